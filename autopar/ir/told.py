"""Numbers that a program is told as it runs: those that Python has then, and a trace would keep as they were.

    if torch.rand(1) < self.p: …        a draw: made anew in each step, from the generator that eager takes it from
    self.step += 1                      an attribute that forward changes: what it is now, and what it is afterwards
    alpha = min(1, self.step / 1000)    made of such numbers

What Python asks of them is answered while the model is traced, so a program is for these answers; before a step the
same questions are asked again (`Told.walk`), with the numbers of that step, which says what program is its own.
What a program computes with them it reads from one buffer (`BUFFER`), which is written before each step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError

BUFFER = "python_numbers"
"""The name of the buffer, float64 [n]: of Python's numbers, in the order in which forward meets them."""
FEW = 64
"""Numbers of a draw that may decide, and of a program as it is first traced."""
MOST_NUMBERS = 1024
Answer = bool | int | float | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """A draw that forward makes. library: torch, random or numpy; name: of its function there; line: the model's."""

    library: str
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    line: str

    def __str__(self) -> str:
        prefix = {"torch": "torch.", "random": "random.", "numpy": "np.random."}[self.library]
        return f"{prefix}{self.name} ({self.line})"


@dataclass(frozen=True, slots=True)
class Held:
    """A number that a module has: the path of the module, its attribute, and keys within it, where it is a dict or a
    list.
    """

    path: str
    name: str
    keys: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".") + "".join(f"[{key!r}]" for key in self.keys)

    def of(self, model: nn.Module) -> Any:
        """What it is now; None where it is not there."""
        found = vars(model.get_submodule(self.path)).get(self.name)
        for key in self.keys:
            try:
                found = found[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def put(self, model: nn.Module, value: Any) -> None:
        """Have it be this."""
        module = model.get_submodule(self.path)
        if not self.keys:
            vars(module)[self.name] = value
            return
        found = vars(module)[self.name]
        for key in self.keys[:-1]:
            found = found[key]
        found[self.keys[-1]] = value


Source = Draw | Held


@dataclass(frozen=True, slots=True)
class Carried:
    """A single value that a step leaves on a module. appends: put behind what a list has, not set. kind: float, int or
    tensor, or that a hook looks at it, which is called behind the step (`hooked.py`).
    """

    held: Held
    appends: bool
    kind: str

    def leave(self, model: nn.Module, value: Any) -> None:
        """Have it be there."""
        if self.kind != "tensor":
            value = (int if self.kind == "int" else float)(value.detach())
        if self.appends:
            self.held.of(model).append(value)
        else:
            self.held.put(model, value)

    def data(self) -> list[Any]:
        """JSON-ready."""
        return [self.held.path, self.held.name, list(self.held.keys), self.appends, self.kind]

    @staticmethod
    def of_data(data: Sequence[Any]) -> Carried:
        """What `data` gave."""
        path, name, keys, appends, kind = data
        return Carried(Held(path, name, tuple(keys)), appends, kind)


@dataclass(frozen=True, slots=True)
class Made:
    """How a number is made of others, as operators on tensors. steps: of each its function and what it is given, where
    a `Step` stands for what an earlier one gave; the first is the buffer.
    """

    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...]

    def of(self, numbers: Sequence[float]) -> Tensor:
        """What comes of these numbers."""
        found: list[Any] = [torch.tensor(list(numbers), dtype=torch.float64)]

        def given(value: Any) -> Any:
            if isinstance(value, Step):
                return found[value.number]
            if isinstance(value, tuple | list):
                return type(value)(map(given, value))
            return value

        with torch.no_grad():
            for function, args, kwargs in self.steps:
                values = [x.clone() if isinstance(x, Tensor) else x for x in map(given, args)]
                found.append(function(*values, **{name: given(x) for name, x in kwargs.items()}))
        result: Tensor = found[-1]
        return result


@dataclass(frozen=True, slots=True)
class Step:
    """What an earlier step of `Made` gave, by its number; 0 is the buffer."""

    number: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What Python asks of numbers. known: how many are there then. reading: what makes the number Python's own.
    answer: of the numbers that the model was traced with. line: the model's.
    """

    made: Made | None
    known: int
    reading: Callable[[Tensor], Any]
    answer: Answer
    line: str

    def of(self, numbers: Sequence[Any]) -> Answer:
        """The answer, of numbers that begin with those that are known then."""
        if self.made is None:  # a draw that is no number: which ones, or in which order
            found: tuple[int, ...] = numbers[self.known - 1]
            return found
        flat = [0.0 if isinstance(x, tuple) else x for x in numbers[: self.known]]
        answer: Answer = self.reading(self.made.of(flat).detach())
        return answer


@dataclass(frozen=True, slots=True)
class After:
    """What forward leaves: an attribute, and its value, or how it is made."""

    held: Held
    made: Made | None
    value: Any = None
    kind: type = float

    def of(self, numbers: Sequence[Any]) -> Any:
        """What it is behind a step with these numbers."""
        if self.made is None:
            return self.value
        flat = [0.0 if isinstance(x, tuple) else x for x in numbers]
        return self.kind(self.made.of(flat).reshape(()).item())


class ToldNeeded(AutoparError):
    """The model is to be traced with these numbers told. draws: of which libraries. more: numbers than were."""

    held: frozenset[Held] = frozenset()
    draws: frozenset[str] = frozenset()
    more = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a trace has to tell. draws: of which libraries, all of few numbers. length: of the buffer."""

    held: frozenset[Held] = frozenset()
    draws: frozenset[str] = frozenset()
    length: int = FEW

    def __bool__(self) -> bool:
        return bool(self.held or self.draws)

    def with_needed(self, needed: ToldNeeded) -> Wanted:
        """And that; the same, where nothing is new."""
        length = self.length * 4 if needed.more else self.length
        return Wanted(self.held | needed.held, self.draws | needed.draws, min(length, MOST_NUMBERS))


