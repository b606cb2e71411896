"""Layers of experts while a model is traced: `autopar::experts`, one operator each.

    y = self.experts(x, indices, weights)   →   y = experts(x, indices, weights, gate_up, down, act="mul(silu(gate), …")

What lies between the two products of an expert is read off what the module does to a few numbers; where that is no
pointwise function of gate and up, the layer is traced as transformers has it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from autopar.base.huggingface import experts
from autopar.base.torch_compat.tracing import outside_of_tracing
from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)
from autopar.operators.activations import described


def as_operators(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, layers of experts of the model, which is a copy, are operators."""
    return experts.instead(model, _operator)


def _operator(layer: experts.Layer) -> Tensor | None:
    with outside_of_tracing():
        found = described(layer.activation, gated=layer.gated, dtype=layer.x.dtype)
    if found is None:
        return None
    act, interleaved = found
    bias = () if layer.first_bias is None else (layer.first_bias,)
    made: Tensor = torch.ops.autopar.experts(
        layer.x, layer.indices, layer.weights, layer.first, layer.second, *bias,
        act=act, gated=layer.gated, interleaved=interleaved, transposed=layer.transposed,
    )  # fmt: skip
    return made if layer.second_bias is None else made + _of_each(layer, layer.second_bias).to(made.dtype)


def _of_each(layer: experts.Layer, bias_ED: Tensor) -> Tensor:
    """What the biases of the second product add: each token's weights, by expert, times these. Apart, so that it counts
    once where experts' widths are split.
    """
    shares = layer.weights.new_zeros((layer.x.shape[0], bias_ED.shape[0]))
    return shares.scatter_add(1, layer.indices, layer.weights).to(bias_ED.dtype) @ bias_ED
