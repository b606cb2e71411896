"""The report's content: one JSON-ready object with all that its page shows.

The page formats numbers (SI units: seconds, bytes, FLOPs) and escapes texts; only `pictures[].svg` and `program.html`
are markup.

    plan, explanations, what-ifs ─ content_of ─► dict ─ page.page ─► one HTML file
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from autopar import __version__
from autopar.base.text import format_bytes
from autopar.ir.interface import TensorInterface
from autopar.ir.interface_text import format_tensor, format_tensors
from autopar.ir.tensor_type import dtype_name
from autopar.planner.plan.record import PlanRecord
from autopar.views.compare import Comparison
from autopar.views.experts import expert_rows
from autopar.views.explain.explanation import Explanation
from autopar.views.holds import parameter_classes
from autopar.views.items import Items
from autopar.views.other_axes import by_axis
from autopar.views.rates import Rates
from autopar.views.rows import collective_rows, curve_row, memory_parts, operator_rows, parameter_row, region_row
from autopar.views.text import memory_price_text
from autopar.views.timeline import timeline_data
from autopar.views.whatif import WhatIf
from autopar.views.words import axis_does, bound, in_words

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Picture:
    """One drawing. group: `overview`, or a region's name. svg: Graphviz's, whose ids are keys of items."""

    id: str
    title: str
    group: str
    svg: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What a report adds to its plan, which took solving, or a run: explanations by the name that was explained;
    expert_loads: layer -> tokens of each expert.
    """

    explanations: Mapping[str, Explanation] = field(default_factory=dict)
    what_ifs: Sequence[WhatIf] = ()
    comparisons: Sequence[Comparison] = ()
    expert_loads: Mapping[str, Any] = field(default_factory=dict)


