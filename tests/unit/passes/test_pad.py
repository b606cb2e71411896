"""Padded vocabularies: the numbers of the model, before and after differentiation, and split over ranks.

What breaks it: a padded column that a maximum, a sum of exponentials or a gradient sees; logits whose padding a reader
sees; a rank's block that does not begin with what torch.chunk stores there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autopar.api import interpret
from autopar.api.promote import only
from autopar.base.huggingface import huggingface
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.ir.uneven import chunks_are_blocks
from autopar.ir.verify import check_program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate
from autopar.passes.emit import emit, interface_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.outline import outline
from autopar.passes.overlap import overlap
from autopar.passes.pad import pad, padded_size
from autopar.passes.place import place
from autopar.runtime.simulate import simulate
from autopar.strategies.names import resolve

pytestmark = pytest.mark.unit


class Words(nn.Module):
    """A table of 61 rows and a head with a bias of its own; how the loss reads the logits is a choice."""

    def __init__(self, reads: str = "rows", tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(61, 8, padding_idx=3), nn.Linear(8, 61, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.reads = reads

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.table(ids)) * 3)
        if self.reads == "shifted":
            rows = logits[..., :-1, :].contiguous().view(-1, 61)
            return {"loss": functional.cross_entropy(rows.float(), labels[:, 1:].reshape(-1)), "logits": logits}
        if self.reads == "classes":
            return {"loss": functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"), "logits": logits}
        loss = functional.cross_entropy(logits.view(-1, 61), labels.view(-1))
        if self.reads == "smoothed":
            loss = functional.cross_entropy(logits.view(-1, 61), labels.view(-1), label_smoothing=0.1)
        return {"loss": loss + (logits.square().mean() if self.reads == "penalty" else 0), "logits": logits}


READS = [("rows", False), ("rows", True), ("shifted", False), ("classes", True)]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(61, (8, 6), generator=generator)
    labels[0, :2], labels[1, 1] = -100, 60
    return {"ids": torch.randint(61, (8, 6), generator=generator), "labels": labels}


def eager(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model.zero_grad()
    with only(torch.float64):
        outputs: Any = model(**inputs)
    outputs["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in outputs.items() if isinstance(value, Tensor)}, gradients


@lru_cache(maxsize=8)
def words(reads: str, tied: bool) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = Words(reads, tied).double()
    with torch.no_grad():
        # All logits far below 0: a padded column that is taken for 0 would be the largest.
        getattr(model.head, "bias" if model.head.bias is not None else "weight").sub_(5)
    with only(torch.float64):
        return model, outline(capture(model, batch()))


def assert_equal(found: interpret.Results, program: Program, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    outputs, gradients = eager(model, inputs)
    for name, have in zip(program.output_names, found[0], strict=True):
        torch.testing.assert_close(have, outputs[name], rtol=1e-12, atol=1e-13)
    assert set(found[1]) == set(gradients)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("reads", "tied"), READS)
def test_a_padded_program_computes_what_the_model_computes(reads: str, tied: bool) -> None:
    model, outlined = words(reads, tied)
    program = pad(outlined, multiple=8)
    assert {v.name: v.padded for v in program.variables if v.padded} == {
        "table.weight": (64, 8), **({} if tied else {"head.weight": (64, 8), "head.bias": (64,)})
    }  # fmt: skip
    logits = program.port(program.outputs[program.output_names.index("logits")])
    assert (logits.type.shape, logits.logical) == ((8, 6, 64), (8, 6, 61))
    check_program(program, after="pad")
    state = interpret.state_of(model, program)
    with only(torch.float64):
        assert_equal(interpret.run(program, state, batch()), program, model, batch())
        differentiated = differentiate(program)
    check_program(differentiated, after="differentiate")
    assert_equal(interpret.run(differentiated, state, batch()), differentiated, model, batch())


@pytest.mark.parametrize("reads", ["smoothed", "penalty"])
def test_logits_that_something_else_reads_stay_as_they_are(reads: str) -> None:
    program = pad(words(reads, True)[1], multiple=8)
    assert not any(variable.padded for variable in program.variables)
    apart = pad(words(reads, False)[1], multiple=8)
    assert [v.name for v in apart.variables if v.padded] == ["table.weight"]


def test_what_divides_or_is_small_stays_as_it_is() -> None:
    outlined = words("rows", False)[1]
    assert pad(outlined, multiple=1) is outlined
    assert pad(outlined, multiple=61) is outlined
    assert pad(outlined, multiple=40) is outlined, "80 rows would be 31% more"


@pytest.mark.moderate
@pytest.mark.parametrize(("name", "vocabulary"), [("gpt2", 127), ("bert", 125)])
def test_real_models(name: str, vocabulary: int) -> None:
    pytest.importorskip("transformers")
    loaded = catalogue.load(name, tiny=True, device="cpu", dropout=0.0, overrides={"vocab_size": vocabulary})
    model = loaded.model.double()
    with only(torch.float64), huggingface.training_capture(model):
        program = differentiate(pad(outline(capture(model, loaded.batch)), multiple=8))
    assert next(v.padded for v in program.variables if v.padded) == (128, 64)
    state, inputs = interpret.state_of(model, program), interpret.input_tensors(program, loaded.batch)
    assert_equal(interpret.run(program, state, inputs), program, model, dict(loaded.batch))


@pytest.mark.parametrize("mesh", ["tp=8", "dp=2,tp=4"])
@pytest.mark.parametrize(("reads", "tied"), READS)
def test_split_over_ranks_logits_are_never_gathered(reads: str, tied: bool, mesh: str) -> None:
    """Placed with the padded rows stored, as zeros."""
    model, outlined = words(reads, tied)
    with only(torch.float64):
        padded = differentiate(pad(outlined, multiple=8))
    stored = replace(padded, variables=tuple(replace(v, type=v.seen, padded=None) for v in padded.variables))
    program = annotate(stored, mesh=Mesh.parse(mesh, hardware="cpu"))
    assert program.mesh is not None
    strategies = resolve("tensor", program.mesh)
    placed = place(program, strategies=strategies, pins=(), memory_limit_bytes=None)
    lowered = overlap(insert_collectives(placed), strategies=strategies)
    assert lowered.placement is not None
    assert "S(0)" in str(lowered.placement.parameters["table.weight"].stored[-1])
    source = emit(lowered, strategies=strategies)
    assert "all_gather" not in source and "valid=61" in source
    state = interpret.padded(padded, interpret.state_of(model, padded))
    interface = interface_of(lowered)
    ones = [torch.ones(o.shape, dtype=getattr(torch, o.dtype)) for o in interface.outputs if o.differentiable]
    result = simulate(interface, source, state, batch(), ones)
    shapes = {v.name: v.type.shape for v in padded.variables}
    rest = {name: gradient[shapes[name][0] :] for name, gradient in result.gradients.items()}
    assert all(not part.any() for part in rest.values()), "padding has a gradient"
    outputs = tuple(
        interpret.trimmed(value, padded.port(ref).logical)
        for value, ref in zip(result.outputs, padded.outputs, strict=True)
    )
    gradients = {name: interpret.trimmed(gradient, shapes[name]) for name, gradient in result.gradients.items()}
    assert_equal((outputs, gradients), padded, model, batch())


@given(st.integers(1, 200), st.lists(st.integers(1, 8), max_size=3), st.integers(0, 40))
def test_chunks_are_the_beginnings_of_blocks(size: int, axis_sizes: list[int], more: int) -> None:
    padded = size + more

    def chunks(x: Tensor, sizes: list[int], ceil: bool) -> list[Tensor]:
        if not sizes:
            return [x]
        length = max(1, -(-len(x) // sizes[0]))
        pieces = [x[i * length : (i + 1) * length] for i in range(sizes[0])]
        return [part for piece in pieces for part in chunks(piece, sizes[1:], ceil)]

    fits = chunks_are_blocks(size, padded, axis_sizes)
    if fits:
        blocks = chunks(torch.arange(padded), axis_sizes, True)
        assert len({len(block) for block in blocks}) == 1
        for have, block in zip(chunks(torch.arange(size), axis_sizes, True), blocks, strict=True):
            assert have.tolist() == [i for i in block.tolist() if i < size]
    assert chunks_are_blocks(size, padded_size(size, 1), [])
    assert all(chunks_are_blocks(size, padded_size(size, n), [n]) for n in axis_sizes)


def test_two_axes_of_an_uneven_dim_do_not_fit() -> None:
    assert not chunks_are_blocks(10, 16, [2, 4])
    assert chunks_are_blocks(50257, 50264, [8]) and not chunks_are_blocks(50257, 50264, [4])
    assert chunks_are_blocks(12, 16, [4, 4]) is False
