"""Lists of passes in the phases that the planner runs apart (autopar/pipeline.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import pipeline
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.ir.verify import check_program
from autopar.machine.mesh import Mesh
from autopar.pipeline import DEFAULT, TRACE, Pass, Phases


def names(steps: tuple[Pass, ...]) -> list[str]:
    return [step.name for step in steps]


def test_the_default_list_is_its_phases() -> None:
    """Breaks if a pass is in no phase, or in two."""
    found = Phases.of(DEFAULT)
    assert (*found.trace, *found.recompute, *found.annotate, *found.place, *found.lower) == DEFAULT
    assert (found.trace, found.prepare) == (pipeline.TRACE, (*pipeline.RECOMPUTE, *pipeline.ANNOTATE))
    assert found.decide == (*pipeline.PLACE, *pipeline.LOWER)


def test_passes_of_a_users_own_stay_where_they_were_put() -> None:
    """Breaks if a pass that is added runs in another phase, one that is replaced in the wrong one, or behind `place`
    but once: other placements that are tried would go without it.
    """
    own = Pass("own", lambda program, _: program)
    for number, step in enumerate(DEFAULT):
        found = Phases.of((*DEFAULT[: number + 1], own, *DEFAULT[number + 1 :]))
        phase = next(p for p in (found.trace, found.recompute, found.annotate, found.place, found.lower) if own in p)
        assert phase == found.lower if step.name == "place" else step in phase
    replaced = tuple(Pass(step.name, own.apply) if step.name == "annotate" else step for step in DEFAULT)
    assert names(Phases.of(replaced).annotate) == ["annotate"]
    behind = Phases.of(DEFAULT[len(TRACE) :])
    assert names(behind.trace) == [] and not behind.have("capture")


@pytest.mark.moderate
def test_a_pass_behind_place_sees_every_placement() -> None:
    """Breaks if a plan keeps what no pass of the user's has seen."""
    seen: list[Program] = []

    def look(program: Program, _: object) -> Program:
        seen.append(program)
        return program

    cut = names(DEFAULT).index("place") + 1
    loaded = catalogue.load("mlp", tiny=True)
    plan = autopar.plan(
        loaded.model,
        Mesh({"dp": 2}),
        example_inputs=loaded.batch,
        passes=[*DEFAULT[:cut], Pass("look", look), *DEFAULT[cut:]],
    )
    assert plan.program is not None and all(program.placement is not None for program in seen)
    assert any(program.placement == plan.program.placement for program in seen)


@pytest.mark.moderate
@pytest.mark.parametrize("record", ["annotated", "placed"])
def test_what_a_phase_found_is_there_as_a_whole_or_told_missing(record: str) -> None:
    """Breaks if a region without what its phase should have found passes the verifier, or reads as one without
    operators.
    """
    loaded = catalogue.load("mlp", tiny=True)
    plan = autopar.plan(loaded.model, Mesh({"dp": 2}), example_inputs=loaded.batch, strategy="ddp")
    assert plan.program is not None
    (first, *_) = plan.program.regions
    bare = replace(first, **{record: None})
    with pytest.raises(AssertionError, match=f"the program breaks its rules:\n- {first.name} is not {record}"):
        check_program(plan.program.with_regions({first.name: bare}), after="place")
    with pytest.raises(AssertionError, match=f"{first.name} is not {record}"):
        _ = bare.ops if record == "annotated" else bare.strategies
