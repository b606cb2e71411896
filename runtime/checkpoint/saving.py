"""Save a run: every rank writes its pieces, rank 0 the manifest, and one rename makes a step of them.

    meet                 all ranks are there, and the save before is done
    begin                rank 0 makes the new folder, under a name that is no step's
    part                 what each rank holds, and which boxes of it it writes; with wait=False, a copy of them
    write                each rank its boxes, in files of its own, onto the disk
    commit               rank 0 has what all wrote: sees that it is there and whole, writes the manifest, renames

Ranks wait for each other between these, and tell each other what failed. With wait=False the last two are a thread's
(`background.py`), which asks no other process (`writing.py`), and what failed is told when ranks meet next.
"""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar import __version__
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.background import Saving
from autopar.runtime.checkpoint.blocks import Entry
from autopar.runtime.checkpoint.boxes import whole_of
from autopar.runtime.checkpoint.contents import NUMBERS, Contents, Held, extra_states, numbers_left
from autopar.runtime.checkpoint.manifest import Run, StoredTensor
from autopar.runtime.checkpoint.random_state import random_state
from autopar.runtime.checkpoint.snapshot import Snapshot, room_of, snapshot
from autopar.runtime.checkpoint.tree import NAMES, encode, inline
from autopar.runtime.checkpoint.writing import SEES_WITHIN_S, Job, Row, Section
from autopar.runtime.engine import Engine
from autopar.runtime.meeting import meet, together, told

