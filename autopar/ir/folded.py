"""What a captured program left out of long rows of equal blocks, put back where it counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.ir.program import AttentionSite, Folded, Program
from autopar.ir.region import Call
from autopar.ir.values import ValueRef


def with_left_out(sites: Sequence[tuple[AttentionSite, int | None]], folded: Sequence[Folded]) -> list[AttentionSite]:
    """Attentions that were found, and those of the blocks that were left out, in the model's order.

    sites: with the number of the row that each is of (`ROW`).
    """
    found = [site for site, _ in sites]
    for number in reversed(range(len(folded))):
        row = folded[number]
        within = [(place, site) for place, (site, of) in enumerate(sites) if of == number]
        own = [(path, site) for path in row.like for _, site in within if _within(site.module, path)]
        end = max((place + 1 for place, _ in within), default=0)
        where = [dict(zip(row.like, paths, strict=True)) for paths in row.left_out]
        found[end:end] = [
            replace(site, module=others[path] + site.module.removeprefix(path))
            for others in where
            for path, site in own
        ]
    return found


def read_with_left_out(slots: Iterable[str], folded: Sequence[Folded]) -> set[str]:
    """The variables that a program reads whose graph reads these: those of blocks that were left out, too."""
    found = set(slots)
    for row in folded:
        for paths in row.left_out:
            for path, other in zip(row.like, paths, strict=True):
                found |= {other + name.removeprefix(path) for name in found if name.startswith(f"{path}.")}
    return found


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def unfolded(program: Program, rows: Mapping[int, int]) -> Program:
    """The outlined program with the calls of blocks that the graph left out.

    rows: of each long row, by its number, the first call of the period that the others are like.
    """
    for number in reversed(range(len(program.folded))):
        program = _put_back(program, program.folded[number], rows[number])
    return replace(program, folded=())


def _put_back(program: Program, folded: Folded, first: int) -> Program:
    calls, period = program.calls, len(folded.like)
    end, grown = first + period, period * len(folded.left_out)
    before, like = calls[first - period : first], calls[first:end]
    shown = tuple(call.path for call in (*before, *like))
    assert shown == (*folded.before, *folded.like), f"{folded} was cut as {shown}"
    assert [call.region for call in before] == [call.region for call in like], f"{folded} has different regions"

    def later(ref: ValueRef) -> ValueRef:
        """As seen from behind the row: the last period lies further back."""
        return replace(ref, call=ref.call + grown) if ref.call >= first else ref

    def returned(name: str, ref: ValueRef) -> ValueRef:
        if name not in folded.outputs:
            return later(ref)
        return replace(ref, call=ref.call + period * folded.outputs[name])

    others: list[Call] = []
    for again, paths in enumerate(folded.left_out, start=1):
        own_inputs = folded.inputs[again - 1] if folded.inputs else {}
        for earlier, call, path in zip(before, like, paths, strict=True):
            arguments = tuple(
                _moved(one, other, period, again, own_inputs)
                for one, other in zip(earlier.arguments, call.arguments, strict=True)
            )
            own = call.path + "."
            slots = tuple(f"{path}.{slot.removeprefix(own)}" if slot.startswith(own) else slot for slot in call.slots)
            others.append(Call(call.region, path, slots, arguments))
    rest = tuple(replace(call, arguments=tuple(map(later, call.arguments))) for call in calls[end:])
    return replace(
        program,
        calls=(*calls[:end], *others, *rest),
        outputs=tuple(map(returned, program.output_names, program.outputs)),
        updates=tuple((name, later(ref)) for name, ref in program.updates),
    )


def _moved(earlier: ValueRef, ref: ValueRef, period: int, times: int, own_inputs: Mapping[str, str]) -> ValueRef:
    """What the block `times` periods behind the one that reads `ref` reads; the one before that reads `earlier`."""
    if ref.call < 0 and ref.name in own_inputs:
        return replace(ref, name=own_inputs[ref.name])
    if earlier == ref:
        return ref
    assert ref == replace(earlier, call=earlier.call + period), f"{earlier} is followed by {ref}"
    return replace(ref, call=ref.call + period * times)
