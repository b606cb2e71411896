"""A plan as `transformers.distributed.DistributedConfig` takes it: sizes, and a style for each module that is split.

Styles (transformers.distributed.tensor_parallel): colwise and rowwise of linears, `packed_colwise` of two of them in
one matrix, `colwise_gather_output` where the model's own code reads the result whole, `embedding_rowwise` and
`embedding_colwise` of tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.base.errors import AutoparError
from autopar.ir.sharding import Shard
from autopar.views.engines.layout import EXPERT_DIMS, Layout

if TYPE_CHECKING:
    from autopar.ir.sharding import Placement
    from autopar.planner.plan.record import PlanRecord

PACKED = 2
"""Matrices in one whose halves are split alike."""


def text(plan: PlanRecord, layout: Layout, model: nn.Module) -> str:
    """JSON of the arguments of `DistributedConfig`.

    Raises:
        AutoparError: a parameter whose split has no style, key heads that the ranks cannot share evenly, two axes that
            split matrices.
    """
    if len(layout.tensor_axes) > 1:
        raise AutoparError("two axes of this plan split matrices, transformers has one", remedy="plan with one of them")
    data: dict[str, object] = {"tp_size": layout.tensor, "fsdp_size": layout.data, "pp_size": layout.pipeline}
    if layout.experts > 1:
        data["ep_size"] = layout.experts
    for place in layout.tensor_axes:
        _check_heads(layout, model)
        data["tp_plan"] = _styles(plan, place, model)
    return json.dumps(data, indent=1) + "\n"


def _check_heads(layout: Layout, model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % layout.tensor:
        raise AutoparError(
            f"transformers gives each rank as many key heads: {layout.tensor} ranks cannot share {heads}",
            remedy=f"plan with a tensor axis that divides {heads}",
        )


def _styles(plan: PlanRecord, place: int, model: nn.Module) -> dict[str, str]:
    """By module with `*` for numbers; every layer has to say the same."""
    named: Any = getattr(model, "get_output_embeddings", None)
    head = None if named is None else named()
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, str | None] = {}
    for parameter in plan.interface.parameters:
        placement = plan.decisions.placement.parameters[parameter.name].compute[place]
        for name in (parameter.name, *parameter.aliases):
            owner, _, leaf = name.rpartition(".")
            module = modules[owner]
            style = _style(name, leaf, module, placement, parameter.shape, module is head)
            if leaf == "bias" and style is None and isinstance(module, nn.Linear):
                continue  # a row-wise linear's is whole
            key = re.sub(r"\.\d+(?=\.|$)", ".*", name if len(parameter.shape) >= EXPERT_DIMS else owner)
            if found.setdefault(key, style) != style:
                raise AutoparError(
                    f"{name} is split otherwise than others of {key}, for which transformers has one style",
                    remedy="plan with strategy `tensor`, which splits all layers alike",
                )
    return {key: style for key, style in found.items() if style is not None}


def _style(
    name: str, leaf: str, module: nn.Module, placement: Placement, shape: Sequence[int], is_head: bool
) -> str | None:
    """The style of the module by what lies of one parameter; None where it is whole."""
    if not isinstance(placement, Shard):
        return None
    dim, is_linear = placement.dim, isinstance(module, nn.Linear)
    packed = placement.outer == PACKED and not placement.zigzag
    plain = placement.outer == 1 and not placement.zigzag
    if len(shape) >= EXPERT_DIMS and dim == 0 and plain:
        return None  # experts: transformers' own plan for them, with `ep_size`
    if is_linear and dim == 0 and (plain or packed):
        return "packed_colwise" if packed else "colwise_gather_output" if is_head else "colwise"
    if is_linear and leaf == "weight" and dim == 1 and plain:
        return "rowwise"
    if isinstance(module, nn.Embedding) and plain:
        return "embedding_rowwise" if dim == 0 else "embedding_colwise"
    raise AutoparError(
        f"{name} is {placement} over the tensor axis, for which transformers has no style",
        values=f"it belongs to a {type(module).__name__} of shape {list(shape)}",
        remedy="pin it whole (pins={…: autopar.Replicate()}) where the plan allows that, and plan again",
    )
