"""What a forward does to generators of random numbers, while it is traced.

A program computes its numbers from one seed a step, which is torch's default generator's next number. So a forward that
seeds that generator or puts it back, draws from a `torch.Generator` of its own, or with Python or NumPy, would have
other numbers in eager: it is refused, with its line.

While a model is traced, torch's generators are at a seed of ours, and at the next one after each operator that draws:
whoever seeds or puts back leaves another one. What other threads draw meanwhile does not change a generator's seed.
Where no GPU is in use yet, torch keeps the seeds of `torch.cuda.manual_seed` for the first use: those are seen there.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.devices import seeds_gpus, set_waiting_seeds, waiting_seeds
from autopar.passes.blocks.marks import ENTER, LEAVE, REPEATS
from autopar.passes.checks import frame_of_model
from autopar.passes.draws import draws

_FIRST = 0x1E3779B97F4A7C15
"""The seed at which a trace begins: a number that nobody takes for one."""
_OF_GPUS = -1
"""The seed of a generator that is not there yet: no seed of ours."""
_BUFFER = "draw the numbers once, where the model is built, and keep them as a buffer"


_REJECTING: Mapping[str, str] = {
    "_standard_gamma": "Gamma (Chi2, StudentT)", "_sample_dirichlet": "Dirichlet or Beta", "binomial": "Binomial",
}  # fmt: skip
"""torch's functions that draw by rejection, and of which distributions it is."""


class Seeds(TorchFunctionMode):
    """Sees that a forward leaves torch's generators to its draws. what: of the errors, whose forward it is."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._seed, self._last = what, _FIRST, ""
        self._defaults = _default_generators()
        self._before: list[torch.Tensor] = []
        self._waiting: tuple[Any, ...] = ()
        self._entered: dict[int, int] = {}
        self._drawing: set[int] = set()

    def __enter__(self) -> Seeds:
        self._before = [each.get_state() for each in self._defaults]
        self._waiting = waiting_seeds()
        self._seed_all()
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        found = self._found()
        for generator, state in zip(self._defaults, self._before, strict=True):
            generator.set_state(state)
        set_waiting_seeds(self._waiting)
        if error is None and self._last and found is not None:
            does = "puts torch's generator back" if self._is_own(found) else "seeds torch's generator"
            raise AutoparError(
                f"{self._what} {does} in forward() after it draws, so that every step would draw the same numbers",
                where=self._last,
                remedy=f"{_BUFFER}, or seed outside of forward()",
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _REJECTING:
            raise AutoparError(
                f"{self._what} draws from a {_REJECTING[name]} distribution in forward(): torch draws until a number "
                "will do, so how many a part of a tensor takes no rank knows",
                where=_line(),
                remedy="draw it outside of forward() and hand it in with the batch, or take a distribution that draws "
                "one number for each element (Normal, Laplace, Exponential; Kumaraswamy for Beta)",
            )
        kwargs = self._without_generator(name, kwargs or {})
        begun = compat.count_recorded()
        result = func(*args, **kwargs)
        if func is ENTER:
            self._entered[args[1]] = self._seed
        elif func is LEAVE and self._entered.get(args[1]) != self._seed:
            self._drawing.add(args[1])
        if func in REPEATS:
            if args[1] in self._drawing:
                self._draw(f"dropout or the like of {args[2]}")
        elif any(map(draws, compat.recorded_since(begun))):
            self._draw(name)
        return result

    def _without_generator(self, name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        given = kwargs.get("generator")
        if "generator" not in kwargs or not isinstance(given, torch.Generator | None):
            return kwargs
        if given is None or any(given is each for each in self._defaults):
            return {key: value for key, value in kwargs.items() if key != "generator"}
        raise AutoparError(
            f"{self._what} draws from a torch.Generator of its own in forward() ({name}), which no program has",
            where=_line(),
            remedy="leave generator= out: draws follow from torch.manual_seed, the same on every rank and mesh. Or "
            f"{_BUFFER}, or pass them in",
        )

    def _draw(self, name: str) -> None:
        """Something has drawn."""
        found = self._found()
        if found is None:
            self._seed += 1
            self._last = _line() or self._last or self._what
            self._seed_all()
        elif self._is_own(found):
            raise AutoparError(
                f"{self._what} puts torch's generator back in forward() before it draws ({name}): a program would not "
                "draw the same numbers again",
                where=_line(),
                remedy="draw once, and use the numbers as often as they are wanted",
            )
        else:
            raise AutoparError(
                f"{self._what} seeds torch's generator in forward() before it draws ({name}): a program would not draw "
                "the same numbers in every step",
                where=_line(),
                remedy=f"{_BUFFER}, or seed outside of forward()",
            )

    def _seed_all(self) -> None:
        for generator in self._defaults:
            generator.manual_seed(self._seed)

    def _found(self) -> int | None:
        """The seed of a generator that is not at ours, or will not be."""
        if seeds_gpus(self._waiting, waiting_seeds()):
            return _OF_GPUS
        return next((seed for each in self._defaults if (seed := each.initial_seed()) != self._seed), None)

    def _is_own(self, seed: int) -> bool:
        return _FIRST <= seed < self._seed


def _default_generators() -> list[torch.Generator]:
    """Those of torch that a model's draws come from: the CPU's, and that of this process's GPU, if it uses one."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _line() -> str | None:
    """The model's line that is running."""
    frame = frame_of_model(sys._getframe(1), own=True)
    return None if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


