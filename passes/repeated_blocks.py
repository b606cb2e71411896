"""Blocks that a model repeats are traced once: the others stand in the graph as calls, which are then written out.

    layers 0 … 125 of a Llama  →  one traced layer, 125 × `again`, then 126 layers as if each had been traced

A block is another one's repetition where everything that the first one's forward read is the same: classes, shapes and
dtypes of parameters, plain attributes (`training`, `num_heads`, …; only those that were read, so a layer's number does
not count unless it matters), and what it is called with, but for the tensors' values. Blocks with hooks, and blocks
that write attributes, are traced each for itself.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.ir import map_nodes
from autopar.torch_compat import tracing as compat

_LIBRARY = torch.library.Library("autopar_capture", "DEF")
_LIBRARY.define("enter(Tensor[] values, int key) -> Tensor[]")
_LIBRARY.define("leave(Tensor[] values, int key) -> Tensor[]")
_LIBRARY.define("again(Tensor[] values, int key, str path) -> Tensor[]")
_ENTER, _LEAVE, _AGAIN = (getattr(torch.ops.autopar_capture, name).default for name in ("enter", "leave", "again"))
_MISSING = object()
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None), type(Ellipsis))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What `nn.Module` keeps for itself: parameters, buffers, modules and hooks are compared apart."""


class NotRepeated(Exception):
    """The graph is not what repeating blocks would give; the model is to be traced whole."""


@dataclass(slots=True)
class _Traced:
    """A block that was traced: the module, what its forward read, how it was called, and what it gave."""

    key: int
    path: str
    block: nn.Module
    classes: dict[str, type]
    reads: dict[tuple[str, str], Any]
    call: tuple[object, ...]
    result: Any = None
    results: list[tuple[str, Any]] = field(default_factory=list)


