"""Adapters on a frozen model, behind a wrapper, as scripts for LoRA have them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist import script_adapters
from tests.dist.launch import launch


@cache
def eager() -> dict[str, Any]:
    return script_adapters.adapters_trained(*script_adapters.adapted())


@pytest.mark.parametrize("strategy", ["zero3", "tensor"])
def test_adapters_alone_are_trained(strategy: str) -> None:
    """Breaks if a wrapper hides the cache of what it wraps, if frozen parameters get gradients or states, if an adapter
    beside a split layer is added once a rank, or if what is saved of the adapters is a piece.
    """
    expected = eager()
    for found, loss, merged in launch(script_adapters.adapters, 2, strategy, timeout_s=180.0):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["gradients"] == expected["gradients"] and found["states"] == expected["states"] == 12
        assert all("lora" in name for name in found["gradients"])
        for name, value in expected["saved"].items():
            torch.testing.assert_close(found["saved"][name], value, rtol=1e-3, atol=1e-5)
        assert merged == pytest.approx(loss, rel=1e-5)
