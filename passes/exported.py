"""The graph that torch.export gives, made plain: nothing inside of something else, nothing that does nothing.

What `no_grad` and autocast wrap is put in line, assertions, aliases and casts to the same type go, what functional
graphs take apart (dropout) is put together, and dtypes that depend on the process are written out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.base.spoken import spoken
from autopar.base.torch_compat import tracing as compat
from autopar.ir.nodes import drop_dead, map_nodes

_NO_OPS = frozenset({"aten::_assert_tensor_metadata", "aten::_assert_scalar", "aten::sym_constrain_range_for_size"})
_ALIASES = frozenset({"aten::alias", "aten::clone", "aten::lift_fresh_copy", "aten::contiguous", "aten::detach_"})
_CASTS = frozenset({"aten::to.dtype", "aten::to.dtype_layout", "aten::to.device", "aten::to.other", "aten::_to_copy"})


_NEW: Mapping[Any, Any] = {
    torch.ops.aten.new_zeros.default: torch.ops.aten.zeros.default,
    torch.ops.aten.new_ones.default: torch.ops.aten.ones.default,
    torch.ops.aten.new_full.default: torch.ops.aten.full.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.empty.memory_format,
}
"""What is made in the likeness of a tensor, as what is made of its own."""


class SizesByValues(AutoparError):
    """Where a size, or a number, is known only once the values of tensors are."""


def clean_graph(exported: torch.export.ExportedProgram) -> tuple[fx.Graph, dict[str, str], dict[str, fx.Node]]:
    """Inline higher-order operators, drop assertions, no-op casts and aliases.

    Returns the graph, where each node came from, and the placeholders by the names that the signature knows.
    """
    graph = fx.Graph()
    origins: dict[str, str] = {}
    env: dict[fx.Node, Any] = {}
    root = exported.graph_module

    def lookup(node: fx.Node) -> Any:
        return env[node]

    def emit(module: fx.GraphModule, node: fx.Node) -> None:
        if node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and isinstance(node.target, compat.HigherOrderOperator):
            env[node] = inline(*_wrapped_body(node, env), no_grad=_disables_grad(node))
        elif node.target is operator.getitem and isinstance(env[node.args[0]], (list, tuple)):  # type: ignore[index]
            env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
        elif (same := _forwarded(node)) is not None:
            env[node] = env[same] if isinstance(same, fx.Node) else None
        elif node.target is torch.ops.aten.native_dropout.default:
            env[node] = [_as_dropout(graph, env[node.args[0]], node, origins), None]  # type: ignore[index]
        elif node.target is torch.ops.aten.copy.default:
            env[node] = _written(graph, env[node.args[1]], node)  # type: ignore[index]
        else:
            env[node] = graph.node_copy(node, lookup)
            if node.target is torch.ops.aten._unsafe_view.default:  # of a `clone`, which is dropped as an alias
                env[node].target = torch.ops.aten.view.default
            _make_alone(env[node])
            _name_dtype(env[node])
            origins[env[node].name] = origin_of(node)

    def inline(body: fx.GraphModule, arguments: list[Any], no_grad: bool) -> Any:
        holders = [node for node in body.graph.nodes if node.op == "placeholder"]
        env.update(zip(holders, arguments, strict=True))
        for node in body.graph.nodes:
            if node.op == "output":
                results = map_nodes(node.args[0], lookup)
                return _detached(graph, results) if no_grad else results
            if node.op != "placeholder":
                emit(body, node)
        raise AssertionError("a graph without output")

    for node in root.graph.nodes:
        if node.op == "output":
            graph.output(map_nodes(node.args[0], lookup))
        else:
            emit(root, node)
    placeholders = {node.name: env[node] for node in root.graph.nodes if node.op == "placeholder"}
    drop_dead(graph)
    _check_sizes(graph, origins)
    compat.on_meta(graph)
    return graph, origins, placeholders


def _check_sizes(graph: fx.Graph, origins: Mapping[str, str]) -> None:
    """Raises SizesByValues where a value's shape, or a number, is known only once the values of tensors are."""
    for node in graph.nodes:
        if any(compat.is_unknown(value) for value in compat.tree_flatten(node.meta.get("val"))[0]):
            raise SizesByValues(
                f"{spoken(str(node.target))} makes a number, or a size, by the values of a tensor: one program cannot "
                "stand for it",
                where=origins.get(node.name) or node.name,
                remedy="keep the size and mark what counts with a mask (torch.where), or make the choice outside of "
                "forward() and hand its result in",
            )


