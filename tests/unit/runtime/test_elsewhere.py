"""What a module says of a parameter that other stages of a pipeline hold."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from autopar.base.errors import AutoparError
from autopar.runtime.elsewhere import Elsewhere
from autopar.runtime.holders import remove


def test_a_parameter_of_another_stage_is_seen_without_values() -> None:
    """Breaks if its outside is not that of the parameter, if it counts among the rank's own, if its values are made up,
    or if what is lent to its module is not found there, or stays.
    """
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    whole = model[0].weight
    assert isinstance(whole, nn.Parameter)
    absent = remove(whole, ["0.weight", "1.weight"], model, (1,), torch.device("cuda"))
    weight = model[1].weight
    assert weight is model[0].weight and isinstance(weight, nn.Parameter) and isinstance(weight, Elsewhere)
    assert (weight.shape, weight.dtype, weight.numel(), weight.grad) == ((5, 3), torch.float32, 15, None)
    assert weight.device == torch.device("cuda") and weight.requires_grad and "pipeline rank 1" in f"{weight}"
    weight.requires_grad_(False)
    assert not model[0].weight.requires_grad
    for ask in (weight.sum, lambda: weight.data, lambda: weight.T, lambda: model[1](torch.ones(3)), weight.tolist):
        with pytest.raises(AutoparError, match=r"values of 0.weight are not on this rank(.|\n)*pipeline rank 1 holds"):
            ask()
    model[1].weight = weight  # tied again, as transformers does
    assert not list(model.parameters()) and not model.state_dict() and absent.is_missing([model[1]])
    assert copy.deepcopy(model)[1].weight is weight
    assert pickle.loads(pickle.dumps(model[1]._parameters)) == {"weight": None, "bias": None}
    absent.put(whole)
    assert model[1].weight is whole and model[1](torch.ones(3)).shape == (5,) and not absent.is_missing([model[0]])
    absent.put(None)
    assert model[1].weight is weight and model[1].bias is None
