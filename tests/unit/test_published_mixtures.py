"""benchmarks/published/mixtures.py: rows are whole, prices beside a plan right, published orders kept."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.strategies.names import by_name
from benchmarks.published import mixtures
from benchmarks.published.held import Keeps, Sizes, run_peak_bytes
from benchmarks.published.mixtures import Row, copies_of_token, peaks, predict, ratios

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
def test_ratios_of_peaks_by_hand() -> None:
    """Breaks if a ratio of peaks is turned over, or two models are compared."""
    found = {"deepspeed/zero3": 40.0, "deepspeed/ep8": 20.0, "autoep/mixtral-ep4": 30.0, "autoep/qwen3.5-ep8": 25.0}
    (one,) = peaks(ROWS, found)
    assert (one.fast, one.slow, one.predicted) == ("deepspeed/zero3", "deepspeed/ep8", 2.0)
    assert one.published == pytest.approx(52.23 / 31.11)


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
@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", list(itertools.combinations(("zero3", "ep8", "tp2-ep8"), 2)), ids="-".join)
def test_the_order_of_deepspeeds_rows_is_kept(pair: tuple[str, str]) -> None:
    """Breaks if ZeRO-3, which gathers every expert, is not slowest, or tensor parallelism beside experts costs
    nothing. The model is cut to 2 of its 20 layers.
    """
    found = {f"deepspeed/{name}": predict(row(f"deepspeed/{name}"), layers=2).tokens_per_s for name in pair}
    assert [each.is_kept for each in ratios(ROWS, found)] == [True]


@pytest.mark.moderate
def test_script_lists_rows_without_planning() -> None:
    """Breaks if the script does not start from its folder's own path."""
    script = Path(mixtures.__file__)
    done = subprocess.run([sys.executable, script, "--list", "--only", "deepspeed/*"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 and "TP2DP8/EP8" in done.stdout


# ------------------------------------------------------------------------------------------------- memory


@lru_cache(maxsize=1)
def small() -> Program:
    """Two layers of Mixtral under ZeRO-3, which gathers their experts."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        ids = torch.zeros((4, 16), dtype=torch.int64)
    plan = autopar.plan(
        model, Mesh({"dp": 2}, hardware="h100"), strategy="zero3", precision="bf16", microbatches=2,
        example_inputs={"input_ids": ids, "labels": ids}, rematerialize="none", memory_limit=1e15,
    )  # fmt: skip
    assert plan.program is not None
    return plan.program


def held(**keeps: Any) -> float:
    sizes = Sizes(tokens=16, sharing=1, chosen=2, model=32, expert=64)
    return run_peak_bytes(small(), Keeps(**keeps), sizes, reduced=False, waited=True)


@pytest.mark.moderate
def test_what_a_run_keeps_by_hand() -> None:
    """Breaks if what a run keeps is left out of its peak, counted for one layer alone, or in another dtype."""
    experts = 2 * 4 * 3 * 32 * 64  # of two layers, elements
    parameters = sum(math.prod(each.type.shape) for each in small().variables if each.trainable)
    least = held()
    assert held(buffer=1e6) - least == 2e6
    assert held(weights=True) - least == pytest.approx(parameters, rel=0.01)  # half of them, two bytes each
    assert held(added="float32") - held(added="bfloat16") == pytest.approx(2 * parameters, rel=0.01)
    assert held(views=True) - least == pytest.approx(2 * experts, rel=0.01)
    rows = held(model_rows=1, expert_rows=2) - least
    assert rows == pytest.approx(2 * 16 * 2 * 2 * (32 + 2 * 64), rel=0.01)  # layers, tokens, choices, bytes


@pytest.mark.moderate
def test_kernels_keep_what_they_say() -> None:
    """Breaks if what a module keeps for the backward counts beside what its kernels keep, not instead."""
    without = held(kernels={"self_attn": 0.0})
    assert without < held() and held(kernels={"attn": 0.0}) == held()  # a module's whole name, or its end
    assert held(kernels={"self_attn": 1000.0}) - without == 2 * 16 * 1000


@pytest.mark.parametrize("way", ["transposed", "picked", "itself"])
def test_autograd_keeps_the_memory_of_views(way: str) -> None:
    """Breaks if torch no longer does what rows of ZeRO-3 say: a view of a parameter that is saved keeps its memory when
    the parameter is given another, the parameter itself does not.
    """
    weight, x = torch.nn.Parameter(torch.randn(4, 8, 16)), torch.randn(4, 16, 8)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "transposed": lambda: torch.bmm(x.mT, weight.mT),
        "picked": lambda: torch.nn.functional.linear(x[0].T, weight[1]),
        "itself": lambda: torch.bmm(x, weight),
    }
    x.requires_grad_()
    made = ways[way]()
    kept = weight.data.untyped_storage().data_ptr()
    weight.data = torch.empty(0)
    saved = _saved(made.grad_fn)
    assert (kept in {each.untyped_storage().data_ptr() for each in saved}) == (way != "itself")


def _saved(function: Any) -> list[torch.Tensor]:
    """All tensors that a graph of autograd has saved and that have elements."""
    if function is None:
        return []
    names = [name for name in dir(function) if name.startswith("_saved_")]
    found = [each for name in names if isinstance(each := getattr(function, name), torch.Tensor) and each.numel()]
    return found + [each for above, _ in function.next_functions for each in _saved(above)]
