"""The report's tab of experts, and the exchanges in the trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cost.under_way import step_hidden_s
from autopar.machine.hardware import Hardware
from autopar.operators.rules.exchange_cost import ranks_of_token, rows_at_once
from autopar.planner.plan.drawn import Views
from autopar.views.content import Findings, content_of
from autopar.views.step import spans_of

pytestmark = pytest.mark.unit

EXPERTS, CHOSEN, TOKENS = 8, 2, 32


def mixtral(strategy: dict[str, str], mesh: dict[str, int], **options: Any) -> Plan:
    """A Mixtral of two layers; 16 sequences of 8 tokens, 4 sequences a rank of data."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        ids = torch.zeros((16, 8), dtype=torch.int64)
    return autopar.plan(
        model, autopar.Mesh(mesh, hardware="h100"), example_inputs={"input_ids": ids, "labels": ids},
        strategy=strategy, expert_imbalance=1.5, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def exchanged() -> Plan:
    return mixtral({"dp": "expert"}, {"dp": 4})


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    rows = content_of(plan, Findings(), (), {})["experts"]
    assert isinstance(rows, list)
    return rows


@pytest.mark.moderate
def test_a_layer_of_experts_by_hand(exchanged: Plan) -> None:
    """Breaks if tokens of an expert or of a rank are miscounted: 32 tokens a rank choose 2 of 8 experts on 4 ranks, so
    that an expert gets 32 of all 128, and a rank 64 choices.
    """
    (row,) = rows_of(exchanged)
    assert (row["axis"], row["ranks"], row["experts"], row["chosen"]) == ("dp", 4, EXPERTS, CHOSEN)
    assert (row["here"], row["tokens"], row["expert_rows"], row["rows"]) == (2, TOKENS, 32, 64)
    assert row["busiest_rows"] == pytest.approx(1.5 * 64)
    assert row["round_rows"] == rows_at_once(TOKENS, EXPERTS, CHOSEN, 4)
    assert row["split"] == "tokens and experts over dp" and (row["calls"], row["times"]) == (2, 2)
    away = TOKENS * ranks_of_token(EXPERTS, CHOSEN, 4) * 3 / 4
    assert row["forward_bytes"] == pytest.approx(away * (2 * 16 * 4 + CHOSEN * 8) + 3 * 4 * 8)


@pytest.mark.moderate
def test_a_guest_by_hand(exchanged: Plan) -> None:
    """Breaks if an expert that visits a rank is said to take nothing, or its gradients are left out."""
    (row,) = rows_of(exchanged)
    expert, most = (2 * 24 + 24) * 16 * 4, row["round_rows"] + 4  # bytes; rows of a round, of which there may be more
    assert row["guest_bytes"] == 3 * expert + most * (16 + CHOSEN) * 4  # its parameters, gradients of two rounds


def test_exchanges_are_those_of_the_plan(exchanged: Plan) -> None:
    """Breaks if the tab's bytes or seconds are not what the plan's collectives have."""
    (row,) = rows_of(exchanged)
    own = [each for each in exchanged.collectives if each.kind == "exchange"]
    for phase in ("forward", "backward"):
        planned = [each for each in own if each.phase == phase]
        assert row["times"] * row[f"{phase}_bytes"] == pytest.approx(sum(each.bytes_sent for each in planned))
        assert row["times"] * row[f"{phase}_s"] == pytest.approx(sum(each.seconds for each in planned))
        assert row[f"{phase}_compute_s"] > 0
    assert row["item"] in content_of(exchanged, Findings(), (), {})["items"]


def test_loads_say_what_placing_would_gain(exchanged: Plan) -> None:
    """Breaks if layers get each other's loads, if the mean is not one of layers, or if what `place_experts` makes of
    them is something else; if loads that no layer has go by without a word.
    """
    first, second = ([9, 7, 0, 0, 0, 0, 0, 0], [2] * 8)
    loads = {"model.layers.0.mlp.experts": [first, first], "model.layers.1.mlp.experts": second}
    (row,) = content_of(exchanged, Findings(expert_loads=loads), (), {})["experts"]
    assert (row["measured"], row["placed"]) == ((4.0 + 1.0) / 2, (9 / 4 + 1.0) / 2)
    assert row["visited"] == (9 / 8 + 1.0) / 2  # each of the two has one guest, somewhere else
    assert "measured" not in rows_of(exchanged)[0]
    for name, given, said in (
        ("model.layers.0.mlp", second, "model.layers.0.mlp, which is no layer of experts"),
        ("model.layers.0.mlp.experts", [1, 2], "2 numbers a step"),
    ):
        with pytest.raises(AutoparError, match=said):
            content_of(exchanged, Findings(expert_loads={name: given}), (), {})


@pytest.mark.moderate
def test_microbatches_at_a_time_have_a_row_each() -> None:
    """Breaks if the two rows of a layer look alike, or loads are of the first one alone."""
    plan = mixtral({"dp": "expert"}, {"dp": 4}, microbatches=2, halves=True)
    loads = {f"model.layers.{layer}.mlp.experts": [9, 1, 1, 1, 1, 1, 1, 1] for layer in range(2)}
    first, second = content_of(plan, Findings(expert_loads=loads), (), {})["experts"]
    assert first["split"].endswith("microbatch 1 of two at a time")
    assert second["split"].endswith("microbatch 2 of two at a time")
    assert first["measured"] == second["measured"] > second["visited"]


@pytest.mark.moderate
def test_experts_that_stay_send_nothing() -> None:
    """Breaks if an axis that splits widths or experts alone is said to exchange, or the busiest rank to have more."""
    for name, words in (("tensor", "widths over tp"), ("expert+sum", "experts over tp")):
        (row,) = rows_of(mixtral({"dp": "ddp", "tp": name}, {"dp": 2, "tp": 2}))
        assert row["split"] == f"tokens over dp; {words}" and row["axis"] == "" and row["round_rows"] == 0
        assert row["rows"] == row["busiest_rows"] and row["forward_bytes"] == row["forward_s"] == 0.0
        assert row["rows"] == pytest.approx(64 * CHOSEN / (2 if name == "expert+sum" else 1), rel=1e-14)


def test_what_is_shown_of_experts_is_saved(exchanged: Plan) -> None:
    """Breaks if a loaded plan has lost its layers of experts, or a plan of before them cannot be read."""
    views = exchanged.drawn
    data = json.loads(json.dumps(views.to_data()))
    assert Views.from_data(data) == views and any(region.experts for region in views.regions)
    for region in data["regions"]:
        del region["experts"]
    assert not any(region.experts for region in Views.from_data(data).regions)


def test_exchanges_have_their_place_in_the_step(exchanged: Plan) -> None:
    """Breaks if the trace has no span for an exchange, on the lane of its link, with its bytes."""
    assert exchanged.program is not None and isinstance(exchanged.mesh.hardware, Hardware)
    spans = [each for each in spans_of(exchanged.program, exchanged.cost) if each.name.startswith("exchange")]
    assert {each.track for each in spans} == {"node"} and {each.phase for each in spans} == {"forward", "backward"}
    own = [each for each in exchanged.collectives if each.kind == "exchange"]
    assert sum(each.bytes_sent for each in spans) == pytest.approx(sum(each.bytes_sent for each in own))
    assert sum(each.end_s - each.start_s for each in spans) >= 0.99 * sum(each.seconds for each in own)


@pytest.mark.moderate
def test_what_is_hidden_of_exchanges() -> None:
    """Breaks if what runs beside an exchange is missing in the tabs of experts and of collectives, if more is hidden
    than travels, or if that is not what the step's seconds have.
    """
    from tests.unit.passes.test_interleave import large, program_of

    plan = large(True)
    (row,) = rows_of(plan)
    for phase in ("forward", "backward"):
        assert 0.05 * row[f"{phase}_s"] < row[f"{phase}_hidden_s"] < row[f"{phase}_s"]
        hidden = row[f"{phase}_hidden_s"] / row[f"{phase}_s"]
        content = content_of(plan, Findings(), (), {})["collectives"]
        assert isinstance(content, list)
        own = [each["hidden"] for each in content if (each["kind"], each["phase"]) == ("exchange", phase)]
        assert own == [pytest.approx(hidden)]
    saved = row["forward_hidden_s"] + row["backward_hidden_s"]  # no compute is slower beside what travels, there
    assert step_hidden_s(program_of(plan)) == pytest.approx(saved)
    (plain,) = rows_of(large(False))
    assert plain["forward_hidden_s"] == plain["backward_hidden_s"] == 0.0
