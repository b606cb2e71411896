"""What the layers of a compiled model keep between calls of forward: tensors that a program takes and returns.

transformers' static layers are written in place; these are handed in and come back as other tensors, so that a program
is a function of them. A layer is of one of these kinds, by what it keeps:

    attention   keys and values of all positions, and how many are written
    indexed     the same, and the keys of an indexer that chooses what attention looks at
    linear      windows of convolutions and recurrent states: the same size at every position
    hybrid      linear and attention
    none        nothing: it reads another layer's, or has no attention
    cross       keys and values of what an encoder gave: written once, with the first token

Imports transformers, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers.cache_utils as cache_utils
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionLayer
from transformers.utils import ModelOutput

from autopar.base.codes import codes_of, is_by_channel
from autopar.base.errors import AutoparError
from autopar.base.huggingface.kept import Kept
from autopar.base.huggingface.layout import KINDS, STORED, Layout, Part
from autopar.base.huggingface.masks import TOKENS
from autopar.base.huggingface.reuse import does_not_go_back
from autopar.base.huggingface.windows import Windowed
from autopar.base.torch_compat.tracing import register_container


class _Keys(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """Keys and values [batch, heads, length, dim]."""

    is_compileable = True
    is_sliding = False
    kept: tuple[Kept | Windowed, Kept | Windowed]
    cumulative_length: Any = None

    def take(self, storage: str | None, tensors: Iterator[Tensor]) -> None:
        """Keep what comes next of the tensors."""
        if storage is not None and is_by_channel(storage):
            self.kept = Windowed.take(storage, True, tensors), Windowed.take(storage, False, tensors)
        else:
            self.kept = Kept.take(storage, tensors), Kept.take(storage, tensors)
        self.is_initialized = True

    def kept_tensors(self) -> list[Tensor]:
        return [x for kept in self.kept for x in kept.tensors()]

    @property
    def keys(self) -> Any:
        return self.kept[0].read(self.cumulative_length)

    @keys.setter
    def keys(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        assert value is None, "keys are written by update()"

    @property
    def values(self) -> Any:
        return self.kept[1].read(self.cumulative_length)

    @values.setter
    def values(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        assert value is None, "values are written by update()"

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("states are made before they are used")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.kept[0].length, 0

    def get_max_length(self) -> int:
        return self.kept[0].length


class _Attention(_Keys):
    """Keys and values [batch, heads, length, dim] of one layer, and how many positions are written (int64 [])."""

    def __init__(self, layout: Layout, tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self._layout = layout
        self.take(layout.storage, tensors)
        self.cumulative_length = next(tensors)
        self.is_empty = layout.empty

    @property
    def layout(self) -> Layout:
        own = self._layout
        return own if own.empty is self.is_empty else replace(own, empty=self.is_empty)

    def tensors(self) -> list[Tensor]:
        return [*self.kept_tensors(), self.cumulative_length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before, count = self.cumulative_length, key_states.shape[-2]
        at = _following(count, before, self.is_empty)
        self.cumulative_length, self.is_empty = before + count, False
        keys, seen_keys = self.kept[0].written(at, key_states, before)
        values, seen_values = self.kept[1].written(at, value_states, before)
        self.kept = keys, values
        return seen_keys, seen_values

    def get_seq_length(self) -> Any:
        return 0 if self.is_empty else self.cumulative_length

    def advance(self, count: int) -> None:
        """Count so many positions as written."""
        self.cumulative_length, self.is_empty = self.cumulative_length + count, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions, whose number comes negative: they are masked, and written anew."""
        if is_by_channel(self._layout.storage):
            raise does_not_go_back()
        if tokens_to_remove > 0:
            raise AutoparError(
                f"crop({tokens_to_remove}) of a cache would have it longer",
                remedy=f"crop(-{tokens_to_remove}) forgets so many positions; in later versions of transformers, too",
            )
        self.cumulative_length = self.cumulative_length + tokens_to_remove


def _following(count: int, written: Tensor, is_empty: bool = False) -> Tensor:
    """The positions of so many new tokens. is_empty: it is known that none is written."""
    at = torch.arange(count, device=written.device)
    return at if is_empty else at + written


