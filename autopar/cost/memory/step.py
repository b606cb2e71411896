"""The most that a rank holds in one step, call by call: what a lowered program without a pipeline needs.

Placement checks its limit on a folded timeline, which is linear in its choices and counts all gradients at all times.
Once everything is decided the step is walked as it runs: forward, backward, optimizer. Counted are storages
(stages/memory.py): parameters and optimizer states always, gradients from the call that made them, what is on its way
between ranks with its copies (runtime/transfers.py), what the update makes for itself, and the model's outputs to the
end, since a training loop has them under a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.estimate import OPTIMIZER_STATES
from autopar.cost.memory.buckets import local_bytes
from autopar.cost.memory.calls import CallCosts, stage_of_range
from autopar.cost.memory.stages import StageMemory, changes_of
from autopar.ir.program import Program
from autopar.ir.region import Bucket, Call
from autopar.ir.uneven import block_shape
from autopar.ir.values import ValueRef, Variable

Kind = str
"""What is held: `parameters`, `optimizer states`, `gradients` (of parameters), `activations` (saved, and between calls,
with their gradients), `gathered` (parameters on their way, and in use), `working` (what a call, or the update, needs
for a moment), `inputs and outputs`.
"""

_Life = tuple[float, int, int]
_Lives = tuple[list[_Life], list[Kind]]
_Key = tuple[Literal["value", "gradient", "own"], ValueRef | int, str]


def step_peak_bytes(program: Program) -> float:
    """Bytes of the fullest time of a step, which for inference is a forward. The program is lowered, with buckets.

    Over microbatches, forward and backward of one follow those of the one before, as in `train_step`.
    """
    assert program.pipeline is None
    return Step(program, CallCosts(program)).peak()


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes held at one time of a phase, by kind. place: of the call, in the backward from the last one. moment: its
    gathers have `arrived`; it `computes`; what it leaves is `left`; the phase is `through`.
    """

    place: int
    moment: Literal["arrived", "computes", "left", "through"]
    held: Mapping[Kind, float]


@dataclass(frozen=True, slots=True)
class _Flight:
    """Tensors of a call that travel together. result: of what comes of them; under_way: of all that is held until it
    is waited for; arriving: when the results are there, and what brought them still is. All in bytes.
    """

    result: float = 0.0
    under_way: float = 0.0
    arriving: float = 0.0


