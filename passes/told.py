"""Numbers of Python's that differ from step to step, while a model is traced: a program is told them (`ir/told.py`).

    if torch.rand(1) < self.p: continue         a draw that decides: it is made as in eager, the same on every rank
    lam = np.random.beta(0.4, 0.4)              a draw of Python's or NumPy's
    self.step += 1;  min(1, self.step / 1000)   an attribute that forward changes

A trace that meets one says so (`ToldNeeded`), and the model is traced once more, with elements of one buffer in their
place. They are numbers as those that are read of tensors (`read_numbers.py`); what Python asks of them (a branch, an
index, a text) is answered by the numbers of the step that is traced, and noted.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.ir.hooked import HOOK, Look, place_of
from autopar.ir.program import Program
from autopar.ir.told import (
    BUFFER,
    FEW,
    IN_PLACE,
    MOST_NUMBERS,
    After,
    Asked,
    Carried,
    Draw,
    Generators,
    Held,
    Made,
    Source,
    Start,
    Step,
    Told,
    ToldNeeded,
    Wanted,
)  # fmt: skip
from autopar.passes.carried import Carries
from autopar.passes.checks import frame_of_model
from autopar.passes.draws import draws
from autopar.passes.kept import globals_of
from autopar.passes.read_numbers import Numbers
from autopar.passes.source import expression_asked, is_said
from autopar.passes.usual import line_of

START = "_autopar_start"
"""The attribute of a model that says where the step begins that is traced."""


def start_of(model: nn.Module) -> Start:
    """Where the step begins that is traced: now, if nobody says otherwise."""
    found: Start | None = vars(model).get(START)
    return Start({}, Generators.now()) if found is None else found


def rows_among(inputs: Mapping[str, Any]) -> frozenset[int]:
    """The sizes of inputs along their first dim."""
    leaves = compat.tree_flatten(dict(inputs))[0]
    return frozenset(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())


def with_told(program: Program, told: Told | None) -> Program:
    """A traced program with what it is told."""
    if told is None:
        return program
    constants = {**program.constants, BUFFER: told.buffer(told.numbers())}
    notes = (f"is told in each step: {', '.join(told.words)}",)
    return replace(program, told=told, constants=constants, notes=(*program.notes, *notes))


class Telling(TorchFunctionMode):
    """While a model is traced. model: what is traced; it gets a buffer where numbers are told. user: the model that has
    numbers. start: of the step. rows: of the inputs, which a draw has for each row.
    """

    def __init__(
        self,
        model: nn.Module,
        user: nn.Module,
        start: Start,
        wanted: Wanted,
        numbers: Numbers,
        rows: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        now = {held: start.held[held] if held in start.held else held.of(user) for held in wanted.held}
        self._held = {held: value for held, value in now.items() if type(value) in (bool, int, float)}
        self._model, self._start, self._wanted, self._numbers, self._rows = model, start, wanted, numbers, rows
        self._drawing = start.states.drawing()
        self._drawn_by: set[fx.Node] = set()
        self._sources: list[tuple[Source, int]] = []
        self._values: list[Any] = []
        self._asked: list[Asked] = []
        self._after: list[After] = []
        self._thread = threading.get_ident()
        self._buffer: Tensor | None = None
        self._texts: list[str] = []

    @property
    def told(self) -> Told | None:
        """What was told; None where nothing was."""
        if not self._sources and not self._after:
            return None
        start = replace(self._start, held=self._held, wanted=self._wanted)
        found = tuple(self._sources), tuple(self._asked), tuple(self._after)
        return Told(*found, self._wanted.length, start, self._rows)

    @property
    def if_wanted(self) -> tuple[Telling, ...]:
        """The mode to be entered; none where nothing is told."""
        return (self,) if self._wanted else ()

    def heard(self, given: Sequence[Tensor]) -> int:
        """A number that is another one once something was told or asked, and where one of these is a told number."""
        told = self._wanted and any(self._numbers.is_number(each) for each in given)
        return -1 if told else len(self._values) + len(self._asked)

    def asks(self, functions: Collection[Any]) -> bool:
        """Whether an answer is made by one of these."""
        made = [*(each.made for each in self._asked), *(each.made for each in self._after)]
        return any(function in functions for each in made if each is not None for function, _, _ in each.steps)

    def within(self, forward: Callable[..., Any], carries: Carries | None = None) -> Callable[..., Any]:
        """A forward that is told its numbers. carries: says what it leaves otherwise."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._wanted:
                with _replaced(self._model, self._instead):
                    return forward(*args, **kwargs)
            self._buffer = self._model._buffers[BUFFER]
            for held in sorted(self._wanted.held, key=str):
                if held in self._held:
                    held.put(self._model, self._number_of(held, self._held[held]))
            with _replaced(self._model, self._instead):
                found = forward(*args, **kwargs)
            for held in sorted(self._wanted.held, key=str):
                if carries is None or held not in carries.names:
                    self._leave(held)
            return found

        return run

    # ------------------------------------------------------------------------------------------------ where they are

    def _element(self, source: Source, values: Sequence[Any]) -> Tensor:
        """float64 [n]: of a source's numbers."""
        assert self._buffer is not None
        first = len(self._values)
        if first + len(values) > self._wanted.length:
            needed = ToldNeeded(
                "forward() draws more numbers by which it goes than a program is told",
                values=f"{MOST_NUMBERS} numbers in a step",
                remedy="draw them as one tensor, and choose by torch.where",
            )
            needed.more = self._wanted.length < MOST_NUMBERS
            raise needed
        self._sources.append((source, len(values)))
        self._values += values
        return self._buffer[first : first + len(values)]

    def _number_of(self, source: Source, value: float) -> Tensor:
        with self:
            found = self._element(source, [value])[0]
            if type(value) is bool:
                return found != 0
            return self._numbers.item(found.to(torch.int64) if type(value) is int else found)

    def _leave(self, held: Held) -> None:
        """What forward leaves in an attribute."""
        value = held.of(self._model)
        before = self._held.get(held)
        if isinstance(value, Tensor):
            with compat.outside_of_tracing():
                kind = bool if value.dtype == torch.bool else float if value.is_floating_point() else int
            made = self.made(value)
            if made is None:
                raise AutoparError(
                    f"forward() changes {held}, an attribute in Python, by what it computes of the batch",
                    remedy=f'keep it in a buffer (self.register_buffer("{held.name}", torch.zeros(…)) in __init__, '
                    f"self.{held.name}.copy_(…) in forward), or set it outside of forward()",
                )
            self._after.append(After(held, made, kind=kind))
        elif value != before or type(value) is not type(before):
            self._after.append(After(held, None, value))

    # ------------------------------------------------------------------------------------------------- what is asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func in _READING
            and isinstance(args[0], Tensor)
            and not (func is Tensor.item and args[0].dtype != torch.bool)
        ):
            return self._read(func, args)
        if func in _TEXT and isinstance(args[0], Tensor) and self.made(args[0]) is not None:
            return self._text(func, args)
        drawn = _draw_of(func, args, kwargs, self._rows, sys._getframe(1))
        if drawn is not None:
            if "torch" in self._wanted.draws:
                return self._drawn(drawn[0], args, drawn[1])
            found = func(*args, **kwargs)
            if isinstance(found, Tensor) and (node := compat.node_of(found)) is not None:
                self._drawn_by.add(node)
            return found
        return func(*args, **kwargs)

    def _read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        asked, frame = args[0], sys._getframe(2)
        made = self.made(asked) if asked.numel() == 1 else None
        if made is not None:
            return self._answer(made, _READING[func], frame)
        try:
            return func(*args)
        except Exception as error:
            if "torch" in self._wanted.draws or isinstance(error, ToldNeeded) or not self._is_drawn(asked):
                raise
            needed = ToldNeeded("forward() chooses what to do by the value of a tensor that is drawn")
            needed.draws = frozenset({"torch"})
            raise needed from error

    def made(self, asked: Tensor) -> Made | None:
        """How a traced tensor is made of what is told; None of others."""
        node = None if self._buffer is None else compat.node_of(self._buffer)
        last = compat.node_of(asked)
        found = None if node is None or last is None else compat.made_of(last, {node: None})
        if node is None or last is None or found is None or node not in found[2]:
            return None
        needed, held, _ = found
        order = [each for each in last.graph.nodes if each in needed]
        numbers = {node: 0, **{each: place for place, each in enumerate(order, 1)}}

        def step(each: fx.Node) -> Any:
            return held[each] if each in held else Step(numbers[each])

        steps = [(needed[each][0], *map_arg(needed[each][1:], step)) for each in order]
        return Made(tuple((function, tuple(a), dict(k)) for function, a, k in steps))

    def _answer(self, made: Made | None, reading: Callable[[Tensor], Any], frame: FrameType | None) -> Any:
        line = line_of(frame) if frame is not None else ""
        with compat.outside_of_tracing():
            asked = Asked(made, len(self._values), reading, 0, line)
            asked = replace(asked, answer=asked.of(self._values))
        self._asked.append(asked)
        return asked.answer

    def _text(self, func: Callable[..., Any], args: tuple[Any, ...]) -> str:
        """A number written down: where somebody reads it, as it is in the step that is traced."""
        frame = frame_of_model(sys._getframe(2), own=True)
        source, node = (None, None) if frame is None else expression_asked(frame)
        made = self.made(args[0])
        assert made is not None
        kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
        if source is not None and node is not None and is_said(node, source):
            with compat.outside_of_tracing():
                value = kind(made.of([0.0 if isinstance(x, tuple) else x for x in self._values]))
        else:
            value = self._answer(made, kind, frame)
        return format(value, *args[1:]) if func is Tensor.__format__ else str(value)

    def _is_drawn(self, asked: Tensor) -> bool:
        """Whether an answer is made of draws of few numbers, Python's numbers and buffers alone."""
        buffers = {compat.node_of(each) for each in self._model.buffers()}
        made = compat.made_with(compat.node_of(asked), self._drawn_by)
        others = made - self._drawn_by
        if any(draws(node) or (node.op == "placeholder" and node not in buffers) for node in others):
            return False
        return not made.isdisjoint(self._drawn_by)

    # --------------------------------------------------------------------------------------------------------- draws

    def _drawn(self, draw: Draw, args: tuple[Any, ...], like: tuple[torch.Size, Any]) -> Tensor:
        with compat.outside_of_tracing():
            values = self._drawing.draw(draw)
        found = self._element(draw, values).to(like[1]).reshape(like[0])
        return args[0].copy_(found) if draw.name in IN_PLACE else found

    def _instead(self, library: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of a function of random, numpy.random or math."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            if library == "math":
                return self._reckoned(name, original, args)
            own = frame_of_model(frame, own=True)
            if own is not frame:
                return original(*args, **kwargs)
            given = _plain_draw(library, name, args, kwargs)
            if given is None:
                return original(*args, **kwargs)
            if library not in self._wanted.draws:
                needed = ToldNeeded(f"forward() draws from {library}", where=line_of(frame))
                needed.draws = frozenset({library})
                raise needed
            return self._drawn_in_python(Draw(library, name, *given, line_of(frame)), args, frame)

        return call

    def _drawn_in_python(self, draw: Draw, args: tuple[Any, ...], frame: FrameType) -> Any:
        with compat.outside_of_tracing():
            (value,) = self._drawing.draw(draw)
        if not isinstance(value, tuple):
            number = self._number_of(draw, value)
            if draw.name != "choice" or isinstance(args[0], int):
                return number
            made = self.made(number)
            return args[0][self._answer(made, int, frame)]
        self._element(draw, [value])
        self._answer(None, int, frame)
        if draw.name == "shuffle":
            args[0][:] = [args[0][place] for place in value]
            return None
        if draw.name == "sample":
            return [args[0][place] for place in value]
        return sys.modules["numpy"].array(value)

    def _reckoned(self, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not any(isinstance(each, Tensor) and self._numbers.is_number(each) for each in args):
            return original(*args)
        wide = [each.to(torch.float64) if isinstance(each, Tensor) else each for each in args]
        found = getattr(torch, name)(*wide)
        return self._numbers.item(found.to(torch.int64) if name in ("floor", "ceil") else found)


class Redrawn(TorchFunctionMode):
    """While a model runs in eager: draws of torch's that a program was told are those that it was told."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        numbers, first = told.numbers(), 0
        self._rows = told.rows
        self._drawn: list[list[float]] = []
        for source, count in told.sources:
            if isinstance(source, Draw) and source.library == "torch":
                self._drawn.append(numbers[first : first + count])
            first += count

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = _draw_of(func, args, kwargs, self._rows, sys._getframe(1)) if self._drawn else None
        if drawn is None:
            return func(*args, **kwargs)
        shape, dtype = drawn[1]
        found = torch.tensor(self._drawn.pop(0), dtype=dtype).reshape(shape)
        return args[0].copy_(found) if drawn[0].name in IN_PLACE else found


def left_on(model: nn.Module, carried: Sequence[Carried], seen: Mapping[tuple[Look, int], Tensor]) -> list[Any]:
    """What a forward in eager has just left on its modules; it is taken from lists. seen: what its hooks looked at."""
    added = Counter(each.held for each in carried if each.appends)
    found = {held: [held.of(model).pop() for _ in range(count)] for held, count in added.items()}
    return [
        seen[place_of(each)] if each.kind == HOOK else found[each.held].pop() if each.appends else each.held.of(model)
        for each in carried
    ]


@contextmanager
def as_told(model: nn.Module, told: Told | None) -> Iterator[None]:
    """Inside, a model runs in eager as the step that was traced; afterwards its attributes are what they were."""
    if told is None:
        yield
        return
    held = {each for each in (*told.start.held, *(after.held for after in told.after)) if each.of(model) is not None}
    before = {each: each.of(model) for each in held}
    for each, value in told.start.held.items():
        each.put(model, value)
    try:
        with told.start.states.restored(), Redrawn(told):
            yield
    finally:
        for each, value in before.items():
            each.put(model, value)


def _draw_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: frozenset[int], frame: FrameType | None
) -> tuple[Draw, tuple[torch.Size, Any]] | None:
    """The draw, if it is one of few numbers that nothing of the batch goes into, and what it gives."""
    name = getattr(func, "__name__", "")
    if func not in _DRAWING and not (name in IN_PLACE and args and isinstance(args[0], Tensor)):
        return None
    plain = {key: value for key, value in kwargs.items() if key not in _NOT_DRAWN}
    is_of_tensor = name in IN_PLACE or func in (torch.bernoulli, Tensor.bernoulli)
    if any(isinstance(each, Tensor) for each in args[is_of_tensor:]) or (is_of_tensor and compat.is_unknown(args[0])):
        return None
    with compat.outside_of_tracing():
        like = args[0] if is_of_tensor else func(*args, **{**plain, "dtype": kwargs.get("dtype"), "device": "meta"})
    shape = like.shape
    if shape.numel() != 1 and (len(shape) != 1 or shape.numel() > FEW or shape.numel() in rows):
        return None
    if (frame := frame_of_model(frame)) is None:
        return None
    given = args
    if name in IN_PLACE:
        given = (tuple(shape), *args[1:])
    elif is_of_tensor:
        flat = args[0].reshape(-1)
        p = flat.tolist() if compat.has_numbers(flat) else compat.known_value(flat)
        if p is None:
            return None
        name, given = "bernoulli", (tuple(p), tuple(shape), *args[1:])
    draw = Draw("torch", name, given, tuple({**plain, "dtype": like.dtype}.items()), line_of(frame))
    return draw, (shape, like.dtype)


_READING: Mapping[Callable[..., Any], Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__index__: int, Tensor.__float__: float, Tensor.item: bool,
    Tensor.is_nonzero: bool, torch.is_nonzero: bool,
}  # fmt: skip
"""What makes a tensor a number of Python's, in which its value decides."""
_TEXT = (Tensor.__format__, Tensor.__repr__)
_DRAWING = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, Tensor.bernoulli})
_NOT_DRAWN = frozenset({"device", "requires_grad", "pin_memory", "layout", "generator", "dtype", "out"})
_MATH = ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "pow", "floor", "ceil", "log2", "log10", "log1p", "fabs")
_PYTHON = (
    "random", "uniform", "randint", "randrange", "gauss", "normalvariate", "betavariate", "expovariate", "triangular",
    "choice", "sample", "shuffle",
)  # fmt: skip
_NUMPY = (
    "rand", "random", "random_sample", "uniform", "normal", "randn", "standard_normal", "beta", "exponential",
    "binomial", "randint", "choice", "permutation", "shuffle",
)  # fmt: skip


