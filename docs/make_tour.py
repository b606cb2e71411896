"""Write docs/quickstart.md: a small model on its way through the compiler, with what every pass really made of it.

    .venv/bin/python docs/make_tour.py            # writes docs/quickstart.md
    .venv/bin/python docs/make_tour.py --check    # ends with 1 where the file is not what would be written

Run it after a change to a pass or to the emitter.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE / "quickstart.md"
WIDTH = 118


def main() -> int:
    """Write the page, or say whether it is up to date."""
    text = make_text()
    if "--check" in sys.argv[1:]:
        same = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name} is {'up to date' if same else 'out of date: run docs/make_tour.py'}")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}: {len(text.splitlines())} lines")
    return 0


def make_text() -> str:
    """The page: the template with what the passes, the emitter and the proof printed."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_DUMP"] = folder
        import autopar
        from autopar.cli.models import catalogue, plain
        from autopar.views.text import plan_text

        loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
        mesh = autopar.Mesh({"dp": 2, "tp": 2}, hardware="h100")
        strategy = {"dp": "zero3", "tp": "tensor"}
        plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)
        passes = {name: dump(Path(folder), name) for name in ("capture", "outline", "differentiate", "place")}
        every = all_passes(Path(folder))
        explanation = plan.explain("layers.*.down.weight")
        proof = plan.verify()
    parts = {
        "model": f"{inspect.getsource(plain.Block)}\n\n{inspect.getsource(plain.MLP)}",
        "passes": every,
        "holds": str(plan.holds("layers.*.up.weight")),
        "capture": passes["capture"],
        "outline": passes["outline"],
        "differentiate": region(passes["differentiate"], "layer"),
        "place": forward_of(region(passes["place"], "layer")),
        "gather": function(plan.source, "layer_gather"),
        "forward": function(plan.source, "layer_forward"),
        "reduce": function(plan.source, "layer_reduce"),
        "step": function(plan.source, "forward"),
        "table": re.sub(r";\s+planned in .*", "", plan_text(plan)),
        "explain": str(explanation),
        "proof": str(proof),
    }
    template = (HERE / "tour_template.md").read_text(encoding="utf-8")
    kept = ("passes",)  # tables of the page, not printed text
    return re.sub(r"<<(\w+)>>", lambda m: parts[m[1]] if m[1] in kept else clip(parts[m[1]]), template)


def dump(folder: Path, name: str) -> str:
    """What AUTOPAR_DUMP left of a pass."""
    (path,) = folder.glob(f"*_{name}.txt")
    return path.read_text(encoding="utf-8")


def all_passes(folder: Path) -> str:
    """Every pass in order: what it is for, in its own words, and how long the program's text is after it."""
    rows, before = [], ""
    for path in sorted(folder.glob("*.txt")):
        name, text = path.stem.split("_", 1)[1], path.read_text(encoding="utf-8")
        module = importlib.import_module(f"autopar.passes.{name}")
        about = (inspect.getdoc(getattr(module, name)) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        is_same = text.split("\n", 1)[1:] == before.split("\n", 1)[1:]
        length = "as before" if is_same else f"{len(text.splitlines())} lines"
        rows.append(f"| `{name}` | {about} | {length} |")
        before = text
    return "\n".join(["| pass | what for | program after it |", "|---|---|---|", *rows])


def region(text: str, name: str) -> str:
    """One region of a printed program, moved to the left."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"  region {name} "))
    last = next(n for n in range(first + 1, len(lines)) if re.match(r"  (region|call|return) ", lines[n]))
    return "\n".join(line.removeprefix("  ") for line in lines[first:last])


def forward_of(text: str) -> str:
    """A region's operators before its backward."""
    return text.split("\n  backward:")[0]


def function(source: str, name: str) -> str:
    """One function of a generated program."""
    match = re.search(rf"^def {name}\(.*?(?=^(?:def |# =)|\Z)", source, re.MULTILINE | re.DOTALL)
    assert match is not None, f"the generated program has no {name}"
    return match[0].rstrip()


def clip(text: str) -> str:
    """Long lines end in an ellipsis; spaces before a comment shrink."""
    lines = [re.sub(r"(?<=\S) {3,}# ", "  # ", line).rstrip(" #") for line in text.rstrip().splitlines()]
    return "\n".join(line if len(line) <= WIDTH else line[: WIDTH - 2] + " …" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
