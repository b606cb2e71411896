"""Whole weights in folders of three kinds, read part by part: what autopar saved, HuggingFace's safetensors, what
torch.distributed.checkpoint saved. Nothing in them is run, and no more than a part is in memory.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.base import files
from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import made_of, stored_as
from autopar.base.torch_compat.checkpoints import DataReader, stored_tensors
from autopar.runtime.checkpoint.blocks import CODES, Files, Region, Source, opened
from autopar.runtime.checkpoint.boxes import Box, covers, intersection, whole_of
from autopar.runtime.checkpoint.folders import step_at
from autopar.runtime.checkpoint.manifest import StoredTensor, read_manifest
from autopar.runtime.checkpoint.pretrained import INDEX, files_by_name
from autopar.runtime.checkpoint.tree import DTYPES, bytes_of

Kind = Literal["autopar", "huggingface", "torch"]
PART_BYTES = 16 << 20
"""Of what is in memory of a weight; a piece of torch's folders is there whole."""
MOST_HEADER_BYTES = 100 << 20
_DTYPES = {code: DTYPES[name] for name, code in CODES.items()}
_REMEDY = "Give the folder as it was saved"


@dataclass(frozen=True, slots=True)
class Weight:
    """A stored tensor. read: gives a box of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """All of it, row-major, a part after the other. dtype: of floating-point weights."""
        wanted = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        for box in parts_of(self.shape, max(1, PART_BYTES // self.dtype.itemsize)):
            yield self.read(box).to(wanted)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a folder has. kind: of the folder, at: what was read, model_type: transformers' word for the model, "" where
    none is known. others: what is there and is no weight.
    """

    kind: Kind
    at: Path
    weights: Mapping[str, Weight]
    model_type: str = ""
    others: tuple[str, ...] = ()


def parts_of(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most so many elements, or of one row of the last dim, that follow one another in memory."""
    if math.prod(shape) <= most or not shape:
        yield whole_of(shape)
        return
    inner = math.prod(shape[1:])
    rows = max(1, most // max(1, inner))
    if inner <= most or len(shape) == 1:
        for first in range(0, shape[0], rows):
            yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))
        return
    for row in range(shape[0]):
        for box in parts_of(shape[1:], most):
            yield Box((row, *box.offsets), (1, *box.sizes))


def kind_of(folder: Path) -> Kind:
    """Which kind it is."""
    if (folder / ".metadata").exists():
        return "torch"
    if folder.suffix == ".safetensors" or (folder.is_dir() and any(folder.glob("*.safetensors"))):
        return "autopar" if (folder / "manifest.json").exists() else "huggingface"
    return "autopar"


@contextmanager
def weights_of(folder: Path, step: int | None = None, prefix: str = "") -> Iterator[Weights]:
    """The weights of a folder of any kind, whose files are open meanwhile. prefix: of the names of those that are
    meant, left out.

    Raises:
        AutoparError: nothing that can be read, or something that is damaged.
    """
    kind = kind_of(folder)
    with ExitStack() as stack:
        if kind == "torch":
            found, others = _of_torch(folder)
            at = folder
        elif kind == "huggingface":
            found, others, at = _of_huggingface(folder, stack), (), folder
        else:
            at = step_at(folder, step)
            found, others = _of_step(at, stack), ()
        if prefix:
            others = (*others, *(name for name in found if not name.startswith(prefix)))
            found = {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
        if not found:
            raise AutoparError(
                f"{folder} has no weights" + (f" whose names begin with {prefix!r}" if prefix else ""), remedy=_REMEDY
            )
        yield Weights(kind, at, found, _model_type(folder), others)


def _model_type(folder: Path) -> str:
    """What the configuration beside says."""
    path = folder / "config.json"
    if not folder.is_dir() or not path.is_file():
        return ""
    text = files.read_text(path, "configuration", most_bytes=1 << 24, remedy=_REMEDY)
    said = files.parse_json(text, "configuration", where=str(path), remedy=_REMEDY)
    found = said.get("model_type") if isinstance(said, dict) else None
    return found if isinstance(found, str) else ""


# ------------------------------------------------------------------------------------------------------------ autopar


def _of_step(at: Path, stack: ExitStack) -> dict[str, Weight]:
    manifest = read_manifest(at)
    held = stack.enter_context(opened(at, manifest.files))
    for name in sorted({piece[0] for tensor in manifest.model.values() for piece in tensor.pieces}):
        held.check(name)
    return {
        name: Weight(DTYPES[each.dtype], tuple(each.shape), partial(_read_pieces, held, name, each))
        for name, each in manifest.model.items()
    }


def _read_pieces(held: Files, name: str, tensor: StoredTensor, box: Box) -> Tensor:
    found = torch.empty(box.sizes, dtype=DTYPES[tensor.dtype])
    for (file, begin, _, _, hashes), piece in zip(tensor.pieces, tensor.boxes, strict=True):
        shared = intersection(box, piece) if box.sizes else Box((), ())
        if shared is not None:
            region = Region(shared.within(piece), found[shared.within(box).slices()])
            held.fill(Source(name, file, begin, found.dtype, piece.sizes, hashes, (region,)))
    return found


# -------------------------------------------------------------------------------------------------------- huggingface


def _of_huggingface(folder: Path, stack: ExitStack) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    if not (folder / INDEX).exists():
        for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
            held = _safetensors(path, stack)
            if twice := sorted(held.keys() & found.keys()):
                raise _damaged(path, f"another file has the tensor {twice[0][:200]}, too")
            found.update(held)
        return found
    where = files_by_name(folder)
    for path in dict.fromkeys(where.values()):
        held = _safetensors(path, stack)
        for name in (name for name, file in where.items() if file == path):
            if name not in held:
                raise _damaged(path, f"the index says that it has {name[:200]}, which it has not")
            found[name] = held[name]
    return {name: found[name] for name in where}


def _safetensors(path: Path, stack: ExitStack) -> dict[str, Weight]:
    """By the file's own header, as mapped files count as memory."""
    files.regular_file(path, "checkpoint", remedy=_REMEDY)
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
        raise _damaged(path, f"a header of {length} bytes, in a file of {size}")
    try:
        text = os.pread(descriptor, length, 8).decode()
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    header = files.parse_json(text, "header", where=str(path), remedy=_REMEDY, once=True)
    found: dict[str, Weight] = {}
    for name, said in header.items() if isinstance(header, dict) else ():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = _DTYPES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
            numbers = (*shape, begin, end)
            is_right = all(type(each) is int and each >= 0 for each in numbers) and end <= size - 8 - length
            if not is_right or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{shape} at bytes {begin} … {end}")
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"{name[:200]}: {type(error).__name__}: {error}") from error
        found[name] = Weight(dtype, shape, partial(_read_file, path, descriptor, 8 + length + begin, dtype, shape))
    return found


