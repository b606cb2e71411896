"""Data of checkpoints as JSON: what goes in comes out, and what is no data is named."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.tree import decode, encode, names_in


def there_and_back(value: Any) -> Any:
    kept: dict[str, Tensor] = {}

    def put(at: str, x: Tensor) -> dict[str, Any]:
        kept[at] = x
        return {"$at": at}

    tree = json.loads(json.dumps(encode(value, "it", put), allow_nan=False))
    assert names_in(tree) == dict.fromkeys(kept, False)
    return decode(tree, lambda name, like: kept[name])


@pytest.mark.parametrize("value", [
    None, True, 3, -2.5, "text", [1, [2.0, None]], (1, (2,)), {"a": {"b": []}}, {1: "one", (2, 3): "two", "$at": 4},
    Counter({30: 1, 80: 2}), b"\x00\xff", float("inf"), {"$tuple": [1]}, 1e-310, 2**61,
], ids=str)  # fmt: skip
def test_data_comes_back(value: Any) -> None:
    """Breaks if a tuple becomes a list, a key another kind, or a mapping is taken for what stands for something."""
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


def test_numbers_of_others_and_ordered_mappings_are_plain() -> None:
    """Breaks if NumPy's numbers or an OrderedDict are refused: schedulers and loaders have them."""
    assert there_and_back({"a": np.float64(0.1), "b": OrderedDict(x=torch.Size([2]))}) == {"a": 0.1, "b": {"x": (2,)}}
    assert math.isnan(there_and_back(float("nan")))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (500, 5)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Breaks if bits of a small tensor change on the way, or a large one is put into the text."""
    value = (torch.randn(shape) * 3).to(dtype)
    found = there_and_back([value])[0]
    assert found.dtype == dtype and found.shape == value.shape and torch.equal(found, value)


def test_what_is_no_data_is_named() -> None:
    """Breaks if an object would be pickled, or nobody knows which entry it is."""
    with pytest.raises(AutoparError, match=r"extra\['rates'\]\[1\] cannot be saved: it is a builtins\.function"):
        encode({"rates": [1, lambda step: step]}, "extra", lambda at, x: {})
    with pytest.raises(AutoparError, match=r"extra\['x'\] cannot be saved: it is a tensor of .*sparse"):
        encode({"x": torch.eye(2).to_sparse()}, "extra", lambda at, x: {})


@pytest.mark.parametrize("tree", [
    {"$run": "code"}, {"$tensor": ["float32", [2], "AAAA"]}, {"$tensor": ["object", [], ""]}, {"$bytes": "?"},
    {"$pairs": [[[], 1]]}, {"$pairs": [1]}, {"$float": 1.0}, {"$tuple": 3}, {"$at": 1}, {"$at": "a", "$like": "b"},
    {"$tensor": ["float32", [-1, -1], "AAAAAA=="]}, {"$tensor": ["uint8", [1 << 60, 0], ""]}, {"$counter": [[1, "b"]]},
    {"$tensor": ["bool", [1], "Ag=="]}, {"$tensor": [{"a": 1}, [1], "Ag=="]}, {"$float": [1]},
], ids=str)  # fmt: skip
def test_what_stands_for_nothing(tree: Any) -> None:
    """Breaks if a crafted manifest gives anything else than plain data, or another error than that it is none."""
    with pytest.raises(ValueError):
        decode(tree, lambda name, like: torch.zeros(()))
