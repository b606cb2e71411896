"""A graph that Dynamo traced, as a model that autopar can plan for: an nn.Module with named parameters and buffers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.compiling import where_from

Role = Literal["parameter", "trained", "buffer", "input", "constant"]
"""What an argument is to the plan: `trained` gets a gradient, whether it is a parameter or an input that requires one;
a `constant` is no tensor."""

_HOLDERS = ("_modules", "_parameters", "_buffers")
_NORMS = ("batch_norm", "instance_norm")


@dataclass(frozen=True, slots=True)
class Argument:
    """One placeholder. name: the parameter's in the model, `layers.0.weight`; an input's, `input_ids`.

    in_module: it hangs on an nn.Module. is_written: the graph writes into it.
    """

    name: str
    in_module: bool
    is_written: bool


@dataclass(frozen=True, slots=True, eq=False)
class Subgraph:
    """A traced graph without what ties it to one trace. digest: equal for graphs that compute the same thing."""

    module: fx.GraphModule
    arguments: tuple[Argument, ...]
    digest: str

    def roles(self, values: Sequence[Any]) -> tuple[Role, ...]:
        """What each argument is, in a call with these values."""
        given = zip(values, self.arguments, strict=True)
        rows = [v.shape[0] for v, each in given if isinstance(v, Tensor) and v.dim() and not each.in_module]
        rows = [size for size in rows if size > 1] or rows
        batch = max(rows, key=rows.count, default=0)  # the first of those that most agree on
        return tuple(_role(value, each, batch) for value, each in zip(values, self.arguments, strict=True))


def _role(value: Any, argument: Argument, batch: int) -> Role:
    if not isinstance(value, Tensor):
        return "constant"
    if value.requires_grad and torch.is_grad_enabled():
        return "trained"
    if isinstance(value, nn.Parameter):
        return "parameter"
    # What is not as long as the batch (a mask, positions) is no part of it: strategies that split the batch leave it.
    of_batch = value.dim() == 0 or value.shape[0] == batch
    return "input" if of_batch and not argument.in_module and not argument.is_written else "buffer"


def subgraph_of(module: fx.GraphModule) -> Subgraph:
    """The graph that a backend was given; its nodes keep nothing but where in the model they come from.

    Raises:
        AutoparError: it returns something that is no tensor, or uses autocast.
    """
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [where_from(node) for node in holders]
    nodes = [node for each in module.modules() if isinstance(each, fx.GraphModule) for node in each.graph.nodes]
    stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
    roots = {_tokens(path)[0] for stack in stacks for path, _ in stack.values()}
    roots |= {_tokens(name)[0] for name, in_module in sources if in_module}
    root = roots.pop() if len(roots) == 1 else None
    written = _written(module.graph)
    titles = _distinct([_name(name, root, in_module) for name, in_module in sources])
    arguments = tuple(
        Argument(name, in_module, node in written)
        for name, (_, in_module), node in zip(titles, sources, holders, strict=True)
    )
    _check(module.graph, nodes)
    return Subgraph(_cleaned(module, root), arguments, _digest(module))


def _cleaned(module: fx.GraphModule, root: str | None) -> fx.GraphModule:
    """A copy whose nodes, and those of the graphs that it calls, keep their source lines and plain module paths."""
    clean = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = clean.node_copy(node, lambda n: copies[n])
        copies[node].meta = {"stack_trace": node.meta["stack_trace"]} if node.meta.get("stack_trace") else {}
        if stack := node.meta.get("nn_module_stack"):
            names = {key: (".".join(_path(path, root)), kind) for key, (path, kind) in stack.items()}
            copies[node].meta["nn_module_stack"] = names
    copy = fx.GraphModule(module, clean)
    for node in clean.nodes:
        if node.op == "get_attr" and isinstance(held := _attribute(module, str(node.target)), fx.GraphModule):
            setattr(copy, str(node.target), _cleaned(held, root))
    return copy


def _tokens(expression: str) -> list[str]:
    """`L['self']._modules['layers'][0].weight` → self, layers, 0, weight."""
    parts = re.findall(r"\['([^']*)'\]|\[(\d+)\]|(\w+)", re.sub(r"^[LG](?=\[)", "", expression))
    found = [next(part for part in each if part) for each in parts if any(each)]
    return [re.sub(r"\W", "_", token) for token in found if token not in _HOLDERS] or ["value"]


def _path(expression: str, root: str | None) -> list[str]:
    tokens = _tokens(expression)
    return tokens[1:] if tokens[0] == root else tokens


def _name(expression: str, root: str | None, in_module: bool) -> str:
    # Inputs have no dot: they are keywords of forward.
    return ".".join(_path(expression, root)) if in_module else _tokens(expression)[-1].strip("_")


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number where one is taken, as a whole or as the beginning of another."""
    found: list[str] = []
    heads = {".".join(parts[:i]) for parts in (name.split(".") for name in names) for i in range(1, len(parts))}
    for name in names:
        free, number = name or "value", 1
        while free in found or free in heads:
            free, number = f"{name}_{number}", number + 1
        found.append(free)
    return found


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Placeholders that an in-place operator is given as what it writes into."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        in_place = name.endswith("_") and not name.endswith("__")
        if node.op in ("call_method", "call_function") and (in_place or name in ("setitem", "iadd", "imul", "isub")):
            found |= {each for each in node.args[:1] if isinstance(each, fx.Node)}
        if node.op == "call_function" and name in _NORMS:
            found |= {each for each in node.args[1:3] if isinstance(each, fx.Node)}
    return {node for node in found if node.op == "placeholder"}


