"""What forward changes: buffers that the traced program writes, and how their new values leave it."""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat

_aten = torch.ops.aten
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RUNNING_MEAN, _USES_BATCH = 3, 5


def writes(node: fx.Node) -> bool:
    """Whether a node changes one of its operands; some normalizations do, and their schemas do not say so."""
    if node.target in (_aten.batch_norm.default, _aten.instance_norm.default):
        return node.args[_RUNNING_MEAN] is not None and bool(node.args[_USES_BATCH])
    return compat.is_mutable(node)


def check(graph: fx.Graph, where: Callable[[fx.Node], str]) -> None:
    """Raises AutoparError for what still changes an operand once torch has made the graph functional."""
    for node in graph.nodes:
        if node.target is _aten.instance_norm.default and writes(node):
            raise AutoparError(
                "an instance norm changes its running statistics in forward(), which torch.export does not say",
                where=where(node),
                remedy="use track_running_stats=False, or put the module in eval() mode",
            )


def check_hidden_writes(root: fx.GraphModule, parameters: Collection[str], where: Callable[[fx.Node], str]) -> None:
    """Raises AutoparError for what forward changes in place under `torch.no_grad()` where a gradient passes.

    Eager differentiates what had been there before, and uses what is there now: no operator does both.

    root: an exported graph. parameters: the names of its placeholders for them; what writes to these is refused apart.
    """
    carries, places = set[fx.Node](), set[int]()
    own = set[int]().union(*(_places(node) for node in root.graph.nodes if node.name in parameters))
    for node in root.graph.nodes:
        body = _without_gradients(node, root)
        if body is None:
            reads = node.target is not _aten.detach.default and not carries.isdisjoint(node.all_input_nodes)
            if node.name in parameters or (reads and _numbers(node)):
                carries.add(node)
                places |= _places(node) - own
            continue
        for inner in body.graph.nodes:
            into = inner.args[0] if inner.op == "call_function" and inner.args else None
            if compat.is_mutable(inner) and isinstance(into, fx.Node) and not places.isdisjoint(_places(into)):
                raise AutoparError(
                    "forward() changes a value in place under torch.no_grad(), through which a gradient passes",
                    where=where(inner),
                    remedy="write x = x + (new - x).detach() where the gradient is to pass as if nothing had changed",
                )


def _without_gradients(node: fx.Node, root: fx.GraphModule) -> fx.GraphModule | None:
    """What a node runs under `torch.no_grad()`; None where it does nothing so."""
    if "set_grad_enabled" not in str(node.target) or node.args[0] is not False:
        return None
    found: fx.GraphModule = getattr(root, str(node.args[1].target))  # type: ignore[union-attr]
    return found


def _numbers(node: fx.Node) -> list[Tensor]:
    """What a node gives that may have a gradient."""
    leaves = compat.tree_flatten(node.meta.get("val"))[0]
    return [x for x in leaves if isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)]


def _places(node: fx.Node) -> set[int]:
    """The memory in which these lie."""
    return {place for x in _numbers(node) if (place := compat.storage_id(x)) is not None}


def detach_operands(module: fx.GraphModule) -> None:
    """Detach, in place, what `torch.no_grad()` computes from: making a graph functional puts its body in line, and what
    is written there into a buffer, or returned, would be differentiated.
    """
    for node in module.graph.nodes:
        body = _without_gradients(node, module)
        if body is None:
            continue
        holders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        for holder, given in zip(holders, node.args[2:], strict=True):
            value = given.meta.get("val") if isinstance(given, fx.Node) else None
            if not isinstance(value, Tensor) or not value.dtype.is_floating_point or _is_written(holder):
                continue
            with module.graph.inserting_before(node):
                detached = module.graph.call_function(_aten.detach.default, (given,))
            detached.meta = dict(given.meta)
            node.replace_input_with(given, detached)


def part_detached(module: fx.GraphModule, where: Callable[[fx.Node], str]) -> None:
    """Copy, in place, what is detached and then written: making a graph functional would detach what is written, too.

    p = x.detach(); p += z      eager differentiates z; of what becomes of x nobody hears any more

    Raises:
        AutoparError: x is read after that, where eager has changed it.
    """
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        root = _detached_from(node, module)
        if root is None or not _is_written(node):
            continue
        first = min(order[each] for each in _aliases(node) if compat.is_mutable(each))
        if root is not node and any(order[each] > first for each in _aliases(root, node)):
            raise AutoparError(
                "forward() writes into what it has detached, and reads afterwards what it was detached from",
                where=where(node),
                remedy="write into a copy: x.detach().clone()",
            )
        with module.graph.inserting_after(node):
            copied = module.graph.call_function(_aten.clone.default, (node,))
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)


def without_idle_dropout(module: fx.GraphModule) -> None:
    """Take out, in place, dropout that drops nothing: it gives its operand itself, as no schema says, and what is
    written into the one is written into the other.
    """
    for node in list(module.graph.nodes):
        if node.target is not _aten.dropout.default:
            continue
        source, probability, trains = node.args
        if isinstance(source, fx.Node) and not (trains and probability):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


def detached_as_values(module: fx.GraphModule) -> None:
    """What is detached in place becomes a value that is detached, in place: torch's own trace would differentiate it.

    x.detach_(); y = x * w  →  d = x.detach(); y = d * w

    Python's own numbers (`torch.tensor([1.0, 2.0])`) have no gradient before anything was done with them.
    """
    for node in list(module.graph.nodes):
        source = node.args[0] if node.target is _aten.detach_.default else None
        if not isinstance(source, fx.Node) or source.op != "call_function":
            continue
        value = source
        if source.target is not _aten.lift_fresh_copy.default or next(iter(source.users)) is not node:
            with module.graph.inserting_before(node):
                value = module.graph.call_function(_aten.detach.default, (source,))
            value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        module.graph.erase_node(node)


def unsaid_views(graph: fx.Graph) -> set[compat.OpOverload]:
    """The operators that gave views which their schemas do not say (`einsum` of one operand), of what is written later.

    torch takes such results for values of their own, unless it takes the operators apart.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    changed = [node for node in order if compat.is_mutable(node) and isinstance(node.meta.get("val"), Tensor)]
    found: set[compat.OpOverload] = set()
    for node in order if changed else ():
        value = node.meta.get("val")
        if not isinstance(node.target, compat.OpOverload) or not isinstance(value, Tensor) or is_view(node):
            continue
        operands = [each.meta.get("val") for each in node.all_input_nodes]
        if any(isinstance(each, Tensor) and compat.shares_storage(value, each) for each in operands):
            later = [each for each in changed if order[each] > order[node]]
            if any(compat.shares_storage(value, each.meta["val"]) for each in later):
                found.add(node.target)
    return found


def _detached_from(node: fx.Node, module: fx.GraphModule) -> fx.Node | None:
    """What forward made that a value is detached from, or comes out of a `torch.no_grad()` of: itself where that made
    it. None where it is neither, or of what was handed in.
    """
    found = None
    source = node.args[0] if node.target is operator.getitem else None
    if node.target is _aten.detach.default:
        found = _root(node)
    elif isinstance(source, fx.Node) and (body := _without_gradients(source, module)) is not None:
        (returned,) = next(inner for inner in body.graph.nodes if inner.op == "output").args
        number: Any = node.args[1]
        made = returned[number] if isinstance(returned, list | tuple) else returned
        found = _root(made) if isinstance(made, fx.Node) else None
        if found is not None and found.op == "placeholder":
            holders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
            given: Any = source.args[2:][holders.index(found)]
            found = _root(given)
        elif found is not None:
            found = node
    return found if found is not None and found.op == "call_function" else None


def _root(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while node.op == "call_function" and is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _aliases(node: fx.Node, but: fx.Node | None = None) -> set[fx.Node]:
    """Who reads a value, or a view of it other than one."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user is not but:
                found.add(user)
                waiting += [user] if is_view(user) else []
    return found


def _is_written(node: fx.Node) -> bool:
    """Whether an operator writes into a value, or into a view of it; one without a gradient, as others are refused."""
    firsts = [user for user in node.users if user.args and user.args[0] is node]
    outs = [user for user in node.users if node in user.kwargs.values() and compat.is_mutable(user)]
    return bool(outs) or any(compat.is_mutable(user) or (is_view(user) and _is_written(user)) for user in firsts)


def is_view(node: fx.Node) -> bool:
    """Whether a result is a view of what the operator reads first."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def of_dtype(graph: fx.Graph, output: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The value in this dtype, converted before the graph's output where it has another: as writing in place does."""
    known = value.meta["val"]
    if known.dtype == dtype:
        return value
    with graph.inserting_before(output):
        converted = graph.call_function(_aten.to.dtype, (value, dtype))
    converted.meta = {**value.meta, "val": known.to(dtype)}
    return converted


def private(graph: fx.Graph, values: Iterable[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """`values` as nodes that nothing else reads: a buffer's new value lies as the buffer does, whatever others want."""
    found: list[fx.Node] = []
    for value in values:
        node = value
        if value.op != "call_function" or value.users or value in outputs:
            with graph.inserting_after(value) if value.op == "call_function" else contextlib.nullcontext():
                node = graph.call_function(_aten.clone.default, (value,))
            node.meta = dict(value.meta)
        found.append(node)
    return found


def without_counting_in_python(model: nn.Module) -> nn.Module:
    """The model, changed in place, with batch norms whose momentum is None averaging by tensors.

    torch's own forward reads the number of batches as a Python number, which no trace can hold.
    """
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS) and type(module).forward is nn.BatchNorm1d.forward:
            if module.momentum is None and module.training and module.num_batches_tracked is not None:
                module.forward = types.MethodType(_cumulative_forward, module)  # type: ignore[method-assign]
    return model


def _cumulative_forward(self: nn.BatchNorm1d, input: Tensor) -> Tensor:
    """As `torch.nn.BatchNorm1d.forward` in training with momentum None: running statistics are plain averages."""
    self._check_input_dim(input)
    assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
    self.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    out = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
    factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
    self.running_mean.copy_(self.running_mean * (1 - factor) + mean * factor)
    self.running_var.copy_(self.running_var * (1 - factor) + variance * factor)
    return out
