"""Tokens that a script makes by itself, with calls of forward instead of `generate()`.

    out = model(ids)                                          a prompt; transformers' models give a cache unless told
    while …:
        out = model(token, past_key_values=out.past_key_values)

A cache is written by the call that it is handed to, as transformers' own are: whoever keeps it has what was written,
whether it is read from the output or not. A cache of transformers that a script made (`DynamicCache()`, `StaticCache`)
becomes one of ours in place. What a call without a cache gives as one is made when somebody asks for it (`Unmade`): a
script that scores texts never does.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface import transformers_caches
from autopar.base.huggingface.caches import NAMES, encoded_among, is_cache, name_of
from autopar.base.huggingface.layout import COUNTED
from autopar.base.huggingface.masks_of_generate import spelled_out
from autopar.base.huggingface.reuse import fitting, known_empty, num_written, places, put
from autopar.base.huggingface.routers import check_routers, without_routers
from autopar.base.huggingface.unmade import Unmade, unmakeable

logger = logging.getLogger("autopar")

POSITIONS = (
    "hand in position_ids with each call: the columns of (attention_mask.cumsum(1) - 1).clamp(min=0) that are new"
)
LEAST_ROOM = 128
"""Positions of a cache of which nobody said how long it will be."""


class Engine(Protocol):
    """What stands behind a compiled model."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """One forward."""
        ...

    def run_over(self, cache: Any, kwargs: dict[str, Any], /) -> Any:
        """One forward of a script that goes on with a cache."""
        ...

    def new_cache(self, batch: int, length: int, encoded: Any, /) -> Any:
        """An empty cache. encoded: what an encoder gave."""
        ...

    def whole_length(self, length: int, /) -> int:
        """The least length of a cache from `length` on that may be cut."""
        ...

    def gives_cache(self) -> bool:
        """Whether the model gives a cache that it is not handed, where its configuration says so."""
        ...

    def counts_positions(self) -> bool:
        """Whether the model counts positions that it is not handed from behind those of a cache."""
        ...

    def is_driven(self) -> bool:
        """Whether `generate()` or `serve()` calls, which hand over all that a program takes."""
        ...


def with_caches(original: type) -> Callable[[Any, Engine, tuple[Any, ...], dict[str, Any]], Any] | None:
    """One forward of a compiled model of this class, with caches as transformers has them; None where it takes none.

    The function takes the model, what stands behind it, and the arguments of the call. Raises an AutoparError for a
    cache that cannot be taken.
    """
    own: Any = original
    signature = inspect.signature(own.forward)
    name = name_of(own)
    if name is None or not hasattr(own, "config_class"):
        return None
    masks = spelled_out(original)

    def forward(model: Any, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            arguments = signature.bind(model, *args, **kwargs).arguments if args else kwargs
        except TypeError:  # which the engine says in its own words
            arguments = kwargs
        cache = arguments.get(name)
        is_made = is_cache(cache) and not _is_of_the_written(arguments, cache)
        hands_over = is_made or arguments.get("use_cache") is False
        if engine.is_driven() and hands_over:
            return _written(cache, engine.run(args, without_routers(model, kwargs)))
        if cache is None and not _wants_cache(model, arguments):
            return engine.run(args, kwargs)
        call = _Call(model, engine, name, masks, _named(signature, arguments))
        return call.without() if cache is None else call.following(cache)

    return forward


def _is_of_the_written(given: Mapping[str, Any], cache: Any) -> bool:
    """Whether the mask of a call is of positions that are written alone, as scripts have it, and what works within
    `generate()` (guidance by another prompt): `generate()` itself makes masks as long as the cache.
    """
    mask = given.get("decoder_attention_mask" if hasattr(cache, "pair") else "attention_mask")
    counts = cache.is_compileable and any(layout.kind in COUNTED for layout in cache.layouts())
    return counts and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] < places(cache, 0)


def _named(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name alone, without the model."""
    found: dict[str, Any] = {}
    for key, value in arguments.items():
        parameter = signature.parameters.get(key)
        if parameter is not None and parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif key != "self":
            found[key] = value
    return found


