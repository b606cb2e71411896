"""The text of a pipeline: wherever a program is cut, its stages together compute what it computes.

What breaks it: a gradient that a stage forgets to add or to pass on, a parameter that several calls use and one stage
does not know, other dropout seeds, parameters gathered again that are held, blocks of one stage run by another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.cost.memory.boundaries import boundaries
from autopar.ir.program import Program
from autopar.ir.values import ValueRef
from autopar.ir.verify import check_program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate
from autopar.passes.emission.segments import segments
from autopar.passes.emit import emit, interface_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.outline import outline
from autopar.passes.overlap import overlap
from autopar.passes.place import place
from autopar.runtime.loader import load_program
from tests.unit.passes import small
from tests.unit.passes.stages import Uncut, one_after_the_other, run_stages, uncut, uncut_traced
from tests.unit.traced import finish, trace_model

CASES = [
    ("llama", "dp=1", "ddp"),
    ("llama", "tp=2", "tensor+sequence"),
    ("gpt2", "dp=2", "zero3"),
    ("t5", "dp=2", "zero2"),
    ("gemma2", "dp=2", "zero3+keep"),
]
MORE = [
    (name, mesh, strategy)
    for name in ("llama", "gpt2", "t5", "gemma2")
    for mesh, strategy in (
        ("dp=1", "ddp"),
        ("dp=2", "zero2"),
        ("dp=2", "zero3"),
        ("tp=2", "tensor+sequence"),
        ("dp=2,tp=2", "product"),
    )
    if (name, mesh, strategy) not in CASES
]
Golden = Callable[[str], None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=lambda case: "-".join(case)
)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.sampled(3)
def test_any_cut_computes_the_same(case: tuple[str, str, str], data: st.DataObject) -> None:
    """Breaks if loss, outputs or any gradient depend on where the program is cut, or on halves of its backward."""
    whole = uncut(*case)
    inner = st.sets(st.integers(1, len(whole.program.calls) - 1))
    cuts = [0, *sorted(data.draw(inner, "cuts"))]
    piped = whole.cut(cuts, halves=data.draw(st.booleans(), "halves"))
    piped.worst(run_stages(piped)[0])


@pytest.mark.moderate
def test_dropout_does_not_see_the_cut() -> None:
    """Breaks if a block's seed is counted from its stage's first call."""
    whole = uncut("gpt2", "dp=2", "zero2", dropout=0.3)
    for cuts in ([0, 1, 3], [0, 2, 5], [0, 1, 2, 3, 4, 5]):
        piped = whole.cut(cuts)
        piped.worst(run_stages(piped)[0])


@pytest.mark.moderate
@pytest.mark.parametrize("halves", [False, True])
def test_the_cut_sends_nothing_more(halves: bool) -> None:
    """Breaks if stages gather or reduce more than the whole program does, or a half gathers what it does not read."""
    whole = uncut("llama", "dp=2", "zero3")
    plain = finish(whole.traced, whole.program, whole.strategies).run()
    for cuts in ([0], [0, 2, 4]):
        piped, _ = run_stages(whole.cut(cuts, halves=halves))
        assert sum(e.bytes_sent for e in piped.events[0]) <= sum(e.bytes_sent for e in plain.events[0])


# -- parameters held for the step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3+keep"])
def test_held_parameters_are_gathered_once(strategy: str) -> None:
    """Breaks if UNSHARD leaves a gather to the forwards, or these do not find what it gathered."""
    piped = uncut("gpt2", "dp=2", strategy).cut([0, 2, 4])
    result, ranks = run_stages(piped, times=2)
    piped.worst(result)
    events = ranks[0].events
    assert events["unshard"] and {event.kind for event in events["unshard"]} == {"all_gather"}
    assert not [e for part in ("forward", "backward") for e in events[part] if e.kind == "all_gather"]


@pytest.mark.moderate
def test_what_is_held_may_be_a_part() -> None:
    """Breaks if parameters that one axis gathers once, another for each use, are held whole, or gathered twice."""
    whole = uncut("llama", "dp=2,fsdp=2", "dp=zero2,fsdp=zero3")
    buckets = [b for r in whole.cut([0, 3]).program.regions for b in r.transfers["gather"] if 0 < b.keep < len(b.chain)]
    assert buckets, "nothing is held in part: another case is needed"
    piped = whole.cut([0, 3])
    result, ranks = run_stages(piped, times=2)
    piped.worst(result)
    events = ranks[0].events
    assert {event.axis for event in events["unshard"]} == {"dp"}
    assert {event.axis for event in events["forward"] if event.kind == "all_gather"} == {"fsdp"}


@pytest.mark.slow
def test_nothing_held_starts_nothing() -> None:
    piped = uncut("llama", "tp=2", "tensor+sequence").cut([0, 3])
    assert not run_stages(piped)[1][0].events["unshard"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [("t5", "dp=2", "zero3"), ("llama", "tp=2", "tensor+sequence")])
def test_gradients_add_up_over_microbatches(case: tuple[str, str, str]) -> None:
    """Breaks if a stage forgets the sums of the microbatches before, or reduces them more than once."""
    piped = uncut(*case).cut([0, 2, 4], halves=True)
    (once, first), (thrice, last) = run_stages(piped), run_stages(piped, times=3)
    piped.worst(once)
    piped.worst(thrice)
    assert first[0].events["reduce"] == last[0].events["reduce"]


# -- small models of one peculiarity each


class Skip(nn.Module):
    """What enters the blocks is read again behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(small.Block() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> small.Output:
        start = self.enter(x)
        x = start
        for block in self.blocks:
            x = block(x)
        return small.Output((x + 2 * start - target).square().mean(), x)


class Turned(nn.Module):
    """All blocks read a value that is made of inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TurnedBlock() for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> small.Output:
        turn = target.cos() + 1
        for block in self.blocks:
            x = block(x, turn)
        return small.Output((x - target).square().mean(), x)


class TurnedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        return x + self.linear(x) * turn


class Counted(nn.Module):
    """Every block changes buffers; what is added to its result stands behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> small.Output:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return small.Output((x[:, :4] - target).square().mean(), x)


class Uneven(nn.Module):
    """No dim divides, and the first call and the last share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 7, bias=False)
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> small.Output:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return small.Output((x @ self.enter.weight - target).square().mean(), x)


class UnevenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Chain(nn.Module):
    """Every block changes buffers, and one loop runs them all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor, target: Tensor) -> small.Output:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return small.Output((x[:, :4] - target).square().mean(), x)


