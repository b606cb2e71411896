"""What a model's forward is handed for one token of each of several requests, and for a chunk of their prompts: what
`generate()` hands it, the model's own masks in it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface.caches import NAMES, name_of
from autopar.base.huggingface.generation import check_generates, has_encoder
from autopar.base.huggingface.masks import SPELLED_OUT

BY_COLUMN = "chunked_attention"
"""Layers whose masks are made of columns, where others' are of distances."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that follow the longest row of a batch."""


def check_serves(model: nn.Module) -> None:
    """Raises an AutoparError for a model in which a row depends on another, or on the column in which it begins."""
    check_generates(model)
    config: Any = model
    config = config.config.get_text_config(decoder=True)
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = {rotary.get("rope_type"), *(each.get("rope_type") for each in rotary.values() if isinstance(each, dict))}
    reasons = {
        "an encoder gives each request states of its own length": has_encoder(model),
        "its forward takes no cache": name_of(model) is None,
        "its attention is cut by columns": getattr(config, "attention_chunk_size", None) is not None
        or BY_COLUMN in (getattr(config, "layer_types", None) or ()),
        "its rotary embedding follows the longest sequence of a batch": any(kind in BY_LENGTH for kind in kinds),
    }
    for reason, holds in reasons.items():
        if holds:
            raise AutoparError(
                f"{type(model).__name__} cannot serve requests that come and go in a batch",
                values=reason,
                remedy="call generate() for each of them, or for those of one length",
            )


def inputs_of(
    model: Any, ids: Tensor, cache: Any, mask: Tensor, positions: Tensor, *, begins: bool, kept: Tensor | None = None
) -> dict[str, Any]:
    """The keyword arguments of a call of forward.

    ids, positions [rows, count]: of the new tokens. mask [rows, written + count]: 1 where a row has a token of its own.
    begins: whether a prompt does, as `generate()` tells models. kept: of packed prompts, the columns
    whose logits are wanted; None: the last one.
    """
    taken = inspect.signature(model.forward).parameters
    setattr(cache, SPELLED_OUT, kept is not None)
    given: dict[str, Any] = {name_of(model) or NAMES[0]: cache, "attention_mask": mask, "use_cache": True}
    if "position_ids" in taken:
        given["position_ids"] = positions
    if "logits_to_keep" in taken:
        given["logits_to_keep"] = 1 if kept is None else kept
    found = model.prepare_inputs_for_generation(ids, is_first_iteration=begins, **given)
    return {**found, "return_dict": True}


def packs(model: nn.Module, cache: Any, device: torch.device) -> bool:
    """Whether prompts may stand one behind the other in a row: all that a token reads of others goes through attention
    with a mask, and its position is what it is told.
    """
    kinds = {layout.kind for layout in cache.layouts()}
    if not kinds <= {"attention", "none"} or "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    inputs = inputs_of(model, ids, cache, torch.ones_like(ids), ids, begins=True, kept=ids[0])
    masks = _masks(inputs.get("attention_mask"))
    return bool(masks) and all(isinstance(mask, Tensor) and mask.dim() == 4 for mask in masks.values())


def within_documents(inputs: dict[str, Any], documents: Tensor, first: int) -> dict[str, Any]:
    """The inputs with masks under which a token sees its own document alone.

    documents [rows, length]: which one each column of the cache is of; the new tokens are those from column `first`.
    """
    count = next(iter(_masks(inputs["attention_mask"]).values())).shape[2]
    own = documents[:, first : first + count, None] == documents[:, None, :]

    def narrowed(mask: Tensor) -> Tensor:
        same = own[:, None].to(mask.device)
        return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)

    masks = inputs["attention_mask"]
    found = {name: narrowed(mask) for name, mask in masks.items()} if isinstance(masks, dict) else narrowed(masks)
    return {**inputs, "attention_mask": found}


def _masks(given: Any) -> dict[str, Any]:
    return given if isinstance(given, dict) else {"": given}


def ends_of(model: Any, given: int | list[int] | None) -> frozenset[int]:
    """The tokens after which a sequence ends: those that are given, or the model's."""
    found = model.generation_config.eos_token_id if given is None else given
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)
