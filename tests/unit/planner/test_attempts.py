"""The loop over attempts, driven by scripted outcomes: what is tried, what ends it, what wins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.ir.program import MODES
from autopar.planner import attempts as module
from autopar.planner.attempts import (
    BEYOND,
    CLOSE,
    DEAR,
    MOSTLY_WAITING,
    PARTS,
    TIGHTER,
    named,
    tighter,
    tried_for,
)
from autopar.strategies.request import Attempt
from tests.unit.planner.scripted import Scripted, placed_by, plan, run


@pytest.fixture(autouse=True)
def _no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted programs have no graph."""
    monkeypatch.setattr(module, "has_attention", lambda program: False)
    monkeypatch.setattr(module, "has_experts", lambda program: False)
    monkeypatch.setattr(module, "_limit_beside", lambda plan: 0.5)


def walked(ratio: float) -> DoesNotFit:
    error = DoesNotFit("the step does not fit")
    error.ratio = ratio
    return error


def test_of_a_named_strategy_the_first_mode_that_fits_is_taken() -> None:
    """Breaks if memory that is short changes where things lie before it changes what is recomputed, or if a later plan,
    though faster, replaces the first that fits.
    """
    fits = {"none": walked(2.0), "selective": plan(3.0), "full": plan(1.0)}
    programs = Scripted(lambda attempt: fits[attempt.rematerialize], strategy="zero3")
    tried = run(programs)
    assert [(each.rematerialize, each.checks_limit) for each in programs.made] == [("none", True), ("selective", True)]
    assert tried.best is not None and tried.best[1] is fits["selective"]


def test_the_limit_takes_part_only_when_nothing_else_is_left() -> None:
    """Breaks if a named strategy is refused before it was placed within the limit, or placed so in an earlier mode."""
    programs = Scripted(lambda attempt: walked(2.0) if attempt.checks_limit else plan(1.0), strategy="zero3")
    tried = run(programs)
    assert [each.checks_limit for each in programs.made] == [True, True, True, False]
    assert tried.best is not None and tried.best[0].rematerialize == MODES[-1]


def test_a_sequence_that_is_split_is_placed_within_the_limit_at_once() -> None:
    """Breaks if a strategy that leaves to memory how parameters lie is first placed as if there were no limit."""
    programs = Scripted(lambda attempt: plan(1.0), strategy={"dp": "zero3", "tp": "ring"})
    run(programs)
    assert [each.checks_limit for each in programs.made] == [False]


def test_what_was_walked_says_how_much_less_is_asked_for() -> None:
    """Breaks if a placement that does not fit is asked for again with as much memory, or without end."""
    limits: list[float] = []

    def outcome(attempt: Attempt) -> Any:
        limits.append(attempt.placement_limit)
        return walked(1.25)

    programs: Any = Scripted(outcome)
    tried = tried_for(programs, lambda tried: tighter(programs.asked, tried))
    assert tried.best is None and len(limits) == TIGHTER + 1
    assert limits[0] == 1.0 and limits[1] == pytest.approx(0.97 / 1.25) and limits == sorted(limits, reverse=True)


def test_where_nothing_is_placed_less_memory_is_not_tried() -> None:
    """Breaks if hopeless placements are solved again."""
    programs: Any = Scripted(lambda attempt: DoesNotFit("nothing was found"))
    tried_for(programs, lambda tried: tighter(programs.asked, tried))
    assert len(programs.made) == 1


def test_stages_that_are_not_found_get_more_memory() -> None:
    """Breaks if a pipeline, whose placement sees its stages on average, is given up where more on average would fit."""
    programs: Any = Scripted(lambda attempt: plan(1.0) if attempt.placement_limit > 1.1 else DoesNotFit("no stages"))
    staged = replace(programs.asked, pipeline=SimpleNamespace())
    tried = tried_for(programs, lambda tried: tighter(staged, tried))
    assert [each.placement_limit for each in programs.made] == [1.0, 1.2] and tried.last is not None


