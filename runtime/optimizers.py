"""Which optimizers do on split parameters what they do on whole ones.

Parameters, gradients and optimizer states are DTensors in the stored sharding. An update that treats each element by
itself is the same on a piece. Others reduce over a tensor (Adafactor's row and column means, LBFGS's dot products,
Muon's matrix products), and are right only as far as DTensor's own operators carry them.

Tried with torch 2.13 on 2 and 4 processes, parameters split along one dim or two, evenly, unevenly, in stripes, and not
at all (tests/dist/runtime/test_optimizers.py):

    | optimizer                                   | update      | on split parameters                                  |
    | ------------------------------------------- | ----------- | ---------------------------------------------------- |
    | Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, | elementwise | equal to one process, bit by bit                     |
    |   Adadelta, RMSprop, ASGD, SGD              |             | fused: Adam and AdamW only (DTensor has no others)   |
    | Muon, Adafactor, Rprop                      | whole       | equal, on whole tensors, one gathered at a time      |
    | LBFGS                                       | flat dots   | equal; not where a split is uneven; all gathered     |
    | SparseAdam                                  | elementwise | no: gradients are dense                              |

Of other libraries, what is known to use norms or matrices of a whole tensor (`NORM_BASED`) runs on whole tensors, all
gathered at once. The rest is tried on small tensors (`optimizer_trial.py`), and steps on pieces where these come to the
same, else on whole tensors, too. Of what cannot be tried a warning says, once a class, what is assumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import is_split, local_tensor
from autopar.runtime.optimizer_trial import Found, tried

logger = logging.getLogger("autopar")

Layouts = Literal["any", "even", "whole", "none"]


@dataclass(frozen=True, slots=True)
class Support:
    """layouts: of the parameters that an optimizer can update. without: options of a group that DTensor cannot run.

    elementwise: the update of each element depends on that element alone, so it may run on a rank's pieces.
    gathers: it runs on whole tensors (runtime/whole_update.py), of one parameter at a time where the update of each
    looks at that parameter alone.
    """

    layouts: Layouts = "any"
    without: tuple[str, ...] = ()
    elementwise: bool = False
    gathers: Literal["one by one", "all"] | None = None


SUPPORT: Mapping[str, Support] = {
    "Adam": Support(elementwise=True),
    "AdamW": Support(elementwise=True),
    "NAdam": Support(elementwise=True),
    "RAdam": Support(elementwise=True),
    "Adamax": Support(elementwise=True),
    "Adadelta": Support(elementwise=True),
    "RMSprop": Support(elementwise=True),
    "ASGD": Support(elementwise=True),
    "Adagrad": Support(without=("fused",), elementwise=True),
    "SGD": Support(without=("fused",), elementwise=True),
    "Muon": Support(gathers="one by one"),
    "LBFGS": Support("even"),
    "Rprop": Support(gathers="one by one"),
    "Adafactor": Support(gathers="one by one"),
    "SparseAdam": Support("none"),
}
"""Optimizers of torch.optim by name."""

NORM_BASED = (
    *("adafactor", "adamini", "came", "dadapt", "fromage", "galore", "kron", "lamb", "larc", "lars", "lbfgs", "muon"),
    *("novograd", "prodigy", "psgd", "scion", "shampoo", "sm3", "soap"),
)
"""What the names of other libraries' optimizers begin or end with when their update looks at a whole tensor."""

_REMEDIES: Mapping[Layouts, str] = {
    "any": "leave the option out",
    "even": 'use an elementwise optimizer such as AdamW, or strategy="ddp", which does not split parameters',
    "whole": 'use an elementwise optimizer such as AdamW, or strategy="ddp", which does not split parameters',
    "none": "use an optimizer for dense gradients, such as AdamW",
}

_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_trials: WeakKeyDictionary[Optimizer, tuple[int, Found]] = WeakKeyDictionary()
_warned: set[type[Optimizer]] = set()


