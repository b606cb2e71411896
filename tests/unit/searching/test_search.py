"""`autopar.search`: estimates are what plans then say, formulas what schedules then take."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.hardware import Link
from autopar.models import catalogue
from autopar.pipelining import schedules
from autopar.pipelining.costs import StageCost
from autopar.pipelining.simulate import peak_bytes, simulate
from autopar.plots import draw_times
from autopar.searching.candidate import divisors, factorizations
from autopar.searching.cluster import Cluster
from autopar.searching.formulas import compiled
from autopar.searching.result import SearchResult


def test_clusters() -> None:
    assert (Cluster.parse("h100x64").nodes, Cluster.parse("h100x64").num_devices) == (8, 64)
    assert Cluster.parse("h100x4").hardware.devices_per_node == 4
    assert Cluster.parse("h100:ethernet-25x2x4").num_devices == 8
    for text in ("h100", "h100x0", "h100x12", "h100x2x0", "nothingx8"):
        with pytest.raises(AutoparError):
            Cluster.parse(text)


def test_factorizations() -> None:
    found = list(factorizations(12, {"pp": 3, "dp": 12, "tp": 2}))
    assert all(math.prod(each.values()) == 12 and each["pp"] <= 3 and each["tp"] <= 2 for each in found)
    assert {(each["pp"], each["dp"], each["tp"]) for each in found} == {
        (1, 12, 1), (1, 6, 2), (2, 6, 1), (2, 3, 2), (3, 4, 1), (3, 2, 2)
    }  # fmt: skip
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
def test_formulas_are_what_is_simulated(name: str, v: int, p: int, m: int) -> None:
    """Even stages, messages that take no time: the closed forms of the literature. Zero bubble's is a lower bound."""
    cost = StageCost(1.0, 2.0, 1.0, 1.0, saved_bytes=10.0, input_bytes=4.0, kept_bytes=5.0, static_bytes=100.0,
        forward_working_bytes=3.0, backward_working_bytes=3.0)  # fmt: skip
    schedule = schedules.build(name, p, m, v)
    seconds_of, bytes_of = compiled(name)
    predicted = seconds_of(*map(float, (p, v, m, v * 1.0, v * 2.0, v * 1.0, v * 1.0, p * v * 3.0, 0.0, 0.0, 0.0)))
    simulated = simulate(schedule, [cost] * (p * v)).makespan_s
    assert predicted <= simulated * (1 + 1e-9)
    assert predicted == pytest.approx(simulated, rel=0.12 if name == "zero_bubble" else 1e-9)
    ranks = np.arange(p)
    sizes = bytes_of(p, v, m, ranks, v * 100.0, v * 10.0, 11.0, 3.0)
    assert list(sizes) == pytest.approx(peak_bytes(schedule, [cost] * (p * v)), rel=0.05)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_slow_messages_cost_what_is_simulated(name: str, v: int, p: int) -> None:
    """Breaks if a message is thought to cost where a pipeline fills alone: with slow links it sets the pace."""
    m = 8 * p
    cost = StageCost(1.0 / v, 2.0 / v, 1.0 / v, 1.0 / v, forward_bytes=1.0, backward_bytes=1.0)
    schedule = schedules.build(name, p, m, v)
    for seconds in (0.1, 0.5, 1.0, 4.0):
        formula = compiled(name)[0](*map(float, (p, v, m, 1.0, 2.0, 1.0, 1.0, p * 3.0, seconds, 0.0, 0.0)))
        simulated = simulate(schedule, [cost] * (p * v), Link(1 / seconds, 0.0)).makespan_s
        assert formula == pytest.approx(simulated, rel=0.14 if name == "zero_bubble" else 0.12), seconds


@lru_cache(maxsize=1)
def found() -> SearchResult:
    loaded = catalogue.load("llama", tiny=True, batch=(16, 64), device="meta", overrides={"num_hidden_layers": 4})
    return autopar.search(loaded.model, "h100x8", example_inputs=loaded.batch, top=2)


@pytest.mark.slow
def test_estimates_are_what_plans_say() -> None:
    result = found()
    assert len(result) == 2 and result[0].cost.step_time_s <= result[1].cost.step_time_s
    assert result.off_by < 0.15
    for candidate, plan in result.planned:
        assert plan.mesh.num_devices == 8
        assert plan.interface.microbatches == candidate.point.microbatches
        assert plan.rematerialize == candidate.point.rematerialize
    assert {each.point.pp for each in result.candidates} >= {1, 2, 4}
    assert {each.point.tp for each in result.candidates} >= {1, 2, 4}
    frontier = result.frontier
    assert all(a.step_s <= b.step_s and a.peak_bytes > b.peak_bytes for a, b in itertools.pairwise(frontier))
    assert "tokens/s/device" in str(result) and result.to_data()["estimated"] == len(result.candidates)


@pytest.mark.slow
def test_one_microbatch_holds_one_blocks_gradients_unreduced() -> None:
    """Breaks if `zero3` is thought to hold whole gradients where they are reduced block by block."""
    wide = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
    loaded = catalogue.load("llama", tiny=True, batch=(8, 64), device="meta", overrides=wide)
    limits = {"pp": 1, "cp": 1, "tp": 1}
    result = autopar.search(loaded.model, "h100x8", example_inputs=loaded.batch, limits=limits, top=1)
    zero3 = next(each for each in result.candidates if each.point.data == "zero3" and each.point.microbatches == 1)
    mesh = autopar.Mesh({"dp": 8}, hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="zero3", precision="bf16")
    assert zero3.peak_bytes == pytest.approx(plan.cost.peak_memory_bytes, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_an_odd_batch_is_searched(batch: int) -> None:
    """Breaks if one long sequence, which only cp and tp can split, has no points."""
    loaded = catalogue.load("llama", tiny=True, batch=(batch, 64), device="meta")
    result = autopar.search(loaded.model, "h100x4", example_inputs=loaded.batch, limits={"pp": 1}, top=2)
    assert {(each.point.cp, each.point.tp) for each in result.candidates} == {(4, 1), (2, 2), (1, 4)}
    assert result.off_by < 0.2


@pytest.mark.slow
def test_frontier_is_drawn(tmp_path: Path) -> None:
    path = found().plot(tmp_path / "frontier.svg")
    assert "GiB" in path.read_text() or path.stat().st_size > 10_000
    with pytest.raises(AutoparError):
        found().plot(tmp_path / "nowhere" / "frontier.svg")


@pytest.mark.slow
def test_nothing_fits() -> None:
    loaded = catalogue.load("llama", tiny=True, batch=(8, 32), device="meta")
    with pytest.raises(AutoparError, match="the least of"):
        autopar.search(loaded.model, "h100x2", example_inputs=loaded.batch, memory_limit=1e3)


def test_times_are_drawn(tmp_path: Path) -> None:
    rows = [("one", {"capture": 1.0, "place": 2.0}), ("two", {"capture": 1.5, "tiny": 0.001})]
    assert draw_times(rows, tmp_path / "times.png").stat().st_size > 5_000
