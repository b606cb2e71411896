"""Gradients that a forward takes itself (`torch.autograd.grad`), and `torch.vmap`, become plain operators.

    energy = net(pos)                                     h = linear(pos, w); a = tanh(h); energy = a @ v
    force = -torch.autograd.grad(                   →     d = tanh_backward(v, a); force = -(d @ w)
        energy.sum(), pos, create_graph=True)[0]

Potentials whose forces are trained, losses on derivatives (physics-informed networks), divergences of flows. While the
model is traced a call becomes one operator, `autopar::inner_gradient`. Where the whole graph is known, what lies
between its inputs and its outputs is differentiated, and the operators of that backward stand in its place: they can be
differentiated again, split and placed as all others. A `vmap` is traced again with its batch dim written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.errors import AutoparError
from autopar.base.spoken import spoken
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.transforms import restored
from autopar.ir.nodes import drop_dead, map_nodes, operand_of
from autopar.operators import own_gradients
from autopar.passes.draws import draws
from autopar.passes.exported import graph_modules, origin_of
from autopar.passes.taken_gradients import STOPS

_OPERATOR = torch.ops.autopar.inner_gradient.default
_APART = torch.ops.autopar.apart.default
_aten = torch.ops.aten
_BATCH_NORMS = (_aten.batch_norm.default, _aten.native_batch_norm.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_AGAIN = "autopar_again"
"""In the meta of a node that is traced once more: the one of the graph that has this value."""
_LEVEL_AT = {"_add_batch_dim": 2, "_remove_batch_dim": 1}
"""Where functions have the number of the `vmap` that they belong to among their arguments."""
_NOTES = ("stack_trace", "nn_module_stack")
_ENTERS = ("_vmap_increment_nesting", "_jvp_increment_nesting")
_LEAVES = ("_vmap_decrement_nesting", "_jvp_decrement_nesting")


def is_within(exported: torch.export.ExportedProgram) -> bool:
    """Whether a model takes gradients in its forward, or calls `torch.vmap` or `torch.func.jvp`."""
    nodes = (node for module in graph_modules(exported.graph_module) for node in module.graph.nodes)
    return any(node.target is _OPERATOR or _name(node) in _ENTERS for node in nodes)


def prepare(exported: torch.export.ExportedProgram) -> None:
    """Keep what gradients are taken for apart from what it is an alias of, whose other readers have no part in them;
    and put operators on all rows in the place of each `vmap`, with the gradients inside of it. In place, before
    operators that write are replaced, for which the graph is run.

    Raises:
        AutoparError: as of `write_out`.
    """
    values = (n.meta.get("val") for module in graph_modules(exported.graph_module) for n in module.graph.nodes)
    mode = next(filter(None, map(compat.mode_of, values)), None)
    for module in graph_modules(exported.graph_module):
        graph = module.graph
        gradients = [node for node in graph.nodes if node.target is _OPERATOR]
        for source in dict.fromkeys(each for node in gradients for each in node.args[1]):
            if source.op != "placeholder":
                _set_apart(graph, source)
        if any(_name(node) in _ENTERS for node in graph.nodes):
            written = _Traced(graph, module, mode)
            # In this order what a gradient goes through has been written out before, and what is within a vmap.
            for node in [each for each in graph.nodes if each.target is _OPERATOR or _name(each) in _LEAVES]:
                if node.target is _OPERATOR:
                    written.differentiate(node)
                else:
                    written.without_batch_dims(_batched(node))
        module.recompile()


def write_out(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Put the operators of each gradient in its place; in place. origins: of the graph's nodes by name.

    Raises:
        AutoparError: what is differentiated draws random numbers, has no gradient, or cannot be traced.
    """
    gradients = [node for node in graph.nodes if node.target is _OPERATOR]
    written = _Written(graph, origins)
    for node in gradients:
        written.differentiate(node)
    for node in [each for each in graph.nodes if each.target is _APART]:
        node.replace_all_uses_with(operand_of(node))
        graph.erase_node(node)
    if gradients:
        drop_dead(graph)


