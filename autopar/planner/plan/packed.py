"""Views in a plan's file: spans and memory curves as text, a tenth of what a JSON object for each would take.

Names and tracks are numbered by where they first occur. Numbers keep their value; in a curve, one that is as the one
before is left empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.base.trace import MemoryCurve, Span
from autopar.planner.plan.drawn import Views

_TEXTS = ("track", "name", "phase", "why")


def pack(views: Views) -> dict[str, Any]:
    """JSON-ready; `unpack` is the inverse."""
    rest = replace(views, spans=(), memory=()).to_data()
    texts = {text: i for i, text in enumerate(dict.fromkeys(getattr(s, k) for k in _TEXTS for s in views.spans))}
    rows = [
        ",".join(
            (
                *(str(texts[getattr(span, key)]) for key in _TEXTS),
                str(span.call),
                *map(_number, (span.start_s, span.end_s, span.bytes_sent)),
                str(span.times),
            )
        )
        for span in views.spans
    ]
    curves = [
        {
            "rank": curve.rank,
            "times_s": ",".join(map(_number, curve.times_s)),
            "series": {kind: _packed(values) for kind, values in curve.series.items()},
        }
        for curve in views.memory
    ]
    return {**rest, "spans": {"texts": list(texts), "rows": ";".join(rows)}, "memory": curves}


def unpack(data: Mapping[str, Any]) -> Views:
    """The inverse of `pack`."""
    found = Views.from_data({**data, "spans": (), "memory": ()})
    texts = data["spans"]["texts"]
    spans = []
    for row in filter(None, data["spans"]["rows"].split(";")):
        track, name, phase, why, call, start, end, sent, times = row.split(",")
        track, name, phase, why = (texts[int(each)] for each in (track, name, phase, why))
        spans.append(Span(track, name, phase, int(call), float(start), float(end), float(sent), int(times), why))
    curves = []
    for row in data["memory"]:
        times_s = tuple(map(float, row["times_s"].split(",")))
        series = {kind: _unpacked(text) for kind, text in row["series"].items()}
        curves.append(MemoryCurve(row["rank"], times_s, series))
    return replace(found, spans=tuple(spans), memory=tuple(curves))


def _number(value: float) -> str:
    """As short as it can be read back."""
    text = repr(float(value))
    return text[:-2] if text.endswith(".0") else text


def _packed(values: Sequence[float]) -> str:
    before: float | None = None
    found = []
    for value in values:
        found.append("" if value == before else _number(value))
        before = value
    return ",".join(found)


def _unpacked(text: str) -> tuple[float, ...]:
    found: list[float] = []
    for each in text.split(","):
        found.append(float(each) if each else found[-1])
    return tuple(found)
