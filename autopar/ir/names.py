"""Names as people read them: parameters with a star for the repeated index, blocks, values; and what none may be."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx


def starred(name: str, modules: Sequence[str]) -> str:
    """`model.layers.7.mlp.up_proj.weight` with the block's number as `*`, where a region has that module path."""
    for module in modules:
        pattern = "".join(r"[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", module))
        if match := re.match(f"{pattern}(?=\\.|$)", name):
            return module + name[match.end() :]
    return name


def block_path(path: str) -> str:
    """`model.layers.3` for `model.layers.3.mlp`: the shortest part of a module's path that ends in a number."""
    match = re.match(r"(.*?\.)?(\D[^.]*)\.(\d+)(?=\.|$)", path)
    return match[0] if match else ""


def base_name(node: fx.Node) -> str:
    """`linear` for `linear_37`: names count from the region's beginning, so that depth does not change its text."""
    return re.sub(r"_\d+$", "", node.name) if node.op != "placeholder" else node.name


RESERVED = frozenset(
    {
        "aten", "at", "comm", "F", "forward", "backward", "g", "held", "kept", "ops", "p", "r", "saved",
        "split_inputs", "state", "torch",
    }
)  # fmt: skip
"""What the generated functions call things of their own."""
