"""What `generate()` of a compiled model hands to it as a mask: what transformers makes for caches of fixed length.

Most models are handed a mask for each query and key, [batch, 1, new, length]; those that make more of a mask than
attention does (ALiBi counts the tokens before each key) which positions count, [batch, length].
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.huggingface.caches import NAMES, advanced, called_without_data, name_of, of_call
from autopar.base.huggingface.library import quiet
from autopar.base.huggingface.masks import SPELLED_OUT, TOKENS
from autopar.base.huggingface.reuse import num_written
from autopar.base.huggingface.tiny import shrunk

_WHOLE = 4
"""Dims of a mask of each query and key."""
_PROBES = 8
"""Steps between the tokens whose masks are made to see what they show."""
_SLIDING = "sliding_attention"
_BY_KIND = ("create_masks_for_generate", "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING")
_SKIPPED = {
    "full_attention": "create_causal_mask", _SLIDING: "create_sliding_window_causal_mask",
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
        others = (*args, *(x for name, x in kwargs.items() if name != "position_ids"))
        if own is usual and not any(x is not None and x is not False for x in others):
            found = _of_a_token(self, inputs_embeds, attention_mask, past_key_values)
            if found is not None:
                return found
        if own is usual and (window := _window_of_cache(self, config.get_text_config(), module)) is not None:
            shown = partial(_is_kept, written=past_key_values.get_seq_length(), window=window)
            return module.create_causal_mask(
                config.get_text_config(), inputs_embeds, attention_mask, past_key_values, and_mask_function=shown,
                allow_is_causal_skip=False,
            )  # fmt: skip
        original = own.__get__(self, model)  # of some models a static method, of others not
        found = original(config, inputs_embeds, attention_mask, past_key_values, *args, **kwargs)

        def made(pattern: str, **options: Any) -> Any:
            given = {"position_ids": kwargs.get("position_ids"), "block_sequence_ids": kwargs.get("block_sequence_ids")}
            return getattr(module, _SKIPPED[pattern])(
                config.get_text_config(), inputs_embeds, attention_mask, past_key_values, **options,
                **{name: x for name, x in given.items() if x is not None},
            )  # fmt: skip

        if own is usual and isinstance(found, dict) and _leaves_windows_to_caches(config.get_text_config(), module):
            found = {name: made(name) if name == _SLIDING else x for name, x in found.items()}
        if not getattr(past_key_values, SPELLED_OUT, False):
            return found
        spelled = partial(made, allow_is_causal_skip=False)
        if isinstance(found, dict):
            return {name: spelled(name) if x is None and name in _SKIPPED else x for name, x in found.items()}
        return spelled("full_attention") if found is None else found

    return create


def _leaves_windows_to_caches(config: Any, module: Any) -> bool:
    """Whether transformers masks no window of layers that have one, as its caches keep no more than that: ours keep
    all positions.
    """
    patterns = (module.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind) for kind in set(config.layer_types))
    own = getattr(module, _SKIPPED[_SLIDING])
    return any(isinstance(each, Mapping) and each.get(_SLIDING, own) is not own for each in patterns)


def _window_of_cache(model: Any, config: Any, module: Any) -> int | None:
    """The window of a model that masks none: of what was there before a call, its caches keep no more, but what comes
    in one call all sees all before it there (Moshi). None of others.
    """
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or hasattr(config, "layer_types"):
        return None
    makers = {id(getattr(module, name)) for name in dir(module) if "sliding" in name or name in _BY_KIND}
    files = [sys.modules[name] for name in {type(each).__module__ for each in model.modules()}]
    return None if any(id(each) in makers for file in files for each in vars(file).values()) else window


def _is_kept(batch: Any, head: Any, query: Any, key: Any, *, written: Any, window: int) -> Any:
    """Whether a key is of the call itself, or of the last `window - 1` before it."""
    return key > written - window


def _of_a_token(self: Any, embeds: Tensor, mask: Any, cache: Any) -> Any:
    """The mask of one token of each row, [batch, 1, 1, length], where all layers see all tokens before it, in a few
    steps; None where it has to be made as transformers makes it.

    Whether that is so is found out at a cache's first token, of which both are made, and kept with it (`TOKENS`).
    """
    if embeds.shape[1] != 1 or (mask is not None and (type(mask) is not Tensor or mask.dim() != 2)):
        return None
    way = getattr(cache, TOKENS, None)
    if way is None or (way.is_short and way.columns.shape[0] != cache.layers[0].get_max_length()):
        way = _way(self.config.get_text_config(), embeds, mask, cache)
        setattr(cache, TOKENS, way)
    if not way.is_short or (mask is not None and mask.shape[1] > way.columns.shape[0]):
        return None
    found = way.mask(mask, cache, embeds.shape[0])
    return {"full_attention": found} if way.by_kind else found


@dataclass(frozen=True, slots=True)
class _Way:
    """How masks of a token are made for a cache. columns: the numbers of its positions. by_kind: of layers."""

    is_short: bool
    columns: Tensor
    by_kind: bool = False

    def mask(self, mask: Tensor | None, cache: Any, batch: int) -> Tensor:
        """[batch, 1, 1, length]: the positions up to the token's that count. mask: [batch, positions so far], None
        where all count.
        """
        length, device = self.columns.shape[0], self.columns.device
        written = cache.get_seq_length()
        written = written if type(written) is Tensor else torch.as_tensor(written, device=device).as_subclass(Tensor)
        if mask is None:
            return (self.columns <= written).expand(batch, 1, 1, length)
        counts = F.pad(mask.to(torch.bool), (0, length - mask.shape[1]))
        return (counts & (self.columns <= written)).view(-1, 1, 1, length)


def _way(config: Any, embeds: Tensor, mask: Tensor | None, cache: Any) -> _Way:
    kinds = getattr(config, "layer_types", None)
    way = _Way(True, torch.arange(cache.get_max_length(), device=embeds.device), kinds is not None)
    if not _sees_all(config, kinds, cache) or (mask is not None and mask.shape[1] > way.columns.shape[0]):
        return replace(way, is_short=False)
    usual: Any = importlib.import_module("transformers.masking_utils").create_masks_for_generate(
        config, embeds, mask, cache
    )
    if kinds is not None:
        usual = usual.get("full_attention") if isinstance(usual, dict) and len(usual) == 1 else None
    found = way.mask(mask, cache, embeds.shape[0])
    is_same = isinstance(usual, Tensor) and usual.dtype == found.dtype and torch.equal(found, usual)
    return replace(way, is_short=is_same)


def _sees_all(config: Any, kinds: Any, cache: Any) -> bool:
    """Whether each layer sees every token up to the query's, by the masks of `scaled_dot_product_attention`."""
    return (
        config._attn_implementation == "sdpa"
        and getattr(config, "is_causal", True)
        and (kinds is None or set(kinds) == {"full_attention"})
        and getattr(config, "sliding_window", None) is None
        and getattr(config, "attention_chunk_size", None) is None
        and all(layer.kind == "attention" for layer in cache.layouts())
    )


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
        with quiet(), torch.device("meta"):
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


