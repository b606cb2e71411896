"""The states of random generators: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.runtime.checkpoint.tree import decode, encode, inline

_KEYS = 624
"""Of a Mersenne twister."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Of this process, encoded."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    assert kind == "MT19937"
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [[int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return encode(state, "the random state", lambda at, x: inline(x))


def set_random_state(encoded: Any, device: torch.device) -> None:
    """Put the generators where they were.

    Raises:
        ValueError: no states of these generators.
    """
    state = decode(encoded, _no_tensors)
    try:
        keys, position, has_gauss, gauss = state["numpy"]
        if not 0 <= position <= _KEYS or len(keys) != _KEYS:  # NumPy itself does not look
            raise ValueError("NumPy's has another position")
        torch.set_rng_state(state["torch"])
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        random.setstate(state["python"])
        if device.type == "cuda" and isinstance(state.get("cuda"), Tensor):
            torch.cuda.set_rng_state(state["cuda"], device)
    except (KeyError, TypeError, RuntimeError, OverflowError, AttributeError, ValueError) as error:
        raise ValueError(f"the random state is none: {str(error)[:200]}") from error


def _no_tensors(name: str, like: bool) -> Tensor:
    raise ValueError(f"the random state names the tensor {name[:80]}")
