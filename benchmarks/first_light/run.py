"""The first minutes on a GPU: is it right there, how fast, how well predicted. docs/gpu.md is the runbook.

    python benchmarks/first_light/run.py SECTION… --out DIR [--budget SECONDS] [--jobs N] [--profile FILE]
                                         [--device cpu] [--quick]

Sections, in the order given: env, kernels, train, streams, candidates, decode, experts, attention, step1b, generate,
calibrate, accuracy. Each is a process of its own, ended when the budget is; what it has found by then is kept. DIR gets
SECTION.jsonl, a row a line, and SECTION.log, what it printed. A short table comes last. Exit code: 0; 1 where a row is
wrong or a section broke; 2 for bad arguments.

--jobs: kernels, train, streams and candidates, which time nothing, run beside each other, their cases shared among as
many processes: what they wait for is compilers, on the host's cores.

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

TOGETHER = ("kernels", "train", "streams", "candidates")
"""Sections that time nothing."""
SECTIONS = ("env", *TOGETHER, "decode", "experts", "attention", "step1b", "generate", "calibrate", "accuracy")
ENDED = ("", "out of time", "no time left")
"""Ways to end that are no fault."""
LEAST_S = 5.0
"""No section is begun with less left."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--out", type=Path, required=True, help="folder of what was found")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all sections (default %(default)g)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of sections that time nothing (default 1)")
    parser.add_argument("--profile", type=Path, help="a hardware profile (default DIR/measured.toml)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    profile = options.profile or options.out / "measured.toml"
    end, lines = time.monotonic() + options.budget, []
    waiting = list(dict.fromkeys(options.sections))
    while waiting:
        among = [name for name in waiting if name in TOGETHER] if options.jobs > 1 and waiting[0] in TOGETHER else []
        now = among or waiting[:1]
        waiting = [name for name in waiting if name not in now]
        left, begun = end - time.monotonic(), time.monotonic()
        if left < LEAST_S:
            lines += [summary(name, [], 0.0, "no time left") for name in now]
            continue
        ended = run_sections(now, max(1, options.jobs if among else 1), left, profile, options)
        for name, (outcome, until) in ended.items():
            lines.append(summary(name, rows_of(options.out / f"{name}.jsonl"), until - begun, outcome))
            print(lines[-1]["text"], flush=True)
    print("\n".join(["", "section      rows  wrong  seconds  ended", *(line["text"] for line in lines)]))
    for line in lines:
        for row in line["wrong"][:20]:
            print(f"WRONG {json.dumps(row, ensure_ascii=False)}")
        if line["ended"] not in ENDED:
            print(f"{line['name']}: see {options.out / line['name']}*.log")
    return 1 if any(line["wrong"] or line["ended"] not in ENDED for line in lines) else 0


def run_sections(
    names: Sequence[str], jobs: int, seconds: float, profile: Path, options: argparse.Namespace
) -> dict[str, tuple[str, float]]:
    """Run sections beside each other, `jobs` processes in all; by name: how it ended, empty where well, and when.

    Each section has a share of the processes, and the cases of a section are dealt among its own.
    """
    shares = {name: jobs // len(names) + (number < jobs % len(names)) or 1 for number, name in enumerate(names)}
    running, ended, ends = {}, dict.fromkeys(names, ("", 0.0)), time.monotonic() + seconds
    for name in names:
        (options.out / f"{name}.jsonl").unlink(missing_ok=True)
    for name, number in [(each, number) for each in names for number in range(shares[each])]:
        command = [
            sys.executable, "-m", "benchmarks.first_light.section", name, str(options.out), str(seconds), str(profile),
            options.device, str(int(options.quick)), f"{number}/{shares[name]}",
        ]  # fmt: skip
        log = options.out / (f"{name}.log" if shares[name] == 1 else f"{name}.{number}.log")
        with log.open("wb") as file:
            environment = environment_of(name, options.device)
            running[name, number] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    while running:
        time.sleep(0.1)
        is_late = time.monotonic() > ends
        for (name, number), process in list(running.items()):
            if is_late:
                process.kill()
                process.wait()
            elif process.poll() is None:
                continue
            code = running.pop((name, number)).returncode
            said = "out of time" if is_late else "" if code == 0 else f"broke ({code})"
            ended[name] = ended[name][0] or said, time.monotonic()
    return ended


def environment_of(name: str, device: str) -> Mapping[str, str]:
    """The variables of a section's process."""
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if name in ("kernels", "candidates", "decode", "experts", "attention"):
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
