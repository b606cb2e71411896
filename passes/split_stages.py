"""split_stages: cut the calls into the stages of a pipeline, and choose the schedule that its ranks follow.

Requires: phase `lowered`, with the halves of the backward.
Ensures: `Program.pipeline`: contiguous stages, what travels between them, which values a stage computes again, and a
    schedule whose simulated step is the shortest of those that fit the memory limit.

    calls 0: prologue, 1…4: layer, 5: epilogue;  pp=2  →  stage 0: 0 1 2 3, stage 1: 4 5; 1f1b

For every schedule and number of stages that may be: an exact dynamic program balances the slowest stage
(`stages/cut.py`), the simulated step refines the cut, and its memory is that of the simulated step too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.text import plural
from autopar.cost.estimate import stored_bytes, unused_everywhere
from autopar.cost.memory.boundaries import boundaries
from autopar.cost.memory.calls import CallCosts, call_costs, seconds_of_calls
from autopar.cost.memory.stages import memory_fits, stage_cost
from autopar.ir.left_out import place_of
from autopar.ir.program import Program
from autopar.ir.region import Call
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import local_shape
from autopar.ir.stages import Considered, Pipeline, Share, Stage
from autopar.machine.hardware import Link
from autopar.passes.stages.recompute import recompute_or_carry
from autopar.passes.stages.states import StateUse, check_states, parts_states, state_uses
from autopar.strategies.pipelining import greedy, schedules
from autopar.strategies.pipelining.asked import (
    GREEDY_STAGES,
    admitted,
    asked_schedule,
    fewest_stages,
    forwards,
    is_open,
    stages_per_rank,
)
from autopar.strategies.pipelining.costs import StageCost, update_seconds
from autopar.strategies.pipelining.cut import best_cut, ranges, refine
from autopar.strategies.pipelining.simulate import Timeline, simulate
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec
from autopar.strategies.pipelining.summary import PipelineSummary, StageSummary

ALIKE = 1.005
"""Simulated steps within this factor of each other are equally long: a real one varies more."""
NO_OUTPUTS = "train_step returns no outputs but scalars"
"""The note of a plan whose outputs do not fit beside the rest."""
REFINED = 3
"""How many of the schedules, the best first, have their cut refined by simulated steps."""
EVALUATIONS = 60
"""Simulated steps for each."""
UNEVEN = 1.05
"""The slowest stage of a refined cut to that of the most even one."""


def expected_share(spec: PipelineSpec, num_ranks: int, num_microbatches: int, *, training: bool = True) -> Share:
    """What one rank will hold, before anything is cut. training: whether there will be a backward.

    Raises:
        AutoparError: a schedule that this many ranks and microbatches do not admit.
    """
    if spec.schedule in ("auto", greedy.NAME):
        return Share(num_ranks, min(num_ranks, num_microbatches))
    schedule = asked_schedule(spec, num_ranks, num_microbatches) if training else forwards(spec, num_ranks)
    per_rank = [sum(schedule.in_flight[s] for s in schedule.stages_of(rank)) for rank in range(num_ranks)]
    return Share(num_ranks, max(1, -(-max(per_rank) * num_ranks // schedule.num_stages)))


def split_stages(
    program: Program, *, spec: PipelineSpec, num_ranks: int, bucketed: Program, memory_limit_bytes: float | None = None
) -> Program:
    """Cut the stages as `spec` asks.

    Args:
        bucketed: the program as `overlap` leaves it, before it is cut: it says how parameters travel.

    Raises:
        AutoparError: more stages than calls, a schedule that is not admitted, nothing that fits the memory.
    """
    if program.pipeline is not None:  # decided before: the program of a saved plan
        check_states(program, program.pipeline.stages, program.pipeline.schedule.rank_of)
        return program
    if memory_limit_bytes is not None:
        memory_limit_bytes -= stored_bytes(program, unused_everywhere(program))
    cuts = _Cuts.of(program, call_costs(bucketed), memory_limit_bytes)
    pinned = _pinned(program, spec)
    found = [cuts.balanced(schedule, pinned) for schedule in _schedules(program, spec, num_ranks)]
    if program.training and spec.schedule in ("auto", greedy.NAME):
        found += cuts.listed(spec, num_ranks, pinned)
    if not found:
        raise _no_schedule(program, spec, num_ranks, pinned)
    found.sort(key=_rank)
    if not pinned:
        found[:REFINED] = [cuts.refined(each) for each in found[:REFINED]]
        found.sort(key=_rank)
    best = _plainest(found)
    if not best.fits:
        least = min(found, key=lambda each: each.peak_bytes)
        error = DoesNotFit(
            f"no pipeline over {AXIS}={num_ranks} fits the memory limit",
            values=f"the least is {least.schedule.name} with {least.peak_bytes / 2**30:.3g} GiB on its fullest rank, "
            f"the limit is {(memory_limit_bytes or 0) / 2**30:.3g} GiB",
            remedy="use more microbatches, more ranks, or a strategy that shards the stages' parameters",
        )
        error.ratio = least.peak_bytes / memory_limit_bytes if memory_limit_bytes else None
        raise error
    check_states(program, best.stages, best.schedule.rank_of)
    considered = tuple(each.considered for each in (best, *(each for each in found if each is not best)))
    keeps, notes = True, tuple(note for note in program.notes if not note.startswith(NO_OUTPUTS))
    if program.training and memory_limit_bytes is not None and (more := _outputs_bytes(program, best)) > 0:
        keeps = best.peak_bytes + more <= memory_limit_bytes
        if not keeps:
            notes += (
                f"{NO_OUTPUTS}: those of all microbatches would take "
                f"{more / 2**30:.3g} GiB more than fits; compiled(**batch) under torch.no_grad() returns them",
            )
    return replace(program, pipeline=Pipeline(AXIS, best.stages, best.schedule, considered, keeps), notes=notes)


def _plainest(found: Sequence[Candidate]) -> Candidate:
    """Of those that are as good as the first, for all that a simulation can tell, the one with the fewest stages."""
    best = found[0]
    most = ALIKE * best.step_s
    alike = [each for each in found if each.fits == best.fits and each.step_s <= most]
    return min(alike, key=lambda each: each.schedule.num_stages) if best.fits else best


def _kept_bytes(program: Program, stage: Stage) -> float:
    """The larger outputs that a stage makes of all microbatches, on one rank."""
    own = set(stage.calls) - set(stage.recomputed)
    size = 0
    for ref in program.outputs:
        port = program.port(ref)
        if ref.call in own and port.type.shape:
            sharding = program.placed.values[ref.call, ref.index]
            local = math.prod(local_shape(port.type.shape, sharding, program.on_mesh.sizes))
            size += local * port.type.dtype.itemsize
    return size * program.microbatches


def _outputs_bytes(program: Program, best: Candidate) -> float:
    """What the fullest rank would hold beyond its peak, were it to keep larger outputs until the step's end: those of
    the microbatches, and then, beside them, those of the batch.
    """
    peaks = best.timeline.peak_bytes
    kept = [2 * _kept_bytes(program, stage) for stage in best.stages]
    ranks = best.schedule.rank_of
    over = [peaks[ranks[number]] + size - best.peak_bytes for number, size in enumerate(kept) if size]
    return max(over, default=0.0)


@dataclass(frozen=True)
class Candidate:
    """A schedule with the best cut that was found for it."""

    schedule: Schedule
    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    timeline: Timeline
    fits: bool

    @property
    def step_s(self) -> float:
        """With the optimizer's update."""
        return self.timeline.makespan_s + update_seconds(self.schedule.rank_of, self.costs)

    @property
    def peak_bytes(self) -> float:
        return max(self.timeline.peak_bytes)

    @property
    def considered(self) -> Considered:
        timeline, schedule = self.timeline, self.schedule
        v = schedule.num_stages // schedule.num_ranks
        return Considered(schedule.name, v, self.step_s, timeline.bubble_share, self.peak_bytes, self.fits)


