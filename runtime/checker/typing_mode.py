"""Runs a program's operators on meta tensors, and types what they give."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar import operators
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import PlainDispatchMode, tree_leaves, without_dispatch
from autopar.ir.forms import form_of
from autopar.ir.op_call import flatten_results, op_call, parameters_of
from autopar.ir.sharding import PARTIAL, Partial, Placement, Replicate
from autopar.ir.terms import constant_leaf
from autopar.runtime.checker.infer import Inference
from autopar.runtime.checker.moves import resized
from autopar.runtime.checker.on_meta import on_meta
from autopar.runtime.checker.part import ExchangeCall, RingCall
from autopar.runtime.checker.ranks import RankInt
from autopar.runtime.checker.types import Axes, Typed, give, give_said
from autopar.runtime.data_dependent import LARGEST

_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What `torch.tensor([…])` is."""
_MOVING = (torch.ops.aten.stack.default, torch.ops.aten.unbind.int)
"""What small messages are put together and taken apart by."""
_MAXIMUM = Partial("max")
REMEDY = "undo the last edit of the program, or let autopar write it again; AUTOPAR_CHECK=0 runs it unchecked"


class Typing(PlainDispatchMode):
    """Types every operator's results while it is active. filename: of the program, whose lines errors name.

    steps, hinted, any_stripes: as `Inference` takes them. where: what the program runs now.
    """

    def __init__(
        self, axes: Axes, filename: str, steps: frozenset[int] = frozenset(), *, hinted: bool = False,
        any_stripes: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.axes, self.filename = axes, filename
        self.where = ""
        self.inference = Inference(axes, steps, hinted=hinted, any_stripes=any_stripes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.typed(func, args, kwargs)

    def quietly(self) -> AbstractContextManager[None]:
        """What runs inside is no statement of the program."""
        quiet: AbstractContextManager[None] = without_dispatch()
        return quiet

    def typed(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ring: RingCall | ExchangeCall | None = None
    ) -> Any:
        """What the call gives on meta, with its types. ring: where its keys go round, or its rows to their experts.

        Raises:
            AutoparError: it is a part of no whole call.
        """
        own = _traits(func)
        if own.is_special:
            return self._constant(args[0]) if func in _CONSTANTS else self._data_dependent(func, args, kwargs)
        if func in _MOVING and (axes := self._axes_of_maxima(args)):
            return self._of_maxima(func, args, kwargs, axes)
        given, named = tuple(args), dict(kwargs)
        if own.makes:
            named["device"] = "meta"
        with self.quietly():
            question, operands = self.inference.question(func, given, named, ring)
            answer = None if own.writes else self.inference.known(question)
            if answer is not None and answer.results is not None:
                said = self.inference.said(answer, operands)
                if said is not None:
                    like = [x.detach() for x in answer.results]
                    for x, each in zip(like, said, strict=True):
                        if each is not None:
                            give_said(x, each)
                    return like[0] if answer.kind is None else answer.kind(like)
            return self._answered(func, given, named, question, operands, ring)

    def _answered(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], question: Any, operands: Sequence[Tensor],
        ring: RingCall | ExchangeCall | None,
    ) -> Any:  # fmt: skip
        own = _traits(func)
        given = [*args, *kwargs.values()]
        try:
            made = on_meta(func, [_plain(each) for each in args], {name: _plain(x) for name, x in kwargs.items()})
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            raise self.error(f"{_name(func)} does not run on a rank's tensors: {str(error).splitlines()[0]}",
                             tree_leaves(given)) from error  # fmt: skip
        if own.draws and not _is_empty(made):
            raise self.error(f"{_name(func)} draws other numbers on every rank", tree_leaves(given))
        answer = self.inference.answer(question, operands, own.target, args, kwargs, made, ring)
        said = None if answer is None else self.inference.said(answer, operands)
        if said is None:
            raise self.error(f"{_name(func)} on these parts is no part of one whole {_name(func)}", tree_leaves(given))
        for result, each in zip(flatten_results(made), said, strict=True):
            if each is not None:
                give_said(result, each)
        return made

    def _axes_of_maxima(self, args: Sequence[Any]) -> list[int]:
        """Over which axes all operands are terms of a maximum."""
        found = [
            [axis for axis in range(len(self.axes.sizes)) if all(each.sharding[axis] == _MAXIMUM for each in types)]
            for types in (self.axes.of(x) for x in tree_leaves(args) if isinstance(x, Tensor))
        ]
        return found[0] if found and all(axes == found[0] for axes in found) else []

    def _of_maxima(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Sequence[int]) -> Any:
        """What moves elements does to the terms of a maximum what it does to those of a sum."""

        def over(x: Any, placement: Placement) -> Any:
            if not isinstance(x, Tensor):
                return [over(each, placement) for each in x] if isinstance(x, list | tuple) else x
            types = self.axes.of(x)
            for axis in axes:
                types = frozenset(
                    each.over(axis, placement) for each in types if isinstance(each.sharding[axis], Partial)
                )
            return give(x.detach(), types)

        with self.quietly():
            sums = over(args, PARTIAL)
        made = self.typed(func, sums, kwargs)
        with self.quietly():
            return over(made, _MAXIMUM)

    def _constant(self, x: Tensor) -> Tensor:
        with self.quietly():
            return give(x.to("meta"), self.axes.whole(x.shape, constant_leaf(x)))

    def _data_dependent(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(any(_is_whole(each) for each in self.axes.of(x)) for x in given):
            raise self.error(f"what {_name(func)} gives depends on values that a rank does not have whole", given)
        with self.quietly():
            made = LARGEST[func](*args, **kwargs)
        if not isinstance(made, Tensor):
            return made
        terms = [next(each.term for each in self.axes.of(x) if _is_whole(each)) for x in given]
        term = self.inference.terms.make(form_of(op_call(func, args, kwargs, made), 0), terms)
        return give(made, self.axes.whole(made.shape, term))

    def resize(self, x: Tensor, dim: int, size: int) -> Tensor:
        """`ops.resize`, which is no operator of torch's."""
        with self.quietly():
            made = operators.resize(x, dim, size)
        found = [resized(each, dim, size, self.axes) for each in self.axes.of(x)]
        types = [each for each in found if isinstance(each, Typed)]
        if not types:
            raise self.error(f"ops.resize to {size}: {next(each for each in found if isinstance(each, str))}", [x])
        return give(made if made is not x else x.view_as(x), types)

    def error(self, what: str, given: Sequence[Any]) -> AutoparError:
        """What is wrong in the program's line that runs now; given: what it was called with."""
        texts = [self.axes.text(x) for x in given if isinstance(x, Tensor)]
        return self._error(what, self._line(), f"given {', '.join(texts[:6])}" if texts else None)

    def placed(self, error: AutoparError) -> AutoparError:
        """An error of a line of the program, with the line."""
        found = self._error("", self._number_of(error), error.values)
        return AutoparError(error.what, where=found.where, values=error.values, remedy=error.remedy)

    def error_of(self, error: Exception) -> AutoparError:
        """The same of what Python says of the program's text."""
        first = (str(error).splitlines() or [""])[0]
        return self._error(f"{type(error).__name__}: {first}", self._number_of(error), None)

    def _number_of(self, error: Exception) -> int:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.filename]
        return (lines or [0])[-1] or 0

    def _error(self, what: str, number: int, values: str | None) -> AutoparError:
        line = linecache.getline(self.filename, number).partition("#")[0].strip()
        place = f"line {number}" + (f", {self.where}" if self.where else "")
        return AutoparError(
            f"the program is not right: {what}",
            where=f"{place}: {line[:160]}",
            values=values,
            remedy=REMEDY,
        )

    def _line(self) -> int:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back
        return 0 if frame is None else int(frame.f_lineno)


class TypedOperators:
    """Stands for `autopar.operators` in a program's namespace: each call is one operator, not what it consists of."""

    def __init__(self, typing: Typing) -> None:
        self._typing = typing

    def __getattr__(self, name: str) -> Any:
        if name == "resize":
            return self._typing.resize
        packet = getattr(torch.ops.autopar, name, None)
        if packet is None:
            return getattr(operators, name)
        target, typed = packet.default, self._typing.typed

        def call(*args: Any, **kwargs: Any) -> Any:
            made = typed(target, args, kwargs)
            return tuple(made) if isinstance(made, list) else made

        setattr(self, name, call)
        return call


class _Traits(NamedTuple):
    """What is asked of every operator. target: the one that gives what it gives, or writes; makes: takes a device.

    is_special: what it gives are numbers of the text, or depends on values.
    """

    target: Any
    makes: bool
    writes: bool
    draws: bool
    is_special: bool


@lru_cache(maxsize=1 << 12)
def _traits(func: Any) -> _Traits:
    makes = any(each.name == "device" for each in parameters_of(func))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    is_special = func in LARGEST or func in _CONSTANTS
    return _Traits(_functional(func), makes, func._schema.is_mutable, draws, is_special)


def _functional(func: Any) -> Any:
    """The operator that gives what one writes in place."""
    if not func._schema.is_mutable:
        return func
    packet = getattr(torch.ops.aten, func.overloadpacket.__name__.removesuffix("_"), None)
    return getattr(packet, func._overloadname, func)


def _plain(value: Any) -> Any:
    """An argument as it is on rank 0."""
    if isinstance(value, RankInt):
        return int.__index__(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _name(func: Any) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _is_empty(made: Any) -> bool:
    return all(x.numel() == 0 for x in flatten_results(made) if isinstance(x, Tensor))


def _is_whole(typed: Typed) -> bool:
    return all(isinstance(placement, Replicate) for placement in typed.sharding)