def _read_file(path: Path, descriptor: int, begin: int, dtype: torch.dtype, shape: tuple[int, ...], box: Box) -> Tensor:
    """The rows that a box lies in are read."""
    cut = next((dim for dim, size in enumerate(box.sizes) if size != 1), len(shape))  # the first dim with several
    first = 0
    for dim in range(min(cut + 1, len(shape))):
        first = first * shape[dim] + box.offsets[dim]
    inner = math.prod(shape[cut + 1 :])
    sizes = (*(1 for _ in shape[:cut]), *box.sizes[cut : cut + 1], *shape[cut + 1 :])
    found = torch.empty(sizes, dtype=dtype)
    content, done = bytes_of(found), 0
    while done < len(content):
        count = os.preadv(descriptor, [content[done:]], begin + first * inner * dtype.itemsize + done)
        if not count:
            raise _damaged(path, "it ends too early")
        done += count
    for dim in range(cut + 1, len(shape)):
        found = found.narrow(dim, box.offsets[dim], box.sizes[dim])
    return found


# -------------------------------------------------------------------------------------------------------------- torch


def _of_torch(folder: Path) -> tuple[dict[str, Weight], tuple[str, ...]]:
    tensors, others = stored_tensors(DataReader(folder).read_metadata())
    found: dict[str, Weight] = {}
    for name, (dtype, shape, pieces) in tensors.items():
        boxes = [Box(offsets, sizes) for offsets, sizes, *_ in pieces]
        if dtype not in DTYPES.values() or not covers(boxes, shape):
            raise _damaged(folder, f"{name[:200]}: {dtype} {shape} in {len(boxes)} pieces, which are not all of it")
        found[name] = Weight(dtype, shape, _OfTorch(folder, name, dtype, tuple(zip(boxes, pieces, strict=True))))
    return found, others


class _Section(io.RawIOBase):
    """Some of an open file's bytes, as a file of their own; nothing of them is kept."""

    def __init__(self, file: io.RawIOBase, begin: int, length: int) -> None:
        super().__init__()
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        self.file.seek(self.begin + self.at)
        count = self.file.readinto(wanted) or 0
        self.at += count
        return count


class _OfTorch:
    """Reads boxes of a tensor, and keeps the last piece: they come in order."""

    def __init__(self, folder: Path, name: str, dtype: torch.dtype, pieces: tuple[tuple[Box, Any], ...]) -> None:
        self.folder, self.name, self.dtype, self.pieces = folder, name, dtype, pieces
        self._last: tuple[Box, Tensor] | None = None

    def __call__(self, box: Box) -> Tensor:
        found = torch.empty(box.sizes, dtype=self.dtype)
        for piece, (_, _, file, begin, length) in self.pieces:
            shared = intersection(box, piece) if box.sizes else Box((), ())
            if shared is None:
                continue
            if self._last is None or self._last[0] != piece:
                self._last = None  # before the next one is read
                self._last = piece, self._read(piece, file, begin, length)
            found[shared.within(box).slices()] = self._last[1][shared.within(piece).slices()]
        return found

    def _read(self, piece: Box, file: str, begin: int, length: int) -> Tensor:
        path = self.folder / file
        if not 0 <= length <= piece.numel * self.dtype.itemsize + (1 << 24):
            raise _damaged(path, f"{self.name[:200]}: a piece of {length} bytes")
        with open(path, "rb", buffering=0) as opened_file:
            content: Any = _Section(opened_file, begin, length)
            try:
                found = torch.load(content, weights_only=True, map_location="cpu")
            except Exception as error:  # a damaged pickle may raise anything
                raise _damaged(path, f"{self.name[:200]}: {str(error)[:200]}") from error
        if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != (tuple(piece.sizes), self.dtype):
            raise _damaged(path, f"{self.name[:200]}: its piece is another one")
        return found.detach()


