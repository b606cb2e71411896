"""A whole generated program: what comes in is typed by its interface, what goes out must be as its interface says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface, StageInterface, TensorInterface
from autopar.ir.sharding import Sharding, replicated
from autopar.runtime.checker.ranks import Places, RankInt, Runs
from autopar.runtime.checker.typed_comm import TypedComm
from autopar.runtime.checker.types import Axes, Typed, give
from autopar.runtime.checker.typing_mode import REMEDY, TypedOperators, Typing
from autopar.runtime.holders import held_by
from autopar.runtime.layout import local_part_shape
from autopar.runtime.loader import LoadedProgram, LoadedStage, load_program

Tensors = dict[str, Tensor]


@lru_cache(maxsize=64)
def check_types(source: str, interface: ProgramInterface, filename: str = "<checked program>") -> None:
    """Type every statement of a generated program. Runs it on meta tensors: it is code, like any program.

    What was found right is not checked again. filename: what errors and tracebacks call the text.

    Raises:
        AutoparError: the first statement that is no part of a whole one, or the tensor that goes out as the interface
            does not say; with its line, and what is known of its operands.
    """
    axes = Axes(interface.axes, interface.sizes)
    typing = Typing(axes, filename)
    program = load_program(source, filename)
    program.namespace["ops"] = TypedOperators(typing)
    for name, function in list(program.namespace.items()):
        if inspect.isfunction(function) and function.__code__.co_filename == filename and _is_of_region(function):
            program.namespace[name] = _once_a_type(function, axes)
    border = _Border(interface, typing, program)
    try:
        with torch.no_grad(), typing:
            if interface.pipeline is None:
                border.check_step()
            else:
                for number, (stage, own) in enumerate(zip(program.stages, interface.pipeline.stages, strict=True)):
                    border.check_stage(number, stage, own)
    except AutoparError as error:
        if error.where:
            raise
        raise typing.placed(error) from error
    except Exception as error:  # of the text: whatever Python says of it
        raise typing.error_of(error) from error


def _is_of_region(function: Callable[..., Any]) -> bool:
    """Whether it computes on a region's parameters: the same for every call of the region on tensors of these types."""
    return "p" in inspect.signature(function).parameters


