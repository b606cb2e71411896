"""What only looks as if it could be split, at some sizes or for some numbers, gets no rule by chance."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from autopar.ir.op_call import op_call
from autopar.ir.rule import Rule
from autopar.ir.sharding import REPLICATE
from autopar.operators.rules import discover as discovery
from autopar.operators.rules.discover import discover, discover_all
from autopar.operators.rules.lookup import rule_for, rules_for
from autopar.operators.rules.registry import make_rule
from autopar.operators.rules.verify import assemble, check_choices, run, verify_rule

pytestmark = pytest.mark.unit
LIBRARY = Library("autopar_test_trials", "DEF")
aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)


def define(name: str, function: Callable[..., Any], schema: str = "(Tensor x) -> Tensor") -> Any:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.autopar_test_trials, name).default


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def rule_of(target: Any, *args: Any, **kwargs: Any) -> Rule | None:
    return discover(op_call(target, args, kwargs, target(*args, **kwargs)))


def text_of(target: Any, *args: Any, **kwargs: Any) -> str:
    return str(rule_of(target, *args, **kwargs) or "")


def failures(target: Any, make: Callable[[], tuple[Any, ...]], draws: int = 20) -> list[str]:
    """What is wrong with the rule of a call, of any size of axis that divides something, for many numbers."""
    args = make()
    rule = rule_for(op_call(target, args, {}, run(target, args, {})))
    return [line for _ in range(draws) for size in (2, 3) for line in verify_rule(target, make(), {}, rule, size)]


# ------------------------------------------------------------------------------------------------ what was wrong once


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("is_aligned", [False, True])
def test_one_point_of_a_small_image_is_no_maximum(mode: int, padding: int, is_aligned: bool) -> None:
    """Breaks if a maximum over two pieces is believed of one number in a few trials."""

    def make() -> tuple[Any, ...]:
        return numbers(1, 1, 2, 2, 2), numbers(1, 1, 1, 1, 3), mode, padding, is_aligned

    assert failures(aten.grid_sampler_3d.default, make, 4) == []
    assert "max" not in text_of(aten.grid_sampler_3d.default, *make())


@pytest.mark.moderate
def test_a_diagonal_of_one_is_no_maximum() -> None:
    """Breaks if axes of 3 are not tried, or too few numbers are."""
    assert failures(aten.diagonal_copy.default, lambda: (numbers(3, 1),)) == []


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_histogram_is_not_linear_in_its_edges(size: int) -> None:
    """Breaks if counts that are always zero are taken for a sum of zeros."""
    edges = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert rule_of(aten.histogram.bins_tensor, numbers(size), edges) is None


def test_distances_are_linear_in_no_power_of_themselves() -> None:
    """Breaks if results that are not a number count as equal, and nothing else is tried."""
    args = (numbers(5, 5), numbers(5, 4), numbers(5, 4), 0.5, numbers(5, 5).abs())
    assert rule_of(aten._cdist_backward.default, *args).linear == (frozenset({0}),)  # type: ignore[union-attr]


def test_a_sum_that_skips_gaps_is_not_linear() -> None:
    """Breaks if no trial has numbers that are none."""
    assert text_of(aten.nansum.default, numbers(4, 6), [1]) == "d0 d1 -> d0 | d1 sum"


@pytest.mark.parametrize("name", ["hardshrink_backward", "softshrink_backward"])
def test_gaps_at_the_end_of_a_vector_tell_nothing(name: str) -> None:
    """Breaks if pieces have to agree where torch itself makes something else of the last numbers of a tensor."""
    assert text_of(getattr(aten, name).default, numbers(8, 6), numbers(8, 6), 0.5) == "d0 d1, d0 d1 -> d0 d1 | linear 0"


def test_what_wants_its_operands_in_one_piece_is_still_tried_with_gaps() -> None:
    """Breaks if a trial is lost where an operator does not take operands that lie apart."""

    def filled(x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise RuntimeError("x must be contiguous")
        return x.nan_to_num(0.0).sum(1)

    assert text_of(define("filled", filled), numbers(4, 6)) == "d0 d1 -> d0 | d1 sum"


def test_what_only_gaps_tell_is_nothing() -> None:
    """Breaks if a rule rests on numbers that are none alone: of others, none is the least of a segment by chance."""
    empty = torch.empty(5, dtype=torch.float64, device="meta")
    options = {"lengths": None, "offsets": empty.long(), "initial": 2}
    args = (empty, empty, empty, "min")
    assert discover(op_call(aten._segment_reduce_backward.default, args, options, empty)) is None


def test_the_norm_of_one_number_is_not_linear() -> None:
    """Breaks if few trials are enough where a result has one element: numbers of one sign are linear."""
    assert rule_of(aten.norm.ScalarOpt_dim, numbers(1, 1), 2.0, [1]) is None
    rule = rule_of(aten.softshrink_backward.default, numbers(1, 1), numbers(1, 1), 0.5)
    assert rule is not None
    assert rule.linear == (frozenset({0}),)


@pytest.mark.moderate
def test_what_a_mask_takes_in_turn_is_not_split() -> None:
    """Breaks if masks of two are tried alone: they are often alike."""

    def make() -> tuple[Any, ...]:
        return numbers(2, 2), torch.rand(2, generator=GENERATOR) > 0.5, numbers(2, 2)

    assert failures(aten.masked_scatter.default, make) == []


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.repeat.default, (numbers(4, 2), [0, 2])),
        (aten.repeat.default, (numbers(4, 2), [2, 0])),
        (aten.gather.default, (numbers(5), 0, torch.zeros(2, 0, dtype=torch.int64))),
        (aten.scatter_add.default, (numbers(5), 0, torch.zeros(2, 0, dtype=torch.int64), numbers(2, 0))),
        (aten.view_as_real.default, (torch.zeros(0, 3, dtype=torch.complex128),)),
        (torch.ops.autopar.linear.default, (numbers(0, 3), numbers(4, 3))),
        (aten.slice_backward.default, (numbers(1, 4), [3, 4], 0, 1, 3, 1)),
        (aten.select_backward.default, (numbers(1), [6, 2], 1, 1)),
        (aten.select_backward.default, (numbers(6), [6, 2], -1, 1)),
        (
            aten.convolution.default,
            (numbers(1, 0, 0, 0), numbers(1, 0, 0, 0), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ),
        (aten.glu_backward.default, (numbers(0, 1), numbers(0, 0), 1)),
    ],
)
def test_odd_calls_have_right_rules(target: Any, args: tuple[Any, ...]) -> None:
    """Breaks if a rule does not look whether a tensor is empty, or broadcast."""
    assert failures(target, lambda: args, 1) == []


@pytest.mark.parametrize("target", [aten._to_sparse.default, aten._to_sparse.sparse_dim])
def test_sparse_results_are_replicated(target: Any) -> None:
    """Breaks if results are compared, or split, that are not strided."""
    args = (numbers(4, 2),) if target is aten._to_sparse.default else (numbers(4, 2), 1)
    assert rule_of(target, *args) is None


def test_kernels_that_trust_their_operands_do_no_harm() -> None:
    """Breaks if a rule is looked for in the process itself: this one writes behind the end of its memory."""
    args = (numbers(5, 4), numbers(5, 4), numbers(5, 5), "mean")
    kwargs = {"lengths": None, "offsets": torch.tensor([0, 0, 2, 5, 5]).repeat(5, 1), "axis": 1, "initial": 2}
    rule = discover(op_call(aten._segment_reduce_backward.default, args, kwargs, [numbers(5, 5)]))
    assert rule is None or rule.operands


# ---------------------------------------------------------------------------- what each kind of trial is there to find


def alternating(x: Tensor) -> Tensor:
    return x * (1 + torch.arange(x.shape[0]) % 2)[:, None]


def unless_alone(x: Tensor) -> Tensor:
    return x if x.shape[0] > 1 else 0.5 * x


def summed_at_eight(x: Tensor) -> Tensor:
    return x if x.shape[0] != 8 else x.cumsum(0)


ALTERNATING = define("alternating", alternating)
UNLESS_ALONE = define("unless_alone", unless_alone)
NO_ZEROS = define("no_zeros", lambda x: torch.where(x == 0, 1.0, x))
SMALL_SQUARES = define("small_squares", lambda x: x * x * 1e-13)
ROOTS = define("roots", lambda x: x.sqrt().sum(0))
SATURATED = define("saturated", lambda x: torch.where(x > 100, x.cumsum(0), 1.0))
ZEROS = define("zeros", torch.zeros_like)
LEAPS = define("leaps", lambda x, n: x + 10 * (x.abs() > n), "(Tensor x, float n) -> Tensor")
TWO_OF = define("two_of", lambda x, n: x.cumsum(0) if n is True else x * n, "(Tensor x, Scalar n) -> Tensor")
FICKLE = define("fickle", lambda x: x + next(TURNS) % 2)
TURNS = itertools.count()
SHIFTED = define("shifted", lambda x, y: x + y.flip(0), "(Tensor x, Tensor y) -> Tensor")
WRITES = define("deadly", lambda x: (os.abort() if x.dtype == torch.float64 else None) or x.clone())
FOUND_BY_SIZE = define("found_by_size", summed_at_eight)


def test_patterns_are_seen_at_sizes_with_odd_parts() -> None:
    """Breaks if parts of even lengths alone are tried: each looks as the whole does."""
    assert text_of(ALTERNATING, numbers(12, 4)) == "x0_0 d0 -> y0_0 d0 | x0_0 !, y0_0 ! | linear 0"


def test_pieces_of_one_element_are_tried() -> None:
    """Breaks if an axis as large as the dim is not."""
    assert text_of(UNLESS_ALONE, numbers(4, 6)) == "x0_0 d0 -> y0_0 d0 | x0_0 !, y0_0 ! | linear 0"


def test_the_own_sizes_of_a_call_are_tried() -> None:
    """Breaks if other sizes alone are: at 8 this is a running sum."""
    assert "x0_0 !" in text_of(FOUND_BY_SIZE, numbers(8, 6))


def test_zeros_are_tried() -> None:
    """Breaks without coarse numbers: random ones are never zero."""
    assert text_of(NO_ZEROS, numbers(4, 6)) == "d0 d1 -> d0 d1"


def test_nothing_is_said_of_results_too_small_to_tell() -> None:
    """Breaks if squares of 1e-13 count as sums of each other."""
    assert rule_of(SMALL_SQUARES, numbers(4, 6)) is None


def test_roots_are_summed_but_not_linear() -> None:
    """Breaks if results that are mostly no numbers count, or if positive numbers are not tried."""
    assert text_of(ROOTS, numbers(4, 6)) == "d0 d1 -> d1 | d0 sum"


def test_what_is_always_the_same_has_no_rule() -> None:
    """Breaks if zeros count as sums of zeros, or ones as pieces of ones: nobody knows when they are none."""
    assert rule_of(ZEROS, numbers(4, 6)) is None
    assert rule_of(SATURATED, numbers(4, 6)) is None


@pytest.mark.parametrize("height", [2.1, 2.15, 2.2, 2.25, 2.3, 2.35])
def test_rare_events_are_waited_for(height: float) -> None:
    """Breaks if a result of few values is believed after a handful of trials."""
    assert rule_of(LEAPS, numbers(1, 1), height) is None


def test_what_changes_from_call_to_call_has_no_rule() -> None:
    """Breaks if an operator is not run twice on the same."""
    assert rule_of(FICKLE, numbers(4, 6)) is None


@pytest.mark.moderate
def test_other_sizes_that_do_not_go_together_are_left_out() -> None:
    """Breaks if an operator that reads what is not its own at other sizes counts as one that draws random numbers."""
    x = torch.view_as_complex(numbers(4, 6, 2))
    assert text_of(aten._fft_c2r.default, x, [1], 0, 10) == "d0 x0_1 -> d0 y0_1 | x0_1 !, y0_1 ! | linear 0"


def test_true_is_not_one() -> None:
    """Breaks if what was found for one argument is taken for another that equals it."""
    assert text_of(TWO_OF, numbers(4, 6), 1) == "d0 d1 -> d0 d1 | linear 0"
    assert text_of(TWO_OF, numbers(4, 6), True) == "x0_0 d0 -> y0_0 d0 | x0_0 !, y0_0 ! | linear 0"


def test_pieces_have_to_be_at_their_places() -> None:
    """Breaks if pieces that come from the other end pass, or if operands are not split together."""
    assert text_of(SHIFTED, numbers(4, 6), numbers(4, 6)) == (
        "x0_0 d0, x1_0 d0 -> y0_0 d0 | x0_0 !, x1_0 !, y0_0 ! | linear 0 1"
    )


def test_what_takes_the_process_down_is_replicated() -> None:
    """Breaks if the planner dies of an operator, or of the next one."""
    small = op_call(WRITES, (numbers(4, 6).float(),), {}, numbers(4, 6).float())
    other = op_call(SHIFTED, (numbers(3, 5), numbers(3, 5)), {}, numbers(3, 5))
    first, second = discover_all([small, other])
    assert first is None
    assert second is not None


def test_rules_are_discovered_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if each call costs a copy of the process, or if what is known is looked for again."""
    copies = []

    def counted(tasks: Any, limit_s: float) -> Any:
        copies.append(len(tasks))
        return [task() for task in tasks]

    monkeypatch.setattr(discovery, "run_forked", counted)
    calls = [op_call(SHIFTED, (numbers(n, 7), numbers(n, 7)), {}, numbers(n, 7)) for n in (2, 4, 2)]
    known = op_call(aten.mm.default, (numbers(2, 2), numbers(2, 2)), {}, numbers(2, 2))
    assert [str(rule) for rule in rules_for([*calls, known])] == [str(rule_for(call)) for call in (*calls, known)]
    assert [count for count in copies if count] == [2]


