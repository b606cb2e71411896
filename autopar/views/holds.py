"""Which rank holds which part of a tensor: ranges of indices, and boxes for a terminal.

plan.holds("model.layers.0.mlp.up_proj.weight")        boxes: who holds what
plan.holds("model.layers.0.mlp.up_proj.weight").ranges(5)
plan.holds(rank=5)                                      everything that one rank holds
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from autopar.base.errors import AutoparError
from autopar.base.text import format_bytes, new_table, plain_text
from autopar.ir.interface import TensorInterface
from autopar.ir.interface_text import format_tensor
from autopar.ir.names import starred
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.planner.plan.record import PlanRecord
from autopar.views.text import parameter_groups

Range = tuple[int, int]
Pieces = tuple[Range, ...]
"""Index ranges of one dim, [start, stop), in the order in which a rank has them."""

MOST_CELLS = 8
"""Pieces of a dim that are drawn; of more the first ones and the last."""


@dataclass(frozen=True, slots=True)
class Split:
    """What one axis does to a tensor: `dim` is None where every rank of the axis holds the same."""

    axis: str
    size: int
    dim: int | None = None
    outer: int = 1
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor over the mesh. text: `f32[4096/tp, 4096/dp]`. splits: one for each axis of a stage, in mesh order.

    stages: coordinates of the pipeline's axis whose ranks hold it, None where there is no pipeline. count: of tensors
    that lie alike. what: parameter, buffer, input, output.
    """

    name: str
    what: str
    text: str
    shape: tuple[int, ...]
    itemsize: int
    splits: tuple[Split, ...]
    mesh: Mesh
    pipeline_axis: str | None = None
    stages: tuple[int, ...] | None = None
    count: int = 1

    def ranges(self, rank: int) -> tuple[Pieces, ...] | None:
        """For each dim the indices that a rank of the mesh holds; None where its stage does not have the tensor.

        Raises:
            AutoparError: a rank that the mesh lacks.
        """
        coordinates = self.mesh.coordinates(rank)
        if self.stages is not None and coordinates[self.pipeline_axis or ""] not in self.stages:
            return None
        return tuple(self.pieces(dim, coordinates) for dim in range(len(self.shape)))

    def pieces(self, dim: int, coordinates: dict[str, int]) -> Pieces:
        """The indices of one dim at these coordinates. Splits apply in mesh order, each to what the earlier left."""
        left: Pieces = ((0, self.shape[dim]),)
        for split in self.splits:
            if split.dim == dim:
                left = _cut(left, split, coordinates[split.axis])
        return left

    def num_bytes(self, rank: int) -> int:
        """Bytes that a rank holds."""
        held = self.ranges(rank)
        return 0 if held is None else math.prod(map(_length, held)) * self.itemsize

    def __str__(self) -> str:
        return plain_text(self.tables())

    def tables(self) -> RenderableType:
        """For a rich console: the tensor, then its boxes."""
        head = f"{self.what} {self.name}" + (f", {self.count} alike" if self.count > 1 else "")
        lines = [head, f"{self.text}, {format_bytes(math.prod(self.shape) * self.itemsize)} in all"]
        if self.stages is not None:
            places = ", ".join(map(str, self.stages))
            lines.append(f"on the ranks with {self.pipeline_axis} = {places}; the others hold nothing of it")
        lines += [self._in_words(split) for split in self.splits if split.size > 1]
        return Group(*map(Text, lines), Text(""), Text("\n".join(self.boxes())))

    def _in_words(self, split: Split) -> str:
        if split.dim is None:
            return f"{split.axis}: all {split.size} hold the same"
        stripes = "" if split.outer == 1 else f", in {split.outer} stripes{' dealt zigzag' if split.zigzag else ''}"
        return f"{split.axis}: cuts dim {split.dim} into {split.size} pieces{stripes}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the tensor, what each axis does, and of meshes up to 1,024 ranks what each holds."""
        ranks = range(self.mesh.num_devices) if self.mesh.num_devices <= 1024 else ()
        return {
            "name": self.name, "what": self.what, "lies": self.text, "shape": list(self.shape), "count": self.count,
            "splits": [asdict(split) for split in self.splits], "stages": self.stages,
            "ranks": {rank: self.ranges(rank) for rank in ranks},
        }  # fmt: skip

    def boxes(self) -> list[str]:
        """Lines of a drawing: the first two dims that are cut, and in each box the ranks that hold it."""
        cut = [dim for dim in range(len(self.shape)) if any(s.dim == dim and s.size > 1 for s in self.splits)]
        rows = self._along(cut[0]) if cut else [("", {})]
        columns = self._along(cut[1]) if len(cut) > 1 else [("", {})]
        header = ["", *(text for text, _ in columns)]
        body = [
            [text, *("…" if None in (row, column) else self._ranks({**row, **column}) for _, column in columns)]
            for text, row in rows
        ]
        return _drawn(header if len(cut) > 1 else None, body)

    def _along(self, dim: int) -> list[tuple[str, Any]]:
        """The pieces of a dim by their first index: (`0–511`, coordinates); (`…`, None) for some left out."""
        axes = [split for split in self.splits if split.dim == dim]
        found = []
        for place in itertools.product(*(range(split.size) for split in axes)):
            coordinates = {split.axis: at for split, at in zip(axes, place, strict=True)}
            found.append((self.pieces(dim, coordinates), coordinates))
        found.sort(key=lambda each: each[0][:1])
        texts: list[tuple[str, Any]] = [(_text_of(pieces), coordinates) for pieces, coordinates in found]
        if len(texts) > MOST_CELLS:
            texts = [*texts[: MOST_CELLS - 2], ("…", None), texts[-1]]
        return texts

    def _ranks(self, coordinates: dict[str, int]) -> str:
        """The ranks at these coordinates, whatever the others are."""
        found = []
        for rank in range(self.mesh.num_devices) if self.mesh.num_devices <= 64 else ():
            place = self.mesh.coordinates(rank)
            on_stage = self.stages is None or place[self.pipeline_axis or ""] in self.stages
            if on_stage and all(place[axis] == at for axis, at in coordinates.items()):
                found.append(rank)
        if found:
            return ranks_text(found)
        return ", ".join(f"{axis}={at}" for axis, at in coordinates.items()) or "all ranks"