def _once_a_type(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """The function, which is run once for arguments of the same types."""
    known: dict[Any, Any] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        key = _key((args, kwargs), axes)
        if key not in known:
            known[key] = function(*args, **kwargs)
        return _copied(known[key])

    return run


def _key(value: Any, axes: Axes) -> Any:
    """What is equal for arguments of the same types; of this process's communicator there is one."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, axes.of(value)
    if isinstance(value, dict):
        return tuple((name, _key(each, axes)) for name, each in value.items())
    if isinstance(value, Places | Runs):
        return str(value.sharding), value.shape if isinstance(value, Places) else value.size
    if isinstance(value, tuple | list):
        return tuple(_key(each, axes) for each in value)
    return (value.base, tuple(value.terms.items())) if isinstance(value, RankInt) else repr(value)


def _copied(value: Any) -> Any:
    """The same tensors in containers of the caller's own, which may take things out of them."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


class _Border:
    """What goes into a program and what comes out."""

    def __init__(self, interface: ProgramInterface, typing: Typing, program: LoadedProgram) -> None:
        self.interface, self.typing, self.program = interface, typing, program
        self.axes = typing.axes
        self.comm = TypedComm(typing)

    def check_step(self) -> None:
        """A program that is one function forward and one backward: as many microbatches as tell."""
        interface, program = self.interface, self.program
        state, inputs = self._state(interface.parameters), self._inputs()
        held: Tensors = {}
        number = min(interface.microbatches, 2)
        done = [program.forward(self.comm, state, held, inputs, self._seed()) for _ in range(number)]
        for outputs, _ in done:
            self._check_outputs(outputs)
        if not self._trains():
            return
        sums: Tensors = {}
        for place, (_, saved) in enumerate(done, start=1):
            grads = tuple(self._tangent(entry) for entry in interface.outputs if entry.differentiable)
            found = program.backward(self.comm, state, held, saved, grads, sums, place == number)
            if place == number:
                self._check_gradients(found, interface.parameters)

    def check_stage(self, number: int, stage: LoadedStage, own: StageInterface) -> None:
        """One stage of a pipeline, with the one backward or its two halves, whichever there are."""
        interface, pipeline = self.interface, self.interface.pipeline
        assert pipeline is not None
        held_here = list(held_by(interface, pipeline.rank_of[number]))
        mine = [entry for entry in interface.parameters if entry.name in own.parameters]
        state, inputs = self._state(held_here), self._inputs()
        held: Tensors = {}
        for pending in stage.unshard(self.comm, state, held):
            pending.wait()
        received = tuple(self._made(entry, entry.sharding) for entry in own.receives)

        def forward() -> Any:
            sent, outputs, updates, saved = stage.forward(self.comm, state, held, inputs, received, self._seed())
            self._check_all(sent, own.sends, f"what stage {number} sends")
            made = [place for place in own.outputs if place in outputs]
            wanted = [interface.outputs[place] for place in made]
            self._check_all([outputs[place] for place in made], wanted, "output")
            self._check_updates(updates)
            return saved

        saved = forward()
        if not self._trains():
            return
        grads = tuple(self._tangent(entry) for entry in own.sends if entry.differentiable)
        roots = {
            place: self._tangent(interface.outputs[place])
            for place in own.outputs
            if interface.outputs[place].differentiable
        }
        sums: Tensors = {}
        wanted = [entry for entry in own.receives if entry.differentiable]
        if f"{stage.kind}_backward" in self.program.namespace:
            back = stage.backward(self.comm, state, held, saved, grads, roots, sums)
            self._check_all(back, wanted, f"the gradient that stage {number} returns", gradients=True)
        if stage.backward_input is not None and stage.backward_weight is not None:
            back, kept = stage.backward_input(self.comm, state, held, forward(), grads, roots)
            self._check_all(back, wanted, f"the gradient that stage {number} returns", gradients=True)
            stage.backward_weight(self.comm, state, held, kept, sums)
        self._check_gradients(stage.reduce(self.comm, sums), mine)

    # -- what goes in

    def _trains(self) -> bool:
        outputs = any(entry.differentiable for entry in self.interface.outputs)
        return outputs and any(entry.differentiable for entry in self.interface.parameters)

    def _state(self, parameters: Iterable[TensorInterface]) -> Tensors:
        state: Tensors = {}
        for entry in (*parameters, *self.interface.buffers):
            state.update(dict.fromkeys((entry.name, *entry.aliases), self._made(entry, entry.sharding)))
        return state

    def _inputs(self) -> Tensors:
        whole = {entry.name: self._made(entry, self._whole()) for entry in self.interface.inputs}
        return self.program.split_inputs(self.comm, whole)

    def _seed(self) -> Tensor:
        return self._empty((), "int64", self.axes.whole(()))

    def _tangent(self, entry: TensorInterface) -> Tensor:
        return self._made(entry, entry.gradient or entry.sharding)

    def _made(self, entry: TensorInterface, sharding: Sharding) -> Tensor:
        origin = (0,) * len(self.axes.sizes)
        shape = entry.block or local_part_shape(entry.shape, sharding, self.axes.sizes, origin)
        return self._empty(tuple(shape), entry.dtype, self._types(entry, sharding))

    def _types(self, entry: TensorInterface, sharding: Sharding) -> set[Typed]:
        """Of a tensor of the interface: where blocks are longer than the last piece, also that of the padded whole."""
        found = {self.axes.typed(entry.shape, sharding)}
        if entry.block is not None:
            padded = list(entry.block)
            for placement, size in zip(self.axes.typed(entry.shape, sharding).sharding, self.axes.sizes, strict=True):
                dim = getattr(placement, "dim", None)
                if dim is not None:
                    padded[dim] *= size
            found.add(self.axes.typed(padded, sharding))
        return found

    def _empty(self, shape: tuple[int, ...], dtype: str, types: Iterable[Typed]) -> Tensor:
        with self.typing.quietly():
            return give(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), types)

    def _whole(self) -> Sharding:
        return replicated(len(self.axes.sizes))

    # -- what comes out

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        count = len(self.interface.outputs)
        self._check_all(outputs[:count], self.interface.outputs, "output")
        self._check_all(outputs[count:], self.interface.updates, "buffer")

    def _check_updates(self, updates: Mapping[str, Tensor]) -> None:
        entries = [entry for entry in self.interface.updates if entry.name in updates]
        self._check_all([updates[entry.name] for entry in entries], entries, "buffer")

    def _check_gradients(self, found: Mapping[str, Tensor], parameters: Iterable[TensorInterface]) -> None:
        trained = [entry for entry in parameters if entry.differentiable]
        missing = [entry.name for entry in trained if entry.name not in found]
        if missing:
            raise self._wrong("backward returns no gradient", missing[0], None)
        for entry in trained:
            self._check_type(found[entry.name], entry, entry.sharding, "the gradient")  # autograd sees to its dtype

    def _check_all(
        self, found: Sequence[Tensor], wanted: Sequence[TensorInterface], what: str, *, gradients: bool = False
    ) -> None:
        if len(found) != len(wanted):
            raise self._wrong(f"{what}: {len(found)} tensors for {len(wanted)}", "", None)
        for x, entry in zip(found, wanted, strict=True):
            self._check_type(x, entry, (entry.gradient or entry.sharding) if gradients else entry.sharding, what)
            if str(x.dtype).removeprefix("torch.") != entry.dtype:
                raise self._wrong(f"{what} has dtype {x.dtype}, not {entry.dtype}", entry.name, None)

    def _check_type(self, x: Any, entry: TensorInterface, sharding: Sharding, what: str) -> None:
        types = self._types(entry, sharding)
        if not isinstance(x, Tensor) or not types & self.axes.of(x):
            raise self._wrong(f"{what} is not as its interface says", entry.name, (x, types))

    def _wrong(self, what: str, name: str, types: tuple[Any, Iterable[Typed]] | None) -> AutoparError:
        said = None
        if types is not None:
            x, wanted = types
            said = (
                f"it is {self.axes.text(x)}, not {self.axes.text(x, wanted)}" if isinstance(x, Tensor) else f"it is {x}"
            )
        return AutoparError(
            f"the program is not right: {what}",
            where=name or None,
            values=said,
            remedy=REMEDY,
        )
