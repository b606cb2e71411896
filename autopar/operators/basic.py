"""Products, tables, and the pieces of a cross entropy that can be split along the vocabulary.

Shape suffixes: V vocabulary or classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

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
    return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a[.., M, K] times b[.., K, N], with equal leading dims that stay apart: joined ones could not be split by one."""
    return torch.matmul(a, b)


def embedding(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """The rows `ids - start` of weight[V, D]; zeros where that is outside [0, V)."""
    local = ids - start
    inside = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(inside, local, 0), weight)
    return rows.masked_fill_(~inside.unsqueeze(-1), 0)


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
    return (wide(x) - wide(m).unsqueeze(-1)).exp_().sum(-1)


def cross_entropy_grad(g: Tensor, x: Tensor, target: Tensor, lse: Tensor, start: int = 0) -> Tensor:
    """g * (softmax(x) - onehot(target)), in the dtype of x[..., V]; g[...] is 0 in the rows that do not count."""
    local = target - start
    inside = (local >= 0) & (local < x.shape[-1])
    g = g.to(lse.dtype)
    out = (wide(x) - lse.unsqueeze(-1)).exp_().mul_(g.unsqueeze(-1))
    index = torch.where(inside, local, 0).unsqueeze(-1)
    out.scatter_add_(-1, index, torch.where(inside, -g, 0).to(out.dtype).unsqueeze(-1))
    return out.to(x.dtype)
