"""What a forward keeps on its modules between calls: a program does nothing in Python, so it keeps nothing itself.

    self.calls += 1;  loss * min(1, self.calls / 10)       told: another number in every step (`told.py`)
    self.seen["batches"] += 1;  self.is_new = False        told likewise
    if self.last is not None: loss += (z - self.last) ** 2
    self.last = z.detach()                                 refused: z of the step before, which a program does not have
    calls += 1, a global;  if calls > 3: …                 refused likewise
    self.attention = probabilities                         noted: whoever reads it behind forward has what it was
    if self.table is None: self.table = sines(n)           as it is: the same table in every step

What changed is seen in the trace; whether anything is done by what it was before, the source says.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.ir.told import Held, ToldNeeded
from autopar.passes.source import Source, flat, source_of

_NUMBERS = (int, float)


class Unwatched(AutoparError):
    """What a model that seems to go by an attribute is told before its reads are watched: it is to be traced again."""


class Kept:
    """While a model is traced. told: what is told the program, and kept by who runs it. watched: attributes of which it
    is seen whether forward reads them before it sets them; gets those of which that is to be known.
    """

    def __init__(self, model: nn.Module, told: Collection[Held] = (), watched: set[Held] | None = None) -> None:
        self._model, self._told, self._watched = model, frozenset(told), watched
        self._read = set[Held]()
        self.carried: frozenset[Held] = frozenset()
        self._names: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, what forward sets and nothing in a program does."""
        if not (names := ", ".join(name for name in self._names if name not in set(map(str, self.carried)))):
            return ()
        return (f"forward() sets {names}, which a program does not: return what is to be read behind it",)

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward behind which modules are looked at.

        Raises:
            AutoparError: it changes what it goes by in the next step.
        """

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = {path: dict(vars(module)) for path, module in modules_of(self._model, "")}
            counted, sizes = dict(self._counted()), dict(self._sizes())
            held = {id(each): dict(each) for each in globals_of(self._model)}
            with self._reads_watched():
                found = forward(*args, **kwargs)
            for each in globals_of(self._model):
                for name, value in each.items():
                    was = held.get(id(each), each).get(name)
                    if type(value) in _NUMBERS and type(was) in _NUMBERS and value != was:
                        self._look_at_global(name)
            for path, module in modules_of(self._model, ""):
                for name, value in dict.items(vars(module)):
                    was = before.get(path, {}).get(name)
                    if value is not was and name not in OWN and Held(path, name) not in self._told:
                        self._look_at(path, name, was, value)
            for each_list, size in self._sizes():
                if size > sizes.get(each_list, size):
                    self._names[str(each_list)] = None
            changed = [
                entry
                for entry, value in self._counted()
                if value != (was := counted.get(entry, 0))
                and (value == value or was == was)  # NaN is no other number than NaN
                and entry not in self._told
                and (entry in counted or type(entry.keys[-1]) is str)
            ]
            if changed:
                raise _told_needed(changed, "an entry of an attribute in Python", None)
            return found

        return run

    @contextlib.contextmanager
    def _reads_watched(self) -> Iterator[None]:
        """While this lasts, watched attributes are not where they lie: who reads one before it is set is seen."""
        held = {(id(self._model.get_submodule(each.path)), each.name): each for each in self._watched or ()}
        values = {key: vars(self._model.get_submodule(each.path)).pop(each.name, None) for key, each in held.items()}
        if not held:
            yield
            return
        looks_up = nn.Module.__getattr__

        def read(module: nn.Module, name: str) -> Any:
            key = id(module), name
            if key not in held:
                return looks_up(module, name)
            self._read.add(held[key])
            return vars(module).setdefault(name, values[key])

        nn.Module.__getattr__ = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__getattr__ = looks_up  # type: ignore[method-assign]
            for key, each in held.items():
                vars(self._model.get_submodule(each.path)).setdefault(each.name, values[key])

    def _counted(self) -> Iterator[tuple[Held, int | float | bool]]:
        """The numbers in dicts and lists that modules have."""
        for path, module in modules_of(self._model, ""):
            for name, value in dict.items(vars(module)):
                if name not in OWN and not name.startswith("_") and type(value) in _HOLDING:
                    yield from ((Held(path, name, keys), number) for keys, number in _entries(value, ()))

    def _sizes(self) -> Iterator[tuple[Held, int]]:
        """How long the lists are that modules have."""
        for path, module in modules_of(self._model, ""):
            for name, value in dict.items(vars(module)):
                if name not in OWN and not name.startswith("_") and type(value) in (list, deque):
                    yield Held(path, name), len(value)

    def _look_at(self, path: str, name: str, was: Any, value: Any) -> None:
        if type(value) is bool and type(was) is bool:
            self._look_at_flag(path, name)
            return
        is_number = type(value) in _NUMBERS and type(was) in _NUMBERS and value != was
        leaves = compat.tree_flatten(value)[0] if type(value) in (tuple, list, dict) else [value]
        if not is_number and not any(isinstance(x, Tensor) and self._is_of_the_batch(x) for x in leaves):
            return
        full = f"{path}.{name}" if path else name
        line = line_that_goes_by(self._model, name, is_number)
        if line is not None and type(was) in _NUMBERS and isinstance(value, Tensor) and value.numel() == 1:
            raise _told_needed([Held(path, name)], "an attribute in Python", line)
        if is_number and _is_counted(self._model, name):
            raise _told_needed([Held(path, name)], "an attribute in Python", line)
        error, held = AutoparError, Held(path, name)
        of_inputs = was is None and any(isinstance(x, Tensor) and is_of_inputs(self._model, x) for x in leaves)
        if line is None and of_inputs and (kept := line_that_keeps(self._model, name)) is not None:
            line = kept
        elif self._watched is not None and not is_number:
            if held in self._watched:
                line = line_that_reads(self._model, name) if held in self._read else None
            elif line is not None or line_that_reads(self._model, name) is not None:
                others = (at for at, module in modules_of(self._model, "") if name in vars(module))
                self._watched |= {held, *(Held(at, name) for at in others)}
                error, line = Unwatched, line or ""
        if line is not None:
            raise error(
                f"forward() changes {full}, an attribute in Python, and goes by what it was: a program does as in its "
                "first step",
                where=line,
                remedy=f'keep it in a buffer (self.register_buffer("{name}", torch.zeros(…)) in __init__, '
                f"self.{name}.copy_(…) or self.{name} += 1 in forward), or set it outside of forward()",
            )
        self._names[full] = None

    def _look_at_flag(self, path: str, name: str) -> None:
        """A flag that changes: where tensors are set with it, they are made in each step, as in the first."""
        uses = [_Uses.of(source.tree, name) for _, source in called(self._model)]
        held = dict.items(vars(self._model.get_submodule(path)))
        makes = [x for other, x in held if isinstance(x, Tensor) and Held(path, other) not in self._told]
        makes = [x for x in makes if compat.node_of(x) is not None]
        if any(set(each.reads) - each.in_sets for each in uses) and not makes:
            raise _told_needed([Held(path, name)], "an attribute in Python", None)

    def _look_at_global(self, name: str) -> None:
        for code, source in called(self._model):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                    if isinstance(source.parents[node], ast.BinOp) and _is_set_by(source, node, name):
                        continue
                    raise AutoparError(
                        f"forward() changes {name}, a global in Python, and goes by it: a program does as in its first "
                        "step",
                        where=place_in(code, node),
                        remedy="keep it in a buffer (self.register_buffer in __init__, += 1 in forward), or change it "
                        "outside of forward()",
                    )

    def _is_of_the_batch(self, value: Tensor) -> bool:
        """Whether a tensor is made of inputs or of parameters that are trained, not of numbers and buffers alone."""
        buffers = {compat.node_of(buffer) for buffer in self._model.buffers()}
        made = compat.made_with(compat.node_of(value), buffers)
        return any(node.op == "placeholder" and node not in buffers for node in made)


def is_of_inputs(model: nn.Module, value: Tensor) -> bool:
    """Whether a traced tensor's values are made of inputs of the model, of which not only shape and dtype are asked."""
    last = compat.node_of(value)
    held = {compat.node_of(each) for each in (*model.buffers(), *model.parameters())} - {last}
    of_shapes = set[Any]() if last is None else {n for n in last.graph.nodes if str(n.target).startswith(_OF_SHAPES)}
    made = compat.made_with(last, held | of_shapes)
    return any(node.op == "placeholder" and node not in held for node in made)


