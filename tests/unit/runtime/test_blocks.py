"""Files of a checkpoint, read block by block into whatever places."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.blocks import Entry, Region, Source, fill_all, opened, write_file
from autopar.runtime.checkpoint.boxes import Box

WHOLE = torch.arange(9 * 131_075, dtype=torch.float32).reshape(9, 131_075)
"""Four blocks and a half; no row ends where a block does."""
BOXES = {
    "whole": [Box((0, 0), (9, 131_075))],
    "rows": [Box((2, 0), (5, 131_075))],
    "columns": [Box((0, 7), (9, 100_000))],
    "a part of a row": [Box((8, 1000), (1, 130_000))],
    "stripes": [Box((0, 0), (3, 131_075)), Box((4, 0), (1, 131_075)), Box((6, 5), (3, 11))],
    "halves": [Box((0, 0), (4, 131_075)), Box((4, 0), (5, 131_075))],
}


def written(folder: Path, regions: tuple[Region, ...]) -> tuple[dict[str, object], list[Source]]:
    said, [(begin, hashes)] = write_file(
        folder / "a", [Entry("x", WHOLE.dtype, (9, 131_075), partial(WHOLE.__getitem__, ...))]
    )
    return {"a": said}, [Source("x", "a", begin, WHOLE.dtype, (9, 131_075), hashes, regions)]


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("boxes", BOXES)
def test_parts_of_a_piece_come_to_their_places(boxes: str, is_dense: bool, tmp_path: Path) -> None:
    """Breaks if a block that is read straight into its place is another one's, or its neighbours are written over; if
    autograd does not see that a value changed; if more is read than the blocks that are needed.
    """
    places = [torch.full(box.sizes if is_dense else box.sizes[::-1], -1.0) for box in BOXES[boxes]]
    views = [place if is_dense else place.T for place in places]
    versions = [place._version for place in places]
    known, sources = written(tmp_path, tuple(map(Region, BOXES[boxes], views)))
    with opened(tmp_path, known) as files:  # type: ignore[arg-type]
        files.check("a")
        fill_all(files, sources)
        assert files.read <= WHOLE.numel() * 4 + 1000
    for box, view, place, version in zip(BOXES[boxes], views, places, versions):
        assert torch.equal(view, WHOLE[box.slices()]) and place._version > version


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_what_is_written_in_parts(rows: int, tmp_path: Path) -> None:
    """Breaks if hashes are those of the parts, which end where no block does, or a part is lost."""
    known, [source] = written(tmp_path, ())
    whole = partial(WHOLE.__getitem__, ...)
    entry = Entry("x", WHOLE.dtype, (9, 131_075), whole, partial(WHOLE.split, rows))
    assert write_file(tmp_path / "b", [entry]) == (known["a"], [(source.begin, source.hashes)])
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_a_flipped_bit_in_a_block_that_is_read_straight(tmp_path: Path) -> None:
    """Breaks if what is read into its place is not hashed."""
    known, sources = written(tmp_path, (Region(BOXES["whole"][0], torch.zeros(9, 131_075)),))
    content = bytearray((tmp_path / "a").read_bytes())
    content[3 << 20] ^= 1
    (tmp_path / "a").write_bytes(content)
    with opened(tmp_path, known) as files:  # type: ignore[arg-type]
        files.check("a")
        with pytest.raises(AutoparError, match=r"x: bytes \d+ … \d+ are not as they were written"):
            fill_all(files, sources)
