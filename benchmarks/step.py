"""One training step (forward, backward, AdamW): autopar beside PyTorch's own parallelisms, in the same processes.

    python benchmarks/step.py [--rounds 15] [--only llama:zero3] [--quick] [--write]

Two ranks with one thread each under gloo, or NCCL where there are GPUs. Every row trains its contenders in turn, a step
each, the order turned from round to round; what counts is the ratio within a round, since the machine's speed changes.
Before anything is timed, the losses of three steps must agree. Peak memory: bytes of live
storages over one step on rank 0 (on CUDA the allocator's).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.pop(1)  # this folder, whose `coverage` is nobody's package of that name

import torch
import torch.distributed as dist

from benchmarks import pages
from benchmarks.training.count import CollectiveCounter
from benchmarks.training.peers import PEERS, SIZES, Batch, Contender, load, ours
from benchmarks.training.ranks import MIB, launch, machine, peak_bytes, progress, quartiles, synchronize

ROWS = [
    ("llama", "ddp"), ("llama", "zero3"), ("llama", "zero3+keep"), ("llama", "tensor"), ("llama", "tensor+sequence"),
    ("gpt2", "ddp"), ("gpt2", "zero3"), ("gpt2, dropout", "ddp"),
]  # fmt: skip
WARM_UP = 2
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender on this rank: wall and CPU seconds of every round's step; bytes of one step."""

    name: str
    seconds: list[float]
    cpu_seconds: list[float]
    peak_bytes: int
    sent_bytes: float


def measure(model: str, strategy: str, rounds: int, quick: bool, profiled: bool) -> list[dict[str, object]]:
    """One row on this rank: the peer first, then autopar."""
    contenders: list[Contender] = []
    for build in (PEERS[strategy], lambda module, batch: ours(strategy, module, batch)):
        module, batch = load(model, quick)
        contenders.append(build(module, batch))
    check_losses(contenders, batch, model)
    batches = [contender.local(batch) for contender in contenders]
    sent, peaks = [], []
    for contender, own in zip(contenders, batches, strict=True):
        with CollectiveCounter() as counter:
            contender.step(own)
        sent.append(counter.total_bytes())
        peaks.append(peak_of(contender, own))
    if profiled:
        for contender, own in zip(contenders, batches, strict=True):
            profile(contender, own)
    seconds, cpu = take_turns(contenders, batches, rounds)
    columns = zip(contenders, seconds, cpu, peaks, sent, strict=True)
    return [asdict(Measured(each.name, wall, own, peak, total)) for each, wall, own, peak, total in columns]


def check_losses(contenders: list[Contender], batch: Batch, model: str) -> None:
    """Raises SystemExit where contenders do not compute the same."""
    losses = [[contender.loss(batch) for _ in range(3)] for contender in contenders]
    # Dropout draws other numbers in each; there the losses are only of one size.
    tolerance = 0.02 if "dropout" in model else LOSS_TOLERANCE
    for contender, own in zip(contenders, losses, strict=True):
        if any(abs(a - b) > tolerance * abs(a) for a, b in zip(losses[0], own, strict=True)):
            raise SystemExit(f"{model}: losses of {contender.name} {own}, of {contenders[0].name} {losses[0]}")
    progress(f"  losses agree: {', '.join(f'{loss:.6f}' for loss in losses[0])}")


Times = list[list[float]]


def take_turns(contenders: list[Contender], batches: list[Batch], rounds: int) -> tuple[Times, Times]:
    """Wall and CPU seconds of each contender's steps, in order of rounds; the warm-up left out.

    CPU seconds are those of the whole process, so also of the threads that communicate; they do not count waiting.
    """
    seconds: Times = [[] for _ in contenders]
    cpu: Times = [[] for _ in contenders]
    gc.collect()
    gc.freeze()
    for number in range(rounds + WARM_UP):
        for turn in range(len(contenders)):
            which = (number + turn) % len(contenders)
            synchronize()
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            contenders[which].step(batches[which])
            synchronize()
            if number >= WARM_UP:
                seconds[which].append(time.perf_counter() - start)
                cpu[which].append(time.process_time() - cpu_start)
    return seconds, cpu


