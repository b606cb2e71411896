"""Train an unmodified transformers Llama, sharded by autopar.

    torchrun --nproc-per-node 4 examples/train_llama.py --mesh dp=2,tp=2                 # small, on this machine's CPUs
    torchrun --nproc-per-node 8 examples/train_llama.py --mesh dp=2,tp=4 --config DIR    # a config.json, on GPUs

Three lines differ from training on one device: the mesh, `autopar.compile`, and `init_weights` in place of weights that
were there already. The batch is the global one, the same on every rank; each rank takes its part.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import autopar


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
    mesh = init_device_mesh(device, tuple(map(int, sizes)), mesh_dim_names=names)

    config = LlamaConfig.from_pretrained(options.config) if options.config else small_config()
    with torch.device("meta"):  # no weights yet: a model may be larger than one device
        model = AutoModelForCausalLM.from_config(config)

    precision = "bf16" if device == "cuda" else None
    batch = make_batch(0, options, config.vocab_size)
    model = autopar.compile(model, mesh, example_inputs=batch, strategy=options.strategy, precision=precision)
    model.init_weights(seed=0)
    if dist.get_rank() == 0:
        print(model.plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        batch = make_batch(step, options, config.vocab_size)
        loss = model(**batch).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}", flush=True)
    dist.destroy_process_group()


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip


def make_batch(step: int, options: argparse.Namespace, vocabulary: int) -> dict[str, torch.Tensor]:
    """Rows that count up by a random stride: something to learn without a data set. Equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    start_B = torch.randint(vocabulary, (options.rows, 1), generator=generator)
    stride_B = torch.randint(1, 5, (options.rows, 1), generator=generator)
    ids_BS = (start_B + stride_B * torch.arange(options.tokens)) % vocabulary
    if torch.cuda.is_available():
        ids_BS = ids_BS.cuda()
    return {"input_ids": ids_BS, "labels": ids_BS.clone()}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes, slowest link first")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tensor")
    parser.add_argument("--config", help="a config.json or the folder that holds it; default a small model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in a sequence")
    return parser.parse_args()


if __name__ == "__main__":
    main()
