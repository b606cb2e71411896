"""The manifest of a checkpoint: what is where. Plain JSON, whose types, bounds and hash are checked when it is read.

    {"hash": "…64 digits…", "content": {"format": 1, "step": 1000, "files": {…}, "tensors": {…}, …}}

A piece is a box of a tensor in a file: from byte `begin`, row-major, with the hash of each of its blocks, in order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.base import files, typed
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.boxes import Box, covers, why_not
from autopar.runtime.checkpoint.tree import DTYPES, names_in

if TYPE_CHECKING:
    import xxhash

NAME, PLAN, FORMAT = "manifest.json", "plan.json", 1
MOST_BYTES, MOST_VALUES, MOST_DIMS = 1 << 30, 50_000_000, 64
DIGITS = 16
"""Of a block's hash, in hexadecimal: an accident goes unseen once in 2**64."""
REMEDY = "Load another step, or the checkpoint as it was saved; `autopar checkpoint verify` names all that is damaged"
_BEGIN, _MIDDLE, _END = b'{"hash":"', b'","content":', b"}"

PieceRow = tuple[str, int, list[int], list[int], str]


def digest(content: bytes | bytearray | memoryview) -> str:
    """Of a block: XXH3, 64 bits, which is faster than memory."""
    hashing = hasher()
    hashing.update(content)
    return hashing.hexdigest()


def hasher() -> xxhash.xxh3_64:
    """What takes the bytes of a block one after the other, and has their digest.

    Raises:
        AutoparError: this machine lacks the package xxhash.
    """
    try:
        import xxhash
    except ImportError as error:
        raise AutoparError("a checkpoint's hashes need xxhash", remedy="pip install xxhash") from error
    return xxhash.xxh3_64()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """bytes: of all. header: of those before the tensors, which `hash` is of. block: of what is hashed together."""

    bytes: int
    header: int
    hash: str
    block: int


@dataclass(frozen=True)
class StoredTensor:
    """pieces: file, first byte, offsets, sizes, hashes. names: all that the model has for it."""

    dtype: str
    shape: list[int]
    names: list[str]
    pieces: list[PieceRow]

    @cached_property
    def boxes(self) -> list[Box]:
        """Of the pieces."""
        return [Box(tuple(offsets), tuple(sizes)) for _, _, offsets, sizes, _ in self.pieces]

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of an optimizer: its options, and the parameters' names."""

    options: dict[str, Any]
    names: list[str]


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """states: by the parameter's name."""

    kind: str
    groups: list[StoredGroup]
    states: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ByRank:
    """Data that ranks have: `values[of_rank[r]]` is rank r's."""

    of_rank: list[int]
    values: list[Any]

    def of(self, rank: int) -> Any:
        """A rank's; of one that was not there the first one's."""
        return self.values[self.of_rank[rank] if rank < len(self.of_rank) else self.of_rank[0]]


@dataclass(frozen=True, slots=True)
class Run:
    """What saved: the model's class, its mesh, microbatches of a step, versions, and when (seconds since 1970). The
    plan lies beside, as the file `PLAN`; nothing that loads reads it.
    """

    model: str
    axes: list[str]
    sizes: list[int]
    microbatches: int
    strategy: str
    versions: dict[str, str]
    time_s: float


