"""The cache of a compiled model's `generate()`: states, which a program takes and returns.

transformers' static cache is written in place; ours is handed in and comes back as other tensors, so that a program is
a function of it. All layers have the length of the longest sequence: where attention has a window, the mask says so.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.codes import is_by_channel
from autopar.base.errors import AutoparError
from autopar.base.huggingface import experts, transformers_caches
from autopar.base.huggingface.layout import KINDS, Layout
from autopar.base.huggingface.masks import SPELLED_OUT
from autopar.base.huggingface.reuse import (
    does_not_go_back,
    fitting,
    known_empty,
    needed,
    num_marked,
    num_rows,
    num_written,
    put,
)
from autopar.base.huggingface.unknown_values import guessed
from autopar.base.torch_compat.trees import tree_leaves, tree_map

_NOT_GIVEN = (
    "it gives no cache back, as those of transformers that are no decoders (config.is_decoder) and look both ways"
)
NAMES = ("past_key_values", "cache_params")
"""What transformers' models call a cache in their forward."""
WITHOUT = "call it with use_cache=False, which computes every position again for each token"


def is_cache(value: Any) -> bool:
    """Whether it is a cache of ours (`states.py`). Imports nothing."""
    return (
        type(value).__name__ in ("StateCache", "StatePairCache") and type(value).__module__ == f"{__package__}.states"
    )


def of_blocks(value: Any) -> bool:
    """Whether it is a cache of ours of which each block of a model may be given its own layers (`block_cache.py`)."""
    return is_cache(value) and type(value).__name__ == "StateCache"


def layer_of(layout: Any, tensors: Sequence[Tensor]) -> Any:
    """A layer of states. layout: what it keeps beside tensors."""
    from autopar.base.huggingface.states import StateCache

    (layer,) = StateCache([layout], tensors).layers
    return layer


def seen_by_block(layers: Mapping[int, Any]) -> Any:
    """The cache as one block sees it (`block_cache.py`). layers: its own, by their numbers in the whole cache."""
    from autopar.base.huggingface.block_cache import BlockCache

    return BlockCache(layers)


