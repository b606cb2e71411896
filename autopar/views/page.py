"""One HTML file that needs nothing else: the report's template, styles and scripts, and the content that they show.

    content (a JSON object) ─ page ─► text of the file

The browser asks nobody for anything: a policy in the page forbids it. The content stands in the page as JSON, which no
text can break out of.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

STYLES = ("base.css", "views.css", "small.css")

SCRIPTS = (
    "sharding.js", "format.js", "dom.js", "table.js", "content.js", "bars.js", "viewer.js", "grid.js", "boxes.js",
    "explanation.js", "inspector.js", "search.js", "canvas.js", "overview.js", "graph.js", "sharding_view.js",
    "memory.js", "timeline_paint.js", "timeline.js", "collectives.js", "experts.js", "program.js", "compare_file.js",
    "compare.js", "main.js",
)  # fmt: skip
"""In the order in which they stand in the page: each may use those before it at once, all others when it is called."""


def page(content: Mapping[str, Any]) -> str:
    """The report as the text of one HTML file (UTF-8). Equal contents give equal texts.

    content: what `report` makes of a plan; any part may be missing or null, its tab then says so. Numbers that JSON has
    no word for (infinity, not a number) become null.
    """
    folder = resources.files("autopar.views") / "assets"
    read = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", *STYLES, *SCRIPTS)}
    scripts = "\n".join(read[name] for name in SCRIPTS)
    parts = {
        "title": html.escape(str(content.get("title") or "autopar")).encode("utf-8", "replace").decode("utf-8"),
        "css": "\n".join(read[name] for name in STYLES),
        "script": f'(() => {{\n"use strict";\n{scripts}\n}})();',
        "content": embedded_json(content),
    }
    # One pass, so that what looks like a place in the content stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place.group(1)], read["page.html"])


def embedded_json(content: Mapping[str, Any]) -> str:
    """JSON in ASCII without `<`: nothing in it ends a script element or begins a comment."""
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(content), separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inside) for inside in value]
    return value
