"""The calls of ATen operators that torch's own samples make, in the form in which rules are asked about them, and the
same calls in other sizes.

A sample of torch's `op_db` is recorded before dispatch and run again with autopar's operators in place of composite
ones, forward and backward, as `passes/differentiate.py` does; nothing writes in place. Its tensors keep their values,
so that indices are indices.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import operators

MAX_ELEMENTS = 1 << 16
"""Of all operands of a call together; larger ones are left out."""
UNIFORM = (0, 1, 2, 3, 5)
"""Every size of a call is made each of these."""
MIXED = ((2, 3, 5), (6, 4, 12), (12, 6, 4), (3, 6, 2))
"""The sizes of a call, in order, are made these."""
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
"""What samples are made in: the first that the operator takes."""


UNCHECKED = frozenset({"aten.unfold_backward.default"})
"""Kernels that read what is not theirs where sizes do not go together: only calls as recorded are calls."""


@dataclass(frozen=True)
class Recorded:
    """A call of an operator on concrete tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """What decides its rule: all but the values of its tensors."""
        return f"{self.target}{described(self.args)}{described(sorted(self.kwargs.items()))}"


def described(value: Any) -> str:
    """Shapes and dtypes instead of tensors."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)


# ---------------------------------------------------------------------------------------------------------- operators


@lru_cache(maxsize=1)
def database() -> dict[str, Any]:
    """torch's operators with samples, by name and variant."""
    if importlib.util.find_spec("expecttest") is None:  # torch's test cases want it; the samples do not
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    named = [(f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name, op) for op in op_db]
    return dict(named)


def calls_of(operator: Any, most: int) -> list[Recorded]:
    """The distinct calls that its samples make, with up to `most` of each ATen operator's, chosen at random."""
    dtype = next((d for d in DTYPES if d in operator.supported_dtypes("cpu")), None)
    found: dict[str, Recorded] = {}
    if dtype is None:
        return []
    torch.manual_seed(0)
    try:
        samples = list(operator.sample_inputs("cpu", dtype))
    except Exception:  # of torch's own making, where a library is not there
        return []
    for sample in _some(samples, 4 * most):
        function, tensors = _with_tensors_alone(operator.op, (sample.input, *sample.args), sample.kwargs)
        for call in recorded(function, tensors):
            found.setdefault(call.key, call)
    by_target: dict[str, list[Recorded]] = {}
    for call in found.values():
        by_target.setdefault(str(call.target), []).append(call)
    return [call for calls in by_target.values() for call in _some(calls, most)]


