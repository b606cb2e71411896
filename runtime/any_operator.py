"""Any function of torch on parameters and gradients: what cannot be done in pieces is done on whole tensors, and a
plain tensor beside them counts as one that every rank has whole.

    torch.where(mask, p, x), F.mse_loss(p, x)     in pieces: each rank takes its part of x
    p.unique(), torch.linalg.svd(p), p.renorm(…)  whole: gathered on every rank, and what comes out is on every rank
    torch.linalg.inv(p, out=q)                    likewise, and what was written to is cut again

Below autograd, so that gradients, and gradients of gradients, find their operators, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autopar.base.torch_compat.distributed import (
    default_timeout_s,
    handle,
    local_tensor,
    same_group,
    settle,
    tensor_hooks,
    tree_leaves,
    tree_map,
)
from autopar.base.torch_compat.mixed import answer_operators, in_pieces, is_known, take_plain
from autopar.runtime.clipping import check_of_all_stages
from autopar.runtime.meeting import PATIENCE_S, meet
from autopar.runtime.seen_whole import cut

logger = logging.getLogger("autopar")

_ATEN = torch.ops.aten
MISTAKEN = (
    _ATEN.convolution.default, _ATEN.convolution_backward.default, _ATEN.segment_reduce.default,
    _ATEN.mse_loss_backward.default, _ATEN.smooth_l1_loss_backward.default, _ATEN.huber_loss_backward.default,
    _ATEN.binary_cross_entropy_backward.default, _ATEN.soft_margin_loss_backward.default, _ATEN.topk.default,
    _ATEN.nll_loss_forward.default, _ATEN.nll_loss_backward.default, _ATEN.nll_loss2d_forward.default,
    _ATEN.nll_loss2d_backward.default,
)  # fmt: skip
"""What torch does wrong in pieces: it takes a kernel that lies in pieces for one of an image that does, divides means,
or their gradients, by how many numbers a piece has, and says of `topk(10)` that it is five where it did `topk(5)`.
"""
FILLED = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor)
JOINED = (_ATEN.stack.default, _ATEN.cat.default)


def take_operators() -> None:
    """Have DTensors' operators be done so; idempotent. Nothing is done with a torch that has other dispatch."""
    kind: Any = DTensor
    if getattr(kind, "_autopar_operators", False) or not is_known():
        return
    kind._autopar_operators = True
    answer_operators(on_whole)
    take_plain(True)
    for operator in MISTAKEN:
        handle(operator, on_whole)
    for operator in FILLED:
        handle(operator, _fill)
    for operator in JOINED:
        handle(operator, _join)
    handle(_ATEN.as_strided.default, _strided)


def on_whole(operator: Any, args: Any, kwargs: Any) -> Any:
    """An operator on whole tensors; what it gives is on every rank, what it writes to is cut again. Collective."""
    given = tree_leaves((args, kwargs))
    mesh = next(x.device_mesh for x in given if isinstance(x, DTensor))
    written = {id(x) for x in tree_leaves(_written(operator, args, kwargs))}
    known: dict[int, tuple[Any, Tensor]] = {}

    def taken(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        if id(x) not in known:
            say_once(x, "do what cannot be done in pieces")
            detached: Any = x.detach()
            known[id(x)] = x, detached.full_tensor().clone() if id(x) in written else detached.full_tensor()
        return known[id(x)][1]

    with torch.no_grad():
        args, kwargs = tree_map(taken, (args, kwargs))
        found = operator(*args, **kwargs)
        for x, value in known.values():
            if id(x) in written:
                settle(x)
                local_tensor(x).copy_(local_tensor(cut(value, x)))
    stands = {id(value): x for x, value in known.values() if id(x) in written} | {id(x): x for x in given}

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in stands:
            return stands.get(id(value), value)
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return tree_map(back, found)


def _written(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    arguments = operator._schema.arguments
    places = [i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(arguments[i].name) for i in places]


def _fill(operator: Any, args: Any, kwargs: Any) -> Any:
    """A number for all elements: what `torch.ones_like(p.norm())` does to terms that ranks would add up."""
    x, value = (each.full_tensor() if isinstance(each, DTensor) and place else each for place, each in enumerate(args))
    if isinstance(x, DTensor):
        settle(x)
    operator(local_tensor(x) if isinstance(x, DTensor) else x, value)
    return x


def _join(operator: Any, args: Any, kwargs: Any) -> Any:
    """Tensors in a row.

    Raises:
        AutoparError: numbers of gradients of one stage of a pipeline, norms that a script clips by.
    """
    numbers = [x for x in args[0] if isinstance(x, DTensor) and x.numel() == 1 and not x.requires_grad]
    if len(numbers) == len(args[0]):
        check_of_all_stages(numbers)
    return in_pieces(operator, args, kwargs)


def _strided(operator: Any, args: Any, kwargs: Any) -> Any:
    """A part of memory, of which no rank has the whole's."""
    x, size, stride, *offset = args
    same = tuple(x.shape) == tuple(size) and tuple(x.stride()) == tuple(stride) and not any(offset)
    return _ATEN.alias.default(x) if same and isinstance(x, DTensor) else on_whole(operator, args, kwargs)


def take_gradients(x: DTensor) -> None:
    """Have what x was computed of get gradients that lie as it does: of a parameter its pieces, of a plain tensor the
    whole, plain. What comes through the graph of a DTensor lies as it comes out of operators.
    """
    waiting, seen = [x.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Any = getattr(node, "variable", None)
        if leaf is not None and not hasattr(leaf, "_autopar_takes"):
            placed = leaf.placements if isinstance(leaf, DTensor) else None
            vars(leaf)["_autopar_takes"] = leaf.register_hook(partial(_lying, placed))
        waiting += [other for other, _ in node.next_functions]


def is_watched(x: Any) -> bool:
    """Whether a hook of somebody else's looks at a leaf's gradient."""
    own = vars(x).get("_autopar_takes")
    return any(own is None or number != own.id for number in tensor_hooks(x)[0] or ())


def _lying(placements: Any, gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor) or gradient.placements == placements:
        return gradient
    return gradient.full_tensor() if placements is None else gradient.redistribute(placements=placements)


_met: list[Callable[[], bool]] = []
"""Whether the process group is the one in which it was said."""


def say_once(x: DTensor, what: str) -> None:
    """Before the first gather: every rank has to, and it has a price. what: is about to be done."""
    is_split = any(not placement.is_replicate() for placement in x.placements)
    if not is_split or x.device_mesh.size() != dist.get_world_size() or (_met and _met[0]()):
        return
    _met[:] = [same_group()]
    patience_s = default_timeout_s(local_tensor(x).device) or PATIENCE_S
    meet(what, patience_s, "Do it on every rank: each keeps its piece of what is written")
    if dist.get_rank() == 0:
        logger.warning(
            "autopar: to %s, the whole tensor that lies in pieces is gathered on every rank, wherever that is (said "
            "once)", what,
        )  # fmt: skip
