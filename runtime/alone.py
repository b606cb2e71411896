"""A module of a compiled model that a script calls by itself: `model.model(ids)`, `model.get_encoder()(…)`.

Its parameters lie in pieces, which no eager operator takes. So for the time of the call it has them whole, gathered on
every rank; each rank computes all of it, and gradients that come back are cut as the parameters are. What only other
stages of a pipeline hold, they send; its gradients are kept where it is held, since each rank computes the same ones.
The numbers are those of eager; what that costs is said once.

    model.lm_head(hidden)  →  weight = whole(lm_head.weight); linear(hidden, weight); lm_head.weight as it was
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor, tree_leaves
from autopar.ir.interface import ProgramInterface
from autopar.runtime.checks import check_same_batch
from autopar.runtime.communicator import Communicator
from autopar.runtime.holders import Absent, apart
from autopar.runtime.seen_whole import seen_whole, whole

Piece = tuple[dict[str, Any], str, DTensor]
"""A parameter that lies in pieces, and where a module has it."""


class Owner(Protocol):
    """The engine of the model that a module is a part of. absent: what other ranks hold. device_mesh: of all axes."""

    model: nn.Module
    device_mesh: DeviceMesh
    interface: ProgramInterface | None
    absent: tuple[Absent, ...]

    @property
    def comm(self) -> Communicator:
        """Over all axes."""
        ...

    def before_alone(self, name: str, module: nn.Module, num_bytes: int) -> None:
        """Before parameters of a module of this name are gathered: all ranks have to, and it has a price."""


class Alone:
    """The hooks of one module. Copies of the module (for a trace, or taken apart) have hooks that do nothing, which
    `without_own_hooks` removes.
    """

    of_autopar = True

    def __init__(self, engine: Owner | None, name: str) -> None:
        self.engine: ReferenceType[Owner] | None = None if engine is None else ref(engine)
        self.name = name
        self._kept: list[Piece] = []
        self._lent: list[Absent] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return memo.setdefault(id(self), Alone(None, self.name))

    def __reduce__(self) -> Any:
        return Alone, (None, self.name)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Whole tensors in the place of all parameters of a module and those inside it.

        Raises:
            AutoparError: weights are still to be made; a rank came alone, or with other inputs than another.
        """
        engine = self.engine() if self.engine is not None else None
        if engine is None or self._kept or self._lent:
            return
        inside = list(module.modules())
        pieces: list[Piece] = []
        for each in inside:
            held: dict[str, Any] = each._parameters
            pieces += [(held, name, value) for name, value in held.items() if isinstance(value, DTensor)]
        elsewhere = [each for each in engine.absent if each.is_missing(inside)]
        if not pieces and not elsewhere:
            return
        self._check_made(pieces)
        every = [*(value for _, _, value in pieces), *(each.parameter for each in elsewhere)]
        sizes = {id(value): value.numel() * value.element_size() for value in every}
        engine.before_alone(self.name, module, sum(sizes.values()))
        given = tree_leaves((args, kwargs))
        check_same_batch({f"input {i} of {self.name}": x for i, x in enumerate(given) if isinstance(x, Tensor)})
        found: dict[int, Tensor] = {}
        for _, _, value in pieces:
            if id(value) not in found:
                found[id(value)] = whole(seen_whole(value, is_kept=False))
        _lend(engine, self.name, found, elsewhere)
        self._kept, self._lent = pieces, elsewhere
        for held, name, value in pieces:
            held[name] = found[id(value)]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The pieces again."""
        kept, self._kept = self._kept, []
        for held, name, value in kept:
            held[name] = value
        lent, self._lent = self._lent, []
        for each in lent:
            each.put(None)

    def _check_made(self, pieces: list[Piece]) -> None:
        if any(local_tensor(value).is_meta for _, _, value in pieces):
            raise AutoparError(
                f"{self.name} has no weights yet: they are made at the first batch",
                remedy="Call the model first, or give autopar.compile example_inputs",
            )


def _lend(engine: Owner, module: str, found: Mapping[int, Tensor], elsewhere: Sequence[Absent]) -> None:
    """Whole parameters of a module from pipeline ranks that hold them to those that do not, which put them into their
    places. Collective over the pipeline. found: those of this rank, by the `id` of what lies in pieces.
    """
    interface = engine.interface
    shared = apart(interface, module)
    if not shared:
        return
    assert interface is not None and interface.pipeline is not None
    group = engine.device_mesh.get_group(interface.pipeline.axis)
    missing = {name: each for each in elsewhere for name in each.names}
    held = dict(engine.model.named_parameters(remove_duplicate=False))
    for (name, *_), rank in shared:
        absent = missing.get(name)
        like = found[id(held[name])] if absent is None else absent.parameter
        whole = like.detach().contiguous() if absent is None else _empty(like, engine.comm.device)
        dist.broadcast(whole.reshape(-1).view(torch.uint8), group=group, group_src=rank)
        if absent is not None:
            absent.put(nn.Parameter(whole.detach(), like.requires_grad))


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def hook_modules(engine: Owner) -> None:
    """Every module inside the engine's model may be called by itself from now on."""
    for name, module in engine.model.named_modules():
        if module is engine.model:
            continue
        for hook in list(module._forward_pre_hooks.values()):
            if (own := of(hook)) is not None:  # of a copy
                own.engine, own.name = ref(engine), name
                break
        else:
            own = Alone(engine, name)
            module.register_forward_pre_hook(own.before, with_kwargs=True)
            module.register_forward_hook(own.after, always_call=True)


def of(hook: Any) -> Alone | None:
    """Whose a module's hook is, if it is one of these."""
    found = getattr(hook, "__self__", None)
    return found if isinstance(found, Alone) else None
