"""Hardware profiles: the shipped ones hold what data sheets say, a user's own loads, damage is named."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from autopar.base.errors import AutoparError
from autopar.machine import hardware, links, profiles
from autopar.planner.plan.schema import HardwareRow


def shipped_text(name: str) -> str:
    return resources.files("autopar.machine").joinpath("data", "hardware", f"{name}.toml").read_text(encoding="utf-8")


def test_names() -> None:
    """Breaks if a profile is not packaged."""
    assert profiles.names() == (
        "a100-40", "a100-80", "b200", "cpu", "h100-pcie", "h100-sxm", "h200", "h800", "l40s", "mi300x", "v100",
    )  # fmt: skip


@pytest.mark.parametrize("name", (*profiles.names(), *profiles.ALIASES))
def test_shipped_profiles_are_whole(name: str) -> None:
    """Breaks if a number loses its source, a fraction is none, or the network outruns the node's link."""
    profile = profiles.load(name)
    assert profile.name == name and profile.description
    assert all(profile.sources.values()), profile.sources
    assert all(0 < fraction <= 1 for fraction in profile.efficiency.values())
    assert set(hardware.OP_CLASSES) <= set(profile.efficiency)
    share = profile.network_cards / profile.devices_per_node
    assert profile.network.bandwidth_bytes_per_s * share <= profile.node.bandwidth_bytes_per_s
    assert profile.network.latency_s >= profile.node.latency_s
    assert all(0 < curve.efficiency <= 1 for curve in profile.matmul.values())
    assert set(profile.matmul) <= set(profile.peak_flops)
    for curve in profile.attention.values():
        for _, points in (*curve.causal, *curve.full):
            assert all(0 < fraction < 1 for _, fraction in points) and list(points) == sorted(points)
    assert 1 <= profile.network_cards <= profile.devices_per_node
    assert profile.node.kind in links.LINK_KINDS and profile.network.kind in links.LINK_KINDS
    hash(profile)


def test_old_names_are_aliases() -> None:
    """Breaks if plan files that name h100 or a100 load no more, or get another device."""
    for alias, name in profiles.ALIASES.items():
        assert replace(profiles.load(alias), name=name) == profiles.load(name)
        assert profiles.load(alias).name == alias


def test_other_links(tmp_path: Path) -> None:
    """Breaks if a named link does not replace the profile's, its cards are lost, or its name does not load again."""
    h100 = profiles.load("h100")
    slow = h100.with_links(network="ethernet-25")
    assert slow.network.bandwidth_bytes_per_s < 25e9 / 8 and slow.network_cards == 1 and slow.node == h100.node
    assert slow == profiles.load("h100:ethernet-25") == profiles.load(slow.name)
    many = profiles.load("h100:8xinfiniband-200")
    assert (many.network_cards, many.network.bandwidth_bytes_per_s) == (8, pytest.approx(25e9 * 0.9))
    both = h100.with_links(node="pcie5", network="2xethernet-100")
    assert both == profiles.load(both.name) and both.node.kind == "pcie" and both.network_cards == 2
    assert "ethernet" in both.network.kind and both.sources["network"] != h100.sources["network"]
    assert profiles.load("h100:infiniband-100").network_cards == h100.network_cards
    for bad in ("h100:ethernet-26", "h100:node=warp", "h100:0xethernet-25"):
        with pytest.raises(AutoparError, match="There is no link.*ethernet-25.*infiniband-400"):
            profiles.load(bad)
    with pytest.raises(AutoparError, match="no hardware profile 'b300'"):
        profiles.load("b300:ethernet-25")


def test_named_links_have_sources() -> None:
    """Breaks if a link of the catalogue has no source, no known kind, or a fraction that is none."""
    found = links.catalogue()
    assert {"nvlink4", "pcie5", "infiniband-400", "ethernet-25"} <= set(found)
    for each in found.values():
        assert each.source and each.kind in links.LINK_KINDS and 0 < each.efficiency <= 1 and each.latency_s > 0


def test_numbers_of_the_data_sheets() -> None:
    """Breaks if a peak is taken with sparsity, in other units, or the H200 loses its memory."""
    h100, h200, a100 = (profiles.load(name) for name in ("h100", "h200", "a100"))
    assert h100.peak_flops["bf16"] == pytest.approx(989.4e12)
    assert a100.peak_flops["bf16"] == pytest.approx(312e12)
    assert h200.peak_flops == h100.peak_flops
    assert (h100.memory_bytes, h200.memory_bytes) == (80 * 10**9, 141 * 10**9)
    assert h200.memory_bandwidth_bytes_per_s == pytest.approx(4.8e12)
    h800 = profiles.load("h800")
    assert (h800.peak_flops["bf16"], h800.network) == (h100.peak_flops["bf16"], h100.network)
    # DeepSeek-V3 (2412.19437), section 3.2.2: 160 GB/s in a node, 3.2 times what goes between nodes
    assert h800.node.bandwidth_bytes_per_s == pytest.approx(160e9) and h800.peak_flops["fp64"] == 1e12
    assert a100.node.bandwidth_bytes_per_s < 300e9 < h100.node.bandwidth_bytes_per_s < 450e9


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16", "bf16"])
def test_flops_by_dtype(dtype: object) -> None:
    """Breaks if a torch dtype and its names no longer mean the same format."""
    h100 = profiles.load("h100")
    assert h100.flops_per_s(dtype, "matmul") == h100.peak_flops["bf16"] * h100.matmul["bf16"].efficiency
    assert h100.flops_per_s(dtype, "elementwise") == h100.peak_flops["bf16"] * h100.efficiency["elementwise"]


