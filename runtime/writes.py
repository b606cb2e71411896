"""A script's own hand in DTensors: `p.data = x`, `weight[3] = 0`, `weight[10].copy_(row)`, `p.mul_(mask)`, `p * mask`.

    p.data = x                   the pieces of x from now on; torch changes nothing, without a word
    p.mul_(plain), p * plain     a plain tensor, the same on every rank, is a DTensor that every rank has whole
    p[3] = 0, p.view(-1)[:4]     what no piece can do alone is done on the whole, which is gathered, and cut again
    p[10].zero_()                a part that torch copies out of pieces writes back into them, as a view would

Elementwise operators stay in pieces. Whatever is gathered is gathered on every rank, and said once. A parameter whose
experts lie by load is taken part by part, and with plain tensors, as a whole in the model's order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import (
    handle,
    is_pointwise,
    local_tensor,
    settle,
    split_mixed_gradients,
    storage_key,
    tree_leaves,
    tree_map,
)  # fmt: skip
from autopar.runtime import lost_writes
from autopar.runtime.any_operator import say_once, take_gradients, take_operators
from autopar.runtime.clipping import check_of_all_stages
from autopar.runtime.expert_layers import LAYER, from_slots, layer_of
from autopar.runtime.seen_whole import SeenWhole, Term, cut, in_pieces_as, whole

VIEWS = (
    "__getitem__", "chunk", "diagonal", "expand", "flatten", "mT", "movedim", "narrow", "permute", "ravel", "reshape",
    "select", "split", "squeeze", "swapaxes", "T", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold",
    "unsqueeze", "view", "view_as",
)  # fmt: skip
"""What eager answers with a view where it can: writing to it writes to the tensor."""
_NO_WRITES = frozenset({
    "apply_", "as_strided_", "detach_", "map_", "map2_", "rename_", "requires_grad_", "resize_", "resize_as_",
    "resize_as_sparse_", "set_", "share_memory_", "sparse_resize_", "sparse_resize_and_clear_", "squeeze_", "swapaxes_",
    "swapdims_", "t_", "transpose_", "unsqueeze_",
})  # fmt: skip
"""Methods with a name like those that write values, which write none, or do what no piece can follow."""
_BY_ELEMENT = frozenset({
    "__iadd__", "__idiv__", "__imul__", "__ipow__", "__isub__", "__itruediv__", "absolute_", "copy_", "divide_",
    "fill_", "multiply_", "negative_", "subtract_", "zero_",
})  # fmt: skip
"""Beside the operators that torch says are. Anything else DTensor may do to a copy, or by pieces of other sizes,
without a word; and numbers that are drawn are those of the whole, as in one process.
"""
MIXED = (
    "__add__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__matmul__", "__mul__", "__ne__", "__pow__",
    "__radd__", "__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "add", "clamp", "div", "dot", "eq",
    "ge", "gt", "le", "lerp", "lt", "matmul", "maximum", "minimum", "mm", "mul", "mv", "ne", "pow", "sub", "where",
)  # fmt: skip
"""What a script computes of parameters and gradients together with tensors of its own. Where one of those has a
gradient to get, all of it is computed on whole tensors: a gradient in pieces would go through a graph that has none.
"""
_ATEN = torch.ops.aten
DRAWN = (
    _ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype,
    _ATEN.bernoulli.default, _ATEN.bernoulli.p, _ATEN.native_dropout.default, _ATEN.normal.Tensor_float,
    _ATEN.normal.Tensor_Tensor, _ATEN.normal.float_Tensor,
)  # fmt: skip
"""Numbers that a script draws for a tensor in pieces (`p.add_(torch.randn_like(p))`): torch would have each rank draw
its piece, the same numbers where ranks are seeded alike. They are those of the whole, as in one process.
"""
DRAWN_IN_PLACE = (
    _ATEN.bernoulli_.float, _ATEN.bernoulli_.Tensor, _ATEN.uniform_.default, _ATEN.normal_.default,
    _ATEN.random_.default, _ATEN.exponential_.default,
)  # fmt: skip
"""The same inside of other functions (`F.dropout(p)`): methods that a script calls are taken before."""
_OPERATORS = ("__iadd__", "__idiv__", "__imul__", "__ipow__", "__isub__", "__itruediv__", "__setitem__")
_OF_PIECES = ("mixed torch.Tensor and DTensor", "placement", "harding", "not supported with DTensor")
"""What torch says where it has no way on pieces; it does before anything is computed or sent."""


class _View(NamedTuple):
    """What a part of a DTensor was taken from, and how it is taken of a whole tensor."""

    base: DTensor
    take: Callable[[Tensor], Tensor]


def take_writes() -> None:
    """Have DTensors take writes as whole tensors would; idempotent.

    The class itself is given other methods: a subclass would leave torch's quick way of dispatching, and lose itself at
    each operator.
    """
    if getattr(DTensor, "_autopar_writes", False):
        return
    kind: Any = DTensor
    kind._autopar_writes = True
    in_place = [n for n in dir(Tensor) if n.endswith("_") and not n.endswith("__") and not n.startswith("_")]
    for name in (*in_place, *_OPERATORS):
        if name not in _NO_WRITES and hasattr(Tensor, name):
            setattr(kind, name, _writing(getattr(Tensor, name), name in _BY_ELEMENT or is_pointwise(name)))
    for name in MIXED:
        setattr(kind, name, _mixing(getattr(Tensor, name)))
    for name in VIEWS:
        original = getattr(Tensor, name)
        if callable(original):
            setattr(kind, name, _viewing(original))
        else:
            setattr(kind, name, property(_viewing(original.__get__)))
    kind.new_empty = _making(Tensor.new_empty)
    take_operators()
    split_mixed_gradients(check_of_all_stages)
    kind.data = property(_carrying(Tensor.data.__get__), _set_data)  # type: ignore[attr-defined]
    kind.detach = _carrying(Tensor.detach)
    kind.full_tensor = _in_order(DTensor.full_tensor)
    kind.backward, kind.__len__ = _backward, _length
    for operator in (torch.ops.aten.eye.out, torch.ops.aten.eye.m_out):
        handle(operator, _write_out)
    handle(torch.ops.aten._is_any_true.default, _is_any_true)
    for operator in DRAWN:
        handle(operator, _draw)
    for operator in DRAWN_IN_PLACE:
        handle(operator, _draw_in_place)
    handle(_ATEN.allclose.default, lambda operator, args, kwargs: operator(*tree_map(_whole, args), **kwargs))


def _set_data(self: DTensor, value: Any) -> None:
    """The memory of the value's pieces, where they lie as this tensor's do; else pieces that are cut of it.

    Raises:
        AutoparError: a value of another shape, dtype or device type.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    held = local_tensor(self)
    if tuple(value.shape) != tuple(self.shape) or value.dtype != self.dtype:
        raise AutoparError(
            "data of another shape or dtype is put into a tensor that lies in pieces",
            values=f"{tuple(value.shape)} {value.dtype} for {tuple(self.shape)} {self.dtype}",
            remedy="Do it before autopar.compile, and compile then; values of the same shape and dtype may be put in",
        )
    source: Any = value.detach()
    if held.is_meta or (type(source) is DTensor and local_tensor(source).is_meta):
        raise AutoparError(
            "data is put into a parameter that has no weights yet: they are made at the first batch",
            remedy="Call the model first, or give autopar.compile example_inputs",
        )
    if isinstance(source, SeenWhole | DTensor):
        source = in_pieces_as(source, self)
    else:
        source = cut(source.to(held.device), self)
    held.data = local_tensor(source).to(held.device)


