"""A backward in two halves: the same gradients, the same collectives, and nothing kept that the weight half can do
without.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from autopar.api import interpret
from autopar.cost.collectives import collectives
from autopar.ir.graphs import is_view
from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF, half_of, weight_half_reads_parameters
from autopar.ir.program import Program
from autopar.ir.reads import reads_in_backward, reads_in_half
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.verify import check_program
from autopar.machine.mesh import Mesh
from autopar.passes.emit import emit, interface_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.rematerialize import rematerialize
from autopar.runtime.comm import RecordingComm
from autopar.runtime.loader import load_program
from autopar.runtime.simulate import simulate
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Strategy
from tests.unit.passes.small import Case, Output, Small, SmallSequence, make, placed, sequence_batch
from tests.unit.passes.test_numerics import Looped, assert_equal, frozen_case
from tests.unit.tiers import mostly_slow
from tests.unit.traced import Lowered, lower

STRATEGIES: tuple[Strategy, ...] = ("tensor", "tensor+sequence", "zero3")


def halved(program: Program, strategies: tuple[AxisStrategy, ...]) -> Program:
    """A placed program with both halves."""
    program = overlap(insert_collectives(program, halves=True), strategies=strategies)
    check_program(program, after="insert_collectives")
    return program


def emitted(program: Program, strategies: tuple[AxisStrategy, ...]) -> str:
    """The program's text, in which every region's backward runs its two halves and compares them with itself."""
    blocks = [emit(program, strategies=strategies)]
    return "\n\n\n".join(blocks + [both_ways(region) for region in program.regions if WEIGHT_HALF in region.lowered])


def both_ways(region: Region) -> str:
    """A function that stands in for the region's backward."""
    name, p = region.name, "p" if weight_half_reads_parameters(region) else "None"
    results = [f"grad_{i}" for i, _ in enumerate(region.differentiable_inputs)]
    return f"""{name}_backward_whole = {name}_backward


def {name}_backward(comm, p, saved, *grads):
    {", ".join([f"whole_{each}" for each in results] + ["whole_g"])} = {name}_backward_whole(comm, p, saved, *grads)
    {", ".join([*results, "kept"])} = {name}_backward_input(comm, p, saved, *grads)
    g = {name}_backward_weight(comm, {p}, kept)
    assert g.keys() == whole_g.keys()
    {"".join(f"assert torch.equal({each}, whole_{each}); " for each in results)}
    assert all(torch.equal(g[slot], whole_g[slot]) for slot in g)
    return {", ".join([*results, "g"])}"""


def proven(case: Case) -> None:
    program = halved(case.programs["place"], case.strategies)
    state = interpret.state_of(case.model, program)
    inputs = interpret.input_tensors(program, case.batch)
    found = simulate(interface_of(program), emitted(program, case.strategies), state, inputs)
    assert_equal((found.outputs, found.gradients), case, program)


def in_halves(name: str, mesh: str, strategy: Strategy, dropout: float = 0.0) -> Lowered:
    lowered = lower(name, mesh, strategy, dropout=dropout)
    program = halved(lowered.program, lowered.strategies)
    return replace(lowered, program=program, source=emitted(program, lowered.strategies))


def sent(region: Region, phase: str) -> Counter[tuple[str, ...]]:
    """Collectives of a phase, with what each one moves."""
    found: Counter[tuple[str, ...]] = Counter()
    for node in region.lowered[phase].graph.nodes:
        if node.op == "call_method" and node.target not in ("slice", "index", "positions"):
            source = node.args[1]
            found[str(node.target), str(node.args[2]), str(source.meta["type"]), str(source.meta["sharding"])] += 1
    return found


def operators(region: Region, lowered: LoweredFunction) -> set[str]:
    nodes = [node for node in lowered.graph.nodes if hasattr(node.target, "_schema")]  # no arithmetic of offsets
    return {node.name for node in nodes if node.name in region.ops}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["product", "zero3", "tensor+sequence", "auto"])
def test_small_models_are_equal(strategy: str) -> None:
    """Breaks if a half computes another number than the whole, or misses what it reads."""
    plan: Strategy = {"dp": "zero3", "tp": "tensor"} if strategy == "product" else strategy
    cases = [make(), frozen_case(), make(Looped())]
    if strategy == "tensor+sequence":
        cases = [make(SmallSequence(), sequence_batch())]
    for case in cases:
        proven(placed(case, plan))