def _wrapped_body(node: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """The body and operands of `wrap_with_set_grad_enabled` and `wrap_with_autocast`."""
    for position, arg in enumerate(node.args):
        if isinstance(arg, fx.Node) and isinstance(env.get(arg), fx.GraphModule):
            return env[arg], [map_nodes(a, lambda n: env[n]) for a in node.args[position + 1 :]]
    raise AutoparError(
        f"the captured model uses {node.target}, which autopar does not know",
        where=origin_of(node),
        remedy="rewrite it with plain tensor operations",
    )


def _make_alone(node: fx.Node) -> None:
    """`x.new_zeros(…)` of another shape than x's reads nothing of it: where it lies would be that of x otherwise."""
    target = _NEW.get(node.target)
    source: Any = node.args[0] if target is not None else None
    if compat.is_unknown(node.meta.get("val")):  # of a size that values say: refused behind this
        return
    if target is not None and source.meta["val"].shape != node.meta["val"].shape:
        value = node.meta["val"]
        node.target, node.args = target, node.args[1:]
        node.kwargs = {**node.kwargs, "dtype": value.dtype, "device": value.device}


def _name_dtype(node: fx.Node) -> None:
    """What a tensor is made in goes into the program: the process that runs it may have another default dtype."""
    if isinstance(node.target, compat.OpOverload) and not node.all_input_nodes and "dtype" not in node.kwargs:
        places = [number for number, each in enumerate(node.target._schema.arguments) if each.name == "dtype"]
        if places and len(node.args) <= places[0]:
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _written(graph: fx.Graph, value: fx.Node, node: fx.Node) -> fx.Node:
    """What `x[...] = value` writes, once it is no longer in place: the value in the type and shape of what it
    replaces.
    """
    wanted, have = node.meta["val"], value.meta["val"]
    if have.dtype != wanted.dtype:
        value = graph.call_function(torch.ops.aten.to.dtype, (value, wanted.dtype))
        value.meta = {**node.meta, "val": have.to(wanted.dtype)}
    if have.shape != wanted.shape:
        value = graph.call_function(torch.ops.aten.expand.default, (value, list(wanted.shape)))
        value.meta = dict(node.meta)
    return value


def _as_dropout(graph: fx.Graph, source: fx.Node, node: fx.Node, origins: dict[str, str]) -> fx.Node:
    """`dropout`, which making a graph functional takes apart into `native_dropout`: its mask serves a backward that is
    not captured.
    """
    new = graph.call_function(torch.ops.aten.dropout.default, (source, *node.args[1:]))
    new.meta = {**node.meta, "val": node.meta["val"][0]}
    origins[new.name] = origin_of(node)
    return new


def _disables_grad(node: fx.Node) -> bool:
    return "set_grad_enabled" in str(node.target) and node.args[0] is False


def _detached(graph: fx.Graph, results: Any) -> Any:
    def detach(node: fx.Node) -> fx.Node:
        new = graph.call_function(torch.ops.aten.detach.default, (node,))
        new.meta = dict(node.meta)
        return new

    return map_nodes(results, detach)


def _forwarded(node: fx.Node) -> fx.Node | bool | None:
    """The node that stands for this one (True: it is dropped), or None when it is real work."""
    if not isinstance(node.target, compat.OpOverload):
        return None
    name = node.target.name()
    base = name.split(".")[0] if name not in _CASTS else name
    if base in _NO_OPS:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if base in _ALIASES:
        return source
    before, after = source.meta.get("val"), node.meta.get("val")
    if name in _CASTS and isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return source if before.dtype == after.dtype else None
    return None


def origin_of(node: fx.Node) -> str:
    """Module path and source line, `model.layers.0.mlp (modeling_llama.py:177)`."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    line = compat.model_source_line(node.meta.get("stack_trace") or "")
    return f"{path} ({line})".strip() if line else path


def graph_modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The module and those inside: what is wrapped (no_grad, autocast, checkpoints)."""
    return [m for m in module.modules() if isinstance(m, fx.GraphModule)]
