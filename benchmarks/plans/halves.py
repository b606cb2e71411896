"""What two microbatches at a time bring to mixtures whose tokens travel: simulated steps, no device.

    python benchmarks/plans/halves.py [--only NAME] [--json FILE] [--write]

Layers of published sizes, a few of each, are planned for the same batch in three ways: whole; in two microbatches, one
after the other; in two that go through the program together (`passes/pair.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

import autopar
from autopar.cost.under_way import step_hidden_s
from benchmarks import pages

DEEPSEEK: dict[str, Any] = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "use_cache": False}
QWEN: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "use_cache": False,
}  # fmt: skip
SETTINGS: dict[str, tuple[str, dict[str, Any], str, dict[str, int], Any, tuple[int, int]]] = {
    "deepseek-8": ("DeepseekV3", DEEPSEEK, "h800", {"dp": 8}, "zero2+expert", (32, 4096)),
    "deepseek-64": ("DeepseekV3", DEEPSEEK, "h800", {"dp": 64}, "zero2+expert", (256, 4096)),
    "qwen3-8": ("Qwen3Moe", QWEN, "h100", {"dp": 8}, "zero2+expert", (32, 4096)),
    "qwen3-64": ("Qwen3Moe", QWEN, "h100", {"dp": 64}, "zero2+expert", (256, 4096)),
    "qwen3-8x8": ("Qwen3Moe", QWEN, "h100", {"dp": 8, "ep": 8}, {"dp": "zero2", "ep": "expert"}, (256, 4096)),
}
"""Name -> model, its configuration, profile, mesh, strategy, batch. DeepSeek-V3: transformers' own sizes (2412.19437);
Qwen3-235B-A22B: 2505.09388.
"""
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in turn": {"microbatches": 2, "halves": False},
    "together": {"microbatches": 2, "halves": True},
}


ABOUT = """Nothing ran on a device: steps and bytes are predicted (docs/cost.md). Four layers of each model, its first
dense layer among DeepSeek-V3's, with embedding and head. *whole*: one batch; *in turn*: two microbatches, one after the
other; *together*: two that go through the program together. Over 64 devices tokens cross the network between nodes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, one way: seconds of a step, of its exchanges and of what of them is hidden; bytes of a rank."""

    setting: str
    way: str
    step_s: float
    exchange_s: float
    hidden_s: float
    bytes: float


def planned(name: str, way: str) -> Row:
    """The simulated step; nothing is kept from running out of memory, so that ways are compared alike."""
    kind, config, profile, sizes, strategy, batch = SETTINGS[name]
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
        ids = torch.zeros(batch, dtype=torch.int64)
    plan = autopar.plan(
        model, autopar.Mesh(sizes, hardware=profile), strategy=strategy, precision="bf16", memory_limit=1e15,
        example_inputs={"input_ids": ids, "labels": ids}, rematerialize="none", **WAYS[way],
    )  # fmt: skip
    assert plan.program is not None
    exchange_s = sum(row.seconds for row in plan.collectives if row.kind == "exchange")
    return Row(name, way, plan.cost.step_time_s, exchange_s, step_hidden_s(plan.program), plan.cost.peak_memory_bytes)


def page(rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    body = pages.table(
        ["setting", "mesh, batch", "way", "a step", "exchanges", "of it hidden", "a rank holds"],
        [
            [
                row.setting, _where(row.setting), row.way, f"{row.step_s * 1e3:.1f} ms",
                f"{row.exchange_s * 1e3:.1f} ms", f"{row.hidden_s / row.exchange_s:.0%}",
                f"{row.bytes / 2**30:.1f} GiB",
            ]
            for row in rows
        ],
    )  # fmt: skip
    return f"# Two microbatches at a time, simulated\n\n{pages.machine()}. {ABOUT}\n\n{body}\n"


def _where(setting: str) -> str:
    _, _, profile, sizes, strategy, (rows, length) = SETTINGS[setting]
    axes = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    return f"{profile} {axes}, {strategy}, {rows}x{length}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, split by commas")
    parser.add_argument("--json", type=Path, help="a file from which a later run goes on")
    parser.add_argument("--write", action="store_true", help="write the dated page in benchmarks/results")
    options = parser.parse_args(arguments)
    rows = [Row(**row) for row in pages.kept(options.json)]
    known = {(row.setting, row.way) for row in rows}
    for name, way in ((name, way) for name in options.only.split(",") for way in WAYS):
        if (name, way) not in known:
            rows.append(planned(name, way))
            pages.keep(options.json, rows[-1])
    print(page(rows))
    if options.write:
        print(pages.write("mixtures-in-halves", page(rows)))


if __name__ == "__main__":
    main()
