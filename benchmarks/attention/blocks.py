"""Block sizes of the attention kernels by time, for each kernel, head size and kind of attention.

    python benchmarks/attention/blocks.py [--jobs 8] [--json FILE] [--only softcap,padding] [--rounds 5] [--seconds 600]

Every candidate of a grid is first compiled, run and compared with what the default blocks give, in so many processes;
those that are right are then timed by one, from a file of an earlier run without trying them again. bfloat16, 16k
tokens, 2048 elements a token over all heads. A table of the
defaults and the fastest comes last: what `runtime/kernels/attention_configs.py` should say. Exit code: 0; 1 where a
candidate is wrong; 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from autopar.operators import AttentionOptions
from benchmarks import pages

if TYPE_CHECKING:
    from autopar.runtime.kernels.attention_configs import KernelConfig

TOKENS, WIDTH, LENGTH = 16384, 2048, 4096
TOLERANCE = 2e-2
"""Of the largest difference from the default's result, of the largest number: a few roundings of bfloat16."""
FLUSHED_BYTES = 512 * 2**20
KINDS = ("forward", "dq", "dkv")
GRID = {
    "forward": ((64, 32, 4), (64, 64, 4), (128, 32, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8)),
    "dq": ((64, 32, 4), (64, 64, 4), (128, 32, 4), (128, 32, 8), (128, 64, 8)),
    "dkv": ((32, 64, 4), (64, 64, 4), (64, 64, 8), (32, 128, 8), (64, 128, 8), (64, 32, 4)),
}
"""block_m, block_n, warps; each with each number of stages."""
STAGES = (2, 3)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of attention. options: of `AttentionOptions`; padding: the last keys of each row are not seen."""

    options: Mapping[str, Any]
    padding: bool = False
    bias: bool = False

    @property
    def seen(self) -> float:
        """The part of all scores that is computed, about."""
        left = self.options.get("left")
        if left is not None:
            return min(1.0, left / LENGTH)
        return (0.5 if "right" in self.options else 1.0) * (0.875 if self.padding else 1.0)


CAUSAL = {"right": 0}
ATTENTIONS = {
    "full": Kind({}),
    "causal": Kind(CAUSAL),
    "window": Kind({**CAUSAL, "left": 1023}),
    "padding": Kind(CAUSAL, padding=True),
    "softcap": Kind({**CAUSAL, "softcap": 50.0}),
    "dropout": Kind({**CAUSAL, "dropout_p": 0.1}),
    "bias": Kind({}, bias=True),
    "bias and padding": Kind({}, bias=True, padding=True),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate. kernel: of `KINDS`."""

    attention: str
    head_dim: int
    kernel: str
    config: KernelConfig
    is_default: bool = False

    def __str__(self) -> str:
        config = self.config
        name = f"{config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages"
        return f"{self.attention} {self.head_dim} {self.kernel}: {name}"


