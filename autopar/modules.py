"""A region's forward at the level of modules: which boxes there are, and what flows between them. For pictures.

Operators are grouped by the module that called them. A module whose operators surround another's (a block's two
residual additions) becomes several boxes, so that the boxes have no cycle. Collectives are boxes of their own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.cost import collective_bytes
from autopar.ir import Region, TensorType, format_target
from autopar.mesh import Mesh
from autopar.rings import is_ring
from autopar.sharding import Sharding, local_shape

MAX_BOXES = 24
"""More than this in one region, and modules are merged into those that hold them."""

_HIDDEN = ("positions", "starts", "index")
_QUIET = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "permute",
        "expand",
        "unsqueeze",
        "squeeze",
        "clone",
        "contiguous",
        "slice",
        "getitem",
        "alias",
        "detach",
        "_to_copy",
        "select",
        "t",
        "split",
    ]
)
_HEAVY = ("attention", "linear", "mm", "conv", "embedding", "softmax", "norm", "sum_exp", "take_label")


@dataclass(slots=True)
class Box:
    """A module's operators, or one collective. num_bytes: what a rank sends a call."""

    key: str
    path: str
    nodes: list[fx.Node] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    collective: str = ""
    axis: str = ""
    num_bytes: float = 0.0

    @property
    def operators(self) -> str:
        """The operators' names, the heavy ones first, moves of memory left out where there is anything else."""
        names = list(dict.fromkeys(_short(node) for node in self.nodes))
        loud = [name for name in names if name not in _QUIET] or names
        loud.sort(key=lambda name: not any(part in name for part in _HEAVY))
        return ", ".join(loud[:3]) + (f", … {len(loud) - 3} more" if len(loud) > 3 else "")


@dataclass(frozen=True, slots=True)
class Flow:
    """A value on its way between two boxes, as (type, sharding); `more`: how many others take the same way."""

    source: str
    target: str
    type: TensorType
    sharding: Sharding
    more: int = 0

    @property
    def is_float(self) -> bool:
        return self.type.is_float

    def label(self, axes: Sequence[str]) -> str:
        text = self.type.text(self.sharding, axes)
        return f"{text}, {self.more} more" if self.more else text


@dataclass(frozen=True, slots=True)
class RegionBoxes:
    """entries: input number -> the flows it starts (source ""). exits: by output number, the box that makes it ("" for
    none).
    """

    boxes: tuple[Box, ...]
    flows: tuple[Flow, ...]
    entries: Mapping[int, tuple[Flow, ...]]
    exits: tuple[str, ...]

    @property
    def last(self) -> str:
        """A box that nothing in the region reads."""
        read = {flow.source for flow in self.flows}
        return next((box.key for box in reversed(self.boxes) if box.key not in read), "")


def boxes_of(region: Region, mesh: Mesh) -> RegionBoxes:
    """The boxes of a lowered region's forward."""
    depth = 99
    found = _Grouping(region, mesh, depth)
    while len(found.boxes) > MAX_BOXES and depth > 1:
        longest = max(len(box.path.split(".")) for box in found.boxes.values())
        depth = min(depth, longest) - 1
        found = _Grouping(region, mesh, depth)
    return found.result()


