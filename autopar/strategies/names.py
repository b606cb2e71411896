"""Named strategies: constraint sets, one per mesh axis, for the one compiler.

A constraint says how inputs lie on the axis, what parameters may do on it, and which collectives activations may use.
The solver does the rest: `tensor` does not know Megatron's columns and rows, it only says that the batch stays whole,
that every weight matrix is split, and that activations may be summed but never gathered; columns then rows is what is
left.

Two weight dims over two axes is `tensor2d` (weight-stationary: Pope et al., 2211.05102). Products with a third axis
that splits the batch are the 3D products of matrices; SUMMA's and 2.5D's steps, which broadcast blocks of both operands
in turn, are not in the space: no operator here is a loop over blocks.

Where rows of a batch meet rows in a product (CLIP compares every text with every image), a rank needs all rows of one
operand. No strategy gathers activations for that: the operator `whole` makes the pieces terms of a sum, which
`all_reduce` takes. So the loss under `ddp` and `zero3` is that of the whole batch, not of each rank's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.base.errors import AutoparError
from autopar.base.text import did_you_mean
from autopar.ir.sharding import Partial, Placement, Replicate, Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import (
    ANY_COLLECTIVE,
    ANY_MODE,
    AUTO,
    DDP,
    EXPERT,
    EXPERT_SUM,
    HSDP_ACROSS,
    HSDP_INSIDE,
    TENSOR,
    TENSOR_2D,
    TENSOR_SEQUENCE,
    ZERO1,
    ZERO1_EXPERT,
    ZERO2,
    ZERO2_EXPERT,
    ZERO3,
    ZERO3_EXPERT,
    ZERO3_KEEP,
    AxisStrategy,
    ParameterMode,
)
from autopar.strategies.context import CONTEXT, USP_ROW, WHOLE, check_order, is_context_axis
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec, parse_spec

__all__ = [
    "ANY_COLLECTIVE", "ANY_MODE", "AUTO", "DDP", "EXPERT", "HSDP_ACROSS", "HSDP_INSIDE", "STRATEGIES", "TENSOR",
    "TENSOR_2D", "TENSOR_SEQUENCE", "ZERO3", "AxisStrategy", "ParameterMode", "Pin", "Strategy", "by_name", "describe",
    "is_context_axis", "is_expert_axis", "is_tensor_axis", "parse", "pin", "pipeline", "pipeline_of", "resolve", "rows",
    "to_placement",
]  # fmt: skip

_EXPERTS: Mapping[AxisStrategy, AxisStrategy] = {
    EXPERT: DDP, ZERO1_EXPERT: ZERO1, ZERO2_EXPERT: ZERO2, ZERO3_EXPERT: ZERO3, EXPERT_SUM: DDP,
}  # fmt: skip
"""Strategies that give each rank some experts, and what goes with them on axes that are for something else."""
_SINGLE = (
    AUTO, DDP, ZERO1, ZERO2, ZERO3, ZERO3_KEEP, TENSOR, TENSOR_SEQUENCE, TENSOR_2D, *_EXPERTS, *CONTEXT,
)  # fmt: skip
STRATEGIES: Mapping[str, AxisStrategy] = {
    **{strategy.name: strategy for strategy in _SINGLE},
    "fsdp": ZERO3,
    "hsdp": HSDP_INSIDE,
}
_PARTS = {strategy.name: strategy for strategy in (HSDP_ACROSS, HSDP_INSIDE, *WHOLE)}
_TENSOR_FAMILY = (TENSOR, TENSOR_SEQUENCE, TENSOR_2D)

Strategy = str | AxisStrategy | PipelineSpec | Mapping[str, "str | AxisStrategy | PipelineSpec"]


def is_tensor_axis(axis: str) -> bool:
    """Whether an axis is by its name for tensor parallelism: tp, tensor, model, mp, or one of several (tp0, tp_x)."""
    return re.fullmatch(r"(tp|tensor|model|mp)(_?(\d+|[xyz]))?", axis) is not None


def is_expert_axis(axis: str) -> bool:
    """Whether an axis is by its name for experts: ep, expert, experts, or one of several (ep0, ep_x)."""
    return re.fullmatch(r"(ep|experts?)(_?(\d+|[xyz]))?", axis) is not None


def pipeline(schedule: str = "auto", stages_per_rank: int | None = None, cut: Sequence[str | int] = ()) -> PipelineSpec:
    """The strategy of the axis `pp`: stages of the model on its ranks.

    Args:
        schedule: auto, gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev, or the path of a CSV of actions.
        stages_per_rank: how many stages each rank runs; None for the schedule's own number, or the best.
        cut: the first block of each stage but the first, as in ["model.layers.8"]; empty for the best.

    Raises:
        AutoparError: an unknown schedule.
    """
    found = parse_spec(f"pipeline({schedule})")
    assert found is not None
    return replace(found, stages_per_rank=stages_per_rank, cut=tuple(cut))


def pipeline_of(strategy: Strategy, mesh: Mesh) -> PipelineSpec | None:
    """What is asked of the mesh's pipeline axis; None where it has none.

    Raises:
        AutoparError: a pipeline on an axis of another name, another strategy on `pp`.
    """
    if isinstance(strategy, Mapping):
        given = {axis: _as_spec(each) for axis, each in strategy.items()}
        wrong = [axis for axis, each in given.items() if (axis == AXIS) != isinstance(each, PipelineSpec)]
        for axis in wrong:
            said = strategy[axis] if isinstance(strategy[axis], str) else getattr(strategy[axis], "name", "a pipeline")
            if axis == AXIS and said != "auto":
                raise AutoparError(
                    f"the mesh axis {AXIS} is the pipeline's, it cannot be {said}",
                    values=f"mesh: {mesh}",
                    remedy=f'write {AXIS}="pipeline(1f1b)" or leave it out, and give {said} to another axis',
                )
            if axis != AXIS:
                raise AutoparError(
                    f"a pipeline runs over the mesh axis {AXIS}, not over {axis}",
                    values=f"mesh: {mesh}",
                    remedy=f"name that axis {AXIS}",
                )
        found = given.get(AXIS)
    else:
        found = _as_spec(strategy)
    if AXIS not in mesh.axis_names:
        if isinstance(found, PipelineSpec):
            raise AutoparError(
                f"{found} needs a mesh axis {AXIS}",
                values=f"mesh: {mesh}",
                remedy=f"name one: --mesh {AXIS}=2,{','.join(f'{axis}={size}' for axis, size in mesh.axes)}",
            )
        return None
    return found if isinstance(found, PipelineSpec) else PipelineSpec()


def _as_spec(strategy: object) -> object:
    return (parse_spec(strategy) or strategy) if isinstance(strategy, str) else strategy


def resolve(strategy: Strategy, mesh: Mesh) -> tuple[AxisStrategy, ...]:
    """One `AxisStrategy` per mesh axis; per axis of a stage, where `pp` is among them (`pipeline_of` is its strategy).

    A single name serves every axis, with these exceptions: on a mesh that has axes called tp (tp0, tp1, …), `tensor`,
    `tensor+sequence` and `tensor2d` serve those and the others are `ddp`; likewise `ulysses`, `allgather_kv` and `ring`
    on axes called cp (cp0, cp1, …), and `expert` and its like on those called ep, `zero3+expert` with `zero3` on the
    others; what exchanges tokens does so on one, the last that is not for tensors; `hsdp` shards over the last axis and
    replicates over the others; a pipeline serves `pp`, and the others are `auto`. In a mapping, axes that are not named
    are `auto`.

    Raises:
        AutoparError: an unknown name, an axis that the mesh does not have, a strategy for more axes than there are,
            axes that split the sequence in an order that cannot be, several that split experts, one of which exchanges.
    """
    names = mesh.axis_names
    asked = pipeline_of(strategy, mesh)
    if isinstance(strategy, Mapping) and (unknown := [axis for axis in strategy if axis not in names]):
        raise AutoparError(
            f"the strategy names axis {unknown[0]!r}, which the mesh does not have",
            values=f"mesh: {mesh}",
            remedy=f"use {', '.join(names)}",
        )
    if asked is not None:
        mesh = mesh.without(AXIS)
        names = mesh.axis_names
        if isinstance(strategy, Mapping):
            strategy = {axis: each for axis, each in strategy.items() if axis != AXIS}
        elif isinstance(_as_spec(strategy), PipelineSpec):
            strategy = "auto"
    assert not isinstance(strategy, PipelineSpec)
    if isinstance(strategy, Mapping):
        return _spread([_lookup(strategy.get(axis, "auto")) for axis in names], mesh)
    found = _lookup(strategy)
    families = ((_TENSOR_FAMILY, is_tensor_axis), (CONTEXT, is_context_axis), (tuple(_EXPERTS), is_expert_axis))
    for family, is_own in families:
        own = [axis for axis in names if is_own(axis)]
        if found.experts == "exchange" and not own:
            own = [axis for axis in names if not is_tensor_axis(axis)][-1:] or [names[-1]]
        if found in family and own:
            return _spread([found if axis in own else _EXPERTS.get(found, DDP) for axis in names], mesh)
    return _spread([found] * len(names), mesh)


def _spread(chosen: list[AxisStrategy], mesh: Mesh) -> tuple[AxisStrategy, ...]:
    """Strategies that take several axes, over theirs: hsdp's last axis shards; tensor2d's must be two."""
    hybrid = [i for i, each in enumerate(chosen) if each is HSDP_INSIDE]
    grid = [i for i, each in enumerate(chosen) if each.grid]
    remedies = {
        "hsdp": "name several: --mesh node=2,dp=4; on one axis it would be zero3",
        "tensor2d": "name two: --mesh tp0=2,tp1=2; on one axis it would be tensor",
    }
    for wanted, held in (("hsdp", hybrid), ("tensor2d", grid)):
        if (held and len(held) < 2) or (len(held) > 2 and wanted == "tensor2d"):
            axes = ", ".join(mesh.axis_names[i] for i in held)
            raise AutoparError(
                f"{wanted} takes two axes, the mesh gives it {len(held)}",
                values=f"mesh: {mesh}; {wanted} on {axes}",
                remedy=remedies[wanted],
            )
    for i in hybrid[:-1]:
        chosen[i] = HSDP_ACROSS
    check_order(chosen, mesh)
    check_experts(chosen, mesh)
    return tuple(chosen)


def check_experts(chosen: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """Raises an AutoparError where one axis exchanges tokens and another has some experts a rank, too."""
    named = [(axis, each) for (axis, size), each in zip(mesh.axes, chosen, strict=True) if size > 1]
    some = [(axis, each.name) for axis, each in named if each.experts in ("whole", "exchange")]
    if len(some) > 1 and any(each.experts == "exchange" for _, each in named):
        raise AutoparError(
            f"experts are exchanged over one axis, not over {' and '.join(axis for axis, _ in some)}",
            values=f"mesh: {mesh}; {', '.join(f'{axis}={name}' for axis, name in some)}",
            remedy=f'use one axis for both, or {{"{some[0][0]}": "zero3", "{some[-1][0]}": "expert"}}',
        )


_PIPELINES = [
    ("pipeline", "the calls, in stages over the axis pp", "values and gradients at each cut, once a microbatch",
     "autopar: the schedule that is simulated fastest within the memory"),
    ("pipeline(gpipe)", "all forwards, then all backwards", "bubble (p-1)/m; m microbatches in flight",
     "Huang et al., GPipe, 1811.06965"),
    ("pipeline(1f1b)", "one forward, one backward in turn", "bubble (p-1)/m; p microbatches in flight",
     "Narayanan et al., PipeDream-Flush, 2006.09503"),
    ("pipeline(interleaved)", "v stages a rank, 1F1B over all", "bubble (p-1)/(v m); more sends",
     "Narayanan et al., Megatron-LM, 2104.04473"),
    ("pipeline(zero_bubble)", "weight gradients fill the bubble", "bubble (p-1)(F+B-2W) in time",
     "Qi et al., Zero Bubble, 2401.10241"),
    ("pipeline(zbv)", "two stages a rank in a V, as zero_bubble", "bubble near 0; p in flight",
     "Qi et al., Zero Bubble (ZB-V, section 6), 2401.10241"),
    ("pipeline(greedy)", "whatever can start next, within memory", "bubble and microbatches in flight as simulated",
     "autopar, after Qi et al., Zero Bubble, 2401.10241, section 3.1"),
    ("pipeline(dualpipev)", "two stages a rank in a V, forward and backward overlap", "bubble near 0; p in flight",
     "DeepSeek, DualPipe, 2412.19437; Sea AI Lab, DualPipeV (cut in half)"),
]  # fmt: skip


def rows() -> list[tuple[str, str, str, str]]:
    """Every named strategy once: its name, what it shards, when it communicates (Ψ: the bytes of all parameters), its
    source. Another name for one of them says for which.
    """
    found = []
    for name, each in STRATEGIES.items():
        own = each.name.split(":")[0]
        what = (each.shards, each.communicates) if own == name else (f"another name of {own}", f"as {own}")
        found.append((name, *what, each.source))
    return [*found, USP_ROW, *_PIPELINES]


def by_name(name: str) -> AxisStrategy:
    """The strategy of one axis, as a saved plan names it (`hsdp:across` too).

    Raises:
        AutoparError: an unknown name.
    """
    return _PARTS[name] if name in _PARTS else _lookup(name)


def _lookup(strategy: str | AxisStrategy | PipelineSpec) -> AxisStrategy:
    if isinstance(strategy, AxisStrategy):
        return strategy
    assert isinstance(strategy, str)
    if strategy not in STRATEGIES:
        raise AutoparError(
            f"unknown strategy {strategy!r}",
            values=f"known: {', '.join(STRATEGIES)}",
            remedy=did_you_mean(strategy, (*STRATEGIES, "pipeline"))
            + 'write one of these, or a mapping such as {"dp": "zero3", "tp": "tensor"}'
            + (f"; {AXIS} takes pipeline, or pipeline(1f1b)" if strategy.startswith("pip") else ""),
        )
    return STRATEGIES[strategy]


def parse(text: str) -> Strategy:
    """The command line's form: `zero3`, or `dp=zero3,tp=tensor`."""
    if "=" not in text:
        return text
    pairs = [item.split("=", 1) for item in re.split(r",(?![^()]*\))", text) if item]
    if any(len(pair) != 2 for pair in pairs):
        raise AutoparError(f"{text!r} is not a strategy", remedy="write NAME or axis=NAME,axis=NAME")
    return {axis.strip(): name.strip() for axis, name in pairs}


