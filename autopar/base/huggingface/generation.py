"""transformers' own `generate()`, with another forward in the model's place: what it hands to a model, and what it
makes of the answers. The model may be on meta, without weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface.caches import NAMES, Maker, called_without_data, generating, name_of
from autopar.base.huggingface.masks_of_generate import spelled_out
from autopar.base.huggingface.routers import without_routers

Answer = Callable[[dict[str, Any]], Any]
"""The keyword arguments of one call of forward -> what forward returns."""


def check_generates(model: nn.Module) -> None:
    """Raises an AutoparError for a model without `generate()`."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "_prepare_cache_for_generation"):
        raise AutoparError(
            f"{type(model).__name__} has no generate() of transformers",
            remedy="hand in a model of transformers with a head for language, such as LlamaForCausalLM",
        )


def driven(
    model: nn.Module,
    prompt: Mapping[str, Tensor],
    new_tokens: int,
    answer: Answer,
    make_cache: Maker,
    *,
    beams: int = 1,
    chunk: int | None = None,
    encoder: Callable[[Any], nn.Module],
) -> Tensor:
    """The tokens of `generate()`, whose calls of forward `answer` answers; on the CPU, whatever the model is on.

    make_cache: see `caches.generating`. chunk: tokens of the prompt in one call, None: all. encoder: what stands in the
    place of the model's, if it has one. All tokens are made, whatever ends a sequence, and what the model's
    configuration says of tokens (forced, never twice) is left out.
    """
    check_generates(model)
    kind: Any = type(model)

    def forward(self: Any, **kwargs: Any) -> Any:
        return answer(without_routers(self, kwargs))

    namespace = {
        "forward": functools.wraps(kind.forward)(forward),
        "device": property(lambda self: torch.device("cpu")),
        "_prepare_cache_for_generation": generating(kind._prepare_cache_for_generation, make_cache),
        "create_masks_for_generate": spelled_out(kind),
    }
    if has_encoder(model):
        stand_in = encoder(kind.get_encoder(model))
        namespace["get_encoder"] = lambda self: stand_in
    shadow: Any = copy.copy(model)
    shadow.generation_config = _without_rules(model)
    shadow.__class__ = type(kind.__name__, (kind,), namespace)
    found: Any = shadow.generate(
        **prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=beams,
        pad_token_id=0, use_cache=True, prefill_chunk_size=chunk,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def check_takes_chunks(model: nn.Module) -> None:
    """Raises an AutoparError for a model whose prompt `generate()` does not hand over in chunks."""
    if has_encoder(model) or name_of(model) != NAMES[0]:
        reason = "its decoder has no prompt" if has_encoder(model) else f"its cache is called {name_of(model)}"
        raise AutoparError(
            f"generate() of {type(model).__name__} takes no chunks of a prompt",
            values=reason,
            remedy="leave chunk (or prefill_chunk_size) out",
        )


def has_encoder(model: nn.Module) -> bool:
    """Whether its decoder reads what an encoder gives."""
    config: Any = model
    return bool(config.config.is_encoder_decoder)


def _without_rules(model: Any) -> Any:
    """A configuration of `generate()` with nothing of the model's but where a sequence begins."""
    from transformers.generation.configuration_utils import GenerationConfig

    names = ("decoder_start_token_id", "bos_token_id")
    return GenerationConfig(**{name: getattr(model.generation_config, name) for name in names})


class Within(nn.Module):
    """An encoder that runs within something. around: makes it."""

    def __init__(self, encoder: Any, around: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()

        def forward(**kwargs: Any) -> Any:
            with around():
                return encoder(**kwargs)

        self.forward = functools.wraps(encoder.forward)(forward)


class Unfilled(nn.Module):
    """An encoder that gives zeros, of the shapes of what it would give."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()

        def forward(**kwargs: Any) -> Any:
            # What is masked changes no shape, but library code asks what is in a mask.
            given = {name: x for name, x in kwargs.items() if not name.endswith("mask")}
            try:
                found = called_without_data(encoder, given)
            except (RuntimeError, NotImplementedError):  # it asks what is in other tensors, too
                return _as_long(encoder, given)
            return type(found)(**{name: torch.zeros(x.shape, dtype=x.dtype) for name, x in found.items()})

        self.forward = functools.wraps(encoder.forward)(forward)


def _as_long(encoder: Any, given: Mapping[str, Any]) -> Any:
    """Zeros for as many positions as an encoder of tokens is given."""
    from transformers.modeling_outputs import BaseModelOutput

    width = encoder.config.get_text_config(encoder=True).hidden_size
    dtype = next(x.dtype for x in encoder.parameters() if x.is_floating_point())
    hidden: Any = torch.zeros(*given["input_ids"].shape, width, dtype=dtype)
    return BaseModelOutput(last_hidden_state=hidden)


def outputs(logits: Tensor, cache: Any, name: str) -> Any:
    """What a language model's forward returns. name: of the cache."""
    from autopar.base.huggingface.states import Outputs

    return Outputs(logits=logits, **{name: cache})


def vocabulary(model: nn.Module) -> int:
    """How many tokens the head tells apart."""
    config: Any = model
    return int(config.config.get_text_config(decoder=True).vocab_size)