class _Grouping:
    """Puts each node of a lowered forward into a box, in the graph's order."""

    def __init__(self, region: Region, mesh: Mesh, depth: int) -> None:
        self.region, self.mesh, self.depth = region, mesh, depth
        self.lowered = region.lowered["forward"]
        self.boxes: dict[str, Box] = {}
        self.box_of: dict[fx.Node, str] = {}
        self.inputs: dict[fx.Node, int] = {}
        self.parents: dict[str, set[str]] = {}
        self.parameter_of: dict[fx.Node, str] = {}
        self.ways: dict[tuple[str, str], list[fx.Node]] = {}
        needed = self._needed()
        for node in self.lowered.graph.nodes:
            if node.op == "placeholder":
                if node.name in self.lowered.inputs:
                    self.inputs[node] = self.lowered.inputs.index(node.name)
            elif node in needed and node.op != "output":
                self._add(node)

    def _needed(self) -> set[fx.Node]:
        """Nodes that the region's results come from."""
        output = next(node for node in self.lowered.graph.nodes if node.op == "output")
        stack = [node for node in output.args[0][: self.lowered.num_results] if isinstance(node, fx.Node)]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += node.all_input_nodes
        return seen

    def _add(self, node: fx.Node) -> None:
        sources = [each for each in node.all_input_nodes if each in self.box_of or each in self.inputs]
        if node.op == "call_method" and node.target in _HIDDEN:
            return
        holder = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(holder, fx.Node) and holder.op == "placeholder":
            self.parameter_of[node] = str(node.args[1])
            return
        if node.op == "call_method" and node.target == "slice":
            self._pass_on(node)
            return
        if node.target is operator.getitem and holder in self.box_of:
            self.box_of[node] = self.box_of[holder]  # type: ignore[index]
            return
        used = [self.parameter_of[each] for each in node.all_input_nodes if each in self.parameter_of]
        if not sources and not used and not node.meta.get("origin"):
            return
        key = self._box_for(node, sources)
        box = self.boxes[key]
        box.nodes.append(node)
        self.box_of[node] = key
        known = {slot.name for slot in self.region.slots if slot.is_parameter}
        box.parameters += [name for name in used if name in known and name not in box.parameters]
        for source in sources:
            way = self.ways.setdefault((self._where(source), key), [])
            if self._where(source) != key and source not in way:
                way.append(source)
                if source in self.box_of:
                    self.parents[key].add(self.box_of[source])

    def _pass_on(self, node: fx.Node) -> None:
        """A slice is no box: it stands for what it cuts."""
        source = node.args[1]
        assert isinstance(source, fx.Node)
        if source in self.box_of:
            self.box_of[node] = self.box_of[source]
        elif source in self.inputs:
            self.inputs[node] = self.inputs[source]
        elif source in self.parameter_of:
            self.parameter_of[node] = self.parameter_of[source]

    def _where(self, node: fx.Node) -> str:
        return self.box_of.get(node, f"<{self.inputs[node]}" if node in self.inputs else "")

    def _box_for(self, node: fx.Node, sources: Sequence[fx.Node]) -> str:
        path = self._path(node)
        if node.op == "call_method":
            return self._new(path, node).key
        before = {self.box_of[source] for source in sources if source in self.box_of}
        for key in reversed([key for key, box in self.boxes.items() if box.path == path and not box.collective]):
            if not any(key in self._ancestors(other) for other in before if other != key):
                return key
        return self._new(path, None).key

    def _path(self, node: fx.Node) -> str:
        path = re.sub(r"\s*\([^()]*\)$", "", str(node.meta.get("origin") or ""))
        return ".".join(path.split(".")[: max(self.depth, len(self.region.module.split(".")))])

    def _new(self, path: str, collective: fx.Node | None) -> Box:
        box = Box(f"{len(self.boxes)}", path)
        if collective is not None and is_ring(collective):
            box.collective, box.axis = "ring", str(collective.args[1])
            visits: Any = collective.kwargs.get("visits") or range(self.mesh.size(box.axis))
            box.num_bytes = (len(visits) - 1) * sum(self._local_bytes(block) for block in collective.args[3:5])
        elif collective is not None:
            source = collective.args[1]
            assert isinstance(source, fx.Node)
            box.collective, box.axis = str(collective.target), str(collective.args[2])
            size = self._local_bytes(source)
            ranks = self.mesh.size(box.axis)
            handled = size * ranks if box.collective == "all_gather" else size
            box.num_bytes = collective_bytes(box.collective, handled, ranks)  # type: ignore[arg-type]
        self.boxes[box.key] = box
        self.parents[box.key] = set()
        return box

    def _local_bytes(self, value: Any) -> int:
        """What one rank holds of a lowered value."""
        type_ = value.meta["type"]
        return TensorType(local_shape(type_.shape, value.meta["sharding"], self.mesh.sizes), type_.dtype).num_bytes

    def _ancestors(self, key: str) -> set[str]:
        seen: set[str] = set()
        stack = [key]
        while stack:
            for parent in self.parents[stack.pop()]:
                if parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
        return seen

    def result(self) -> RegionBoxes:
        output = next(node for node in self.lowered.graph.nodes if node.op == "output")
        results: Sequence[fx.Node] = output.args[0][: self.lowered.num_results]
        flows: list[Flow] = []
        entries: dict[int, list[Flow]] = {}
        for (source, target), nodes in self.ways.items():
            typed = [node for node in nodes if "type" in node.meta]
            if not typed or not source:
                continue
            first = max(typed, key=lambda node: (node.meta["type"].is_float, node.meta["type"].num_bytes))
            flow = Flow(source, target, first.meta["type"], first.meta["sharding"], len(typed) - 1)
            if source.startswith("<"):
                entries.setdefault(int(source[1:]), []).append(flow)
            else:
                flows.append(flow)
        exits = tuple(self.box_of.get(node, "") for node in results)
        return RegionBoxes(
            tuple(self.boxes.values()), tuple(flows), {key: tuple(each) for key, each in entries.items()}, exits
        )


def _short(node: fx.Node) -> str:
    """`aten.add.Tensor` to `add`."""
    parts = format_target(node).split(".")
    return parts[1] if len(parts) > 1 else parts[0]
