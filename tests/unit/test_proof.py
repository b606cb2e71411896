"""What a proof compares: each output, buffer and gradient by itself, and that it sees where one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import comparing, proof, reference
from autopar.api.small_model import small_model
from autopar.machine.mesh import Mesh
from autopar.runtime.simulation import SimulationResult
from tests.unit.traced import Lowered, lower


@pytest.fixture(scope="module")
def proven() -> tuple[Lowered, SimulationResult]:
    """A right program, and what its ranks computed."""
    lowered = lower("mlp", "dp=2", "zero3")
    return lowered, lowered.run()


def compared(proven: tuple[Lowered, SimulationResult], result: SimulationResult) -> list[comparing.Comparison]:
    lowered, noise = proven[0], comparing.NOISE[torch.float64]
    tolerances = comparing.TOLERANCES[torch.float64]
    return comparing.compare(lowered.program, lowered.traced.expected, result, *tolerances, noise)


def test_everything_is_compared(proven: tuple[Lowered, SimulationResult]) -> None:
    """Breaks if a proof leaves a gradient, an output or the norm out: it would then be ok whatever these are."""
    lowered, result = proven
    rows = compared(proven, result)
    _, gradients, _ = lowered.traced.expected
    parameters = [name for name in lowered.traced.state if name in gradients]
    assert len(parameters) > 3 and len(gradients) == len(parameters)
    expected = [*lowered.program.output_names, *(f"gradient of {name}" for name in gradients), "gradient norm"]
    assert [row.name for row in rows] == expected
    assert all(row.ok for row in rows)


def _swapped(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def _without(result: SimulationResult, name: str) -> SimulationResult:
    return replace(result, gradients={key: value for key, value in result.gradients.items() if key != name})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 1.000001,
        lambda x: -x,
        _swapped,
        torch.zeros_like,
        lambda x: x * float("nan"),
        lambda x: x[..., 1:],
        lambda x: x.reshape(-1, 1),
    ],
    ids=["scaled", "negated", "permuted", "nothing", "nan", "shape", "turned"],
)
def test_one_wrong_gradient_is_named(
    change: Callable[[Tensor], Tensor], proven: tuple[Lowered, SimulationResult]
) -> None:
    """Breaks if a gradient may be anything as long as the loss, or the norm of all of them, is right."""
    for name, gradient in proven[1].gradients.items():
        if change is _swapped and gradient.shape[-1] == 1:
            continue
        wrong = replace(proven[1], gradients={**proven[1].gradients, name: change(gradient)})
        bad = [row for row in compared(proven, wrong) if not row.ok]
        assert bad and bad[0].name.startswith(f"gradient of {name}")


def test_gradients_that_are_missing_or_too_many(proven: tuple[Lowered, SimulationResult]) -> None:
    """Breaks if a parameter that gets no gradient passes, or one that eager gives none is given one."""
    result = proven[1]
    name = next(iter(result.gradients))
    bad = [row.name for row in compared(proven, _without(result, name)) if not row.ok]
    assert f"gradient of {name}" in bad
    more = replace(result, gradients={**result.gradients, "nobody's": torch.ones(3)})
    assert [row.name for row in compared(proven, more) if not row.ok] == ["gradient norm"]


def test_a_wrong_output_is_named(proven: tuple[Lowered, SimulationResult]) -> None:
    """Breaks if logits, which the loss does not show, may be anything."""
    lowered, result = proven
    for place, name in enumerate(lowered.program.output_names):
        outputs = [value * (1.0 + 1e-6 * (at == place)) for at, value in enumerate(result.outputs)]
        bad = [row.name for row in compared(proven, replace(result, outputs=tuple(outputs))) if not row.ok]
        assert bad == [name]


def test_a_wrong_buffer_is_named(proven: tuple[Lowered, SimulationResult]) -> None:
    """Breaks if running statistics may be anything."""
    lowered, result = proven
    outputs, gradients, _ = lowered.traced.expected
    wanted, tolerances = {"mean": torch.ones(3), "seen": torch.tensor(2)}, comparing.TOLERANCES[torch.float64]
    for name in wanted:
        found = replace(result, updates=wanted | {name: wanted[name] + 1})
        rows = comparing.compare(lowered.program, (outputs, gradients, wanted), found, *tolerances, 1e-6)
        assert [row.name for row in rows if not row.ok] == [f"buffer {name}"]


def test_a_mesh_keeps_what_is_to_be_proven() -> None:
    """Breaks if plans are proven on fewer ranks, or with fewer axes, than fit: nothing is split there."""
    assert proof.scaled_mesh(Mesh({"dp": 4, "tp": 4})) == (Mesh({"dp": 4, "tp": 4}), False)
    smaller, scaled = proof.scaled_mesh(Mesh({"dp": 64, "tp": 8}))
    assert scaled and dict(smaller.axes) == {"dp": 4, "tp": 4}
    smaller, _ = proof.scaled_mesh(Mesh({"pp": 8, "dp": 8}), {"pp": 8})
    assert dict(smaller.axes) == {"pp": 8, "dp": 2}


def test_a_batch_that_is_made_up_tells_rows_apart() -> None:
    """Breaks if models on meta are proven on rows that are all alike, in whatever order they come."""
    ids = torch.empty((8, 16), dtype=torch.int64, device="meta")
    model, batch = small_model(nn.Embedding(4, 2), {"ids": ids}, torch.float64, 0)
    assert len(batch["ids"].unique(dim=0)) == 8
    assert len(next(model.parameters()).unique()) == 8


def test_a_model_whose_first_parameter_is_codes_is_proven() -> None:
    """Breaks if a batch has the type of whatever parameter comes first."""
    model = autopar.store_weights(nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)), "int8")
    given = {"input": torch.randn(4, 8)}
    plan = autopar.plan(model, Mesh({"dp": 2}), strategy="ddp", example_inputs=given, inference=True)
    plan.verify().raise_on_failure()


class Cancelling(nn.Module):
    """Biases before a batch norm, one of them large: their gradient is 0, and what is there is much rounding. And a
    layer that counts for little, whose gradient is as small, and right to the last digits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.shift, self.norm = nn.Linear(16, 8), nn.Parameter(torch.zeros(8)), nn.BatchNorm1d(8)
        self.little, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.before(x) + 1e2 * self.shift) + 1e-8 * self.little(x)
        return 1e3 * self.last(hidden).square().mean()


