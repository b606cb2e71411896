"""Packed documents on real ranks equal each document by itself in one process, under every way to split them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.dist import packed
from tests.dist.launch import launch
from tests.dist.test_loss_terms import FLOAT32, check

ROWS = ([[5, 7, 4], [8, 8]], [[16], [3, 13]])
"""Batches of two rows, for what splits rows."""


@cache
def separate() -> Any:
    return packed.separate()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["tensor", "ring", "allgather_kv", "ulysses"])
def test_packed_equals_separate(strategy: str) -> None:
    """Breaks if a query sees another document's keys on any rank, if a rank takes its own part's numbers for the
    others', or if other documents in a row of the same length are planned for again.
    """
    for rank, (found, planned) in enumerate(launch(packed.together, 2, ("tp",), (2,), strategy, timeout_s=120.0)):
        check(found, separate(), FLOAT32)
        assert planned == (rank == 0)


def test_rows_of_packed_documents() -> None:
    """Breaks if documents of one row are those of another, where rows are split and each is dealt over a ring."""
    mesh = ("dp", "cp"), (2, 2), {"dp": "zero3", "cp": "ring"}
    for found, _ in launch(packed.together, 4, *mesh, ROWS, timeout_s=120.0):
        check(found, packed.separate(ROWS), FLOAT32)


def test_a_model_set_to_flash_attention() -> None:
    """Breaks if a trace calls a library for CUDA, or if where documents begin is lost on the way."""
    for found, planned in launch(
        packed.together, 2, ("cp",), (2,), "ring", packed.BATCHES, "flash_attention_2", timeout_s=120.0
    )[:1]:
        check(found, separate(), FLOAT32)
        assert planned == 1


def test_attention_of_the_users_that_reads_where_documents_begin() -> None:
    """Breaks if what reads them gets a program without them, or one of other documents; or if their mask is built."""
    for found, plan in launch(packed.with_limits_of_the_users, 2, ("cp",), (2,), "ring", timeout_s=120.0):
        check(found, separate(), FLOAT32)
        assert "documents" in plan
