"""The nonlinearity inside experts as text: nested calls of ATen's pointwise operators on `gate` and `up`.

    silu(gate) * up                    →  "mul(silu(gate), up)"
    clamped, with up + 1 (gpt-oss)     →  "mul(add(clamp(up, -7.0, 7.0), 1), mul(clamp(gate, None, 7.0), …))"

So one operator serves every model, and a program says what it computes. Text is parsed, and only what torch tags as
pointwise is called. `wide` and `narrow` are casts to at least float32, and back to the dtype that came in.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import TorchDispatchMode, tree_leaves
from autopar.operators.basic import wide_dtype
from autopar.operators.expressions import Evaluated, evaluated

_MOST_CHARACTERS = 4000
_ROWS, _WIDTH = 3, 4


def activate(text: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """What the text says of gate[..., F] and up[..., F].

    Raises:
        AutoparError: text of another form, or that calls what is no pointwise operator.
    """
    values = {"gate": gate} if up is None else {"gate": gate, "up": up}
    found: Tensor = parsed(text)(values)
    return found


@lru_cache(maxsize=256)
def parsed(text: str) -> Evaluated:
    """A function of `gate` and `up`."""
    try:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError("it is too long")
        return evaluated(ast.parse(text, mode="eval").body, ("gate", "up"), _function)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AutoparError(
            f"{text[:80]!r} is no activation of experts",
            values=str(error),
            remedy="write nested calls of pointwise operators of torch on gate and up: mul(silu(gate), up)",
        ) from None


def _wide(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def _narrow(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x.to(values["gate"].dtype)


def _function(name: str) -> Callable[..., Any]:
    if name in ("wide", "narrow"):
        return _wide if name == "wide" else _narrow
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("_") and not name.endswith("_") else None
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    if packet is None or not any(torch.Tag.pointwise in each.tags for each in overloads):
        raise ValueError(f"{name} is no pointwise operator")
    return lambda values, *args, **options: packet(*args, **options)


# -------------------------------------------------------------------------------------------------- from code to text


def described(function: Callable[[Tensor], Tensor], *, gated: bool, dtype: torch.dtype) -> tuple[str, bool] | None:
    """The text of what a function does to a product [S, 2F] of which halves are gate and up, or [S, F] if not `gated`;
    and whether its columns alternate between gate and up. None where it does something else.

    It is run on a few numbers of that dtype, outside of any trace.
    """
    x = torch.arange(1.0, _ROWS * _WIDTH * (2 if gated else 1) + 1).reshape(_ROWS, -1).to(dtype)
    watch = _Watch(x, gated)
    try:
        with watch:
            result = function(x)
        text = watch.text_of(result)
        same = text is not None and len(text) <= _MOST_CHARACTERS and result.shape == (_ROWS, _WIDTH)
        if not same or text is None or (gated and watch.interleaved is None):
            return None
        parts = watch.halves[watch.interleaved or False] if gated else (x,)
        agrees = torch.equal(activate(text, *parts), result)
    except (AutoparError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return (text, bool(watch.interleaved)) if agrees else None


class _Watch(TorchDispatchMode):
    """Notes of every value what it is made of."""

    def __init__(self, x: Tensor, gated: bool) -> None:
        super().__init__()
        self._texts: dict[int, str] = {} if gated else {id(x): "gate"}
        self._kept: list[Any] = [x]
        self._dtype, self._gated = x.dtype, gated
        self.halves = {False: x.chunk(2, -1), True: (x[:, ::2], x[:, 1::2])}
        self.interleaved: bool | None = None

    def text_of(self, value: Any) -> str | None:
        """None for what is not made of gate and up by pointwise operators alone."""
        return self._texts.get(id(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        found = func(*args, **options)
        self._kept.append((args, found))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and (text := self._text(func, args, options, each)) is not None:
                self._texts[id(each)] = text
        return found

    def _text(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], made: Tensor) -> str | None:
        if func is torch.ops.aten._to_copy.default and set(options) <= {"dtype"}:
            of = self.text_of(args[0])
            word = {self._dtype: "narrow", wide_dtype(self._dtype): "wide"}.get(options.get("dtype", args[0].dtype))
            return None if of is None or word is None else f"{word}({of})"
        if torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
            words = [*map(self._argument, args), *(_named(key, self._argument(x)) for key, x in options.items())]
            name = func.overloadpacket.__name__
            return None if None in words else f"{name}({', '.join(word for word in words if word is not None)})"
        if self._gated:
            for interleaved, (gate, up) in self.halves.items():
                if self.interleaved in (None, interleaved) and made.shape == gate.shape:
                    for name, half in (("gate", gate), ("up", up)):
                        if torch.equal(made, half):
                            self.interleaved = interleaved
                            return name
        return None

    def _argument(self, value: Any) -> str | None:
        if isinstance(value, Tensor):
            return self.text_of(value)
        return repr(value) if value is None or type(value) in (int, float, bool, str) else None


def _named(name: str, text: str | None) -> str | None:
    return None if text is None else f"{name}={text}"