def _set_apart(graph: fx.Graph, source: fx.Node) -> None:
    with graph.inserting_after(source):
        made = graph.call_function(_APART, (source,))
    made.meta = dict(source.meta)
    source.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


class _Written:
    """A graph that has been cleaned: on meta, its nodes' origins in a table."""

    def __init__(self, graph: fx.Graph, origins: dict[str, str]) -> None:
        self.graph, self.origins = graph, origins
        self.exact = False
        """Whether norms are differentiated by what they are made of: torch has no third derivative of theirs."""

    def line(self, node: fx.Node) -> str:
        """Where a node comes from."""
        return self.origins.get(node.name, "")

    def mark(self, made: fx.Node, source: fx.Node) -> None:
        """Say of a new node that it comes from where another does."""
        self.origins[made.name] = self.line(source)

    def example(self, value: Tensor) -> Tensor:
        """A tensor without numbers, as a node's value."""
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def finished(self, graph: fx.Graph) -> None:
        """Make a recorded graph as this one is."""
        compat.on_meta(graph)

    def held(self, node: fx.Node) -> Any:
        """What an attribute of the graph's module is."""
        raise AssertionError(node)

    def differentiate(self, node: fx.Node) -> None:
        """Put the operators of a gradient in its place."""
        arguments: tuple[Any, ...] = node.args
        ends, starts, given, zeros = *map(list, arguments[:3]), arguments[3]
        self.exact = any(each.args[4] for each in self.graph.nodes if each.target is _OPERATOR)
        part = _between(self.graph, ends, starts)
        for each in part:
            if each.target is _aten.dropout.default and draws(each):
                self._with_mask(each)
        part = _between(self.graph, ends, starts)
        if drawn := next(filter(draws, part), None):
            raise AutoparError(
                f"torch.autograd.grad of what draws random numbers ({spoken(str(drawn.target))}) in forward()",
                where=self.line(drawn) or self.line(node) or None,
                remedy="switch it off there, or draw outside of what is differentiated and multiply by it",
            )
        if self.exact and (norm := next((each for each in part if each.target in _BATCH_NORMS), None)):
            raise AutoparError(
                f"torch has no third derivative of {spoken(str(norm.target))}, which forward() takes with jvp, jacfwd "
                "or hessian",
                where=self.line(norm) or self.line(node) or None,
                remedy="take jacrev or torch.autograd.grad, or another norm (LayerNorm)",
            )
        piece = _Piece(self, part, (*starts, *ends, *given))

        def joint(*values: Tensor) -> list[Tensor]:
            env = dict(zip(piece.given, values, strict=True))
            for each in starts:
                env[each].requires_grad_()
            leaves = [env[each] for each in starts]
            piece.run(env)
            pairs = [(env[end], env[each]) for end, each in zip(ends, given, strict=True)]
            pairs = [(end, each) for end, each in pairs if end.requires_grad or not zeros]
            found: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if pairs:
                outputs, received = zip(*pairs, strict=True)
                found = torch.autograd.grad(outputs, leaves, received, create_graph=True, allow_unused=True)
            if None in found and not zeros:
                raise RuntimeError("no gradient comes to what it is taken for")
            return [torch.zeros_like(x) if each is None else each for x, each in zip(leaves, found, strict=True)]

        made = self.traced(joint, piece, node, node, "torch.autograd.grad in forward()")
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(made[place])
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _with_mask(self, node: fx.Node) -> None:
        """Multiply by what a dropout makes of ones, in its place: that is the same in the gradient."""
        source, probability = operand_of(node), node.args[1]
        value: Tensor = node.meta["val"]
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        with self.graph.inserting_before(node):
            ones = self.graph.call_function(_aten.ones.default, (list(value.shape),), options)
            mask = self.graph.call_function(_aten.dropout.default, (ones, probability, True))
        for made in (ones, mask):
            made.meta = dict(node.meta)
            self.mark(made, node)
        node.target, node.args, node.kwargs = _aten.mul.Tensor, (source, mask), {}

    def traced(
        self, function: Callable[..., list[Tensor]], piece: _Piece, before: fx.Node, source: fx.Node, what: str
    ) -> list[fx.Node]:
        """The nodes of what a function of the piece's values gives, recorded and put before a node. source: where
        they come from, but for those that are again what nodes of the graph are.
        """
        given = list(piece.given)
        try:
            with restored(), torch.enable_grad():
                module = compat.make_fx(function, {}, [self.example(node.meta["val"]) for node in given])
            if source.target is _OPERATOR:
                given += _cut(module.graph)
                module.recompile()
            if any(map(compat.is_mutable, module.graph.nodes)):
                module = compat.functional(module, [self.example(node.meta["val"]) for node in given])
        except AutoparError:
            raise
        except Exception as error:
            raise AutoparError(
                f"{what} cannot be traced: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                where=self.line(source) or None,
                remedy="write it out by operators, or take it outside of the model that is compiled",
            ) from error
        self.finished(module.graph)
        return self.inserted(module, given, before, source)

    def inserted(
        self, module: fx.GraphModule, given: Sequence[fx.Node], before: fx.Node, source: fx.Node
    ) -> list[fx.Node]:
        """The nodes of a recorded graph's results, put before a node. given: what its placeholders are here."""
        env: dict[fx.Node, Any] = {}
        holders = iter(given)
        with self.graph.inserting_before(before):
            for node in module.graph.nodes:
                if node.op == "output":
                    return [env[each] for each in node.args[0]]
                if node.op == "placeholder":
                    env[node] = next(holders)
                elif node.op == "get_attr":
                    env[node] = self._number(getattr(module, str(node.target)))
                else:
                    env[node] = self.graph.node_copy(node, env.__getitem__)
                    self.mark(env[node], env[node].meta.pop(_AGAIN, source))
        raise AssertionError("a graph without output")

    def _number(self, value: Tensor) -> fx.Node:
        """A number that a formula of a gradient has as a tensor."""
        known = getattr(value, "constant", None) if compat.is_stand_in(value) else value
        if known is None or known.numel() != 1:
            raise AutoparError(
                "a gradient that forward() takes has a constant without values",
                remedy="write it out by operators, or take it outside of the model that is compiled",
            )
        example = self.example(value)
        options: dict[str, Any] = {"dtype": value.dtype, "device": example.device}
        made = self.graph.call_function(_aten.full.default, (list(value.shape), known.item()), options)
        made.meta = {"val": example}
        return made


