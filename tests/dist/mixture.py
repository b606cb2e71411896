"""What one rank does in the tests of mixtures of experts: compile, train, count bytes. Importable by name."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.exchanges import Ways
from autopar.passes import interleave
from benchmarks.training.count import CollectiveCounter
from tests.dist import training

STEPS = 6
EAGERLY: dict[str, Any] = {"WORTH": -1.0, "LEAST": 0.0, "ways_of": lambda *_: Ways(0.0, 4e-6, 4e-6)}
"""Of the pass that takes exchanges apart: in a small model all is latency."""


COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_experts_per_tok": 2, "experts_implementation": "eager",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {
        "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1,
    },
    "Qwen3Moe": {
        "num_key_value_heads": 2, "moe_intermediate_size": 16, "head_dim": 8, "num_experts": 8, "norm_topk_prob": True,
        "output_router_logits": True, "router_aux_loss_coef": 0.1,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


def model_and_batch(kind: str = "Mixtral") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small mixture, with its auxiliary loss if it has one, in float64: near ties of the router would tell float32's
    rounding.
    """
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **KINDS[kind]})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    ids = torch.randint(0, 64, (8, 6))
    return model, {"input_ids": ids, "labels": ids}


def rows_away(model: nn.Module, batch: dict[str, torch.Tensor], num: int) -> list[tuple[int, int, int]]:
    """Of all layers, the rows that each of `num` ranks sends to others, one for each other rank that has experts of a
    token, and those that it gets from others; and the bytes of a weight.
    """
    table, hooks, sizes = torch.zeros(num, num, dtype=torch.int64), [], []

    def count(module: Any, given: Any, made: Any) -> None:
        homes = given[1] // (module.num_experts // num)
        sizes.append(given[2].element_size())
        for rank, own in enumerate(homes.chunk(num)):
            for row in own.tolist():
                table[rank, list(set(row) - {rank})] += 1

    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            hooks.append(module.register_forward_hook(count))
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return [(there, back, sizes[0]) for there, back in zip(table.sum(1).tolist(), table.sum(0).tolist(), strict=True)]


def bytes_of_rows(rows: tuple[int, int, int]) -> int:
    """Of float64 rows of 32 there and back, with the numbers and weights (as the router has them) of two experts; twice
    there with gradients, and back with the gradients of the weights.
    """
    there, back, size = rows
    row, routing = 32 * 8, 2 * (4 + size)
    return there * (row + routing + 2 * row + routing) + back * (row + row + 2 * size)


def train(
    axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, kind: str = "Mixtral", beside: bool = False
) -> tuple[list[float], list[float], float, float, float]:
    """Losses, gradient norms, bytes sent in a step and as planned, less what is exchanged; and that. beside: exchanges
    run beside whatever can, however little that takes.
    """
    model, batch = model_and_batch(kind)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    with ExitStack() as stack:
        for name, value in EAGERLY.items() if beside else ():
            stack.enter_context(patch.object(interleave, name, value))
        compiled = autopar.compile(model, mesh, strategy=strategy, example_inputs=batch)
    program = str(compiled.plan.source)
    assert ("comm.send_tokens(" in program) == ("comm.take_tokens(" in program) == beside, program
    losses, norms = training.train(compiled, batch, STEPS)
    with CollectiveCounter() as counter:
        compiled(**batch).loss.backward()
    exchanged = counter.bytes_by_kind().get("exchange", 0)
    rows = [row for row in compiled.plan.collectives if row.kind != "exchange"]
    ranks = next((size for axis, size in zip(axes, sizes) if axis in _exchanging(compiled.plan.collectives)), 0)
    layers = sum(hasattr(module, "gate_up_proj") for module in model.modules())
    told = 2 * layers * ranks * (ranks - 1) * 8  # how many rows come, forward and backward
    sent = counter.total_bytes() - exchanged - told
    return losses, norms, sent, sum(row.bytes_sent for row in rows), exchanged


def _exchanging(rows: Any) -> set[str]:
    return {row.axis for row in rows if row.kind == "exchange"}


def train_with_each(cases: list[tuple[Any, ...]]) -> list[Any]:
    """One after the other."""
    return [train(*case) for case in cases]


def train_in_halves(cases: list[tuple[tuple[str, ...], tuple[int, ...], Any]]) -> list[Any]:
    """Losses and gradient norms where two microbatches go through the program together; one case after the other."""
    found = []
    for axes, sizes, strategy in cases:
        model, batch = model_and_batch("DeepseekV3")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        compiled = autopar.compile(model, mesh, strategy=strategy, example_inputs=batch, microbatches=2, halves=True)
        assert compiled.plan.interface.together == 2
        found.append(training.train(compiled, batch, STEPS))
    return found


def steps_of(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Some batches, in one of which a microbatch of four has no labels."""
    found = training.batches(batch, 4)
    labels = found[2]["labels"].clone()
    labels[[1, 5]] = -100  # of each of two ranks
    found[2] = {**found[2], "labels": labels}
    return found


def pairs_in_a_pipeline() -> tuple[list[float], list[float]]:
    """Losses and gradient norms of `steps_of` where pairs of microbatches go through the stages, and at last the loss
    of a forward alone.
    """
    model, batch = model_and_batch("DeepseekV3")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    strategy = {"pp": "pipeline(zero_bubble)", "dp": "expert"}
    compiled: Any = autopar.compile(model, mesh, strategy=strategy, example_inputs=batch, microbatches=4, halves=True)
    assert compiled.plan.interface.together == 2
    optimizer, losses, norms = torch.optim.AdamW(compiled.parameters(), lr=1e-2), list[float](), list[float]()
    for each in steps_of(batch):
        losses.append(float(compiled.train_step(**each).loss))
        norms.append(float(compiled.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(compiled(**batch).loss))
    return losses, norms
