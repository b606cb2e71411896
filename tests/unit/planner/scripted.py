"""Programs whose plans are made up, for the loop over attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from autopar.ir.program import MODES, Mode
from autopar.machine.mesh import Mesh
from autopar.planner.attempts import attempts, tried_for
from autopar.planner.tried import Tried
from autopar.strategies.names import Strategy, resolve
from autopar.strategies.request import Attempt

MESH = Mesh({"dp": 2, "tp": 2}, hardware="h100")
LIMIT = 100.0


def plan(
    step_s: float,
    peak: float = 10.0,
    *,
    prefetch: bool = True,
    price: float = 0.0,
    waited_s: float = 0.0,
    compute_s: float = 0.0,
    moved_s: float = 0.0,
    priced_s: float = 1.0,
) -> Any:
    """What the loop reads of a plan."""
    rows = [
        SimpleNamespace(kind="all_gather", why="gather parameter", seconds=waited_s, axis="dp"),
        SimpleNamespace(kind="all_reduce", why="sum", seconds=moved_s, axis="dp"),
    ]
    return SimpleNamespace(
        cost=SimpleNamespace(
            step_time_s=step_s, peak_memory_bytes=peak, memory=SimpleNamespace(peak=peak, activations=0.0),
            hidden_s=0.0, compute_s=compute_s,
        ),
        solved=SimpleNamespace(memory_price_s_per_byte=price, overlap_price=1.0),
        program=SimpleNamespace(
            overlap=SimpleNamespace(prefetch=prefetch), regions=(), on_mesh=MESH,
            result=SimpleNamespace(priced_s=priced_s, memory_price_s_per_byte=price),
        ),
        collectives=rows, pipeline=None, memory_limit_bytes=LIMIT, strategy="auto", mesh=MESH,
        rematerialize="none",
    )  # fmt: skip


@dataclass
class Scripted:
    """Programs whose plans are made up: `outcome(attempt)`, an error or a plan."""

    outcome: Callable[[Attempt], Any]
    strategy: Strategy = "auto"
    least: dict[Mode, float] = field(default_factory=dict)
    made: list[Attempt] = field(default_factory=list)
    traced: Any = None
    first: Any = None
    named: Callable[[tuple[str, ...]], tuple[float, float]] = lambda _: (0.0, 0.0)
    odd: Sequence[tuple[str, ...]] = ()

    @property
    def asked(self) -> Attempt:
        model = nn.Linear(1, 1)
        return Attempt(model, {}, MESH, resolve(self.strategy, MESH), memory_limit_bytes=LIMIT)

    def plan(self, attempt: Attempt) -> Any:
        self.made.append(attempt)
        if isinstance(found := self.outcome(attempt), Exception):
            raise found
        return found

    def layouts(self, mode: Mode, placed_by: object = None) -> None:
        return None

    def placed_by(self, mode: Mode, strategies: object) -> Any:
        return self.first

    def least_named_s(self, mode: Mode, strategies: Any, *given: object) -> tuple[float, float]:
        return self.named(tuple(each.name for each in strategies))

    def cannot_split(self, mode: Mode, strategies: Any) -> bool:
        return tuple(each.name for each in strategies) in self.odd

    def least_s(self, mode: Mode) -> float:
        return self.least.get(mode, 0.0)


def run(programs: Any, generate: Callable[..., Any] = attempts, modes: Sequence[Mode] = MODES) -> Tried:
    return tried_for(programs, lambda tried: generate(programs, modes, tried))


def placed_by(programs: Scripted) -> list[tuple[str, ...]]:
    """The named strategies that were tried, once each."""
    tried = (tuple(s.name for s in each.placed_by) for each in programs.made if each.placed_by is not None)
    return list(dict.fromkeys(tried))
