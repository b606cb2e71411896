"""Where the backward's nodes come from, and of what they are gradients, as autograd itself tells it.

Autograd keeps, for every operator of the forward that it differentiates, a node of its own. While the backward is
recorded, each of these says which gradients it gets (of the values that its operator made) and what it records: that
belongs to the module and source line of its operator. What is recorded between two of them are sums of gradients: they
belong to the value whose gradient they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import NAME, TERM


class BackwardNotes:
    """Notes origins and names in the meta of recorded nodes."""

    def __init__(self) -> None:
        self._origins: dict[Any, str] = {}
        self._names: dict[tuple[Any, int], str] = {}
        self._through: dict[Any, str] = {}
        self._watch = tracing.BackwardWatch(self._begins, self._ends)

    def made(self, result: object, origin: str, name: str) -> None:
        """The forward has computed `result` for a node of the model, whose value has this name ("": none)."""
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if not isinstance(value, torch.Tensor):
                continue
            for step in tracing.autograd_nodes(value, self._origins):
                self._origins[step] = origin
                self._through[step] = name
                self._watch.add(step)
            if name and value.grad_fn is not None:
                self._names[value.grad_fn, value.output_nr] = name
                self._through[value.grad_fn] = self._through.get(value.grad_fn) or name
            if name and (node := tracing.recorded_node(value)) is not None and node.op == "call_function":
                node.meta.setdefault(NAME, name)

    def _begins(self, step: Any, given: list[fx.Node | None]) -> None:
        for position, node in enumerate(given):
            if node is None or node.op != "call_function":
                continue
            if (name := self._names.get((step, position))) is not None:
                node.meta.setdefault(NAME, f"grad_{name}")
            node.meta.setdefault(tracing.ORIGIN_KEY, self._origins[step])

    def _ends(self, step: Any, given: list[fx.Node | None], recorded: list[fx.Node]) -> None:
        for node in recorded:
            node.meta[tracing.ORIGIN_KEY] = self._origins[step]
        name = self._through[step]
        for term in given:
            if name and term is not None and term in recorded:
                term.meta.setdefault(TERM, f"from_{name}")