@pytest.mark.moderate
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_computed_again_is_computed_once(mode: str) -> None:
    """Breaks if a value that the backward recomputes is recomputed in each half, or read from the wrong one."""
    case = make(SmallSequence(), sequence_batch())
    case.programs["differentiate"] = rematerialize(case.programs["differentiate"], mode=mode)  # type: ignore[arg-type]
    case = placed(case, "tensor+sequence")
    proven(case)
    for region in halved(case.programs["place"], case.strategies).regions:
        both = operators(region, region.lowered[INPUT_HALF]) & operators(region, region.lowered[WEIGHT_HALF])
        nodes = {node.name: node for node in region.graph.nodes}
        assert all(is_view(nodes[name]) for name in both)


@pytest.mark.moderate
def test_parameters_that_the_weight_half_reads() -> None:
    """Breaks if the weight half is said to read no parameters and reads one, or the other way round."""

    class Squared(nn.Module):
        """The gradient of `weight` is a product with `weight` itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight * self.weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 4)
            self.blocks = nn.ModuleList(nn.Sequential(Squared()) for _ in range(3))

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> Output:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return Output((x - target).square().sum(), x)

    case = placed(make(Model()), "zero3")
    proven(case)
    program = halved(case.programs["place"], case.strategies)
    reads = {region.name: weight_half_reads_parameters(region) for region in program.regions}
    block = next(region for region in program.regions if region.module)
    assert reads == {region.name: region is block for region in program.regions}
    assert reads_in_half(block, 0, WEIGHT_HALF)
    for region in program.regions:
        for slot in range(len(region.slots)):
            either = reads_in_half(region, slot, INPUT_HALF) or reads_in_half(region, slot, WEIGHT_HALF)
            assert either == reads_in_backward(region, slot)


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["p", "comm", "saved", "kept", "g", "F"])
def test_an_input_may_have_any_name(name: str) -> None:
    """Breaks if a model's input is taken for what a region's functions have under the same name."""
    namespace = {"Small": Small}
    body = f"return super(Model, self).forward({name}, target)"
    exec(f"class Model(Small):\n    def forward(self, {name}, target):\n        {body}", namespace)
    batch = make().batch
    proven(placed(make(namespace["Model"](), {name: batch["x"], "target": batch["target"]})))


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", mostly_slow(["llama", "gpt2"], "gpt2"))
def test_halves_send_what_the_whole_sends(name: str, strategy: Strategy) -> None:
    """Breaks if a value that both halves want moved is moved twice, or an estimate counts halves beside the whole."""
    lowered = lower(name, "dp=2,tp=2", strategy)
    program = halved(lowered.program, lowered.strategies)
    for region in program.regions:
        assert sent(region, INPUT_HALF) + sent(region, WEIGHT_HALF) == sent(region, "backward")
    assert list(collectives(program)) == list(collectives(lowered.program))
    assert not any(INPUT_HALF in region.lowered for region in lowered.program.regions)


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_operator_is_in_one_half(name: str, strategy: Strategy) -> None:
    """Breaks if gradients of weights hold up the stage before, or an operator other than a view runs twice."""
    lowered = lower(name, "dp=2,tp=2", strategy)
    for region in halved(lowered.program, lowered.strategies).regions:
        halves = half_of(region)
        assert set(halves) == set(region.ops)
        first, last = (operators(region, region.lowered[phase]) for phase in (INPUT_HALF, WEIGHT_HALF))
        assert first == {operator for operator, half in halves.items() if half == "input"}
        assert {operator for operator, half in halves.items() if half == "weight"} <= last
        nodes = {node.name: node for node in region.graph.nodes}
        assert all(is_view(nodes[operator]) for operator in first & last)
        assert all(halves[operator] == "weight" for operator in halves if "grad_weight" in operator)
        if not region.differentiable_inputs:
            assert not first


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_only_what_is_read_is_kept(name: str, strategy: Strategy) -> None:
    """Breaks if activations that only the input half reads stay until the weight half has run, or views are kept."""
    lowered = lower(name, "dp=2,tp=2", strategy)
    for region in halved(lowered.program, lowered.strategies).regions:
        first, last = region.lowered[INPUT_HALF], region.lowered[WEIGHT_HALF]
        holders = [node for node in last.graph.nodes if node.op == "placeholder"][2:]
        assert first.saved == tuple(node.name for node in holders)
        assert all(node.users for node in holders)
        output = next(node for node in first.graph.nodes if node.op == "output")
        kept: list[fx.Node] = list(output.args[0])[first.num_results :]
        assert not any(node.op == "call_function" and is_view(node) and len(node.args) == 1 for node in kept)
        if region.module:
            assert set(region.lowered["forward"].saved) - set(first.saved)


@pytest.mark.moderate
def test_what_both_halves_gather_is_kept_gathered() -> None:
    """Breaks if, with the sequence split, the weight half gathers the gradient of a block's output again."""
    program = lower("llama", "tp=2", "tensor+sequence")
    source = emit(halved(program.program, program.strategies), strategies=program.strategies)
    first, weight = (source.split(f"def layer_backward_{half}(")[1].split("\n\n")[0] for half in ("input", "weight"))
    gathered = re.findall(r"(\w+) = comm\.all_gather", first)
    kept = re.findall(r"\w+", first.rpartition("return ")[2])
    assert set(gathered) & set(kept)
    assert "all_gather" not in weight


