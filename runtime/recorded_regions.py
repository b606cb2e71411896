"""Regions that send nothing, compiled on the CPU for tensors of one layout: recorded once with the operators of autopar
spelled out, so that a compiler makes loops of what stands between products, and run without asking anything else.

    rms_norm ─ linear ─ silu ─ mul ─ linear     ──►     a loop ─ linear ─ a loop ─ linear

What a recording leaves out is what Python does beside tensors. So only straight text is recorded: values computed of
values. Whoever reads such a region needs no guards: shapes, strides and types of what comes in are all that it depends
on, and they are compared at every call.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.torch_compat import tracing
from autopar.operators.registration import SPELLED_OUT
from autopar.runtime.communicator import Communicator

logger = logging.getLogger("autopar")

_KEYS = tuple[Any, ...]
_MODULES = ("torch", "F", "aten", "ops", "math")
_BUILTINS = ("len", "min", "max", "int", "float", "bool", "tuple", "list", "range", "slice")
_KNOWS = ("axes", "sizes", "rank", "device", "index", "size", "slice", "starts")
"""Of a communicator, what sends nothing and keeps no tensors."""
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Delete, ast.Pass)
_PARTS = (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MOST = 16
"""Layouts of arguments for which a region is compiled; with others it runs as it is."""


def is_straight(function: Callable[..., Any]) -> bool:
    """Whether a region does nothing but compute tensors of those that it is given, and sends nothing."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return False
    rest = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    known = {each.arg for each in tree.args.args}
    nodes = [node for statement in rest for node in ast.walk(statement)]
    known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    constants = {name for name, value in function.__globals__.items() if isinstance(value, bool | int | float)}
    own = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _KNOWS}
    return all(isinstance(statement, _STATEMENTS) for statement in rest) and all(
        not isinstance(node, _PARTS)
        and (not isinstance(node, ast.Name) or node.id in known | constants | {*_MODULES, *_BUILTINS})
        and (not isinstance(node, ast.Name) or node.id != "comm" or id(node) in own)
        for node in nodes
    )


class RecordedRegion:
    """A region of straight text, recorded and compiled for each layout of its arguments at its first call.

    written: ids of the states that it may write where they lie (`in_place.py`).
    """

    def __init__(self, name: str, function: Callable[..., Any], compiler: Any, filename: str) -> None:
        self.name, self.function, self.compiler, self.filename = name, function, compiler, filename
        self.written: set[int] = set()
        self._made: dict[_KEYS, _Recording | None] = {}
        self._lock = Lock()

    def write(self, written: set[int], other: RecordedRegion) -> None:
        """From now on states of these ids are written where they lie. other: the region of a program that copies them,
        whose recordings are this one's where nothing is written.
        """
        self.written, self._made, self._lock = written, other._made, other._lock

    def __call__(self, comm: Communicator, p: Mapping[str, Tensor], *args: Any) -> Any:
        given = [*p.values(), *args]
        key = (tuple(p), *[_layout(x, self.written) for x in given])
        if None in key:
            return self.function(comm, p, *args)
        if key not in self._made:
            with self._lock:
                if key not in self._made:
                    self._made[key] = self._recorded(comm, tuple(p), given) if len(self._made) < _MOST else None
        found = self._made[key]
        return self.function(comm, p, *args) if found is None else found(given)

    def _recorded(self, comm: Communicator, names: Sequence[str], given: Sequence[Any]) -> _Recording | None:
        try:
            with torch.no_grad():
                return self._record(_Alone(comm), names, given, [x for x in given if isinstance(x, Tensor)])
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            logger.warning(
                "autopar: torch.compile failed for the region function %s (%s); it runs uncompiled. %s",
                self.name, self.filename, said,
            )  # fmt: skip
            return None

    def _record(self, comm: Any, names: Sequence[str], given: Sequence[Any], tensors: list[Tensor]) -> _Recording:
        is_written = [id(x) in self.written for x in tensors]
        outputs: list[int | None] = []

        def flat(*standing: Tensor) -> list[Tensor]:
            taken = iter(standing)
            values = [next(taken) if isinstance(x, Tensor) else x for x in given]
            known = {id(x): place for place, x in enumerate(values) if isinstance(x, Tensor)}
            here = {id(x) for x, written in zip(standing, is_written, strict=True) if written}
            self.written |= here
            try:
                found, saved = self.function(comm, dict(zip(names, values, strict=False)), *values[len(names) :])
            finally:
                self.written -= here
            if saved != () or not all(isinstance(x, Tensor) for x in found):
                raise TypeError("it keeps something for a backward, or gives something else than tensors")
            outputs[:] = [known.get(id(x)) for x in found]
            return [x for x in found if id(x) not in known]

        try:
            graph = tracing.make_fx(flat, SPELLED_OUT, tensors)
        except Exception:  # an operator that looks at numbers, as experts ask how many tokens each has
            graph = tracing.make_fx(flat, {}, tensors)
        return _Recording(self.compiler(graph, tensors), tuple(outputs))


@dataclass(frozen=True, slots=True)
class _Recording:
    """Compiled for arguments of one layout. outputs: which of the arguments each is; None: the next of `run`."""

    run: Callable[..., Sequence[Tensor]]
    outputs: Sequence[int | None]

    def __call__(self, given: Sequence[Any]) -> tuple[tuple[Tensor, ...], tuple[()]]:
        made = iter(self.run(*[x for x in given if isinstance(x, Tensor)]))
        return tuple(next(made) if place is None else given[place] for place in self.outputs), ()


class _Alone:
    """A communicator for text that sends nothing."""

    def __init__(self, comm: Communicator) -> None:
        for name in _KNOWS:
            if hasattr(comm, name):
                setattr(self, name, getattr(comm, name))


def _layout(x: Any, written: set[int]) -> tuple[Any, ...] | None:
    """What of an argument a recording depends on; None of one that cannot be recorded."""
    if type(x) in (Tensor, nn.Parameter):
        return (x.shape, x.stride(), x.dtype, id(x) in written) if x.is_cpu else None
    return (type(x), x) if type(x) in _PLAIN else None
