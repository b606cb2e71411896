"""Attention kernels: autopar's beside PyTorch's flash, cuDNN and FlexAttention and a plain Triton one, in one run.

    python benchmarks/attention/speed.py [--quick] [--head-dims 64,128] [--lengths 1024,...] [--rounds 30] [--write]
    TRITON_INTERPRET=1 python benchmarks/attention/speed.py --check      (no GPU: tiny sizes, correctness alone)

bfloat16, head dim 64 and 128, causal and full, forward and backward, 1k to 16k tokens a sequence and 16k in all, 2048
elements a token over all heads, as in the FlashAttention papers. What each contender computes is compared with float64
first; one that is wrong or cannot run is not timed, and named. Then all are timed in turn, once a round, the order
turned from round to round, the L2 cache overwritten before each, the device asleep while the host launches. Medians and
quartiles of TFLOP/s. Exit code: 0; 1 where autopar's kernels are wrong or fail; 2 without a CUDA device, and for bad
arguments.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from autopar.base.torch_compat.devices import sleep_on
from autopar.cost.calibration.timing import launching_s
from benchmarks import pages
from benchmarks.attention.contenders import INTERPRETED, ON_CUDA, OURS, Case, Contender, Prepared, reference

TOKENS, WIDTH = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Of the largest difference from float64, relative to the largest number: a few roundings of the dtype."""
FLUSHED_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One case and direction: milliseconds of every round by contender; why those that are missing are."""

    case: Case
    backward: bool
    milliseconds: Mapping[str, Sequence[float]]
    missing: Mapping[str, str]


def errors(case: Case, prepared: Prepared, tensors: Sequence[Tensor]) -> dict[str, float]:
    """The largest relative difference from float64 of each result, at the first and the last head."""
    found: dict[str, float] = {}
    results = {"out": prepared.forward()}
    if prepared.backward is not None:
        results |= dict(zip(("dq", "dk", "dv"), prepared.backward()))
    for row, head in ((0, 0), (case.batch - 1, case.heads - 1)):
        expected = dict(zip(("out", "dq", "dk", "dv"), reference(case, *(x[row, head] for x in tensors))))
        for name, result in results.items():
            # A difference that is not a number is the largest.
            difference = (result[row, head].double() - expected[name]).abs().max() / expected[name].abs().max()
            error = float(difference)
            found[name] = max(found.get(name, 0.0), error if error == error else float("inf"))
    return found


def prepare(
    case: Case, contenders: Mapping[str, Contender], tensors: Sequence[Tensor]
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Those that run and are right, and why the others are not among them."""
    ready: dict[str, Prepared] = {}
    missing: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            prepared = contender(case, *tensors)
            found = errors(case, prepared, tensors)
        except Exception as error:  # of any library that is compared: the others are still timed
            missing[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        wrong = {each: value for each, value in found.items() if not value <= TOLERANCES[case.dtype]}
        shown = ", ".join(f"{each} {value:.1e}" for each, value in found.items())
        if wrong:
            missing[name] = f"wrong: {shown}"
        else:
            ready[name] = prepared
            print(f"  {name}: {shown}", file=sys.stderr)
    return ready, missing


def time_in_turn(runs: Mapping[str, Callable[[], object]], rounds: int, flushed: Tensor) -> dict[str, list[float]]:
    """Milliseconds of every round for each run, all in turn."""
    names = list(runs)
    timed: dict[str, list[float]] = {name: [] for name in names}
    for name in names * 3:
        runs[name]()
    device = flushed.device
    launching = {name: launching_s(run, device) for name, run in runs.items()}
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        events = {}
        for name in order:
            flushed.zero_()
            sleep_on(device, launching[name])
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[name]()
            stop.record()
            events[name] = start, stop
        torch.cuda.synchronize()
        for name, (start, stop) in events.items():
            timed[name].append(start.elapsed_time(stop))
    return timed


def measure(case: Case, rounds: int) -> list[Row]:
    """Both directions of one case."""
    print(case, file=sys.stderr)
    tensors = case.tensors()
    ready, missing = prepare(case, ON_CUDA, tensors)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=case.device)
    rows = []
    for backward in (False, True):
        runs = {name: each.backward if backward else each.forward for name, each in ready.items()}
        timed = time_in_turn({name: run for name, run in runs.items() if run is not None}, rounds, flushed)
        rows.append(Row(case, backward, timed, missing))
    return rows


def cell(row: Row, name: str) -> str:
    """`612 (608–615)`: TFLOP/s, median and quartiles over rounds."""
    times = row.milliseconds.get(name)
    if not times:
        return "—"
    speeds = sorted(row.case.flops(row.backward) / ms / 1e9 for ms in times)
    low, middle, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
    return f"{middle:.0f} ({low:.0f}–{high:.0f})"


