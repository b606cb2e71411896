"""Bytes that every simulated rank sends in a step, against the literature, to the byte; and that the numbers hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from autopar.cost.collectives import Collective, collectives
from autopar.ir.placement import ParameterLayout
from autopar.ir.sharding import REPLICATE, Shard, num_pieces
from autopar.ir.values import Variable
from autopar.machine import profiles
from autopar.runtime.event import Event
from autopar.runtime.simulation import SimulationResult
from tests.nodes import nodes_of_two
from tests.unit.traced import Lowered, lower

pytestmark = pytest.mark.slow

TOKENS = 8 * 16
"""Of the tiny batches."""

GATHERS = {"zero1": 1, "zero2": 1, "zero3": 2, "zero3+keep": 1}
TENSORS = ("tensor", "tensor+sequence")
NODES = {"zero2": (1, 1), "zero3": (2, 2), "node=zero2,dp=zero3": (1, 2)}
"""Gathers a step over the axis between nodes, and over the one inside."""
CASES = [
    *((name, "dp=4", strategy) for name in ("mlp", "cnn", "gpt2") for strategy in GATHERS),
    *(("llama", "dp=2", strategy) for strategy in GATHERS),
    *((name, "node=2,dp=2", "hsdp") for name in ("mlp", "gpt2")),
    *((name, "tp=4", "tensor+sequence") for name in ("llama", "gpt2", "bert")),
    *((name, "tp0=2,tp1=2", "tensor2d") for name in ("mlp", "llama")),
    ("llama", "dp=2,tp0=2,tp1=2", "tensor2d"),
    *(("llama", "dp=2,tp=2", f"dp={data},tp={tensors}") for data in ("zero1", "zero2", "zero3") for tensors in TENSORS),
    ("gpt2", "dp=2,tp=2", "dp=zero2,tp=tensor+sequence"),
    ("bert", "dp=2,tp=2", "dp=zero1,tp=tensor+sequence"),
    ("bert", "dp=2,tp=2", "dp=zero2,tp=tensor"),
]


@cache
def lowered_and_run(name: str, mesh: str, strategy: str) -> tuple[Lowered, SimulationResult]:
    lowered = lower(name, mesh, strategy)
    return lowered, lowered.run()


def parameters(lowered: Lowered) -> list[tuple[Variable, ParameterLayout]]:
    """Trained parameters, tied ones once, with their layouts."""
    layouts = lowered.program.placement.parameters
    return [(v, layouts[v.name]) for v in lowered.program.variables if v.trainable and v.name in layouts]


def local_bytes(lowered: Lowered, only: Callable[[ParameterLayout], bool] = lambda layout: True) -> int:
    """Ψ: bytes of the parameters as a rank computes with them."""
    sizes = lowered.program.mesh.sizes
    chosen = ((v.type.num_bytes, layout.compute) for v, layout in parameters(lowered) if only(layout))
    return sum(size // num_pieces(sharding, sizes) for size, sharding in chosen)


def sent(events: Sequence[Event]) -> Counter[tuple[str, str]]:
    """(kind, axis) -> bytes, scalars apart: the loss, and with it how many rows count."""
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        if math.prod(event.shape) > 2:
            found[event.kind, event.axis] += event.bytes_sent  # type: ignore[assignment]
    return found


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("name", "mesh", "strategy"), CASES)
def test_the_plan_says_what_every_rank_sends(name: str, mesh: str, strategy: str) -> None:
    """Breaks if a collective of a bucket runs more or less often than listed, or a strategy computes something else."""
    lowered, result = lowered_and_run(name, mesh, strategy)
    said: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for row in collectives(lowered.program):
        said[row.kind, row.axis] += row.bytes_sent  # type: ignore[assignment]
        times[row.kind, row.axis] += row.times
    for events in result.events:
        ran: Counter[tuple[str, str]] = Counter()
        for event in events:
            ran[event.kind, event.axis] += event.bytes_sent  # type: ignore[assignment]
        assert ran == said
        assert Counter((event.kind, event.axis) for event in events) == times
    assert lowered.worst(result) < 1e-9


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"), [case for case in CASES if case[2] in GATHERS and "," not in case[1]]
)
def test_zero_gathers_and_scatters(name: str, mesh: str, strategy: str) -> None:
    """Breaks if a parameter is gathered, or its gradient reduced, more or less often than Rajbhandari et al. count:
    all-gather Ψ (zero3: 2Ψ), reduce-scatter Ψ, times (n−1)/n; 2Ψw(n−1)/n for the Ψw that n does not divide.
    """
    lowered, result = lowered_and_run(name, mesh, strategy)
    num = int(mesh.split("=")[1])
    pieces = local_bytes(lowered, lambda layout: layout.stored != layout.compute)
    whole = local_bytes(lowered) - pieces
    for variable, layout in parameters(lowered):
        cut = any(size % num == 0 for size in variable.type.shape)
        assert (layout.stored != layout.compute) == cut, f"{variable.name} is cut where it can be"
    for events in result.events:
        assert +sent(events) == +Counter({
            ("all_gather", "dp"): GATHERS[strategy] * pieces * (num - 1) / num,
            ("reduce_scatter", "dp"): pieces * (num - 1) / num,
            ("all_reduce", "dp"): 2 * whole * (num - 1) / num,
        })  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_hsdp_shards_inside_and_sums_pieces_across(name: str) -> None:
    """Breaks if whole gradients cross the slow axis: inside 3Ψ(n−1)/n, across 2(Ψ/n)(m−1)/m."""
    lowered, result = lowered_and_run(name, "node=2,dp=2", "hsdp")
    pieces = local_bytes(lowered, lambda layout: layout.stored != layout.compute)
    whole = local_bytes(lowered) - pieces
    for events in result.events:
        assert +sent(events) == +Counter({
            ("all_gather", "dp"): 2 * pieces / 2,
            ("reduce_scatter", "dp"): pieces / 2,
            ("all_reduce", "node"): 2 * (pieces / 2 + whole) / 2,
            ("all_reduce", "dp"): 2 * whole / 2,
        })  # fmt: skip


@pytest.mark.parametrize("strategy", NODES)
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_pieces_cross_nodes(name: str, strategy: str, tmp_path: Path) -> None:
    """Breaks if anything but a rank's own piece crosses the slow axis: (Ψ/n)(m−1)/m there, n ranks inside."""
    lowered = lower(name, "node=2,dp=2", strategy, hardware=profiles.load(nodes_of_two(tmp_path)))
    result = lowered.run()
    assert lowered.worst(result) < 1e-9
    across, inside = NODES[strategy]
    pieces = local_bytes(lowered, lambda layout: num_pieces(layout.stored, (2, 2)) == 4)
    for variable, layout in parameters(lowered):
        assert num_pieces(layout.stored, (2, 2)) == 4, f"{variable.name}: {layout.stored}"
        dims = [placement.dim for placement in layout.stored if isinstance(placement, Shard)]
        assert dims[0] != dims[1] or layout.stored[0] == Shard(dims[0], outer=2), f"{variable.name}: {layout.stored}"
    for events in result.events:
        assert +sent(events) == +Counter({
            ("all_gather", "node"): across * pieces / 2 / 2,
            ("all_gather", "dp"): inside * pieces / 2,
            ("reduce_scatter", "node"): pieces / 2 / 2,
            ("reduce_scatter", "dp"): pieces / 2,
        })  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_sequence_parallelism_sends_what_tensor_sends(name: str, mesh: str) -> None:
    """Breaks if a block gathers a value twice, or still sums it whole: in place of each all-reduce one reduce-scatter
    and one all-gather, the same bytes (Korthikanti et al.).
    """
    rows = {strategy: activations(lower(name, mesh, strategy)) for strategy in TENSORS}
    for phase in ("forward", "backward"):
        plain, sequence = ([row for row in rows[strategy] if row.phase == phase] for strategy in TENSORS)
        hidden = max(row.bytes_sent for row in plain)
        # Beside the hidden state only gradients of vectors (norms, biases): a TOKENS-th of it.
        assert Counter((row.kind, row.bytes_sent) for row in plain if TOKENS * row.bytes_sent != hidden) == {
            ("all_reduce", hidden): 2
        }
        moves = [row for row in sequence if 2 * TOKENS * row.bytes_sent != hidden]
        assert Counter((row.kind, row.bytes_sent) for row in moves) == {
            ("all_gather", hidden / 2): 2, ("reduce_scatter", hidden / 2): 2
        }  # fmt: skip
        assert {row.times for row in moves} == {2}
        assert not [row for row in sequence if row.kind == "all_reduce"]


