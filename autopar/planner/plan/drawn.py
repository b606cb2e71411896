"""What pictures, reports and traces show of a program: plain data, saved with the plan, so that a loaded plan draws.

    program (lowered) ─ graphs.views_of ─► Views ─► visualize, report, trace

Shardings are texts (`dp=S(0), tp=R`, `sharding.parse_sharding` reads them), seconds and bytes are of one rank and one
call of the region, unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autopar.base.trace import MemoryCurve, Span

Kind = Literal["compute", "view", "collective"]


@dataclass(frozen=True, slots=True)
class ValueView:
    """One tensor: `dtype` as in `bf16`, its global shape, its sharding."""

    dtype: str
    shape: tuple[int, ...]
    sharding: str


@dataclass(frozen=True, slots=True)
class OpView:
    """One line of the generated program: an operator, a view, or a collective (a ring, too).

    name: as in the program; `region.name` is what `plan.explain` takes. op: `linear`, `all_gather`. module: path with
    `*` for the block's number; source: `modeling_llama.py:164`; both "" where unknown. reads: names of ops of the same
    phase, `in:NAME` inputs of the region, `p:SLOT` parameters, `saved:NAME` values of the forward, `grad:NAME`
    gradients of the region's outputs. result: None where there are several (a getitem follows for each).
    op_class, flops, moved_bytes: of what computes. axis, bytes_sent, why: of a collective. seconds: of a ring, those
    that it takes beyond its computing, which is compute_seconds. In the backward, a name that the forward has, too,
    ends in `@backward`. line: what the line of the generated program that makes it assigns to, and how often its
    function assigns to that before; None where none makes it, and in plans of older versions.
    """

    name: str
    op: str
    kind: Kind
    phase: str
    module: str
    source: str
    reads: tuple[str, ...]
    result: ValueView | None
    seconds: float = 0.0
    op_class: str = ""
    flops: float = 0.0
    moved_bytes: float = 0.0
    axis: str = ""
    bytes_sent: float = 0.0
    why: str = ""
    compute_seconds: float = 0.0
    line: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class MoveView:
    """One collective of a bucket of parameters, or of their gradients. slots: that travel in it. which: `gather`,
    `gather_for_backward`, `reduce`. once: once a step, not at each use. shared: of a parameter that several regions'
    calls use, gathered once for all of them.
    """

    which: str
    kind: str
    axis: str
    slots: tuple[str, ...]
    bytes_sent: float
    seconds: float
    once: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class SlotView:
    """A parameter or buffer of a region. name: inside the region's module (`mlp.up_proj.weight`); tensor: the fully
    qualified name that fills it in the first call. stored: between steps; used: by the region, after its gathers.
    """

    name: str
    tensor: str
    is_parameter: bool
    trainable: bool
    stored: ValueView
    used: ValueView


@dataclass(frozen=True, slots=True)
class PortView:
    """What enters or leaves a region. name: of an input as in `in:NAME`, of an output the op that makes it."""

    name: str
    value: ValueView
    differentiable: bool


@dataclass(frozen=True, slots=True)
class ExpertsView:
    """A layer of experts: numbers of one rank and one call, as planned.

    op: of the forward. split: what axes do (`tokens and experts over ep`), "" for nothing. axis, ranks: of the
    exchange, "" and 1 where there is none. experts: of the layer; chosen: by each token; here: on a rank. tokens: of a
    rank. expert_rows: tokens that choose an expert, on the average of those that come here; rows, busiest_rows: choices
    that a rank multiplies, on the average and the one that has most; round_rows: tokens that an exchange takes at once
    at most, 0 without. Bytes sent and seconds of the exchange and of the computing, in each phase; backward: 0 without
    training. forward_hidden_s, backward_hidden_s: of the exchange's seconds, those in which something else computes.
    guest_bytes: what an expert that visits a rank (`place_experts(replicas=1)`) takes there at most while the layer
    runs, beside what is planned.
    """

    op: str
    split: str
    axis: str
    ranks: int
    experts: int
    chosen: int
    here: float
    tokens: float
    expert_rows: float
    rows: float
    busiest_rows: float
    round_rows: int
    forward_bytes: float
    forward_s: float
    forward_compute_s: float
    backward_bytes: float
    backward_s: float
    backward_compute_s: float
    forward_hidden_s: float = 0.0
    backward_hidden_s: float = 0.0
    guest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region: its ops in the program's order (those of the forward first), what goes in and out, its parameters with
    the collectives that bring them. module: with `*` where it is repeated. calls: a microbatch, on all stages.
    gradients: (`p:SLOT` or `in:NAME`, the op of the backward that makes its gradient). experts: its layers of experts.
    """

    name: str
    module: str
    calls: int
    inputs: tuple[PortView, ...]
    outputs: tuple[PortView, ...]
    slots: tuple[SlotView, ...]
    moves: tuple[MoveView, ...]
    ops: tuple[OpView, ...]
    gradients: tuple[tuple[str, str], ...] = ()
    experts: tuple[ExpertsView, ...] = ()


