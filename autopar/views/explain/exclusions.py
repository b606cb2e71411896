"""Which shardings of a plan's tensor are out before anything is solved, and what the strategies and pins say of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.cost.context import attending_regions
from autopar.ir.choices import NONE
from autopar.ir.program import Program
from autopar.ir.sharding import Replicate, Shard, Sharding
from autopar.machine.mesh import Mesh
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin, pin
from autopar.views.explain import attention_choices as attending
from autopar.views.explain.explanation import Excluded
from autopar.views.explain.subjects import (
    Layout,
    Subject,
    candidates,
    choices_in,
    indivisible,
    layout_of,
    layout_text,
    operator_layouts,
    sharding_in,
)


def sift(plan: PlanRecord, subject: Subject) -> tuple[list[Layout], dict[Layout, Excluded]]:
    """The shardings worth solving, nearest to the chosen one first; those that are out beforehand, with the reason."""
    program = plan.program
    assert program is not None
    chosen = layout_of(program, subject)
    listed = [sharding for sharding in candidates(program, subject) if sharding != chosen]
    wanted: list[Layout] = []
    out: dict[Layout, Excluded] = {}
    for sharding in sorted(listed, key=lambda each: sum(a != b for a, b in zip(each, chosen, strict=True))):
        found = _excluded(plan, program, subject, sharding)
        if found is None:
            wanted.append(sharding)
        else:
            out[sharding] = found
    return wanted, out


def nearest(chosen: Layout, shardings: Iterable[Layout]) -> list[Layout]:
    """Without those that differ from the chosen one in all that another one does, and more: they say nothing new."""
    listed = list(shardings)

    def is_between(middle: Layout, last: Layout) -> bool:
        return all(m in (a, b) for m, a, b in zip(middle, chosen, last, strict=True))

    return [each for each in listed if not any(is_between(other, each) for other in listed if other != each)]


def _excluded(plan: PlanRecord, program: Program, subject: Subject, layout: Layout) -> Excluded | None:
    axes, text = plan.stage_mesh.axis_names, layout_text(program, subject, layout)
    if subject.kind == "attention":
        return _attention_excluded(plan, program, subject, layout)
    sharding = sharding_in(layout)
    if reason := indivisible(program, subject.type, sharding):
        return Excluded(text, "size", reason)
    if subject.kind == "operator":
        rule = program.region(subject.region).ops[subject.node][1]
        allowed = sharding in operator_layouts(program, subject)
        return None if allowed else Excluded(text, "operator", f"its rule has no such split: {rule}")
    for axis, placement in enumerate(sharding):
        for pinned in pins_on(plan, subject):
            if dict(pinned.placements).get(axes[axis], placement) != placement:
                return Excluded(text, "pin", f"{why_pinned(pinned)} {pin_text(pinned)}")
        if plan.stage_mesh.sizes[axis] > 1 and (reason := forbidden(plan, subject, axis, placement)):
            return Excluded(text, "strategy", reason)
    return None


def _attention_excluded(plan: PlanRecord, program: Program, subject: Subject, layout: Layout) -> Excluded | None:
    """What sizes, and strategies that say what attention does, have nothing of."""
    choices, region = choices_in(layout), program.region(subject.region)
    chosen, mesh = choices_in(layout_of(program, subject)), plan.stage_mesh
    attends = region.name in attending_regions(program)
    text = attending.choices_text(choices, mesh)
    for (axis, size), strategy, choice, own in zip(mesh.axes, plan.strategies, choices, chosen, strict=True):
        if choice != own and size > 1 and attends and (said := attending.forbidden(strategy, choice, axis)):
            return Excluded(text, "strategy", said)
    if any(strategy.choices == choices for strategy in region.options[subject.node].strategies):
        return None
    number = next(axis for axis, (choice, own) in enumerate(zip(choices, chosen, strict=True)) if choice != own)
    rule = region.ops[subject.node][1]
    if text_of_sizes := attending.indivisible(rule, choices, number, mesh):
        return Excluded(text, "size", text_of_sizes)
    others = attending.choices_text((*choices[:number], NONE, *choices[number + 1 :]), mesh)
    return Excluded(text, "operator", f"does not go with what the other axes do: {others}")


def pins_on(plan: PlanRecord, subject: Subject) -> list[Pin]:
    """The plan's own pins that say something of the subject."""
    names = (*subject.members, *subject.aliases)
    return [pinned for pinned in plan.pins if any(pinned.matches(name) for name in names)]