class Blocks:
    """The blocks of one model, while it is traced and after."""

    def __init__(self, model: nn.Module) -> None:
        self.traced: list[_Traced] = []
        self.paths: dict[nn.Module, str] = {}
        self.repeats = 0
        tied = _tied(model)
        for name, module in _outermost_lists(model):
            for number, block in enumerate(module):
                if self._may_repeat(block, tied):
                    self.paths[block] = f"{name}.{number}"

    @staticmethod
    def _may_repeat(block: nn.Module, tied: set[int]) -> bool:
        hooked = any(_has_hooks(module) or "forward" in vars(module) for module in block.modules())
        shared = any(id(tensor) in tied for tensor in (*block.parameters(), *block.buffers()))
        return not hooked and not shared

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, a block that has been traced before is not traced again."""
        _current.append(self)
        for block, path in self.paths.items():
            block.forward = functools.partial(self._forward, block, path, block.forward)
        try:
            yield
        finally:
            for block in self.paths:
                del block.forward
            _current.pop()

    def _forward(self, block: nn.Module, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = compat.tree_flatten((args, kwargs))
        call = _signature(leaves, spec)
        if call is None:
            return forward(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for known in self.traced:
            if known.call == call and _is_same(known, block):
                self.repeats += 1
                return _rebuilt(known, _AGAIN(tensors, known.key, path), tensors)
        entered = iter(_ENTER(tensors, len(self.traced)))
        inner = [next(entered) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inner_args, inner_kwargs = compat.tree_unflatten(inner, spec)
        with _reads_of(block) as (reads, classes, writes):
            result = forward(*inner_args, **inner_kwargs)
        found = _Traced(len(self.traced), path, block, classes, reads, call)
        results, found.result = compat.tree_flatten(result)
        given = [leaf for leaf in inner if isinstance(leaf, Tensor)]
        same = {id(tensor): place for place, tensor in enumerate(given)}
        made = [leaf for leaf in results if isinstance(leaf, Tensor) and id(leaf) not in same]
        if writes or any(not isinstance(leaf, (Tensor, *_PLAIN)) for leaf in results):
            raise NotRepeated(f"{path} keeps something of its own")
        if any(compat.shares_storage(leaf, tensor) for leaf in made for tensor in given):
            raise NotRepeated(f"{path} returns a view of what it is given")
        left = iter(_LEAVE(made, found.key))
        # A result is one that was made, one that was given (by its place), or plain.
        for leaf in results:
            if not isinstance(leaf, Tensor):
                found.results.append(("plain", leaf))
            elif id(leaf) in same:
                found.results.append(("given", same[id(leaf)]))
            else:
                found.results.append(("made", (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)))
        self.traced.append(found)
        return _rebuilt(found, list(left), tensors)

    def check_written(self, nodes: Iterable[fx.Node]) -> None:
        """Raises NotRepeated where one of these nodes changes what a block is given, or what it gives."""
        for node in nodes:
            target = node.args[0]
            while isinstance(target, fx.Node) and _may_alias(target):
                target = target.all_input_nodes[0]
            if not isinstance(target, fx.Node) or target.op != "call_function" or target.target is operator.getitem:
                raise NotRepeated(f"{node} changes {target}")

    def write_out(self, graph: fx.Graph, origins: dict[str, str], names: Mapping[fx.Node, str]) -> None:
        """Replace every call of a block in the graph by the block.

        Args:
            names: of the placeholders that are parameters and buffers.

        Raises:
            NotRepeated: a block reads or gives more than what it is called with and returns.
        """
        bodies = {found.key: _body(graph, found, names) for found in self.traced}
        by_name = {name: node for node, name in names.items()}
        for node in list(graph.nodes):
            if node.target is _AGAIN:
                _insert(graph, origins, node, self.traced[node.args[1]], bodies[node.args[1]], names, by_name)
        for node in reversed(list(graph.nodes)):
            if node.target in (_ENTER, _LEAVE):
                _pass_through(graph, node, node.args[0])


_current: list[Blocks] = []
_SOMETIMES_VIEWS = frozenset({"reshape", "flatten", "contiguous", "to", "type_as", "ravel", "float", "unflatten"})


def _may_alias(node: fx.Node) -> bool:
    """Whether a node's result may lie where its first operand does."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload) or not node.all_input_nodes:
        return False
    schema = node.target._schema
    name = schema.name.rpartition("::")[2]
    return name in _SOMETIMES_VIEWS or any(result.alias_info is not None for result in schema.returns)


def _like(values: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


@torch.library.register_fake("autopar_capture::enter")
def _(values: list[Tensor], key: int) -> list[Tensor]:
    return _like(values)


@torch.library.register_fake("autopar_capture::leave")
def _(values: list[Tensor], key: int) -> list[Tensor]:
    return _like(values)


@torch.library.register_fake("autopar_capture::again")
def _(values: list[Tensor], key: int, path: str) -> list[Tensor]:
    made = [what for kind, what in _current[-1].traced[key].results if kind == "made"]
    return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in made]


# -- what is a repetition
# ----------------------------------------------------------------------------------------------------------------


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                yield below, child
            else:
                yield from walk(child, below)

    return walk(model, "")