@lru_cache
def of_small(model: type[nn.Module], mesh: str = "dp=2", strategy: str = "zero2", training: bool = True) -> Uncut:
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(8, 4, generator=generator) for name in ("x", "target")}
    return uncut_traced(trace_model(model().train(training), batch), mesh, strategy)


@pytest.mark.parametrize("cuts", [[0], [0, 1], [0, 2, 3], [0, 1, 2, 3, 4]])
def test_a_value_read_by_the_first_block_and_behind_the_last(cuts: list[int]) -> None:
    """Breaks if the gradient that comes back through the loop replaces the other one, or is replaced by it."""
    whole = of_small(Skip)
    piped = whole.cut(cuts)
    piped.worst(run_stages(piped)[0])
    finish(whole.traced, whole.program, whole.strategies).worst()


@pytest.mark.moderate
@pytest.mark.parametrize("halves", [False, True])
def test_a_stage_computes_again_what_it_then_need_not_receive(halves: bool) -> None:
    """Breaks if a value that is computed again still travels, or carries its call into the backward."""
    whole = of_small(Turned)
    assert whole.program.calls[0].region == "prologue" and not whole.program.regions[0].slots
    again = whole.cut([0, 2, 4], recomputed=[(), (0,), (0,)], halves=halves)
    assert again.program.pipeline is not None
    assert [stage.receives for stage in again.program.pipeline.stages] == [(), (ValueRef(1, 0),), (ValueRef(3, 0),)]
    for piped in (again, whole.cut([0, 2, 4], halves=halves)):
        piped.worst(run_stages(piped)[0])


@pytest.mark.moderate
def test_blocks_whose_parameters_have_other_names_are_no_loop() -> None:
    """Breaks if a loop makes up the names of its blocks' parameters where they are called otherwise."""
    program = of_small(Chain).program
    assert [each.count for each in segments(program)] == [1, 6, 1]
    borrowed = [
        replace(call, slots=tuple(f"others.{number}.{name}" for name in call.slots))
        for number, call in enumerate(program.calls)
    ]
    assert [each.count for each in segments(replace(program, calls=tuple(borrowed)))] == [1] * 8


