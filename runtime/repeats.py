"""A forward without gradients that is of a kind of one before, as the tokens of `generate()` are: what was looked up
for that one (the program, where inputs go and outputs come from, how they lie) is used again.

    kind of the batch, model as it was ──► this rank's pieces ──► the program (or its graph) ──► the model's output

Where such calls follow one another in one `generate()`, caches that one of them made are written in place by the next
(`in_place.py`): nobody else has them.

All that is left out is what gives the same again: nothing that ranks tell each other is. Anything that is otherwise
than in that call (a module in another mode, a parameter in another's place, a cache that lies otherwise) is no repeat.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base import environment
from autopar.base.huggingface.caches import is_cache
from autopar.base.huggingface.outputs import Make, maker_like
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.interface import TensorInterface
from autopar.runtime.agreement import Call
from autopar.runtime.communicator import Communicator
from autopar.runtime.executable import Executable
from autopar.runtime.given import Given, Kind
from autopar.runtime.graphs import Capture, Graph, Run, StateUses, cuda_graph
from autopar.runtime.in_place import InPlace
from autopar.runtime.layout import in_blocks
from autopar.runtime.loader import LoadedProgram, Tensors, load_program
from autopar.runtime.microbatches import seed_of
from autopar.runtime.placements import from_dtensor_placements
from autopar.runtime.replay import Replay
from autopar.runtime.seen_whole import SeenWhole, Term
from autopar.runtime.snapshot import Snapshot
from autopar.runtime.straight import is_straight_program

logger = logging.getLogger("autopar")

MOST = 64
"""Kinds of calls that a model keeps."""
MOST_GRAPHS = 4
"""Of them, those whose program is a graph, which holds a cache."""


class Repeats:
    """The kinds of calls of a model that may come again."""

    def __init__(self) -> None:
        self._kept: dict[Kind, Repeat] = {}

    @staticmethod
    def given(kwargs: Mapping[str, Any]) -> Given | None:
        """The arguments of a call; None where some are of other kinds."""
        return Given.of(kwargs)

    def find(self, given: Given) -> Repeat | None:
        """The one that a call is of, where the model is as it was."""
        found = self._kept.get(given.kind)
        if found is not None and not found.snapshot.holds():
            self._kept.clear()
            return None
        return found

    def drop(self, repeat: Repeat) -> None:
        """It is none any more."""
        self._kept = {kind: each for kind, each in self._kept.items() if each is not repeat}

    def keep(self, given: Given, make: Callable[[], Repeat | None]) -> None:
        """Keep what a call left for others of its kind, if that is new."""
        made = None if given.kind in self._kept else make()
        if made is not None:
            self._kept[given.kind] = made
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]

    def num_graphs(self) -> int:
        """How many of them are graphs now."""
        return sum(each.has_graph for each in self._kept.values())

    def limit_graphs(self) -> None:
        """Few hold memory: the latest."""
        graphs = [each for each in self._kept.values() if each.has_graph]
        for each in graphs[:-MOST_GRAPHS]:
            each.drop_graph()


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where a tensor comes from: an argument of the call; of a cache, a state by its number.

    spec: how the state lies; None of one that every rank has whole (a number, an empty cache), of which plain has shape
    and dtype. entry: the input of the program that it is.
    """

    argument: str
    state: int | None = None
    spec: Any = None
    plain: Any = None
    entry: TensorInterface | None = None


