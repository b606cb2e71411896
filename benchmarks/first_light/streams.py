"""Several simulated ranks on one device: programs with collectives and pipelines against eager.

On CUDA each rank has streams of its own, what it gathers and reduces on its side stream is late, and memory that holds
no result yet holds NaN (runtime/simulated_comm.py): a wait that is missing gives a wrong number. Without a GPU the
streams are those of tests/unit/runtime/racing.py, which find what could be read too early.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch

import autopar
from autopar.api.proof import program_of
from autopar.cli.models import catalogue
from autopar.runtime.simulate import simulate
from autopar.runtime.streams import Streams
from benchmarks.first_light.section import Section
from tests.unit.runtime.racing import RacingStreams

LATE_S = 2e-3
CASES = [
    ("llama", "dp=2", "zero3"), ("llama", "tp=2", "tensor"), ("llama", "dp=2,tp=2", "auto"), ("gpt2", "dp=2", "ddp"),
    ("llama", "pp=2", "auto"), ("gpt2", "pp=2,dp=2", "auto"), ("bert", "dp=4", "zero3"), ("t5", "tp=2", "tensor"),
]  # fmt: skip
TOLERANCES = {"cuda": 1e-4, "cpu": 1e-5}
"""Of the loss and of each gradient, on the scale of its largest, in float32 (on CUDA without TF32)."""
LEAST = 1e-3
"""Of the largest gradient of all: one that is smaller is rounding, as that of a key's bias, which is 0."""


def run(section: Section) -> None:
    for model, mesh, strategy in CASES[:5] if section.quick else CASES:
        for late in (0.0, LATE_S) if section.on_cuda else (0.0,):
            text = f"{model} {mesh} {strategy}{' late' if late else ''}"
            section.attempt(text, partial(_compare, section, text, model, mesh, strategy, late))


def _compare(section: Section, text: str, name: str, mesh: str, strategy: str, late: float) -> None:
    loaded = catalogue.load(name, tiny=True, batch=(8, 16), device="cpu", dropout=0.0)
    hardware = "h100-sxm" if section.on_cuda else "cpu"
    plan = autopar.plan(
        loaded.model, autopar.Mesh.parse(mesh, hardware=hardware), example_inputs=loaded.batch, strategy=strategy
    )
    constants = program_of(plan, loaded.model, loaded.batch, plan.mesh, False, torch.float32)[0].constants
    loaded.model.to(section.device)
    batch = {key: value.to(section.device) for key, value in loaded.batch.items()}
    loss = loaded.model(**batch).loss
    loss.backward()
    interface, model = plan.interface, loaded.model
    if interface.pipeline is not None:
        interface = replace(interface, pipeline=replace(interface.pipeline, keeps_outputs=True))
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    state = {name: x.to(section.device) for name, x in constants.items()} | dict(held)
    racing = None if section.on_cuda else RacingStreams()
    found = simulate(
        interface, plan.source, state, batch, device=section.device, late_s=late, streams=cast(Streams | None, racing)
    )
    races = [] if racing is None else racing.races
    wanted = {key: x.grad for key, x in loaded.model.named_parameters() if x.grad is not None}
    least = LEAST * max(float(want.abs().max()) for want in wanted.values())
    errors = {
        key: float((found.gradients[key] - want).abs().max() / max(least, float(want.abs().max())))
        for key, want in wanted.items()
        if key in found.gradients
    }
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    off = abs(float(found.outputs[0].detach()) - float(loss.detach())) / abs(float(loss.detach()))
    tolerance = TOLERANCES[section.device.type]
    right = off <= tolerance and errors[worst] <= tolerance and not races
    section.row(
        text, right, loss_error=off, worst=worst, gradient_error=errors[worst], compared=len(errors), races=races[:3]
    )
