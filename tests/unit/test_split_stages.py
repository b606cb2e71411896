"""split_stages against brute force: every cut of models with unequal blocks, every number of microbatches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

import autopar
from autopar import pipeline
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.cli.models import catalogue
from autopar.cost.memory.boundaries import boundaries
from autopar.cost.memory.calls import call_costs, seconds_of_calls
from autopar.cost.memory.stages import stage_cost
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.split_stages import ALIKE, expected_share, pipeline_link, split_stages, summarize
from autopar.passes.stages.recompute import recompute_or_carry
from autopar.strategies.names import resolve
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import update_seconds
from autopar.strategies.pipelining.simulate import Timeline, simulate
from autopar.strategies.pipelining.spec import PipelineSpec
from autopar.strategies.request import Request

CLOSE = 1.05

MODELS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    # The head is as heavy as ten of the blocks.
    "vocabulary": ("llama", (8, 512), {
        "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 256_000, "num_hidden_layers": 7,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    }),
    "t5": ("t5", (8, 512), {
        "d_model": 512, "d_ff": 4096, "num_layers": 5, "num_decoder_layers": 3, "num_heads": 8, "d_kv": 64,
        "vocab_size": 64_000,
    }),
    # The encoder's blocks are wider and see more positions than the decoder's.
    "whisper": ("whisper", (8, 32), {
        "d_model": 512, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 512,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": 32_000,
    }),
}  # fmt: skip


@lru_cache(maxsize=4)
def lowered(name: str, microbatches: int = 4) -> Program:
    """A model without stages, lowered for one of them; two axes, so that a stage has collectives of its own."""
    spec, batch, overrides = MODELS[name]
    loaded = catalogue.load(spec, tiny=True, batch=batch, device="meta", overrides=overrides)
    inner = Mesh({"pp": 2, "dp": 2}, hardware="h100").without("pp")
    request = Request(
        loaded.model, loaded.batch, inner, resolve("zero2", inner), microbatches=microbatches, pipeline=PipelineSpec()
    )
    placed, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE, *pipeline.ANNOTATE, *pipeline.PLACE))
    return insert_collectives(placed, halves=True)


def split(program: Program, spec: PipelineSpec, num_ranks: int, limit: float | None = None) -> Program:
    strategies = resolve("zero2", mesh_of(program))
    bucketed = overlap(program, strategies=strategies)
    found = split_stages(program, spec=spec, num_ranks=num_ranks, bucketed=bucketed, memory_limit_bytes=limit)
    return overlap(found, strategies=strategies)


def mesh_of(program: Program) -> Mesh:
    assert program.mesh is not None
    return program.mesh


class BruteForce:
    """Every contiguous cut of a program into stages of one schedule."""

    def __init__(self, program: Program, schedule: str, num_ranks: int, stages_per_rank: int | None = None) -> None:
        self.program = program
        self.costs = call_costs(overlap(program, strategies=resolve("zero2", mesh_of(program))))
        self.link = pipeline_link(program)
        self.schedule = schedules.build(schedule, num_ranks, program.microbatches, stages_per_rank)
        count, stages = len(program.calls), self.schedule.num_stages
        self.cuts = [(0, *rest) for rest in itertools.combinations(range(1, count), stages - 1)]

    def slowest_s(self, cut: tuple[int, ...]) -> float:
        seconds = seconds_of_calls(self.program, self.costs)
        return max(sum(seconds[first:stop]) for first, stop in zip(cut, (*cut[1:], len(seconds)), strict=True))

    def timeline(self, cut: tuple[int, ...]) -> Timeline:
        stages = boundaries(self.program, cut, recompute_or_carry(self.program, cut, self.costs, self.link))
        return simulate(self.schedule, [stage_cost(self.program, each, self.costs) for each in stages], self.link)


def cut_of(program: Program) -> tuple[int, ...]:
    return tuple(min(set(stage.calls) - set(stage.recomputed)) for stage in program.pipeline.stages)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_cut_is_better_by_much(name: str, num_ranks: int) -> None:
    """Breaks if another contiguous cut has a slowest stage or a simulated step that is shorter by more than 5%."""
    program = lowered(name)
    brute = BruteForce(program, "1f1b", num_ranks)
    assert len(brute.cuts) >= 7
    found = split(program, PipelineSpec("1f1b"), num_ranks)
    assert found.pipeline is not None
    least_s = min(map(brute.slowest_s, brute.cuts))
    step_s = min(brute.timeline(cut).makespan_s for cut in brute.cuts)
    assert summarize(found).timeline.makespan_s <= CLOSE * step_s
    assert brute.slowest_s(cut_of(found)) <= CLOSE * least_s


@pytest.mark.moderate
def test_a_schedule_without_a_number_of_stages_tries_them() -> None:
    """Breaks if a name alone stands for two stages a rank where three wait less, or a number that was asked is lost."""
    program = lowered("vocabulary")
    found = [split(program, PipelineSpec("interleaved", stages), 2).pipeline for stages in (None, 2, 3, 4)]
    tried, *alone = (each.considered for each in found if each is not None)
    assert {each.schedule for each in tried} == {"interleaved"}
    assert sorted(each.stages_per_rank for each in tried) == [2, 3, 4]  # as many as `auto` tries
    assert [[each.stages_per_rank for each in rows] for rows in alone] == [[2], [3], [4]]
    assert tried[0].step_s <= ALIKE * min(rows[0].step_s for rows in alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_before_refinement_the_slowest_stage_is_the_fastest_that_can_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if the dynamic program misses the optimum, or works on other seconds than those of the calls."""
    monkeypatch.setattr("autopar.passes.split_stages.REFINED", 0)
    for num_ranks in (2, 3, 4):
        brute = BruteForce(lowered(name), "gpipe", num_ranks)
        found = split(lowered(name), PipelineSpec("gpipe"), num_ranks)
        assert brute.slowest_s(cut_of(found)) == pytest.approx(min(map(brute.slowest_s, brute.cuts)), rel=1e-9)


