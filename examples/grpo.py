"""Reinforce a small language model by its own samples (GRPO), generation and training of one object on a mesh.

    torchrun --nproc-per-node 4 examples/grpo.py                                 # small, on this machine's CPUs
    torchrun --nproc-per-node 8 examples/grpo.py --mesh dp=2,tp=4 --model FOLDER
    python examples/grpo.py --plain                                              # without autopar, on one device

Lines that differ from a script for one device are marked (1) and (2). Parameters lie the same for both phases: nothing
is loaded, gathered or copied between them. The log-probabilities under which tokens were drawn are those of the trainer
(`gap`), which scripts with an engine of their own for generation mend by importance sampling. Method: Shao et al.,
DeepSeekMath (arXiv 2402.03300): advantages are rewards against the mean of a group of answers to one prompt.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autopar

PAD = 0


def main() -> list[float]:
    options = parse_options()
    torch.manual_seed(options.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model) if options.model else small_model()
    model = model.to(getattr(torch, options.dtype))
    prompts = torch.randint(1, model.config.vocab_size, (options.prompts, options.length))
    if not options.plain:
        names, sizes = zip(*(pair.split("=") for pair in options.mesh.split(",")))
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, tuple(map(int, sizes)), mesh_dim_names=names)  # (1)
        model = autopar.compile(model, mesh, strategy=options.strategy)  # (2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)

    found = []
    for step in range(options.steps):
        torch.manual_seed(options.seed + step)  # alike on all ranks: they draw the same tokens
        tokens, drawn = sampled(model, prompts.repeat_interleave(options.group, 0), options.tokens)
        rewards = reward(tokens[:, options.length :])
        groups = rewards.view(-1, options.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        now = log_probs(model(input_ids=tokens).logits[:, options.length - 1 : -1], tokens[:, options.length :])
        ratio = torch.exp(now - drawn)  # one step a batch of samples: 1, but for its gradient
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(rewards.mean().item())
        if options.plain or dist.get_rank() == 0:
            gap = (now.detach() - drawn).abs().max().item()
            print(f"step {step}: reward {found[-1]:.4f}, loss {loss.item():+.5f}, gap {gap:.1e}", flush=True)
    return found


@torch.no_grad()
def sampled(model: Any, prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Prompts with `count` tokens behind them, and the log-probability of each under which it was drawn."""
    model.eval()
    found = model.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=count,
        min_new_tokens=count, pad_token_id=PAD, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    model.train()
    tokens: Tensor = found.sequences
    return tokens, log_probs(torch.stack(found.logits, 1), tokens[:, prompts.shape[1] :])


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """[rows, length, vocabulary], [rows, length] → [rows, length]."""
    return torch.log_softmax(logits, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def reward(tokens: Tensor) -> Tensor:
    """What is wanted of answers [rows, length]: even tokens. Yours may ask a program, a person or another model."""
    return (tokens % 2 == 0).double().mean(1)


def small_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes, slowest link first")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, zero3, tensor")
    parser.add_argument("--model", help="a folder with a model; default a small one")
    parser.add_argument("--dtype", default="float32", help="of parameters")
    parser.add_argument("--plain", action="store_true", help="without autopar, on one device")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each")
    parser.add_argument("--length", type=int, default=6, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=10, help="tokens of an answer")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