@dataclass(slots=True, eq=False)
class Repeat:
    """A kind of call. compared: the inputs whose values ranks compare. specs: how outputs lie, None of numbers.
    named: this rank's parameters, with how they lie. make, fields: what makes the model's output, and the places of
    outputs in it; None where it is no plain structure of these. capture: what makes a graph of the program, where it
    may be one. states: its inputs that are states, with the places of the outputs that they become. cut: the inputs of
    which the program takes a part or casts; stand_ins: for those of which this rank has its piece.
    """

    executable: Executable
    program: LoadedProgram
    snapshot: Snapshot
    call: Call
    compared: Mapping[str, _Source]
    sources: Sequence[_Source]
    specs: Sequence[Any]
    named: Sequence[tuple[TensorInterface, DTensor, Any]]
    buffers: Sequence[tuple[str, Mapping[str, Any], str]]
    comm: Communicator
    seed: Any
    make: Make | None
    fields: Sequence[tuple[str, Any]] | None
    gather_first: Sequence[Callable[[], None] | None]
    choose_first: Sequence[Callable[[], None] | None]
    capture: Capture | None
    states: Mapping[str, int]
    cut: frozenset[str]
    stand_ins: Tensors
    _latest: dict[_Source, Any] = field(default_factory=dict[_Source, Any])
    _tensors: list[Tensor] = field(default_factory=list[Tensor])
    _state: Tensors = field(default_factory=dict[str, Tensor])
    _num_runs: int = 0
    _written: frozenset[str] = frozenset()
    _graph: Graph | None = None
    _in_place: InPlace | None = None
    _replay: Replay | None = None
    _handed: tuple[weakref.ref[Any], dict[str, weakref.ref[Any]]] | None = None

    def states_of(self, leaves: Mapping[str, Any]) -> dict[str, list[Any]] | None:
        """The states of the call's caches, by argument; None where one lies otherwise than in the call before."""
        found = {name: value.states() for name, value in leaves.items() if is_cache(value)}
        for source in self.sources:
            if source.state is None:
                continue
            given = found[source.argument]
            state: Any = given[source.state] if source.state < len(given) else None
            if source.spec is None:
                if type(state) not in (Tensor, Term) or (state.shape, state.dtype) != source.plain:
                    return None
                continue
            if not isinstance(state, DTensor) or getattr(state, "_whole", None) is not None:
                return None
            if state._spec is not source.spec and state._spec is not self._latest.get(source):
                if state._spec != source.spec:
                    return None
                self._latest[source] = state._spec
        return found

    def inputs(self, leaves: Mapping[str, Any], states: Mapping[str, list[Any]]) -> Tensors:
        """This rank's pieces of the program's inputs."""
        found: Tensors = {}
        for source in self.sources:
            entry = source.entry
            assert entry is not None
            given = leaves[source.argument] if source.state is None else states[source.argument][source.state]
            if source.spec is None:
                is_plain = type(given) is Tensor and not given.requires_grad and given.device == self.comm.device
                found[entry.name] = given if is_plain else given.detach().to(self.comm.device, non_blocking=True)
            else:
                found[entry.name] = local_tensor(given)
        if self.cut:
            # Pieces are as they are to be; what the program makes of stand-ins for them is nothing.
            local = self.program.split_inputs(self.comm, {**found, **self.stand_ins})
            found.update({name: local[name] for name in self.cut})
        return found

    def state(self) -> Tensors | None:
        """This rank's parameters and buffers by name; None where a parameter lies otherwise than in the call before."""
        for _, parameter, spec in self.named:
            if parameter._spec is not spec:
                return None
        tensors = [local_tensor(parameter) for _, parameter, _ in self.named]
        tensors += [held[own] for _, held, own in self.buffers]
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return self._state
        found: Tensors = {}
        for (entry, *_), local in zip(self.named, tensors, strict=False):
            found.update(dict.fromkeys((entry.name, *entry.aliases), local))
        for (name, *_), buffer in zip(self.buffers, tensors[len(self.named) :], strict=True):
            found[name] = buffer
        state = in_blocks(self.executable.interface, found)
        if not any(entry.block is not None for entry, *_ in self.named):  # else others are made of them each time
            self._tensors, self._state = tensors, state
        return state

    def call_of(self, number: int, leaves: Mapping[str, Any], states: Mapping[str, list[Any]]) -> Call:
        """What ranks compare, as of the call before, with these inputs' values."""
        given = {
            name: leaves[at.argument] if at.state is None else states[at.argument][at.state]
            for name, at in self.compared.items()
        }
        return self.call._replace(number=number, inputs=given)

    def run(
        self, leaves: Mapping[str, Any], states: Mapping[str, list[Any]], state: Tensors,
        as_number: Callable[[Tensor], Tensor], during: object | None = None,
    ) -> list[Any]:  # fmt: skip
        """The program's outputs, as the user has them. during: the `generate()` that calls, while it runs."""
        inputs = self.inputs(leaves, states)
        is_compiled = bool(self.executable.compile_regions)

        def forward(given: Tensors) -> Sequence[Tensor]:
            if during is None or is_compiled:
                return run(self.comm, state, given)
            self._replay = self._replay or Replay(self.program.source, self.program.filename)
            return self._replay(run, self.comm, state, given)

        def run(comm: Communicator, state: Tensors, given: Tensors) -> Sequence[Tensor]:
            return self.program.forward(comm, state, {}, given, self.seed)[0]

        self._num_runs += 1
        if self.states and self._num_runs == 1 and self._is_readable():
            # Which operators a compiled text calls is not seen.
            text = load_program(self.program.source, self.program.filename) if is_compiled else self.program
            with StateUses({name: inputs[name] for name in self.states}) as uses:
                values: Sequence[Tensor] = text.forward(self.comm, state, {}, inputs, self.seed)[0]
            self._written = uses.only_written()
            return self._handed_out(self.seen(values, as_number, {}), during)
        given = {source.entry.name: states[source.argument][source.state] for source in self.sources
                 if source.state is not None and source.entry is not None}  # fmt: skip
        graph = self._graph_for(forward, inputs, state)
        if graph is not None:
            values = graph(inputs)
            same = {place: given[name] for name, place in self.states.items() if graph.has_out(name, given[name])}
            seen = self.seen(values, as_number, same)
            graph.hand_out(seen)
            return seen
        may_write = self._may_write(given, during)
        if not may_write and not (is_compiled and self._written):
            return self._handed_out(self.seen(forward(inputs), as_number, {}), during)
        if not may_write:  # compiled once, for writing: into copies
            inputs = {**inputs, **{name: inputs[name].clone() for name in self._written}}
        self._in_place = self._in_place or InPlace(self.program, self.executable.compile_regions)
        values = self._in_place(self.comm, state, inputs, self.seed, self._written)
        same = self._in_same_memory(values, inputs, given) if may_write else {}
        return self._handed_out(self.seen(values, as_number, same), during)

    def _is_readable(self) -> bool:
        """Whether states that its text writes may be written in place."""
        if not self.executable.compile_regions:
            return True
        return self.comm.device.type == "cpu" and is_straight_program(self.program.source)

    def _in_same_memory(self, values: Sequence[Tensor], inputs: Tensors, given: Mapping[str, Any]) -> dict[int, Any]:
        """The states that were written where they lay, by the places of outputs; others, as where a text that somebody
        edited writes by another name, are copies.
        """
        places = ((name, self.states[name]) for name in self._written)
        return {place: given[name] for name, place in places if values[place] is inputs[name]}

    def _graph_for(self, forward: Run, inputs: Tensors, state: Tensors) -> Graph | None:
        """What the program is on these inputs, where it may be a graph."""
        if self.capture is None or not self.states:
            return None
        addresses = [x.data_ptr() for x in state.values()]
        is_elsewhere = self._graph is not None and self._graph.addresses != addresses
        if self._num_runs == 2 or is_elsewhere:
            self._graph = self._captured(forward, inputs, addresses)
        return self._graph if self._graph is not None and self._graph.fits(inputs, addresses) else None

    def _may_write(self, given: Mapping[str, Any], during: object | None) -> bool:
        """Whether the states that could be written in place are those that the call before made, in the same
        `generate()`: it has no other use for them.
        """
        if during is None or self._handed is None or not self._written or not self.program.source:
            return False
        made_during, handed = self._handed
        return made_during() is during and all(handed[name]() is given[name] for name in self._written)

    def _handed_out(self, seen: list[Any], during: object | None) -> list[Any]:
        if during is not None and self._written:
            states = {name: weakref.ref(seen[self.states[name]]) for name in self._written}
            self._handed = (weakref.ref(during), states)
        return seen

    def _captured(self, forward: Run, inputs: Tensors, addresses: Sequence[int]) -> Graph | None:
        assert self.capture is not None
        try:
            return Graph(forward, inputs, self.states, self._written, addresses, self.capture)
        except RuntimeError as error:
            why = str(error).splitlines()[0][:200]
            logger.info("autopar: the program %s is no CUDA graph: %s", self.program.filename, why)
            return None

    @property
    def has_graph(self) -> bool:
        """Whether it holds memory of a graph."""
        return self._graph is not None

    def drop_graph(self) -> None:
        """Free its memory; it runs plainly from now on."""
        self._graph = None

    def seen(
        self, values: Sequence[Tensor], as_number: Callable[[Tensor], Tensor], same: Mapping[int, Any]
    ) -> list[Any]:
        """Outputs as the user has them. values: this rank's pieces. same: those that the user has already, by place."""
        found: list[Any] = []
        for place, (value, spec) in enumerate(zip(values, self.specs, strict=True)):
            if place in same:
                found.append(same[place])
                continue
            if spec is None:
                found.append(as_number(value))
                continue
            each: Any = SeenWhole(value, spec, requires_grad=False)  # pyright: ignore
            each._gather_first, each._choose_first = self.gather_first[place], self.choose_first[place]
            found.append(each)
        return found

    def output(self, seen: Sequence[Any], leaves: Mapping[str, Any]) -> Any:
        """What the model's forward returns. seen: its outputs."""
        if self.fields is None or self.make is None:
            return self.executable.rebuild_output(seen)
        found: dict[str, Any] = {}
        for name, place in self.fields:
            found[name] = seen[place] if isinstance(place, int) else leaves[name].after([seen[i] for i in place])
        return self.make(found)


