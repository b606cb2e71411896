"""Files of a checkpoint, written and read block by block: safetensors, whose blocks are hashed on the way.

Each piece begins a block of its own, so that what a rank reads of one it can check by itself, whatever else is in the
file. Files are written once, in order, and are on the disk when `write_file` returns (fsync).
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.checkpoint.boxes import Box, intersection, rows_of, whole_of
from autopar.runtime.checkpoint.manifest import DIGITS, REMEDY, Damaged, StoredFile, damaged, digest, hasher
from autopar.runtime.checkpoint.tree import NAMES, bytes_of

MIB = 1 << 20
MOST_BLOCKS = 8192
"""In a file: a manifest has their hashes, so that blocks of large files are larger than a mebibyte."""
CHUNK_BYTES = 8 * MIB
"""Of what is read or written at once."""
THREADS = 4
CODES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""What safetensors calls dtypes. Others are written as their bytes, with one dim more."""


class Entry(NamedTuple):
    """A box to be written, under a key of the file. part: gives it. parts: instead, one part after the other."""

    key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    part: Callable[[], Tensor]
    parts: Callable[[], Iterable[Tensor]] | None = None

    @property
    def bytes(self) -> int:
        """In the file."""
        return math.prod(self.sizes) * self.dtype.itemsize


class Region(NamedTuple):
    """A part of a piece, counted from its beginning, and where it goes: a view of the same sizes."""

    box: Box
    place: Tensor


class Source(NamedTuple):
    """A piece in a file: its first byte and the hashes of its blocks, and what is wanted of it."""

    name: str
    file: str
    begin: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    hashes: str
    regions: tuple[Region, ...]


class NewFile:
    """A new file, written entry after entry, in the order in which they were announced: its header comes first.

    After `add` of all parts of an entry (none of an empty one), `end` gives its first byte and its blocks' hashes. The
    file is on the disk when `close` returns.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], said: Mapping[str, str] | None = None) -> None:
        """entries: dtypes of larger elements first, as safetensors wants. said: in the header, beside the format.

        Raises:
            OSError: there is such a file, or no room.
        """
        header = _header(entries, said or {})
        total = len(header) + sum(entry.bytes for entry in entries)
        block = MIB
        while total > block * MOST_BLOCKS:
            block *= 2
        self.stored = StoredFile(total, len(header), digest(header), block)
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._begin, self._size = len(header), 0
        self._hashes: list[str] = []
        self._hashing = hasher()
        try:
            self._write(header)
        except OSError:
            self._file.close()
            raise

    def add(self, part: Tensor) -> None:
        """The next part of an entry, row-major."""
        content, block = bytes_of(part), self.stored.block
        while content:
            some = content[: block - self._size % block]
            self._hashing.update(some)  # while the processor's cache has it
            self._write(some)
            self._size += len(some)
            content = content[len(some) :]
            if self._size % block == 0:
                self._hashes.append(self._hashing.hexdigest())
                self._hashing = hasher()

    def end(self, entry: Entry) -> tuple[int, str]:
        """All of an entry was added."""
        assert self._size == entry.bytes, entry.key
        if self._size % self.stored.block:
            self._hashes.append(self._hashing.hexdigest())
        found = self._begin, "".join(self._hashes)
        self._begin, self._size, self._hashes, self._hashing = self._begin + self._size, 0, [], hasher()
        return found

    def close(self, *, synced: bool = True) -> None:
        """synced: all is on the disk then."""
        try:
            if synced:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _write(self, content: bytes | memoryview) -> None:
        _write(self._file.fileno(), content)


def write_file(path: Path, entries: Sequence[Entry]) -> tuple[StoredFile, list[tuple[int, str]]]:
    """Write a new file, largest dtypes first. Gives what the manifest says of it, and for each entry, in the order
    given, its first byte and its blocks' hashes.

    Raises:
        OSError: there is such a file, or no room.
    """
    order = sorted(range(len(entries)), key=lambda at: -entries[at].dtype.itemsize)
    found: list[tuple[int, str]] = [(0, "")] * len(entries)
    file, is_whole = NewFile(path, [entries[at] for at in order]), False
    try:
        for at in order:
            entry = entries[at]
            for part in (entry.part(),) if entry.parts is None else entry.parts():
                file.add(part)
            found[at] = file.end(entry)
        is_whole = True
    finally:
        file.close(synced=is_whole)
    return file.stored, found


def write_whole(path: Path, content: bytes) -> StoredFile:
    """Write a new file that is no safetensors, all of which is hashed as a header is.

    Raises:
        OSError: there is such a file, or no room.
    """
    with open(path, "xb", buffering=0) as file:
        _write(file.fileno(), content)
        os.fsync(file.fileno())
    return StoredFile(len(content), len(content), digest(content), MIB)


def stored_sizes(dtype: torch.dtype, sizes: Sequence[int]) -> list[int]:
    """As a header says them: with one dim more, of an element's bytes, where safetensors has no such dtype."""
    return list(sizes) if NAMES[dtype] in CODES else [*sizes, dtype.itemsize]


