"""Views, and the operators that move whole pieces: reshapes, permutations, slices, concatenations, paddings.

A reshape is matched dim against dim into the factors that both sides are made of. A slice, split or concatenation into
*equal* pieces is (c f): c tells the piece, and f, the place within it, may be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import bind, make_rule, normal_dim, replicate, rule

_FIRST = (frozenset({0}),)
Names = list[tuple[str, ...]]


def match_shapes(source: Sequence[int], target: Sequence[int]) -> tuple[Names, Names, dict[str, int], set[str]]:
    """The factors that two shapes of equally many elements share, in row-major order.

    (6, 4) and (2, 12) are (2 3) 4 and 2 (3 4). Where neither remainder divides the other, as in (6, 4) and (8, 3), what
    both have in front is shared, and the rest up to the next common boundary is blocked. Returns the dims of both
    sides, the sizes, and the names of the blocked factors.
    """
    sizes: dict[str, int] = {}
    blocked: set[str] = set()
    sides = ([[] for _ in source], [[] for _ in target])  # type: tuple[list[list[str]], list[list[str]]]

    def new(size: int, *places: list[str], block: bool = False) -> None:
        name = f"d{len(sizes)}"
        sizes[name] = size
        blocked.update({name} if block else ())
        for place in places:
            place.append(name)

    if math.prod(source) == 0:
        for side, shape in zip(sides, (source, target)):
            for place, size in zip(side, shape):
                new(size, place, block=True)
    else:
        _match(list(source), list(target), sides, new)
    return [tuple(dim) for dim in sides[0]], [tuple(dim) for dim in sides[1]], sizes, blocked


def _match(left: list[int], right: list[int], sides: tuple[list[list[str]], list[list[str]]], new: object) -> None:
    assert callable(new)
    i = j = 0
    while True:
        while i < len(left) and left[i] == 1:
            i += 1
        while j < len(right) and right[j] == 1:
            j += 1
        if i == len(left):
            return
        common = math.gcd(left[i], right[j])
        if common > 1:
            new(common, sides[0][i], sides[1][j])
            left[i] //= common
            right[j] //= common
        if left[i] > 1 and right[j] > 1:
            i, j = _block_to_boundary(left, right, i, j, sides, new)


def _block_to_boundary(
    left: list[int], right: list[int], i: int, j: int, sides: tuple[list[list[str]], list[list[str]]], new: object
) -> tuple[int, int]:
    """Block the dims from i and j on, until both sides have walked the same number of elements."""
    assert callable(new)
    a, b, last_i, last_j = left[i], right[j], i, j
    while a != b:
        if a < b:
            last_i += 1
            a *= left[last_i]
        else:
            last_j += 1
            b *= right[last_j]
    for side, shape, first, last in ((sides[0], left, i, last_i), (sides[1], right, j, last_j)):
        for k in range(first, last + 1):
            if shape[k] > 1:
                new(shape[k], side[k], block=True)
            shape[k] = 1
    return last_i + 1, last_j + 1


@rule(
    "aten.view.default",
    "aten.view_copy.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten._reshape_copy.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
)
def reshape(call: OpCall) -> Rule:
    """`view`, and everything else that only regroups dims."""
    source, result = call.operands[0], call.result
    left, right, sizes, blocked = match_shapes(source.shape, result.shape)
    if call.name == "aten.squeeze.default":
        blocked = set(sizes)  # a dim that becomes 1 on a rank would go, too
    elif call.name in ("aten.squeeze.dim", "aten.squeeze.dims"):
        dims = call.arg("dim")
        for dim in [dims] if isinstance(dims, int) else dims:
            if source.ndim:
                blocked |= set(left[normal_dim(dim, source.ndim)])
    size_name = {"aten.reshape.default": "shape", "aten.unflatten.int": "sizes"}.get(call.name, "size")
    shape_args = (
        ((call.path(size_name), 0),) if call.arg(size_name) is not None and "unflatten" not in call.name else ()
    )
    size_args = ()  # type: tuple[tuple[tuple[int | str, ...], str], ...]
    if call.name == "aten.unflatten.int":
        dim = normal_dim(call.arg("dim"), source.ndim)
        for offset in range(len(call.arg("sizes"))):
            blocked |= set(right[dim + offset]) if len(right[dim + offset]) > 1 else set()
            size_args += tuple(((*call.path("sizes"), offset), name) for name in right[dim + offset])
    return make_rule(
        call, [left], [right], sizes, blocked=blocked, linear=_FIRST, alias="copy" not in call.name,
        shape_args=shape_args, size_args=size_args, op_class="view",
    )  # fmt: skip


@rule("aten.expand.default", "aten.expand_copy.default")
def expand(call: OpCall) -> Rule:
    """Dims that are new, or were 1, are factors of the result alone."""
    source, result = call.operands[0], call.result
    names = [f"d{i}" if size != 1 else "" for i, size in enumerate(result.shape)]
    own = names[len(names) - source.ndim :]
    operand = [name if size != 1 else "" for name, size in zip(own, source.shape)]
    return make_rule(
        call, [operand], [names], {n: s for n, s in zip(names, result.shape) if n}, linear=_FIRST,
        alias=call.name == "aten.expand.default", shape_args=((call.path("size"), 0),), op_class="view",
    )  # fmt: skip


@rule("aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.movedim.int", "aten.mT.default")
def permute(call: OpCall) -> Rule:
    """The same dims in another order."""
    source = call.operands[0]
    order = list(range(source.ndim))
    if call.name == "aten.permute.default":
        order = [normal_dim(dim, source.ndim) for dim in call.arg("dims")]
    elif call.name == "aten.movedim.int":
        moved = order.pop(normal_dim(call.arg("source"), source.ndim))
        order.insert(normal_dim(call.arg("destination"), source.ndim), moved)
    elif source.ndim:
        pair = {"aten.t.default": (0, source.ndim - 1), "aten.mT.default": (-2, -1)}.get(call.name)
        a, b = pair or (call.arg("dim0"), call.arg("dim1"))
        order[a], order[b] = order[b], order[a]
    names = _names(source.shape)
    sizes = dict(zip(names, source.shape))
    return make_rule(call, [names], [[names[i] for i in order]], sizes, linear=_FIRST, alias=True, op_class="view")


def _names(shape: Sequence[int]) -> list[str]:
    return [f"d{i}" for i in range(len(shape))]


@rule("aten.select.int", "aten.select_copy.int", "aten.unbind.int")
def select(call: OpCall) -> Rule:
    """One (or each) index of a dim: that dim cannot be split."""
    shape = call.operands[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    names = _names(shape)
    rest = names[:dim] + names[dim + 1 :]
    return make_rule(
        call, [names], [rest] * len(call.results), dict(zip(names, shape)), blocked={names[dim]}, linear=_FIRST,
        alias="copy" not in call.name, op_class="view",
    )  # fmt: skip


@rule("aten.select_backward.default", "aten.select_scatter.default")
def select_scatter(call: OpCall) -> Rule:
    """The other way: a piece is put at an index of zeros, or of another tensor."""
    result = call.result
    dim = normal_dim(call.arg("dim"), result.ndim)
    if call.operands[-1].shape != (*result.shape[:dim], *result.shape[dim + 1 :]):
        return replicate(call)  # it is broadcast
    names = _names(result.shape)
    rest = names[:dim] + names[dim + 1 :]
    backward = call.name == "aten.select_backward.default"
    return make_rule(
        call, [rest] if backward else [names, rest], [names], dict(zip(names, result.shape)), blocked={names[dim]},
        linear=(frozenset(range(len(call.operands))),),
        shape_args=((call.path("input_sizes"), 0),) if backward else (),
    )  # fmt: skip


def _slice_dims(call: OpCall, shape: Sequence[int], dim: int) -> tuple[Names, Names, dict[str, int], set[str], tuple]:
    """The dims of a whole tensor and of its slice; one of equally many pieces is (c f)."""
    size, step = shape[dim], call.arg("step", 1)
    start, end = call.arg("start"), call.arg("end")
    first = min(max(normal_dim(start or 0, size), 0), size)
    last = min(max(normal_dim(size if end is None else end, size), first), size)
    length = (last - first + step - 1) // step
    whole: Names = [(name,) for name in _names(shape)]
    part = list(whole)
    sizes = dict(zip(_names(shape), shape))
    if length == size:
        return whole, part, sizes, set(), ()
    if step == 1 and length and size % length == 0 and first % length == 0:
        whole[dim], part[dim] = ("c", "f"), ("f",)
        del sizes[f"d{dim}"]
        scaled = [("start", start)] + ([("end", end)] if end is not None and end <= size else [])
        size_args = tuple((call.path(name), "f") for name, value in scaled if value)
        return whole, part, sizes | {"c": size // length, "f": length}, {"c"}, size_args
    part[dim] = ("s",)
    return whole, part, sizes | {"s": length}, {"s", f"d{dim}"}, ()


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_tensor(call: OpCall) -> Rule:
    """`x[..., start:end]`: the dim can be split where the slice is everything, or one of equal pieces."""
    shape = call.operands[0].shape
    whole, part, sizes, blocked, size_args = _slice_dims(call, shape, normal_dim(call.arg("dim", 0), len(shape)))
    return make_rule(
        call, [whole], [part], sizes, blocked=blocked, linear=_FIRST, alias=call.name == "aten.slice.Tensor",
        size_args=size_args, op_class="view",
    )  # fmt: skip


@rule("aten.slice_backward.default", "aten.slice_scatter.default")
def slice_scatter(call: OpCall) -> Rule:
    """The other way: a slice is put into zeros, or into another tensor."""
    result = call.result
    whole, part, sizes, blocked, size_args = _slice_dims(
        call, result.shape, normal_dim(call.arg("dim", 0), result.ndim)
    )
    if call.operands[-1].shape != tuple(math.prod(sizes[name] for name in names) for names in part):
        return replicate(call)  # it is broadcast
    backward = call.name == "aten.slice_backward.default"
    return make_rule(
        call, [part] if backward else [whole, part], [whole], sizes, blocked=blocked,
        linear=(frozenset(range(len(call.operands))),), size_args=size_args,
        shape_args=((call.path("input_sizes"), 0),) if backward else (),
    )  # fmt: skip


@rule(
    "aten.split.Tensor",
    "aten.split_copy.Tensor",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    "aten.chunk.default",
)
def split(call: OpCall) -> Rule:
    """Equal pieces are (c f), and f may be split; of unequal ones, nothing."""
    shape = call.operands[0].shape
    dim = normal_dim(call.arg("dim", 0), len(shape))
    lengths = [result.shape[dim] for result in call.results if result is not None]
    whole, parts, sizes, blocked = _pieces(shape, dim, lengths)
    name = "split_size" if call.name in ("aten.split.Tensor", "aten.split_copy.Tensor") else "split_sizes"
    size_args = ((call.path(name), "f"),) if "f" in sizes and call.name != "aten.chunk.default" else ()
    return make_rule(
        call, [whole], parts, sizes, blocked=blocked, linear=_FIRST, alias="copy" not in call.name,
        size_args=size_args, op_class="view",
    )  # fmt: skip


@rule("aten.cat.default")
def cat(call: OpCall) -> Rule:
    """Equal pieces make (c f), and f may be split; of unequal ones, nothing."""
    result = call.result
    dim = normal_dim(call.arg("dim", 0), result.ndim)
    if any(operand.ndim != result.ndim for operand in call.operands):
        return replicate(call)  # the legacy empty tensor
    whole, parts, sizes, blocked = _pieces(result.shape, dim, [operand.shape[dim] for operand in call.operands])
    group = frozenset(range(len(parts)))
    return make_rule(call, parts, [whole], sizes, blocked=blocked, linear=(group,))


def _pieces(
    shape: Sequence[int], dim: int, lengths: Sequence[int]
) -> tuple[Names, list[Names], dict[str, int], set[str]]:
    """The dims of a tensor and of its pieces along `dim`, sizes, and what cannot be split."""
    whole: Names = [(name,) for name in _names(shape)]
    sizes = dict(zip(_names(shape), shape))
    parts = [list(whole) for _ in lengths]
    equal = len(set(lengths)) == 1 and bool(lengths[0])
    for i, part in enumerate(parts):
        part[dim] = ("f",) if equal else (f"s{i}",)
    if equal:
        whole[dim] = ("c", "f")
        return whole, parts, sizes | {"c": len(lengths), "f": lengths[0]}, {"c"}
    uneven = {f"s{i}": length for i, length in enumerate(lengths)}
    return whole, parts, sizes | uneven, {f"d{dim}", *uneven}


@rule("aten.stack.default")
def stack(call: OpCall) -> Rule:
    """A new dim, which cannot be split."""
    result = call.result
    dim = normal_dim(call.arg("dim", 0), result.ndim)
    names = _names(result.shape)
    part = names[:dim] + names[dim + 1 :]
    group = frozenset(range(len(call.operands)))
    sizes = dict(zip(names, result.shape))
    return make_rule(call, [part] * len(group), [names], sizes, blocked={names[dim]}, linear=(group,))


@rule("aten.unfold.default", "aten.unfold_backward.default")
def unfold(call: OpCall) -> Rule:
    """The dim that windows are cut of, which of them, and where in one, are whole; the other dims are free."""
    backward = call.name == "aten.unfold_backward.default"
    windows, whole = (call.operands[0], call.result) if backward else (call.result, call.operands[0])
    if not whole.ndim:
        return _linear_whole(call)
    dim = normal_dim(call.arg("dim" if backward else "dimension"), whole.ndim)
    names = _names(whole.shape)
    cut = [*names[:dim], "p", *names[dim + 1 :], "w"]
    sizes = {**dict(zip(names, whole.shape)), "p": windows.shape[dim], "w": windows.shape[-1]}
    sides, blocked = (cut, names) if backward else (names, cut), {names[dim], "p", "w"}
    shape_args = ((call.path("input_sizes"), 0),) if backward else ()
    return make_rule(
        call, sides[:1], sides[1:], sizes, blocked=blocked, linear=_FIRST, shape_args=shape_args, op_class="view"
    )


@rule("aten.diagonal.default", "aten.as_strided.default")
def strided(call: OpCall) -> Rule:
    """Whole: rare, and not worth more."""
    return _linear_whole(call)


def _linear_whole(call: OpCall) -> Rule:
    whole = replicate(call)
    names = {factor.name: factor.size for factor in whole.factors}
    results = [None if dims is None else list(dims) for dims in whole.results]
    return make_rule(call, list(whole.operands), results, names, blocked=set(names), linear=_FIRST, op_class="view")


@rule(
    "aten.constant_pad_nd.default", "aten.roll.default", "aten.flip.default", "aten.tril.default", "aten.triu.default"
)
def whole_dims(call: OpCall) -> Rule:
    """The dims they work along are whole; the others are free. Linear, but for a padding that is not zero."""
    source, result = call.operands[0], call.result
    ndim = source.ndim
    if call.name == "aten.constant_pad_nd.default":
        pad = call.arg("pad")
        dims = {ndim - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    elif call.name in ("aten.tril.default", "aten.triu.default"):
        dims = {ndim - 2, ndim - 1}
    else:
        dims = {normal_dim(dim, ndim) for dim in call.arg("dims")} or set(range(ndim))
    left, right = _names(source.shape), _names(source.shape)
    sizes = dict(zip(left, source.shape))
    for dim in dims:
        if source.shape[dim] != result.shape[dim]:
            right[dim] = f"p{dim}"
            sizes[f"p{dim}"] = result.shape[dim]
    blocked = {left[dim] for dim in dims} | {right[dim] for dim in dims}
    linear = _FIRST if call.arg("value", 0) in (0, None) else ()
    return make_rule(call, [left], [right], sizes, blocked=blocked, linear=linear)


@rule("aten.repeat.default")
def repeat(call: OpCall) -> Rule:
    """Each result dim is (r x): which copy, and where in it. Both may be split: copies are alike."""
    source, result = call.operands[0], call.result
    repeats = call.arg("repeats")
    added = result.ndim - source.ndim
    operand = [f"x{i}" for i in range(source.ndim)]
    whole = [(f"r{i}",) if i < added else (f"r{i}", operand[i - added]) for i in range(result.ndim)]
    sizes = dict(zip(operand, source.shape)) | {f"r{i}": count for i, count in enumerate(repeats)}
    size_args = tuple(((*call.path("repeats"), i), f"r{i}") for i in range(len(repeats)))
    return make_rule(call, [operand], [whole], sizes, linear=_FIRST, size_args=size_args)


@rule("aten.view_as_real.default", "aten.view_as_complex.default")
def complex_view(call: OpCall) -> Rule:
    """The dim of real and imaginary parts is whole."""
    text = (
        "... -> ... c | c ! | linear 0" if call.name == "aten.view_as_real.default" else "... c -> ... | c ! | linear 0"
    )
    return bind(call, text, alias=True, op_class="view")


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(call: OpCall) -> Rule:
    """Channels into space, `(c p q) h w -> c (h p) (w q)`, and back; the factors p and q are whole."""
    deep, wide = "... (c p q) h w", "... c (h p) (w q)"
    if call.name == "aten.pixel_shuffle.default":
        text, factor = f"{deep} -> {wide}", call.arg("upscale_factor")
    else:
        text, factor = f"{wide} -> {deep}", call.arg("downscale_factor")
    return bind(call, f"{text} | p={factor} !, q={factor} ! | linear 0")


@rule("aten.glu.default", "aten.glu_backward.default")
def glu(call: OpCall) -> Rule:
    """Both halves of a dim, (c f): f may be split."""
    backward = call.name == "aten.glu_backward.default"
    shape = call.operands[-1].shape
    dim = normal_dim(call.arg("dim", -1), len(shape))
    if backward and call.operands[0].shape != (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :]):
        return replicate(call)  # it is broadcast
    part: Names = [(name,) for name in _names(shape)]
    sizes = dict(zip(_names(shape), shape)) | {"c": 2, "f": shape[dim] // 2}
    part[dim] = ("f",)
    whole = [*part[:dim], ("c", "f"), *part[dim + 1 :]]
    operands, result = ([part, whole], whole) if backward else ([whole], part)
    return make_rule(call, operands, [result], sizes, blocked={"c"}, linear=_FIRST if backward else ())
