"""Whole programs whose attention is a ring: equal to eager, readable, and sending what the plan says."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.runtime.comm import RecordingComm
from autopar.runtime.dry_run import dry_events
from autopar.strategies.context import RING
from autopar.strategies.names import Strategy
from tests.unit.tiers import mostly_slow

LENGTH, FEATURES, HEADS = 64, 16, 2
ZIGZAG = replace(RING, zigzag=True)
ASKED: dict[str, Strategy] = {
    "ring": {"cp": RING},
    "zigzag": {"cp": ZIGZAG},
    "ring and ulysses": {"cp0": ZIGZAG, "cp1": "ulysses"},
    "zero3 and ring": {"dp": "zero3", "cp": ZIGZAG},
    "zero_bubble and ring": {"pp": "pipeline(zero_bubble)", "cp": ZIGZAG},
}


class Block(nn.Module):
    """Causal attention to all keys, or the last `window` of them, and a residual."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.qkv, self.out, self.window = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES), window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.window is None:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            places = torch.arange(x.shape[1], device=x.device)
            distance = places[:, None] - places
            found = F.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < self.window))
        return x + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(window) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x - y) ** 2).mean()


@lru_cache(maxsize=16)
def planned(mesh: str, asked: str, window: int | None = None, rematerialize: str = "none") -> Plan:
    inputs = {name: torch.zeros(2, LENGTH, FEATURES) for name in ("x", "y")}
    options: dict[str, Any] = {"microbatches": 2} if "pp=" in mesh else {}
    return autopar.plan(
        Model(window), Mesh.parse(mesh, hardware="cpu"), example_inputs=inputs, strategy=ASKED[asked],
        rematerialize=rematerialize, **options,
    )  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "asked", "window"), mostly_slow([
    ("cp=2", "ring", None),
    ("cp=4", "ring", 9),
    ("cp=4", "zigzag", None),
    ("cp=2", "zigzag", 9),
    ("cp0=2,cp1=2", "ring and ulysses", None),
    ("dp=2,cp=2", "zero3 and ring", None),
    ("pp=2,cp=2", "zero_bubble and ring", None),
], ("cp=2", "ring", None)))  # fmt: skip
def test_equal_to_eager(mesh: str, asked: str, window: int | None) -> None:
    assert planned(mesh, asked, window).verify().ok


@pytest.mark.moderate
def test_equal_to_eager_where_the_backward_computes_attention_again() -> None:
    plan = planned("cp=2", "zigzag", rematerialize="full")
    assert plan.source.count("comm.ring_attention(") == 2
    assert plan.verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_llama(num: int) -> None:
    loaded = catalogue.load("llama", tiny=True, batch=(2, 64))
    mesh = Mesh.parse(f"cp={num}", hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=ASKED["zigzag"])
    assert plan.source.count("comm.ring_attention(") == plan.source.count("comm.ring_attention_backward(") == 1
    assert plan.verify().ok


@pytest.mark.moderate
def test_the_program_reads_well() -> None:
    lines = planned("cp=4", "zigzag").source.splitlines()
    at = next(i for i, line in enumerate(lines) if "comm.ring_attention(" in line)
    q, k, v = lines[at + 1].strip().removesuffix(",").split(", ")[1:]
    assert lines[at].endswith(" = comm.ring_attention(")
    assert lines[at + 1] == f'        "cp", {q}, {k}, {v},'
    assert lines[at + 2].startswith("        scale=0.35355339059327")
    starts = 'comm.starts(64, "cp=S(0, outer=2, zigzag)")'
    assert lines[at + 2].endswith(f", right=0, query_starts={starts}, outer=2, zigzag=True,")
    assert lines[at + 3] == "    )  # f32[2, 2, 64/2~cp, 8], f32[2, 2, 64/2~cp]"
    assert sum(starts in line for line in lines) == 2


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "asked", "window"), [
    ("cp=4", "ring", None), ("cp=4", "ring", 9), ("cp=2", "zigzag", 9), ("cp0=2,cp1=2", "ring and ulysses", None),
])  # fmt: skip
def test_the_plan_says_what_every_rank_sends(mesh: str, asked: str, window: int | None) -> None:
    plan = planned(mesh, asked, window)
    said = sum(row.bytes_sent for row in plan.collectives if row.kind == "ring")
    axes, sizes = plan.interface.axes, plan.interface.sizes
    for rank in range(4 if "4" in mesh else 2):
        events = dry_events(RecordingComm(axes, sizes, rank), plan.interface, plan.source) or []
        assert sum(event.bytes_sent for event in events if event.kind == "send") == said > 0


@pytest.mark.moderate
def test_a_window_reaches_the_neighbour_alone() -> None:
    near, far = planned("cp=4", "ring", 9), planned("cp=4", "ring")
    assert near.source.count("visits=[0, 1],") == 2
    assert "visits" not in far.source
    sent = [sum(row.bytes_sent for row in plan.collectives if row.kind == "ring") for plan in (near, far)]
    assert sent[0] / sent[1] == (1 + 1 + 2) / (3 + 3 + 4)


def test_a_saved_plan_runs_the_same() -> None:
    plan = planned("cp=4", "zigzag")
    assert Plan.from_json(plan.to_json()).source == plan.source


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "tensor+sequence", "allgather_kv"])
def test_no_ring_where_another_strategy_is_named(name: str) -> None:
    loaded = catalogue.load("llama", tiny=True, batch=(2, 64))
    plan = autopar.plan(
        loaded.model, Mesh.parse("tp=2", hardware="cpu"), example_inputs=loaded.batch, strategy=name
    )  # fmt: skip
    assert "comm.ring" not in plan.source


def test_the_peak_counts_what_travels() -> None:
    ring, gathered = planned("cp=4", "ring"), planned("cp=4", "ring", 9)
    assert ring.cost.peak_memory_bytes > gathered.cost.peak_memory_bytes  # one block under way, not two


def test_an_explanation_names_the_ring() -> None:
    text = str(planned("cp=4", "ring").explain("block.attention"))
    assert "keys and values go round" in text