class Problem:
    """The tensors of a kind of attention at a head size, and what the default blocks give of them."""

    def __init__(self, attention: str, head_dim: int, device: str = "cuda", length: int | None = None) -> None:
        self.attention, self.head_dim, self.kind = attention, head_dim, ATTENTIONS[attention]
        # A bias is as large as all scores of a sequence.
        length = length or (LENGTH // 2 if self.kind.bias else LENGTH)
        batch, heads = max(1, TOKENS // length), WIDTH // head_dim
        if device == "cpu":
            batch, heads = 2, 2
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.q, self.k, self.v, self.g = (draw(batch, length, heads, head_dim).transpose(1, 2) for _ in range(4))
        self.bias = draw(1, heads, length, length) if self.kind.bias else None
        self.keys = None
        if self.kind.padding:
            ends = torch.linspace(length * 3 // 4, length, batch, device=device)
            self.keys = torch.arange(length, device=device) < ends[:, None]
        self.seed = torch.tensor(7, device=device) if "dropout_p" in self.kind.options else None
        self.options = AttentionOptions(scale=head_dim**-0.5, **self.kind.options)
        self.wanted = self.results()

    def forward(self) -> tuple[Tensor, Tensor]:
        from autopar.runtime.kernels.attention_forward import attention_forward

        return attention_forward(
            self.q, self.k, self.v, self.bias, self.keys, None, self.seed, options=self.options
        )  # fmt: skip

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        from autopar.runtime.kernels.attention_backward import attention_backward

        return attention_backward(
            self.g, self.q, self.k, self.v, self.bias, self.keys, None, self.seed, out, lse, options=self.options
        )  # fmt: skip

    def results(self) -> tuple[Tensor, ...]:
        """out, lse, dq, dk, dv."""
        out, lse = self.forward()
        return out, lse, *self.backward(out, lse)

    def error(self) -> float:
        """The largest difference from what the defaults give, of each result's largest number."""
        errors = []
        for found, wanted in zip(self.results(), self.wanted, strict=True):
            difference = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
            errors.append(difference if difference == difference else float("inf"))
        return max(errors)

    def flops(self, kernel: str) -> float:
        """Of the products of this kernel: two, three, four of so many seen scores."""
        products = {"forward": 2, "dq": 3, "dkv": 4}[kernel]
        return (
            2.0 * products * self.q.shape[0] * self.q.shape[1] * self.q.shape[2] ** 2 * self.head_dim * self.kind.seen
        )


def trials(only: Sequence[str], head_dims: Sequence[int] = (128, 64), arch: int = 90) -> list[Trial]:
    """All candidates, each default first."""
    from autopar.runtime.kernels.attention_configs import KernelConfig, default_config

    found = []
    for attention, head_dim, kernel in itertools.product(only, head_dims, KINDS):
        kind = ATTENTIONS[attention]
        plain = attention in ("full", "causal")
        rich = kind.bias or bool({"softcap", "dropout_p"} & kind.options.keys())
        default = default_config(
            kernel, arch, torch.bfloat16, head_dim, head_dim, plain=plain, rich=rich, crowded=kind.padding
        )
        tma = plain and arch // 10 == 9
        configs = [KernelConfig(*each, stages, tma) for each in GRID[kernel] for stages in STAGES]
        found.append(Trial(attention, head_dim, kernel, default, is_default=True))
        found += [Trial(attention, head_dim, kernel, each) for each in configs if each != default]
    return found


@contextmanager
def chosen(trial: Trial) -> Iterator[None]:
    """Within, this kernel runs with this configuration."""
    from autopar.runtime.kernels import attention_launch

    before = attention_launch.choose
    attention_launch.choose = lambda kind, *rest: trial.config if kind == trial.kernel else before(kind, *rest)
    try:
        yield
    finally:
        attention_launch.choose = before


def row_of(trial: Trial, **found: Any) -> dict[str, Any]:
    """What is kept of a trial."""
    config = trial.config
    return {
        "trial": str(trial), "attention": trial.attention, "head_dim": trial.head_dim, "kernel": trial.kernel,
        "blocks": [config.block_m, config.block_n, config.num_warps, config.num_stages], "default": trial.is_default,
        **found,
    }  # fmt: skip


def tried(trial: Trial, problem: Problem) -> dict[str, Any]:
    """Whether the candidate is right. Too large for the device: neither."""
    try:
        with chosen(trial):
            error = problem.error()
    except Exception as failure:
        return row_of(trial, ok=None, failure=f"{type(failure).__name__}: {str(failure)[:100]}")
    return row_of(trial, ok=error <= TOLERANCE, error=error)


def timed(trial: Trial, problem: Problem, rounds: int, flushed: Tensor) -> float:
    """Milliseconds of the kernel alone: of the backward's two the other one's time is not in it, as both are timed
    with everything else at its default, and what those take is the same for all candidates.
    """
    out, lse = problem.wanted[:2]
    run = problem.forward if trial.kernel == "forward" else lambda: problem.backward(out, lse)
    times = []
    with chosen(trial):
        run()
        for _ in range(rounds):
            flushed.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # while the host launches
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def share(given: tuple[int, int, Sequence[str], float]) -> list[dict[str, Any]]:
    """Try every n-th candidate, from the i-th on, in this process, until `ends` (on `time.monotonic`'s clock)."""
    number, jobs, only, ends = given
    rows: list[dict[str, Any]] = []
    problem = None
    for trial in trials(only)[number::jobs]:
        if time.monotonic() > ends:
            break
        try:
            problem = problem_of(trial, problem)
        except torch.OutOfMemoryError as error:
            rows.append(row_of(trial, ok=None, failure=str(error)[:100]))
            continue
        rows.append(tried(trial, problem))
    return rows


def problem_of(trial: Trial, last: Problem | None) -> Problem:
    """The trial's: the last one where it is the same."""
    if last is not None and (last.attention, last.head_dim) == (trial.attention, trial.head_dim):
        return last
    torch.cuda.empty_cache()
    return Problem(trial.attention, trial.head_dim)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """By kind of attention, head size and kernel: the default, the fastest three, as milliseconds of the whole pass."""
    lines = []
    for key, each in itertools.groupby(rows, key=lambda row: (row["attention"], row["head_dim"], row["kernel"])):
        ran = [row for row in each if row.get("ms")]
        default = next((row for row in ran if row["default"]), None)
        best = sorted(ran, key=lambda row: row["ms"])[:3]
        fastest = [f"{row['ms']:.3f} ({', '.join(map(str, row['blocks']))})" for row in best]
        own = f"{default['ms']:.3f} ({', '.join(map(str, default['blocks']))})" if default else "—"
        ratio = f"{default['ms'] / best[0]['ms']:.2f}" if default and best else "—"
        lines.append([*key, own, ratio, *fastest, *["—"] * (3 - len(fastest))])
    return pages.table(["attention", "head", "kernel", "default, ms", "by fastest", "1.", "2.", "3."], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="timed launches of each (default 5)")
    parser.add_argument("--only", default=",".join(ATTENTIONS), help="kinds of attention, split by commas")
    parser.add_argument("--json", type=Path, help="a file that gets a row a candidate")
    parser.add_argument("--try-only", action="store_true", help="time nothing: what else is on the device may be busy")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no candidate later (default 600)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: blocks are timed on a GPU only", file=sys.stderr)
        return 2
    only = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in only if name not in ATTENTIONS]:
        parser.error(f"--only {unknown[0]!r}: one of {', '.join(ATTENTIONS)}")
    ends = time.monotonic() + options.seconds
    found = {row["trial"]: row for row in pages.kept(options.json)}
    if not found:
        asked = [(number, options.jobs, only, ends) for number in range(options.jobs)]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for rows in pool.imap_unordered(share, asked):
                found |= {row["trial"]: row for row in rows}
                for row in rows:
                    pages.keep(options.json, row)
    wrong = [row for row in found.values() if row["ok"] is False]
    rows = [] if options.try_only else list(times_of(only, found, options.rounds, ends))
    for row in rows:
        pages.keep(options.json, row)
    if rows:
        print(table(rows))
    large = sum(row["ok"] is None for row in found.values())
    print(f"{len(found)} candidates tried, {large} too large, {len(rows)} timed")
    for row in wrong:
        print(f"WRONG {json.dumps(row)}")
    return 1 if wrong else 0


def times_of(
    only: Sequence[str], found: Mapping[str, Mapping[str, Any]], rounds: int, ends: float
) -> Iterator[dict[str, Any]]:
    """The rows of the candidates that are right, timed."""
    flushed, problem = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda"), None
    for trial in trials(only):
        row = found.get(str(trial))
        if row is None or not row["ok"] or time.monotonic() > ends:
            continue
        problem = problem_of(trial, problem)
        ms = timed(trial, problem, rounds, flushed)
        yield {**row, "ms": ms, "tflops": problem.flops(trial.kernel) / ms / 1e9}


if __name__ == "__main__":
    sys.exit(main())
