"""What every rank has to do together and what has a price, the first time that a script asks for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.base.text import format_bytes
from autopar.runtime.communicator import Communicator
from autopar.runtime.meeting import meet

logger = logging.getLogger("autopar")


class FirstTimes:
    """Of one compiled model. is_apart: ranks hold other outputs (of a pipeline, its last stage does): none waits for
    others.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.is_apart = comm, False
        self._said: set[str] = set()

    def choose(self, name: str) -> Communicator:
        """The first time that the largest of an output is looked for: every rank has to. Who sends for it."""
        what = f"look for the largest of {name}"
        if not self.is_apart and not {name, what} & self._said:
            self._said.add(what)
            meet(what, self.comm.timeout_s, f"Ask for the largest of {name} on every rank (and print on one)")
        return self.comm

    def arrive(self, name: str, axis: str, piece: Tensor) -> Tensor:
        """Of what one stage of a pipeline made, this rank's piece on every stage. Collective.

        piece: where it was not made, zeros.
        """
        what = f"look at {name}, which one stage has made"
        if what not in self._said:
            self._said.add(what)
            meet(what, self.comm.timeout_s, f"Look at {name} on every rank (and print on one)")
        self.comm.at(what)
        with torch.no_grad():
            return self.comm.all_reduce(piece.contiguous(), axis)

    def gather(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """The first time that an output is looked at whole: every rank has to, and it has a price."""
        if name in self._said:
            return
        self._said.add(name)
        if not self.is_apart:
            remedy = f"Look at {name} on every rank (and print on one), or at this rank's piece: {name}.to_local()"
            meet(f"look at the whole {name}", self.comm.timeout_s, remedy)
        size = format_bytes(math.prod(shape) * dtype.itemsize)
        logger.warning(
            "autopar: %s is used as a whole tensor: wherever that is, %s are gathered on every rank (a loss that the "
            "model computes itself, and %s.to_local(), need no gather)", name, size, name,
        )  # fmt: skip

    def call(self, name: str, num_bytes: int) -> bool:
        """Whether it is the first time that a module is called by itself: every rank has to, and it has a price."""
        if name in self._said:
            return False
        self._said.add(name)
        meet(f"call {name}", self.comm.timeout_s, f"Call {name} on every rank: each hands in its pieces")
        logger.warning(
            "autopar: %s is called by itself: wherever that is, %s of its parameters are gathered on every rank, and "
            "each computes all of it. What forward returns (output_hidden_states=True), and a loss that is planned "
            "with the model (loss=), need not", name, format_bytes(num_bytes),
        )  # fmt: skip
        return True