def holding_of(plan: PlanRecord, name: str) -> Holding:
    """The tensor of a plan with this name: a parameter (also an alias, or a pattern of parameters that lie alike), a
    buffer, an input, an output.

    Raises:
        AutoparError: a name that nothing has, or a pattern of tensors that lie differently.
    """
    for first, members in parameter_classes(plan):
        names = {each for member in members for each in (member.name, *member.aliases)}
        if name == first or name in names:
            shown = first if name == first else name
            return _holding(plan, "parameter", shown, members[0], len(members) if name == first else 1)
    interface = plan.interface
    for what, tensors in (("buffer", interface.buffers), ("input", interface.inputs), ("output", interface.outputs)):
        for tensor in tensors:
            if tensor.name == name:
                return _holding(plan, what, name, tensor, 1)
    modules = [region.module for region in plan.regions if "*" in region.module]
    if "*" in name and (alike := [first for first, _ in parameter_classes(plan) if starred(first, modules) == name]):
        raise AutoparError(
            f"{name} names parameters that lie in {len(alike)} ways", values=", ".join(alike), remedy="name one of them"
        )
    some = ", ".join(first for first, _ in parameter_classes(plan)[:4])
    raise AutoparError(
        f"nothing in the plan is called {name!r}", values=f"parameters: {some} …", remedy="print(plan) lists them"
    )


