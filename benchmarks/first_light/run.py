"""The first minutes on a GPU: is it right there, how fast, how well predicted. docs/gpu.md is the runbook.

    python benchmarks/first_light/run.py SECTION… --out DIR [--budget SECONDS] [--profile FILE] [--device cpu] [--quick]

Sections, in the order given: env, kernels, train, streams, attention, step1b, calibrate, accuracy. Each is a process of
its own, ended when the budget is; what it has found by then is kept. DIR gets SECTION.jsonl, a row a line, and
SECTION.log, what it printed. A short table comes last. Exit code: 0; 1 where a row is wrong or a section broke; 2 for
bad arguments.

--quick: small and few, a look. --device cpu: everything that can be tried without a GPU, the kernels interpreted; what
it times says nothing of one. --profile: calibrate writes it, step1b and accuracy predict with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SECTIONS = ("env", "kernels", "train", "streams", "attention", "step1b", "calibrate", "accuracy")
ENDED = ("", "out of time", "no time left")
"""Ways to end that are no fault."""
LEAST_S = 5.0
"""No section is begun with less left."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--out", type=Path, required=True, help="folder of what was found")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all sections (default %(default)g)")
    parser.add_argument("--profile", type=Path, help="a hardware profile (default DIR/measured.toml)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    profile = options.profile or options.out / "measured.toml"
    end, lines = time.monotonic() + options.budget, []
    for name in options.sections:
        left = end - time.monotonic()
        if left < LEAST_S:
            lines.append(summary(name, [], 0.0, "no time left"))
            continue
        begun = time.monotonic()
        outcome = run_section(name, options.out, left, profile, options.device, options.quick)
        lines.append(summary(name, rows_of(options.out / f"{name}.jsonl"), time.monotonic() - begun, outcome))
        print(lines[-1]["text"], flush=True)
    print("\n".join(["", "section      rows  wrong  seconds  ended", *(line["text"] for line in lines)]))
    for line in lines:
        for row in line["wrong"][:10]:
            print(f"WRONG {json.dumps(row, ensure_ascii=False)}")
        if line["ended"] not in ENDED:
            print(f"{line['name']}: see {options.out / line['name']}.log")
    return 1 if any(line["wrong"] or line["ended"] not in ENDED for line in lines) else 0


def run_section(name: str, out: Path, seconds: float, profile: Path, device: str, quick: bool) -> str:
    """Run one section in a process; how it ended, empty where well."""
    (out / f"{name}.jsonl").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "benchmarks.first_light.section", name, str(out), str(seconds), str(profile), device,
        str(int(quick)),
    ]  # fmt: skip
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment_of(name, device), stdout=log, stderr=log)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "out of time"
    return "" if code == 0 else f"broke ({code})"


def environment_of(name: str, device: str) -> Mapping[str, str]:
    """The variables of a section's process."""
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if name in ("kernels", "attention"):
            found |= {"TRITON_INTERPRET": "1", "AUTOPAR_ATTENTION": "triton"}
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What a section has found; a line that it was ended in is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def summary(name: str, rows: Sequence[Mapping[str, Any]], seconds: float, ended: str) -> dict[str, Any]:
    """A line of the table. A section that ends well without a row has shown nothing, which is wrong too."""
    wrong = [row for row in rows if row.get("ok") is False]
    ended = ended or ("" if rows else "found nothing")
    text = f"{name:12} {len(rows):4}  {len(wrong):5}  {seconds:7.0f}  {ended or 'well'}"
    return {"name": name, "wrong": wrong, "ended": ended, "text": text}


if __name__ == "__main__":
    sys.exit(main())
