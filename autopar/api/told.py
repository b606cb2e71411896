"""What the steps of a compiled model are told of Python's numbers (`ir/told.py`): rank 0's, on every rank.

Before a step of a kind that is told, rank 0 asks what forward asked while it was traced, of what its generators would
draw and of what the user's model has now: the answers say which program the step is for, and where they were never met,
the model is traced with these. Draws are made, and attributes set, when the step has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.ir.told import BUFFER, Answer, Asked, Draw, Generators, Held, Source, Start, Told, Wanted, draw_again, read
from autopar.passes.emptied import values_of
from autopar.passes.told import START

MOST_ANSWERS = 16
"""Numbers that Python asks for at one place and that are no yes or no, each with programs of its own."""
Answers = tuple[Any, ...]
Kind = tuple[Any, ...]
_UNKNOWN = ("unknown",)


@dataclass(frozen=True, slots=True)
class _Question:
    """What forward meets behind some answers: numbers, and what is asked of them; None: nothing more. told: then."""

    sources: tuple[tuple[Source, int], ...]
    asked: Asked | None
    told: Told
    met: set[Answer] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Step:
    """answers: `_UNKNOWN` where a program is still to be made. numbers: the buffer. draws: that forward makes.
    after: what attributes are then.
    """

    answers: Answers
    numbers: Tensor | None = None
    draws: Sequence[Draw] = ()
    after: Sequence[tuple[Held, Any]] = ()


class Steps:
    """Of a model that programs are traced from. names: of attributes that are told, by their paths. left: the numbers
    that steps leave on modules.
    """

    def __init__(self, blueprint: nn.Module) -> None:
        self._blueprint = blueprint
        self._questions: dict[Kind, dict[Answers, _Question]] = {}
        self._wanted: dict[Kind, Wanted] = {}
        self._starts: dict[object, Start] = {}
        self._step = _Step(())
        self.names: set[str] = set()
        self.left: set[Held] = set()

    def answers(self, kind: Kind) -> Answers:
        """Those of the step that is about to run; nothing of a kind that is told nothing. Collective of others."""
        if kind not in self._questions:
            return ()
        box = [self._walked(kind) if dist.get_rank() == 0 else _Step(())]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0)
        self._step = box[0]
        return self._step.answers

    def starts(self, kind: Kind, answers: Answers) -> None:
        """Have the model be traced as of what gave these answers, or as of now."""
        found = self._starts.get((kind, answers))
        if found is None:
            found = Start({}, Generators.now(), self._wanted.get(kind, Wanted()))
        vars(self._blueprint)[START] = found

    def ends(self) -> None:
        """Have it be traced as of then."""
        vars(self._blueprint).pop(START, None)

    def learn(self, kind: Kind, plan: Plan) -> None:
        """A plan was made for a kind: what its program is told."""
        numbers = (each for each in plan.interface.carried if each.kind in ("float", "int"))
        self.left |= {each.held for each in numbers if not each.appends}
        if not plan.interface.told:
            return
        self.names |= set(plan.interface.told)
        questions = self._questions.setdefault(kind, {})
        told = None if plan.program is None else plan.program.told
        if told is None:
            return
        self._wanted[kind] = told.start.wanted
        self.left |= told.start.wanted.held
        answers: Answers = (_present(told.start.held),)
        known = 0
        for asked in (*told.asked, None):
            until = len(told.sources) if asked is None else _sources_known(told, asked.known)
            found = questions.setdefault(answers, _Question(told.sources[known:until], asked, told))
            if asked is not None:
                self._meet(found, asked)
                answers, known = (*answers, asked.answer), until
        self._starts[kind, answers] = told.start

    def buffers(self, device: torch.device) -> Mapping[str, Tensor]:
        """What the program of the step reads: float64 [n], by name."""
        assert self._step.numbers is not None
        return {BUFFER: self._step.numbers.to(device)}

    def done(self) -> None:
        """The step has run: what it drew is drawn, and what it left is there."""
        for draw in self._step.draws:
            draw_again(draw)
        for held, value in self._step.after:
            held.put(self._model, value)

    @property
    def _model(self) -> nn.Module:
        return values_of(self._blueprint)

    def _walked(self, kind: Kind) -> _Step:
        questions, drawing = self._questions[kind], Generators.now().drawing()
        now = {each: each.of(self._model) for each in self._wanted[kind].held}
        answers: Answers = (_present(now),)
        numbers, draws = list[Any](), list[Draw]()
        while (question := questions.get(answers)) is not None:
            for source, count in question.sources:
                numbers += read(source, count, now, drawing)
                draws += [source] if isinstance(source, Draw) else []
            if question.asked is None:
                after = [(each.held, each.of(numbers)) for each in question.told.after]
                return _Step(answers, question.told.buffer(numbers), draws, after)
            answers = (*answers, question.asked.of(numbers))
        return _Step(_UNKNOWN)

    def _meet(self, question: _Question, asked: Asked) -> None:
        question.met.add(asked.answer)
        if len(question.met) > MOST_ANSWERS:
            raise AutoparError(
                "forward() goes by a number of Python's that is another one in every step",
                where=asked.line,
                values=f"{MOST_ANSWERS} programs were made for batches of the same shapes",
                remedy="reckon with the number and compare it (x * alpha, if step > 10), which one program does for "
                "all; an index, a range or float() of it needs a program for each value",
            )


def _present(now: Mapping[Held, Any]) -> tuple[tuple[str, str], ...]:
    """Which attributes are there, each with its kind."""
    return tuple(sorted((str(each), type(x).__name__) for each, x in now.items() if type(x) in (bool, int, float)))


def _sources_known(told: Told, numbers: int) -> int:
    """How many sources give the first numbers."""
    total = 0
    for place, (_, count) in enumerate(told.sources):
        if total == numbers:
            return place
        total += count
    return len(told.sources)
