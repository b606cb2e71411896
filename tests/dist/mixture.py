"""What one rank does in the tests of mixtures of experts: compile, train, count bytes. Importable by name."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from benchmarks.training.count import CollectiveCounter
from tests.dist import training

STEPS = 10


def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small Mixtral with its auxiliary loss, in float64: near ties of the router would tell float32's rounding."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double().train()
    ids = torch.randint(0, 64, (8, 6))
    return model, {"input_ids": ids, "labels": ids}


def train(
    axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any
) -> tuple[list[float], list[float], float, float]:
    """Losses, gradient norms, bytes sent in a step and as planned."""
    model, batch = model_and_batch()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    compiled = autopar.compile(model, mesh, strategy=strategy, example_inputs=batch)
    losses, norms = training.train(compiled, batch, STEPS)
    with CollectiveCounter() as counter:
        compiled(**batch).loss.backward()
    return losses, norms, counter.total_bytes(), sum(row.bytes_sent for row in compiled.plan.collectives)


def train_with_each(cases: list[tuple[tuple[str, ...], tuple[int, ...], Any]]) -> list[Any]:
    """One after the other."""
    return [train(*case) for case in cases]