@dataclass(frozen=True)
class Manifest:
    """model: parameters and persistent buffers by name. state: other tensors. random: of torch, NumPy and Python.
    modules: what modules say of themselves beside tensors (`get_extra_state`). copies: pieces of the model's tensors
    that other files have once more, by name: each rank's file has all that the rank holds (`sharded.py`).
    """

    step: int
    run: Run
    files: dict[str, StoredFile]
    model: dict[str, StoredTensor]
    state: dict[str, StoredTensor] = field(default_factory=dict)
    optimizers: list[StoredOptimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loader: ByRank | None = None
    random: ByRank | None = None
    extra: Any = None
    modules: Any = None
    copies: dict[str, list[PieceRow]] = field(default_factory=dict)
    format: Literal[1] = 1

    def tensors(self) -> dict[str, StoredTensor]:
        """All, those of `state` under names that no module has."""
        return {**self.model, **{f"state/{name}": each for name, each in self.state.items()}}

    def encoded(self) -> bytes:
        """The file's content."""
        content = to_json(self)
        return b"".join((_BEGIN, hash_of(content).encode(), _MIDDLE, content, _END))


def to_json(value: Any) -> bytes:
    """Records as JSON, field by field."""

    def of(record: Any) -> dict[str, Any]:
        return {each.name: getattr(record, each.name) for each in fields(record)}

    return json.dumps(value, default=of, separators=(",", ":"), allow_nan=False).encode()


def hash_of(content: bytes) -> str:
    """Of a manifest's content."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step's folder, checked: what it says fits together, and covers each tensor once.

    Raises:
        AutoparError: no manifest, or one that is damaged, of a later version, names files elsewhere, or does not cover
            a tensor; names it.
    """
    path = folder / NAME
    content = files.read_bytes(path, "checkpoint's manifest", most_bytes=MOST_BYTES, remedy=REMEDY)
    start = len(_BEGIN) + 64
    inner = content[start + len(_MIDDLE) : -1]
    is_framed = content.startswith(_BEGIN) and content[start : start + len(_MIDDLE)] == _MIDDLE
    if not is_framed or content[-1:] != _END or content[len(_BEGIN) : start] != hash_of(inner).encode():
        raise damaged(path, "the manifest is not as it was written: its hash is another")
    try:
        text = inner.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8: {error}") from error
    said = {"where": str(path), "remedy": REMEDY}
    value = files.parse_json(text, "checkpoint's manifest", most_values=MOST_VALUES, once=True, **said)
    if isinstance(value, dict) and type(value.get("format")) is int and value["format"] != FORMAT:
        raise AutoparError(
            f"the checkpoint is of format {value['format']}",
            where=str(path),
            values=f"this version reads {FORMAT}",
            remedy="Load it with the version of autopar that saved it",
        )
    try:
        typed.check(Manifest, value, "the manifest")
        found = _made_of(value)
        check(found)
    except ValueError as error:  # WrongType is one
        raise damaged(path, str(error)) from error
    return found


def _made_of(value: Mapping[str, Any]) -> Manifest:
    given = dict(value)
    given["run"] = Run(**given["run"])
    given["files"] = files_of(given["files"])
    for section in ("model", "state"):
        given[section] = tensors_of(given.get(section, {}))
    given["optimizers"] = optimizers_of(given.get("optimizers", []))
    for name in ("loader", "random"):
        given[name] = None if given.get(name) is None else ByRank(**given[name])
    return Manifest(**given)


def files_of(value: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Of JSON whose types are right, as the next ones."""
    return {name: StoredFile(**each) for name, each in value.items()}


def tensors_of(value: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """By name."""
    return {name: StoredTensor(**each) for name, each in value.items()}


def optimizers_of(value: Sequence[Any]) -> list[StoredOptimizer]:
    """In order."""
    return [
        StoredOptimizer(each["kind"], [StoredGroup(**group) for group in each["groups"]], each["states"])
        for each in value
    ]


def check(manifest: Manifest) -> None:
    """Raises a ValueError where parts do not fit together."""
    if manifest.step < 0:
        raise ValueError(f"step {manifest.step} is none")
    for name, file in manifest.files.items():
        check_file_name(name)
        if not 0 <= file.header <= file.bytes or file.block < 4096 or file.block & (file.block - 1):
            raise ValueError(f"the file {name[:80]} has a header of {file.header} of {file.bytes} bytes")
    seen: dict[str, str] = {}
    held: Counter[str] = Counter()
    for name, tensor in manifest.tensors().items():
        try:
            _check_tensor(tensor, manifest.files)
        except ValueError as error:
            raise ValueError(f"{name[:200]}: {error}") from error
        for each in {name, *tensor.names}:
            if seen.setdefault(each, name) != name:
                raise ValueError(f"{each[:200]} is two tensors")
        for (file_name, *_), box in zip(tensor.pieces, tensor.boxes, strict=True):
            held[file_name] += box.numel * DTYPES[tensor.dtype].itemsize
    for name, rows in manifest.copies.items():
        if name not in manifest.model:
            raise ValueError(f"copies of {name[:200]}, which is not there")
        for file_name, size in _check_copies(name, manifest.model[name], rows, manifest.files):
            held[file_name] += size
    for name, size in held.items():
        if size > manifest.files[name].bytes - manifest.files[name].header:
            raise ValueError(f"the file {name[:80]} is said to hold {size} bytes of tensors, more than it has")
    by_rank = [each for each in (manifest.loader, manifest.random) if each is not None]
    for ranks in by_rank:
        if not ranks.of_rank or not all(0 <= at < len(ranks.values) for at in ranks.of_rank):
            raise ValueError("what ranks have is not there for each")
    trees = [manifest.schedulers, manifest.extra, manifest.modules, *(ranks.values for ranks in by_rank)]
    trees += [[optimizer.states, [group.options for group in optimizer.groups]] for optimizer in manifest.optimizers]
    for name in names_in(trees):
        if name not in manifest.state:
            raise ValueError(f"the tensor {name[:200]} is named and not there")


def _check_tensor(tensor: StoredTensor, known: Mapping[str, StoredFile]) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.dtype[:40]!r} is no dtype")
    if len(tensor.shape) > MOST_DIMS or any(size < 0 for size in tensor.shape) or tensor.bytes > typed.LARGEST:
        raise ValueError(f"{str(tensor.shape)[:80]} is no shape")
    for row in tensor.pieces:
        _check_piece(row, tensor.dtype, known)
    if not covers(tensor.boxes, tensor.shape):
        raise ValueError(f"its pieces do not have each element once: {why_not(tensor.boxes, tensor.shape)}")


def _check_piece(row: PieceRow, dtype: str, known: Mapping[str, StoredFile]) -> int:
    """Its bytes."""
    name, begin, _, sizes, hashes = row
    if name not in known:
        raise ValueError(f"its piece is in {name[:80]!r}, which is no file of the checkpoint")
    file = known[name]
    if any(size < 0 for size in sizes):
        raise ValueError(f"its piece is {sizes}")
    size = math.prod(sizes) * DTYPES[dtype].itemsize
    if begin < file.header or begin + size > file.bytes:
        raise ValueError(f"its piece is at bytes {begin} … {begin + size} of {name[:80]}, which has {file.bytes}")
    if len(hashes) != DIGITS * -(-size // file.block):
        raise ValueError(f"its piece of {size} bytes has {len(hashes)} digits of hashes")
    return size


def _check_copies(
    name: str, tensor: StoredTensor, rows: Sequence[PieceRow], known: Mapping[str, StoredFile]
) -> Iterator[tuple[str, int]]:
    """Files and bytes of copies. Each is of a piece, and has its hashes where its file is cut into like blocks."""
    pieces = {(tuple(offsets), tuple(sizes)): (file, hashes) for file, _, offsets, sizes, hashes in tensor.pieces}
    for row in rows:
        try:
            size = _check_piece(row, tensor.dtype, known)
        except ValueError as error:
            raise ValueError(f"{name[:200]}: {error}") from error
        file, hashes = pieces.get((tuple(row[2]), tuple(row[3])), ("", ""))
        if not file or (known[file].block == known[row[0]].block and hashes != row[4]):
            raise ValueError(f"{name[:200]}: a copy in {row[0][:80]} is of no piece")
        yield row[0], size


def check_file_name(name: str) -> None:
    """Raises a ValueError for what is not the plain name of a file in the folder."""
    is_plain = name and not name.startswith(".") and not set(name) & {"/", "\\", "\0"}
    if not is_plain or len(name) > 200:
        raise ValueError(f"it names the file {name[:200]!r}, which is not in its folder")


class Damaged(AutoparError):
    """Of a step that is not as it was written, or lacks a file: one before it may be whole."""


def damaged(path: Path, why: str) -> Damaged:
    """What is said of a file that is not as it was written."""
    return Damaged("the checkpoint is damaged", where=str(path), values=why[:600], remedy=REMEDY)
