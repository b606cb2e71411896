"""The experts of a mixture by PyTorch's grouped product, on CUDA where there are no kernels of autopar's.

Rows are gathered by experts, and groups are told by offsets on the device: the host waits for no counts. It takes
memory for all choices of all tokens at once, and bfloat16 alone.

Shape suffixes as in `autopar.operators.experts`; S = T K rows, those of no expert here behind all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from autopar.base.torch_compat.autograd import recording
from autopar.operators.basic import wide_dtype
from autopar.operators.expert_layout import Layout

ALIGNED = 8
"""Elements of bfloat16 that are 16 bytes: every row of an operand has to begin at a multiple of these."""


def fits(x: Tensor, indices: Tensor, first: Tensor, second: Tensor, bias: Tensor | None) -> bool:
    """Whether PyTorch's grouped product takes these: on CUDA from compute capability 8.0 on, bfloat16, rows aligned."""
    given = [x, first, second, *([] if bias is None else [bias])]
    return (
        x.is_cuda
        and all(each.dtype == torch.bfloat16 for each in given)
        and all(each.shape[-1] % ALIGNED == 0 and each.is_contiguous() for each in given)
        and (first.shape[1] % ALIGNED, second.shape[1] % ALIGNED) == (0, 0)
        and x.numel() > 0
        and indices.numel() > 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where rows are. tokens[S], order[S]: a row's token, and its place in [T K]; at[T K]: a place's row; ends[E]: of
    groups; here[S, 1]: whether it is of an expert; experts[S]: of which, of any where it is of none.
    """

    tokens: Tensor
    order: Tensor
    at: Tensor
    ends: Tensor
    here: Tensor
    experts: Tensor

    @staticmethod
    def of(indices_TK: Tensor, num_experts: int, start: int) -> _Rows:
        numbers = indices_TK.reshape(-1).to(torch.int32) - start
        numbers = numbers.masked_fill((numbers < 0) | (numbers >= num_experts), num_experts)
        experts, order = numbers.sort(stable=True)
        every = torch.arange(num_experts, dtype=torch.int32, device=numbers.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        at = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        here = (experts < num_experts)[:, None]
        return _Rows(order // indices_TK.shape[-1], order, at, ends, here, experts.clamp(max=num_experts - 1).long())

    def of_tokens(self, rows: Tensor, num_choices: int) -> Tensor:
        """[T, D]: of each token the sum over its rows[S, D], of which those of no expert may be anything."""
        found = rows.masked_fill(~self.here, 0)[self.at]
        wide = found.unflatten(0, (-1, num_choices)).sum(1, dtype=wide_dtype(rows.dtype))
        return wide.to(rows.dtype)


def grouped(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, layout: Layout,
    start: int,
) -> Tensor:  # fmt: skip
    """As `experts.experts`."""
    rows = _Rows.of(indices, first.shape[0], start)
    product = _product(x[rows.tokens], first, bias, rows, layout)
    made = grouped_mm(layout.activated(product).to(x.dtype), layout.inward(second), offs=rows.ends)
    weighted = (made * weights.reshape(-1)[rows.order, None]).to(x.dtype)
    return rows.of_tokens(weighted, indices.shape[-1])


def grouped_gradients(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
    layout: Layout, start: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `experts.gradients`."""
    rows, wide = _Rows.of(indices, first.shape[0], start), wide_dtype(x.dtype)
    x_rows, g_rows = x[rows.tokens], g[rows.tokens].contiguous()
    flat = weights.reshape(-1)[rows.order, None]
    with recording():
        leaf = _product(x_rows, first, bias, rows, layout).detach().requires_grad_()
        activated = layout.activated(leaf).to(x.dtype)
    values = activated.detach()
    through = grouped_mm(g_rows, layout.inward(second).transpose(1, 2), offs=rows.ends)
    of_weights = (through.to(wide) * values.to(wide)).sum(-1).masked_fill(~rows.here[:, 0], 0)
    with recording():
        (dproduct,) = torch.autograd.grad(activated, leaf, (through * flat).to(x.dtype))
    dproduct = dproduct.masked_fill(~rows.here, 0).contiguous()
    weighted = (g_rows * flat).to(x.dtype)
    dsecond = _of_parameter(values.masked_fill(~rows.here, 0), weighted, rows, layout)
    dfirst = _of_parameter(x_rows, dproduct, rows, layout)
    dbias = x.new_zeros(0)
    if bias is not None:
        columns = torch.ones_like(flat, dtype=x.dtype).expand(-1, ALIGNED).contiguous()
        dbias = grouped_mm(columns.t(), dproduct, offs=rows.ends)[:, 0]
    dx = rows.of_tokens(grouped_mm(dproduct, layout.inward(first).transpose(1, 2), offs=rows.ends), indices.shape[-1])
    return dx, of_weights[rows.at].reshape(weights.shape).to(weights.dtype), dfirst, dsecond, dbias


def _product(x_rows: Tensor, first: Tensor, bias: Tensor | None, rows: _Rows, layout: Layout) -> Tensor:
    product = grouped_mm(x_rows, layout.inward(first), offs=rows.ends)
    return product if bias is None else product + bias[rows.experts]


def _of_parameter(inner: Tensor, outer: Tensor, rows: _Rows, layout: Layout) -> Tensor:
    """Of each expert the sum of inner[in] times outer[out] over its rows, as parameters lie."""
    one, other = (inner, outer) if layout.transposed else (outer, inner)
    return grouped_mm(one.contiguous().t(), other.contiguous(), offs=rows.ends).contiguous()
