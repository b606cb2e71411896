"""The text that gathers parameters and reduces their gradients: one function a region, one bucket a collective."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.placement import Overlap, ParameterLayout
from autopar.ir.program import Program
from autopar.ir.region import Bucket, Call, Region
from autopar.ir.sharding import Sharding, Step
from autopar.ir.tensor_type import TensorType
from autopar.ir.uneven import resizes
from autopar.ir.values import Slot, Variable
from autopar.passes.emission.literals import quoted
from autopar.passes.emission.sizes import Sizes

WIDTH = 88


@dataclass(frozen=True, slots=True)
class Names:
    """What the emitter knows of the whole program, or of one stage of it.

    shared: parameters that several calls use and that are gathered once a phase. tied: trainable parameters that
    several calls use: their gradients are added before the reduction. Of a stage: those that it uses. known_sizes:
    those that the text has names for.
    """

    program: Program
    shared: tuple[str, ...]
    tied: tuple[str, ...]
    known_sizes: Sizes = field(default_factory=Sizes)

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
    own = region.module and slot.name != variable.name
    return f"at + {quoted(slot.name)}" if own else quoted(variable.name)


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
        lines: list[str] = []
        for bucket in buckets:
            for move in bucket.moves:
                slot, variable = slots[move.slot]
                layout = names.layout(variable.name).compute
                text = f"        {quoted(slot.name)}: {_stored(region, slot, variable)},"
                lines.append(_noted(text, names, variable, layout))
        return "\n".join([f"def {region.name}_{which}(state, at):", *_returned(lines)])
    known = {table.gather: table for table in tables_of(names, region)} if which == "gather" else {}
    calls: list[list[str]] = []
    for number, bucket in enumerate(buckets):
        entries = _gathered(names, region, bucket)
        if number in known:
            calls.append([f".bucket({known[number].gathered})"])
        else:
            calls += _calls(names, bucket, entries, [names.layout(entry[3].name).compute for entry in entries])
    return "\n".join(
        [f"def {region.name}_{which}(comm, state, held, at):", *_started("comm.transfers(held, at)", "p", calls)]
    )


def unshard_function(names: Names, region: Region) -> str | None:
    """Starts those gathers of a region whose results are held for the step: of each bucket the steps that are kept.

    A later `gather` finds them in `held`. None where nothing is held.
    """
    kept = [held_part(bucket) for bucket in region.transfers["gather"] if bucket.keep]
    if not kept:
        return None
    calls: list[list[str]] = []
    for bucket in kept:
        entries = _gathered(names, region, bucket)
        calls += _calls(names, bucket, entries, [names.layout(entry[3].name).held for entry in entries])
    head = f"def {region.name}_unshard(comm, state, held, at):"
    return "\n".join([head, *_started("comm.transfers(held, at)", "p", calls)])


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
            key = quoted(each.name)
            entry = (key, _cast(f"state[{key}]", variable), bucket.moves[0].steps, variable)
            lines += _bucket(names, "shared", bucket, [entry], [names.layout(each.name).held])
    return lines


def reduce_function(names: Names, region: Region) -> str:
    """Starts the reductions of a region's gradients, from `g` or from the sums over microbatches; a dict of them where
    nothing is to be reduced.
    """
    source = "sums" if names.waits else "g"
    moves = moves_anything(region.transfers["reduce"])
    head = f"def {region.name}_reduce({'comm, ' if moves else ''}{source}, at):"
    known = {table.reduce: table for table in tables_of(names, region)}
    calls: list[list[str]] = []
    plain: list[str] = []
    for number, bucket in enumerate(region.transfers["reduce"]):
        entries = _reduced(names, region, bucket)
        results = [names.layout(entry[3].name).stored for entry in entries]
        if number in known:
            calls.append([f".bucket({known[number].reduced})"])
        elif moves:
            calls += _calls(names, bucket, entries, results)
        else:
            pairs = zip(entries, results, strict=True)
            plain += [_noted(f"        {key}: {text},", names, v, sharding) for (key, text, _, v), sharding in pairs]
    if not moves:
        return "\n".join([head, *_returned(plain)])
    return "\n".join([head, *_started("comm.transfers()", "r", calls)])


def _returned(entries: Sequence[str]) -> list[str]:
    """The end of a function that gives a dict."""
    return ["    return {", *entries, "    }"] if entries else ["    return {}"]


Entry = tuple[str, str, tuple[Step, ...], Variable]
"""Of one tensor of a bucket: its key, the tensor as Python text, its steps, the parameter."""


def _gathered(names: Names, region: Region, bucket: Bucket) -> list[Entry]:
    slots = [(slot, variable, move) for move in bucket.moves for slot, variable in [_slots(names, region)[move.slot]]]
    return [(quoted(slot.name), _stored(region, slot, v), move.steps, v) for slot, v, move in slots]


def _reduced(names: Names, region: Region, bucket: Bucket) -> list[Entry]:
    entries: list[Entry] = []
    for move in bucket.moves:
        slot, variable = _slots(names, region)[move.slot]
        key = state_key(region, slot, variable)
        text = gradient_of(names, variable, key) if names.waits else f"g[{quoted(slot.name)}]"
        entries.append((key, *_resized_gradient(names, variable, text, move.steps), variable))
    return entries


@dataclass(frozen=True, slots=True)
class Table:
    """Parameters that are gathered and whose gradients are reduced with the same arguments: said once, above both.

    gather, reduce: numbers of the buckets. gathered, reduced: what these are given.
    """

    gather: int
    reduce: int
    text: str
    gathered: str
    reduced: str


def tables_of(names: Names, region: Region) -> list[Table]:
    """The tables of a region: one for each bucket of its gather that one of its reductions mirrors."""
    found: list[Table] = []
    for number, bucket in enumerate(region.transfers["gather"]):
        for place, other in enumerate(region.transfers.get("reduce", ())):
            title = _title(names, region)
            title += f"_{len(found) + 1}" if found else ""
            table = _table(names, region, title, bucket, other)
            if table is not None:
                text, gathered, reduced = table
                found.append(Table(number, place, text, gathered, reduced))
                break
    return found


def _title(names: Names, region: Region) -> str:
    """What a region's tables are called: not as another's, nor as what a pipeline has."""
    title = (f"{region.name}_parameters" if len(region.name) == 1 else region.name).upper()
    regions = [each.name for each in names.program.regions]
    several = title in _TITLES or [each.upper() for each in regions].count(region.name.upper()) > 1
    return f"{title}_OF_REGION_{regions.index(region.name)}" if several else title


_TITLES = ("STAGES", "SCHEDULE")


def _table(names: Names, region: Region, title: str, gather: Bucket, reduce: Bucket) -> tuple[str, str, str] | None:
    if len(gather.moves) < LEAST_ROWS or not gather.chain or not reduce.chain:
        return None
    ins, outs = _gathered(names, region, gather), _reduced(names, region, reduce)
    if [v.name for *_, v in ins] != [v.name for *_, v in outs]:
        return None
    values = [_arguments_of(steps) for _, _, steps, _ in ins]
    if values != [_arguments_of(steps) for _, _, steps, _ in outs] or len({len(each) for each in values}) > 1:
        return None
    slots = [quoted(region.slots[move.slot].name) for move in gather.moves]
    keys = [outs[i][0] for i in range(len(outs))]
    prefix = {key.removesuffix(slot) for key, slot in zip(keys, slots, strict=True)}
    sources = {text.replace(slot, "name") for (_, text, *_), slot in zip(ins, slots, strict=True)}
    gradients = {text.replace(slot, "name") for (_, text, *_), slot in zip(outs, slots, strict=True)}
    if len(prefix) > 1 or len(sources) > 1 or len(gradients) > 1:
        return None
    (before,), (source,), (gradient,) = prefix, sources, gradients
    count = len(values[0])
    pairs = f"for name, dim in {title}.items()" if count == 1 else f"for name, dims in {title}.items()"
    given = {0: "{}", 1: "({}, dim)"}.get(count, "({}, *dims)")
    loop = pairs if count else f"for name in {title}"
    lines = [f"{title} = {{  # what each call gathers, along which dims: in use ← stored"]
    for slot, arguments, (*_, variable) in zip(slots, values, ins, strict=True):
        value = arguments[0] if count == 1 else parenthesized(arguments)
        layout = names.layout(variable.name)
        type_ = TensorType(variable.seen.shape, variable.type.dtype)
        note = f"{type_.text(layout.compute, names.axes)} ← {type_.text(layout.stored, names.axes)}"
        lines.append(f"    {slot}: {value},".ljust(NOTES) + f"  # {note}")
    gathered = f'"{_chain(names, gather)}", {{name: {given.format(source)} {loop}}}{_options(gather)}'
    reduced = f'"{_chain(names, reduce)}", {{{before}name: {given.format(gradient)} {loop}}}{_options(reduce)}'
    return "\n".join([*lines, "}"]), gathered, reduced


LEAST_ROWS, NOTES = 2, 56
"""Fewer parameters need no table; where the comments of one begin."""


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
        key = quoted(each.name)
        steps = bucket.moves[0].steps
        if which == "gather":
            text = _cast(f"state[{key}]", variable)
        else:
            text = gradient_of(names, variable, key) if names.waits else f"tied[{key}]"
            text, steps = _resized_gradient(names, variable, text, steps)
        entry = (key, text, steps, variable)
        sharding = layout.compute if which == "gather" else layout.stored
        lines += _bucket(names, "shared" if which == "gather" else "reducing", bucket, [entry], [sharding])
    return lines


def resize_lines(names: Names, target: str, entries: Iterable[tuple[str, Variable]], indent: str) -> Iterator[str]:
    """Cut or pad what was gathered from uneven pieces to what operators see."""
    for key, variable in entries:
        for dim, _, seen in resizes(variable, names.layout(variable.name), names.sizes):
            yield f"{indent}{target}[{quoted(key)}] = ops.resize({target}[{quoted(key)}], {dim}, {seen})"


def slots_of(names: Names, region: Region, call: Call, which: str) -> Iterator[tuple[str, Variable]]:
    """The slots that a region gathers itself, with their variables."""
    for bucket in region.transfers[which]:
        for move in bucket.moves:
            yield region.slots[move.slot].name, names.program.variable(call.slots[move.slot])


def _resized_gradient(
    names: Names, variable: Variable, text: str, steps: tuple[Step, ...]
) -> tuple[str, tuple[Step, ...]]:
    """A gradient of a parameter that its axes do not divide: padded until they do; or, where it is first gathered along
    that dim, cut into uneven pieces afterwards.
    """
    for dim, gathered, _ in resizes(variable, names.layout(variable.name), names.sizes):
        gathers = [at for at, step in enumerate(steps) if step.kind == "all_gather" and step.dim == dim]
        if not gathers:
            text = f"ops.resize({text}, {dim}, {gathered})"
            continue
        cuts = [at for at, step in enumerate(steps) if at > gathers[-1] and step.kind == "slice" and step.dim == dim]
        assert len(cuts) == 1, f"{variable.name} is stored in uneven pieces of uneven pieces"
        sized = replace(steps[cuts[0]], size=variable.type.shape[dim])
        steps = (*steps[: cuts[0]], sized, *steps[cuts[0] + 1 :])
    return text, steps


def _slots(names: Names, region: Region) -> list[tuple[Slot, Variable]]:
    _, call = next(names.program.calls_of(region.name))
    return [(slot, names.program.variable(name)) for slot, name in zip(region.slots, call.slots, strict=True)]


def _stored(region: Region, slot: Slot, variable: Variable) -> str:
    return _cast(f"state[{state_key(region, slot, variable)}]", variable)


def _cast(text: str, variable: Variable) -> str:
    return f"{text}.to({variable.type.dtype})" if variable.stored_dtype != variable.type.dtype else text


def _bucket(
    names: Names, target: str, bucket: Bucket, entries: Sequence[Entry], results: Sequence[Sharding]
) -> Iterator[str]:
    """The lines that start one bucket on `target`."""
    for call in _calls(names, bucket, entries, results):
        yield f"    {target}{call[0]}"
        yield from call[1:]


def _calls(names: Names, bucket: Bucket, entries: Sequence[Entry], results: Sequence[Sharding]) -> Iterator[list[str]]:
    """The calls that start one bucket, `.bucket(…)` or `.put(…)`, each as lines."""
    rows = list(zip(entries, results, strict=True))
    if not bucket.chain:
        for (key, text, _, variable), sharding in rows:
            yield [_noted(f".put({key}, {text})", names, variable, sharding, WIDTH - 5)]
        return
    lines = [f'.bucket("{_chain(names, bucket)}", {{']
    for (key, text, steps, variable), sharding in rows:
        arguments = _arguments_of(steps)
        value = parenthesized([text, *arguments]) if arguments else text
        if len(rows) == 1:
            yield [_noted(f"{lines[0]}{key}: {value}}}{_options(bucket)})", names, variable, sharding)]
            return
        lines.append(_noted(f"        {key}: {value},", names, variable, sharding))
    yield [*lines, f"    }}{_options(bucket)})"]


def _started(start: str, name: str, calls: Sequence[Sequence[str]]) -> list[str]:
    """The transfers that `start` begins, with these calls, returned."""
    if len(calls) == 1:
        return [f"    return {start}{calls[0][0]}", *calls[0][1:]]
    lines = [f"    {name} = {start}"]
    for call in calls:
        lines += [f"    {name}{call[0]}", *call[1:]]
    return [*lines, f"    return {name}"]


def _chain(names: Names, bucket: Bucket) -> str:
    return ", ".join(f"{kind} {names.axes[axis]}" for kind, axis in bucket.chain)


def _options(bucket: Bucket) -> str:
    return f", keep={bucket.keep}" if bucket.keep else ", owned=True" if bucket.owned else ""


def _arguments_of(steps: Iterable[Step]) -> list[str]:
    return [_argument(step) for step in steps if step.kind != "all_reduce"]


def _argument(step: Step) -> str:
    assert not (step.zigzag or step.from_zigzag), "parameters and their gradients are not stored zigzag"
    if step.kind == "all_to_all":
        return f"({step.dim}, {step.outer}, {step.from_dim}, {step.from_outer})"
    if step.size:
        return f"({step.dim}, {step.outer}, {step.size})"
    return str(step.dim) if step.outer == 1 else f"({step.dim}, {step.outer})"


def _noted(text: str, names: Names, variable: Variable, sharding: Sharding, width: int = WIDTH) -> str:
    note = TensorType(variable.seen.shape, variable.type.dtype).text(sharding, names.axes)
    return f"{text.ljust(width if len(text) < width else 0)}  # {note}"


def tied_lines(names: Names, region: Region, call: Call, indent: str) -> Iterator[str]:
    """Add the gradients of parameters that several calls use to what the other calls gave."""
    for slot, name in zip(region.slots, call.slots, strict=True):
        if slot.trainable and name in names.tied:
            yield f'{indent}comm.accumulate(tied, {{{quoted(name)}: g.pop({quoted(slot.name)})}}, "")'
