"""fuse_elementwise: an RMSNorm, a rotary embedding or a GELU that is spelled out becomes one operator.

Requires: phase `outlined`.
Ensures: the same phase and numbers (in half types a gradient is rounded once where it was rounded several times). On
    `cuda` only where the hardware has such kernels and they are predicted to take less time; elsewhere the operator is
    a few calls of torch, which hold less memory than what is spelled out. Nowhere is a sharding lost that the strategy
    needs: a fused norm needs its rows whole, so it is left alone under `tensor2d`, whose axes may split the hidden dim,
    and where a pin splits its weight.

    v = mean(pow(float(x), 2)); y = w * bf16(float(x) * rsqrt(v + eps))  →  y, _ = rms_norm(x, w, eps, round_first=True)
    y = x * cos + cat([-x[..., D/2:], x[..., :D/2]]) * sin  →  y = rotary(x, cos, sin)
    y = 0.5 * x * (1 + tanh(0.7979 * (x + 0.044715 * x ** 3)))       →  y = gelu(x, approximate="tanh")
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.cost.roofline import Work, compute_time_s
from autopar.ir.graphs import is_view
from autopar.ir.nodes import NAME, copy_graph, drop_dead, result_types
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import Shard
from autopar.ir.tensor_type import TensorType
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from autopar.operators.basic import wide_dtype
from autopar.passes.fused_patterns import Match, gelus, rms_norms, rotaries
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin, Pins

aten = torch.ops.aten
logger = logging.getLogger("autopar.fuse_elementwise")

_ATEN_STEPS = 4
"""What ATen makes of its own call of an RMSNorm writes so many tensors like x: two casts, a square, two products."""


def fuse_elementwise(
    program: Program, *, mesh: Mesh, strategies: Sequence[AxisStrategy] = (), pins: Sequence[Pin] = ()
) -> Program:
    """Fuse where that is predicted to gain; the program itself where nothing is fused."""
    if any(strategy.grid for strategy in strategies):
        return program
    regions: dict[str, Region] = {}
    for region in program.regions:
        found = (*rms_norms(region.graph), *rotaries(region.graph), *gelus(region.graph))
        matches = [m for m in found if _serves(m, mesh.hardware) and not _is_pinned(program, region, m, pins)]
        if matches:
            regions[region.name] = _rewrite(region, matches)
            logger.info("%s: %d sequences of operators are fused", region.name, len(matches))
    return program.with_regions(regions) if regions else program


def _serves(match: Match, hardware: Hardware) -> bool:
    """Whether the operator is worth its place. ATen's own is; autopar's, on `cuda`, with a kernel and a gain."""
    if match.target is aten.gelu.default:
        return True
    if hardware.device != "cuda":
        return not hardware.compiled  # a compiler makes more of what is spelled out
    return str(match.target).split(".")[1] in hardware.fused_kernels and gain_s(match, hardware) > 0


def gain_s(match: Match, hardware: Hardware) -> float:
    """Seconds that the fused forward is faster by, on one device: kernels and memory traffic that are saved."""
    if match.result.target is aten.rms_norm.default:
        written = [match.result] * _ATEN_STEPS
    else:
        written = [node for node in match.nodes if not is_view(node)]
    unfused_s = sum(_elementwise_s(node.all_input_nodes, [node], hardware) for node in written)
    read = [node for arg in match.args for node in (arg if isinstance(arg, tuple) else (arg,))]
    return unfused_s - _elementwise_s([n for n in read if isinstance(n, fx.Node)], [match.result], hardware)


def _elementwise_s(reads: Iterable[fx.Node], writes: Iterable[fx.Node], hardware: Hardware) -> float:
    """Seconds of one kernel that reads and writes these once."""
    results = [type_ for node in writes for type_ in result_types(node) if type_ is not None]
    types = [type_ for node in reads for type_ in result_types(node) if type_ is not None] + results
    flops = float(sum(type_.num_elements for type_ in types))
    return compute_time_s(Work("elementwise", results[0].dtype, flops, sum(t.num_bytes for t in types)), hardware)


def _is_pinned(program: Program, region: Region, match: Match, pins: Sequence[Pin]) -> bool:
    """Whether the user wants the weight of a norm split."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"][: len(region.slots)]
    if match.weight not in holders:
        return False
    names = [call.slots[holders.index(match.weight)] for _, call in program.calls_of(region.name)]
    splitting = [pin for pin in pins if any(isinstance(placement, Shard) for _, placement in pin.placements)]
    return bool(Pins(splitting).of(*names))


def _rewrite(region: Region, matches: Sequence[Match]) -> Region:
    graph, copies = copy_graph(region.graph)
    origins = dict(region.origins)
    for match in matches:
        result = copies[match.result]
        made: list[fx.Node] = []
        with graph.inserting_before(result):
            args = tuple(_argument(graph, arg, copies, made) for arg in match.args)
            node = graph.call_function(match.target, args, dict(match.kwargs))
            value = _meta(match.result)
            made.append(node)
            if match.several:
                rstd = torch.empty(value.shape[:-1], dtype=wide_dtype(value.dtype), device="meta")
                node.meta["val"] = (value, rstd)
                node = graph.call_function(operator.getitem, (node, 0))
                made.append(node)
            node.meta["val"] = value
        origins |= {each.name: region.origins.get(match.result.name, "") for each in made}
        node.meta |= {key: match.result.meta[key] for key in (NAME,) if key in match.result.meta}
        result.replace_all_uses_with(node)
        # A later match may read what this one made.
        copies[match.result] = node
    drop_dead(graph)
    graph.lint()
    return replace(region, graph=graph, origins=origins)


def _argument(graph: fx.Graph, arg: object, copies: dict[fx.Node, fx.Node], made: list[fx.Node]) -> Any:
    """The copy of an argument; of a table with a dim for the heads (in a tuple), without it."""
    if isinstance(arg, tuple):
        table = copies[arg[0]]
        squeezed = graph.call_function(aten.squeeze.dim, (table, 1))
        squeezed.meta["val"] = torch.empty_like(table.meta["val"].squeeze(1), device="meta")
        made.append(squeezed)
        return squeezed
    return copies[arg] if isinstance(arg, fx.Node) else arg


def _meta(node: fx.Node) -> torch.Tensor:
    type_ = TensorType.of(node.meta["val"])
    return torch.empty(type_.shape, dtype=type_.dtype, device="meta")
