"""Parameters that only ranks of other pipeline stages hold, as a script meets them in a module: all but their values.

compiled.lm_head.weight.shape      on every rank; so dtype, device, numel(), requires_grad_(False), repr(compiled)
compiled.lm_head.weight.sum()      refused on ranks that do not hold it
compiled.parameters()              the rank's own, as state_dict()
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import plain_functions

OUTSIDE = frozenset({
    "__deepcopy__", "__format__", "__hash__", "__len__", "__repr__", "dim", "element_size", "get_device", "is_complex",
    "is_floating_point", "ndimension", "nelement", "numel", "requires_grad_", "size",
})  # fmt: skip
"""Functions that look at a tensor's outside."""
OF_OUTSIDE = frozenset({
    "device", "dtype", "grad", "grad_fn", "is_leaf", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
})  # fmt: skip
"""Attributes that say of the outside."""


class Elsewhere(Tensor):
    """A parameter without values. name: the model's. ranks: those along the pipeline that hold it."""

    _is_param = True  # for isinstance(…, nn.Parameter)
    _name: str
    _ranks: tuple[int, ...]
    _on: torch.device

    @staticmethod
    def of(like: Tensor, name: str, ranks: tuple[int, ...], device: torch.device) -> Elsewhere:
        """What stands for a parameter that lies like `like`. device: of those that this rank holds."""
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
        found: Elsewhere = Tensor._make_subclass(Elsewhere, empty, like.requires_grad)
        found._name, found._ranks, found._on = name, ranks, device
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of the parameters which this rank holds."""
        return self._on

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        return self

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self._name}, shape={tuple(self.shape)}, dtype={self.dtype}, held by {self._held()})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def _held(self) -> str:
        return f"pipeline rank {', '.join(map(str, self._ranks))}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What looks at the outside; the rest is refused."""
        kwargs = kwargs or {}
        is_attribute = func.__name__ in ("__get__", "__set__")
        name = func.__self__.__name__ if is_attribute else func.__name__
        if name in (OF_OUTSIDE if is_attribute else OUTSIDE):
            with plain_functions():
                return func(*args, **kwargs)
        found = next((x for x in (*args, *kwargs.values()) if isinstance(x, Elsewhere)), None)
        raise AutoparError(
            "the values of a parameter are asked for on a rank that does not hold them"
            if found is None
            else f"the values of {found._name} are not on this rank",
            values=f"{name}(), of what {'other ranks hold' if found is None else found._held() + ' holds'}",
            remedy="Call the module that has it, on every rank, which lends it for the call; or look at it on a rank "
            "that holds it (among named_parameters() there). Here shape, dtype and device are known",
        )


class Held(dict[str, Any]):
    """A module's parameters: None for whoever lists those of other stages, what stands for one for whoever asks for it
    by its name, as `module.weight` does.
    """

    def __init__(self, parameters: Mapping[str, Any], elsewhere: dict[str, Elsewhere]) -> None:
        super().__init__(parameters)
        self._elsewhere = elsewhere

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return self._elsewhere.get(name) if found is None else found

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, None if isinstance(value, Elsewhere) else value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return Held({name: copy.deepcopy(value, memo) for name, value in self.items()}, self._elsewhere)

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)


def stand_in(module: nn.Module, name: str, parameter: Elsewhere) -> None:
    """Have a module say of a parameter, which it lacks, what it knows."""
    held = module._parameters
    if not isinstance(held, Held):
        held = module._parameters = Held(held, {})
    held._elsewhere[name] = parameter
    held[name] = None
