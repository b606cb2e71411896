"""What is done with a checkpoint without the model, in one process: look, and check all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.blocks import MIB, Files, Region, Source, opened
from autopar.runtime.checkpoint.boxes import whole_of
from autopar.runtime.checkpoint.folders import step_at
from autopar.runtime.checkpoint.manifest import PLAN, Manifest, StoredTensor, read_manifest
from autopar.runtime.checkpoint.tree import DTYPES


def read(folder: Path, step: int | None = None) -> Manifest:
    """The manifest of a run's newest step, or of one, checked as far as it goes by itself.

    Raises:
        AutoparError: as `read_manifest`; no such step.
    """
    return read_manifest(step_at(folder, step))


def check(at: Path, manifest: Manifest) -> list[str]:
    """All that is not as it was written in a step's folder, a line each; every byte is read."""
    found: list[str] = []
    with opened(at, manifest.files) as files:
        broken: set[str] = set()
        for name in manifest.files:
            try:
                files.check(name)
            except AutoparError as error:
                broken.add(name)
                found.append(str(error))
        for name, tensor in manifest.tensors().items():
            for source in _sources(name, tensor, None):
                if source.file in broken:
                    continue
                try:
                    for _ in files.checked(source):
                        pass
                except AutoparError as error:
                    found.append(str(error))
    return found


def weights(at: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """The weights of a step, whole, one after the other.

    Raises:
        AutoparError: something is damaged.
    """
    with opened(at, manifest.files) as files:
        for name, tensor in manifest.model.items():
            for piece in tensor.pieces:
                files.check(piece[0])
            yield name, _whole(files, name, tensor, DTYPES[tensor.dtype])


def _whole(files: Files, name: str, tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    found = torch.empty(tensor.shape, dtype=dtype)
    for source in _sources(name, tensor, found):
        files.fill(source)
    return found


def _sources(name: str, tensor: StoredTensor, into: Tensor | None) -> list[Source]:
    """The pieces of a tensor, to be put into a whole one."""
    return [
        Source(
            name, file, begin, DTYPES[tensor.dtype], box.sizes, hashes,
            () if into is None else (Region(whole_of(box.sizes), into[box.slices()]),),
        )
        for (file, begin, _, _, hashes), box in zip(tensor.pieces, tensor.boxes, strict=True)
    ]  # fmt: skip


def summary(at: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """What is in a step's folder, in words."""
    run = manifest.run
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(run.axes, run.sizes))
    elements = sum(tensor.bytes // DTYPES[tensor.dtype].itemsize for tensor in manifest.model.values())
    rows = [
        ("step", str(manifest.step)),
        ("model", f"{run.model}, {len(manifest.model)} tensors, {elements:,} elements"),
        ("saved on", f"{mesh}; strategy {run.strategy or 'unknown'}; {run.microbatches} microbatches"),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
        ("files", f"{len(manifest.files)}, {sum(file.bytes for file in manifest.files.values()) / MIB:,.1f} MiB"),
    ]
    for optimizer in manifest.optimizers:
        names = sum(len(group.names) for group in optimizer.groups)
        rows.append(("optimizer", f"{optimizer.kind}, {len(optimizer.groups)} groups, {names} parameters"))
    if PLAN in manifest.files:
        rows.append(("plan", f"{manifest.files[PLAN].bytes / 1024:,.0f} KiB: autopar report {at / PLAN}"))
    extras = {"schedulers": manifest.schedulers, "loader": manifest.loader, "extra": manifest.extra}
    rows.append(("also", ", ".join(name for name, value in extras.items() if value) or "nothing"))
    return rows
