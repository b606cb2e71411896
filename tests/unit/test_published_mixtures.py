"""benchmarks/published/mixtures.py: rows are whole, prices beside a plan right, published orders kept."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.machine.mesh import Mesh
from autopar.strategies.names import by_name
from benchmarks.published import mixtures
from benchmarks.published.mixtures import Row, copies_of_token, predict, ratios

pytestmark = pytest.mark.unit
ROWS, DATA = mixtures.load()


def row(name: str) -> Row:
    return next(each for each in ROWS if each.id == name)


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.id)
def test_rows_are_whole(one: Row) -> None:
    """Breaks if a row has no speed and no order, an axis without a strategy, or a batch that does not divide."""
    assert one.speed is None or 1 < one.speed < 1e5
    assert (one.speed is None) == bool(one.slower_than) and (not one.slower_than or row(one.slower_than))
    assert one.mesh.keys() == one.strategy.keys() and Mesh(one.mesh).num_devices == one.gpus
    assert all(by_name(name) for axis, name in one.strategy.items() if axis != "pp")
    split = math.prod(size for axis, size in one.mesh.items() if axis not in ("pp", "tp"))
    assert one.global_batch % (one.microbatches * (split if one.slower_than == "" else 1)) == 0
    assert set(one.published) <= {"tokens_per_s", "tokens_per_s_per_gpu", "memory_gib"}


def test_sources_say_what_was_published() -> None:
    """Breaks if a source's numbers are not those that it quotes: the pull request's three rows."""
    assert [row(f"deepspeed/{name}").published["tokens_per_s"] for name in ("zero3", "ep8", "tp2-ep8")] == [
        27941,
        57414,
        33477,
    ]
    assert row("deepspeed/ep8").speed == pytest.approx(3588, abs=1) and row("transformers/ep1").speed == pytest.approx(
        3602, abs=1
    )


# 256 experts on 64 ranks, 8 a token: 4 experts a rank.
@pytest.mark.parametrize(
    ("copies", "experts", "ranks", "count"),
    [("experts", 256, 64, 8.0), ("consecutive", 256, 64, 2.0), ("consecutive", 128, 8, 1.0), ("ranks", 8, 8, 8.0)],
)
def test_copies_of_a_token(copies: str, experts: int, ranks: int, count: float) -> None:
    """Breaks if it is miscounted to how many ranks a token goes."""
    assert copies_of_token(copies, experts, 8, ranks) == pytest.approx(count)


def test_ratios_by_hand() -> None:
    """Breaks if a ratio is turned over, two sources are compared, or a row that was said to be slower is lost."""
    speeds = {
        "deepspeed/zero3": 10.0,
        "deepspeed/ep8": 30.0,
        "automodel/qwen3-30b-8": 5.0,
        "automodel/gpt-oss-20b-8": 6.0,
    }
    (one,) = ratios(ROWS, speeds)
    assert (one.fast, one.slow, one.predicted) == ("deepspeed/ep8", "deepspeed/zero3", 3.0)
    assert one.published == pytest.approx(57414 / 27941) and one.off == pytest.approx(3 * 27941 / 57414 - 1)
    (said,) = ratios(ROWS, {"transformers/ep1": 2.0, "transformers/ep2": 3.0})
    assert said.published is None and said.off is None and not said.is_kept


@pytest.mark.moderate
def test_speeds_of_mixtures_are_near_the_published() -> None:
    """Breaks if exchanges over one node or eight, or products of experts, are priced far from what was measured."""
    for name in ("automodel/qwen3-30b-8", "automodel/gpt-oss-120b-64"):
        found = predict(row(name))
        assert found.tokens_per_s == pytest.approx(row(name).speed, rel=mixtures.NEAR), name


@pytest.mark.moderate
def test_sharing_a_batch_gets_slower_with_the_ranks_that_share() -> None:
    """Breaks if experts over ranks that share a batch are predicted to gain from more of them."""
    names = ("transformers/ep1", "transformers/ep2", "transformers/ep4")
    found = {name: predict(row(name), layers=4).tokens_per_s for name in names}
    assert all(each.is_kept for each in ratios(ROWS, found)) and len(ratios(ROWS, found)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_order_of_deepspeeds_rows_is_kept() -> None:
    """Breaks if ZeRO-3, which gathers every expert, is not slowest, or tensor parallelism beside experts costs
    nothing. The model is cut to 4 of its 20 layers.
    """
    names = ("deepspeed/zero3", "deepspeed/ep8", "deepspeed/tp2-ep8")
    found = {name: predict(row(name), layers=4).tokens_per_s for name in names}
    assert [each.is_kept for each in ratios(ROWS, found)] == [True, True, True]


@pytest.mark.moderate
def test_script_lists_rows_without_planning() -> None:
    """Breaks if the script does not start from its folder's own path."""
    script = Path(mixtures.__file__)
    done = subprocess.run([sys.executable, script, "--list", "--only", "deepspeed/*"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 and "TP2DP8/EP8" in done.stdout