def layouts_among(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What caches keep beside tensors, which tells one program from another: whether a state was written."""
    return tuple(tuple(value.layouts()) for value in inputs.values() if is_cache(value))


_SHOWN = "_autopar_shown"
"""An attribute of a cache among the inputs that something is planned for: what masks show of it, by their names."""


def with_shown(inputs: dict[str, Any], shown: Mapping[str, float]) -> dict[str, Any]:
    """The inputs, with a note of how many positions masks among them show a token on the average, by their names."""
    for name in sorted(states_among(inputs))[:1] if shown else ():
        vars(inputs[name])[_SHOWN] = dict(shown)
    return inputs


def shown_among(inputs: Mapping[str, Any]) -> dict[str, float]:
    """What is noted of masks among the inputs."""
    return {name: few for cache in inputs.values() if is_cache(cache)
            for name, few in vars(cache).get(_SHOWN, {}).items()}  # fmt: skip


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


def check_serves(cache: Any) -> None:
    """Raises an AutoparError for a cache of ours whose rows cannot be moved by columns, as requests come and go."""
    if any(is_by_channel(layout.storage) for layout in cache.layouts()):
        raise AutoparError(
            "requests that come and go cannot share a cache whose keys have a scale a channel",
            values="tokens of a group share scales, wherever a request begins",
            remedy="compile with cache='int8', 'int4' or 'fp8'",
        )


def check_forgets(cache: Any) -> None:
    """Raises an AutoparError for a cache of ours that cannot go back behind drafts that were not taken."""
    from autopar.base.huggingface.states import CROPPABLE

    for number, layout in enumerate(cache.layouts()):
        if is_by_channel(layout.storage):
            raise does_not_go_back()
        if layout.kind not in CROPPABLE:
            raise AutoparError(
                "generate() of this compiled model cannot try drafts: a recurrent state does not go back",
                where=f"layer {number}",
                remedy="leave prompt_lookup_num_tokens and assistant_model out",
            )


def states_among(inputs: Mapping[str, Any]) -> set[str]:
    """The inputs that are caches."""
    return {name for name, value in inputs.items() if is_cache(value)}


def called_without_data(module: nn.Module, given: Mapping[str, Any]) -> Any:
    """What a module gives, on meta, whatever it is on itself; layers of experts are left out. It stays as it is."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_meta = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    given = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in given.items()}
    without_experts = experts.instead(module, lambda layer: torch.empty_like(layer.x))
    with torch.no_grad(), torch.device("meta"), without_experts, _unwarned(module), _unchanged(module):
        return torch.func.functional_call(module, on_meta, kwargs=given)


_WARNS = "warn_if_padding_and_no_attention_mask"
"""A method of transformers' models that looks for padding among tokens, and does nothing but warn of it."""


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Inside, what forward keeps on modules is kept for so long: tables that it makes once would be without data."""
    before = [(each, dict(vars(each))) for each in module.modules()]
    try:
        yield
    finally:
        for each, attributes in before:
            for name in vars(each).keys() - attributes.keys():
                del vars(each)[name]
            vars(each).update(attributes)


@contextmanager
def _unwarned(module: nn.Module) -> Iterator[None]:
    """Inside, no model within a module looks for padding that it would warn of."""
    warning = [each for each in module.modules() if hasattr(type(each), _WARNS) and _WARNS not in vars(each)]
    for each in warning:
        vars(each)[_WARNS] = lambda *tensors: None
    try:
        yield
    finally:
        for each in warning:
            vars(each).pop(_WARNS, None)


def encoded_among(given: Mapping[str, Any]) -> Any:
    """What the encoder gave among the arguments of a call, as it gave it: hidden states first, [batch, length, dim]."""
    return given.get("encoder_outputs")


def num_new(given: Mapping[str, Any]) -> int:
    """How many positions a call of forward is for."""
    ids = given.get("decoder_input_ids")
    return int((given["input_ids"] if ids is None else ids).shape[1])


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
        values="some models begin anew where a sequence becomes longer than they were trained for",
        remedy="plan for sequences on one side of that length, or compile without generate=: compiled.generate() gives "
        "such a call a cache of its own",
    )


def gives_cache(model: nn.Module) -> bool:
    """Whether forward of a model, on meta, gives a cache that it is not handed: encoders take some and give none."""
    if model not in _give:
        ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
        config: Any = model.config
        given = {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
        try:
            found = called_without_data(model, {**given, "use_cache": True, "return_dict": True})
        except Exception:  # whatever else it wants: what nobody asks for costs nothing
            _give[model] = True
        else:
            _give[model] = any(getattr(found, name, None) is not None for name in NAMES)
    return _give[model]


_give: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def new_cache(
    model: nn.Module, batch: int, length: int, device: torch.device, encoded: Any = None,
    storage: str | None = None,
) -> Any:  # fmt: skip
    """An empty cache for `batch` sequences of up to `length` positions, whose zeros take no memory until they are cut.

    model: what its layers keep is found by a forward of it, without data. encoded: what an encoder gave, of any rows,
    where there is one. storage: of keys and values (`base/codes.py`); None: as they are.

    Raises:
        AutoparError: layers that keep what is no state, or keys that cannot be stored so.
    """
    from autopar.base.huggingface.states import StateCache, StatePairCache, states_across, states_of_layer

    known = _known.setdefault(model, {})
    key = (batch, *((tuple(x.shape), x.dtype) for x in tree_leaves(encoded) if isinstance(x, Tensor)))
    if key not in known:
        known[key] = _written_layers(model, batch, encoded)
    layers, crossing = known[key]
    across = 0 if encoded is None else encoded[0].shape[1]
    layouts: list[Layout] = []
    states: list[Tensor] = []
    for number, layer in enumerate([*layers, *crossing]):
        try:
            own = number < len(layers)
            make, positions = (states_of_layer, length) if own else (states_across, across)
            layout, kept = make(layer, positions, device, storage)
        except ValueError as error:
            raise _refused(model, "nothing was written into its cache", number % len(layers)) from error
        layouts.append(layout)
        states += kept
    return StateCache(layouts, states) if encoded is None else StatePairCache.of(layouts, states)


_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[list[Any], list[Any]]]] = weakref.WeakKeyDictionary()
"""What models' layers keep, on meta, by rows and what an encoder gave."""


def _written_layers(model: Any, batch: int, encoded: Any) -> tuple[list[Any], list[Any]]:
    """transformers' layers of the model's own cache, and of what it keeps of an encoder, after a forward of one token.

    One kind of cache knows lengths as numbers, the other's masks do not ask what is in them: either serves models that
    the other does not. Models that ask how many rows there are of something (loops over experts) are told so
    (`unknown_values.py`), once neither does.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

    name = name_of(model)
    if name is None:
        raise _refused(model, f"its forward() takes no {NAMES[0]}")
    config = model.config.get_text_config(decoder=True)
    ids = torch.zeros(batch, 1, dtype=torch.long, device="meta")
    failed: Exception | None = None
    kinds: list[Callable[[int], Any]] = [
        lambda length: StaticCache(config, max_cache_len=length), lambda length: DynamicCache(config=config)
    ]  # fmt: skip
    for without_values, make in itertools.product((nullcontext, guessed), kinds):
        try:
            probe = make(1)
        except KeyError:  # layers of which there is no static kind: the other has their names
            continue
        for number, layer in enumerate(probe.layers):
            if type(layer).__name__ not in KINDS:
                raise _refused(model, f"it keeps a {type(layer).__name__}", number)
        layers, crossing, given = probe.layers, [], {"input_ids": ids}
        _counts[model] = False
        _watch_counting(probe, model)
        if encoded is not None:
            behind = make(encoded[0].shape[1])
            probe, crossing = EncoderDecoderCache(probe, behind), behind.layers
            given = {"decoder_input_ids": ids, "encoder_outputs": _without_data(encoded, batch)}
        try:
            with without_values():
                output = called_without_data(model, {**given, name: probe, "use_cache": True, "return_dict": True})
        except (RuntimeError, NotImplementedError, ValueError) as error:  # ValueError: it takes no cache but its own
            failed = failed or error
            continue
        if getattr(output, name, None) is None:
            raise _refused(model, _NOT_GIVEN)
        return layers, crossing
    said = str(failed).splitlines()[0][:200]
    why = said if isinstance(failed, ValueError) else f"its forward() asks what is in tensors: {said}"
    raise _refused(model, why) from failed


def _without_data(encoded: Any, batch: int) -> Any:
    """What an encoder gave, in the class in which it gave it, for so many rows and on meta; but for masks, which change
    no shape, and library code asks what is in them.
    """
    rows = encoded[0].shape[0]

    def empty(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = (batch, *x.shape[1:]) if x.dim() and x.shape[0] == rows else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")

    if not isinstance(encoded, Mapping):
        return tree_map(empty, encoded)
    kind: Any = type(encoded)
    return kind(**{name: tree_map(empty, x) for name, x in encoded.items() if not name.endswith("mask")})


_counts: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
"""Whether models ask a cache how many positions it has."""


def counts_positions(model: nn.Module) -> bool:
    """Whether forward of a model, on meta, that is handed no positions counts them from behind those of its cache; else
    it begins anew with each call.
    """
    if model not in _counts:
        _written_layers(model, 1, None)
    return _counts[model]


def _watch_counting(cache: Any, model: nn.Module) -> None:
    """Note whether a model's own code asks a cache of transformers how many positions it has, beside what makes masks
    for it.
    """
    length = cache.get_seq_length

    def get_seq_length(*args: Any, **kwargs: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        _counts[model] = _counts[model] or asker not in _OF_MASKS
        return length(*args, **kwargs)

    cache.get_seq_length = get_seq_length


_OF_MASKS = ("transformers.masking_utils", "transformers.cache_utils")


def _refused(model: nn.Module, values: str, layer: int | None = None) -> AutoparError:
    where = type(model).__name__ if layer is None else f"layer {layer} of {type(model).__name__}"
    what = "generate() of a compiled model cannot keep what this model keeps"
    return AutoparError(what, where=where, values=values, remedy=WITHOUT)


def advanced(cache: Any, count: int) -> Any:
    """The cache as a forward of `count` tokens leaves it, but for what it writes."""
    after = cache.after(cache.states())
    after.advance(count)
    return after


def with_states(cache: Any, values: Mapping[str, Tensor], name: str) -> Any:
    """The cache after a forward, of the states that this gave, which are called `name.0`, `name.1`, ..."""
    return cache.after(values[f"{name}.{number}"] for number in range(len(cache.states())))


class _Call:
    """A call of `generate()`, while it runs."""


_NEW_TOKENS = "_autopar_new_tokens"
"""An attribute of a configuration of one call of `generate()`: how many tokens it makes, whatever says so."""


def counting_tokens(original: Any) -> Callable[..., Any]:
    """`_prepare_generated_length` of a compiled model, which notes how many tokens a call makes, also where only the
    length of all of them is said. original: the model's own.
    """

    def prepare(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, generation_config, *args, **kwargs)
        if (count := kwargs.get("input_ids_length")) is not None and config.max_length is not None:
            setattr(config, _NEW_TOKENS, max(1, config.max_length - count))
        return config

    return prepare


Maker = Callable[[Any, int, int, Any], Any]
"""(model, batch, length, what its encoder gave) -> a cache."""


def _check_padding(cache: Any, mask: Any) -> None:
    """Raises an AutoparError where padding would share scales with tokens: what it computes means nothing."""
    by_channel = any(is_by_channel(layout.storage) for layout in cache.layouts())
    if by_channel and isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        raise AutoparError(
            "prompts of different lengths cannot be padded where keys have a scale a channel",
            remedy="store them with a scale a token (cache='int8', 'int4' or 'fp8'), or generate for one length alone",
        )


def _check_goes_on(written: int, marked: int | None) -> None:
    """Raises an AutoparError where a call of `generate()` is for no more than what a cache has."""
    if written and marked is not None and marked <= written:
        raise AutoparError(
            f"a cache of {written} positions was handed in for a sequence of {marked}",
            values="generate() writes into the cache that it is handed",
            remedy="hand in copy.deepcopy(cache) where several calls begin with it, and what follows it in each call",
        )


def generating(
    original: Any,
    make: Maker,
    chunk: Callable[[Any], int | None] = lambda model: None,
    whole: Callable[[Any, int], int] = lambda model, length: length,
    begun: Callable[[Any, Any], None] = lambda model, call: None,
) -> Callable[..., None]:
    """`_prepare_cache_for_generation` of a compiled model, which gives `generate()` a cache of ours.

    original: the model's own. chunk: of the model, the tokens of a prompt in one call, where the call does not say it.
    whole: of the model, the least length of a cache from another on that may be cut. begun: called with the model and
    what lives as long as this call of `generate()`.
    """

    def prepare(
        self: Any, config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if config.use_cache is False:
            original(self, config, model_kwargs, mode, batch_size, max_cache_length)
            return
        if config.cache_implementation is not None:  # the configuration is this call's own copy
            transformers_caches.check_implementation(config.cache_implementation)
            config.cache_implementation = None
        config.disable_compile = True  # it is compiled
        if config.prefill_chunk_size is None:
            config.prefill_chunk_size = chunk(self)
        rows = batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)
        length = max(max_cache_length, getattr(config, "max_cache_len", None) or 0)
        if mode.value == "assisted_generation":  # drafts of the prompt's own tokens go beyond the longest sequence
            length += getattr(config, "prompt_lookup_num_tokens", None) or 0
        name = name_of(self) or NAMES[0]
        # An encoder's padding is not in what its decoder keeps of itself.
        mask = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
        if (handed := model_kwargs.get(name)) is None:
            made = make(self, rows, length, encoded_among(model_kwargs))
            model_kwargs[name] = made if config.prefill_chunk_size is not None else known_empty(made)
        else:
            marked = num_marked(config, model_kwargs.get(mask))

            def room(written: int) -> int:
                new_tokens = getattr(config, _NEW_TOKENS, config.max_new_tokens)
                return whole(self, needed(marked, length, new_tokens, written))

            if not is_cache(handed):
                transformers_caches.take_over(
                    handed, lambda size: make(self, batch_size, size, encoded_among(model_kwargs)), room
                )
            written = num_written(handed)
            _check_goes_on(written, marked)
            is_own = num_rows(handed, rows) == rows
            found = fitting(handed, rows, room(written))
            if is_own:  # the script's, and is written as transformers' are
                put(handed, found)
            model_kwargs[name] = handed if is_own else found
        config._autopar_call = call = _Call()
        begun(self, call)
        _check_padding(model_kwargs[name], model_kwargs.get(mask))
        if config.prefill_chunk_size is not None:
            setattr(model_kwargs[name], SPELLED_OUT, True)
        if mode.value == "assisted_generation":
            check_forgets(model_kwargs[name])

    return prepare