def peak_of(contender: Contender, batch: Batch) -> int:
    """The peak of one step, everything in it."""
    return peak_bytes(lambda: contender.step(batch), [*contender.tensors(), *batch.values()])[0]


def profile(contender: Contender, batch: Batch) -> None:
    """Print where a few steps of one contender spend their time, on rank 0."""
    with torch.profiler.profile() as found:
        for _ in range(3):
            dist.barrier()
            contender.step(batch)
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    progress(f"--- {contender.name}\n{found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=50)}")


def row(model: str, strategy: str, ranks: list[list[dict[str, object]]]) -> tuple[list[str], str]:
    """The cells of one row. A step's time is the slowest rank's, its CPU time that of both."""
    own = [[Measured(**each) for each in rank] for rank in ranks]  # type: ignore[arg-type]
    walls, cpus = (
        [[combine(times) for times in zip(*(getattr(rank[i], what) for rank in own), strict=True)] for i in range(2)]
        for combine, what in ((max, "seconds"), (sum, "cpu_seconds"))
    )
    ratios = []
    for peer, mine in (walls, cpus):
        low, middle, high = quartiles([b / a for a, b in zip(peer, mine, strict=True)])
        ratios.append(f"**{middle:.3f}** ({low:.3f}–{high:.3f})")
    first = own[0]
    cells = [model, strategy, first[0].name, *(f"{1e3 * quartiles(times)[1]:.0f}" for times in walls), *ratios]
    cells += [f"{each.peak_bytes / MIB:.0f}" for each in first] + [f"{each.sent_bytes / MIB:.2f}" for each in first]
    return cells, f"{first[0].name} {cells[3]} ms, autopar {cells[4]} ms, ratios: wall {ratios[0]}, CPU {ratios[1]}"


HEADER = [
    "model", "strategy", "peer", "peer ms", "autopar ms", "wall: autopar / peer (quartiles)", "CPU time: the same",
    "peer peak MiB", "autopar peak MiB", "peer sent MiB", "autopar sent MiB",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", help="MODEL, or MODEL:STRATEGY; may be given several times")
    parser.add_argument("--quick", action="store_true", help="two layers, three rounds: whether it runs")
    parser.add_argument("--profile", action="store_true", help="print where each contender's time goes, on rank 0")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    rows = []
    for model, strategy in ROWS:
        if options.only and not {model, f"{model}:{strategy}"} & set(options.only):
            continue
        progress(f"{model} {strategy}")
        cells, text = row(model, strategy, launch(measure, model, strategy, rounds, options.quick, options.profile))
        progress(f"  {text}")
        rows.append(cells)
    page = (
        f"# One training step, {date.today()}\n\n{machine()}.\n\n{_explained(rounds)}\n\n{pages.table(HEADER, rows)}\n"
    )
    print(page)
    if options.write:
        pages.write("step", page)


def _explained(rounds: int) -> str:
    sizes = "; ".join(f"{name}: {SIZES[name][3]}, global batch {SIZES[name][1]}" for name in ("llama", "gpt2"))
    return (
        f"`python benchmarks/step.py`. Forward, backward, AdamW in float32; {sizes}. Milliseconds are medians of "
        f"{rounds} rounds, ratios medians over rounds of autopar's step by the peer's next to it, with quartiles: "
        "under 1 is faster. CPU time is that of both processes, all threads: what a step costs on shared cores. "
        "Losses of three steps agreed to 1e-4 (with dropout: 2e-2) before. Peak: bytes of live storages, one step, "
        "rank 0. A peer's DDP buckets count from their first use in the step on."
    )


if __name__ == "__main__":
    main()
