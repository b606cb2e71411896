"""Recurrent layers: an operator for each layer and direction, whose rows split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan

TIME, WIDTH, HIDDEN = 7, 6, 8


class Tagger(nn.Module):
    """Labels every step, and has a term on the last states; the first ones are computed where `states` says so."""

    def __init__(self, kind: str, states: bool = False, **options: Any) -> None:
        super().__init__()
        self.batch_first = options.get("batch_first", False)
        width = options.get("proj_size", HIDDEN)
        self.rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        self.recurrent = getattr(nn, kind)(WIDTH, HIDDEN, **options)
        self.first = nn.Linear(WIDTH, self.rows * HIDDEN) if states else None
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        given: list[Any] = []
        if self.first is not None:
            h = self.first(x[:, 0]).unflatten(-1, (self.rows, HIDDEN)).transpose(0, 1)
            given = [(h, h.tanh()) if isinstance(self.recurrent, nn.LSTM) else h]
        y, last = self.recurrent(x if self.batch_first else x.transpose(0, 1), *given)
        logits = self.head(y if self.batch_first else y.transpose(0, 1))
        term = sum(each.pow(2).mean() for each in (last if isinstance(last, tuple) else (last,)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + term


def planned(model: nn.Module, strategy: str = "ddp", mesh: str = "dp=2") -> Plan:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, TIME, WIDTH), "labels": torch.randint(0, 3, (4, TIME))}
    return autopar.plan(model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy)


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.3}),
    ("LSTM", {"states": True, "num_layers": 2}),
    ("GRU", {"bias": False, "bidirectional": True, "num_layers": 2}),
    ("GRU", {"states": True, "batch_first": True, "bidirectional": True}),
    ("RNN", {"num_layers": 2, "dropout": 0.5}),
    ("RNN", {"nonlinearity": "relu", "states": True}),
]


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), MODELS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_layers_and_directions(kind: str, options: dict[str, Any]) -> None:
    """Breaks if a direction, a layer's weights, dropout between layers or a last state is another one's."""
    plan = planned(Tagger(kind, **options))
    assert plan.verify().ok and plan.source is not None
    name = "lstm" if kind == "LSTM" else "rnn"
    assert f"ops.{name}(" in plan.source and f"ops.{name}_grad(" in plan.source
    assert not any("all rows of the batch" in note for note in plan.notes)


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "mesh"), [("zero3", "dp=2"), ("auto", "dp=2,tp=2"), ("tensor", "tp=2")])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_under_other_strategies(kind: str, strategy: str, mesh: str) -> None:
    """Breaks if a hidden state is split that every step meets whole, or gates are."""
    assert planned(Tagger(kind, num_layers=2), strategy, mesh).verify().ok


@pytest.mark.moderate
def test_what_is_evaluated_has_no_dropout() -> None:
    """Breaks if dropout between layers stays in a model that is evaluated."""
    assert planned(Tagger("LSTM", num_layers=2, dropout=0.5).eval()).verify().ok


@pytest.mark.moderate
def test_a_projected_state_is_left_to_torch() -> None:
    """Breaks if five weights of a layer are taken for four."""
    plan = planned(Tagger("LSTM", proj_size=4))
    assert plan.verify().ok and plan.source is not None and "ops.lstm(" not in plan.source


@pytest.mark.moderate
def test_one_sequence_without_a_batch() -> None:
    """Breaks if a layer's input of two dims is taken for one of three."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(WIDTH, HIDDEN), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            y, _ = self.gru(self.head(x)[0])
            return y.pow(2).mean()

    assert planned(Alone(), "zero3").verify().ok
