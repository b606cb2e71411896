"""benchmarks/published/backtest.py: rows are whole, units right, the order of configurations is counted right."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.base.errors import AutoparError
from autopar.machine import profiles
from benchmarks.published import backtest
from benchmarks.published import rows as published_rows
from benchmarks.published import runs as published_runs
from benchmarks.published.backtest import Outcome
from benchmarks.published.rows import FOLDER, Machine, Row, Shape, flops_per_token, tokens_per_s
from benchmarks.published.runs import predict

pytestmark = pytest.mark.unit
ROWS = published_rows.load()
SMALL = Shape("gpt", layers=2, hidden=4, heads=2, kv_heads=2, ffn=16, vocabulary=8, tied=True)


def row(**fields: object) -> Row:
    """A row of two ranks, whose step is 8 sequences of 12 tokens."""
    given: dict[str, object] = {
        "id": "a/b", "source": "a", "citation": "c", "where": "w", "name": "m", "shape": SMALL,
        "machine": Machine("h100", "h"), "precision": "bf16", "sizes": {"pp": 1, "dp": 2, "cp": 1, "tp": 1},
        "data_parallel": "fsdp", "global_batch": 8, "sequence": 12, "published": {"tokens_per_s_per_gpu": 7.0},
    }  # fmt: skip
    return Row(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.id)
def test_rows_are_whole(one: Row) -> None:
    """Breaks if a row lacks a citation, a speed, or sizes that fit each other."""
    assert one.citation.startswith(("https://", "arXiv ")) and one.where
    assert one.microbatches >= 1
    assert 1 < tokens_per_s(one, 1e15) < 1e6
    assert one.shape.hidden % one.shape.heads == 0 and one.shape.heads % one.shape.kv_heads == 0
    assert one.recompute is not None or "recomputation not published: none" in one.assumptions
    assert set(one.published) <= {*published_rows.METRICS, "memory_gib", "memory_gb"}
    assert backtest.describe(one) and published_runs.machine_of(one.machine).network.bandwidth_bytes_per_s > 1e9


def test_files_say_where_they_come_from() -> None:
    """Breaks if a source has no address, or a repository no commit."""
    for path in FOLDER.glob("*.toml"):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        if path.stem == published_rows.CHOICES:
            assert all(each["citation"] and each["id"] for each in (*data["choices"], *data["guidance"]))
            continue
        for source in data["sources"] if path.stem in published_rows.OTHERS else (data["source"],):
            for address in (source["url"], *source.get("also", ())):
                assert "github.com" not in address or re.search(r"/[0-9a-f]{40}/|/(pull|issues)/[0-9]+", address)


def test_choices_multiply_to_their_gpus() -> None:
    """Breaks if the sizes of an expert's configuration are not those of the machine."""
    data = tomllib.loads((FOLDER / "choices.toml").read_text(encoding="utf-8"))
    for each in data["choices"]:
        sizes = each["choice"]
        if {"tp", "pp", "dp"} <= sizes.keys() and isinstance(sizes["tp"], int):
            gpus = sizes["tp"] * sizes["pp"] * sizes["dp"] * sizes.get("cp", 1)
            assert each["machine"].startswith(f"{gpus} "), each["id"]


# What parameter counts the sources print, of the same models (MPT's table, last column; README of Megatron-LM).
@pytest.mark.parametrize(
    ("name", "count", "off"),
    [
        ("mpt/h100-7b-2048-8", 6658859008, 0.001),
        ("mpt/h100-70b-2048-512", 64862437376, 0.001),
        ("megatron_a100/530b", 529.6e9, 0.001),
        ("megatron_h100/462b", 462e9, 0.005),
    ],
)
def test_parameters_are_those_of_the_source(name: str, count: float, off: float) -> None:
    one = next(each for each in ROWS if each.id == name)
    positions = one.sequence if one.shape.architecture == "gpt" else 0
    assert one.shape.parameters(positions) == pytest.approx(count, rel=off)


def test_parameters_by_hand() -> None:
    """2 blocks of 4 matrices 4x4, 2 matrices 4x16, 2 norms; the last norm; 8 rows of 4; 3 positions."""
    assert SMALL.parameters(3) == 2 * (64 + 128 + 8) + 4 + 32 + 12
    gated = Shape("llama", layers=1, hidden=4, heads=4, kv_heads=1, ffn=8, vocabulary=8)
    assert gated.parameters() == (2 * 16 + 2 * 4 + 3 * 32 + 8) + 4 + 2 * 32


