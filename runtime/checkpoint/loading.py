"""Load a run, on any mesh: what each rank holds is put together of the pieces that meet it.

All that can be known is known before a value changes: which step, that its manifest covers every tensor once, that all
names, shapes and dtypes are the model's, that the files are there and of their lengths. Then bytes are read, and hashed
on the way; a block that is not as it was written ends it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import dtensor_like, local_tensor
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.blocks import Files, Region, Source, fill_all, opened
from autopar.runtime.checkpoint.boxes import Box, intersection, whole_of
from autopar.runtime.checkpoint.contents import NUMBERS, Contents, boxes_of, put_numbers, set_extra_states, tensors_of
from autopar.runtime.checkpoint.manifest import (
    PLAN,
    Manifest,
    PieceRow,
    StoredOptimizer,
    StoredTensor,
    damaged,
    read_manifest,
)
from autopar.runtime.checkpoint.random_state import set_random_state
from autopar.runtime.checkpoint.tree import DTYPES, NAMES, decode
from autopar.runtime.engine import Engine
from autopar.runtime.meeting import meet, together, told
from autopar.runtime.weights import materialize_buffers

logger = logging.getLogger("autopar")

WHAT = "load a checkpoint"
_OF_THIS = "Load the checkpoint of this model and these optimizers"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` found. step: as it was saved. extra: the same data. folder: of the step."""

    step: int
    extra: Any
    folder: Path


@dataclass(slots=True, eq=False)
class _Work:
    """What one rank is to read, and what to do then."""

    manifest: Manifest
    folder: Path
    sources: list[Source] = field(default_factory=list)
    favourites: dict[str, int] = field(default_factory=dict)
    then: list[Callable[[], None]] = field(default_factory=list)

    def want(self, name: str, stored: StoredTensor, tensor: Tensor) -> None:
        """Read this rank's part of a stored tensor into `tensor`.

        Raises:
            AutoparError: another shape or dtype.
        """
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        said = (stored.dtype, tuple(stored.shape))
        if said != (NAMES.get(local.dtype), tuple(tensor.shape)):
            raise AutoparError(
                f"{name} is another one in the checkpoint",
                where=str(self.folder),
                values=f"{said[0]} {said[1]}, here {str(local.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
                remedy="Load the checkpoint of this configuration; load_pretrained converts dtypes of weights alone",
            )
        wanted = boxes_of(tensor)
        copied = self.manifest.copies.get(name, ()) and [*stored.pieces, *self.manifest.copies[name]]
        if copied:
            wanted = tuple(each for each in wanted if not self._from_favourite(name, each, copied, local, stored.dtype))
        for (file, begin, _, _, hashes), piece in zip(stored.pieces, stored.boxes, strict=True):
            regions = [
                Region(shared.within(piece), local.detach()[place][shared.within(box).slices()])
                for box, place in wanted
                if (shared := _meeting(box, piece)) is not None
            ]
            if regions:
                dtype = DTYPES[stored.dtype]
                self.sources.append(Source(name, file, begin, dtype, piece.sizes, hashes, tuple(regions)))

    def favour(self, wanted: Iterable[tuple[str, StoredTensor, Tensor]]) -> None:
        """Of files that have the same, this rank reads those that have most of what it holds, in its own pieces: one of
        a rank that holds the same, where there is one.
        """
        if not self.manifest.copies:
            return
        found: Counter[str] = Counter()
        for name, stored, tensor in wanted:
            own = {(box.offsets, box.sizes) for box, _ in boxes_of(tensor)}
            for file, _, offsets, sizes, _ in (*stored.pieces, *self.manifest.copies.get(name, ())):
                if (tuple(offsets), tuple(sizes)) in own:
                    found[file] += math.prod(sizes) * DTYPES[stored.dtype].itemsize
        self.favourites = {file: at for at, (file, _) in enumerate(found.most_common())}

    def _from_favourite(
        self, name: str, wanted: tuple[Box, Any], rows: Sequence[PieceRow], local: Tensor, dtype: str
    ) -> bool:
        """Whether one of these pieces is just what is wanted, which then is read of the best file."""
        box, place = wanted
        same = [row for row in rows if (tuple(row[2]), tuple(row[3])) == (box.offsets, box.sizes)]
        if not same:
            return False
        file, begin, _, _, hashes = min(same, key=lambda row: self.favourites.get(row[0], len(self.favourites)))
        region = Region(whole_of(box.sizes), local.detach()[place])
        self.sources.append(Source(name, file, begin, DTYPES[dtype], box.sizes, hashes, (region,)))
        return True

    def data(self, tree: Any, what: str, like: Tensor | None = None) -> Any:
        """The data of a tree of the manifest; its tensors are filled when all is read. like: the parameter that some
        lie as.

        Raises:
            AutoparError: what is no data.
        """

        def get(name: str, is_like: bool) -> Tensor:
            stored = self.manifest.state[name]
            if is_like:
                if like is None or tuple(stored.shape) != tuple(like.shape):
                    raise ValueError(f"{name[:200]} lies as no parameter does")
                local = local_tensor(like) if isinstance(like, DTensor) else like
                empty = torch.zeros(local.shape, dtype=DTYPES[stored.dtype], device=local.device)
                found: Tensor = dtensor_like(like, empty) if isinstance(like, DTensor) else empty
            else:
                found = torch.zeros(stored.shape, dtype=DTYPES[stored.dtype])
            self.want(name, stored, found)
            return found

        try:
            return decode(tree, get)
        except ValueError as error:
            raise damaged(self.folder, f"{what}: {error}") from error