def _check_options(optimizer: Optimizer) -> None:
    """A group of parameters of one pipeline rank is in no other rank's checkpoint: torch then drops its options."""
    # torch itself gives every optimizer that loads a state the default of `differentiable`, and the groups none.
    options = optimizer.defaults.keys() - {"differentiable"}
    lost = sorted({option for group in optimizer.param_groups for option in options if option not in group})
    if lost:
        raise AutoparError(
            f"this {type(optimizer).__name__} has lost its options {', '.join(lost)}",
            values="torch found the parameters of this rank's stages in no group of the checkpoint",
            remedy="Save and load with StateDictOptions(flatten_optimizer_state_dict=True) of "
            "torch.distributed.checkpoint.state_dict",
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of taken-over parameters would be another than of whole tensors.

    Looked at once per optimizer, and again when it gets more parameters.

    Raises:
        AutoparError: names the optimizer, the reason, and how many parameters are concerned.
    """
    parameters = [p for p in held_by(optimizer) if isinstance(p, DTensor) and hasattr(p, "_autopar_placed")]
    if parameters:
        _check_options(optimizer)
    if not parameters or _checked.get(optimizer) == len(parameters):
        return
    name, support = _support(optimizer)
    for option in support.without:
        if any(group.get(option) for group in optimizer.param_groups):
            raise AutoparError(
                f"{name} with {option}=True cannot update distributed parameters",
                values="DTensor has no such operator",
                remedy=_REMEDIES["any"],
            )
    concerned = [p for p in parameters if not _can_update(support.layouts, p)]
    if concerned:
        reasons: dict[Layouts, str] = {
            "even": "unevenly split parameters",
            "whole": "parameters that are split between ranks",
            "none": "parameters with dense gradients",
        }
        raise AutoparError(
            f"{name} cannot update {reasons[support.layouts]}: its update is not one of single elements",
            values=f"{len(concerned)} of {len(parameters)} parameters, such as one of {tuple(concerned[0].shape)}",
            remedy=_REMEDIES[support.layouts],
        )
    _checked[optimizer] = len(parameters)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the update is known to treat each element by itself."""
    if not any(isinstance(p, DTensor) and hasattr(p, "_autopar_placed") for p in held_by(optimizer)):
        support = _of_torch(optimizer)
        return support is not None and support.elementwise
    return _support(optimizer)[1].elementwise


def gathers(optimizer: Optimizer) -> Literal["one by one", "all"] | None:
    """How the optimizer gets to see whole tensors, where its update needs them; `check_optimizer` was asked before."""
    if not any(isinstance(p, DTensor) and hasattr(p, "_autopar_placed") for p in held_by(optimizer)):
        return None
    return _support(optimizer)[1].gathers


def held_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _support(optimizer: Optimizer) -> tuple[str, Support]:
    cls, known = type(optimizer), _of_torch(optimizer)
    if known is not None:
        return cls.__name__, known
    plain = cls.__name__.lower().replace("_", "")
    if any(plain.startswith(word) or plain.endswith(word) for word in NORM_BASED):
        return cls.__name__, Support(gathers="all")
    num_groups, found = _trials.get(optimizer, (0, "unclear"))
    if num_groups != len(optimizer.param_groups):
        found = tried(optimizer)
        _trials[optimizer] = len(optimizer.param_groups), found
    if found != "unclear":
        return cls.__name__, Support(elementwise=True) if found == "elements" else Support(gathers="all")
    if cls not in _warned:
        _warned.add(cls)
        logger.warning(
            "autopar: %s is not known, and cannot be tried by itself; where parameters are split between ranks, its "
            "update must treat each element by itself (no norms, means or products over a tensor)",
            cls.__name__,
        )
    return cls.__name__, Support()


def _of_torch(optimizer: Optimizer) -> Support | None:
    """Of an optimizer of torch.optim, or a subclass that only changes defaults: whose `step` it is counts."""
    step = type(optimizer).step
    return SUPPORT.get(step.__qualname__.split(".")[0]) if step.__module__.startswith("torch.optim.") else None


def _can_update(layouts: Layouts, parameter: DTensor) -> bool:
    if layouts in ("any", "none"):
        return layouts == "any"
    pieces = 1
    for axis, placement in enumerate(parameter.placements):
        if is_split(placement):
            pieces *= parameter.device_mesh.size(axis)
    return pieces == 1 or (layouts == "even" and local_tensor(parameter).numel() * pieces == parameter.numel())
