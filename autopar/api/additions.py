"""What a batch gets before it is planned for: positions up to one of a few lengths, rows that axes divide."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import lengths as padded_lengths
from autopar.api.added_rows import rows_added, rows_of
from autopar.api.lengths import Padding
from autopar.api.small_model import twin_of
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.torch_compat import tracing
from autopar.planner.inputs import family_key, modes_key, shapes_key
from autopar.runtime.added import Added

logger = logging.getLogger("autopar")

Told = Callable[[Callable[[], Any]], Any]
"""What rank 0 finds, on every rank. Collective."""


class Additions:
    """Finds, on rank 0, what leaves no trace; remembers it by kinds of batches, and says once what it does.

    lengths: that batches may be padded to. loss: gives a model the user's loss.
    """

    def __init__(
        self,
        blueprint: nn.Module,
        lengths: Sequence[int] | None,
        precision: torch.dtype | None,
        loss: Callable[[nn.Module], nn.Module],
    ) -> None:
        self.blueprint, self.precision, self.loss = blueprint, precision, loss
        self.lengths = padded_lengths.checked(lengths)
        self._rows: dict[object, Added | None] = {}
        self._positions: dict[object, Padding | None] = {}
        self._fills: dict[object, list[Any]] = {}
        self._twins: dict[object, nn.Module] = {}
        self._said: set[str] = set()

    def rows(self, inputs: Mapping[str, Any], pieces: int, told: Told, *, training: bool) -> Added | None:
        """Rows that a batch gets for the axes to divide it, where they leave no trace; the same on every rank. None
        beside caches, of which each call would make a longer copy.

        pieces: that rows are cut in.
        """
        rows = rows_of(inputs)
        if not rows or rows % pieces == 0 or caches.states_among(inputs):
            return None
        kind = (*shapes_key(self.blueprint, inputs), training)
        if kind not in self._rows:
            self._rows[kind] = told(lambda: self._rows_found(inputs, pieces, rows, training))
        return self._rows[kind]

    def _rows_found(self, inputs: Mapping[str, Any], pieces: int, rows: int, training: bool) -> Added | None:
        try:
            found = rows_added(self.blueprint, inputs, pieces, precision=self.precision, training=training)
        except AutoparError as error:
            self._say(
                "no rows", "%s gets no rows for the axes to divide it: %s", shapes(inputs), str(error).rstrip(".")
            )
            return None
        self._say(
            "rows", "%s is no multiple of the %d pieces that rows are cut in: it gets rows that count for nothing, and "
            "outputs have the %d that were given", shapes(inputs), pieces, rows,
        )  # fmt: skip
        return found

    def positions(self, inputs: Mapping[str, Any], told: Told, *, training: bool) -> Padding | None:
        """Positions that a batch gets for its length to be one of `lengths`, where they leave no trace; the same on
        every rank.
        """
        if not self.lengths or caches.states_among(inputs):
            return None
        sizes = padded_lengths.growing(inputs, self.lengths)
        if not sizes:
            return None
        kind = (*shapes_key(self.blueprint, inputs), training)
        if kind not in self._positions:
            self._positions[kind] = told(lambda: self._padding(inputs, sizes, training))
        return self._positions[kind]

    def longest(self, inputs: Mapping[str, Any], found: Padding | None) -> dict[str, Any] | None:
        """A batch like this, without values, of the longest of `lengths`; None where it is of that length, or is not
        padded. found: what it gets itself.
        """
        empty = _without_values(inputs)
        sizes = padded_lengths.growing(empty, self.lengths[-1:])
        is_kept = found is None and bool(padded_lengths.growing(empty, self.lengths))
        if not sizes or is_kept or caches.states_among(inputs):
            return None
        grown = padded_lengths.grown_inputs(empty, sizes)
        if found is not None:
            grown = {name: dims for name, dims in grown.items() if name in found.inputs}
        return Added(grown, ()).pad_tree(empty)

    def _padding(self, inputs: Mapping[str, Any], sizes: padded_lengths.Sizes, training: bool) -> Padding | None:
        known = self._fills.setdefault((family_key(self.blueprint, inputs), training), [])
        try:
            modes = modes_key(self.blueprint)
            if modes not in self._twins:
                self._twins[modes] = twin_of(self.blueprint, self.loss, self.lengths[-1])
            found = padded_lengths.padding(self._twins[modes], inputs, sizes, training=training, known=known)
        except AutoparError as error:
            self._say("kept", "%s is not padded to one of lengths=: %s. It runs as it is", shapes(inputs), error)
            return None
        known[:] = dict.fromkeys((found.fills, *known))
        fills = ", ".join(f"{name} {'as its last' if dims[0].fill is None else dims[0].fill}"
                          for name, dims in found.inputs.items())  # fmt: skip
        self._say(
            "padded", "%s is padded to %s (%s), which leaves no trace in what comes back", shapes(inputs),
            " and ".join(str(size) for size in dict.fromkeys(sizes.values())), fills,
        )  # fmt: skip
        return found

    def _say(self, what: str, text: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(f"autopar: {text} (said once)", *values)


def _without_values(inputs: Mapping[str, Any]) -> dict[str, Any]:
    leaves, spec = tracing.tree_flatten(dict(inputs))
    empty = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in leaves
    ]  # fmt: skip
    found: dict[str, Any] = tracing.tree_unflatten(empty, spec)
    return found


def shapes(inputs: Mapping[str, Any]) -> str:
    """How a batch is called in messages."""
    named = [f"{name} {tuple(value.shape)}" for name, value in inputs.items() if isinstance(value, Tensor)]
    return f"a batch of {', '.join(named)}"
