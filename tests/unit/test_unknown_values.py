"""What layers keep of models whose forward asks how many rows there are of something."""

from __future__ import annotations

import pytest
import torch

from autopar.base.huggingface import caches
from autopar.base.huggingface.unknown_values import guessed
from tests.dist.architectures import model_and_prompt


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["dbrx", "jetmoe"])
def test_caches_are_as_models_write_them(name: str) -> None:
    """Breaks if loops over experts that are hit, or parts whose sizes values say, keep layers from being found, or if
    what is answered leads to other keys than a forward of tokens writes.
    """
    model, prompt = model_and_prompt(name)
    cache = caches.new_cache(model, 4, 7, torch.device("cpu"))
    with torch.no_grad():
        written = model(**prompt, use_cache=True).past_key_values
    want = [tuple(each.shape) for layer in written.layers for each in (layer.keys, layer.values)]
    assert [tuple(each.shape) for each in cache.states() if each.dim() == 4] == want


def test_parts_fit_what_they_are_parts_of() -> None:
    """Breaks if sizes that are known change, or parts of unknown sizes are more or fewer rows than there are."""
    x, counts = torch.empty(6, 10, device="meta"), torch.empty(3, dtype=torch.long, device="meta")
    with guessed():
        assert [each.shape[0] for each in x.split(counts.tolist())] == [6, 0, 0]
        assert [each.shape[1] for each in torch.split(x, [2, *counts.tolist()], dim=1)] == [2, 8, 0, 0]
        assert [each.shape[1] for each in x.split([3, 7], dim=1)] == [3, 7]
        assert counts.nonzero().shape == (3, 1) and x[counts[0]].shape == (10,) and x[:, counts[1]].shape == (6,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        counts.nonzero()
