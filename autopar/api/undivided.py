"""Batches that axes do not divide: rows, to which none can be added, or the sequence. Those axes keep what they would
split whole, and each of their ranks computes all of it. A price, never another result.

    4 rows over dp=2 → 2 each     5 rows, no rows can be added → 5 on each rank of dp, nothing to sum over it
    12 tokens over tp=2, tensor+sequence → norms of 6 each     11 tokens → as tensor
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from autopar.api.added_rows import pieces_of, rows_of
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.base.text import plural
from autopar.base.torch_compat import tracing
from autopar.ir.interface import ProgramInterface
from autopar.ir.sharding import REPLICATE
from autopar.machine.mesh import Mesh
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.axis import AUTO, AxisStrategy
from autopar.strategies.context import SequenceDoesNotDivide, of_whole_sequence
from autopar.strategies.names import Pin, Strategy, pipeline_of, resolve
from autopar.strategies.pipelining.asked import refusal
from autopar.strategies.pipelining.spec import AXIS

logger = logging.getLogger("autopar")

Axes = tuple[tuple[str, int], ...]
Record = TypeVar("Record", bound=PlanRecord)


class Undivided:
    """Of a model on a mesh. rows, sequence: the axes that split one or the other, whatever the rest of a placement is.
    is_cut: whether batches go through the program in parts, or its stages.
    """

    def __init__(self, strategies: Sequence[AxisStrategy], mesh: Mesh, is_cut: bool) -> None:
        named = [(axis, each) for axis, each in zip(mesh.axes, strategies, strict=True) if axis[1] > 1]
        self.rows: Axes = tuple(axis for axis, each in named if each.inputs == "batch")
        self.sequence: Axes = tuple(axis for axis, each in named if each.hidden == "split")
        self.is_cut = is_cut
        self._told: set[str] = set()

    @staticmethod
    def of(plan: Plan | None, strategy: Strategy, mesh: Mesh, microbatches: int | None) -> Undivided:
        """Of strategies by name, or of the plan that was handed in.

        Raises:
            AutoparError: a strategy that the mesh cannot have.
        """
        if plan is not None:
            parts = plan.interface.microbatches > 1 or plan.pipeline is not None
            return Undivided(plan.strategies, plan.stage_mesh, parts)
        is_staged = pipeline_of(strategy, mesh) is not None
        stage = mesh.without(AXIS) if is_staged else mesh
        return Undivided(resolve(strategy, mesh), stage, is_staged or (microbatches or 1) > 1)

    def pieces_by(self, first: ProgramInterface | None) -> int:
        """In how many pieces rows are cut: by strategies by name, or as a first plan has them; 1 where neither says."""
        named = 1 if self.is_cut else math.prod(size for _, size in self.rows)
        return max(named, 1 if first is None else pieces_of(first))

    def left(self, inputs: Mapping[str, Any]) -> Axes:
        """The axes that do not split the rows of a batch: from the first on, each that divides what is left does."""
        rows, found = rows_of(inputs), []
        for name, size in self.rows:
            if rows % size:
                found.append((name, size))
            else:
                rows //= size
        return tuple(found)

    def kind(self, inputs: Mapping[str, Any]) -> object:
        """What batches have in common of which one placement serves all, as far as it goes by what divides them."""
        leaves = [x for _, x in tracing.tree_leaves_with_path(dict(inputs)) if isinstance(x, Tensor)]
        lengths = {size for x in leaves for size in x.shape[1:]}
        return self.left(inputs), tuple(frozenset(each % size == 0 for each in lengths) for _, size in self.sequence)

    def planned(self, mesh: Mesh, options: Mapping[str, Any], make: Callable[..., Record]) -> Record:
        """A plan for a batch in which what the axes do not divide is whole on them.

        Where what a strategy allows does not go with that (tokens that are sent to the ranks of their experts have to
        be split), those axes are left to the solver, around parameters that lie somewhere already.

        options: of a plan, `example_inputs` among them. make: of options.

        Raises:
            AutoparError: what stands in the way of what was asked.
        """
        inputs = options["example_inputs"]
        has_places = any(pinned.taken for pinned in options["constraints"])
        options = {**options, "constraints": [*options["constraints"], *self.pins(inputs)]}
        self.tell(inputs)
        strategies, asked = resolve(options["strategy"], mesh), pipeline_of(options["strategy"], mesh)
        names = mesh.axis_names if asked is None else mesh.without(AXIS).axis_names
        stages = {} if asked is None else {AXIS: asked}

        def under(strategies: Sequence[AxisStrategy]) -> Record:
            return make(**{**options, "strategy": {**stages, **dict(zip(names, strategies, strict=True))}})

        try:
            return make(**options)
        except AutoparError as error:
            whole, problem = [name for name, _ in self.left(inputs)], error
        if (of_sequence := _of_sequence(problem)) is not None:
            self._tell("sequence", "autopar: %s Each of its ranks computes all of it (said once)", of_sequence)
            whole += [name for name, _ in self.sequence]
            try:
                return under(of_whole_sequence(strategies))
            except AutoparError as error:
                problem = error
        if not whole or not has_places:
            raise problem
        try:
            return under([AUTO if name in whole else each for name, each in zip(names, strategies, strict=True)])
        except AutoparError:
            raise problem from None

    def pins(self, inputs: Mapping[str, Any]) -> list[Pin]:
        """That keep a batch whole where it does not divide."""
        whole = tuple((name, REPLICATE) for name, _ in self.left(inputs))
        leaves = tracing.tree_leaves_with_path(dict(inputs)) if whole else ()
        return [Pin(path, whole, taken=True) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]

    def microbatches(self, options: Mapping[str, Any], mesh: Mesh) -> int | None:
        """In how many a later batch goes through: as many as were asked for, or, where these do not divide its rows
        (the last one of an epoch), the largest smaller number that does and that the schedule takes, else one above.
        Numbers that leave rows for all axes that split rows come first.
        """
        asked, rows = options["microbatches"], rows_of(options["example_inputs"])
        pieces = math.prod(size for _, size in self.rows)
        if asked is None or asked < 2 or not rows or rows % (asked * pieces) == 0:
            return asked
        spec = pipeline_of(options["strategy"], mesh)
        divisors = [each for each in range(1, rows + 1) if rows % each == 0]
        for number in sorted(divisors, key=lambda n: (rows % (n * pieces) > 0, n > asked, abs(n - asked))):
            if spec is None or refusal(spec, mesh.size(AXIS), number) is None:
                if number != asked:
                    self._tell(
                        "microbatches", "autopar: %d rows go through in %s, as they do not divide into %d (said once)",
                        rows, plural(number, "microbatch", "microbatches"), asked,
                    )  # fmt: skip
                return number
        return asked

    def tell(self, inputs: Mapping[str, Any]) -> None:
        """Once, what a batch that is whole costs."""
        over = self.left(inputs)
        if over:
            self._tell(
                "rows", "autopar: %d rows do not divide over %s: each of its ranks computes all of them, %d times the "
                "work of rows that do (said once)", rows_of(inputs),
                " × ".join(f"{name}={size}" for name, size in over), math.prod(size for _, size in over),
            )  # fmt: skip

    def _tell(self, what: str, text: str, *values: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(text, *values)


def _of_sequence(error: BaseException) -> SequenceDoesNotDivide | None:
    """The first that was in the way, where it was a sequence that an axis does not divide."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, SequenceDoesNotDivide):
            return found
        found = found.__cause__ or found.__context__
    return None
