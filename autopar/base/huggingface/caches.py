"""The cache of a compiled model's `generate()`: states, which a program takes and returns.

transformers' static cache is written in place; ours is handed in and comes back as other tensors, so that a program is
a function of it. All layers have the length of the longest sequence: where attention has a window, the mask says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.tracing import register_container

NAMES = ("past_key_values", "cache_params")
"""What transformers' models call a cache in their forward."""


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """The class of a layer and of a cache; they extend transformers' own, which is imported late."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class StateLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
        """Keys and values [batch, heads, length, dim] of one layer, and how many positions are written (int64 [])."""

        is_compileable = True
        is_sliding = False
        keys: Any
        values: Any

        def __init__(self, keys: Tensor, values: Tensor, written: Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.cumulative_length = keys, values, written
            self.is_initialized = True

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("states are made before they are used")

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            count = key_states.shape[-2]
            at = torch.arange(count, device=key_states.device) + self.cumulative_length
            self.cumulative_length = self.cumulative_length + count
            self.keys = self.keys.index_copy(2, at, key_states)
            self.values = self.values.index_copy(2, at, value_states)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.keys.shape[-2], 0

        def get_seq_length(self) -> Any:
            return self.cumulative_length

        def get_max_length(self) -> int:
            return int(self.keys.shape[-2])

    class StateCache(Cache):  # type: ignore[misc, unused-ignore]
        """One `StateLayer` a layer."""

        def __init__(self, states: list[Tensor]) -> None:
            layers: list[Any] = [StateLayer(*states[i : i + 3]) for i in range(0, len(states), 3)]
            super().__init__(layers=layers)

        def states(self) -> list[Tensor]:
            """Of every layer keys, values and the number of positions written."""
            layers: list[Any] = self.layers
            return [x for each in layers for x in (each.keys, each.values, each.cumulative_length)]

    register_container(StateCache, lambda cache: cache.states(), StateCache)
    return StateLayer, StateCache


def is_cache(value: Any) -> bool:
    """Whether it is a cache of ours. Imports nothing."""
    return type(value).__name__ == "StateCache" and type(value).__module__ == __name__


def check_cache(inputs: Mapping[str, Any]) -> None:
    """Raises an AutoparError where a batch comes with a cache of another kind, which no program can take."""
    for name in NAMES:
        value = inputs.get(name)
        if value is not None and not is_cache(value):
            raise AutoparError(
                f"a compiled model cannot take {name} of type {type(value).__name__}",
                remedy="compiled.generate() makes its own cache: hand in none, nor a cache_implementation "
                "(or call forward with use_cache=False)",
            )


def states_among(inputs: Mapping[str, Any]) -> set[str]:
    """The inputs that are caches."""
    return {name for name, value in inputs.items() if is_cache(value)}


def new_cache(model: nn.Module, batch: int, length: int, device: torch.device) -> Any:
    """An empty cache for `batch` sequences of up to `length` positions, whose zeros take no memory until they are cut.

    model: on meta; what its layers keep is found by a forward of it.

    Raises:
        AutoparError: layers that keep something other than keys and values, encoders.
    """
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    found: Any = model
    refused = "generate() of a compiled model keeps keys and values of decoders alone"
    remedy = "call it with use_cache=False, which computes every position again for each token"
    if found.config.is_encoder_decoder:
        raise AutoparError(refused, where=type(model).__name__, values="it has an encoder", remedy=remedy)
    probe = StaticCache(found.config, max_cache_len=length)
    for number, layer in enumerate(probe.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            kind = type(layer).__name__
            raise AutoparError(
                refused, where=f"layer {number} of {type(model).__name__}", values=f"it keeps a {kind}", remedy=remedy
            )
    with torch.no_grad(), torch.device("meta"):
        found(input_ids=torch.zeros(batch, 1, dtype=torch.long), past_key_values=probe, use_cache=True)
    _, cache = _kinds()
    states: list[Tensor] = []
    layers: list[Any] = probe.layers
    for layer in layers:
        for like in (layer.keys, layer.values):
            if like is None:
                raise AutoparError(refused, where=type(model).__name__, values="layers share keys", remedy=remedy)
            shape = (*like.shape[:2], length, like.shape[3])
            states.append(torch.zeros((), dtype=like.dtype, device=device).expand(shape))
        states.append(torch.zeros((), dtype=torch.int64, device=device))
    return cache(states)


def advanced(cache: Any, count: int) -> Any:
    """The cache as a forward of `count` tokens leaves it, but for what it writes."""
    for layer in cache.layers:
        layer.cumulative_length = layer.cumulative_length + count
    return cache


def with_states(cache: Any, values: Mapping[str, Tensor], name: str) -> Any:
    """A cache like this one of other states, which are called `name.0`, `name.1`, ..."""
    return type(cache)([values[f"{name}.{number}"] for number in range(len(cache.states()))])


def generating(original: Any, make: Callable[[Any, int, int], Any]) -> Callable[..., None]:
    """`_prepare_cache_for_generation` of a compiled model, which gives `generate()` a cache of ours.

    original: the model's own. make: (model, batch, length) -> the cache.
    """

    def prepare(
        self: Any, config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if config.use_cache is False:
            original(self, config, model_kwargs, mode, batch_size, max_cache_length)
            return
        if mode.value == "assisted_generation":
            raise AutoparError(
                "generate() of a compiled model does not try drafts: its cache cannot be cut back",
                remedy="leave prompt_lookup_num_tokens and assistant_model out",
            )
        check_cache(model_kwargs)
        if config.cache_implementation is not None:
            raise AutoparError(
                f"a compiled model has no cache_implementation={config.cache_implementation!r}",
                remedy="leave it out: compiled.generate() makes its own cache, of fixed length",
            )
        config.disable_compile = True  # it is compiled
        if not any(is_cache(model_kwargs.get(name)) for name in NAMES):
            rows = batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)
            length = max(max_cache_length, getattr(config, "max_cache_len", None) or 0)
            model_kwargs["past_key_values"] = make(self, rows, length)

    return prepare