def _writing(original: Callable[..., Any], by_element: bool) -> Callable[..., Any]:
    @wraps(original)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not DTensor:
            return original(self, *args, **kwargs)
        if torch.is_grad_enabled() and self.requires_grad:  # refused, or a part of a graph
            return original(self, *args, **kwargs)
        settle(self)
        view: _View | None = vars(self).get("_autopar_view")
        if view is not None:
            return _write_back(self, view, original, args, kwargs)
        if by_element and not _is_out_of_order(self, args, kwargs):
            try:
                pieces, words = tree_map(partial(_replicated, mesh=self.device_mesh), (args, kwargs))
                return original(self, *pieces, **words)
            except (NotImplementedError, RuntimeError) as error:
                if not _is_of_pieces(error):
                    raise
        elif original is Tensor.__setitem__ and _is_mask(self, *args):
            return self.masked_fill_(*args)
        args, kwargs = tree_map(_whole, (args, kwargs))
        _write_whole(self, lambda x: original(x, *args, **kwargs))
        return self

    return write


def _is_mask(x: DTensor, index: Any, value: Any) -> bool:
    """Whether what is set are elements that a mask of the same shape chooses, to a number."""
    of_same_shape = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == x.shape
    return of_same_shape and isinstance(value, int | float)


def _mixing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def mix(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is DTensor:
            is_in_graph = torch.is_grad_enabled() and any(_is_plain(x, 0) and x.requires_grad for x in args)
            if is_in_graph or _is_out_of_order(self, args, kwargs):
                self, args, kwargs = tree_map(_whole, (self, args, kwargs))
            elif any(_is_plain(x) for x in args):
                args, kwargs = tree_map(partial(_replicated, mesh=self.device_mesh), (args, kwargs))
        return original(self, *args, **kwargs)

    return mix


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    """`orthogonal_` of torch.nn.init draws what it works on into a tensor of its own: a plain one, on every rank."""

    @wraps(original)
    def make(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        is_drawn = type(self) is DTensor and sys._getframe(1).f_globals.get("__name__") == torch.nn.init.__name__
        return original(local_tensor(self) if is_drawn else self, *args, **kwargs)

    return make


def _write_out(operator: Any, args: Any, kwargs: Any) -> Any:
    """An operator that writes its result into a DTensor, and would make the piece as large as the whole."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    _write_whole(out, lambda x: operator(*args, **kwargs, out=x))
    return out


def _draw(operator: Any, args: Any, kwargs: Any) -> Any:
    """What every rank draws of the whole, in pieces. Collective where the numbers depend on values."""
    like = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))
    args, kwargs = tree_map(_shape_of if "_like" in operator.name() else _whole, (args, kwargs))
    return tree_map(lambda x: cut(x, like), operator(*args, **kwargs))


def _draw_in_place(operator: Any, args: Any, kwargs: Any) -> Any:
    others, words = tree_map(_whole, (args[1:], kwargs))
    _write_whole(args[0], lambda held: operator(held, *others, **words))
    return args[0]


def _shape_of(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device=local_tensor(x).device) if isinstance(x, DTensor) else x


def _is_any_true(operator: Any, args: Any, kwargs: Any) -> Any:
    """What `torch.autograd.set_detect_anomaly` asks of each gradient. Collective: every rank raises, or none."""
    return args[0].any().full_tensor()


def _write_whole(x: DTensor, act: Callable[[Tensor], object]) -> None:
    """`act` on the whole tensor, of which this rank keeps its piece. Collective."""
    say_once(x, "write into a part of a tensor")
    with torch.no_grad():
        held = _whole(x.detach()).clone()
        act(held)
        local_tensor(x).copy_(local_tensor(cut(held, x)))
    torch.autograd.graph.increment_version(x)


def _write_back(x: DTensor, view: _View, original: Callable[..., Any], args: Any, kwargs: Any) -> DTensor:
    """A write to a part that torch copied out of pieces: into them, and into the copy."""
    args, kwargs = tree_map(_whole, (args, kwargs))
    root, take = view
    while (above := vars(root).get("_autopar_view")) is not None:
        root, take = above.base, _after(above.take, take)
    _write_whole(root, lambda held: original(take(held), *args, **kwargs))
    with torch.no_grad():
        local_tensor(x).copy_(local_tensor(cut(take(_whole(root.detach())), x)))
    lost_writes.written_back(x)
    return x


def _after(first: Callable[[Tensor], Any], then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: then(first(x))


def _viewing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def view(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not DTensor:
            return original(self, *args, **kwargs)
        try:
            found = original(self, *args, **kwargs) if layer_of(self) is None else None
        except (NotImplementedError, RuntimeError) as error:
            if not _is_of_pieces(error):
                raise
            found = None
        if found is None:
            args, kwargs = tree_map(_whole, (args, kwargs))
            found = tree_map(partial(_as_dtensor, mesh=self.device_mesh), original(self.full_tensor(), *args, **kwargs))
        if isinstance(found, tuple | list):
            for index, each in enumerate(found):
                _note(each, self, _after(lambda x: original(x, *args, **kwargs), itemgetter(index)))
        else:
            _note(found, self, lambda x: original(x, *args, **kwargs))
        return found

    return view


def _carrying(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same tensor outside of the graph, which is the same part of another."""

    @wraps(original)
    def same(self: DTensor, *args: Any) -> Any:
        found = original(self, *args)
        view, layer = vars(self).get("_autopar_view"), vars(self).get(LAYER)
        if layer is not None and type(found) is DTensor:
            setattr(found, LAYER, layer)
        if view is not None and type(found) is DTensor:
            found._autopar_view = view  # type: ignore[attr-defined]
            lost_writes.watch(found, self)
        return found

    return same


def _in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if self.grad_fn is not None:
            take_gradients(self)
        return from_slots(original(self, *args, **kwargs), self)

    return full_tensor


def _backward(self: DTensor, *args: Any, **kwargs: Any) -> None:
    take_gradients(self)
    Tensor.backward(self, *args, **kwargs)


def _length(self: DTensor) -> int:
    if self.ndim == 0:
        raise TypeError(
            "len() of a 0-d DTensor, which torch.tensor asks of numbers in a list: torch.stack(numbers) joins them, or "
            "torch.tensor([x.item() for x in numbers])"
        )
    return Tensor.__len__(self)


def _is_out_of_order(x: DTensor, args: Any, kwargs: Any) -> bool:
    """Whether a tensor's rows lie otherwise than those of a plain one beside it."""
    return layer_of(x) is not None and any(map(_is_plain, tree_leaves((args, kwargs))))


def _note(found: Any, base: DTensor, take: Callable[[Tensor], Tensor]) -> None:
    """Whose part a DTensor is, where eager would give a view and torch has made a copy of pieces."""
    if type(found) is not DTensor or found is base:
        return
    is_view = storage_key(local_tensor(found)) == storage_key(local_tensor(base))
    if is_view and vars(base).get("_autopar_view") is None:
        return
    shown = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    if storage_key(take(shown)) == storage_key(shown):
        found._autopar_view = _View(base, take)  # type: ignore[attr-defined]
        lost_writes.watch(found, base)


def _is_plain(x: Any, least_dims: int = 1) -> bool:
    return isinstance(x, Tensor) and x.ndim >= least_dims and (not isinstance(x, DTensor) or isinstance(x, SeenWhole))


def _replicated(x: Any, mesh: DeviceMesh) -> Any:
    """A plain tensor that every rank has as a DTensor of this mesh."""
    if isinstance(x, SeenWhole):
        x = whole(x)
    if not _is_plain(x) or (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _as_dtensor(x.detach().as_subclass(Tensor).to(mesh.device_type), mesh)


def _as_dtensor(x: Any, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False) if isinstance(x, Tensor) else x


def _is_of_pieces(error: Exception) -> bool:
    return any(words in str(error) for words in _OF_PIECES)


def _whole(x: Any) -> Any:
    x = whole(x)
    if isinstance(x, Term):
        return x.as_subclass(Tensor)
    return x.full_tensor() if isinstance(x, DTensor) else x