_OF_SHAPES = ("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.new_")
"""Operators that ask of a tensor its shape and dtype alone: `zeros_like`, `new_zeros`; those that draw are not here."""

OWN = ("_parameters", "_buffers", "_modules", "training")
_HOLDING = (dict, list, defaultdict, Counter, OrderedDict)
_DEEPEST = 3
"""Dicts and lists within others that are looked at."""
_MOST_ENTRIES = 256


def _entries(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int | float | bool]]:
    """The numbers in a dict or a list, by their keys."""
    if type(value) not in _HOLDING or len(keys) > _DEEPEST or len(value) > _MOST_ENTRIES:
        return
    for key, each in list(value.items()) if isinstance(value, dict) else enumerate(list(value)):
        if type(each) in (int, float, bool) and type(key) in (int, str):
            yield (*keys, key), each
        else:
            yield from _entries(each, (*keys, key))


def _told_needed(held: Sequence[Held], what: str, line: str | None) -> ToldNeeded:
    needed = ToldNeeded(
        f"forward() changes {held[0]}, {what}, and goes by what it was: a program does as in its first step",
        where=line,
        remedy=f'keep it in a buffer (self.register_buffer("{held[0].name}", torch.zeros(…)) in __init__, '
        f"self.{held[0].name}.copy_(…) or self.{held[0].name} += 1 in forward), or set it outside of forward()",
    )
    needed.held = frozenset(held)
    return needed


