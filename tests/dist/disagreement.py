"""Work for test_agreement: one rank does something else, after a first step that all agreed on."""

from __future__ import annotations

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
    if odd and habit == "no grad":
        torch.set_grad_enabled(False)
    try:
        return message(lambda: _step(compiled, optimizer, batch))
    finally:
        torch.set_grad_enabled(True)


def _step(compiled: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    loss = compiled(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded_in_parts() -> tuple[float, float]:
    """Two steps whose batches come as DTensors, each rank with rows of its own; their losses."""
    compiled, batch = compile_tiny("gpt2", (2,), strategy="zero2")
    losses = [float(compiled(**each).loss.detach()) for each in compiled.shard_loader([batch, batch])]
    return losses[0], losses[1]
