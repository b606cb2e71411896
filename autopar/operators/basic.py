"""Products, tables, and the pieces of a cross entropy that can be split along the vocabulary.

Shape suffixes: V vocabulary or classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.errors import AutoparError

HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype in which it is reduced: float32 for half types."""
    return x.float() if x.dtype in HALF else x


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `wide`."""
    return torch.float32 if dtype in HALF else dtype


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, *, valid: int | None = None, start: int = 0) -> Tensor:
    """x[..., K] @ w[N, K].T + b[N]; the columns from `valid - start` on are padding, and -inf.

    valid: how many columns count, of all ranks together (None: all); start: the number of the first one here.
    """
    out = F.linear(x, w, b)
    if valid is not None and valid - start < w.shape[0]:
        out[..., max(0, valid - start) :] = -math.inf
    return out


def linear_grad_input(g: Tensor, w: Tensor) -> Tensor:
    """The gradient of `linear` to x: g[..., N] @ w[N, K]."""
    return torch.matmul(g, w)


def linear_grad_weight(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `linear` to w: [N, K], summed over the leading dims of g[..., N] and x[..., K]."""
    rows = math.prod(g.shape[:-1])
    return g.reshape(rows, g.shape[-1]).mT @ x.reshape(rows, x.shape[-1])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a[.., M, K] times b[.., K, N], with equal leading dims that stay apart: joined ones could not be split by one."""
    return torch.matmul(a, b)


def embedding(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """The rows `ids - start` of weight[V, D]; zeros where that is outside [0, V)."""
    local = ids if type(start) is int and start == 0 else ids - start
    row = local.clamp(0, max(0, weight.shape[0] - 1))
    rows = F.embedding(row, weight)
    return rows.masked_fill_((row != local).unsqueeze(-1), 0)


def embedding_grad(g: Tensor, ids: Tensor, num_rows: int, start: int = 0, padding_idx: int = -1) -> Tensor:
    """The gradient of `embedding` to its weight: [num_rows, D]. `padding_idx` counts as `ids` do, before `start`."""
    local = ids - start
    counts = (local >= 0) & (local < num_rows) & (ids != padding_idx)
    local = torch.where(counts, local, num_rows)
    return torch.ops.aten.embedding_dense_backward(g, local, num_rows + 1, num_rows, False)[:num_rows]


def part(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """The `length` elements from `start` on of a dim; `whole` is its gradient, and it the gradient of `whole`."""
    return x.narrow(dim, start, length)


def whole(x: Tensor, dim: int, size: int, start: int = 0) -> Tensor:
    """x as the elements from `start` on of a dim of `size`, zeros elsewhere; x itself where it is all of them.

    The terms of a sum that is the whole tensor, from its pieces.
    """
    if x.shape[dim] == size:
        return x
    out = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    out.narrow(dim, start, x.shape[dim]).copy_(x)
    return out


def take_label(x: Tensor, target: Tensor, start: int = 0) -> Tensor:
    """x[..., V] at `target - start`; 0 where that is outside [0, V), as `ignore_index` is."""
    local = target - start
    inside = (local >= 0) & (local < x.shape[-1])
    taken = x.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
    return taken.masked_fill_(~inside, 0)


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """The sum of exp(x - m) over the last dim of x[..., V], in float32 for half types; m[...]: usually the maximum."""
    rows, shifts = x.reshape(-1, x.shape[-1]), wide(m).reshape(-1, 1)
    out = rows.new_empty((rows.shape[0],), dtype=shifts.dtype)
    buffer = None
    for part_ in _row_parts(rows):
        buffer = _shifted(rows[part_], shifts[part_], buffer)
        torch.sum(buffer.exp2_(), -1, out=out[part_])
    return out.view(m.shape)


def no_class(target: Tensor, classes: int, ignore_index: int | None = None) -> Tensor:
    """Which targets are neither one of so many classes nor `ignore_index`; eager refuses them."""
    outside = (target < 0) | (target >= classes)
    return outside if ignore_index is None else outside & (target != ignore_index)


def cross_entropy(
    maximum: Tensor, total: Tensor, label: Tensor, target: Tensor, ignore_index: int = -100, classes: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses of rows, how many rows count, and their log-sum-exp[...], from what vocabularies give.

    maximum, total, label [...]: of x[..., V], `amax`, `sum_exp` and `take_label`, over the whole vocabulary. The number
    has the dtype of the sum that it divides. Of parts of the rows both are terms: in float32 numbers up to 2^24 are
    exact, and beyond they are rounded as the sum of the losses is. classes: how many there are (0: it is not asked); a
    target that is none of them makes the loss no number, and on a CPU, uncompiled, ends the step, as in eager.

    Raises:
        AutoparError: such a target, on a CPU.
    """
    lse = total.log().add_(maximum)
    ignored = target == ignore_index
    rows = (lse - label).masked_fill_(ignored, 0)
    if classes:
        outside = no_class(target, classes, ignore_index)
        if target.device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside.any()):
            raise AutoparError(
                f"label {int(target[outside].flatten()[0])} is no class",
                values=f"there are {classes}, from 0 on; {ignore_index} marks what does not count",
                remedy="check the labels against the size of the model's vocabulary",
            )
        rows = rows.masked_fill_(outside, math.nan)
    loss = rows.sum()
    return loss, (~ignored).sum().to(loss.dtype), lse


def cross_entropy_grad(
    g: Tensor, x: Tensor, target: Tensor, lse: Tensor, start: int = 0, ignore_index: int = -100
) -> Tensor:
    """g * (softmax(x) - onehot(target)), in the dtype of x[..., V]; 0 in the rows whose target is `ignore_index`.

    g: of each row [...], or of their sum.
    """
    size = x.shape[-1]
    rows, factors = x.reshape(-1, size), row_gradients(g, target, ignore_index).to(lse.dtype).reshape(-1, 1)
    shifts, local = lse.reshape(-1, 1), (target - start).reshape(-1, 1)
    inside = (local >= 0) & (local < size)
    index, terms = torch.where(inside, local, 0), torch.where(inside, -factors, 0)
    out = rows.new_empty(rows.shape)
    buffer = None
    for part_ in _row_parts(rows):
        buffer = _shifted(rows[part_], shifts[part_], out[part_] if out.dtype == lse.dtype else buffer)
        buffer.exp2_().mul_(factors[part_]).scatter_add_(-1, index[part_], terms[part_])
        if out.dtype != lse.dtype:
            out[part_] = buffer
    return out.view(x.shape)


def row_gradients(g: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The gradient of each row's loss, [...] as target: `g`, which may be one for all; 0 where it does not count."""
    return g.expand(target.shape).masked_fill(target == ignore_index, 0)


_PART = 1 << 17
"""Elements of logits that a CPU handles at a time: they stay in its cache from one operator to the next."""


def _row_parts(rows: Tensor) -> list[slice]:
    """All rows of [R, V], in parts on a CPU."""
    count = rows.shape[0]
    step = max(1, _PART // max(1, rows.shape[1])) if rows.device.type == "cpu" else max(1, count)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _shifted(x: Tensor, shift: Tensor, out: Tensor | None) -> Tensor:
    """(x[R, V] - shift[R, 1]) / ln 2, in the memory of `out` where it fits: `exp2` is much faster than `exp`."""
    if out is None or len(out) < len(x):
        out = x.new_empty(x.shape, dtype=shift.dtype)
    return torch.sub(x, shift, out=out[: len(x)]).mul_(1 / math.log(2))
