"""What splits the sequence under `auto`, driven by scripted outcomes: what is tried, what tells that it cannot win."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.base.errors import DoesNotFit
from autopar.ir.program import MODES, Mode
from autopar.planner import attempts as module
from autopar.planner import shares
from autopar.planner.attempts import Tried
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt
from tests.unit.planner.scripted import MESH, Scripted, placed_by, plan, run


class Recomputing(Scripted):
    """That says what the backward computes, too."""

    def recomputing(self, mode: Mode, spread: object) -> None:
        return None

    def computing_s(self, mode: Mode) -> float:
        return 0.0


@pytest.mark.parametrize("excluded", [True, False])
def test_what_splits_the_sequence_computes_more_again_only_for_want_of_memory(
    excluded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if strategies that exclude each other are tried in every mode and with parameters kept otherwise, or those
    that lack memory only once.
    """
    monkeypatch.setattr(module, "least_seconds", lambda *given: 0.0)

    def outcome(attempt: Attempt) -> Any:
        error = DoesNotFit("nothing was found")
        error.excluded = excluded
        return error

    programs = Recomputing(outcome, traced=SimpleNamespace(states={}))
    run(programs, module._contexts)
    named = [[each.name for each in attempt.placed_by or ()] for attempt in programs.made]
    if excluded:  # zero3 beside what was tried beside ddp is left out, too
        assert len(named) == len({*map(tuple, named)}) and not any("zero3" in each for each in named)
    else:
        assert len(named) == len({*map(tuple, named)}) * len(MODES) and any("zero3" in each for each in named)


SPLITS = [("allgather_kv", "tensor"), ("ring", "tensor"), ("ulysses", "tensor")]
"""The first axis split along the sequence, in each way to meet in attention; in the order of names."""


def context_names(programs: Scripted) -> list[tuple[str, ...]]:
    """What splits the sequence over the first axis, of what was tried."""
    return sorted(each for each in placed_by(programs) if each[1] == "tensor")


@pytest.mark.parametrize(
    ("step_s", "attention_s", "moved_s", "tried"),
    [
        (9.0, 7.0, 0.0, SPLITS),  # all but attention takes as long as the best step
        (9.0, 6.8, 0.0, SPLITS[:1]),
        (9.0, 0.0, 7.0, SPLITS),  # what attention reads and gives is moved the rest of the time
        (9.0, 0.0, 6.8, SPLITS[:1]),
        (1.9, 0.1, 0.0, SPLITS),
    ],
)
def test_ways_to_meet_in_attention_are_tried_where_it_may_decide(
    step_s: float, attention_s: float, moved_s: float, tried: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if every way is placed though what they all compute and move outside of attention takes longer than the
    best step, or if attention's own seconds count against others.
    """
    monkeypatch.setattr(module, "least_seconds", lambda *given: 0.0)
    monkeypatch.setattr(shares, "seconds_in_attention", lambda program: attention_s)
    candidates = [resolve(dict(zip(MESH.axis_names, each)), MESH) for each in SPLITS]
    monkeypatch.setattr(module, "context_candidates", lambda *given, **more: candidates)

    def outcome(attempt: Attempt) -> Any:
        return plan(step_s, compute_s=attention_s, moved_s=moved_s) if attempt.placed_by else plan(2.0)

    programs = Recomputing(outcome, traced=SimpleNamespace(states={}))
    own = outcome(programs.asked)

    def after(programs: Any, modes: Sequence[Mode], tried: Tried) -> Any:
        tried.takes(programs.asked, own)
        yield from module._contexts(programs, modes, tried)

    run(programs, after)
    # Those of a family have the same values, which took too long.
    assert context_names(programs) == tried


@pytest.mark.parametrize(
    ("rows_s", "attention_s", "moved_s", "tried"),
    [
        (1.6, 1.5, 0.0, []),  # a ring takes longer than what it saves
        (1.6, 0.9, 0.0, [("ring", "tensor")]),
        (1.6, 1.5, 0.6, [("ring", "tensor")]),  # what splits the batch moves values over that axis; a ring may not
        (3.1, 0.0, 0.0, []),  # whatever attention takes
        (3.1, 0.0, 0.2, [("ring", "tensor")]),
    ],
)
def test_what_splits_the_sequence_is_not_tried_where_splitting_the_batch_says_that_it_takes_longer(
    rows_s: float, attention_s: float, moved_s: float, tried: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a ring is placed that takes longer than the best step outside of attention alone, or is left out though
    it may be spared what is moved for want of rows; or if its attention is not counted.
    """
    monkeypatch.setattr(module, "least_seconds", lambda *given: 0.0)
    monkeypatch.setattr(module, "least_in_attention", lambda *given: attention_s)
    monkeypatch.setattr(shares, "seconds_in_attention", lambda program: 1.0)
    rows, ring = (resolve(dict(zip(MESH.axis_names, each)), MESH) for each in (("ddp", "tensor"), ("ring", "tensor")))
    monkeypatch.setattr(module, "context_candidates", lambda *given, **more: [ring])
    programs = Recomputing(lambda attempt: plan(9.0 if attempt.placed_by else 2.0), traced=SimpleNamespace(states={}))

    def after(programs: Any, modes: Sequence[Mode], tried: Tried) -> Any:
        tried.takes(programs.asked, plan(2.0))
        tried.knows(rows, plan(rows_s, moved_s=moved_s))
        tried.knows(rows, plan(4.0))  # the fastest of them tells
        yield from module._contexts(programs, modes, tried)

    run(programs, after)
    assert context_names(programs) == tried


@pytest.mark.parametrize(("outside", "known", "times"), [(True, False, 1), (False, False, 3), (False, True, 0)])
def test_what_no_way_to_meet_in_attention_can_mend_is_tried_once(
    outside: bool, known: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if all are asked where something else forbids the split, one where attention does, any where known."""
    monkeypatch.setattr(module, "least_seconds", lambda *given: 0.0)

    def outcome(attempt: Attempt) -> Any:
        error = DoesNotFit("they exclude each other")
        error.excluded, error.outside_attention = True, outside
        return error

    programs = Recomputing(outcome, traced=SimpleNamespace(states={}), odd=SPLITS if known else ())
    run(programs, module._contexts)
    assert len(context_names(programs)) == times
    assert len(placed_by(programs)) - times == (1 if outside else 3)  # the other axis is another matter