def content_of(
    plan: PlanRecord, found: Findings, pictures: Sequence[Picture], boxes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Everything. The plan has its views. boxes: what pictures draw as one: key -> keys of the operators in it."""
    classes = parameter_classes(plan)
    of = {each: name for name, members in classes for member in members for each in (member.name, *member.aliases)}
    made = Items(plan, of, found.explanations)
    items = made.all(boxes)
    for picture in sorted(pictures, key=lambda each: each.group == "overview"):  # where it is largest
        for key in re.findall(r'id="([^"]+)" class="(?:node|edge|cluster)"', picture.svg):
            if key in items and items[key]["picture"] is None:
                items[key]["picture"] = picture.id
    explained = {name: _explained(plan, each) for name, each in found.explanations.items()}
    return {
        "format": FORMAT,
        "title": f"{plan.title} on {plan.mesh} ({plan.mesh.hardware.name}), {plan.strategy}",
        "autopar": __version__,
        "model": {"name": plan.title, "parameters": _num_elements(plan), "command": _command(plan)},
        "mesh": {"axes": list(_axes(plan)), "hardware": plan.mesh.hardware.name, "devices": plan.mesh.num_devices},
        "strategy": plan.strategy,
        "precision": dtype_name(plan.precision) if plan.precision else "the model's own",
        "training": plan.training,
        "microbatches": plan.interface.microbatches,
        "batch": [
            {"name": name, "type": kind} for name, kind in format_tensors(plan.interface.inputs, plan.interface.axes)
        ],
        "headline": _headline(plan),
        "bound": bound(plan),
        "words": list(in_words(plan)),
        "questions": list(_questions(plan, found, classes)),
        "notes": list(plan.notes),
        "step": list(_step(plan)),
        "operators": list(operator_rows(plan)),
        "memory_parts": memory_parts(plan),
        "collectives": collective_rows(plan, items),
        "experts": expert_rows(plan, found.expert_loads),
        "regions": [region_row(plan, each.name) for each in plan.regions],
        "pictures": [{"id": p.id, "title": p.title, "group": p.group, "svg": p.svg} for p in pictures],
        "items": items,
        "parameters": [parameter_row(plan, name, members) for name, members in classes],
        "explanations": explained,
        "memory": [curve_row(plan, each) for each in plan.drawn.memory],
        "timeline": timeline_data(plan),
        "program": {"html": _highlighted(plan.source), "anchors": made.lines, "edited": plan.source_is_edited},
        "comparisons": [
            each.to_dict() for each in (*(w.comparison for w in found.what_ifs if w.comparison), *found.comparisons)
        ],
    }  # fmt: skip


def _explained(plan: PlanRecord, explanation: Explanation) -> dict[str, Any]:
    """The explanation, and what it says of each axis."""
    axes = [each.to_dict() for each in by_axis(explanation, plan.stage_mesh.axes)]
    return {**explanation.to_dict(), "axes": axes}


def _headline(plan: PlanRecord) -> dict[str, Any]:
    cost, rates = plan.cost, Rates.of(plan)
    return {
        "step_s": cost.step_time_s,
        "mfu": rates.mfu,
        "tokens_per_s": rates.tokens_per_s,
        "samples_per_s": rates.rows_per_s,
        "peak_bytes": cost.peak_memory_bytes,
        "limit_bytes": plan.memory_limit_bytes,
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "communication_s": cost.communication_s,
        "bubble": plan.pipeline.timeline.bubble_share if plan.pipeline else None,
    }


def _num_elements(plan: PlanRecord) -> int:
    return sum(math.prod(each.shape) for each in plan.interface.parameters)


def _command(plan: PlanRecord) -> str | None:
    """How the command line builds the plan's model."""
    spec = plan.model_spec
    if spec is None:
        return None
    batch = f" --batch {'x'.join(map(str, spec.batch))}" if spec.batch else ""
    layers = f" --layers {spec.layers}" if spec.layers else ""
    return f"{shlex.quote(spec.spec)}{' --tiny' if spec.tiny else ''}{layers}{batch}"


def _axes(plan: PlanRecord) -> Iterator[dict[str, Any]]:
    sent = plan.bytes_by_axis()
    for number, (name, size) in enumerate(plan.mesh.axes):
        link = plan.mesh.link(name)
        where = "between nodes" if plan.mesh.crosses_nodes(name) else "inside a node"
        is_stage = plan.asked is not None and name not in plan.stage_mesh.axis_names
        yield {
            "name": name,
            "size": size,
            "colour": number,
            "what": "runs the stages of the pipeline" if is_stage else axis_does(plan, name),
            "link": f"{where}, {link.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
            "bytes": sent.get(name, 0.0),
            "seconds": sum(row.seconds for row in plan.collectives if row.axis == name),
        }


def _step(plan: PlanRecord) -> Iterator[dict[str, Any]]:
    cost = plan.cost
    parts = (
        ("compute", cost.compute_s, "compute"), ("communication", cost.communication_s, "communication"),
        ("of it hidden beside the compute", -cost.hidden_s, "hidden"),
        ("waiting for other ranks", cost.waiting_s, "waiting"), ("optimizer", cost.optimizer_s, "optimizer"),
        ("waiting for the host", cost.host_s, "waiting"),
    )  # fmt: skip
    for what, seconds, kind in parts:
        if seconds:
            yield {"what": what, "seconds": seconds, "kind": kind}


def _highlighted(source: str) -> str:
    """The program as HTML, a span with the class `line` and an id for each line."""
    lines = highlight(source, PythonLexer(ensurenl=True, stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    return "\n".join(f'<span class="line" id="L{number}">{line}</span>' for number, line in enumerate(lines, 1))


def _questions(
    plan: PlanRecord, found: Findings, classes: Sequence[tuple[str, Sequence[TensorInterface]]]
) -> Iterator[dict[str, Any]]:
    def row(question: str, answer: str, link: str | None) -> dict[str, Any]:
        return {"question": question, "answer": answer, "link": link}

    memory = plan.cost.memory
    kept = (
        f"{format_bytes(memory.parameters)} of parameters and {format_bytes(memory.optimizer_states)} of optimizer "
        f"states at all times, {format_bytes(memory.gradients)} of gradients by the end of the backward; "
        if plan.training
        else f"{format_bytes(memory.parameters)} of parameters"
        + (f" and {format_bytes(memory.states)} of caches" if memory.states else "")
        + " at all times; "
    )
    whole = f"{format_bytes(memory.peak)} in all when the fullest rank is fullest."
    yield row("What does each rank hold?", kept + whole, "#sharding/rank")
    name, members = max(classes, key=lambda each: math.prod(each[1][0].shape) * len(each[1]))
    explanation = found.explanations.get(name)
    why = f" {_sentence('; '.join(explanation.why))}" if explanation is not None and explanation.why else ""
    text = format_tensor(members[0], plan.interface.axes)
    yield row("Where is the largest weight split, and why?", f"{name} is stored as {text}.{why}", f"#sharding/{name}")
    compared = [what_if for what_if in found.what_ifs if what_if.comparison]  # the page's first comparisons
    for what_if in found.what_ifs:
        verb = "buy" if what_if.factor > 1 else "cost"
        link = f"#compare/{compared.index(what_if)}" if what_if in compared else None
        yield row(f"What would {what_if.title} {verb}?", what_if.answer(plan), link)
    if not found.what_ifs and (price := memory_price_text(plan)):
        yield row("What would more memory buy?", _sentence(price), None)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
