"""The decisions of `place` and `overlap`: how parameters live, where values lie, what travels together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.region import Bucket
from autopar.ir.sharding import Sharding


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How a parameter lives: `stored` between steps, `held` from its first use in a step to the last (gathered once),
    `compute` while a region uses it (gathered for each use), `gradient` before its reduction.
    """

    stored: Sharding
    held: Sharding
    compute: Sharding
    gradient: Sharding


@dataclass(frozen=True, slots=True)
class Placement:
    """The decisions of `place`: a layout for every parameter, and a sharding for every value (and gradient) between
    calls.
    """

    parameters: Mapping[str, ParameterLayout]
    inputs: Mapping[str, Sharding]
    values: Mapping[tuple[int, int], Sharding]
    gradients: Mapping[tuple[int, int], Sharding]


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """What the solver says of its answer.

    cost_s: the objective, seconds a step. gap: relative optimality gap. peak_bytes: of one rank, by the folded
    timeline. memory_price_s_per_byte: what one more byte would save. overlap_price: what a second of gathers and
    reductions beside the compute counts. hides_exchanges: whether exchanges count less what may run beside them
    (cost/beside.py). priced_s: what the objective grows by as the overlap price grows by one; infinite where nobody
    asked. num_nodes, num_choices, num_edges: the size of the problem.
    """

    cost_s: float
    bound_s: float
    gap: float
    peak_bytes: float
    memory_price_s_per_byte: float
    num_nodes: int
    num_choices: int
    num_edges: int
    seconds: float
    overlap_price: float = 1.0
    hides_exchanges: bool = False
    priced_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Conceded:
    """What strategies were let off for a placement to be: operators, by region and node, whose operands may be
    gathered; weight matrices, by name and axis, that may stay whole; and what the user is told of it.
    """

    gathered: tuple[tuple[str, str], ...] = ()
    whole: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Learnt:
    """What placements of one annotated program tell of others on it.

    conceded: what strategies that are only compared were let off, by what they do with values
    (`strategies.context.family_of`). refused: those of them that split the sequence and could not be had, here or of
    the same model prepared for others. chosen: the solver's choices where it had too little time, by the strategies,
    the memory limit, and what was conceded: other prices of the same problem are searched from there. facts: what
    problems of the program have alike, whatever the strategies (placement/parts.py).
    """

    conceded: dict[tuple[str, ...], Conceded] = field(default_factory=dict)
    refused: list[tuple[str, ...]] = field(default_factory=list)
    chosen: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    facts: dict[tuple[str, ...], Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several calls use: gathered once a phase, its gradients added before their reduction.

    gather, reduce: as of a region's slots; None where nothing is to be moved.
    """

    name: str
    gather: Bucket | None
    reduce: Bucket | None


@dataclass(frozen=True, slots=True)
class Overlap:
    """How collectives of parameters run beside the compute.

    prefetch: the next call's gathers start before this call computes, and one call's reductions run while the next one
    computes. at_end: gradients are reduced when the whole backward is through. extra_bytes: what that holds beyond the
    placement's timeline. exchanges: tokens go to their experts, and home, beside what does not depend on them.
    """

    prefetch: bool
    at_end: bool
    extra_bytes: int
    exchanges: bool = True