def _check(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    entered = [node for node in nodes if getattr(node.target, "__name__", "") == "_enter_autocast"]
    if any(node.args[2] for node in entered):  # (device type, dtype, enabled, cache)
        raise autocast_error()
    output = next(node for node in graph.nodes if node.op == "output")
    returned: Sequence[Any] = output.args[0]
    for number, node in enumerate(returned):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
        if value is not None and not isinstance(value, Tensor):
            raise AutoparError(
                f"output {number} of a traced graph is {value!r}, a size and no tensor",
                remedy="trace with static shapes: torch.compile(model, backend=..., dynamic=False)",
            )


def autocast_error() -> AutoparError:
    """Models are traced on meta, where autocast casts nothing: the program would compute in other types than eager."""
    return AutoparError(
        "autocast is not known to this backend",
        remedy='cast the model, as in model.to(torch.bfloat16), or use autopar.compile(..., precision="bf16")',
    )


def _digest(module: fx.GraphModule) -> str:
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _lines(module: fx.GraphModule) -> list[str]:
    """The graph in words: the same in every process, whatever its nodes are called."""
    number: dict[fx.Node, int] = {}

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"{type(value).__name__}({','.join(map(text, value))})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{text(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({text(value.start)},{text(value.stop)},{text(value.step)})"
        return repr(value)

    lines: list[str] = []
    for node in module.graph.nodes:
        number[node] = len(number)
        target = str(node.target) if node.op == "call_method" else ""
        if node.op == "call_function":
            target = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"
        if node.op == "get_attr":
            held = _attribute(module, str(node.target))
            if isinstance(held, fx.GraphModule):
                target = "\n".join(_lines(held))
            elif isinstance(held, Tensor):
                target = hashlib.sha256(repr((held.shape, held.dtype, held.tolist())).encode()).hexdigest()
            else:
                target = repr(held)
        lines.append(f"{node.op} {target} {text(node.args)} {text(node.kwargs)}")
    return lines


def _attribute(module: nn.Module, path: str) -> Any:
    held: Any = module
    for part in path.split("."):
        held = getattr(held, part)
    return held


class GraphModel(nn.Module):
    """The subgraph as a model of the given arguments, on meta. forward takes the inputs by name, and returns a tuple.

    Scalars are returned with one dim. A program is differentiated with respect to its loss alone where it returns one,
    a scalar; here whatever is returned may get a gradient.
    """

    def __init__(self, subgraph: Subgraph, roles: Sequence[Role], values: Sequence[Any]) -> None:
        super().__init__()
        self.graph_module = subgraph.module
        self.places: list[tuple[Role, Any]] = []
        for argument, role, value in zip(subgraph.arguments, roles, values, strict=True):
            self.places.append((role, value if role == "constant" else argument.name))
            if role in ("parameter", "trained", "buffer"):
                self._hold(argument.name, role, torch.empty(value.shape, dtype=value.dtype, device="meta"))

    def _hold(self, name: str, role: Role, value: Tensor) -> None:
        *path, last = name.split(".")
        holder: nn.Module = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if role == "buffer":
            holder.register_buffer(last, value)
        else:
            holder.register_parameter(last, nn.Parameter(value, requires_grad=role == "trained"))

    def forward(self, **inputs: Tensor) -> tuple[Any, ...]:
        def value(role: Role, given: Any) -> Any:
            return given if role == "constant" else inputs[given] if role == "input" else _attribute(self, given)

        values = [value(*place) for place in self.places]
        device = next((each.device for each in values if isinstance(each, Tensor)), torch.device("cpu"))
        # Keeps where each operator comes from, so that repeated layers are found.
        with traceback.preserve_node_meta():
            results = _OnDevice(self.graph_module, device).run(*values, enable_io_processing=False)
        return tuple(x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x for x in results)


class _OnDevice(fx.Interpreter):
    """Runs the graph on one device, in place of those that Dynamo wrote into it: models are traced on meta."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.device = device

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        moves = n.op == "call_method" and n.target == "to"

        def here(value: Any) -> Any:
            return self.device if isinstance(value, torch.device) or (moves and isinstance(value, str)) else value

        args, kwargs = tuple(map(here, args)), {key: here(value) for key, value in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = self.device
        return args, kwargs

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # What is computed again is the plan's decision (`rematerialize`), with or without torch.utils.checkpoint.
        if getattr(target, "__name__", "") == "tag_activation_checkpoint":
            return _OnDevice(args[0], self.device).run(*args[1:], enable_io_processing=False)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in ("cpu", "cuda"):
            return args[0].to(self.device)
        return super().call_method(target, args, kwargs)
