"""Forward hooks of modules inside a model that give nothing back: what they look at is returned beside the results.

    saved = {}
    model.encoder.register_forward_hook(lambda module, args, output: saved.update(h=output))

They run while a model is traced, as a forward may read what they leave. What they left in lists and dicts is taken back
behind the trace, for it is of the trace; who runs the program calls them with what is there then (`ir/hooked.py`).
"""

from __future__ import annotations

import dis
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from autopar.base.hooks import hooks_inside, name_of
from autopar.base.torch_compat import tracing as compat
from autopar.ir.hooked import Look, Unsaid, tensors_of
from autopar.ir.told import Carried, ToldNeeded
from autopar.passes.kept import Unwatched

_HOLDERS = (dict, OrderedDict, defaultdict, list, deque, set)
MOST_SEEN = 1024
"""Values that hooks look at in a step."""


class Observers:
    """While a model runs: what its hooks look at, that give nothing back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: list[tuple[Look, tuple[Any, ...], list[int]]] = []

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward whose hooks are watched."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.watched():
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, hooks are watched; behind it lists and dicts that they know are what they were."""
        self._seen.clear()
        found, names, calls = [*hooks_inside(self._model)], Counter[tuple[str, str, str]](), Counter[int]()
        held = [(each, each.copy()) for each in {id(x): x for *_, hook in found for x in _held_by(hook)}.values()]
        for path, module, table, number, hook in found:
            kind = path, table, name_of(hook)
            getattr(module, table)[number] = self._watching(hook, Look(*kind, names[kind], 0), calls)
            names[kind] += 1
        try:
            yield
        finally:
            for _, module, table, number, hook in found:
                getattr(module, table)[number] = hook
            for each, before in held:
                each.clear()
                each.extend(before) if isinstance(each, list | deque) else each.update(before)

    def left(self) -> Iterator[tuple[Carried, Tensor]]:
        """What they looked at. Nothing of a call that looked at what was written to afterwards, is no value of the
        trace, or of no class of Python's own.
        """
        found: list[tuple[Carried, Tensor]] = []
        for look, given, versions in self._seen:
            try:
                carried = look.carried(given)
            except Unsaid:
                continue
            tensors = [x for _, x in carried]
            if [x._version for x in tensors] == versions and all(map(_is_traced, tensors)):
                found += carried
        return iter(found if len(found) <= MOST_SEEN else ())

    def in_eager(self) -> dict[tuple[Look, int], Tensor]:
        """What they looked at, by whose it is and its number among the tensors of that call."""
        return {(look, place): x for look, given, _ in self._seen for place, x in enumerate(_tensors(given))}

    def _watching(self, hook: Any, look: Look, calls: Counter[int]) -> Callable[..., Any]:
        reads, may_fail = _reads(hook), _gives_nothing(hook) and not self._knows_the_model(hook)

        def watching(module: nn.Module, *given: Any) -> Any:
            try:
                found = hook(module, *given)
            except (ToldNeeded, Unwatched):
                raise
            except Exception:
                if not may_fail:
                    raise
                found = None  # what it does with values (NumPy, Python's numbers) it does behind the program
            if found is None:
                call, calls[id(watching)] = calls[id(watching)], calls[id(watching)] + 1
                read = tuple(x if reads is None or place + 1 in reads else None for place, x in enumerate(given))
                read = read if _tensors(read) else given  # that it was called is to be told by some value
                now = Look(look.path, look.table, look.name, look.number, call)
                self._seen.append((now, read, [x._version for x in _tensors(read)]))
            return found

        return watching

    def _knows_the_model(self, hook: Any) -> bool:
        """Whether a hook may leave something where forward reads it."""
        inside = {id(module) for module in self._model.modules()}
        return any(id(each) in inside for each in _known_by(hook))


def _tensors(given: Any) -> list[Tensor]:
    try:
        return tensors_of(given)
    except Unsaid:
        return []


def _is_traced(value: Tensor) -> bool:
    return not compat.is_unknown(value) and compat.node_of(value) is not None


def _reads(hook: Any) -> frozenset[int] | None:
    """Places of the arguments that a hook looks at; None where that cannot be told."""
    function, first = (hook.__func__, 1) if isinstance(hook, MethodType) else (hook, 0)
    if not isinstance(function, FunctionType) or function.__code__.co_flags & 0x0C:  # *args, **kwargs
        return None
    names = function.__code__.co_varnames[first : function.__code__.co_argcount]
    loaded: set[Any] = set()
    for each in dis.get_instructions(function):  # Python 3.13 loads two at a time
        if "LOAD_" in each.opname or each.opname == "MAKE_CELL":
            loaded.update(each.argval if isinstance(each.argval, tuple) else (each.argval,))
    return frozenset(place for place, name in enumerate(names) if name in loaded)


def _gives_nothing(hook: Any) -> bool:
    """Whether all that a hook's code returns is None."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType) or function.__code__.co_flags & 0x2A0:  # generators, coroutines
        return False
    told = [*dis.get_instructions(function)]
    ends = [place for place, each in enumerate(told) if each.opname == "RETURN_VALUE"]
    return all(told[place - 1].opname == "LOAD_CONST" and told[place - 1].argval is None for place in ends) and not any(
        each.opname == "RETURN_CONST" and each.argval is not None for each in told
    )


def _held_by(hook: Any) -> Iterator[Any]:
    """Lists, dicts and sets that a hook knows."""
    return (each for each in _known_by(hook) if type(each) in _HOLDERS)


def _known_by(hook: Any) -> Iterator[Any]:
    """What a hook knows by itself, by another function, or by the names of its file."""
    pending, met = [hook], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        yield value
        if isinstance(value, MethodType | BuiltinMethodType):
            pending += [value.__self__, getattr(value, "__func__", None)]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
            pending += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
            pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


_EMPTY = CellType()
