r"""Prove the sharding rule of every call that the samples of torch's `op_db` make: whatever one axis may do gives what
torch itself gives.

    python benchmarks/proofs/operators.py [--only 'grid_sampler*;histogram'] [--limit 40] [--resume FILE] [--page]

For each of some 700 operators: its samples, forward and backward, become calls of ATen operators
(`operator_calls.py`), and these calls in sizes from 0 to 12. For each call the rule is asked, and each choice that it
gives to one axis of 2 or 3 ranks is carried out: operands are cut as it says (terms of a sum are random), the operator
runs on each rank's arguments on plain CPU tensors, and what comes of it, put together, is compared with what the
operator gives for the whole. Cutting, putting together and comparing are written here once more, in plain torch.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import mmap
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from autopar.ir.choices import Choice, Offset, Positions, Starts, axis_choices, localize, shardings
from autopar.ir.op_call import OpCall, op_call
from autopar.ir.rule import Rule
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Placement, Shard
from autopar.operators.rules.discover import discover
from autopar.operators.rules.lookup import registered, rule_for
from benchmarks.proofs.operator_calls import Recorded, calls_of, database, described, resized

RANKS = (2, 3)
MOST_CALLS, MOST_RESIZED = 3, 1
"""Of an ATen operator, for each operator of `op_db`: calls as recorded, and how many of them in other sizes, too."""
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Found:
    """What came of one call: proven choices, what is wrong, where autopar raised, the operator where it has no rule."""

    proven: int = 0
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    refused: str = ""


@dataclass
class Row(Found):
    """What came of all calls of an operator."""

    calls: int = 0
    refusals: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.crashed or self.wrong:
            return "crashed" if self.crashed else "wrong"
        if self.proven:
            return "right"
        return "refused" if self.refusals else "trivial" if self.calls else "not run"


class Note:
    """What a child is about to run, where its parent can read it when the child is gone."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 << 14)

    def write(self, text: str) -> None:
        data = text.encode()[: len(self._memory) - 1]
        self._memory[: len(data) + 1] = data + b"\0"

    def read(self) -> str:
        return self._memory[:].split(b"\0")[0].decode(errors="replace")


def prove_apart(name: str, known: dict[str, Found], most: int = MOST_CALLS, sizes: int = MOST_RESIZED) -> Row:
    """As `prove`, in a child: some kernels of torch write where they must not when sizes do not go together. A call
    that torch itself cannot run is left out; where a piece of one is what kills, that is a crash.
    """
    note, deadly = Note(), set[str]()
    while True:
        reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            before = set(known)
            row = prove(name, known, most, sizes, note, deadly)
            writer.send((row, {key: found for key, found in known.items() if key not in before}))
            os._exit(0)
        writer.close()
        answer: tuple[Row, dict[str, Found]] | None = None
        with contextlib.suppress(EOFError):
            answer = reader.recv()
        status = os.waitpid(child, 0)[1]
        if answer is not None:
            known.update(answer[1])
            return answer[0]
        phase, _, key = note.read().partition(" ")
        if not key or key in deadly:
            return Row(crashed=[f"{key or name}: the process died, status {status}"])
        if phase == "choices":
            known[key] = Found(crashed=[f"{key}: the process died, status {status}"])
        deadly.add(key)
        print(f"    {name}: the process died of {phase} of {key[:300]}", flush=True)


def prove(
    name: str,
    known: dict[str, Found] | None = None,
    most: int = MOST_CALLS,
    sizes: int = MOST_RESIZED,
    note: Note | None = None,
    deadly: Collection[str] = (),
) -> Row:
    """Prove all calls of one operator of `op_db`. known: what came of calls before. deadly: calls not to be run."""
    row, known = Row(), {} if known is None else known
    refusals: set[str] = set()

    def about_to_run(phase: str, call: Recorded) -> bool:
        if note is not None:
            note.write(f"{phase} {call.key}")
        return call.key not in deadly

    for call in _all_calls(name, most, sizes, about_to_run):
        found = known.get(call.key)
        if found is None:
            found = known[call.key] = prove_call(call, about_to_run)
        row.calls += 1
        row.proven += found.proven
        row.wrong += found.wrong
        row.crashed += found.crashed
        refusals |= {found.refused} if found.refused else set()
    row.refusals = sorted(refusals)
    return row


