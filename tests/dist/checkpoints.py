"""What one rank does in the tests of checkpoints: train, save, go on elsewhere. Importable by name."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import autopar
from autopar.base.errors import AutoparError
from tests.dist.pipelining import model_and_batch
from tests.dist.runtime.work import full
from tests.dist.training import as_under_torchrun

Setting = tuple[dict[str, int], Any]
"""Sizes of the mesh, strategy."""

ZERO3: Setting = ({"dp": 2}, "zero3")


def compiled(name: str, setting: Setting) -> tuple[Any, dict[str, Any]]:
    """A small model, and its batch."""
    sizes, strategy = setting
    model, batch = model_and_batch(name, torch.float32)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    options = {"microbatches": 2} if "pp" in sizes else {}
    return autopar.compile(model, mesh, example_inputs=batch, strategy=strategy, **options), batch


def held(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole parameters, buffers and states that this rank has a part of."""
    found = {name: full(value).clone() for name, value in model.named_parameters()}
    found |= {name: value.clone() for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = full(value).clone()
    return found


def steps(model: Any, optimizer: torch.optim.Optimizer, rates: Any, batch: dict[str, Any], num: int) -> list[float]:
    losses = []
    for _ in range(num):
        losses.append(float(model.train_step(**batch).loss.detach()))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return losses


def optimizer_of(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW in two groups, with a schedule."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2] or [model.autopar.placeholder], "weight_decay": 0.0},
    ]
    if not groups[0]["params"]:
        groups[0]["params"] = [model.autopar.placeholder]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def saved(name: str, setting: Setting, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps, a checkpoint; what was held then, and the losses of two more steps."""
    model, batch = compiled(name, setting)
    optimizer, rates = optimizer_of(model)
    steps(model, optimizer, rates, batch, 2)
    model.save(folder, step=2, optimizer=optimizer, scheduler=rates, extra={"rank": 0})
    return held(model, optimizer), steps(model, optimizer, rates, batch, 2)


def resumed(name: str, settings: list[Setting], folder: str) -> list[tuple[dict[str, Tensor], list[float]]]:
    """The same from the checkpoint, on other meshes, after a step of its own."""
    found = []
    for setting in settings:
        model, batch = compiled(name, setting)
        optimizer, rates = optimizer_of(model)
        steps(model, optimizer, rates, batch, 1)
        loaded = model.load(folder, optimizer=optimizer, scheduler=rates)
        assert loaded.step == 2 and loaded.extra == {"rank": 0}
        assert rates.last_epoch == 2
        found.append((held(model, optimizer), steps(model, optimizer, rates, batch, 2)))
    return found


def resumed_from(name: str, setting: Setting, folders: list[str]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """The same on one mesh, from one checkpoint after the other."""
    model, batch = compiled(name, setting)
    found = []
    for folder in folders:
        optimizer, rates = optimizer_of(model)
        assert model.load(folder, optimizer=optimizer, scheduler=rates).step == 2
        found.append((held(model, optimizer), steps(model, optimizer, rates, batch, 2)))
    return found


def failing(folder: str) -> list[str]:
    """What every rank says when one of them fails at something."""
    model, batch = compiled("llama", ({"dp": 2}, "zero3"))
    optimizer, rates = optimizer_of(model)
    steps(model, optimizer, rates, batch, 1)
    rank, said = dist.get_rank(), []

    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"at": Loader if rank == 1 else rank}

    try:
        model.save(folder, step=1, loader=Loader())
    except AutoparError as error:
        said.append(str(error))
    model.save(folder, step=1, optimizer=optimizer)
    if rank == 0:
        path = Path(folder, "step-000000001", "state-00001.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 4
        path.write_bytes(content)
    dist.barrier()
    try:
        model.load(folder, optimizer=optimizer)
    except AutoparError as error:
        said.append(str(error))
    model.save(folder, step=2, optimizer=optimizer)
    assert model.load(folder, optimizer=optimizer).step == 2
    return said


def meanwhile(folder: str) -> list[Any]:
    """Steps while each one is saved; then one that rank 1's disk has no room for, told at the next save."""
    from autopar.runtime.checkpoint import writing

    model, batch = compiled("llama", ZERO3)
    optimizer, rates = optimizer_of(model)
    losses: list[Any] = []
    for step in range(1, 5):
        losses += steps(model, optimizer, rates, batch, 1)
        model.save(folder, step=step, optimizer=optimizer, scheduler=rates, keep=10, wait=False)
    write_file = writing.write_file

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    model.autopar.background.finish()
    if dist.get_rank() == 1:
        writing.write_file = full
    model.save(folder, step=5, optimizer=optimizer, wait=False)
    losses += steps(model, optimizer, rates, batch, 1)
    try:
        model.save(folder, step=6, optimizer=optimizer, wait=False)
    except AutoparError as error:
        losses.append(str(error))
    writing.write_file = write_file
    found = []
    for step in range(1, 5):
        assert model.load(folder, step=step, optimizer=optimizer, scheduler=rates).step == step
        found += steps(model, optimizer, rates, batch, 1)
    return [losses, found]


def killed(folder: str, at: str, rank: int) -> None:
    """A save in which a rank is killed when it gets to one of its functions."""
    from autopar.runtime.checkpoint import folders, writing

    model, batch = compiled("llama", ({"dp": 2}, "zero3"))
    optimizer, rates = optimizer_of(model)
    steps(model, optimizer, rates, batch, 1)
    model.save(folder, step=1, optimizer=optimizer, scheduler=rates)
    steps(model, optimizer, rates, batch, 1)
    if dist.get_rank() == rank:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(folders if at in ("commit", "prune") else writing, at, die)
    model.save(folder, step=2, optimizer=optimizer, scheduler=rates)


def survived(folder: str) -> tuple[int, list[float]]:
    """What the next job finds: the step, and losses up to the third step."""
    model, batch = compiled("llama", ({"dp": 2}, "zero3"))
    optimizer, rates = optimizer_of(model)
    loaded = model.load(folder, optimizer=optimizer, scheduler=rates)
    return loaded.step, steps(model, optimizer, rates, batch, 3 - loaded.step)


def asked_to_end(folder: str) -> list[Any]:
    """A loop whose second rank gets a signal in its third step, then one that goes on, once the newest is damaged."""
    said: list[Any] = []
    for attempt in range(3):
        model, batch = compiled("llama", ({"dp": 2}, "zero3"))
        optimizer, rates = optimizer_of(model)
        run = autopar.resume_or_start(
            model, folder, start=partial(said.append, "start"), optimizer=optimizer, scheduler=rates, every=2
        )
        said.append((run.step, run.extra))
        for step in range(run.step, 4):
            said += steps(model, optimizer, rates, batch, 1)
            if attempt == 0 and step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if run.after(step + 1, extra=step):
                break
        if attempt == 1 and dist.get_rank() == 0:
            next(Path(folder, "step-000000004").glob("model-00001*")).unlink()
        dist.barrier()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    return said


def fed(setting: Setting, folder: str, goes_on: bool, own: bool) -> list[list[int]]:
    """The rows of the batches of a shuffled loader behind the fifth of a round of six, and of the next round. Of a run
    that saves there, or of one that goes on from it. own: whether the loader has a generator of its own.
    """
    sizes, strategy = setting
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(4)
    model: Any = autopar.compile(
        torch.nn.Linear(2, 2), mesh, example_inputs={"input": torch.zeros(4, 2)}, strategy=strategy
    )
    rows: Any = torch.arange(24.0).view(-1, 1).expand(-1, 2)
    generator = torch.Generator().manual_seed(9) if own else None
    loader = model.shard_loader(DataLoader(rows, batch_size=4, shuffle=True, generator=generator))
    found: list[list[int]] = []
    if goes_on:
        torch.manual_seed(77)
        assert model.load(folder, loader=loader).step == 5
    else:
        for number, _ in enumerate(loader, 1):
            if number == 5:
                model.save(folder, step=5, loader=loader)
                break
        model.load(folder, loader=loader)
    for _ in range(2):
        found += [full(batch)[:, 0].int().tolist() for batch in loader]
    return found


def ran(script: str, options: list[str]) -> dict[int, str]:
    """The losses that a script prints, as torchrun starts it."""
    as_under_torchrun()
    sys.argv = [script, *options]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return steps_of(printed.getvalue())


def steps_of(printed: str) -> dict[int, str]:
    """Losses by step, as lines have them: `step 3  loss 5.1`."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return {int(line[1]): line[3] for line in lines}
