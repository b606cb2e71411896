"""Programs of one kind of batch that go other ways at branches which values decide: which one a batch is for.

    outputs = program(batch)            its last output: the number of the first branch that went another way
    other = other_ways(branches, …)     None, or the ways that are known now: all before that branch, and its other one

The ranks have to say the same; nothing that forward changes is kept of a run that went another way. Reading the number
waits for the device, as eager does at such a branch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.errors import AutoparError

Late = list[tuple[Tensor, Tensor]]
"""Leaves with their gradients, which are added once it is known that the batch went the program's way."""


def add_gradients(late: Late) -> None:
    """To `.grad`, from the leaves themselves, so that accumulation and their hooks are autograd's."""
    if late:
        torch.autograd.backward([leaf for leaf, _ in late], [gradient for _, gradient in late])


def other_ways(branches: Sequence[tuple[bool, str]], outputs: Sequence[Tensor | None]) -> tuple[bool, ...] | None:
    """The ways of the first branches, where they are not the program's; None where it went as it says."""
    if not branches:
        return None
    first = outputs[-1]
    assert first is not None
    number = int(first)
    if number == len(branches):
        return None
    return (*(way for way, _ in branches[:number]), not branches[number][0])


def check_same_ways(ways: Sequence[bool] | None, branches: Sequence[tuple[bool, str]], device: torch.device) -> None:
    """Collective, of all ranks. ways: as `other_ways` gives them.

    Raises:
        AutoparError: ranks go different ways.
    """
    if dist.get_world_size() == 1:
        return
    number = len(branches) if ways is None else len(ways) - 1
    mine = torch.tensor([number, -number], device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    most, least = int(mine[0]), -int(mine[1])
    if most != least:
        raise AutoparError(
            "the ranks go different ways where values decide what forward does",
            where=branches[least][1],
            remedy="decide by what is the same on every rank: the batch, buffers and parameters, no rank and no time",
        )
