"""Steps of optimizers whose update looks at whole tensors (Muon's products, Adafactor's means): on whole tensors.

    pre-hook    parameters, gradients and states are gathered  ->  a double of the optimizer, plain tensors
    step        runs on the double, the same on every rank
    post-hook   each rank keeps its pieces; states that lie as no parameter does stay whole

Where a parameter's update looks at that parameter alone, one after the other is gathered and stepped, so that only one
is whole at a time. Every rank computes every update: what that costs is said once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.text import format_bytes
from autopar.base.torch_compat.distributed import is_split, local_tensor
from autopar.runtime.expert_layers import from_slots
from autopar.runtime.seen_whole import cut

logger = logging.getLogger("autopar")

FINISH = "_autopar_finish"
"""Of a double: what to do after its step."""


def on_whole_tensors(optimizer: Optimizer, *, one_by_one: bool) -> tuple[Optimizer]:
    """The arguments of a step on whole tensors. All steps but the last are done here. Collective."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    _say_the_price(optimizer, trained, one_by_one)
    rounds = [[p] for p in trained] if one_by_one and trained else [trained]
    for some in rounds[:-1]:
        double = _double(optimizer, some)
        step = type(optimizer).step
        raw: Any = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        raw(double)
        getattr(double, FINISH)()
    return (_double(optimizer, rounds[-1]),)


def _say_the_price(optimizer: Optimizer, trained: Sequence[Tensor], one_by_one: bool) -> None:
    split = any(isinstance(p, DTensor) and any(map(is_split, p.placements)) for p in trained)
    if not split or getattr(optimizer, "_autopar_price_said", False):
        return
    optimizer._autopar_price_said = True  # type: ignore[attr-defined]
    size = format_bytes(sum(2 * p.numel() * p.element_size() for p in trained))
    logger.warning(
        "autopar: %s looks at whole tensors: each step gathers parameters, gradients (%s) and states on every rank%s; "
        "an elementwise optimizer such as AdamW needs no gather",
        type(optimizer).__name__, size, ", one parameter at a time" if one_by_one else "",
    )  # fmt: skip


def _double(optimizer: Optimizer, some: Sequence[Tensor]) -> Optimizer:
    """An optimizer of the same class and options for these parameters, whole. `FINISH` writes back what it did."""
    double = object.__new__(type(optimizer))
    before = dict(vars(optimizer))
    vars(double).update(before)
    wanted = {id(p) for p in some}
    whole = {id(p): _whole_parameter(p) for p in some}
    states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [p for p in group["params"] if id(p) in wanted]
        groups.append({**group, "params": [whole[id(p)] for p in own]})
        for p in own:
            if p in optimizer.state:
                states[whole[id(p)]] = {name: _whole(value, p) for name, value in optimizer.state[p].items()}
    double.param_groups, double.state = groups, cast("Any", states)

    def finish() -> None:
        for p in some:
            optimizer.state[p] = {name: _piece(value, p) for name, value in states[whole[id(p)]].items()}
            if isinstance(p, DTensor):
                local_tensor(p).copy_(local_tensor(cut(whole[id(p)], p)))
        torch.autograd.graph.increment_version([p for p in some if isinstance(p, DTensor)])
        if len(some) != 1:  # counters that an optimizer keeps beside its states
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in own.items() if name != "params"})
            kept = ("param_groups", "state", FINISH)
            vars(optimizer).update({name: value for name, value in vars(double).items() if name not in kept})

    setattr(double, FINISH, _without_gradients(finish))
    return double


def _without_gradients(act: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            act()

    return run


def _whole_parameter(parameter: Tensor) -> Tensor:
    """A leaf with the whole values and gradient; a plain parameter itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    found = _whole(parameter, parameter).requires_grad_(parameter.requires_grad)
    found.grad = None if parameter.grad is None else _whole(parameter.grad, parameter)
    return found


def _whole(value: Any, parameter: Tensor) -> Any:
    """The whole of what lies as the parameter does; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    detached: Any = value.detach()
    full: Tensor = detached.full_tensor()
    if value is not parameter:
        full = from_slots(full, parameter)
    return full.clone() if full.data_ptr() == local_tensor(value).data_ptr() else full


def _piece(value: Any, parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return cut(value.detach(), parameter)
