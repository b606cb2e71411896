"""What decides, beside its values and the batch, what a forward of a model is: whether it is as it was."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from autopar.base.huggingface.adapters import SWITCHES
from autopar.runtime.hooks import BACKWARD, FORWARD


class Snapshot:
    """What of a model, beside its values, decides what a forward of it is: as one forward found it."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = [
            (vars(module), module, type(module), module.training, list(module._modules.values()),
             list(map(id, module._parameters.values())))
            for module in modules
        ]  # fmt: skip
        inside = [getattr(each, kind) for each in modules[1:] for kind in {**FORWARD, **BACKWARD}]
        self._no_hooks = [hooks for hooks in inside if not hooks]
        self._hooks = [hooks for hooks in inside if hooks]
        self._keys = [*map(tuple, self._hooks)]
        numbers = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if (type(value) in (bool, int, float) and name != "training") or name in SWITCHES
        ]
        self._holders, self._names = [held for held, *_ in numbers], [name for _, name, _ in numbers]
        self._values = [list(x) if isinstance(x, list) else x for *_, x in numbers]
        self._parameters = list(model.parameters())  # held, so that their ids are nobody else's
        self._grads = _grads(self._parameters)

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        for held, module, kind, training, children, parameters in self._modules:
            if (
                type(module) is not kind
                or held["training"] is not training
                or [*held["_modules"].values()] != children
                or [*map(id, held["_parameters"].values())] != parameters
            ):
                return False
        if [*map(dict.get, self._holders, self._names)] != self._values:
            return False
        if any(self._no_hooks) or [*map(tuple, self._hooks)] != self._keys:
            return False
        return _grads(self._parameters) == self._grads


def _grads(parameters: Sequence[nn.Parameter]) -> list[tuple[bool, bool]]:
    """Of each, whether it wants gradients, and whether it has none."""
    return [(p.requires_grad, p.grad is None) for p in parameters]