def ratio(row: Row) -> str:
    """autopar's median speed by that of the fastest other."""
    medians = {name: statistics.median(times) for name, times in row.milliseconds.items() if times}
    others = [time for name, time in medians.items() if name != OURS]
    return f"**{min(others) / medians[OURS]:.2f}**" if OURS in medians and others else "—"


def table(rows: Sequence[Row]) -> str:
    """TFLOP/s of every case, direction and contender."""
    head = ["pass", "head dim", "mask", "length", "batch", *ON_CUDA, f"{OURS} / best other"]
    lines = []
    for row in sorted(rows, key=lambda r: (r.backward, r.case.head_dim, r.case.causal, r.case.length)):
        case = row.case
        mask = "causal" if case.causal else "full"
        cells = ["backward" if row.backward else "forward", case.head_dim, mask, case.length, case.batch]
        lines.append([*cells, *(cell(row, name) for name in ON_CUDA), ratio(row)])
    return pages.table(head, lines)


def page(rows: Sequence[Row], rounds: int) -> str:
    """The dated result as Markdown."""
    import triton

    failed = sorted({f"{row.case}: {name}: {why}" for row in rows for name, why in row.missing.items()})
    cudnn = torch.backends.cudnn.version()
    where = (
        f"{torch.cuda.get_device_name()} (driver {_driver()}), torch {torch.__version__} (CUDA {torch.version.cuda}, "
        f"cuDNN {cudnn}), triton {triton.__version__}, Python {platform.python_version()}; autopar {_commit()}"
    )
    how = (
        f"`{' '.join(['python', 'benchmarks/attention/speed.py', *sys.argv[1:]])}`. bfloat16, {TOKENS} tokens, {WIDTH} "
        f"elements a token over all heads; TFLOP/s as the FlashAttention papers count them (forward 4·S²·D a head, "
        f"backward 2.5 times that, half under a causal mask): medians of {rounds} rounds in which all take turns, with "
        f"quartiles. What each computes was compared with float64 before (relative difference at most "
        f"{TOLERANCES[torch.bfloat16]:.0e})."
    )
    notes = "\n".join(["Not timed:", "", *(f"- {each}" for each in failed)]) if failed else "All ran and were right."
    return f"# Attention kernels, {date.today()}\n\n{where}.\n\n{how}\n\n{table(rows)}\n\n{notes}\n"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _commit() -> str:
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "of an unknown commit"


def check() -> int:
    """Correctness alone: bfloat16 on CUDA; float32 and tiny in Triton's interpreter. 1 where something is wrong."""
    on_cuda = torch.cuda.is_available()
    if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        print("--check without a CUDA device needs Triton's interpreter: set TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    contenders = ON_CUDA if on_cuda else INTERPRETED
    failed = []
    for head_dim in HEAD_DIMS if on_cuda else (16, 32):
        for causal in (False, True):
            case = (
                Case(head_dim, causal, 512, 2, 4)
                if on_cuda
                else Case(head_dim, causal, 48, 2, 2, dtype=torch.float32, device="cpu")
            )
            print(case, file=sys.stderr)
            _, missing = prepare(case, contenders, case.tensors())
            failed += [f"{case}: {name}: {why}" for name, why in missing.items()]
    print("\n".join([*failed, f"attention: {len(failed)} contenders wrong or not running"]))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths, ten rounds: a look, not a result")
    parser.add_argument("--check", action="store_true", help="correctness alone, nothing timed")
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)), help="default: %(default)s")
    parser.add_argument("--lengths", default="", help=f"default: {','.join(map(str, LENGTHS))}")
    parser.add_argument("--rounds", type=int, default=0, help="default: 30, with --quick 10")
    parser.add_argument("--write", action="store_true", help="write results/attention-DATE.md too")
    options = parser.parse_args()
    if options.check:
        return check()
    head_dims = _numbers(parser, "--head-dims", options.head_dims, WIDTH)
    lengths = _numbers(parser, "--lengths", options.lengths or ",".join(map(str, LENGTHS)), TOKENS)
    lengths = lengths if options.lengths or not options.quick else [1024, 8192]
    rounds = options.rounds or (10 if options.quick else 30)
    if not torch.cuda.is_available():
        print(
            "no CUDA device: attention kernels are timed on a GPU only. TRITON_INTERPRET=1 and --check try them here.",
            file=sys.stderr,
        )
        return 2
    rows = [
        row
        for head_dim in head_dims
        for causal in (False, True)
        for length in lengths
        for row in measure(Case(head_dim, causal, length, TOKENS // length, WIDTH // head_dim), rounds)
    ]
    text = page(rows, rounds)
    print(text)
    if options.write:
        pages.write("attention", text)
    return 1 if any(OURS in row.missing for row in rows) else 0


def _numbers(parser: argparse.ArgumentParser, option: str, text: str, whole: int) -> list[int]:
    """Numbers that divide `whole`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        parser.error(f"{option} {text!r}: numbers with commas between")
    if wrong := [number for number in numbers if number < 1 or whole % number]:
        parser.error(f"{option}: {wrong[0]} does not divide {whole}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
