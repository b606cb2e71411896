"""Small models of several families: five AdamW steps against eager, and how often a step waits for the device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from benchmarks.first_light.section import Section, alone

MODELS = ("llama", "qwen3", "gpt2", "bert", "t5")
STEPS = 5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the losses of five steps, relative."""


def run(section: Section) -> None:
    with alone(section):
        for name in MODELS[:2] if section.quick else MODELS:
            for dtype, compiled in _ways(section):
                text = f"{name} {str(dtype).removeprefix('torch.')} {'compiled' if compiled else 'uncompiled'}"
                section.attempt(text, partial(_train, section, text, name, dtype, compiled))
        section.attempt("taken for granted", partial(_granted, section))


class _Branching(nn.Module):
    """Decides by its input's values, which a program takes for granted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.min() < 0:
            pixels = (pixels + 1) / 2
        return self.linear(pixels).square().mean()


def _granted(section: Section) -> None:
    """A batch that is otherwise than the program takes for granted: told before a weight gets its NaN, nobody waits."""
    x = torch.rand(4, 8).to(section.device)
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(_Branching().to(section.device), mesh, strategy="zero3", example_inputs={"pixels": x})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waits = _waits(lambda: model(x).backward()) if section.on_cuda else None
    said = ""
    try:
        model(x - 0.5).backward()
        optimizer.step()
    except AutoparError as error:
        said = str(error)
    finite = all(bool(p.to_local().isfinite().all()) for p in model.parameters())
    section.row("taken for granted", "takes for granted" in said and finite and not waits, said=said[:200], waits=waits)


def _ways(section: Section) -> list[tuple[torch.dtype, bool | str]]:
    """Without a GPU regions go through Dynamo and AOTAutograd, not through a C++ compiler."""
    compiler: bool | str = True if section.on_cuda else "aot_eager"
    ways: list[tuple[torch.dtype, bool | str]] = [(torch.float32, False), (torch.float32, compiler)]
    return ways if not section.on_cuda else [*ways, (torch.bfloat16, False), (torch.bfloat16, compiler)]


def _train(section: Section, text: str, name: str, dtype: torch.dtype, compiled: bool | str) -> None:
    loaded = catalogue.load(name, tiny=True, batch=(4, 48), device="cpu", dropout=0.0, dtype=dtype)
    batch = {key: value.to(section.device) for key, value in loaded.batch.items()}
    eager = loaded.model.to(section.device)
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    ours = autopar.compile(copy.deepcopy(eager), mesh, example_inputs=batch, strategy="zero3", compile_regions=compiled)
    if section.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    wanted, found = _losses(eager, batch), _losses(ours, batch)
    difference = max(abs(a - b) / abs(a) for a, b in zip(wanted, found, strict=True))
    waits = _waits(lambda: ours(**batch).loss.backward()) if section.on_cuda else None
    right = difference <= TOLERANCES[dtype] and not waits
    section.row(text, right, difference=difference, eager=wanted, ours=found, waits=waits, **section.memory())


def _losses(model: Any, batch: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _waits(step: Callable[[], Any]) -> list[str]:
    """Where forward and backward of one more step wait for the device, as torch says: one text for each place."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    said = [f"{each.filename}:{each.lineno}" for each in seen if "synchroniz" in str(each.message)]
    return sorted(set(said))
