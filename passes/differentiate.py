"""differentiate: every distinct region becomes one graph of its forward and its backward.

Requires: phase `outlined`.
Ensures: phase `differentiated`; graphs of ATen and `autopar::` operators, without composite ones; placeholders are
    slots, inputs, the dropout seed if used, gradients of the outputs in `tangents`; results are outputs, gradients of
    trainable slots, gradients of differentiable inputs. `forward_nodes` names the forward phase. Nothing that is a
    view, and nothing that is made of parameters alone, crosses from forward to backward: both are made again there.

    y = relu(linear(x, w))  →  h = linear(x, w); y = relu(h) | g = threshold_backward(dy, y); dx = g·w; dw = gᵀ·x
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn

from autopar import operators
from autopar.base.errors import AutoparError
from autopar.base.spoken import spoken
from autopar.base.torch_compat import tracing
from autopar.ir.graphs import Recompute, _base_name, ancestors, is_view, parameter_only
from autopar.ir.nodes import NAME, TERM, drop_dead
from autopar.ir.op_call import is_float
from autopar.ir.program import Program
from autopar.ir.reach import reached_by
from autopar.ir.region import Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import ValueRef, gradient_key
from autopar.passes.class_dims import over_classes
from autopar.passes.differentiation.backward_notes import BackwardNotes
from autopar.passes.functional import written_apart
from autopar.passes.group_heads import group_heads
from autopar.passes.products import batch_size, coupled_products, fused_linears

aten = torch.ops.aten

_STOPS_GRADIENT = frozenset({"aten::detach", "aten::argmax", "aten::sign", "aten::floor", "aten::round", "aten::ceil"})


def differentiate(program: Program, *, roots: Sequence[str] | None = None) -> Program:
    """Differentiate each distinct region once (training), or keep the forward alone (inference).

    roots: the outputs whose gradients the backward takes, by name; None: the loss where there is one, else all that
    depend on parameters. Inputs whose gradients are wanted, and to which none comes, are not wanted any more.

    Raises:
        AutoparError: an output that does not depend on parameters, or is none.
    """
    found = _differentiated(program, roots)
    if not program.wanted:
        return found
    reached = reached_by(found)
    idle = {name for name in found.wanted if gradient_key(name) not in reached}
    if not idle:
        return found
    inputs = tuple(replace(port, differentiable=port.name in program.wanted - idle) for port in program.inputs)
    return _differentiated(replace(program, inputs=inputs), roots)


def _differentiated(program: Program, roots: Sequence[str] | None) -> Program:
    flags = _differentiable_ports(program) if program.training else {}
    starts = _roots(program, flags, roots) if program.training else set()
    regions: dict[str, Region] = {}
    for region in program.regions:
        inputs = tuple(
            replace(
                port, differentiable=any(flags.get(c.arguments[i], False) for _, c in program.calls_of(region.name))
            )
            for i, port in enumerate(region.inputs)
        )
        outputs = tuple(
            replace(
                port, differentiable=any(flags.get(ValueRef(c, i), False) for c, _ in program.calls_of(region.name))
            )
            for i, port in enumerate(region.outputs)
        )
        wanted = _wanted_outputs(program, region, flags, starts)
        tangents = tuple(i for i, port in enumerate(outputs) if port.differentiable and i in wanted)
        graph = group_heads(region.graph)
        ready = replace(region, graph=graph, inputs=inputs, outputs=outputs, tangents=tangents)
        regions[region.name] = _trace(ready, program.training, batch_size(program))
    return program.with_regions(regions, phase="differentiated", roots=frozenset(starts))


def loss_index(program: Program) -> int | None:
    """Which output is the loss: the one named so, or the first scalar of floating point."""
    for index, (name, ref) in enumerate(zip(program.output_names, program.outputs, strict=True)):
        if name == "loss" and program.port(ref).type.shape == ():
            return index
    scalars = [i for i, ref in enumerate(program.outputs) if program.port(ref).type.shape == ()]
    return scalars[0] if scalars else None


def _differentiable_ports(program: Program) -> dict[ValueRef, bool]:
    """Which values between calls, and which inputs, carry a gradient, in call order."""
    flags = {ValueRef(name=name): True for name in program.wanted}
    for index, call in enumerate(program.calls):
        region = program.region(call.region)
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        carries = {node: slot.trainable for node, slot in zip(holders, region.slots, strict=False)}
        for node, argument in zip(holders[len(region.slots) :], call.arguments, strict=True):
            carries[node] = flags.get(argument, False)
        for node in region.graph.nodes:
            if node.op == "call_function":
                carries[node] = _carries_gradient(node, carries)
        output = next(node for node in region.graph.nodes if node.op == "output")
        for position, node in enumerate(output.args[0]):
            flags[ValueRef(index, position)] = carries[node]
    return flags


def _carries_gradient(node: fx.Node, carries: Mapping[fx.Node, bool]) -> bool:
    value = node.meta.get("val")
    has_gradient = any(isinstance(v, torch.Tensor) and is_float(v.dtype) for v in _leaves(value))
    name = node.target.name().split(".")[0] if isinstance(node.target, tracing.OpOverload) else ""
    return has_gradient and name not in _STOPS_GRADIENT and any(carries[source] for source in node.all_input_nodes)


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _roots(program: Program, flags: Mapping[ValueRef, bool], names: Sequence[str] | None) -> set[ValueRef]:
    """Outputs whose gradient the user gives: those of these names, or the loss where there is one, else every
    differentiable output.
    """
    if names is not None:
        named = dict(zip(program.output_names, program.outputs, strict=True))
        wrong = [name for name in names if not flags.get(named.get(name, ValueRef(-1, 0)), False)]
        if wrong:
            known = [name for name, ref in named.items() if flags.get(ref, False)]
            raise AutoparError(
                f"no gradient can come for {', '.join(wrong)}",
                values=f"outputs that depend on trainable parameters or inputs: {', '.join(known) or 'none'}",
            )
        return {named[name] for name in names}
    loss = loss_index(program)
    if loss is not None and flags.get(program.outputs[loss], False):
        return {program.outputs[loss]}
    return {ref for ref in program.outputs if flags.get(ref, False)}


def _wanted_outputs(program: Program, region: Region, flags: Mapping[ValueRef, bool], roots: set[ValueRef]) -> set[int]:
    own = {index for index, _ in program.calls_of(region.name)}
    used = {ref for call in program.calls for ref in call.arguments if flags.get(ref, False)} | roots
    return {ref.index for ref in used if ref.call in own}


class _Replay(fx.Interpreter):
    """Runs a captured graph with autopar's operators in place of composite ones, noting which module each new node
    serves, what the model calls its value, and, of the backward, what it differentiates.
    """

    def __init__(self, region: Region, batch: int | None) -> None:
        super().__init__(nn.Module(), garbage_collect_values=False, graph=region.graph)
        self._origins = region.origins
        self._notes = BackwardNotes()
        self._coupled = {node.name for node in coupled_products(region, batch)}
        self._fused = fused_linears(region)
        self._over_classes = {node.name for node in over_classes(region)}
        self._cuts = {name: pieces for cuts in self._fused.values() for name, pieces in cuts.items()}

    def run_node(self, n: fx.Node) -> Any:
        origin = self._origins.get(n.name, "")
        with tracing.tag_new_nodes(origin):
            result = self._run(n)
        if n.op == "call_function":
            self._notes.made(result, origin, n.meta.get(NAME, ""))
        return result

    def _run(self, n: fx.Node) -> Any:
        if n.name in self._coupled:
            return operators.trace_coupled_product(n.target, *self.fetch_args_kwargs_from_env(n)[0])
        if n.name in self._over_classes:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return operators.OVER_CLASSES[n.target](*args, **kwargs)
        if n.name in self._fused:
            return operators.FusedLinear(*self.fetch_args_kwargs_from_env(n)[0])
        if n.name in self._cuts:
            pieces = [self.env[n.args[0]].piece(*piece) for piece in self._cuts[n.name]]  # type: ignore[index]
            return pieces[0] if n.target is aten.slice.Tensor else pieces
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Strides are the runtime's business: capture drops `contiguous`.
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default
        function: Any = operators.AUTOGRAD.get(target, target)
        return function(*args, **kwargs)


def _trace(region: Region, training: bool, batch: int | None) -> Region:
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    examples = [_meta(TensorType.of(node.meta["val"])) for node in holders]
    for example, slot in zip(examples, region.slots, strict=False):
        example.requires_grad_(training and slot.trainable)
    for example, port in zip(examples[len(region.slots) :], region.inputs, strict=True):
        example.requires_grad_(training and port.differentiable)
    uses_dropout = any(_draws(node) for node in region.graph.nodes)
    seed = [torch.empty((), dtype=torch.int64, device="meta")] if uses_dropout else []
    tangents = [_meta(region.outputs[i].type) for i in region.tangents]
    drawn = list[tuple[int, ...]]()

    def joint(*arguments: torch.Tensor) -> tuple[Any, ...]:
        replay = _Replay(region, batch)
        values, rest = arguments[: len(examples)], list(arguments[len(examples) :])
        nothing: contextlib.AbstractContextManager[list[tuple[int, ...]]] = contextlib.nullcontext([])
        with operators.tracing_seed(rest.pop(0)) if uses_dropout else nothing as shapes:
            outputs = replay.run(*values, enable_io_processing=False)
        drawn[:] = shapes
        if not training:
            return tuple(outputs)
        wanted = [value for value in values if value.requires_grad]
        pairs = [(outputs[i], g) for i, g in zip(region.tangents, rest, strict=True) if outputs[i].requires_grad]
        grads: tuple[Any, ...] = (None,) * len(wanted)
        if pairs and wanted:
            grads = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        filled = [torch.zeros_like(v) if g is None else g for v, g in zip(wanted, grads, strict=True)]
        return (*outputs, *filled)

    arguments = [*examples, *seed, *tangents]
    try:
        module = tracing.make_fx(joint, operators.DECOMPOSITIONS, arguments)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and "no fake impl" not in str(error):
            raise
        raise _no_shapes(error, region) from error
    if any(tracing.is_mutable(node) for node in module.graph.nodes) and not written_apart(module.graph):
        module = tracing.functional(module, [argument.detach() for argument in arguments], kept=(NAME, TERM))
    _refuse_draws(module.graph, region)
    simplified = simplify(_with_named_placeholders(module.graph, holders, bool(seed), region))
    return _split_phases(replace(region, graph=simplified, seeds=int(uses_dropout), draws=len(drawn)))


def _no_shapes(error: Exception, region: Region) -> AutoparError:
    """torch says of some operators, and of some gradients, nothing but how they compute: a trace has only shapes."""
    found = re.search(r"\b\w+::(\w+)", str(error))
    name = found[1] if found else str(error).split(":")[0]
    forward = name.removeprefix("_").removesuffix("_backward")
    nodes = [n for n in region.graph.nodes if n.op == "call_function" and f".{forward}." in f".{n.target}."]
    origin = region.origins.get(nodes[0].name, "") if nodes else ""
    return AutoparError(
        f"{name} cannot be traced: torch does not say what shapes it gives",
        where=origin or region.module or None,
        remedy="use another operator there, or write it with operators that torch.compile can trace",
    )


def _draws(node: fx.Node) -> bool:
    if node.target in operators.RANDOM:
        return True
    if node.target is aten.dropout.default or node.target is aten.native_dropout.default:
        probability, active = cast(float, node.args[1]), node.args[2] is not False
        return probability > 0 and active
    if node.target is aten.scaled_dot_product_attention.default:
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return cast(float, given) > 0
    if node.target is torch.ops.autopar.attention.default:
        return cast(float, node.kwargs.get("dropout_p", 0.0)) > 0
    return False


def _refuse_draws(graph: fx.Graph, region: Region) -> None:
    """Operators that draw from the process's own generator: each rank would have other numbers.

    Raises:
        AutoparError: names the operator and the model's line.
    """
    for node in graph.nodes:
        if not isinstance(node.target, tracing.OpOverload) or node.target.namespace == "autopar":
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise AutoparError(
                f"{spoken(str(node.target))} draws random numbers that would differ from rank to rank",
                where=node.meta.get(tracing.ORIGIN_KEY, "") or region.module,
                remedy="draw with torch.rand or torch.randn and compute the rest, or pass the numbers in as an input",
            )


def _meta(type_: TensorType) -> torch.Tensor:
    return torch.empty(type_.shape, dtype=type_.dtype, device="meta")


def _with_named_placeholders(graph: fx.Graph, holders: list[fx.Node], has_seed: bool, region: Region) -> fx.Graph:
    """The same graph, its placeholders named as in the region; operators make way."""
    names = [node.name for node in holders] + ["seed"] * has_seed
    names += [f"grad_{region.outputs[i].name}" for i in region.tangents]
    named = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    old = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(old, names, strict=True):
        copies[node] = named.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node not in copies:
            copies[node] = named.node_copy(node, lambda n: copies[n])
    return named


_SAME_IF_EQUAL_TYPE = frozenset(
    {"aten::view", "aten::expand", "aten::_to_copy", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_copy"}
)
_ALWAYS_SAME = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh_copy"})
_RANDOM = frozenset(
    {"aten::rand", "aten::randn", "aten::bernoulli", "aten::randint", "aten::rand_like", "aten::randn_like"}
)


def simplify(graph: fx.Graph) -> fx.Graph:
    """Drop operators that change nothing, share equal ones, drop dead ones."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if "val" not in node.meta and not node.users:
            graph.erase_node(node)  # a check of values, such as whether a matrix has an inverse: it gives nothing
            continue
        if (source := _identity_of(node)) is not None:
            _stand_in(graph, node, source)
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        if _base_name(node) in _RANDOM:
            continue
        if key in seen:
            _stand_in(graph, node, seen[key])
        else:
            seen[key] = node
    drop_dead(graph)
    return graph


