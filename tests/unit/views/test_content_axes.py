"""What the report says of an explanation axis by axis, and of the part of each collective that is hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.api.plan import Plan
from autopar.views.explain.explanation import Excluded, Explanation, Row
from autopar.views.hidden import hidden_shares
from autopar.views.other_axes import by_axis, way_of_text
from tests.unit.views.conftest import make_plan

AXES = (("dp", 8), ("tp", 8), ("one", 1))


def row(stored: str, delta_s: float, **fields: Any) -> Row:
    values: dict[str, Any] = {"step_delta_s": delta_s, "rematerialize": "selective", **fields}
    return Row({"stored": stored}, 1.5 + delta_s, 0.5, 2**30, **values)


def explanation(*rows: Row, excluded: tuple[Excluded, ...] = (), **fields: Any) -> Explanation:
    chosen = row("f32[64/tp, 11]", 0.0)
    values: dict[str, Any] = {"kind": "parameter", **fields}
    return Explanation(
        "w", values.pop("kind"), ("w",), "plan", "auto", values.pop("chosen", chosen), 1, (), (), (), rows, excluded,
        **values,
    )  # fmt: skip


def said(asked: Explanation) -> dict[str, str]:
    return {answer.axis: " ".join((answer.now, *answer.sentences)) for answer in by_axis(asked, AXES)}


def test_texts_are_read_as_they_are_written() -> None:
    """Breaks if stripes, zigzag, terms, several axes on a dim, or an attention's choices are read wrongly."""
    assert way_of_text("f32[64/8:dp/tp, 256/2~cp, 3] +ep max:pp") == {
        "dp": "dim 0 in 8 stripes", "tp": "dim 0", "cp": "dim 1 in 2 stripes, every second backwards", "ep": "terms",
        "pp": "terms",
    }  # fmt: skip
    assert way_of_text("dp: batch, cp: ring zigzag") == {"dp": "batch", "cp": "ring zigzag"}
    assert way_of_text("f32[]") == way_of_text("one rank has it all") == {}


def test_the_other_axis_in_its_place() -> None:
    """Breaks if not the best alternative in which the other axis cuts that dim is named, or its numbers are not."""
    best = row("f32[64/dp, 11]", 0.03, communication_delta_s=0.02, note="against tensor on tp")
    answer = said(explanation(row("f32[64, 11]", 0.01), best, row("f32[64/dp, 11/tp]", 0.3)))
    assert set(answer) == {"dp", "tp"}
    assert (
        "Over dp instead of tp (dim 0): a step would take 1.53 s (+30.0 ms, +2.00%), 20.0 ms more communication. It "
        "goes against tensor on tp: only a pin has it so." in answer["tp"]
    )
    assert answer["tp"].startswith("cuts dim 0 in 8 ") and answer["dp"].startswith("every rank has the same")
    assert "Whole on tp: a step would take 1.51 s (+10.0 ms, +0.67%)" in answer["tp"]


def test_two_changes_are_two() -> None:
    """Breaks if a difference that is of the sharding and of what is recomputed is said to be of the sharding alone."""
    answer = said(explanation(row("f32[64/dp, 11]", 0.7, rematerialize="full", note="recomputes full")))
    assert (
        "These are two changes" in answer["tp"] and "recompute whole blocks (full; the plan: selective)" in answer["tp"]
    )
    assert "two changes" not in said(explanation(row("f32[64/dp, 11]", 0.7)))["tp"]


def test_why_there_is_no_alternative() -> None:
    """Breaks if a reason is lost, or what there was no time for is said to be impossible."""
    size = Excluded("f32[64, 11/tp]", "size", "dim 1 is 11, which tp=8 does not divide")
    answer = said(explanation(excluded=(size,)))
    assert "Dim 1 over tp: not possible: dim 1 is 11, which tp=8 does not divide." in answer["tp"]
    assert "Over dp instead of tp (dim 0): nothing of it was tried." in answer["tp"]
    late = said(explanation(unsolved=("f32[64/dp, 11]", "f32[64, 11]")))["tp"]
    assert late.count("not tried within the time for explanations") == 2
    both = Excluded("f32[64/dp/tp, 11]", "memory", "it needs too much")
    assert (
        "nor can f32[64/dp/tp, 11], which changes less (does not fit: it needs too much)"
        in said(explanation(excluded=(both,)))["tp"]
    )
    assert "what else was solved (3) is worse" in said(explanation(more=3))["tp"]
    rule = Excluded("f32[64, 11]", "operator", "its rule has no such split: n k -> n | k sum")
    of_operator = said(explanation(kind="operator", chosen=row("f32[64/dp, 11] +tp", 0.0), excluded=(rule,)))
    assert of_operator["tp"].startswith("holds terms of a sum")
    assert "Whole on dp: the operator was offered no such split." in of_operator["dp"]
    assert by_axis(explanation(kind="value"), AXES) == ()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("gpt2", strategy={"dp": "zero3", "tp": "tensor"}, microbatches=4)


@pytest.mark.moderate
def test_what_is_hidden_is_as_the_timeline_has_it(plan: Plan) -> None:
    """Breaks if what a call waits for counts as hidden, or gathers that run beside calls do not; the plan's own sum
    (less, as what runs at once is slower) must not be above theirs.
    """
    shares = hidden_shares(plan)
    rows = list(zip(plan.collectives, shares, strict=True))
    assert all(share is not None and 0.0 <= share <= 1.0 for share in shares)
    assert all(share == 0.0 for own, share in rows if own.why not in ("gather parameter", "reduce gradient"))
    beside_s = sum(own.seconds * (share or 0.0) for own, share in rows)
    assert plan.cost.hidden_s * (1 - 1e-6) <= beside_s <= plan.cost.communication_s
    assert plan.views is not None
    bare = replace(plan, views=replace(plan.views, spans=()))
    assert set(hidden_shares(bare)) == {None}


@pytest.mark.moderate
def test_what_a_pipeline_hides() -> None:
    """Breaks if what is gathered in each call counts as hidden, or the rank's sends are not found."""
    staged = make_plan("gpt2", "pp=2,dp=2", strategy={"pp": "pipeline(1f1b)", "dp": "zero3"}, microbatches=4)
    shares = hidden_shares(staged)
    found = {own.why: share for own, share in zip(staged.collectives, shares, strict=True)}
    assert found["gather parameter"] == 0.0 == found["sum"]
    assert found["reduce gradient"] is not None and found["gradient to the stage before"] is not None
    assert all(share is None or 0.0 <= share <= 1.0 for share in shares)