# ---------------------------------------------------------------------------------------------- Python's and NumPy's

_DRAWS = 6
"""How many numbers in a row lie at one end."""


@dataclass(frozen=True, slots=True)
class Other:
    """A generator that is not torch's. name: of errors. made: one like it, by its seed; None: it is not known."""

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], None]
    made: Callable[[int], Any] | None = None

    def put(self, end: str) -> None:
        """Have it draw what lies at an end (`ENDS`): what chance chose as before says nothing of what else it may."""
        if self.made is not None:
            made = self.made(_seed_of(self.made, end))
            self.restore(made.getstate() if isinstance(made, random.Random) else made.get_state())

    def text(self) -> str:
        """Tells its states apart."""
        return str(self.state())


@contextmanager
def others_kept(generators: Sequence[Other]) -> Iterator[None]:
    """Afterwards they give what they gave before."""
    before = [each.state() for each in generators]
    try:
        yield
    finally:
        for each, state in zip(generators, before, strict=True):
            each.restore(state)


def others(model: nn.Module) -> list[Other]:
    """Python's and NumPy's own, those that modules have, and those among the globals that methods of modules name."""
    found = [Other("Python's random generator", random.getstate, random.setstate, random.Random)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random.RandomState
        found.append(Other("NumPy's generator", numpy.random.get_state, numpy.random.set_state, legacy))
    named = [*held(model).items(), *_among_globals({type(module) for module in model.modules()})]
    for name, generator in {id(each): (name, each) for name, each in named}.values():
        if isinstance(generator, random.Random):
            made = random.Random if type(generator) is random.Random else None
            found.append(Other(f"the generator {name}", generator.getstate, generator.setstate, made))
        elif hasattr(generator, "bit_generator"):
            found.append(Other(f"the generator {name}", *_of_bits(generator.bit_generator)))
        else:
            found.append(Other(f"the generator {name}", generator.get_state, generator.set_state))
    return found


@functools.cache
def _seed_of(made: Callable[[int], Any], end: str) -> int:
    """The first seed of a generator whose next numbers all lie at one end."""
    draw, is_there = ENDS[end]

    def is_at_the_end(seed: int) -> bool:
        generator = made(seed)
        return all(is_there(draw(generator)) for _ in range(_DRAWS))

    return next(filter(is_at_the_end, itertools.count()))


def _one_of_two(generator: Any) -> int:
    drawn = generator.randrange(2) if isinstance(generator, random.Random) else generator.randint(2)
    return int(drawn)


ENDS: Mapping[str, tuple[Callable[[Any], float], Callable[[float], bool]]] = {
    "low": (lambda generator: generator.random(), lambda drawn: drawn < 0.25),
    "high": (lambda generator: generator.random(), lambda drawn: drawn > 0.75),
    "first": (_one_of_two, lambda drawn: drawn == 0),
    "last": (_one_of_two, lambda drawn: drawn == 1),
}
"""What generators are made to draw: small numbers and large ones of those between 0 and 1, the first and the last of
two; how, and when it is so.
"""


def _of_bits(bits: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: bits.state, lambda state: setattr(bits, "state", state)


def held(model: nn.Module) -> dict[str, Any]:
    """The generators of Python's and NumPy's kinds that modules have, by name."""
    kinds = _kinds()
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds)
    }


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState)))


def _among_globals(classes: set[type]) -> Iterator[tuple[str, Any]]:
    kinds = _kinds()
    for method in (value for each in classes for value in vars(each).values() if hasattr(value, "__code__")):
        for name in method.__code__.co_names:
            if isinstance(value := method.__globals__.get(name), kinds):
                yield name, value