def _tied(model: nn.Module) -> set[int]:
    """Tensors with several names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    seen: set[int] = set()
    return {id(tensor) for _, tensor in named if id(tensor) in seen or seen.add(id(tensor))}  # type: ignore[func-returns-value]


def _has_hooks(module: nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict))


def _signature(leaves: list[Any], spec: Any) -> tuple[object, ...] | None:
    """What a block is called with, but for the values; None where that cannot be told."""
    described: list[object] = [spec, torch.is_grad_enabled(), torch.is_autocast_enabled()]
    seen: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            alike = seen.setdefault(id(leaf), place)
            described.append((alike, leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif (plain := _plain(leaf)) is not None:
            described.append(plain)
        else:
            return None
    return tuple(described)


def _plain(value: Any) -> object | None:
    """A value that can be compared at any time, with its type; None for any other."""
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):  # a function is equal to itself alone
        return type(value), value
    if isinstance(value, functools.partial):
        value = [value.func, value.args, sorted(value.keywords.items())]
    if isinstance(value, (list, tuple, torch.Size)):
        parts = [_plain(part) for part in value]
        return None if any(part is None for part in parts) else (type(value), *parts)
    return None


def _is_same(known: _Traced, block: nn.Module) -> bool:
    """Whether the forward of `block` would read what that of the block that was traced did."""
    modules = dict(block.named_modules())
    if {path: type(module) for path, module in modules.items()} != known.classes:
        return False
    if known.block is not block and _tensors(known.block) != _tensors(block):
        return False
    for (path, name), before in known.reads.items():
        now = vars(modules[path]).get(name, _MISSING)
        if now is not before and _comparable(now) != before:
            return False
    return True


def _comparable(value: Any) -> Any:
    """As attributes are kept: plain ones by value, any other as itself."""
    plain = _plain(value)
    return value if plain is None else plain


def _tensors(block: nn.Module) -> list[object]:
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return [*parameters, *((name, b.shape, b.dtype) for name, b in block.named_buffers())]


@contextmanager
def _reads_of(block: nn.Module) -> Iterator[tuple[dict[tuple[str, str], Any], dict[str, type], list[str]]]:
    """What the modules of a block read of their own attributes meanwhile, their classes, and what they write."""
    reads: dict[tuple[str, str], Any] = {}
    writes: list[str] = []
    paths = {id(module): path for path, module in block.named_modules()}
    classes = {path: type(module) for path, module in block.named_modules()}
    with contextlib.ExitStack() as stack:
        for cls, get, set_ in [(each, each.__getattribute__, each.__setattr__) for each in {*classes.values()}]:
            stack.enter_context(_replaced(cls, "__getattribute__", _noting_reads(cls, get, paths, reads, writes)))
            stack.enter_context(_replaced(cls, "__setattr__", _noting_writes(set_, paths, writes)))
        yield reads, classes, writes


@contextmanager
def _replaced(cls: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A method of a class replaced for the duration."""
    own = vars(cls).get(name, _MISSING)
    setattr(cls, name, function)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, own)


def _noting_reads(
    cls: type, get: Callable[..., Any], paths: Mapping[int, str], reads: dict[tuple[str, str], Any], writes: list[str]
) -> Callable[..., Any]:
    def getattribute(self: Any, name: str) -> Any:
        path = paths.get(id(self))
        if path is None:
            pass
        elif name == "__dict__":
            if sys._getframe(1).f_code not in _KNOWN:
                writes.append(path)
        elif name not in _OWN and not name.startswith("__"):
            own = object.__getattribute__(self, "__dict__")
            if name in own or not (hasattr(cls, name) or _is_registered(own, name)):
                reads[path, name] = _comparable(own.get(name, _MISSING))
        return get(self, name)

    return getattribute


def _noting_writes(set_: Callable[..., Any], paths: Mapping[int, str], writes: list[str]) -> Callable[..., Any]:
    def setattr_(self: Any, name: str, value: Any) -> None:
        if id(self) in paths:
            writes.append(f"{paths[id(self)]}.{name}")
        set_(self, name, value)

    return setattr_


_KNOWN = {nn.Module.__getattr__.__code__}
"""Looks into `__dict__` for parameters, buffers and modules only."""


def _is_registered(own: Mapping[str, Any], name: str) -> bool:
    return any(name in own[kind] for kind in ("_parameters", "_buffers", "_modules"))


def _rebuilt(found: _Traced, made: list[Tensor], given: list[Tensor]) -> Any:
    """A block's result."""
    rest = iter(made)
    leaves = [
        next(rest) if kind == "made" else given[what] if kind == "given" else what for kind, what in found.results
    ]
    return compat.tree_unflatten(leaves, found.result)


