"""What forward writes in place becomes a value of its own, where nothing else lies in the same memory.

    n += 1; y = batch_norm(x, …, mean, variance)  →  n1 = n + 1; y, mean1, variance1 = batch_norm_functional(x, …)
    a[2, :3] = x                                  →  a1 = select_scatter(a, slice_scatter(a[2], x, 0, 0, 3), 0, 2)
    y = x.view(…)[1:]; y *= m                     →  y1 = y * m, where nobody reads x any more

Operators stay those that the model called, and a long graph is not traced a second time. So it is with what is made and
written under `torch.no_grad()` (a rotary table). What else is written there or through other views, or read through a
view afterwards, is left to torch, which knows all memory.
"""

from __future__ import annotations

import operator
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from autopar.base.torch_compat import tracing as compat
from autopar.ir.nodes import map_nodes
from autopar.passes import mutation
from autopar.passes.exported import graph_modules

_aten = torch.ops.aten
_STATISTICS = (3, 4)
"""Which operands `aten.batch_norm` writes, and which results of its functional form take their place."""
_SCATTERS: Mapping[object, compat.OpOverload] = {
    _aten.select.int: _aten.select_scatter.default,
    _aten.slice.Tensor: _aten.slice_scatter.default,
}
"""The views through which may be written: what gives the whole with the view's place taken by something else."""
_WHOLE = _aten.alias.default
"""A slice of all there is."""
_THROUGH = frozenset((*_SCATTERS, _WHOLE))
_TAKEN_ANEW = frozenset(
    (*_THROUGH, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.transpose.int, _aten.permute.default)
)
"""The views that are taken of what was written once more, where they are read after a write: any strides will do."""
_FUNCTIONAL_NORM = _aten._native_batch_norm_legit_functional.default
_BATCH_NORM_OPERANDS = 8
"""Those of the functional form; the last one of `aten.batch_norm` chooses a library."""


def make_functional(exported: torch.export.ExportedProgram) -> bool:
    """Give every written value a node of its own, in place; new values of buffers become outputs, as torch says them.

    False, and nothing has changed, where a write is not as plain as that.
    """
    root = exported.graph_module
    bodies = [_Written.of(each.graph) for each in graph_modules(root) if each is not root]
    if None in bodies:
        return False
    specs = exported.graph_signature.input_specs
    buffers = {spec.arg.name: str(spec.target) for spec in specs if spec.kind.name == "BUFFER"}
    writes = [node for node in root.graph.nodes if mutation.writes(node)]
    # Of nothing torch leaves statistics as they are, which the functional form does not.
    if any(_is_batch_norm(node) and node.args[0].meta["val"].numel() == 0 for node in writes):
        return False
    order = {node: place for place, node in enumerate(root.graph.nodes)}
    apart = _apart(writes, order, buffers)
    if apart is None:
        return False
    for body in filter(None, bodies):
        body.make_functional()
    changed: dict[str, fx.Node] = {}
    latest: dict[fx.Node, str] = {}
    known: dict[Any, list[Tensor]] = {}
    for node in writes:
        for before, value in _replace(node, order, known, node in apart):
            held = latest.get(before, before.name)
            if held in buffers:
                latest.pop(changed.get(held, before), None)
                changed[held], latest[value] = value, held
    output = next(node for node in root.graph.nodes if node.op == "output")
    for write in reversed(writes):
        root.graph.erase_node(write)
    output.args = ((*changed.values(), *output.args[0]),)
    exported.graph_signature.output_specs[:0] = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(value.name), buffers[name])
        for name, value in changed.items()
    ]
    return True


def by_one_name(exported: torch.export.ExportedProgram) -> None:
    """Have a buffer that several modules share (a norm of two towers) be handed in by its first name alone: torch takes
    what is written under two names for two.
    """
    graph, specs = exported.graph_module.graph, exported.graph_signature.input_specs
    holders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    firsts: dict[Any, fx.Node] = {}
    for spec in [each for each in specs if each.kind.name == "BUFFER"]:
        node = holders[spec.arg.name]
        value = node.meta["val"]
        place = compat.storage_id(value), value.storage_offset(), value.dtype, value.shape, value.stride()
        first = firsts.setdefault(place, node)
        if place[0] is not None and first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            specs.remove(spec)


