from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.launch import launch
from tests.dist.runtime.pipeline_work import train_chain, train_eager
from tests.unit.runtime.pipelines import schedule_of

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
