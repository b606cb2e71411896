"""`auto` against the named strategies: never predicted slower than one that fits in memory."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.models import catalogue
from autopar.strategies import Strategy

CASES = [
    ("mlp", "dp=4,tp=2", "h100", (64, 1), False, None),
    ("cnn", "dp=8", "a100", (64, 1), False, None),
    ("gpt2", "dp=8,tp=4", "h100", (32, 512), False, None),
    ("llama", "tp=2", "cpu", (8, 16), True, None),
    ("mlp", "dp=2,tp=2", "cpu", (8, 1), True, 110_000.0),
]
NAMED: tuple[Strategy, ...] = ("ddp", "zero3", "tensor", {"dp": "zero3", "tp": "tensor"})


@pytest.mark.parametrize(("name", "mesh_text", "hardware", "batch", "tiny", "limit"), CASES)
def test_auto_is_never_predicted_slower(
    name: str, mesh_text: str, hardware: str, batch: tuple[int, int], tiny: bool, limit: float | None
) -> None:
    """Breaks if the solver stops too early, counts a move twice, or forbids what a named strategy does."""
    mesh = Mesh.parse(mesh_text, hardware=hardware)
    loaded = catalogue.load(
        name, tiny=tiny, batch=batch, overrides=None if name in catalogue.PLAIN else _two_layers(name)
    )
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, memory_limit=limit)
    assert limit is None or plan.cost.peak_memory_bytes <= limit
    compared = 0
    for strategy in NAMED:
        try:
            named = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, memory_limit=limit)
        except AutoparError:
            continue
        compared += 1
        assert plan.cost.step_time_s <= named.cost.step_time_s * (1 + 1e-9), named.strategy
    assert compared >= (1 if limit else 2)
    assert 0 <= plan.gap < 0.01


def _two_layers(name: str) -> dict[str, object]:
    return {"num_hidden_layers": 2}
