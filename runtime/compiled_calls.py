"""Calls of a program that send nothing, compiled as one function, without guards.

    v1 = square(i0)   …   v7 = linear(v6, s0)          v7, = forward(i0, s0, …)
    v8 = all_reduce(v7, 'tp')                   ──►    v8 = all_reduce(v7, 'tp')
    v9 = add(i0, v8)  …                                v20, = forward_1(i0, v8, s1, …)

They are cut where something is sent: a program that sends nothing is one function. One of very many calls is cut at its
regions, too, as a compiler takes longer for it than it gains; equal parts, as those of all layers are, are compiled
once. Who knows the calls knows how everything lies (`replay.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_compat import tracing
from autopar.base.torch_compat.compiling import within
from autopar.operators.registration import SPELLED_OUT
from autopar.runtime.calls import Call, Calls, Ref, Text, moved

logger = logging.getLogger("autopar")

LEAST = 3
"""Calls that are worth a function of their own."""
MOST = 1500
"""Calls that are one function, whatever regions they are of."""
Function = Callable[..., Any]
_LOCK = RLock()  # ranks that are threads of one process


@dataclass(frozen=True, slots=True)
class _Part:
    """Calls in a row that send nothing, or one that does. given: values from before; found: those that are used behind
    it.
    """

    calls: Sequence[Call]
    given: tuple[int, ...]
    found: tuple[int, ...]


def compiled_between(
    calls: Sequence[Call], record: Calls, outputs: Sequence[Ref], compiler: Any, filename: str
) -> list[Call]:
    """The calls, with one in the place of those between two that send. compiler: (graph, examples) -> a function.

    A part that cannot be compiled is cut at its regions; what of it cannot be either stays as it is, with a warning. So
    does one that shares written memory with others.
    """
    compiling = _Compiling(calls, record, outputs, compiler, filename)
    between = [[*row] for _, row in groupby(calls, _Turns())]
    with _LOCK:
        return [call for row in between for call in compiling.row(row)]


class _Turns:
    """A number that tells rows of calls apart: those that send are rows of their own."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, call: Call) -> int:
        self._number += call.is_sent
        found, self._number = self._number, self._number + call.is_sent
        return found


class _Compiling:
    """What is known of all calls while rows of them are compiled."""

    def __init__(
        self, calls: Sequence[Call], record: Calls, outputs: Sequence[Ref], compiler: Any, filename: str
    ) -> None:
        self._calls, self._record, self._compiler, self._filename = calls, record, compiler, filename
        self._place = {id(call): place for place, call in enumerate(calls)}
        self._last = {number: place for place, call in enumerate(calls) for number in (*call.refs, *call.outs)}
        self._last |= {ref.number: len(calls) for ref in outputs}
        self._known: dict[str, tuple[Function | None, str]] = {}

    def row(self, row: Sequence[Call]) -> Iterable[Call]:
        """Calls in a row as few calls."""
        if row[0].is_sent or len(row) < LEAST:
            return row
        regions = [[*calls] for _, calls in groupby(row, attrgetter("region"))]
        part, run, why = self._part(row), None, ""
        if len(row) <= MOST or len(regions) == 1:
            run, why = self._compiled(part) if self._stands_alone(part) else (None, "")
        if run is not None:
            return [self._as_one(part, run)]
        if len(regions) > 1:
            return [call for each in regions for call in self.row(each)]
        if why:
            logger.warning(
                "autopar: torch.compile failed for a part of %s; it runs uncompiled. %s", self._filename, why
            )
        return row

    def _part(self, row: Sequence[Call]) -> _Part:
        end = self._place[id(row[-1])]
        made = [number for call in row for number in call.outs if number in call.made]
        known = set(made)
        given = dict.fromkeys(n for call in row for n in (*call.refs, *call.outs) if n not in known)
        return _Part(row, tuple(given), tuple(n for n in dict.fromkeys(made) if self._last[n] > end))

    def _as_one(self, part: _Part, run: Function) -> Call:
        writes = frozenset(storage for call in part.calls for storage in call.writes)
        args = tuple(Ref(number) for number in part.given)
        return Call(run, args, {}, part.given, part.found, frozenset(part.found), True, writes, False, None)

    def _stands_alone(self, part: _Part) -> bool:
        """Whether it writes into inputs of the program and what it makes alone, and nobody else into what it gives."""
        record, own = self._record, {id(call) for call in part.calls}
        elsewhere = {storage for call in self._calls if id(call) not in own for storage in call.writes}
        here = {storage for call in part.calls for storage in call.writes}
        given, found = [record.storage(n) for n in part.given], [record.storage(n) for n in part.found]
        inputs = {record.storage(n) for n in record.inputs}
        return (
            elsewhere.isdisjoint(found)
            and all(found.count(storage) == 1 and storage not in given for storage in here.intersection(found))
            and all(storage in inputs and given.count(storage) == 1 for storage in here & {*given})
        )

    def _compiled(self, part: _Part) -> tuple[Function | None, str]:
        """A function, or why there is none."""
        order = dict.fromkeys((*part.given, *(n for call in part.calls for n in call.outs)))
        numbers = {number: place for place, number in enumerate(order)}
        renumbered = [
            replace(
                moved(call, numbers), outs=tuple(numbers[n] for n in call.outs),
                made=frozenset(numbers[n] for n in call.made),
            )
            for call in part.calls
        ]  # fmt: skip
        written = Text([numbers[n] for n in part.given], {})
        text = written.of(renumbered, [Ref(numbers[n]) for n in part.found])
        lie = [self._record.layout(number)[1:] for number in part.given]
        key = f"{text}{sorted((name, repr(x)) for name, x in written.namespace.items())}{lie}"
        if key not in self._known:
            exec(compile(text, f"{self._filename} between what is sent", "exec"), written.namespace)
            examples = [_example(n, self._record) for n in part.given]
            try:
                self._known[key] = _run(written.namespace["forward"], examples, self._compiler), ""
            except Exception as error:
                said = str(error).strip().splitlines() or [""]
                self._known[key] = None, said[0] or type(error).__name__
        return self._known[key]


def _run(function: Function, examples: list[Tensor], compiler: Any) -> Function:
    def flat(*given: Tensor) -> list[Tensor]:
        return list(function(*given))

    with torch.no_grad():
        try:
            graph = tracing.make_fx(flat, SPELLED_OUT, examples)
        except Exception:  # an operator that looks at numbers, as experts ask how many tokens each has
            graph = tracing.make_fx(flat, {}, examples)
        return within(compiler(graph, examples))


def _example(number: int, record: Calls) -> Tensor:
    """A tensor that lies as a value does."""
    if number in record.held:
        return record.held[number].detach()
    _, shape, stride, dtype, *_ = record.layout(number)
    return torch.empty_strided(shape, stride, dtype=dtype)
