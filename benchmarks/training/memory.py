"""Memory that a plan predicts beside what a step holds, by kind, on two local ranks.

    python benchmarks/training/memory.py [--only llama:zero3] [--detail] [--write]

Every model × strategy trains two steps (the first makes the optimizer's states); in the second, rank 0 follows every
storage. Then a plan for inference runs its second forward so. The ratio is predicted by measured peak: under 1, a plan
promises to fit where it does not.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

import autopar
from autopar.cli.models import catalogue
from benchmarks import pages
from benchmarks.training.peers import axis_of, mesh_of, ours
from benchmarks.training.ranks import MIB, LiveBytes, device_type, launch, local_bytes, machine, peak_bytes, progress

LLAMA: dict[str, object] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
GPT2: dict[str, object] = {"vocab_size": 2048, "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 256}
BERT: dict[str, object] = {
    "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024,
}  # fmt: skip
MODELS: dict[str, tuple[str, tuple[int, int], float | None, dict[str, object]]] = {
    "llama": ("llama", (8, 256), None, LLAMA),
    "gpt2": ("gpt2", (8, 256), 0.0, GPT2),
    "gpt2, dropout": ("gpt2", (8, 256), 0.1, GPT2),
    "bert": ("bert", (8, 256), 0.0, BERT),
    "mlp": ("mlp", (2048, 1), None, {}),
}
STRATEGIES = ("ddp", "zero2", "zero3", "tensor", "tensor+sequence", "auto")


def measure(name: str, strategy: str, detail: bool) -> dict[str, float] | str:
    """Predicted and measured bytes of one case on this rank, or why there is no plan."""
    model, batch = _loaded(name)
    try:
        contender = ours(strategy, model, batch)
    except autopar.AutoparError as error:
        return str(error).splitlines()[0]
    contender.step(batch)
    compiled: Any = contender.model
    memory = compiled.plan.cost.memory
    parameters = list(contender.model.parameters())
    found = {f"predicted {key}": float(getattr(memory, key)) for key in KINDS}
    held = [*contender.tensors(), *batch.values()]
    contender.forward_backward(batch)
    found["measured gradients"] = local_bytes(parameter.grad for parameter in parameters)
    contender.optimizer.zero_grad()
    found["measured peak"], live = peak_bytes(lambda: contender.step(batch), held)
    found["measured parameters"] = local_bytes(parameters)
    buffers = local_bytes([*contender.model.buffers(), *batch.values()])
    found["measured optimizer_states"] = (
        local_bytes(contender.tensors()) - found["measured parameters"] - local_bytes(contender.model.buffers())
    )
    if detail and live is not None:
        progress(f"{name} {strategy}: {_text(live)}\n  buffers and batch {buffers / MIB:.2f} MiB")
    return found


def measure_inference(name: str, strategy: str, detail: bool) -> tuple[float, float] | str:
    """Predicted and measured bytes of a forward at its fullest, or why there is no plan."""
    model, batch = _loaded(name)
    compiled: Any = autopar.compile(model, mesh_of(axis_of(strategy)), strategy=strategy)
    with torch.no_grad():
        try:
            compiled(**batch)  # the first batch plans, for a forward alone
        except autopar.AutoparError as error:
            return str(error).splitlines()[0]
        gc.collect()
        held = [*compiled.parameters(), *compiled.buffers(), *batch.values()]
        measured, live = peak_bytes(lambda: compiled(**batch), held)
    if detail and live is not None:
        progress(f"{name} {strategy}, inference: {_text(live)}")
    return float(compiled.plan.cost.memory.peak), float(measured)


def _loaded(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    spec, rows, dropout, overrides = MODELS[name]
    loaded = catalogue.load(spec, batch=rows, device="cpu", dropout=dropout, overrides=overrides)
    return loaded.model.to(device_type()), {key: value.to(device_type()) for key, value in loaded.batch.items()}


KINDS = ("parameters", "gradients", "optimizer_states", "peak")


def _text(live: LiveBytes) -> str:
    """What lives at the peak, the most first."""
    counted: Counter[tuple[int, str]] = Counter(live.living)
    lines = [f"{live.peak / MIB:.2f} MiB at {live.at}"]
    for (size, label), count in sorted(counted.items(), key=lambda item: -item[0][0] * item[1])[:40]:
        if size * count > 0.002 * live.peak:
            lines.append(f"{size * count / MIB:9.2f} MiB = {count} × {size / MIB:.3f} {label}")
    return "\n    ".join(lines)


def cells(name: str, strategy: str, found: dict[str, float] | str) -> list[str]:
    if isinstance(found, str):
        return [name, strategy, f"no plan: {found}", *[""] * 5]
    pairs = [(found[f"predicted {kind}"] / MIB, found[f"measured {kind}"] / MIB) for kind in KINDS]
    predicted, measured = pairs[-1]
    rest = [sum(pair[side] for pair in pairs[:3]) for side in (0, 1)]
    texts = [f"{a:.1f} / {b:.1f}" for a, b in [*pairs[:3], (predicted - rest[0], measured - rest[1]), pairs[-1]]]
    return [name, strategy, *texts, f"**{predicted / measured:.3f}**"]


def inference_cells(name: str, strategy: str, found: tuple[float, float] | str) -> list[str]:
    if isinstance(found, str):
        return [name, strategy, f"no plan: {found}", ""]
    predicted, measured = found
    return [name, strategy, f"{predicted / MIB:.1f} / {measured / MIB:.1f}", f"**{predicted / measured:.3f}**"]


HEADER = ["model", "strategy", "parameters MiB", "gradients", "optimizer states", "the rest at the peak", "peak",
          "predicted / measured peak"]  # fmt: skip
INFERENCE_HEADER = ["model", "strategy", "peak MiB", "predicted / measured peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="MODEL, or MODEL:STRATEGY; may be given several times")
    parser.add_argument("--detail", action="store_true", help="print what lives at each peak")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    cases = [(name, strategy) for name in MODELS for strategy in STRATEGIES]
    cases = [case for case in cases if not options.only or {case[0], ":".join(case)} & set(options.only)]
    training, inference = launch(measure_all, cases, options.detail)[0]
    rows = [cells(*case, found) for case, found in zip(cases, training, strict=True)]
    forwards = [inference_cells(*case, found) for case, found in zip(cases, inference, strict=True)]
    page = (
        f"# Memory of a step, predicted and measured, {date.today()}\n\n{machine()}; float32.\n\n"
        "`python benchmarks/training/memory.py`. Cells are predicted / measured MiB of rank 0; the peak is of live "
        f"storages through forward, backward and AdamW.\n\n{_sizes()}\n\n{pages.table(HEADER, rows)}\n\n"
        "Planned for inference, of one forward under `torch.no_grad`:\n\n"
        f"{pages.table(INFERENCE_HEADER, forwards)}\n"
    )
    print(page)
    if options.write:
        pages.write("memory", page)


def measure_all(cases: list[tuple[str, str]], detail: bool) -> tuple[list[Any], list[Any]]:
    """Of every case a training step, and a forward."""
    training: list[Any] = []
    inference: list[Any] = []
    for name, strategy in cases:
        training.append(measure(name, strategy, detail))
        progress(" ".join(cells(name, strategy, training[-1])))
        inference.append(measure_inference(name, strategy, detail))
        progress(" ".join(inference_cells(name, strategy, inference[-1])))
    return training, inference


def _sizes() -> str:
    return "; ".join(
        f"{name}: {size[3] or 'as `autopar models` lists it'}, batch {size[1]}" for name, size in MODELS.items()
    )


if __name__ == "__main__":
    main()