WHAT = "save a checkpoint"
INLINE_BYTES = 1 << 14
"""A tensor of a loader's state up to this size, such as a generator's state, stands in the manifest."""
_FOR_OTHERS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What is saved beside the model. optimizers, schedulers: none, one or several. loader: or None."""

    step: int
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    loader: Any
    extra: Any
    keep: int


def save(model: nn.Module, engine: Engine, folder: Path, given: Given, wait: bool) -> Path | Saving:
    """The folder of the step, or with wait=False what writes it. See `CompiledModule.save`. Collective."""
    if type(given.step) is not int or not 0 <= given.step <= folders.LARGEST_STEP or given.keep < 1:
        raise AutoparError(
            "a step is a number from 0, and at least one is kept", values=f"step {given.step}, keep={given.keep}"
        )
    meet(f"save step {given.step}", engine.comm.timeout_s, "Call save on every rank: each writes its own pieces")
    engine.background.finish()
    made = Path(told(WHAT, lambda: str(folders.begin(folder, given.step, engine.background.known))))
    try:
        if not wait:
            return engine.background.start(*together(WHAT, lambda: _copied(_job(model, engine, given, made), engine)))
        job = together(WHAT, lambda: _job(model, engine, given, made))
        together(WHAT, job.write)
        return Path(told(WHAT, lambda: str(job.commit(SEES_WITHIN_S))))
    except BaseException:
        if dist.get_rank() == 0:
            folders.discard(made)
        raise


def prepare(model: nn.Module, engine: Engine, optimizers: tuple[Optimizer, ...]) -> None:
    """Get memory for the copies of saves with wait=False, by a thread, so that the first of them has it."""
    contents = Contents(model, engine)
    state: list[Held] = []
    try:
        held = contents.of_model()
        for number, optimizer in enumerate(optimizers):
            contents.optimizer(optimizer, f"optimizers[{number}]", state.append)
    except AutoparError:  # what cannot be saved, the save says
        return
    sections = [_section("model", held), _section("state", state)]
    rooms = {each.name: room_of(each.entries) for each in sections}
    # Tensors of `extra` and of the loader come to it, which are small.
    sizes = {name: room + room // 64 + _FOR_OTHERS for name, room in rooms.items()}
    engine.background.memory.reserve(sizes, engine.comm.device.type == "cuda")


def _job(model: nn.Module, engine: Engine, given: Given, made: Path) -> Job:
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

    modules = {**extra_states(model), NUMBERS: numbers_left(model, engine.numbers())}
    names = ["scheduler"] if len(given.schedulers) == 1 else [f"schedulers[{i}]" for i in range(len(given.schedulers))]
    trees = {
        "schedulers": [encode(each.state_dict(), name, put) for each, name in zip(given.schedulers, names)],
        "extra": encode(given.extra, "extra", put),
        "modules": encode(modules, "modules", put),
    }
    rank, loader = dist.get_rank(), None
    if given.loader is not None:

        def put_own(at: str, x: Tensor) -> dict[str, Any]:
            if x.numel() * x.element_size() <= INLINE_BYTES and not isinstance(x, DTensor):
                return inline(x)  # so that what ranks have alike is seen to be one
            state.append(contents.of_rank(at, x))
            return {"$at": at}

        loader = encode(_state_of(given.loader, "loader"), f"loader[{rank}]", put_own)
    return Job(
        made=made,
        step=given.step,
        keep=given.keep,
        rank=rank,
        num_ranks=dist.get_world_size(),
        run=_run(model, engine),
        sections=[_section("model", held), _section("state", state)],
        optimizers=optimizers,
        trees=trees,
        loader=loader,
        random=random_state(engine.comm.device),
        known=engine.background.known,
        plan=_plan_of(model, engine) if rank == 0 else b"",
    )


def _run(model: nn.Module, engine: Engine) -> Run:
    interface, plan = engine.interface, getattr(model, "plan", None)
    return Run(
        model=type(model).__qualname__,
        axes=list(engine.comm.axes),
        sizes=list(engine.comm.sizes),
        microbatches=1 if interface is None else interface.microbatches,
        strategy=str(getattr(plan, "strategy", "")),
        versions=_versions(),
        time_s=time.time(),
    )


def _versions() -> dict[str, str]:
    """Of what made these numbers."""
    found = {"autopar": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("numpy", "transformers"):
        if name in sys.modules:  # a model of another library does not need it
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def _plan_of(model: nn.Module, engine: Engine) -> bytes:
    """The plan that the model runs by, as `Plan.save` writes it; made once for each plan."""
    plan: Any = getattr(model, "plan", None)
    if plan is None or not hasattr(plan, "to_json"):
        return b""
    known = engine.background.plan
    if known is None or known[0] is not plan:
        known = engine.background.plan = plan, plan.to_json().encode()
    return known[1]


def _state_of(thing: Any, what: str) -> Any:
    if not callable(getattr(thing, "state_dict", None)):
        raise AutoparError(
            f"the {what} {type(thing).__name__} has no state_dict()",
            remedy=f"Hand in compiled.shard_loader(…), torchdata's StatefulDataLoader, or what is needed of the {what} "
            "as extra=",
        )
    return thing.state_dict()


def _section(name: str, all_held: list[Held]) -> Section:
    entries: list[Entry] = []
    rows: list[Row] = []
    described: dict[str, StoredTensor] = {}
    for held in all_held:
        if held.name in described:
            raise AutoparError(f"{held.name} is saved twice", remedy="Hand in each optimizer and entry once")
        # All that a rank holds is described, by whoever writes it: so what nobody writes is missed.
        described[held.name] = StoredTensor(NAMES[held.local.dtype], list(held.shape), list(held.names), [])
        for box, place in held.boxes if held.writes else ():
            key = held.name if box == whole_of(held.shape) else f"{held.name}{box}"
            entries.append(Entry(key, held.local.dtype, box.sizes, partial(held.local.__getitem__, place)))
            rows.append(Row(held.name, list(box.offsets), list(box.sizes)))
    return Section(name, entries, rows, described)


def _copied(job: Job, engine: Engine) -> tuple[Job, list[Snapshot]]:
    """It, of copies."""
    copies = [snapshot(section.entries, engine.background.memory, section.name) for section in job.sections]
    sections = [replace(one, entries=copy.entries) for one, copy in zip(job.sections, copies)]
    return replace(job, sections=sections), copies
