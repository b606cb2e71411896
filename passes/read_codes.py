"""read_codes: attention of a few queries reads keys and values that are stored as codes as they are.

Requires: phase `differentiated`.
Ensures: the same phase and numbers. On `cuda`, where a kernel reads codes (`Hardware.fused_kernels`), attention of at
    most `FEW_QUERIES` queries whose keys and values both are codes times scales (`base/codes.py`) takes these instead,
    so that no numbers are written out for it; what only it reads of them is gone. Prompts have many queries, for which
    numbers are read again and again, and stay as they are.

    k = to(codes) · scales                   →
    out, lse = attention(q, k, v, …)         →  attention(q, codes, v_codes, …, storage="int8", key_scales=scales, …)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.base.codes import STORAGES
from autopar.cost.local_work import FEW_QUERIES
from autopar.ir.nodes import argument, copy_graph, dtype_of, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.hardware import Hardware

_aten, _own = torch.ops.aten, torch.ops.autopar


def read_codes(program: Program, *, hardware: Hardware) -> Program:
    """The program itself where the hardware has no such kernel, or nothing is stored as codes."""
    if hardware.device != "cuda" or "stored_attention" not in hardware.fused_kernels or program.training:
        return program
    return program.with_regions({region.name: _rewrite(region) for region in program.regions})


def _rewrite(region: Region) -> Region:
    graph, _ = copy_graph(region.graph)
    found = [(node, codes) for node in graph.nodes if (codes := _codes_of(node)) is not None]
    if not found:
        return region
    for node, (keys, values) in found:
        node.args = (node.args[0], keys.codes, values.codes, *node.args[3:])
        said = {"storage": keys.storage, "key_scales": keys.scales, "value_scales": values.scales}
        node.kwargs = {**node.kwargs, **said}
    graph.eliminate_dead_code()
    graph.lint()
    left = frozenset(node.name for node in graph.nodes if node.name in region.forward_nodes)
    return replace(region, graph=graph, forward_nodes=left)


@dataclass(frozen=True, slots=True)
class _Codes:
    storage: str
    codes: fx.Node
    scales: fx.Node


def _codes_of(node: fx.Node) -> tuple[_Codes, _Codes] | None:
    """The codes of keys and of values that attention of a few queries reads, where nobody else reads their numbers."""
    if node.target not in (_own.attention.default, _own.attention_pieces.default) or len(node.args) < 3:
        return None
    q, k, v = node.args[:3]
    if shape_of(q)[2] > FEW_QUERIES or node.kwargs.get("dropout_p") or node.kwargs.get("storage"):
        return None
    if any(not isinstance(each, fx.Node) or set(each.users) != {node} for each in (k, v)):
        return None
    keys, values = _read(k), _read(v)
    if keys is None or values is None or keys.storage != values.storage:
        return None
    return keys, values


def _read(numbers: Any) -> _Codes | None:
    """Of what codes and scales these are the numbers, as `Storage.decode` makes them; None where of none."""
    if numbers.target is not _aten.mul.Tensor:
        return None
    cast, scales = numbers.args
    if not isinstance(scales, fx.Node) or not _casts(cast, dtype_of(scales)):
        return None
    shape, read = shape_of(numbers), cast.args[0]
    if shape_of(scales) != (*shape[:-1], 1) or shape_of(read) != shape:
        return None
    for storage in sorted(STORAGES, key=lambda name: name == "int8"):  # steps of others may be int8, too
        codes = _stored(storage, read)
        if codes is not None and dtype_of(codes) == STORAGES[storage].dtype:
            return _Codes(storage, codes, scales)
    return None


def _stored(storage: str, read: fx.Node) -> fx.Node | None:
    """The codes of which `read` are the steps, in the type that `Storage._read` gives them."""
    if storage == "int8":
        return read
    if storage == "fp8":
        return _source(read, _aten.view.dtype, torch.float8_e4m3fn)
    signed = _source(read, _aten.sub.Tensor, 8)
    if signed is None or not _casts(signed, torch.int8):
        return None
    both = signed.args[0]
    if not isinstance(both, fx.Node) or both.target is not _aten.cat.default:
        return None
    halves = both.args[0]
    if argument(both, 1, "dim", 0) not in (-1, 3) or not isinstance(halves, (list, tuple)) or len(halves) != 2:
        return None
    low = _source(halves[0], _aten.bitwise_and.Scalar, 15)
    high = _source(halves[1], _aten.__rshift__.Scalar, 4)
    return low if low is not None and low is high else None


def _source(node: Any, target: Any, value: Any) -> fx.Node | None:
    """What this operator, with this second argument, reads; None for other nodes."""
    if not isinstance(node, fx.Node) or node.target is not target or node.args[1:] != (value,) or node.kwargs:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _casts(node: Any, dtype: torch.dtype) -> bool:
    """Whether a node makes numbers of this type of others, and nothing else."""
    is_cast = isinstance(node, fx.Node) and node.target is _aten._to_copy.default
    return is_cast and dict(node.kwargs) == {"dtype": dtype} and isinstance(node.args[0], fx.Node)
