"""What a user asked for (model, batch, mesh, strategies, limits), and what is tried for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from autopar.ir.placement import Learnt
from autopar.ir.program import Mode, Program
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import Spread
from autopar.strategies.names import Pin
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is made for.

    mesh: of one stage, where there is a pipeline (`mesh.whole` is then the one that was asked for). inputs: the whole
    batch, which a step runs in `microbatches` parts. halves: whether two of these go through the program together
    (`passes/pair.py`); None: where that is predicted faster. memory_limit_bytes: of one rank; None for no limit. roots:
    the outputs whose gradients a backward takes, by name; None: the loss where there is one, else all. wanted: the
    inputs whose gradients it returns, by name.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    mesh: Mesh
    strategies: tuple[AxisStrategy, ...]
    pins: tuple[Pin, ...] = ()
    memory_limit_bytes: float | None = None
    precision: torch.dtype | None = None
    training: bool = True
    microbatches: int = 1
    pipeline: PipelineSpec | None = None
    roots: tuple[str, ...] | None = None
    halves: bool | None = None
    wanted: frozenset[str] = frozenset()

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh that was asked for."""
        return self.mesh.whole or self.mesh

    @property
    def num_stage_ranks(self) -> int:
        """How many ranks the pipeline has; 1 without one."""
        return 1 if self.pipeline is None else self.whole_mesh.size(AXIS)


@dataclass(frozen=True, slots=True)
class Attempt(Request):
    """One way to meet a request, which passes get.

    rematerialize: what the backward computes again. placed_by: the strategies that decide the placement, where they are
    not the request's own; the program is lowered as the request says. spread: what the program is prepared for; None:
    what the strategies need. placement_limit: the part of the memory limit that the placement gets: a pipeline's
    stages it knows only on average, and what is in flight beside the compute is not in it. checks_limit: the limit
    decides whether the placement will do, but takes no part in it. overlap_price, alike: as of `place`.
    together: how many microbatches go through the program at once. hides_exchanges: exchanges count what waits for them
    where all that may run beside them does. explain: work out why, when nothing can be placed (costs time).
    captured: the whole batch's program ("whole"; "parts": as one that comes in microbatches), and those of numbers of
    microbatches, once they are captured; attempts that are made of this one (`dataclasses.replace`) use them too.
    learnt: what attempts on one annotated program tell of others on it.
    """

    rematerialize: Mode = "none"
    placed_by: tuple[AxisStrategy, ...] | None = None
    spread: Spread | None = None
    placement_limit: float = 1.0
    checks_limit: bool = False
    overlap_price: float = 1.0
    together: int = 1
    hides_exchanges: bool = False
    explain: bool = True
    alike: Program | None = field(default=None, compare=False, repr=False)
    captured: dict[object, Program] = field(default_factory=dict, compare=False, repr=False)
    learnt: Learnt | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(request: Request, **changes: Any) -> Attempt:
        """The first attempt at a request; an attempt stays what it is, but for the changes."""
        known = {each.name: getattr(request, each.name) for each in fields(request)}
        return Attempt(**(known | changes))

    @property
    def runs(self) -> int:
        """How often a step runs the program."""
        return self.microbatches // self.together

    @property
    def placing(self) -> tuple[AxisStrategy, ...]:
        """The strategies that decide the placement."""
        return self.strategies if self.placed_by is None else self.placed_by

    @property
    def placement_limit_bytes(self) -> float | None:
        """The limit that `place` gets; none where the step is merely checked, when it is walked or cut in stages."""
        walks = self.training or self.pipeline is not None
        if self.memory_limit_bytes is None or (self.checks_limit and walks):
            return None
        return self.memory_limit_bytes * self.placement_limit

    @property
    def prepared(self) -> Spread:
        """What the program is prepared for."""
        return self.spread or Spread.of(self.strategies, self.mesh)


Progress = Callable[[str, int, int], None]
"""Called before each pass with its name, its number from 0, and how many there are."""
