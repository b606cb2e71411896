"""torch's private parts that tracing needs, each with its reason. Tested on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

# differentiate: the tracer below dispatch that records forward and backward of one region in one graph.
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as _make_fx

# capture: what torch.export raises when control flow depends on data.
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# capture: batches and outputs are pytrees, and torch.export's own specs say how HuggingFace outputs are rebuilt.
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError

# capture, outline: how operators are told from higher-order ones.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator

tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def is_mutable(node: fx.Node) -> bool:
    """Whether a node changes one of its operands."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def tree_leaves_with_path(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with dotted paths, in the order of `tree_flatten`.

    Knows dicts (and ModelOutput), sequences and dataclasses.
    """
    items: list[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        items = list(zip(getattr(tree, "_fields"), tree, strict=True))  # noqa: B009 (a namedtuple)
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    elif len(leaves := pytree.tree_leaves(tree)) != 1 or leaves[0] is not tree:
        items = list(enumerate(leaves))
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from tree_leaves_with_path(value, f"{prefix}.{key}" if prefix else str(key))


def output_names(spec: Any, count: int) -> tuple[str, ...]:
    """A dotted name per leaf of an output spec: `loss`, `logits`; `output` for a bare tensor."""
    tree = pytree.tree_unflatten(list(range(count)), spec)
    names = [""] * count
    for path, index in tree_leaves_with_path(tree):
        names[index] = path or "output"
    return tuple(names)


def dump_treespec(spec: Any) -> str:
    """A pytree spec as text (plan files)."""
    for kind in _namedtuples(pytree.tree_unflatten([None] * spec.num_leaves, spec)):
        _register_namedtuple(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytree.treespec_dumps(spec)


def load_treespec(text: str) -> Any:
    """The inverse of `dump_treespec`. Runs and imports nothing: classes are looked for in what is imported already.

    Raises:
        AutoparError: the text names a class that is not there.
    """
    if "__enum__" in text:
        raise AutoparError("the model's output holds an enumeration", remedy="return tensors under plain string keys")
    for name in re.findall(r'"([\w.<>]+)', text.replace("\\", "")):
        if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and (kind := _imported_class(name)) is not None:
            _register_namedtuple(kind)
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, KeyError) as error:
        raise AutoparError(
            "the class of the model's output is not known in this process",
            values=str(error),
            remedy="define it at the top level of a module, and import the module before loading the plan",
        ) from error


def _namedtuples(tree: Any) -> Iterator[type]:
    """The classes of the named tuples in a tree."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        yield type(tree)
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    for child in children:
        yield from _namedtuples(child)


def _register_namedtuple(kind: type) -> None:
    """Give a named tuple the name under which torch writes it into specs: torch knows none for a user's class."""
    if kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")


def _imported_class(name: str) -> type | None:
    """The named tuple `module.Class`, if its module is imported."""
    module, _, attribute = name.rpartition(".")
    kind = getattr(sys.modules.get(module), attribute, None)
    return kind if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, of meta too, lie in the same memory."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def is_data_dependent(error: BaseException) -> bool:
    """Whether an export failed because Python asked for the value of a tensor."""
    seen: BaseException | None = error
    while seen is not None:
        if (
            isinstance(seen, GuardOnDataDependentSymNode)
            or "data-dependent" in str(seen)
            or "meta tensors" in str(seen)
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_tracer_file(filename: str) -> bool:
    """Whether a traceback's file belongs to torch, to autopar or to Python itself, not to the model."""
    if filename.startswith("<") or filename.endswith("contextlib.py"):
        return True
    return filename.startswith(_TRACERS) and not filename.startswith(_MODELS)


_AUTOPAR = f"{Path(__file__).parent.parent}{os.sep}"
_TRACERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(sympy.__file__).parent}{os.sep}", _AUTOPAR)
_MODELS = f"{_AUTOPAR}models{os.sep}"
"""Models that autopar ships are models like the user's."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def model_source_line(stack_trace: str) -> str:
    """`modeling_llama.py:177`: the innermost frame of a node's stack trace that is the model's own."""
    for filename, line in reversed(_FRAME.findall(stack_trace)):
        if not is_tracer_file(filename):
            return f"{filename.rsplit('/', 1)[-1]}:{line}"
    return ""


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Silence the tracer's own log lines: autopar reports the failure itself."""
    names = ("torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export", "torch._dynamo")
    loggers = [logging.getLogger(name) for name in names]
    levels = [item.level for item in loggers]
    for item in loggers:
        item.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for item, level in zip(loggers, levels, strict=True):
            item.setLevel(level)


def make_fx(
    function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]], arguments: list[torch.Tensor]
) -> fx.GraphModule:
    """Record `function` on fake tensors as a flat graph of ATen operators."""
    with quiet_export():
        return _make_fx(function, decomposition_table=dict(decompositions), tracing_mode="fake")(*arguments)


def functional(module: fx.GraphModule, arguments: list[torch.Tensor]) -> fx.GraphModule:
    """The same graph without operators that change their operands (some gradient formulas of torch have them)."""
    return make_fx(torch.func.functionalize(_Again(module).run, remove="mutations"), {}, arguments)


class _Again(fx.Interpreter):
    """Runs a recorded graph, and marks what is recorded now with the origins that it has."""

    def run_node(self, n: fx.Node) -> Any:
        with tag_new_nodes(n.meta.get(ORIGIN_KEY, "")):
            return super().run_node(n)


ORIGIN_KEY = "autopar_origin"


@contextlib.contextmanager
def tag_new_nodes(origin: str) -> Iterator[None]:
    """Mark the nodes that the surrounding `make_fx` records inside the block with where they come from."""
    mode = get_proxy_mode()
    graph = mode.tracer.graph if mode is not None else None
    before = len(graph.nodes) if graph is not None else 0
    yield
    if graph is None:
        return
    new = len(graph.nodes) - before
    for node in itertools.islice(reversed(graph.nodes), new):
        node.meta[ORIGIN_KEY] = origin