def forbidden(plan: PlanRecord, subject: Subject, axis: int, placement: object) -> str | None:
    """What the strategy of an axis forbids, pin or not."""
    strategy, name = plan.strategies[axis], plan.stage_mesh.axis_names[axis]
    if subject.kind == "parameter" and isinstance(placement, Shard):
        if not strategy.parameters - {"replicate"}:
            return f"{strategy.name} keeps parameters whole on {name}"
        if placement.outer > 1 and "shard" not in strategy.parameters:
            return f"{strategy.name} stores parameters on {name} in contiguous pieces, which it gathers for use"
    if subject.kind == "input":
        if strategy.inputs == "replicate" and isinstance(placement, Shard):
            return f"{strategy.name} keeps inputs whole on {name}"
        if strategy.inputs == "batch" and placement != Shard(0) and subject.type.shape:
            return f"{strategy.name} splits the batch, dim 0 of every input, over {name}"
    return None


def required(strategy: AxisStrategy, subject: Subject, axis: str) -> str:
    """What a strategy asks of a parameter unless it is pinned; empty where it asks nothing."""
    if subject.kind == "parameter" and strategy.required in ("gather", "keep"):
        return f"{strategy.name} stores parameters in pieces on {axis}, where they can be cut"
    if subject.kind == "parameter" and strategy.required == "shard_matrices" and len(subject.type.shape) == 2:
        return f"{strategy.name} splits weight matrices on {axis}, where they can be cut"
    return ""


def overridden(plan: PlanRecord, subject: Subject, sharding: Layout) -> list[str]:
    """The strategies that would not have it so, and that only a pin gets around: `against zero3 on dp`."""
    found = []
    for strategy, placement, (axis, size) in zip(plan.strategies, sharding, plan.stage_mesh.axes, strict=True):
        if size > 1 and isinstance(placement, Replicate) and required(strategy, subject, axis):
            found.append(f"against {strategy.name} on {axis}")
    return found


def mixed_splits(plan: PlanRecord, sharding: Layout) -> str | None:
    """A dim that one axis would gather for use while another, which cuts its pieces again, would not."""
    splits = [(axis, p) for axis, p in enumerate(sharding) if isinstance(p, Shard) and plan.stage_mesh.sizes[axis] > 1]
    for (first, placement), (second, other) in itertools.combinations(splits, 2):
        one, two = plan.strategies[first], plan.strategies[second]
        keeps = [s for s in (one, two) if s.parameters <= {"replicate", "shard"}]
        gathers = [s for s in (one, two) if "shard" not in s.parameters]
        if placement.dim == other.dim and len(keeps) == len(gathers) == 1:
            axes = plan.stage_mesh.axis_names
            gathered, kept = (first, second) if gathers[0] is one else (second, first)
            return (
                f"{gathers[0].name} gathers what {axes[gathered]} cuts and {keeps[0].name} keeps what {axes[kept]} "
                f"cuts: they cannot both cut dim {placement.dim}"
            )
    return None


def pin_of(pattern: str, sharding: Sharding, mesh: Mesh) -> Pin | None:
    """On all axes that can split anything; None on a mesh of one rank."""
    placements = {axis: p for (axis, size), p in zip(mesh.axes, sharding, strict=True) if size > 1}
    return pin(pattern, **placements) if placements else None


def why_pinned(pinned: Pin) -> str:
    """Who has said so."""
    return "another program of the model has" if pinned.taken else "the plan was asked for"


def pin_texts(pins: Sequence[Pin]) -> Iterator[tuple[Pin, str]]:
    """Pins as a user would write them, each with its first: those of parameters that differ in numbers alone, as those
    of equal layers do, are one pattern and how many there are.

        layers.0.up.weight, layers.1.up.weight, both Shard(0) on tp → pin("layers.*.up.weight", tp=Shard(0)), 2 of them
    """
    groups: dict[tuple[str, object, bool], list[Pin]] = {}
    for each in pins:
        pattern = _NUMBER.sub("*", each.pattern) if each.is_name else each.pattern
        groups.setdefault((pattern, each.placements, each.taken), []).append(each)
    for (pattern, _, _), same in groups.items():
        several = f", {len(same)} of them" if len(same) > 1 else ""
        shown = replace(same[0], pattern=pattern) if several else same[0]
        yield same[0], f"{pin_text(shown)}{several}"


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number, as of a list's element."""


def pin_text(pinned: Pin) -> str:
    """As a user would write it: `autopar.pin("x", dp=Shard(0))`."""
    return f'autopar.pin("{pinned.pattern}", {", ".join(f"{axis}={_code(p)}" for axis, p in pinned.placements)})'


def _code(placement: object) -> str:
    if isinstance(placement, Shard):
        more = f", {placement.outer}" if placement.outer != 1 else ""
        return f"Shard({placement.dim}{more}{', zigzag=True' if placement.zigzag else ''})"
    return f"{type(placement).__name__}()"
