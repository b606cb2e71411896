"""Pipelines of stages that sleep: the simulator's steps beside real ones, and schedules' bubbles beside the papers'.

    python benchmarks/pipeline.py [--rounds 7] [--only 1f1b] [--trace trace.json] [--write]

Eight stages, on eight ranks or two a rank on four, gloo processes of this machine. A stage sleeps for a known time
where it would compute, so that ranks do not contend for cores; torch's schedule runtime runs the actions, and tensors
are sent. The jobs take turns, a step each; a step's time is that of the last rank to end.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch.distributed as dist
from ranks import launch, machine, progress, quartiles, table
from sleepers import NUMBERS, Gauge, Job, Overheads, Sleeper

from autopar.hardware import Link
from autopar.pipelining import schedules
from autopar.pipelining.actions import Schedule
from autopar.pipelining.costs import StageCost
from autopar.pipelining.simulate import Timeline, simulate
from autopar.pipelining.trace import Recorded, write

STAGES, MICROBATCHES = 8, 16
WARM_UP = 1
MS = 1e-3
FORMULAS = {
    "gpipe": "(p−1)(F+B)",
    "1f1b": "(p−1)(F+B)",
    "interleaved": "(p−1)(F+B)",
    "zero_bubble": "(p−1)(F+B−2W)",
    "zbv": "0",
    "dualpipev": "(p−1)(F+2B−3W)",
}
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
        text = f"F {self.forward:g}, I {self.first:g}, W {self.second:g} ms"
        return text if self.last == 1 else f"{text}, last stage × {self.last:g}"

    def costs(self) -> list[StageCost]:
        """Of all stages; each message is one that `sleepers` sends."""
        found = []
        for stage in range(STAGES):
            factor = MS * (self.last if stage == STAGES - 1 else 1.0)
            parts = (self.forward, self.first + self.second, self.first, self.second)
            found.append(StageCost(*(part * factor for part in parts), 4.0 * NUMBERS, 4.0 * NUMBERS, saved_bytes=1.0))
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
    if times is not HEAD or name in ("1f1b", "zbv", "zero_bubble")
]


def job_of(schedule: Schedule, times: Times) -> Job:
    order = [[str(action) for action in row] for row in schedule.order]
    return Job(order, list(schedule.rank_of), times.costs(), schedule.num_microbatches)


def measure(jobs: list[Job], rounds: int) -> dict[str, object]:
    """On this rank: for every job and round, when the step began and this rank ended; what the last step recorded."""
    rank = dist.get_rank()
    with suppress(OSError):  # what else runs on the machine is not to be measured
        os.nice(-10)
    sleepers = [Sleeper(job, rank) for job in jobs]
    gauge = Gauge()
    spans: list[list[tuple[float, float]]] = [[] for _ in jobs]
    for number in range(rounds + WARM_UP):
        gauge.take()
        for job, sleeper in enumerate(sleepers):
            dist.barrier()
            span = sleeper.step()
            if number >= WARM_UP:
                spans[job].append(span)
        progress(f"  round {number + 1} of {rounds + WARM_UP}")
    taken = [asdict(each) for each in gauge.taken[WARM_UP:]]
    late = [statistics.mean(sleeper.late) for sleeper in sleepers]
    return {"overheads": taken, "late": late, "spans": spans, "records": [sleeper.records for sleeper in sleepers]}


@dataclass(frozen=True)
class Measured:
    """One row: seconds of each round's step; the simulated step, with overheads and bare; the last round's record."""

    schedule: Schedule
    times: Times
    steps: list[float]
    timeline: Timeline
    bare: Timeline
    records: list[Recorded]

    def cells(self) -> list[str]:
        low, middle, high = quartiles(self.steps)
        predicted = self.timeline.makespan_s
        num_ranks, costs = self.schedule.num_ranks, self.times.costs()
        works = [
            sum(costs[stage].forward_s + costs[stage].backward_s for stage in self.schedule.stages_of(rank))
            for rank in range(num_ranks)
        ]
        ideal = max(works) * MICROBATCHES
        busy = sum(works) * MICROBATCHES / num_ranks
        formula = f"{100 * self.times.idle(self.schedule.name, num_ranks) / ideal:.1f}" if self.times.last == 1 else "–"
        bubble = [f"{100 * (seconds - ideal) / ideal:.1f}" for seconds in (self.bare.makespan_s, middle)]
        return [
            self.schedule.name,
            f"{num_ranks} × {self.schedule.num_stages // num_ranks}",
            str(self.times),
            f"{self.bare.makespan_s / MS:.1f}",
            f"{predicted / MS:.1f}",
            f"{middle / MS:.1f} ({low / MS:.1f}–{high / MS:.1f})",
            f"**{100 * (middle / predicted - 1):+.1f}%**",
            *bubble,
            formula,
            *(f"{100 * (1 - busy / seconds):.1f}" for seconds in (self.bare.makespan_s, middle)),
        ]


HEADER = [
    "schedule",
    "ranks × stages",
    "times of a stage",
    "simulated ms, bare",
    "simulated ms",
    "measured ms (quartiles)",
    "measured / simulated",
    "bubble, % of the work: bare",
    "measured",
    "published",
    "idle share, %: bare",
    "measured",
]


def run(rows: Sequence[tuple[str, int, Times]], rounds: int) -> tuple[list[Measured], list[str]]:
    """All rows, those of the same number of ranks in the same processes; and the overheads that were found."""
    found: dict[int, Measured] = {}
    notes = []
    for stages in sorted({stages for _, stages, _ in rows}):
        num_ranks = STAGES // stages
        own = [number for number, (_, each, _) in enumerate(rows) if each == stages]
        plans = [schedules.build(rows[number][0], num_ranks, MICROBATCHES, stages) for number in own]
        progress(f"{num_ranks} ranks: {', '.join(plan.name for plan in plans)}")
        jobs = [job_of(plan, rows[number][2]) for plan, number in zip(plans, own, strict=True)]
        ranks = launch(measure, jobs, rounds, ranks=num_ranks)
        overheads = _mean([each for rank in ranks for each in rank["overheads"]])
        late = statistics.mean(each for rank in ranks for each in rank["late"])
        notes.append(
            f"{num_ranks} ranks: {1e6 * overheads.message:.0f} µs a message, {1e6 * overheads.post:.0f} µs to post it, "
            f"{1e6 * overheads.launch:.0f} µs an action, {1e6 * late:.0f} µs that a sleep ended late"
        )
        for place, (number, plan) in enumerate(zip(own, plans, strict=True)):
            found[number] = _measured(plan, rows[number][2], ranks, place, overheads)
    return [found[number] for number in range(len(rows))], notes


def _mean(taken: list[dict[str, float]]) -> Overheads:
    return Overheads(**{name: statistics.mean(each[name] for each in taken) for name in taken[0]})


def _measured(plan: Schedule, times: Times, ranks: list[dict], place: int, overheads: Overheads) -> Measured:
    spans = [rank["spans"][place] for rank in ranks]
    steps = [max(end for _, end in ends) - min(start for start, _ in ends) for ends in zip(*spans, strict=True)]
    # Every action of the simulation takes what a post does; of a computation the rest is in its cost.
    late = statistics.mean(rank["late"][place] for rank in ranks) + overheads.launch - overheads.post
    costs = [
        replace(
            cost,
            forward_s=cost.forward_s + late,
            backward_s=cost.backward_s + late,
            input_s=cost.input_s + late,
            weight_s=cost.weight_s + late,
        )
        for cost in times.costs()
    ]
    timeline = simulate(plan, costs, Link(1e12, overheads.message), overheads.post)
    start = spans[0][-1][0]
    records = [
        Recorded(number, text, begin - start, end - start)
        for number, rank in enumerate(ranks)
        for text, begin, end in rank["records"][place]
    ]
    return Measured(plan, times, steps, timeline, simulate(plan, times.costs()), records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", help="a schedule's name; may be given several times")
    parser.add_argument("--trace", help="write the simulated and the last measured step of the first row, for Perfetto")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or row[0] in options.only]
    found, notes = run(rows, options.rounds)
    if options.trace:
        write(options.trace, {"predicted": found[0].timeline, "measured": found[0].records})
    body = table(HEADER, [row.cells() for row in found])
    page = f"# Pipelines, {date.today()}\n\n{machine('8 and 4')}.\n\n{_explained(options.rounds, notes)}\n\n{body}\n"
    print(page)
    if options.write:
        Path(__file__).parent.joinpath("results", f"pipeline-{date.today()}.md").write_text(page)


def _explained(rounds: int, notes: Sequence[str]) -> str:
    formulas = "; ".join(f"{name} {formula}" for name, formula in FORMULAS.items())
    return (
        f"`python benchmarks/pipeline.py`. {STAGES} stages, {MICROBATCHES} microbatches, a gloo process a rank. Stages "
        "sleep in place of computing, so that ranks do not contend for cores; torch's schedule runtime runs the "
        f"actions, and messages of {4 * NUMBERS} bytes are sent. Measured: median over {rounds} rounds, quartiles, of "
        "the time from a start that the ranks agree on until the last has ended. Bare: simulated with the times asked "
        "for and messages that take no time. Simulated: with overheads that were measured in the same processes, of "
        "messages and actions between the steps, and with sleeps as much longer than asked for as they were in the "
        f"mean ({'; '.join(notes)}). Bubble: what a step takes beyond the work of its busiest rank, as a share of it. "
        f"Published: {formulas}, over "
        "v m (F + B); of equal stages and messages that take no time."
    )


if __name__ == "__main__":
    main()