# ------------------------------------------------------------------------------------------------------------- proofs


def test_a_proof_tells_every_error_of_an_operator() -> None:
    """Breaks if `check_choices` lets through what an operator of someone else's raises."""
    from autopar.ir.choices import Choice
    from autopar.ir.rule import parse_rule

    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    rule = parse_rule("a b -> a b", [(4, 6)], [(4, 6)])
    problem = check_choices(
        fails, (numbers(4, 6),), {}, rule, (Choice("factor", "a"),), (2,), [numbers(4, 6)], GENERATOR
    )
    assert problem == "fails on rank (0,): ZeroDivisionError"


def test_a_proof_wants_replicated_results_alike() -> None:
    """Breaks if `assemble` takes what the first rank has for what all have."""
    pieces = {(0,): numbers(2), (1,): numbers(2)}
    with pytest.raises(ValueError, match="a replicated result differs over axis 0"):
        assemble(pieces, (REPLICATE,), (2,))
    assert assemble({(0,): pieces[0,], (1,): pieces[0,]}, (REPLICATE,), (2,)).equal(pieces[0,])


def test_dims_of_other_sizes_in_the_result_are_whole() -> None:
    """Breaks if a factor may have two sizes, or if nothing else is left where one has."""
    twice = define("twice", lambda x: x.repeat_interleave(2, 0))
    assert text_of(twice, numbers(4, 6)) == "x0_0 d1 -> y0_0 d1 | x0_0 !, y0_0 ! | linear 0"


def test_a_rule_for_other_shapes_is_an_error() -> None:
    """Breaks if `make_rule` does not look whether its sizes are the call's."""
    call = op_call(aten.mm.default, (numbers(4, 6), numbers(6, 8)), {}, numbers(4, 8))
    with pytest.raises(AssertionError, match=r"aten\.mm\.default"):
        make_rule(call, [["m", "k"], ["k", "n"]], [["m", "n"]], {"m": 4, "k": 6, "n": 9})


def test_results_of_two_kinds_of_terms_have_no_rule() -> None:
    """Breaks if a maximum beside a sum counts as another."""
    both = define("both", lambda x: (x.sum(0), x.amax(0)), "(Tensor x) -> (Tensor, Tensor)")
    assert text_of(both, numbers(4, 6)) == "x0_0 d0 -> d0, d0 | x0_0 !"
