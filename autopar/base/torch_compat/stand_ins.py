"""What stands for tensors while a model is captured: of a shape and a dtype, without data, as if on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

# capture: tensors without data that torch.export traces on.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have a shape and a dtype, no data, and say that they are on the CPU, for `torch.export`.

    What a model makes of Python's own numbers while it is traced keeps its values, which it does not on meta.
    """
    return FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)


def stand_in(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """What stands for a tensor on meta in a mode, and says that it is on the CPU: made without torch's dispatcher."""
    return FakeTensor(mode, value, torch.device("cpu"))


def traced_itself(value: torch.Tensor, mode: FakeTensorMode) -> None:
    """A parameter or a buffer of a mode stands for itself in `torch.export`, which would make another one of it."""
    mode.fake_tensor_converter.set_tensor_memo(value, value)  # type: ignore[arg-type]


def on_meta(graph: fx.Graph) -> None:
    """Values and operators of a graph that was traced on fake tensors, on the meta device; in place."""

    def moved(value: Any) -> Any:
        return torch.device("meta") if isinstance(value, torch.device) else value

    def emptied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value

    for node in graph.nodes:
        node.args = pytree.tree_map(moved, node.args)
        node.kwargs = pytree.tree_map(moved, node.kwargs)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(emptied, node.meta["val"])