@pytest.mark.parametrize("lacks", ["slots", "tangents"])
def test_what_carries_gradients_is_not_computed_again(lacks: str) -> None:
    """Breaks if a stage may compute for itself what gradients should come back through: to parameters of the call, or
    through a call that has none.
    """
    program = of_small(Chain).program
    block = program.region("block")
    assert block.slots and block.tangents
    changed = program.with_regions({"block": replace(block, **{lacks: ()})})
    with pytest.raises(AutoparError, match="carries gradients and cannot be computed again"):
        boundaries(changed, [0, 2, 4], [(), (1,), ()])


@pytest.mark.moderate
@pytest.mark.parametrize("model", [Counted, Chain])
@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 2, 5]])
def test_every_stage_gives_the_buffers_that_it_changes(model: type[nn.Module], cuts: list[int]) -> None:
    """Breaks if running statistics of a block get lost, or another block's name."""
    piped = of_small(model).cut(cuts)
    result, _ = run_stages(piped)
    piped.worst(result)
    assert set(result.updates) == {name for name, _ in piped.program.updates} and len(result.updates) > 10


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("halves", [False, True])
def test_pieces_may_be_uneven(strategy: str, halves: bool) -> None:
    """Breaks if padding reaches operators, or a parameter of two stages is trimmed in one of them only."""
    piped = of_small(Uneven, "dp=2", strategy).cut([0, 2, 4], halves=halves)
    assert any(entry.block for entry in interface_of(piped.program).parameters)
    piped.worst(run_stages(piped, times=2)[0])


# -- the text


