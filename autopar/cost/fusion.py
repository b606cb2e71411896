"""Which operators of a region a compiler runs as one kernel, and what that saves.

Inductor fuses pointwise operators and reductions of one iteration space with those that read them, so a value that only
members of a group read is never written. The rule here is the plain one: two elementwise operators or reductions are in
one group where one reads the other's result, both run in the same phase, the value is not moved between ranks, and no
product, attention or gather lies on a way from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx

from autopar.cost.roofline import Work
from autopar.ir.op_call import OpCall
from autopar.ir.region import NodeStrategy, Region
from autopar.ir.rule import Rule
from autopar.ir.sharding import num_pieces
from autopar.ir.tensor_type import TensorType

FUSED = ("elementwise", "reduction")
"""Classes of operators that are fused with one another."""
OPAQUE = ("rms_norm", "rms_norm_backward", "rotary", "rotary_backward")
"""autopar's own kernels, which a compiler takes as they are."""


def groups(region: Region) -> list[tuple[str, ...]]:
    """The names of the operators that run as one kernel, in the order of the graph; single operators are left out."""
    root: dict[fx.Node, fx.Node] = {}
    level: dict[fx.Node, int] = {}

    def find(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            node = root[node]
        return node

    for node in region.graph.nodes:
        reads = list(_sources(region, node))
        before = [level.get(each, 0) + (not _fuses(region, each)) for each in reads if each.op == "call_function"]
        level[node] = max(before, default=0)
        if not _fuses(region, node):
            continue
        root[node] = node
        for each in reads:
            if each in root and level[each] == level[node] and _stays(region, each, node):
                root[find(node)] = find(each)
    found: dict[fx.Node, list[str]] = {}
    for node in root:
        found.setdefault(find(node), []).append(node.name)
    return [tuple(names) for names in found.values() if len(names) > 1]


def group_work(region: Region, names: Sequence[str], work: Mapping[str, Work], sizes: Sequence[int]) -> Work:
    """A group as one kernel: it reads what it does not make, each value once, and writes what others read.

    work: of its members by themselves. sizes: of the mesh's axes.
    """
    members = {node for node in region.graph.nodes if node.name in set(names)}
    read: dict[fx.Node, float] = {}
    written = 0.0
    for node in members:
        call, _ = region.ops[node.name]
        strategy = region.strategies[node.name]
        for source, spec, layout in zip(_operands(node), call.operands, strategy.operands, strict=False):
            origin = _through_views(region, source)
            if origin not in members and spec is not None and layout is not None:
                read[origin] = max(read.get(origin, 0.0), _bytes(spec, layout, sizes))
        if _is_read_outside(region, node, members):
            results = zip(call.results, strategy.results, strict=True)
            written += sum(_bytes(spec, layout, sizes) for spec, layout in results if spec is not None and layout)
    first = work[names[0]]
    kind = "reduction" if any(work[name].op_class == "reduction" for name in names) else "elementwise"
    return Work(kind, first.dtype, sum(work[name].flops for name in names), written + sum(read.values()))


def fused_seconds(
    region: Region,
    seconds: Mapping[str, float],
    work: Callable[[str], Work],
    time_of: Callable[[Work], float],
    sizes: Sequence[int],
) -> dict[str, float]:
    """Seconds of every operator; those of a group share what it takes as they would take it by themselves.

    seconds: by themselves. A group takes no longer than its members one after the other.
    """
    found = dict(seconds)
    for names in groups(region):
        alone = sum(seconds[name] for name in names)
        together = time_of(group_work(region, names, {name: work(name) for name in names}, sizes))
        if alone > together:
            found |= {name: seconds[name] * together / alone for name in names}
    return found


def _fuses(region: Region, node: fx.Node) -> bool:
    if node.name not in region.strategies:
        return False
    return fuses(*region.ops[node.name])


def fuses(call: OpCall, rule: Rule) -> bool:
    """Whether a compiler makes one kernel of an operator and its neighbours."""
    return rule.op_class in FUSED and not rule.alias and call.name.split(".")[1] not in OPAQUE


def hands_on(region: Region, node: fx.Node) -> bool:
    """Whether a node hands on what another made: a view, or one of several results."""
    if node.op != "call_function":
        return False
    return node.name not in region.ops or region.ops[node.name][1].alias


def _through_views(region: Region, node: fx.Node) -> fx.Node:
    while hands_on(region, node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _operands(node: fx.Node) -> list[fx.Node]:
    """Each occurrence of a node among the arguments, in their order, as of `OpCall.operands`."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _sources(region: Region, node: fx.Node) -> Iterator[fx.Node]:
    """What a node reads, through views."""
    return (_through_views(region, each) for each in node.all_input_nodes)


def _stays(region: Region, maker: fx.Node, reader: fx.Node) -> bool:
    """Whether a value is read as it was made: in the same phase, and in the same pieces."""
    if (maker.name in region.forward_nodes) != (reader.name in region.forward_nodes):
        return False
    made, wanted = region.strategies[maker.name], region.strategies[reader.name]
    return _counts(made) == _counts(wanted)


def _counts(strategy: NodeStrategy) -> list[str]:
    """By axis, whether the operator's work is split."""
    return [choice.kind for choice in strategy.choices]


def _is_read_outside(region: Region, node: fx.Node, members: set[fx.Node]) -> bool:
    for user in node.users:
        if user in members:
            continue
        if not hands_on(region, user) or user.op == "output" or _is_read_outside(region, user, members):
            return True
    return not node.users


def _bytes(spec: object, layout: object, sizes: Sequence[int]) -> float:
    tensor = TensorType(spec.shape, spec.dtype)  # type: ignore[attr-defined]
    return tensor.num_bytes / num_pieces(layout, sizes)  # type: ignore[arg-type]