def test_codes_of_a_byte_are_read_on_any_device() -> None:
    """Breaks if a cast from fp8 asks for a peak that only products have."""
    cpu = profiles.load("cpu")
    assert cpu.flops_per_s(torch.float8_e4m3fn, "elementwise") == cpu.flops_per_s(torch.float32, "elementwise")
    with pytest.raises(AutoparError, match="float8_e4m3fn has no peak"):
        cpu.flops_per_s(torch.float8_e4m3fn, "matmul")


def test_a_format_that_the_device_lacks() -> None:
    """Breaks if fp8 on an A100 is silently priced as another format."""
    with pytest.raises(AutoparError, match="float8_e4m3fn has no peak FLOP/s in the hardware profile a100"):
        profiles.load("a100").flops_per_s(torch.float8_e4m3fn, "matmul")
    with pytest.raises(ValueError, match="op_class 'matmlu'"):
        profiles.load("a100").flops_per_s(torch.float32, "matmlu")


def test_a_profile_of_the_users_own(tmp_path: Path) -> None:
    """Breaks if a path no longer loads, or the file's numbers do not reach the profile."""
    path = tmp_path / "mine.toml"
    path.write_text(
        shipped_text("h100-sxm").replace('name = "h100-sxm"', 'name = "mine"').replace("devices = 8", "devices = 4")
    )
    mine = profiles.load(path)
    assert (mine.name, mine.devices_per_node) == ("mine", 4)
    assert profiles.load(mine) is mine
    assert profiles.load("H100") == profiles.load("h100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices = 8", "", "positive number for node.devices"),
        ("latency_s = 4e-6", "latency_s = -1", "positive number for network.latency_s.*It has -1"),
        ("[memory]", "[memory", "is not TOML"),
        ("bf16 = 989.4e12", 'bf16 = "fast"', "positive number for peak_flops.bf16"),
        ("half_rows = 4224", "half_rows = true", "positive number for attention.half_rows"),
        ("64 = [[256,", "64 = [[2560,", "ascending in the first, for attention.forward.causal.64"),
        ("128 = [[512,", "wide = [[512,", "head sizes as keys of attention.forward.full"),
        ("half_m = 16", "half_x = 16", "half_x in matmul.bf16.*Use efficiency"),
        ('kind = "nvswitch"', 'kind = "string"', "a node of the kind 'string'"),
        ("cards = 8", "cards = 0", "positive number for network.cards"),
    ],
)
def test_a_damaged_profile_names_what_is_wrong(old: str, new: str, message: str) -> None:
    """Breaks if a missing or senseless number is taken, or the error does not say which."""
    text = shipped_text("h100-sxm")
    assert old in text
    with pytest.raises(AutoparError, match=message):
        profiles.parse(text.replace(old, new), name="h100", where="h100.toml")


def test_an_unknown_name_lists_the_known() -> None:
    """Breaks if the error stops naming the profiles there are."""
    with pytest.raises(AutoparError, match="no hardware profile 'b300'.*a100-80, b200, cpu, .*h100, a100"):
        profiles.load("b300")


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM3-32GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", "a100"),
    ],
)
def test_guess_by_the_gpus_name(monkeypatch: pytest.MonkeyPatch, gpu: str, name: str) -> None:
    """Breaks if a GPU gets another one's profile; an unknown one gets the nearest, with a warning."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert profiles.guess("cuda").name == name
    assert profiles.guess("cpu").name == "cpu"


def test_as_data_and_back() -> None:
    """Breaks if a plan that was made on a profile of the user's own is read back on another one."""
    import json

    from autopar.machine import hardware_data

    for name in (*profiles.names(), *profiles.ALIASES):
        profile = profiles.load(name)
        assert hardware_data.to_data(profile) == name
        own = replace(profile, name="mine", devices_per_node=4)
        again = hardware_data.from_data(json.loads(json.dumps(hardware_data.to_data(own))))
        assert asdict(again) == asdict(own)
    named = profiles.load("h100:ethernet-25")
    assert hardware_data.from_data(hardware_data.to_data(named)) == named
    # The name alone would give another number of devices a node.
    fewer = replace(profiles.load("h100"), devices_per_node=4)
    assert hardware_data.from_data(json.loads(json.dumps(hardware_data.to_data(fewer)))).devices_per_node == 4


def test_plans_know_all_of_a_profile() -> None:
    """Breaks if a profile has a number that a plan on it writes and cannot read."""
    assert HardwareRow.__annotations__.keys() == {each.name for each in fields(hardware.Hardware)}
