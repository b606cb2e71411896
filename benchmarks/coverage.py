"""Verify every model × strategy × mesh in float64 by simulating all ranks, and write the matrix to docs/coverage.md.

    python benchmarks/coverage.py [--only MODEL] [--float32]

A cell holds the worst relative error over loss, outputs, every gradient and the gradient norm
(`Plan.verify`), or the error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import autopar
from autopar.errors import AutoparError
from autopar.models import catalogue
from autopar.strategies import Strategy

MODELS: tuple[tuple[str, str, float | None], ...] = (
    ("llama", "llama", None),
    ("gpt2", "gpt2, no dropout", 0.0),
    ("gpt2", "gpt2, dropout 0.1", 0.1),
    ("bert", "bert, no dropout", 0.0),
    ("bert", "bert, dropout 0.1", 0.1),
    ("qwen3-0.6b", "qwen3", None),
    ("gemma2", "gemma2", None),
    ("phi3", "phi3", None),
    ("phi-3-medium", "phi3, grouped heads", None),
    ("t5", "t5, no dropout", 0.0),
    ("t5", "t5, dropout 0.1", 0.1),
    ("t5-3b", "t5-3b, heads wider than the hidden state, no dropout", 0.0),
    ("whisper", "whisper", None),
    ("vit", "vit", None),
    ("clip", "clip", None),
    ("mlp", "mlp", None),
    ("cnn", "cnn", None),
    ("resnet", "resnet", None),
)
STRATEGIES: dict[str, Strategy] = {
    "ddp": "ddp",
    "zero3": "zero3",
    "tensor": "tensor",
    "auto": "auto",
    "dp=zero3,tp=tensor": {"dp": "zero3", "tp": "tensor"},
}
MESHES = ("dp=2", "tp=2", "tp=4", "dp=2,tp=2", "dp=2,tp=4")


def cell(name: str, dropout: float | None, strategy: Strategy, mesh_text: str, dtype: torch.dtype) -> str:
    """The worst error as text, or what went wrong."""
    mesh = autopar.Mesh.parse(mesh_text, hardware="cpu")
    if isinstance(strategy, dict) and set(strategy) - set(mesh.axis_names):
        return "–"
    loaded = catalogue.load(name, tiny=True, device="cpu", dropout=dropout)
    try:
        plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)
        proof = plan.verify(dtype=dtype)
    except AutoparError as error:
        return f"error: {error}"
    return f"{'ok' if proof.ok else 'NOT EQUAL'} {proof.worst.error:.1e}"


def table(label: str, name: str, dropout: float | None, dtype: torch.dtype) -> tuple[list[str], int]:
    """The rows of one model, and how many cells failed."""
    rows = [f"## {label}", "", f"| strategy | {' | '.join(MESHES)} |", "|---" * (len(MESHES) + 1) + "|"]
    failed = 0
    for strategy_name, strategy in STRATEGIES.items():
        cells = []
        for mesh in MESHES:
            start = time.perf_counter()
            cells.append(cell(name, dropout, strategy, mesh, dtype))
            failed += cells[-1].startswith(("error", "NOT"))
            print(
                f"{label:20} {strategy_name:20} {mesh:10} {cells[-1]}  ({time.perf_counter() - start:.1f} s)",
                flush=True,
            )
        rows.append(f"| {strategy_name} | {' | '.join(cells)} |")
    return [*rows, ""], failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model; the page is not written")
    parser.add_argument("--float32", action="store_true", help="verify in float32; the page is not written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = torch.float32 if options.float32 else torch.float64
    lines: list[str] = []
    failed = 0
    for name, label, dropout in MODELS:
        if options.only in (None, name):
            rows, bad = table(label, name, dropout, dtype)
            lines += rows
            failed += bad
    if options.only is None and not options.float32:
        Path(__file__).parent.parent.joinpath("docs", "coverage.md").write_text(_page(lines))
    print(f"{failed} cells failed")
    return 1 if failed else 0


def _page(lines: list[str]) -> str:
    return "\n".join(
        [
            "# What is proven equal to eager",
            "",
            "Written by `python benchmarks/coverage.py`. Tiny versions of the models (`--tiny`), unmodified classes,",
            "all ranks simulated in one process in float64. A cell holds the largest relative error over the loss,",
            "every output, every gradient and the gradient norm; 1e-9 is allowed. `–`: the strategy names an axis that",
            f"the mesh does not have. torch {torch.__version__.split('+')[0]}.",
            "",
            *lines,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
