"""What the ranks of a pipeline do, one action after the other.

    action    ::= stage kind microbatch?                 2F0: stage 2, forward, microbatch 0
                | "(" action (";" action)* ")OVERLAP_F_B"     run beside each other
    kind      ::= F | B | I | W                          forward, backward, its input half, its weight half
                | SEND_F | RECV_F | SEND_B | RECV_B      activations to the next stage, gradients to the one before
                | UNSHARD | RESHARD | REDUCE_GRAD        of a stage's parameters; no microbatch

The text is that of `torch.distributed.pipelining`. A *schedule* gives every rank of the pipeline axis its actions; a
stage runs on one rank, a rank may run several stages.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from autopar.base.errors import AutoparError


class Kind(StrEnum):
    """What an action does; the value is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"

    __hash__ = str.__hash__  # Enum's own is Python, and schedules are looked up action by action


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
TRANSFERS = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
PARAMETERS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
_PATTERN = re.compile(r"([0-9]{1,5})(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|I|B|W)([0-9]{0,7})")
"""Numbers of stages and microbatches have bounds: what is done for each of them has, too."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank. parts: of an `OVERLAP_F_B`, whose own stage is -1."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    @staticmethod
    def parse(text: str) -> Action:
        """`2F0` to an action.

        Raises:
            AutoparError: text that is no action.
        """
        text = text.strip()
        if text.startswith("(") and text.endswith(")OVERLAP_F_B"):
            texts = text[1 : -len(")OVERLAP_F_B")].split(";")
            parts = tuple(Action.parse(part) for part in texts if "(" not in part)
            if len(parts) == len(texts) and all(part.kind in COMPUTE for part in parts):
                return Action(-1, Kind.OVERLAP_F_B, None, parts)
        match = _PATTERN.fullmatch(text)
        if match is None or (Kind(match[2]) in PARAMETERS) != (not match[3]):
            raise AutoparError(
                f"{text[:200]!r} is no action of a pipeline schedule",
                remedy="Write stage, kind and microbatch, as in 2F0, 2B0, 2I0, 2W0, 1UNSHARD, (2F1;3B0)OVERLAP_F_B",
            )
        stage, kind, microbatch = match.groups()
        return Action(int(stage), Kind(kind), int(microbatch) if microbatch else None)

    @property
    def leaves(self) -> tuple[Action, ...]:
        """Itself, or the actions that it overlaps."""
        return self.parts or (self,)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions, in order, communication included.

    name: of a known schedule (`1f1b`), or the file that a user wrote it in. rank_of: stage -> rank of the axis.
    """

    name: str
    num_microbatches: int
    rank_of: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...]

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is worked out of them can be large, and is worked out again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def num_ranks(self) -> int:
        return len(self.order)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that run on a rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @cached_property
    def has_backward(self) -> bool:
        """Whether there is some backward: a schedule of evaluation has forwards only."""
        kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        return any(leaf.kind in kinds for actions in self.order for action in actions for leaf in action.leaves)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """What others work out of the order once and keep with it, under names of theirs."""
        return {}

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its actions."""
        return frozenset(leaf.kind for actions in self.order for action in actions for leaf in action.leaves)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into its input and its weight half."""
        return Kind.BACKWARD_INPUT in self.kinds

    @property
    def runs_whole_backward(self) -> bool:
        """Whether some backward is not split."""
        return Kind.BACKWARD in self.kinds

    def num_actions(self, stage: int) -> Counter[str]:
        """How many actions of each kind a stage has, by the kind's text."""
        return self._counts[stage]

    @cached_property
    def _counts(self) -> tuple[Counter[str], ...]:
        found: tuple[Counter[str], ...] = tuple(Counter() for _ in self.rank_of)
        for actions in self.order:
            for leaf in (leaf for action in actions for leaf in action.leaves):
                found[leaf.stage][leaf.kind.value] += 1
        return found

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most microbatches whose forward is done and whose backward (both halves) is not."""
        most = [0] * self.num_stages
        now = [0] * self.num_stages
        for actions in self.order:
            for leaf in (leaf for action in actions for leaf in action.leaves):
                if leaf.kind is Kind.FORWARD:
                    now[leaf.stage] += 1
                    most[leaf.stage] = max(most[leaf.stage], now[leaf.stage])
                elif leaf.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    now[leaf.stage] -= 1
        return tuple(most)
