"""Objects that were there before planning are spared by the collector meanwhile, and given back."""

import gc

import pytest
from torch import nn

import autopar
from autopar.base.garbage import older_spared
from autopar.planner import decide


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.moderate
def test_older_objects_are_spared_inside_alone():
    with older_spared():
        assert gc.get_freeze_count() > 1000
        with older_spared():
            pass
        assert gc.get_freeze_count() > 1000, "the inner one does not end the outer one"
    assert gc.get_freeze_count() == 0


def test_an_error_gives_them_back():
    with pytest.raises(ZeroDivisionError), older_spared():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


@pytest.mark.moderate
def test_what_a_user_froze_stays_frozen():
    gc.freeze()
    with older_spared():
        pass
    assert gc.get_freeze_count() > 1000


@pytest.mark.moderate
def test_planning_spares_them(monkeypatch):
    seen = []
    real = decide.best_plan
    monkeypatch.setattr(decide, "best_plan", lambda *given: (seen.append(gc.get_freeze_count()), real(*given))[1])
    model = nn.Linear(4, 4)
    plan = autopar.plan(model, autopar.Mesh({"dp": 1}), example_inputs=nn.Parameter(model.weight.detach()))
    assert plan.source
    assert seen[0] > 1000
    assert gc.get_freeze_count() == 0