@pytest.mark.moderate
def test_a_half_without_an_operator_is_found() -> None:
    """Breaks if the verifier lets a gradient, or what it is made of, get lost between the halves."""
    program = halved(placed(make()).programs["place"], placed(make()).strategies)
    region = program.regions[1]
    for wrong in (
        {INPUT_HALF: replace(region.lowered[INPUT_HALF], saved=())},
        {WEIGHT_HALF: region.lowered[INPUT_HALF]},
        {INPUT_HALF: region.lowered[WEIGHT_HALF]},
    ):
        broken = program.with_regions({region.name: replace(region, lowered={**region.lowered, **wrong})})
        with pytest.raises(AssertionError, match=region.name):
            check_program(broken, after="insert_collectives")
    alone = {name: region.lowered[name] for name in ("forward", "backward", INPUT_HALF)}
    with pytest.raises(AssertionError, match="is lowered as"):
        check_program(program.with_regions({region.name: replace(region, lowered=alone)}), after="insert_collectives")


@pytest.mark.moderate
def test_halves_are_compiled_as_regions(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if compile_regions leaves the halves uncompiled, or cannot do without `p` where nothing reads it."""
    case = placed(make(), "ddp", Mesh({"dp": 1}, hardware="cpu"))
    source = emit(halved(case.programs["place"], case.strategies), strategies=case.strategies)
    plain = load_program(source, "<plain>").namespace
    compiled = load_program(source, "<compiled>", compile_regions="eager").namespace
    halves = [name for name in plain if name.endswith((INPUT_HALF, WEIGHT_HALF))]
    assert len(halves) == 2 * len(case.programs["place"].regions)
    assert all(hasattr(compiled[name], "__wrapped__") for name in halves)
    comm = RecordingComm(("dp",), (1,), 0)
    state = interpret.state_of(case.model, case.programs["place"])
    p = {name: state[f"blocks.0.{name}"] for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    x = case.batch["x"]
    (result,), saved = plain["block_forward"](comm, p, x)
    gradients = []
    for namespace in (plain, compiled):
        grad, kept = namespace["block_backward_input"](comm, p, saved, torch.ones_like(result))
        g = namespace["block_backward_weight"](comm, None, kept)
        gradients.append({"x": grad, **g})
    assert "uncompiled" not in caplog.text
    assert set(gradients[0]) == {"x", *p}
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "tensor+sequence", "zero3", "product", "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "gemma2"])
def test_models_are_equal(name: str, strategy: str) -> None:
    """Breaks if a half of any of these models' regions gives another gradient than the whole, or than eager."""
    lowered = in_halves(name, "dp=2,tp=2", strategy)
    assert lowered.worst() < 1e-9
    for region in lowered.program.regions:
        if INPUT_HALF in region.lowered:
            assert sent(region, INPUT_HALF) + sent(region, WEIGHT_HALF) == sent(region, "backward")


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "strategy", "dropout"), [
    ("bert", "dp=2,tp=2", "product", 0.3), ("gpt2", "tp=2", "tensor+sequence", 0.3), ("cnn", "dp=2,tp=2", "auto", 0.0),
    ("resnet", "dp=2", "zero3", 0.0), ("phi3", "dp=2,tp=2", "tensor+sequence", 0.0), ("vit", "tp=2", "auto", 0.0),
    ("clip", "dp=2,tp=2", "product", 0.0), ("whisper", "dp=2,tp=2", "zero3", 0.0),
])  # fmt: skip
def test_other_models_are_equal(name: str, mesh: str, strategy: str, dropout: float) -> None:
    """Breaks if dropout is drawn anew in the weight half, or statistics, fused or tied weights get lost between."""
    assert in_halves(name, mesh, strategy, dropout).worst() < 1e-9
