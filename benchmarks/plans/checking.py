"""What the checker adds to a plan: CPU seconds of a first plan, of them those that check its program.

    python benchmarks/plans/checking.py [--repeat 7] [--only gpt2] [--write]

A process per case imports, builds the model on meta, and forks once for every plan, so that each is the first of its
process and imports count for nothing. What is counted as the checker's: the terms of the plan's graphs (`meaning_of`),
and reading the program's text again (`check_types`), both of the same run as the rest, so that what else the machine
does weighs on both. --write adds a dated file under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pages

Measured = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is planned. tiny: the small configuration of the model. strategy: `auto`, or one of each axis."""

    model: str
    mesh: str
    strategy: str
    batch: str = ""
    tiny: bool = False

    def __str__(self) -> str:
        return f"{self.model}{' (tiny)' if self.tiny else ''} {self.mesh} {self.strategy}"


CASES = [
    Case("mlp", "dp=2", "ddp"),
    Case("llama", "dp=2", "ddp", tiny=True),
    Case("llama", "dp=2,tp=2", "dp=zero3,tp=tensor", tiny=True),
    Case("gpt2", "dp=2", "ddp", tiny=True),
    Case("bert", "dp=2,tp=2", "dp=zero3,tp=tensor", tiny=True),
    Case("t5", "dp=2", "zero3", tiny=True),
    Case("resnet", "dp=2", "ddp", tiny=True),
    Case("whisper", "dp=2,tp=2", "dp=ddp,tp=tensor", tiny=True),
    Case("gpt2", "dp=8", "ddp", "64x1024"),
    Case("gpt2", "dp=8", "zero3", "64x1024"),
    Case("bert-large", "tp=8", "tensor", "256x512"),
    Case("llama-3.1-8b", "dp=8", "zero3", "64x8192"),
    Case("llama-3.1-8b", "dp=8,tp=8", "dp=zero3,tp=tensor", "64x8192"),
    Case("llama-3.1-8b", "pp=4,dp=8", "pp=pipeline,dp=zero2", "64x8192"),
    Case("llama-3.1-8b", "pp=4,dp=8,tp=8", "auto", "256x8192"),
    Case("llama-3.1-8b", "dp=32,tp=8", "auto", "64x8192"),
    Case("resnet-50", "dp=8", "ddp", "64x3"),
    Case("whisper-small", "dp=8", "zero3"),
]


def measure(case: Case, repeat: int) -> list[Measured]:
    """Of each of some first plans: the CPU seconds of all, of the terms, and of reading the text."""
    import autopar.api.planning  # noqa: F401
    from autopar.cli.models import catalogue

    rows, _, tokens = case.batch.partition("x")
    loaded = catalogue.load(case.model, tiny=case.tiny, batch=(int(rows), int(tokens)) if case.batch else None)
    _warm_up()
    return [_forked(lambda: _planned(case, loaded)) for _ in range(repeat)]


def _warm_up() -> None:
    """What torch itself loads late: a trace, a meta kernel."""
    import torch

    with torch.device("meta"):
        model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
    torch.export.export(model, (x,), strict=False)


def _planned(case: Case, loaded: Any) -> Measured:
    import autopar
    from autopar.api import planning

    spent = {"terms": 0.0, "text": 0.0}

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - begun

        return run

    planning.meaning_of, planning.check_types = timed("terms", planning.meaning_of), timed("text", planning.check_types)
    axes = [axis.partition("=") for axis in case.mesh.split(",")]
    mesh = autopar.Mesh({name: int(size) for name, _, size in axes}, hardware="h100")
    pairs = [each.partition("=") for each in case.strategy.split(",")]
    strategy = {name: word for name, _, word in pairs} if pairs[0][1] else case.strategy
    begun = time.process_time()
    autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, memory_limit=1e14)
    return {"all": time.process_time() - begun, **spent}


def _forked(run: Any) -> Measured:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            os.write(write, json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return dict(json.loads(text))


def _row(case: Case, runs: Sequence[Measured]) -> list[str]:
    def spread(values: Sequence[float], form: str) -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"

    plain = [run["all"] - run["terms"] - run["text"] for run in runs]
    shares = [100 * (run["terms"] + run["text"]) / rest for run, rest in zip(runs, plain, strict=True)]
    return [
        str(case), spread(plain, ".2f"), f"{statistics.median(run['terms'] for run in runs):.3f}",
        f"{statistics.median(run['text'] for run in runs):.3f}", spread(shares, ".1f"),
    ]  # fmt: skip


HEADS = ("plan", "CPU s without the checker", "terms, CPU s", "text, CPU s", "added, %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="plans of each case")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)), options.repeat)))
        return
    rows = []
    for case in CASES:
        if options.only not in str(case):
            continue
        given = ["--case", json.dumps(asdict(case)), "--repeat", str(options.repeat)]
        done = subprocess.run([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(_row(case, json.loads(done.stdout.splitlines()[-1])))
        print(" | ".join(rows[-1]), flush=True)
    if options.write:
        head = (
            f"# What the checker adds to a plan\n\n{pages.machine()}; medians (range) of {options.repeat} first plans"
        )
        what = "each forked from a process that has imported and built the model. Added: of a plan without the checker."
        pages.write(
            "checking", f"{head}, {what}\n\n{pages.table(HEADS, rows)}\n\nWritten by `benchmarks/plans/checking.py`.\n"
        )


if __name__ == "__main__":
    main()
