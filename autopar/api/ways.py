"""Batches of one kind that go different ways at branches which values decide: a program for each way that is met."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.api.plan import Plan
from autopar.api.told import Steps
from autopar.base.errors import AutoparError
from autopar.passes.branches import WAYS, put_ways
from autopar.runtime.executable import Executable

logger = logging.getLogger(__name__)
MOST_PROGRAMS = 32
"""Programs for batches of the same shapes that go different ways."""
MOST_VALUES = 16
"""Programs for batches of the same shapes that differ in inputs whose values decide what a model does."""
TOLD = "what Python's numbers say"
MOST_KEPT = 64
"""Programs of one kind that are kept for what Python's numbers say: those that were used last."""
MANY = 16
"""After so many of them it is said that each has a program of its own."""
Key = tuple[Any, ...]
Taken = tuple[bool, ...]


class Ways:
    """The ways that the next batch of a kind is thought to go: those of the last one.

    A kind's executables have keys (kind, (values, ways)): ways are those of the first branches, which were asked for
    when it was traced.
    """

    def __init__(self, blueprint: nn.Module) -> None:
        self._blueprint = blueprint
        self._next: dict[Key, Taken] = {}
        self._tried: set[Key] = set()
        self.steps = Steps(blueprint)

    def key(self, kind: Key, values: Key) -> Key:
        """Of the executable for a batch. Collective, where its kind is told Python's numbers."""
        told = self.steps.answers(kind)
        values = (*values, (TOLD, told)) if told else values
        return kind, (values, self._next.get((kind, values), ()))

    @contextmanager
    def asked(self, key: Key, branches: Sequence[tuple[bool, str]] = ()) -> Iterator[None]:
        """Inside, the model is traced for the ways of a key, or all those of a program that was traced for it."""
        put_ways(self._blueprint, [way for way, _ in branches] or key[1][1])
        self.steps.starts(key[0], dict(key[1][0]).get(TOLD, ()))
        try:
            yield
        finally:
            self.steps.ends()
            vars(self._blueprint).pop(WAYS, None)

    def check_values(self, kind: Key, names: Sequence[str], executables: Mapping[Key, Executable]) -> None:
        """Raises AutoparError where a program for each set of values has become too many programs. names: of inputs."""
        found = {each[1][0] for each in executables if each[0] == kind}
        if names and len({tuple(value for value in values if value[0] != TOLD) for values in found}) >= MOST_VALUES:
            raise AutoparError(
                f"the values of {', '.join(names)} decide what the model does, and they are different once more",
                values=f"{MOST_VALUES} programs were made for batches of the same shapes",
                remedy=f"group batches by {', '.join(names)}, so that few kinds of them occur, or keep what they "
                "decide out of forward()",
            )

    def used(self, key: Key, executables: dict[Key, Executable], plan: Plan | None = None) -> None:
        """A program that is told numbers is used, or was just made (plan): those that were not for long are dropped."""
        if not _told(key):
            return
        executables[key] = executables.pop(key)
        own = [each for each in executables if each[0] == key[0] and _told(each)]
        if plan is not None and len(own) == MANY and dist.get_rank() == 0:
            told = None if plan.program is None else plan.program.told
            words = "what forward asks of numbers" if told is None else ", ".join(told.words)
            logger.warning(
                "autopar: %s has had %d programs, one for each answer that forward got: each is planned when it is "
                "met, the last %d are kept. keep * layer(x), keep a tensor of 0 or 1, has one program for all (said "
                "once)", words, MANY, MOST_KEPT,
            )  # fmt: skip
        for each in own[:-MOST_KEPT]:
            del executables[each]

    def go(self, key: Key, executables: Mapping[Key, Executable], ways: Taken | None) -> None:
        """After a run: have the next batch, of this key, go these ways at its first branches. None: it went its way.

        Raises:
            AutoparError: there would be too many programs; none of them goes its way with this batch.
        """
        if ways is None:
            self._tried.clear()
            return
        line = executables[key].interface.branches[len(ways) - 1][1]
        if key in self._tried:
            self._tried.clear()
            raise AutoparError(
                "random numbers decide what forward does: with those that each program draws the batch goes the "
                "other's way",
                where=line,
                remedy="decide by what nothing random goes into, or choose between both results by torch.where",
            )
        self._tried.add(key)
        kind, (values, _) = key
        own = {each: x for each, x in executables.items() if each[0] == kind and each[1][0] == values}
        for (_, (_, asked)), executable in reversed(own.items()):
            if tuple(way for way, _ in executable.interface.branches[: len(ways)]) == ways:
                self._next[kind, values] = asked
                return
        if len(own) >= MOST_PROGRAMS:
            raise AutoparError(
                "what forward does is decided by values of tensors, and it does otherwise once more",
                where=line,
                values=f"{MOST_PROGRAMS} programs were made for batches of the same shapes",
                remedy="choose between the results of both cases by torch.where, or multiply by a mask of zeros and "
                "ones, so that one program does for all",
            )
        self._next[kind, values] = ways


def _told(key: Key) -> bool:
    return any(value[0] == TOLD for value in key[1][0])
