"""Runs a model on the whole batch and on microbatches, and compares what `batching` says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import operators
from autopar.api.promote import only
from autopar.base.huggingface import huggingface
from autopar.base.torch_compat import tracing
from autopar.ir.program import Program
from autopar.passes.batching import Batching, OutputBatching, analyse
from autopar.passes.capture import capture

ROWS = 8
Batch = dict[str, Tensor]


def captured(model: nn.Module, batch: Batch) -> Program:
    with huggingface.training_capture(model), only(torch.float64):
        return capture(model, batch)


def part(batch: Batch, batching: Batching, index: int, m: int) -> Batch:
    cut = {}
    for name, tensor in batch.items():
        dim = batching.inputs[name]
        cut[name] = tensor if dim is None else tensor.chunk(m, dim)[index]
    return cut


def analysed(model: nn.Module, batch: Batch, m: int = 2, *, compare: bool = True) -> Batching:
    """The analysis of a microbatch's capture; the inputs of the tests are cut along dim 0 where they have 8 rows."""
    less = {name: x[: x.shape[0] // m] if x.dim() and x.shape[0] == ROWS else x for name, x in batch.items()}
    return analyse(captured(model, less), m, captured(model, batch) if compare else None)


def ran(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The outputs that are tensors, flat, in the program's order."""
    with huggingface.training_capture(model), only(torch.float64):
        leaves, _ = tracing.tree_flatten(model(**batch))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def gradients(model: nn.Module, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad and grad is not None]
    parameters = list(model.parameters())
    found = torch.autograd.grad([o for o, _ in pairs], parameters, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def weight_function(source: str) -> Callable[[Batch], Tensor]:
    names: dict[str, Any] = {"torch": torch, "F": F, "ops": operators, "aten": torch.ops.aten}
    exec(source, names)
    return names["loss_weight"]


def combined(how: OutputBatching, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if how.combine == "concat":
        assert how.batch_dim is not None
        return torch.cat(list(parts), how.batch_dim)
    if how.combine == "same":
        return parts[0]
    scales = factors(how, len(parts), weights)
    return sum((scale * value for scale, value in zip(scales, parts, strict=True)), torch.zeros(()))


def factors(how: OutputBatching, m: int, weights: Sequence[float]) -> list[float]:
    return {
        "mean": [1 / m] * m,
        "sum": [1.0] * m,
        "weighted": [weight / sum(weights) for weight in weights] if weights else [],
        "same": [1.0] + [0.0] * (m - 1),
    }[how.combine]


def grad_of(how: OutputBatching, grad: Tensor, index: int, m: int, weights: Sequence[float]) -> Tensor:
    if how.combine == "concat":
        assert how.batch_dim is not None
        return grad.chunk(m, how.batch_dim)[index]
    return grad * factors(how, m, weights)[index]


def prove(
    model: nn.Module,
    batch: Batch,
    batching: Batching,
    m: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Outputs and gradients of all parameters: the whole batch at once, and m microbatches put together."""
    with around():
        whole = ran(model, batch)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in whole]
    expected = gradients(model, whole, grads)
    small = [part(batch, batching, index, m) for index in range(m)]
    weights = [float(weight_function(batching.weight)(one)) for one in small] if batching.weight else []
    parts: list[list[Tensor]] = []
    found = [torch.zeros_like(g) for g in expected]
    for index, one in enumerate(small):
        with around():
            outputs = ran(model, one)
        own = [grad_of(h, g, index, m, weights) for h, g in zip(batching.outputs, grads, strict=True)]
        found = [a + b for a, b in zip(found, gradients(model, outputs, own), strict=True)]
        parts.append([out.detach() for out in outputs])
    for number, (how, value) in enumerate(zip(batching.outputs, whole, strict=True)):
        close(combined(how, [one[number] for one in parts], weights), value.detach(), f"output {number}")
    scale = max((float(g.norm()) for g in expected), default=1.0)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a, b, f"gradient {number}", scale)


def close(found: Tensor, expected: Tensor, what: str, scale: float = 0.0) -> None:
    assert found.shape == expected.shape, what
    error = float((found.double() - expected.double()).norm())
    assert error <= 1e-12 * max(float(expected.double().norm()), scale, 1e-3), f"{what} is off by {error}"


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1) * 0.5)
    return model


def labels_of(rows: int, length: int, classes: int, seed: int = 0) -> Tensor:
    """Labels of which row i ignores i mod length."""
    labels = torch.randint(classes, (rows, length), generator=torch.Generator().manual_seed(seed))
    for row in range(rows):
        labels[row, : row % length] = -100
    return labels
