"""Save a run: every rank writes its pieces, rank 0 the manifest, and one rename makes a step of them.

    meet                 all ranks are there
    begin                rank 0 makes the new folder, under a name that is no step's
    write                each rank its boxes, in files of its own, onto the disk
    commit               rank 0 has what all wrote: sees that it is there and whole, writes the manifest, renames

Ranks wait for each other between these, and tell each other what failed.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.blocks import Entry, sync_folder, write_file
from autopar.runtime.checkpoint.boxes import whole_of
from autopar.runtime.checkpoint.contents import Contents, Held, extra_states
from autopar.runtime.checkpoint.manifest import (
    NAME,
    ByRank,
    Manifest,
    Run,
    StoredFile,
    StoredGroup,
    StoredOptimizer,
    StoredTensor,
    check,
)
from autopar.runtime.checkpoint.random_state import random_state
from autopar.runtime.checkpoint.tree import NAMES, encode, names_in
from autopar.runtime.engine import Engine
from autopar.runtime.meeting import at_first, gathered, meet, together

logger = logging.getLogger("autopar")

WHAT = "save a checkpoint"
SEES_WITHIN_S = 30.0
"""How long rank 0 waits to see what others wrote: folders of a network show it late."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What is saved beside the model. optimizers, schedulers: none, one or several. loader: or None."""

    step: int
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    loader: Any
    extra: Any
    keep: int


@dataclass(frozen=True, slots=True)
class _Section:
    """Tensors of one file of a rank."""

    name: str
    held: list[Held]


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank tells rank 0. tensors: by section, name: dtype, shape, names, pieces."""

    files: dict[str, StoredFile]
    tensors: dict[str, dict[str, StoredTensor]]
    optimizers: list[StoredOptimizer]
    loader: Any
    random: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What this rank holds, before it is written. trees: of rank 0, which count."""

    sections: list[_Section]
    optimizers: list[StoredOptimizer]
    trees: dict[str, Any]
    loader: Any
    random: Any


def save(model: nn.Module, engine: Engine, folder: Path, given: Given) -> Path:
    """The folder of the step. See `CompiledModule.save`. Collective."""
    if type(given.step) is not int or not 0 <= given.step <= folders.LARGEST_STEP or given.keep < 1:
        raise AutoparError(
            "a step is a number from 0, and at least one is kept", values=f"step {given.step}, keep={given.keep}"
        )
    meet(f"save step {given.step}", engine.comm.timeout_s, "Call save on every rank: each writes its own pieces")
    is_first = dist.get_rank() == 0
    made = together(WHAT, lambda: folders.begin(folder, given.step) if is_first else None)
    made = Path(gathered(WHAT, str(made))[0])
    try:
        part = together(WHAT, lambda: _part_of(model, engine, given))
        written = together(WHAT, lambda: _write(part, made))
        found = at_first(WHAT, written)
        final = together(WHAT, lambda: _commit(model, engine, part, found, made, given))
        return Path(gathered(WHAT, str(final))[0])
    except BaseException:
        if is_first:
            shutil.rmtree(made, ignore_errors=True)
        raise


def _part_of(model: nn.Module, engine: Engine, given: Given) -> _Part:
    contents = Contents(model, engine)
    state: list[Held] = []
    held = contents.of_model()
    one = len(given.optimizers) == 1
    optimizers = [
        contents.optimizer(optimizer, "optimizer" if one else f"optimizers[{number}]", state.append)
        for number, optimizer in enumerate(given.optimizers)
    ]

    def put(at: str, x: Tensor) -> dict[str, Any]:
        state.append(contents.other(at, x))
        return {"$at": at}

    names = ["scheduler"] if len(given.schedulers) == 1 else [f"schedulers[{i}]" for i in range(len(given.schedulers))]
    trees = {
        "schedulers": [encode(each.state_dict(), name, put) for each, name in zip(given.schedulers, names)],
        "extra": encode(given.extra, "extra", put),
        "modules": encode(dict(extra_states(model)), "modules", put),
    }
    rank, loader = dist.get_rank(), None
    if given.loader is not None:

        def put_own(at: str, x: Tensor) -> dict[str, Any]:
            state.append(contents.of_rank(at, x))
            return {"$at": at}

        loader = encode(_state_of(given.loader, "loader"), f"loader[{rank}]", put_own)
    sections = [_Section("model", held), _Section("state", state)]
    return _Part(sections, optimizers, trees, loader, random_state(engine.comm.device))


def _state_of(thing: Any, what: str) -> Any:
    if not callable(getattr(thing, "state_dict", None)):
        raise AutoparError(
            f"the {what} {type(thing).__name__} has no state_dict()",
            remedy=f"Hand in compiled.shard_loader(…), torchdata's StatefulDataLoader, or what is needed of the {what} "
            "as extra=",
        )
    return thing.state_dict()


def _write(part: _Part, made: Path) -> _Written:
    found_files: dict[str, StoredFile] = {}
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for section in part.sections:
        entries: list[Entry] = []
        rows: list[tuple[str, list[int], list[int]]] = []
        described = tensors.setdefault(section.name, {})
        for held in section.held:
            if held.name in described:
                raise AutoparError(f"{held.name} is saved twice", remedy="Hand in each optimizer and entry once")
            # All that a rank holds is described, by whoever writes it: so what nobody writes is missed.
            described[held.name] = StoredTensor(NAMES[held.local.dtype], list(held.shape), list(held.names), [])
            for box, place in held.boxes if held.writes else ():
                key = held.name if box == whole_of(held.shape) else f"{held.name}{box}"
                entries.append(Entry(key, held.local.dtype, box.sizes, partial(held.local.__getitem__, place)))
                rows.append((held.name, list(box.offsets), list(box.sizes)))
        if not entries:
            continue
        name = f"{section.name}-{dist.get_rank():05d}.safetensors"
        found_files[name], places = write_file(made / name, entries)
        for (tensor, offsets, sizes), (begin, hashes) in zip(rows, places, strict=True):
            described[tensor].pieces.append((name, begin, offsets, sizes, hashes))
    sync_folder(made)
    return _Written(found_files, tensors, part.optimizers, part.loader, part.random)


