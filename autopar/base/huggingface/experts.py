"""Where transformers goes through the experts of a mixture: what a layer of them is, and another way to go.

Models hand every such layer to the implementation that their configuration names, all of which give the same but for
the order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SETTING = "_experts_implementation_internal"
"""What a configuration of transformers says of how experts are gone through."""
_OWN = "autopar"
_MARKS = ("has_gate", "has_bias", "is_transposed")
"""What transformers' decorator gives a module of experts, in every version."""
_OTHER_FORMS = ("has_post_expert_norm", "_is_expert_parallel")
"""What later versions say of modules whose form is another one; earlier ones have none that are."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of a module of experts. x[T, D], indices[T, K], weights[T, K].

    first: [E, G F, D] with G = 2 if `gated`, else 1; second: [E, D, F]; or both with their last two dims swapped if
    `transposed`. first_bias[E, G F], second_bias[E, D]. activation: from [S, G F] to [S, F].
    """

    x: Tensor
    indices: Tensor
    weights: Tensor
    first: Tensor
    second: Tensor
    first_bias: Tensor | None
    second_bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    gated: bool
    transposed: bool


def has_layers(model: nn.Module) -> bool:
    """Whether a model has layers of experts."""
    return any(_is_layer(module) for module in model.modules())


def stacks_of(module: nn.Module) -> dict[str, bool]:
    """The parameters of a layer of experts that are their matrices on top of each other, and whether these are
    [in, out]; none of another module.
    """
    layer: Any = module
    names = ("gate_up_proj", "up_proj", "down_proj") if _is_layer(module) else ()
    return {name: layer.is_transposed for name in names if name in module._parameters}


def _is_layer(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _MARKS)


@contextmanager
def instead(model: nn.Module, run: Callable[[Layer], Tensor | None]) -> Iterator[None]:
    """Inside, `run` computes what modules of experts give; where it returns None, or a module is of another form,
    transformers does. Give it a copy of a model, whose configurations nobody else reads.
    """
    functions = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)
    modules: list[Any] = [each for each in model.modules() if _is_layer(each)]
    configs = {id(each.config): each.config for each in modules if hasattr(each.config, SETTING)}
    if functions is None or not configs:
        yield
        return
    wide = all(x.dtype.itemsize >= 4 for x in model.parameters() if x.is_floating_point())
    others = {key: "grouped_mm" if wide else getattr(config, SETTING) for key, config in configs.items()}

    def forward(module: Any, *given: Any, **named: Any) -> Any:
        layer = _layer(module, [*given, *named.values()])
        found = None if layer is None else run(layer)
        if found is not None:
            return found
        usual = functions.get_interface(others[id(module.config)], type(module).forward.__wrapped__)
        return usual(module, *given, **named)

    before = [(config, getattr(config, SETTING)) for config in configs.values()]
    functions[_OWN] = forward
    for config in configs.values():
        setattr(config, SETTING, _OWN)
    try:
        yield
    finally:
        for config, value in before:
            setattr(config, SETTING, value)
        del functions[_OWN]


def _layer(module: Any, given: list[Any]) -> Layer | None:
    if len(given) != 3 or any(getattr(module, name, False) for name in _OTHER_FORMS):
        return None
    x, indices, weights = given
    first: Any = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    second: Any = getattr(module, "down_proj", None)
    shaped = all(isinstance(each, Tensor) and each.ndim == 2 for each in given)
    if not shaped or not all(isinstance(each, Tensor) and each.ndim == 3 for each in (first, second)):
        return None
    if weights.shape != indices.shape or indices.dtype.is_floating_point:
        return None
    first_bias = (
        getattr(module, "gate_up_proj_bias" if module.has_gate else "up_proj_bias") if module.has_bias else None
    )
    second_bias = module.down_proj_bias if module.has_bias else None
    activation = module._apply_gate if module.has_gate else module.act_fn
    return Layer(
        x, indices, weights, first, second, first_bias, second_bias, activation, module.has_gate, module.is_transposed
    )


@contextmanager
def wide() -> Iterator[None]:
    """For the duration, transformers multiplies float64 by its own fallback: torch's grouped product knows narrower
    types alone. Nothing where it is not loaded, or has no such choice.
    """
    module: Any = sys.modules.get("transformers.integrations.moe")
    before = getattr(module, "_can_use_grouped_mm", None)
    if before is None:
        yield
        return

    def can_use(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> bool:
        return weight.dtype != torch.float64 and before(input, weight, *rest, **options)

    module._can_use_grouped_mm = can_use
    try:
        yield
    finally:
        module._can_use_grouped_mm = before
