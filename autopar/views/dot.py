"""Graphviz text, written by hand: names with any character, the same text for the same picture.

Nodes, edges and clusters each have an `id`, which Graphviz hands on to the svg. Where one stands for several
things, `Dot.members` has their ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FONT = "Helvetica,Arial,sans-serif"
SIZE = 10.0
"""Of text in nodes, in points."""

_WIDE, _NARROW = "mwMW@%&", "iljt.,:;'|![]()/ "


class Dot:
    """A directed graph in the making."""

    def __init__(self, **attributes: str) -> None:
        self.members: dict[str, list[str]] = {}
        self.lines: list[str] = ["digraph plan {"]
        self._depth = 1
        self._ids: set[str] = set()
        self._say(f"graph {_attributes(attributes)}")

    def defaults(self, kind: str, **attributes: str) -> None:
        """What nodes or edges (`kind`) have where nothing else is said."""
        self._say(f"{kind} {_attributes(attributes)}")

    def node(self, id: str, lines: Sequence[str], **attributes: str) -> None:
        """A node; its text is centred, and gets the room that it takes in the widest of the fonts."""
        size = float(attributes.get("fontsize", SIZE))
        width = max((text_width(line) for line in lines), default=0.0) * size / 72 + 0.22
        self._ids.add(id)
        known = {"id": id, "label": "\\n".join(map(_escape, lines)), "width": f"{width:.2f}"}
        self._say(f"{_quote(id)} {_attributes(known | attributes)}")

    def point(self, id: str, **attributes: str) -> None:
        """A small dot where ways part."""
        self._say(
            f"{_quote(id)} {_attributes({'id': id, 'shape': 'point', 'width': '0.07', 'label': ''} | attributes)}"
        )

    def edge(self, source: str, target: str, lines: Sequence[str] = (), up: bool = False, /, **attributes: str) -> None:
        """An edge. up: the layout has the target above the source."""
        id = attributes.pop("id", "") or f"edge:{source}>{target}"
        number = 2
        unique = id
        while unique in self._ids:
            unique, number = f"{id}#{number}", number + 1
        self._ids.add(unique)
        known = {"id": unique} | ({"label": "\\n".join(_padded(line) for line in lines)} if lines else {})
        if up:
            source, target, known["dir"] = target, source, "back"
            pairs = (("lhead", "ltail"), ("ltail", "lhead"))
            attributes = {dict(pairs).get(name, name): value for name, value in attributes.items()}
        self._say(f"{_quote(source)} -> {_quote(target)} {_attributes(known | attributes)}")

    def below(self, above: str, below: str, weight: int = 0) -> None:
        """One node stands lower than another; the more weight, the straighter."""
        self.edge(above, below, id=f"below:{above}>{below}", style="invis", weight=str(weight))

    @contextmanager
    def cluster(self, id: str, title: str, **attributes: str) -> Iterator[None]:
        """A frame around all that is drawn within; `lhead` and `ltail` call it `cluster_ID`."""
        self._say(f"subgraph {_quote(f'cluster_{id}')} {{")
        self._depth += 1
        self._say(f"graph {_attributes({'id': id, 'label': _padded(title)} | attributes)}")
        yield
        self._depth -= 1
        self._say("}")

    def row(self, ids: Sequence[str]) -> None:
        """These nodes stand in one row, from the left to the right."""
        self._say(f"{{ rank=same; {'; '.join(map(_quote, ids))} }}")
        for left, right in itertools.pairwise(ids):
            self.edge(left, right, id=f"row:{left}>{right}", style="invis")

    def column(self, ids: Sequence[str]) -> None:
        """These nodes stand one under another."""
        for above, below in itertools.pairwise(ids):
            self.edge(above, below, id=f"column:{above}>{below}", style="invis")

    @property
    def source(self) -> str:
        return "\n".join([*self.lines, "}"]) + "\n"

    def _say(self, line: str) -> None:
        self.lines.append("  " * self._depth + line)


def text_width(text: str) -> float:
    """In units of the font's size; DejaVu Sans, the widest that stands in for Helvetica."""
    return sum(0.97 if c in _WIDE else 0.39 if c in _NARROW else 0.7 if c.isupper() else 0.63 for c in text)


def _padded(line: str) -> str:
    """With the room at both sides that a wider font needs."""
    room = " " * (3 + len(line) // 7)
    return _escape(f"{room}{line}{room}")


def _attributes(attributes: dict[str, str]) -> str:
    return "[" + " ".join(f"{name}={_value(name, value)}" for name, value in attributes.items() if value != "") + "]"


def _value(name: str, value: str) -> str:
    if name == "label":
        return f'"{value}"'
    if name == "tooltip":
        return f'"{_escape(value)}"'
    return _quote(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