# By hand, for one token of SMALL at 12 tokens: h² = 16, s/6h = 1/2, V/16lh = 1/16, V/12lh = 1/12, s/h = 3, V/2lh = 1/2.
@pytest.mark.parametrize(
    ("formula", "flops"),
    [
        ("narayanan", 96 * 2 * 16 * (1 + 1 / 2 + 1 / 16)),
        ("korthikanti", 72 * 2 * 16 * (1 + 1 / 2 + 1 / 12)),
        ("megatron_core", 12 * 2 * 16 * (1 + 1 + 3 + 4 + 1 / 2)),
        ("palm", 6 * 436 + 12 * 2 * 4 * 12),
    ],
)
def test_flops_by_hand(formula: str, flops: float) -> None:
    assert flops_per_token(formula, SMALL, 12) == pytest.approx(flops)


def test_korthikanti_and_megatron_core_agree() -> None:
    """The same count written in two ways, for an MLP of 4h without gate."""
    assert flops_per_token("korthikanti", SMALL, 12) == pytest.approx(flops_per_token("megatron_core", SMALL, 12))


def test_published_units_agree() -> None:
    """Breaks if a metric is converted wrongly: the same speed in four units."""
    assert tokens_per_s(row(), 1.0) == 7.0
    assert tokens_per_s(row(published={"step_s": 8 * 12 / 7 / 2}), 1.0) == pytest.approx(7.0)
    flops = 7 * 72 * 2 * 16 * (1 + 1 / 2 + 1 / 12)
    teraflops = row(published={"tflops_per_s_per_gpu": flops / 1e12}, formula="korthikanti")
    assert tokens_per_s(teraflops, 1.0) == pytest.approx(7.0)
    assert tokens_per_s(row(published={"mfu": 0.5}, formula="korthikanti"), 2 * flops) == pytest.approx(7.0)


# Seconds of 2205.05198, table 5, and the MFU that README.md of Megatron-LM prints for the same runs.
@pytest.mark.parametrize(("name", "seconds"), [("175b", 13.75), ("530b", 37.83), ("1t", 71.49)])
def test_mfu_is_that_of_the_measured_seconds(name: str, seconds: float) -> None:
    one = next(each for each in ROWS if each.id == f"megatron_recompute/{name}-selective")
    timed = replace(one, published={"step_s": seconds})
    assert tokens_per_s(one, 312e12) == pytest.approx(tokens_per_s(timed, 312e12), rel=0.002)


def test_bad_rows_say_what_is_wrong() -> None:
    with pytest.raises(AutoparError, match="no whole number of microbatches"):
        _ = row(microbatch=3).microbatches
    with pytest.raises(AutoparError, match="publishes no speed"):
        tokens_per_s(row(published={}), 1.0)
    with pytest.raises(AutoparError, match="needs a formula"):
        tokens_per_s(row(published={"mfu": 0.5}), 1.0)
    with pytest.raises(AutoparError, match="no FLOP formula 'guess'"):
        flops_per_token("guess", SMALL, 12)
    with pytest.raises(AutoparError, match="no source 'nowhere'"):
        published_rows.load(["nowhere"])
    text = '[source]\nurl = "u"\n[hardware]\n[models]\n[[rows]]\nid = "r"\nmodel = "m"\n'
    with pytest.raises(AutoparError, match=r"damaged \(s: r\)"):
        published_rows.parse(text, "s")


def test_what_is_silent_is_assumed_by_name() -> None:
    found = row(sizes={"pp": 2, "dp": 4, "cp": 2, "tp": 1}, async_tp=True).assumptions
    assert [text.split(":")[0] for text in found] == [
        "microbatch not published", "recomputation not published", "schedule not published",
        "form of context parallelism not published", "async TP", "network not stated",
    ]  # fmt: skip


def test_machine_takes_what_is_stated() -> None:
    """A network of half the profile's wire is half as fast, at the profile's efficiency."""
    profile = profiles.load("h100")
    made = published_runs.machine_of(Machine("h100", "h", network_gbit_per_s=200.0, memory_bytes=96e9))
    assert made.network.bandwidth_bytes_per_s == pytest.approx(profile.network.bandwidth_bytes_per_s / 2)
    assert made.memory_bytes == 96_000_000_000 and made.node == profile.node


def test_order_by_hand() -> None:
    """Five rows, one of another group and one within the noise: 5 pairs, one swapped, one tied."""

    def outcome(name: str, published: float, predicted: float, group: str = "g") -> Outcome:
        return Outcome(name, "s", group, "", published, predicted)

    rows = [outcome("a", 100, 50), outcome("b", 90, 60), outcome("c", 80, 40), outcome("d", 80.5, 50)]
    order = backtest.order_of([*rows, outcome("e", 1, 99, "other")])
    assert (order.pairs, order.swapped, order.tied) == (5, (("a", "b"),), 1)
    assert order.tau == pytest.approx((3 - 1) / 5)


