"""The way through: the ordered list of passes, and what happens between them.

    model, mesh ─ capture ─ fuse_attention ─ outline ─ separate ─ pad ─ fuse_elementwise ─ fold_loops ─ differentiate
                 ─ name_values ─ rematerialize ─ spread_heads ─ split_keys ─ read_codes ─ fuse_writes ─ annotate ─ place
                 ─ insert_collectives ─ interleave ─ split_stages ─ overlap ─ emit ─► Python

`separate` and `split_stages` have something to do where the mesh has a pipeline axis, `spread_heads` where what
attention reads is moved for its sake, `interleave` where tokens go to their experts. Between passes, and nowhere else,
the program is verified, timed, and (AUTOPAR_DUMP=dir) written to `03_outline.txt`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing
from autopar.cost.beside import with_work_beside
from autopar.cost.context import zigzag_axes
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.program import Program
from autopar.ir.stages import Share
from autopar.ir.verify import check_program
from autopar.passes.annotate import annotate
from autopar.passes.batching import RowsTogether, in_microbatches
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate, loss_index
from autopar.passes.fold_loops import fold_loops
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.fuse_elementwise import fuse_elementwise
from autopar.passes.fuse_writes import fuse_writes
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.interleave import interleave
from autopar.passes.name_values import name_values
from autopar.passes.outline import outline
from autopar.passes.overlap import overlap
from autopar.passes.pad import pad
from autopar.passes.pair import pair
from autopar.passes.place import place
from autopar.passes.read_codes import read_codes
from autopar.passes.rematerialize import rematerialize
from autopar.passes.separate import separate
from autopar.passes.split_keys import split_keys
from autopar.passes.split_stages import expected_share, split_stages
from autopar.passes.spread_heads import spread_heads
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import splits_sequence
from autopar.strategies.pipelining.asked import fewest_stages, forwards, stages_per_rank
from autopar.strategies.request import Attempt, Progress, Request


@dataclass(frozen=True, slots=True)
class Pass:
    """A named step. `apply(program, request)`; the request is what is tried for it. The first pass gets None and makes
    the program.
    """

    name: str
    apply: Callable[[Any, Attempt], Program]


@dataclass(frozen=True, slots=True)
class PassTime:
    """Wall and CPU seconds of one pass."""

    name: str
    wall_s: float
    cpu_s: float


TRACE: tuple[Pass, ...] = (
    Pass("capture", lambda _, request: _capture(request)),
    Pass("fuse_attention", lambda program, _: fuse_attention(program)),
    Pass("outline", lambda program, request: outline(program, pieces=stages_asked(request), names=cuts_asked(request))),
    Pass("separate", lambda program, request: separate(program) if request.pipeline is not None else program),
    Pass("pad", lambda program, request: pad(program, multiple=vocabulary_ranks(request))),
    Pass(
        "fuse_elementwise",
        lambda program, request: fuse_elementwise(
            program, mesh=request.mesh, strategies=request.strategies, pins=request.pins
        ),
    ),
    Pass("fold_loops", lambda program, request: fold_loops(program, mesh=request.mesh, strategies=request.strategies)),
    Pass("differentiate", lambda program, request: differentiate(program, roots=request.roots)),
    Pass("name_values", lambda program, _: name_values(program)),
)
"""From the model to differentiated regions: once for all that is tried."""

RECOMPUTE: tuple[Pass, ...] = (
    Pass("rematerialize", lambda program, request: rematerialize(program, mode=request.rematerialize)),
    Pass(
        "spread_heads",
        lambda program, request: spread_heads(program, ranks=request.prepared.heads, moves=request.prepared.moves),
    ),
    Pass("split_keys", lambda program, request: split_keys(program, pieces=request.prepared.pieces)),
    Pass("read_codes", lambda program, request: read_codes(program, hardware=request.mesh.hardware)),
    Pass(
        "fuse_writes", lambda program, request: fuse_writes(program, mesh=request.mesh, strategies=request.strategies)
    ),
)
"""What the backward computes again, and what attention reads: once for each mode of recomputation."""

ANNOTATE: tuple[Pass, ...] = (Pass("annotate", lambda program, request: _annotate(program, request)),)
"""All strategies of all operators, priced."""

RULES: tuple[Pass, ...] = (
    Pass("annotate", lambda program, request: annotate(program, mesh=request.mesh, decided=True)),
)
"""In the place of `ANNOTATE` where everything is decided, by a plan for a batch of other sizes."""

PLACE: tuple[Pass, ...] = (Pass("place", lambda program, request: _place(program, request)),)
"""The one of them that is taken: for each limit and each price that is tried."""

LOWER: tuple[Pass, ...] = (
    Pass("pair", lambda program, request: pair(program) if request.together > 1 else program),
    Pass(
        "insert_collectives", lambda program, request: insert_collectives(program, halves=request.pipeline is not None)
    ),
    Pass("interleave", lambda program, request: _interleave(program, request)),
    Pass("split_stages", lambda program, request: _split_stages(program, request)),
    Pass("overlap", lambda program, request: _overlap(program, request)),
)
"""From decisions to what runs."""

DEFAULT: tuple[Pass, ...] = (*TRACE, *RECOMPUTE, *ANNOTATE, *PLACE, *LOWER)

_PHASES = (TRACE, RECOMPUTE, ANNOTATE, PLACE, LOWER)
_PHASE_OF = {step.name: number for number, phase in enumerate(_PHASES) for step in phase}


@dataclass(frozen=True, slots=True)
class Phases:
    """A list of passes in its phases, each of which the planner runs by itself.

    A pass that has a name of the default list is of its phase; any other is of the phase of the pass before it, and of
    `lower` behind `place`, so that it sees every placement that is tried. Phases never go back.
    """

    trace: tuple[Pass, ...]
    recompute: tuple[Pass, ...]
    annotate: tuple[Pass, ...]
    place: tuple[Pass, ...]
    lower: tuple[Pass, ...]

    @staticmethod
    def of(steps: Sequence[Pass]) -> Phases:
        """The phases of a list: all of it, or its end."""
        found: tuple[list[Pass], ...] = ([], [], [], [], [])
        last = _PHASES.index(LOWER)
        current = 0
        for step in steps:
            own = _PHASE_OF.get(step.name)
            current = max(current, own) if own is not None else last if current == last - 1 else current
            found[current].append(step)
        return Phases(*map(tuple, found))

    @property
    def spelled_out(self) -> tuple[Pass, ...]:
        """A trace in which nothing is fused that costs decide on."""
        return tuple(step for step in self.trace if step.name != "fuse_elementwise")

    @property
    def prepare(self) -> tuple[Pass, ...]:
        """From a trace to what is placed."""
        return (*self.recompute, *self.annotate)

    @property
    def decide(self) -> tuple[Pass, ...]:
        """From what is placed to the end."""
        return (*self.place, *self.lower)

    @property
    def after_trace(self) -> tuple[Pass, ...]:
        """All that follows on a trace."""
        return (*self.prepare, *self.decide)

    def have(self, *names: str) -> bool:
        """Whether all of these passes are among them."""
        return set(names) <= {step.name for step in (*self.trace, *self.after_trace)}


def _place(program: Program, request: Attempt) -> Program:
    """Afterwards operators have the options that they had before."""
    priced = with_work_beside(program) if request.hides_exchanges else program
    placed = place(
        priced,
        strategies=request.placing,
        pins=request.pins,
        memory_limit_bytes=request.placement_limit_bytes,
        explain=request.explain,
        checks_limit=request.checks_limit,
        overlap_price=request.overlap_price,
        alike=request.alike,
        reasons=request.placed_by is None,
        learnt=request.learnt,
    )
    if not request.hides_exchanges or placed.result is None:
        return placed
    regions = {each.name: each.with_options(program.region(each.name).options) for each in placed.regions}
    return placed.with_regions(regions, result=replace(placed.result, hides_exchanges=True))


def _overlap(program: Program, request: Attempt) -> Program:
    return overlap(
        program,
        strategies=request.strategies,
        memory_limit_bytes=request.memory_limit_bytes,
        peak_bytes=step_peak_bytes if program.pipeline is None else None,
    )


def _annotate(program: Program, request: Attempt) -> Program:
    spread, context = request.prepared, {axis for axis, each in _named(request) if splits_sequence(each)}
    context.update(request.spread.zigzag if request.spread is not None else ())
    chosen = [axis for axis in spread.zigzag if axis in context]
    zigzag = frozenset(spread.zigzag).difference(chosen) | zigzag_axes(program, request.mesh, chosen)
    sequence, parts = frozenset(spread.sequence), dict(spread.parts)
    return annotate(program, mesh=request.mesh, zigzag=zigzag, sequence=sequence, parts=parts)


def _named(request: Request) -> Iterator[tuple[str, AxisStrategy]]:
    return zip(request.mesh.axis_names, request.strategies, strict=True)


def _interleave(program: Program, request: Attempt) -> Program:
    """Where a memory limit does not hold what is on its way then, exchanges run by themselves."""
    if program.overlap is not None and not program.overlap.exchanges:  # decided before: the program of a saved plan
        return program
    beside = interleave(program)
    limit = request.memory_limit_bytes
    if beside is program or program.overlap is not None or limit is None or request.pipeline is not None:
        return beside
    fits = step_peak_bytes(overlap(beside, strategies=request.strategies)) <= limit
    return beside if fits else program


def _split_stages(program: Program, request: Attempt) -> Program:
    if request.pipeline is None:
        return program
    decided = program.pipeline is not None  # the program of a saved plan
    return split_stages(
        program,
        spec=request.pipeline,
        num_ranks=request.num_stage_ranks,
        bucketed=program if decided else overlap(program, strategies=request.strategies),
        memory_limit_bytes=request.memory_limit_bytes,
    )


def _share(request: Attempt) -> Share | None:
    if request.pipeline is None:
        return None
    ranks, runs, training = request.num_stage_ranks, request.runs, request.training
    share = expected_share(request.pipeline, ranks, runs, training=training)
    return replace(share, in_flight=share.in_flight * request.together)


def stages_asked(request: Attempt) -> int:
    """The fewest stages that a pipeline has as it is asked for; 0 without one."""
    if (spec := request.pipeline) is None:
        return 0
    ranks = request.num_stage_ranks
    if spec.rank_of or spec.is_file:
        return forwards(spec, ranks).num_stages
    return ranks * (stages_per_rank(spec, ranks) or fewest_stages(spec))


def cuts_asked(request: Attempt) -> frozenset[str]:
    """The modules before which a user cuts a pipeline."""
    cut = () if request.pipeline is None else request.pipeline.cut
    return frozenset(name.split("#")[0] for name in cut if isinstance(name, str))


def vocabulary_ranks(request: Attempt) -> int:
    """How many ranks may share a vocabulary: those of the last axis that may split parameters for good; 1 where nothing
    is to be padded for them.
    """
    if not request.prepared.padded:
        return 1
    named = zip(request.strategies, request.mesh.sizes, strict=True)
    return next((size for strategy, size in reversed(list(named)) if "shard" in strategy.parameters), 1)


def _capture(request: Attempt) -> Program:
    found = _captured(request)
    if not request.wanted:
        return found
    if found.batching is not None:
        _check_not_told(found, request.wanted)
    return replace(found, inputs=tuple(replace(p, differentiable=p.name in request.wanted) for p in found.inputs))


def _check_not_told(program: Program, wanted: Collection[str]) -> None:
    """Raises RowsTogether for an input whose gradient would come through what is known before the program runs."""
    assert program.batching is not None
    for port in program.inputs:
        if port.name in program.batching.told_by.intersection(wanted) and port.type.dtype.is_floating_point:
            raise RowsTogether(
                f"the gradient of the input {port.name} comes through what is made of all rows of the batch, which no "
                "microbatch has",
                values="an average is divided by it, or weighted with it",
                remedy="microbatches=1",
            )


def _captured(request: Attempt) -> Program:
    in_parts = request.microbatches > 1

    def captured(inputs: Mapping[str, Any], like: Program | None = None) -> Program:
        return capture(
            request.model,
            inputs,
            precision=request.precision,
            training=request.training,
            tells_ways=True,
            in_parts=in_parts,
            in_stages=request.pipeline is not None,
            like=like,
        )

    first = one_microbatch(request.inputs, request.microbatches) if request.microbatches > 1 else None
    kind = "parts" if in_parts else "whole"
    whole = request.captured.get(kind)
    if whole is None or (whole.carried and request.pipeline is not None):
        whole = request.captured[kind] = captured(request.inputs)
        if not (whole.branches or whole.carried or whole.granted or whole.by_value):  # the same, in parts or not
            request.captured["whole"] = request.captured["parts"] = whole
    if first is None:
        return replace(whole, share=_share(request))
    several = request.training and _has_several_roots(whole, request)
    key = (request.microbatches, several)
    if key not in request.captured:
        # Two captures tell what in the graph depends on the number of rows.
        _check_values_alike(whole.by_value, request)
        try:
            part = captured(first, whole)
        except AutoparError as error:
            raise _not_traced(error, first, request) from error
        request.captured[key] = in_microbatches(part, request.microbatches, whole, several=several)
    return replace(request.captured[key], share=_share(request))


def _has_several_roots(program: Program, request: Attempt) -> bool:
    """Whether gradients may come for several outputs."""
    if request.roots is not None:
        return len(request.roots) > 1
    return loss_index(program) is None and len(program.outputs) > 1


def _check_values_alike(names: Collection[str], request: Attempt) -> None:
    """Inputs whose values decide what is done say the same in each microbatch: all run one program.

    Raises:
        RowsTogether: one does not.
    """
    for name, leaf in tracing.tree_leaves_with_path(dict(request.inputs)):
        if name not in names or leaf.shape[0] % request.microbatches:
            continue
        first, *others = leaf.chunk(request.microbatches)
        if any(not torch.equal(first, other) for other in others):
            raise RowsTogether(
                f"the values of {name} decide what is done, and are others in each of {request.microbatches} "
                "microbatches",
                remedy="microbatches=1",
            )


def _not_traced(error: AutoparError, part: Mapping[str, Any], request: Attempt) -> RowsTogether:
    """The error of a model that is traced on the whole batch, and not on rows of it."""
    shapes = dict(tracing.tree_leaves_with_path(dict(request.inputs)))
    same = [
        f"{name} {list(leaf.shape)}"
        for name, leaf in tracing.tree_leaves_with_path(dict(part))
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape == shapes[name].shape
    ]
    values = f"inputs that have no row for each of the batch's: {', '.join(same)}; " if same else ""
    return RowsTogether(
        f"a batch cannot be cut into {request.microbatches} microbatches that the model does not take",
        where=error.where,
        values=f"{values}{error.what}",
        remedy="microbatches=1",
    )


def one_microbatch(inputs: Mapping[str, Any], num: int) -> dict[str, Any]:
    """The first of `num` equal parts of a batch: its rows are those that most inputs agree on.

    Raises:
        AutoparError: a batch that does not divide.
    """
    leaves, spec = tracing.tree_flatten(dict(inputs))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    rows = max(set(sizes), key=sizes.count, default=0)
    if not rows or rows % num:
        raise AutoparError(
            f"a batch of {rows} rows cannot be cut into {num} microbatches",
            remedy=f"use {_divisors_near(rows, num)} or a batch that is a multiple of {num}",
        )

    def part(leaf: Any) -> Any:
        return leaf[: rows // num] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows else leaf

    return dict(tracing.tree_unflatten([part(leaf) for leaf in leaves], spec))


def _divisors_near(rows: int, num: int) -> str:
    """`2 or 4 microbatches,`: the divisors of `rows` next to `num`."""
    divisors = [each for each in range(1, rows + 1) if rows % each == 0]
    below, above = [each for each in divisors if each < num][-1:], [each for each in divisors if each > num][:1]
    return f"{' or '.join(map(str, below + above))} microbatches," if divisors else "a batch with rows,"


def run(
    request: Request,
    passes: Sequence[Pass] = DEFAULT,
    *,
    program: Program | None = None,
    progress: Progress | None = None,
    first: int = 0,
) -> tuple[Program, tuple[PassTime, ...]]:
    """Apply the passes in order.

    Args:
        program: where to start from, for a list that does not begin with `capture`.
        first: the number of the first pass in the whole list (dumped files are named by it).

    Raises:
        AutoparError: from a pass (bad input), with what was asked, where, and the remedy.
        AssertionError: a pass broke the program (a bug of ours), with the printed program.
    """
    settings = environment.read()
    settings.apply_log_levels()
    attempt = request if isinstance(request, Attempt) else Attempt.of(request)
    times: list[PassTime] = []
    for number, step in enumerate(passes):
        if progress is not None:
            progress(step.name, number, len(passes))
        wall, cpu, before = time.perf_counter(), time.process_time(), program
        program = step.apply(program, attempt)
        times.append(PassTime(step.name, time.perf_counter() - wall, time.process_time() - cpu))
        if program is not before or step is passes[-1]:  # what a pass leaves as it was has been checked
            check_program(program, after=step.name)
        if settings.dump_dir is not None:
            _dump(Path(settings.dump_dir), first + number, step.name, program)
    assert program is not None
    return program, tuple(times)


def _dump(folder: Path, number: int, name: str, program: Program) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(str(program))
