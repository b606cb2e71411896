"""The text that gathers parameters and reduces their gradients: one function a region, one bucket a collective."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.blocks import resizes
from autopar.ir import Bucket, Call, Overlap, ParameterLayout, Program, Region, Slot, TensorType, Variable
from autopar.sharding import Sharding, Step

WIDTH = 88


@dataclass(frozen=True, slots=True)
class Names:
    """What the emitter knows of the whole program, or of one stage of it.

    shared: parameters that several calls use and that are gathered once a phase. tied: trainable parameters that
    several calls use: their gradients are added before the reduction. Of a stage: those that it uses.
    """

    program: Program
    shared: tuple[str, ...]
    tied: tuple[str, ...]

    @staticmethod
    def of(program: Program, calls: Iterable[int] | None = None) -> Names:
        """calls: of one stage; all where left out."""
        numbers = range(len(program.calls)) if calls is None else calls
        used = {name for number in numbers for name in program.calls[number].slots}
        several = [each for each in program.shared if each.name in used]
        shared = tuple(each.name for each in several if each.gather is not None)
        return Names(program, shared, tuple(each.name for each in several if each.reduce is not None))

    @property
    def axes(self) -> tuple[str, ...]:
        assert self.program.mesh is not None
        return self.program.mesh.axis_names

    @property
    def sizes(self) -> tuple[int, ...]:
        assert self.program.mesh is not None
        return tuple(self.program.mesh.sizes)

    @property
    def overlap(self) -> Overlap:
        assert self.program.overlap is not None
        return self.program.overlap

    @property
    def waits(self) -> bool:
        """Whether gradients wait in `sums` before they are reduced."""
        return self.program.microbatches > 1 or self.at_end

    @property
    def at_end(self) -> bool:
        """Whether they wait until the whole backward is through, or the last one of a stage."""
        return self.overlap.at_end or self.program.pipeline is not None

    def layout(self, name: str) -> ParameterLayout:
        assert self.program.placement is not None
        return self.program.placement.parameters[name]


def parenthesized(items: Sequence[str]) -> str:
    """A tuple display: `()`, `(a,)`, `(a, b)`."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def state_key(region: Region, slot: Slot, variable: Variable) -> str:
    """`at + "mlp.up_proj.weight"` in a repeated block, the full name elsewhere."""
    return f'at + "{slot.name}"' if region.module and slot.name != variable.name else f'"{variable.name}"'


def moves_anything(buckets: Sequence[Bucket]) -> bool:
    """Whether there is a collective to wait for."""
    return any(bucket.chain for bucket in buckets)


def has_own_backward_gather(region: Region) -> bool:
    """Whether the backward gathers other parameters than the forward, beside those that need no move."""
    forward, backward = (
        [move.slot for bucket in region.transfers[which] if bucket.chain for move in bucket.moves]
        for which in ("gather", "gather_for_backward")
    )
    return sorted(forward) != sorted(backward)


def gather_call(region: Region, which: str, at: str) -> str:
    """The expression that starts a region's gathers, or gives its parameters where nothing is to be gathered."""
    name = which if which == "gather" or has_own_backward_gather(region) else "gather"
    arguments = "comm, state, held" if moves_anything(region.transfers[name]) else "state"
    return f"{region.name}_{name}({arguments}, {at})"


def gather_function(names: Names, region: Region, which: str) -> str:
    """Gives `p`: a dict where nothing is to be gathered, else the transfers that end in one."""
    buckets = region.transfers[which]
    slots = _slots(names, region)
    if not moves_anything(buckets):
        lines = [f"def {region.name}_{which}(state, at):", "    return {"]
        for bucket in buckets:
            for move in bucket.moves:
                slot, variable = slots[move.slot]
                layout = names.layout(variable.name).compute
                text = f'        "{slot.name}": {_stored(region, slot, variable)},'
                lines.append(_noted(text, names, variable, layout))
        return "\n".join([*lines, "    }"])
    lines = [f"def {region.name}_{which}(comm, state, held, at):", "    p = comm.transfers(held, at)"]
    for bucket in buckets:
        entries = [
            (f'"{slots[m.slot][0].name}"', _stored(region, *slots[m.slot]), m.steps, slots[m.slot][1])
            for m in bucket.moves
        ]
        lines += _bucket(names, "p", bucket, entries, [names.layout(entry[3].name).compute for entry in entries])
    return "\n".join([*lines, "    return p"])


