"""One placement for a family of batches: solved once, lowered again for every other size.

A family is all batches that differ in the sizes of their inputs alone. Its first plan is solved; for another size the
same decisions are written into the model's program for that size (`Decisions.apply`) and lowered anew. That program is
traced, the first few times. What differs then are numbers, each a polynomial of the sizes that vary (`ir/sized.py`), and
a trace with symbols says for which sizes the model's Python does the same (`passes/sizes.py`): from then on programs of
other sizes are written from those that are known, and nothing is traced. Whatever does not follow is traced.

    first size ─ trace ─ solve ─ lower        next two ─ trace ─ lower        others ─ read off ─ lower

Each is lowered by the same passes, held against the memory limit, and checked before it runs, as every program.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.program import Program
from autopar.ir.sized import NotAlike, Sized, sizes_of
from autopar.passes.emit import interface_of
from autopar.passes.sizes import SizeGuard, size_guard
from autopar.planner.assembly import check_fits, make_plan
from autopar.planner.inputs import input_sizes
from autopar.planner.plan.decisions import Decisions
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar.family")
MOST_KNOWN = 6
"""Programs that are kept to read others off; a family that says nothing of another size by then never does."""

MOST_SOLVED = 4
"""Placements of one family: a longer batch may need to compute more again, an odd one another axis."""


@dataclass(slots=True)
class Family:
    """The batches that one placement serves.

    solved: the plans that were solved: of the first, and of those that it did not serve; the last that served one comes
    first. traced, read: for how many sizes the model was traced, or the program followed from those that were.
    """

    solved: list[PlanRecord]
    traced: int = 0
    read: int = 0
    _sized: Sized | None = field(default_factory=Sized)
    _guards: dict[frozenset[tuple[str, int]], SizeGuard | None] = field(default_factory=dict)

    @staticmethod
    def of(solved: PlanRecord) -> Family:
        """The family of a batch that was solved for."""
        family = Family([])
        family.add(solved)
        return family

    def plan(self, model: nn.Module, inputs: Mapping[str, Any]) -> PlanRecord:
        """The same decisions for another batch, as yet without the program's text.

        Raises:
            DoesNotFit: a rank would hold more than the memory limit.
            AutoparError: an axis does not divide what it splits, or another program came of the trace.
        """
        program: Program | None = None
        problem: AutoparError | None = None
        for solved in tuple(self.solved):
            request = _request(solved, model, inputs)
            try:
                program = self._program(request) if program is None else program
                plan = _lowered(solved, request, program)
            except AutoparError as error:
                logger.info("a placement does not serve %s: %s", input_sizes(inputs), error)
                problem = problem or error
            else:
                self.solved.remove(solved)
                self.solved.insert(0, solved)
                return plan
        assert problem is not None
        raise problem

    def add(self, solved: PlanRecord) -> None:
        """Another placement, for what the others did not serve."""
        self.solved = [solved, *self.solved[: MOST_SOLVED - 1]]
        if solved.traced is not None and self._fits(solved):
            self._learn(solved.traced)

    def _fits(self, solved: PlanRecord) -> bool:
        return all(each.spread == solved.spread for each in self.solved)

    def _program(self, request: Attempt) -> Program:
        """Differentiated, for this batch: read off, or traced."""
        program = self._followed(request)
        if program is not None:
            self.read += 1
            return program
        program, _ = pipeline.run(request, pipeline.TRACE)
        self.traced += 1
        self._learn(program)
        return program

    def _followed(self, request: Attempt) -> Program | None:
        """The program that follows from those known; None where none does."""
        if self._sized is None or request.microbatches > 1:
            return None
        sizes = input_sizes(request.inputs)
        try:
            program = self._sized.at(sizes)
        except NotAlike as error:
            logger.info("the program for %s is traced: %s", sizes, error)
            return None
        guard = self._guard(request)
        if guard is None or not guard.holds(sizes):
            logger.info("the model may do something else for %s: it is traced", sizes)
            return None
        return program

    def _guard(self, request: Attempt) -> SizeGuard | None:
        assert self._sized is not None
        varying = frozenset(size for group in self._sized.varying() for size in group)
        if varying not in self._guards:
            found = size_guard(request.model, request.inputs, varying, precision=request.precision)
            known = [sizes_of(program) for program in self._sized.programs]
            # What is read off programs must be what was done for all of them.
            self._guards[varying] = found if found is not None and all(map(found.holds, known)) else None
        return self._guards[varying]

    def _learn(self, program: Program) -> None:
        if self._sized is None:
            return
        if program.by_value or len(self._sized.programs) == MOST_KNOWN:
            self._sized = None
            return
        try:
            self._sized.add(program)
            self._guards = {varying: guard for varying, guard in self._guards.items() if self._is_of(guard, program)}
        except NotAlike as error:
            logger.info("programs of this family are no functions of its sizes: %s", error)
            self._sized = None

    def _is_of(self, guard: SizeGuard | None, program: Program) -> bool:
        return guard is None or guard.holds(sizes_of(program))


def _request(solved: PlanRecord, model: nn.Module, inputs: Mapping[str, Any]) -> Attempt:
    return Attempt(
        model, inputs, solved.stage_mesh, solved.strategies, solved.pins, solved.memory_limit_bytes, solved.precision,
        solved.training, microbatches=solved.interface.microbatches, pipeline=solved.asked, roots=solved.roots,
        rematerialize=solved.rematerialize, spread=solved.spread,
    )  # fmt: skip


def _lowered(solved: PlanRecord, request: Attempt, program: Program) -> PlanRecord:
    """A program with the decisions of a plan for other sizes. Nothing is solved.

    Raises:
        DoesNotFit, AutoparError: see `Family.plan`.
    """
    program, before = pipeline.run(request, (*pipeline.RECOMPUTE, *pipeline.RULES), program=program)
    program, after = pipeline.run(request, pipeline.LOWER, program=solved.decisions.apply(program))
    if program.pipeline is not None:
        plan = make_plan(request, program, solved.passes or pipeline.DEFAULT, (*before, *after))
        return replace(plan, solved=solved.solved, notes=solved.notes)
    memory = replace(solved.cost.memory, peak=int(step_peak_bytes(program)))
    plan = replace(
        solved, inputs=request.inputs, program=program, interface=interface_of(program), traced=None, views=None,
        cost=replace(solved.cost, memory=memory), times=(*before, *after), decisions=Decisions.of(program),
        output_spec=tracing.dump_treespec(program.output_spec), output_leaves=program.output_leaves,
    )  # fmt: skip
    check_fits(plan)
    return plan


