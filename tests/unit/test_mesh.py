"""Mesh: rank arithmetic against torch-like row-major order, links, parsing and its errors."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from autopar.api.devices import devices_of
from autopar.base.errors import AutoparError
from autopar.machine import profiles
from autopar.machine.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh([(f"a{i}", size) for i, size in enumerate(sizes)], hardware="cpu")
)


@pytest.mark.moderate
@given(meshes)
def test_groups_are_the_slices_of_a_row_major_array(mesh: Mesh) -> None:
    """Breaks if a group's ranks, their order, or a coordinate differ from DeviceMesh's row-major array of ranks."""
    array = torch.arange(mesh.num_devices).reshape(mesh.sizes)
    for dim, axis in enumerate(mesh.axis_names):
        expected = array.movedim(dim, -1).reshape(-1, mesh.size(axis)).tolist()
        assert mesh.groups(axis) == expected
        for rank in range(mesh.num_devices):
            group = next(group for group in expected if rank in group)
            assert group[mesh.coordinates(rank)[axis]] == rank
    assert mesh.num_devices == math.prod(mesh.sizes)


def test_axes_keep_their_order_and_print() -> None:
    """Breaks if axes are sorted or the order is lost: it decides which ranks are neighbours."""
    mesh = Mesh({"tp": 2, "dp": 4})
    assert mesh.axis_names == ("tp", "dp")
    assert str(mesh) == "tp=2 × dp=4"
    assert mesh != Mesh({"dp": 4, "tp": 2})


def test_is_a_value() -> None:
    """Breaks if a mesh stops being a key of caches, or cannot be sent to another process."""
    mesh = Mesh({"dp": 4, "tp": 2})
    same = Mesh.parse("dp=4, tp=2", hardware="h100")
    assert mesh == same == Mesh("dp=4,tp=2") and hash(mesh) == hash(same) and len({mesh, same}) == 1
    assert mesh != Mesh({"dp": 4, "tp": 2}, hardware="a100")
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy == mesh and copy.axes == mesh.axes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,dp=4", "names the axis dp twice"),
        ("dp=0", "axis dp has the size 0"),
        ("dp=-2", "axis dp has the size -2"),
        ("dp", "the part 'dp'"),
        ("dp=2,,tp=2", "the part ''"),
        ("dp=two", "the part 'dp=two'"),
        ("2d=2", "'2d' cannot name a mesh axis"),
        ("", "the part ''"),
    ],
)
def test_bad_text_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    """Breaks if a malformed mesh is taken, or the message no longer shows the part at fault."""
    with pytest.raises(AutoparError, match=message):
        Mesh.parse(text)


def test_other_bad_questions() -> None:
    """Breaks if an empty mesh, an unknown axis, rank or profile passes, or the message lists no way out."""
    with pytest.raises(AutoparError, match="a name and a size each"):
        Mesh((2,))  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="at least one axis"):
        Mesh({})
    mesh = Mesh({"dp": 2, "tp": 2})
    with pytest.raises(AutoparError, match="no axis 'cp'.*Use dp or tp"):
        mesh.size("cp")
    with pytest.raises(AutoparError, match="Rank 4"):
        mesh.coordinates(4)
    with pytest.raises(AutoparError, match="a100-40, a100-80, b200, cpu, .*h200"):
        Mesh({"dp": 2}, hardware="h1000")


def test_links_follow_the_nodes() -> None:
    """Breaks if an axis is priced as NVLink although its group leaves a node of 8, or the other way round."""
    h100 = profiles.load("h100")
    mesh = Mesh({"dp": 32, "tp": 8})
    assert mesh.link("tp") == h100.node
    assert mesh.link("dp").bandwidth_bytes_per_s == h100.network.bandwidth_bytes_per_s
    assert mesh.link("dp").latency_s == h100.network.latency_s
    small = Mesh({"dp": 4, "tp": 2})
    assert small.link("dp") == small.link("tp") == h100.node
    # tp is wider than a node: neighbours are inside it, but the group leaves it.
    wide = Mesh({"tp": 16}).link("tp")
    assert wide.wire_bandwidth_bytes_per_s == h100.network.bandwidth_bytes_per_s


def test_a_ring_through_nodes_uses_all_its_cards() -> None:
    """Breaks if a group with several members in a node gets one card's bandwidth, or more than the node's link."""
    h100 = profiles.load("h100")
    wire = h100.network.bandwidth_bytes_per_s
    four_a_node = Mesh({"dp": 32, "tp": 2}).link("dp")
    assert four_a_node.bandwidth_bytes_per_s == 4 * wire
    assert h100.node.latency_s < four_a_node.latency_s < h100.network.latency_s
    assert Mesh({"dp": 64}).link("dp").bandwidth_bytes_per_s == min(8 * wire, h100.node.bandwidth_bytes_per_s)


def test_a_group_knows_how_many_of_it_are_in_a_node() -> None:
    """Breaks if all-to-alls over several nodes are priced as if each rank were in its own, or all in one."""
    h100 = profiles.load("h100")
    whole = Mesh({"dp": 64}).link("dp")
    assert (whole.members, whole.inside_bandwidth_bytes_per_s) == (8, h100.node.bandwidth_bytes_per_s)
    assert Mesh({"dp": 32, "tp": 2}).link("dp").members == 4
    assert Mesh({"dp": 32, "tp": 8}).link("dp").members == 1
    assert Mesh({"dp": 12}).link("dp").members == 4  # 8 in one node, 4 in another
    assert h100.node.members == 1 and Mesh({"dp": 8}).link("dp").inside_bandwidth_bytes_per_s is None
    mi300x = profiles.load("mi300x")
    wired = Mesh({"dp": 32, "tp": 2}, hardware=mi300x).link("dp")
    assert mi300x.node.direct_bandwidth_bytes_per_s is not None
    assert wired.inside_bandwidth_bytes_per_s == 3 * mi300x.node.direct_bandwidth_bytes_per_s


def test_groups_share_the_cards_of_a_node() -> None:
    """Breaks if all groups of an axis get a node's cards for themselves, or a device a card."""
    two_cards = profiles.load("h100:2xethernet-100")
    card = two_cards.network.bandwidth_bytes_per_s
    assert Mesh({"dp": 2, "tp": 8}, hardware=two_cards).link("dp").bandwidth_bytes_per_s == pytest.approx(card * 2 / 8)
    assert Mesh({"dp": 32, "tp": 2}, hardware=two_cards).link("dp").bandwidth_bytes_per_s == pytest.approx(card)
    whole = Mesh({"dp": 64}, hardware=two_cards).link("dp")
    assert whole.bandwidth_bytes_per_s == pytest.approx(2 * card)
    assert whole.wire_bandwidth_bytes_per_s == pytest.approx(card * 2 / 8)
    assert whole.nvls_bandwidth_bytes_per_s is None
    dgx2 = profiles.load("v100")
    link = Mesh({"dp": 4, "tp": 16}, hardware=dgx2).link("dp")
    assert link.bandwidth_bytes_per_s == pytest.approx(dgx2.network.bandwidth_bytes_per_s / 2)


