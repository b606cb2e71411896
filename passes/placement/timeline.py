"""When every value of a training step lives: the folded timeline that memory limits are checked on.

One step runs the regions forward in call order, then backward in reverse. A repeated region takes one stretch of the
timeline, its last call's; what it saves for the backward is counted once per call, because by then all calls have saved
theirs. Time is a position in this order; intervals are half open.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.ir.program import Program
from autopar.ir.region import Region


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value is alive from `start` to `end`, `copies` times at once."""

    start: int
    end: int
    copies: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Positions of every node, and the stretch of each region's phases."""

    length: int
    position: dict[tuple[str, str], int]
    forward: dict[str, tuple[int, int]]
    backward: dict[str, tuple[int, int]]

    @staticmethod
    def of(program: Program) -> Timeline:
        position: dict[tuple[str, str], int] = {}
        forward: dict[str, tuple[int, int]] = {}
        backward: dict[str, tuple[int, int]] = {}
        order = list(dict.fromkeys(call.region for call in program.calls))
        now = 0
        for name in order:
            now = _lay(program.region(name), True, now, position, forward)
        for name in reversed(order):
            now = _lay(program.region(name), False, now, position, backward)
        return Timeline(now, position, forward, backward)

    def lifetime(self, region: Region, node: fx.Node, uses: list[fx.Node], copies: float) -> Lifetime:
        """From the node to its last use; `copies` times when it crosses from forward to backward (once per call).

        Args:
            uses: the operators that read the value, through views.
        """
        start = self.position[(region.name, node.name)]
        ends = [self.position[(region.name, use.name)] for use in uses if use.op == "call_function"]
        is_result = any(use.op == "output" for use in uses)
        is_forward = node.name in region.forward_nodes
        phase = self.forward if is_forward else self.backward
        if is_result:
            ends.append(phase[region.name][1] - 1)
        end = max([start, *ends]) + 1
        saved = is_forward and end > self.forward[region.name][1]
        return Lifetime(start, end, copies if saved else 1)


def _lay(
    region: Region,
    is_forward: bool,
    now: int,
    position: dict[tuple[str, str], int],
    stretch: dict[str, tuple[int, int]],
) -> int:
    start = now
    for node in region.graph.nodes:
        if node.op == "call_function" and (node.name in region.forward_nodes) == is_forward:
            position[(region.name, node.name)] = now
            now += 1
    now = max(now, start + 1)
    stretch[region.name] = (start, now)
    return now