def test_auto_tries_no_mode_once_memory_costs_nothing() -> None:
    """Breaks if recomputing is tried where it only adds work."""
    programs = Scripted(lambda attempt: plan(2.0 if attempt.placed_by is None else 9.0))
    run(programs)
    assert {each.rematerialize for each in programs.made if each.placed_by is None} == {"none"}


def test_auto_skips_modes_that_compute_longer_than_the_best_step() -> None:
    """Breaks if a mode is solved that cannot win, or one is left out that can."""
    programs = Scripted(
        lambda attempt: plan(2.0 if attempt.placed_by is None else 9.0, price=1e-9),
        least={"selective": 2.5, "full": 1.0},
    )
    run(programs)
    own = [each.rematerialize for each in programs.made if each.placed_by is None]
    assert set(own) == {"none", "full"}


def test_where_memory_lets_nothing_run_beside_the_compute_the_placement_gets_less() -> None:
    """Breaks if `auto` gives up running gathers beside the compute, or does not keep the faster of both."""

    def outcome(attempt: Attempt) -> Any:
        if attempt.placed_by is not None:
            return plan(9.0)
        return plan(1.0, prefetch=True) if attempt.placement_limit < 1 else plan(2.0, prefetch=False)

    programs = Scripted(outcome)
    tried = run(programs)
    assert tried.step_s == 1.0 and [each.placement_limit for each in programs.made[:2]] == [1.0, 0.5]


def test_what_is_waited_for_is_placed_at_its_full_price() -> None:
    """Breaks if gathers that nothing hides count next to nothing."""

    def outcome(attempt: Attempt) -> Any:
        return plan(1.5 if attempt.overlap_price == 1.0 else 2.0, waited_s=1.0)

    programs = Scripted(outcome)
    tried = run(programs)
    assert tried.best is not None and tried.best[0].overlap_price == 1.0 and tried.best[0].placed_by is None


@pytest.mark.parametrize(
    ("waited_s", "dear_s", "priced_s", "prices", "step_s"),
    [
        (2.0 * MOSTLY_WAITING + 0.1, 1.9, 1.0, [DEAR], 1.9),
        (2.0 * MOSTLY_WAITING + 0.1, 2.0, 1.0, [DEAR, 1.0], 1.85),
        (2.0 * MOSTLY_WAITING - 0.1, 0.1, 1.0, [1.0], 1.85),
        (2.0 * MOSTLY_WAITING + 0.1, 1.9, 0.0, [], 2.0),
    ],
)
def test_where_a_step_waits_most_of_the_time_few_messages_are_sought(
    waited_s: float, dear_s: float, priced_s: float, prices: list[float], step_s: float
) -> None:
    """Breaks if latencies, which the objective leaves out, decide nothing where they are most of a step; if the full
    price is left out where that brought nothing; if other steps are placed so; or if what no price could change is.
    """

    def outcome(attempt: Attempt) -> Any:
        if attempt.placed_by is not None:
            return plan(9.0)
        step_s = {DEAR: dear_s, 1.0: 1.85}.get(attempt.overlap_price, 2.0)
        return plan(step_s, waited_s=waited_s, priced_s=priced_s)

    programs = Scripted(outcome)
    tried = run(programs)
    assert [each.overlap_price for each in programs.made if each.placed_by is None][1:] == prices
    assert tried.step_s == step_s