# -- writing them out
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Body:
    """The nodes of a traced block, in order, what it was given, and what it made."""

    nodes: list[fx.Node]
    given: list[fx.Node]
    made: list[fx.Node]


def _body(graph: fx.Graph, found: _Traced, names: Mapping[fx.Node, str]) -> _Body:
    enters = {node.args[1]: node for node in graph.nodes if node.target is _ENTER}
    leaves = {node.args[1]: node for node in graph.nodes if node.target is _LEAVE}
    enter, leave = enters[found.key], leaves.get(found.key)
    made: list[fx.Node] = list(leave.args[0]) if leave is not None else []
    inside: set[fx.Node] = set()
    waiting = list(made)
    while waiting:
        node = waiting.pop()
        if node in inside or node is enter:
            continue
        if node.op == "placeholder":
            _check_parameter(found, names.get(node, ""))
            continue
        if node.target in (_ENTER, _LEAVE, _AGAIN):
            raise NotRepeated(f"{found.path} reads what another block made")
        inside.add(node)
        waiting += node.all_input_nodes
    # What lies inside is read inside alone.
    picks = set(enter.users)
    for node in [*inside, enter]:
        for user in node.users:
            if user not in inside and user is not leave and user not in picks:
                raise NotRepeated(f"{user} reads {node}, inside {found.path}")
    order = [node for node in graph.nodes if node in inside and node not in picks]
    return _Body(order, list(enter.args[0]), made)


def _check_parameter(found: _Traced, name: str) -> None:
    blocks, own = found.path.rpartition(".")[0] + ".", found.path + "."
    if name.startswith(blocks) and not name.startswith(own):
        raise NotRepeated(f"{found.path} reads {name}")


def _insert(
    graph: fx.Graph,
    origins: dict[str, str],
    call: fx.Node,
    found: _Traced,
    body: _Body,
    names: Mapping[fx.Node, str],
    by_name: Mapping[str, fx.Node],
) -> None:
    """The block's nodes in place of a call of it, with the call's own parameters and arguments."""
    path, own = str(call.args[2]), found.path + "."
    env: dict[fx.Node, fx.Node] = {}

    def lookup(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        if node.op == "placeholder":
            name = names.get(node, "")
            return by_name[path + "." + name.removeprefix(own)] if name.startswith(own) else node
        if node.target is operator.getitem and node.args[0].target is _ENTER:  # type: ignore[union-attr]
            return call.args[0][node.args[1]]  # type: ignore[index,return-value]
        raise NotRepeated(f"{found.path} reads {node}")

    with graph.inserting_before(call):
        for node in body.nodes:
            new = graph.create_node(
                node.op,
                node.target,
                map_nodes(node.args, lookup),
                map_nodes(node.kwargs, lookup),
                name=_base(node.name),
            )
            new.meta = dict(node.meta)
            stack = node.meta.get("nn_module_stack") or {}
            new.meta["nn_module_stack"] = {
                _moved(key, found.path, path): (_moved(where, found.path, path), kind)
                for key, (where, kind) in stack.items()
            }
            origins[new.name] = _moved(origins.get(node.name, ""), found.path, path)
            env[node] = new
    _pass_through(graph, call, [lookup(node) for node in body.made])


def _pass_through(graph: fx.Graph, node: fx.Node, values: Any) -> None:
    """Whoever picks a result of `node` gets the value at that place."""
    for pick in list(node.users):
        pick.replace_all_uses_with(values[pick.args[1]])
        graph.erase_node(pick)
    graph.erase_node(node)


def _moved(text: str, source: str, target: str) -> str:
    """`model.layers.0.mlp` → `model.layers.7.mlp`."""
    if text == source or text.startswith((f"{source}.", f"{source} ", f"{source}@")):
        return target + text.removeprefix(source)
    return text


def _base(name: str) -> str:
    head, _, tail = name.rpartition("_")
    return head if head and tail.isdigit() else name
