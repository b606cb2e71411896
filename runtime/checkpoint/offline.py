"""What is done with a checkpoint without the model, in one process: look, check all of it, write whole weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.blocks import MIB, Entry, Files, Region, Source, opened, sync_folder, write_file
from autopar.runtime.checkpoint.boxes import whole_of
from autopar.runtime.checkpoint.folders import step_at
from autopar.runtime.checkpoint.manifest import PLAN, Manifest, StoredTensor, read_manifest
from autopar.runtime.checkpoint.pretrained import INDEX
from autopar.runtime.checkpoint.tree import DTYPES

SHARD_BYTES = 5 << 30
"""Of a file with whole weights, as transformers writes them; a tensor that is larger has one of its own."""


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


def convert(at: Path, out: Path, dtype: str | None = None) -> list[Path]:
    """Write the weights of a step as HuggingFace's safetensors: whole tensors under the model's names, tied ones once,
    in files of up to 5 GiB with an index where there are several. One tensor is in memory at a time.

    dtype: of floating-point tensors; None as they are. Gives the files.

    Raises:
        AutoparError: `out` is there already, no such dtype, or something is damaged; nothing is left then.
    """
    if out.exists():
        raise AutoparError(f"{out} is there already", remedy="Give the name of a folder that is to be made")
    wanted = None if dtype is None else DTYPES.get(dtype)
    if dtype is not None and (wanted is None or not wanted.is_floating_point):
        raise AutoparError(f"{dtype} is no floating-point dtype", remedy="Use float32, float16, bfloat16")
    manifest = read_manifest(at)
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in manifest.model.items():
        if shards[-1] and size + tensor.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.bytes
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write(at, manifest, made, shards, wanted)
        made.chmod(0o755)
        sync_folder(made)
        made.rename(out)
    except OSError as error:
        raise AutoparError("the weights cannot be written", where=str(out), values=str(error)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return sorted(out.iterdir())


def _write(at: Path, manifest: Manifest, made: Path, shards: list[list[str]], wanted: torch.dtype | None) -> None:
    where: dict[str, str] = {}
    with opened(at, manifest.files) as files:
        for name in {piece[0] for tensor in manifest.model.values() for piece in tensor.pieces}:
            files.check(name)
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            entries = []
            for name in names:
                tensor = manifest.model[name]
                stored = DTYPES[tensor.dtype]
                dtype = wanted if wanted is not None and stored.is_floating_point else stored
                part = partial(_whole, files, name, tensor, dtype)
                entries.append(Entry(name, dtype, tuple(tensor.shape), part))
                where[name] = file
            write_file(made / file, entries)
    if len(shards) > 1:
        total = sum(manifest.model[name].bytes for name in where)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        (made / INDEX).write_text(text, encoding="utf-8")


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
