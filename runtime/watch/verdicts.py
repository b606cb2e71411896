"""What is to be done about the numbers of a step: a loss, or a norm of gradients, that is none, or far from the usual.

A number is a spike where it is more than `threshold` deviations above the median of the last steps that were taken.
The deviation is the median absolute one (times 1.4826, a normal distribution's standard deviation: Rousseeuw and Croux,
1993), which spikes themselves hardly move; at least a hundredth of the median, as losses of a long run are steady.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

Policy: TypeAlias = Literal["stop", "skip", "warn"]

LAST = 128
"""How many steps say what is usual."""
FIRST = 20
"""How many are needed."""
LEAST = 0.01
"""A deviation, as a part of the median."""
MOST_SKIPPED = 10
"""How many steps in a row are skipped: after that, it is no accident."""


class Numbers(NamedTuple):
    """Of one step, the same on all ranks. loss: None where the model returns none."""

    loss: float | None
    norm: float

    def named(self) -> list[tuple[str, float]]:
        """Those that there are, as messages name them."""
        return [*([] if self.loss is None else [("the loss", self.loss)]), ("the gradients' norm", self.norm)]


class Usual:
    """The last numbers of one kind."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)

    def add(self, number: float) -> None:
        """What a step had that is to count as usual."""
        if math.isfinite(number):
            self._last.append(number)

    def middle(self) -> float | None:
        """The median; None of nothing."""
        return median(self._last) if self._last else None

    def limit(self, threshold: float) -> float:
        """Above it lies a spike; infinite where too little is known."""
        if len(self._last) < FIRST:
            return math.inf
        middle = median(self._last)
        deviation = 1.4826 * median(abs(number - middle) for number in self._last)
        return middle + threshold * max(deviation, LEAST * abs(middle))


class Verdict(NamedTuple):
    """On one step. policy: None: it is taken. what, values: what is wrong, in words."""

    policy: Policy | None = None
    what: str = ""
    values: str = ""


class Judge:
    """Says what is to be done, from the numbers of all steps so far."""

    def __init__(self, nonfinite: Policy | None, spikes: Policy | None, threshold: float) -> None:
        self.nonfinite: Policy | None = nonfinite
        self.spikes: Policy | None = spikes
        self.threshold = threshold
        self._usual: dict[str, Usual] = {}
        self.in_a_row = 0

    def judge(self, numbers: Numbers) -> Verdict:
        """What is to be done about a step."""
        verdict = self._judge(numbers)
        self.in_a_row = self.in_a_row + 1 if verdict.policy == "skip" else 0
        if self.in_a_row > MOST_SKIPPED:
            values = f"{MOST_SKIPPED} steps in a row were skipped before it: this is no accident"
            return Verdict("stop", verdict.what, values)
        if verdict.policy != "skip":
            for name, number in numbers.named():
                self._usual.setdefault(name, Usual()).add(number)
        return verdict

    def _judge(self, numbers: Numbers) -> Verdict:
        nonfinite, spikes = self.nonfinite, self.spikes
        for name, number in numbers.named():
            if nonfinite is not None and not math.isfinite(number):
                return Verdict(nonfinite, f"{name} is {number}")
        for name, number in numbers.named():
            limit = self._usual.setdefault(name, Usual()).limit(self.threshold)
            if spikes is not None and limit < number < math.inf:
                return Verdict(spikes, f"{name} is {number:.6g}", f"above {limit:.6g} it is no usual one")
        return Verdict()
