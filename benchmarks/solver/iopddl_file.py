"""The file format of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism, and what an answer costs exactly.

A file is JSON, as it is or in gzip (github.com/google/iopddl):

    problem.nodes.costs      [[number]]       of each strategy of each node; 1e17 or more: forbidden
    problem.nodes.usages     [[number]]       its bytes
    problem.nodes.intervals  [[int, int]]     when they are held: lower <= t < upper; none where upper <= lower
    problem.edges.nodes      [[int, int]]     a node twice, or [int]: the edge adds to the costs of that node
    problem.edges.costs      [[number]]       row-major, the first node's strategy first
    problem.usage_limit      number or null   bytes that may be held at any time; may be left out

`read` gives what the solver takes. `evaluate` never looks at that: it adds up what the file says, in whole numbers.
"""

from __future__ import annotations

import csv
import gc
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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

LATEST = 2**62
"""Times are below this, before and after 0."""

SLACK = 1e-9
"""Relative: by how much the solver lets a sum exceed a limit, as rounding (`AssignmentProblem.fits`). Files do not."""

FORMAT = "benchmarks/solver/iopddl_file.py says how a problem is written"
AGAIN = "download it again from github.com/google/iopddl"

Number = int | float


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says, as JSON has it: types and lengths are checked, values are not."""

    path: Path
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


def read(path: Path) -> AssignmentProblem:
    """The problem in a file, for the solver.

    Raises:
        AutoparError: the file is missing, damaged, or says what no problem can.
    """
    return problem_of(load(path))


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
    """The file as it is, its types and lengths checked. Raises AutoparError as `read` does."""
    data = _parse(path)
    problem = _member(path, data, "problem", dict)
    nodes = _member(path, problem, "nodes", dict)
    edges = _member(path, problem, "edges", dict)
    document = Document(
        path,
        _lists(path, nodes, "costs", "node", {int, float}),
        _lists(path, nodes, "usages", "node", {int, float}),
        _lists(path, nodes, "intervals", "node", {int}),
        _lists(path, edges, "nodes", "edge", {int}),
        _lists(path, edges, "costs", "edge", {int, float}),
        problem.get("usage_limit"),
    )
    _check_lengths(document)
    return document


@_uncollected()
def problem_of(document: Document) -> AssignmentProblem:
    """What the solver takes. Equal edge costs share one array. Raises AutoparError where a value is impossible."""
    sizes = [len(costs) for costs in document.costs]
    ends = np.cumsum([0, *sizes]).tolist()
    costs = _costs(document, document.costs, "node")
    usages = _flat(document, document.usages, "node")
    if not (usages >= 0).all() or np.isinf(usages).any():
        which = _first(document.usages, lambda value: not 0 <= value < math.inf)
        raise _refusal(document.path, f"node {which} uses {_worst(document.usages[which])} bytes", FORMAT)
    nodes = tuple(
        Node(
            str(v),
            costs[start:end],
            (Usage(lower, upper, usages[start:end]),) if lower < upper else (),
        )
        for v, ((start, end), (lower, upper)) in enumerate(zip(pairwise(ends), document.intervals, strict=True))
    )
    return AssignmentProblem(nodes, _edges(document, sizes), _limit(document))


def evaluate(document: Document, strategies: Sequence[int]) -> Evaluation:
    """What these strategies cost and hold at most, added up without rounding. AutoparError where they are none."""
    num_nodes = len(document.costs)
    if len(strategies) != num_nodes:
        raise _refusal(document.path, f"{len(strategies)} strategies for {num_nodes} nodes", "give one for each node")
    for v, (i, costs) in enumerate(zip(strategies, document.costs, strict=True)):
        if type(i) is not int or not 0 <= i < len(costs):
            count = f"node {v} has strategies 0 to {len(costs) - 1}"
            raise _refusal(document.path, f"node {v} has no strategy {i!r}", "strategies count from 0", count)
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
    found: dict[str, Contest] = {}
    rows = csv.DictReader(_bytes(path).decode(errors="replace").splitlines())
    columns = ("instance", "time_limit_s", "best_contest_cost")
    if missing := [name for name in columns if name not in (rows.fieldnames or ())]:
        raise _refusal(path, f"there is no column {missing[0]}", f"its first line names {', '.join(columns)}")
    for row in rows:
        try:
            limit, cost = (float(row[name]) if row[name] else None for name in columns[1:])
        except ValueError as error:
            raise _refusal(path, f"instance {row['instance']}: {error}", "leave blank what is not known") from error
        if not 0 < (1.0 if limit is None else limit) < math.inf or not math.isfinite(cost or 0.0):
            values = f"time_limit_s {limit}, best_contest_cost {cost}"
            raise _refusal(
                path, f"instance {row['instance']}: no such limit or cost", "leave blank what is not known", values
            )
        found[row["instance"]] = Contest(cost, limit)
    return found


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


def _parse(path: Path) -> object:
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


def _member(path: Path, data: object, key: str, kind: type) -> Any:
    if not isinstance(data, dict) or key not in data:
        raise _refusal(path, f"there is no {key!r}", FORMAT)
    if not isinstance(data[key], kind):
        raise _refusal(path, f"{key!r} is of type {type(data[key]).__name__}, not {kind.__name__}", FORMAT)
    return data[key]


def _lists(path: Path, data: dict[str, Any], key: str, owner: str, kinds: set[type]) -> list[list[Any]]:
    """A list of lists of numbers: of bools and texts, which also become floats, none."""
    lists = _member(path, data, key, list)
    whole = set(map(type, lists)) <= {list}
    if whole and set(map(type, chain.from_iterable(lists))) <= kinds:
        return lists
    for index, values in enumerate(lists):
        if type(values) is not list:
            raise _refusal(path, f"{owner} {index}: {key} are of type {type(values).__name__}, not list", FORMAT)
        for value in values:
            if type(value) not in kinds:
                words = " or ".join(sorted(kind.__name__ for kind in kinds))
                raise _refusal(path, f"{owner} {index}: {value!r} in its {key}", FORMAT, f"each is {words}")
    raise AssertionError("types were wrong, and are not")


def _check_lengths(document: Document) -> None:
    path, costs = document.path, document.costs
    for name, others in (("usages", document.usages), ("intervals", document.intervals)):
        if len(others) != len(costs):
            raise _refusal(path, f"costs of {len(costs)} nodes, but {name} of {len(others)}", FORMAT)
    for v, (each, usages, interval) in enumerate(zip(costs, document.usages, document.intervals, strict=True)):
        if not each:
            raise _refusal(path, f"node {v} has no strategies", "each needs one at least")
        if len(usages) != len(each):
            raise _refusal(path, f"node {v} has {len(each)} costs, but {len(usages)} usages", FORMAT)
        if len(interval) != 2 or max(map(abs, interval)) >= LATEST:
            raise _refusal(path, f"node {v}: {interval} is no interval", "write [lower, upper], within 64 bits")
    if len(document.edge_costs) != len(document.edges):
        raise _refusal(path, f"{len(document.edges)} edges, but costs of {len(document.edge_costs)}", FORMAT)
    for e, (ends, each) in enumerate(zip(document.edges, document.edge_costs, strict=True)):
        if len(ends) not in (1, 2):
            raise _refusal(path, f"edge {e} joins {len(ends)} nodes", "edges of one node and of two can be solved")
        if not 0 <= min(ends) <= max(ends) < len(costs):
            count = f"there are {len(costs)}, counted from 0"
            raise _refusal(path, f"edge {e} joins nodes {ends}", FORMAT, count)
        sizes = [len(costs[v]) for v in ends]
        if len(each) != math.prod(sizes):
            product = " × ".join(map(str, sizes))
            raise _refusal(path, f"edge {e} of nodes {ends} has {len(each)} costs, not {product}", FORMAT)
    limit = document.usage_limit
    if limit is not None and (type(limit) not in (int, float) or not 0 <= limit < math.inf):
        raise _refusal(path, f"usage_limit is {limit!r}", "write a number of bytes, or leave it out")


def _edges(document: Document, sizes: Sequence[int]) -> tuple[Edge, ...]:
    flat = _costs(document, document.edge_costs, "edge")
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


def _costs(document: Document, lists: Sequence[Sequence[Number]], owner: str) -> NDArray[np.float64]:
    costs = _flat(document, lists, owner)
    if np.isnan(costs).any() or (costs == -np.inf).any():
        which = _first(lists, lambda value: not value > -math.inf)
        raise _refusal(document.path, f"{owner} {which} has a cost of {_worst(lists[which])}", FORMAT)
    costs[costs >= FORBIDDEN] = np.inf
    return costs


def _flat(document: Document, lists: Sequence[Sequence[Number]], owner: str) -> NDArray[np.float64]:
    try:
        return np.fromiter(chain.from_iterable(lists), np.float64, count=sum(map(len, lists)))
    except OverflowError as error:
        which = _first(lists, lambda value: isinstance(value, int) and value.bit_length() > 1000)
        raise _refusal(document.path, f"{owner} {which} has a number that no float64 can hold", FORMAT) from error


def _first(lists: Iterable[Sequence[Number]], wrong: Callable[[Number], bool]) -> int:
    return next(index for index, values in enumerate(lists) if any(map(wrong, values)))


def _worst(values: Sequence[Number]) -> Number:
    """The value that is no number, or infinite, or the least."""
    return next((value for value in values if math.isnan(value) or math.isinf(value)), min(values))


def _limit(document: Document) -> float | None:
    """With what the solver takes for rounding the file's limit, or less than the next whole number."""
    limit = document.usage_limit
    try:
        return None if limit is None else min(float(limit), (limit + 0.5) / (1 + SLACK))
    except OverflowError as error:
        raise _refusal(document.path, "usage_limit is a number that no float64 can hold", FORMAT) from error


def _exact(value: Number) -> int | Fraction:
    return value if isinstance(value, int) else Fraction(value)


def _plain(value: int | Fraction) -> Number:
    return int(value) if value == int(value) else float(value)
