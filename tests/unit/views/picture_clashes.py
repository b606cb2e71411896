"""What of a picture's svg lies on what: words on words, words on boxes and frames, edges through words.

Words are measured in DejaVu Sans, the widest font that stands in for Helvetica where pictures are looked at.

    .venv/bin/python -m tests.unit.views.picture_clashes a.svg b.svg
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.ft2font import FT2Font

SLACK = 1.0
"""Points that two may share."""
SVG = "{http://www.w3.org/2000/svg}"
ASCENT, DESCENT = 0.72, 0.18
"""Of letters with and without tails, in units of the font's size."""
STEPS = 24
"""Places on a piece of a curve that are looked at."""


@dataclass(frozen=True, slots=True)
class Area:
    """In points, y down."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area) -> bool:
        """Whether they share more than SLACK in both directions."""
        return (
            min(self.right, other.right) - max(self.left, other.left) > SLACK
            and min(self.bottom, other.bottom) - max(self.top, other.top) > SLACK
        )

    def touches(self, other: Area) -> bool:
        """Whether they share any place."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def has(self, x: float, y: float) -> bool:
        """Whether a place lies inside, SLACK from the border."""
        return self.left + SLACK < x < self.right - SLACK and self.top + SLACK < y < self.bottom - SLACK


@dataclass(slots=True)
class Thing:
    """A node, an edge or a frame (`cluster`). words: of each line of text."""

    kind: str
    id: str
    title: str
    words: list[tuple[str, Area]] = field(default_factory=list)
    border: Area | None = None
    places: list[tuple[float, float]] = field(default_factory=list)


def clashes_of(svg: str) -> list[tuple[str, str, str]]:
    """(kind, what, with what): `words on words`, `words on box`, `words over border` (of a frame), `words out of box`,
    `edge through words`, `edge through box`, `back left` (a region's backward not right of its forward).
    """
    things = list(_things(svg))
    said = [(thing, line, area) for thing in things for line, area in thing.words]
    boxes = [thing for thing in things if thing.kind == "node" and thing.border is not None]
    found: list[tuple[str, str, str]] = []
    for (one, line, area), (other, words, space) in itertools.combinations(said, 2):
        if one is not other and area.meets(space):
            found.append(("words on words", f"{one.id}: {line}", f"{other.id}: {words}"))
    for thing, line, area in said:
        for box in boxes:
            if box.border is not None and box is not thing and thing.kind != "node" and area.meets(box.border):
                found.append(("words on box", f"{thing.id}: {line}", box.id))
        if thing.kind != "edge" and thing.border is not None:
            if area.left < thing.border.left - SLACK or area.right > thing.border.right + SLACK:
                found.append(("words out of box", f"{thing.id}: {line}", f"{area} {thing.border}"))
        for frame in things:
            if frame.kind == "cluster" and frame is not thing and frame.border is not None:
                for side in _sides(frame.border):
                    if area.meets(side):
                        found.append(("words over border", f"{thing.id}: {line}", frame.id))
    for edge in things:
        if edge.kind != "edge" or not edge.places:
            continue
        around = Area(*map(min, zip(*edge.places, strict=True)), *map(max, zip(*edge.places, strict=True)))
        for thing, line, area in said:
            if thing.kind != "node" and around.touches(area) and any(area.has(*place) for place in edge.places):
                found.append(("edge through words", edge.id, f"{thing.id}: {line}"))
        ends = set(edge.title.split("->"))
        for box in boxes:
            if box.title in ends or box.border is None or not around.touches(box.border):
                continue
            if any(box.border.has(*place) for place in edge.places):
                found.append(("edge through box", edge.id, box.id))
    return found + _turned(things)


def _turned(things: list[Thing]) -> list[tuple[str, str, str]]:
    """Where a region's backward begins left of where its forward ends."""
    frames = {thing.id: thing.border for thing in things if thing.kind == "cluster" and thing.border is not None}
    found = []
    for id, border in frames.items():
        kind, _, name = id.partition(":")
        back = frames.get(f"backward:{name}") if kind == "region" else None
        if back is not None and back.left < border.right:
            found.append(("back left", id, f"backward:{name}"))
    return found


def _sides(area: Area) -> list[Area]:
    wide = 1.2
    return [
        Area(area.left - wide, area.top, area.left + wide, area.bottom),
        Area(area.right - wide, area.top, area.right + wide, area.bottom),
        Area(area.left, area.top - wide, area.right, area.top + wide),
        Area(area.left, area.bottom - wide, area.right, area.bottom + wide),
    ]


def _things(svg: str) -> Iterator[Thing]:
    root = ElementTree.fromstring(svg)
    for group in root.iter(f"{SVG}g"):
        kind = group.get("class", "")
        if kind not in ("node", "edge", "cluster"):
            continue
        title = group.findtext(f"{SVG}title") or ""
        thing = Thing(kind, group.get("id", ""), title.replace("\xa0", " "))
        for part in group.iter():
            if part.tag == f"{SVG}text" and (part.text or "").strip():
                thing.words.append(((part.text or "").strip(), _words(part)))
            elif part.tag == f"{SVG}path" and kind == "edge":
                thing.places += _curve(part.get("d", ""))
            elif part.tag in (f"{SVG}polygon", f"{SVG}path", f"{SVG}polyline") and kind != "edge":
                numbers = [float(each) for each in re.findall(r"-?[\d.]+", part.get("points", "") + part.get("d", ""))]
                if not numbers:
                    continue
                xs, ys = numbers[::2], numbers[1::2]
                old = thing.border or Area(min(xs), min(ys), max(xs), max(ys))
                thing.border = Area(min(*xs, old.left), min(*ys, old.top), max(*xs, old.right), max(*ys, old.bottom))
        yield thing


def _words(text: Any) -> Area:
    size, x, y = (float(text.get(name)) for name in ("font-size", "x", "y"))
    width = _width((text.text or "").replace("\xa0", " ").strip()) * size
    left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor"), 0.0)
    return Area(left, y - ASCENT * size, left + width, y + DESCENT * size)


@cache
def _width(text: str) -> float:
    """In units of the font's size."""
    font = FT2Font(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")))
    font.set_size(100, 72)
    font.set_text(text)
    return font.get_width_height()[0] / 64 / 100


def _curve(path: str) -> list[tuple[float, float]]:
    numbers = [float(each) for each in re.findall(r"-?[\d.]+", path)]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    found = []
    for at in range(0, len(points) - 3, 3):
        a, b, c, d = points[at : at + 4]
        for step in range(STEPS + 1):
            t = step / STEPS
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            found.append(
                (
                    sum(w * p[0] for w, p in zip(weights, (a, b, c, d), strict=True)),
                    sum(w * p[1] for w, p in zip(weights, (a, b, c, d), strict=True)),
                )
            )
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        every = clashes_of(Path(name).read_text("utf-8"))
        print(name, dict(Counter(kind for kind, _, _ in every)))
        for each in every:
            print("   ", *each, sep=" | ")
