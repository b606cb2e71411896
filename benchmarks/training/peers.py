"""The models that the step benchmark trains, as PyTorch's own parallelisms and autopar run them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import autopar
from autopar.cli.models import catalogue
from benchmarks.training.ranks import device_type

Batch = dict[str, Tensor]

SIZES: dict[str, tuple[str, tuple[int, int], float | None, dict[str, object]]] = {
    "llama": (
        "llama", (4, 128), None,
        {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    ),
    "gpt2": ("gpt2", (4, 128), 0.0, {"vocab_size": 2048, "n_embd": 384, "n_layer": 4, "n_head": 6, "n_positions": 256}),
    "gpt2, dropout": ("gpt2", (4, 128), 0.1, {"vocab_size": 2048, "n_embd": 384, "n_layer": 4, "n_head": 6,
                                              "n_positions": 256}),
}  # fmt: skip


class Contender:
    """A model under one parallelism, with its optimizer; `step(batch)` trains once and gives the global loss."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        splits_batch: bool,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.model, self.splits_batch, self.context = name, model, splits_batch, context
        self.options = options or {}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def local(self, batch: Batch) -> Batch:
        """This rank's rows, where the model takes those."""
        if not self.splits_batch:
            return batch
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {key: value.chunk(ranks)[rank] for key, value in batch.items()}

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, AdamW. batch: this rank's."""
        loss = self.forward_backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def forward_backward(self, batch: Batch) -> Tensor:
        """The loss; gradients in `.grad`."""
        with self.context():
            output = self.model(**batch, **self.options)  # a name, as in most training loops: so logits live
            output.loss.backward()
        return output.loss.detach()

    def loss(self, batch: Batch) -> float:
        """The global loss of a step."""
        loss = self.step(self.local(batch))
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
        if self.splits_batch:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return float(loss)

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers, optimizer states."""
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *states]


def load(model: str, quick: bool) -> tuple[nn.Module, Batch]:
    """A model with the same weights every time, and the global batch."""
    spec, rows, dropout, overrides = SIZES[model]
    layers = "n_layer" if "n_layer" in overrides else "num_hidden_layers"
    overrides = {**overrides, layers: 2} if quick else overrides
    loaded = catalogue.load(spec, batch=rows, device="cpu", dropout=dropout, overrides=overrides)
    loaded.model.train()
    return loaded.model.to(device_type()), {key: value.to(device_type()) for key, value in loaded.batch.items()}


def mesh_of(axis: str) -> DeviceMesh:
    return dist.init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=(axis,))


def blocks_of(model: Any) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def ours(strategy: str, model: nn.Module, batch: Batch) -> Contender:
    compiled = autopar.compile(model, mesh_of(axis_of(strategy)), example_inputs=batch, strategy=strategy)
    return Contender("autopar", compiled, False)


def axis_of(strategy: str) -> str:
    return "tp" if strategy.startswith("tensor") else "dp"


def ddp(model: nn.Module, batch: Batch) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contender("DDP", wrapped, True, options={"use_cache": False})


def fsdp(model: nn.Module, batch: Batch, reshards: bool) -> Contender:
    mesh = mesh_of("dp")
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return Contender("FSDP2", model, True, options={"use_cache": False})


def megatron(model: nn.Module, batch: Batch, sequence: bool) -> Contender:
    """HF Llama in Megatron's columns and rows, the vocabulary and the loss split; `sequence`: norms too."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    layer = "model.layers.*"
    plan |= {f"{layer}.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {f"{layer}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {
        f"{layer}.{name}": RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    if sequence:
        names = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
        plan |= {name: SequenceParallel() for name in names}
        hidden: dict[str, Placement] = {"hidden_states": Shard(1)}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts=hidden, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    model = parallelize_module(model, mesh_of("tp"), plan)
    # Positions are given, since the model would count those of its shard of the sequence.
    positions = torch.arange(batch["input_ids"].shape[1], device=device_type()).unsqueeze(0)
    return Contender("DTensor", model, False, loss_parallel, {"use_cache": False, "position_ids": positions})


Build = Callable[[nn.Module, Batch], Contender]
PEERS: dict[str, Build] = {
    "ddp": ddp,
    "zero3": lambda model, batch: fsdp(model, batch, True),
    "zero3+keep": lambda model, batch: fsdp(model, batch, False),
    "tensor": lambda model, batch: megatron(model, batch, False),
    "tensor+sequence": lambda model, batch: megatron(model, batch, True),
}