def _rank(each: Candidate) -> tuple[bool, float, int, float]:
    """What fits first, the shortest step first, of equal ones what holds less; then what comes nearest to fitting."""
    step_s = float(f"{each.step_s:.9g}") if each.fits else 0.0
    return not each.fits, step_s, each.schedule.num_stages if each.fits else 0, each.peak_bytes


@dataclass(frozen=True)
class _Cuts:
    """Cuts of one program. seconds: of one microbatch, forward and backward, by call. states: which stages keep."""

    program: Program
    costs: CallCosts
    link: Link
    seconds: tuple[float, ...]
    limit: float | None
    states: tuple[StateUse, ...] = ()
    known: dict[Stage, StageCost] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, costs: CallCosts, limit: float | None) -> _Cuts:
        seconds = tuple(seconds_of_calls(program, costs))
        return _Cuts(program, costs, pipeline_link(program), seconds, limit, state_uses(program))

    def balanced(self, schedule: Schedule, pinned: tuple[int, ...]) -> Candidate:
        """The cut whose slowest stage is fastest, within memory and with states whole where that can be; `pinned` is
        the user's own.
        """
        if pinned:
            if len(pinned) != schedule.num_stages:
                names = plural(schedule.num_stages - 1, "block", "blocks")
                raise AutoparError(
                    f"{plural(len(pinned) - 1, 'cut makes', 'cuts make')} {len(pinned)} stages, {schedule.name} has "
                    f"{schedule.num_stages}",
                    values=f"{plural(schedule.num_ranks, 'rank', 'ranks')} of {AXIS}",
                    remedy=f"name {names}, the first of each stage but the first",
                )
            return self.candidate(schedule, pinned)
        fits = self._fits(schedule)
        for allowed in (self._keeping(fits), self._keeping(None), None) if self.states else (fits, None):
            with suppress(DoesNotFit):
                return self.candidate(schedule, best_cut(self.seconds, schedule.num_stages, allowed))
        raise AssertionError("there are as many calls as stages")

    def _keeping(self, fits: Callable[[int, int, int], bool] | None) -> Callable[[int, int, int], bool]:
        """Whether a stage parts no state from whoever reads it, and `fits`."""
        states = self.states

        def allowed(stage: int, first: int, stop: int) -> bool:
            return not parts_states(states, (first,)) and (fits is None or fits(stage, first, stop))

        return allowed

    def listed(self, spec: PipelineSpec, num_ranks: int, pinned: tuple[int, ...]) -> list[Candidate]:
        """Our own schedules, which need to know what stages take: stages around the ranks, or two there and back."""
        wanted, found = stages_per_rank(spec, num_ranks), []
        for rank_of in [spec.rank_of] if spec.rank_of else _arrangements(num_ranks):
            many = spec.schedule == "auto" and wanted is None and len(rank_of) > 2 * num_ranks  # takes seconds
            unsuited = many or (wanted is not None and wanted * num_ranks != len(rank_of))
            if unsuited or len(rank_of) > len(self.seconds) or (pinned and len(pinned) != len(rank_of)):
                continue
            stages = self._stages(pinned or best_cut(self.seconds, len(rank_of)))
            costs = [self._cost(stage) for stage in stages]
            for limit in [math.inf] if self.limit is None else [self.limit, math.inf]:
                with suppress(AutoparError):  # not even one microbatch fits
                    schedule = greedy.greedy(rank_of, self.program.microbatches, costs, limit, self.link)
                    found.append(self._simulated(schedule, stages))
                    break
                if spec.schedule == "auto":
                    break
        return found

    def refined(self, found: Candidate) -> Candidate:
        """With borders moved where the simulated step, or what does not fit, falls. What fits stays even: uneven stages
        may gain a little where microbatches are few, and lose wherever a prediction is off.
        """
        cut = tuple(min(set(stage.calls) - set(stage.recomputed)) for stage in found.stages)
        most = UNEVEN * self._slowest(cut) if found.fits else math.inf

        def judge(cut: tuple[int, ...]) -> float:
            allowed = self._slowest(cut) <= most and not parts_states(self.states, cut)
            return self._judge(found.schedule, cut) if allowed else math.inf

        better = refine(cut, len(self.seconds), judge, EVALUATIONS)
        return self.candidate(found.schedule, better)

    def _slowest(self, cut: Sequence[int]) -> float:
        return max(sum(self.seconds[first:stop]) for first, stop in ranges(cut, len(self.seconds)))

    def _judge(self, schedule: Schedule, cut: tuple[int, ...]) -> float:
        candidate = self.candidate(schedule, cut)
        # What does not fit is worse than all that does, by how far it is from fitting.
        over = 0.0 if candidate.fits or not self.limit else 1e6 * candidate.peak_bytes / self.limit
        return candidate.step_s + over

    def _fits(self, schedule: Schedule) -> Callable[[int, int, int], bool] | None:
        """Whether a stage fits with its microbatches in flight; only where a rank has one stage."""
        if self.limit is None or schedule.num_stages != schedule.num_ranks:
            return None
        return memory_fits(self.program, self.costs, schedule.in_flight, self.limit, schedule.splits_backward)

    def candidate(self, schedule: Schedule, cut: tuple[int, ...]) -> Candidate:
        return self._simulated(schedule, self._stages(cut))

    def _stages(self, cut: Sequence[int]) -> tuple[Stage, ...]:
        return boundaries(self.program, cut, recompute_or_carry(self.program, cut, self.costs, self.link))

    def _simulated(self, schedule: Schedule, stages: tuple[Stage, ...]) -> Candidate:
        costs = tuple(self._cost(stage) for stage in stages)
        timeline = simulate(schedule, costs, self.link)
        fits = self.limit is None or max(timeline.peak_bytes) <= self.limit
        return Candidate(schedule, stages, costs, timeline, fits)

    def _cost(self, stage: Stage) -> StageCost:
        if stage not in self.known:
            self.known[stage] = stage_cost(self.program, stage, self.costs)
        return self.known[stage]