def _wants_cache(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether the model, on one device, would give a cache that it was not handed."""
    asked = given.get("use_cache")
    if asked is not None:
        return bool(asked)
    config = model.config
    return bool(getattr(config, "use_cache", None) or getattr(config.get_text_config(decoder=True), "use_cache", None))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of forward. name: what the model calls a cache. masks: makes them (`spelled_out`). given: arguments."""

    model: Any
    engine: Engine
    name: str
    masks: Callable[..., Any]
    given: dict[str, Any]

    def without(self) -> Any:
        """The output of a call that was handed no cache, and in it one that can be asked for."""
        if self.given.get("use_cache") and not self._is_training():
            return self.following(None)
        given = {**self.given, "use_cache": False} if self.given.get("use_cache") else self.given
        return self._as_asked(self._with_unmade(self.engine.run((), {**given, **self._by_name()})))

    def _by_name(self) -> dict[str, bool]:
        """What a call says beside what it was given, so that outputs have names."""
        return {} if self.given.get("return_dict") in (None, True) else {"return_dict": True}

    def _as_asked(self, output: Any) -> Any:
        return output.to_tuple() if self._by_name() else output

    def following(self, cache: Any) -> Any:
        """The output of a call that writes into a cache. None: into a new one."""
        self._check()
        with torch.no_grad():
            if self.model.config.is_encoder_decoder and self.given.get("encoder_outputs") is None:
                return replace(self, given=self._encoded()).following(cache)
            cache, written = self._fit(cache)
            given = {**self.given, **self._by_name(), self.name: cache, "use_cache": True}
            counts = self._add_masks(given, cache, written)
            try:
                output = self.engine.run_over(cache, given)
            except AutoparError as error:
                if not counts:
                    raise
                raise AutoparError(
                    f"{type(self.model).__name__} was called with padding, a cache, and no positions",
                    values=str(error),
                    remedy=POSITIONS,
                ) from error
            return self._as_asked(_written(cache, output))

    def _is_training(self) -> bool:
        return bool(self.model.training) and torch.is_grad_enabled()

    def _check(self) -> None:
        if self._is_training():
            raise AutoparError(
                f"{type(self.model).__name__} was handed a cache in training",
                values="a program that takes a cache has no backward",
                remedy="call model.eval(), or leave the cache out",
            )
        config = self.model.config
        is_part = not config.is_encoder_decoder and config.get_text_config(decoder=True) is not config
        if is_part and self.given.get("position_ids") is None:
            raise AutoparError(
                f"{type(self.model).__name__} counts positions by what it saw before, which a cache does not say",
                remedy="hand in position_ids with each call, or use generate()",
            )
        check_routers(self.model, self.given)

    def _size(self) -> tuple[int, int, torch.device]:
        """Rows and new tokens of the call, and where they are."""
        names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
        behind = self.model.config.is_encoder_decoder
        for name in names[:2] if behind else names[2:]:
            x = self.given.get(name)
            if isinstance(x, Tensor):
                return x.shape[0], x.shape[1], x.device
        raise AutoparError(
            f"{type(self.model).__name__} was called with a cache and without tokens",
            remedy=f"hand in {names[0] if behind else names[2]}",
        )

    def _encoded(self) -> dict[str, Any]:
        """The arguments with what the encoder gives, in place of what it is given."""
        given = {**self.given, "return_dict": True, "use_cache": False}
        given.pop(self.name, None)
        output = self.engine.run((), given)
        return _behind(self.given, output)

    def _fit(self, cache: Any) -> tuple[Any, int]:
        """The cache, one of ours with room for the call, and how many positions are written."""
        rows, count, _ = self._size()
        encoded = encoded_among(self.given)

        def make(length: int) -> Any:
            return self.engine.new_cache(rows, length, encoded)

        if cache is None:
            cache = known_empty(make(self._room(count)))
        elif not is_cache(cache):
            transformers_caches.take_over(cache, make, lambda written: self._room(written + count))
        written = num_written(cache)
        if places(cache, written + count) < written + count:
            length = self.engine.whole_length(self._room(written + count))
            logger.info("autopar: a cache is made longer, for %d positions, which is another program", length)
            put(cache, fitting(cache, rows, length))
        elif (fit := fitting(cache, rows, 0)) is not cache:
            put(cache, fit)
        return cache, written

    def _room(self, length: int) -> int:
        """The positions of a cache that is to have room for `length`, and for what may follow: as far as the model has
        positions, which may have a table as long as they are.
        """
        room = max(LEAST_ROOM, 1 << length.bit_length())
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return min(room, most) if isinstance(most, int) and length <= most else room

    def _add_masks(self, given: dict[str, Any], cache: Any, written: int) -> bool:
        """What generate() would hand over: masks as long as the cache, and positions. Whether it is left to the model
        what positions are, as where padding is models count in ways of their own.
        """
        if not cache.is_compileable or not any(layout.kind in COUNTED for layout in cache.layouts()):
            return False
        rows, count, device = self._size()
        name = "decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask"
        mask = given.get(name)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return False
        so_far = written + count
        if mask is not None and mask.shape[1] < so_far:
            raise AutoparError(
                f"a mask of {mask.shape[1]} positions was handed in with a cache",
                values=f"{written} positions are written, {count} are new",
                remedy=f"{name} is for all of them: torch.cat([mask, torch.ones_like(tokens)], 1) with each call",
            )
        if mask is None:
            mask = torch.ones(rows, so_far, dtype=torch.long, device=device)
        takes = inspect.signature(self.model.forward).parameters
        if given.get("position_ids") is None and "position_ids" in takes:
            if counts_by_tokens(self.model) or not bool(mask[:, :so_far].all()):
                self._check_counts(cache)
                given[name] = F.pad(mask, (0, max(0, places(cache, so_far) - mask.shape[1])))
                return True
            first = written if self.engine.counts_positions() else 0  # as the model has it on one device
            given["position_ids"] = torch.arange(first, first + count, device=device).expand(rows, -1).contiguous()
        embeds = torch.empty(rows, count, 0, dtype=self.model.dtype, device=device)
        kinds = {key: given[key] for key in ("token_type_ids", "mm_token_type_ids") if given.get(key) is not None}
        found = self.masks(
            self.model, self.model.config, embeds, mask, cache, position_ids=given.get("position_ids"), **kinds
        )
        if isinstance(found, dict):
            found = {key: None if x is None else x.contiguous() for key, x in found.items()}
        given[name] = found.contiguous() if isinstance(found, Tensor) else found
        return False

    def _check_counts(self, cache: Any) -> None:
        if not all(layout.kind in (*COUNTED, "none", "cross") for layout in cache.layouts()):
            raise AutoparError(
                f"{type(self.model).__name__} was called with padding, a cache, and no positions",
                values="its recurrent layers read padding as long as the tokens, its attention as long as the cache",
                remedy=POSITIONS,
            )

    def _with_unmade(self, output: Any) -> Any:
        """The output with a cache that is made when somebody looks at it."""
        if getattr(output, self.name, self) is not None or not self.engine.gives_cache():
            return output
        fields = {key: getattr(output, key) for key in type(output).__dataclass_fields__}
        made = unmakeable("it was called in training mode") if self.model.training else self._maker(output)
        fields[self.name] = Unmade(made)
        return type(output)(**fields)

    def _maker(self, output: Any) -> Callable[[], Any]:
        given = {name: x for name, x in self.given.items() if name not in ("labels", "use_cache", "return_dict")}
        if self.model.config.is_encoder_decoder and given.get("encoder_outputs") is None:
            given = _behind(given, output)
        # Writes to tensors of inference_mode are not counted: they are read as they are now.
        given = {name: x.clone() if isinstance(x, Tensor) and x.is_inference() else x for name, x in given.items()}
        call = replace(self, given=without_routers(self.model, given))
        before = call._versions()

        def make() -> Any:
            if call._versions() != before:
                raise unmakeable("its inputs or the weights changed since")
            return call.following(None)[self.name]

        return make

    def _versions(self) -> list[int]:
        """Numbers that change when what the call read is written."""
        read = (*self.given.values(), *_some_weights(self.model))
        return [x._version for x in read if isinstance(x, Tensor) and not x.is_inference()]


def counts_by_tokens(model: Any) -> bool:
    """Whether positions that nobody hands in follow from which tokens there are, not from their places alone: from
    behind the number of the padding token on, as RoBERTa's.
    """
    return any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules())


_weights: weakref.WeakKeyDictionary[Any, tuple[Tensor, ...]] = weakref.WeakKeyDictionary()


def _some_weights(model: Any) -> tuple[Tensor, ...]:
    """Some that every step of an optimizer writes."""
    if model not in _weights:
        trained = [x for x in model.parameters() if x.requires_grad] or [*model.parameters()]
        _weights[model] = (*trained[:1], *trained[-1:])
    return _weights[model]


def _behind(given: Mapping[str, Any], output: Any) -> dict[str, Any]:
    """The arguments of a decoder behind what an encoder gave in an earlier call. given: of that, which had both."""
    from transformers.modeling_outputs import BaseModelOutput

    encoded = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
    kept = ("attention_mask", "output_attentions", "output_hidden_states", "return_dict", "use_cache")
    own = {name: x for name, x in given.items() if name.startswith("decoder_") or name in kept}
    return {**own, "encoder_outputs": encoded}


def _written(cache: Any, output: Any) -> Any:
    """The output of a call with the cache that it was handed in the place of the one that it gave, and as that is."""
    if not is_cache(cache):
        return output
    for name in NAMES:
        if is_cache(found := output.get(name)):
            put(cache, found)
            output[name] = cache
    return output