def activations(lowered: Lowered) -> list[Collective]:
    """What the repeated blocks send, parameters and their gradients apart."""
    blocks = tuple(f"{r.name} {p}" for r in lowered.program.regions if r.module for p in ("forward", "backward"))
    return [row for row in collectives(lowered.program) if row.where.startswith(blocks)]


@pytest.mark.parametrize("strategy", [case[2] for case in CASES if case[0] == "llama" and case[1] == "dp=2,tp=2"])
def test_products_move_what_their_parts_move(strategy: str) -> None:
    """Breaks if the data axis moves more than a tensor rank's part of the parameters, or blocks talk over it."""
    lowered, result = lowered_and_run("llama", "dp=2,tp=2", strategy)
    gathered = local_bytes(lowered, lambda layout: layout.stored[0] != REPLICATE)
    whole = local_bytes(lowered) - gathered
    times = GATHERS[strategy.split(",")[0].removeprefix("dp=")]
    assert whole < 0.01 * gathered
    for events in result.events:
        over_data = {kind: size for (kind, axis), size in (+sent(events)).items() if axis == "dp"}
        assert over_data == dict(+Counter({
            "all_gather": times * gathered / 2, "reduce_scatter": gathered / 2, "all_reduce": 2 * whole / 2,
        }))  # fmt: skip
    inside = Counter(row.kind for row in activations(lowered) if row.axis == "tp" and row.phase == "forward")
    assert inside == ({"all_gather": 2, "reduce_scatter": 2} if "sequence" in strategy else {"all_reduce": 2})
    assert not [row for row in activations(lowered) if row.axis == "dp"]
