"""Batches of random lengths: how long a step takes whose shape is new.

    python benchmarks/training/lengths.py [--shapes 50] [--only gpt2:zero3] [--profile] [--write]

Two ranks with one thread each under gloo (NCCL where there are GPUs). A model of four layers is compiled, then gets one
batch after the other, each of a length that was not there before: forward and backward. A second step on the same batch
says what the step itself takes; the difference is what a new shape costs. How many placements were solved, traces made,
and programs read off is counted; every loss is held against the eager model's.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from benchmarks import pages
from benchmarks.training.ranks import device_type, launch, machine, progress, quartiles

ROWS = [("gpt2", "ddp"), ("gpt2", "zero3"), ("bert", "zero3"), ("llama", "tensor")]
VOCABULARY, LONGEST, ROWS_OF_BATCH = 512, 256, 4
TOLERANCE = 1e-5
Batch = dict[str, torch.Tensor]


def model_of(name: str) -> Any:
    """Four layers of 64."""
    import transformers as hf

    torch.manual_seed(0)
    bert = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "use_cache": False}
    makers: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=64, n_layer=4, n_head=4, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        ),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(**bert, **common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**bert, **common, num_key_value_heads=2)),
    }  # fmt: skip
    return makers[name]()


def batch_of(length: int) -> Batch:
    """Rows of several lengths, padded at the end."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCABULARY, (ROWS_OF_BATCH, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, ROWS_OF_BATCH):
        mask[row, length - int(torch.randint(1, length // 2, (), generator=generator)) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def measure(name: str, strategy: str, shapes: int, profiled: bool) -> dict[str, Any]:
    """On one rank."""
    from autopar.api import compile as compiling

    model = model_of(name)
    plain = copy.deepcopy(model)
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp",))
    lengths = random.Random(0).sample(range(16, LONGEST + 1), shapes)
    solved = 0
    fresh = compiling.make_fresh_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal solved
        solved += 1
        return fresh(*args, **kwargs)

    compiling.make_fresh_plan = counted
    compiled = autopar.compile(model, mesh, strategy=strategy)
    seconds, cpu, steps, worst = [], [], [], 0.0
    profile = cProfile.Profile() if profiled and dist.get_rank() == 0 else None
    for number, length in enumerate(lengths):
        batch = batch_of(length)
        if profile is not None and number == shapes // 2:
            profile.enable()
        first, first_cpu, loss = _step(compiled, batch)
        if profile is not None:
            profile.disable()
        again, again_cpu, _ = _step(compiled, batch)
        worst = max(worst, abs(loss - float(plain(**batch).loss)))
        seconds.append(first - again)
        cpu.append(first_cpu - again_cpu)
        steps.append(again)
    if profile is not None:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(90)
    if worst > TOLERANCE:
        raise SystemExit(f"{name} {strategy}: a loss is off by {worst}")
    counts = compiled.autopar.prepare.__self__.counts()
    return {
        "first": seconds[0],
        "rest": seconds[1:],
        "cpu": cpu[1:],
        "steps": steps,
        "worst": worst,
        "solved": solved,
        **counts,
    }


def _step(model: Any, batch: Batch) -> tuple[float, float, float]:
    """Seconds by the wall clock, of the processor, and the loss."""
    dist.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    loss = model(**batch).loss
    loss.backward()
    taken, used = time.perf_counter() - begun, time.process_time() - cpu
    model.zero_grad()
    return taken, used, float(loss.detach())


HEADER = [
    "model", "strategy", "first s", "new shape s, median (quartiles)", "CPU s of rank 0", "of others", "the first four",
    "step ms", "solved", "traced", "read off", "largest difference of a loss",
]  # fmt: skip


def row(name: str, strategy: str, ranks: list[dict[str, Any]]) -> list[str]:
    """The slowest rank of each shape."""
    rest = [max(each) for each in zip(*(rank["rest"] for rank in ranks), strict=True)]
    low, middle, high = quartiles(rest)
    first = ranks[0]
    return [
        name, strategy, f"{first['first']:.2f}", f"**{middle:.2f}** ({low:.2f}–{high:.2f})",
        *(f"{statistics.median(rank['cpu']):.2f}" for rank in ranks[:2]),
        ", ".join(f"{each:.2f}" for each in rest[:4]), f"{1e3 * statistics.median(first['steps']):.0f}",
        str(first["solved"]), str(first["traced"]), str(first["read"]), f"{first['worst']:.1e}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=50)
    parser.add_argument("--only", action="append", help="MODEL:STRATEGY; may be given several times")
    parser.add_argument("--profile", action="store_true", help="print where one new shape's time goes, on rank 0")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    options = parser.parse_args()
    rows = []
    for name, strategy in ROWS:
        if options.only and f"{name}:{strategy}" not in options.only:
            continue
        cells = row(name, strategy, launch(measure, name, strategy, options.shapes, options.profile))
        progress("  ".join(cells))
        rows.append(cells)
    page = (
        f"# Batches of random lengths, {date.today()}\n\n{machine()}.\n\n`python benchmarks/training/lengths.py`. "
        f"{options.shapes} lengths from 16 to {LONGEST}, none twice, {ROWS_OF_BATCH} rows, four layers of 64, two "
        "ranks. Seconds are those of the first step on a shape less those of the second, of the slowest rank: what "
        f"programs cost, not what they compute.\n\n{pages.table(HEADER, rows)}\n"
    )
    print(page)
    if options.write:
        pages.write("lengths", page)


if __name__ == "__main__":
    main()
