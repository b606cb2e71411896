"""What is said where a model's forward cannot be traced: its line, why, and what would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.torch_compat import tracing as compat
from autopar.passes.avoidable import argument_instead

_NO_VALUES = "its data is not allocated yet"
"""What torch says where its own code, which no mode sees, reads a tensor that has no values."""


def asks_for_values(error: Exception) -> bool:
    """Whether a trace ended because a tensor's value was asked for, or because a size is one."""
    cause = error.__cause__ or error
    return compat.is_data_dependent(cause) or "SymInt" in str(cause)


def capture_error(model: nn.Module, arguments: Mapping[str, Any], error: Exception) -> AutoparError:
    """Name the model's own line: the innermost frame that is not the tracer's, outside torch.

    arguments: of the call that was traced; with a cache of ours among them it is one of `generate()`.
    """
    where = compat.model_line(error) or type(model).__name__
    if compat.is_data_dependent(error):
        what = f"{type(model).__name__} chooses what to do by the value of a tensor, so one program cannot stand for it"
        remedy = "replace the branch by torch.where or torch.cond, or keep the decision out of forward()"
        if instead := argument_instead(error, model.forward):
            name, line = instead
            remedy = f"make {name} yourself and hand it in with the batch: forward makes it where it is None ({line})"
    elif asks_for_values(error):
        what = f"{type(model).__name__} makes a size by the values of a tensor: one program cannot stand for it"
        remedy = "keep the size and mark what counts with a mask (torch.where), or make the choice outside of forward()"
    else:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"{type(model).__name__} cannot be traced: {reason}"
        remedy = "check that model(**batch) runs in eager mode on this batch; the cause is chained below"
        if kept := sorted(caches.states_among(arguments)):
            what = f"{type(model).__name__} cannot be traced over a cache of a fixed length ({kept[0]}): {reason}"
            remedy = caches.WITHOUT
        if ".numpy()" in reason:
            what = f"{type(model).__name__} hands values of tensors to NumPy, of which no program knows what comes"
            remedy = "compute it with torch's operators, or outside of forward(), and hand it in with the batch"
        if _NO_VALUES in reason:
            what = f"{type(model).__name__} makes a tensor of numbers that it reads of others in a way that nobody sees"
            remedy = "put them together with torch.stack, or torch.tensor, not with torch.FloatTensor and its like"
        if "meta" in str(error) and "cpu" in str(error):
            remedy = (
                "a tensor that the model holds in a plain attribute, or makes, is on meta and has no values: build the "
                "model on the CPU, or register the tensor as a buffer"
            )
    return AutoparError(what, where=where, remedy=remedy)


def with_line(error: AutoparError) -> AutoparError:
    """The error, with the model's line that it was raised under, if it says none itself."""
    if error.where is None and (line := compat.model_line(error)):
        error.where = line
        error.args = (str(error),)
    return error