def _stand_in(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Drop a node for one with the same value, which has its name where it has none but its operator's."""
    has_own = source.meta.get(NAME, "") not in ("", _base_name(source).rpartition("::")[2])
    if NAME in node.meta and source.op != "placeholder" and not has_own:
        source.meta[NAME] = node.meta[NAME]
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _identity_of(node: fx.Node) -> fx.Node | None:
    name = _base_name(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name in _ALWAYS_SAME:
        return source
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if name in _SAME_IF_EQUAL_TYPE and TensorType.of(before) == TensorType.of(after):
        return source
    if len(node.args) < 2 or node.kwargs or TensorType.of(before) != TensorType.of(after):
        return None
    is_sum_of_ints = name == "aten::add" and not before.is_floating_point()
    if (name in ("aten::mul", "aten::pow") and node.args[1] == 1) or (is_sum_of_ints and node.args[1] == 0):
        return source
    return None


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    return (type(value), value) if isinstance(value, (int, float, bool)) else value


def _split_phases(region: Region) -> Region:
    """Order the graph as forward then backward; make views and parameter-only values again in the backward."""
    graph = region.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    output = next(node for node in graph.nodes if node.op == "output")
    forward = ancestors(list(output.args[0])[: len(region.outputs)])
    _sum_products_first(graph, [node for node in nodes if node not in forward])
    backward = [node for node in graph.nodes if node.op == "call_function" and node not in forward]
    from_parameters = parameter_only(region, graph)
    again = Recompute(graph, forward, lambda node: node in from_parameters or is_view(node))
    anchor = output
    for node in backward:
        anchor.prepend(node)
    for node in backward:
        again.rewire(node)
    drop_dead(graph)
    graph.lint()
    names = frozenset(node.name for node in graph.nodes if node in forward and node.op == "call_function")
    origins = _origins(region, graph)
    return replace(region, forward_nodes=names, origins=origins)


def _sum_products_first(graph: fx.Graph, backward: list[fx.Node]) -> None:
    """Where a gradient has several terms, add the matrix products first.

    Autograd adds in the order in which terms arrive. Split over ranks, products are partial sums: added to each other
    first, they are reduced once; with another term in between, once each.
    """
    for node in backward:
        if not _is_plain_add(node) or _is_inner_add(node):
            continue
        terms = _terms(node)
        products = [term for term in terms if _is_product(term)]
        ordered = products + [term for term in terms if term not in products]
        if len(products) < 2 or len(set(terms)) < len(terms) or ordered == terms:
            continue
        total = ordered[0]
        for term in ordered[1:]:
            with graph.inserting_before(node):
                total = graph.call_function(aten.add.Tensor, (total, term))
            total.meta = dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    drop_dead(graph)


def _is_plain_add(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own type."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    return len({TensorType.of(each.meta["val"]) for each in (node, *node.all_input_nodes)}) == 1


def _is_inner_add(node: fx.Node) -> bool:
    """Whether a sum is nothing but a term of another one."""
    return _is_plain_add(node) and len(node.users) == 1 and _is_plain_add(next(iter(node.users)))


def _terms(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum, in the order in which they are added."""
    terms: list[fx.Node] = []
    for term in node.args:
        assert isinstance(term, fx.Node)
        terms += _terms(term) if _is_inner_add(term) else [term]
    return terms


def _is_product(node: fx.Node) -> bool:
    """Whether a value is a matrix product, or a view of one."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return _base_name(node) in ("autopar::linear_grad_input", "autopar::linear", "aten::mm", "aten::bmm")


def _origins(region: Region, graph: fx.Graph) -> dict[str, str]:
    """node name -> module and source line; a backward node has those of what it differentiates, a sum of gradients
    those of the value.
    """
    prefix = f"{region.module}." if region.module else ""
    output = next(node for node in graph.nodes if node.op == "output")
    gradients = list(output.args[0])[len(region.outputs) :]
    found = {node: node.meta.get(tracing.ORIGIN_KEY, "") for node in graph.nodes if node.op == "call_function"}
    for node, slot in zip(gradients, region.trainable_slots, strict=False):
        if not found.get(node, ""):
            found[node] = prefix + slot.name.rpartition(".")[0]
    for node in gradients[len(region.trainable_slots) :]:
        if not found.get(node, ""):
            found[node] = region.module
    for node in found:
        if not found[node]:  # a sum that is a term of another: it is taken when its last term comes
            found[node] = next((found[each] for each in reversed(node.all_input_nodes) if found.get(each)), "")
    return {node.name: origin for node, origin in found.items()}