@dataclass(frozen=True, slots=True)
class RankContents:
    """What one rank of a plan's mesh holds between steps. rows: each class of parameters, with how many tensors of it
    are on the rank.
    """

    rank: int
    mesh: Mesh
    rows: tuple[tuple[Holding, int], ...]

    @property
    def num_bytes(self) -> int:
        """Of all parameters."""
        return sum(holding.num_bytes(self.rank) * count for holding, count in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [
            {
                "name": holding.name, "count": count, "lies": holding.text, "ranges": holding.ranges(self.rank),
                "bytes": holding.num_bytes(self.rank) * count,
            }
            for holding, count in self.rows
        ]  # fmt: skip
        return {
            "rank": self.rank,
            "coordinates": self.mesh.coordinates(self.rank),
            "bytes": self.num_bytes,
            "rows": rows,
        }

    def __str__(self) -> str:
        return plain_text(self.tables())

    def tables(self) -> RenderableType:
        """For a rich console."""
        place = ", ".join(f"{axis}={at}" for axis, at in self.mesh.coordinates(self.rank).items())
        table = new_table(f"Rank {self.rank} ({place})", "parameter", ">×", "as stored", "its indices", ">bytes")
        for holding, count in self.rows:
            ranges = holding.ranges(self.rank)
            assert ranges is not None
            own = "[" + ", ".join(_text_of(pieces) for pieces in ranges) + "]"
            size = format_bytes(holding.num_bytes(self.rank) * count)
            table.add_row(holding.name, str(count), holding.text, own, size)
        table.add_section()
        table.add_row("all", str(sum(count for _, count in self.rows)), "", "", format_bytes(self.num_bytes))
        return Group(table)


def contents_of(plan: PlanRecord, rank: int) -> RankContents:
    """Everything that one rank holds.

    Raises:
        AutoparError: a rank that the mesh lacks.
    """
    coordinates = plan.mesh.coordinates(rank)
    rows = []
    for first, members in parameter_classes(plan):
        here = [each for each in members if _is_at(stages_of(plan, each.name), plan, coordinates)]
        if here:
            rows.append((_holding(plan, "parameter", first, here[0], len(here)), len(here)))
    return RankContents(rank, plan.mesh, tuple(rows))


Indices = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a contiguous part of a tensor: its first index in each dim, and how many."""


def parts_by_rank(plan: PlanRecord, names: Collection[str]) -> list[dict[str, tuple[Indices, ...]]]:
    """What each rank of the mesh holds of these parameters and buffers between steps, each as contiguous parts."""
    tensors = [each for each in (*plan.interface.parameters, *plan.interface.buffers) if each.name in names]
    holdings = [_holding(plan, "tensor", each.name, each, 1) for each in tensors]
    known: dict[Any, tuple[Indices, ...]] = {}
    found = []
    for rank in range(plan.mesh.num_devices):
        own = {}
        for holding in holdings:
            key = rank, holding.shape, holding.splits, holding.stages
            if key not in known:
                known[key] = _parts(holding.ranges(rank))
            if known[key]:
                own[holding.name] = known[key]
        found.append(own)
    return found


def _parts(ranges: tuple[Pieces, ...] | None) -> tuple[Indices, ...]:
    if ranges is None:
        return ()
    boxes = itertools.product(*ranges)
    parts = [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]
    return tuple(part for part in parts if all(part[1]))


def splits_of(plan: PlanRecord, tensor: TensorInterface) -> tuple[Split, ...]:
    """What each axis of a stage does to a tensor."""
    found = []
    for (axis, size), placement in zip(plan.stage_mesh.axes, tensor.sharding, strict=True):
        if isinstance(placement, Shard):
            found.append(Split(axis, size, placement.dim, placement.outer, placement.zigzag))
        else:
            found.append(Split(axis, size))
    return tuple(found)


def stages_of(plan: PlanRecord, name: str) -> tuple[int, ...] | None:
    """Coordinates of the pipeline's axis whose ranks hold a parameter or buffer; None where there is no pipeline, or
    no stage says so.
    """
    pipeline = plan.interface.pipeline
    if pipeline is None:
        return None
    stages = enumerate(pipeline.stages)
    found = {pipeline.rank_of[number] for number, each in stages if name in (*each.parameters, *each.buffers)}
    return tuple(sorted(found)) or None


def ranks_text(ranks: Sequence[int]) -> str:
    """`0–3, 8`: runs of ranks joined; with a step `0, 2 … 14` where they are evenly spaced."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 3 and step > 1 and all(b - a == step for a, b in itertools.pairwise(ranks)):
        return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def parameter_classes(plan: PlanRecord) -> list[tuple[str, list[TensorInterface]]]:
    """Parameters that lie alike; of several classes with one starred name, each goes by its first member's."""
    groups = parameter_groups(plan)
    names = [name for name, _ in groups]
    return [(name if names.count(name) == 1 else members[0].name, members) for name, members in groups]


def _holding(plan: PlanRecord, what: str, name: str, tensor: TensorInterface, count: int) -> Holding:
    pipeline = plan.interface.pipeline
    return Holding(
        name, what, format_tensor(tensor, plan.interface.axes), tensor.shape, getattr(torch, tensor.dtype).itemsize,
        splits_of(plan, tensor), plan.mesh, None if pipeline is None else pipeline.axis,
        stages_of(plan, tensor.name), count,
    )  # fmt: skip


def _is_at(stages: tuple[int, ...] | None, plan: PlanRecord, coordinates: dict[str, int]) -> bool:
    pipeline = plan.interface.pipeline
    return stages is None or pipeline is None or coordinates[pipeline.axis] in stages


def _cut(left: Pieces, split: Split, at: int) -> Pieces:
    """The piece that one rank of an axis gets of what the axes before have left."""
    length = _length(left)
    stripe = -(-length // split.outer)
    found: list[Range] = []
    for number in range(split.outer):
        place = split.size - 1 - at if split.zigzag and number % 2 else at
        begin, end = number * stripe, min(length, (number + 1) * stripe)
        piece = -(-(end - begin) // split.size)
        found += _between(left, begin + place * piece, min(end, begin + (place + 1) * piece))
    return _joined(found) or ((0, 0),)


def _between(left: Pieces, begin: int, end: int) -> Iterator[Range]:
    """The indices of what is left from place `begin` to place `end`."""
    passed = 0
    for start, stop in left:
        low, high = max(begin, passed), min(end, passed + stop - start)
        if low < high:
            yield start + low - passed, start + high - passed
        passed += stop - start


def _joined(ranges: Sequence[Range]) -> Pieces:
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _length(pieces: Pieces) -> int:
    return sum(stop - start for start, stop in pieces)


def _text_of(pieces: Pieces) -> str:
    """`0–511`, `0–63, 128–191`, of many the first two and how many more."""
    texts = [f"{start}–{stop - 1}" if stop - start > 1 else str(start) for start, stop in pieces if stop > start]
    more = f", … {len(texts) - 2} more" if len(texts) > 3 else ""
    return ", ".join(texts[:2] if more else texts) + more or "nothing"


def _drawn(header: Sequence[str] | None, body: Sequence[Sequence[str]]) -> list[str]:
    """Boxes in lines, with the rows' names at the left."""
    rows = [*([header] if header else []), *body]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    margin = " " * widths[0]

    def line(left: str, middle: str, right: str) -> str:
        return f"{margin} {left}{middle.join('─' * (width + 2) for width in widths[1:])}{right}"

    lines = []
    if header:
        lines.append(margin + "  " + " ".join(f" {text:^{width}} " for text, width in zip(header[1:], widths[1:])))
    lines.append(line("┌", "┬", "┐"))
    for number, row in enumerate(body):
        if number:
            lines.append(line("├", "┼", "┤"))
        cells = "│".join(f" {text:^{width}} " for text, width in zip(row[1:], widths[1:]))
        lines.append(f"{row[0]:>{widths[0]}} │{cells}│")
    return [*lines, line("└", "┴", "┘")]
