"""benchmarks/published/generation.py: rows are whole, and what a row publishes is what is predicted of it."""

from __future__ import annotations

import pytest

from benchmarks.published import generation
from benchmarks.published.generation import METRICS, Prediction, Row, hardware_of, predict

pytestmark = pytest.mark.unit
ROWS, DATA = generation.load()


def row(name: str) -> Row:
    return next(each for each in ROWS if each.id == name)


def test_rows_are_whole() -> None:
    """Breaks if two rows have one name, a source or a model is not used, or nothing says where a number stands."""
    assert len({each.id for each in ROWS}) == len(ROWS)
    assert {each.source for each in ROWS} == {each["id"] for each in DATA["sources"]}
    assert all(each["url"].startswith("https://") and each["quote"] for each in DATA["sources"])
    assert all(each.metric in METRICS and each.batch > 0 and each.new > 1 for each in ROWS)
    assert {id(each.model) for each in ROWS} == {id(each) for each in DATA["models"].values()}


@pytest.mark.parametrize(
    ("name", "published", "speed"),
    [
        ("gpt-fast/7b-tp2", 168.84, 200 / (0.5 + 199 * 0.01) / 168.84),
        ("trtllm/7b-2048-2048", 782, 64 * 2048 / (0.5 + 2047 * 0.01) / 2 / 782),
        ("vllm-ci/70b-a100", 3.99059, 3.99059 / (0.5 + 127 * 0.01)),
        ("trtllm/7b-first-128", 0.016, 0.016 / 0.5),
        ("vllm-sweep/8b-1", 0.0133333, 0.0133333 / 0.01),
    ],
)
def test_a_prediction_is_in_the_unit_of_its_row(name: str, published: float, speed: float) -> None:
    """Breaks if GPUs, the prompt, or which of two numbers is better are mixed up."""
    found = Prediction(name, first_s=0.5, token_s=0.01, collectives_s=0.0)
    assert list(row(name).published.values()) == [published]
    assert found.speed(row(name)) == pytest.approx(speed)


def test_what_a_run_used_is_its_hardware() -> None:
    """Breaks if a run with NCCL's all-reduces gets an engine's, or a limit of power is lost."""
    assert hardware_of(row("vllm-reduce/70b-own")).node.by_peers
    assert not hardware_of(row("vllm-reduce/70b-nccl")).node.by_peers
    assert hardware_of(row("gpt-fast/7b-tp1")).power_limit_w == 330


@pytest.mark.slow
def test_a_row_is_predicted() -> None:
    """Breaks if a token of a small part of a model takes less than its weights do, or the prompt less than a token."""
    found = predict(row("gpt-fast/7b-tp2"), layers=1)
    weights = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 4096 * 32000) / 2
    assert weights / 2.039e12 < found.token_s < 2 * weights / 2.039e12
    assert found.first_s >= found.token_s > found.collectives_s > 0
