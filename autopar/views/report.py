"""One offline HTML file with everything about a plan.

plan ─ explanations, what-ifs (solved within a time limit) ─ pictures ─ content ─► page
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from autopar.base.errors import AutoparError
from autopar.planner.plan.record import PlanRecord
from autopar.views.compare import compare
from autopar.views.content import Findings, Picture, content_of
from autopar.views.explain.explain import explain, with_program
from autopar.views.explain.explanation import Explanation
from autopar.views.generation import phase_rows
from autopar.views.holds import parameter_classes
from autopar.views.page import page
from autopar.views.picture import box_members, dot_source
from autopar.views.render import render
from autopar.views.whatif import WhatIf, with_memory

logger = logging.getLogger("autopar.views.report")
EXPLAIN_S = 60.0
"""Wall seconds for explanations: what is not begun by then is left out, and the page says how to ask."""
MEMORY_FACTORS = (1.2, 0.8)
_HEAVY = ("matmul", "attention", "convolution", "conv", "gather")

Say = Callable[[str, int, int], None]
"""Called before each part of the work: what, its number from 0, how many there are."""


def report(
    plan: PlanRecord,
    path: str | Path,
    *,
    against: Mapping[str, PlanRecord] | Sequence[PlanRecord] = (),
    explain_s: float = EXPLAIN_S,
    memory_factors: Sequence[float] = MEMORY_FACTORS,
    model: nn.Module | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    expert_loads: Mapping[str, Any] | None = None,
    progress: Say | None = None,
) -> Path:
    """Write everything about a plan as one HTML file that needs no network, and return its path.

    Args:
        against: other plans to compare with, by the names they go by.
        explain_s: wall seconds in which parameters and heavy operators are explained, the largest first; of what is not
            begun by then the page says how to ask. 0: nothing is explained.
        memory_factors: of the memory limit under which the plan is made again, to say what more or less would change.
        model, example_inputs: what a loaded plan was made for; without them nothing is explained or made again.
        expert_loads: tokens that chose each expert, as `compiled.expert_loads()` counts them: the tab of experts says
            what they come to, and what `place_experts` would make of them.
        progress: called before each part of the work with what it is, its number from 0, and how many there are.

    Raises:
        AutoparError: a plan that was saved by an older version, a file that cannot be written, loads of other layers.
    """
    say = progress or (lambda what, number, total: None)
    content = report_content(plan, against, explain_s, memory_factors, model, example_inputs, expert_loads or {}, say)
    return write_page(content, path, say)


def phases_report(
    data: Mapping[str, Any],
    phases: Mapping[str, PlanRecord],
    path: str | Path,
    *,
    explain_s: float = EXPLAIN_S,
    progress: Say | None = None,
) -> Path:
    """Write everything about a plan for `generate()` as one HTML file: what both phases come to, and each phase's
    report, between which the page switches. Returns its path.

    Args:
        data: as `GenerationPlan.to_data` gives it.
        phases: their plans, by name, in the order in which they run.
        explain_s: as of `report`, shared evenly. A phase that was loaded from a file is not explained.
        progress: as of `report`.

    Raises:
        AutoparError: a plan that was saved by an older version, a file that cannot be written.
    """
    say = progress or (lambda what, number, total: None)
    made, rows = {}, phase_rows(data, phases)
    for name, plan in phases.items():

        def say_of(what: str, number: int, total: int, name: str = name) -> None:
            say(f"{name}: {what}", number, total)

        # Another limit of memory for one phase alone would move what both share.
        content = report_content(plan, (), explain_s / len(phases), (), None, None, {}, say_of)
        made[name] = {**content, "generation": {**data, "rows": rows}, "phase": name}
    first = next(iter(made.values()))
    whole = {key: first[key] for key in ("format", "title", "autopar")}
    return write_page({**whole, "phases": made}, path, say)


def report_content(
    plan: PlanRecord,
    against: Mapping[str, PlanRecord] | Sequence[PlanRecord],
    explain_s: float,
    memory_factors: Sequence[float],
    model: nn.Module | None,
    example_inputs: Mapping[str, Any] | None,
    expert_loads: Mapping[str, Any],
    say: Say,
) -> dict[str, Any]:
    """What the page shows of a plan. Arguments as of `report`.

    Raises:
        AutoparError: as `report`, but for files.
    """
    if plan.views is None:
        raise AutoparError(
            "this plan's file has nothing to show: it was saved by an older version",
            remedy="make the plan again and save it",
        )
    found = _findings(plan, against, explain_s, memory_factors, model, example_inputs, say)
    found = replace(found, expert_loads=expert_loads)
    boxes: dict[str, list[str]] = {}
    pictures = list(_pictures(plan, boxes, say))
    return content_of(plan, found, pictures, boxes)


def write_page(content: Mapping[str, Any], path: str | Path, say: Say) -> Path:
    """Raises an AutoparError where the file cannot be written."""
    path = Path(path)
    say("writing the page", 0, 1)
    try:
        path.write_text(page(content), encoding="utf-8")
    except OSError as error:
        raise AutoparError(
            f"cannot write {path}", values=str(error), remedy="name a file in a folder that exists"
        ) from error
    return path


def _findings(
    plan: PlanRecord,
    against: Mapping[str, PlanRecord] | Sequence[PlanRecord],
    explain_s: float,
    factors: Sequence[float],
    model: nn.Module | None,
    example_inputs: Mapping[str, Any] | None,
    say: Say,
) -> Findings:

    named = against if isinstance(against, Mapping) else {_name_of(each): each for each in against}
    comparisons = [compare(plan, other, names=("this plan", name)) for name, other in named.items()]
    has_program = plan.program is not None and plan.program.placement is not None
    if not has_program and (model is None or plan.program is not None):
        return Findings(comparisons=comparisons)
    solved = with_program(plan, model, example_inputs)
    what_ifs = list(_what_ifs(solved, factors, say)) if plan.memory_limit_bytes else []
    return Findings(dict(_explanations(solved, explain_s, say)), what_ifs, comparisons)


def _name_of(plan: PlanRecord) -> str:
    return f"{plan.strategy} on {plan.mesh}"


def _explanations(plan: PlanRecord, seconds: float, say: Say) -> Iterator[tuple[str, Explanation]]:
    """Of parameters, the largest class first, then of operators that compute most; the time left is shared out."""
    end = time.perf_counter() + seconds
    names = [*_parameters(plan), *_operators(plan)]
    for number, name in enumerate(names):
        left = end - time.perf_counter()
        if left <= 0:
            return
        say(f"explaining {name}", number, len(names))
        share = max(left / 4, left / (len(names) - number))
        try:
            found = explain(plan, name, time_limit_s=share, progress=lambda *_: None)
        except AutoparError:
            continue  # a name that only pictures have
        assert isinstance(found, Explanation)
        yield name, found


def _parameters(plan: PlanRecord) -> list[str]:
    classes = [(sum(_size(each.shape) for each in members), name) for name, members in parameter_classes(plan)]
    return [name for _, name in sorted(classes, key=lambda each: -each[0])]


def _operators(plan: PlanRecord) -> list[str]:
    """Products, attention and lookups of the forward, dearest first."""
    found = [
        (op.seconds * region.calls, f"{region.name}.{op.name}")
        for region in plan.drawn.regions
        for op in region.ops
        if op.phase == "forward" and op.kind == "compute" and op.op_class in _HEAVY
    ]
    return [name for _, name in sorted(found, key=lambda each: -each[0])]


def _what_ifs(plan: PlanRecord, factors: Sequence[float], say: Say) -> Iterator[WhatIf]:
    for number, factor in enumerate(factors):
        say(f"planning with {factor:.0%} of the memory", number, len(factors))
        try:
            yield with_memory(replace(plan, memory_limit_bytes=plan.memory_limit_bytes), factor)
        except AutoparError as error:
            logger.warning("the report does not say what other memory would buy: %s", error)
            return


def _pictures(plan: PlanRecord, boxes: dict[str, list[str]], say: Say) -> Iterator[Picture]:
    """The overview, then every region's modules and operators. boxes: gets what is drawn as one, by its id."""
    wanted: list[tuple[str, str, str, dict[str, Any]]] = [("overview", "Overview", "overview", {"detail": "overview"})]
    for region in plan.drawn.regions:
        title = region.module or region.name
        wanted.append(
            (f"region-{region.name}", f"{title}: modules", title, {"detail": "region", "region": region.name})
        )
        for phase in dict.fromkeys(op.phase for op in region.ops):
            options = {"detail": "operator", "region": region.name, "phase": phase}
            wanted.append((f"{phase}-{region.name}", f"{title}: {phase}, operators", title, options))
    for number, (key, title, group, options) in enumerate(wanted):
        say(f"drawing {title}", number, len(wanted))
        try:
            drawn = render(dot_source(plan, legend=False, **options), "svg")
        except AutoparError as error:
            logger.warning("the report goes without a picture, %s: %s", title, error)
            continue
        if drawn is not None:
            yield Picture(key, title, group, slim(drawn.decode()))
        for name, members in box_members(plan, **options).items():
            if name.startswith("box:"):
                boxes[name] = list(dict.fromkeys([*boxes.get(name, ()), *members]))


def slim(svg: str) -> str:
    """Graphviz's drawing without what the page says once for all, or does not need: a third of its size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", svg, flags=re.S)
    svg = re.sub(r' xml:space="preserve"| text-anchor="middle"', "", svg)
    family = re.search(r' font-family="[^"]*"', svg)
    if family is None:
        return svg
    return svg.replace(family[0], "").replace("<svg", f'<svg text-anchor="middle"{family[0]}', 1)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
