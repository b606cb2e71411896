"""What a function of tensors on meta computes, recorded as a flat graph: as torch's `make_fx` has it, names included.

    lambda x, w: (x @ w).relu()      →      arg0_1, arg1_1;  mm = aten.mm(arg0_1, arg1_1);  relu = aten.relu(mm)

Tensors on meta have a shape, a dtype and no data, so nothing is computed. `make_fx` makes of each a fake tensor that
stands for it, keeps tables of what operators gave before, and notes much of each node that nobody reads here: nine
tenths of what recording took. What is not plain (values, sizes that nobody knows, tensors of elsewhere) is refused, so
that whoever asks can have torch record it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

# How results of convolutions lie, which only fake tensors tell.
from torch._subclasses.fake_tensor import FakeTensorMode

# Gradients of views that are written are views of the same kind, not strides.
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils import _pytree as pytree

# Modes see operators below autograd; nothing public does.
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.base.recent import Recent

_aten = torch.ops.aten


class NotPlain(Exception):
    """Something that is no operator on recorded tensors of known sizes."""


class Recorder(TorchDispatchMode):
    """While a function runs: `graph` gets a node for each operator, with what it gives on meta in `meta["val"]`.

    decompositions: what is recorded in the place of an operator.
    """

    def __init__(self, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.count = 0
        """How many nodes there are."""
        self._decompositions = decompositions
        self._nodes: dict[int, fx.Node] = {}
        self._held: list[Tensor] = []
        self._kinds: dict[Any, tuple[bool, str]] = {}

    def given(self, value: Tensor) -> None:
        """An argument of the function."""
        self._stands_for(value, self.graph.placeholder(f"arg{self.count}_1"))
        self.count += 1

    def node_of(self, value: Any) -> fx.Node | None:
        """The node that stands for a tensor; None where it is not recorded."""
        return self._nodes.get(id(value))

    def returns(self, results: Any) -> None:
        """What the function gives: tensors in tuples, lists and dicts."""
        self.graph.output(pytree.tree_map_only(Tensor, self._known, results))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (apart := self._decompositions.get(func)) is not None:
            with self:
                found = apart(*args, **kwargs)
            if found is not NotImplemented:
                return found
        composite, name = self._kind(func)
        if composite:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        given = tuple([self._recorded(each) for each in args])
        named = {key: self._recorded(each) for key, each in kwargs.items()}
        node = self.graph.create_node("call_function", func, given, named, name)
        self.count += 1
        found = _LAID.get(func, _called)(func, args, kwargs)
        self._made(found, node)
        return found

    def _kind(self, func: Any) -> tuple[bool, str]:
        """Whether autograd takes an operator apart, which it may be asked for below autograd; and what it is called."""
        kind = self._kinds.get(func)
        if kind is None:
            composite = not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
            name = self.graph._target_to_str(func.overloadpacket.__name__)
            kind = self._kinds[func] = composite, name
        return kind

    def _recorded(self, value: Any) -> Any:
        """An operand as a node has it."""
        if isinstance(value, Tensor):
            return self._known(value)
        if isinstance(value, list | tuple):
            return [self._recorded(each) for each in value]
        if isinstance(value, _UNKNOWN):
            raise NotPlain(f"{value} is known only when a program runs")
        return value

    def _known(self, value: Tensor) -> fx.Node:
        node = self._nodes.get(id(value))
        if node is None:
            raise NotPlain("a tensor that is made elsewhere")
        return node

    def _made(self, value: Any, node: fx.Node) -> None:
        """A node's results, each of which has one of its own where there are several."""
        if isinstance(value, Tensor):
            self._stands_for(value, node)
            return
        if isinstance(value, _UNKNOWN):
            raise NotPlain(f"{node.target} gives a number that is known only when a program runs")
        if not isinstance(value, list | tuple):
            return
        node.meta["val"] = type(value)([each.detach() if isinstance(each, Tensor) else each for each in value])
        for place, each in enumerate(value):
            part = self.graph.create_node("call_function", operator.getitem, (node, place), {})
            self.count += 1
            self._made(each, part)

    def _stands_for(self, value: Tensor, node: fx.Node) -> None:
        if not value.is_meta or value.layout is not torch.strided:
            raise NotPlain("a tensor with values, or none that lies in a row")
        # Nobody else is to get its number while it is looked up by that.
        self._held.append(value)
        self._nodes[id(value)] = node
        node.meta["val"] = value.detach()


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _as_convolutions_lie(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives, lying as where it is computed, which on meta is not asked: reshaping behind it copies or
    not by that.
    """
    key = (func, _frozen(args), _frozen(kwargs))
    types = _KNOWN.get(key, lambda: _laid(func, args, kwargs))
    made = [None if each is None else torch.empty_strided(*each[:2], dtype=each[2], device="meta") for each in types]
    return tuple(made) if func is _aten.convolution_backward.default else made[0]


def _laid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any, torch.dtype] | None]:
    mode = FakeTensorMode()
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: mode.from_tensor(x.detach()), (args, kwargs))
    with mode:
        found = func(*args, **kwargs)
    leaves = found if isinstance(found, tuple) else (found,)
    return [None if each is None else (tuple(each.shape), each.stride(), each.dtype) for each in leaves]


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


_LAID: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.convolution.default: _as_convolutions_lie, _aten.convolution_backward.default: _as_convolutions_lie,
}  # fmt: skip
_KNOWN: Recent[Any, list[tuple[Any, Any, torch.dtype] | None]] = Recent(4096)
_UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def current() -> Recorder | None:
    """Who records what this thread computes on meta."""
    return _CURRENT.get()


def recorded(
    function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]], arguments: Sequence[Tensor]
) -> fx.Graph:
    """The graph of what `function` computes of these tensors on meta; gradients that it asks for belong to it.

    Raises:
        NotPlain: what it does is no flat graph of operators on tensors of known sizes.
    """
    recorder = Recorder(decompositions)
    for each in arguments:
        recorder.given(each)
    token = _CURRENT.set(recorder)
    try:
        with recorder, _force_original_view_tracking(True):
            results = function(*arguments)
    finally:
        _CURRENT.reset(token)
    recorder.returns(results)
    return recorder.graph