class _Traced(_Written):
    """A graph as torch.export gives it: on fake tensors, its nodes' origins in their own notes."""

    def __init__(self, graph: fx.Graph, module: fx.GraphModule, mode: compat.FakeTensorMode | None) -> None:
        super().__init__(graph, {})
        self.module, self.mode = module, mode

    def line(self, node: fx.Node) -> str:
        """As it says itself."""
        return origin_of(node)

    def mark(self, made: fx.Node, source: fx.Node) -> None:
        """As it says itself."""
        made.meta.update({name: source.meta[name] for name in _NOTES if name in source.meta})

    def example(self, value: Tensor) -> Tensor:
        """On the device that it says."""
        with nullcontext() if self.mode is None else self.mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def finished(self, graph: fx.Graph) -> None:
        """It is."""

    def held(self, node: fx.Node) -> Any:
        """What an attribute of the graph's module is."""
        return getattr(self.module, str(node.target))

    def without_batch_dims(self, part: Sequence[fx.Node]) -> None:
        """Put operators on all rows in the place of a `vmap`."""
        own = set(part)
        first = next((each for each in part if self.line(each)), part[0])
        if drawn := next(filter(draws, part), None):
            raise AutoparError(
                f"torch.vmap of what draws random numbers ({spoken(str(drawn.target))}) in forward()",
                where=self.line(drawn) or self.line(first) or None,
                remedy="draw outside of it, for all rows at once, and hand the numbers in",
            )
        results = [each for each in part if any(user not in own for user in each.users)]
        piece = _Piece(self, part)

        def flat(*values: Tensor) -> list[Tensor]:
            env = dict(zip(piece.given, values, strict=True))
            piece.run(env)
            return [env[each] for each in results]

        made = self.traced(flat, piece, part[-1].next, first, "torch.vmap in forward()")
        for each, instead in zip(results, made, strict=True):
            each.replace_all_uses_with(instead, delete_user_cb=lambda user: user not in own)
        for each in reversed(part):
            self.graph.erase_node(each)


