"""Steps of elementwise optimizers on the local tensors of distributed parameters: the same numbers, without DTensor's
dispatch, which costs as much as the arithmetic of a small tensor (gpt2's 52 parameters: 21 ms of CPU time where 13 do).

    pre-hook    the user's optimizer  ->  a double of its class: local parameters, gradients and states, shared memory
    step        runs on the double
    post-hook   states that the step made become DTensors, in the user's optimizer

The user's optimizer is not written to before its step has ended, so a step that raises leaves it as it was.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.torch_compat.distributed import dtensor_like, local_tensor, num_step_hooks
from autopar.runtime.whole_update import FINISH

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def on_local_tensors(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The arguments of a step on local tensors instead of `optimizer`'s own; None where it has to be on DTensors.

    For optimizers whose update treats each element by itself. All parameters with a gradient must be taken over, with
    gradients and states that lie as they do. A closure would fill the gradients of the DTensors, and so might other
    hooks than autopar's two, or look at states that are not there yet.
    """
    is_plain = len(args) == 1 and not any(value is not None for value in kwargs.values())
    if not is_plain or num_step_hooks(optimizer) > 2 or torch.compiler.is_compiling():
        return None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    # GradScaler tells fused optimizers its scale so, in tensors that fit the parameters.
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return None
    pairs = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not pairs or not all(_lies_plainly(p, grad, optimizer) for p, grad in pairs):
        return None
    return (_double(optimizer),), kwargs


def take_over_states(optimizer: Optimizer, args: tuple[Any, ...]) -> None:
    """After the step: what it made, and that the parameters were written, also for who looks at the DTensors alone."""
    double = args[0]
    if double is optimizer:
        return
    if hasattr(double, FINISH):
        getattr(double, FINISH)()
        return
    written: list[Tensor] = []
    for group, own in zip(optimizer.param_groups, double.param_groups, strict=True):
        for parameter, local in zip(group["params"], own["params"], strict=True):
            if local.grad is None:
                continue
            written.append(parameter)
            state = optimizer.state[parameter]
            for name, value in double.state[local].items():
                before = state.get(name)
                if isinstance(before, DTensor) and local_tensor(before) is value:
                    continue
                is_like_parameter = isinstance(value, Tensor) and value.shape == local.shape
                state[name] = dtensor_like(parameter, value) if is_like_parameter else value
        # Counters that optimizers of others keep in their groups.
        group.update({name: value for name, value in own.items() if name not in ("params", "foreach")})
    kept = ("param_groups", "state")
    vars(optimizer).update({name: value for name, value in vars(double).items() if name not in kept})
    torch.autograd.graph.increment_version(written)


def _lies_plainly(parameter: Tensor, grad: Tensor | None, optimizer: Optimizer) -> bool:
    """Whether the gradient and all states of a taken-over parameter are DTensors placed as it is, or plain numbers."""
    # A parameter of no dim looks like a step counter.
    if not isinstance(parameter, DTensor) or not hasattr(parameter, "_autopar_placed") or parameter.ndim == 0:
        return False
    state = optimizer.state.get(parameter, {})
    others = [value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0]
    return all(
        isinstance(other, DTensor)
        and other.placements == parameter.placements
        and other.device_mesh == parameter.device_mesh
        and other.shape == parameter.shape
        for other in (grad, *others)
    )


def _double(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and options, of which only parameters that have a gradient keep their states."""
    double = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        locals_ = [_local_parameter(parameter) for parameter in group["params"]]
        for parameter, local in zip(group["params"], locals_, strict=True):
            if local.grad is not None and parameter in optimizer.state:
                states[local] = {name: _local(value) for name, value in optimizer.state[parameter].items()}
        groups.append({**group, "params": locals_})
        if "foreach" in group and not group.get("foreach") and not group.get("fused"):
            # What torch takes for DTensors: on plain tensors of a GPU it would take more memory.
            groups[-1]["foreach"] = False
    double.param_groups, double.state = groups, cast("Any", states)
    return double


def _local_parameter(parameter: Tensor) -> Tensor:
    """The memory of this rank's piece under a name of its own, with its gradient; the parameter where it has none."""
    if parameter.grad is None:
        return parameter
    assert isinstance(parameter, DTensor)
    local = local_tensor(parameter).detach()
    local.grad = _local(parameter.grad)
    return local


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value
