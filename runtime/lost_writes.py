"""Writes to copies of parts of DTensors: torch copies `weight[3]` out of pieces, where eager gives a view.

    weight[3].fill_(1)               a method writes back into the pieces (`writes.py`)
    torch.Tensor.fill_(weight[3], 1) a function writes to the copy alone: told at the next forward, with its line
    model.state_dict()["w"][3].fill_(1), rows.mul_(2)           a view of the whole tensor, which is a copy: likewise
    torch.from_numpy(state["w"].numpy()).fill_(1)    its memory, by an array or an address: likewise (`arrays.py`)

torch counts no versions of a DTensor's pieces, so a copy's values are kept, and looked at when nobody has it any more.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor, storage_key

MOST_WAITING = 64
"""Copies that nobody has any more, and that wait to be looked at: on CUDA each look waits for the device."""
_NOT_SCRIPTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), weakref.__file__, "<")
MOST_BYTES = 1 << 28
"""Of copies of whole tensors that are kept until the next forward: who has their memory by now, nobody tells."""
_waiting: list[tuple[_Watched, str]] = []
_handed_out: list[tuple[_Memory, str]] = []
_lost: list[tuple[str, str]] = []
_views: dict[int, tuple[_Memory, int, str]] = {}
_numbers = itertools.count()
_OF_PARTS = "Use the method (weight[3].fill_(x), weight[3] = x), or hand the whole tensor to the function"
_OF_MEMORY = (
    'Write to the tensor itself (state["w"].copy_(torch.from_numpy(array)), model.get_parameter("w").data.copy_(x)); '
    "an array to work in is x.numpy().copy()"
)
_OF_STATES = (
    'Write to the tensor itself (state["w"][3] = x, state["w"].copy_(x)), or to a part of the parameter '
    '(model.get_parameter("w")[3].fill_(x))'
)


_COLUMNS = 61
"""Of numbers that are summed apart, a prime, so that rows that change places are seen, too."""


class _Memory:
    """The memory of a copy of a whole tensor, and what its numbers came to when it was handed out."""

    def __init__(self, local: Tensor, remedy: str) -> None:
        self.local, self.remedy = local, remedy
        self.before = _sums(local)

    def is_other(self) -> bool:
        """Whether something else is in it, by sums of its bits."""
        return not torch.equal(_sums(self.local), self.before)


def _sums(x: Tensor) -> Tensor:
    """Sums of what is in memory, read as whole numbers."""
    held = x.contiguous().flatten()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(held.element_size(), torch.int64)
    bits = (torch.view_as_real(held).flatten() if held.is_complex() else held).view(kind)
    whole = len(bits) // _COLUMNS * _COLUMNS
    rest = torch.nn.functional.pad(bits[whole:].long(), (0, _COLUMNS - (len(bits) - whole)))
    return torch.stack([bits[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64), rest])


class _Watched:
    """The memory of a copy, and what was in it when all that was written had gone into the pieces."""

    def __init__(self, local: Tensor) -> None:
        self.local, self.before = local, local.clone()

    def is_other(self) -> bool:
        """Whether something else is in it, bit by bit."""
        one, other = (x.contiguous().flatten().view(torch.uint8) for x in (self.local, self.before))
        return not torch.equal(one, other)


@torch.no_grad()
def watch(part: DTensor, base: DTensor) -> None:
    """Tell of writes to this copy that do not go into the pieces. base: of what it is a part, perhaps itself a copy,
    whose memory it may have.
    """
    local = local_tensor(part).detach()
    if local.is_meta or not local.numel():
        return
    watched: _Watched | None = vars(base).get("_autopar_watched")
    if watched is None or storage_key(watched.local) != storage_key(local):
        watched = _Watched(local)
    held: Any = part
    held._autopar_watched = watched
    weakref.finalize(part, _is_gone, watched).atexit = False


@torch.no_grad()
def written_back(part: DTensor) -> None:
    """What was written to the copy is in the pieces."""
    watched: _Watched | None = vars(part).get("_autopar_watched")
    if watched is not None:
        watched.before = watched.local.clone()


@torch.no_grad()
def watch_memory(holder: object, memory: Tensor) -> _Memory:
    """Tell of writes to a copy of a whole tensor, of which somebody has the memory as long as there is a holder."""
    watched = _Memory(memory.detach(), _OF_MEMORY)
    weakref.finalize(holder, _is_handed_out, watched).atexit = False
    return watched


@torch.no_grad()
def refilled(watched: _Memory, now: Tensor) -> None:
    """Such a copy is what the tensor is now."""
    if watched.is_other():
        _lost.append((_line(), watched.remedy))
    watched.local.copy_(now)
    watched.before = _sums(watched.local)


@torch.no_grad()
def watch_view(view: Tensor, base: Tensor) -> None:
    """Tell of writes to a view of a whole tensor that stands for one that lies in pieces."""
    if not base.is_inference() and not base.is_meta:
        number = next(_numbers)
        _views[number] = _Memory(base.detach(), _OF_STATES), base._version, _line()
        weakref.finalize(view, _look_at_view, number).atexit = False


def _look_at_view(number: int) -> None:
    """It is gone; an array of it may not be."""
    if number in _views:
        memory, version, where = _views.pop(number)
        if memory.local._version != version:
            _lost.append((where, _OF_STATES))
        else:
            _hand_out(memory, where)


def _look_at_views() -> None:
    """Those that somebody has, too."""
    for number, (memory, version, _) in list(_views.items()):
        if memory.local._version != version:
            _look_at_view(number)


def _is_handed_out(memory: _Memory) -> None:
    _hand_out(memory, _line())


def _hand_out(memory: _Memory, where: str) -> None:
    _handed_out.append((memory, where))
    if sum(each.local.nbytes for each, _ in _handed_out) > MOST_BYTES:
        _look_at_memory()


def _look_at_memory() -> None:
    while _handed_out:
        memory, where = _handed_out.pop()
        if memory.is_other():
            _lost.append((where, memory.remedy))


def _is_gone(watched: _Watched) -> None:
    _waiting.append((watched, _line()))
    if watched.local.device.type == "cpu" or len(_waiting) > MOST_WAITING:
        _look()


def _look() -> None:
    while _waiting:
        watched, where = _waiting.pop()
        if watched.is_other():
            _lost.append((where, _OF_PARTS))


def _line() -> str:
    """Where the script is."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_SCRIPTS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def check() -> None:
    """Raises an AutoparError, once, where something was written to a copy and is lost."""
    _look()
    _look_at_views()
    _look_at_memory()
    if not _lost:
        return
    (where, remedy), _lost[:] = _lost[0], []
    raise AutoparError(
        "a function wrote into a part of a tensor that lies in pieces: it got a copy, and the tensor is as it was",
        where=where or None,
        remedy=remedy,
    )
