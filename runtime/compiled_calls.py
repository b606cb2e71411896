"""Calls of a program between two that send, compiled as one function each, without guards.

    v1 = square(i0)   …   v7 = linear(v6, c0)          v7, = forward(i0, c0, …)
    v8 = all_reduce(v7, 'tp')                   ──►    v8 = all_reduce(v7, 'tp')
    v9 = add(i0, v8)  …                                v20, = forward_1(i0, v8, c1, …)

Equal ones, as those of all layers are, are compiled once. Who knows the calls knows how everything lies (`replay.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_compat import tracing
from autopar.runtime.calls import Call, Calls, Ref, Text, moved

logger = logging.getLogger("autopar")

LEAST = 3
"""Calls that are worth a function of their own."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Calls in a row that send nothing. given: values from before; found: those that are used behind it."""

    calls: Sequence[Call]
    given: tuple[int, ...]
    found: tuple[int, ...]


def compiled_between(
    calls: Sequence[Call], record: Calls, outputs: Sequence[Ref], compiler: Any, filename: str
) -> list[Call]:
    """The calls, with one in the place of those between two that send. compiler: (graph, examples) -> a function.

    A part that cannot be compiled stays as it is, with a warning; so does one that shares written memory with others.
    """
    found: list[Call] = []
    known: dict[str, Callable[..., Any] | None] = {}
    for part in _parts(calls, outputs):
        run = None
        if len(part.calls) >= LEAST and _stands_alone(part, calls, record):
            run = _compiled(part, record, compiler, filename, known)
        if run is None:
            found += part.calls
            continue
        writes = frozenset(storage for call in part.calls for storage in call.writes)
        args = tuple(Ref(number) for number in part.given)
        found.append(Call(run, args, {}, part.given, part.found, frozenset(part.found), True, writes, False, None))
    return found


def _parts(calls: Sequence[Call], outputs: Sequence[Ref]) -> Iterator[_Part]:
    rows: list[list[Call]] = [[]]
    for call in calls:
        rows += [[call], []] if call.is_sent else []
        if not call.is_sent:
            rows[-1].append(call)
    last = {number: place for place, row in enumerate(rows) for call in row for number in (*call.refs, *call.outs)}
    last |= {ref.number: len(rows) for ref in outputs}
    for place, row in enumerate(rows):
        made = [number for call in row for number in call.outs if number in call.made]
        given = dict.fromkeys(n for call in row for n in (*call.refs, *call.outs) if n not in made)
        if row:
            yield _Part(row, tuple(given), tuple(number for number in dict.fromkeys(made) if last[number] > place))


def _stands_alone(part: _Part, calls: Sequence[Call], record: Calls) -> bool:
    """Whether it writes into inputs of the program and what it makes alone, and nobody else into what it gives."""
    if part.calls[0].is_sent:
        return False
    own = {id(call) for call in part.calls}
    elsewhere = {storage for call in calls if id(call) not in own for storage in call.writes}
    here = {storage for call in part.calls for storage in call.writes}
    given, found = [record.storage(n) for n in part.given], [record.storage(n) for n in part.found]
    inputs = {record.storage(n) for n in record.inputs}
    return (
        elsewhere.isdisjoint(found)
        and all(found.count(storage) == 1 and storage not in given for storage in here.intersection(found))
        and all(storage in inputs and given.count(storage) == 1 for storage in here & {*given})
    )


def _compiled(
    part: _Part, record: Calls, compiler: Any, filename: str, known: dict[str, Callable[..., Any] | None]
) -> Callable[..., Any] | None:
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
    lie = [record.layout(number)[1:] for number in part.given]
    key = f"{text}{sorted((name, repr(x)) for name, x in written.namespace.items())}{lie}"
    if key not in known:
        exec(compile(text, f"{filename} between what is sent", "exec"), written.namespace)
        try:
            known[key] = _run(written.namespace["forward"], [_example(n, record) for n in part.given], compiler)
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            logger.warning("autopar: torch.compile failed for a part of %s; it runs uncompiled. %s", filename, said)
            known[key] = None
    return known[key]


def _run(function: Callable[..., Any], examples: list[Tensor], compiler: Any) -> Callable[..., Any]:
    with torch.no_grad():
        graph = tracing.make_fx(lambda *given: list(function(*given)), {}, examples)
        return compiler(graph, examples)


def _example(number: int, record: Calls) -> Tensor:
    """A tensor that lies as a value does."""
    if number in record.held:
        return record.held[number].detach()
    _, shape, stride, dtype, *_ = record.layout(number)
    return torch.empty_strided(shape, stride, dtype=dtype)
