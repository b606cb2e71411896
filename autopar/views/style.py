"""How pictures look: a colour for each axis of the mesh, and the words of boxes and edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.base.text import format_bytes, format_time
from autopar.ir.sharding import format_shape, parse_sharding
from autopar.planner.plan.drawn import MoveView, OpView, ValueView
from autopar.views.boxes import axes_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of the mesh's axes, in order: Okabe and Ito's, which colour-blind people can tell apart."""
FRAME, PAPER, FAINT, TEXT = "#F6F7F9", "#FFFFFF", "#8A8F98", "#22262B"
BOLD, QUIET_LINE = "#3A3F47", "#C3C8D0"
LINE = "#555B66"
LEGEND = "legend:text"
"""The node at the top of the legend."""
MAX_NAME = 34
QUIET = frozenset(
    ["view", "_unsafe_view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "clone", "contiguous"]
    + ["slice", "getitem", "alias", "detach", "_to_copy", "select", "t", "split"]
)
"""Moves of memory, which no box names where it does anything else."""
HEAVY = ("attention", "linear", "mm", "conv", "embedding", "softmax", "norm", "sum_exp", "cross_entropy")


class Style:
    """Colours and texts of one plan's pictures. axes: of the mesh that tensors lie on; every: of the whole mesh."""

    def __init__(self, axes: Sequence[str], every: Sequence[str]) -> None:
        self.axes = tuple(axes)
        self.every = tuple(every)
        self.colour = {axis: COLOURS[number % len(COLOURS)] for number, axis in enumerate(every)}

    def fill(self, values: Iterable[ValueView | None]) -> dict[str, str]:
        """A box's background: the colours of the axes that split one of these values, side by side."""
        return self.stripes(axes_of(values, self.axes))

    def stripes(self, axes: Sequence[str]) -> dict[str, str]:
        """The colours of these axes, white for none."""
        tints = [tint(self.colour[axis]) for axis in axes]
        if len(tints) > 1:
            return {"style": "striped", "fillcolor": ":".join(tints)}
        return {"style": "filled", "fillcolor": tints[0] if tints else PAPER}

    def type(self, value: ValueView) -> str:
        """`bf16[64/dp, 8192, 4096/tp]`."""
        return format_shape(value.dtype, value.shape, parse_sharding(value.sharding, self.axes), self.axes)

    def shape(self, value: ValueView) -> str:
        """`[4096/tp, 4096]`."""
        return self.type(value).removeprefix(value.dtype)

    def collective(self, rows: Sequence[OpView | MoveView], axis: str = "") -> dict[str, str]:
        """How an edge of collectives over one axis is drawn, and all that is known of them as a tooltip."""
        axis = axis or rows[0].axis
        colour = self.colour[axis]
        return {
            "color": colour,
            "fontcolor": colour,
            "penwidth": "1.8",
            "arrowsize": "0.7",
            "tooltip": "\n".join(map(_described, rows)),
        }


def collective_lines(rows: Sequence[OpView | MoveView]) -> list[str]:
    """`2 × all_reduce tp`, `64.0 MiB · 412 µs`: what one rank sends in one call, and how long that takes."""
    kind = rows[0].op if isinstance(rows[0], OpView) else rows[0].kind
    kind = next((word for word in ("ring", "exchange") if kind.startswith(f"{word}_")), kind)
    times = f"{len(rows)} × " if len(rows) > 1 else ""
    sent, seconds = sum(row.bytes_sent for row in rows), sum(row.seconds for row in rows)
    return [f"{times}{kind} {rows[0].axis}", f"{format_bytes(sent)} · {format_time(seconds)}"]


def _described(row: OpView | MoveView) -> str:
    amount = f"{format_bytes(row.bytes_sent)} a rank, {format_time(row.seconds)}"
    if isinstance(row, OpView):
        return f"{row.name}: {row.op} {row.axis} ({row.why}), {amount}"
    once = ", once a step" if row.once else ""
    return f"{row.kind} {row.axis}, {amount}{once}: {', '.join(row.slots)}"


def operators(ops: Sequence[OpView]) -> str:
    """At most three of the operators' names, the heavy ones first, how often; moves of memory only where there is
    nothing else.
    """
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.op] = counts.get(op.op, 0) + 1
    loud = [name for name in counts if name not in QUIET] or list(counts)
    loud.sort(key=lambda name: not any(part in name for part in HEAVY))
    texts = [name if counts[name] == 1 else f"{counts[name]} × {name}" for name in loud]
    shown = texts[:1]
    while len(shown) < min(3, len(texts)) and len(", ".join(texts[: len(shown) + 1])) <= MAX_NAME:
        shown = texts[: len(shown) + 1]
    return ", ".join(shown) + (", …" if len(texts) > len(shown) else "")


def shortened(name: str, most: int = MAX_NAME) -> str:
    """A long path without its middle."""
    if len(name) <= most:
        return name
    parts = name.split(".")
    while len(parts) > 2 and len(".".join(parts)) > most - 2:
        del parts[len(parts) // 2]
    text = f"{'.'.join(parts[: (len(parts) + 1) // 2])}.….{'.'.join(parts[(len(parts) + 1) // 2 :])}"
    return text if len(text) <= most else text[: most - 1] + "…"


def tint(colour: str, strength: float = 0.27) -> str:
    """A colour mixed with white, to write on."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02X}" for part in parts)
