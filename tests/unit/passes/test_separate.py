"""separate: what no parameter goes into becomes calls of its own, and no number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.api import interpret
from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.base.huggingface import huggingface
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.ir.verify import check_program
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate
from autopar.passes.outline import outline
from autopar.passes.repeatable import is_repeatable, repeatable_calls
from autopar.passes.separate import separate

ROWS, TOKENS, WIDTH = 4, 6, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        scores = (x * cos) @ (self.mix(x) * sin).transpose(1, 2)
        return x + scores.masked_fill(mask, 0.0) @ x


class Everything(nn.Module):
    """Tables that share work, a mask, ids that both the mask and the prologue read, a value that feeds another one,
    one that is an output, one with a frozen parameter, one with a buffer that changes, a random one, and one that only
    the prologue reads.
    """

    frequencies: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.first = nn.ModuleList(Layer() for _ in range(2))
        self.second = nn.ModuleList(Layer() for _ in range(2))
        self.fixed = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        angle = places[..., None] * self.frequencies
        cos, sin = torch.cos(angle), torch.sin(angle)
        mask = (places[:, None, :] > places[:, :, None]).expand(ids.shape[0], -1, -1)
        self.count += 1
        x = self.embed(ids) + self.places(places) + cos * (ids > 3)[..., None]
        for block in self.first:
            x = block(x, cos, sin, mask)
        later, scaled, other = cos + 1.0, sin * self.fixed, mask & (ids[:, None] > 0)
        x = x * 1.5
        for block in self.second:
            x = block(x, later, scaled, other)
        x = x + torch.cos(places + self.count)[..., None]
        return {"loss": (x * cos).square().mean(), "cos": cos, "mask": mask, "side": (ids * 2).amax()}


def outlined(model: nn.Module, batch: dict[str, Any], **options: Any) -> tuple[Program, dict[str, Tensor]]:
    model, batch = small_model(model, batch, torch.float64, 0)
    with only(torch.float64), huggingface.training_capture(model):
        program = outline(capture(model, batch, **options))
    state = interpret.state_of(model, program)
    return program, state | {f"input {k}": v for k, v in interpret.input_tensors(program, batch).items()}


def assert_same(before: Program, after: Program, tensors: dict[str, Tensor]) -> None:
    """Outputs, gradients and changed buffers equal, to the last bit; also once differentiated."""
    check_program(after, after="separate")
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith("input ")}
    inputs = {name.removeprefix("input "): t for name, t in tensors.items() if name.startswith("input ")}
    want = interpret.run_with_updates(before, state, inputs)
    with only(torch.float64):
        both = after, differentiate(after)
    check_program(both[1], after="differentiate")
    for program, tolerance in zip(both, (0.0, 1e-11), strict=True):
        found = interpret.run_with_updates(program, state, inputs)
        torch.testing.assert_close(found[0], want[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found[1], want[1], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found[2], want[2], rtol=tolerance, atol=tolerance)


def everything(**options: Any) -> tuple[Program, dict[str, Tensor]]:
    return outlined(Everything(), {"ids": torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 9}, **options)


def results(program: Program) -> dict[str, list[str]]:
    return {r.name: [str(port.type) for port in r.outputs] for r in program.regions if not r.module}


@pytest.mark.moderate
def test_values_leave_their_regions() -> None:
    """Breaks if a value stays where a stage cannot make it again, work is done twice, or a value with a parameter, a
    changed buffer or a gradient goes along.
    """
    before, tensors = everything()
    after = separate(before)
    assert_same(before, after, tensors)
    values = {
        "prologue_values_1": ["i64[1, 6]"],
        "prologue_values_2": ["f64[1, 6, 4]", "f64[1, 6, 4]"],
        "prologue_values_3": ["b8[4, 6, 6]"],
        "gap_values_1": ["f64[1, 6, 4]"],
        "gap_values_2": ["b8[4, 6, 6]"],
    }
    assert results(after) == values | {
        "prologue": ["f64[]", "f64[]", "f64[4, 6, 4]"],  # the count, the buffer's new value, what the blocks read
        "gap": ["f64[1, 6, 4]", "f64[4, 6, 4]"],
        "epilogue": ["f64[]", "i64[]"],
    }
    assert [after.calls[i].region for i in sorted(repeatable_calls(after))] == list(values)
    assert [is_repeatable(after, i) for i in range(4)] == [True, True, True, False]
    assert [port.name for port in after.region("prologue").inputs] == ["ids", "cos"]  # places are made again


@pytest.mark.moderate
def test_inference_separates_the_same() -> None:
    """Breaks if, where nothing is trained, parameters count for nothing and whole models become repeatable."""
    training, _ = everything()
    inference, tensors = everything(training=False)
    after = separate(inference)
    assert results(after) == results(separate(training))
    assert_same(inference, after, tensors)


@pytest.mark.moderate
def test_a_program_without_such_values_is_left_alone() -> None:
    """Breaks if a program changes that has nothing to separate, or one that was separated already."""
    program, _ = outlined(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"input": torch.ones(2, 4)})
    assert str(separate(program)) == str(program)
    once = separate(everything()[0])
    assert str(separate(once)) == str(once)


class Noisy(nn.Module):
    """Random values and values of the loss: none may be made twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        noisy = functional.dropout(x, 0.5, training=True)
        x = x * 2
        for layer in self.layers:
            x = layer(x) + noisy
        return (x - noisy).square().mean()


def test_random_values_are_drawn_once() -> None:
    """Breaks if a stage that runs a call again draws other numbers than the stage before it."""
    program, _ = outlined(Noisy(), {"x": torch.ones(2, 4)})
    after = separate(program)
    check_program(after, after="separate")
    assert [after.calls[i].region for i in sorted(repeatable_calls(after))] == ["prologue_values"]
    drawn = [r.name for r in after.regions if torch.ops.aten.dropout.default in {n.target for n in r.graph.nodes}]
    assert drawn == ["prologue"]


MODELS = {
    "llama": {"prologue_values": ["f64[1, 16, 8]"] * 2},  # its mask is the operator's, as in eager
    "gemma2": {
        "prologue_values_1": ["f64[8, 1, 16, 16]"], "prologue_values_2": ["f64[8, 1, 16, 16]"],
        "prologue_values_3": ["f64[1, 16, 16]"] * 2,
    },
    "t5": {
        "prologue_values": ["b8[8, 1, 16, 16]"], "gap_values": ["b8[8, 1, 8, 16]"],
        "decoder_block_1_values": ["f64[1, 8, 8, 16]"],
    },
    "whisper": {"prologue_values": ["i64[8, 16]"]},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Breaks if a mask, a rotary table or shifted ids of a real model cannot be made again by a later stage."""
    loaded = catalogue.load(name, tiny=True, device="cpu", dropout=0.0)
    before, tensors = outlined(loaded.model, loaded.batch)
    after = separate(before)
    assert_same(before, after, tensors)
    repeatable = {after.calls[i].region for i in repeatable_calls(after)}
    assert {name: types for name, types in results(after).items() if name in repeatable} == MODELS[name]