def fake_device_mesh(ranks: torch.Tensor, names: tuple[str, ...] | None) -> SimpleNamespace:
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names, device_type="cpu")


def test_from_device_mesh() -> None:
    """Breaks if names or sizes of a DeviceMesh are read in another order, or a CPU mesh is priced as GPUs."""
    mesh = Mesh.from_device_mesh(fake_device_mesh(torch.arange(8).reshape(4, 2), ("dp", "tp")))  # type: ignore[arg-type]
    assert mesh == Mesh({"dp": 4, "tp": 2}, hardware="cpu")
    assert all(type(size) is int for size in mesh.sizes)


@pytest.mark.parametrize(
    ("ranks", "names", "message"),
    [
        (torch.arange(4), None, "no axis names"),
        (torch.arange(4, 8), ("tp",), "row-major"),
        (torch.arange(4).reshape(2, 2).T, ("dp", "tp"), "row-major"),
    ],
)
def test_from_a_device_mesh_that_does_not_serve(
    ranks: torch.Tensor, names: tuple[str, ...] | None, message: str
) -> None:
    """Breaks if a mesh whose ranks our groups would get wrong is accepted."""
    with pytest.raises(AutoparError, match=message):
        Mesh.from_device_mesh(fake_device_mesh(ranks, names))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [7, ["dp", 4], None])
def test_what_is_no_mesh_is_told(given: object) -> None:
    """Breaks if what is no mesh ends in an AttributeError."""
    for asks in (Mesh.from_device_mesh, Mesh.of):
        with pytest.raises(AutoparError, match=r"A mesh was expected, \w+ was given.*Mesh\.parse"):
            asks(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["dp=4,tp=2", {"dp": 4, "tp": 2}, Mesh("dp=4,tp=2")])
def test_a_mesh_is_meant_by_its_axes(given: Mesh | str | dict[str, int]) -> None:
    """Breaks if `autopar.plan(model, "dp=4,tp=2", …)` is refused, or forgets whose hardware was asked for."""
    assert Mesh.of(given) == Mesh({"dp": 4, "tp": 2}, hardware="h100")
    asked = Mesh.of(given, "cpu")
    assert asked.axes == (("dp", 4), ("tp", 2))
    assert asked.hardware.name == ("h100" if isinstance(given, Mesh) else "cpu")


def test_axes_make_a_mesh_of_the_ranks_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if `autopar.compile(model, "dp=1")` is refused, or runs where there are not as many ranks."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(AutoparError, match=r"no ranks were started.*torchrun --nproc-per-node 2"):
        devices_of("dp=2", "compile")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        made = devices_of({"dp": 1, "tp": 1}, "compile")
        assert (made.mesh_dim_names, tuple(made.shape), made.device_type) == (("dp", "tp"), (1, 1), "cpu")
        assert devices_of(made, "compile") is made
        with pytest.raises(AutoparError, match="the mesh has 2 ranks, 1 processes were started"):
            devices_of("dp=2", "compile")
        with pytest.raises(AutoparError, match=r"compile needs the devices.*'dp=1'"):
            devices_of(Mesh("dp=1"), "compile")  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
