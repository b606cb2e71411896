"""The named strategies that `auto` is held against: what a user could ask for on the axes that are `auto`."""

from __future__ import annotations

import contextlib
import itertools

from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import check_order, is_context_axis
from autopar.strategies.names import AUTO, Strategy, check_experts, is_tensor_axis, resolve
from autopar.strategies.request import Request

_ONE = ("ulysses", "allgather_kv", "ring")
_CACHED = ("split_kv", "helix")
_TWO = (("ring", "ulysses"), ("allgather_kv", "ulysses"), ("ulysses", "ulysses"), ("allgather_kv", "allgather_kv"))


def named_candidates(request: Request, *, mixture: bool = False) -> list[tuple[AxisStrategy, ...]]:
    """Named strategies, products of two for data, and of one for data and one for tensors, on the axes that are `auto`;
    the others as asked. mixture: the model has layers of experts, to which tokens may be sent.
    """
    mesh = request.mesh
    data, tensors = ("ddp", "zero2", "zero3"), ("tensor", "tensor+sequence")
    wanted: list[Strategy] = [*data, *tensors]
    if len(mesh.axis_names) > 1:
        own = [axis for axis in mesh.axis_names if is_tensor_axis(axis)]
        last = mesh.axis_names[-1]
        if not own:
            pairs = (("ddp", "zero2"), ("zero2", "zero3"))
            wanted += ["hsdp", *({a: inner if a == last else d for a in mesh.axis_names} for d, inner in pairs)]
        own = own or [last]
        wanted += [{a: t if a in own else d for a in mesh.axis_names} for d in data for t in tensors]
        wanted += ["hsdp"]
    if mixture:
        wanted += _exchanging(mesh)
    found: dict[tuple[AxisStrategy, ...], None] = {}
    for strategy in wanted:
        with contextlib.suppress(AutoparError):  # the axes that are not `auto` have experts already
            filled = _filled(request, resolve(strategy, mesh))
            check_experts(filled, mesh)
            found[filled] = None
    return list(found)


def _exchanging(mesh: Mesh) -> list[Strategy]:
    """Tokens sent to their experts over an axis for data, the last; beside it tensors, where an axis is named so."""
    wanted: list[Strategy] = [f"{data}expert" for data in ("", "zero2+", "zero3+")]
    tensors = [axis for axis in mesh.axis_names if is_tensor_axis(axis)]
    if tensors and len(tensors) < len(mesh.axis_names):
        for name in wanted[:]:
            rest = zip(mesh.axis_names, resolve(name, mesh), strict=True)
            wanted.append({axis: "tensor" if axis in tensors else each for axis, each in rest})
    return wanted


def context_candidates(request: Request, *, cached: bool = False) -> list[tuple[AxisStrategy, ...]]:
    """Context strategies on the axes that are `auto`: on those that are for the sequence by name, else on any one; the
    others split data, or tensors where that is their name. cached: the program has caches, whose length may be split.
    """
    mesh = request.mesh
    free = [a for a, each in zip(mesh.axis_names, request.strategies, strict=True) if each is AUTO and mesh.size(a) > 1]
    named = [axis for axis in free if is_context_axis(axis)]
    groups = [named] if named else [[axis] for axis in free]
    found = []
    for own in groups:
        ways = _TWO if len(own) == 2 else tuple((each,) * len(own) for each in _ONE)
        ways = (*ways, *((each,) * len(own) for each in _CACHED if cached))
        for way, data in itertools.product(ways, ("ddp", "zero3") if len(free) > len(own) else ("ddp",)):
            given = dict(zip(own, way, strict=True))
            rest = {axis: "tensor" if is_tensor_axis(axis) else data for axis in mesh.axis_names if axis not in own}
            with contextlib.suppress(AutoparError):  # an order that cannot be
                strategies = _filled(request, resolve(given | rest, mesh))
                check_order(strategies, mesh)
                found.append(strategies)
    return list(dict.fromkeys(found))


def _filled(request: Request, named: tuple[AxisStrategy, ...]) -> tuple[AxisStrategy, ...]:
    """These strategies on the axes that are `auto`, the others as asked."""
    return tuple(each if asked is AUTO else asked for asked, each in zip(request.strategies, named, strict=True))
