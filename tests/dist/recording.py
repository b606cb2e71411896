"""What ranks do for tests/dist/test_recording.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.pipelining import compile_gpt2
from tests.dist.training import message


def record(path: str, sizes: dict[str, int], strategy: Any, microbatches: int) -> dict[str, Any]:
    """A trace of two steps; what one rank sends in a step, as planned; what a block without a step says."""
    compiled, batch = compile_gpt2(sizes, strategy, microbatches=microbatches)
    compiled.train_step(**batch)
    with compiled.record(path):
        compiled.train_step(**batch)
        compiled(**batch).loss.backward()

    def nothing() -> None:
        with compiled.record(path):
            pass

    plan = compiled.plan
    calls = [call.path for call in plan.program.calls] if plan.program is not None else []
    sent = sum(row.bytes_sent for row in plan.collectives)
    return {"nothing": message(nothing), "sent": sent, "calls": calls, "seconds": plan.cost.step_time_s}


def evaluate(path: str) -> None:
    """A trace of a forward alone, and of one whose backward never comes."""
    compiled, batch = compile_gpt2({"dp": 2}, "zero3")
    compiled.eval()
    with torch.no_grad():
        compiled(**batch)
        with compiled.record(path):
            compiled(**batch)