def describe(strategies: Sequence[AxisStrategy], mesh: Mesh, asked: PipelineSpec | None = None) -> str:
    """`zero3`, or `dp=zero3, tp=tensor`; with the pipeline's axis first where there is one.

    mesh: of a stage, where there is a pipeline.
    """
    names = [strategy.name.split(":")[0] for strategy in strategies]
    each = [f"{axis}={name}" for axis, name in zip(mesh.axis_names, names, strict=True)]
    if asked is not None:
        given = mesh.axis_names if mesh.whole is None else mesh.whole.axis_names  # a stage of one rank has an axis too
        each = [text for axis, text in zip(mesh.axis_names, each, strict=True) if axis in given]
        return ", ".join([f"{AXIS}={asked}", *each])
    return names[0] if len(set(names)) == 1 else ", ".join(each)


@dataclass(frozen=True, slots=True)
class Pin:
    """A user's constraint: tensors whose name matches `pattern` have these placements on these axes.

    taken: nobody asked for it: another program of the model has them so, and nothing is to move between the two.
    """

    pattern: str
    placements: tuple[tuple[str, Placement], ...]
    taken: bool = False

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    @property
    def is_name(self) -> bool:
        """Whether it is one name, without wildcards."""
        return not any(each in self.pattern for each in "*?[")


