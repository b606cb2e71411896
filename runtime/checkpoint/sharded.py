"""Weights cut as a plan stores them: a file for each rank, with all that it holds, whatever other ranks hold, too.

    rank-00002-of-00008.safetensors            what rank 2 holds, under the model's names; of ranks that hold the same
                                               the first one has the file
    rank-00002-of-00008-part-00001.safetensors further pieces of tensors of which it holds several
    manifest.json                              what is where, as in a step that was saved: `compiled.load` reads it

The header of each file says where its pieces begin as torch.distributed.checkpoint's HuggingFaceStorageWriter does, so
that its reader takes the folder, too. Each weight is read once, in parts, for up to MOST_FILES files at a time.
"""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from autopar import __version__
from autopar.runtime.checkpoint.blocks import Entry, NewFile, stored_sizes, write_whole
from autopar.runtime.checkpoint.boxes import Box, intersection
from autopar.runtime.checkpoint.formats import PART_BYTES, Weight, parts_of
from autopar.runtime.checkpoint.manifest import NAME, PLAN, Manifest, PieceRow, Run, StoredFile, StoredTensor
from autopar.runtime.checkpoint.tree import NAMES

MOST_FILES = 256
"""That are open at a time."""
Held = Mapping[str, Sequence[Box]]
"""The boxes of a rank, by the tensor's name."""


def write_sharded(
    made: Path,
    ranks: Sequence[Held],
    weights: Mapping[str, tuple[Weight, torch.dtype, Sequence[str]]],
    mesh: Mapping[str, int],
    plan: bytes,
    progress: Callable[[str, int, int], None] = lambda name, number, count: None,
) -> None:
    """Write the files and the manifest into a new folder.

    ranks: what each holds, in order. weights: each with the dtype that it is stored in and all of its names. mesh: for
    the manifest, sizes by axis. plan: as `Plan.save` writes it. progress: told the tensor that is written next, its
    number and how many there are.

    Raises:
        AutoparError: weights that are damaged.
        OSError: no room.
    """
    files = {name: boxes for name, boxes in _files(ranks) if boxes}
    order = sorted(weights, key=lambda name: -weights[name][1].itemsize)
    stored: dict[str, StoredFile] = {}
    rows: dict[str, list[PieceRow]] = {name: [] for name in weights}
    listed = iter(files.items())
    groups = [dict(some) for some in iter(lambda: tuple(islice(listed, MOST_FILES)), ())]
    for number, group in enumerate(groups):
        first_one, count = number * len(order), len(groups) * len(order)
        _write_files(made, group, order, weights, stored, rows, partial(_told, progress, first_one, count))
    model: dict[str, StoredTensor] = {}
    copies: dict[str, list[PieceRow]] = {}
    for name, (weight, dtype, names) in weights.items():
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], PieceRow] = {}
        for row in rows[name]:
            if first.setdefault((tuple(row[2]), tuple(row[3])), row) is not row:
                copies.setdefault(name, []).append(row)
        model[name] = StoredTensor(NAMES[dtype], list(weight.shape), list(names), list(first.values()))
    if plan:
        stored[PLAN] = write_whole(made / PLAN, plan)
    versions = {"autopar": __version__, "torch": torch.__version__, "python": platform.python_version()}
    run = Run("", list(mesh), list(mesh.values()), 1, "", versions, time.time())
    (made / NAME).write_bytes(Manifest(0, run, stored, model, copies=copies).encoded())


def _files(ranks: Sequence[Held]) -> Iterator[tuple[str, dict[str, Box]]]:
    """What is in which file: one for the first box of each tensor, the next for the second."""
    seen = set()
    for rank, held in enumerate(ranks):
        key = tuple((name, tuple(boxes)) for name, boxes in held.items())
        if key in seen:
            continue
        seen.add(key)
        name = f"rank-{rank:05d}-of-{len(ranks):05d}"
        for part in range(max(map(len, held.values()), default=0)):
            boxes = {name: own[part] for name, own in held.items() if part < len(own)}
            yield f"{name}-part-{part:05d}.safetensors" if part else f"{name}.safetensors", boxes


def _write_files(
    made: Path,
    files: Mapping[str, Mapping[str, Box]],
    order: Iterable[str],
    weights: Mapping[str, tuple[Weight, torch.dtype, Sequence[str]]],
    stored: dict[str, StoredFile],
    rows: Mapping[str, list[PieceRow]],
    progress: Callable[[str, int], None],
) -> None:
    """Some files together, weight by weight."""
    opened: dict[str, NewFile] = {}
    entries: dict[str, dict[str, Entry]] = defaultdict(dict)
    is_whole = False
    try:
        for file, boxes in files.items():
            for name in order:
                if name in boxes:
                    entries[file][name] = Entry(name, weights[name][1], boxes[name].sizes, _nothing)
            opened[file] = NewFile(made / file, list(entries[file].values()), _said(boxes, weights))
        for at, name in enumerate(order):
            progress(name, at)
            weight, dtype, _ = weights[name]
            places = [(opened[file], boxes[name]) for file, boxes in files.items() if name in boxes]
            _spread(weight, dtype, places)
            for file, boxes in files.items():
                if name in boxes:
                    begin, hashes = opened[file].end(entries[file][name])
                    rows[name].append((file, begin, list(boxes[name].offsets), list(boxes[name].sizes), hashes))
        is_whole = True
    finally:
        for file, each in opened.items():
            each.close(synced=is_whole)
            stored[file] = each.stored


def _spread(weight: Weight, dtype: torch.dtype, places: Sequence[tuple[NewFile, Box]]) -> None:
    """Each box into its file, row-major. The weight is read once: its parts follow one another in memory, so that what
    a box has of them does, too.
    """
    for part in parts_of(weight.shape, max(1, PART_BYTES // max(weight.dtype.itemsize, dtype.itemsize))):
        own = [(file, shared) for file, box in places if (shared := intersection(part, box)) is not None]
        if own:
            content = weight.read(part).to(dtype)
            for file, shared in own:
                file.add(content[shared.within(part).slices()].contiguous())


def _said(boxes: Mapping[str, Box], weights: Mapping[str, tuple[Weight, torch.dtype, Sequence[str]]]) -> dict[str, str]:
    """Where pieces begin, as torch.distributed.checkpoint says it (torch/distributed/checkpoint/_hf_utils.py)."""
    where = {}
    for name, box in boxes.items():
        further = len(stored_sizes(weights[name][1], box.sizes)) - len(box.sizes)
        where[name] = {"saved_offsets": [*box.offsets, *[0] * further]}
    return {"DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0"}


def _told(progress: Callable[[str, int, int], None], first: int, count: int, name: str, at: int) -> None:
    progress(name, first + at, count)


def _nothing() -> Tensor:
    raise AssertionError("parts are added by hand")
