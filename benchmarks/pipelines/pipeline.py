"""Pipelines of stages that sleep: the simulator's steps beside real ones, bubbles beside the papers', equal memory.

    python benchmarks/pipelines/pipeline.py [--rounds 5] [--part bubbles] [--trace trace.json] [--write]

Gloo processes of this machine, whose stages sleep for a known time where they would compute, so that ranks do not
contend for cores; torch's schedule runtime runs the actions, and tensors are sent. The jobs take turns, a step each; a
step's time is that of the last rank to end.

bubbles: eight stages, on eight ranks or two a rank on four. memory: for limits on memory, the schedule that autopar
picks beside the best of PyTorch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.ir.schedule import Schedule
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.greedy import greedy, there_and_back
from autopar.strategies.pipelining.simulate import Timeline, simulate
from autopar.strategies.pipelining.trace import write
from benchmarks import pages
from benchmarks.pipelines.sleepers import NUMBERS, Measured, Overheads, run
from benchmarks.training.ranks import machine, quartiles

STAGES, MICROBATCHES = 8, 16
MS = 1e-3
FORMULAS = {
    "gpipe": "(p−1)(F+B)", "1f1b": "(p−1)(F+B)", "interleaved": "(p−1)(F+B)", "zero_bubble": "(p−1)(F+B−2W)",
    "zbv": "0", "dualpipev": "(p−1)(F+2B−3W)",
}  # fmt: skip
"""Idle seconds of a step: of the work of a rank, v m (F + B), they are the published shares (p−1)/m, (p−1)/(v m), ….

zero_bubble: ZB-H1's; zbv: where F = I = W; dualpipev: where F and B beside each other take as long as one after the
other (github.com/deepseek-ai/DualPipe). F, B, W are of one stage.
"""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of a stage's F, I and W; B takes I + W. last: factor of the last stage (a head)."""

    forward: float
    first: float
    second: float
    last: float = 1.0

    def __str__(self) -> str:
        text = f"{self.forward:g}, {self.first:g}, {self.second:g}"
        return text if self.last == 1 else f"{text}; last × {self.last:g}"

    def costs(self) -> list[StageCost]:
        """Of all stages; each message is one that `sleepers` sends."""
        found = []
        for stage in range(STAGES):
            factor = MS * (self.last if stage == STAGES - 1 else 1.0)
            parts = (self.forward, self.first + self.second, self.first, self.second)
            found.append(StageCost(*(part * factor for part in parts), 4.0 * NUMBERS, 4.0 * NUMBERS))
        return found

    def idle(self, name: str, num_ranks: int) -> float:
        """The seconds that `FORMULAS` gives, of equal stages."""
        forward, backward, second = self.forward * MS, (self.first + self.second) * MS, self.second * MS
        factor = {
            "zero_bubble": forward + backward - 2 * second,
            "zbv": 0.0,
            "dualpipev": forward + 2 * backward - 3 * second,
        }.get(name, forward + backward)
        return (num_ranks - 1) * factor


