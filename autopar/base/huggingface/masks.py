"""Which attention masks transformers makes, decided while it is traced as it is in eager mode.

Without padding and packed sequences eager makes no mask and lets attention be causal, or not, as the module says. Under
export it makes one in any case, which is causal even where the module's attention is not.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autopar.base.torch_compat import tracing

logger = logging.getLogger(__name__)

# What the functions that make masks ask. Whether anything is exported, later versions ask by itself; earlier ones ask
# `is_tracing` of a padding that there is not.
_ASKED = ("find_packed_sequence_indices", "is_torchdynamo_exporting", "is_tracing")
_NEEDED = {"find_packed_sequence_indices", "is_tracing"}


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Inside, only a mask that depends on the inputs is made where eager might make none.

    What eager does, in other threads too, stays as it is.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    before = {name: getattr(module, name) for name in _ASKED if hasattr(module, name)}
    if module is not None and not before.keys() >= _NEEDED:
        logger.warning(
            "this version of transformers makes masks by other functions than autopar knows (%s are missing): "
            "attention that goes both ways, or packed sequences, may be traced as causal; compare by plan.verify()",
            ", ".join(sorted(_NEEDED - before.keys())),
        )

    def known_packed(position_ids: Any) -> Any:
        follow = tracing.known_value(position_ids, _follow_each_other)
        return None if follow else before["find_packed_sequence_indices"](position_ids)

    def traced(tensor: Any = None) -> bool:
        return tensor is not None and before["is_tracing"](tensor)

    instead = {
        "find_packed_sequence_indices": known_packed,
        "is_torchdynamo_exporting": lambda: False,
        "is_tracing": traced,
    }
    try:
        for name in before:
            setattr(module, name, instead[name])
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


SPELLED_OUT = "_autopar_masks_are_spelled_out"
"""An attribute of a cache: whether a prompt that is read into it has a mask even where attention could be told that it
is causal, as it can of the first tokens alone. So all chunks of a prompt are of one kind.
"""
_SKIPPED = {
    "full_attention": "create_causal_mask", "sliding_attention": "create_sliding_window_causal_mask",
    "chunked_attention": "create_chunked_causal_mask",
}  # fmt: skip


def spelled_out(model: type) -> Callable[..., Any]:
    """`create_masks_for_generate` of a class of transformers, with the masks that it leaves out where a cache asks for
    them (`SPELLED_OUT`).
    """
    module = importlib.import_module("transformers.masking_utils")
    own: Any = inspect.getattr_static(
        model, "create_masks_for_generate", staticmethod(module.create_masks_for_generate)
    )

    def create(
        self: Any, config: Any, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        original = own.__get__(self, model)  # of some models a static method, of others not
        found = original(config, inputs_embeds, attention_mask, past_key_values, *args, **kwargs)
        if not getattr(past_key_values, SPELLED_OUT, False):
            return found

        def made(pattern: str) -> Any:
            given = {"position_ids": kwargs.get("position_ids"), "block_sequence_ids": kwargs.get("block_sequence_ids")}
            return getattr(module, _SKIPPED[pattern])(
                config.get_text_config(), inputs_embeds, attention_mask, past_key_values, allow_is_causal_skip=False,
                **{name: x for name, x in given.items() if x is not None},
            )  # fmt: skip

        if isinstance(found, dict):
            return {name: made(name) if x is None and name in _SKIPPED else x for name, x in found.items()}
        return made("full_attention") if found is None else found

    return create


def _follow_each_other(rows: Tensor) -> bool:
    """Whether each number in rows[B, S] is one more than the one before it."""
    return bool((rows.diff(dim=-1) == 1).all())