def written_apart(graph: fx.Graph) -> bool:
    """Give every value that an operator of a recorded graph writes a node of its own, in place (gradient formulas of
    torch write what they have just made). Nothing that is handed in may be written.

    False, and nothing has changed, where a write is not as plain as that.
    """
    written = _Written.of(graph)
    if written is None:
        return False
    written.make_functional()
    return True


@dataclass(frozen=True, slots=True)
class _Written:
    """A graph all of whose writes are plain, and none into what is handed in: a recorded one, or one that another
    calls (what runs under `no_grad`). apart: the writes that need not write.
    """

    graph: fx.Graph
    writes: Sequence[fx.Node]
    order: dict[fx.Node, int]
    apart: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph) -> _Written | None:
        """None where a write is not as plain as that."""
        writes = [node for node in graph.nodes if mutation.writes(node)]
        order = {node: place for place, node in enumerate(graph.nodes)}
        apart = None if any(map(_is_batch_norm, writes)) else _apart(writes, order, ())
        return None if apart is None else _Written(graph, writes, order, apart)

    def make_functional(self) -> None:
        """Give every value that is written a node of its own, in place."""
        for node in self.writes:
            _replace(node, self.order, {}, node in self.apart)
        for write in reversed(self.writes):
            self.graph.erase_node(write)


def _apart(writes: list[fx.Node], order: Mapping[fx.Node, int], buffers: Collection[str]) -> frozenset[fx.Node] | None:
    """The writes that need not write, where that makes all others plain; none where they are so without. None where
    they are not.
    """
    if _are_plain(writes, order, buffers):
        return frozenset()
    found = _last_seen(writes, order)
    return found if _are_plain(writes, order, buffers, found) else None


def _last_seen(writes: list[fx.Node], order: Mapping[fx.Node, int]) -> frozenset[fx.Node]:
    """The writes into values that operators made, or into views of such, after which nobody reads this memory but
    through what they wrote into and what they gave: what they give may be a value of its own.
    """
    found = set[fx.Node]()
    for node in writes:
        into = _written(node)[0]
        made = _maker(into, found)
        if into is None or made is None or _is_batch_norm(node):
            continue
        own = _views([node, into], order, order[node]) | {node, into}
        # Of what a write before this one gave, views of what that wrote into are views, too.
        others = _views([made, *_first(made, found)], order, order[made]) | {made}
        read = any(order[user] > order[node] for each in others - own for user in each.users)
        if not read and all(each.target is not _aten.as_strided.default for each in own - {into}):
            found.add(node)
    return frozenset(found)


