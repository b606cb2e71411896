"""What a user asked for: model, batch, mesh, strategies, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
    batch, which a step runs in `microbatches` parts. memory_limit_bytes: of one rank; None for no
    limit. explain: work out why, when nothing can be placed (costs time). checks_limit: the limit decides whether the
    placement will do, but takes no part in it. placement_limit: the part of the limit that the placement
    gets: a pipeline's stages it knows only on average, and what is in flight beside the compute is not in it.
    overlap_price, alike: as of `place`. spread: what the program is prepared for; None: what the strategies need.
    captured: the whole batch's program ("whole"), and those of numbers of microbatches, once they are captured;
    requests that are made of this one (`dataclasses.replace`) use them too.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    mesh: Mesh
    strategies: tuple[AxisStrategy, ...]
    pins: tuple[Pin, ...] = ()
    memory_limit_bytes: float | None = None
    precision: torch.dtype | None = None
    training: bool = True
    rematerialize: Mode = "none"
    explain: bool = True
    microbatches: int = 1
    checks_limit: bool = False
    pipeline: PipelineSpec | None = None
    placement_limit: float = 1.0
    overlap_price: float = 1.0
    spread: Spread | None = None
    alike: Program | None = field(default=None, compare=False, repr=False)
    captured: dict[object, Program] = field(default_factory=dict, compare=False, repr=False)

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

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh that was asked for."""
        return self.mesh.whole or self.mesh

    @property
    def num_stage_ranks(self) -> int:
        """How many ranks the pipeline has; 1 without one."""
        return 1 if self.pipeline is None else self.whole_mesh.size(AXIS)


Progress = Callable[[str, int, int], None]
"""Called before each pass with its name, its number from 0, and how many there are."""
