"""Graphviz text, written by hand: names with any character, the same text for the same picture.

Nodes, edges and clusters each have an `id`, which Graphviz hands on to the svg. Where one stands for several
things, `Dot.members` has their ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autopar.views.style import BOLD, TEXT

FONT = "Helvetica,Arial,sans-serif"
SIZE, LABEL_SIZE = 10.0, 9.0
"""Of text in nodes and on edges, in points."""
LABEL, END, TITLE = "label:", "end:", "title:"
"""What ids begin with: of an edge's text, of what follows it, of a frame's title; `render` makes them one with the edge
and the frame in an svg.
"""

_WIDE, _NARROW = "mwMW@%&", "iljt.,:;'|![]()/ "


class Dot:
    """A directed graph in the making. drawn: for each node, point and edge that is seen its kind and its attributes;
    words: lines of text in nodes and on edges; titles: of frames.
    """

    def __init__(self, **attributes: str) -> None:
        self.members: dict[str, list[str]] = {}
        self.drawn: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.titles: list[str] = []
        self.lines: list[str] = ["digraph plan {"]
        self._depth = 1
        self._ids: set[str] = set()
        self._say(f"graph {_attributes(attributes)}")

    def defaults(self, kind: str, **attributes: str) -> None:
        """What nodes or edges (`kind`) have where nothing else is said."""
        self._say(f"{kind} {_attributes(attributes)}")

    def node(self, id: str, lines: Sequence[str], newline: str = "\\n", /, **attributes: str) -> None:
        """A node; its text is centred, or as `newline` has it, and gets the room of the widest of the fonts."""
        size = float(attributes.get("fontsize", SIZE))
        width = max((text_width(line) for line in lines), default=0.0) * size / 72 + 0.22
        self._ids.add(id)
        self.drawn.append(("node", attributes))
        self.words += lines
        text = newline.join(map(_escape, lines)) + newline * (newline != "\\n")
        self._say(f"{_quote(id)} {_attributes({'id': id, 'label': text, 'width': f'{width:.2f}'} | attributes)}")

    def point(self, id: str, **attributes: str) -> None:
        """A small dot where ways part."""
        self.drawn.append(("point", attributes))
        self._say(
            f"{_quote(id)} {_attributes({'id': id, 'shape': 'point', 'width': '0.07', 'label': ''} | attributes)}"
        )

    def edge(self, source: str, target: str, lines: Sequence[str] = (), up: bool = False, /, **attributes: str) -> None:
        """An edge; its text is a node on its way, so that nothing else runs through it. From a node to itself it turns
        back at its text. up: the layout has the target above the source.
        """
        if attributes.get("style") != "invis":
            self.drawn.append(("edge", attributes))
        self.words += lines or [attributes.get("label", "")]
        id = attributes.pop("id", "") or f"edge:{source}>{target}"
        number = 2
        unique = id
        while unique in self._ids:
            unique, number = f"{id}#{number}", number + 1
        self._ids.add(unique)
        if up:
            source, target = target, source
            pairs = (("lhead", "ltail"), ("ltail", "lhead"))
            attributes = {dict(pairs).get(name, name): value for name, value in attributes.items()}
        if not lines:
            self._line(source, target, {"id": unique} | ({"dir": "back"} if up else {}) | attributes)
            return
        label, first, last = f"{LABEL}{unique}", {"id": unique}, {"id": f"{END}{unique}"}
        self._label(label, lines, attributes)
        (last if up else first)["dir"] = "none"
        (first if up else last)["dir"] = "back" if up else "forward"
        plain = {name: value for name, value in attributes.items() if name not in ("lhead", "ltail", "fontcolor")}
        ends = [{name: attributes[name]} if name in attributes else {} for name in ("ltail", "lhead")]
        if source == target:  # both lines on one side of the box
            last["dir"] = "forward" if up else "back"
            pair = (label, source) if up else (source, label)
            self._line(*pair, first | plain)
            self._line(*pair, last | plain)
            return
        self._line(source, label, first | plain | ends[0])
        self._line(label, target, last | plain | ends[1])

    def _label(self, id: str, lines: Sequence[str], edge: dict[str, str]) -> None:
        own = {name: edge[name] for name in ("fontcolor", "tooltip") if name in edge}
        self._text(id, lines, LABEL_SIZE, {"fontcolor": BOLD} | own)

    def _text(self, id: str, lines: Sequence[str], size: float, attributes: dict[str, str]) -> None:
        width = max(map(text_width, lines)) * size / 72 + 0.08
        known = {"id": id, "label": "\\n".join(map(_escape, lines)), "shape": "plaintext", "width": f"{width:.2f}"}
        known |= {"height": "0.1", "margin": "0.03,0.02", "fontsize": f"{size:g}"}
        self._say(f"{_quote(id)} {_attributes(known | attributes)}")

    def _line(self, source: str, target: str, attributes: dict[str, str]) -> None:
        self._say(f"{_quote(source)} -> {_quote(target)} {_attributes(attributes)}")

    def below(self, above: str, below: str, weight: int = 0) -> None:
        """One node stands lower than another; the more weight, the straighter."""
        self.edge(above, below, id=f"below:{above}>{below}", style="invis", weight=str(weight))

    @contextmanager
    def cluster(self, id: str, title: str, **attributes: str) -> Iterator[None]:
        """A frame around all that is drawn within; `lhead` and `ltail` call it `cluster_ID`."""
        self._say(f"subgraph {_quote(f'cluster_{id}')} {{")
        self._depth += 1
        self.titles.append(title)
        self._say(f"graph {_attributes({'id': id, 'label': _padded(title) if title else ''} | attributes)}")
        yield
        self._depth -= 1
        self._say("}")

    def row(self, ids: Sequence[str]) -> None:
        """These nodes stand in one row, from the left to the right."""
        self._say(f"{{ rank=same; {'; '.join(map(_quote, ids))} }}")
        for left, right in itertools.pairwise(ids):
            self.edge(left, right, id=f"row:{left}>{right}", style="invis")

    def columns(self, id: str, tops: Sequence[str]) -> None:
        """What stands below each of these nodes is left of what stands below the next: an unseen node above all, whose
        edges keep their order, where edges within a row would not keep frames apart.
        """
        self._say(f"{_quote(id)} {_attributes({'id': id, 'shape': 'point', 'style': 'invis', 'ordering': 'out'})}")
        for top in tops:
            self.below(id, top, weight=2)

    def title(self, id: str, lines: Sequence[str]) -> None:
        """The title of the frame `id` as a node in it, so that no edge runs through it."""
        self.titles += lines
        self._text(f"{TITLE}{id}", lines, 13.0, {"fontcolor": TEXT})

    @property
    def source(self) -> str:
        return "\n".join([*self.lines, "}"]) + "\n"

    def _say(self, line: str) -> None:
        self.lines.append("  " * self._depth + line)


def text_width(text: str) -> float:
    """In units of the font's size; DejaVu Sans, the widest that stands in for Helvetica."""
    return sum(0.97 if c in _WIDE else 0.39 if c in _NARROW else 0.7 if c.isupper() else 0.63 for c in text)


def joined(lines: Sequence[str]) -> str:
    """Text beside an edge, where a node on its way would stand in its row."""
    return "\\n".join(map(_padded, lines))


def _padded(line: str) -> str:
    """With the room at both sides that a wider font needs."""
    room = " " * (3 + len(line) // 7)
    return _escape(f"{room}{line}{room}")


def _attributes(attributes: dict[str, str]) -> str:
    kept = [(name, value) for name, value in attributes.items() if value or name == "label"]
    return f"[{' '.join(f'{name}={_value(name, value)}' for name, value in kept)}]"


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
