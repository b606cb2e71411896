"""Gathers and scatters: the dims of the indices are free where they only select, the indexed dims are whole."""

from __future__ import annotations

from autopar.ir.op_call import OpCall, is_float
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import bind, make_rule, normal_dim, replicate, rule

_FIRST = (frozenset({0}),)


@rule("aten.embedding.default")
def _embedding(call: OpCall) -> Rule:
    ids = " ".join(f"b{i}" for i in range(call.operands[1].ndim))
    return bind(call, f"v d, {ids or '.'} -> {ids} d | v ! | linear 0", op_class="gather")


@rule("aten.embedding_dense_backward.default")
def _embedding_dense_backward(call: OpCall) -> Rule:
    """Ids of a part give terms of the gradient, unless it is scaled by how often each occurs."""
    names = [f"b{i}" for i in range(call.operands[1].ndim)]
    ids = " ".join(names)
    mark = "!" if call.arg("scale_grad_by_freq") else "sum"
    notes = ", ".join(["v !", *(f"{name} {mark}" for name in names)])
    return bind(call, f"{ids} d, {ids or '.'} -> v d | {notes} | linear 0", op_class="gather")


@rule("aten.one_hot.default")
def _one_hot(call: OpCall) -> Rule:
    ids = " ".join(f"b{i}" for i in range(call.operands[0].ndim))
    return bind(call, f"{ids or '.'} -> {ids} c | c={call.result.shape[-1]} !", op_class="gather")


def _indexes(call: OpCall) -> bool:
    """Whether the operands have dims, and equally many; an empty index may have any."""
    return bool(call.operands[0].ndim) and len({operand.ndim for operand in call.operands}) == 1


def _index_dims(call: OpCall, index: int, dim: int) -> tuple[list[str], list[str], dict[str, int], set[str]]:
    """The dims of a tensor and of an index tensor of as many dims: shared where they are of one size, but for `dim`."""
    source, own = call.operands[0].shape, call.operands[index].shape
    names, index_names, blocked = [f"d{i}" for i in range(len(source))], [f"d{i}" for i in range(len(own))], set()
    sizes = dict(zip(names, source))
    for i in range(len(own)):
        if i == dim or source[i] != own[i]:
            index_names[i] = f"i{i}"
            sizes[f"i{i}"] = own[i]
            blocked |= {names[i]} if i == dim else {names[i], f"i{i}"}
    return names, index_names, sizes, blocked


@rule("aten.gather.default")
def _gather(call: OpCall) -> Rule:
    if not _indexes(call):
        return replicate(call)
    dim = normal_dim(call.arg("dim"), call.operands[0].ndim)
    names, index, sizes, blocked = _index_dims(call, 1, dim)
    return make_rule(call, [names, index], [index], sizes, blocked=blocked, linear=_FIRST, op_class="gather")


