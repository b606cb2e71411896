"""Every pass keeps the numbers: loss, outputs and gradients equal the eager model's after each of them, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.api import interpret
from autopar.api.promote import only
from autopar.ir.program import Program
from autopar.ir.verify import check_program
from autopar.machine.mesh import Mesh
from autopar.passes.emit import emit, interface_of
from autopar.passes.rematerialize import rematerialize
from autopar.runtime.simulate import simulate
from tests.unit.passes.small import MESH, PASSES, Block, Case, Output, make, placed


class Frozen(nn.Module):
    """What outlining and differentiating find hard, in one model.

    A frozen parameter, an unused one, one that two calls share, a detached value, a value that skips the blocks, an
    output that no loss reads, an input that is not a float, and one that feeds the first block directly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gate = nn.Parameter(torch.ones(4))
        self.table = nn.Embedding(6, 4)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Tensor]:
        start = x
        for block in self.blocks:
            x = block(x) * self.gate
        x = x + self.scale * start
        scores = functional.linear(x, self.table.weight) + self.table(index).sum(1, keepdim=True)
        loss = functional.cross_entropy(scores, index)
        return {"loss": loss, "scores": scores, "largest": scores.detach().amax(), "side": start * 2}


class Looped(nn.Module):
    """Two lists of blocks run in turns, as in an encoder and a decoder that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Reader() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Output:
        memory = x * 1.0
        for block in self.encoder:
            memory = block(memory)
        x = torch.tanh(x)
        for block in self.decoder:
            x = block(x, memory)
        return Output((x - target).square().sum(), x)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Block(), Block()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.own(x) + self.other(memory) * x


def frozen_case() -> Case:
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 4, generator=generator).double(), "index": torch.arange(8) % 6}
    return make(Frozen(), batch)


CASES = {"small": make, "frozen": frozen_case, "looped": lambda: make(Looped())}


@pytest.fixture(scope="module", params=CASES)
def any_case(request: pytest.FixtureRequest) -> Case:
    return placed(CASES[request.param](), "auto")


def eager(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    case.model.zero_grad()
    with only(torch.float64):
        output: Any = case.model(**case.batch)
    values = list(output.values()) if isinstance(output, dict) else list(output)
    values[0].backward()
    trained = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
    return [value.detach() for value in values], gradients


def assert_equal(found: Any, case: Case, program: Program) -> None:
    outputs, gradients = eager(case)
    assert len(found[0]) == len(outputs)
    for name, have, want in zip(program.output_names, found[0], outputs, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")
    if program.training:
        assert set(found[1]) - {"unused.weight", "unused.bias"} == {n for n in gradients if not n.startswith("unused")}
    for name, have in found[1].items():
        torch.testing.assert_close(
            have, gradients[name], rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("after", [name for name in PASSES if name not in ("insert_collectives", "overlap")])
def test_the_program_computes_what_the_model_computes(any_case: Case, after: str) -> None:
    """Breaks if a pass changes a number: a wrong border of a region, a lost gradient path, a wrong simplification."""
    program = any_case.programs[after]
    check_program(program, after=after)
    state = interpret.state_of(any_case.model, program)
    assert_equal(interpret.run(program, state, interpret.input_tensors(program, any_case.batch)), any_case, program)


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["auto", "ddp", "zero3", "tensor", "product"])
@pytest.mark.parametrize("name", CASES)
def test_the_lowered_program_computes_what_the_model_computes(name: str, strategy: str) -> None:
    """Breaks if a collective, a local shape, a loop over calls or an accumulated gradient is wrong."""
    case = placed(CASES[name](), {"dp": "zero3", "tp": "tensor"} if strategy == "product" else strategy)
    assert_equal(simulated(case), case, case.programs["overlap"])


@pytest.mark.moderate
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", CASES)
def test_rematerialized_blocks_compute_the_same(name: str, mode: str) -> None:
    """Breaks if a value made again in the backward differs from the one the forward made, or reads what is gone."""
    case = CASES[name]()
    before = case.programs["differentiate"]
    after = rematerialize(before, mode=mode)  # type: ignore[arg-type]
    check_program(after, after="rematerialize")
    case.programs["differentiate"] = after
    case = placed(case, "auto", Mesh({"a": 4}, hardware="cpu"))
    assert_equal(simulated(case), case, after)
    for region in case.programs["insert_collectives"].regions:
        if mode == "full" and region.module:
            inputs = [node.name for node in region.graph.nodes if node.op == "placeholder"][len(region.slots) :]
            assert set(region.lowered["forward"].saved) <= set(inputs)


def simulated(case: Case) -> tuple[Any, Any]:
    program = case.programs["overlap"]
    check_program(program, after="overlap")
    state = interpret.state_of(case.model, program)
    inputs = interpret.input_tensors(program, case.batch)
    found = simulate(interface_of(program), emit(program, strategies=case.strategies), state, inputs)
    return found.outputs, found.gradients


@pytest.mark.moderate
def test_tied_parameters_are_one_variable() -> None:
    """Breaks if a tied weight is declared, gathered or reduced twice, or its gradient lacks one of its uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor, target: Tensor) -> Output:
            y = self.second(torch.relu(self.first(x)))
            return Output((y - target).square().sum(), y)

    case = placed(make(Tied()), "zero3", MESH)
    variables = [v for v in case.programs["capture"].variables if v.name.endswith("weight")]
    assert [(v.name, v.aliases) for v in variables] == [("first.weight", ("second.weight",))]
    assert_equal(simulated(case), case, case.programs["overlap"])


@pytest.mark.moderate
def test_inference_has_no_backward() -> None:
    """Breaks if a forward-only program traces a backward, saves activations, or gives other outputs."""
    from autopar.passes.annotate import annotate
    from autopar.passes.capture import capture
    from autopar.passes.differentiate import differentiate
    from autopar.passes.insert_collectives import insert_collectives
    from autopar.passes.outline import outline
    from autopar.passes.overlap import overlap
    from autopar.passes.place import place
    from autopar.strategies.names import resolve

    case = make()
    with only(torch.float64):
        program = differentiate(outline(capture(case.model, case.batch, training=False)))
    strategies = resolve("auto", MESH)
    program = insert_collectives(place(annotate(program, mesh=MESH), strategies=strategies))
    program = overlap(program, strategies=strategies)
    assert all(set(region.lowered) == {"forward"} for region in program.regions)
    assert not any(region.lowered["forward"].saved for region in program.regions)
    state = interpret.state_of(case.model, program)
    source = emit(program, strategies=strategies)
    found = simulate(interface_of(program), source, state, case.batch, backward=False)
    for have, want in zip(found.outputs, eager(case)[0], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
