"""Seeds of random draws: what repeats torch's generator repeats them, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import seeds
from tests.dist.launch import launch


@pytest.mark.parametrize(("sizes", "strategy"), [((2,), "zero2"), ((1, 2), "pipeline")])
def test_a_seed_repeats_what_is_drawn(sizes: tuple[int, ...], strategy: Any) -> None:
    """Breaks if `torch.manual_seed` or a restored state of the generator does not repeat the masks of dropout, if two
    steps draw alike, or if ranks that were seeded differently do not draw as rank 0 does.
    """
    one, other = launch(seeds.again, 2, sizes, strategy, timeout_s=120.0)
    assert one == other
    assert len({*one["seeded"], *one["after"]}) == 4
    assert one["seeded again"] == one["own seeds"] == one["seeded"]
    assert one["restored"] == one["after"]


def test_what_draws_nothing_leaves_the_generator_alone() -> None:
    """Breaks if a model without dropout, or planning, takes numbers from the generator that a user draws from."""
    assert launch(seeds.left_alone, 2, timeout_s=90.0) == [True, True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_draws_that_decide_are_rank_0s(strategy: str) -> None:
    """Breaks if ranks that are seeded differently go different ways, or another one than eager with rank 0's seed, or
    count otherwise.
    """
    for have, want in launch(seeds.told, 2, strategy, timeout_s=120.0):
        assert have == pytest.approx(want, rel=1e-9)
