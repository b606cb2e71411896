"""The experts of a mixture, of which each token goes through those that the router chose, as one operator.

Shape suffixes: T tokens, D their width, K experts a token, E experts, F an expert's width, G 2 with a gate and 1
without. Nothing is dropped: each expert multiplies the rows that chose it, however many. Experts may be split: with
`start`, the number of the first one here, tokens whose expert lies elsewhere get zeros, terms of a sum. So may F be.
The gradient runs the experts again, so that nothing of [T, K, G, F] is kept.

On CUDA the kernels of runtime/kernels/experts.py stand in for these functions. Without them PyTorch's grouped product
does where it can (`grouped_experts.fits`); else the host waits for how many rows each expert has, and multiplies expert
by expert.

Parameters may be codes with scales (`coded_experts.py`): those of an expert that was chosen are decoded where they are
multiplied, and no others. There is no gradient then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_compat.autograd import recording
from autopar.operators.basic import wide_dtype
from autopar.operators.coded_experts import MOST_FEW, Held, of_few
from autopar.operators.expert_layout import Layout
from autopar.operators.grouped_experts import fits, grouped, grouped_gradients


def _groups(indices_TK: Tensor, num_experts: int, start: int) -> Iterator[tuple[int, Tensor]]:
    """The experts here that are chosen, each with the places in [T * K] that chose it."""
    numbers = indices_TK.reshape(-1).long() - start
    elsewhere = (numbers < 0) | (numbers >= num_experts)
    numbers = numbers.masked_fill(elsewhere, num_experts)
    order = numbers.argsort(stable=True)
    counts = torch.bincount(numbers, minlength=num_experts + 1).tolist()
    at = 0
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            yield expert, order[at : at + count]
        at += count


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None = None, *,
    act: str, gated: bool = True, interleaved: bool = False, transposed: bool = False, start: int = 0,
    storage: str = "", first_scales: Tensor | None = None, second_scales: Tensor | None = None,
    first_zeros: Tensor | None = None, second_zeros: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[T, D]: of each token x[T, D] the sum over k of weights[T, K] times what expert indices[T, K] makes of it:
    act(x @ first + bias) @ second.

    first: [E, G F, D], second: [E, D, F], or [E, D, G F] and [E, F, D] if `transposed`; bias[E, G F]. act: text of
    `activations`. start: the number of the first expert here; a number of none here adds nothing. The product with
    weights is rounded to x's dtype, the sum over k is not. Source: Shazeer et al., 1701.06538; as transformers' loops
    over experts have it.

    storage: of `STORAGES_OF_WEIGHTS`; then first and second are codes of [E, G F, D] and [E, D, F], in rows, groups or
    blocks that share a scale, and scales and zeros have one for each.
    """
    layout = Layout(act, gated, interleaved, transposed)
    one, other = Held(storage, first, first_scales, first_zeros), Held(storage, second, second_scales, second_zeros)
    if not storage:
        served = fits(x, indices, first, second, bias)
        return (grouped if served else one_by_one)(x, indices, weights, first, second, bias, layout, start)
    if x.is_cuda and 0 < indices.numel() <= MOST_FEW:
        return of_few(x, indices, weights, one, other, bias, layout, start)
    return _one_by_one(x, indices, weights, one, other, bias, layout, start)


def one_by_one(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, layout: Layout,
    start: int,
) -> Tensor:  # fmt: skip
    """`experts` of no codes, expert by expert: the host waits for how many rows each has."""
    one, other = (Held("", each, None, None) for each in (first, second))
    return _one_by_one(x, indices, weights, one, other, bias, layout, start)


def _one_by_one(
    x: Tensor, indices: Tensor, weights: Tensor, one: Held, other: Held, bias: Tensor | None, layout: Layout, start: int
) -> Tensor:
    num_choices, flat = indices.shape[-1], weights.reshape(-1)
    out = x.new_zeros(x.shape, dtype=wide_dtype(x.dtype))
    for expert, places in _groups(indices, one.held.shape[0], start):
        tokens = places // num_choices
        product = x[tokens] @ layout.inward(one.of(expert, x.shape[1]))
        activated = layout.activated(product if bias is None else product + bias[expert])
        made = activated @ layout.inward(other.of(expert, activated.shape[1]))
        out.index_add_(0, tokens, (made * flat[places, None]).to(x.dtype).to(out.dtype))
    return out.to(x.dtype)


def experts_grad(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, *,
    act: str, gated: bool = True, interleaved: bool = False, transposed: bool = False, start: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients to x, weights, first and second of `experts` without a bias, for g[T, D]."""
    layout = Layout(act, gated, interleaved, transposed)
    return gradients(g, x, indices, weights, first, second, None, layout, start)[:4]


def experts_grad_bias(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor, *,
    act: str, gated: bool = True, interleaved: bool = False, transposed: bool = False, start: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients to x, weights, first, second and bias of `experts`, for g[T, D]."""
    layout = Layout(act, gated, interleaved, transposed)
    return gradients(g, x, indices, weights, first, second, bias, layout, start)


def gradients(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
    layout: Layout, start: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of `experts_grad_bias`; where there is no bias, the last one is empty."""
    served = fits(x, indices, first, second, bias) and g.dtype == x.dtype
    found = grouped_gradients if served else gradients_one_by_one
    return found(g, x, indices, weights, first, second, bias, layout, start)


def gradients_one_by_one(
    g: Tensor, x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, bias: Tensor | None,
    layout: Layout, start: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`gradients`, expert by expert."""
    num_choices, flat = indices.shape[-1], weights.reshape(-1)
    dx = x.new_zeros(x.shape, dtype=wide_dtype(x.dtype))
    dweights, dfirst, dsecond = torch.zeros_like(flat), torch.zeros_like(first), torch.zeros_like(second)
    dbias = x.new_zeros(0) if bias is None else torch.zeros_like(bias)
    for expert, places in _groups(indices, first.shape[0], start):
        tokens = places // num_choices
        rows, received, inner = x[tokens], g[tokens], layout.inward(first[expert])
        product = rows @ inner
        product = product if bias is None else product + bias[expert]
        with recording():
            leaf = product.detach().requires_grad_()
            activated = layout.activated(leaf)
        values = activated.detach()
        weighted = (received * flat[places, None]).to(received.dtype)
        through = received @ layout.inward(second[expert]).t()
        wide = wide_dtype(x.dtype)
        dweights[places] = (through.to(wide) * values.to(wide)).sum(-1).to(flat.dtype)
        layout.inward(dsecond[expert]).copy_(values.t() @ weighted)
        with recording():
            (dproduct,) = torch.autograd.grad(activated, leaf, weighted @ layout.inward(second[expert]).t())
        layout.inward(dfirst[expert]).copy_(rows.t() @ dproduct)
        if bias is not None:
            dbias[expert] = dproduct.sum(0)
        dx.index_add_(0, tokens, (dproduct @ inner.t()).to(dx.dtype))
    return dx.to(x.dtype), dweights.reshape(weights.shape), dfirst, dsecond, dbias


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *given: Tensor) -> Any:
        ctx.save_for_backward(*given)
        ctx.options = options
        return torch.ops.autopar.experts(*given, **options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = ctx.saved_tensors
        operator = torch.ops.autopar.experts_grad if len(given) == 5 else torch.ops.autopar.experts_grad_bias
        dx, dweights, *rest = operator(*grads, *given, **ctx.options)
        return None, dx, None, dweights, *rest


def trace_experts(*given: Tensor, **options: Any) -> Any:
    """`experts` with its gradient."""
    return _Experts.apply(options, *given)
