"""What travels between the stages of a pipeline, once it is known where the program is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from autopar.base.errors import AutoparError
from autopar.ir.program import Program
from autopar.ir.stages import Stage
from autopar.ir.values import ValueRef


def boundaries(program: Program, cuts: Sequence[int], recomputed: Sequence[Sequence[int]] = ()) -> tuple[Stage, ...]:
    """The stages of consecutive calls, with what each receives and sends.

    A value that a later stage reads is relayed by every stage between; it comes from the last one before the reader
    that computes it. Inputs of the program do not travel, nor do its outputs, unless a later stage reads them.

    Args:
        cuts: the first call of each stage, 0 first.
        recomputed: for each stage, calls of earlier stages that it computes again for itself; none where left out.

    Returns:
        One stage per cut; values in the order of their calls, then of their results.

    Raises:
        AutoparError: cuts that are not increasing, or leave a stage without calls (which only steps do that leave out
            blocks, as Python's numbers say); a call computed again that carries gradients, changes buffers, or belongs
            to no earlier stage.
    """
    _check_cuts(cuts, len(program.calls), may_be_empty=program.told is not None)
    repeated = [tuple(sorted(set(calls))) for calls in recomputed] or [()] * len(cuts)
    if len(repeated) != len(cuts):
        raise AutoparError(f"calls to compute again are given for {len(repeated)} stages, there are {len(cuts)}")
    ends = [*cuts[1:], len(program.calls)]
    for stage, calls in enumerate(repeated):
        for call in calls:
            _check_recomputed(program, stage, call, cuts[stage])
    owned = [(*calls, *range(first, end)) for calls, first, end in zip(repeated, cuts, ends, strict=True)]
    received = _received(program, owned)
    return tuple(
        Stage(calls, repeated[stage], received[stage], received[stage + 1] if stage + 1 < len(cuts) else ())
        for stage, calls in enumerate(owned)
    )


def reads(program: Program, calls: Sequence[int]) -> tuple[ValueRef, ...]:
    """What some calls read of other calls' results, in order."""
    own = set(calls)
    found = {ref for number in calls for ref in program.calls[number].arguments if ref.call >= 0}
    return tuple(sorted((ref for ref in found if ref.call not in own), key=_order))


def inputs_wanted_of(program: Program, calls: Iterable[int]) -> tuple[str, ...]:
    """The inputs of the program whose gradients are wanted, and of which the backwards of these calls give terms."""
    found = {
        ref.name
        for number in calls
        for ref, port in zip(
            program.calls[number].arguments, program.region(program.calls[number].region).inputs, strict=True
        )
        if ref.call < 0 and port.differentiable
    }
    return tuple(port.name for port in program.inputs if port.differentiable and port.name in found)


def carries_gradient(program: Program, ref: ValueRef) -> bool:
    """Whether a value between calls has a gradient."""
    return ref.call >= 0 and ref.index in program.region(program.calls[ref.call].region).tangents


def _received(program: Program, owned: Sequence[Sequence[int]]) -> list[tuple[ValueRef, ...]]:
    """For each stage, what the one before gives it: what it reads itself, and what it only passes on."""
    found: list[set[ValueRef]] = [set() for _ in owned]
    last: dict[int, int] = {}  # the last stage that computes a call
    for stage, calls in enumerate(owned):
        for ref in reads(program, calls):
            for each in range(last[ref.call] + 1, stage + 1):
                found[each].add(ref)
        last.update(dict.fromkeys(calls, stage))
    return [tuple(sorted(refs, key=_order)) for refs in found]


def _order(ref: ValueRef) -> tuple[int, int]:
    return ref.call, ref.index


def _check_cuts(cuts: Sequence[int], num_calls: int, *, may_be_empty: bool) -> None:
    bounds = [*cuts, num_calls]
    least = 0 if may_be_empty else 1
    if not cuts or cuts[0] != 0 or any(end - first < least for first, end in itertools.pairwise(bounds)):
        raise AutoparError(
            f"a program of {num_calls} calls cannot be cut before calls {', '.join(map(str, cuts)) or '-'}",
            values="cuts begin with 0 and increase, so that each stage has a call",
            remedy=f"use at most {num_calls} stages",
        )


def _check_recomputed(program: Program, stage: int, number: int, first: int) -> None:
    where = f"stage {stage}, call {number}"
    if not 0 <= number < first:
        raise AutoparError("only calls of earlier stages can be computed again", where=where)
    call = program.calls[number]
    region = program.region(call.region)
    if region.tangents or any(slot.trainable for slot in region.slots):
        raise AutoparError(f"{call.path or region.name} carries gradients and cannot be computed again", where=where)
    if any(ref.call == number for _, ref in program.updates):
        raise AutoparError(f"{call.path or region.name} changes buffers and cannot be computed again", where=where)
