"""One stage of a pipeline during one step, on one rank: what it has of each microbatch, and what its actions do.

Where two microbatches go through the program together, an action's number is that of the two. The values of a
microbatch live from the action that makes them to the one that uses them last:

    received    RECV_F (or the F before, on the same rank) to F       gradients    RECV_B to B or I
    sent        F to SEND_F, then until they have left                sent_back    B or I to SEND_B, likewise
    saved       F to B or I                                           kept         I to W
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import StageInterface, TensorInterface
from autopar.ir.sharding import Sharding
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Pending
from autopar.runtime.input_gradients import InputGradients
from autopar.runtime.layout import local_part_shape, piece_of_block
from autopar.runtime.loader import LoadedStage, Tensors
from autopar.runtime.microbatches import Batch, seeds_of
from autopar.runtime.recording import Recorder
from autopar.runtime.step import Grads, given_gradient
from autopar.runtime.transfers import Transfers

Values = tuple[Tensor, ...]
Wanted = tuple[tuple[int, ...], torch.dtype]


@dataclass(slots=True, eq=False)
class Work:
    """What the stages of one rank have in common during a step.

    comm: of the whole mesh; the batch's is that of one stage. groups: the microbatches that the number of an action
    stands for, all of them or some (`Batch.together`). own: the inputs that they take, by name. grads: local, one for
    each differentiable output; None where there is no backward. keeps_outputs: larger ones than scalars, too. pending:
    what was sent, and may not have left. inputs_gradients: collects those of the step's inputs.
    """

    batch: Batch
    groups: Sequence[tuple[int, ...]]
    comm: Communicator
    axis: str
    rank_of: tuple[int, ...]
    seed: int | Tensor
    grads: Grads | None
    recorder: Recorder
    num_here: int
    own: frozenset[str]
    inputs_gradients: InputGradients
    keeps_outputs: bool = True
    pending: list[Pending] = field(default_factory=list)
    inputs: dict[int, tuple[int, Tensors]] = field(default_factory=dict)

    def is_alive(self, i: int) -> bool:
        """Whether the step's outputs that have a gradient depend on the microbatches `i`; the same on every rank."""
        if self.grads is None:
            return False
        outputs = [entry for entry in self.batch.interface.outputs if entry.differentiable]
        return any(
            grad is not None
            and (self.batch.num == 1 or entry.combine == "concat" or self.batch.scale(entry, each) is not None)
            for each in self.groups[i]
            for grad, entry in zip(self.grads, outputs, strict=True)
        )

    def inputs_of(self, i: int) -> Tensors:
        """This rank's part of the inputs of a microbatch: made for its first stage here, dropped after its last."""
        uses, local = self.inputs.pop(i) if i in self.inputs else (0, self.batch.inputs_of(self.groups[i], self.own))
        if uses + 1 < self.num_here:
            self.inputs[i] = uses + 1, local
        return local

    def roots(self, places: Sequence[int], i: int) -> dict[int, Any]:
        """The gradients of those of the program's outputs `places` that are differentiable."""
        assert self.grads is not None
        outputs = self.batch.interface.outputs
        given = iter(self.grads)
        by_place = {place: next(given) for place, entry in enumerate(outputs) if entry.differentiable}
        found: dict[int, Any] = {}
        for place in places:
            own, microbatch = self.output_of(place, i)
            if own in by_place:
                grad = None if microbatch is None else self.batch.gradient(own, by_place[own], microbatch)
                found[place] = given_gradient(self.batch.comm, grad, outputs[own])
        return found

    def output_of(self, place: int, i: int) -> tuple[int, int | None]:
        """Which of the step's outputs one of the program's is, and of which microbatch; None for what is there twice
        and counts once.
        """
        turn, own = divmod(place, len(self.batch.interface.outputs))
        group = self.groups[i]
        return own, None if group[turn] in group[:turn] else group[turn]

    def send(self, values: Values, stage: int, other: int, kind: str, i: int) -> None:
        """To another stage, which needs them for its action `kind` of microbatch `i`."""
        if values:
            self.comm.at(f"{stage}SEND_{kind}{i}")
            self.pending = [each for each in self.pending if not each.has_left()]
            self.pending.append(self.comm.send(values, self.axis, self.rank_of[other], f"{other}{kind}{i}"))

    def receive(self, wanted: Sequence[Wanted], stage: int, other: int, kind: str, i: int) -> Pending:
        """From another stage, for the action `kind` of microbatch `i` here."""
        self.comm.at(f"{stage}RECV_{kind}{i}")
        return self.comm.receive(wanted, self.axis, self.rank_of[other], f"{stage}{kind}{i}")


