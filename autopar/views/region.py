"""One region of a plan with all its modules and parameters."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.plan.drawn import PortView, RegionView
from autopar.views.boxes import boxes_of
from autopar.views.dot import Dot
from autopar.views.modules import Drawn, Modules
from autopar.views.style import PAPER, QUIET_LINE, Style


def draw_region(dot: Dot, region: RegionView, style: Style, phases: Sequence[str]) -> str:
    """The region between what goes in and what comes out, the forward on the left. Returns a node above all."""
    modules = Modules(dot, style, full=True)
    every = [Drawn(region, phase, boxes_of(region, phase)) for phase in phases]
    every = [drawn for drawn in every if drawn.boxes.boxes]
    for drawn in every:
        modules.region(drawn)
        _entries(dot, style, modules, drawn)
        _exits(dot, style, drawn)
    dot.columns("top", [modules.head(drawn) for drawn in every])
    return "top"


def _entries(dot: Dot, style: Style, modules: Modules, drawn: Drawn) -> None:
    """Inputs; in the backward, the gradients of outputs."""
    kind, ports = ("grad", drawn.region.outputs) if drawn.up else ("in", drawn.region.inputs)
    for port in ports:
        flows = [flow for flow in drawn.boxes.flows if flow.source == f"{kind}:{port.name}"]
        ways = [way for way in drawn.boxes.ways if way.source == f"{kind}:{port.name}"]
        id = f"{kind}:{drawn.region.name}.{port.name}"
        if flows or ways:
            _port(dot, style, id, port, gradient=drawn.up)
        for flow in flows:
            quiet = {} if port.differentiable else {"color": QUIET_LINE}
            dot.edge(id, drawn.id_of(flow.target), (), drawn.up, **quiet)
        for way in ways:
            modules.way(drawn, id, way)


def _exits(dot: Dot, style: Style, drawn: Drawn) -> None:
    """Outputs; in the backward, the gradients of inputs."""
    region = drawn.region
    made = [(f"out:{region.name}.{number}", port, port.name) for number, port in enumerate(region.outputs)]
    if drawn.up:
        ports = {f"in:{port.name}": port for port in region.inputs}
        made = [(f"grad:{region.name}.{of}", ports[of], name) for of, name in region.gradients if of in ports]
    for id, port, name in made:
        end = drawn.boxes.end_of.get(name)
        if end is not None:
            _port(dot, style, id, port, gradient=drawn.up)
            dot.edge(drawn.id_of(end), id, (), drawn.up)


def _port(dot: Dot, style: Style, id: str, port: PortView, gradient: bool) -> None:
    lines = [f"gradient of {port.name}" if gradient else port.name, style.type(port.value)]
    dot.node(id, lines, style="rounded,filled", fillcolor=PAPER, tooltip="\n".join(lines))
