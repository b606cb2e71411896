"""Load safetensors: each rank reads its own pieces from disk, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_boxes, local_tensor


def load_pretrained(
    model: nn.Module, path: str | Path, device: torch.device, elsewhere: Sequence[tuple[str, ...]] = ()
) -> None:
    """Fill parameters and persistent buffers from `path`: one file, or a folder of *.safetensors (index or not).

    elsewhere: the names of each parameter that only other ranks hold, and read. Tied parameters may be stored under any
    of their names. Values are converted to the parameter's dtype.

    Raises:
        AutoparError: no such file, names that are missing or that the model does not have, other shapes.
    """
    from safetensors import safe_open

    where = _files_by_name(Path(path))
    targets = _targets(model, device)
    targets += [(list(names), None) for names in elsewhere]
    missing = [names[0] for names, _ in targets if not any(name in where for name in names)]
    known = {name for names, _ in targets for name in names}
    unexpected = sorted(set(where) - known)
    for problem, names in (("lacks", missing), ("has names that the model does not have:", unexpected)):
        if names:
            raise AutoparError(
                f"the checkpoint {problem} {_some(names)}",
                where=str(path),
                values=f"{len(where)} tensors in the checkpoint, {len(targets)} in the model",
                remedy="Load the checkpoint of this architecture, saved by this class",
            )
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for names, target in targets:
        if target is None:
            continue
        name = next(name for name in names if name in where)
        by_file.setdefault(where[name], []).append((name, target))
    for file, entries in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as opened, torch.no_grad():
            for name, target in entries:
                _fill(target, opened, name, file)


def _fill(target: Tensor, opened: Any, name: str, file: Path) -> None:
    stored = opened.get_slice(name)
    if tuple(stored.get_shape()) != tuple(target.shape):
        raise AutoparError(
            f"{name} has another shape in the checkpoint",
            where=str(file),
            values=f"{tuple(stored.get_shape())}, the model's is {tuple(target.shape)}",
            remedy="Load the checkpoint of this configuration",
        )
    if not isinstance(target, DTensor):
        target.copy_(opened.get_tensor(name))
        return
    local = local_tensor(target)
    if not target.ndim:
        local.copy_(opened.get_tensor(name))
        return
    for box in local_boxes(target):
        piece = stored[tuple(slice(run.start, run.start + run.length) for run in box)]
        local[tuple(slice(run.place, run.place + run.length) for run in box)] = piece.to(local.dtype).to(local.device)


def _targets(model: nn.Module, device: torch.device) -> list[tuple[list[str], Tensor | None]]:
    """Each parameter and persistent buffer once, with all its names; buffers on meta become real here."""
    persistent = set(model.state_dict(keep_vars=True))
    names_of: dict[int, list[str]] = {}
    tensor_of: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if tensor is None or full_name not in persistent:
                    continue
                if not isinstance(tensor, DTensor) and tensor.is_meta:
                    tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                    module._buffers[name] = tensor
                names_of.setdefault(id(tensor), []).append(full_name)
                tensor_of[id(tensor)] = tensor
    return [(names, tensor_of[key]) for key, names in names_of.items()]


def _files_by_name(path: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: path / file for name, file in weight_map.items()}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise AutoparError(
            "there is no checkpoint to load", where=str(path), remedy="Give a folder with *.safetensors, or one file"
        )
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
