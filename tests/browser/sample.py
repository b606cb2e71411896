"""The content of a report as its maker would write it: a Llama on 16 stages × 8 × 8 devices, with everything there is.

What depends on nothing stands in sample.json. The numbers are made up, but consistent where the page adds them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.browser import sample_curves, sample_graph
from tests.browser.sample_graph import LAYER_WEIGHTS, MODULES

STEP_S = 7.52
LAYERS = 126


def content(num_ranks: int = 16, num_events: int = 300, num_collectives: int = 60) -> dict[str, Any]:
    """Everything. num_events: of each rank, about."""
    items, pictures = sample_graph.graph()
    text, anchors = sample_graph.program(items)
    parameters = _parameters()
    return {
        **json.loads(Path(__file__).with_name("sample.json").read_text(encoding="utf-8")),
        "collectives": _collectives(items, num_collectives),
        "pictures": pictures,
        "items": items,
        "parameters": parameters,
        "explanations": {row["name"]: _explanation(row) for row in parameters if row["name"] != "model.norm.weight"},
        "memory": [sample_curves.memory(rank, num_ranks) for rank in range(num_ranks)],
        "timeline": sample_curves.timeline(num_ranks, num_events, STEP_S),
        "program": {"html": text, "anchors": anchors, "edited": False},
    }


def _parameters() -> list[dict[str, Any]]:
    rows = [
        _parameter(f"model.layers.*.{name}", shape, tp, dp, LAYERS, list(range(16)), f"p:layer.{name}")
        for name, shape, tp, dp in LAYER_WEIGHTS
    ]
    rows.append(_parameter("model.embed_tokens.weight", (128256, 16384), 0, 1, 1, [0], None))
    rows.append(_parameter("lm_head.weight", (128256, 16384), 0, 0, 1, [15], None))
    rows.append(_parameter("model.norm.weight", (16383,), None, 0, 1, [15], None))
    return rows


def _parameter(
    name: str, shape: tuple[int, ...], tp: int | None, dp: int | None, count: int, stages: list[int], item: str | None
) -> dict[str, Any]:
    cut = [
        str(size) + "".join(f"/{axis}" for axis, dim in (("dp", dp), ("tp", tp)) if dim == index)
        for index, size in enumerate(shape)
    ]
    used = [str(size) + ("/tp" if tp == index else "") for index, size in enumerate(shape)]
    elements = 1
    for size in shape:
        elements *= size
    return {
        "name": name,
        "count": count,
        "members": [name.replace("*", str(number)) for number in range(count)],
        "dtype": "f32",
        "shape": list(shape),
        "stored": f"f32[{', '.join(cut)}]",
        "used": f"bf16[{', '.join(used)}]",
        "gradient": f"bf16[{', '.join(used)}] +dp",
        "bytes_a_rank": elements
        * 4
        * -(-count // len(stages))
        // ((8 if dp is not None else 1) * (8 if tp is not None else 1)),
        "elements": elements * count,
        "region": "layer" if count > 1 else "epilogue",
        "item": item,
        "placement": {
            "shape": list(shape),
            "axes": [
                {"name": "dp", "size": 8, "dim": dp, "outer": 1, "zigzag": False},
                {"name": "tp", "size": 8, "dim": tp, "outer": 1, "zigzag": False},
            ],
        },
        "stages": stages,
        "held": {str(stage): len(range(stage, count, len(stages))) for stage in stages},
    }


def _explanation(row: dict[str, Any]) -> dict[str, Any]:
    """An answer of `plan.explain`, the same for each class but for its names."""
    text = Path(__file__).with_name("explanation.json").read_text(encoding="utf-8")
    shape = ", ".join(map(str, row["shape"]))
    for word in ("name", "stored", "used", "gradient"):
        text = text.replace(f"<{word}>", row[word])
    answer = json.loads(text.replace("<shape>", shape))
    return {**answer, "members": row["members"], "bytes_a_rank": row["bytes_a_rank"]}


def _collectives(items: dict[str, Any], count: int) -> list[dict[str, Any]]:
    pick = random.Random(1)
    moves = [key for key, item in items.items() if item["kind"] == "collective"]
    kinds = (
        ("all_gather", "tp", "redistribute"),
        ("reduce_scatter", "tp", "sum of terms"),
        ("all_gather", "dp", "gather parameter"),
        ("reduce_scatter", "dp", "reduce gradient"),
        ("send", "pp", "activations to the next stage"),
    )
    rows = []
    for number in range(count):
        kind, axis, why = kinds[number % len(kinds)]
        module = f"model.layers.*.{pick.choice(MODULES)}"
        rows.append(
            {
                "kind": kind,
                "axis": axis,
                "tensor": f"getitem_{number}",
                "bytes_sent": pick.random() * 4e9,
                "seconds": pick.random() * 0.08,
                "times": 384,
                "phase": pick.choice(("forward", "backward")),
                "where": f"layer forward: {module} (modeling_llama.py:{60 + number})",
                "why": why,
                "hidden": {"dp": 0.75, "tp": 0.0}.get(axis),
                "module": module,
                "item": moves[number % len(moves)],
            }
        )
    return rows