@pytest.mark.moderate
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)])
def test_schedules_with_more_stages(schedule: str, stages_per_rank: int) -> None:
    """Breaks if a schedule with several stages a rank, or split backwards, gets a cut that is far from the best."""
    program = lowered("vocabulary")
    brute = BruteForce(program, schedule, 2, stages_per_rank)
    found = split(program, PipelineSpec(schedule, stages_per_rank), 2)
    least = min(brute.timeline(cut).makespan_s for cut in brute.cuts)
    assert summarize(found).timeline.makespan_s <= CLOSE * least


@pytest.mark.moderate
def test_a_large_vocabulary_gets_a_stage_with_fewer_blocks() -> None:
    """Breaks if embedding and head do not count as pieces of the model."""
    program = lowered("vocabulary")
    found = split(program, PipelineSpec("1f1b"), 2)
    blocks = [sum(program.calls[n].region == "layer" for n in stage.calls) for stage in found.pipeline.stages]
    assert sum(blocks) == 7 and blocks[1] <= 1


@pytest.mark.moderate
def test_auto_fits_and_is_short() -> None:
    """Breaks if the schedule with the fewest stages is taken however long its step, or one of which a rank runs out of
    memory: the first tier's part of the next.
    """
    program = lowered("t5")
    free = split(program, PipelineSpec(), 2).pipeline
    assert free.considered[0].step_s <= ALIKE * min(each.step_s for each in free.considered)
    limit = 0.95 * max(each.peak_bytes for each in free.considered)
    found = split(program, PipelineSpec(), 2, limit)
    assert max(summarize(found).timeline.peak_bytes) <= limit
    assert all(each.fits == (each.peak_bytes <= limit) for each in found.pipeline.considered)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_auto_takes_the_shortest_step_that_fits(name: str) -> None:
    """Breaks if a schedule is chosen that does not fit, or a longer step than one that was simulated."""
    program = lowered(name)
    free = split(program, PipelineSpec(), 2).pipeline
    shown = free.considered
    assert len({(each.schedule, each.stages_per_rank) for each in shown}) >= 6
    assert shown[0].step_s <= ALIKE * min(each.step_s for each in shown) and shown[0].schedule == free.schedule.name
    # A named schedule by itself is never predicted faster.
    for each in ("gpipe", "1f1b", "zero_bubble"):
        named = split(program, PipelineSpec(each), 2)
        summary = summarize(named)
        update_s = update_seconds(summary.schedule.rank_of, summary.timeline.costs)
        assert (summary.timeline.makespan_s + update_s) * ALIKE >= shown[0].step_s
    least = min(each.peak_bytes for each in shown)
    seen, limit = set(), max(each.peak_bytes for each in shown)
    while True:
        limit *= 0.9
        try:
            found = split(program, PipelineSpec(), 2, limit)
        except DoesNotFit as error:
            assert error.ratio is not None and error.ratio > 1
            break
        best = found.pipeline.considered[0]
        assert best.fits and best.peak_bytes <= limit and max(summarize(found).timeline.peak_bytes) <= limit
        fitting = [each for each in found.pipeline.considered if each.fits]
        assert best.step_s <= ALIKE * min(each.step_s for each in fitting)
        assert all(each.peak_bytes <= limit for each in fitting)
        seen.add((best.schedule, best.stages_per_rank))
    assert limit < least and len(seen) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vocabulary", "t5"])
