"""A mixture of experts on four gloo processes follows one process, and sends what was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import mixture, training
from tests.dist.launch import launch

pytestmark = pytest.mark.dist

CASES: list[tuple[tuple[str, ...], tuple[int, ...], Any]] = [
    (("dp",), (4,), "zero3"),
    (("dp", "ep"), (2, 2), {"dp": "zero3", "ep": "expert+sum"}),
    (("ep", "tp"), (2, 2), {"ep": "expert+sum", "tp": "tensor"}),
    (("dp",), (4,), "expert"),
    (("dp", "ep"), (2, 2), {"dp": "ddp", "ep": "zero3+expert"}),
]


def test_training_follows_one_process() -> None:
    """Breaks if an expert's tokens, or a term of the router's gradient, are lost or counted twice: the curves part; if
    more is sent than planned, or other rows than those of tokens whose experts are elsewhere.
    """
    model, batch = mixture.model_and_batch()
    losses, norms = training.train(model, batch, mixture.STEPS)
    away = mixture.rows_away(model, batch, 4)
    for rank, results in enumerate(launch(mixture.train_with_each, 4, CASES, timeout_s=280.0)):
        for (_, sizes, strategy), (found, found_norms, sent, planned, rows) in zip(CASES, results, strict=True):
            where = f"{strategy} on {sizes}"
            assert found == pytest.approx(losses, rel=1e-5), where
            assert found_norms == pytest.approx(norms, rel=1e-4), where
            assert sent == pytest.approx(planned, rel=1e-9), where
            if strategy == "expert":
                assert rows == mixture.bytes_of_rows(away[rank]), where
            else:
                assert bool(rows) == ("zero3+expert" in str(strategy)), where
    assert losses[-1] < losses[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_training_of_other_mixtures_follows_one_process(kind: str) -> None:
    """Breaks if scores made to sum to one, those of a sigmoid that groups of experts limit, or a shared expert's part
    get lost on the way to experts elsewhere, or other rows are sent; where a shared expert runs beside exchanges, if
    these do not wait for each other's messages.
    """
    beside = kind == "DeepseekV3"
    cases = [
        (("dp",), (4,), "expert", kind, beside), (("dp", "ep"), (2, 2), {"dp": "zero3", "ep": "expert"}, kind),
    ]  # fmt: skip
    model, batch = mixture.model_and_batch(kind)
    losses, norms = training.train(model, batch, mixture.STEPS)
    away = mixture.rows_away(model, batch, 4)
    for rank, results in enumerate(launch(mixture.train_with_each, 4, cases, timeout_s=280.0)):
        for (_, _, strategy, *_), (found, found_norms, sent, planned, rows) in zip(cases, results, strict=True):
            assert found == pytest.approx(losses, rel=1e-5), strategy
            assert found_norms == pytest.approx(norms, rel=1e-4), strategy
            assert sent == pytest.approx(planned, rel=1e-9), strategy
            assert strategy != "expert" or rows == mixture.bytes_of_rows(away[rank])
    assert losses[-1] < losses[0]


def test_two_microbatches_at_a_time_follow_one_process() -> None:
    """Breaks if tokens of two microbatches that are on their way together get mixed up, if gradients of one are lost,
    or ranks send in other orders.
    """
    cases = [(("dp",), (4,), "expert"), (("dp", "ep"), (2, 2), {"dp": "zero3", "ep": "expert"})]
    model, batch = mixture.model_and_batch("DeepseekV3")
    losses, norms = training.train(model, batch, mixture.STEPS)
    for results in launch(mixture.train_in_halves, 4, cases, timeout_s=280.0):
        for (_, _, strategy), (found, found_norms) in zip(cases, results, strict=True):
            assert found == pytest.approx(losses, rel=1e-5), strategy
            assert found_norms == pytest.approx(norms, rel=1e-4), strategy
    assert losses[-1] < losses[0]


def test_pairs_in_a_pipeline_follow_one_process() -> None:
    """Breaks if a stage hands one microbatch's values to the other, ranks send in other orders, or a microbatch without
    labels gets into the gradients by way of the one that goes with it.
    """
    model, batch = mixture.model_and_batch("DeepseekV3")
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for each in mixture.steps_of(batch):
        loss = model(**each).loss
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(model(**batch).loss))
    for found, found_norms in launch(mixture.pairs_in_a_pipeline, 4, timeout_s=280.0):
        assert found == pytest.approx(losses, rel=1e-6)  # the loss is float32
        assert found_norms == pytest.approx(norms, rel=1e-5)