@pytest.mark.moderate
def test_what_cancels_is_compared_on_the_scale_of_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the bias before a batch norm, whose gradient is rounding alone, makes a right program wrong; or if a
    gradient that is small, but is no rounding, may be lost, or one that is 0 may be anything.
    """
    plan = autopar.plan(
        Cancelling(), Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(16, 16)}, strategy="ddp"
    )
    right, ranks = plan.verify(), proof.run_all_ranks
    assert right.ok and not [row for row in right.comparisons if "before.bias" in row.name and row.error < 1e-12]

    def found(name: str, change: Callable[[Tensor, float], Tensor]) -> list[str]:
        def run(*arguments: Any) -> SimulationResult:
            result = ranks(*arguments)
            total = sum(float(x.square().sum()) for x in result.gradients.values()) ** 0.5
            changed = {**result.gradients, name: change(result.gradients[name], total)}
            return replace(result, gradients=changed)

        monkeypatch.setattr(proof, "run_all_ranks", run)
        return [row.name.split()[-1] for row in plan.verify().comparisons if not row.ok]

    assert found("before.bias", lambda x, total: torch.zeros_like(x)) == []
    assert found("before.bias", lambda x, total: x + 1e-10 * total) == ["before.bias"]
    assert found("little.weight", lambda x, total: torch.zeros_like(x)) == ["little.weight"]
    assert found("little.weight", lambda x, total: x * (1 + 1e-3)) == ["little.weight"]


class Scaled(nn.Module):
    """A number made in the model's own precision from one that is not: a cast in float32, none in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor(8**0.5, dtype=torch.float64).to(x.dtype)
        return self.last(self.first(x).mul(scale).tanh()).square().mean()


@pytest.mark.moderate
def test_casts_that_the_proof_has_not() -> None:
    """Breaks if a model of float32 that makes a number in another precision cannot be proven in float64: its program
    has a cast fewer there, and the plan's decisions would be for another one.
    """
    model = Scaled()
    plan = autopar.plan(model, Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")
    assert plan.verify().ok and plan.verify(dtype=torch.float32).ok


@pytest.mark.moderate
def test_what_a_script_draws_next_is_what_it_was() -> None:
    """Breaks if a proof, which one rank may ask for alone, seeds or uses torch's generator."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2))
    state = torch.get_rng_state()
    plan = autopar.plan(model, Mesh({"dp": 2}, hardware="cpu"), example_inputs={"input": torch.zeros(4, 4)})
    assert plan.verify().ok
    assert torch.equal(torch.get_rng_state(), state)


class Remembered(nn.Module):
    """A running mean that code reads and writes as it holds it, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.means = [self.mean]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.means[0].lerp_(y.mean(0), 0.1)
        return (y - self.means[0]).square().mean()


def test_buffers_stay_what_they_are_in_another_dtype() -> None:
    """Breaks if a cast for the proof leaves code that holds a buffer an old one."""
    model, x = Remembered(), torch.randn(4, 8)
    clone, _ = small_model(model, {"x": x}, torch.float64, 0)
    assert clone.means[0] is clone.mean and clone.mean.dtype == torch.float64  # type: ignore
    assert model.mean.dtype == torch.float32
    plan = autopar.plan(model, Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": x}, strategy="ddp")
    plan.verify().raise_on_failure()


def test_what_is_no_number_and_becomes_one_has_changed() -> None:
    """Breaks if a buffer that is none at first counts as unchanged where eager fills it with zeros, or one that stays
    none as changed.
    """
    nan, zero = torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 1.0])
    assert reference._is_as_it_was(nan.clone(), nan) and not reference._is_as_it_was(zero, nan)
    assert not reference._is_as_it_was(nan.double(), nan) and not reference._is_as_it_was(nan[:1], nan)
