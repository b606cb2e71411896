"""The comments that say which module and which source lines statements come from: one for each run of them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

_ORIGIN = re.compile(r"^(?P<module>[^ (]*)\s*(?:\((?P<file>.+):(?P<line>\d+)\))?$")
MOST_WITHIN = 3
"""So many statements of an inner module may stand among those of one around it without a heading of their own."""


@dataclass(slots=True)
class _Run:
    """Consecutive statements whose lines one module holds; lines by file."""

    module: str
    lines: dict[str, list[int]]
    nodes: list[fx.Node]

    @property
    def heading(self) -> str:
        where = [f"{file}:{_range(lines)}" for file, lines in self.lines.items()]
        return f"{self.module} ({', '.join(where)})".strip() if where else self.module

    def add(self, other: _Run) -> None:
        """Take in the run behind this one."""
        self.nodes += other.nodes
        for file, lines in other.lines.items():
            self.lines.setdefault(file, []).extend(lines)


def headings(nodes: Iterable[fx.Node], leaves: Container[str]) -> Iterator[tuple[str, Sequence[fx.Node]]]:
    """Statements in order, with the heading above them; "" where there is nothing to say.

    leaves: modules of torch's own: the line above them is that of the module that calls them.
    """
    runs: list[_Run] = []
    for node in nodes:
        run = _run_of(node, leaves)
        if runs and (run is None or run.module == runs[-1].module):
            runs[-1].add(run or _Run("", {}, [node]))
        else:
            runs.append(run or _Run("", {}, [node]))
    for run in _absorbed(runs):
        yield run.heading, run.nodes


def _run_of(node: fx.Node, leaves: Container[str]) -> _Run | None:
    origin = str(node.meta.get("origin") or "")
    match = _ORIGIN.match(origin)
    if not origin or match is None:
        return None
    module = match["module"]
    while module in leaves:
        module = module.rpartition(".")[0]
    lines = {match["file"]: [int(match["line"])]} if match["file"] else {}
    return _Run(module, lines, [node])


def _absorbed(runs: Sequence[_Run]) -> list[_Run]:
    """Short runs of inner modules among statements of one around them stand under its heading."""
    found: list[_Run] = []
    for run in runs:
        if len(found) > 1 and found[-2].module == run.module and _is_within(found[-1], run.module):
            found[-2].add(found.pop())
        if found and found[-1].module == run.module:
            found[-1].add(run)
        else:
            found.append(run)
    return found


def _is_within(run: _Run, module: str) -> bool:
    return len(run.nodes) <= MOST_WITHIN and bool(module) and run.module.startswith(f"{module}.")


def _range(lines: Sequence[int]) -> str:
    first, last = min(lines), max(lines)
    return str(first) if first == last else f"{first}-{last}"
