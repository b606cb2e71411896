"""Batches of which the axes that split rows do not divide the number, and that can have no rows added: those axes keep
the batch whole, and each of their ranks computes all of it. A price, never another result.

    4 rows over dp=2 → 2 each     5 rows, no rows can be added → 5 on each rank of dp, nothing to sum over it
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.api.added_rows import pieces_of, rows_of
from autopar.api.plan import Plan
from autopar.base.torch_compat import tracing
from autopar.ir.interface import ProgramInterface
from autopar.ir.sharding import REPLICATE
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin, Strategy, pipeline_of, resolve
from autopar.strategies.pipelining.spec import AXIS

logger = logging.getLogger("autopar")

Axes = tuple[tuple[str, int], ...]


class WholeRows:
    """Of a model on a mesh. axes: those that split rows, whatever the rest of a placement is. is_cut: whether batches
    go through the program in parts, or its stages.
    """

    def __init__(self, strategies: Sequence[AxisStrategy], mesh: Mesh, is_cut: bool) -> None:
        named = zip(mesh.axes, strategies, strict=True)
        self.axes: Axes = tuple(axis for axis, each in named if each.inputs == "batch" and axis[1] > 1)
        self.is_cut = is_cut
        self._has_told = False

    @staticmethod
    def of(plan: Plan | None, strategy: Strategy, mesh: Mesh, microbatches: int | None) -> WholeRows:
        """Of strategies by name, or of the plan that was handed in.

        Raises:
            AutoparError: a strategy that the mesh cannot have.
        """
        if plan is not None:
            parts = plan.interface.microbatches > 1 or plan.pipeline is not None
            return WholeRows(plan.strategies, plan.stage_mesh, parts)
        is_staged = pipeline_of(strategy, mesh) is not None
        stage = mesh.without(AXIS) if is_staged else mesh
        return WholeRows(resolve(strategy, mesh), stage, is_staged or (microbatches or 1) > 1)

    def pieces_by(self, first: ProgramInterface | None) -> int:
        """In how many pieces rows are cut: by strategies by name, or as a first plan has them; 1 where neither says."""
        named = 1 if self.is_cut else math.prod(size for _, size in self.axes)
        return max(named, 1 if first is None else pieces_of(first))

    def left(self, inputs: Mapping[str, Any]) -> Axes:
        """The axes that do not split the rows of a batch: from the first on, each that divides what is left does."""
        rows, found = rows_of(inputs), []
        for name, size in self.axes:
            if rows % size:
                found.append((name, size))
            else:
                rows //= size
        return tuple(found)

    def pins(self, inputs: Mapping[str, Any]) -> list[Pin]:
        """That keep a batch whole where it does not divide."""
        whole = tuple((name, REPLICATE) for name, _ in self.left(inputs))
        leaves = tracing.tree_leaves_with_path(dict(inputs)) if whole else ()
        return [Pin(path, whole, taken=True) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]

    def tell(self, inputs: Mapping[str, Any]) -> None:
        """Once, what a batch that is whole costs."""
        over = self.left(inputs)
        if over and not self._has_told:
            self._has_told = True
            logger.warning(
                "autopar: %d rows do not divide over %s: each of its ranks computes all of them, %d times the work of "
                "rows that do (said once)", rows_of(inputs), " × ".join(f"{name}={size}" for name, size in over),
                math.prod(size for _, size in over),
            )  # fmt: skip
