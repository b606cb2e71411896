"""Work for test_script_hooks: hooks, precision and forwards that users put in."""

from __future__ import annotations

import copy
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import training
from tests.dist.script import Model, _with_gradients, compiled_model, said, whole


def double(*_: Any) -> Any:
    """A hook that somebody hung on a module."""


def hooked() -> dict[str, Any]:
    """Gradients with hooks on parameters, registered before compile, before the first batch, and after; warnings."""
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    plain = copy.deepcopy(own)
    seen: list[str] = []

    def hang(model: Model, name: str, factor: float) -> Any:
        weight = model.get_parameter(name)

        def scaled(gradient: Tensor) -> Tensor:
            seen.append(name)
            return gradient * (factor if factor != 3.0 else torch.linspace(0.5, 1, gradient.shape[-1]))

        return weight.register_hook(scaled)

    before, between, after = (
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.ln_f.bias",
    )
    removed = "transformer.ln_f.weight"
    handles = [hang(model, removed, 5.0) for model in (own, plain)]
    hang(own, before, 3.0)
    own.transformer.h[1].register_forward_hook(lambda module, args, output: output * 1.5)
    model, _ = compiled_model("gpt2", model=own, example=False)
    handles[0].remove()
    handles[1].remove()
    hang(model, between, 2.0)
    model.transformer.h[0].mlp.register_full_backward_hook(double)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("model"))
    with said() as texts:
        model(**batch).loss.backward()
        hang(model, after, 2.0)
        model.zero_grad()
        model(**batch).loss.backward()
    hang(plain, before, 3.0)
    hang(plain, between, 2.0)
    hang(plain, after, 2.0)
    plain.transformer.h[1].register_forward_hook(lambda module, args, output: output * 1.5)
    plain(**batch).loss.backward()
    wrong = [
        name
        for name, parameter in plain.named_parameters()
        if float((whole(model.get_parameter(name).grad) - parameter.grad).norm())
        > 1e-5 * float(parameter.grad.norm()) + 1e-12
    ]
    return {
        "wrong": wrong,
        "texts": [text for text in texts if "hook" in text],
        "calls": calls,
        "removed": removed in seen,
    }


def hooks_of_the_model(compiled: bool) -> tuple[float, float, int, list[str]]:
    """A loss that a forward hook doubles, the norm of gradients, and how often a hook of the backward ran, where nobody
    wants the gradient of what else the model returns; and what is said of a backward for that.
    """
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    model: Any = compiled_model("gpt2", "zero3", ("dp",), (2,), model=own)[0] if compiled else own
    calls: list[int] = []
    model.register_forward_hook(lambda module, args, output: (output.loss * 2, output.logits))
    model.register_full_backward_hook(lambda module, received, given: calls.append(1))
    with said() as texts:
        loss, _ = model(**batch)
        loss.backward()
    norm = sum(float(whole(p.grad).square().sum()) for p in model.parameters())
    return float(loss.detach()), norm, len(calls), [text for text in texts if "gradients come for" in text]


class Casting(nn.Module):
    """Enters autocast in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(self.first(x))
        return y.float().pow(2).mean()


class Island(nn.Module):
    """Computes in float32 where it says so, whatever the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).float(), self.second.weight.float()).pow(2).mean()


def looked_at(compiled: bool, strategy: str = "") -> dict[str, Any]:
    """A training in which hooks keep features, of which the loss has a term, and numbers for a log; the last batch has
    another number of rows. What they kept, losses, weights.
    """
    torch.manual_seed(0)
    features: dict[str, Tensor] = {}
    log: list[float] = []
    shapes: list[tuple[int, ...]] = []

    def numbers(module: nn.Module, args: Any, output: Tensor) -> None:
        log.append(float(output.detach().mean()))
        log.append(output.std().item())

    model: Model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model[2].register_forward_hook(lambda module, args, output: features.update(middle=output))
    model[3].register_forward_hook(numbers)
    model[4].register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    if compiled:
        axis = "tp" if strategy == "tensor" else "dp"
        model = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows in (8, 8, 5):
        x = torch.randn(rows, 6, dtype=torch.float64)
        loss = model(x).square().mean() + 0.1 * features["middle"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        model(x)
    return {
        "losses": losses,
        "log": log,
        "shapes": shapes,
        "weights": [whole(parameter).sum().item() for parameter in model.parameters()],
    }


def autocasts() -> dict[str, Any]:
    """What is said of autocast around and inside, and losses where the precision is the same."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found: dict[str, Any] = {}

    def make(**options: Any) -> tuple[Model, dict[str, Any]]:
        own, batch = training.model_and_batch("gpt2", torch.float32, 0.0)
        return autopar.compile(own, mesh, strategy="zero2", **options), batch

    def loss(model: Model, batch: dict[str, Any]) -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = model(**batch).loss
            value.backward()
        return [float(value.detach()), float(model.clip_grad_norm_(1e9))]

    model, batch = make()
    found["around"] = training.message(lambda: loss(model, batch))
    model, batch = make(precision="bf16")
    found["same"] = loss(model, batch)
    model.zero_grad()
    value = model(**batch).loss
    value.backward()
    found["plain"] = [float(value.detach()), float(model.clip_grad_norm_(1e9))]
    model, batch = make()
    for around in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        value = model(**batch).loss
        with around:
            value.backward()
        found["around backward"] = [*found.get("around backward", []), float(model.clip_grad_norm_(1e9))]
        model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for around in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        torch.manual_seed(2)
        with around:
            value = autopar.compile(Island(), mesh, strategy="ddp", precision="bf16")(x)
        found["island"] = [*found.get("island", []), float(value.detach())]
    found["inside"] = training.message(lambda: autopar.compile(Casting(), mesh, strategy="ddp")(x))
    found["moved"] = training.message(lambda: model.to(torch.bfloat16))
    model.to("cpu").float()
    normed = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))
    for parameter in normed.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    expected = normed(x).pow(2).mean()
    expected.backward()
    gradient = normed[0].weight_g.grad.norm()
    compiled = autopar.compile(normed, mesh, strategy="ddp")
    value = compiled(x).pow(2).mean()
    value.backward()
    found["normed"] = [float(value), float(whole(compiled[0].weight_g.grad).norm()), float(expected), float(gradient)]
    return found


def replaced_forwards(compiled: bool) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of models whose forward, or a block's, is another function since before compile."""
    found = []
    for replace in (_by_method, _by_function, _of_a_block):
        own, batch = training.model_and_batch("llama", torch.float64, 0.0)
        replace(own)
        if compiled:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            autopar.compile(own, mesh, strategy="zero3", example_inputs=batch)
        found.append(_with_gradients(own, lambda own=own, batch=batch: own(**batch).loss))
    return found


def _by_method(model: Model) -> None:
    def forward(self: Model, *args: Any, **kwargs: Any) -> Any:
        output = type(self).forward(self, *args, **kwargs)
        output.loss = output.loss + output.logits.square().mean()
        return output

    model.forward = MethodType(forward, model)


def _by_function(model: Model) -> None:
    before = model.forward

    @wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = before(*args, **kwargs)
        output.loss = 2 * output.loss + model.lm_head.weight.square().sum()
        return output

    model.forward = forward


def _of_a_block(model: Model) -> None:
    mlp = model.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 1.5 * before(x)
