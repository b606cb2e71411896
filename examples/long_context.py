"""Train an unmodified transformers Llama on sequences that several devices share.

    torchrun --nproc-per-node 4 examples/long_context.py                        # ring over this machine's CPUs
    torchrun --nproc-per-node 4 examples/long_context.py --strategy ulysses
    torchrun --nproc-per-node 4 examples/long_context.py --mesh cp0=2,cp1=2 --strategy cp0=ring,cp1=ulysses
    torchrun --nproc-per-node 4 examples/long_context.py --mesh dp=2,cp=2 --strategy dp=zero3,cp=allgather_kv

Every rank is given the whole batch and takes its tokens; loss, gradients and their norm are the whole batch's.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import autopar
from autopar.strategies.names import parse


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=timedelta(minutes=5))
    names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
    mesh = init_device_mesh(device, tuple(map(int, sizes)), mesh_dim_names=names)

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=options.tokens,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = autopar.compile(
        model,
        mesh,
        example_inputs=make_batch(0, options, config.vocab_size, device),
        strategy=parse(options.strategy),
    )
    model.init_weights(seed=0)
    if dist.get_rank() == 0:
        print(model.plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        loss = model(**make_batch(step, options, config.vocab_size, device)).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}", flush=True)
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
    parser.add_argument("--mesh", default="cp=4", help="axes, slowest link first")
    parser.add_argument("--strategy", default="ring", help="a name, or axis=name,axis=name (docs/attention.md)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2, help="sequences in the global batch")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in a sequence")
    return parser.parse_args()


if __name__ == "__main__":
    main()
