"""A program that runs again and again, as one CUDA graph: what launches its kernels is recorded once and replayed.

    inputs ── copied where they lie elsewhere ──► memory of the graph ──► replay ──► outputs: copies
                                                     ▲                        │
    states ──────────────────────────────────────────┴── written in place ◄───┘

States stay in the graph's memory from one call to the next, as in transformers' static caches: a cache that is handed
in is written. What a script keeps of an earlier run is never written: as long as anybody holds it, the program runs
plainly.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import autopar.operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.base.torch_compat.distributed import TorchDispatchMode, tree_leaves
from autopar.ir.graphs import CACHES
from autopar.runtime.loader import Tensors

Run = Callable[[Tensors], Sequence[Tensor]]
"""The program's inputs, this rank's, by name -> its outputs."""
Work = Callable[[], Sequence[Tensor]]
Capture = Callable[[Work, Work], tuple[Sequence[Tensor], Callable[[], None]]]
"""(the work without what lasts, the work) -> what it gives, and what computes that anew, in the same memory.

Raises RuntimeError where the work cannot be recorded; all is then as before.
"""


def cuda_graph(rehearse: Work, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """A `Capture`. What `work` gives is there after the first replay.

    It is rehearsed before: once, so that what compiles does; and once more, to see whether it waits for the device.
    """
    rehearse()
    waits = waiting_for_device(rehearse)
    if waits:
        raise RuntimeError(f"it waits for the device: {waits[0]}")
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            values = work()
    except BaseException:
        generator.graphsafe_set_state(before)  # else it takes itself for one that is being recorded, for good
        raise
    return values, graph.replay


def waiting_for_device(work: Callable[[], object]) -> list[str]:
    """Where some work waits for the device, as torch says: file and line, each once."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # Not what torch says once of the mode itself.
    found = {f"{each.filename}:{each.lineno}" for each in caught if "called a synchronizing" in str(each.message)}
    return sorted(found)


_rotary_write, _cache_write = torch.ops.autopar.rotary_write.default, torch.ops.autopar.cache_write.default
_OWN = {_rotary_write: CACHES["rotary_write"], _cache_write: CACHES["cache_write"]}
_WRITTEN: Mapping[Any, Sequence[int]] = {torch.ops.aten.index_copy.default: (0,), **_OWN}
"""Operators that write into a copy of what they are given at these places."""


class StateUses(TorchDispatchMode):
    """Finds the states of which a program only asks that something be written into a copy of them."""

    def __init__(self, states: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {_storage(x): name for name, x in states.items()}
        self._uses: dict[str, list[bool]] = {name: [] for name in states}
        self._are_apart = len(self._names) == len(states)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, leaf in enumerate(tree_leaves((args, kwargs or {}))):
            name = self._names.get(_storage(leaf)) if isinstance(leaf, Tensor) else None
            if name is not None:
                self._uses[name].append(place in _WRITTEN.get(func, ()))
        return func(*args, **(kwargs or {}))

    def only_written(self) -> frozenset[str]:
        """Their names: nothing reads the value from before."""
        return frozenset(name for name, uses in self._uses.items() if uses == [True] and self._are_apart)


class _InPlace(TorchDispatchMode):
    """Writes into some tensors where a program asks for a copy of them that is written."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._ids = {id(x) for x in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_copy.default and id(args[0]) in self._ids:
            return torch.ops.aten.index_copy_.default(*args, **(kwargs or {}))
        if func in _OWN:
            caches = [args[place] for place in _OWN[func] if place < len(args) and args[place] is not None]
            if all(id(each) in self._ids for each in caches):
                if func is _rotary_write:
                    return [torch.ops.autopar.rotary_write_.default(*args, **(kwargs or {})), *caches]
                torch.ops.autopar.cache_write_.default(*args, **(kwargs or {}))
                return caches
        return func(*args, **(kwargs or {}))


class Graph:
    """A program over memory of its own.

    run: the program. inputs: of the call that it is made in, which its memory is shaped by. states: the inputs that are
    states -> the places of the outputs that are what becomes of them. written: those of them that are written in place.
    addresses: of what else the program reads.
    """

    def __init__(
        self,
        run: Run,
        inputs: Tensors,
        states: Mapping[str, int],
        written: frozenset[str],
        addresses: Sequence[int],
        capture: Capture,
    ) -> None:
        self.states, self.addresses = states, addresses
        self.memory = {name: torch.empty_like(x).copy_(x) for name, x in inputs.items()}
        self._handed: dict[str, weakref.ref[Any]] = {}
        in_place = _InPlace([self.memory[name] for name in written]) if written else nullcontext()

        def work() -> Sequence[Tensor]:
            with in_place:
                values = run(self.memory)
            for name, place in states.items():
                if values[place] is not self.memory[name]:
                    self.memory[name].copy_(values[place])
            return values

        self._values, self._replay = capture(lambda: run(self.memory), work)

    def fits(self, inputs: Tensors, addresses: Sequence[int]) -> bool:
        """Whether it can run on these: nobody still holds a state of an earlier run that would be written."""
        if addresses != self.addresses:
            return False
        return all(
            _is_at(inputs[name], self.memory[name]) or self._handed.get(name, _nothing)() is None
            for name in self.states
        )

    def __call__(self, inputs: Tensors) -> list[Tensor]:
        """The program's outputs. Those of states are the graph's own memory, the others copies."""
        for name, x in inputs.items():
            if not _is_at(x, self.memory[name]):
                self.memory[name].copy_(x)
        self._replay()
        places = {place: self.memory[name].detach() for name, place in self.states.items()}
        return [places[place] if place in places else value.clone() for place, value in enumerate(self._values)]

    def hand_out(self, outputs: Sequence[Any]) -> None:
        """What the script has of its outputs."""
        self._handed = {name: weakref.ref(outputs[place]) for name, place in self.states.items()}

    def has_out(self, name: str, state: Any) -> bool:
        """Whether it is what the script has of a state since an earlier call."""
        known = self._handed.get(name)
        return known is not None and known() is state


def _nothing() -> None:
    return None


def _is_at(x: Tensor, memory: Tensor) -> bool:
    return x.data_ptr() == memory.data_ptr() and x.stride() == memory.stride()


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
