"""What the model calls its values: the variable that a statement assigns, the module that returns a value.

query_states = self.q_proj(x).view(shape).transpose(1, 2)   →   linear: q_proj; transpose: query_states
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import groupby

from torch import Tensor, fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import NAME

_TARGETS = re.compile(r"^([A-Za-z_][\w.]*(?:\s*,\s*[A-Za-z_][\w.]*)*)(?:\s*:[^=]+)?\s[-+*/@&|]?=\s")
"""`a`, `a, b`, `self.a` or `a: Tensor` before a lone ` = ` or ` += ` (keywords have no blanks)."""


_ALIASES = frozenset(
    (
        "view", "_unsafe_view", "reshape", "expand", "expand_as", "permute", "transpose", "t", "unsqueeze", "squeeze",
        "to", "_to_copy", "clone", "contiguous", "detach", "flatten", "unflatten", "type_as", "repeat", "split",
        "chunk", "float", "numpy_T", "mT",
    )
)  # fmt: skip
"""Operators whose result is called as what they are given."""


def name_nodes(nodes: Iterable[fx.Node], updates: Container[fx.Node] = ()) -> None:
    """Note in each node's meta what the model calls its value; nothing where the model has no word for it.

    updates: values that replace buffers, which no module returns.
    """
    known = [node for node in nodes if node.op == "call_function" and node not in updates]
    for frames, statement in _statements(known):
        for node, name in _of_statement(frames, *statement):
            node.meta[NAME] = name
    modules = {_module(node)[0] for node in known}
    inner = {path for path in modules if not any(other.startswith(f"{path}.") for other in modules)}
    for (path, kind), run in groupby(known, key=_module):
        nodes = list(run)
        inside = set(nodes)
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        if path and len(results) == 1 and (path in inner or kind.startswith("torch.") or _returns(results[0], path)):
            if not path.rpartition(".")[2].isdigit():
                results[0].meta[NAME] = path.rpartition(".")[2]
            elif kind.startswith("torch.") or NAME not in results[0].meta:
                results[0].meta[NAME] = kind.rpartition(".")[2]  # of one in a list, its class
            _name_before_shape(results[0], inside)
    for node in known:
        if (base := _base(node)) and base not in _ALIASES and isinstance(node.meta.get("val"), Tensor):
            node.meta.setdefault(NAME, base.strip("_"))


def _name_before_shape(result: fx.Node, inside: Container[fx.Node]) -> None:
    """What a module only brings into shape before it returns it has no better name than the module's."""
    node = result
    while _base(node) in _ALIASES and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        if node not in inside or len(node.users) > 1:
            return
        node.meta[NAME] = result.meta[NAME]


def _base(node: fx.Node) -> str:
    """`view` of `aten::view`; "" for what is no operator."""
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, tracing.OpOverload) else ""


_Frames = tuple[tracing.Frame, ...]


def _statements(nodes: Sequence[fx.Node]) -> Iterator[tuple[_Frames, tuple[list[fx.Node], set[fx.Node]]]]:
    """Each run of a statement of the model, inner ones first: the frames down to it, its own nodes, and all of it, what
    the modules that it calls do, too. What a plain function does is its caller's own.
    """
    running: dict[_Frames, tuple[list[fx.Node], set[fx.Node]]] = {}
    for node in nodes:
        frames = tracing.model_frames(node.meta.get("stack_trace") or "")
        for done in [known for known in reversed(running) if frames[: len(known)] != known]:
            yield done, running.pop(done)
        module = max((depth for depth, frame in enumerate(frames, start=1) if frame.is_forward), default=len(frames))
        for depth in range(module, len(frames) + 1):
            running.setdefault(frames[:depth], ([], set()))[0].append(node)
        for _, inside in running.values():
            inside.add(node)
    yield from reversed(running.items())


def _of_statement(frames: _Frames, own: Sequence[fx.Node], inside: Container[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    match = _TARGETS.match(frames[-1].text) if frames else None
    if match is None:
        return
    targets = [target.strip().rpartition(".")[2] for target in match[1].split(",")]
    results = [node for node in own if any(user not in inside for user in node.users)]
    if len(results) > len(targets) == 1 and frames[-1].text[match.end() :].startswith(("(", "[")):
        return  # the name of a tuple, not of what is in it
    for node, target in zip(results[-len(targets) :], targets, strict=False):
        is_told = len(results) >= len(targets) or NAME not in node.meta
        if target != "_" and is_told:
            yield node, target


def library_modules(nodes: Iterable[fx.Node]) -> frozenset[str]:
    """The paths of modules of torch's own: what they do has no line of the model but their caller's."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
    every = {(path.split("@")[0], _class_name(kind)) for stack in stacks for path, kind in stack.values()}
    return frozenset(path for path, kind in every if path and kind.startswith("torch."))


def _module(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module that makes a node's value."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    return path.split("@")[0], _class_name(kind)


def _class_name(kind: str | type) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _returns(node: fx.Node, path: str) -> bool:
    """Whether the module at `path` returns a value: in a statement that says so, and not to a part of itself."""
    frames = tracing.model_frames(node.meta.get("stack_trace") or "")
    if not frames or not frames[-1].text.startswith("return"):
        return False
    return not any(f"{_module(user)[0]}.".startswith(f"{path}.") for user in node.users)