def test_rows_that_calibrate_are_no_test() -> None:
    """Breaks if a row that calibrates, or one with assumed settings, counts among the tests."""
    kept = Outcome("a", "s", "g", "", 10.0, 11.0)
    fitted = replace(kept, id="b", predicted=100.0, part="calibrates")
    assumed = replace(kept, id="c", predicted=5.0, part="incomplete", why="so it is")
    assert backtest.of_part([kept, fitted, assumed], "test") == [kept]
    shown = backtest.summary([kept, fitted, assumed])
    assert shown.index("| s | 1 | 10.0% | 10.0% | +10.0% |") < shown.index("| s | 1 | 50.0% |") < shown.index("900.0%")
    text = backtest.report([kept, fitted, assumed], None)
    assert "Rows that calibrate the cost model: b." in text
    assert "- b +900%: not explained\n- c -50%: so it is" in text


def test_calibrating_rows_are_few_and_of_one_node() -> None:
    """Breaks if more rows calibrate than docs/cost.md says, or rows of several nodes do."""
    fitted = [one for one in ROWS if one.calibrates]
    assert len(fitted) == 5 and all(one.gpus == 8 and one.is_whole for one in fitted)


def test_unfused_attention_by_hand() -> None:
    """A forward of one pair of head size 64: two products of all pairs, 13 bytes; half the pairs are counted."""
    h100 = profiles.load("h100")
    fast = replace(h100, sustained=1.0, memory_bandwidth_bytes_per_s=1e30)
    forward = published_runs.unfused_attention(64, fast, "bf16", "none")["forward"]
    assert forward.fraction(1e9, 100, 64, False) == pytest.approx(fast.matmul["bf16"].efficiency / 2, rel=1e-5)
    curves = published_runs.unfused_attention(64, h100, "bf16", "none")
    again = published_runs.unfused_attention(64, h100, "bf16", "attention")
    seconds = [5 / curve["backward"].fraction(1e9, 100, 64, False) for curve in (curves, again)]
    assert seconds[1] - seconds[0] == pytest.approx(2 / curves["forward"].fraction(1e9, 100, 64, False), rel=1e-4)


def test_hardware_of_a_row() -> None:
    """Breaks if what a run used does not reach its profile."""
    profile = profiles.load("h100")
    old = row(
        attention="flash1",
        compiled=True,
        kernels=(),
        optimizer="fused",
        machine=Machine("h100", "h", power_limit_w=500.0),
    )
    made = published_runs.hardware_of(old)
    assert (made.compiled, made.fused_kernels, made.optimizer_passes, made.power_limit_w) == (True, (), 7, 500.0)
    assert not made.plain_attention
    fractions = [each.attention["forward"].fraction(1e6, 2048, 128, False) for each in (profile, made)]
    assert fractions[0] / fractions[1] == pytest.approx(1.8)
    flash = published_runs.hardware_of(row(kernels=published_rows.FUSED_KERNELS)).attention
    assert flash == {phase: profile.attention[phase] for phase in ("forward", "backward")}


def test_names_of_strategies() -> None:
    """Breaks if a row is planned as something else than the source did."""
    one = next(each for each in ROWS if each.id == "megatron_a100/145b")
    assert list(published_runs.axes_of(one).items()) == [("pp", 8), ("dp", 24), ("tp", 8)]
    strategy = published_runs.strategy_of(one)
    assert (strategy["pp"].schedule, strategy["pp"].stages_per_rank) == ("interleaved", 2)
    assert (strategy["dp"], strategy["tp"]) == ("ddp", "tensor")


@pytest.mark.slow
def test_small_row_is_planned() -> None:
    """Breaks if a row does not become a plan: two blocks, a small model, the machine of the row."""
    pytest.importorskip("transformers")
    shape = Shape("llama", layers=2, hidden=64, heads=8, kv_heads=4, ffn=128, vocabulary=256)
    small = row(shape=shape, sizes={"pp": 1, "dp": 2, "cp": 1, "tp": 2}, sequence=16, sequence_parallel=True)
    found = {mode: predict(replace(small, microbatch=2, recompute=mode)) for mode in published_rows.RECOMPUTE}
    assert all(each.tokens_per_s > 0 and each.gib > 0 for each in found.values())
    assert found["products"].beside_s > 0 < found["whole"].beside_s and found["full"].beside_s == 0
    assert found["whole"].tokens_per_s < found["full"].tokens_per_s < found["none"].tokens_per_s
    mean = (1 / found["none"].tokens_per_s + 1 / found["full"].tokens_per_s) / 2
    assert 1 / found["blocks"].tokens_per_s == pytest.approx(mean)


@pytest.mark.moderate
def test_script_lists_rows_without_planning() -> None:
    """Breaks if fp8 rows are planned, or their reason is not said."""
    script = str(Path(backtest.__file__))
    done = subprocess.run(
        [sys.executable, script, "--list", "--rows", "nemo"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "autopar has no fp8" in done.stdout and "not planned |" not in done.stdout