def _is_counted(model: nn.Module, name: str) -> bool:
    """Whether a statement makes an attribute of what it was, and none before sets it anew in every forward."""
    for _, source in called(model):
        sets = _Uses.of(source.tree, name).sets
        counts = [each.lineno for each in sets if _goes_on(each, name)]
        anew = [each.lineno for each in sets if isinstance(source.parents[each], ast.FunctionDef)]
        if counts and min(anew, default=counts[0]) >= min(counts):
            return True
    return False


def modules_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules()`, unseen by who notes what is read of modules (`blocks/recording.py`)."""
    yield path, module
    held = vars(module)["_modules"]
    for name, child in dict.items(held) if isinstance(held, dict) else held.items():  # a scripted one has no dict
        if isinstance(child, nn.Module):
            yield from modules_of(child, f"{path}.{name}" if path else name)


def globals_of(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the files that a model's own classes are of."""
    files = dict.fromkeys(type(module).__module__ for _, module in modules_of(model, ""))
    own = (name for name in files if name.partition(".")[0] not in ("torch", "autopar", "transformers"))
    return [vars(sys.modules[name]) for name in own if name in sys.modules]


def _is_set_by(source: Source, node: ast.AST, name: str) -> bool:
    """Whether a name is read to set it: `calls = calls + 1`."""
    above: ast.AST | None = node
    while isinstance(above, ast.expr):
        above = source.parents.get(above)
    targets = above.targets if isinstance(above, ast.Assign) else []
    return any(isinstance(each, ast.Name) and each.id == name for each in targets)


def line_that_goes_by(model: nn.Module, name: str, is_number: bool) -> str | None:
    """A line of forward, or of what it calls, in which an attribute is what the last step made it; None if there is
    none. Only changes that go on are meant: a number that is counted on, a tensor that is read before it is set.
    """
    found, lines = [_Uses.of(source.tree, name) for _, source in called(model)], list[str]()
    for (code, source), uses in zip(called(model), found, strict=True):
        reads = [node for node in uses.reads if not _is_compared_to_none(source.parents[node])]
        lines += [place_in(code, node) for node in reads if is_number and node not in uses.in_sets]
        is_lazy = any(node in uses.reads for each in uses.sets for node in _tests_around(each, source))
        if not is_number and uses.sets and not is_lazy:
            first = min(each.lineno for each in uses.sets)
            lines += [place_in(code, node) for node in reads if node.lineno <= first]
    if is_number and not _is_counted(model, name):
        return None  # set anew in every forward, or by who knows what
    return next(iter(lines), None)


def line_that_reads(model: nn.Module, name: str) -> str | None:
    """A line of forward, or of what it calls, that reads an attribute which nobody sets where it is not yet."""
    found = [(code, source, _Uses.of(source.tree, name)) for code, source in called(model)]
    if any(
        node in uses.reads for _, source, uses in found for each in uses.sets for node in _tests_around(each, source)
    ):
        return None
    lines = [
        place_in(code, node)
        for code, source, uses in found
        for node in uses.reads
        if not _is_compared_to_none(source.parents[node])
    ]
    return next(iter(lines), None)


def line_that_keeps(model: nn.Module, name: str) -> str | None:
    """A line that sets an attribute once, where a test of it says so: `if self.mean is None: self.mean = …`."""
    found = [(code, source, _Uses.of(source.tree, name)) for code, source in called(model)]
    sets = [
        (place_in(code, each), any(node in uses.reads for node in _tests_around(each, source)))
        for code, source, uses in found
        for each in uses.sets
    ]
    return sets[0][0] if sets and all(is_once for _, is_once in sets) else None


@dataclass(frozen=True, slots=True)
class _Uses:
    """Of an attribute, in a function: statements that set it, where it is read, and what of that stands in those."""

    sets: list[ast.Assign | ast.AugAssign]
    reads: list[ast.Attribute]
    in_sets: set[ast.AST]

    @staticmethod
    def of(tree: ast.AST, name: str) -> _Uses:
        sets = [node for node in ast.walk(tree) if _sets(node, name)]
        reads = [node for node in ast.walk(tree) if _reads(node, name)]
        return _Uses(sets, reads, {part for each in sets for part in ast.walk(each)})


def _is_compared_to_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)


def _tests_around(node: ast.AST, source: Source) -> Iterator[ast.AST]:
    """All parts of the tests of the branches that a statement is in."""
    while (above := source.parents.get(node)) is not None:
        if isinstance(above, ast.If):
            yield from ast.walk(above.test)
        node = above


def place_in(code: CodeType, node: Any) -> str:
    """File and line of a part of a function's source."""
    return f"{code.co_filename.rpartition('/')[2]}:{node.lineno}"


def _reads(node: ast.AST, name: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)


def _sets(node: ast.AST, name: str) -> TypeGuard[ast.Assign | ast.AugAssign]:
    """Whether a statement sets an attribute."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(each, ast.Attribute) and each.attr == name for each in flat(targets))


def _goes_on(node: ast.AST, name: str) -> bool:
    """Whether a statement makes an attribute of what it was: `self.calls += 1`, `self.mean = 0.9 * self.mean + x`."""
    if isinstance(node, ast.AugAssign):
        return True
    return isinstance(node, ast.Assign) and any(_reads(each, name) for each in ast.walk(node.value))


def called(model: nn.Module) -> Iterator[tuple[CodeType, Source]]:
    """The functions of a model's classes that forward calls by their names, those whose source is there."""
    for code in _codes(model):
        if (source := source_of(code)) is not None:
            yield code, source


def _codes(model: nn.Module) -> Iterator[CodeType]:
    """The functions of a model's classes that forward calls by their names."""
    functions: dict[str, dict[CodeType, None]] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        hidden = set[str]()
        for cls in kind.__mro__:
            if cls is object or cls.__module__.partition(".")[0] in ("torch", "autopar"):
                continue
            for name, value in vars(cls).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, FunctionType) and name not in hidden:
                    functions.setdefault(name, {})[function.__code__] = None
                    if "super" not in _names(function.__code__):
                        hidden.add(name)
    waiting, seen = ["forward"], {"forward", "__init__"}
    while waiting:
        for code in functions.get(waiting.pop(), ()):
            new = _names(code) - seen
            seen |= new
            waiting += new
            yield code


def may_go_by(model: nn.Module) -> set[Held]:
    """Attributes that forward may set to other tensors in each step, and read before: to be watched from the first
    trace on. What is not among them is seen when it changed, and the model is traced again.
    """
    held = [(path, name) for path, module in modules_of(model, "") for name in _empty(module)]
    if not held:
        return set()
    names, codes = {name for _, name in held}, _codes(model)
    given = {name for code in codes for name in names.intersection(code.co_names) if _stores(code, name)}
    gone_by = {name for name in given if line_that_goes_by(model, name, False) or line_that_reads(model, name)}
    return {Held(path, name) for path, name in held if name in gone_by}


def _empty(module: nn.Module) -> list[str]:
    """The attributes of a module that are tensors, or None until they are set."""
    own = dict.items(vars(module))
    return [name for name, x in own if (x is None or isinstance(x, Tensor)) and name not in OWN and name[:1] != "_"]


def _stores(code: CodeType, name: str) -> bool:
    return any(each.opname == "STORE_ATTR" and each.argval == name for each in dis.get_instructions(code))


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
