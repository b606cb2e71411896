"""Draw the gallery: docs/gallery.md and the pictures in docs/gallery/, each from a plan made here.

    .venv/bin/python docs/make_gallery.py            # some minutes: plans five models, draws them
    .venv/bin/python docs/make_gallery.py --check    # ends with 1 where a drawing's text is not what would be written
    .venv/bin/python docs/make_gallery.py --reports DIR    # also writes each plan's report and trace into DIR

Run it after a change to pictures or to what plans decide.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.views.charts import draw_memory, draw_timeline
from autopar.views.picture import dot_source
from autopar.views.text import one_line

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "gallery"
INTRO = """# Gallery

Pictures of plans, as `plan.visualize` and `autopar draw` make them; `docs/make_gallery.py` writes this page.
Every collective is an edge in the colour of its mesh axis, with its kind, axis, bytes of one rank and predicted time;
boxes are modules, in the colours of the axes that split what they make; blocks that repeat are drawn once.
`autopar report plan.json` has the same pictures to click on.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One plan of the gallery. text: what there is to see. options: of `autopar.plan`. charts: of time and memory, too.

    forward: a picture of the forward alone, too, which the README opens with.
    """

    name: str
    title: str
    model: str
    mesh: str
    batch: tuple[int, int]
    strategy: Any
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    charts: bool = False
    forward: bool = False


ENTRIES = (
    Entry(
        "gpt2", "GPT-2, decided by the solver", "gpt2", "dp=4,tp=2", (32, 1024), "auto",
        "The embedding is tied to the classifier, so its gradient comes from both ends.",
    ),
    Entry(
        "llama-8b", "Llama 3.1 8B, ZeRO-3 × tensor parallelism", "llama-3.1-8b", "dp=8,tp=8", (64, 8192),
        {"dp": "zero3", "tp": "tensor+sequence"},
        "Parameters are gathered over dp for each layer; between the two halves of a layer a hidden state is gathered "
        "and scattered over tp, along the sequence.",
        charts=True, forward=True,
    ),
    Entry(
        "zero-bubble", "Llama 3.1 8B, a pipeline with zero bubble", "llama-3.1-8b", "pp=4,dp=2", (64, 4096),
        {"pp": "pipeline(zero_bubble)", "dp": "zero2"},
        "Backwards are cut in halves: gradients of inputs travel on at once, those of weights fill what would be "
        "waiting.",
        {"microbatches": 16}, charts=True,
    ),
    Entry(
        "ring", "Llama 3.1 8B, one long sequence with ring attention", "llama-3.1-8b", "dp=2,cp=8", (2, 131072),
        {"dp": "zero3", "cp": "ring"},
        "Each of eight ranks has an eighth of the tokens; keys and values go round while attention computes.",
    ),
    Entry(
        "t5", "T5, encoder and decoder", "t5-base", "dp=4,tp=2", (32, 512), "auto",
        "Two rows of blocks; the decoder's read what the encoder made.",
    ),
)  # fmt: skip


def main() -> int:
    """Write the page and its pictures, or say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--reports", type=Path, help="write each plan's report and trace here too")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    parts, stale = [INTRO], []
    for entry in ENTRIES:
        print(f"{entry.title} …", flush=True)
        plan = make_plan(entry)
        pictures = {entry.name: "both"} | ({f"{entry.name}-forward": "forward"} if entry.forward else {})
        for name, phase in pictures.items():
            text = FOLDER / f"{name}.gv"
            if not arguments.check:
                plan.visualize(text.with_suffix(".svg"), phase=phase)
            elif not text.exists() or text.read_text(encoding="utf-8") != dot_source(plan, phase=phase):
                stale.append(text.name)
        if arguments.check:
            continue
        parts.append(section(entry, plan))
        if arguments.reports is not None:
            arguments.reports.mkdir(parents=True, exist_ok=True)
            plan.report(arguments.reports / f"{entry.name}.html")
            plan.trace(arguments.reports / f"{entry.name}.perfetto.json")
    if arguments.check:
        print(f"out of date: {', '.join(stale)}: run docs/make_gallery.py" if stale else "the gallery is up to date")
        return int(bool(stale))
    (HERE / "gallery.md").write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote {HERE / 'gallery.md'}")
    return 0


def make_plan(entry: Entry) -> Plan:
    """The plan of one entry."""
    loaded = catalogue.load(entry.model, batch=entry.batch, device="meta")
    mesh = autopar.Mesh.parse(entry.mesh, hardware="h100")
    return autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, strategy=entry.strategy, precision="bf16", **entry.options
    )


def section(entry: Entry, plan: Plan) -> str:
    """A title, the picture, what there is to see, how to get it."""
    strategy = entry.strategy
    if isinstance(strategy, dict):
        strategy = ",".join(f"{axis}={name}" for axis, name in strategy.items())
    more = "".join(f" --{name} {value}" for name, value in entry.options.items())
    batch = "x".join(map(str, entry.batch))
    lines = [f"## {entry.title}", entry.text, "", f"![{entry.title}](gallery/{entry.name}.svg)", ""]
    if entry.charts:
        draw_timeline(plan, FOLDER / f"{entry.name}-timeline.svg")
        draw_memory(plan, FOLDER / f"{entry.name}-memory.svg")
        lines += [
            f"![The step](gallery/{entry.name}-timeline.svg)",
            "",
            f"![Memory](gallery/{entry.name}-memory.svg)",
            "",
        ]
    lines += [f"{one_line(plan)}.", "", "```"]
    lines += [
        f"autopar plan {entry.model} --mesh {entry.mesh} --hardware h100 --batch {batch} --strategy '{strategy}'{more} "
        f"--picture {entry.name}.svg --report {entry.name}.html",
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