@dataclass(frozen=True, slots=True)
class CallView:
    """One use of a region. path: of its module. stage: of the pipeline, 0 where there is none. reads: for each input
    of the region `in:NAME` (an input of the program) or `CALL.INDEX`.
    """

    region: str
    path: str
    stage: int
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Views:
    """All of it. outputs: (name, `CALL.INDEX` or `in:NAME`). spans, memory: of the predicted step; spans are empty
    where there is a pipeline, whose own timeline says more. forward_flops: floating point operations of products,
    attention and convolutions of one microbatch's forward, on all ranks together, each counted once.
    """

    regions: tuple[RegionView, ...]
    calls: tuple[CallView, ...]
    outputs: tuple[tuple[str, str], ...]
    spans: tuple[Span, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    forward_flops: float = 0.0

    def region(self, name: str) -> RegionView:
        return next(region for region in self.regions if region.name == name)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready; `from_data` is the inverse."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Views:
        """The inverse of `to_data`, also after a way through JSON."""
        return Views(
            tuple(map(_region, data["regions"])),
            tuple(CallView(**{**row, "reads": tuple(row["reads"])}) for row in data["calls"]),
            tuple((name, ref) for name, ref in data["outputs"]),
            tuple(Span(**row) for row in data["spans"]),
            tuple(
                MemoryCurve(row["rank"], tuple(row["times_s"]), {k: tuple(v) for k, v in row["series"].items()})
                for row in data["memory"]
            ),
            data["forward_flops"],
        )


def _region(row: Mapping[str, Any]) -> RegionView:
    return RegionView(
        row["name"],
        row["module"],
        row["calls"],
        tuple(map(_port, row["inputs"])),
        tuple(map(_port, row["outputs"])),
        tuple(map(_slot, row["slots"])),
        tuple(MoveView(**{**each, "slots": tuple(each["slots"])}) for each in row["moves"]),
        tuple(map(_op, row["ops"])),
        tuple((of, name) for of, name in row["gradients"]),
        tuple(ExpertsView(**each) for each in row.get("experts", ())),
    )  # fmt: skip


def _op(row: Mapping[str, Any]) -> OpView:
    line = tuple(row["line"]) if row.get("line") is not None else None
    return OpView(**{**row, "reads": tuple(row["reads"]), "result": _value(row["result"]), "line": line})


def _slot(row: Mapping[str, Any]) -> SlotView:
    return SlotView(**{**row, "stored": _value(row["stored"]), "used": _value(row["used"])})


def _port(row: Mapping[str, Any]) -> PortView:
    return PortView(row["name"], _value(row["value"]), row["differentiable"])


def _value(row: Mapping[str, Any] | None) -> Any:
    return None if row is None else ValueView(row["dtype"], tuple(row["shape"]), row["sharding"])