def unshard_function(names: Names, region: Region) -> str | None:
    """Starts those gathers of a region whose results are held for the step: of each bucket the steps that are kept.

    A later `gather` finds them in `held`. None where nothing is held.
    """
    kept = [held_part(bucket) for bucket in region.transfers["gather"] if bucket.keep]
    if not kept:
        return None
    slots = _slots(names, region)
    lines = [f"def {region.name}_unshard(comm, state, held, at):", "    p = comm.transfers(held, at)"]
    for bucket in kept:
        entries = [
            (f'"{slots[m.slot][0].name}"', _stored(region, *slots[m.slot]), m.steps, slots[m.slot][1])
            for m in bucket.moves
        ]
        lines += _bucket(names, "p", bucket, entries, [names.layout(entry[3].name).held for entry in entries])
    return "\n".join([*lines, "    return p"])


def held_part(bucket: Bucket) -> Bucket:
    """A bucket's first steps, whose results are kept."""
    moves = tuple(replace(move, steps=move.steps[: bucket.keep]) for move in bucket.moves)
    return replace(bucket, chain=bucket.chain[: bucket.keep], moves=moves)


def shared_unshard_lines(names: Names) -> list[str]:
    """The same for parameters that several calls use."""
    lines: list[str] = []
    for each in names.program.shared:
        if each.name in names.shared and each.gather is not None and each.gather.keep:
            bucket, variable = held_part(each.gather), names.program.variable(each.name)
            entry = (f'"{each.name}"', _cast(f'state["{each.name}"]', variable), bucket.moves[0].steps, variable)
            lines += _bucket(names, "shared", bucket, [entry], [names.layout(each.name).held])
    return lines


def reduce_function(names: Names, region: Region) -> str:
    """Starts the reductions of a region's gradients, from `g` or from the sums over microbatches; a dict of them where
    nothing is to be reduced.
    """
    slots = _slots(names, region)
    source = "sums" if names.waits else "g"
    moves = moves_anything(region.transfers["reduce"])
    lines = [f"def {region.name}_reduce({'comm, ' if moves else ''}{source}, at):"]
    lines.append("    r = comm.transfers()" if moves else "    return {")
    for bucket in region.transfers["reduce"]:
        entries = []
        for move in bucket.moves:
            slot, variable = slots[move.slot]
            key = state_key(region, slot, variable)
            text = gradient_of(names, variable, key) if names.waits else f'g["{slot.name}"]'
            entries.append((key, _resized_gradient(names, variable, text), move.steps, variable))
        results = [names.layout(entry[3].name).stored for entry in entries]
        if moves:
            lines += _bucket(names, "r", bucket, entries, results)
        else:
            pairs = zip(entries, results, strict=True)
            lines += [_noted(f"        {key}: {text},", names, v, sharding) for (key, text, _, v), sharding in pairs]
    return "\n".join([*lines, "    return r" if moves else "    }"])


def gradient_of(names: Names, variable: Variable, key: str) -> str:
    """A gradient out of the sums over microbatches, in the dtype in which it is reduced."""
    text = f"sums.pop({key})"
    return f"{text}.to({variable.type.dtype})" if accumulates_in_other_dtype(names, variable) else text


def accumulates_in_other_dtype(names: Names, variable: Variable) -> bool:
    """Whether microbatches are summed in the stored dtype, which is not the compute dtype."""
    return names.program.microbatches > 1 and variable.stored_dtype != variable.type.dtype


def shared_lines(names: Names, which: str, wanted: Container[str] | None = None) -> list[str]:
    """Gather, once a phase, the parameters that several calls use (`which`: gather), or reduce their gradients.

    wanted: their names, all where left out.
    """
    lines: list[str] = []
    used = wanted if wanted is not None else names.shared if which == "gather" else names.tied
    for each in names.program.shared:
        bucket = each.gather if which == "gather" else each.reduce
        if bucket is None or each.name not in used:
            continue
        variable = names.program.variable(each.name)
        layout = names.layout(each.name)
        key = f'"{each.name}"'
        if which == "gather":
            text = _cast(f"state[{key}]", variable)
        else:
            text = gradient_of(names, variable, key) if names.waits else f"tied[{key}]"
            text = _resized_gradient(names, variable, text)
        entry = (key, text, bucket.moves[0].steps, variable)
        sharding = layout.compute if which == "gather" else layout.stored
        lines += _bucket(names, "shared" if which == "gather" else "reducing", bucket, [entry], [sharding])
    return lines


