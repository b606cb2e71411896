"""One of the four processes of `autopar demo`: what a training script does. Started by torch.distributed.run.

python -m torch.distributed.run --standalone --nproc-per-node 4 -m autopar.cli.demo_worker FOLDER STEPS
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli.models import catalogue

MESH = {"dp": 2, "tp": 2}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 512}
ROWS, TOKENS = 16, 64
LEARNING_RATE = 1e-3
MAX_NORM = 1.0
WEIGHTS = "weights.safetensors"
PLAN = "plan.json"
TRACE = "plan.perfetto.json"
TIMEOUT = timedelta(seconds=120)


def make_model(device: str) -> nn.Module:
    """transformers' own LlamaForCausalLM, small."""
    options: Any = {"device": device, "overrides": SIZES, "batch": (ROWS, TOKENS)}
    return catalogue.load("llama", tiny=True, **options).model


def make_batch(step: int) -> dict[str, Tensor]:
    """Rows that count up from a random token by a random stride, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start_B = torch.randint(SIZES["vocab_size"], (ROWS, 1), generator=generator)
    stride_B = torch.randint(1, 5, (ROWS, 1), generator=generator)
    ids_BS = (start_B + stride_B * torch.arange(TOKENS)) % SIZES["vocab_size"]
    return {"input_ids": ids_BS, "labels": ids_BS.clone()}


def main() -> None:
    """Train, and print one JSON line a step on rank 0."""
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    compiled: Any = autopar.compile(
        make_model("meta"), mesh, example_inputs=make_batch(0), plan=autopar.Plan.load(folder / PLAN)
    )
    compiled.load_pretrained(folder / WEIGHTS)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        # The last step is recorded, for a trace of what was predicted and what was measured.
        with compiled.record(folder / TRACE) if step == num_steps - 1 else nullcontext():
            loss = compiled(**make_batch(step)).loss
            loss.backward()
        norm = compiled.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": float(loss.detach()), "norm": float(norm)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
