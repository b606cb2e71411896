"""What an operator does to terms: forms that are equal for calls that do the same to the elements."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.op_call import OpCall, TensorSpec, parameters_of
from autopar.ir.terms import NOTHING, ORDER, SAME, SUM, Form, Shape, digest, elementwise, reshaped, viewed


def form_of(call: OpCall, index: int) -> Form:
    """What an operator's result `index` is of its operands."""
    name = call.name.removesuffix(".default")
    maker = _FORMS.get(name)
    found = (maker(call, index) if maker is not None else None) or _operator(call, index)
    if found.kind in ("op", "sum") and len(call.results) == 1 and torch.Tag.pointwise in call.target.tags:
        return _of_elements(call, found)
    return found


def _of_elements(call: OpCall, form: Form) -> Form:
    """The same where the elements of all operands pair off: then it does not matter in which shape they are."""
    shape = call.result.shape
    if any(spec.shape not in (shape, ()) for spec in call.operands):
        return form
    return elementwise(form, shape, tuple(spec.shape == () for spec in call.operands))


def _around(shape: Shape, first: int, last: int) -> Shape:
    """A shape in three: what is before the dims from `first` to `last`, they, what is after."""
    return math.prod(shape[:first]), math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])


def summed_over(dim: int, shape: Shape) -> Form:
    """What `sum([dim], keepdim=True)` of a tensor of this shape is."""
    return _over("aten.sum", [], shape, [dim], (*shape[:dim], 1, *shape[dim + 1 :]))


def _over(name: str, words: Sequence[str], shape: Shape, dims: Sequence[int], made: Shape) -> Form:
    """A reduction of a tensor of this shape over dims."""
    first, last = min(dims), max(dims)
    if len(dims) <= last - first:
        left = tuple(size for dim, size in enumerate(shape) if dim not in dims)
        return reshaped(_op(name, [f"dim={sorted(dims)}", *words], 0), [None], (left, made))
    outer, size, inner = _around(shape, first, last)
    return reshaped(_op(name, words, 0), [(shape, (outer, size, inner))], ((outer, inner), made))


_OF_THE_MACHINE = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that say nothing of the value."""

_SIZES = frozenset({"size", "sizes", "shape"})
"""Arguments that are the shape of the result."""
_TO_THE_END = sys.maxsize


def _operator(call: OpCall, index: int) -> Form:
    """The operator's name, and every argument that is not its default."""
    words = []
    result = call.results[index]
    given, count = call.kwargs, len(call.args)
    for place, (name, default) in enumerate(_said(call.target)):
        if place < count:
            value = call.args[place]
        elif name in given:
            value = given[name]
        else:
            value = None
            if name not in _SIZES:
                continue
        if name in _OF_THE_MACHINE:
            continue
        if name in _SIZES and result is not None:
            value = list(result.shape)  # -1 has many readings
        if value in (None, [], _TO_THE_END) or (text := _text(value)) == default:
            continue
        words.append(f"{name}={text}")
    return _op(call.name.removesuffix(".default").replace(".Scalar", ".Tensor"), words, index)


@lru_cache(maxsize=1 << 12)
def _said(target: Any) -> tuple[tuple[str, str], ...]:
    """The name of each argument, and the text of its default."""
    return tuple((each.name, _text(each.default if each.has_default else None)) for each in parameters_of(target))


def _op(name: str, words: Sequence[str], index: int) -> Form:
    return _interned(f"{name}({', '.join(words)})[{index}]")


@lru_cache(maxsize=1 << 14)
def _interned(text: str) -> Form:
    return Form("op", digest(text))


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return "T"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, complex):  # written and read again, a zero may have another sign
        return f"{_text(value.real)}, {_text(value.imag)} j"
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def _first(call: OpCall) -> TensorSpec:
    return call.operands[0]


def _unchanged(call: OpCall, index: int) -> Form | None:
    """The same numbers, but for rounding: a float of another precision is no other value."""
    made, given = call.result, _first(call)
    floats = made.dtype.is_floating_point and given.dtype.is_floating_point
    return SAME if made.shape == given.shape and (floats or made.dtype == given.dtype) else None


def _viewed(call: OpCall, index: int) -> Form | None:
    return viewed(_first(call).shape, call.result.shape)


def _transposed(call: OpCall, index: int) -> Form | None:
    ndim = _first(call).ndim
    dims = list(range(ndim))
    if call.name.startswith("aten.permute"):
        dims = [dim % ndim for dim in call.arg("dims")]
    elif ndim > 1:
        one, other = (call.arg("dim0", 0) % ndim, call.arg("dim1", 1) % ndim)
        dims[one], dims[other] = dims[other], dims[one]
    return Form("order", ORDER, tuple(dims))


def _added(call: OpCall, index: int) -> Form | None:
    if call.arg("alpha", 1) != 1:
        return None
    if len(call.operands) == 2:
        return SUM
    number = call.arg("other")
    return Form("sum", SUM.key, (number,)) if type(number) is int else None


