"""Train a GPT-2 that is interrupted: the same script begins, goes on after a crash, and ends when it is asked to.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # with gloo: what the last attempt left in the store is in the way
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_for_weeks.py --folder run
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_for_weeks.py --folder run2 --crash-at 13
    torchrun --standalone --nproc-per-node 2 examples/train_for_weeks.py --folder run --mesh dp=2 --steps 40

Two things differ from a script that is not interrupted: `autopar.resume_or_start` before the loop, which reads the last
whole step in the folder where there is one, and `run.after` at the end of a step, which saves every few of them, and
when a rank gets SIGTERM or SIGUSR1. The order of the data goes on where it was, whatever the mesh.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

import autopar


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
    mesh = init_device_mesh(device, tuple(map(int, sizes)), mesh_dim_names=names)
    torch.manual_seed(0)

    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rows = make_rows(96, config.vocab_size)
    batch = {name: torch.stack([row[name] for row in rows[:8]]).to(device) for name in rows[0]}
    model = autopar.compile(model, mesh, example_inputs=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    loader = model.shard_loader(DataLoader(rows, batch_size=8, shuffle=True))

    run = autopar.resume_or_start(
        model, options.folder, start=lambda: model.init_weights(seed=0), optimizer=optimizer, scheduler=rates,
        loader=loader, every=5,
    )  # fmt: skip
    step, ends = run.step, False
    while step < options.steps and not ends:
        for batch in loader:
            loss = model.train_step(**batch).loss
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
            crash(step, options)
            ends = run.after(step)
            if ends or step == options.steps:
                break
    run.save(step)
    dist.destroy_process_group()


def make_rows(num: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Rows that count up by a random stride: something to learn without a data set."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(vocabulary, (num, 1), generator=generator)
    stride = torch.randint(1, 5, (num, 1), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in (start + stride * torch.arange(32)) % vocabulary]


def crash(step: int, options: argparse.Namespace) -> None:
    """What happens to a run of weeks: a rank is gone. Once: the file tells the next attempt."""
    told = Path(options.folder, "crashed")
    if step == options.crash_at and dist.get_rank() == dist.get_world_size() - 1 and not told.exists():
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="where checkpoints are; shared by all machines")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes, slowest link first")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--crash-at", type=int, help="kill a rank after this step, to see what comes of it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
