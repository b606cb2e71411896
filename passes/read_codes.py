"""read_codes: attention of a few queries, and experts, read what is stored as codes as it is.

Requires: phase `differentiated`.
Ensures: the same phase and numbers. On `cuda`, where a kernel reads codes (`Hardware.fused_kernels`), attention of at
    most `FEW_QUERIES` queries whose keys and values both are codes times scales (`base/codes.py`) takes these instead,
    so that no numbers are written out for it; what only it reads of them is gone. Prompts have many queries, for which
    numbers are read again and again, and stay as they are. Everywhere layers of experts take their parameters' codes,
    scales and zeros, so that of a few tokens only the experts that they chose are decoded, and one at a time.

    k = to(codes) · scales                   →
    out, lse = attention(q, k, v, …)         →  attention(q, codes, v_codes, …, storage="int8", key_scales=scales, …)
    experts(x, …, to(codes) · scales, …)     →  experts(x, …, codes, …, storage="int8", first_scales=scales, …)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.base.codes import STORAGES, STORAGES_OF_WEIGHTS, decoded
from autopar.base.torch_compat import tracing
from autopar.cost.local_work import FEW_QUERIES
from autopar.ir.nodes import argument, copy_graph, drop_dead, dtype_of, shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.machine.hardware import Hardware
from autopar.operators.coded_experts import Cut
from autopar.passes.alike import is_alike

_aten, _own = torch.ops.aten, torch.ops.autopar


def read_codes(program: Program, *, hardware: Hardware) -> Program:
    """The program itself where nothing is stored as codes, or the hardware has no kernel and the model no experts."""
    if program.training:
        return program
    has_kernel = hardware.device == "cuda" and "stored_attention" in hardware.fused_kernels
    return program.with_regions({region.name: _rewrite(region, has_kernel) for region in program.regions})


def _rewrite(region: Region, has_kernel: bool) -> Region:
    graph, _ = copy_graph(region.graph)
    attention = [(node, codes) for node in graph.nodes if has_kernel and (codes := _codes_of(node)) is not None]
    experts = [(node, stacks) for node in graph.nodes if (stacks := _stacks_of(node)) is not None]
    if not attention and not experts:
        return region
    for node, (keys, values) in attention:
        node.args = (node.args[0], keys.codes, values.codes, *node.args[3:])
        said = {"storage": keys.storage, "key_scales": keys.scales, "value_scales": values.scales}
        node.kwargs = {**node.kwargs, **said}
    for node, (first, second) in experts:
        node.args = (*node.args[:3], first.codes, second.codes, *node.args[5:])
        parts = {"first_scales": first.scales, "second_scales": second.scales}
        if first.zeros is not None and second.zeros is not None:
            parts |= {"first_zeros": first.zeros, "second_zeros": second.zeros}
        said = {name: value for name, value in node.kwargs.items() if name != "transposed"}
        node.kwargs = {**said, "storage": first.storage, **parts}
    drop_dead(graph)
    graph.lint()
    left = frozenset(node.name for node in graph.nodes if node.name in region.forward_nodes)
    return replace(region, graph=graph, forward_nodes=left)


@dataclass(frozen=True, slots=True)
class _Codes:
    storage: str
    codes: fx.Node
    scales: fx.Node
    zeros: fx.Node | None = None


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


# ------------------------------------------------------------------------------------------------------------- experts


def _stacks_of(node: fx.Node) -> tuple[_Codes, _Codes] | None:
    """The codes of both parameters of a layer of experts, where both are stored alike, [out, in], and no block of them
    has gate and up.
    """
    if node.target is not _own.experts.default or node.kwargs.get("storage"):
        return None
    is_turned = bool(node.kwargs.get("transposed"))
    held = [_held(each, is_turned) for each in node.args[3:5]]
    if held[0] is None or held[1] is None:
        return None
    size = shape_of(node.args[0])[1]
    first, second = _decoded(held[0]), _decoded(held[1])
    if first is None or second is None or first.storage != second.storage:
        return None
    if (first.zeros is None) != (second.zeros is None):
        return None
    shapes, gated = (shape_of(first.codes), shape_of(second.codes)), bool(node.kwargs.get("gated", True))
    if any(shape[0] != shape_of(each)[0] for shape, each in zip(shapes, node.args[3:5], strict=True)):
        return None
    return (first, second) if Cut.of(first.storage, *shapes, size, gated) is not None else None


def _held(node: Any, is_turned: bool) -> fx.Node | None:
    """What is [experts, out, in] of a parameter of experts, which has its last two dims swapped or not."""
    if is_turned:
        is_swap = node.target is _aten.transpose.int and {dim % 3 for dim in node.args[1:]} == {1, 2}
        if not is_swap and not (node.target is _aten.permute.default and list(node.args[1]) == [0, 2, 1]):
            return None
        node = node.args[0]
    while isinstance(node, fx.Node) and node.target in _SAME:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _decoded(numbers: fx.Node) -> _Codes | None:
    """Of what codes, scales and zeros these are the numbers, as `decoded` makes them; None where of none."""
    if numbers.target is not _aten.mul.Tensor or not isinstance(numbers.args[1], fx.Node):
        return None
    scales = numbers.args[1]
    sources = _sources(numbers)
    for storage, kind in STORAGES_OF_WEIGHTS.items():
        for codes in (each for each in sources if dtype_of(each) in (kind.dtype, torch.uint8)):
            for zeros in (None, *(each for each in sources if each not in (codes, scales))):
                if zeros is not None and (dtype_of(zeros) != torch.uint8 or dtype_of(codes) != torch.uint8):
                    continue
                given = [codes, scales] if zeros is None else [codes, scales, zeros]
                if not _is_cut_so(numbers, kind.per_byte, *given):
                    continue
                pattern = _decoding(storage, *map(_like, given))
                own = [node for node in pattern.nodes if node.op == "placeholder"]
                output = next(node for node in pattern.nodes if node.op == "output")
                found: dict[fx.Node, fx.Node] = dict(zip(own, given, strict=True))
                if is_alike(output.args[0], numbers, found):
                    return _Codes(storage, codes, scales, zeros)
    return None


def _is_cut_so(numbers: fx.Node, per_byte: int, codes: fx.Node, *others: fx.Node) -> bool:
    """Whether codes have these numbers' shape, and scales and zeros as many dims, each expert its own."""
    held, shape = shape_of(codes), shape_of(numbers)
    are_own = all(len(shape_of(each)) == len(shape) and shape_of(each)[0] == shape[0] for each in others)
    return (*held[:-1], held[-1] * per_byte) == shape and are_own and len({shape_of(each) for each in others}) == 1


def _sources(numbers: fx.Node) -> list[fx.Node]:
    """The placeholders that it is made of."""
    seen, waiting = {numbers}, [numbers]
    while waiting:
        more = [each for each in waiting.pop().all_input_nodes if each not in seen]
        seen.update(more)
        waiting += more
    return [node for node in numbers.graph.nodes if node in seen and node.op == "placeholder"]


def _like(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(shape_of(node)), dtype_of(node)


@lru_cache(maxsize=64)
def _decoding(storage: str, *parts: tuple[tuple[int, ...], torch.dtype]) -> fx.Graph:
    """What decodes parts of these shapes and types, as a program has it."""
    given = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in parts]
    return tracing.make_fx(lambda *given: decoded(storage, *given), {}, given).graph


_SAME = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.alias.default, _aten.clone.default
)  # fmt: skip
"""What lays a matrix together of its groups and blocks."""