def _sliced(call: OpCall, index: int) -> Form | None:
    source = _first(call)
    dim = call.arg("dim", 0) % source.ndim
    size = source.shape[dim]
    start, end, step = call.arg("start") or 0, call.arg("end"), call.arg("step", 1)
    start, end = _inside(start, size), size if end is None else _inside(end, size)
    return _piece(source, dim, start, end, step)


def _inside(place: int, size: int) -> int:
    return min(max(place + size if place < 0 else place, 0), size)


def _part(call: OpCall, index: int) -> Form | None:
    source = _first(call)
    dim = call.arg("dim", 0) % source.ndim
    ends = [spec.shape[dim] for spec in call.results if spec is not None]
    start = sum(ends[:index])
    return _piece(source, dim, start, start + ends[index], 1)


def _piece(source: TensorSpec, dim: int, start: int, end: int, step: int) -> Form:
    shape = source.shape
    if (start, end, step) == (0, shape[dim], 1):
        return SAME
    count = len(range(start, end, step))
    made = (*shape[:dim], count, *shape[dim + 1 :])
    if count == 1:
        return _one_of(shape, dim, start, made)
    outer, size, inner = _around(shape, dim, dim)
    form = _op("slice", [f"{start}", f"{end}", f"{step}"], 0)
    return reshaped(form, [(shape, (outer, size, inner))], ((outer, count, inner), made))


def _one_of(shape: Shape, dim: int, place: int, made: Shape) -> Form:
    outer, size, inner = _around(shape, dim, dim)
    form = Form("pick", digest(f"pick {place}"), (place,))
    return reshaped(form, [(shape, (outer, size, inner))], ((outer, inner), made))


def _picked(call: OpCall, index: int) -> Form | None:
    source = _first(call)
    dim = call.arg("dim", 0) % source.ndim
    place = call.arg("index", index)
    place += source.shape[dim] if place < 0 else 0
    return _one_of(source.shape, dim, place, (*source.shape[:dim], *source.shape[dim + 1 :]))


def _stacked(call: OpCall, index: int) -> Form | None:
    shape = _first(call).shape
    dim, count = call.arg("dim", 0) % (len(shape) + 1), len(call.operands)
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim:])
    made = ((outer, count, inner), (*shape[:dim], count, *shape[dim:]))
    return reshaped(Form("stack", digest("stack")), [(shape, (outer, inner))] * count, made)


def _joined(call: OpCall, index: int) -> Form | None:
    shapes = [spec.shape for spec in call.operands]
    dim = call.arg("dim", 0) % len(call.result.shape)
    if any(len(shape) <= dim for shape in shapes):
        return None
    made = _around(call.result.shape, dim, dim), call.result.shape
    return reshaped(_op("cat", [], 0), [(shape, _around(shape, dim, dim)) for shape in shapes], made)


def _reduced(call: OpCall, index: int) -> Form | None:
    """A reduction: whether it keeps its dims, and in which shape the others are, does not matter."""
    source = _first(call)
    dims = call.arg("dim", None)
    dims = [dims] if isinstance(dims, int) else list(dims or range(source.ndim))
    words = [] if call.result.dtype == source.dtype else [f"dtype={call.result.dtype}"]
    name = call.name.partition(".dim")[0].removesuffix(".default")
    if not source.ndim:
        return None
    return _over(name, words, source.shape, [dim % source.ndim for dim in dims], call.result.shape)


def _nothing(call: OpCall, index: int) -> Form | None:
    return NOTHING


_FORMS: Mapping[str, Callable[[OpCall, int], Form | None]] = {
    **dict.fromkeys(
        ("aten.alias", "aten.detach", "aten.clone", "aten.contiguous", "aten.lift_fresh", "aten._to_copy",
         "aten.expand"),
        _unchanged,
    ),
    **dict.fromkeys(
        ("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.unsqueeze", "aten.squeeze",
         "aten.squeeze.dim", "aten.squeeze.dims", "aten.flatten.using_ints", "aten.unflatten.int"),
        _viewed,
    ),
    **dict.fromkeys(("aten.t", "aten.transpose.int", "aten.permute"), _transposed),
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), _added),
    "aten.slice.Tensor": _sliced,
    **dict.fromkeys(("aten.split.Tensor", "aten.split_with_sizes", "aten.chunk"), _part),
    **dict.fromkeys(("aten.select.int", "aten.unbind.int"), _picked),
    "aten.stack": _stacked,
    "aten.cat": _joined,
    **dict.fromkeys(
        ("aten.sum", "aten.sum.dim_IntList", "aten.mean", "aten.mean.dim", "aten.amax", "aten.amin", "aten.any",
         "aten.any.dim", "aten.any.dims", "aten.all", "aten.all.dim", "aten.all.dims"),
        _reduced,
    ),
    **dict.fromkeys(("aten.zeros", "aten.zeros_like", "aten.new_zeros"), _nothing),
}  # fmt: skip
