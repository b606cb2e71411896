"""Does a run go on on any mesh? Saved on each of eight, loaded on each of eight: parameters, buffers and states of
AdamW bit by bit, and then the next two steps.

    python benchmarks/training/resume.py [--models llama,gpt2,t5] [--write]

Tiny models in float32, of one seed; the meshes have 1, 2 and 4 ranks. On the mesh that a step was saved on the next
losses are those of the run that was not interrupted, exactly; on another mesh, within float32's rounding of sums (a
relative 1e-4). T5 on meshes of its own: pipelines among them, and no split of its sequence, which it does not allow.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.dist import checkpoints
from tests.dist.launch import launch

ROOT = Path(__file__).parents[2]
Setting = checkpoints.Setting
MESHES: dict[str, Setting] = {
    "one rank": ({"dp": 1}, "ddp"),
    "dp 2, ddp": ({"dp": 2}, "ddp"),
    "dp 2, zero1": ({"dp": 2}, "zero1"),
    "tp 2": ({"tp": 2}, "tensor"),
    "dp 4, zero3": ({"dp": 4}, "zero3"),
    "dp 2 zero2, tp 2": ({"dp": 2, "tp": 2}, {"dp": "zero2", "tp": "tensor"}),
    "pp 2, dp 2 zero2": ({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "zero2"}),
    "dp 2 zero3, cp 2 ring": ({"dp": 2, "cp": 2}, {"dp": "zero3", "cp": "ring"}),
}
OWN: dict[str, dict[str, Setting]] = {
    "t5": {
        **{name: MESHES[name] for name in ("one rank", "dp 2, zero1", "dp 2 zero2, tp 2", "pp 2, dp 2 zero2")},
        "pp 4": ({"pp": 4}, {"pp": "pipeline(gpipe)"}),
    }
}


def saved(model: str, meshes: dict[str, Setting], folder: Path) -> dict[str, Any]:
    """What each mesh held when it saved, whole, and its next losses."""
    found = {}
    for name, setting in meshes.items():
        ranks = launch(checkpoints.saved, _num(setting), model, setting, str(folder / name), timeout_s=300.0)
        whole: dict[str, torch.Tensor] = {}
        for values, _ in ranks:
            whole |= values
        found[name] = whole, ranks[0][1]
    return found


def _num(setting: Setting) -> int:
    return math.prod(setting[0].values())


def compared(whole: dict[str, torch.Tensor], losses: list[float], ranks: list[Any], is_same: bool) -> str:
    """What is wrong, or ""."""
    names: set[str] = set()
    for values, next_losses in ranks:
        names |= values.keys()
        for name, value in values.items():
            if not torch.equal(value, whole[name]):
                return f"{name} differs"
        pairs = list(zip(next_losses, losses, strict=True))
        if any(a != b if is_same else not math.isclose(a, b, rel_tol=1e-4) for a, b in pairs):
            return f"losses {next_losses}, not {losses}"
    return "" if names == whole.keys() else f"{len(whole.keys() - names)} tensors are on no rank"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,llama,t5")
    parser.add_argument("--write", action="store_true", help="benchmarks/results/resume-DATE.md")
    options = parser.parse_args()
    begun = time.time()
    lines, wrong = [], 0
    for model in options.models.split(","):
        meshes = OWN.get(model, MESHES)
        with tempfile.TemporaryDirectory(prefix="resume-") as folder:
            first = saved(model, meshes, Path(folder))
            rows = []
            for onto, setting in meshes.items():
                folders = [str(Path(folder, name)) for name in meshes]
                ranks = launch(checkpoints.resumed_from, _num(setting), model, setting, folders, timeout_s=300.0)
                said = [
                    compared(*first[name], [rank[at] for rank in ranks], name == onto) for at, name in enumerate(meshes)
                ]
                wrong += sum(map(bool, said))
                rows.append((onto, said))
                print(model, onto, said, flush=True)
        tensors = len(next(iter(first.values()))[0])
        lines += [f"## {model}: {tensors} tensors", "", f"| loaded on, saved on → | {' | '.join(meshes)} |"]
        lines += [f"| --- |{' --- |' * len(meshes)}"]
        lines += [f"| {onto} | {' | '.join(each or 'equal' for each in said)} |" for onto, said in rows] + [""]
    head = [
        f"# Resuming, {date.today()}",
        "",
        f"`python benchmarks/training/resume.py --models {options.models}`: saved on each mesh, loaded on each, tiny "
        "models in float32 with AdamW.",
        "",
        "*equal*: every parameter, buffer and state bit by bit; the two next losses those of the run that was not "
        "interrupted: exactly on the same mesh, to a relative 1e-4 on another one.",
        f"{wrong} of {sum(len(OWN.get(m, MESHES)) ** 2 for m in options.models.split(','))} pairs are wrong. "
        f"torch {torch.__version__}, Python {platform.python_version()}, gloo, {time.time() - begun:.0f} s.",
        "",
    ]
    if options.write:
        (ROOT / "benchmarks" / "results" / f"resume-{date.today()}.md").write_text("\n".join([*head, *lines]))
    print("\n".join([*head, *lines]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