class Step(StageMemory):
    """The whole step as one stage. Places count calls, in the backward from the last one."""

    def __init__(self, program: Program, costs: CallCosts) -> None:
        super().__init__(program, stage_of_range(program, 0, len(program.calls)), costs)
        self.variables = {variable.name: variable for variable in program.variables}
        names = dict.fromkeys(name for call in self.calls for name in call.slots)
        self.used = [self.variables[name] for name in names]
        self.shared = {each.name: each for each in program.shared}
        # Of parameters that lie alike, by the object that says how.
        self.sizes: dict[tuple[object, ...], tuple[float, float]] = {}
        self.named: dict[str, tuple[float, float]] = {}
        overlap = program.overlap
        self.reduces_at_end = overlap is not None and overlap.at_end
        self.runs_beside = overlap is not None and overlap.prefetch

    def peak(self) -> float:
        """Bytes."""
        if not self.program.training:
            return sum(self.always().values()) + self.forwards()
        always, sums = self.always(), self.sums()
        passes = sum(always.values()) + sums + max(self.forwards(), self.backwards())
        passes += (self.program.microbatches - 1) * self.output_bytes()
        return max(passes, sum(self.update().values()))

    # -- what a whole step holds

    def always(self) -> dict[Kind, float]:
        """Through all passes of all microbatches."""
        used = self.used
        return {
            "parameters": sum(self._stored(v) for v in used),
            "optimizer states": sum(map(self._stored, self._trained())) * OPTIMIZER_STATES,
            "gathered": self._kept(),
            "inputs and outputs": self._batch(),
        }

    def sums(self) -> float:
        """Gradients that microbatches add up, all of them."""
        if self.program.microbatches == 1:
            return 0.0
        return sum(map(self.sum_of, self._trained()))

    def sum_of(self, variable: Variable) -> float:
        """The sum of a parameter's gradients over microbatches."""
        return max(self._stored(variable), self._raw(variable, variable.stored_dtype.itemsize))

    def output_bytes(self) -> float:
        """The outputs of one microbatch."""
        return sum(self._outputs().values())

    def update(self) -> dict[Kind, float]:
        """When all passes are through: the outputs of the microbatches put together, gradients cast, the update."""
        trained = self._trained()
        cast = sum(self._reduced(v) for v in trained if v.stored_dtype != v.type.dtype)
        num, outputs = self.program.microbatches, self.output_bytes()
        held = self.always()
        return {
            **held,
            "gathered": 0.0,
            "gradients": sum(self._stored(v) for v in trained),
            "working": max(cast, self._update(trained), num * outputs * (num > 1)),
            "inputs and outputs": held["inputs and outputs"] + num * outputs,
        }

    # -- phases

    def forwards(self, seen: list[Sample] | None = None) -> float:
        """The most beside what the whole step holds, in the forward of one microbatch. seen: gets all samples."""
        end, outputs = len(self.calls), self._outputs()
        lives = {key: (size, first + 1, end) for key, (size, first, _) in self._alive().items()}
        for ref, (start, stop) in self._values().items():
            if ref.call < 0:
                continue
            key: _Key = ("value", self._origin(ref), "")
            if key in lives:
                size, since, _ = lives[key]
                lives[key] = (size, min(since, start), end)
            else:
                lives[key] = (self.costs.value_bytes[ref], start, stop)
        peaks = [memory.peaks["forward"] for memory in self.memories]
        flights = [self._flight(call, "gather") for call in self.calls]
        kinds: list[Kind] = ["inputs and outputs" if key in outputs else "activations" for key in lives]
        return self._walk((list(lives.values()), kinds), peaks, flights, self._together("gather"), seen=seen)

    def backwards(self, seen: list[Sample] | None = None) -> float:
        """The same of its backward; gradients of parameters, where they are not `sums`, from when they are made."""
        calls, sums = list(reversed(self.calls)), self.program.microbatches > 1 and self.sums() > 0
        peaks = [memory.peaks.get("backward", 0.0) for memory in reversed(self.memories)]
        flights = [self._flight(call, "gather_for_backward") for call in calls]
        lives, kinds = self._values_backwards()
        made = [] if sums else self._gradients_from(calls)
        after = [0.0] * len(calls) if sums else [self._leaving(call) for call in calls]
        every: _Lives = (lives + made, [*kinds, *["gradients" for _ in made]])
        return self._walk(every, peaks, flights, self._together("gather_for_backward"), after, seen=seen)

    def _values_backwards(self) -> _Lives:
        """What is saved, gradients between calls, and outputs."""
        last, outputs = len(self.calls) - 1, self._outputs()
        lives = [(size, 0, last - first) for key, (size, first, _) in self._alive().items() if key not in outputs]
        kinds: list[Kind] = ["activations" for _ in lives]
        lives += [(size, 0, last + 1) for size in outputs.values()]
        kinds += ["inputs and outputs" for _ in outputs]
        gradients = self._gradients().items()
        lives += [(self.costs.gradient_bytes[ref], start, stop) for ref, (start, stop) in gradients]
        return lives, kinds + ["activations" for _ in gradients]

    def _walk(
        self, lives: _Lives, peaks: Sequence[float], flights: Sequence[_Flight], always: float,
        after: Sequence[float] = (), seen: list[Sample] | None = None,
    ) -> float:  # fmt: skip
        """The most over all calls. always: held through all of them; after: for a moment, when a call is through."""
        end = len(peaks)
        changes = changes_of(lives[0], end)
        running = None if seen is None else _Running(lives, end, always, seen)
        most = now = 0.0
        for place in range(end):
            now += changes[place]
            here = flights[place]
            coming = flights[place + 1].under_way if self.runs_beside and place + 1 < end else 0.0
            most = max(most, now + here.arriving, now + here.result + coming + peaks[place])
            if after:
                most = max(most, now + changes[place + 1] + here.result + coming + after[place])
            if running is not None:
                left = after[place] if after else None
                running.add(place, here.arriving, here.result + coming, peaks[place], left)
        if running is not None:
            running.through(end)
        return max(most, now + changes[end]) + always

    # -- gradients

    def _gradients_from(self, calls: Sequence[Call]) -> list[_Life]:
        """Gradients that earlier calls have made, backwards: as made, or on their way while the next call computes, or
        reduced.
        """
        end, found, seen = len(calls), [], set()
        for place, call in enumerate(calls):
            region = self.program.region(call.region)
            for bucket in region.transfers.get("reduce", ()):
                own = [self.variables[call.slots[move.slot]] for move in bucket.moves]
                raw, reduced = sum(map(self._raw, own)), sum(map(self._reduced, own))
                if self.reduces_at_end or not bucket.chain:
                    found.append((raw, place + 1, end))
                    continue
                if _sums_in_place(bucket):
                    found.append((reduced, place + 1, end))
                else:
                    found += [(raw, place + 1, place + 1), (reduced, place + 1, end)]
            for name in call.slots:
                if name in self.shared and self.variables[name].trainable and name not in seen:
                    seen.add(name)
                    variable = self.variables[name]
                    found.append((max(self._raw(variable), self._reduced(variable)), place + 1, end))
        return [each for each in found if each[1] <= end]

    def _leaving(self, call: Call) -> float:
        """What a call's gradients take besides those counted from the next call on: as made, beside their copies."""
        if self.reduces_at_end:
            return 0.0
        extra = 0.0
        for bucket in self.program.region(call.region).transfers.get("reduce", ()):
            if bucket.chain and (len(bucket.moves) > 1 or not _sums_in_place(bucket)):
                extra += sum(self._raw(self.variables[call.slots[move.slot]]) for move in bucket.moves)
        return extra

    def _raw(self, variable: Variable, itemsize: int | None = None) -> float:
        """A gradient as the backward makes it."""
        return self._elements(variable)[1] * (itemsize or variable.type.dtype.itemsize)

    def _reduced(self, variable: Variable) -> float:
        return self._stored(variable) / variable.stored_dtype.itemsize * variable.type.dtype.itemsize

    # -- parameters, batch

    def _trained(self) -> list[Variable]:
        return [each for each in self.used if each.trainable and self.program.training]

    def _stored(self, variable: Variable) -> float:
        return self._elements(variable)[0] * variable.stored_dtype.itemsize

    def _elements(self, variable: Variable) -> tuple[float, float]:
        """Of the stored piece, and of the gradient as the backward makes it."""
        if variable.name in self.named:
            return self.named[variable.name]
        layout = self.program.placed.parameters[variable.name]
        has_gradient = self.program.training and variable.trainable
        key = (id(layout), variable.type.shape, variable.padded, has_gradient)
        if key not in self.sizes:
            stored = math.prod(block_shape(variable, layout, self.program.on_mesh.sizes))
            raw = float(stored)
            if has_gradient:  # else the piece that is stored may be an uneven one
                raw = local_bytes(self.program, variable, layout.gradient, variable.type.dtype)
                raw /= variable.type.dtype.itemsize
            self.sizes[key] = (stored, raw)
        self.named[variable.name] = self.sizes[key]
        return self.sizes[key]

    def _kept(self) -> float:
        """Parameters that are gathered once and held for the step."""
        return sum(self.costs.parameters[variable.name].held_bytes for variable in self.used)

    def _together(self, which: str) -> float:
        """Parameters that several calls read, gathered for a whole phase."""
        copies = (self.costs.parameters[name].gathered_bytes for name, each in self.shared.items() if each.gather)
        return sum(copies)

    def _batch(self) -> float:
        """The whole batch is the user's, and so are gradients of it; pieces of it are made beside. States are there in
        pieces alone.
        """
        states = self.program.states
        whole = sum(p.type.num_bytes for p in self.program.inputs if p.name not in states) * self.program.microbatches
        given_back = sum(p.type.num_bytes for p in self.program.inputs if p.differentiable) * self.program.microbatches
        sizes = [(ref.name, size) for ref, size in self.costs.value_bytes.items() if ref.call < 0]
        local = sum(size for name, size in sizes if name not in states)
        held = whole + (local if local != whole else 0.0) + sum(size for name, size in sizes if name in states)
        return held + given_back

    def _outputs(self) -> dict[_Key, float]:
        """Storages of the model's outputs."""
        refs = [ref for ref in self.program.outputs if ref.call >= 0]
        return {("value", self._origin(ref), ""): self.costs.value_bytes[ref] for ref in refs}

    def _alive(self) -> dict[_Key, tuple[float, int, int]]:
        """What is saved for the backward, but of the batch, which is there anyway."""
        return {key: each for key, each in self.saved.items() if not _of_batch(key)}

    def _flight(self, call: Call, which: str) -> _Flight:
        """What a call gathers of its parameters."""
        region = self.program.region(call.region)
        gathered = self.costs[call.region].moves.forward_gathered
        if which != "gather":
            gathered = self.costs[call.region].moves.backward_gathered
        copies = 0.0
        for bucket in region.transfers.get(which, ()):
            if len(bucket.moves) > 1 and any(kind == "all_gather" for kind, _ in bucket.chain):
                own = [self.variables[call.slots[move.slot]] for move in bucket.moves]
                copies += sum(self._reduced(variable) for variable in own)
        return _Flight(gathered, gathered + copies, gathered * (1 + (copies > 0)))

    def _update(self, trained: Sequence[Variable]) -> float:
        """What AdamW makes for itself: on CUDA (`foreach`) the roots of all second moments; in the loop of a CPU those
        of one parameter, and their quotients (torch/optim/adam.py).
        """
        sizes = [self._stored(variable) for variable in trained]
        return sum(sizes) if self.program.on_mesh.hardware.device == "cuda" else 2 * max(sizes, default=0.0)


