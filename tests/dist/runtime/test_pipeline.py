from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import ChildError, launch
from tests.dist.runtime.pipeline_work import (
    eager_evaluations,
    evaluate,
    fresh_weights,
    load,
    load_shards,
    misuse,
    nothing_to_train,
    recorded,
    save,
    step_seeds,
    train_chain,
    train_eager,
    train_in_a_circle,
    train_in_other_orders,
    train_other_batches,
    train_other_programs,
    train_other_schedules,
    train_out_of_order,
    train_with_a_rank_in_the_text,
    train_with_one_rank_gone,
    views,
)
from tests.unit.runtime.pipelines import chain_batch, make_chain, run_chain, schedule_of

pytestmark = pytest.mark.dist

RUNS: list[tuple[str, dict[str, int], int, bool, bool]] = [
    ("gpipe", {"pp": 4}, 4, False, False),
    ("1f1b", {"pp": 4}, 8, False, True),
    ("1f1b", {"pp": 2, "dp": 2}, 4, True, False),
    ("interleaved", {"pp": 2, "dp": 2}, 4, False, True),
    ("zero_bubble", {"dp": 2, "pp": 2}, 8, True, False),
    ("zbv", {"pp": 4}, 4, False, False),
    ("dualpipev", {"pp": 2, "dp": 2}, 8, True, False),
]


