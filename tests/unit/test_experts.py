"""benchmarks/experts/{experts,choices}.py: data are whole, words follow from numbers, experts' choices come out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autopar.machine.mesh import Mesh
from autopar.planner.search.space import Space
from benchmarks.experts import choices, experts, priced
from benchmarks.experts.priced import NO_LIMIT, Priced
from benchmarks.experts.situations import SITUATIONS, Situation
from benchmarks.published import rows as published_rows
from benchmarks.published.rows import Row

CHOSEN = Priced("a", "dp=8", "zero2", ("zero2 inside",), 1.0, 0.5, 0.4, 0.0, 0.1, 10e9, 80e9)
BY_NAME = {each.name: each for each in SITUATIONS}


def test_every_row_of_the_table_is_there() -> None:
    """Breaks if a situation of the literature is left out, or its mesh is none of its cluster."""
    starts = (
        "fits one device", "does not fit", "the largest layer", "links of 1 Tb/s", "100–400", "slow links",
        "NVLink inside", "long sequences", "memory short",
    )  # fmt: skip
    assert all(any(each.row.startswith(start) for each in SITUATIONS) for start in starts)
    assert len(BY_NAME) == len(SITUATIONS)
    for each in SITUATIONS:
        hardware = experts.cluster_of(each).hardware
        meshes = [*each.auto, *(other.mesh for other in each.others)]
        assert all(Mesh.parse(text, hardware=hardware).num_devices == each.gpus for text in meshes), each.name
        assert each.auto or each.searched
    assert BY_NAME["memory-short"].lacks


def test_agreement_is_read_off_traits() -> None:
    one = Situation("n", "r", "e", "a", "m", (1, 1), "h100", 8, ("tensor * & pipeline across", "zero3 *"), ("zero2 *",))
    assert one.agrees(("tensor inside", "pipeline across"))
    assert one.agrees(("zero3 across",))
    assert not one.agrees(("tensor inside", "pipeline inside"))
    assert not one.agrees(("zero3 across", "zero2 inside"))
    assert replace(one, wanted=()).agrees(())


def test_parts_make_up_a_step() -> None:
    assert CHOSEN.exposed_s == pytest.approx(0.1) and CHOSEN.step_s == pytest.approx(1.2)
    assert CHOSEN.fits and not replace(CHOSEN, limit_bytes=1e9).fits and not replace(CHOSEN, reason="no").fits


def test_why_names_what_makes_the_difference() -> None:
    """Breaks if a kind is told that hardly counts, or one that counts is not."""
    assert priced.why(CHOSEN, CHOSEN) == "as fast"
    slower = replace(CHOSEN, communication_s=1.1, hidden_s=0.4, compute_s=1.01)
    assert priced.why(CHOSEN, slower) == "+50.8%: exposed communication +600 ms"
    bubble = replace(CHOSEN, waiting_s=1.2, compute_s=0.8)
    assert priced.why(CHOSEN, bubble) == "+83.3%: compute -200 ms, waiting +1.2 s"
    assert priced.why(CHOSEN, replace(CHOSEN, peak_bytes=160 * 2**30)).startswith("needs 160 GiB of 74.5")
    assert priced.why(CHOSEN, Priced("b", "tp=3", reason="heads do not divide")) == "heads do not divide"


@pytest.mark.parametrize(("lies", "mode"), [("RRR", "whole"), ("SSS", "tensor"), ("SRR", "zero2"), ("SSR", "zero3")])
def test_what_becomes_of_a_parameter(lies: str, mode: str) -> None:
    assert priced.mode_of(*lies) == mode


def test_offload_is_arithmetic_and_says_so() -> None:
    """Bytes there and back over 64 GB/s at 62%."""
    whole = replace(CHOSEN, peak_bytes=10e9 + 39.68e9, compute_s=0.7)
    text = experts.offload_note(CHOSEN, whole, Mesh({"dp": 8}).hardware)
    assert "37 GiB for 300 ms" in text and "take 2 s (arithmetic, no plan)" in text


def test_hand_made_configurations_are_whole() -> None:
    """Breaks if a configuration's devices are not those of its machine, or its batch does not divide."""
    found = choices.rows()
    assert {name for name, row in found.items() if isinstance(row, str)} == {"nemo-nemotron4-340b"}
    for name, row in found.items():
        if isinstance(row, Row):
            assert row.microbatches >= 1 and row.gpus == choices.SUBJECTS.get(name, (0, 0, row.gpus))[2]
    assert found["nemo-llama3-70b"].shape.parameters() == pytest.approx(70.6e9, rel=0.01)  # type: ignore[union-attr]


def test_what_a_search_does_not_try() -> None:
    row = next(row for row in published_rows.load(["megatron_a100"]) if (row.microbatch or 0) > 4)
    assert not choices.left_out(row, Space({}))
    assert choices.left_out(replace(row, microbatch=32), Space({}))[0].startswith("32 rows")
    plain = replace(row, microbatch=1, sizes={"pp": 2, "dp": 4, "cp": 1, "tp": 1}, schedule="interleaved")
    assert choices.left_out(replace(plain, stages_per_rank=12), Space({})) == ("12 stages a rank (searched: up to 8)",)
    assert not choices.left_out(replace(plain, stages_per_rank=5), Space({}))
    assert not choices.left_out(replace(plain, stages_per_rank=4), Space({"pp": 2}))
    other = replace(plain, schedule="gpipe", stages_per_rank=None, data_parallel="zero1")
    found = choices.left_out(other, Space({"pp": 1}))
    assert [each.split(" ")[:2] for each in found] == [["schedule", "gpipe"], ["pp=2", "(limit"]]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["experts.py", "choices.py"])
def test_lists_need_no_plan(script: str) -> None:
    path = Path(experts.__file__).parent / script
    done = subprocess.run([sys.executable, path, "--list"], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) >= 10


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence-up-to-heads", "memory-short"])
def test_experts_choices_come_out(name: str) -> None:
    """Breaks if a cost no longer says what experts know. Two blocks, and memory for less than they take."""
    one = BY_NAME[name]
    overrides = {**one.overrides, "num_hidden_layers": 2}
    limit = 26.0 if name == "memory-short" else None
    outcome = experts.measure(replace(one, overrides=overrides, limit_gb=limit, others=one.others[:1]))
    assert outcome.agrees, outcome.chosen
    assert outcome.chosen.fits and outcome.chosen.limit_bytes < NO_LIMIT
    assert experts.of_data(json.loads(json.dumps(asdict(outcome)))) == outcome
    assert name in experts.details(outcome) and outcome.row in experts.table([outcome])