class _Running:
    """What `_walk` has counted so far, by kind. always: parameters gathered for the whole phase."""

    def __init__(self, lives: _Lives, end: int, always: float, seen: list[Sample]) -> None:
        self.seen, self.always = seen, always
        self.changes = {
            kind: changes_of([life for life, each in zip(*lives, strict=True) if each == kind], end)
            for kind in dict.fromkeys(lives[1])
        }
        self.now: dict[Kind, float] = dict.fromkeys(self.changes, 0.0)

    def add(self, place: int, arriving: float, gathered: float, peak: float, left: float | None) -> None:
        """The samples of one call. gathered: while it computes; left: of gradients, when it is through."""
        self._go(place)
        self._sample(place, "arrived", self.now, {"gathered": arriving})
        self._sample(place, "computes", self.now, {"gathered": gathered, "working": peak})
        if left is not None:
            after = {kind: held + self.changes[kind][place + 1] for kind, held in self.now.items()}
            self._sample(place, "left", after, {"gathered": gathered, "gradients": left})

    def through(self, end: int) -> None:
        """The sample after the last call."""
        self._go(end)
        self._sample(end, "through", self.now, {})

    def _go(self, place: int) -> None:
        for kind, changes in self.changes.items():
            self.now[kind] += changes[place]

    def _sample(
        self, place: int, moment: Literal["arrived", "computes", "left", "through"],
        held: Mapping[Kind, float], more: Mapping[Kind, float],
    ) -> None:  # fmt: skip
        found = {**held, "gathered": self.always}
        for kind, size in more.items():
            found[kind] = found.get(kind, 0.0) + size
        self.seen.append(Sample(place, moment, found))


def _of_batch(key: _Key) -> bool:
    return isinstance(key[1], ValueRef) and key[1].call < 0


def _sums_in_place(bucket: Bucket) -> bool:
    """Whether what is reduced has the memory in which it travelled."""
    return all(kind in ("all_reduce", "slice") for kind, _ in bucket.chain) and bool(bucket.chain)
