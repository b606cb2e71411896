"""What a block's forward reads of its modules' attributes.

Only attributes that are not the same in all blocks are watched. They are put aside: out of the dictionary of a module,
which is of a copy of the model that nobody else holds. Python then asks `nn.Module.__getattr__`, which looks among the
submodules; there the attribute is found, and the read is noted. No class is touched: other threads see nothing of it,
and a module has the type that its forward may ask for.

    vars(module) = {number: 3, width: 4, _modules: {…}}  →  {width: 4, _modules: {…, and `number` for who asks for it}}
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from autopar.base.watched import Watched
from autopar.passes.blocks.alike import OWN
from autopar.passes.blocks.hollow import NotRepeated, Running

Place = tuple[str, str]
"""The path of a module in its block, and the name of an attribute."""


class Recording:
    """The modules of one copy of a model, while it is traced."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._under_way: list[tuple[Mapping[int, str], dict[Place, None]]] = []
        self._always: dict[int, list[str]] = {}
        self._numbers: dict[int, dict[str, int]] = {}

    def put_aside(self, block: nn.Module, places: Iterable[Place], watched: Container[Place] = ()) -> None:
        """From now on reads of these attributes are noted. A module may lack them: that is noted too.

        watched: those that count as read by who looks at them, not by who hands them on (`base/watched.py`).
        """
        modules = dict(block.named_modules())
        names: dict[str, list[str]] = {}
        for path, name in places:
            names.setdefault(path, []).append(name)
        for path, wanted in names.items():
            module = modules[path]
            hidden = [name for name in wanted if _may_be_put_aside(module, name)]
            self._always.setdefault(id(module), []).extend(name for name in wanted if name not in hidden)
            if hidden:
                self._hide(module, hidden, {name for name in hidden if (path, name) in watched})

    def _hide(self, module: nn.Module, names: list[str], watched: Container[str]) -> None:
        key, own = id(module), dict(vars(module))
        values = {name: own.pop(name) for name in names if name in own}
        numbers = {name: value for name, value in values.items() if name in watched}
        self._numbers[key] = numbers
        aside = _Aside(
            values, set(names), self._running, lambda name: self._note(key, name),
            {name: functools.partial(self._watched, key, name, value) for name, value in numbers.items()},
        )  # fmt: skip
        own["_modules"] = _Modules(own["_modules"], aside)
        object.__setattr__(module, "__dict__", _Attributes(own, aside))

    def numbers(self, block: nn.Module) -> set[int]:
        """Those that are watched in a block."""
        modules = (module for _, module in modules_of(block, ""))
        return {value for module in modules for value in self._numbers.get(id(module), {}).values()}

    def _watched(self, module: int, name: str, value: int) -> Any:
        """A number that is read: of the block that is under way, or looked at."""
        for paths, _ in self._under_way:
            if module in paths:
                return Watched(value, (paths[module], name), lambda: self._looked(module, name))
        return value

    def _looked(self, module: int, name: str) -> None:
        if not any(module in paths for paths, _ in self._under_way):
            raise NotRepeated(f"{name} is looked at outside of its block")
        self._note(module, name)

    def _note(self, module: int, name: str) -> None:
        for paths, reads in self._under_way:
            if module in paths:
                reads[paths[module], name] = None

    @contextmanager
    def of(self, block: nn.Module) -> Iterator[dict[Place, None]]:
        """What the modules of a block read meanwhile of what was put aside, and what cannot be watched."""
        paths = {id(module): path for path, module in block.named_modules()}
        unseen = ((path, name) for key, path in paths.items() for name in self._always.get(key, ()))
        reads: dict[Place, None] = dict.fromkeys(unseen)
        self._under_way.append((paths, reads))
        try:
            yield reads
        finally:
            self._under_way.pop()


