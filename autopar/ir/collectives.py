"""The collectives that a lowered graph may call."""

from __future__ import annotations

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
