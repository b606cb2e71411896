"""The way through: the ordered list of passes, and what happens between them.

    model, mesh ─ capture ─ fuse_attention ─ outline ─ separate ─ pad ─ fuse_elementwise ─ differentiate ─ rematerialize
                 ─ spread_heads ─ annotate ─ place ─ insert_collectives ─ split_stages ─ overlap ─ emit ─► Python

`separate` and `split_stages` have something to do where the mesh has a pipeline axis, `spread_heads` where what
attention reads is moved for its sake. Between passes, and nowhere else, the program is verified, timed, and
(AUTOPAR_DUMP=dir) written to `03_outline.txt`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar import environment
from autopar.check import check_program
from autopar.collectives import Collective
from autopar.context_strategies import Spread, splits_sequence
from autopar.errors import AutoparError
from autopar.estimate import Cost, difference, estimate
from autopar.ir import Mode, Program, Share
from autopar.mesh import Mesh
from autopar.models import huggingface
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.context_gain import zigzag_axes
from autopar.passes.differentiate import differentiate
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.fuse_elementwise import fuse_elementwise
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.outline import outline
from autopar.passes.overlap import overlap
from autopar.passes.pad import pad
from autopar.passes.place import place
from autopar.passes.rematerialize import rematerialize
from autopar.passes.separate import separate
from autopar.passes.split_stages import expected_share, split_stages, summarize
from autopar.passes.spread_heads import spread_heads
from autopar.passes.step_memory import step_peak_bytes
from autopar.pipelining.costs import update_seconds
from autopar.pipelining.spec import AXIS, PipelineSpec
from autopar.pipelining.summary import PipelineSummary
from autopar.strategies import AxisStrategy, Pin
from autopar.torch_compat import tracing


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is made for.

    mesh: of one stage, where there is a pipeline (`mesh.whole` is then the one that was asked for). inputs: the whole
    batch, which a step runs in `microbatches` parts. memory_limit_bytes: of one rank; None for no
    limit. explain: work out why, when nothing can be placed (costs time). checks_limit: the limit decides whether the
    placement will do, but takes no part in it. placement_limit: the part of the limit that the placement
    gets: a pipeline's stages it knows only on average, and what is in flight beside the compute is not in it.
    overlap_price, alike: as of `place`. spread: what the program is prepared for; None: what the strategies need.
    captured: the whole batch's program ("whole"), and those of numbers of microbatches, once they are captured;
    requests that are made of this one (`dataclasses.replace`) use them too.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    mesh: Mesh
    strategies: tuple[AxisStrategy, ...]
    pins: tuple[Pin, ...] = ()
    memory_limit_bytes: float | None = None
    precision: torch.dtype | None = None
    training: bool = True
    rematerialize: Mode = "none"
    explain: bool = True
    microbatches: int = 1
    checks_limit: bool = False
    pipeline: PipelineSpec | None = None
    placement_limit: float = 1.0
    overlap_price: float = 1.0
    spread: Spread | None = None
    alike: Program | None = field(default=None, compare=False, repr=False)
    captured: dict[object, Program] = field(default_factory=dict, compare=False, repr=False)

    @property
    def placement_limit_bytes(self) -> float | None:
        """The limit that `place` gets; none where the step is merely checked, when it is walked or cut in stages."""
        walks = self.training or self.pipeline is not None
        if self.memory_limit_bytes is None or (self.checks_limit and walks):
            return None
        return self.memory_limit_bytes * self.placement_limit

    @property
    def prepared(self) -> Spread:
        """What the program is prepared for."""
        return self.spread or Spread.of(self.strategies, self.mesh)

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh that was asked for."""
        return self.mesh.whole or self.mesh

    @property
    def num_stage_ranks(self) -> int:
        """How many ranks the pipeline has; 1 without one."""
        return 1 if self.pipeline is None else self.whole_mesh.size(AXIS)


@dataclass(frozen=True, slots=True)
class Pass:
    """A named step. `apply(program, request)`; the first pass gets None and makes the program."""

    name: str
    apply: Callable[[Any, Request], Program]


@dataclass(frozen=True, slots=True)
class PassTime:
    """Wall and CPU seconds of one pass."""

    name: str
    wall_s: float
    cpu_s: float


DEFAULT: tuple[Pass, ...] = (
    Pass("capture", lambda _, request: _capture(request)),
    Pass("fuse_attention", lambda program, _: fuse_attention(program)),
    Pass("outline", lambda program, _: outline(program)),
    Pass("separate", lambda program, request: separate(program) if request.pipeline is not None else program),
    Pass("pad", lambda program, request: pad(program, multiple=vocabulary_ranks(request))),
    Pass(
        "fuse_elementwise",
        lambda program, request: fuse_elementwise(
            program, mesh=request.mesh, strategies=request.strategies, pins=request.pins
        ),
    ),
    Pass("differentiate", lambda program, _: differentiate(program)),
    Pass("rematerialize", lambda program, request: rematerialize(program, mode=request.rematerialize)),
    Pass(
        "spread_heads",
        lambda program, request: spread_heads(program, ranks=request.prepared.heads, moves=request.prepared.moves),
    ),
    Pass("annotate", lambda program, request: _annotate(program, request)),
    Pass(
        "place",
        lambda program, request: place(
            program,
            strategies=request.strategies,
            pins=request.pins,
            memory_limit_bytes=request.placement_limit_bytes,
            explain=request.explain,
            checks_limit=request.checks_limit,
            overlap_price=request.overlap_price,
            alike=request.alike,
        ),
    ),
    Pass(
        "insert_collectives",
        lambda program, request: insert_collectives(program, halves=request.pipeline is not None),
    ),
    Pass("split_stages", lambda program, request: _split_stages(program, request)),
    Pass("overlap", lambda program, request: _overlap(program, request)),
)


