"""One placement for a family of batches: solved once, lowered again for every other size.

A family is all batches that differ in the sizes of their inputs alone. Its first plan is solved; for another size the
same decisions are written into the model's program for that size (`Decisions.apply`) and lowered anew. That program is
traced, the first few times. What differs then are numbers, each a polynomial of the sizes that vary (`ir/sized.py`),
and a trace with symbols says for which sizes the model's Python does the same (`sizes.py`): from then on programs of
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
from autopar.ir.sized import NotAlike, Size, Sized
from autopar.passes.emit import interface_of
from autopar.planner.assembly import check_fits, make_plan
from autopar.planner.inputs import input_sizes
from autopar.planner.plan.decisions import Decisions
from autopar.planner.plan.record import PlanRecord
from autopar.planner.sizes import SizeGuard, size_guard
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar.family")
MOST_KNOWN = 8
"""Programs of one kind that are kept to read others off."""
MOST_KINDS = 4
"""Of programs of one family that are not alike: at the longest length a slice of all positions is none."""

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
    _kinds: list[Sized] = field(default_factory=list)
    _guards: dict[tuple[int, frozenset[Size]], SizeGuard | None] = field(default_factory=dict)

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
        if solved.traced is not None and solved.inputs is not None and self._fits(solved):
            assert solved.model is not None
            self._learn(solved.traced, _request(solved, solved.model, solved.inputs))

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
        self._learn(program, request)
        return program

    def _followed(self, request: Attempt) -> Program | None:
        """The program that follows from those known; None where none does."""
        sizes = input_sizes(request.inputs)
        for number, known in enumerate(self._kinds):
            varying = frozenset(size for group in known.varying() for size in group)
            if any(sizes.get(size) == 1 for size in varying):
                continue  # sizes of one are told from others everywhere: they spread
            try:
                program = known.at(sizes)
            except NotAlike as error:
                logger.info("the program for %s is traced: %s", sizes, error)
                continue
            guard = self._guard(number, varying, request)
            if guard is not None and _holds(guard, sizes, request.microbatches):
                return program
            logger.info("the model may do something else for %s: it is traced", sizes)
        return None

    def _guard(self, number: int, varying: frozenset[Size], request: Attempt) -> SizeGuard | None:
        """Of a kind of programs: what the model takes for granted of sizes, where that is so for all of them."""
        key = (number, varying)
        if key not in self._guards:
            found = size_guard(request.model, request.inputs, varying, precision=request.precision)
            known = self._kinds[number].sizes
            holds = found is not None and all(_holds(found, each, request.microbatches) for each in known)
            self._guards[key] = found if holds else None
        return self._guards[key]

    def _learn(self, program: Program, request: Attempt) -> None:
        if program.by_value or program.branches or program.told is not None:
            return  # it is for these values alone
        if program.batching is not None and program.batching.of_batch:
            return  # a text, which has the sizes of the whole batch
        sizes = input_sizes(request.inputs)
        if any(sizes in known.sizes for known in self._kinds):
            return
        for number, known in enumerate(self._kinds):
            guards = [guard for (kind, _), guard in self._guards.items() if kind == number and guard is not None]
            if len(known.programs) == MOST_KNOWN or not all(_holds(g, sizes, request.microbatches) for g in guards):
                continue  # the model does something else there, even if it looks alike
            try:
                known.add(program, sizes)
            except NotAlike as error:
                logger.info("the program for %s is like no other of its kind: %s", sizes, error)
            else:
                return
        if len(self._kinds) < MOST_KINDS:
            self._kinds.append(Sized())
            self._kinds[-1].add(program, sizes)


def _holds(guard: SizeGuard, sizes: Mapping[Size, int], microbatches: int) -> bool:
    """Whether the model does the same for a batch, and for a microbatch of it."""
    if not guard.holds(sizes):
        return False
    return microbatches == 1 or guard.holds(_of_microbatch(sizes, microbatches))


def _of_microbatch(sizes: Mapping[Size, int], num: int) -> dict[Size, int]:
    first = [size for (_, dim), size in sizes.items() if dim == 0]
    rows = max(set(first), key=first.count, default=0)
    return {key: size // num if key[1] == 0 and size == rows else size for key, size in sizes.items()}


def _request(solved: PlanRecord, model: nn.Module, inputs: Mapping[str, Any]) -> Attempt:
    return Attempt(
        model, inputs, solved.stage_mesh, solved.strategies, solved.pins, solved.memory_limit_bytes, solved.precision,
        solved.training, microbatches=solved.interface.microbatches, pipeline=solved.asked, roots=solved.roots,
        wanted=solved.wanted,
        rematerialize=solved.rematerialize, spread=solved.spread, together=solved.interface.together,
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