def functions(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def kinds_of(source: str) -> list[str]:
    names: dict[str, Any] = {}
    exec(source, names)
    return [kind for kind, _ in names["STAGES"]]


def test_stages_alike_share_their_text() -> None:
    """Breaks if the text grows with the number of stages, or stages of unequal depth need functions of their own."""
    whole = of_small(Chain)
    assert [call.region for call in whole.program.calls] == ["prologue", *["block"] * 6, "epilogue"]
    few, many = whole.cut([0, 1, 6]).source, whole.cut([0, 1, 3, 4, 6]).source
    assert kinds_of(few) == ["first", "middle", "last"]
    assert kinds_of(many) == ["first", "middle", "middle", "middle", "last"]
    assert len(functions(few)) == len(functions(many))
    assert len(set(functions(many))) == len(functions(many))


def cut_small() -> list[str]:
    case = small.make()
    whole = uncut_traced(trace_model(case.model, case.batch), "dp=2", "zero3")
    source = whole.cut([0, 1, 3, 4]).source.replace("\n\n\n", "\n\n")
    return [re.sub(r"^# =.*\n", "", block) for block in source.split("\n\n")]


@pytest.mark.moderate
def test_emit_middle_stage(golden: Golden) -> None:
    """Breaks if the text of a middle stage changes: what it unpacks, gathers, adds up and gives back."""
    golden("\n\n".join(block for block in cut_small() if re.match(r"def middle_(forward|backward)", block)))


@pytest.mark.moderate
def test_emit_stage_table(golden: Golden) -> None:
    """Breaks if the tables above the functions change: blocks, what is said to travel, the schedule."""
    golden(next(block for block in cut_small() if "STAGES = (" in block))


def test_the_schedule_is_written_out_while_it_is_small() -> None:
    whole = of_small(Counted)
    assert "# pp rank 1: 1F0 1B0\n" in whole.cut([0, 3]).source
    pipeline = whole.cut([0, 3]).program.pipeline
    assert pipeline is not None
    long = replace(pipeline, schedule=replace(pipeline.schedule, num_microbatches=17))
    program = overlap(replace(whole.program, pipeline=long), strategies=whole.strategies)
    source = emit(program, strategies=whole.strategies)
    assert "pp rank 1: 1F0" not in source and 'SCHEDULE = "1f1b"' in source


def test_halves_are_written_where_the_schedule_uses_them() -> None:
    whole = of_small(Chain)
    assert "middle_backward_weight" in functions(whole.cut([0, 1, 2, 5], halves=True).source)
    assert "middle_backward_weight" not in functions(whole.cut([0, 1, 2, 5]).source)


@pytest.mark.moderate
def test_a_plan_for_inference_has_no_backward() -> None:
    """Breaks if stages without gradients are not written, or do not say why they have no backward."""
    model, batch = Skip().double().eval(), {name: torch.randn(8, 4, dtype=torch.float64) for name in ("x", "target")}
    program = differentiate(outline(capture(model, batch, training=False)))
    inner, trained = Mesh({"pp": 2, "dp": 2}, hardware="cpu").without("pp"), of_small(Skip)
    placed = place(annotate(program, mesh=inner), strategies=trained.strategies)
    piped = Uncut(trained.traced, insert_collectives(placed, halves=True), trained.strategies).cut([0, 2])
    stage = load_program(piped.source, "<inference>").stages[1]
    assert stage.backward_input is None
    with pytest.raises(AutoparError, match="planned for inference"):
        stage.backward(None, {}, {}, [], (), {}, {})  # type: ignore[arg-type]


# -- the border


@pytest.mark.slow
def test_the_interface_of_a_pipeline() -> None:
    """Breaks if a parameter has no stage, an output or an update none or two, or the whole mesh is lost."""
    piped = uncut("t5", "dp=2", "zero2").cut([0, 1, 4, 6])
    interface = interface_of(piped.program)
    pipeline = interface.pipeline
    assert pipeline is not None
    assert (pipeline.axis, pipeline.axes, pipeline.sizes) == ("pp", ("pp", "dp"), (2, 2))
    assert (interface.axes, interface.sizes) == (("dp",), (2,))
    assert {name for stage in pipeline.stages for name in stage.parameters} == {e.name for e in interface.parameters}
    assert sorted(place for stage in pipeline.stages for place in stage.outputs) == list(range(len(interface.outputs)))
    assert sum("shared.weight" in stage.parameters for stage in pipeline.stages) == 3
    for before, after in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        assert before.sends == after.receives
    assert pipeline.stages[0].receives == () and pipeline.stages[-1].sends == ()


def test_boundaries_relay_values_and_refuse_what_cannot_be() -> None:
    program = of_small(Skip).program
    stages = boundaries(program, [0, 2, 4])
    assert stages[0].sends == stages[1].receives == (ValueRef(0, 0), ValueRef(1, 0))
    assert stages[1].sends == (ValueRef(0, 0), ValueRef(3, 0))
    for cuts in ([1, 2], [0, 0], [0, 5], []):
        with pytest.raises(AutoparError, match="cannot be cut"):
            boundaries(program, cuts)
    with pytest.raises(AutoparError, match="carries gradients"):
        boundaries(program, [0, 2], [(), (0,)])
    with pytest.raises(AutoparError, match="earlier stages"):
        boundaries(program, [0, 2], [(), (3,)])


def test_a_pipeline_has_no_step_of_its_own() -> None:
    """Breaks if a pipelined text is run as a plain one, or a damaged table of stages is believed."""
    source = of_small(Skip).cut([0, 2]).source
    with pytest.raises(AutoparError, match="has no forward of the whole step"):
        load_program(source, "<pipeline>").forward(None, {}, {}, {}, torch.tensor(0))  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="does not define nowhere_unshard"):
        load_program(source.replace('("first"', '("nowhere"'), "<pipeline>")
    with pytest.raises(AutoparError, match="takes the blocks blocks, STAGES gives layers"):
        load_program(source.replace('("first", {"blocks"', '("first", {"layers"'), "<pipeline>")
    with pytest.raises(AutoparError, match="no table of kinds"):
        load_program(source + "\nSTAGES = 3\n", "<pipeline>")


def test_check_finds_what_a_stage_lacks() -> None:
    """Breaks if a cut that loses a value goes unnoticed until it runs."""
    program: Program = of_small(Skip).cut([0, 2]).program
    assert program.pipeline is not None
    first, last = program.pipeline.stages
    lost, unsent, unread = replace(first, calls=(0,)), replace(first, sends=()), replace(last, receives=())
    for broken in ((lost, last), (unsent, last), (first, unread)):
        damaged = replace(program, pipeline=replace(program.pipeline, stages=broken))
        with pytest.raises(AssertionError, match="stage"):
            check_program(damaged, after="split_stages")
    schedule = replace(program.pipeline, schedule=one_after_the_other(3))
    with pytest.raises(AssertionError, match="the schedule is of 3 stages"):
        check_program(replace(program, pipeline=schedule), after="split_stages")
