"""Weights of one kind of folder as another kind, part by part: a model larger than memory is converted, too.

What is made is written under another name, synced, and gets its name by one rename; where something is damaged, or a
disk is full, nothing is left.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import torch

from autopar import __version__
from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import has_table
from autopar.base.torch_compat.checkpoints import write_tensors
from autopar.runtime.checkpoint.blocks import Entry, sync_folder, write_file, write_whole
from autopar.runtime.checkpoint.boxes import Box, whole_of
from autopar.runtime.checkpoint.folders import new_folder
from autopar.runtime.checkpoint.formats import PART_BYTES, Kind, Weight, as_held, as_stored, parts_of, weights_of
from autopar.runtime.checkpoint.manifest import NAME, Manifest, Run, StoredFile, StoredTensor
from autopar.runtime.checkpoint.pretrained import INDEX
from autopar.runtime.checkpoint.tree import DTYPES, NAMES

SHARD_BYTES = 5 << 30
"""Of a file with whole weights, as transformers writes them; a tensor that is larger has one of its own."""
BESIDE = ("config.json", "generation_config.json")
"""Of a HuggingFace folder, taken along into another one."""
EXPERTS = ("single", "stacked")


def convert(
    folder: Path,
    out: Path,
    dtype: str | None = None,
    *,
    to: Kind = "huggingface",
    step: int | None = None,
    prefix: str = "",
    experts: str | None = None,
    model_type: str | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> list[Path]:
    """Write the weights of a folder, of whatever kind, as another folder; its files.

    folder: what compiled.save, transformers' save_pretrained or torch.distributed.checkpoint wrote. dtype: of
    floating-point weights; None as they are. to: "huggingface" makes safetensors of up to 5 GiB with an index, "torch"
    what torch.distributed.checkpoint loads, "autopar" a step 0 for compiled.load. step: of ours; None the newest.
    prefix: of the names in a folder of torch's, which is left out (or put there, with to="torch"). experts: "single" or
    "stacked", the two ways in which mixtures are stored, as transformers does for `model_type`; None as they are.
    beside: files that the folder has, too, by name.

    Raises:
        AutoparError: `out` is there already, arguments that are none, or something is damaged; nothing is left then.
    """
    wanted = None if dtype is None else DTYPES.get(dtype)
    if dtype is not None and (wanted is None or not wanted.is_floating_point):
        raise AutoparError(f"{dtype} is no floating-point dtype", remedy="Use float32, float16, bfloat16")
    if to not in get_args(Kind) or experts not in (None, *EXPERTS):
        raise AutoparError(
            "nothing can be made so", values=f"to={to!r}, experts={experts!r}",
            remedy=f"Use {', '.join(get_args(Kind))}; {', '.join(EXPERTS)}",
        )  # fmt: skip
    with weights_of(folder, step, "" if to == "torch" else prefix) as found:
        weights = dict(found.weights)
        if experts is not None:
            weights = _regrouped(weights, experts, model_type or found.model_type)
        if to == "torch" and prefix:
            weights = {f"{prefix}{name}": each for name, each in weights.items()}
        writers: Mapping[str, Callable[[Path, dict[str, Weight], torch.dtype | None], None]] = {
            "huggingface": _huggingface, "torch": _torch, "autopar": _autopar,
        }  # fmt: skip
        with new_folder(out) as made:
            writers[to](made, weights, wanted)
            for name in BESIDE if found.kind == to == "huggingface" and folder.is_dir() else ():
                if name not in beside and (folder / name).is_file():
                    shutil.copyfile(folder / name, made / name)
            for name, content in beside.items():
                write_whole(made / name, content)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _regrouped(weights: dict[str, Weight], experts: str, model_type: str) -> dict[str, Weight]:
    if not model_type or not has_table(model_type):
        raise AutoparError(
            f"how {model_type or 'this model'} stores its experts is not known",
            remedy="Name what transformers calls it, --model-type mixtral (config.json says it), and see that "
            "transformers is installed",
        )
    return as_held(weights, model_type) if experts == "stacked" else as_stored(weights, model_type)


def _shards(weights: Mapping[str, Weight], wanted: torch.dtype | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, each in weights.items():
        num_bytes = (
            each.bytes * (1 if wanted is None else wanted.itemsize) // (1 if wanted is None else each.dtype.itemsize)
        )
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards


def _dtype(weight: Weight, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and weight.dtype.is_floating_point else weight.dtype


def _entry(name: str, weight: Weight, wanted: torch.dtype | None) -> Entry:
    whole = partial(weight.read, whole_of(weight.shape))
    return Entry(name, _dtype(weight, wanted), weight.shape, whole, partial(weight.parts, wanted))


def _huggingface(made: Path, weights: dict[str, Weight], wanted: torch.dtype | None) -> None:
    where: dict[str, str] = {}
    shards = _shards(weights, wanted)
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [_entry(name, weights[name], wanted) for name in names]
        where.update(dict.fromkeys(names, file))
        write_file(made / file, entries)
    if len(shards) > 1:
        total = sum(each.bytes // each.dtype.itemsize * _dtype(each, wanted).itemsize for each in weights.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        (made / INDEX).write_text(text, encoding="utf-8")


def _torch(made: Path, weights: dict[str, Weight], wanted: torch.dtype | None) -> None:
    described = {
        name: (
            _dtype(each, wanted),
            each.shape,
            [(tuple(box.offsets), tuple(box.sizes)) for box in parts_of(each.shape, PART_BYTES // each.dtype.itemsize)],
        )
        for name, each in weights.items()
    }

    def read(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        weight = weights[name]
        return weight.read(Box(offsets, sizes)).to(_dtype(weight, wanted))

    write_tensors(made, described, read)


def _autopar(made: Path, weights: dict[str, Weight], wanted: torch.dtype | None) -> None:
    step = made / "step-000000000"
    step.mkdir()
    stored_files: dict[str, StoredFile] = {}
    model: dict[str, StoredTensor] = {}
    for number, names in enumerate(_shards(weights, wanted)):
        file = f"model-{number:05d}.safetensors"
        stored_files[file], places = write_file(step / file, [_entry(name, weights[name], wanted) for name in names])
        for name, (begin, hashes) in zip(names, places, strict=True):
            shape = list(weights[name].shape)
            rows = [(file, begin, [0] * len(shape), shape, hashes)] if 0 not in shape else []
            model[name] = StoredTensor(NAMES[_dtype(weights[name], wanted)], shape, [name], rows)
    versions = {"autopar": __version__, "torch": torch.__version__, "python": platform.python_version()}
    run = Run("", [], [], 1, "", versions, time.time())
    (step / NAME).write_bytes(Manifest(0, run, stored_files, model).encoded())
    sync_folder(step)
