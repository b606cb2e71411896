"""A region: a piece of the model's graph that occurs once or many times; and a call: one use of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.ir.choices import Choice
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.ir.sharding import Sharding, Step
from autopar.ir.values import Port, Slot, ValueRef


@dataclass(frozen=True, slots=True)
class NodeStrategy:
    """What each axis does with one operator, and the shardings that follow (one per tensor operand and result)."""

    choices: tuple[Choice, ...]
    operands: tuple[Sharding, ...]
    results: tuple[Sharding | None, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Every strategy an operator may take, and the seconds it computes under each, on one rank. columns: what placement
    has worked out of them (placement/columns.py): many problems are built of the same options.
    """

    strategies: tuple[NodeStrategy, ...]
    seconds: tuple[float, ...]
    columns: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Annotated:
    """What `annotate` finds out of a region's operators, by the names of their nodes.

    ops: the call and its rule. hints: factor (or, for placeholders, dim) -> stripe counts; zigzags: the same, of splits
    that may be zigzag. options: every strategy that the mesh allows. rounds: for operators of a loop's later
    rounds, the one of the first (rounds.py).
    """

    ops: Mapping[str, tuple[OpCall, Rule]]
    hints: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    zigzags: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    options: Mapping[str, Options] = field(default_factory=dict)
    rounds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """What `place` decides of a region's operators, by the names of their nodes.

    relays: values that several operators read -> the sharding in which they are moved once for all of them. seconds:
    what each operator computes on a mesh, kept with what it was worked out of (cost/operator_time.py).
    """

    strategies: Mapping[str, NodeStrategy]
    relays: Mapping[str, Sharding] = field(default_factory=dict)
    seconds: list[tuple[object, object, dict[str, float]]] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class LoweredFunction:
    """One phase of a region on local tensors: `forward`, `backward`, or one of its halves.

    graph: placeholders are `comm`, `p` (the gathered parameters by slot name), then `inputs`; collectives are method
    calls on `comm`. Every node's meta holds `type` (global), `sharding` and `origin` where it is one tensor. The graph
    returns `results` values, then those saved: by a forward for the backward, by the input half for the weight half.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    num_results: int
    saved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor of a bucket: a slot of the region, and its part in each step of the bucket."""

    slot: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that travel together through the same steps, as one collective each.

    chain: (kind, axis number) of each step; empty for what needs no collective. keep: after how many steps the result
    is kept for the rest of the optimizer step. owned: nobody else reads the tensors, they may be reduced in place.
    """

    chain: tuple[tuple[str, int], ...]
    moves: tuple[Move, ...]
    keep: int = 0
    owned: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of graph that occurs once or many times.

    module: the module path with the repeated index as `*`. seeds: how many its random draws follow from, one for each
    microbatch that goes through at once; 0 where it draws nothing. draws: how many random draws the model makes in it,
    with those that nobody reads. forward_nodes: names of the nodes that run in the forward phase (differentiated and
    later). origins: node name -> module path and source line for comments. leaves: modules of torch's own, whose source
    line is that of their caller. annotated, placed: what these phases found, whole or not
    there. transfers: the buckets of `gather`, `gather_for_backward` and `reduce`. lowered: `forward` and `backward`;
    where a pipeline wants them, `backward_input` and `backward_weight` too, which together do what `backward` does
    (autopar/passes/halves.py). shown: of each input that is a mask of which `Program.shown` knows it, how many
    positions a query is shown in each call (inf: all); from `annotate` on, nothing where no mask is known.
    """

    name: str
    module: str
    graph: fx.Graph
    slots: tuple[Slot, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    seeds: int = 0
    draws: int = 0
    tangents: tuple[int, ...] = ()
    forward_nodes: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict)
    leaves: frozenset[str] = frozenset()
    annotated: Annotated | None = None
    placed: Placed | None = None
    transfers: Mapping[str, tuple[Bucket, ...]] = field(default_factory=dict)
    lowered: Mapping[str, LoweredFunction] = field(default_factory=dict)
    shown: tuple[tuple[float, ...], ...] = ()

    @property
    def uses_dropout(self) -> bool:
        """Whether it draws random numbers."""
        return self.seeds > 0

    @property
    def _known(self) -> Annotated:
        assert self.annotated is not None, f"{self.name} is not annotated"
        return self.annotated

    @property
    def ops(self) -> Mapping[str, tuple[OpCall, Rule]]:
        """The operators with their rules, from `annotate` on; so `hints`, `zigzags`, `options` and `rounds`."""
        return self._known.ops

    @property
    def hints(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        return self._known.hints

    @property
    def zigzags(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        return self._known.zigzags

    @property
    def options(self) -> Mapping[str, Options]:
        return self._known.options

    @property
    def rounds(self) -> Mapping[str, str]:
        return self._known.rounds

    @property
    def strategies(self) -> Mapping[str, NodeStrategy]:
        """What was chosen for each operator, from `place` on; so `relays`."""
        assert self.placed is not None, f"{self.name} is not placed"
        return self.placed.strategies

    @property
    def relays(self) -> Mapping[str, Sharding]:
        assert self.placed is not None, f"{self.name} is not placed"
        return self.placed.relays

    def with_options(self, options: Mapping[str, Options]) -> Region:
        """The region with other strategies to choose from."""
        return replace(self, annotated=replace(self._known, options=options))

    @property
    def trainable_slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.trainable)

    @property
    def phases(self) -> Mapping[str, LoweredFunction]:
        """What is lowered, each operator once: the forward, and the backward as a whole, not its halves."""
        return {name: self.lowered[name] for name in ("forward", "backward") if name in self.lowered}

    @property
    def differentiable_inputs(self) -> tuple[Port, ...]:
        return tuple(port for port in self.inputs if port.differentiable)


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a region. slots: the fully qualified names that fill the region's slots, in order."""

    region: str
    path: str
    slots: tuple[str, ...]
    arguments: tuple[ValueRef, ...]
