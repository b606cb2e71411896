"""Which attention masks transformers makes, decided while it is traced as it is in eager mode.

Without padding and packed sequences eager makes no mask and lets attention be causal, or not, as the module says. Under
export it makes one in any case, which is causal even where the module's attention is not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autopar.base.torch_compat import tracing

logger = logging.getLogger(__name__)

# What the functions that make masks ask. Whether anything is exported, later versions ask by itself; earlier ones ask
# `is_tracing` of a padding that there is not.
_ASKED = ("find_packed_sequence_indices", "is_torchdynamo_exporting", "is_tracing", "_ignore_causal_mask_sdpa")
_NEEDED = {"find_packed_sequence_indices", "is_tracing"}


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Inside, only a mask that depends on the inputs is made where eager might make none.

    How many tokens a cache holds is such an input: a mask holds for any number of them. Earlier versions ask whether
    there are none, to tell attention that it is causal.

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

    def none_needed(padding: Any, num_new: int, num_held: int, first: Any, *others: Any, **named: Any) -> bool:
        if isinstance(first, Tensor) and before["is_tracing"](first):
            return False
        return bool(before["_ignore_causal_mask_sdpa"](padding, num_new, num_held, first, *others, **named))

    instead = {
        "find_packed_sequence_indices": known_packed,
        "is_torchdynamo_exporting": lambda: False,
        "is_tracing": traced,
        "_ignore_causal_mask_sdpa": none_needed,
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
TOKENS = "_autopar_masks_of_tokens"
"""An attribute of a cache: how masks of one token are made for it (`masks_of_generate.py`)."""


def _follow_each_other(rows: Tensor) -> bool:
    """Whether each number in rows[B, S] is one more than the one before it."""
    return bool((rows.diff(dim=-1) == 1).all())