def _arrangements(num_ranks: int) -> list[tuple[int, ...]]:
    """Stage -> rank, of list schedules."""
    around = [tuple(range(num_ranks)) * times for times in GREEDY_STAGES]
    return [*around, greedy.there_and_back(num_ranks)] if num_ranks > 1 else around[:1]


def summarize(program: Program) -> PipelineSummary:
    """The stages of a program in words and figures."""
    assert program.pipeline is not None
    pipeline, costs = program.pipeline, call_costs(program)
    stages = []
    for stage in pipeline.stages:
        names = {name for number in stage.calls for name in program.calls[number].slots}
        variables = [v for v in program.variables if v.is_parameter and v.name in names]
        own = [number for number in stage.calls if number not in stage.recomputed]
        cost = stage_cost(program, stage, costs)
        if program.training and pipeline.keeps_outputs:
            cost = replace(cost, static_bytes=cost.static_bytes + _kept_bytes(program, stage))
        forwards = sum(len(program.region(program.calls[n].region).forward_nodes) for n in stage.calls)
        stages.append(
            StageSummary(
                _runs(program, own) or "nothing, and hands on",
                ", ".join(program.calls[number].region for number in stage.recomputed),
                ", ".join(program.port(ref).name for ref in stage.sends),
                sum(variable.type.num_elements for variable in variables),
                cost,
                forwards * program.on_mesh.hardware.launch_overhead_s,
            )
        )
    link = pipeline_link(program)
    return PipelineSummary(pipeline.axis, pipeline.schedule, tuple(stages), link, pipeline.considered)


