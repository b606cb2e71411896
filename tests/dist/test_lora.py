"""peft's LoRA on compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import launch

pytest.importorskip("accelerate")
pytest.importorskip("peft")
from tests.dist import lora
from tests.dist.test_trainer import compare


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lora.of_one(str(tmp_path_factory.mktemp("one")))


def test_what_users_of_adapters_do(expected: dict[str, Any], tmp_path: Path) -> None:
    """Breaks if frozen parameters get gradients or states, if adapters that are off count, if the base is sent for
    saving what is not it, or if what is saved, merged or loaded is a piece.
    """
    wanted = expected["used"]
    assert all("lora" in name for name in wanted["gradients"]) and wanted["states"] == len(wanted["gradients"])
    assert wanted["disabled"] != pytest.approx(wanted["losses"][-1], rel=1e-3)
    for found in launch(lora.split, 2, str(tmp_path), timeout_s=180.0):
        compare(found, wanted)
        assert found["sends"]


def test_the_trainer_has_adapters(expected: dict[str, Any], tmp_path: Path) -> None:
    """Breaks if checkpoints of adapters, or their states, are pieces: the run goes on otherwise than it did."""
    for found in launch(lora.sharded, 2, str(tmp_path), timeout_s=120.0):
        compare(found, expected["trained"])
        compare(found["continued"], expected["trained"]["run"])


def test_adapters_where_the_base_is_on_every_rank(expected: dict[str, Any]) -> None:
    """Breaks if gradients of the frozen base are reduced, or adapters that came after `compile` are silently left
    out.
    """
    for found, is_small, late in launch(lora.replicated, 2, timeout_s=120.0):
        compare(found, {name: expected["used"][name] for name in found})
        assert is_small
        assert "compiled already" in late and "get_peft_model(model, config)" in late