EVEN, UNEVEN, HEAD = Times(16, 16, 16), Times(16, 20, 12), Times(16, 16, 16, last=1.5)
ROWS = [
    (name, stages, times)
    for times in (EVEN, UNEVEN, HEAD)
    for name, stages in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("zero_bubble", 1),
        ("interleaved", 2),
        ("zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    )
    if times is EVEN or name in ("1f1b", "zbv") or (name, stages) == ("zero_bubble", 1)
]
BUBBLES = [
    "schedule", "ranks × stages", "F, I, W ms of a stage", "simulated ms, bare", "simulated ms",
    "measured ms (quartiles)", "measured / simulated", "bubble, % of the work: bare", "measured", "published",
    "idle share, %: bare", "measured",
]  # fmt: skip


def bubbles(rounds: int) -> tuple[str, Measured]:
    """The first table, and the job of its first row."""
    found: dict[int, Measured] = {}
    notes = []
    for stages in (1, 2):
        own = [number for number, row in enumerate(ROWS) if row[1] == stages]
        names = [ROWS[number][0] for number in own]
        plans = [schedules.build(name, STAGES // stages, MICROBATCHES, stages) for name in names]
        costs = [ROWS[number][2].costs() for number in own]
        measured, overheads, _ = run(list(zip(plans, costs, strict=True)), rounds)
        found |= dict(zip(own, measured, strict=True))
        notes.append(f"{STAGES // stages} ranks: {overheads}")
    rows = [bubble_row(ROWS[number][2], found[number]) for number in range(len(ROWS))]
    formulas = "; ".join(f"{name} {formula}" for name, formula in FORMULAS.items())
    text = (
        f"{STAGES} stages, {MICROBATCHES} microbatches. Bubble: what a step takes beyond the work of its busiest rank, "
        f"as a share of it. Published: {formulas}, over v m (F + B), of equal stages and messages that take no time. A "
        "step of its own never loses less than the (p−1) F by which the last rank starts later; ZB-V's zero leaves "
        f"them out. Overheads: {'; '.join(notes)}."
    )
    return f"## Bubbles\n\n{text}\n\n{pages.table(BUBBLES, rows)}\n", found[0]


def bubble_row(times: Times, measured: Measured) -> list[str]:
    schedule, costs = measured.timeline.schedule, times.costs()
    low, middle, high = quartiles(measured.steps)
    bare, predicted = measured.bare.makespan_s, measured.timeline.makespan_s
    num_ranks = schedule.num_ranks
    works = [
        sum(costs[stage].forward_s + costs[stage].backward_s for stage in schedule.stages_of(rank)) * MICROBATCHES
        for rank in range(num_ranks)
    ]
    ideal, busy = max(works), sum(works) / num_ranks
    return [
        schedule.name, f"{num_ranks} × {schedule.num_stages // num_ranks}", str(times), f"{bare / MS:.1f}",
        f"{predicted / MS:.1f}", f"{middle / MS:.1f} ({low / MS:.1f}–{high / MS:.1f})",
        f"**{100 * (middle / predicted - 1):+.1f}%**",
        *(f"{100 * (seconds - ideal) / ideal:.1f}" for seconds in (bare, middle)),
        f"{100 * times.idle(schedule.name, num_ranks) / ideal:.1f}" if times.last == 1 else "–",
        *(f"{100 * (1 - busy / seconds):.1f}" for seconds in (bare, middle)),
    ]  # fmt: skip


LAYERS, RANKS = 16, 4
DEFAULTS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2)]
DEFAULTS += [("dualpipev", 2)]
LIMITS = [(head, limit) for head in (0.0, 2.0) for limit in (0.75, 1.0, 1.25)]
MEMORY = [
    "head, layers", "memory of a rank", "best of PyTorch's", "simulated ms", "measured ms (quartiles)", "autopar's",
    "simulated ms", "measured ms (quartiles)", "peak of both", "step: autopar's / PyTorch's, simulated", "measured",
]  # fmt: skip


def layered(rank_of: Sequence[int], head: float) -> list[StageCost]:
    """Layers cut evenly, F = I = W = 8 ms, each of which saves 1; I frees a half of it and keeps a quarter."""
    layers = LAYERS / len(rank_of)
    counts = [layers] * (len(rank_of) - 1) + [layers + head]
    seconds = [8 * MS * count for count in counts]
    message = 4.0 * NUMBERS
    return [
        StageCost(each, 2 * each, each, each, message, message, saved_bytes=n, input_bytes=n / 2, kept_bytes=n / 4)
        for each, n in zip(seconds, counts, strict=True)
    ]


def equal_memory(rounds: int) -> str:
    """The second table. A limit of 1 is what 1f1b needs without a head."""
    plain = schedules.build("1f1b", RANKS, MICROBATCHES)
    _, _, known = run([(plain, layered(plain.rank_of, 0.0))] * 2, 6)
    pairs = [choose(head, limit, known) for head, limit in LIMITS]
    jobs = [
        (step.schedule, layered(step.schedule.rank_of, head))
        for (head, _), pair in zip(LIMITS, pairs)
        for step in pair
        if step
    ]
    measured, overheads, _ = run(jobs, rounds)
    results = iter(measured)
    rows = []
    for (head, limit), (theirs, ours) in zip(LIMITS, pairs, strict=True):
        found = [None if step is None else next(results) for step in (theirs, ours)]
        rows.append([f"{head:g}", f"{limit:g}", *memory_cells(theirs, ours, found)])
    text = (
        f"{LAYERS} layers cut evenly over {RANKS} ranks, {MICROBATCHES} microbatches; a layer's F, I and W take 8 ms "
        "each and it saves 1, of which I frees a half and keeps a quarter; a head on the last stage counts as so many "
        "layers. Memory: a limit of 1 is what 1f1b saves without a head. PyTorch's: the best by simulation of "
        f"{', '.join(f'{name} × {stages}' for name, stages in DEFAULTS)} that fits, of which 1f1b is our order. "
        "autopar's: the best of the known schedules and its own greedy one. Both are "
        f"chosen, and simulated here, with overheads measured before, trimmed means: {known}. Measured: {overheads}. "
        "Where both are the same schedule, it ran twice: the measured ratio is the noise."
    )
    return f"## At equal memory\n\n{text}\n\n{pages.table(MEMORY, rows)}\n"


def choose(head: float, limit: float, known: Overheads) -> tuple[Timeline | None, Timeline]:
    """The shortest of PyTorch's schedules that fits, and autopar's choice; of machines with these overheads."""

    def costs_of(rank_of: Sequence[int]) -> list[StageCost]:
        return known.costs(layered(rank_of, head))

    def best(tried: Sequence[Schedule]) -> Timeline | None:
        steps = [simulate(schedule, costs_of(schedule.rank_of), known.link(), known.post) for schedule in tried]
        fitting = [step for step in steps if max(step.peak_bytes) <= room]
        return min(fitting, key=lambda step: step.makespan_s, default=None)

    room, link = limit * LAYERS, known.link()
    ours = [
        schedules.build(each.name, RANKS, MICROBATCHES, each.stages_per_rank)
        for each in schedules.candidates(RANKS, MICROBATCHES, LAYERS)
    ]
    for rank_of in (tuple(range(RANKS)), there_and_back(RANKS)):
        ours.append(greedy(rank_of, MICROBATCHES, costs_of(rank_of), room, link))
    chosen = best(ours)
    assert chosen is not None
    return best([schedules.build(name, RANKS, MICROBATCHES, stages) for name, stages in DEFAULTS]), chosen


def memory_cells(theirs: Timeline | None, ours: Timeline, found: Sequence[Measured | None]) -> list[str]:
    cells, middles, peaks = [], [], []
    for step, measured in zip((theirs, ours), found, strict=True):
        if step is None or measured is None:
            cells += ["none fits", "–", "–"]
            peaks.append("–")
            continue
        low, middle, high = quartiles(measured.steps)
        middles.append(middle)
        peaks.append(f"{max(step.peak_bytes) / LAYERS:.2f}")
        cells += [name_of(step.schedule), f"{step.makespan_s / MS:.1f}"]
        cells += [f"{middle / MS:.1f} ({low / MS:.1f}–{high / MS:.1f})"]
    if theirs is None:
        return [*cells, ", ".join(peaks), "–", "–"]
    ratios = (ours.makespan_s / theirs.makespan_s, middles[1] / middles[0])
    return [*cells, ", ".join(peaks), *(f"**{ratio:.3f}**" for ratio in ratios)]


def name_of(schedule: Schedule) -> str:
    return f"{schedule.name} × {schedule.num_stages // schedule.num_ranks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["bubbles", "memory"], help="one table only")
    parser.add_argument("--trace", help="write the first row's step, simulated and measured, for ui.perfetto.dev")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    path = pages.RESULTS / f"pipeline-{date.today()}.md"
    tables: dict[str, str] = {}
    if options.part and options.write and path.exists():  # the other part stays
        for each in path.read_text().split("\n## ")[1:]:
            tables[each.splitlines()[0]] = f"## {each.rstrip()}\n"
    if options.part != "memory":
        tables["Bubbles"], first = bubbles(options.rounds)
        if options.trace:
            write(options.trace, {"predicted": first.timeline, "measured": first.records})
    if options.part != "bubbles":
        tables["At equal memory"] = equal_memory(options.rounds)
    head = f"# Pipelines, {date.today()}\n\n{machine('8 and 4')}.\n\n{_explained(options.rounds)}\n"
    page = "\n".join([head, *(tables[name] for name in sorted(tables, reverse=True))])
    print(page)
    if options.write:
        path.write_text(page)


def _explained(rounds: int) -> str:
    return (
        "`python benchmarks/pipelines/pipeline.py`. A gloo process a rank. Stages sleep in place of computing, so that "
        "ranks do not contend for cores; torch's schedule runtime runs the actions, and messages of "
        f"{4 * NUMBERS} bytes are sent. Measured: median over {rounds} rounds, quartiles, of the time from a start "
        "that the ranks agree on until the last has ended. Bare: simulated with the times asked for and messages that "
        "take no time. Simulated: with overheads that were measured in the same processes, of messages and actions "
        "between the steps, and with sleeps as much longer than asked for as they were in the mean of each job."
    )


if __name__ == "__main__":
    main()
