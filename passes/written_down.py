"""Values that a forward writes down or hands to a check of torch's, while a model is traced.

print(f"norm {h.norm():.3f}")          a text that somebody reads: nothing comes of it, and nothing is written
torch._check(x.item() > 0)             a check, as `assert x.item() > 0` is (`checks.py`)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import checking_tensors
from autopar.passes.checks import frame_of_model
from autopar.passes.source import expression_asked, is_gone_by
from autopar.passes.usual import line_of


class WrittenDown(TorchFunctionMode):
    """While a model is traced: texts of its values."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, what forward writes and no program does."""
        return tuple(
            f"forward() writes down a value ({line}), which a program does not: return it, and print it outside of "
            "forward()"
            for line in self._lines
        )

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward whose checks of torch's may be given tensors."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with checking_tensors():
                return forward(*args, **kwargs)

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__format__ and compat.node_of(args[0]) is not None and compat.known_value(args[0]) is None:
            frame = frame_of_model(sys._getframe(1), own=True)
            source, node = (None, None) if frame is None else expression_asked(frame)
            if source is None or node is None or is_gone_by(node, source):
                raise AutoparError(
                    "forward() writes down a value of a tensor, which nobody has when a program is made",
                    where=line_of(frame),
                    remedy="return the tensor, and write it down outside of forward()",
                )
            self._lines[line_of(frame)] = None
            return "?"
        return func(*args, **(kwargs or {}))