# ------------------------------------------------------------------------------------------------------------ experts


def as_held(weights: Mapping[str, Weight], model_type: str) -> dict[str, Weight]:
    """Under the names and in the form in which transformers' model holds them: experts on top of each other."""
    made = made_of(model_type, weights)
    return {name: weights[each.parts[0][0]] if not each.is_stack else stacked(weights, each.parts)
            for name, each in made.items()}  # fmt: skip


def stacked(weights: Mapping[str, Weight], parts: tuple[tuple[str, ...], ...]) -> Weight:
    """[E, k · rows, …] of `k` parts of `E` weights [rows, …]."""
    first = weights[parts[0][0]]
    rows = [weights[names[0]].shape[0] for names in parts]
    for names, num in zip(parts, rows, strict=True):
        for name in names:
            each = weights[name]
            if (each.dtype, each.shape) != (first.dtype, (num, *first.shape[1:])):
                raise AutoparError(f"{name} is {each.dtype} {each.shape}, and not like other experts", remedy=_REMEDY)
    shape = (len(parts[0]), sum(rows), *first.shape[1:])

    def read(box: Box) -> Tensor:
        found = torch.empty(box.sizes, dtype=first.dtype)
        for expert in range(box.sizes[0]):
            begin = 0
            for names, num in zip(parts, rows, strict=True):
                low, high = max(box.offsets[1], begin), min(box.offsets[1] + box.sizes[1], begin + num)
                if low < high:
                    inner = Box((low - begin, *box.offsets[2:]), (high - low, *box.sizes[2:]))
                    value = weights[names[box.offsets[0] + expert]].read(inner)
                    found[expert, low - box.offsets[1] : high - box.offsets[1]] = value
                begin += num
        return found

    return Weight(first.dtype, shape, read)


def as_stored(weights: Mapping[str, Weight], model_type: str) -> dict[str, Weight]:
    """The inverse: as transformers stores them, an expert by itself."""
    made = stored_as(model_type, {name: each.shape for name, each in weights.items()})
    found: dict[str, Weight] = {}
    for name, how in made.items():
        whole = weights[name]
        if not how.is_stack:
            found[how.parts[0][0]] = whole
            continue
        if whole.shape[1] % len(how.parts):
            raise AutoparError(f"{name} is {whole.shape}, which is not {len(how.parts)} parts", remedy=_REMEDY)
        rows = whole.shape[1] // len(how.parts)
        for place, names in enumerate(how.parts):
            for expert, one in enumerate(names):
                read = partial(_read_expert, whole, expert, place * rows)
                found[one] = Weight(whole.dtype, (rows, *whole.shape[2:]), read)
    return found


def _read_expert(whole: Weight, expert: int, begin: int, box: Box) -> Tensor:
    return whole.read(Box((expert, begin + box.offsets[0], *box.offsets[1:]), (1, *box.sizes)))[0]


def _damaged(path: Path, why: str) -> AutoparError:
    return AutoparError("the checkpoint is damaged", where=str(path), values=why[:400], remedy=_REMEDY)


def described(found: Weights) -> list[tuple[str, str]]:
    """What is in a folder that is none of ours, in words."""
    names = {"huggingface": "HuggingFace's safetensors", "torch": "torch.distributed.checkpoint", "autopar": "autopar"}
    elements = sum(math.prod(each.shape) for each in found.weights.values())
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in found.weights.values()})
    size = sum(each.bytes for each in found.weights.values())
    rows = [
        ("kind", names[found.kind]),
        (
            "model",
            f"{len(found.weights)} tensors, {elements:,} elements, {size / (1 << 20):,.1f} MiB, {', '.join(dtypes)}",
        ),
    ]
    if found.model_type:
        rows.append(("type", found.model_type))
    if found.others:
        more = f" and {len(found.others) - 3} more" if len(found.others) > 3 else ""
        rows.append(("also", f"{', '.join(found.others[:3])}{more}"))
    return rows


def as_data(found: Weights) -> str:
    """The same for machines, with all tensors."""
    tensors = {
        name: {"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)}
        for name, each in found.weights.items()
    }
    said = {"kind": found.kind, "model_type": found.model_type, "model": tensors, "others": list(found.others)}
    return json.dumps(said)
