"""What strategies that were tried tell of others by name: what need not be placed to lose."""

from __future__ import annotations

import pytest

from autopar.planner import attempts as module
from autopar.planner.attempts import BEYOND, Tried
from autopar.strategies.names import resolve
from tests.unit.planner.scripted import MESH, Scripted, plan


def test_tokens_are_not_sent_where_what_sends_none_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if experts on some ranks each are tried where splitting the batch there takes longer by all that is not
    theirs; or are not where theirs is what takes long.
    """
    together, apart = (resolve({"dp": each, "tp": "tensor"}, MESH) for each in ("ddp", "expert"))
    tried = Tried(100.0)
    tried.takes(Scripted(lambda attempt: plan(2.0)).asked, plan(2.0))
    assert not module._experts_are_no_help(apart, tried)  # nothing is known
    tried.knows(together, plan(3.0, compute_s=1.0, moved_s=BEYOND * 2.0 - 0.9))
    assert module._experts_are_no_help(apart, tried) and not module._experts_are_no_help(together, tried)
    monkeypatch.setattr(module, "seconds_in_experts", lambda plan: 0.5)
    assert not module._experts_are_no_help(apart, tried)


def test_what_flows_between_blocks_is_not_split_where_its_sums_take_too_long() -> None:
    """Breaks if sums are made two messages each though they take longer than the best step as one; or are not where
    it is computing that takes long.
    """
    whole, split, rows = (resolve({"dp": "ddp", "tp": each}, MESH) for each in ("tensor", "tensor+sequence", "ddp"))
    for compute_s, moved_s, in_vain in ((1.0, BEYOND * 2.1, True), (3.0, BEYOND * 1.9, False)):
        tried = Tried(100.0)
        tried.takes(Scripted(lambda attempt: plan(2.0)).asked, plan(2.0))
        assert not tried.splits_hidden_in_vain(split, BEYOND)  # nothing is known
        tried.knows(whole, plan(9.0, compute_s=compute_s, moved_s=moved_s))
        assert tried.splits_hidden_in_vain(split, BEYOND) == in_vain
        assert not tried.splits_hidden_in_vain(whole, BEYOND) and not tried.splits_hidden_in_vain(rows, BEYOND)


def test_parameters_are_not_kept_otherwise_where_that_was_no_help_without_experts() -> None:
    """Breaks if experts on some ranks each are tried with parameters in pieces where these made the same without
    experts slower, and with whole ones they took too long; or are not where one of that is not so, or not known.
    """
    whole, pieces, apart, other = (
        resolve({"dp": each, "tp": "ddp"}, MESH) for each in ("ddp", "zero2", "expert", "zero2+expert")
    )

    def told(plain_s: float, first_s: float) -> bool:
        tried = Tried(100.0)
        tried.takes(Scripted(lambda attempt: plan(2.0)).asked, plan(2.0))
        for strategies, step_s in ((whole, 3.0), (pieces, plain_s), (apart, first_s)):
            assert not tried.keeping_is_no_help(other, apart, BEYOND)  # not all is known
            tried.knows(strategies, plan(step_s))
        assert not tried.keeping_is_no_help(pieces, whole, BEYOND)  # no experts
        return tried.keeping_is_no_help(other, apart, BEYOND)

    assert told(3.0, BEYOND * 2.1) and not told(2.9, BEYOND * 2.1) and not told(3.0, BEYOND * 1.9)
