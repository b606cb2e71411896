"""Inputs that nothing in a model reads: programs are made without them, so that other values need no other program.

    model(input_ids, position_ids, cu_seq_lens_q=[0, 5, 12], max_length_q=7)   →   a program of input_ids, position_ids

Shown by two traces: one in which whoever looks at such an input is noticed, one without it, which must say the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.opaque import LookedAtError, Opaque
from autopar.passes.capture import capture, say_the_same


def nobody_reads(
    names: Collection[str],
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    precision: torch.dtype | None,
    training: bool,
) -> bool:
    """Whether a call of the model is the same without these inputs, whatever they are."""
    others = {name: value for name, value in inputs.items() if name not in names}
    watched = copy.copy(model)
    forward = vars(model).get("forward") or type(model).forward.__get__(watched)
    vars(watched)["forward"] = functools.partial(forward, **{name: Opaque() for name in names})
    try:
        found = capture(watched, others, precision=precision, training=training)
        without = capture(model, others, precision=precision, training=training)
    except (AutoparError, LookedAtError):
        return False
    return say_the_same(found, without)
