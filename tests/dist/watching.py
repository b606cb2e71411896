"""Work for test_watching: what may go wrong in a run, planted on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.base.torch_compat.distributed import local_tensor
from tests.dist import trainer
from tests.dist.checkpoints import Setting, compiled, held, optimizer_of
from tests.dist.training import message


def flipped(name: str, setting: Setting, of: str, rank: int, state: str = "") -> str:
    """What is said when one bit of a parameter, or of its optimizer's state, flips on one rank after two steps."""
    model, batch = compiled(name, setting)
    optimizer, _ = optimizer_of(model)
    autopar.watch(model, every=2)

    def run() -> None:
        for step in range(6):
            if step == 3 and dist.get_rank() == rank:
                parameter: Any = dict(model.named_parameters())[of]
                value = optimizer.state[parameter][state] if state else parameter
                local_tensor(value).detach().view(-1).view(torch.int32)[1] ^= 1
            model.train_step(**batch)
            optimizer.step()
            optimizer.zero_grad()

    return message(run)


def with_values(setting: Setting, policy: Any, planted: str, rank: int = 1) -> tuple[str, list[int], bool]:
    """A run in which one rank's gradients, or the loss of all, are bad at step 25 of 28: what is said, which steps were
    skipped, and whether that step left parameters and states as they were, bit by bit.
    """
    model, batch = compiled("gpt2", setting)
    optimizer, _ = optimizer_of(model)
    watch = autopar.watch(model, nonfinite=policy, spikes=policy)
    same: list[bool] = []

    def run() -> None:
        for step in range(28):
            output = model.train_step(**batch)
            if step == 25:
                _plant(model, watch, planted, output.loss.detach(), rank)
            if policy != "stop":  # clipping makes all gradients NaN where one is
                model.clip_grad_norm_(1.0)
            before = held(model, optimizer) if step == 25 else {}
            optimizer.step()
            if step == 25:
                after = held(model, optimizer)
                same.append(before.keys() == after.keys() and all(map(torch.equal, before.values(), after.values())))
            optimizer.zero_grad()

    said = message(run)
    return said, watch.skipped, all(same)


def _plant(model: Any, watch: autopar.Watch, planted: str, loss: Tensor, rank: int) -> None:
    if planted == "spike":
        watch.loss(loss * 100)
    elif dist.get_rank() == rank:
        grad = [p.grad for p in model.parameters() if p.grad is not None][-1]
        local_tensor(grad).view(-1)[0] = float(planted)


def always_bad() -> tuple[str, list[int]]:
    """What is said of a run in which no step can be taken."""
    model, batch = compiled("gpt2", ({"dp": 2}, "zero3"))
    optimizer, _ = optimizer_of(model)
    watch = autopar.watch(model, nonfinite="skip")

    def run() -> None:
        for _ in range(20):
            watch.loss(model.train_step(**batch).loss.detach() * torch.inf)
            optimizer.step()

    return message(run), watch.skipped


def in_a_trainer(folder: str) -> tuple[list[int], int, bool]:
    """The Trainer, whose second step has a gradient that is none on rank 1: skipped steps, steps, finite parameters."""
    model = trainer.compiled({"dp": 2}, "zero3")
    watch = autopar.watch(model, nonfinite="skip")
    made = trainer.trainer(model, folder, eval_strategy="no", save_strategy="no")

    step = made.training_step

    def bad_step(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        if watch.step == 2 and dist.get_rank() == 1:
            local_tensor(next(p.grad for p in model.parameters())).view(-1)[0] = torch.nan
        return loss

    made.training_step = bad_step
    made.train()
    return watch.skipped, watch.step, all(bool(local_tensor(p).isfinite().all()) for p in model.parameters())


def written(setting: Setting, folder: str, every: int) -> tuple[list[float], list[float], int]:
    """Six steps with metrics, a save behind the third, a gradient that is none in the fifth: losses and norms that
    this rank saw, and the tokens of a batch.
    """
    model, batch = compiled("gpt2", setting)
    optimizer, _ = optimizer_of(model)
    watch = autopar.watch(model, nonfinite="skip", every=every, metrics=f"{folder}/metrics", step=10)
    losses, norms = [], []
    for step in range(6):
        output = model.train_step(**batch)
        if step == 4:
            _plant(model, watch, "nan", output.loss.detach(), 1)
        losses.append(float(output.loss.detach()))
        norms.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.save(f"{folder}/run", step=step, optimizer=optimizer)
    watch.close()
    return losses, norms, batch["input_ids"].numel()