def _some(items: Sequence[Any], most: int) -> list[Any]:
    """Up to `most` of them, in their order: at random, as samples are products of what may be given."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in sorted(random.Random(0).sample(range(len(items)), most))]


def _with_tensors_alone(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """The same as a function of its tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def function(*tensors: Tensor) -> Any:
        own = iter(tensors)
        filled = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        new_args, new_kwargs = pytree.tree_unflatten(filled, spec)
        return target(*new_args, **new_kwargs)

    return function, [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# ---------------------------------------------------------------------------------------------------------- recording


def recorded(function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Recorded]:
    """The calls that a function dispatches to, as a program has them; without its backward, or as torch itself runs it,
    where nothing else can be had.
    """
    replayed = function
    try:
        with torch.no_grad():
            graph = make_fx(function, pre_dispatch=True)(*tensors)
        replayed = _Replay(graph).run
    except Exception:  # what cannot be traced
        pass
    for run in (lambda: _with_backward(replayed, tensors), lambda: replayed(*tensors), lambda: function(*tensors)):
        recorder = _Recorder()
        try:
            with recorder, operators.tracing_seed(torch.tensor(5)):
                run()
        except Exception:  # of a sample that a part of this cannot run: the next does with less
            continue
        return [functional for call in recorder.calls for functional in _without_writes(call)]
    return []


class _Replay(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function: Any = operators.AUTOGRAD.get(target, target)
        return function(*args, **kwargs)


def _with_backward(function: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
    inexact = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
    results = [r for r in pytree.tree_leaves(function(*inexact)) if isinstance(r, Tensor) and r.requires_grad]
    wanted = [t for t in inexact if t.requires_grad]
    if results and wanted:
        torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results], allow_unused=True)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own_args, own_kwargs = pytree.tree_map_only(Tensor, _kept, (tuple(args), dict(kwargs or {})))
        self.calls.append(Recorded(func, own_args, own_kwargs))
        return func(*args, **(kwargs or {}))


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.layout == torch.strided else tensor.detach()


def _without_writes(call: Recorded) -> list[Recorded]:
    """A call that writes in place as the calls that stand for it in a program."""
    if not call.target._schema.is_mutable:
        return [call]
    function, tensors = _with_tensors_alone(call.target, call.args, call.kwargs)
    recorder = _Recorder()
    try:
        with recorder:
            torch.func.functionalize(function, remove="mutations")(*tensors)
    except Exception:  # operators that have no other form: no program has them
        return []
    return [each for each in recorder.calls if not each.target._schema.is_mutable]


# -------------------------------------------------------------------------------------------------------- other sizes


def resized(call: Recorded, may_run: Callable[[Recorded], bool] = lambda _: True) -> Iterator[Recorded]:
    """The same call in other sizes, where it still runs: all of one size, all different, one of them 1 or 0.

    Dims of one size stay of one size. Ints that equal a size follow it, or stay, as the operator takes it.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    sizes = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
    if str(call.target) in UNCHECKED:
        return
    if not sizes or any(tensor.layout != torch.strided or tensor.is_quantized for tensor in tensors):
        return
    maps = [dict.fromkeys(sizes, size) for size in UNIFORM]
    maps += [dict(zip(sizes, itertools.cycle(mixed))) for mixed in MIXED]
    maps += [{size: new} for size in sizes[:3] for new in (0, 1, 2)]
    seen = {call.key}
    for sizes_map in maps:
        for follow in (True, False):
            other = _in_sizes(call, sizes_map, follow)
            if other.key in seen:
                continue
            seen.add(other.key)
            if may_run(other) and _runs(other):
                yield other
                break


def _in_sizes(call: Recorded, sizes: dict[int, int], follow: bool) -> Recorded:
    """Only arguments that the schema calls sizes (`SymInt`) follow: 2 may as well be the name of a reduction."""
    shapes: list[list[int]] = []
    pytree.tree_map_only(Tensor, lambda t: shapes.append([sizes.get(s, s) for s in t.shape]), (call.args, call.kwargs))
    smallest = min((size for shape in shapes for size in shape if size), default=1)

    def changed(value: Any, follow: bool) -> Any:
        if isinstance(value, Tensor):
            return _refilled(value, [sizes.get(size, size) for size in value.shape], smallest)
        if isinstance(value, list | tuple):
            return type(value)(changed(item, follow) for item in value)
        return sizes.get(value, value) if follow and type(value) is int else value

    types = {p.name: "SymInt" in str(p.real_type) for p in call.target._schema.arguments}
    places = list(types.values())
    args = tuple(changed(value, follow and places[place]) for place, value in enumerate(call.args))
    return Recorded(call.target, args, {k: changed(v, follow and types[k]) for k, v in call.kwargs.items()})


def _refilled(tensor: Tensor, shape: Sequence[int], bound: int) -> Tensor:
    """A tensor of another shape with the same values in turn; whole numbers, which may be places, below `bound`."""
    inexact = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    if list(shape) == list(tensor.shape):
        return tensor if inexact else tensor.remainder(bound)
    count = torch.Size(shape).numel()
    flat = tensor.reshape(-1)
    if not flat.numel() or count > MAX_ELEMENTS:
        return tensor.new_zeros(shape)
    filled = flat[torch.arange(count) % flat.numel()].reshape(shape)
    return filled if inexact else filled.remainder(bound)


def _runs(call: Recorded) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    if sum(tensor.numel() for tensor in tensors) > MAX_ELEMENTS:
        return False
    try:
        call.target(*pytree.tree_map_only(Tensor, torch.clone, call.args), **call.kwargs)
    except Exception:  # arguments that do not go together
        return False
    return True