@pytest.mark.parametrize(("waited_s", "hides"), [(2.0 * MOSTLY_WAITING + 0.1, 0), (2.0 * MOSTLY_WAITING - 0.1, 1)])
def test_exchanges_are_hidden_where_latencies_are_not_most(
    waited_s: float, hides: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a mixture is placed with exchanges beside its compute where few messages are best, or nowhere."""
    monkeypatch.setattr(module, "has_experts", lambda program: True)

    def outcome(attempt: Attempt) -> Any:
        found = plan({DEAR: 1.0, 1.0: 1.85}.get(attempt.overlap_price, 2.0), waited_s=waited_s, priced_s=1.0)
        found.solved.overlap_price = attempt.overlap_price
        return found

    programs = Scripted(outcome)
    run(programs)
    assert sum(each.hides_exchanges for each in programs.made) == hides


def test_a_tie_goes_to_the_requests_own_placement() -> None:
    """Breaks if a named strategy's decisions are taken that are not faster."""
    programs = Scripted(lambda attempt: plan(2.0))
    tried = run(programs)
    assert tried.best is not None and tried.best[0].placed_by is None


def test_a_tie_goes_to_the_requests_own_placement_though_it_came_later() -> None:
    """Breaks if decisions of a name stay, and a note of them, where `auto` itself found as good ones in its mode."""

    def outcome(attempt: Attempt) -> Any:
        if attempt.rematerialize == "none":
            return plan(3.0) if attempt.placed_by is None else walked(1.1)
        return plan(1.0)

    def with_free(attempt: Attempt) -> Any:
        return plan(0.9) if attempt.memory_limit_bytes is None else outcome(attempt)

    tried = run(Scripted(with_free))
    assert tried.best is not None and tried.best[0].placed_by is None and tried.step_s == 1.0


def test_a_named_strategy_that_is_faster_wins_and_its_mode_is_bounded() -> None:
    """Breaks if `auto` is slower than a name, or if what is proven is of a mode that recomputes something else."""

    def outcome(attempt: Attempt) -> Any:
        if attempt.placed_by is None:
            return plan(3.0)
        return plan(1.0) if attempt.rematerialize == "selective" else walked(1.1)

    def with_free(attempt: Attempt) -> Any:
        return plan(0.9) if attempt.placed_by and attempt.memory_limit_bytes is None else outcome(attempt)

    programs = Scripted(with_free)
    tried = run(programs)
    assert tried.best is not None and tried.best[0].placed_by is not None and tried.step_s == 1.0
    assert ("selective", None) in tried.own


def test_a_family_whose_values_alone_take_too_long_is_tried_once() -> None:
    """Breaks if strategies that only keep parameters otherwise are placed where what they all do takes longer than the
    best step; or if another family goes with them.
    """
    long = BEYOND * 2.0 + 0.1
    programs = Scripted(
        lambda attempt: plan(2.0) if attempt.placed_by is None else plan(9.0, compute_s=1.0, moved_s=long - 1.0)
    )
    run(programs)
    assert placed_by(programs) == [("ddp", "ddp"), ("ddp", "tensor"), ("ddp", "tensor+sequence")]


def test_names_that_take_too_long_at_least_are_not_placed() -> None:
    """Breaks if a name is placed that takes longer than the best step whatever is chosen; or one is left out that does
    so only by what may run beside each other, by values that others hide, or by its family's first's transfers.
    """
    long = BEYOND * 2.0 + 0.1
    least = {
        ("ddp", "ddp"): (0.5, 2.0), ("ddp", "tensor"): (long, 0.0), ("ddp", "tensor+sequence"): (1.9, 1.9),
        ("zero2", "zero2"): (2.1, 0.0), ("zero3", "zero3"): (0.0, 2.1),
    }  # fmt: skip
    programs = Scripted(lambda attempt: plan(2.0), named=lambda names: least.get(names, (0.0, 0.0)))
    run(programs)
    assert ("zero2", "zero2") in placed_by(programs) and ("ddp", "tensor+sequence") in placed_by(programs)
    left_out = {("ddp", "ddp"), ("zero3", "zero3"), ("ddp", "tensor"), ("zero3", "tensor")}
    assert not left_out & {*placed_by(programs)}


def test_a_family_that_may_win_by_how_it_keeps_parameters_is_tried_whole() -> None:
    """Breaks if what parameters and gradients take counts against a whole family, or values that take as long as the
    best step do: the next may hide what the first waits for.
    """

    def outcome(attempt: Attempt) -> Any:
        names = [each.name for each in attempt.placed_by or ()]
        step_s = 2.0 if not names else 1.9 if names == ["zero3", "zero3"] else 9.0
        return plan(step_s, waited_s=7.0 * bool(names), compute_s=1.0, moved_s=1.1)

    programs = Scripted(outcome)
    tried = run(programs)
    assert ("zero2", "zero2") in placed_by(programs) and ("zero3", "tensor") in placed_by(programs)
    assert tried.best is not None and [each.name for each in tried.best[0].placed_by or ()] == ["zero3", "zero3"]


def test_of_a_family_only_what_comes_close_is_placed_anew() -> None:
    """Breaks if each way to keep parameters is placed from nothing, if one that may win is not, or if what was placed
    alike, with all the memory there is, is what is taken.
    """
    first: Any = SimpleNamespace()

    def outcome(attempt: Attempt) -> Any:
        names = [each.name for each in attempt.placed_by or ()]
        if names == ["zero3", "zero3"]:
            return plan(CLOSE * 2.0 - 0.01 if attempt.alike else 1.9)
        return plan(2.0 if not names else CLOSE * 2.0 + 0.01)

    programs = Scripted(outcome, first=first)
    tried = run(programs)
    by_name: dict[tuple[str, ...], list[bool]] = {}
    for attempt in programs.made:
        if attempt.placed_by is not None:
            by_name.setdefault(tuple(s.name for s in attempt.placed_by), []).append(attempt.alike is first)
            assert attempt.memory_limit_bytes is None or attempt.alike is None
    assert by_name["ddp", "ddp"] == by_name["ddp", "tensor"] == [False]
    assert by_name["zero2", "zero2"] == by_name["hsdp:across", "hsdp:inside"] == by_name["zero2", "tensor"] == [True]
    assert by_name["zero3", "zero3"] == [True, False, False]
    assert tried.step_s == 1.9


def test_a_plan_with_all_the_memory_there_is_never_wins() -> None:
    """Breaks if what was planned without a limit is given to who has one."""

    def outcome(attempt: Attempt) -> Any:
        if attempt.placed_by is None:
            return plan(3.0)
        return plan(1.0) if attempt.memory_limit_bytes is None else walked(1.5)

    programs = Scripted(outcome)
    tried = run(programs)
    assert tried.step_s == 3.0
    last = [each for each in programs.made if each.placed_by == programs.made[-1].placed_by]
    assert [each.placement_limit for each in last if not each.checks_limit and each.memory_limit_bytes] == list(PARTS)


def test_a_name_that_cannot_be_had_is_left_out_of_auto() -> None:
    """Breaks if `auto` is refused for what a named strategy cannot do; what was asked itself is an error."""
    refused = AutoparError("dim 0 cannot be split")
    programs = Scripted(lambda attempt: refused if attempt.placed_by else plan(2.0))
    assert run(programs).step_s == 2.0
    with pytest.raises(AutoparError, match="cannot be split"):
        run(Scripted(lambda attempt: refused))


def test_names_are_tried_where_auto_finds_nothing() -> None:
    """Breaks if `auto` is refused where a named strategy would fit."""
    programs = Scripted(lambda attempt: plan(5.0) if attempt.placed_by else DoesNotFit("nothing was found"))
    assert run(programs).step_s == 5.0


def test_pins_are_never_overruled_by_a_name() -> None:
    """Breaks if a named strategy's placement, which knows of no pins, is taken where a user pinned something."""

    class Pinned(Scripted):
        @property
        def asked(self) -> Attempt:
            return replace(super().asked, pins=(SimpleNamespace(),))  # type: ignore[arg-type]

    programs = Pinned(lambda attempt: plan(1.0 if attempt.placed_by else 2.0))
    assert run(programs).step_s == 2.0


def test_the_error_is_that_of_the_first_walk_of_the_last_mode() -> None:
    """Breaks if a user is told what an earlier mode takes, or what is left when less memory was asked for."""
    ratios = iter([9.0, 8.0, 7.0, 3.0, 2.0, 1.5, 1.2, 1.1])
    programs = Scripted(lambda attempt: walked(next(ratios)), strategy="zero3")
    attempt, error = run(programs, named).reason()
    assert attempt.rematerialize == MODES[-1] and error.ratio == 3.0


def test_of_auto_too_the_error_is_the_last_modes() -> None:
    """Breaks if a limit is named that would do with less recomputing than there could be."""
    ratio = {"none": 9.0, "selective": 5.0, "full": 3.0}
    programs = Scripted(lambda attempt: walked(ratio[attempt.rematerialize]))
    attempt, error = run(programs).reason()
    assert attempt.rematerialize == MODES[-1] and error.ratio == 3.0
