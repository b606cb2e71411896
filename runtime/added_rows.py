"""Rows that a batch gets so that axes divide it, and that leave no trace: outputs are cut back to the rows given.

    3 rows on dp=2:  rows 0 1 | 2 2'  →  logits of 0 1 | 2;  the loss counts 0, 1 and 2

Row 2' is a copy of the last row, but for the labels, which say that nothing in it counts. That added rows have no part
in a loss is shown of the model's graph before (`autopar/passes/batching.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.torch_compat.distributed import local_tensor
from autopar.base.torch_compat.tracing import tree_flatten, tree_leaves_with_path, tree_unflatten
from autopar.ir.interface import ProgramInterface
from autopar.runtime.communicator import Communicator
from autopar.runtime.layout import local_part_shape
from autopar.runtime.placements import make_dtensor


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What is added to a batch of `rows` rows. inputs: those that have rows, along dim 0. fill: of these, what added
    rows have in the place of a copy. outputs: for each whether it has rows, along which dim.
    """

    rows: int
    more: int
    inputs: tuple[str, ...]
    fill: Mapping[str, int]
    outputs: tuple[int | None, ...]

    def pad(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs, by name, with the rows added."""
        return {name: self._padded(name, x) if name in self.inputs else x for name, x in tensors.items()}

    def pad_tree(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The same of nested inputs."""
        leaves, spec = tree_flatten(dict(inputs))
        paths = [path for path, _ in tree_leaves_with_path(dict(inputs))]
        named = zip(paths, leaves, strict=True)
        padded = [self._padded(name, x) if name in self.inputs else x for name, x in named]
        found: dict[str, Any] = tree_unflatten(padded, spec)
        return found

    def _padded(self, name: str, x: Tensor) -> Tensor:
        last = x[-1:].expand(self.more, *x.shape[1:])
        return torch.cat([x, torch.full_like(last, self.fill[name]) if name in self.fill else last])

    def cut(
        self, outputs: Sequence[Tensor | None], interface: ProgramInterface, comm: Communicator
    ) -> list[Tensor | None]:
        """The outputs without them; pieces stay where they are, the last ones are shorter."""
        found = []
        for value, entry, dim in zip(outputs, interface.outputs, self.outputs, strict=True):
            if value is None or dim is None:
                found.append(value)
                continue
            shape = (*value.shape[:dim], self.rows, *value.shape[dim + 1 :])
            if not isinstance(value, DTensor):
                found.append(value.narrow(dim, 0, self.rows))
                continue
            at = [comm.index(axis) for axis in comm.axes]
            own = local_part_shape(shape, entry.sharding, comm.sizes, at)[dim]
            local = value.to_local() if value.requires_grad else local_tensor(value)
            found.append(make_dtensor(local.narrow(dim, 0, own), value.device_mesh, entry.sharding, shape))
        return found
