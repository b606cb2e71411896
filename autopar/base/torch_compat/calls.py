"""The calls of torch that code makes, as its Python names them, told one by one while it runs.

    y = F.silu(x.mT) + 1      ──►      (Tensor.mT.__get__, (x,)), (F.silu, (…,)), (Tensor.add, (…, 1))

What decides by values (`x.item()`, `if x.any():`, as many rows as a mask chooses) or draws random numbers is told, too:
whoever makes the same calls again would not do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_BY_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_ASKED = frozenset({
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_same_size",
    "is_signed", "is_tensor", "ndimension", "nelement", "numel", "promote_types", "result_type", "size",
    "storage_offset", "stride",
})  # fmt: skip
"""Functions that look at how tensors lie, never at what is in them."""


class Told(Protocol):
    """Who is told of calls. `mark` and `back_to`: forget what was told since; it is told as one call instead."""

    def called(self, function: Any, args: Any, kwargs: Any, found: Any, written: list[Tensor]) -> None:
        """A call that gave `found`, tensors or a flat sequence of them. written: its arguments that it wrote into."""

    def goes_by(self, what: str) -> None:
        """What was done cannot be told as calls. what: the function."""

    def mark(self) -> Any:
        """How much was told."""

    def back_to(self, mark: Any) -> bool:
        """Forget what was told since; whether some of that could not be told as calls. Where all could, nothing is
        forgotten.
        """
        ...


@contextmanager
def telling(told: Told, spelled_out: Mapping[Any, Callable[..., Any]]) -> Iterator[Calls]:
    """Tell of the calls that are made inside, on the CPU. spelled_out: operators -> what they do in calls of torch."""
    calls = Calls(told, spelled_out)
    before = torch.get_rng_state()
    with _Values(calls), calls:
        yield calls
    if not torch.equal(before, torch.get_rng_state()):
        told.goes_by("random numbers")


def has_modes() -> bool:
    """Whether somebody else sees the calls of torch here, or makes others of them (`with torch.device(…):`)."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


@contextmanager
def without_trackers() -> Iterator[None]:
    """Inside, what torch itself hooks on all modules does not run (`FlopCounterMode` and others follow modules so, and
    ask for a gradient of each): a trace is no call of the model's modules.
    """
    module: Any = torch.nn.modules.module
    tables = [module._global_forward_pre_hooks, module._global_forward_hooks]
    kept = [dict(table) for table in tables]
    try:
        for table in tables:
            for key, hook in [*table.items()]:
                if getattr(hook, "__module__", "").startswith("torch.utils."):
                    del table[key]
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)


def shortest(function: Any) -> Any:
    """What does the same in fewer steps of the host."""
    private: Any = torch
    own = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: "_scaled_dot_product_flash_attention_for_cpu"}
    name = own.get(function) if isinstance(function, torch._ops.OpOverloadPacket) else None
    return function if name is None else getattr(private, name, function)


class Calls(TorchFunctionMode):
    """See above. `unseen`: what is called inside counts as one call, or none."""

    def __init__(self, told: Told, spelled_out: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.told, self._spelled_out, self._is_apart = told, spelled_out, False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Calls that are made inside are told by whoever makes them."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    @property
    def is_apart(self) -> bool:
        """Whether calls are not told now."""
        return self._is_apart

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_apart:
            return func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        versions = [x._version for x in given]
        kernel = self._spelled_out.get(func) if isinstance(func, torch._ops.OpOverload) else None
        if kernel is not None and not _has_own_kernel(func):
            mark = self.told.mark()
            with self:
                found = kernel(*args, **kwargs)
            if not self.told.back_to(mark):
                return found
        else:
            found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not _is_of_tensors(found):
            if name != "__get__" and name not in _ASKED:
                self.told.goes_by(name)
            return found
        written = [x for x, before in zip(given, versions, strict=True) if x._version != before or _writes(func)]
        self.told.called(func, args, kwargs, found, written)
        return found


class _Values(TorchDispatchMode):
    """Tells of operators that decide by values, whoever calls them."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._calls.is_apart and _goes_by_values(func, args):
            self._calls.told.goes_by(str(func))
        return func(*args, **(kwargs or {}))


def _goes_by_values(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:  # by numbers it gives as many as there are of them
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not _BY_VALUES.isdisjoint(func.tags)


def _writes(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable


def _has_own_kernel(func: Any) -> bool:
    """Whether the CPU has another kernel of an operator than what it is spelled out as."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"))


def _is_of_tensors(found: Any) -> bool:
    return isinstance(found, Tensor) or (
        isinstance(found, tuple | list) and bool(found) and all(isinstance(x, Tensor) for x in found)
    )


def tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors among arguments."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for each in given:
            yield from tensors_in(each)
    elif isinstance(given, dict):
        for each in given.values():
            yield from tensors_in(each)
