"""benchmarks/published/generation.py: rows are whole, and what a row publishes is what is predicted of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import generation
from benchmarks.published.generation import METRICS, Prediction, Row, hardware_of, predict
from benchmarks.published.runs import machine_of

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
    old, own = hardware_of(row("trtllm/7b-first-128")), machine_of(row("trtllm/7b-first-128").machine)
    assert old.launch_overhead_s == own.launch_overhead_s and old.head_by_head and not old.node.by_peers
    new = hardware_of(row("trtllm-1/h200-1000-1000"))
    assert (new.launch_overhead_s, new.attention_rows, new.head_by_head) == (own.graph_kernel_s, 8, False)


@pytest.mark.moderate
def test_a_run_that_has_a_whole_head_multiplies_by_all_of_it() -> None:
    """Breaks if ranks of such a run are charged for a part of the head, or for all of it beside their part."""
    whole = row("gpt-fast/7b-tp2")
    parted = replace(whole, whole_head=False)
    more_s = predict(whole, layers=1).token_s - predict(parted, layers=1).token_s
    half = 2 * 4096 * 32000 / 2
    assert more_s == pytest.approx(half / hardware_of(whole).memory_bytes_per_s(half), rel=0.06)


@pytest.mark.moderate
def test_prompts_and_tokens_that_go_together_read_weights_once() -> None:
    """Breaks if steps of requests that come and go take less than a token of all, or more than these and the prompts
    that end in one, each by themselves.
    """
    both = replace(row("nim/5000-500-5"), batch=8, prompt=16, new=16)
    apart = predict(replace(both, together=False), layers=1)
    found = predict(both, layers=1)
    assert apart.token_s < found.token_s < apart.token_s + apart.first_s / both.new
    alone = predict(replace(both, batch=1, together=False), layers=1)
    assert found.token_s - apart.token_s < 0.5 * 8 / both.new * alone.first_s


@pytest.mark.slow
def test_a_row_is_predicted() -> None:
    """Breaks if a token of a small part of a model takes less than its weights do, or the prompt less than a token."""
    found = predict(row("gpt-fast/7b-tp2"), layers=1)
    weights = 2 * ((4 * 4096 * 4096 + 3 * 4096 * 11008) / 2 + 4096 * 32000)
    assert weights / 2.039e12 < found.token_s < 2 * weights / 2.039e12
    assert found.first_s >= found.token_s > found.collectives_s > 0
