"""Tokens of `generate()`: autopar beside transformers' own loop, plain and compiled, and on two ranks beside
DTensor and transformers' own tensor parallelism.

    python benchmarks/generate.py [--ranks 1|2] [--size small|tiny|1b] [--tokens 32] [--rounds 5] [--only NAME]
                                  [--write]

Contenders take turns, a whole generation each, the order turned from round to round. Before anything is timed their
greedy tokens are compared. Time to the first token, and the median over tokens of the time between two; CPU seconds of
the process (all threads) likewise. `tiny` computes next to nothing: what is left is the work of the host a token.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.pop(1)  # this folder, whose `coverage` is nobody's package of that name

from benchmarks import pages
from benchmarks.serving.contenders import BUILT
from benchmarks.serving.tokens import SIZES, measure
from benchmarks.training.ranks import launch, machine, progress, quartiles

HEADER = [
    "contender", "first token, ms", "a token, ms", "by the first row (quartiles of rounds)", "CPU ms a token",
    "by the first row", "tokens",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--size", default="small", choices=tuple(SIZES))
    parser.add_argument("--tokens", type=int, default=32, help="new tokens a call (default %(default)d)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="a contender by its name; may be given several times")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    names = [name for name, built in BUILT.items() if options.ranks in built.ranks]
    names = [name for name in names if not options.only or name in options.only]
    found = launch(measure, options.size, names, options.tokens, options.rounds, ranks=options.ranks)
    rows, first = [], None
    for number, name in enumerate(names):
        mine = [rank[number] for rank in found]
        if mine[0].get("error"):
            rows.append([name, "—", "—", "—", "—", "—", mine[0]["error"]])
            continue
        walls = [max(each) for each in zip(*(rank["token_s"] for rank in mine), strict=True)]
        cpus = [sum(each) for each in zip(*(rank["token_cpu_s"] for rank in mine), strict=True)]
        first = first or (walls, cpus)
        ratios = []
        for own, others in zip((walls, cpus), first, strict=True):
            low, middle, high = quartiles([a / b for a, b in zip(own, others, strict=True)])
            ratios.append(f"**{middle:.2f}** ({low:.2f}–{high:.2f})")
        begun = 1e3 * quartiles([max(each) for each in zip(*(rank["first_s"] for rank in mine), strict=True)])[1]
        wall, cpu = (1e3 * quartiles(own)[1] for own in (walls, cpus))
        same = "the same" if mine[0]["same"] == 1 else f"{mine[0]['same']:.0%} the same"
        rows.append([name, f"{begun:.1f}", f"{wall:.2f}", ratios[0], f"{cpu:.2f}", ratios[1], same])
        progress(f"{name}: {wall:.2f} ms a token, by the first {ratios[0]}")
    said = f"{SIZES[options.size].text}; {options.tokens} new tokens, {options.ranks} rank{'s'[: options.ranks - 1]}"
    page = (
        f"# Tokens of generate(), {options.size} on {options.ranks}, {date.today()}\n\n{machine()}.\n\n"
        f"`python benchmarks/generate.py --size {options.size} --ranks {options.ranks} --tokens {options.tokens}`. "
        f"{said}. Greedy. Medians of {options.rounds} rounds in turn; ratios within a round. Of two ranks the slower "
        f"one's time, and the CPU time of both.\n\n{pages.table(HEADER, rows)}\n"
    )
    print(page)
    if options.write:
        pages.write(f"generate-{options.size}-{options.ranks}", page)


if __name__ == "__main__":
    main()