class Pins:
    """Pins by what they match: a second plan has one for each parameter of the first, which are names."""

    def __init__(self, pins: Sequence[Pin]) -> None:
        self._named: dict[str, list[tuple[int, Pin]]] = {}
        for place, each in enumerate(pins):
            if each.is_name:
                self._named.setdefault(each.pattern, []).append((place, each))
        self._others = [(place, each) for place, each in enumerate(pins) if not each.is_name]

    def of(self, *names: str) -> list[Pin]:
        """Those that match one of these names, in their order."""
        found = {place: each for name in names for place, each in self._named.get(name, ())}
        found.update((place, each) for place, each in self._others if any(map(each.matches, names)))
        return [found[place] for place in sorted(found)]


def pin(pattern: str, **placements: Any) -> Pin:
    """Pin the placement of parameters, inputs or outputs by name.

    Args:
        pattern: a fully qualified name with shell wildcards: `model.layers.*.mlp.down_proj.weight`, `input_ids`,
        `logits`.
        placements: axis name to `Shard(dim)` or `Replicate()`, autopar's or torch.distributed.tensor's.

    Raises:
        AutoparError: something that is no placement.
    """
    if not placements:
        raise AutoparError(f"pin({pattern!r}) says nothing", remedy="name an axis: pin(pattern, tp=Shard(0))")
    return Pin(pattern, tuple((axis, to_placement(value)) for axis, value in placements.items()))


def to_placement(value: Any) -> Placement:
    """autopar's placement for autopar's or torch's own (duck-typed: this module imports no torch)."""
    if isinstance(value, (Replicate, Shard, Partial)):
        return value
    kind = type(value).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(int(value.dim))
    if kind == "_StridedShard":
        return Shard(int(value.dim), int(value.split_factor))
    raise AutoparError(f"{value!r} is not a placement that can be pinned", remedy="use Shard(dim) or Replicate()")
