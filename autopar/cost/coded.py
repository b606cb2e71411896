"""Products of weights that are stored as codes, as serving engines run them: one kernel that reads codes and scales.

    weight = to(codes) · scales          three kernels, the weight written and read in between
    y = linear(x, weight)           →    one, which reads codes and scales, and computes in their format where it is a
                                         float of eight bits that the device multiplies; other codes it decodes, for
                                         each tile of rows anew

autopar's own programs write the weight out first: this is for `Hardware.engine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.cost.fusion import hands_on
from autopar.cost.local_work import decoded_bytes
from autopar.cost.roofline import Work
from autopar.ir.graphs import placeholders
from autopar.ir.nodes import type_of
from autopar.ir.op_call import TensorSpec
from autopar.ir.region import Region
from autopar.ir.sharding import Sharding, num_pieces
from autopar.ir.tensor_type import TensorType
from autopar.machine.mesh import Mesh
from autopar.operators.expert_tiles import ROW_TILES

_MAKES = ("elementwise", "gather")
"""Classes of operators that a weight is made by of its parts; what cuts, joins and moves is a view or among these."""
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class CodedOperand:
    """An operand of a product that is made of codes. made: the operators that make it, and nothing else reads.
    operand: its number. num_bytes: of its parts, local. dtype: of the codes, where they are floats.
    """

    made: tuple[fx.Node, ...]
    operand: int
    num_bytes: float
    dtype: torch.dtype | None


def coded_seconds(
    region: Region, mesh: Mesh, work: Callable[[str], Work], time_of: Callable[[Work], float]
) -> dict[str, float]:
    """Seconds of the products of coded weights, and of what is a part of them: nothing.

    work: of an operator by itself, by its name.
    """
    found: dict[str, float] = {}
    for node in region.graph.nodes:
        if node.name not in region.strategies or region.ops[node.name][1].op_class != "matmul":
            continue
        if region.ops[node.name][0].arg("storage"):  # experts, which are handed codes
            written = decoded_bytes(*region.ops[node.name], region.strategies[node.name], mesh.sizes)
            own = work(node.name)
            codes = torch.float8_e4m3fn if region.ops[node.name][0].arg("storage") == "fp8" else None
            dtype = codes if _multiplies(codes, mesh) else own.dtype
            decoded = 0.0 if _multiplies(codes, mesh) else own.decoded
            read = replace(own, dtype=dtype, moved_bytes=own.moved_bytes - written, decoded=decoded)
            found[node.name] = time_of(read)
            continue
        for coded in _coded_operands(region, node, mesh.sizes):
            call, own = region.ops[node.name][0], work(node.name)
            layout = region.strategies[node.name].operands[coded.operand]
            whole = _bytes(call.operands[coded.operand], layout, mesh.sizes)
            dtype = coded.dtype if _multiplies(coded.dtype, mesh) else own.dtype
            decoded = 0.0 if _multiplies(coded.dtype, mesh) else _decoded(own)
            read = replace(own, dtype=dtype, moved_bytes=own.moved_bytes - whole + coded.num_bytes, decoded=decoded)
            found |= {each.name: 0.0 for each in coded.made if each.name in region.strategies}
            found[node.name] = time_of(read)
    return found


def _multiplies(dtype: torch.dtype | None, mesh: Mesh) -> bool:
    """Whether the device multiplies codes as they are: floats of eight bits."""
    return dtype in _FLOATS and mesh.hardware.format_of(dtype) in mesh.hardware.peak_flops


def _decoded(product: Work) -> float:
    """Numbers that a kernel makes of codes: all of the weight, for each tile of rows."""
    if product.dims is None:
        return 0.0
    rows, columns, summed, batch = product.dims
    return math.ceil(rows / ROW_TILES[-1]) * columns * summed * batch


def _coded_operands(region: Region, product: fx.Node, sizes: tuple[int, ...]) -> Iterator[CodedOperand]:
    """At most one: a product has one weight."""
    operands: list[fx.Node] = []
    fx.map_arg((product.args, product.kwargs), operands.append)
    for number, operand in enumerate(operands[: len(region.ops[product.name][0].operands)]):
        made = _made_of_parts(region, operand, product)
        if made is None or not _lies_as_read(region, made, product, number, sizes):
            continue
        floats = [type_.dtype for each in made if (type_ := type_of(each)) is not None and type_.dtype in _FLOATS]
        yield CodedOperand(made, number, _part_bytes(region, made, sizes), floats[0] if floats else None)
        return


def _made_of_parts(region: Region, operand: fx.Node, product: fx.Node) -> tuple[fx.Node, ...] | None:
    """What makes an operand of parameters, codes among them, for this product alone; None where that is not so."""
    slots = set(placeholders(region.graph, len(region.slots)))
    made: dict[fx.Node, None] = {}
    codes, stack = False, [operand]
    while stack:
        node = stack.pop()
        if node in slots:
            type_ = type_of(node)
            codes |= type_ is not None and len(type_.shape) > 1 and not type_.dtype.is_floating_point
        elif node.op != "call_function" or not (hands_on(region, node) or _makes(region, node)):
            return None
        elif node not in made:
            made[node] = None
            stack += node.all_input_nodes
    alone = all(user in made or user is product for node in made for user in node.users)
    return tuple(made) if codes and made and alone else None


def _makes(region: Region, node: fx.Node) -> bool:
    return node.name in region.strategies and region.ops[node.name][1].op_class in _MAKES


def _lies_as_read(
    region: Region, made: tuple[fx.Node, ...], product: fx.Node, number: int, sizes: tuple[int, ...]
) -> bool:
    """Whether every rank makes what it multiplies, and nothing of it is moved in between."""
    wanted = region.strategies[product.name].operands[number]
    makers = [node for node in made if node.name in region.strategies and not hands_on(region, node)]
    if not makers or wanted is None:
        return False
    layout = region.strategies[makers[0].name].results[0]  # what was met first made the operand
    return layout is not None and num_pieces(layout, sizes) == num_pieces(wanted, sizes)


def _part_bytes(region: Region, made: tuple[fx.Node, ...], sizes: tuple[int, ...]) -> float:
    """Of the parameters that are read, each once, as they lie where they are read."""
    read: dict[fx.Node, float] = {}
    for node in made:
        if node.name not in region.strategies or hands_on(region, node):
            continue
        operands: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), operands.append)
        given = zip(operands, region.ops[node.name][0].operands, region.strategies[node.name].operands, strict=False)
        for source, spec, layout in given:
            while source.op == "call_function" and hands_on(region, source):
                source = source.all_input_nodes[0]
            if source.op == "placeholder" and layout is not None:
                read[source] = max(read.get(source, 0.0), _bytes(spec, layout, sizes))
    return sum(read.values())


def _bytes(spec: TensorSpec, layout: Sharding | None, sizes: tuple[int, ...]) -> float:
    assert layout is not None
    return TensorType(spec.shape, spec.dtype).num_bytes / num_pieces(layout, sizes)