class StageRun:
    """One stage during one step. Its attributes are also what torch's schedule runtime wants to know of a stage.

    before, after: the neighbours that run on this rank, which are handed values without communication. sums: what there
    is of gradients, unreduced.
    """

    submod = None
    has_backward = True

    def __init__(
        self,
        number: int,
        work: Work,
        functions: LoadedStage,
        interface: StageInterface,
        state: Tensors,
        sums: Tensors,
    ) -> None:
        self.stage_index, self.num_stages = number, len(work.rank_of)
        self.group_rank, self.group_size = work.rank_of[number], work.comm.size(work.axis)
        self.is_first, self.is_last = number == 0, number == len(work.rank_of) - 1
        self.work, self.functions, self.interface = work, functions, interface
        self.comm = work.batch.comm
        self.before: StageRun | None = None
        self.after: StageRun | None = None
        self.state, self.states = state, dict[int, Tensors]()
        self.held, self.sums = Tensors(), sums
        self.unsharding: list[Transfers] = []
        self.received: dict[int, Pending | Values] = {}
        self.gradients: dict[int, Pending | Values] = {}
        self.sent: dict[int, Values] = {}
        self.sent_back: dict[int, Values] = {}
        self.saved: dict[int, list[Any]] = {}
        self.kept: dict[int, list[Any]] = {}
        self.outputs: dict[int, dict[int, Tensor]] = {work.output_of(place, 0)[0]: {} for place in interface.outputs}
        self.updates: dict[str, dict[int, Tensor]] = {}

    def clear_runtime_states(self) -> None:
        """For torch's runtime; a stage lives for one step."""

    # -- parameters

    def unshard(self) -> None:
        """Start to gather what is held for the step."""
        self.unsharding = self.functions.unshard(self.comm, self.state, self.held)

    def reshard(self) -> None:
        """Let go of what was gathered for the step."""
        self._be_unsharded()
        self.held.clear()

    def reduce(self) -> Tensors:
        """The reduced local gradients of the step, by the parameters' first names."""
        found = self.functions.reduce(self.comm, self.sums)
        self.sums = {}
        gradients: Tensors = {}
        for entry in self.work.batch.interface.parameters:
            name = next((name for name in (entry.name, *entry.aliases) if name in found), None)
            if name is not None:
                gradients[entry.name] = piece_of_block(self.comm, found[name], entry)
        return gradients

    def _be_unsharded(self) -> None:
        pending, self.unsharding = self.unsharding, []
        for transfers in pending:
            transfers.wait()

    # -- compute

    def forward(self, i: int) -> None:
        """F of microbatch `i`."""
        work = self.work
        self._be_unsharded()
        received = self._taken(self.received, i, "F")
        with work.recorder.action(f"{self.stage_index}F{i}"):
            inputs, seed = work.inputs_of(i), seeds_of(work.seed, work.groups[i], self.comm.device)
            sent, outputs, updates, saved = self.functions.forward(
                self.comm, self.state, self.held, inputs, received, seed
            )
        del received
        if work.is_alive(i):
            self.saved[i], self.states[i] = saved, self.state
        self._check_results(i, outputs, updates)
        entries = work.batch.interface.outputs
        for place, value in outputs.items():
            own, microbatch = work.output_of(place, i)
            if microbatch is not None and (work.keeps_outputs or not entries[own].shape):
                self.outputs[own][microbatch] = piece_of_block(self.comm, value, entries[own])
        for name, value in updates.items():
            self.updates.setdefault(name, {})[i] = value
        self._check_values(tuple(sent), self._sent_shapes(), f"{self.stage_index}F{i}", "values to send")
        if self.after is not None:
            self.after.received[i] = tuple(sent)
        elif not self.is_last:
            self.sent[i] = tuple(sent)

    def backward(self, i: int) -> None:
        """B of microbatch `i`."""
        if self.work.is_alive(i):
            grads, saved, state, roots = self._for_backward(i, "B")
            with self.work.recorder.action(f"{self.stage_index}B{i}"):
                found = self.functions.backward(self.comm, state, self.held, saved, grads, roots, self.sums)
            self._give_back(i, found, "B")

    def backward_input(self, i: int) -> None:
        """I of microbatch `i`."""
        if self.functions.backward_input is None:
            raise self._lacks("backward_input", f"{self.stage_index}I{i}")
        if self.work.is_alive(i):
            grads, saved, state, roots = self._for_backward(i, "B")
            self.states[i] = state
            with self.work.recorder.action(f"{self.stage_index}I{i}"):
                found, kept = self.functions.backward_input(self.comm, state, self.held, saved, grads, roots)
            self.kept[i] = kept
            self._give_back(i, found, "I")

    def backward_weight(self, i: int) -> None:
        """W of microbatch `i`."""
        if self.functions.backward_weight is None:
            raise self._lacks("backward_weight", f"{self.stage_index}W{i}")
        if self.work.is_alive(i):
            self._be_unsharded()
            with self.work.recorder.action(f"{self.stage_index}W{i}"):
                self.functions.backward_weight(
                    self.comm, self.states.pop(i), self.held, self._popped(self.kept, i, "W"), self.sums
                )

    def _for_backward(self, i: int, kind: str) -> tuple[Values, list[Any], Tensors, dict[int, Any]]:
        """Gradients of what was sent, what was saved, the state that the forward saw, gradients of outputs."""
        self._be_unsharded()
        saved = self._popped(self.saved, i, kind)
        grads = self._taken(self.gradients, i, kind) if self._gradient_shapes(sends=True) else ()
        return grads, saved, self.states.pop(i), self.work.roots(self.interface.outputs, i)

    def _give_back(self, i: int, found: Sequence[Tensor | None], kind: str) -> None:
        """The gradients of what was received, to the stage before."""
        wanted, of_inputs = self._gradient_shapes(sends=False), self.interface.wanted
        count = len(wanted)
        if len(found) != count + len(of_inputs):
            number = count + len(of_inputs)
            raise self._other_number(f"{self.stage_index}{kind}{i}", "gradients to send back", len(found), number)
        terms = {name: x for name, x in zip(of_inputs, found[count:], strict=True) if x is not None}
        self.work.inputs_gradients.take_some(self.work.groups[i], terms)
        found = found[:count]
        grads = tuple(
            torch.zeros(shape, dtype=dtype, device=self.comm.device) if grad is None else grad
            for grad, (shape, dtype) in zip(found, wanted, strict=True)
        )
        self._check_values(grads, wanted, f"{self.stage_index}{kind}{i}", "gradients to send back")
        if self.before is not None:
            self.before.gradients[i] = grads
        elif not self.is_first:
            self.sent_back[i] = grads

    # -- communication; torch's runtime calls these, and has nothing more to do

    def get_fwd_send_ops(self, i: int) -> list[Any]:
        """SEND_F of microbatch `i`."""
        if self.after is None:
            with self.work.recorder.action(f"{self.stage_index}SEND_F{i}"):
                values = self._popped(self.sent, i, "SEND_F")
                self.work.send(values, self.stage_index, self.stage_index + 1, "F", i)
        return []

    def get_fwd_recv_ops(self, i: int) -> list[Any]:
        """RECV_F of microbatch `i`: only posted here."""
        if self.before is None:
            wanted = [self._shape(entry, entry.sharding) for entry in self.interface.receives]
            self.received[i] = self.work.receive(wanted, self.stage_index, self.stage_index - 1, "F", i)
        return []

    def get_bwd_send_ops(self, i: int) -> list[Any]:
        """SEND_B of microbatch `i`; nothing for one that no gradient reaches."""
        if self.before is None and self.work.is_alive(i):
            with self.work.recorder.action(f"{self.stage_index}SEND_B{i}"):
                values = self._popped(self.sent_back, i, "SEND_B")
                self.work.send(values, self.stage_index, self.stage_index - 1, "B", i)
        return []

    def get_bwd_recv_ops(self, i: int) -> list[Any]:
        """RECV_B of microbatch `i`: only posted here; nothing for one that no gradient reaches."""
        if self.after is None and self.work.is_alive(i):
            wanted = self._gradient_shapes(sends=True)
            self.gradients[i] = self.work.receive(wanted, self.stage_index, self.stage_index + 1, "B", i)
        return []

    def left_over(self, *, reduced: bool = True) -> str:
        """What no action has used, as text; empty at the end of a whole schedule. reduced: gradients are, too."""
        stage = self.stage_index
        left = [f"{stage}SEND_F{i}" for i in self.sent] + [f"{stage}SEND_B{i}" for i in self.sent_back]
        left += [f"{stage}F{i}" for i in self.received] + [f"{stage}B{i}" for i in self.saved]
        left += [f"{stage}W{i}" for i in self.kept] + ([f"{stage}REDUCE_GRAD"] if self.sums and reduced else [])
        return ", ".join(left)

    # -- values

    def _taken(self, store: dict[int, Pending | Values], i: int, kind: str) -> Values:
        """What came from a neighbour, waited for."""
        if kind == "F" and self.is_first:
            return ()
        found = self._popped(store, i, kind)
        if not isinstance(found, Pending):
            return found
        self.comm.at(f"{self.stage_index}{kind}{i}")
        with self.work.recorder.action(f"{self.stage_index}RECV_{kind}{i}"):
            return tuple(found.wait())

    def _popped(self, store: dict[int, Any], i: int, kind: str) -> Any:
        if i not in store:
            raise AutoparError(
                f"the pipeline schedule runs {self.stage_index}{kind}{i} before what it needs",
                where=f"stage {self.stage_index} on pipeline rank {self.group_rank}",
                remedy="put it after the action that makes or receives it",
            )
        return store.pop(i)

    def _shape(self, entry: TensorInterface, sharding: Sharding) -> Wanted:
        at = [self.comm.index(axis) for axis in self.comm.axes]
        whole = entry.block if entry.block is not None and sharding == entry.sharding else None
        return whole or local_part_shape(entry.shape, sharding, self.comm.sizes, at), getattr(torch, entry.dtype)

    def _sent_shapes(self) -> list[Wanted]:
        return [self._shape(entry, entry.sharding) for entry in self.interface.sends]

    def _gradient_shapes(self, sends: bool) -> list[Wanted]:
        entries = self.interface.sends if sends else self.interface.receives
        return [self._shape(entry, entry.gradient or entry.sharding) for entry in entries if entry.differentiable]

    def _check_results(self, i: int, outputs: dict[int, Tensor], updates: Tensors) -> None:
        for what, found, planned in (
            ("outputs", set(outputs), set(self.interface.outputs)),
            ("new buffers", set(updates), set(self.interface.updates)),
        ):
            if found != planned:
                raise AutoparError(
                    f"a stage returned other {what} than planned",
                    where=f"{self.stage_index}F{i}, {self.work.batch.program.filename}",
                    values=f"{sorted(found)}, planned {sorted(planned)}",
                )

    def _check_values(self, values: Values, wanted: Sequence[Wanted], where: str, what: str) -> None:
        """As the other side expects them: a backend would mix them up without a word."""
        if len(values) != len(wanted):
            raise self._other_number(where, what, len(values), len(wanted))
        for number, (value, (shape, dtype)) in enumerate(zip(values, wanted, strict=True)):
            if tuple(value.shape) != tuple(shape) or value.dtype != dtype:
                raise AutoparError(
                    f"number {number} of the {what} is {value.dtype} {tuple(value.shape)}",
                    where=f"{where}, {self.work.batch.program.filename}",
                    values=f"planned {dtype} {tuple(shape)}",
                )

    def _other_number(self, where: str, what: str, found: int, planned: int) -> AutoparError:
        return AutoparError(
            f"a stage returned {found} {what}, {planned} are planned",
            where=f"{where}, {self.work.batch.program.filename}",
        )

    def _lacks(self, name: str, where: str) -> AutoparError:
        return AutoparError(
            f"the generated program does not define {self.functions.kind}_{name}, which the schedule uses",
            where=f"{where}, {self.work.batch.program.filename}",
            remedy="plan for a schedule that splits backwards, or use B in place of I and W",
        )