def _runs(program: Program, calls: Sequence[int]) -> str:
    """`prologue, model.layers.0-7`; what a model computes of its inputs alone is left out where there is more."""
    trained = {region.name for region in program.regions if any(slot.trainable for slot in region.slots)}
    calls = [n for n in calls if program.calls[n].path or program.calls[n].region in trained] or calls
    parts: list[list[str]] = []
    for number in calls:
        call = program.calls[number]
        name = call.path or call.region
        prefix, _, last = name.rpartition(".")
        if parts and prefix and parts[-1][0] == prefix and last.isdigit():
            parts[-1][2] = last
        else:
            parts.append([prefix, last if prefix else name, last if prefix else ""])
    texts = []
    for prefix, first, last in parts:
        dotted = f"{prefix}." if prefix else ""
        texts.append(f"{dotted}{first}" + (f"-{last}" if prefix and last != first else ""))
    return ", ".join(texts)


def pipeline_link(program: Program) -> Link:
    """What carries a send from one stage to the next: one device's own wire."""
    assert program.on_mesh.whole is not None
    link = program.on_mesh.whole.link(AXIS)
    return Link(link.wire_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s, link.latency_s)


def _schedules(program: Program, spec: PipelineSpec, num_ranks: int) -> Iterator[Schedule]:
    """Those that were asked for."""
    num_calls, num_microbatches = len(program.calls), program.microbatches
    if not program.training:
        schedule = forwards(spec, num_ranks)
        if schedule.num_stages > num_calls:
            raise too_many_stages(program, schedule.num_stages, num_ranks)
        yield schedule
        return
    if spec.schedule == greedy.NAME:
        return
    if not is_open(spec, num_ranks):
        schedule = asked_schedule(spec, num_ranks, num_microbatches)
        if schedule.num_stages > num_calls and not (spec.cut and program.told):
            raise too_many_stages(program, schedule.num_stages, num_ranks)
        yield schedule
        return
    least = num_ranks * (stages_per_rank(spec, num_ranks) or fewest_stages(spec))
    if least > num_calls:
        raise too_many_stages(program, least, num_ranks)
    for each in admitted(spec, num_ranks, num_microbatches, num_calls):
        if not spec.cut or len(spec.cut) + 1 == each.stages_per_rank * num_ranks:
            yield schedules.build(each.name, num_ranks, num_microbatches, each.stages_per_rank)


