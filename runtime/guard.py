"""Before and after a step of any optimizer: whether it can train a compiled model's parameters, and on what."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.base.errors import AutoparError
from autopar.runtime import state
from autopar.runtime.engine import Engine
from autopar.runtime.expert_layers import is_placed
from autopar.runtime.known import ENGINES, is_new
from autopar.runtime.local_update import Arguments, on_local_tensors, take_over_states
from autopar.runtime.optimizers import check_optimizer, gathers, held_by, is_elementwise
from autopar.runtime.place_experts import bring_home
from autopar.runtime.whole_update import on_whole_tensors


def _follow_experts(optimizer: Optimizer, engine: Engine) -> None:
    """States that are loaded, or given out, have the model's order: experts that lie otherwise go home before."""
    if is_placed(engine.inner):
        if optimizer.state:  # loaded before its first step
            bring_home(engine, optimizer)
        elif not is_elementwise(optimizer) and gathers(optimizer) is None:
            raise AutoparError(
                f"{type(optimizer).__name__} is not known to treat each element by itself, and experts are placed",
                remedy="Use an elementwise optimizer such as AdamW, or call compiled.experts_home() first",
            )
    known = ref(engine)

    def home(*_: Any) -> None:
        held = known()
        if held is not None:
            bring_home(held)

    optimizer.register_load_state_dict_pre_hook(home)
    optimizer.register_state_dict_pre_hook(home)


@cache
def guard_optimizers() -> None:
    """Registered once: before a step, an optimizer is asked for parameters that it cannot train; where it can, and
    treats each element by itself, it steps on local tensors.
    """
    before: Any = torch.compiler.disable(_guard)  # of torch.compile around optimizer.step()
    after: Any = torch.compiler.disable(_stepped)
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    take_over_states(optimizer, args)
    trained = {id(parameter) for parameter in held_by(optimizer)}
    for engine in ENGINES:
        if not trained.isdisjoint(engine.parameter_ids):
            engine.agreement.stepped()


def _guard(optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
    replaced = [parameter for parameter in held_by(optimizer) if hasattr(parameter, "_autopar_replaced")]
    if replaced:
        raise AutoparError(
            f"this {type(optimizer).__name__} was made before autopar.compile, on parameters the model no longer has",
            values=f"{len(replaced)} of its parameters were replaced",
            remedy="Make the optimizer after compile, from compiled.parameters()",
        )
    check_optimizer(optimizer)
    trained = {id(parameter) for parameter in held_by(optimizer)}
    is_first = is_new(optimizer)
    for engine in ENGINES:
        if not trained.isdisjoint(engine.parameter_ids):
            engine.granted.settle()
            engine.agreement.note(optimizer)
            if is_first:
                _follow_experts(optimizer, engine)
            state.show_optimizer_whole(optimizer, engine.comm.timeout_s)
            state.cut_states(optimizer, engine.inner, engine.parameter_ids)
    asked = [e.watch for e in ENGINES if e.watch is not None and not trained.isdisjoint(e.trained_ids())]
    for watch in sorted(asked, key=lambda watch: watch.number):
        watch.before_step(optimizer)
    if is_elementwise(optimizer):
        return on_local_tensors(optimizer, args, kwargs)
    how = gathers(optimizer)
    if how is None:
        return None
    stages = [e for e in ENGINES if not trained.isdisjoint(e.parameter_ids) and e.pipeline_axis() is not None]
    name = type(optimizer).__name__
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise AutoparError(
            f"{name} cannot step with a closure: it steps on whole tensors, which a closure does not fill",
            remedy="Compute the gradients before optimizer.step()",
        )
    if how == "all" and stages:
        raise AutoparError(
            f"{name} looks at whole tensors, perhaps at several together, which lie on the ranks of several stages",
            remedy="Use an elementwise optimizer such as AdamW, or a mesh without a pipeline",
        )
    return on_whole_tensors(optimizer, one_by_one=how == "one by one"), kwargs
