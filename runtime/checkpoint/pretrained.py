"""Load safetensors: each rank reads its own pieces from disk, tensor by tensor.

Checkpoints are data from elsewhere: files are regular ones of the folder itself, whatever an index says (the folder may
be a link, and hold links, as in a HuggingFace cache); nothing in them is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base import files
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_boxes, local_tensor

INDEX = "model.safetensors.index.json"
MOST_INDEX_BYTES, MOST_TENSORS = 64 * files.MIB, 1_000_000
"""Of an index; that of a model with 256 experts in 61 layers has 92,000 tensors in 9 mebibytes."""
MOST_FILES = 10_000
_REMEDY = "Load the checkpoint as it was saved, a folder of *.safetensors"


def load_pretrained(
    model: nn.Module, path: str | Path, device: torch.device, elsewhere: Sequence[tuple[str, ...]] = ()
) -> None:
    """Fill parameters and persistent buffers from `path`: one file, or a folder of *.safetensors (index or not).

    elsewhere: the names of each parameter that only other ranks hold, and read. Tied parameters may be stored under any
    of their names. Values are converted to the parameter's dtype.

    Raises:
        AutoparError: no such file, or one that is damaged or lies outside of the folder; two files with one tensor;
            names that are missing or that the model does not have, other shapes.
    """
    where = files_by_name(Path(path))
    targets = wanted(model, device, elsewhere, where, path)
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for names, target in targets:
        if target is None:
            continue
        name = next(name for name in names if name in where)
        by_file.setdefault(where[name], []).append((name, target))
    for file, entries in by_file.items():
        with _opened(file) as (opened, held), torch.no_grad():
            for name, target in entries:
                if name not in held:
                    raise _damaged(file, f"the index says that it has {name[:200]}, which it has not")
                _fill(target, opened, name, file)


def wanted(
    model: nn.Module,
    device: torch.device,
    elsewhere: Sequence[tuple[str, ...]],
    where: Collection[str],
    path: str | Path,
) -> list[tuple[list[str], Tensor | None]]:
    """What of the model is to be filled, with all its names, of a checkpoint that has the names `where`; None for what
    other ranks hold.

    Raises:
        AutoparError: names that are missing or that the model does not have.
    """
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
    return targets


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, frozenset[str]]]:
    """A safetensors file, and the names of its tensors."""
    from safetensors import SafetensorError, safe_open

    files.regular_file(file, "checkpoint", remedy=_REMEDY)
    try:
        opened = safe_open(file, framework="pt", device="cpu")
        with opened:
            yield opened, frozenset(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, why: str) -> AutoparError:
    return AutoparError("the checkpoint is damaged", where=str(file), values=why[:300], remedy=_REMEDY)


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


def files_by_name(path: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = path / INDEX
    if path.is_dir() and index.exists():
        return _indexed(path, index)
    listed = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.exists() else []
    if not listed or len(listed) > MOST_FILES:
        raise AutoparError(
            "there is no checkpoint to load",
            where=str(path),
            values=f"{len(listed)} files, at most {MOST_FILES} are read" if listed else None,
            remedy="Give a folder with *.safetensors, or one file",
        )
    found: dict[str, Path] = {}
    for file in listed:
        with _opened(file) as (_, held):
            if twice := sorted(held & found.keys()):
                raise AutoparError(
                    f"two files of the checkpoint have the tensor {_some(twice)}",
                    where=str(path),
                    values=f"{found[twice[0]].name} and {file.name}",
                    remedy="Leave one of them in the folder, or load it by its own path",
                )
            found.update(dict.fromkeys(held, file))
    return found


def _indexed(path: Path, index: Path) -> dict[str, Path]:
    """The same from an index, whose files lie beside it."""
    text = files.read_text(index, "checkpoint's index", most_bytes=MOST_INDEX_BYTES, remedy=_REMEDY)
    said = {"where": str(index), "remedy": _REMEDY}
    content = files.parse_json(text, "checkpoint's index", most_values=MOST_TENSORS, once=True, **said)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _damaged(index, "it has no weight_map, a mapping of names of tensors to names of files")
    for file in dict.fromkeys(weight_map.values()):
        # The file itself may be a link to elsewhere: whoever made the folder made that, not who wrote the index.
        parts = Path(file).parts
        if not parts or Path(file).is_absolute() or ".." in parts or "\0" in file or "\\" in file:
            raise AutoparError(
                "the checkpoint's index names a file outside of its folder",
                where=str(index),
                values=repr(file[:200]),
                remedy=_REMEDY,
            )
    return {name: path / file for name, file in weight_map.items()}


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(name[:200] for name in listed[:most]) + more