def _plain_draw(
    library: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] | None:
    """What a draw of one number, or of an order, is given; None of others."""
    if name in ("choice", "sample", "shuffle") and args and not isinstance(args[0], int):
        is_list = hasattr(args[0], "__len__") and hasattr(args[0], "__getitem__") and not isinstance(args[0], Tensor)
        if not is_list or (name == "shuffle" and not isinstance(args[0], list)):
            return None
        args = (len(args[0]), *args[1:])
    sizes = {"rand": 0, "randn": 0, "random": 0, "random_sample": 0, "standard_normal": 0, "choice": 1, "beta": 2}
    if library == "numpy" and (len(args) > sizes.get(name, 2) or kwargs.get("size") is not None):
        return None
    if not all(type(each) in (int, float) for each in (*args, *kwargs.values())):
        return None
    return args, tuple(kwargs.items())


@contextmanager
def _replaced(
    model: nn.Module, instead: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, functions that draw, and those of math, are others, also where a model's files have their names."""
    numpy = sys.modules.get("numpy")
    libraries: list[tuple[str, Any, Sequence[str]]] = [("random", random, _PYTHON), ("math", math, _MATH)]
    libraries += [] if numpy is None else [("numpy", numpy.random, _NUMPY)]
    found: list[tuple[dict[str, Any], str, Any, Any]] = []
    by_id: dict[int, Any] = {}
    for library, module, names in libraries:
        for name in names:
            original = getattr(module, name)
            other = by_id[id(original)] = instead(library, name, original)
            found.append((vars(module), name, original, other))
    for names_of in globals_of(model):
        for name, value in list(names_of.items()):
            if id(value) in by_id:
                found.append((names_of, name, value, by_id[id(value)]))
    for names_of, name, _, other in found:
        names_of[name] = other
    try:
        yield
    finally:
        for names_of, name, original, _ in found:
            names_of[name] = original
