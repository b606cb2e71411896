"""What a program returns under several names: to autograd each is a tensor of its own."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def apart(outputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The outputs, where one stands that stood before, a copy: `loss` and `loss.detach()` are the same to a program, of
    which only one has a gradient.
    """
    seen, found = set[int](), list[Tensor]()
    for value in outputs:
        found.append(value.clone() if id(value) in seen else value)
        seen.add(id(value))
    return tuple(found)
