"""Documents that lie behind one another in a row: masks that let a query see the keys of its own document alone.

    numbers[:, :, None] == numbers[:, None, :]                         →  documents = numbers [B, S]
    … & (positions[:, None, :] <= positions[:, :, None])               →  … and causal, where numbers are counted up
                                                                          wherever positions do not go on by one

Both sides of the comparison must be the same numbers: one tensor, seen once along queries and once along keys, or made
of such tensors by the same operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import argument, dtype_of, is_float, map_nodes, operand_of, shape_of
from autopar.passes.attention.build import Builder
from autopar.passes.attention.constants import Constant, Constants, Value

aten = torch.ops.aten

_MAX_NODES = 64
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "clone.default", "contiguous.default", "detach.default", "expand.default", "reshape.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "to.device", "to.dtype", "_to_copy.default",
        "unsqueeze.default", "view.default",
    )
)  # fmt: skip
_ORDERS = frozenset(f"aten.{name}.Tensor" for name in ("eq", "ne", "le", "lt", "ge", "gt"))
_SUMS = frozenset(f"aten.{name}" for name in ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar"))


class Documents:
    """Reads the comparisons of one graph."""

    def __init__(self, builder: Builder, constants: Constants) -> None:
        self._build, self._constants = builder, constants
        self._counted: dict[fx.Node, fx.Node] = {}
        self._first: dict[object, fx.Node] = {}
        self._like: dict[fx.Node, fx.Node] = {}

    def numbers(self, node: fx.Node, shape: tuple[int, int, int, int], *, shows: bool) -> fx.Node | None:
        """The documents [B, S], integers, of a bool mask of scores [B, H, S, S] that is true (or, unless it `shows`,
        false) where query and key are of one document; None for other masks.
        """
        batch, _, queries, keys = shape
        own = _four(shape_of(node))
        if queries != keys or own[1] != 1 or own[0] not in (1, batch) or own[2:] != (queries, keys):
            return None
        while str(node.target) in _VIEWS and _shows_the_same(node, own[2:]):
            node = operand_of(node)
        wanted = aten.eq.Tensor if shows else aten.ne.Tensor
        if node.target is not wanted or math.prod(shape_of(node)[:-2]) not in (1, batch):
            return None
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return None
        for query, key in ((left, right), (right, left)):
            if _is_along(query, -2, queries) and _is_along(key, -1, keys):
                found = self._same(query, key)
                return None if found is None else self._rows(found, batch, queries)
        return None

    def starts_anew(self, numbers: fx.Node) -> fx.Node | None:
        """Positions of which `numbers` counts, along the last dim, how often they did not go on by one; so that two of
        one document are as far apart as their places are. None for other numbers.
        """
        root = self._counted.get(numbers, numbers)
        if root.target is not aten.cumsum.default or int(argument(root, 1, "dim")) not in (-1, len(shape_of(root)) - 1):
            return None
        breaks = operand_of(root)
        if breaks.target is not aten.ne.Scalar or breaks.args[1] != 1 or root.kwargs:
            return None
        steps = operand_of(breaks)
        if is_float(steps):
            return None
        if steps.target is not aten.diff.default or argument(steps, 1, "n", 1) != 1:
            return None
        last = int(argument(steps, 2, "dim", -1)) in (-1, len(shape_of(steps)) - 1)
        if not last or shape_of(steps) != shape_of(operand_of(steps)) or argument(steps, 4, "append", None) is not None:
            return None
        return self._origin(operand_of(steps))

    def in_places(self, node: fx.Node, positions: fx.Node) -> Value | None:
        """The value that a mask has within a document of such positions: of the distance from query to key alone, so
        that their places in the row stand for them. None where it depends on more.
        """
        along = {each: dim for each in _above(node) if (dim := self._dim_of(each, positions)) is not None}
        if not along or self._degree(node, along) != 0:
            return None
        known: dict[fx.Node, Value] = {}
        for each, dim in along.items():
            shape = shape_of(each)
            places = torch.arange(shape[dim]).reshape(*(1,) * (len(shape) - 2), *((-1, 1) if dim == -2 else (1, -1)))
            known[each] = Constant(places, shape)
        return self._constants.knowing(known)(node)

    # -- what is the same ----------------------------------------------------------------------------------------------

    def _same(self, query: fx.Node, key: fx.Node) -> fx.Node | None:
        """A node, of integers or bools, whose elements, in order, are those of both; None where that cannot be seen."""
        query, key = self._root(query), self._root(key)
        if query is key:
            return None if is_float(query) else query
        own, other = self._constants(query), self._constants(key)
        if isinstance(own, Constant) and isinstance(other, Constant) and dtype_of(query) == dtype_of(key):
            flat = (own.whole.flatten(), other.whole.flatten())
            return query if not is_float(query) and torch.equal(*flat) else None
        if query.target is not key.target or not _is_pointwise(query) or is_float(query):
            return None
        return self._made_alike(query, key)

    def _made_alike(self, query: fx.Node, key: fx.Node) -> fx.Node | None:
        """The operator on operands that are the same, and lie alike in the result."""
        if _skeleton(query) != _skeleton(key) or _plain(shape_of(query)) != _plain(shape_of(key)):
            return None
        found: dict[fx.Node, fx.Node] = {}
        for own, other in zip(query.all_input_nodes, key.all_input_nodes, strict=True):
            alike = _dims_in(shape_of(own), shape_of(query)) == _dims_in(shape_of(other), shape_of(key))
            same = self._same(own, other) if alike else None
            if same is None:
                return None
            found[own] = self._shaped(same, list(shape_of(own)))
        args, kwargs = map_nodes((query.args, query.kwargs), lambda node: found[node])
        return self._build.make(self._build.after([*found.values()]), query.target, *args, **kwargs)

    def _root(self, node: fx.Node) -> fx.Node:
        """What has the elements of a node in the same order: behind views, and takes of all columns."""
        while (inner := self._inside(node)) is not None:
            node = inner
        return self._first_like(node)

    def _first_like(self, node: fx.Node) -> fx.Node:
        """The first node of the graph that is seen to be made as this one is, of the same: models repeat themselves."""
        if node not in self._like:
            key: object = node
            target = node.target
            if (
                isinstance(target, tracing.OpOverload)
                and not tracing.is_mutable(node)
                and torch.Tag.nondeterministic_seeded not in target.tags
            ):
                operands = map_nodes((node.args, node.kwargs), self._root)
                shapes = tuple(shape_of(each) for each in node.all_input_nodes)
                key = (target, repr(operands), shapes)
            self._like[node] = self._first.setdefault(key, node)
        return self._like[node]

    def _origin(self, node: fx.Node) -> fx.Node:
        """The root, behind the repetition of one row, too."""
        node = self._root(node)
        while node.target is aten.expand.default and shape_of(operand_of(node)) == (1, *shape_of(node)[1:]):
            node = self._root(operand_of(node))
        return node

    def _inside(self, node: fx.Node) -> fx.Node | None:
        """What a node is, but for dims of size 1 and their places among the others."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or math.prod(shape_of(source)) != math.prod(shape_of(node)):
            return None
        plain = _plain(shape_of(node)) == _plain(shape_of(source))
        if str(node.target) in _VIEWS:
            return source if plain and dtype_of(source) == dtype_of(node) else None
        if node.target is aten.slice.Tensor and shape_of(source) == shape_of(node):
            return source
        if node.target is aten.transpose.int:
            dims = [argument(node, i, f"dim{i - 1}") % len(shape_of(node)) for i in (1, 2)]
            between = shape_of(source)[min(dims) : max(dims) + 1]
            return source if len(_plain(between)) < 2 else None
        return source if node.target is aten.index.Tensor and plain and self._takes_all(node, source) else None

    def _takes_all(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether x[:, i], or x[b, i], takes all elements in order."""
        indices = node.args[1]
        if not isinstance(indices, list | tuple) or len(shape_of(source)) != 2 or len(indices) != 2:
            return False
        for dim, index in enumerate(indices):
            found = self._constants(index)
            if index is None and dim == 0:
                continue
            if not isinstance(found, Constant) or found.value.dtype == torch.bool:
                return False
            if not torch.equal(found.value.flatten(), torch.arange(shape_of(source)[dim])):
                return False
        return True

    def _rows(self, node: fx.Node, batch: int, length: int) -> fx.Node:
        """[B, S] of numbers in order, of all rows or of one that all share; counts of bools as int32."""
        count = math.prod(shape_of(node)) // length
        found = self._shaped(node, [count, length])
        counts = node.target is aten.cumsum.default and dtype_of(operand_of(node)) == torch.bool
        if counts or dtype_of(node) == torch.bool:
            found = self._build.make(self._build.after([found]), aten.to.dtype, found, torch.int32)
        if count < batch:
            found = self._build.make(self._build.after([found]), aten.expand.default, found, [batch, length])
        self._counted[found] = node
        return found

    def _shaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(shape_of(node)) == shape:
            return node
        return self._build.make(self._build.after([node]), aten.reshape.default, node, shape)

    # -- what depends on distances alone -------------------------------------------------------------------------------

    def _dim_of(self, node: fx.Node, positions: fx.Node) -> int | None:
        """Along which of the last two dims a node has the positions; None where it is something else."""
        shape = shape_of(node)
        length = shape_of(positions)[-1]
        if len(shape) < 3 or length < 2 or self._origin(node) is not positions:
            return None
        return next((dim for dim in (-2, -1) if _is_along(node, dim, length)), None)

    def _degree(self, node: fx.Node, along: dict[fx.Node, int]) -> int | None:
        """How often a number that is added to all positions is added to the node; None where it changes otherwise."""
        if node in along:
            return 1
        if self._constants(node) is not None:
            return 0
        if node.op != "call_function" or not node.all_input_nodes or tracing.is_mutable(node):
            return None
        operands = [self._degree(each, along) for each in node.all_input_nodes]
        if any(degree is None for degree in operands):
            return None
        degrees = dict(zip(node.all_input_nodes, operands, strict=True))
        first, second = [degrees.get(arg) or 0 if isinstance(arg, fx.Node) else 0 for arg in (*node.args[:2], 0)][:2]
        name, whole = str(node.target), not is_float(node)
        if name in _VIEWS and whole and dtype_of(node) == dtype_of(operand_of(node)):
            return first
        if name in _SUMS and whole and not node.kwargs:
            return first + second if name.startswith("aten.add") else first - second
        if name in _ORDERS and first == second:
            return 0
        return 0 if _is_pointwise(node) and not any(operands) else None


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (4 - len(shape)) + shape


def _plain(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size > 1]


def _dims_in(shape: tuple[int, ...], whole: tuple[int, ...]) -> list[int]:
    """Which of the dims of `whole` that are no 1, counted among these, an operand that broadcasts to it has."""
    own = (1,) * (len(whole) - len(shape)) + shape
    dims = [size for size in zip(own, whole, strict=True) if size[1] > 1]
    return [index for index, (size, _) in enumerate(dims) if size > 1]


def _shows_the_same(node: fx.Node, plane: tuple[int, ...]) -> bool:
    """Whether a view leaves the last two dims as they are, and the dtype."""
    source = operand_of(node)
    return shape_of(source)[-2:] == plane and dtype_of(source) == dtype_of(node)


def _is_along(node: fx.Node, dim: int, length: int) -> bool:
    """Whether, of the last two dims, a node has this one alone, of that length."""
    last = (1, 1, *shape_of(node))[-2:]
    return last[dim] == length and last[-3 - dim] == 1


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, tracing.OpOverload) and (
        torch.Tag.pointwise in node.target.tags
        or str(node.target) in ("aten.__and__.Tensor", "aten.__or__.Tensor", "aten.floor_divide.default")
    )


def _skeleton(node: fx.Node) -> str:
    """The arguments of a node, without the nodes."""
    return repr(map_nodes((node.args, node.kwargs), lambda _: None))


def _above(node: fx.Node) -> Iterator[fx.Node]:
    stack, seen = [node], set[fx.Node]()
    while stack and len(seen) < _MAX_NODES:
        last = stack.pop()
        if last not in seen:
            seen.add(last)
            yield last
            stack += last.all_input_nodes
