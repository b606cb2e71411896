"""Work for test_script_optimizers: optimizers of users' own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dist.script import Losses, Model, compiled_model, said, whole


class Lamb(torch.optim.Optimizer):
    """A user's own, which looks at norms of whole tensors, and counts in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                rows = state.setdefault("rows", torch.zeros(p.shape[0], dtype=p.dtype))
                rows.add_(p.grad.reshape(p.shape[0], -1).square().mean(1))
                update = mean / (1 - 0.9 ** group["step"]) / (rows.sqrt().reshape(-1, *[1] * (p.ndim - 1)) + 1e-6)
                p.sub_(update * (group["lr"] / group["step"] ** 0.5 * float(p.norm()) / (update.norm() + 1e-9)))


class Blocks(torch.optim.Optimizer):
    """A user's own, whose mean is kept in 8 bits, with a scale for each 16 elements, as bitsandbytes has it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, count = self.state[p], p.numel()
                rows = F.pad(p.grad.reshape(-1), (0, -count % 16)).view(-1, 16)
                before = state["mean"].to(rows.dtype) * state["scale"] if state else torch.zeros_like(rows)
                mean = before * 0.9 + rows * 0.1
                state["scale"] = mean.abs().amax(1, keepdim=True) / 127 + 1e-30
                state["mean"] = torch.round(mean / state["scale"]).to(torch.int8)
                p.sub_(mean.view(-1)[:count].view_as(p), alpha=group["lr"])


class Averaging(torch.optim.Optimizer):
    """A user's own, which treats each element by itself, and counts in its groups and on itself, as ScheduleFree."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight": 0.0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            group["weight"] += group["k"] ** 2
            trained = [p for p in group["params"] if p.grad is not None]
            fast = [self.state[p].setdefault("z", p.clone()) for p in trained]
            torch._foreach_add_(fast, [p.grad for p in trained], alpha=-group["lr"] / self.steps**0.5)
            torch._foreach_lerp_(trained, fast, group["k"] ** 2 / group["weight"])


def optimized(model: Model, batch: dict[str, Any], kind: str) -> tuple[Losses, dict[str, Tensor]]:
    """Losses of five steps in float64, with a schedule and clipping, and the parameters after them."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    made: list[Any] = {
        "muon": lambda: [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=1e-2)],
        "adafactor": lambda: [torch.optim.Adafactor(model.parameters(), lr=1e-2)],
        "blocks": lambda: [Blocks(model.parameters(), lr=1e-1)],
        "averaging": lambda: [Averaging([{"params": matrices}, {"params": others, "lr": 1e-2}], lr=2e-2)],
        "lamb": lambda: [Lamb([{"params": matrices}, {"params": others, "lr": 1e-2}], lr=2e-2)],
    }[kind]()
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in made]
    losses = []
    for step in range(5):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for each in (*made, *schedules):
            each.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
        if step == 2:
            states = [copy.deepcopy(each.state_dict()) for each in made]
            for each, state in zip(made, states, strict=True):
                each.load_state_dict(state)
    return losses, {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def optimizers(kind: str, strategy: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    with said() as texts:
        model, batch = compiled_model("gpt2", strategy, axes, sizes)
        return *optimized(model, batch, kind), [text for text in texts if "looks at whole tensors" in text]
