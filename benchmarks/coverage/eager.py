"""A pair in tiny form that runs eagerly: forward, a loss, every gradient."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.torch_compat import tracing
from benchmarks.coverage import inputs, shrinking
from benchmarks.coverage.discovery import Pair

SECONDS, TRIES_S = 8, 16
"""Of CPU: of one try, and of those after which no other is begun."""


@dataclass(frozen=True)
class Subject:
    """A model and the batch that it takes.

    parameters: how many numbers. loss: whether it has one of its own. blocks: whether a row of equal ones stands in it.
    attention: whether its inputs are one sequence. kept: which sizes stayed as they are by default.
    """

    model: nn.Module
    batch: Any
    parameters: int
    loss: bool
    blocks: bool
    sequence: bool
    kept: str
    dropout: bool


class NotEager(Exception):
    """No batch was found that the model takes."""


def subject(pair: Pair) -> Subject:
    """The first tiny model and batch that run.

    Raises NotEager with what stood in the way of the first.
    """
    dropout = int(pair.rank("dropout"), 16) % 8 == 0
    failure = ""
    made = shrinking.models(pair, dropout)
    began = time.process_time()
    while time.process_time() - began < TRIES_S:
        try:
            with _limited():
                model, kept = next(made)
        except StopIteration:
            break
        except Exception as error:
            failure = failure or _said(error)
            break
        for batch in inputs.batches(model, pair.task):
            batch = inputs.settled(batch)
            try:
                with _limited():
                    loss = run(copy.deepcopy(model), batch)
            except Exception as error:
                failure = failure or _said(error)
                continue
            sequence = "input_ids" in batch and set(batch) <= PLAIN and _attends(model)
            size = sum(p.numel() for p in model.parameters())
            return Subject(model, batch, size, loss, _repeats(model), sequence, kept, dropout)
    raise NotEager(failure)


PLAIN = {"input_ids", "attention_mask", "labels", "start_positions", "end_positions"}


def run(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Forward and backward; whether the loss is the model's own.

    Raises ValueError where nothing that depends on a parameter comes out, or a number is none.
    """
    return _differentiated(model, model(**batch))


def run_any(model: nn.Module, batch: Any) -> bool:
    """`run` with a batch of any form: by keyword, in order, or one tensor."""
    if isinstance(batch, Mapping):
        return run(copy.deepcopy(model), batch)
    model = copy.deepcopy(model)
    return _differentiated(model, model(*batch) if isinstance(batch, tuple) else model(batch))


def _differentiated(model: nn.Module, output: Any) -> bool:
    values = [v for v in tracing.tree_flatten(output)[0] if isinstance(v, Tensor) and v.is_floating_point()]
    own = output.get("loss") if hasattr(output, "get") else None
    loss = own if isinstance(own, Tensor) else None
    if loss is None:
        wanted = [value.square().mean() for value in values if value.requires_grad]
        if not wanted:
            raise ValueError("no output depends on a parameter")
        loss = torch.stack(wanted).sum()
    loss.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient")
    if not all(bool(each.isfinite().all()) for each in (loss, *gradients)):
        raise ValueError("a loss or a gradient is not finite")
    return own is not None


def _attends(model: nn.Module) -> bool:
    """Whether its configuration, or one inside it, counts heads."""
    return any(name.endswith(("heads", "n_head")) for config in inputs.configs(model) for name in vars(config))


def _repeats(model: nn.Module) -> bool:
    """Whether a list of modules has two of one class."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    return any(len(each) > 1 and type(each[0]) is type(each[1]) for each in lists)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} CPU-seconds")

    before = signal.signal(signal.SIGPROF, late)  # of CPU: a machine that has other work says nothing of a model
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