def _views(nodes: Sequence[fx.Node], order: Mapping[fx.Node, int], after: int) -> set[fx.Node]:
    """What lies where these do, of what is made after this place in the order."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if order[user] > after and user not in found and _may_alias(user):
                found.add(user)
                waiting.append(user)
    return found


def _first(node: fx.Node, apart: Collection[fx.Node]) -> list[fx.Node]:
    """What a write that is apart wrote into."""
    return node.all_input_nodes[:1] if node in apart else []


def _maker(node: fx.Node | None, apart: Collection[fx.Node]) -> fx.Node | None:
    """The node that made the memory in which a value lies; None where that was handed in, or nobody can say. apart:
    writes that make memory of their own.
    """
    while node is not None and node.op == "call_function" and node not in apart:
        if not _may_alias(node):
            return node
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if node.target is operator.getitem:
            if not _may_alias(source):
                return node
        elif not isinstance(node.target, compat.OpOverload) or not mutation.is_view(node):
            return None
        node = source
    return node if node is not None and node.op == "call_function" else None


def _are_plain(
    writes: list[fx.Node],
    order: Mapping[fx.Node, int],
    buffers: Collection[str],
    apart: Collection[fx.Node] = (),
) -> bool:
    """Whether each write is into a buffer or a value that an operator made, and views of that which are read after it
    can be taken anew. apart: writes that need not write; what they give is a value of its own.
    """
    places: dict[fx.Node, list[int]] = {}
    for node in writes:
        for operand in _written(node) if node not in apart else ():
            held = _holder(_behind(operand), apart)
            if held is None or (held.op == "placeholder" and held.name not in buffers):
                return False
            places.setdefault(held, []).append(order[node])
    written = set(writes)
    through: dict[fx.Node | None, list[fx.Node]] = {}
    for node in writes:
        if not _is_batch_norm(node) and node not in apart:
            through.setdefault(_holder(node, apart), []).append(node)
    lying: Counter[int] = Counter(
        place for node in order if node.op == "placeholder" for place in _storages(node.meta.get("val"))
    )
    for held, when in places.items():
        same = [held, *through.get(held, ())]
        readers = {user for node in same for user in node.users}
        readers |= {user for node in _first(held, apart) for user in node.users if order[user] > order[held]}
        for reader in readers - written:
            # What lies between: `when` is sorted.
            late = _may_alias(reader) and bisect(when, order[reader]) < bisect_left(when, _last_read(reader, order))
            if late and not _taken_anew(reader, order, written):
                return False
        if held.op == "placeholder" and any(lying[place] > 1 for place in _storages(held.meta["val"])):
            return False  # another one lies there, too
    return True


def _written(node: fx.Node) -> list[fx.Node | None]:
    """The operands that a node writes; None stands for what no functional form is known of."""
    operands: list[fx.Node | None] = []
    if _is_batch_norm(node):
        for place in _STATISTICS:
            value = node.args[place]
            operands.append(value if isinstance(value, fx.Node) else None)
        return operands
    first = node.args[0] if node.args else None
    return [first if isinstance(first, fx.Node) and _functional(node) is not None else None]


def _holder(node: fx.Node | None, apart: Collection[fx.Node] = ()) -> fx.Node | None:
    """The node whose memory this one is, by writes alone; None where that is a view, or nobody can say. apart: writes
    that make memory of their own.
    """
    while node is not None and node.op == "call_function" and node not in apart:
        if mutation.writes(node) and not _is_batch_norm(node):
            node = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            continue
        made = node.args[0] if node.target is operator.getitem else node
        return None if not isinstance(made, fx.Node) or _may_alias(made) else node
    return node if node is not None and (node.op == "placeholder" or node in apart) else None


def _behind(node: fx.Node | None) -> fx.Node | None:
    """What a chain of selections and slices is of."""
    while node is not None and node.op == "call_function" and node.target in _THROUGH:
        source = node.args[0]
        node = source if isinstance(source, fx.Node) else None
    return node


def _is_batch_norm(node: fx.Node) -> bool:
    return node.target is _aten.batch_norm.default


def _normalized(operands: Sequence[Any], known: dict[Any, list[Tensor]]) -> list[Tensor]:
    """What the functional batch norm gives on stand-ins, which takes torch ten operators to say."""
    key = tuple([(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in operands])
    if key not in known:
        known[key] = list(_FUNCTIONAL_NORM(*operands))
    return [compat.another(each) for each in known[key]]


def _functional(node: fx.Node) -> compat.OpOverload | None:
    """The operator that gives what this one writes into its first operand, and into no other."""
    if not isinstance(node.target, compat.OpOverload) or node.target.namespace != "aten":
        return None
    schema = node.target._schema
    name, _, mark = schema.name.removeprefix("aten::").rpartition("_")
    into = [place for place, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write]
    packet = getattr(_aten, name, None) if into == [0] and not mark else None
    if packet is None:
        return None

    def signature(target: compat.OpOverload) -> list[tuple[str, str, str]]:  # the first one has many names
        named = enumerate(target._schema.arguments)
        return [(each.name if n else "", str(each.type), str(each.default_value)) for n, each in named]

    own = node.target._overloadname  # of pow_.Scalar that is another operator, and pow.Tensor_Scalar the one
    overloads = sorted(packet.overloads(), key=lambda overload: overload != own)
    candidates: list[compat.OpOverload] = [getattr(packet, overload) for overload in overloads]
    found = next((each for each in candidates if signature(each) == signature(node.target)), None)
    if found is None or any(each.alias_info is not None for each in found._schema.returns):
        return None
    return found if torch.Tag.generated not in found.tags else None


def _may_alias(node: fx.Node) -> bool:
    """Whether a result lies where an operand does, or may: views, what returned its operand as it was (dropout that
    drops nothing), and what wraps a graph of its own.
    """
    if node.op != "call_function" or node.target is _aten.lift_fresh_copy.default:
        return False  # a copy of numbers: its stand-in lies where they do
    if not isinstance(node.target, compat.OpOverload) or mutation.is_view(node):
        return True
    made = [each for each in compat.tree_flatten(node.meta.get("val"))[0] if isinstance(each, Tensor)]
    return any(_shared(each, operand) for each in made for operand in node.all_input_nodes)


def _last_read(node: fx.Node, order: Mapping[fx.Node, int]) -> int:
    """When a view is read for the last time, through others too."""
    found, waiting = order[node], [node]
    while waiting:
        for user in waiting.pop().users:
            found = max(found, order[user])
            waiting += [user] if _may_alias(user) else []
    return found


def _taken_anew(view: fx.Node, order: Mapping[fx.Node, int], written: Collection[fx.Node]) -> bool:
    """Whether a view and all views of it can be made of another tensor of the same shape. written: the writes; what
    one gives is the whole then, so nobody may read that.
    """
    views = (view, *_views([view], order, order[view]))
    return all(each.target in _TAKEN_ANEW or (each in written and not each.users) for each in views)


def _shared(value: Tensor, node: fx.Node) -> bool:
    others = compat.tree_flatten(node.meta.get("val"))[0]
    return any(isinstance(other, Tensor) and compat.shares_storage(value, other) for other in others)


def _storages(value: Any) -> set[int]:
    """Where the tensors of a value lie."""
    found = {compat.storage_id(each) for each in compat.tree_flatten(value)[0] if isinstance(each, Tensor)}
    return {each for each in found if each is not None}


def _replace(
    node: fx.Node, order: dict[fx.Node, int], known: dict[Any, list[Tensor]], apart: bool
) -> list[tuple[fx.Node, fx.Node]]:
    """Put the functional form before a node, and its results in place of what the node wrote and gave.

    known: the results of batch norms, by their operands' types. apart: what was written is a value of its own, no part
    of another. Returns what was there, and what is there now.
    """
    target = _functional(node)
    operands: Any = node.args
    new: list[tuple[fx.Node, fx.Node]] = []

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = node.graph.call_function(target, args, kwargs)
        known_args, known_kwargs = map_nodes((args, kwargs), lambda each: each.meta["val"])
        gives = _normalized(known_args, known) if target is _FUNCTIONAL_NORM else target(*known_args, **known_kwargs)
        made.meta = {**node.meta, "val": gives}
        order[made] = order[node]
        return made

    def instead(before: fx.Node, value: fx.Node) -> None:
        new.append((before, value))
        waiting = [(before, value)]
        while waiting:
            before, value = waiting.pop()
            before.replace_all_uses_with(value, delete_user_cb=lambda user: order[user] > order[node])
            for view in () if apart else [user for user in before.users if user.target in _TAKEN_ANEW]:
                if _last_read(view, order) > order[node]:
                    assert callable(view.target)
                    anew = call(view.target, value, *view.args[1:], **view.kwargs)
                    anew.meta = {**view.meta, "val": anew.meta["val"]}
                    waiting.append((view, anew))

    with node.graph.inserting_before(node), torch.no_grad():
        if target is None:
            made = call(_FUNCTIONAL_NORM, *operands[:_BATCH_NORM_OPERANDS])
            node.replace_all_uses_with(call(operator.getitem, made, 0))
            for place in _STATISTICS:
                instead(operands[place], call(operator.getitem, made, place))
            return new
        written = operands[0]
        if node.target is _aten.copy_.default and written.target in _THROUGH:
            made = operands[1]
        else:
            made = call(target, *operands, **node.kwargs)
        if made.meta["val"].dtype != (dtype := written.meta["val"].dtype):
            made = call(_aten.to.dtype, made, dtype)
        if made.meta["val"].shape != (shape := written.meta["val"].shape):
            made = call(_aten.expand.default, made, list(shape))
        while not apart and written.target in _THROUGH:
            whole, *where = written.args
            if written.target is not _WHOLE:
                made = call(_SCATTERS[written.target], whole, made, *where, **written.kwargs)
            written = whole
        node.replace_all_uses_with(made)
        instead(written, made)
    return new
