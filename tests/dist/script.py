"""Work for test_script_*: what users' scripts do around the step, in words that eager knows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import meeting
from tests.dist import training

Model = Any
Losses = list[float]


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings of autopar inside."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("autopar").removeHandler(handler)


def compiled_model(
    name: str,
    strategy: Any = "zero3",
    axes: tuple[str, ...] = ("dp",),
    sizes: tuple[int, ...] = (2,),
    model: nn.Module | None = None,
    example: bool = True,
) -> tuple[Model, dict[str, Any]]:
    own, batch = training.model_and_batch(name, torch.float64, 0.0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    options = {"example_inputs": batch} if example else {}
    return autopar.compile(own if model is None else model, mesh, strategy=strategy, **options), batch


def run(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, Any], steps: int) -> Losses:
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def adam(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses_outside(model: Model, batch: dict[str, Any]) -> list[Any]:
    """Per loss of the user's own: its value, and all gradients. Not a word of autopar's, or of DTensors."""
    ids, labels = batch["input_ids"], batch["labels"]
    torch.manual_seed(1)
    teacher, _ = training.model_and_batch("gpt2", torch.float64, 0.0)
    for parameter in teacher.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
    with torch.no_grad():
        wanted = F.softmax(teacher(input_ids=ids).logits, -1)

    def shifted() -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))

    def smoothed() -> Tensor:
        logits = model(input_ids=ids).logits
        return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, logits.shape[-1]), labels.view(-1))

    def distilled() -> Tensor:
        output = model(input_ids=ids, labels=labels)
        student = F.log_softmax(output.logits, -1)
        return output.loss + F.kl_div(student, wanted, reduction="batchmean")

    def masked() -> Tensor:
        logits = model(input_ids=ids).logits
        logits[:, :, 3] = -10.0
        return logits.logsumexp(-1).mean() + torch.stack([logits, 2 * logits]).square().mean()

    def decayed() -> Tensor:
        loss = model(input_ids=ids, labels=labels).loss
        return 0.01 * sum(p.pow(2).sum() for p in model.parameters()) + loss + loss * 0.5

    return [_with_gradients(model, each) for each in (shifted, smoothed, masked, distilled, decayed)]


def _with_gradients(model: Model, loss_of: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.item(), {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def measured(model: Model, batch: dict[str, Any]) -> list[Any]:
    """What a script prints of the logits."""
    norm = sum(p.grad.norm(2).item() ** 2 for p in model.parameters()) ** 0.5
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    accuracy = (logits.argmax(-1) == batch["labels"]).float().mean().item()
    best = max(float(row.max()) for row in logits[0])
    return [
        norm, largest, f"{next(model.parameters()).sum():.4f}", accuracy, best, logits.float().mean().item(),
        logits.cpu().numpy().sum(), tuple(logits.shape), logits.dtype, logits[0, 0, :2].tolist(), len(logits),
        float(logits.sum()), float((1 - logits).pow(2).mean()),
    ]  # fmt: skip


def own_losses(strategy: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[list[Any], list[Any], list[str]]:
    with said() as texts:
        model, batch = compiled_model("gpt2", strategy, axes, sizes)
        return losses_outside(model, batch), measured(model, batch), [each for each in texts if "whole tensor" in each]


def gradients_asked_for(model: Model, batch: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Gradients that `torch.autograd.grad` gives, that come into `.grad` of some alone, and behind a hook."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(model(**batch).loss, parameters, allow_unused=True)
    asked = {name: whole(gradient) for name, gradient in zip(names, found, strict=True) if gradient is not None}
    some = parameters[: len(parameters) // 2]
    model(**batch).loss.backward(inputs=list(some))
    of_some = {name: whole(p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None}
    model.zero_grad()
    logits = model(**batch).logits
    logits.register_hook(lambda gradient: gradient * 3)
    logits.float().pow(2).mean().backward()
    behind = {name: whole(p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None}
    model.zero_grad()
    return [asked, of_some, behind]


def asked_for_gradients(strategy: str) -> tuple[list[dict[str, Tensor]], str, str]:
    """`gradients_asked_for`, and what is said where one is differentiated again, or a hook sees a part of one."""
    compiled, batch = compiled_model("gpt2", strategy)
    found = gradients_asked_for(compiled, batch)

    def penalty() -> None:
        gradients = torch.autograd.grad(compiled(**batch).loss, list(compiled.parameters()), create_graph=True)
        torch.stack([whole(gradient).pow(2).sum() for gradient in gradients]).sum().backward()

    def hooked_beside_loss() -> None:
        output = compiled(**batch)
        output.logits.register_hook(lambda gradient: gradient * 2)
        (output.loss + output.logits.pow(2).mean()).backward()

    return found, training.message(penalty), training.message(hooked_beside_loss)


def looked_at_by_one() -> list[str]:
    """What is said where rank 0 alone asks for the largest of the logits, and for what takes all of them."""
    meeting.PATIENCE_S = 1.0
    model, batch = compiled_model("llama")
    with torch.no_grad():
        logits = model(**batch).logits
    asked = (lambda: logits.argmax(-1), lambda: logits.std()) if dist.get_rank() == 0 else ()
    texts = [training.message(each) for each in asked]
    meeting.PATIENCE_S = 120.0
    return texts
