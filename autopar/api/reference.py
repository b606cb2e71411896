"""What the eager model gives: the side of a proof on which nothing is autopar's but the random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.api.comparing import Expected, distance
from autopar.api.draws import draws_of, handed
from autopar.api.in_parts import Draws, batch_of, by_microbatches, with_tensors
from autopar.api.promote import only
from autopar.base.errors import AutoparError
from autopar.base.huggingface import experts, huggingface
from autopar.base.torch_compat import tracing
from autopar.base.torch_compat.control_flow import control_flow_by_torch
from autopar.base.torch_compat.functions import run_backward
from autopar.ir.program import Program
from autopar.ir.values import ValueRef, gradient_key
from autopar.passes.observers import Observers
from autopar.passes.told import as_told, left_on


class NotEager(AutoparError):
    """The model itself does not run where it is compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is run. model: what runs changes it. inputs: its batch, and tensors: that of a program, by name."""

    model: nn.Module
    inputs: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    seed: int
    dtype: torch.dtype


def expected(program: Program, case: Case, source: str = "") -> Expected:
    """What the eager model gives: outputs, gradients, and the buffers as it leaves them: those that the program says it
    changes, and all others that are not what they were.

    Where it draws random numbers, it gets those that the program draws (`draws.py`). Which rows a microbatch has, and
    so what it draws, is decided when the program is lowered: for microbatches that draw it has to be, with its
    `source`; then the model runs on one after the other.
    """
    assert program.phase not in ("captured", "outlined"), "the reference needs the roots of a differentiated program"
    model, inputs, tensors, seed = case.model, case.inputs, case.tensors, case.seed
    model.zero_grad()
    changed = {name for name, _ in program.updates}
    others = {name: x.detach().clone() for name, x in model.named_buffers() if name not in changed}
    wanted = {name: tensors[name].detach().clone().requires_grad_() for name in sorted(program.wanted)}
    if wanted:
        inputs, tensors = with_tensors(inputs, wanted), {**tensors, **wanted}
    with (
        only(case.dtype),
        huggingface.training_capture(model),
        experts.wide(),
        torch.set_grad_enabled(program.training),
    ):
        if program.microbatches > 1 and draws_of(program, seed):
            results = by_microbatches(program, model, inputs, batch_of(program, source, tensors), seed, _run)
        else:
            results = _run(program, model, inputs, handed(draws_of(program, seed)), {})
    grads: dict[str, torch.Tensor] = {}
    if program.training:
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in model.named_parameters()}
        grads = {n: grads[n] for n, p in model.named_parameters() if p.requires_grad or p.grad is not None}
        grads |= {gradient_key(n): torch.zeros_like(x) if x.grad is None else x.grad for n, x in wanted.items()}
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A table that became longer stays as it was in a program (`passes/reassigned.py`); what is made of it is compared.
    tables = _not_kept(model) & held.keys() & others.keys()
    longer = {name for name in tables if held[name].shape != others[name].shape}
    changed |= {name for name, was in others.items() if name in held and not _is_as_it_was(held[name], was)} - longer
    updates = {name: held[name].detach().clone() for name in sorted(changed)}
    return results, grads, updates


def _not_kept(model: nn.Module) -> set[str]:
    """The buffers that are in no checkpoint."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _is_as_it_was(now: torch.Tensor, was: torch.Tensor) -> bool:
    if now.shape != was.shape or now.dtype != was.dtype:
        return False
    return bool(((now == was) | ((now != now) & (was != was))).all())  # what is no number stays none


def rounding(
    program: Program,
    case: Case,
    source: str,
    state: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """How far the eager model's gradients move when every parameter does by one unit of rounding, up or down.

    Changes the parameters, and sets buffers back to `state` first: forward may have changed them.
    """
    generator, model = torch.Generator().manual_seed(case.seed), case.model
    before = {name: value.clone() for name, value in gradients.items()}
    with torch.no_grad():
        changed = {name for name, _ in program.updates}
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name in state and (name in changed or not isinstance(tensor, torch.nn.Parameter)):
                if tensor.shape != state[name].shape:  # a table that became longer
                    tensor.data = torch.empty_like(state[name], dtype=tensor.dtype)
                tensor.copy_(state[name])
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + torch.finfo(case.dtype).eps * signs.to(case.dtype))
    _, moved, _ = expected(program, case, source)
    return {name: distance(moved[name], value) for name, value in before.items()}


def _run(
    program: Program, model: nn.Module, inputs: Mapping[str, Any], draws: Draws, scales: Mapping[ValueRef, float] | None
) -> tuple[torch.Tensor, ...]:
    """Forward and backward of the eager model; gradients add up. scales: of the roots' gradients, instead of 1; None:
    forward alone.
    """
    observers = Observers(model)
    with draws, control_flow_by_torch(), as_told(model, program.told), observers.watched():
        output = _eager(model, inputs)
        left = left_on(model, program.carried, observers.in_eager())
    results = tuple(x for x in map(_as_tensor, [*tracing.tree_flatten(output)[0], *left]) if x is not None)
    if program.branches:  # the program's last output: it is to go the ways that eager does
        results = (*results, torch.tensor(len(program.branches)))
    if program.training and scales is not None:
        # What depends on parameters here, and does not in the program, has lost its gradient there: not here.
        roots = [
            (value, ref)
            for value, ref in zip(results, program.outputs, strict=True)
            if ref in program.roots or (value.requires_grad and not program.port(ref).differentiable)
        ]
        given = [torch.full_like(value, scales.get(ref, 1.0)) for value, ref in roots]
        try:
            with draws, control_flow_by_torch():  # what a checkpoint runs again draws what it drew
                run_backward([value for value, _ in roots], given)
        except RuntimeError as error:
            raise NotEager(
                f"{type(model).__name__} has no backward in eager, so there is nothing to compare with: "
                f"{str(error).partition('. Hint')[0]}",
                remedy="check that the loss's backward() runs in eager mode (a tensor that is written after it was "
                "used wants a clone())",
            ) from error
    return tuple(value.detach() for value in results)


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    """An output: a tensor, or a number that forward read of one; None of a text."""
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    return torch.tensor(leaf) if type(leaf) is int else leaf if isinstance(leaf, torch.Tensor) else None


def _eager(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the model gives.

    Raises:
        NotEager: it does not run on the CPU in this dtype.
    """
    try:
        return model(**inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        dtype = str(next(dtypes, torch.get_default_dtype())).removeprefix("torch.")
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "check that model(**batch) runs in eager mode on the CPU"
        if dtype == "float64":
            remedy = f"verify(dtype=torch.float32) where an operator has no float64; else {remedy}"
        raise NotEager(
            f"{type(model).__name__} does not run in {dtype} on the CPU, so there is nothing to compare with: {said}",
            where=tracing.model_line(error),
            remedy=remedy,
        ) from error
