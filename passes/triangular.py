"""Forward substitution, written as a loop over rows, becomes one triangular solve.

Gated delta rules put the updates of a chunk together by an inverse, which they build row by row where a model is
exported: eight operators for each of 64 rows, every one a copy of the matrix.

    for i in range(1, n): a[i, :i] += a[i, :i] @ a[:i, :i]   →   a = solve_triangular(I - a, a)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.nodes import drop_dead, map_nodes
from autopar.passes.indices import Builder, constant

aten = torch.ops.aten

_WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
_KEEPS_PLACES = (
    *_WRITES, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.clone.default, aten.alias.default,
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.sum.dim_IntList, aten.matmul.default,
)  # fmt: skip
"""What a row is made of: polynomials, by operators that know no size of the batch."""
_COPIES = (aten.clone.default, aten.alias.default, aten.contiguous.default, aten.neg.default)
_SOLVED = (torch.float32, torch.float64)
LEAST_WRITES = 3
"""Below, a solve saves nothing."""
TOLERANCE = 1e-12
"""Of float64: what two ways to one polynomial may differ by."""


def simplify_substitution(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Where a chain of writes makes of a strictly lower matrix a the sum a + a² + a³ + …, which is (I - a)⁻¹ - I, write
    that.

    What the chain computes is found out by running it: it is a polynomial of one matrix, so one that agrees with the
    solve at a random one is the solve.
    """
    for last in reversed(list(graph.nodes)):
        if last.target in _WRITES and last.users and not any(_goes_on(user, last) for user in last.users):
            written = list(_written_before(last))
            start = written[-1] if len(written) > LEAST_WRITES else None
            if start is not None and _is_inverse(start, last):
                build = Builder(graph, last, origins)
                factor = build(aten.neg.default, start)
                solved = build(aten.linalg_solve_triangular.default, factor, start, upper=False, unitriangular=True)
                last.replace_all_uses_with(solved)
                drop_dead(graph)


def _goes_on(user: fx.Node, written: fx.Node) -> bool:
    return user.target in _WRITES and user.args[0] is written


def _written_before(last: fx.Node) -> Iterator[fx.Node]:
    """What a chain of writes over square matrices has made, from `last` back to what it began with."""
    shape = tuple(last.meta["val"].shape)
    node: Any = last
    if len(shape) > 1 and shape[-1] == shape[-2]:
        yield node
        while node.target in _WRITES:
            node = node.args[0]
            yield node


def _is_inverse(start: fx.Node, last: fx.Node) -> bool:
    """Whether `last` is (I - a)⁻¹ - I of a strictly lower `start`, and of nothing else."""
    steps = _between(start, last) if start.meta["val"].dtype in _SOLVED else None
    if steps is None or not _is_strictly_lower(start):
        return False
    *lead, _, size = start.meta["val"].shape
    generator = torch.Generator().manual_seed(0)
    lead = [2 + place for place, _ in enumerate(lead)]  # whatever mixed them would be another function
    sample = torch.randn(*lead, size, size, dtype=torch.float64, generator=generator).tril(-1) / size**0.5
    found: dict[fx.Node, Tensor] = {start: sample}
    try:
        for node in steps:
            args, kwargs = map_nodes((node.args, node.kwargs), lambda n: found[n])
            target: Any = node.target
            found[node] = target(*args, **kwargs)
    except (RuntimeError, IndexError):  # made for the sizes of this batch alone
        return False
    wanted = torch.linalg.solve_triangular(-sample, sample, upper=False, unitriangular=True)
    made = found[last]
    return made.shape == wanted.shape and bool((made - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def _between(start: fx.Node, last: fx.Node) -> list[fx.Node] | None:
    """The nodes that make `last` of `start`, in order; None where they read anything else, or are of other kinds."""
    found, waiting = {last}, [last]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source is start or source in found:
                continue
            if source.target not in _KEEPS_PLACES:
                return None
            found.add(source)
            waiting.append(source)
    return [node for node in start.graph.nodes if node in found]


def _is_strictly_lower(made: fx.Node) -> bool:
    """Whether a matrix has zeros on its diagonal and above, by how it is made."""
    node: Any = made
    while node.target in _COPIES:
        node = node.args[0]
    if node.target is aten.tril.default:
        return bool(len(node.args) > 1 and node.args[1] < 0)
    if node.target not in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return False
    _, mask, value = node.args
    known = value if not isinstance(value, fx.Node) else constant(value)
    where = constant(mask) if isinstance(mask, fx.Node) else None
    if where is None or known is None or bool(known != 0) or where.dim() < 2:
        return False
    size = node.meta["val"].shape[-1]
    upper = torch.ones(size, size, dtype=torch.bool).triu()
    return where.shape[-2:] == upper.shape and bool(where[..., upper].all())