def _no_schedule(program: Program, spec: PipelineSpec, num_ranks: int, pinned: tuple[int, ...]) -> AutoparError:
    """Why nothing was left to simulate."""
    least = num_ranks * (stages_per_rank(spec, num_ranks) or 1)
    if not pinned or len(pinned) == least:
        return too_many_stages(program, least, num_ranks)
    return AutoparError(
        f"{plural(len(pinned) - 1, 'cut makes', 'cuts make')} {len(pinned)} stages, which {spec.schedule} cannot have",
        values=f"{plural(num_ranks, 'rank', 'ranks')} of {AXIS}",
        remedy=f"name {plural(least - 1, 'block', 'blocks')}, the first of each stage but the first",
    )


def too_many_stages(program: Program, num_stages: int, num_ranks: int) -> AutoparError:
    """The model has fewer pieces than the pipeline has stages."""
    num_calls, per_rank = len(program.calls), num_stages // num_ranks
    ways = [f"{AXIS}={num_calls // per_rank} or less"] * (per_rank <= num_calls // 2)
    ways += ["a schedule with fewer stages a rank"] * (per_rank > 1) + ["a model with more layers"]
    return AutoparError(
        f"{num_stages} pipeline stages cannot be cut from a model of {plural(num_calls, 'piece', 'pieces')}",
        values="blocks, calls of modules with parameters and operators that read some are pieces, "
        f"{AXIS}={num_ranks}, {plural(per_rank, 'stage', 'stages')} a rank",
        remedy=f"use {', '.join(ways[:-1])}{', or ' if len(ways) > 2 else ' or ' * (len(ways) > 1)}{ways[-1]}",
    )


def _pinned(program: Program, spec: PipelineSpec) -> tuple[int, ...]:
    """The first calls of the stages that the user named."""
    if not spec.cut:
        return ()
    numbers = [0]
    for name in spec.cut:
        number = name if isinstance(name, int) else _call_at(program, name)
        if program.told is not None and number in (numbers[-1], len(program.calls)):
            numbers.append(number)  # this step leaves out all that a stage computes: it hands on what it receives
            continue
        if not numbers[-1] < number < len(program.calls):
            raise AutoparError(
                f"the pipeline cannot be cut at {', '.join(map(str, spec.cut))}: {name} does not come after "
                f"{_names(program.calls[numbers[-1] : numbers[-1] + 1])}",
                values=f"the model has {len(program.calls)} pieces, in the order {_names(program.calls)}",
                remedy="name the first block of each stage but the first, in the order of the model",
            )
        numbers.append(number)
    return tuple(numbers)


def _call_at(program: Program, name: str) -> int:
    calls = program.calls
    plain, _, nth = name.partition("#")
    found = [number for number, call in enumerate(calls) if plain == (call.path or call.region)]
    found = found[int(nth or 1) - 1 :] if (nth or "1").isdecimal() and int(nth or 1) else []
    if not found and program.told is not None and any(v.name.startswith(f"{plain}.") for v in program.variables):
        # This step leaves it out; where it leaves out the whole list, what reads parameters at last comes behind it.
        place = place_of(program, plain)
        return place[0] if place is not None else max(n for n, call in enumerate(calls) if call.slots)
    if not found:
        raise AutoparError(
            f"the pipeline is to be cut at {name!r}, which is no block of the model",
            values=f"blocks: {_names(calls)}",
            remedy="name blocks such as model.layers.8",
        )
    return found[0]


def _names(calls: Sequence[Call]) -> str:
    names = [call.path or call.region for call in calls]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "…", *names[-3:]])
