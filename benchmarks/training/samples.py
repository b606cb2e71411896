"""What it costs to look at what ranks hold alike, and at who writes into weights: a step with it beside one without.

    python benchmarks/training/samples.py [--rounds 30] [--only gpt2:ddp] [--write]

Two ranks with one thread each. One compiled model does both kinds of steps in turn, the order turned from round to
round; CPU seconds of both processes, and their ratio within a round. The third number needs no difference of two steps:
CPU seconds of the calls themselves, within the steps that have them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

from benchmarks import pages
from benchmarks.training.peers import load, ours
from benchmarks.training.ranks import launch, progress, quartiles

ROWS = [("gpt2", "ddp"), ("gpt2", "zero3"), ("llama", "ddp"), ("llama", "tensor")]
WARM_UP = 2
HEADER = [
    "model",
    "strategy",
    "parameters",
    "step, CPU ms",
    "with / without (quartiles)",
    "the calls, CPU ms",
    "of a step",
]


@dataclass
class Measured:
    """Of one rank: CPU seconds of each step without and with, and of the calls in each of the latter."""

    parameters: int
    without: list[float] = field(default_factory=list)
    looking: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


def measure(model: str, strategy: str, rounds: int) -> dict[str, Any]:
    """One row on this rank."""
    from autopar.runtime.edits import Edits

    module, batch = load(model, True)
    contender: Any = ours(strategy, module, batch)
    contender.step(batch)
    agreement = contender.model.autopar.agreement
    alike, edits, spent = agreement.alike, agreement.writes, [0.0]
    for of, name in ((alike, "numbers"), (edits, "note"), (edits, "accept"), (edits, "taken")):
        setattr(of, name, _timed(getattr(of, name), spent))
    found = Measured(len(list(contender.model.parameters())))
    for number in range(rounds + WARM_UP):
        for looks in (number % 2 == 0, number % 2 == 1):
            agreement.alike, agreement.writes = (alike, edits) if looks else (None, Edits({}))
            edits.accept()
            dist.barrier()
            spent[0], begun = 0.0, time.process_time()
            contender.step(batch)
            taken = time.process_time() - begun
            if number >= WARM_UP:
                (found.looking if looks else found.without).append(taken)
                found.calls += [spent[0]] if looks else []
    return asdict(found)


def _timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The same; what is inside a call that is counted is not counted again."""

    def run(*args: Any) -> Any:
        begun, before = time.process_time(), spent[0]
        try:
            return call(*args)
        finally:
            spent[0] = before + time.process_time() - begun

    return run


def row(model: str, strategy: str, ranks: list[dict[str, Any]]) -> list[str]:
    """The cells of one row; times are those of both processes."""
    own = [Measured(**each) for each in ranks]
    without, looking, calls = (
        [sum(times) for times in zip(*(getattr(each, what) for each in own), strict=True)]
        for what in ("without", "looking", "calls")
    )
    low, middle, high = quartiles([b / a for a, b in zip(without, looking, strict=True)])
    step, called = quartiles(without)[1], quartiles(calls)[1]
    ratio = f"{middle:.3f} ({low:.3f}-{high:.3f})"
    cells = [str(own[0].parameters), f"{1e3 * step:.1f}", ratio, f"{1e3 * called:.3f}", f"{100 * called / step:.2f}%"]
    return [model, strategy, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", action="append", help="MODEL:STRATEGY; may be given several times")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    rows = []
    for model, strategy in ROWS:
        if not options.only or f"{model}:{strategy}" in options.only:
            rows.append(row(model, strategy, launch(measure, model, strategy, options.rounds)))
            progress(" | ".join(rows[-1]))
    head = f"# What ranks hold alike, looked at in each step\n\n{pages.machine()}; {options.rounds} rounds."
    what = "Two layers of each model, two ranks. " + (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    page = f"{head} {what}\n\n{pages.table(HEADER, rows)}\n\nWritten by `benchmarks/training/samples.py`.\n"
    print(page)
    if options.write:
        pages.write("samples", page)


if __name__ == "__main__":
    main()