def has_slots(module: nn.Module) -> bool:
    """Whether a module keeps values outside of its dictionary."""
    own = (value for cls in type(module).__mro__ for value in vars(cls).values())
    return any(isinstance(value, types.MemberDescriptorType) for value in own)


def _may_be_put_aside(module: nn.Module, name: str) -> bool:
    """Whether Python looks for an attribute where `_Modules` has it: no class has one of that name, or finds attributes
    in a way of its own.
    """
    classes = [vars(cls) for cls in type(module).__mro__ if cls not in (nn.Module, object)]
    special = any("__getattr__" in own or "__getattribute__" in own for own in classes)
    return not special and not hasattr(type(module), name) and type(vars(module)["_modules"]) is dict


def held(block: nn.Module) -> dict[tuple[str, ...], Any]:
    """What the modules of a block hold, without noting that it was read."""
    found: dict[tuple[str, ...], Any] = {}
    for path, module in modules_of(block, ""):
        for name, value in dict.items(vars(module)):
            found[path, name] = value
            if name in OWN and isinstance(value, dict):
                found.update(((path, name, str(key)), part) for key, part in dict.items(value))
    return found


def modules_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules()`, without noting that it was read; those that stand in for others, too (`hollow.py`)."""
    yield path, module
    for name, child in dict.items(vars(module)["_modules"]):
        if child is not None:
            yield from modules_of(child, f"{path}.{name}" if path else name)


@dataclass(frozen=True, slots=True)
class _Aside:
    """What was put aside of one module. names: also those of attributes that it lacks.
    watched: what gives those values that are only handed on. elsewhere: what somebody else keeps from now on, who puts
    it back where it is read.
    """

    values: dict[str, Any]
    names: set[str]
    running: Running
    note: Callable[[str], None]
    watched: Mapping[str, Callable[[], Any]]
    elsewhere: set[str] = field(default_factory=set)

    def has(self, name: object) -> bool:
        """Whether it is there; somebody wants to know."""
        if name not in self.names:
            return False
        if name not in self.watched:
            self.note(str(name))
        return name in self.values

    def value(self, name: str) -> Any:
        """What is there."""
        return self.watched[name]() if name in self.watched else self.values[name]


class _Completed(dict[str, Any]):
    """A dictionary in which what was put aside is found by its name."""

    def __init__(self, own: Mapping[str, Any], aside: _Aside) -> None:
        super().__init__(own)
        self._aside = aside

    def __contains__(self, name: object) -> bool:
        return self._aside.has(name) or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        return self._aside.value(name) if self._aside.has(name) else super().__getitem__(name)


class _Modules(_Completed):
    """A module's submodules, among which an attribute that was put aside is found by its name alone."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


class _Attributes(_Completed):
    """A module's dictionary for whoever looks into it: complete. Python itself looks past these methods."""

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self._aside.value(name) if self._aside.has(name) else super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict; before the model runs, of what was put aside, too (`passes/kept.py`)."""
        if name not in self._aside.names:
            return super().pop(name, *default)
        if self._aside.running.now:
            raise NotRepeated("pop of a module's dictionary")
        self._aside.names.remove(name)
        self._aside.elsewhere.add(name)
        return self._aside.values.pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        if name in self._aside.elsewhere:
            self._aside.note(name)
        return self._aside.value(name) if self._aside.has(name) else super().setdefault(name, default)

    def copy(self) -> dict[str, Any]:
        """A plain one with everything."""
        for name in self._aside.names:
            self._aside.note(name)
        return {**dict(super().items()), **self._aside.values}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


def _of_everything(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.copy(), name)(*args)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: _Attributes, *args: Any) -> NoReturn:
        raise NotRepeated(f"{name} of a module's dictionary")

    return refuse


_WHOLE = ("__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "keys", "values", "items")
for _name in _WHOLE:
    setattr(_Attributes, _name, _of_everything(_name))
for _name in ("popitem", "clear", "__delitem__"):
    setattr(_Attributes, _name, _refused(_name))