def _commit(
    model: nn.Module, engine: Engine, part: _Part, found: Sequence[_Written], made: Path, given: Given
) -> str | None:
    if dist.get_rank() != 0:
        return None
    manifest = _manifest(model, engine, part, found, given)
    try:
        check(manifest)
    except ValueError as error:
        raise AutoparError("what the ranks wrote does not fit together", values=str(error)[:600]) from error
    _check_seen(made, manifest.files)
    with open(made / NAME, "xb") as file:
        file.write(manifest.encoded())
        file.flush()
        os.fsync(file.fileno())
    final = folders.commit(made, given.step)
    try:
        folders.prune(final.parent, given.keep, final)
    except OSError as error:
        logger.warning("autopar: older checkpoints in %s could not be removed: %s", final.parent, error)
    return str(final)


def _manifest(model: nn.Module, engine: Engine, part: _Part, found: Sequence[_Written], given: Given) -> Manifest:
    stored: dict[str, dict[str, StoredTensor]] = {"model": {}, "state": {}}
    for rank, written in enumerate(found):
        for section, tensors in written.tensors.items():
            for name, tensor in tensors.items():
                known = stored[section].setdefault(name, StoredTensor(tensor.dtype, tensor.shape, tensor.names, []))
                if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                    raise AutoparError(
                        f"{name} is {tensor.dtype} {tensor.shape} on rank {rank}, {known.dtype} {known.shape} before"
                    )
                known.pieces.extend(tensor.pieces)
    optimizers = [
        _merged(number, [each.optimizers[number] for each in found]) for number in range(len(part.optimizers))
    ]
    loaders = [each.loader for each in found]
    interface, plan = engine.interface, getattr(model, "plan", None)
    manifest = Manifest(
        step=given.step,
        run=Run(
            model=type(model).__qualname__,
            axes=list(engine.comm.axes),
            sizes=list(engine.comm.sizes),
            microbatches=1 if interface is None else interface.microbatches,
            strategy=str(getattr(plan, "strategy", "")),
            versions={"torch": torch.__version__, "python": platform.python_version()},
            time_s=time.time(),
        ),
        files={name: file for each in found for name, file in each.files.items()},
        model=stored["model"],
        state=stored["state"],
        optimizers=optimizers,
        loader=_by_rank(loaders) if any(each is not None for each in loaders) else None,
        random=_by_rank([each.random for each in found]),
        **part.trees,
    )
    named = names_in([manifest.schedulers, manifest.extra, manifest.modules, loaders])
    named |= names_in([[each.states, [group.options for group in each.groups]] for each in optimizers])
    if lost := sorted(manifest.state.keys() - named.keys()):
        raise AutoparError(
            f"{lost[0]} is a tensor that rank 0 does not have",
            values=f"{len(lost)} such tensors",
            remedy="What is saved as extra= and of schedulers is rank 0's: hand in the same names on every rank "
            "(with a pipeline, whole tensors)",
        )
    return manifest


def _merged(number: int, parts: Sequence[StoredOptimizer]) -> StoredOptimizer:
    """An optimizer of what ranks have of it: ranks of other stages have other parameters, in the same groups."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.kind, len(part.groups)) != (first.kind, len(first.groups)):
            raise AutoparError(
                f"optimizer {number} of rank {rank} is a {part.kind} of {len(part.groups)} groups",
                values=f"rank 0's is a {first.kind} of {len(first.groups)}",
            )
    groups = []
    for at, group in enumerate(first.groups):
        names: dict[str, None] = {}
        for rank, part in enumerate(parts):
            other = part.groups[at]
            if other.options != group.options:
                different = [key for key in other.options if other.options[key] != group.options.get(key)]
                raise AutoparError(
                    f"{', '.join(different[:3])} of group {at} of the {first.kind} differs on rank {rank}",
                    remedy="Set learning rates and the like from what is the same on every rank",
                )
            names.update(dict.fromkeys(other.names))
        groups.append(StoredGroup(group.options, list(names)))
    states: dict[str, Any] = {}
    for part in parts:
        states.update(part.states)
    return StoredOptimizer(first.kind, groups, states)


def _by_rank(values: Sequence[Any]) -> ByRank:
    different: list[Any] = []
    of_rank = []
    for value in values:
        if value not in different:
            different.append(value)
        of_rank.append(different.index(value))
    return ByRank(of_rank, different)


def _check_seen(made: Path, known: Mapping[str, StoredFile]) -> None:
    """Rank 0 sees what all wrote, whole: the folder is one that all share."""
    until = time.monotonic() + SEES_WITHIN_S
    for name, said in known.items():
        while True:
            try:
                size = os.stat(made / name).st_size
            except FileNotFoundError:
                size = -1
            if size == said.bytes:
                break
            if time.monotonic() > until:
                raise AutoparError(
                    f"rank 0 does not see the file {name} that another rank wrote",
                    where=str(made),
                    values=f"{size} bytes of {said.bytes}" if size >= 0 else None,
                    remedy="Save into a folder that all machines share",
                )
            time.sleep(0.2)