def _header(entries: Sequence[Entry], said: Mapping[str, str]) -> bytes:
    """As of safetensors: the length of a JSON text, and the text, filled up to a multiple of 8."""
    described, begin = {}, 0
    for entry in entries:
        described[entry.key] = {
            "dtype": CODES.get(NAMES[entry.dtype], "U8"),
            "shape": stored_sizes(entry.dtype, entry.sizes),
            "data_offsets": [begin, begin + entry.bytes],
        }
        begin += entry.bytes
    assert len(described) == len(entries), "keys of a file are different"
    text = json.dumps({"__metadata__": {"format": "pt", **said}, **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Files:
    """The data files of a step, open for reading. read: how many bytes were."""

    def __init__(self, folder: Path, known: Mapping[str, StoredFile]) -> None:
        self.folder, self.known = folder, known
        self.read = 0
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def check(self, name: str) -> None:
        """Open a file, and see that it is a regular one of its length, with the header that was written.

        Raises:
            AutoparError: no such file, a pipe or a device, other lengths or headers.
        """
        if name in self._open:
            return
        path, said = self.folder / name, self.known[name]
        try:
            is_regular = stat.S_ISREG(os.stat(path).st_mode)  # before it is opened: opening may wait, or do something
            if not is_regular:
                raise damaged(path, "it is a folder, a pipe, a socket or a device")
            self._open[name] = descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise Damaged(
                f"cannot read a file of the checkpoint, {name}", where=str(path), values=str(error), remedy=REMEDY
            ) from error
        size = os.fstat(descriptor).st_size
        if size != said.bytes:
            raise damaged(path, f"it has {size} bytes, {said.bytes} were written")
        begin, hashing = 0, hasher()
        while begin < said.header:
            content = self._bytes(name, begin, min(CHUNK_BYTES, said.header - begin))
            hashing.update(content)
            begin += len(content)
        if hashing.hexdigest() != said.hash:
            raise damaged(path, "its header is not as it was written")

    def close(self) -> None:
        """Close all."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def _bytes(self, name: str, begin: int, size: int) -> memoryview:
        """Raises an AutoparError where the file ends before."""
        content = np.empty(size, np.uint8).data  # not filled with zeros first
        self._read_into(name, begin, content)
        return content

    def _read_into(self, name: str, begin: int, content: memoryview) -> None:
        size, done = len(content), 0
        try:
            while done < size:
                count = os.preadv(self._open[name], [content[done:]], begin + done)
                if not count:
                    raise damaged(self.folder / name, f"it ends at byte {begin + done}")
                done += count
        except OSError as error:
            raise Damaged(
                f"cannot read a file of the checkpoint, {name}",
                where=str(self.folder / name),
                values=str(error),
                remedy=REMEDY,
            ) from error
        with self._lock:
            self.read += size

    def fill(self, source: Source) -> None:
        """Write the regions of a piece into their places. A block all of which goes to one place in a row is read
        there; others are read beside, and none of one that is not whole is written.

        Raises:
            AutoparError: a block that is not as it was written; names the tensor.
        """
        width = source.dtype.itemsize
        torch.autograd.graph.increment_version([region.place for region in source.regions])
        straight = [row for region in source.regions if (row := _in_a_row(region, source)) is not None]
        for first, last in _blocks_of(source, self.known[source.file].block):
            for begin, content, is_there in self._checked(source, first, last, straight):
                if not is_there:
                    _spread(content, begin // width, (begin + len(content)) // width, source)

    def checked(self, source: Source) -> Iterator[tuple[int, memoryview]]:
        """The blocks of a piece: where they begin in it, and their bytes.

        Raises:
            AutoparError: a block that is not as it was written; names the tensor.
        """
        block, size = self.known[source.file].block, math.prod(source.sizes) * source.dtype.itemsize
        for begin, content, _ in self._checked(source, 0, -(-size // block), ()):
            yield begin, content

    def _checked(
        self, source: Source, first: int, last: int, straight: Sequence[_Row]
    ) -> Iterator[tuple[int, memoryview, bool]]:
        """Blocks one by one, so that each is hashed while the processor's cache has it; and whether they are in their
        place.
        """
        block, size = self.known[source.file].block, math.prod(source.sizes) * source.dtype.itemsize
        beside: memoryview | None = None
        for number in range(first, last):
            begin, end = number * block, min((number + 1) * block, size)
            row = next((row for row in straight if row.begin <= begin and end <= row.begin + len(row.place)), None)
            if row is not None:
                content = row.place[begin - row.begin : end - row.begin]
            else:
                beside = np.empty(min(block, size), np.uint8).data if beside is None else beside
                content = beside[: end - begin]
            self._read_into(source.file, source.begin + begin, content)
            if digest(content) != source.hashes[number * DIGITS : (number + 1) * DIGITS]:
                at = source.begin + begin
                why = f"{source.name}: bytes {at} … {at + len(content)} are not as they were written"
                raise damaged(self.folder / source.file, why)
            yield begin, content, row is not None


class _Row(NamedTuple):
    """Bytes of a piece that lie in a row in their place, from its byte `begin`."""

    begin: int
    place: memoryview


def _in_a_row(region: Region, source: Source) -> _Row | None:
    """A region that is a range of its piece's elements, of a tensor in main memory without gaps; else None."""
    box, place = region
    last = max((dim for dim, size in enumerate(source.sizes) if box.sizes[dim] != size), default=0)
    if any(size != 1 for size in box.sizes[:last]) or not place.is_contiguous() or place.device.type != "cpu":
        return None
    if not place.numel() or place.dtype != source.dtype or place.is_conj() or place.is_neg():
        return None
    return _Row(_flat(box.offsets, source.sizes) * source.dtype.itemsize, bytes_of(place))


@contextmanager
def opened(folder: Path, known: Mapping[str, StoredFile]) -> Iterator[Files]:
    """The files of a step's folder; they are closed at the end."""
    files = Files(folder, known)
    try:
        yield files
    finally:
        files.close()


def fill_all(files: Files, sources: Sequence[Source]) -> None:
    """Read pieces, a few at a time.

    Raises:
        AutoparError: as `Files.fill`, of the first that fails.
    """
    threads = min(THREADS, len(sources), os.cpu_count() or 1)
    if threads < 2:
        for source in sources:
            files.fill(source)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="autopar-read") as pool:
        waiting = [pool.submit(files.fill, source) for source in sources]
        try:
            for each in waiting:
                each.result()
        finally:
            for each in waiting:
                each.cancel()


def _blocks_of(source: Source, block: int) -> list[tuple[int, int]]:
    """Runs of the blocks, numbered from 0, that hold what is wanted: first, and the one behind the last."""
    width, runs = source.dtype.itemsize, []
    for region in source.regions:
        ends = [offset + size - 1 for offset, size in zip(*region.box, strict=True)]
        first, last = _flat(region.box.offsets, source.sizes), _flat(ends, source.sizes)
        runs.append((first * width // block, -(-(last + 1) * width // block)))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _flat(index: Sequence[int], sizes: Sequence[int]) -> int:
    found = 0
    for each, size in zip(index, sizes, strict=True):
        found = found * size + each
    return found


def _spread(content: memoryview, first: int, last: int, source: Source) -> None:
    """Elements `first … last` of a piece into the regions that have some of them."""
    if all(region.box == whole_of(source.sizes) for region in source.regions) and last - first == math.prod(
        source.sizes
    ):
        boxes = [(0, whole_of(source.sizes))]
    else:
        boxes, at = [], 0
        for box in rows_of(source.sizes, first, last):
            boxes.append((at, box))
            at += box.numel
    flat = torch.frombuffer(content, dtype=source.dtype)
    with torch.no_grad():
        for at, box in boxes:
            held = flat[at : at + box.numel].view(box.sizes)
            for region in source.regions:
                shared = intersection(box, region.box)
                if shared is not None:
                    part = held[shared.within(box).slices()]
                    region.place[shared.within(region.box).slices()].copy_(part)
