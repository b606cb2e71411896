"""What the colours, shapes and signs of one picture stand for: those that it has, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.planner.plan.record import PlanRecord
from autopar.views.dot import Dot
from autopar.views.style import BOLD, FAINT, LEGEND, PAPER, QUIET_LINE, Style, tint

_SIGNS = (
    (r"\b[a-z]+\d+\[[^]/]*/(?P<axis>[a-z]\w*)[^]]*\]", "global sizes; {axis} splits the one before it"),
    (r"\d+/(?P<count>\d+):(?P<axis>\w+)", "seen as {count} stripes, each split by {axis}"),
    (r"\d+/(?P<count>\d+)~(?P<axis>\w+)", "in {count} stripes, every second one dealt to {axis} backwards"),
    (r"(?<=\] )\+(?P<axis>\w+)", "each rank of {axis} holds a term of the sum"),
    (r"(?<=\] )max:(?P<axis>\w+)", "the largest over {axis} is still to be found"),
)
"""Of tensors' types, with what they mean; the example is the first that the picture has."""


def draw_legend(dot: Dot, plan: PlanRecord, style: Style, detail: str) -> str:
    """The frame with all of it, from what has been drawn so far: axes, and below them the rest in groups. Returns a
    node of its last row.
    """
    groups = [list(_signs(dot)), list(_edges(dot, style)), list(_boxes(dot, detail))]
    axes = [axis for axis in style.every if _is_shown(dot, style, axis)]
    with dot.cluster(
        "legend", "legend", style="rounded", color=FAINT, fontsize="11", fontcolor=FAINT, labeljust="l", margin="10"
    ):
        names = [LEGEND]
        dot.node(LEGEND, ["axes"], style="filled", fillcolor=PAPER, color=PAPER)
        for axis in axes:
            names.append(f"legend:{axis}")
            stages = "" if axis in style.axes else ", stages"
            dot.node(
                names[-1], [f"{axis}: {plan.mesh.size(axis)} ranks{stages}"], style="filled",
                fillcolor=tint(style.colour[axis]), color=style.colour[axis],
            )  # fmt: skip
        dot.row(names)
        texts = []
        for number, group in enumerate(each for each in groups if each):
            texts.append(f"legend:text{number}")
            lines = [f"{sign}   {meaning}" for sign, meaning in group]
            dot.node(texts[-1], lines, "\\l", style="filled", fillcolor=PAPER, color=PAPER, fontsize="9")
            dot.below(LEGEND, texts[-1], weight=1)
    return texts[-1] if texts else LEGEND


def _signs(dot: Dot) -> Iterator[tuple[str, str]]:
    for pattern, meaning in _SIGNS:
        for found in filter(None, (re.search(pattern, line) for line in dot.words)):
            yield found[0], meaning.format(**found.groupdict())
            break


def _edges(dot: Dot, style: Style) -> Iterator[tuple[str, str]]:
    """Of edges, dots and what stands on them."""
    coloured = set(style.colour.values())
    if any(kind == "edge" and each.get("color") in coloured for kind, each in dot.drawn):
        yield "coloured edge", "a collective over that axis" + ", or a send" * any("send" in line for line in dot.words)
    if found := next((line for line in dot.words if re.match(r"[\d.]+ [KMGTP]?i?B · [\d.]+ \S*s$", line)), None):
        yield found, "bytes that a rank sends, and seconds, of one call"
    if found := next((line for line in dot.words if re.match(r"\d+ × (all_|reduce_|ring|permute)", line)), None):
        yield found, "so many, with the sum of their bytes and seconds"
    if any(line.startswith("once a step") for line in dot.words):
        yield "once a step", "not again for each microbatch"
    if any(kind == "edge" and each.get("color") == QUIET_LINE for kind, each in dot.drawn):
        yield "thin grey edge", "what no gradient flows through"
    if any(kind == "edge" and each.get("style") == "dashed" for kind, each in dot.drawn):
        yield "dashed edge", "gradients, from stage to stage"
    if any(kind == "point" and each.get("color") in coloured for kind, each in dot.drawn):
        yield "dot", "where ways part"
    if any(kind == "point" and each.get("color") == FAINT for kind, each in dot.drawn):
        yield "grey dot", "what the forward has saved"


def _boxes(dot: Dot, detail: str) -> Iterator[tuple[str, str]]:
    """Of nodes and frames."""
    nodes = [each for kind, each in dot.drawn if kind == "node"]
    if any(":" in each.get("fillcolor", "") or each.get("fillcolor", PAPER) != PAPER for each in nodes):
        yield "colours", "of the axes that split it, or sum it up"
    times = (re.match(r"(?:\w+ · )?([\d.]+ [mµn]?s)$", line) for line in dot.words)
    if found := next(filter(None, times), None):
        yield found[1], "what it computes, in one call"
    if any(each.get("color") == BOLD for each in nodes):
        yield "bold border", "products, attention, convolutions" if detail == "operator" else "has parameters"
    if any(each.get("shape") == "box3d" for each in nodes):
        yield "solid box", "a parameter, as used"
    if any(each.get("style") == "rounded,filled" for each in nodes):
        yield "round box", "comes from outside, or goes there"
    if any(each.get("style") == "filled" and each.get("fillcolor") == PAPER for each in nodes):
        yield "white box", "whole on every rank"
    if any(each.get("color") == QUIET_LINE for each in nodes):
        yield "pale border", "the same memory, seen otherwise"
    if found := next(filter(None, (re.match(r"\S+ (× \d+)[ ,]", line) for line in dot.titles)), None):
        yield found[1], f"drawn once, called {found[1][2:]} times a microbatch"


def _is_shown(dot: Dot, style: Style, axis: str) -> bool:
    colours = {style.colour[axis], tint(style.colour[axis])}
    for _, each in dot.drawn:
        if colours & {each.get("color", ""), *each.get("fillcolor", "").split(":")}:
            return True
    return any(re.search(rf"[/~:+]{axis}\b", line) for line in dot.words)
