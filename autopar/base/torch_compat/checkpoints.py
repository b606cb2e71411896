"""Checkpoints of torch.distributed.checkpoint read as data. torch unpickles a folder's `.metadata`, and all that is no
tensor, without a limit: whoever wrote the folder runs what they like in the process that loads it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

# Where a piece lies: read from a folder's metadata, and written into it.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from autopar.base import files
from autopar.base.errors import AutoparError

MOST_BYTES = 1 << 30
"""Of a `.metadata`: it has a row for each piece of each tensor on each rank."""
_DATA = "__0_0.distcp"
_REMEDY = "load a folder that torch.distributed.checkpoint.save has written"
_METADATA = frozenset(
    {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    }
)  # fmt: skip
_OTHERS = frozenset(
    {
        ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("torch", "Size"), ("collections", "OrderedDict"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    }
)  # fmt: skip


class DataReader(FileSystemReader):
    """Reads a folder whose metadata names nothing but metadata, and no file outside of the folder.

    error: why the metadata was not read; torch 2.11 says only that there is none.
    """

    error: AutoparError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's.

        Raises:
            AutoparError: no metadata, or something else in its place.
        """
        try:
            return self._read(*args, **kwargs)
        except AutoparError as error:
            self.error = self.error or error
            raise

    def _read(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        content = files.read_bytes(path, "checkpoint's metadata", most_bytes=MOST_BYTES, remedy=_REMEDY)
        try:
            found = _Unpickler(io.BytesIO(content)).load()
        except AutoparError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise _damaged(path, "it is no metadata")
        for key, info in found.storage_data.items():
            name = getattr(info, "relative_path", None)
            inside = isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
            if not isinstance(key, MetadataIndex) or not inside or "\0" in str(name):
                raise _damaged(path, f"it names the file {str(name)[:80]!r}, which is not in the folder")
            if getattr(info, "transform_descriptors", None):
                raise _damaged(path, "its tensors are packed by extensions")
        for name in {info.relative_path for info in found.storage_data.values()}:
            files.regular_file(path.parent / name, "checkpoint", remedy=_REMEDY)
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class DataPlanner(DefaultLoadPlanner):
    """Takes of what is no tensor what `torch.load(weights_only=True)` takes: numbers, texts, lists, mappings."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:
            raise AutoparError(
                f"{read_item.dest_index.fqn} of the checkpoint is no plain data",
                values=str(error).splitlines()[0][:300] if str(error) else None,
                remedy="save numbers, texts, lists and mappings beside tensors; load others by themselves",
            ) from error
        plain = io.BytesIO()
        torch.save(found, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


Piece = tuple[tuple[int, ...], tuple[int, ...], str, int, int]
"""Of a stored tensor: offsets, sizes, file, first byte, length."""


def stored_tensors(
    metadata: Metadata,
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...], list[Piece]]], tuple[str, ...]]:
    """Of a folder's metadata: each tensor's dtype, shape and pieces (runtime/checkpoint/formats.py), and the names of
    what is none.

    Raises:
        AutoparError: a piece that is nowhere.
    """
    found: dict[str, tuple[torch.dtype, tuple[int, ...], list[Piece]]] = {}
    others = []
    for name, said in metadata.state_dict_metadata.items():
        if not isinstance(said, TensorStorageMetadata):
            others.append(name)
            continue
        pieces: list[Piece] = []
        for chunk in said.chunks:
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None:
                raise _damaged(Path(".metadata"), f"{name[:200]} has a piece that is nowhere")
            pieces.append((tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length))
        found[name] = said.properties.dtype, tuple(said.size), pieces
    return found, tuple(others)


Described = tuple[torch.dtype, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""A tensor to be written: dtype, shape, offsets and sizes of its pieces."""


def write_tensors(
    folder: Path, described: Mapping[str, Described], read: Callable[[str, Any, Any], torch.Tensor]
) -> None:
    """Write a folder that torch.distributed.checkpoint loads, in this process (runtime/checkpoint/convert.py). torch's
    own writer keeps a piece of every tensor until the end of a file; here one is in memory at a time.

    read: gives a piece, by name, offsets and sizes.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with open(folder / _DATA, "xb") as file:
        for name, (dtype, shape, pieces) in described.items():
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in pieces]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
            for chunk, (offsets, sizes) in zip(chunks, pieces, strict=True):
                begin = file.tell()
                torch.save(read(name, offsets, sizes).contiguous(), file)
                places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(_DATA, begin, file.tell() - begin)
        file.flush()
        os.fsync(file.fileno())
    with open(folder / ".metadata", "xb") as file:
        pickle.dump(Metadata(dict(tensors), None, places), file)
        file.flush()
        os.fsync(file.fileno())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_known = module == "torch.distributed.checkpoint.metadata" and name in _METADATA
        if is_dtype or is_known or (module, name) in _OTHERS:
            return super().find_class(module, name)
        raise AutoparError(
            f"the checkpoint's metadata names {module[:80]}.{name[:80]}, which is none",
            remedy=f"somebody may want to run code here: {_REMEDY}",
        )


def _damaged(path: Path, why: str) -> AutoparError:
    return AutoparError("the checkpoint is damaged", where=str(path), values=why[:300], remedy=_REMEDY)
