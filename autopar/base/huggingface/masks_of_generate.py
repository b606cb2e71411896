"""What `generate()` of a compiled model hands to it as a mask: what transformers makes for caches of fixed length.

Most models are handed a mask for each query and key, [batch, 1, new, length]; those that make more of a mask than
attention does (ALiBi counts the tokens before each key) which positions count, [batch, length].
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.huggingface.caches import NAMES, called_without_data, name_of
from autopar.base.huggingface.masks import SPELLED_OUT
from autopar.base.huggingface.tiny import shrunk

_SKIPPED = {
    "full_attention": "create_causal_mask", "sliding_attention": "create_sliding_window_causal_mask",
    "chunked_attention": "create_chunked_causal_mask",
}  # fmt: skip


def spelled_out(model: type) -> Callable[..., Any]:
    """`create_masks_for_generate` of a class of transformers, with the masks that it leaves out where a cache asks for
    them (`SPELLED_OUT`), and of a model that reads no others the mask of positions, as long as the cache.
    """
    module = importlib.import_module("transformers.masking_utils")
    usual = staticmethod(module.create_masks_for_generate)
    own: Any = inspect.getattr_static(model, "create_masks_for_generate", usual)
    reads_rows: list[bool] = []

    def create(
        self: Any, config: Any, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if own is usual and not reads_rows:
            reads_rows.append(_reads_rows(model, self.config))
        if reads_rows == [True]:
            return _rows(attention_mask, past_key_values, *inputs_embeds.shape[:2])
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


def _rows(mask: Tensor | None, cache: Any, batch: int, count: int) -> Tensor:
    """The mask [batch, length], as long as a cache, with so many new tokens. mask: up to these; None: all count."""
    length = cache.get_max_length()
    if mask is not None:
        return F.pad(mask, (0, max(0, length - mask.shape[1])))
    written = torch.as_tensor(cache.get_seq_length())
    columns = torch.arange(length, device=written.device)
    return (columns < written + count).to(torch.int64).expand(batch, length).contiguous()


def _reads_rows(model: type, config: Any) -> bool:
    """Whether forward of a class can be handed a mask [batch, length], beside a cache of fixed length, and none of more
    dims: a small one of it is asked, without data.
    """
    from transformers.cache_utils import StaticCache

    length = 4
    failures = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
    try:
        with torch.device("meta"):
            small: Any = model(shrunk(config, length)).eval()
    except Exception:  # whatever a configuration says of sizes that it does not take
        return False
    text, name = small.config.get_text_config(decoder=True), name_of(small) or NAMES[0]

    def takes(mask: Tensor) -> bool:
        cache = StaticCache(text, max_cache_len=length)
        given = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device="meta"), "attention_mask": mask, name: cache}
        try:
            called_without_data(small, {**given, "use_cache": True})
        except failures:
            return False
        return True

    whole = torch.ones(1, 1, 1, length, dtype=torch.bool, device="meta")
    return not takes(whole) and takes(torch.ones(1, length, dtype=torch.long, device="meta"))