def test_memory_moves_the_cut(name: str) -> None:
    """Breaks if under a tight limit no cut is found though one fits, by brute force."""
    program = lowered(name)
    brute = BruteForce(program, "1f1b", 3)
    lines = {cut: brute.timeline(cut) for cut in brute.cuts}
    peaks = sorted(max(line.peak_bytes) for line in lines.values())
    for limit in (peaks[0] * 1.01, peaks[len(peaks) // 4]):
        found = split(program, PipelineSpec("1f1b"), 3, limit)
        step_s = summarize(found).timeline.makespan_s
        fitting = [line.makespan_s for line in lines.values() if max(line.peak_bytes) <= limit]
        assert step_s <= CLOSE * min(fitting)
    with pytest.raises(DoesNotFit, match=r"no pipeline over pp=3 fits the memory limit"):
        split(program, PipelineSpec("1f1b"), 3, peaks[0] * 0.9)


def test_the_user_may_cut() -> None:
    """Breaks if a pinned cut is moved, or its number of stages does not choose among the schedules."""
    program = lowered("vocabulary")
    names = [call.path or call.region for call in program.calls]
    for spec in (
        autopar.strategies.pipeline("1f1b", cut=["model.layers.2"]),
        autopar.strategies.pipeline(cut=["model.layers.2"]),
        autopar.strategies.pipeline("greedy", cut=["model.layers.2"]),
    ):
        found = split(program, spec, 2)
        assert [names[at] for at in cut_of(found)[1:]] == ["model.layers.2"]
    three = ["model.layers.1", "model.layers.4", "epilogue"]
    for spec in (autopar.strategies.pipeline(name, cut=three) for name in ("auto", "interleaved", "zbv")):
        found = split(program, spec, 2)
        assert [names[at] for at in cut_of(found)[1:]] == three
        assert found.pipeline is not None and found.pipeline.stages_per_rank == 2
    for schedule in ("1f1b", "auto", "greedy"):
        with pytest.raises(AutoparError, match=r"2 cuts make 3 stages"):
            split(program, autopar.strategies.pipeline(schedule, cut=three[:2]), 2)


@lru_cache(maxsize=2)
def small(name: str) -> Any:
    spec, _, overrides = MODELS[name]
    return catalogue.load(spec, tiny=True, batch=(32, 128), device="meta", overrides=overrides)


@lru_cache(maxsize=2)
def passes(name: str) -> tuple[pipeline.Pass, ...]:
    """All passes, for plans of `small(name)`: its capture is most of a plan, and the same for equal microbatches."""
    capture, *others = pipeline.DEFAULT
    kept: dict[int, Program] = {}
    whole: dict[object, Program] = {}

    def once(_: Program | None, request: Request) -> Program:
        assert request.pipeline is not None
        number = request.microbatches
        if number not in kept:
            request.captured.update(whole)
            kept[number] = capture.apply(None, request)
            whole.update(request.captured)
        return replace(kept[number], share=expected_share(request.pipeline, request.num_stage_ranks, number))

    return (pipeline.Pass(capture.name, once), *others)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipeline(1f1b)", "pipeline"])
@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_microbatches(name: str, schedule: str) -> None:
    """Breaks if some other number, planned by itself, has a step that is shorter by more than 5%."""
    loaded, mesh = small(name), Mesh({"pp": 2, "dp": 2}, hardware="h100")
    strategy = {"pp": schedule, "dp": "zero2"}

    def planned(microbatches: int | None) -> Plan:
        return autopar.plan(
            loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, precision="bf16",
            microbatches=microbatches, passes=passes(name),
        )  # fmt: skip

    found = planned(None)
    steps = {count: planned(count).cost.step_time_s for count in (1, 2, 4, 8, 16)}
    assert found.cost.step_time_s <= CLOSE * min(steps.values()), steps
    assert found.cost.step_time_s == pytest.approx(steps[found.interface.microbatches])


@pytest.mark.slow
def test_a_pipeline_that_is_decided_stays() -> None:
    """Breaks if the stages of a saved plan are cut again."""
    found = split(lowered("t5"), PipelineSpec("1f1b", cut=("epilogue",)), 2)
    again = split_stages(replace(found), spec=PipelineSpec("gpipe"), num_ranks=2, bucketed=found)
    assert again.pipeline == found.pipeline