def _all_calls(name: str, most: int, sizes: int, may_run: Callable[[str, Recorded], bool]) -> Iterator[Recorded]:
    counts: Counter[str] = Counter()
    for call in calls_of(database()[name], most):
        yield call
        counts[str(call.target)] += 1
        if counts[str(call.target)] <= sizes:
            yield from resized(call, lambda each: may_run("sizes", each))


# ----------------------------------------------------------------------------------------------------------- one call


def prove_call(call: Recorded, may_run: Callable[[str, Recorded], bool] = lambda *_: True) -> Found:
    """Every choice of one axis of 2 and of 3 ranks, carried out and compared."""
    found = Found()
    if not may_run("whole", call):
        return found
    try:
        whole = _results(_run(call, call.args, call.kwargs))
        again = _results(_run(call, call.args, call.kwargs))
    except Exception:  # what does not run as a whole needs no rule
        return found
    may_run("choices", call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seen = op_call(call.target, call.args, call.kwargs, list(whole))
            rule = rule_for(seen)
            found.refused = "" if _has_rule(seen) else seen.name
            choices = [(n, choice) for n in RANKS for choice in axis_choices(rule, n) if choice.kind != "none"]
        except Exception as error:  # what is looked for
            found.crashed.append(f"{call.key}: {type(error).__name__}: {str(error)[:200]}")
            return found
    if not all(_is_plain(tensor) for tensor in _tensors((call.args, tuple(call.kwargs.values())))):
        return found  # no program has sparse or quantized operands
    unset = "empty" in seen.name or not all(_is_equal(a, b, _tolerance(call, a)) for a, b in zip(whole, again))
    for ranks, choice in choices:
        try:
            problem = _carried_out(call, rule, choice, ranks, whole, unset)
        except Exception as error:  # what is looked for
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        if problem:
            found.wrong.append(f"{call.key}: {rule} under {choice} on {ranks}: {problem}")
        found.proven += not problem
    return found


def _has_rule(call: OpCall) -> bool:
    known = call.name in registered() or torch.Tag.pointwise in call.target.tags
    return known or all(result is None for result in call.results) or discover(call) is not None


def _run(call: Recorded, args: Any, kwargs: Any) -> Any:
    torch.manual_seed(0)
    return call.target(*_mapped(args, _copy), **{name: _mapped(value, _copy) for name, value in kwargs.items()})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.layout == torch.strided else tensor


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_mapped(v, function) for v in value) if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def _results(output: Any) -> list[Any]:
    if not isinstance(output, list | tuple):
        return [output]
    return [item for part in output for item in (part if isinstance(part, list | tuple) else [part])]


def _carried_out(call: Recorded, rule: Rule, choice: Choice, ranks: int, whole: Sequence[Any], unset: bool) -> str:
    """What is wrong with a choice; nothing where its pieces make the whole. unset: only shapes can be compared."""
    placed = shardings(rule, (choice,), (ranks,))
    assert placed is not None, "a choice that cannot be"
    operands = [placements[0] for placements in placed[0]]
    args, kwargs = localize(rule, call.args, call.kwargs, (choice,), (ranks,))
    home: set[int] = set()
    if choice.kind == "ring":  # what travels comes past every rank: each has seen all of it in the end
        assert rule.ring is not None
        operands = [REPLICATE if i in rule.ring.travelling else each for i, each in enumerate(operands)]
        home = {i for i, dims in enumerate(rule.results) if dims in [rule.operands[i] for i in rule.ring.travelling]}
    tensors = _tensors((call.args, tuple(call.kwargs.values())))
    cut = [_cut(tensor, placement, ranks) for tensor, placement in zip(tensors, operands, strict=True)]
    pieces = []
    for rank in range(ranks):
        own = iter([parts[rank] for parts in cut])
        local = _filled(args, rank, own)
        pieces.append(_results(_run(call, local, {name: _filled(value, rank, own) for name, value in kwargs.items()})))
    for index, (expected, placements) in enumerate(zip(whole, placed[1], strict=True)):
        if not isinstance(expected, Tensor):
            continue
        assert placements is not None, f"result {index} is a tensor"
        parts = [results[index] for results in pieces]
        placement = PARTIAL if index in home else placements[0]  # and what travels home has gathered terms
        if choice.kind == "linear" and all(part.shape == expected.shape for part in parts):
            # The sum of a term that is infinite, and of one that makes up for it, is no number.
            finite = torch.stack([part.isfinite() for part in parts]).all(0) | expected.isnan()
            parts, expected = [part.where(finite, 0) for part in parts], expected.where(finite, 0)
        have = _joined(parts, placement, expected)
        if isinstance(have, str):
            return f"result {index}: {have}"
        if not unset and not _is_equal(have, expected, _tolerance(call, expected), parts):
            return f"result {index} differs"
        rest = parts if not isinstance(placement, Shard | Partial) else []
        if not unset and not all(_is_equal(part, expected, _tolerance(call, expected)) for part in rest):
            return f"result {index} differs from rank to rank"
    return ""


