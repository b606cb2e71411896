"""A proof is of the text that the plan runs, and not merely of what is traced again for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import proof


class Gated(nn.Module):
    """Two linear layers, a norm that computes in float32, and numbers that stand in the code."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(p)
        self.weight = nn.Parameter(torch.ones(16))
        self.scale, self.shift = 0.5, [0.1, 0.2]

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        h = self.drop(self.down(torch.tanh(self.up(x)))) * self.scale + torch.tensor(self.shift).repeat(8)
        wide = h.float()
        h = self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        return h.masked_fill(~keep[:, None], torch.finfo(h.dtype).min).softmax(-1).mul(torch.arange(16.0)).mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16), "keep": torch.arange(8) > 1}


def planned(model: nn.Module | None = None, mesh: str = "dp=2,tp=2", strategy: Any = "tensor", **options: Any) -> Any:
    mesh_of = autopar.Mesh.parse(mesh, hardware="cpu")
    return autopar.plan(model or Gated(), mesh_of, example_inputs=batch(), strategy=strategy, **options)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a proof runs."""
    found: list[str] = []
    simulate: Callable[..., Any] = proof.simulate

    def run(interface: Any, source: str, *given: Any, **options: Any) -> Any:
        found.append(source)
        return simulate(interface, source, *given, **options)

    monkeypatch.setattr(proof, "simulate", run)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_what_follows_from_the_dtype_is_the_same_text(runs: list[str], strategy: str) -> None:
    plan = planned(strategy=strategy)
    assert plan.verify().ok
    assert len(runs) == 1 and runs[0] != plan.source  # its limits are those of float64


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("strategy", ["zero3", "tensor", "auto"])
def test_a_program_that_casts_is_run_as_it_stands(runs: list[str], strategy: str, p: float) -> None:
    plan = planned(Gated(p), strategy=strategy, precision="bf16")
    report = plan.verify()
    assert report.ok, str(report)
    assert len(runs) == 2 and "bfloat16" in plan.source and "bfloat16" not in runs[1]
    assert runs[1].count("\n") == plan.source.count("\n")
    assert any(row.name.endswith("(the plan's own text)") for row in report.comparisons)


def test_stages_that_cast_are_run_as_they_stand(runs: list[str]) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)))
    given = {"input": torch.randn(8, 16)}
    plan = autopar.plan(
        layers, autopar.Mesh.parse("pp=2,dp=2", hardware="cpu"), example_inputs=given, precision="bf16",
        strategy={"pp": "pipeline(1f1b)", "dp": "ddp"}, microbatches=2,
    )  # fmt: skip
    report = plan.verify()
    assert report.ok, str(report)
    assert len(runs) == 2


def test_a_text_whose_microbatches_have_other_rows_draws_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced for the proof may be placed otherwise: its ranks share the rows of a microbatch otherwise, and so
    do draws.
    """
    plan, other = (planned(Gated(0.3), strategy=each, microbatches=2, precision="bf16") for each in ("zero3", "tensor"))
    program_of = proof.program_of
    monkeypatch.setattr(proof, "program_of", lambda _, *given: program_of(other, *given))
    report = plan.verify()
    assert report.ok, str(report)


def test_a_number_that_was_another_when_the_plan_was_made() -> None:
    model = Gated()
    plan = planned(model)
    plan.model.scale = 0.75
    report = plan.verify()
    assert not report.ok and report.worst.name.endswith("(the plan's own text)")


def test_a_constant_that_was_another_when_the_plan_was_made() -> None:
    plan = planned()
    plan.model.shift = [0.11, 0.2]
    report = plan.verify()
    assert not report.ok and report.worst.name.endswith("(the plan's own text)")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_line_of_the_plan_that_is_another(precision: str | None) -> None:
    plan = planned(precision=precision)
    line = next(each for each in plan.source.splitlines() if "torch.tanh" in each)
    wrong = replace(plan, source=plan.source.replace(line, line.replace("torch.tanh", "torch.sin")))
    report = wrong.verify()
    assert not report.ok and not wrong.source_is_edited


def test_a_border_that_is_another() -> None:
    plan = planned()
    lost = [replace(each, reached_by=()) if each.name == "up.weight" else each for each in plan.interface.parameters]
    report = replace(plan, interface=replace(plan.interface, parameters=tuple(lost))).verify()
    assert "gradient of up.weight (the plan's own text)" in {row.name for row in report.comparisons if not row.ok}


def _generation(precision: str | None) -> autopar.GenerationPlan:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=64, **sizes)).eval()
    mesh, wanted = autopar.Mesh.parse("tp=2", hardware="cpu"), autopar.Generation(2, 4, 2)
    return autopar.plan_generation(model, mesh, wanted, strategy="tensor", precision=precision)


def test_what_generates_in_fewer_bits_is_run_as_it_stands() -> None:
    report = _generation("bf16").verify()
    assert report.ok, str(report)
    assert {"logits of prefill (the plan's own text)", "logits of decode (the plan's own text)"} <= {
        row.name for row in report.comparisons
    }


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_line_of_a_plan_of_generation_that_is_another(precision: str | None) -> None:
    plan = _generation(precision)
    source = plan.decode.source.replace("silu(", "tanh(")
    assert source != plan.decode.source
    report = replace(plan, decode=replace(plan.decode, source=source)).verify()
    assert not report.ok and report.worst.name.endswith("of decode (the plan's own text)")