def shown(model: Any, given: Mapping[str, Any], first: int, length: int) -> dict[str, float]:
    """How many positions of a cache the masks of a call for one token show it, on the average of the tokens behind
    `first` written positions up to the last of `length`, by the names of inputs; of masks that show fewer than are
    written.

    model: may be on meta. given: what `generate()` hands to forward for a token, with masks made by `spelled_out`.
    """
    _, cache = of_call(given)
    own = cache.pair[0] if hasattr(cache, "pair") else cache
    takes = "decoder_attention_mask" if hasattr(cache, "pair") else "attention_mask"
    given_mask = given.get(takes)
    masks = given_mask if isinstance(given_mask, dict) else {"": given_mask}
    if not any(isinstance(x, Tensor) and x.dim() == _WHOLE for x in masks.values()):
        return {}
    create, embeds = spelled_out(type(model)), torch.empty(1, 1, 0, dtype=model.dtype)
    counts: dict[str, float] = {}
    tokens = sorted({round(first + (length - 1 - first) * n / _PROBES) for n in range(_PROBES + 1)})
    for written in tokens:
        at = advanced(own, written - num_written(own))
        made = create(model, model.config, embeds, None, at, position_ids=torch.tensor([[written]]))
        for kind, mask in (made if isinstance(made, dict) else {"": made}).items():
            seen = written + 1 if mask is None else (mask if mask.dtype == torch.bool else mask == 0).sum(-1).max()
            counts[kind] = counts.get(kind, 0.0) + float(seen) / len(tokens)
    whole = sum(written + 1 for written in tokens) / len(tokens)
    return {f"{takes}.{kind}" if kind else takes: few for kind, few in counts.items() if few < 0.999 * whole}
