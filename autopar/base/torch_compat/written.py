"""What a trace writes, beside what it makes."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.modules import module as modules


def is_mutable(node: fx.Node) -> bool:
    """Whether a node changes one of its operands."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


@contextmanager
def buffers_as_assigned() -> Iterator[None]:
    """Inside, what is assigned to buffers stays there: torch.export, which notes that of the outermost module, does not
    hear of it.
    """
    hooks = modules._global_buffer_registration_hooks
    exports = {key: hook for key, hook in hooks.items() if (hook.__module__ or "").startswith("torch.")}
    for key in exports:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(exports)


@contextmanager
def untraced() -> Iterator[None]:
    """What runs inside is not recorded; stand-ins stay what they are."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield


def storage_id(value: torch.Tensor) -> int | None:
    """A number of the memory that a tensor lies in, of meta too: two that have the same share it. None where it has
    none, as sparse ones.
    """
    with torch._C.DisableTorchFunction():  # A trace has a dozen modes, each of which would be asked.
        return int(value.untyped_storage()._cdata) if torch._C._has_storage(value) else None


def writes_into(nodes: Collection[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """The other nodes that write where some nodes lie: `n[0] = x`, which no later `n[0]` has among its operands."""
    known = frozenset(nodes)
    writing = [node for node in graph.nodes if is_mutable(node) and node not in known]
    memory = {_memory(node) for node in nodes} - {None} if writing else set()
    return [node for node in writing if any(_memory(each) in memory for each in _written(node))]


def made_with(last: fx.Node | None, ends: Container[fx.Node | None]) -> set[fx.Node]:
    """The nodes that a value is made of, what is written where they lie as well; of those that are `ends` it is not
    asked what they are made of.
    """
    found = set[fx.Node]()
    waiting = [] if last is None else [last]
    while waiting or (last is not None and (waiting := writes_into(found, last.graph))):
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in ends else node.all_input_nodes
    return found


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that a node changes."""
    found: list[fx.Node] = []
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.kwargs.get(argument.name, node.args[place] if place < len(node.args) else None)
            found += [
                each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, fx.Node)
            ]
    return found


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, torch.Tensor) else None
