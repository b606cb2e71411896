"""Work for test_lora: peft's own adapters on compiled models, and as the Trainer has them."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

import autopar
from benchmarks.training.count import CollectiveCounter
from tests.dist import script, trainer, training

Model = Any


def adapted(own: Model) -> Model:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    torch.manual_seed(11)
    model = get_peft_model(own, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, which would hide what is wrong
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def batch() -> dict[str, torch.Tensor]:
    rows = trainer.rows(8, 0)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def one() -> Model:
    return adapted(trainer.one())


def compiled(sizes: dict[str, int], strategy: Any) -> Model:
    trainer.as_under_torchrun()
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return autopar.compile(adapted(trainer.model()), mesh, strategy=strategy)


def loss_of(model: Model) -> float:
    with torch.no_grad():
        return float(model(**batch()).loss)


def steps(model: Model) -> dict[str, Any]:
    """Losses of five steps; what has gradients and states."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = script.run(model, optimizer, batch(), 5)
    model(**batch()).loss.backward()
    gradients = {name: script.whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"losses": losses, "gradients": gradients, "states": len(optimizer.state)}


def used(model: Model, folder: str) -> dict[str, Any]:
    """What peft's users do after training."""
    found = steps(model)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model.print_trainable_parameters()
    found["printed"] = printed.getvalue()
    loss = loss_of(model)
    with model.disable_adapter():
        found["disabled"] = loss_of(model)
    found["enabled"] = loss_of(model) / loss
    with CollectiveCounter() as counter:
        model.save_pretrained(f"{folder}/adapters")
    adapters = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    found["sends"] = counter.total_bytes() < 2 * adapters
    found["files"] = sorted(os.listdir(f"{folder}/adapters"))
    found["read"] = loss_of(PeftModel.from_pretrained(trainer.model(), f"{folder}/adapters"))
    found["states by name"] = {k: v.norm().item() for k, v in get_peft_model_state_dict(model).items()}
    script.run(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), batch(), 1)
    model.load_adapter(f"{folder}/adapters", "default")
    found["loaded"] = loss_of(model) / loss
    merged = model.merge_and_unload()
    merged.save_pretrained(f"{folder}/merged")
    if dist.is_initialized():
        dist.barrier()  # rank 0 writes
    found["merged"] = [loss_of(merged), loss_of(LlamaForCausalLM.from_pretrained(f"{folder}/merged"))]
    return found


def trained(make: Callable[[], Model], folder: str) -> dict[str, Any]:
    """With the Trainer: five steps, the last three also from a checkpoint."""
    made = trainer.trainer(make(), folder)
    made.train()
    again = trainer.trainer(make(), f"{folder}/on")
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {"run": trainer.outcome(made), "continued": trainer.outcome(again)}


def of_one(folder: str) -> dict[str, Any]:
    return {"used": used(one(), folder), "trained": trained(one, f"{folder}/trainer")}


def split(folder: str) -> dict[str, Any]:
    return used(compiled({"tp": 2}, "tensor"), folder)


def sharded(folder: str) -> dict[str, Any]:
    return trained(partial(compiled, {"dp": 2}, "zero3"), folder)


def replicated() -> tuple[dict[str, Any], bool, str]:
    """Steps where every rank holds all; whether only adapters are reduced; what is said of late adapters."""
    model = compiled({"dp": 2}, "ddp")
    found = steps(model)
    adapters = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    with CollectiveCounter() as counter:
        model(**batch()).loss.backward()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    late = adapted(autopar.compile(trainer.model(), mesh, strategy="zero3"))
    return found, counter.total_bytes() < 2 * adapters, training.message(lambda: late(**batch()))
