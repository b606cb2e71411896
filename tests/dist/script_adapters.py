"""Work for test_script_adapters: adapters on frozen models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.dist import training
from tests.dist.script import Model, compiled_model, run


class Adapted(nn.Module):
    """A frozen layer and two small ones beside it, as a stranger would write LoRA."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        dtype = next(base.parameters()).dtype
        self.base, self.dropout = base, nn.Identity()
        self.lora_a = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        nn.init.normal_(self.lora_b.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(self.dropout(x))) * 2.0


class Peft(nn.Module):
    """A wrapper that hides what it wraps, as peft's does: it is no model of transformers itself."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def adapted() -> tuple[Model, dict[str, Any]]:
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            base = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Adapted(base, base.in_features, base.out_features))
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj, layer.mlp.down_proj.in_features, model.config.hidden_size)
    return Peft(model), batch


def adapters_trained(model: Model, batch: dict[str, Any]) -> dict[str, Any]:
    """Losses of five steps of the adapters, which tensors have gradients and states, and the adapters as saved."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = run(model, optimizer, batch, 5)
    model(**batch).loss.backward()
    return {
        "losses": losses,
        "gradients": sorted(name for name, p in model.named_parameters() if p.grad is not None),
        "states": len(optimizer.state),
        "saved": {name: value.cpu() for name, value in model.state_dict().items() if "lora" in name},
    }


def adapters(strategy: str) -> tuple[dict[str, Any], float, float]:
    """Also the loss of the compiled model now, and of a plain one that has its adapters merged."""
    own, batch = adapted()
    model, _ = compiled_model("llama", strategy, model=own, example=False)
    found = adapters_trained(model, batch)
    plain, _ = adapted()
    plain.load_state_dict(found["saved"], strict=False)
    for module in list(plain.modules()):
        for name, child in module.named_children():
            if isinstance(child, Adapted):
                child.base.weight.data += 2.0 * child.lora_b.weight.data @ child.lora_a.weight.data
                setattr(module, name, child.base)
    return found, float(model(**batch).loss.detach()), float(plain(**batch).loss.detach())
