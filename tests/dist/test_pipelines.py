"""autopar.compile on a mesh with an axis pp: unmodified models, real gloo processes."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import pipelining
from tests.dist.launch import ChildError, launch

pytestmark = pytest.mark.dist

DEEP, WIDE, DATA = {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}
F32, F64 = "float32", "float64"
CASES: dict[str, list[pipelining.Case]] = {
    "llama": [
        (DEEP, {"pp": "pipeline(zero_bubble)"}, 8, F64),
        (DATA, {"pp": "pipeline(interleaved)", "dp": "zero3"}, 4, F64),
        (WIDE, {"pp": "pipeline(gpipe)", "tp": "tensor+sequence"}, 4, F64),
        (DATA, {"pp": "pipeline(greedy)", "dp": "zero2"}, 4, F64),
    ],
    "gpt2": [
        (DEEP, {"pp": "pipeline(1f1b)"}, 8, F64),
        (DATA, {"pp": "pipeline(zbv)", "dp": "zero2"}, 4, F64),
        (WIDE, {"pp": "pipeline(dualpipev)", "tp": "tensor+sequence"}, 8, F64),
        (DATA, {"pp": "pipeline(zero_bubble)", "dp": "zero3"}, 2, F32),
    ],
    "t5": [
        (DEEP, {"pp": "pipeline(dualpipev)"}, 8, F64),
        (DATA, {"pp": "pipeline(1f1b)", "dp": "zero2"}, 4, F64),
        (WIDE, {"pp": "pipeline(zero_bubble)", "tp": "tensor"}, 4, F64),
    ],
    "gemma2": [
        (DEEP, {"pp": "pipeline(zbv)"}, 8, F64),
        (WIDE, {"pp": "pipeline(interleaved)", "tp": "tensor+sequence"}, 4, F64),
        (DATA, {"pp": "pipeline", "dp": "auto"}, 4, F32),
    ],
}
TOLERANCE = {F32: (2e-5, 2e-4), F64: (1e-11, 1e-10)}
"""Relative, of losses and gradient norms after ten steps of AdamW."""


@lru_cache(maxsize=8)
def one_process(name: str, dtype: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the eager model."""
    return pipelining.train_eager(name, getattr(torch, dtype))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_training_follows_one_process(name: str) -> None:
    """A microbatch weighed wrongly, a gradient lost between stages, a tied weight updated apart: the curves part."""
    by_rank = launch(pipelining.train_cases, 4, name, CASES[name], timeout_s=280.0)
    for number, case in enumerate(CASES[name]):
        ranks, where = [results[number] for results in by_rank], f"{name} {case}"
        losses, norms = one_process(name, case[3])
        loss_tolerance, norm_tolerance = TOLERANCE[case[3]]
        said = next(rank["said"] for rank in ranks if rank["said"] is not None)
        tied: dict[tuple[str, int], str] = {}
        for rank in ranks:
            assert rank["losses"] == pytest.approx(losses, rel=loss_tolerance), where
            assert rank["norms"] == pytest.approx(norms, rel=norm_tolerance), where
            assert rank["sent"] == pytest.approx(said[rank["place"]], rel=1e-12), where
            assert rank["sent"]["send", "pp"] > 0
            assert sorted(rank["held"]) == rank["states"] == rank["own"], where
            for parameter, bits in rank["held"].items():
                assert tied.setdefault((parameter, rank["inner"]), bits) == bits, (where, parameter)
        assert losses[-1] < losses[0]
        held = [parameter for parameter, inner in tied if inner == 0]
        model, _ = pipelining.model_and_batch(name, torch.float32)
        assert sorted(held) == sorted(parameter for parameter, _ in model.named_parameters()), where
        assert len({tuple(rank["own"]) for rank in ranks}) == case[0]["pp"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small GPT-2 as safetensors."""
    folder = tmp_path_factory.mktemp("weights")
    model, _ = pipelining.model_and_batch("gpt2", torch.float64, pipelining.GPT2)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def test_a_checkpoint_moves_between_meshes(stored: Path, tmp_path: Path) -> None:
    """Parameters or states of a stage missing in a checkpoint, or read for another one, change the next step."""
    saved = launch(pipelining.save_on_two_stages, 4, str(stored), str(tmp_path), timeout_s=120.0)
    loaded = launch(pipelining.load_elsewhere, 4, str(tmp_path), timeout_s=120.0)
    everything: dict[str, Any] = {}
    for rank in saved:
        everything |= rank["held"]
    assert {name for rank in saved for name in rank["names"]} >= {"transformer.wte.weight", "lm_head.weight"}
    for rank in loaded[1:3]:  # the first rank's list of parameters names none of theirs
        assert "lost its options betas" in rank[0]["refused"]
    for mesh in range(2):
        names = set()
        for rank in loaded:
            names |= set(rank[mesh]["held"])
            for name, value in rank[mesh]["held"].items():
                assert torch.equal(value, everything[name]), name
            assert rank[mesh]["loss"] == pytest.approx(saved[0]["losses"][-1], rel=1e-12)
        assert names == set(everything)
    model, batch = pipelining.model_and_batch("gpt2", torch.float64, pipelining.GPT2)
    with pipelining.casts(torch.float64):
        first = float(model(**batch).loss.detach())
    assert saved[0]["losses"][0] == pytest.approx(first, rel=1e-12)


def test_fresh_weights_do_not_depend_on_the_stages() -> None:
    """A rank that skips what other stages hold draws other numbers."""
    known: dict[str, torch.Tensor] = {}
    for rank in launch(pipelining.fresh_weights, 4, timeout_s=120.0):
        for held in rank:
            for name, value in held.items():
                assert torch.equal(known.setdefault(name, value), value), name
    model, _ = pipelining.model_and_batch("gpt2", torch.float64, pipelining.GPT2)
    assert set(known) == {name for name, _ in model.named_parameters()}


def test_forwards_alone_other_batches_and_loaders() -> None:
    """An evaluation that waits for gradients, or whose logits only some ranks have; another shape on other stages, rows
    that a loader cuts otherwise.
    """
    model, batch = pipelining.model_and_batch("gpt2", torch.float64, pipelining.GPT2)
    short = {key: value[:, :8] for key, value in batch.items()}
    with pipelining.casts(torch.float64), torch.no_grad():
        output, brief = model(**batch), float(model(**short).loss)
    loss = float(output.loss)
    found = launch(pipelining.evaluate, 4, timeout_s=180.0)
    for rank in found:
        assert "Call compiled.train_step(**batch)" in rank["refused"]
        expected = {"train": loss, "eval": loss, "train short": brief, "eval short": brief, "eval alone": loss}
        for key, value in expected.items():
            assert rank[key] == pytest.approx(value, rel=1e-12), key
        assert rank["cut"] and rank["loaded"] == pytest.approx([loss], rel=1e-12)
        torch.testing.assert_close(rank["logits"], output.logits.double())
        assert rank["chosen"] == output.logits[:, -1].argmax(-1).tolist()


def test_a_recorded_run_lies_beside_the_predicted_one(tmp_path: Path) -> None:
    """A trace that lacks ranks, steps or actions, or mixes those of two pipelines."""
    for text in launch(pipelining.record, 4, str(tmp_path / "run.perfetto.json"), timeout_s=120.0):
        assert "no step ran" in text
    events = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name for name in names.values() if "(" in name} == {
        "predicted: rank 0 (mesh 0-1)", "predicted: rank 1 (mesh 2-3)"
    }  # fmt: skip
    names = {pid: name.partition(" (")[0] for pid, name in names.items()}
    groups = ["predicted", *(f"measured dp={dp}, step {step}" for dp in range(2) for step in range(2))]
    assert sorted(names.values()) == sorted(f"{group}: rank {rank}" for group in groups for rank in range(2))
    actions: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] not in ("RECV_F", "RECV_B"):
            actions.setdefault(names[event["pid"]], set()).update(event["name"].strip("()").split(";"))
    for rank in range(2):
        own = {f"{stage}{kind}" for stage in ((0, 3) if rank == 0 else (1, 2)) for kind in ("UNSHARD", "REDUCE_GRAD")}
        for group in groups:
            found = actions[f"{group}: rank {rank}"]
            assert own <= found
            assert {text for text in found if "F" in text and "S" not in text} == {
                f"{stage}F{i}" for stage in ((0, 3) if rank == 0 else (1, 2)) for i in range(4)
            }


def test_plans_programs_and_schedules_of_ones_own(tmp_path: Path) -> None:
    """A saved plan cut otherwise, an edit that does not run, a schedule that hangs rather than being refused."""
    for rank in launch(pipelining.planned_elsewhere, 4, str(tmp_path), timeout_s=180.0, gives_up=True):
        assert rank["loaded"] == rank["fresh"] == pytest.approx(rank["mine.csv"], rel=1e-12)
        assert rank["edited"] == pytest.approx(2 * rank["fresh"], rel=1e-12)
        assert "rank 0 stands at" in rank["circle.csv"] and "rank 1 stands at" in rank["circle.csv"]


def test_ranks_that_disagree_or_sleep_are_named() -> None:
    """A wait without an end, or an error that does not say for whom, or at which action, one waited."""
    found = launch(pipelining.disagree, 4, timeout_s=100.0, gives_up=True)
    for number, rank in enumerate(found):
        assert rank["timeout_s"] == 100.0
        assert "the values of the inputs differ on ranks 1, 2, 3 from rank 0's (input_ids)" in rank["batches"]
        if number != 2:
            assert rank["waited_s"] < 6
    assert "rank 0 waited 2 s for rank 2 to send (0RECV_B0)" in found[0]["sleeps"]
    assert "rank 3" in found[3]["sleeps"] and "rank 2" in found[3]["sleeps"]
    assert "rank 1" in found[1]["sleeps"] and "waited 2 s" in found[1]["sleeps"] + found[3]["sleeps"]


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """The others would wait for it until somebody ends the job."""
    with pytest.raises(ChildError, match="rank 3: died with exit code 3"):
        launch(pipelining.die, 4, str(tmp_path), timeout_s=100.0)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert "rank 3" in texts[1] and "0RECV_B0" in texts[1]
    assert all("rank" in text and text != "no error" for text in texts)