class _Indexed(_Attention):
    """With keys of an indexer [batch, length, dim], and how many of them are written."""

    def __init__(self, layout: Layout, tensors: Iterator[Tensor]) -> None:
        super().__init__(layout, tensors)
        self.indexer_keys, self.indexer_cumulative_length = next(tensors), next(tensors)
        self.indexer_position_ids = None
        self.is_indexer_initialized = True

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.indexer_keys, self.indexer_cumulative_length]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        count = indexer_key_states.shape[1]
        at = _following(count, self.indexer_cumulative_length)
        self.indexer_cumulative_length = self.indexer_cumulative_length + count
        self.indexer_keys = self.indexer_keys.index_copy(1, at, indexer_key_states)
        return self.indexer_keys

    def advance(self, count: int) -> None:
        super().advance(count)
        self.indexer_cumulative_length = self.indexer_cumulative_length + count

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.indexer_cumulative_length = self.indexer_cumulative_length + tokens_to_remove


class _Own(dict[int, Any]):
    """States of a linear layer, by number. Models write into what they read of it, so each is copied when it is first
    read: what was handed in stays as it was.
    """

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(values)
        self._copied: set[int] = set()

    def __getitem__(self, number: int) -> Any:
        value = super().__getitem__(number)
        if value is not None and number not in self._copied:
            self[number] = value = value.clone()
        return value

    def __setitem__(self, number: int, value: Any) -> None:
        self._copied.add(number)
        super().__setitem__(number, value)


