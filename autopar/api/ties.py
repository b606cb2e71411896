"""Parameters that a script ties behind `compile`, before anything is planned: `model.head.weight = model.a.weight`."""

from __future__ import annotations

from torch import nn


def follow_ties(blueprint: nn.Module, model: nn.Module, *, is_planned: bool) -> None:
    """Have names share a parameter in the copy that is planned where they do in the model. Names that
    only one of them has stay as they are.
    """
    if is_planned:
        return
    owns = dict(model.named_parameters(remove_duplicate=False))
    shown: dict[int, nn.Parameter] = {}
    for path, module in blueprint.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            own = owns.get(f"{path}.{name}" if path else name)
            if own is not None and parameter is not None and own.shape == parameter.shape:
                module._parameters[name] = shown.setdefault(id(own), parameter)