class _Piece:
    """A part of a graph that is run by itself. given: what it reads of the graph around it."""

    def __init__(self, within: _Written, nodes: Sequence[fx.Node], given: Sequence[fx.Node] = ()) -> None:
        own = set(nodes)
        read = [each for node in nodes for each in node.all_input_nodes]
        outer = [each for each in (*given, *read) if each not in own]
        self.within, self.nodes = within, nodes
        self.held = {node: within.held(node) for node in outer if node.op == "get_attr"}
        self.given = list(dict.fromkeys(node for node in outer if node not in self.held))

    def run(self, env: dict[fx.Node, Any]) -> None:
        """Add the values of all nodes to those of what it is given."""
        env.update(self.held)
        level = 0
        for node in self.nodes:
            if node.op == "get_attr":
                env[node] = self.within.held(node)
                continue
            args, kwargs = map_nodes((node.args, node.kwargs), env.__getitem__)
            if (place := _LEVEL_AT.get(_name(node))) is not None:  # recorded within others, it runs by itself
                args = (*args[:place], level, *args[place + 1 :])
            function = _aten_of(node.target, self.within.exact)
            env[node] = function(*args, **kwargs)
            level = env[node] if _name(node) in _ENTERS else level
            recorded = compat.recorded_node(env[node])
            if recorded is not None and isinstance(node.meta.get("val"), Tensor):
                recorded.meta.setdefault(_AGAIN, node)


def _aten_of(target: Any, exact: bool) -> Callable[..., Any]:
    """What is called for an operator, while a gradient is recorded."""
    if isinstance(target, compat.HigherOrderOperator) and "set_grad_enabled" in str(target):
        return _with_grad_enabled
    if target in _VIEWS:  # strides are the runtime's business: capture drops `contiguous`
        return torch.reshape
    if target is _APART:
        return lambda x: x
    if exact and target is _aten.layer_norm.default:
        return _layer_norm
    found: Callable[..., Any] = own_gradients.AUTOGRAD.get(target, target)
    return found


def _with_grad_enabled(enabled: bool, body: fx.GraphModule, *operands: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return fx.Interpreter(body).run(*operands)


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    dims = list(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    found = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _cut(graph: fx.Graph) -> list[fx.Node]:
    """Leave of a recorded gradient what is not computed already: what is again a node of the graph around it becomes a
    placeholder. Returns those nodes. What autograd has put by, and takes out again, is no new value: in a program it
    has its gradient, as in eager.
    """
    given: list[fx.Node] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        again = node.meta.get(_AGAIN)
        if again is not None:
            with graph.inserting_after(last):
                last = instead = graph.placeholder(f"given_{len(given)}")
            instead.meta = {"val": node.meta["val"]}
            given.append(again)
        elif node.target in STOPS:
            instead = operand_of(node)
        else:
            continue
        node.replace_all_uses_with(instead)
        graph.erase_node(node)
    drop_dead(graph)
    return given


def _between(graph: fx.Graph, ends: Sequence[fx.Node], starts: Sequence[fx.Node]) -> list[fx.Node]:
    """What is computed of the starts and goes into the ends, in the graph's order."""
    after: set[fx.Node] = set(starts)
    for node in graph.nodes:
        if node.op == "call_function" and node not in after and any(each in after for each in node.all_input_nodes):
            after.add(node)
    needed: set[fx.Node] = set()
    waiting = [each for each in ends if each in after]
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in starts:
            needed.add(node)
            waiting += [each for each in node.all_input_nodes if each in after]
    return [node for node in graph.nodes if node in needed]


def _batched(last: fx.Node) -> list[fx.Node]:
    """The nodes of the `vmap` that ends here; those inside of it have been written out."""
    part = [last]
    while _name(part[-1]) not in _ENTERS:
        part.append(part[-1].prev)
    return part[::-1]


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")