@pytest.mark.parametrize(("name", "sizes", "num", "zero", "lazy"), RUNS)
def test_training_equals_one_process(name: str, sizes: dict[str, int], num: int, zero: bool, lazy: bool) -> None:
    """Breaks when a real backend, an optimizer on a part of the parameters, or clipping gives other numbers."""
    schedule = schedule_of(name, sizes["pp"], num)
    expected = train_eager(schedule.num_stages + 1, num, sizes.get("dp", 1))
    found = launch(train_chain, 4, name, sizes, num, zero, lazy)
    for rank in found:
        for key in ("losses", "norms", "numbers", "seen"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-9), key
    for key in ("logits", "first"):
        made = [rank[key] for rank in found if rank[key][0] is not None]
        assert len(made) == 4 // sizes["pp"]
        torch.testing.assert_close(made[0], expected[key])
    weights: dict[str, Any] = {}
    for rank in found:
        assert "unused" in rank["weights"]
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=1e-9, atol=1e-12)
            if name in weights:
                assert torch.equal(weights[name], value)  # tied copies stay equal bit by bit
            weights[name] = value
    assert set(weights) == set(expected["weights"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("work", "num_ranks", "message"),
    [
        (train_in_a_circle, 2, r"rank 0 waited 1\.5 s for rank 1 to send \(0RECV_B0\)"),
        (
            train_with_one_rank_gone,
            2,
            r"rank 0 (waited 1\.5 s for rank 1 to begin a step|lost rank 1 at the beginning)",
        ),
        (
            train_in_other_orders,
            2,
            r"ranks 0 and 1 would exchange different messages \(message 0 of the step\).*1F0.*1F1",
        ),
        (train_out_of_order, 2, r"rank 0: .*rank 1 cannot run its part: the pipeline schedule runs 1F0 before what it"),
        (train_other_schedules, 2, r"ranks 0 and 1 run different pipeline schedules"),
        (train_other_programs, 2, r"ranks 0 and 1 run different generated programs"),
        (train_other_batches, 2, r"the values of the inputs differ on rank 1 from rank 0's \(ids"),
        (
            train_with_a_rank_in_the_text,
            4,
            r"cannot run its part: the program decides by the number of its rank \(line",
        ),
    ],
)
def test_ranks_that_disagree_or_wait_in_a_circle_say_so(work: Any, num_ranks: int, message: str) -> None:
    """Breaks when a wrong order, another text, batch or schedule hangs, or mixes up tensors in silence."""
    with pytest.raises(ChildError, match=f"(?s){message}"):
        launch(work, num_ranks, timeout_s=40)


def test_backward_and_absent_parameters_are_told() -> None:
    """Breaks when loss.backward() of a pipeline hangs or does nothing, or None stands for a parameter in silence."""
    first, second = launch(misuse, 2)
    for found in (first, second):
        assert "Call compiled.train_step(**batch)" in found["backward"] and found["grads"] == []
    assert "whose stage does not make it" in first["logits"] and "train_step" in second["logits"]
    assert "the stages that use it run on pipeline rank 0" in second["absent"]
    assert "blocks.0.weight is not on this rank" in second["absent"] and first["shape"] == (4, 4)


def test_evaluation_runs_forwards_only() -> None:
    """Breaks when an evaluation waits for gradients, or computes other outputs than the model on some rank."""
    expected = eager_evaluations()
    for found in launch(evaluate, 4):
        for key in ("loss", "number", "again", "seen"):
            torch.testing.assert_close(torch.as_tensor(found[key]), torch.as_tensor(expected[key]))
        for key in ("logits", "first"):  # both are made on the first rank: a V ends where it begins
            torch.testing.assert_close(found[key], expected[key])


def test_checkpoints_of_all_ranks_are_one(tmp_path: Path) -> None:
    """Breaks when a rank's parameters or states are missing in a checkpoint, or come back on other ranks."""
    from safetensors.torch import save_file

    model = make_chain(3)
    stored = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(stored, tmp_path / "model.safetensors")
    before = launch(save, 4, str(tmp_path / "checkpoint"), str(tmp_path))
    after = launch(load, 4, str(tmp_path / "checkpoint"))
    for rank in range(4):
        assert list(after[rank]) == list(before[rank]) and "table.weight average" in after[rank]
        for name, value in before[rank].items():
            assert torch.equal(after[rank][name], value), name
    assert "blocks.0.weight" in before[0] and "blocks.0.weight" not in before[2]
    first = run_chain(model, chain_batch(16), 4, 2, seed=next(step_seeds()))
    first["loss"].backward()
    torch.optim.AdamW(model.parameters(), lr=0.05).step()
    torch.testing.assert_close(before[2]["blocks.2.weight"], model.blocks[2].weight.detach())


def test_fresh_weights_are_those_without_a_pipeline() -> None:
    """Breaks when what a rank does not hold changes the numbers that it draws."""
    with_one, with_two = launch(fresh_weights, 2, {"pp": 2}), launch(fresh_weights, 4, {"pp": 2, "dp": 2})
    plain = launch(fresh_weights, 2, {"dp": 2})
    assert set(with_one[0]) | set(with_one[1]) >= {"table.weight", "head.weight", "blocks.2.bias", "seen"}
    assert not {"blocks.2.weight"} & set(with_one[0])
    known: dict[str, torch.Tensor] = {}
    assert set(plain[0]) == set(with_one[0]) | set(with_one[1])
    for found in (*plain, *with_one, *with_two):
        for name, value in found.items():
            assert torch.equal(known.setdefault(name, value), value), name


def test_a_loader_gives_all_stages_the_same_rows() -> None:
    """Breaks when ranks of another stage get other samples, or DTensors of a stage's mesh are cut wrongly."""
    for losses in launch(load_shards, 4):
        assert losses[:2] == pytest.approx(losses[2:], rel=1e-12)


def test_a_rank_without_parameters_takes_part() -> None:
    """Breaks when an optimizer refuses an empty list, or clipping waits for a rank that has nothing."""
    found = launch(nothing_to_train, 3)
    assert [each[0] for each in found] == [5, 1, 4] and found[1][1] == []
    assert found[0][2:] == found[1][2:] == found[2][2:]
    assert found[0][2] != found[0][3]


def test_actions_are_recorded() -> None:
    """Breaks when a recorded step lacks actions, or counts the wait for a message as compute."""
    for rank, actions in enumerate(launch(recorded, 2)):
        texts = [action for _, action, _, _ in actions]
        stage = rank
        wanted = {f"{stage}{kind}{i}" for kind in "FB" for i in range(4)} | {f"{stage}UNSHARD", f"{stage}REDUCE_GRAD"}
        wanted |= {f"1RECV_F{i}" for i in range(4)} if rank else {f"0RECV_B{i}" for i in range(4)}
        assert wanted <= set(texts)
        assert all(each[0] == rank and 0 <= each[2] <= each[3] for each in actions)
        for (_, _, _, end), (_, _, start, _) in pairwise(actions):
            assert end <= start


def test_views_and_messages_of_real_ranks() -> None:
    """Breaks when a stage's mesh joins ranks of two stages, or a mask, a scalar or nothing at all is sent wrongly."""
    for rank, (total, (inner, alone), (mask, number)) in enumerate(launch(views, 4)):
        peer = rank ^ 1
        assert total == [2.0 * (rank % 2) + 2] and (inner, alone) == (rank // 2, 1)
        assert mask == [True, False, peer == 3] and number == 7 + peer
