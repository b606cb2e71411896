"""Arrays and addresses of what a compiled model holds, in the words of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import script_arrays
from tests.dist.launch import launch

READ_ONLY = {"array", "asarray", "data", "row"}
SHARED = {"dlpack", "dlpack_of_state"}


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_safetensors_writes_what_there_is(tmp_path: Path, strategy: str) -> None:
    """Breaks if a file is written from memory that is gone, if copies of two weights at one address are taken for one
    weight, or ranks gather different numbers of times.
    """
    for found in launch(script_arrays.saved, 2, str(tmp_path), strategy, timeout_s=120.0):
        assert found == dict.fromkeys(found, True)


def test_what_is_written_to_arrays_of_pieces_is_told() -> None:
    """Breaks if a write to an array, an address or a view of a copy is lost without a word, or other numbers come."""
    for found in launch(script_arrays.written, 2, "zero3", timeout_s=120.0):
        for way, (changed, said) in found.items():
            assert not changed, way
            word = "read-only" if way in READ_ONLY else "full_tensor()" if way in SHARED else "it got a copy"
            assert word in said, (way, said)


def test_arrays_of_whole_weights_are_the_weights() -> None:
    """Breaks if where each rank has a weight whole a script's write to its array is lost, or refused."""
    for found in launch(script_arrays.written, 2, "ddp", timeout_s=120.0):
        assert all(changed and not said for changed, said in found.values()), found


def test_arrays_of_pieces_are_read() -> None:
    """Breaks if what only reads, or works on a copy, is refused or told."""
    for found in launch(script_arrays.read, 2, "zero3", timeout_s=120.0):
        assert found == [True] * 4
