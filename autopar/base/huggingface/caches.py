"""The cache of a compiled model's `generate()`: states, which a program takes and returns.

transformers' static cache is written in place; ours is handed in and comes back as other tensors, so that a program is
a function of it. All layers have the length of the longest sequence: where attention has a window, the mask says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import experts

NAMES = ("past_key_values", "cache_params")
"""What transformers' models call a cache in their forward."""


def is_cache(value: Any) -> bool:
    """Whether it is a cache of ours (`states.StateCache`). Imports nothing."""
    return type(value).__name__ == "StateCache" and type(value).__module__ == f"{__package__}.states"


def layouts_among(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What caches keep beside tensors, which tells one program from another: whether a state was written."""
    return tuple(tuple(value.layouts()) for value in inputs.values() if is_cache(value))


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


def name_of(model: nn.Module) -> str | None:
    """What its forward calls a cache, if it takes one."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in taken), None)


def of_call(given: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache among the arguments of a call of forward, and its name.

    Raises:
        AutoparError: there is none.
    """
    for name in NAMES:
        if is_cache(given.get(name)):
            return name, given[name]
    raise AutoparError(
        "generate() calls forward() without the cache that it was given",
        remedy="call it with use_cache=False, which computes every position again for each token",
    )


def new_cache(model: nn.Module, batch: int, length: int, device: torch.device) -> Any:
    """An empty cache for `batch` sequences of up to `length` positions, whose zeros take no memory until they are cut.

    model: on meta; what its layers keep is found by a forward of it.

    Raises:
        AutoparError: layers that keep what is no state yet, encoders.
    """
    from transformers.cache_utils import StaticCache

    from autopar.base.huggingface.states import KINDS, Layout, StateCache, states_of_layer

    found: Any = model
    where = type(model).__name__
    refused = "generate() of a compiled model cannot keep what this model keeps"
    remedy = "call it with use_cache=False, which computes every position again for each token"
    if found.config.is_encoder_decoder:
        raise AutoparError(refused, where=where, values="it has an encoder", remedy=remedy)
    name = name_of(model)
    if name is None:
        raise AutoparError(refused, where=where, values=f"its forward() takes no {NAMES[0]}", remedy=remedy)
    probe = StaticCache(found.config, max_cache_len=length)
    layers: list[Any] = probe.layers
    for number, layer in enumerate(layers):
        if type(layer).__name__ not in KINDS:
            values = f"it keeps a {type(layer).__name__}"
            raise AutoparError(refused, where=f"layer {number} of {where}", values=values, remedy=remedy)
    with torch.no_grad(), torch.device("meta"), experts.instead(model, lambda layer: torch.empty_like(layer.x)):
        found(input_ids=torch.zeros(batch, 1, dtype=torch.long), use_cache=True, **{name: probe})
    layouts: list[Layout] = []
    states: list[Tensor] = []
    for number, layer in enumerate(layers):
        try:
            layout, kept = states_of_layer(layer, length, device)
        except ValueError as error:
            values = "nothing was written into its cache: it may share another layer's keys"
            raise AutoparError(refused, where=f"layer {number} of {where}", values=values, remedy=remedy) from error
        layouts.append(layout)
        states += kept
    return StateCache(layouts, states)


def advanced(cache: Any, count: int) -> Any:
    """The cache as a forward of `count` tokens leaves it, but for what it writes."""
    after = cache.after(cache.states())
    after.advance(count)
    return after


def with_states(cache: Any, values: Mapping[str, Tensor], name: str) -> Any:
    """The cache after a forward, of the states that this gave, which are called `name.0`, `name.1`, ..."""
    return cache.after(values[f"{name}.{number}"] for number in range(len(cache.states())))


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
            model_kwargs[name_of(self) or NAMES[0]] = make(self, rows, length)

    return prepare
