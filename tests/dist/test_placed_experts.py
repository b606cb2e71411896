"""Experts that move by load between steps, on four gloo processes, change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import placed_experts
from tests.dist.launch import launch

pytestmark = pytest.mark.dist
KIND = "Qwen3Moe"
CASES: dict[str, placed_experts.Case] = {
    "folded": (("dp",), (4,), "expert"),
    "zero3": (("dp", "ep"), (2, 2), {"dp": "zero3", "ep": "expert"}),
    "tensor": (("dp", "tp"), (2, 2), {"dp": "expert", "tp": "tensor"}),
    "pipeline": (("pp", "dp"), (2, 2), {"pp": "pipeline(1f1b)", "dp": "expert"}),
}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str) -> None:
    # Routers compute in float32: with experts at home the parameters differ as much.
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=5e-6, msg=lambda m, n=name: f"{where} {n}: {m}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("names", [("folded", "pipeline"), ("zero3", "tensor")])
def test_training_with_experts_moved_twice_follows_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    """Breaks if a token finds another expert than it chose, if an optimizer's states or what is saved stay behind, if
    a layer is placed by another's loads, if gradients of guests get lost, or if `state_dict`, a row or the whole of a
    parameter are seen by slots.
    """
    wanted = placed_experts.eager(KIND)
    cases = [(*CASES[name], KIND, str(tmp_path / name)) for name in names]
    every: list[list[dict[str, Any]]] = launch(placed_experts.train_with_each, 4, cases, timeout_s=400.0)
    for place, name in enumerate(names):
        for rank, found in enumerate(each[place] for each in every):
            where = f"{name}, rank {rank}"
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6), where
            assert found["loads"] == wanted["loads"], where
            assert all(move.after < move.before for move in found["moves"] if move.moved), where
            assert sum(move.moved for move in found["moves"]) > 4, where
            assert all(move.guests for move in found["moves"][2:]) and not any(m.guests for m in found["moves"][:2])
            same(found["state"], wanted["state"], where)
            same(found["home"], wanted["state"], where)
            same(found["averages"], wanted["averages"], where)
            if found["whole"] is not None:
                seen = {placed_experts.WATCHED: found["whole"]}
                same(seen, wanted["state"], where)
                torch.testing.assert_close(found["row"], found["whole"][5], rtol=0, atol=0)
    loaded = launch(placed_experts.loaded, 1, str(tmp_path / names[1]), KIND)[0]
    same(loaded["state"], wanted["state"], "loaded")
    same(loaded["averages"], wanted["averages"], "loaded")
    assert wanted["losses"][-1] < wanted["losses"][0]


def test_what_cannot_be_placed_says_so() -> None:
    """Breaks if ranks that have other loads place experts otherwise, if an optimizer keeps what cannot follow, if loads
    of other layers are taken, or if a refusal leaves experts half moved.
    """
    for found in launch(placed_experts.refused, 2, timeout_s=280.0):
        assert "ranks would place experts otherwise: rank 1 than rank 0" in found["disagree"]
        assert "no tokens were counted" in found["none"]
        assert "loads of model.layers.7.mlp, which is no layer" in found["unknown"]
        assert "5 numbers a step" in found["size"]
        assert "a hook looks at the gradient of experts of model.layers.0.mlp.experts" in found["hook"]
        assert "LBFGS is not known to treat each element by itself" in found["optimizer"]
        assert "this plan sends no tokens to experts" in found["plan"]
        assert found["home"] and found["loss"] == pytest.approx(found["before"], rel=1e-6)


def test_what_is_loaded_and_copied_finds_its_experts() -> None:
    """Breaks if loading into a placed model, or into its optimizer before or after its first step, mixes slots with the
    model's order, if a copy's experts stay behind, or if scripts write by slots.
    """
    for found in launch(placed_experts.loaded_into, 2, timeout_s=280.0):
        for name, difference in found.items():
            assert difference <= 1e-6, name
