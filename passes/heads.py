"""Which projections of attention an axis cannot split by heads, because it does not divide how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from autopar.ir.nodes import shape_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.passes.codes import readers_of

_PRODUCTS = ("autopar.linear", "autopar.matmul", "autopar.attention", "aten.mm", "aten.bmm", "aten.addmm")


def may_stay_whole(program: Program, key: tuple[str, str, int], size: int) -> bool:
    """Whether a weight is a projection into or out of heads of which `size` ranks could not have equally many.

    key: ("slot", region, slot number); size: of the axis, or of all axes together that split weights. Keys and values
    of 4 heads on 8 ranks may stay whole while their 8 query heads are split: each rank computes all four (KV heads are
    replicated). 12 heads on 8 ranks cannot be split at all, so all four projections may stay whole.
    """
    return any(heads % size for heads in head_counts(program.region(key[1]), key[2]))


def head_counts(region: Region, slot: int) -> set[int]:
    """How many heads the product of a weight is seen as where attention reads it, or had where attention made it."""
    found: set[int] = set()
    for product in readers_of(region, slot):
        if product.name in region.forward_nodes and _is_product(product):
            found |= {shape_of(operand)[1] for operand in _operands_of_attention(product, region)}
            found |= {shape_of(value)[1] for value in _sources(product.args[0]) if _makes_heads(value)}
    return found


def _operands_of_attention(product: fx.Node, region: Region) -> Iterator[fx.Node]:
    """The values made of a product without another product in between that attention reads as heads."""
    for value in _walk(product, lambda node: [] if _is_product(node) and node is not product else list(node.users)):
        for user in value.users:
            if user.name in region.forward_nodes and _reads_heads(user) and len(shape_of(value)) == 4:
                yield value


def _sources(value: object) -> Iterator[fx.Node]:
    """What a value is made of, as far as the next product."""
    if isinstance(value, fx.Node):
        yield from _walk(value, lambda node: [] if _is_product(node) else node.all_input_nodes)


def _walk(start: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    seen, stack = {start}, [start]
    while stack:
        node = stack.pop()
        if node.op == "call_function":
            yield node
            fresh = [other for other in neighbours(node) if other not in seen]
            seen.update(fresh)
            stack += fresh


def _is_product(node: fx.Node) -> bool:
    return str(node.target).startswith((*_PRODUCTS, "autopar.repeat_heads"))


def _reads_heads(node: fx.Node) -> bool:
    return str(node.target).startswith(("autopar.attention", "autopar.matmul", "autopar.repeat_heads"))


def _makes_heads(node: fx.Node) -> bool:
    """Whether a node is the result of attention: its own, or the product of probabilities and values."""
    if len(shape_of(node)) != 4:
        return False
    producer = node.args[0] if "getitem" in str(node.target) else node
    return isinstance(producer, fx.Node) and str(producer.target).startswith(("autopar.attention", "autopar.matmul"))
