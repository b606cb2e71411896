"""Whether an operator of a graph draws random numbers."""

from __future__ import annotations

import torch
from torch import fx

from autopar.base.torch_compat import tracing as compat


def draws(node: fx.Node) -> bool:
    """Whether an operator draws, as it is called: a dropout may be off."""
    if not isinstance(node.target, compat.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for place, argument in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        off = {"p": 0, "dropout_p": 0, "dropout": 0, "train": False, "training": False}.get(argument.name)
        if off is not None and isinstance(given, (bool, int, float)) and given == off:
            return False
    return True
