"""A Llama of 1.2 billion parameters in bfloat16: autopar, compiled or not, beside eager and torch.compile, in turn.

One AdamW (fused) a contender. What the plan predicts, with the profile, beside what was measured; where the time goes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli.models import catalogue
from benchmarks.first_light.section import Section, alone

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256}  # fmt: skip
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
WARM_UP = 3
SHOWN = 15
"""Operators of the profile."""


def run(section: Section) -> None:
    small = section.quick and not section.on_cuda
    dtype = torch.bfloat16 if section.on_cuda else torch.float32
    rows = (2, 32) if small else (4, 2048)
    loaded = catalogue.load(
        "llama", batch=rows, device="cuda" if section.on_cuda else "cpu", dropout=0.0, dtype=dtype,
        overrides=QUICK if small else SIZES,
    )  # fmt: skip
    batch, base = dict(loaded.batch), loaded.model
    with alone(section):
        steps: dict[str, Callable[[], Any]] = {}
        for name, build in _contenders(section).items():
            made = section.attempt(name, partial(_step, section, name, build, base, batch))
            if made is not None:
                steps[name] = made
        names = list(steps)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(5 if section.quick else 20):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if not section.is_late:
                    seconds[name].append(_seconds(section, steps[name]))
        medians = {name: statistics.median(taken) for name, taken in seconds.items() if taken}
        tokens = rows[0] * rows[1]
        for name, taken in medians.items():
            section.row(f"step: {name}", None, ms=1e3 * taken, tokens_per_s=tokens / taken, rounds=len(seconds[name]))
        for name in names:
            if name.startswith("autopar") and not section.is_late:
                _profile(section, name, steps[name])


def _contenders(section: Section) -> dict[str, Callable[[Any, Any], Any]]:
    """What makes a trained model of a model. Without a GPU nothing goes through a C++ compiler."""
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    profile = str(section.profile) if section.profile.exists() else None

    def ours(compiled: bool | str) -> Callable[[Any, Any], Any]:
        return lambda model, batch: autopar.compile(
            model, mesh, example_inputs=batch, strategy="ddp", compile_regions=compiled, hardware=profile
        )

    if not section.on_cuda:
        return {"eager": lambda model, batch: model, "autopar": ours(False), "autopar, compiled": ours("aot_eager")}
    return {
        "eager": lambda model, batch: model,
        "autopar, compiled": ours(True),
        "autopar": ours(False),
        "torch.compile": lambda model, batch: torch.compile(model),
    }


def _step(
    section: Section, name: str, build: Callable[[Any, Any], Any], base: Any, batch: dict[str, Any]
) -> Callable[[], Any]:
    """A step, warm; a row with its loss, memory beyond what was held before, and, of autopar's, what was predicted."""
    held = section.held()
    model = build(copy.deepcopy(base), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [float(step()) for _ in range(WARM_UP)]
    section.synchronize()
    if section.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = _seconds(section, step)
    found: dict[str, Any] = {"losses": losses, "ms": 1e3 * taken, **section.memory(held)}
    plan = getattr(model, "plan", None)
    if plan is not None:
        cost = plan.cost
        found |= {"predicted_ms": 1e3 * cost.step_time_s, "predicted_gib": cost.peak_memory_bytes / 2**30}
        found["hardware"] = str(section.profile) if section.profile.exists() else "shipped"
    section.row(f"made: {name}", None, **found)
    return step


def _seconds(section: Section, step: Callable[[], Any]) -> float:
    section.synchronize()
    begun = time.perf_counter()
    step()
    section.synchronize()
    return time.perf_counter() - begun


def _profile(section: Section, name: str, step: Callable[[], Any]) -> None:
    """The operators and kernels that take longest; all of the table goes to a file."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if section.on_cuda else [])]
    with profile(activities=activities) as found:
        step()
        section.synchronize()
    by = "self_cuda_time_total" if section.on_cuda else "self_cpu_time_total"
    text = found.key_averages().table(sort_by=by, row_limit=60)
    (section.out / f"step1b.{name.replace(', ', '-')}.txt").write_text(text, encoding="utf-8")
    attribute = "self_device_time_total" if section.on_cuda else "self_cpu_time_total"
    longest = sorted(found.key_averages(), key=lambda each: -getattr(each, attribute))[:SHOWN]
    section.row(f"profile: {name}", None, ms={each.key[:80]: getattr(each, attribute) / 1e3 for each in longest})
