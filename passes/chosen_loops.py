"""A loop over what a mask marks, as experts that some token chose: it is run for all, and nothing comes of others.

    for expert in hit.nonzero():                    hit[E]; expert e in turn
        rows = torch.where(index == expert)[0]      index == e, where hit[e]
        out.index_add_(0, rows, f[expert](x[rows]))

Inside, a mask chooses nothing in a round whose own mark is not set, so all that is written to rows that a mask chooses
stays as it was. That nothing else comes of a round is checked: no value that is made in it is used behind it, but for
what is so written; and one of the model's two traces has a first and a last round more, in which nothing is written:
what Python counted would be another number there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, fx

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import lifted
from autopar.passes.checks import frame_of_model

MOST_ROUNDS = 1024
"""Of a loop: those over tokens would make programs of as many copies of its body."""

_CHECK = torch.ops.aten._assert_tensor_metadata.default
"""What export notes of a cast."""


@dataclass(slots=True)
class Round:
    """One round that is under way. mark: whether eager has it, a traced bool; None in a round that nobody has. beyond:
    whether eager would fail in it, as there is no such expert: what is written then is NaN.
    """

    mark: Tensor | None
    beyond: bool = False
    nodes: list[fx.Node] = field(default_factory=list)
    written: set[fx.Node] = field(default_factory=set)


class Loops:
    """The loops of a trace. extra: whether each has two rounds more, which nothing comes of."""

    def __init__(self, extra: bool) -> None:
        self.extra = extra
        self.now: Round | None = None
        self._done: list[Round] = []
        self._left = False
        self._line: str | None = None

    def over(self, mask: Tensor, *, with_dim: bool) -> Over | None:
        """What goes through the marks of a mask [E]; None where that is no loop that can be had. with_dim: whether each
        is a tensor of one element, or has no dims.
        """
        if self.now is not None or mask.dim() != 1 or not 0 < mask.shape[0] <= MOST_ROUNDS:
            return None
        return Over(self, mask, with_dim)

    def rounds(self, mask: Tensor) -> Iterator[int]:
        """Through all numbers, each a round."""
        if (frame := frame_of_model(sys._getframe(1))) is not None:
            self._line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        last = mask.shape[0] - 1
        numbers = [*[0] * self.extra, *range(last + 1), *[0] * self.extra]
        for place, number in enumerate(numbers):
            dry = self.extra and place in (0, len(numbers) - 1)
            self.now = Round(None if dry else mask.select(0, number))
            count = compat.count_recorded()
            try:
                yield number
            except GeneratorExit:
                self._left = True
                raise
            finally:
                done, self.now = self.now, None
                done.nodes = list(compat.recorded_since(count))
                self._done.append(done)

    def item(self, x: Tensor, number: int, *, with_dim: bool) -> Tensor:
        """x[number], or x[[number]], in the round that is under way."""
        assert self.now is not None
        if not -len(x) <= number < len(x):
            self.now.beyond, number = True, len(x) - 1
        number %= len(x)
        return x[number : number + 1] if with_dim else x[number]

    def narrowed(self, mask: Tensor) -> Tensor:
        """A mask in the round that is under way."""
        return mask if self.now is None or self.now.mark is None else mask & self.now.mark

    def wrote(self, count: int) -> None:
        """What was recorded since is written to rows that a mask chooses."""
        if self.now is not None:
            self.now.written.update(compat.recorded_since(count))

    def check(self) -> None:
        """Look at all that comes of rounds.

        Raises:
            AutoparError: more than what they write, or a loop was left, where eager may go on to another round.
        """
        if self._left:
            raise looped(self._line)
        for done in self._done:
            own = set(done.nodes)
            for node in done.nodes:
                behind = [user for user in node.users if user not in own and user.target is not _CHECK]
                if behind and node not in done.written:
                    raise looped(self._line)


@dataclass(frozen=True, slots=True)
class Over:
    """What `unbind` gives of marks: who goes through it goes through the rounds."""

    loops: Loops
    mask: Tensor
    with_dim: bool

    def __iter__(self) -> Iterator[Tensor]:
        for number in self.loops.rounds(self.mask):
            yield lifted(torch.tensor([number] if self.with_dim else number))

    def __len__(self) -> int:
        raise looped()


def looped(line: str | None = None) -> AutoparError:
    """What a loop that cannot be had is refused with."""
    return AutoparError(
        "forward() goes through the rows that a mask chooses one by one: how many there are, values say",
        where=line,
        remedy="in each round write to rows that a mask chooses and nothing else, work on all rows and mark those that "
        "count with a mask (torch.where), or choose them outside of forward()",
    )
