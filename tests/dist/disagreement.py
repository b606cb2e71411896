"""Work for test_agreement: one rank does something else, after a first step that all agreed on."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.training import compile_tiny, message


def after_a_step(habit: str) -> str:
    """What is said when rank 1 has this habit from the second step on."""
    compiled, batch = compile_tiny("gpt2", (2,), strategy="zero2", example_inputs=None)
    odd = dist.get_rank() == 1
    rate = 0.1 * (1 + (odd and habit == "rate"))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=rate)
    _step(compiled, optimizer, batch)
    if odd and habit == "batch":
        batch = {name: value.roll(1, 0) for name, value in batch.items()}
    if odd and habit == "shape":
        batch = {name: value[:, :8].contiguous() for name, value in batch.items()}
    if odd and habit == "eval":
        compiled.eval()
    if odd and habit == "freeze":
        next(compiled.parameters()).requires_grad_(False)
    if odd and habit == "no grad":
        torch.set_grad_enabled(False)
    try:
        return message(lambda: _step(compiled, optimizer, batch))
    finally:
        torch.set_grad_enabled(True)


def between_steps(habit: str, sizes: tuple[int, ...], strategy: str) -> str:
    """What is said at the step behind the one in which rank 1 did something else to weights, gradients or losses."""
    compiled, batch = compile_tiny("gpt2", sizes, strategy=strategy, example_inputs=None)
    if habit == "frozen":
        compiled.transformer.wte.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in compiled.parameters() if each.requires_grad], lr=0.1)
    _step(compiled, optimizer, batch)
    odd = dist.get_rank() == 1
    loss = compiled(**batch).loss
    (loss * 2 if odd and habit == "loss" else loss).backward()
    for parameter in compiled.parameters() if odd and habit == "gradients" else ():
        parameter.grad.mul_(1.01)
    if not (odd and habit == "step"):
        optimizer.step()
    if not (odd and habit == "zero_grad"):
        optimizer.zero_grad()
    with torch.no_grad():
        if odd and habit == "weights":
            compiled.transformer.h[0].mlp.c_fc.weight.mul_(1.001)
        if odd and habit == "rounding":
            for parameter in compiled.parameters():
                parameter.view(-1)[0].mul_(1 + 2 * torch.finfo(parameter.dtype).eps)
        if odd and habit == "frozen":
            compiled.transformer.wte.weight.data.mul_(1.001)
        if odd and habit == "norm":
            compiled.transformer.ln_f.weight.mul_(1.001)
        if habit == "everywhere":
            for parameter in compiled.parameters():
                parameter.mul_(0.999)
                parameter.copy_(parameter * 2)
    said = message(lambda: _step(compiled, optimizer, batch))
    turns = iter(
        range(12 if habit not in ("loss", "step", "zero_grad", "gradients") else 0)
    )  # each parameter has its own
    while said == "no error" and next(turns, None) is not None:
        said = message(lambda: _step(compiled, optimizer, batch))
    return said


def without_rank_1() -> tuple[str, float]:
    """What ranks are told that begin a step without rank 1, and after how many seconds."""
    compiled, batch = compile_tiny("gpt2", (4,), strategy="zero2", example_inputs=None)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    _step(compiled, optimizer, batch)
    compiled.autopar.comm.timeout_s = 2.0
    dist.barrier()
    begun = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(6)
        return "", 0.0
    return message(lambda: _step(compiled, optimizer, batch)), time.monotonic() - begun


def steps_in_two_ways() -> float:
    """Rank 1 updates its parameters one by one, rank 0 all at once: the loss after a step."""
    compiled, batch = compile_tiny("gpt2", (2,), strategy="zero2", example_inputs=None)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, foreach=dist.get_rank() == 0)
    _step(compiled, optimizer, batch)
    return float(compiled(**batch).loss.detach())


def _step(compiled: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    loss = compiled(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded_in_parts() -> tuple[float, float, list[int] | None]:
    """Two steps whose batches come as DTensors, each rank with rows of its own; their losses. And, after an inference,
    a sum over ranks that neighbours exchange by themselves; None where they do not.
    """
    compiled, batch = compile_tiny("gpt2", (2,), strategy="zero2")
    losses = [float(compiled(**each).loss.detach()) for each in compiled.shard_loader([batch, batch])]
    comm = compiled.autopar.comm
    trains = comm.nearby is not None
    with torch.no_grad():
        compiled(**batch)
    total = comm.all_reduce(torch.arange(3) + dist.get_rank(), comm.axes[0]).tolist()
    return losses[0], losses[1], None if trains or comm.nearby is None else total