def _filled(value: Any, rank: int, own: Iterator[Tensor]) -> Any:
    """An argument as it is on a rank."""
    if isinstance(value, Tensor):
        return next(own)
    if isinstance(value, Offset | Starts):
        return value.value((rank,))
    if isinstance(value, Positions):
        places = torch.arange(value.size)
        for _, ranks, outer, zigzag in value.splits:
            places = places[_places(len(places), Shard(0, outer, zigzag), ranks)[rank]]
        return places
    return type(value)(_filled(item, rank, own) for item in value) if isinstance(value, list | tuple) else value


def _places(size: int, placement: Shard, ranks: int) -> list[Tensor]:
    """Which elements of a dim each rank has: of each of `outer` stripes, one part."""
    assert not placement.zigzag, "one axis is not zigzag unless it is asked to be"
    stripes = torch.arange(size).reshape(placement.outer, ranks, -1)
    return [stripes[:, rank].flatten() for rank in range(ranks)]


def _cut(tensor: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    if isinstance(placement, Shard):
        places = _places(tensor.shape[placement.dim], placement, ranks)
        return [tensor.index_select(placement.dim, each) for each in places]
    if isinstance(placement, Partial):
        assert tensor.dtype != torch.bool, "there are no sums of truth values"
        inexact = tensor.is_floating_point() or tensor.is_complex()
        terms = [torch.randn_like(tensor) if inexact else torch.randint_like(tensor, -5, 5) for _ in range(ranks - 1)]
        return [*terms, tensor - sum(terms)]
    return [tensor] * ranks


def _joined(parts: Sequence[Tensor], placement: Placement, expected: Tensor) -> Tensor | str:
    """The whole of which ranks hold these parts, or why there is none."""
    if isinstance(placement, Shard):
        dim = placement.dim
        places = _places(expected.shape[dim], placement, len(parts))
        for each, part in zip(places, parts):
            wanted = (*expected.shape[:dim], len(each), *expected.shape[dim + 1 :])
            if part.shape != wanted or part.dtype != expected.dtype:
                return f"a part is {described(part)}, not of shape {list(wanted)}"
        joined, order = torch.cat(list(parts), dim), torch.cat(places).argsort()
        return joined if placement.outer == 1 else joined.index_select(dim, order)
    if any(part.shape != expected.shape for part in parts):
        return f"a part is {described(parts[0])}"
    if isinstance(placement, Partial):
        stacked = torch.stack(list(parts))
        return stacked.sum(0).to(expected.dtype) if placement.op == "sum" else stacked.amax(0)
    return parts[0]


def _tolerance(call: Recorded, expected: Any) -> float:
    tensors = _tensors((call.args, tuple(call.kwargs.values()), expected))
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return max((TOLERANCE.get(dtype, 2e-2) for dtype in dtypes), default=0.0)


def _is_equal(a: Any, b: Any, tolerance: float, terms: Sequence[Tensor] = ()) -> bool:
    """Whether two results are the same up to rounding, which is relative to the largest number, of `terms` too."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if not _is_plain(a) or not _is_plain(b):
        return a.layout == b.layout
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = [each[each.isfinite()].abs() for each in (b, *terms)]
    largest = max((float(each.max()) for each in finite if each.numel()), default=0.0)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)


# ------------------------------------------------------------------------------------------------------------- results


def page(rows: Mapping[str, Row], seconds: float) -> str:
    """benchmarks/results/operators-DATE.md."""
    verdicts = {name: row.verdict for name, row in rows.items()}
    counts = Counter(verdicts.values())
    words = ("right", "trivial", "refused", "not run", "wrong", "crashed")
    lines = [
        f"# Sharding rules of torch's operators, {time.strftime('%Y-%m-%d')}",
        "",
        f"{os.cpu_count()} cores, x86_64, Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"{seconds / 60:.0f} minutes of CPU time. {sum(row.calls for row in rows.values())} calls, forward and "
        f"backward, sizes 0 to 12; {sum(row.proven for row in rows.values())} choices of one axis of 2 or 3 ranks "
        "carried out and equal to the whole. Of the samples of an operator, at least "
        f"{MOST_CALLS} calls of each ATen operator are taken, at random, where there are so many.",
        "",
        "Right: something splits, and whatever the rule allows is right. Trivial: nothing can be split in any of its "
        "calls. Refused: no rule, none is found by running it, so it is replicated, with a warning. Not run: no sample "
        "runs on this machine.",
        "",
        "| operators | " + " | ".join(words) + " |",
        "|--:" * (len(words) + 1) + "|",
        f"| {len(rows)} | " + " | ".join(str(counts[word]) for word in words) + " |",
        "",
        "## Wrong or crashed",
        "",
    ]
    bad = {name: row for name, row in rows.items() if row.wrong or row.crashed}
    lines += [f"- `{name}`: {(row.crashed + row.wrong)[0][:300]}" for name, row in bad.items()] or ["None."]
    for word in words[1:4]:
        named = sorted(name for name, verdict in verdicts.items() if verdict == word)
        lines += ["", f"## {word.capitalize()}", "", ", ".join(f"`{name}`" for name in named) or "None."]
    refusals = sorted({name for row in rows.values() for name in row.refusals})
    lines += ["", "## ATen operators of which some call is replicated with a warning", ""]
    lines += [", ".join(f"`{name}`" for name in refusals) or "None."]
    return "\n".join([*lines, "", "Written by `benchmarks/proofs/operators.py`.", ""])


def _cpu_seconds() -> float:
    """Of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def main() -> int:
    """The command. Exit status 1 where a choice is wrong, or autopar raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="patterns of names, separated by ;")
    parser.add_argument("--limit", type=int, help="at most so many operators")
    parser.add_argument("--resume", type=Path, help="a file of results to go on from, and to keep them in")
    parser.add_argument("--page", action="store_true", help=f"write the page of today in {RESULTS.name}/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in database() if any(fnmatch.fnmatch(n, each.strip()) for each in options.only.split(";"))]
    kept: dict[str, Any] = json.loads(options.resume.read_text()) if options.resume and options.resume.exists() else {}
    rows = {name: Row(**row) for name, row in kept.get("rows", {}).items()}
    before = kept.get("seconds", 0.0) - _cpu_seconds()
    known: dict[str, Found] = {}
    for number, name in enumerate(names[: options.limit], 1):
        if name not in rows:
            rows[name] = prove_apart(name, known)
            kept = {"seconds": before + _cpu_seconds(), "rows": {n: asdict(r) for n, r in rows.items()}}
            if options.resume:
                options.resume.write_text(json.dumps(kept))
        row = rows[name]
        print(f"{number}/{len(names)} {name}: {row.verdict}, {row.calls} calls, {row.proven} choices", flush=True)
        for each in [*row.crashed, *row.wrong][:4]:
            print(f"    {each[:400]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in Counter(row.verdict for row in rows.values()).items()))
    if options.page:
        (RESULTS / f"operators-{time.strftime('%Y-%m-%d')}.md").write_text(page(rows, before + _cpu_seconds()))
    return 1 if any(row.wrong or row.crashed for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
