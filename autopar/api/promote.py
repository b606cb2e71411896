"""Keep a computation in one floating-point type, whatever casts the model writes.

Models cast on purpose (Llama's norms run in float32), so a float64 model is not a float64 computation, and sums in
another order differ by float32 rounding. Proofs need rounding out of the way: inside `only(torch.float64)` every
narrower floating-point type that the model names is read as float64, in eager mode and while tracing alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROWER = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex32, torch.complex128})
_NAMED_CASTS = {"float", "half", "bfloat16", "double"}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What torch makes of whole numbers where it makes fractions of them (the root of an integer), and of no dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_dtype(given: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a type is where `dtype` stands for all floating-point ones: complex numbers are pairs of these."""
    if given.is_complex:
        return dtype.to_complex()
    return dtype if given.is_floating_point else given


class only(TorchFunctionMode):
    """Inside, floating-point dtypes that the code names are replaced by `dtype`; so is torch's own, where it names none
    (`torch.ones(8)`), which is the process's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> only:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(self._before.pop())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "meta":
            return func(*args, **kwargs)  # of the tracer: what a tensor is, not what the model makes of it
        if getattr(func, "__name__", "") in _NAMED_CASTS and args and isinstance(args[0], torch.Tensor):
            return args[0].to(self._dtype)
        given = [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        mixed = self._dtype in given
        args = tuple(self._replace(arg, mixed and (place > 0 or _is_sparse(arg))) for place, arg in enumerate(args))
        kwargs = {key: self._replace(value, mixed) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _replace(self, value: Any, mixed: bool) -> Any:
        """mixed: a tensor may be one that is neither a parameter nor a buffer (of a loss: weights of classes), which
        stayed what it was.
        """
        if isinstance(value, torch.dtype):
            return in_dtype(value, self._dtype) if value in _NARROWER | _COMPLEX else value
        is_other = mixed and isinstance(value, torch.Tensor) and value.dtype in _NARROWER - {self._dtype}
        return value.to(self._dtype) if is_other else value


def _is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor, which stands first in its products."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided
