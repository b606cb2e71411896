"""Train an unmodified transformers GPT-2 in a pipeline.

    torchrun --nproc-per-node 4 examples/train_pipeline.py                            # pp=2,dp=2 on this machine's CPUs
    torchrun --nproc-per-node 4 examples/train_pipeline.py --mesh pp=4 --schedule zbv --microbatches 8
    torchrun --nproc-per-node 4 examples/train_pipeline.py --trace run.perfetto.json  # for ui.perfetto.dev

Beside the axis pp of the mesh, one line differs from training without a pipeline: `train_step` in place of a forward
and `loss.backward()`. GPT-2's embedding is also its head: the first and last stage have it, and it stays one weight.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, GPT2Config

import autopar


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=timedelta(minutes=5))  # how long a rank waits for another before it says for whom
    names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
    mesh = init_device_mesh(device, tuple(map(int, sizes)), mesh_dim_names=names)

    config = GPT2Config(
        vocab_size=512, n_embd=256, n_layer=8, n_head=8, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    schedule = "pipeline" if options.schedule == "auto" else f"pipeline({options.schedule})"
    model = autopar.compile(
        model,
        mesh,
        example_inputs=make_batch(0, options, config.vocab_size, device),
        strategy={"pp": schedule, **{name: "tensor" if name == "tp" else "zero2" for name in names if name != "pp"}},
        microbatches=options.microbatches,
    )
    model.init_weights(seed=0)
    if dist.get_rank() == 0:
        print(model.plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the parameters of this rank's stages
    for step in range(options.steps):
        batch = make_batch(step, options, config.vocab_size, device)
        with model.record(options.trace) if options.trace and step == 2 else nullcontext():
            loss = model.train_step(**batch).loss
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}", flush=True)

    model.eval()
    with torch.no_grad():  # forwards alone
        loss = model(**make_batch(-1, options, config.vocab_size, device)).loss
    if dist.get_rank() == 0:
        print(f"evaluation loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def make_batch(step: int, options: argparse.Namespace, vocabulary: int, device: str) -> dict[str, torch.Tensor]:
    """Rows that count up by a random stride: something to learn without a data set. Equal on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    start_B = torch.randint(vocabulary, (options.rows, 1), generator=generator)
    stride_B = torch.randint(1, 5, (options.rows, 1), generator=generator)
    ids_BS = ((start_B + stride_B * torch.arange(options.tokens)) % vocabulary).to(device)
    return {"input_ids": ids_BS, "labels": ids_BS.clone()}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="pp=2,dp=2", help="axes, slowest link first")
    parser.add_argument("--schedule", default="auto", help="auto, 1f1b, interleaved, zbv, … (docs/pipelines.md)")
    parser.add_argument("--microbatches", type=int, help="default: as many as are predicted fastest")
    parser.add_argument("--trace", help="write the third step, measured and predicted, into this file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in a sequence")
    return parser.parse_args()


if __name__ == "__main__":
    main()