@dataclass(frozen=True, slots=True)
class Start:
    """Where a step begins: what attributes are, and the generators' states."""

    held: Mapping[Held, Any]
    states: Generators
    wanted: Wanted = Wanted()


@dataclass(frozen=True, slots=True)
class Told:
    """Of a traced program. sources: where numbers come from, each with how many it gives. length: of the buffer.

    asked: in order. start: of the step that was traced, with all that has to be told. rows: of the batch, of which no
    draw is told that has a number for each.
    """

    sources: tuple[tuple[Source, int], ...]
    asked: tuple[Asked, ...]
    after: tuple[After, ...]
    length: int
    start: Start
    rows: frozenset[int] = frozenset()

    @property
    def words(self) -> tuple[str, ...]:
        """The sources, and the attributes that forward leaves, in words."""
        return tuple(dict.fromkeys((*(str(each) for each, _ in self.sources), *(str(x.held) for x in self.after))))

    def numbers(self) -> list[Any]:
        """Those of its own start: for draws that are no numbers, what they are."""
        numbers, drawing = list[Any](), self.start.states.drawing()
        for source, count in self.sources:
            numbers += read(source, count, self.start.held, drawing)
        return numbers

    def buffer(self, numbers: Sequence[Any]) -> Tensor:
        """float64 [length], on the CPU."""
        flat = [0.0 if isinstance(x, tuple) else float(x) for x in numbers]
        return torch.tensor(flat + [0.0] * (self.length - len(flat)), dtype=torch.float64)


def read(source: Source, count: int, held: Mapping[Held, Any], drawing: Drawing) -> list[Any]:
    """The numbers that a source gives now: its draw is made."""
    if isinstance(source, Held):
        return [held[source]]
    found = drawing.draw(source)
    assert len(found) == count, source
    return found


# ---------------------------------------------------------------------------------------------------------- generators


@dataclass(frozen=True, slots=True)
class Generators:
    """States of those that forward may draw from: torch's on the CPU, Python's, NumPy's where it is loaded."""

    torch: Tensor
    python: Any
    numpy: Any

    @staticmethod
    def now() -> Generators:
        """Their states."""
        numpy = sys.modules.get("numpy")
        return Generators(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())

    def drawing(self) -> Drawing:
        """Draws that begin here, of which the generators know nothing."""
        return Drawing(self)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the generators are here; afterwards where they were."""
        before = Generators.now()
        self.put()
        try:
            yield
        finally:
            before.put()

    def put(self) -> None:
        """Have the generators be here."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class Drawing:
    """Draws from generators of their own that begin where others are."""

    def __init__(self, start: Generators) -> None:
        self._torch = torch.Generator()
        self._torch.set_state(start.torch)
        self._python = random.Random()
        self._python.setstate(start.python)
        self._numpy: Any = None
        if start.numpy is not None:
            self._numpy = sys.modules["numpy"].random.RandomState()
            self._numpy.set_state(start.numpy)

    def draw(self, draw: Draw) -> list[Any]:
        """The numbers of a draw; a tuple of numbers where it says which ones, or in which order."""
        return _drawn(draw, self._torch, self._python, self._numpy)


def draw_again(draw: Draw) -> None:
    """Have the generator that everybody draws from make this draw."""
    numpy = sys.modules.get("numpy")
    _drawn(draw, torch.default_generator, random, None if numpy is None else numpy.random)


IN_PLACE = frozenset({"uniform_", "normal_", "random_", "bernoulli_", "exponential_"})
"""Methods of tensors that fill them, in the place of functions of torch; their first argument is the shape."""


def _drawn(draw: Draw, generator: torch.Generator, python: Any, numpy: Any) -> list[Any]:
    kwargs = dict(draw.kwargs)
    if draw.library == "torch":
        if draw.name in IN_PLACE:
            (shape, *args), dtype = draw.args, kwargs.pop("dtype")
            found = getattr(torch.empty(shape, dtype=dtype), draw.name)(*args, **kwargs, generator=generator)
        elif draw.name == "bernoulli":
            (values, shape), dtype = draw.args, kwargs.pop("dtype")
            p = torch.tensor(values, dtype=dtype).reshape(shape)
            found = torch.bernoulli(p, **kwargs, generator=generator)
        else:
            found = getattr(torch, draw.name)(*draw.args, **kwargs, generator=generator)
        numbers: list[Any] = found.reshape(-1).tolist()
        return numbers
    of = python if draw.library == "random" else numpy
    name, given = draw.name, draw.args
    if name == "shuffle":
        order = list(range(given[0]))
        of.shuffle(order)
        return [tuple(map(int, order))]
    if draw.library == "random" and name in ("choice", "sample"):
        given = (range(given[0]), *given[1:])
    found = getattr(of, name)(*given, **kwargs)
    if name in ("sample", "permutation"):
        return [tuple(map(int, found))]
    plain: Any = found
    return [plain if type(plain) in (int, float) else plain.item()]
