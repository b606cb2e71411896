"""What of a model that was changed behind compile its programs follow."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from autopar.api.following import Following, numbers_of
from autopar.base.huggingface.configuration import configurations

pytestmark = pytest.mark.unit


def _model() -> Any:
    model: Any = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Identity()), nn.Identity())
    config = SimpleNamespace(output_hidden_states=False, layers=2, name="own")
    model[1].config = model[1][0].config = config
    model[2].config = SimpleNamespace(use_cache=True)
    return model


def test_a_configuration_is_followed_as_modules_are() -> None:
    """Breaks if flags of a configuration stay what they were when the model was compiled, if one that two modules have
    counts twice, or if it is forgotten that a number is what it was again.
    """
    model = _model()
    blueprint = copy.deepcopy(model)
    assert [*configurations(model)] == ["1.config", "2.config"]
    following = Following(blueprint, model, numbers_of(blueprint))
    assert following.follow() == ()
    model[1].config.output_hidden_states, model[0].p = True, 0.25
    assert following.follow() == (("0.p", 0.25), ("1.config.output_hidden_states", True))
    assert blueprint[1][0].config.output_hidden_states is True
    model[1].config.output_hidden_states, model[2].config.use_cache = False, False
    assert following.follow() == (("0.p", 0.25), ("2.config.use_cache", False))
    assert blueprint[1].config.output_hidden_states is False


def test_other_configurations_are_not_taken_for_those_that_were_compiled() -> None:
    """Breaks if a module that got a configuration of its own has another one's numbers followed."""
    model = _model()
    blueprint = copy.deepcopy(model)
    model[1][0].config = SimpleNamespace(output_hidden_states=True)
    following = Following(blueprint, model, numbers_of(blueprint))
    assert following.follow() == () and blueprint[2].config.use_cache is True
