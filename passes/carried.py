"""Single values that a forward leaves on its modules: a program returns them, and who runs it puts them there.

    self.aux_loss = balance.mean()             set behind each step, with its gradient
    self.log.append(loss.item())               put behind what the user's list has
    self.mean = 0.9 * self.mean + 0.1 * x      told to the next step (`told.py`), where it is a number of Python's

Larger ones would be outputs that nobody may want: they are noted (`kept.py`), and so is all of that where a step has
microbatches or stages. What forward hooks look at is returned likewise, however large (`observers.py`).
"""

from __future__ import annotations

import ast
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.ir.hooked import HOOK
from autopar.ir.told import Carried, Held
from autopar.passes.kept import OWN, called, modules_of, place_in
from autopar.passes.observers import Observers
from autopar.passes.read_numbers import Numbers

MOST_CARRIED = 64
"""Values that a step leaves."""
_LISTS = (list, deque)


class Carries:
    """While a model is traced. told: attributes that are told. makes: how a number is made of those, if it is.
    observers: watch its hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        numbers: Numbers,
        told: Collection[Held],
        makes: Callable[[Tensor], object],
        observers: Observers,
    ) -> None:
        self._model, self._numbers, self._told, self._makes = model, numbers, frozenset(told), makes
        self._observers = observers
        self.carried: tuple[Carried, ...] = ()

    @property
    def names(self) -> frozenset[Held]:
        """What is left so."""
        return frozenset(each.held for each in self.carried)

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that returns what it leaves beside its results, where it leaves anything.

        Raises:
            AutoparError: it goes by a list that it adds to.
        """

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = {path: dict(vars(module)) for path, module in modules_of(self._model, "")}
            lists = {held: list(map(id, value)) for held, value in self._lists()}
            found = forward(*args, **kwargs)
            left = [*self._set(before), *self._added(lists)]
            left = [*(left if len(left) <= MOST_CARRIED else ()), *self._observers.left()]
            if not left:
                return found
            self.carried = tuple(each for each, _ in left)
            return found, tuple((x if each.kind in ("tensor", HOOK) else x.reshape(())).clone() for each, x in left)

        return run

    def _set(self, before: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Carried, Tensor]]:
        for held in sorted(self._told, key=str):
            value = held.of(self._model)
            if isinstance(value, Tensor) and self._makes(value) is None and value.numel() == 1:
                yield Carried(held, False, "float" if value.is_floating_point() else "int"), value
        for path, module in modules_of(self._model, ""):
            for name, value in dict.items(vars(module)):
                held = Held(path, name)
                if name in OWN or held in self._told or value is before.get(path, {}).get(name):
                    continue
                if (found := self._single(value)) is not None:
                    yield Carried(held, False, found[0]), found[1]

    def _added(self, before: Mapping[Held, list[int]]) -> Iterator[tuple[Carried, Tensor]]:
        for held, value in self._lists():
            if held not in before or list(map(id, value))[: len(before[held])] != before[held]:
                continue
            found = [self._single(each) for each in list(value)[len(before[held]) :]]
            if not found or any(each is None for each in found):
                continue
            self._check_only_added(held)
            yield from ((Carried(held, True, each[0]), each[1]) for each in found if each is not None)

    def _single(self, value: Any) -> tuple[str, Tensor] | None:
        """A single value that is made in the step, with its kind."""
        made = self._numbers.made_plain(value)
        if made is not None:
            return "float" if made.is_floating_point() else "int", made
        if not isinstance(value, Tensor) or compat.is_unknown(value) or value.numel() != 1:
            return None
        if compat.node_of(value) is None or compat.value_from(value, {}) is not None:
            return None
        if not self._numbers.is_number(value):
            return "tensor", value
        return "float" if value.is_floating_point() else "int", value

    def _lists(self) -> Iterator[tuple[Held, Any]]:
        for path, module in modules_of(self._model, ""):
            for name, value in dict.items(vars(module)):
                if name in OWN:
                    continue
                if type(value) in _LISTS:
                    yield Held(path, name), value
                elif isinstance(value, dict) and not name.startswith("_"):
                    pairs = ((key, each) for key, each in dict.items(value) if type(key) in (str, int))
                    yield from ((Held(path, name, (key,)), each) for key, each in pairs if type(each) in _LISTS)

    def _check_only_added(self, held: Held) -> None:
        for code, source in called(self._model):
            for node in ast.walk(source.tree):
                if not (isinstance(node, ast.Attribute) and node.attr == held.name and isinstance(node.ctx, ast.Load)):
                    continue
                above = source.parents[node]
                while isinstance(above, ast.Subscript) and held.keys:
                    above = source.parents[above]
                if not (isinstance(above, ast.Attribute) and above.attr in ("append", "clear")):
                    raise AutoparError(
                        f"forward() adds to {held}, a list in Python, and goes by what is in it: a program has it as "
                        "it was when it was made",
                        where=place_in(code, node),
                        remedy="keep what is gone by in a buffer (self.register_buffer in __init__, self.recent[i] = "
                        "loss.detach() in forward), or look at the list outside of forward()",
                    )
