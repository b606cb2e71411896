"""transformers' own `generate()`, with another forward in the model's place: what it hands to a model, and what it
makes of the answers. The model may be on meta, without weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface.caches import generating

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
    make_cache: Callable[[Any, int, int], Any],
    *,
    beams: int = 1,
) -> Tensor:
    """The tokens of `generate()`, whose calls of forward `answer` answers; on the CPU, whatever the model is on.

    make_cache: see `caches.generating`. All tokens are made, whatever ends a sequence.
    """
    check_generates(model)
    kind: Any = type(model)

    def forward(self: Any, **kwargs: Any) -> Any:
        return answer(kwargs)

    namespace = {
        "forward": functools.wraps(kind.forward)(forward),
        "device": property(lambda self: torch.device("cpu")),
        "_prepare_cache_for_generation": generating(kind._prepare_cache_for_generation, make_cache),
    }
    shadow: Any = copy.copy(model)
    shadow.__class__ = type(kind.__name__, (kind,), namespace)
    found: Any = shadow.generate(
        **prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=beams,
        pad_token_id=0, use_cache=True,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def outputs(logits: Tensor, cache: Any, name: str) -> Any:
    """What a language model's forward returns. name: of the cache."""
    from autopar.base.huggingface.states import Outputs

    return Outputs(logits=logits, **{name: cache})


def vocabulary(model: nn.Module) -> int:
    """How many tokens the head tells apart."""
    config: Any = model
    return int(config.config.get_text_config(decoder=True).vocab_size)