def _meeting(one: Box, other: Box) -> Box | None:
    return intersection(one, other) if one.sizes else Box((), ())


def load(
    model: nn.Module,
    engine: Engine,
    folder: Path,
    step: int | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    loader: Any,
) -> Loaded:
    """See `CompiledModule.load`. Collective."""
    meet(f"load a checkpoint from {str(folder)!r}", engine.comm.timeout_s, "Call load on every rank")
    engine.background.finish()
    at = Path(told(WHAT, lambda: str(folders.step_at(folder, step))))
    manifest = together(WHAT, lambda: _read(at, optimizers, schedulers, loader))

    def tensors() -> None:
        work = _Work(manifest, at)
        together(WHAT, lambda: _plan(work, model, engine, optimizers))
        with opened(at, manifest.files) as files:
            together(WHAT, lambda: _check_files(work, files))
            together(WHAT, lambda: fill_all(files, work.sources))
            read = files.read
        together(WHAT, lambda: [act() for act in work.then])
        materialize_buffers(model, engine.inner, engine.absent)
        logger.info("autopar: read %d bytes of %s", read, at)

    engine.when_placed(tensors)
    # What is no model's: small, whole on each rank, and known at once.
    work = _Work(manifest, at)
    extra = together(WHAT, lambda: _others(work, schedulers, loader))
    together(WHAT, lambda: _numbers(work, model))  # which the first step is told before anything is placed
    with opened(at, manifest.files) as files:
        together(WHAT, lambda: _check_files(work, files))
        together(WHAT, lambda: fill_all(files, work.sources))
    together(WHAT, lambda: [act() for act in work.then])
    together(WHAT, lambda: _restore_random(work, engine.comm.device))
    if dist.get_rank() == 0:
        _look_at_plan(at, manifest)
        with suppress(OSError):  # where it cannot be read, it cannot be saved into either
            engine.background.known.add(at.parent)
    return Loaded(manifest.step, extra, at)


def _read(at: Path, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], loader: Any) -> Manifest:
    manifest = read_manifest(at)
    for what, asked, stored in (
        ("optimizers", len(optimizers), len(manifest.optimizers)),
        ("schedulers", len(schedulers), len(manifest.schedulers)),
        ("loaders", int(loader is not None), int(manifest.loader is not None)),
    ):
        if asked and asked != stored:
            raise AutoparError(
                f"the checkpoint has {stored} {what}, {asked} are to be loaded",
                where=str(at),
                remedy="Leave them out to load without, or load what was saved",
            )
    for number, (optimizer, stored_one) in enumerate(zip(optimizers, manifest.optimizers)):
        if type(optimizer).__name__ != stored_one.kind:
            raise AutoparError(
                f"optimizer {number} of the checkpoint is a {stored_one.kind}, this one a {type(optimizer).__name__}",
                where=str(at),
                remedy="Make the same optimizer, or leave it out to begin with a fresh one",
            )
    return manifest


def _look_at_plan(at: Path, manifest: Manifest) -> None:
    """What is loaded does not depend on the plan of the run that saved: where it is damaged, that is told."""
    if PLAN in manifest.files:
        try:
            with opened(at, manifest.files) as files:
                files.check(PLAN)
        except AutoparError as error:
            logger.warning("autopar: %s It is not needed: what was loaded is whole.", error)


def _check_files(work: _Work, files: Files) -> None:
    for name in sorted({source.file for source in work.sources}):
        files.check(name)


def _plan(work: _Work, model: nn.Module, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
    """All that this rank is to read, without changing a value."""
    targets = _model_targets(work, model, engine)
    contents = Contents(model, engine)
    work.favour(targets)
    for name, stored, tensor in targets:
        work.want(name, stored, tensor)
    for optimizer, stored_one in zip(optimizers, work.manifest.optimizers):
        _plan_optimizer(work, contents, optimizer, stored_one)
    modules = work.data(work.manifest.modules, "modules")
    if modules is not None:  # what was converted has none
        work.then.append(lambda: set_extra_states(model, modules))


def _model_targets(work: _Work, model: nn.Module, engine: Engine) -> list[tuple[str, StoredTensor, Tensor]]:
    """The model's tensors and what is stored for them, under any of their names; buffers on meta become real.

    Raises:
        AutoparError: names that are missing, or that the model does not have.
    """
    stored = {alias: (name, each) for name, each in work.manifest.model.items() for alias in (name, *each.names)}
    found, used, missing = [], set(), []
    for names, tensor, is_parameter in tensors_of(model):
        known = [stored[name] for name in names if name in stored]
        if not known:
            missing.append(names[0])
            continue
        used |= {name for name, _ in known}
        if not is_parameter and tensor.is_meta:
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=engine.comm.device)
            for name in names:
                owner, _, last = name.rpartition(".")
                model.get_submodule(owner)._buffers[last] = tensor
        found.append((known[0][0], known[0][1], tensor))
    for absent in engine.absent:
        known = [stored[name] for name in absent.names if name in stored]
        used |= {name for name, _ in known}
        missing += [] if known else [absent.names[0]]
    unexpected = sorted(work.manifest.model.keys() - used)
    for problem, some in (("lacks", missing), ("has names that the model does not have:", unexpected)):
        if some:
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise AutoparError(
                f"the checkpoint {problem} {', '.join(some[:3])}{more}", where=str(work.folder), remedy=_OF_THIS
            )
    return found