@rule(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def _scatter(call: OpCall) -> Rule:
    """Neither the dim that is written along nor the indices' own can be split: a part would leave what others write."""
    if not _indexes(call):
        return replicate(call)
    dim = normal_dim(call.arg("dim"), call.operands[0].ndim)
    names, index, sizes, blocked = _index_dims(call, 1, dim)
    blocked.add(f"i{dim}")
    operands = [names, index]
    if len(call.operands) == 3:
        source = []
        for i, size in enumerate(call.operands[2].shape):
            same = size == sizes[index[i]]
            source.append(index[i] if same else f"s{i}")
            if not same:
                sizes[f"s{i}"] = size
                blocked |= {f"s{i}", index[i]}
        operands.append(source)
    linear = (frozenset({0, 2}),) if call.name in ("aten.scatter.src", "aten.scatter_add.default") else ()
    linear = _FIRST if call.name == "aten.scatter.value" and call.arg("value") == 0 else linear
    linear = linear if is_float(call.operands[0].dtype) else ()
    return make_rule(call, operands, [names], sizes, blocked=blocked, linear=linear, op_class="gather")


@rule("aten.index_select.default")
def _index_select(call: OpCall) -> Rule:
    shape, length = call.operands[0].shape, call.operands[1].shape
    if not shape or not length:
        return replicate(call)
    dim = normal_dim(call.arg("dim"), len(shape))
    names = [f"d{i}" for i in range(len(shape))]
    result = [*names[:dim], "i", *names[dim + 1 :]]
    sizes = dict(zip(names, shape)) | {"i": length[0]}
    return make_rule(call, [names, ["i"]], [result], sizes, blocked={names[dim]}, linear=_FIRST, op_class="gather")


@rule("aten.index_add.default", "aten.index_copy.default", "aten.index_fill.int_Scalar")
def _index_add(call: OpCall) -> Rule:
    shape = call.operands[0].shape
    if not shape or not call.operands[1].ndim:
        return replicate(call)
    dim = normal_dim(call.arg("dim"), len(shape))
    names = [f"d{i}" for i in range(len(shape))]
    source = [*names[:dim], "i", *names[dim + 1 :]]
    sizes = dict(zip(names, shape)) | {"i": call.operands[1].shape[0]}
    fill = call.name == "aten.index_fill.int_Scalar"
    operands = [names, ["i"]] if fill else [names, ["i"], source]
    linear = () if fill or not is_float(call.operands[0].dtype) else (frozenset({0, 2}),)
    return make_rule(call, operands, [names], sizes, blocked={names[dim], "i"}, linear=linear, op_class="gather")


@rule("autopar.write_piece.default")
def _write_piece(call: OpCall) -> Rule:
    """Also the dim that is written along may be split: each part is told where it begins, and leaves out the rest."""
    shape, dim = call.operands[0].shape, call.arg("dim")
    names = [f"d{i}" for i in range(len(shape))]
    source = [*names[:dim], "i", *names[dim + 1 :]]
    sizes = dict(zip(names, shape)) | {"i": call.operands[1].shape[0]}
    return make_rule(
        call, [names, ["i"], source], [names], sizes, blocked={"i"}, op_class="gather",
        offset_args=((call.path("start"), names[dim]),),
    )  # fmt: skip


def _advanced(call: OpCall) -> tuple[list[list[str]], list[str], list[str], dict[str, int], set[str]] | None:
    """Advanced indexing: the dims of the index operands, of the tensor, and of the selection; sizes; the indexed dims.

    None for masks, which select as many elements as they like. The index tensors are broadcast together; their dims
    stand where the indexed dims were if those are neighbours, else in front.
    """
    shape = call.operands[0].shape
    indices = list(call.arg("indices"))
    specs = [index for index in indices if index is not None]
    if any(str(spec.dtype) in ("torch.bool", "torch.uint8") for spec in specs):
        return None
    ndim = max(spec.ndim for spec in specs)
    broadcast = [max((s.shape[i - ndim + s.ndim] for s in specs if i >= ndim - s.ndim), default=1) for i in range(ndim)]
    index_names = [f"i{i}" for i in range(ndim)]
    operands = []
    for spec in specs:
        own = list(zip(index_names[ndim - spec.ndim :], broadcast[ndim - spec.ndim :], spec.shape))
        operands.append([name if size == whole else "" for name, whole, size in own])
    names = [f"d{i}" for i in range(len(shape))]
    indexed = [i for i, index in enumerate(indices) if index is not None]
    neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    front = indexed[0] if neighbours else 0
    rest = [name for i, name in enumerate(names) if i not in indexed]
    selection = rest[:front] + index_names + rest[front:]
    sizes = dict(zip(names, shape)) | dict(zip(index_names, broadcast))
    return operands, names, selection, sizes, {names[i] for i in indexed}


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: OpCall) -> Rule:
    found = _advanced(call)
    if found is None:
        return replicate(call)
    indices, names, selection, sizes, indexed = found
    return make_rule(
        call, [names, *indices], [selection], sizes, blocked=indexed, linear=_FIRST, op_class="gather"
    )  # fmt: skip


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(call: OpCall) -> Rule:
    """The dims of the indices are whole, too: a part would leave what others write."""
    found = _advanced(call)
    if found is None:
        return replicate(call)
    indices, names, selection, sizes, indexed = found
    values = call.operands[-1]
    own = selection[len(selection) - values.ndim :]
    value_dims = [name if sizes[name] == size else "" for name, size in zip(own, values.shape)]
    blocked = indexed | {name for name in selection if name not in names}
    linear = (frozenset({0, len(call.operands) - 1}),) if is_float(values.dtype) else ()
    return make_rule(
        call, [names, *indices, value_dims], [names], sizes, blocked=blocked, linear=linear, op_class="gather"
    )  # fmt: skip
