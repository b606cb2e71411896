"""Objects that were there before planning are spared by the collector meanwhile, and given back."""

import gc

import pytest
from torch import nn

import autopar
from autopar.api import planning
from autopar.base.garbage import OFTEN, older_spared, spare
from autopar.planner import decide


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.moderate
def test_older_objects_are_spared_inside_alone():
    with older_spared():
        assert gc.get_freeze_count() > 1000
        with older_spared():
            pass
        assert gc.get_freeze_count() > 1000, "the inner one does not end the outer one"
    assert gc.get_freeze_count() == 0


def test_nothing_is_spared_when_it_is_over():
    with older_spared():
        spare()
    spare()
    assert gc.get_freeze_count() == 0


def test_an_error_gives_them_back():
    with pytest.raises(ZeroDivisionError), older_spared():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


@pytest.mark.moderate
def test_what_a_user_froze_stays_frozen():
    gc.set_threshold(700, 10, 10)
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    with older_spared():
        later = [[] for _ in range(1000)]
        with older_spared():
            spare()
        assert gc.get_threshold() == (700, 10, 10)
    assert abs(gc.get_freeze_count() - frozen) < len(later), "what came later is still searched through"


def test_what_is_frozen_is_counted_once(monkeypatch):
    """Breaks if each call in another walks through all that somebody froze."""
    counted = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1000)
    with older_spared(), older_spared():
        pass
    assert len(counted) == 1
    with older_spared():
        assert len(counted) == 2, "who has let go of it since is spared"


def test_garbage_is_searched_for_less_often_inside_alone():
    gc.set_threshold(700, 10, 10)
    with older_spared():
        assert gc.get_threshold() == OFTEN
        with older_spared():
            pass
        assert gc.get_threshold() == OFTEN, "the inner one does not end the outer one"
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (1_000_000, 5, 5)])
def test_who_searches_even_less_often_goes_on_so(own):
    gc.set_threshold(*own)
    with older_spared():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_thresholds_that_are_set_inside_stay():
    gc.set_threshold(700, 10, 10)
    with older_spared():
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


@pytest.mark.moderate
def test_planning_spares_them(monkeypatch):
    seen = []
    real = decide.best_plan
    monkeypatch.setattr(decide, "best_plan", lambda *given: (seen.append(gc.get_freeze_count()), real(*given))[1])
    views = planning.views_of
    monkeypatch.setattr(planning, "views_of", lambda *given: (seen.append(gc.get_freeze_count()), views(*given))[1])
    model = nn.Linear(4, 4)
    plan = autopar.plan(model, autopar.Mesh({"dp": 1}), example_inputs=nn.Parameter(model.weight.detach()))
    assert plan.source
    assert len(seen) == 2
    assert min(seen) > 1000, "also while its text and its views are made"
    assert gc.get_freeze_count() == 0
