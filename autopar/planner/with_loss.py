"""A loss of the user's as the end of a model: a program that has both never gathers what lies between.

    logits = model(input_ids=ids).logits; F.cross_entropy(…)  →  one forward that returns the loss beside the logits

The model keeps its class, its modules and the names of its parameters: a copy of it gets another `forward`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.planner import python_state
from autopar.planner.plan.record import PlanRecord

Loss = Callable[[Any, Mapping[str, Any]], Tensor]
"""Of a model's outputs and the batch, its tensors by name, to one number."""
Module = TypeVar("Module", bound=nn.Module)
CONTRACT = (
    "a loss is called as loss(outputs, batch), with the batch's inputs by name: "
    'loss=lambda outputs, batch: criterion(outputs, batch["labels"])'
)


class LossAndOutput(NamedTuple):
    """What a model with a loss returns, where its own output has no place for one."""

    loss: Tensor
    output: Any


def with_loss(model: Module, loss: Loss | None, example: Mapping[str, Any] | None = None) -> Module:
    """The model with a forward that computes the loss, too; its modules and parameters are the model's. Without a
    loss the model itself.

    Where outputs are a mapping with a `loss`, or one that takes any key, it stands there, else in `LossAndOutput`.
    Inputs that the model's forward does not take go to the loss alone; those that are None are not in its batch. A
    batch that lacks what the loss asks for (`batch["labels"]`) gives the model's own outputs.

    example: the batch for which a plan is made, which has to have all that the loss asks for.

    Raises:
        AutoparError: no function; one with parameters of its own.
    """
    if loss is None:
        return model
    if not callable(loss):
        raise AutoparError("the loss is no function", values=f"given {str(loss)[:80]}", remedy=CONTRACT)
    for name, parameter in python_state.parameters_of(loss):
        raise _with_parameter(model, name, parameter)
    found = copy.copy(model)
    required = None if example is None else frozenset(key for key, x in example.items() if x is not None)
    vars(found)["forward"] = _Forward(found, vars(model).get("forward"), loss, required)
    return found


def has_own_forward(model: nn.Module) -> bool:
    """Whether something else than a loss stands in the place of the forward of the model's class."""
    found = vars(model).get("forward")
    return found is not None and not (isinstance(found, _Forward) and found.inner is None)


class Watched:
    """A loss, and what it read of Python when it was planned: a program has that as it was."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._before = loss, python_state.numbers_of(loss)

    def check_planned(self, plan: PlanRecord) -> None:
        """Raises AutoparError where the program's loss leads to no parameter, or the loss counted the trace."""
        self.check()
        fixed = any(each.name == "loss" and not each.differentiable for each in plan.interface.outputs)
        if fixed and plan.training and any(each.differentiable for each in plan.interface.parameters):
            raise AutoparError(
                "the loss does not depend on any parameter that is trained",
                remedy="keep .detach(), .item(), numpy and torch.no_grad out of what it returns",
            )

    def check(self) -> None:
        """Raises AutoparError where any of it is another now."""
        if found := python_state.changed(self._before, self._loss):
            name, before, now = found
            raise AutoparError(
                f"the loss reads {name}, which has changed: a program has what it was",
                values=f"{before} when it was planned, now {now}",
                remedy=f"hand it in with the batch, as a tensor: model(**batch, {_word(name)}=torch.tensor(…)), and "
                f'read batch["{_word(name)}"]',
            )


def _word(name: str) -> str:
    """`schedule.weight` → `weight`."""
    return next((word for word in reversed(re.findall(r"[A-Za-z_]\w*", name))), "weight")


def _with_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> AutoparError:
    if own := next((own for own, each in model.named_parameters() if each is parameter), None):
        return AutoparError(
            f"the loss reads a parameter of the model, {own}",
            remedy="add such a term to the loss that comes back: model(**batch).loss + 0.01 * sum(p.pow(2).sum() for p "
            "in model.parameters())",
        )
    return AutoparError(
        f"the loss has a parameter of its own, {name}: only the model's are trained and placed",
        remedy="make a module whose forward calls the model and returns the loss, with all parameters in it; where "
        "they are a second model's (a teacher), compile that one, and hand its outputs in with the batch",
    )


class _Batch(dict[str, Any]):
    """What a loss asks for its inputs."""

    def __missing__(self, name: str) -> Any:
        raise _NotGiven(name)


class _NotGiven(KeyError):
    """An input that this batch does not have."""


class _Forward:
    """The forward of a copy of a model. Copies of that have one of their own."""

    def __init__(
        self, model: nn.Module, inner: Callable[..., Any] | None, loss: Loss, required: frozenset[str] | None
    ) -> None:
        self.model, self.inner, self.loss, self.required = model, inner, loss, required
        own = inspect.signature(self._forward())
        others = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        self._names = {each.name for each in others}
        self._takes_any = len(others) < len(own.parameters)
        rest = inspect.Parameter("batch", inspect.Parameter.VAR_KEYWORD)
        self.__signature__ = own if self._takes_any else own.replace(parameters=[*others, rest])

    def _forward(self) -> Callable[..., Any]:
        return self.inner if self.inner is not None else type(self.model).forward.__get__(self.model)

    def _own(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the model takes of a batch."""
        return {name: x for name, x in inputs.items() if self._takes_any or name in self._names}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own(kwargs)
        outputs = self._forward()(*args, **own)
        given = inspect.signature(self._forward()).bind(*args, **own).arguments if args else {}
        batch = _Batch({name: x for name, x in {**given, **kwargs}.items() if x is not None})
        try:
            loss = self.loss(outputs, batch)
        except _NotGiven as error:
            if self.required is not None and self.required == set(batch):
                raise AutoparError(
                    f"the loss asks for {error.args[0]!r}, which the batch does not have",
                    values=f"given: {', '.join(batch)}",
                    remedy="hand it in with the example batch, as at every step",
                ) from error
            return outputs
        except TypeError as error:
            raise AutoparError(f"the loss cannot be called: {error}", remedy=CONTRACT) from error
        _check(loss)
        return _joined(outputs, loss)


def _check(loss: object) -> None:
    """Raises AutoparError where a loss is not one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() and loss.dim() == 0:
        return
    kind = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise AutoparError(
        "the loss is not one number",
        values=f"it returned {kind}",
        remedy="return a tensor without dims: .mean() or .sum() of the terms; of several results, the loss alone",
    )


def _joined(outputs: Any, loss: Tensor) -> Any:
    """The outputs with the loss."""
    if isinstance(outputs, dict):
        if not dataclasses.is_dataclass(outputs):
            return type(outputs)({**outputs, "loss": loss})
        if "loss" in {field.name for field in dataclasses.fields(outputs)}:
            return type(outputs)(**{**outputs, "loss": loss})
    return LossAndOutput(loss, outputs)