def repeat_of(
    executable: Executable,
    program: LoadedProgram,
    comm: Communicator,
    model: nn.Module,
    call: Call,
    leaves: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
    seen: Sequence[Tensor | None],
    output: Any,
    parameters: Sequence[nn.Parameter],
    constants: Mapping[str, Tensor],
) -> Repeat | None:
    """What a call left for others of its kind; None where they have to go the whole way.

    call: as ranks compared it. inputs: of the program, as they were handed in. seen: outputs as the user has
    them; output: made of these. parameters: in the interface's order.
    """
    interface = executable.interface
    others = (interface.pipeline, executable.added, *interface.updates, *interface.by_value, *interface.branches)
    others = (*others, *interface.told, *(str(each.held) for each in interface.carried))
    if any(each is not None for each in others) or not executable.repeats or interface.microbatches != 1:
        return None
    if program.draws or any(entry.block is not None for entry in (*interface.inputs, *interface.outputs)):
        return None
    sources = [_source(entry.name, inputs.get(entry.name), leaves, entry) for entry in interface.inputs]
    compared = {name: _source(name, call.inputs[name], leaves) for name in call.compared()}
    if not all(sources) or not all(compared.values()):
        return None
    placed = [p for p in parameters if isinstance(p, DTensor)]
    if any(each is None for each in seen) or len(placed) < len(parameters):
        return None
    buffers = []
    for entry in interface.buffers:
        path, _, own = entry.name.rpartition(".")
        held = constants if entry.name in constants else model.get_submodule(path)._buffers
        buffers.append((entry.name, held, entry.name if entry.name in constants else own))
    outputs: list[Any] = list(seen)
    fields = _fields_of(output, seen, leaves)
    capture = cuda_graph if may_be_graph(comm) else None
    is_padded = any(entry.block is not None for entry in interface.parameters)
    may_capture = capture is not None and not is_padded and not interface.granted
    pieces = {source.entry for source in sources if source is not None and source.spec is not None}
    stand_ins = {entry.name: _meta(entry) for entry in interface.inputs if entry in pieces}
    whole = {entry.name: _meta(entry) for entry in interface.inputs}
    try:
        local = program.split_inputs(comm, dict(whole))
    except (RuntimeError, NotImplementedError):  # one that somebody edited, which asks what is in tensors
        return None
    cut = frozenset(name for name, x in whole.items() if name not in stand_ins and local[name] is not x)
    kept = call._replace(inputs={}, kinds=call.kinds_of_inputs())
    return Repeat(
        executable, program, Snapshot(model, dist.get_world_size() > 1), kept,
        {name: each for name, each in compared.items() if each is not None},
        [each for each in sources if each is not None],
        [getattr(each, "_spec", None) for each in outputs],
        [(entry, p, p._spec) for entry, p in zip(interface.parameters, placed, strict=True)],
        buffers, comm, seed_of(0, 0, comm.device), None if fields is None else maker_like(output), fields,
        [getattr(each, "_gather_first", None) for each in outputs],
        [getattr(each, "_choose_first", None) for each in outputs],
        capture if may_capture else None, _states(sources, fields) if stand_ins else {}, cut, stand_ins,
    )  # fmt: skip