def resize_lines(names: Names, target: str, entries: Iterable[tuple[str, Variable]], indent: str) -> Iterator[str]:
    """Cut or pad what was gathered from uneven pieces to what operators see."""
    for key, variable in entries:
        for dim, _, seen in resizes(variable, names.layout(variable.name), names.sizes):
            yield f'{indent}{target}["{key}"] = ops.resize({target}["{key}"], {dim}, {seen})'


def slots_of(names: Names, region: Region, call: Call, which: str) -> Iterator[tuple[str, Variable]]:
    """The slots that a region gathers itself, with their variables."""
    for bucket in region.transfers[which]:
        for move in bucket.moves:
            yield region.slots[move.slot].name, names.program.variable(call.slots[move.slot])


def _resized_gradient(names: Names, variable: Variable, text: str) -> str:
    """A gradient that its axes divide, of a parameter that they do not."""
    for dim, gathered, _ in resizes(variable, names.layout(variable.name), names.sizes):
        text = f"ops.resize({text}, {dim}, {gathered})"
    return text


def _slots(names: Names, region: Region) -> list[tuple[Slot, Variable]]:
    _, call = next(names.program.calls_of(region.name))
    return [(slot, names.program.variable(name)) for slot, name in zip(region.slots, call.slots, strict=True)]


def _stored(region: Region, slot: Slot, variable: Variable) -> str:
    return _cast(f"state[{state_key(region, slot, variable)}]", variable)


def _cast(text: str, variable: Variable) -> str:
    return f"{text}.to({variable.type.dtype})" if variable.stored_dtype != variable.type.dtype else text


def _bucket(
    names: Names,
    target: str,
    bucket: Bucket,
    entries: Sequence[tuple[str, str, tuple[Step, ...], Variable]],
    results: Sequence[Sharding],
) -> Iterator[str]:
    if not bucket.chain:
        for (key, text, _, variable), sharding in zip(entries, results, strict=True):
            yield _noted(f"    {target}.put({key}, {text})", names, variable, sharding)
        return
    chain = ", ".join(f"{kind} {names.axes[axis]}" for kind, axis in bucket.chain)
    yield f'    {target}.bucket("{chain}", {{'
    for (key, text, steps, variable), sharding in zip(entries, results, strict=True):
        arguments = [_argument(step) for step in steps if step.kind != "all_reduce"]
        value = parenthesized([text, *arguments]) if arguments else text
        yield _noted(f"        {key}: {value},", names, variable, sharding)
    options = f", keep={bucket.keep}" if bucket.keep else ", owned=True" if bucket.owned else ""
    yield f"    }}{options})"


def _argument(step: Step) -> str:
    assert not (step.zigzag or step.from_zigzag), "parameters and their gradients are not stored zigzag"
    if step.kind == "all_to_all":
        return f"({step.dim}, {step.outer}, {step.from_dim}, {step.from_outer})"
    return str(step.dim) if step.outer == 1 else f"({step.dim}, {step.outer})"


def _noted(text: str, names: Names, variable: Variable, sharding: Sharding) -> str:
    note = TensorType(variable.seen.shape, variable.type.dtype).text(sharding, names.axes)
    return f"{text.ljust(WIDTH if len(text) < WIDTH else 0)}  # {note}"


def tied_lines(names: Names, region: Region, call: Call, indent: str) -> Iterator[str]:
    """Add the gradients of parameters that several calls use to what the other calls gave."""
    for slot, name in zip(region.slots, call.slots, strict=True):
        if slot.trainable and name in names.tied:
            new, old = f'g.pop("{slot.name}")', f'tied["{name}"]'
            yield f'{indent}{old} = {old} + {new} if "{name}" in tied else {new}'