def _plan_optimizer(work: _Work, contents: Contents, optimizer: Optimizer, stored: StoredOptimizer) -> None:
    kind, where = stored.kind, str(work.folder)
    group_of = {name: at for at, group in enumerate(stored.groups) for name in group.names}
    aliases = {name: names for names in contents.names_of.values() for name in names}
    mine: set[str] = set()
    states: list[tuple[Tensor, Any]] = []
    options: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        trained = [
            (next((each for each in aliases[name] if each in group_of), name), parameter)
            for name, parameter in contents.trained(group["params"], optimizer)
        ]
        if lacking := [name for name, _ in trained if name not in group_of]:
            raise AutoparError(f"the checkpoint's {kind} does not train {lacking[0]}", where=where, remedy=_OF_THIS)
        groups = sorted({group_of[name] for name, _ in trained})
        if not groups and len(stored.groups) == len(optimizer.param_groups):
            groups = [number]
        for other in groups[1:]:
            if stored.groups[other].options != stored.groups[groups[0]].options:
                raise AutoparError(
                    f"group {number} of this {kind} has parameters of two groups of the checkpoint's, whose options "
                    "differ",
                    where=where,
                    remedy=_OF_THIS,
                )
        if groups:
            tree = stored.groups[groups[0]].options
            options.append((group, work.data(tree, f"options of the {kind}")))
        for name, parameter in trained:
            mine.add(name)
            if name in stored.states:
                state = work.data(stored.states[name], f"the {kind}'s state of {name}", parameter)
                if not isinstance(state, dict):
                    raise damaged(work.folder, f"the {kind}'s state of {name} is none")
                is_moved = bool(group.get("capturable") or group.get("fused"))
                states.append((parameter, (state, is_moved)))
    elsewhere = {name for absent in contents.engine.absent for name in absent.names}
    if left := sorted(group_of.keys() - mine - elsewhere):
        raise AutoparError(
            f"the checkpoint's {kind} trains {left[0]}, which this one does not",
            where=where,
            values=f"{len(left)} such parameters",
            remedy=_OF_THIS,
        )

    def put() -> None:
        for group, found in options:
            group.update(found)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
        for parameter, (state, is_moved) in states:
            device = local_tensor(parameter).device if isinstance(parameter, DTensor) else parameter.device
            optimizer.state[parameter] = {key: _on_device(key, value, device, is_moved) for key, value in state.items()}

    work.then.append(put)


def _on_device(key: str, value: Any, device: torch.device, is_moved: bool) -> Any:
    """As torch's optimizers load: a count of steps stays on the CPU, unless a step reads it on the device."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or (key == "step" and not is_moved):
        return value
    return value.to(device)


def _numbers(work: _Work, model: nn.Module) -> None:
    stored = work.manifest.modules.get(NUMBERS) if isinstance(work.manifest.modules, dict) else None
    if stored is not None:
        found = work.data(stored, NUMBERS)
        work.then.append(lambda: put_numbers(model, found))


def _others(work: _Work, schedulers: Sequence[Any], loader: Any) -> Any:
    manifest = work.manifest
    extra = work.data(manifest.extra, "extra")
    for scheduler, tree in zip(schedulers, manifest.schedulers):
        state = work.data(tree, "the scheduler's state")
        work.then.append(partial(scheduler.load_state_dict, state))
    if loader is not None and manifest.loader is not None:
        num = len(manifest.loader.of_rank)
        if len(manifest.loader.values) > 1 and num != dist.get_world_size():
            raise AutoparError(
                "the checkpoint has another state of the loader for each rank",
                where=str(work.folder),
                values=f"{num} ranks, now {dist.get_world_size()}",
                remedy="Go on with as many ranks, or load without loader= and place the data by the step",
            )
        state = work.data(manifest.loader.of(dist.get_rank()), "the loader's state")
        work.then.append(partial(loader.load_state_dict, state))
    return extra


def _restore_random(work: _Work, device: torch.device) -> None:
    states = work.manifest.random
    if states is not None:
        try:
            set_random_state(states.of(dist.get_rank()), device)
        except ValueError as error:
            raise damaged(work.folder, str(error)) from error


def tuple_of(given: Any) -> tuple[Any, ...]:
    """None, one or several, as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)