def _source(
    path: str, x: Tensor | None, leaves: Mapping[str, Any], entry: TensorInterface | None = None
) -> _Source | None:
    """Where a tensor came from, by its path: one tensor may be handed in under several names, and another time not.

    None where it was made on the way, or lies otherwise than the program takes it.
    """
    if type(x) is Tensor and leaves.get(path) is x:
        return _Source(path, entry=entry)
    above, _, number = path.rpartition(".")
    cache = leaves.get(above)
    if x is None or not is_cache(cache) or not number.isdecimal():
        return None
    states: list[Any] = cache.states()  # type: ignore[union-attr]
    if int(number) >= len(states) or states[int(number)] is not x:
        return None
    if isinstance(x, DTensor):
        lies = entry is None or _lies_as(x, entry)
        return _Source(above, int(number), x._spec, entry=entry) if lies else None
    return _Source(above, int(number), plain=(x.shape, x.dtype), entry=entry) if type(x) in (Tensor, Term) else None


def _lies_as(x: DTensor, entry: TensorInterface) -> bool:
    return from_dtensor_placements(x.placements) == entry.sharding and str(x.dtype) == f"torch.{entry.dtype}"


def _meta(entry: TensorInterface) -> Tensor:
    """A tensor without values in the place of an input."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")


def _fields_of(output: Any, seen: Sequence[Any], leaves: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """The places of a structure's outputs by its fields, of a cache those of its states; None of another structure."""
    if not dataclasses.is_dataclass(output) or not isinstance(output, Mapping):
        return None
    places = {id(each): place for place, each in enumerate(seen)}
    found: list[tuple[str, Any]] = []
    for each in dataclasses.fields(output):
        value = getattr(output, each.name)
        if value is None:
            continue
        states = value.states() if is_cache(value) and is_cache(leaves.get(each.name)) else None
        if states is not None and all(id(x) in places for x in states):
            found.append((each.name, [places[id(x)] for x in states]))
        elif id(value) in places:
            found.append((each.name, places[id(value)]))
        else:
            return None
    return found


def _states(sources: Iterable[_Source | None], fields: Sequence[tuple[str, Any]] | None) -> dict[str, int]:
    """The inputs that are states, with the places of the outputs that they become."""
    places = {name: place for name, place in fields or () if not isinstance(place, int)}
    return {
        source.entry.name: places[source.argument][source.state]
        for source in sources
        if source is not None and source.state is not None and source.entry is not None and source.argument in places
    }


def may_be_graph(comm: Communicator) -> bool:
    """Whether programs that are run again and again are CUDA graphs: on one GPU. Several ranks would have to record in
    the same call.
    """
    return comm.device.type == "cuda" and math.prod(comm.sizes) == 1 and environment.cuda_graphs()
