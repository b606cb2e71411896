"""The file format of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism, and what an answer costs exactly.

A file is JSON, as it is or in gzip (github.com/google/iopddl):

    problem.nodes.costs      [[number]]       of each strategy of each node; 1e17 or more: forbidden
    problem.nodes.usages     [[number]]       its bytes
    problem.nodes.intervals  [[int, int]]     when they are held: lower <= t < upper; none where upper <= lower
    problem.edges.nodes      [[int, int]]     a node twice, or [int]: the edge adds to the costs of that node
    problem.edges.costs      [[number]]       row-major, the first node's strategy first
    problem.usage_limit      number or null   bytes that may be held at any time; may be left out

`problem_of` gives what the solver takes. `evaluate` never looks at that: it adds up what the file says, in whole
numbers.
"""

from __future__ import annotations

import csv
import gc
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.base.errors import AutoparError
from autopar.solver import AssignmentProblem, Edge, Node, Usage

FORBIDDEN = 10**17
"""Costs from here on mean that a choice is not allowed: files have 1e18."""

SLACK = 1e-9
"""Relative: by how much the solver lets a sum exceed a limit, as rounding (`AssignmentProblem.fits`). Files do not."""

AGAIN = "download it again from github.com/google/iopddl"

Number = int | float


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says, as JSON has it."""

    costs: list[list[Number]]
    usages: list[list[Number]]
    intervals: list[list[int]]
    edges: list[list[int]]
    edge_costs: list[list[Number]]
    usage_limit: Number | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An answer by the file's own numbers. cost: infinite where something `forbidden` (so many times) is chosen."""

    cost: Number
    peak: Number
    limit: Number | None
    forbidden: int

    @property
    def feasible(self) -> bool:
        return not self.forbidden and (self.limit is None or self.peak <= self.limit)


@dataclass(frozen=True, slots=True)
class Contest:
    """The lowest cost that a team reached within the time limit; None where it is not known."""

    cost: float | None
    time_limit_s: float | None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which would look through millions of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def load(path: Path) -> Document:
    """The file as it is.

    Raises:
        AutoparError: it is missing, or damaged.
    """
    problem = _parse(path)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    lists = (nodes["costs"], nodes["usages"], nodes["intervals"], edges["nodes"], edges["costs"])
    return Document(*lists, problem.get("usage_limit"))


@_uncollected()
def problem_of(document: Document) -> AssignmentProblem:
    """What the solver takes. Equal edge costs share one array."""
    sizes = [len(costs) for costs in document.costs]
    ends = np.cumsum([0, *sizes]).tolist()
    costs, usages = _costs(document.costs), _flat(document.usages)
    nodes = tuple(
        Node(str(v), costs[start:end], (Usage(lower, upper, usages[start:end]),) if lower < upper else ())
        for v, ((start, end), (lower, upper)) in enumerate(zip(pairwise(ends), document.intervals, strict=True))
    )
    return AssignmentProblem(nodes, _edges(document, sizes), _limit(document))


def evaluate(document: Document, strategies: Sequence[int]) -> Evaluation:
    """What these strategies cost and hold at most, added up without rounding."""
    chosen = [costs[i] for costs, i in zip(document.costs, strategies, strict=True)]
    for ends, costs in zip(document.edges, document.edge_costs, strict=True):
        place = 0
        for v in ends:
            place = place * len(document.costs[v]) + strategies[v]
        chosen.append(costs[place])
    forbidden = sum(cost >= FORBIDDEN for cost in chosen)
    change: dict[int, int | Fraction] = {}
    for (lower, upper), usages, i in zip(document.intervals, document.usages, strategies, strict=True):
        if lower < upper:
            change[lower] = change.get(lower, 0) + _exact(usages[i])
            change[upper] = change.get(upper, 0) - _exact(usages[i])
    held: int | Fraction = 0
    peak: int | Fraction = 0
    for time in sorted(change):
        held += change[time]
        peak = max(peak, held)
    cost = math.inf if forbidden else _plain(sum(map(_exact, chosen)))
    return Evaluation(cost, _plain(peak), document.usage_limit, forbidden)


def contest_results(folder: Path) -> dict[str, Contest]:
    """By instance, what the folder's best.csv says; nothing without one."""
    path = folder / "best.csv"
    if not path.exists():
        return {}
    columns = ("best_contest_cost", "time_limit_s")
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return {row["instance"]: Contest(*(float(row[name]) if row[name] else None for name in columns)) for row in rows}


def name_of(path: Path) -> str:
    """The instance's name: the file's, without its endings."""
    return path.name.removesuffix(".gz").removesuffix(".json")


def _refusal(path: Path, what: str, remedy: str, values: str | None = None) -> AutoparError:
    return AutoparError(what, where=str(path), values=values, remedy=remedy)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _refusal(path, "there is no such file", "check the path") from error
    except OSError as error:
        raise _refusal(path, "the file cannot be read", "check the path", error.strerror) from error


def _parse(path: Path) -> Any:
    content = _bytes(path)
    if content.startswith(b"\x1f\x8b") or path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise _refusal(path, "this is no whole gzip file", AGAIN, str(error)) from error
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # bytes that are no text are a ValueError, too
        raise _refusal(path, "this is no whole JSON", AGAIN, str(error)) from error


def _edges(document: Document, sizes: Sequence[int]) -> tuple[Edge, ...]:
    flat = _costs(document.edge_costs)
    classes = {size: np.arange(size) for size in set(sizes)}
    alone = {size: np.zeros(size, dtype=np.int64) for size in set(sizes)}
    known: dict[tuple[int, int, bytes], NDArray[np.float64]] = {}
    edges: list[Edge] = []
    start = 0
    for ends in document.edges:
        u, v = ends[0], ends[-1]
        rows, columns = sizes[u], sizes[v] if len(ends) == 2 else 1
        piece = flat[start : start + rows * columns]
        start += rows * columns
        key = (rows, columns, piece.tobytes())
        costs = known.get(key)
        if costs is None:
            costs = known[key] = piece.reshape(rows, columns).copy()
        edges.append(Edge(u, v, classes[rows], classes[columns] if len(ends) == 2 else alone[rows], costs))
    return tuple(edges)


def _costs(lists: Sequence[Sequence[Number]]) -> NDArray[np.float64]:
    costs = _flat(lists)
    costs[costs >= FORBIDDEN] = np.inf
    return costs


def _flat(lists: Sequence[Sequence[Number]]) -> NDArray[np.float64]:
    return np.fromiter(chain.from_iterable(lists), np.float64, count=sum(map(len, lists)))


def _limit(document: Document) -> float | None:
    """With what the solver takes for rounding the file's limit, or less than the next whole number."""
    limit = document.usage_limit
    return None if limit is None else min(float(limit), (limit + 0.5) / (1 + SLACK))


def _exact(value: Number) -> int | Fraction:
    return value if isinstance(value, int) else Fraction(value)


def _plain(value: int | Fraction) -> Number:
    return int(value) if value == int(value) else float(value)