def _overlap(program: Program, request: Request) -> Program:
    return overlap(
        program,
        strategies=request.strategies,
        memory_limit_bytes=request.memory_limit_bytes,
        peak_bytes=step_peak_bytes if program.pipeline is None else None,
    )


def _annotate(program: Program, request: Request) -> Program:
    spread, context = request.prepared, {axis for axis, each in _named(request) if splits_sequence(each)}
    context.update(request.spread.zigzag if request.spread is not None else ())
    chosen = [axis for axis in spread.zigzag if axis in context]
    zigzag = frozenset(spread.zigzag).difference(chosen) | zigzag_axes(program, request.mesh, chosen)
    sequence, parts = frozenset(spread.sequence), dict(spread.parts)
    return annotate(program, mesh=request.mesh, zigzag=zigzag, sequence=sequence, parts=parts)


def _named(request: Request) -> Iterator[tuple[str, AxisStrategy]]:
    return zip(request.mesh.axis_names, request.strategies, strict=True)


def _split_stages(program: Program, request: Request) -> Program:
    if request.pipeline is None:
        return program
    return split_stages(
        program,
        spec=request.pipeline,
        num_ranks=request.num_stage_ranks,
        strategies=request.strategies,
        memory_limit_bytes=request.memory_limit_bytes,
    )


def _share(request: Request) -> Share | None:
    if request.pipeline is None:
        return None
    return expected_share(request.pipeline, request.num_stage_ranks, request.microbatches)


def price(program: Program) -> tuple[Cost, list[Collective], PipelineSummary | None]:
    """What a lowered program costs, its collectives, and its stages where it has a pipeline: then the step is the one
    that was simulated, and its peak the fullest rank's.
    """
    cost, rows = estimate(program, program.result.peak_bytes if program.result else 0.0)
    if program.pipeline is None:
        memory = replace(cost.memory, peak=int(step_peak_bytes(program)))
        return replace(cost, memory=memory), rows, None
    summary = summarize(program)
    timeline = summary.timeline
    busiest = max(timeline.busy_s)
    waiting_s = max(0.0, difference(timeline.makespan_s - busiest, busiest))
    # Sends, gathers and reductions run beside the computations.
    hidden_s = difference(cost.compute_s + cost.communication_s - busiest, busiest)
    memory = replace(cost.memory, peak=int(max(timeline.peak_bytes)))
    optimizer_s = update_seconds(summary.schedule.rank_of, timeline.costs) if program.training else 0.0
    cost = replace(cost, memory=memory, waiting_s=waiting_s, hidden_s=hidden_s, optimizer_s=optimizer_s)
    return cost, rows, summary


def vocabulary_ranks(request: Request) -> int:
    """How many ranks may share a vocabulary: those of the last axis that may split parameters for good; 1 where nothing
    is to be padded for them.
    """
    if not request.prepared.padded:
        return 1
    named = zip(request.strategies, request.mesh.sizes, strict=True)
    return next((size for strategy, size in reversed(list(named)) if "shard" in strategy.parameters), 1)


def _capture(request: Request) -> Program:
    def captured(inputs: Mapping[str, Any]) -> Program:
        return capture(request.model, inputs, precision=request.precision, training=request.training)

    first = one_microbatch(request.inputs, request.microbatches) if request.microbatches > 1 else None
    with huggingface.training_capture(request.model):
        if "whole" not in request.captured:
            request.captured["whole"] = captured(request.inputs)
        whole = request.captured["whole"]
        if first is None:
            return replace(whole, share=_share(request))
        if request.microbatches not in request.captured:
            from autopar.passes.batching import analyse

            # Two captures tell what in the graph depends on the number of rows.
            part = captured(first)
            batching = analyse(part, request.microbatches, other=whole)
            request.captured[request.microbatches] = replace(part, microbatches=request.microbatches, batching=batching)
    return replace(request.captured[request.microbatches], share=_share(request))


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


Progress = Callable[[str, int, int], None]
"""Called before each pass with its name, its number from 0, and how many there are."""


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
    times: list[PassTime] = []
    for number, step in enumerate(passes):
        if progress is not None:
            progress(step.name, number, len(passes))
        wall, cpu = time.perf_counter(), time.process_time()
        program = step.apply(program, request)
        times.append(PassTime(step.name, time.perf_counter() - wall, time.process_time() - cpu))
        check_program(program, after=step.name)
        if settings.dump_dir is not None:
            _dump(Path(settings.dump_dir), first + number, step.name, program)
    assert program is not None
    return program, tuple(times)


def _dump(folder: Path, number: int, name: str, program: Program) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(str(program))