class _Linear(LinearAttentionLayer):  # type: ignore[misc, unused-ignore]
    """Windows of convolutions [..., window] and recurrent states, of any shape that does not grow."""

    conv_states: Any
    recurrent_states: Any

    def __init__(self, layout: Layout, tensors: Iterator[Tensor]) -> None:
        super().__init__(number_of_states=len(layout.parts))
        self._layout = layout
        windows, recurrent = dict(self.conv_states), dict(self.recurrent_states)
        for number, part in enumerate(layout.parts):
            windows[number] = None if part.window is None else next(tensors)
            recurrent[number] = next(tensors) if part.recurs else None
            self.conv_kernel_size[number] = part.window  # type: ignore[assignment, unused-ignore]
            self.is_conv_states_initialized[number] = part.window is not None
            self.is_recurrent_states_initialized[number] = part.recurs
            self.has_previous_state[number] = part.written
        self.conv_states, self.recurrent_states = _Own(windows), _Own(recurrent)

    @property
    def layout(self) -> Layout:
        """With what is written by now."""
        written = self.has_previous_state
        parts = (replace(part, written=bool(written[i])) for i, part in enumerate(self._layout.parts))
        return replace(self._layout, parts=tuple(parts))

    def tensors(self) -> list[Tensor]:
        return self.tensors_of_parts()

    def tensors_of_parts(self) -> list[Tensor]:
        windows, recurrent = dict(self.conv_states.items()), dict(self.recurrent_states.items())
        found: list[Any] = []
        for number, part in enumerate(self._layout.parts):
            found += [windows[number]] if part.window is not None else []
            found += [recurrent[number]] if part.recurs else []
        return found

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        window: Any = self.conv_kernel_size[state_idx]
        full = conv_states
        if self.has_previous_state[state_idx]:
            full = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        elif full.shape[-1] < window:
            full = torch.nn.functional.pad(full, (window - full.shape[-1], 0))
        self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = full[..., -window:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        kept = dict.__getitem__(self.recurrent_states, state_idx)
        self.recurrent_states[state_idx] = recurrent_states.to(kept.dtype)
        return self.recurrent_states[state_idx]  # type: ignore[return-value, unused-ignore]

    def advance(self, count: int) -> None:
        """Nothing is counted."""


class _Hybrid(_Linear, _Attention):
    """Attention and a linear layer side by side."""

    def __init__(self, layout: Layout, tensors: Iterator[Tensor]) -> None:
        CacheLayerMixin.__init__(self)
        _Linear.__init__(self, layout, tensors)
        self.take(layout.storage, tensors)
        self.cumulative_length = next(tensors)
        self.is_empty = layout.empty

    @property
    def layout(self) -> Layout:
        return replace(super().layout, empty=self.is_empty)

    def tensors(self) -> list[Tensor]:
        return [*self.tensors_of_parts(), *_Attention.tensors(self)]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        _Keys.lazy_initialization(self)

    def get_max_length(self) -> int:
        return _Attention.get_max_length(self)

    def advance(self, count: int) -> None:
        _Attention.advance(self, count)


class _Cross(_Keys):
    """Keys and values [batch, heads, length, dim] of what an encoder gave."""

    def __init__(self, layout: Layout, tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self._layout = layout
        self.is_written = layout.parts[0].written
        self.take(layout.storage, tensors)

    @property
    def layout(self) -> Layout:
        return replace(self._layout, parts=(Part(None, False, self.is_written),))

    def tensors(self) -> list[Tensor]:
        return self.kept_tensors()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        storage = self._layout.storage
        self.kept, self.is_written = (Kept.of(storage, key_states), Kept.of(storage, value_states)), True
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.get_max_length() if self.is_written else 0

    def advance(self, count: int) -> None:
        """Nothing is counted."""

    def crop(self, tokens_to_remove: int) -> None:
        """What an encoder gave stays."""


class _Nothing(getattr(cache_utils, "DummyLayer", object)):  # type: ignore[misc]
    """A layer that keeps nothing."""

    def __init__(self, layout: Layout, tensors: Iterator[Tensor]) -> None:
        super().__init__()
        self.layout = layout

    def tensors(self) -> list[Tensor]:
        return []

    def advance(self, count: int) -> None:
        """Nothing is counted."""


CROPPABLE = frozenset(KINDS.values()) - {"linear", "hybrid"} | {"cross"}
"""Kinds that can forget their last positions."""
_CLASSES: dict[str, Any] = {
    "attention": _Attention, "indexed": _Indexed, "linear": _Linear, "hybrid": _Hybrid, "none": _Nothing,
    "cross": _Cross,
}  # fmt: skip


class StateCache(Cache):  # type: ignore[misc, unused-ignore]
    """One layer of states for each of the model's."""

    def __init__(self, layouts: Iterable[Layout], states: Iterable[Tensor]) -> None:
        tensors = iter(states)
        super().__init__(layers=[_CLASSES[layout.kind](layout, tensors) for layout in layouts])
        assert next(tensors, None) is None, "a cache of fewer states than were handed in"

    @staticmethod
    def of(layouts: Iterable[Layout], states: Iterable[Tensor]) -> StateCache:
        """As a call of the class."""
        return StateCache(layouts, states)

    def states(self) -> list[Tensor]:
        """Of every layer in turn; a pytree's leaves."""
        layers: list[Any] = self.layers
        return [value for layer in layers for value in layer.tensors()]

    def layouts(self) -> list[Layout]:
        layers: list[Any] = self.layers
        return [layer.layout for layer in layers]

    def reorder_cache(self, beam_idx: Any) -> None:
        self._change_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Any) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        states = [change(x) if x.dim() else x for x in self.states()]
        changed: Any = StateCache(self.layouts(), states)
        self.layers = changed.layers

    def after(self, states: Iterable[Tensor]) -> StateCache:
        """As a forward leaves it, of other tensors."""
        found = StateCache([layout.after() for layout in self.layouts()], states)
        if (way := vars(self).get(TOKENS)) is not None:
            setattr(found, TOKENS, way)
        return found

    def advance(self, count: int) -> None:
        """Count so many positions as written."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer.advance(count)


class StatePairCache(EncoderDecoderCache):  # type: ignore[misc, unused-ignore]
    """Of a decoder behind an encoder: its own states, and what it keeps of the encoder's."""

    def __init__(self, own: StateCache, crossing: StateCache) -> None:
        # Not as transformers does it, who asks tensors for lengths: pytrees hold other things for a while.
        self.pair = (own, crossing)
        self.self_attention_cache, self.cross_attention_cache = own, crossing
        layers: list[Any] = crossing.layers
        self.is_updated = {number: bool(layer.is_written) for number, layer in enumerate(layers)}

    @staticmethod
    def of(layouts: Iterable[Layout], states: Iterable[Tensor]) -> StatePairCache:
        """The decoder's layers first."""
        layouts, tensors = list(layouts), list(states)
        crossing = [layout for layout in layouts if layout.kind == "cross"]
        half = len(layouts) - len(crossing)
        behind = len(tensors) - sum(2 if layout.storage is None else 4 for layout in crossing)
        return StatePairCache(
            StateCache(layouts[:half], tensors[:behind]), StateCache(layouts[half:], tensors[behind:])
        )

    def states(self) -> list[Tensor]:
        """A pytree's leaves."""
        return [value for each in self.pair for value in each.states()]

    def layouts(self) -> list[Layout]:
        return [layout for each in self.pair for layout in each.layouts()]

    def after(self, states: Iterable[Tensor]) -> StatePairCache:
        """As a forward leaves it, of other tensors."""
        return StatePairCache.of([layout.after() for layout in self.layouts()], states)

    def advance(self, count: int) -> None:
        """Count so many positions as written."""
        self.pair[0].advance(count)

    def batch_select_indices(self, indices: Any) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for each in self.pair:
            each.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions of the decoder."""
        self.pair[0].crop(tokens_to_remove)


register_container(
    StatePairCache,
    lambda cache: (cache.states(), [layout.to_data() for layout in cache.layouts()]),
    lambda states, data: StatePairCache.of([Layout.of(each) for each in data], states),
)
register_container(
    StateCache,
    lambda cache: (cache.states(), [layout.to_data() for layout in cache.layouts()]),
    lambda states, data: StateCache([Layout.of(each) for each in data], states),
)


@dataclass
class Outputs(ModelOutput):  # type: ignore[misc, unused-ignore]
    """What forward of a language model returns to `generate()`; a cache under the name that the model has for it."""

    logits: Tensor | None = None
    past_key_values: StateCache | StatePairCache | None = None
    cache_params: StateCache | None = None


def states_of_layer(
    layer: Any, length: int, device: torch.device, storage: str | None = None
) -> tuple[Layout, list[Tensor]]:
    """What one of transformers' layers keeps, after a forward of it: ours for `length` positions, empty. Zeros
    take no memory until they are cut. storage: see `Layout`.

    Raises:
        KeyError: a layer of another kind. ValueError: one that keeps nothing of what its kind keeps.
    """
    kind = KINDS[type(layer).__name__]

    def empty(like: Any, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros((), dtype=like.dtype, device=device).expand(shape)

    def count() -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=device)

    states: list[Tensor] = []
    parts: list[Part] = []
    if kind in ("linear", "hybrid"):
        for number in range(layer.number_of_states):
            window, recurrent = layer.conv_states[number], layer.recurrent_states[number]
            parts.append(Part(None if window is None else window.shape[-1], recurrent is not None))
            states += [empty(x, tuple(x.shape)) for x in (window, recurrent) if x is not None]
    if kind in ("attention", "indexed", "hybrid"):
        if layer.keys is None or layer.values is None:
            raise ValueError
        states += _empty_pair(layer, length, device, storage)
        states.append(count())
    if kind == "indexed":
        keys = layer.indexer_keys
        if keys is None:
            raise ValueError
        states += [empty(keys, (keys.shape[0], length, keys.shape[2])), count()]
    if kind in ("linear", "hybrid") and not any(part.recurs or part.window is not None for part in parts):
        raise ValueError
    return Layout(kind, tuple(parts), storage if kind in STORED else None), states


def states_across(
    layer: Any, length: int, device: torch.device, storage: str | None = None
) -> tuple[Layout, list[Tensor]]:
    """The same of a layer that keeps what an encoder gave.

    Raises:
        ValueError: it keeps nothing.
    """
    if getattr(layer, "keys", None) is None or layer.values is None:
        raise ValueError
    own = None if storage is None else codes_of(storage).name  # written once: it has no last tokens
    return Layout("cross", (Part(None, False),), own), _empty_pair(layer, length, device, own)


def _empty_pair(layer: Any, length: int, device: torch.device, storage: str | None) -> list[Tensor]:
    """Of keys and values."""
    kept = [((*x.shape[:2], length, x.shape[3]), x.dtype) for x in (layer.keys, layer.values)]
    if storage is not None and is_by_channel(storage):
        return [
            x for of_keys, (shape, dtype) in zip((True, False), kept, strict=True)
            for x in Windowed.empty(storage, of_keys, shape, dtype, device)
        ]  # fmt: skip
    return [x for shape, dtype in kept for x in Kept.empty(storage, shape, dtype, device)]
