"""Search layouts of the largest mixtures without a device, and how the best compares with a published layout.

    python benchmarks/plans/mixtures.py [--models mixtral,qwen3,deepseek] [--json FILE] [--write]

Each is searched on its cluster for a global batch as its makers train with; parameters, results and the search's own
CPU seconds are told, and where a layout is published, what the same cost model says of it.
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

import autopar
from benchmarks import pages

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "class": "Mixtral", "cluster": "h100x128", "batch": (1024, 4096), "limits": {"pp": 8, "tp": 8, "cp": 1},
        "config": {
            "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
            "num_key_value_heads": 8, "vocab_size": 32768, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    },
    "qwen3": {
        "class": "Qwen3Moe", "cluster": "h100x128", "batch": (1024, 4096), "limits": {"pp": 8, "tp": 4, "cp": 1},
        "config": {
            "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "num_experts": 128, "num_experts_per_tok": 8,
        },
    },
    "deepseek": {
        "class": "DeepseekV3", "cluster": "h800x2048", "batch": (15360, 4096), "limits": {"pp": 16, "tp": 8, "cp": 1},
        "config": {}, "published": {"pp": 16, "ep": 64, "tp": 1},
    },
}  # fmt: skip
"""DeepSeek-V3: transformers' own configuration is the model's; its layout and batch: 2412.19437, sections 3.2, 4.2."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a model. best, published: points, as text. *_s: of a step, as planned, estimated. cpu_s: of the
    search with the plan of the best. bytes: that a rank of the best holds.
    """

    model: str
    cluster: str
    parameters: int
    best: str
    step_s: float
    bytes: float
    published: str
    published_s: float
    candidates: int
    cpu_s: float


def searched(name: str) -> Row:
    """One search, with the best planned."""
    import transformers

    entry = MODELS[name]
    config = getattr(transformers, f"{entry['class']}Config")(**entry["config"])
    with torch.device("meta"):
        model = getattr(transformers, f"{entry['class']}ForCausalLM")(config)
        ids = torch.zeros(entry["batch"], dtype=torch.int64)
    found = autopar.search(
        model, entry["cluster"], example_inputs={"input_ids": ids, "labels": ids}, limits=entry["limits"], top=1
    )
    (candidate, plan), *_ = found.planned
    same = [
        each for each in found.candidates
        if "published" in entry and all(getattr(each.point, k) == v for k, v in entry["published"].items())
    ]  # fmt: skip
    like = min(same, key=lambda each: each.step_s, default=None)
    return Row(
        name, entry["cluster"], sum(p.numel() for p in model.parameters()), str(candidate.point), plan.cost.step_time_s,
        float(plan.cost.memory.peak), "" if like is None else str(like.point), 0.0 if like is None else like.step_s,
        len(found.candidates), found.cpu_s,
    )  # fmt: skip


def page(rows: Sequence[Row]) -> str:
    """The table of all searches."""
    body = pages.table(
        (
            "model", "parameters", "cluster", "the best", "a step", "a rank holds", "published layout", "a step",
            "points", "CPU-s",
        ),
        [
            (
                row.model, f"{row.parameters / 1e9:.0f} G", row.cluster, row.best, f"{row.step_s:.2f} s",
                f"{row.bytes / 2**30:.1f} GiB", row.published, f"{row.published_s:.2f} s" if row.published else "",
                str(row.candidates), f"{row.cpu_s:.1f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    return f"# Layouts of the largest mixtures, searched without a device\n\n{pages.machine()}.\n\n{body}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = [Row(**row) for row in pages.kept(options.json)]
    for name in options.models.split(","):
        if any(row.model == name for row in rows):
            continue
        rows.append(searched(name))
        print(rows[-1], flush=True)
        pages.keep(options.json, rows[-1])
    print(page(rows))
    if options.write:
        print(pages.write("mixtures-searched", page(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
