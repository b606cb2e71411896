"""A whole generated program: what comes in is typed by its interface, what goes out must be as its interface says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.garbage import without_collection
from autopar.base.torch_compat.distributed import without_dispatch
from autopar.ir.interface import ProgramInterface, StageInterface, TensorInterface
from autopar.ir.meaning import gradient_leaf, input_leaf, parameter_leaf, seed_leaf
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.terms import Tape, Term
from autopar.ir.values import gradient_key
from autopar.runtime.checker.compared import Compared
from autopar.runtime.checker.ranks import Places, RankInt, Runs
from autopar.runtime.checker.typed_comm import TypedComm
from autopar.runtime.checker.types import Axes, Typed, alike, give, give_said, like
from autopar.runtime.checker.typing_mode import REMEDY, TypedOperators, Typing
from autopar.runtime.holders import holders, own_inputs
from autopar.runtime.layout import local_part_shape
from autopar.runtime.loader import LoadedProgram, LoadedStage, load_program, split_together

Tensors = dict[str, Tensor]


@lru_cache(maxsize=64)
def check_types(
    source: str, interface: ProgramInterface, filename: str = "<checked program>", *, identity: bool = True
) -> None:
    """Type every statement of a generated program. Runs it on meta tensors: it is code, like any program.

    What was found right is not checked again. filename: what errors and tracebacks call the text. identity: outputs,
    buffers and gradients are what was planned, too.

    Raises:
        AutoparError: the first statement that is no part of a whole one, or the tensor that goes out as the interface
            does not say; with its line, and what is known of its operands. Then outputs and gradients of another value.
    """
    if not identity:
        interface = replace(interface, meaning=None)
    is_comparable = interface.meaning is not None and interface.meaning.is_comparable
    # Hinted, only what was planned is looked for of what something may be. Most programs need no stripes but those met.
    *before, last = product((True, False) if is_comparable else (False,), (False, True))
    for hinted, any_stripes in before:
        try:
            return _check(source, interface, filename, hinted=hinted, any_stripes=any_stripes)
        except AutoparError:  # the next looks for more
            pass
    _check(source, interface, filename, hinted=last[0], any_stripes=last[1])


@without_collection()
def _check(source: str, interface: ProgramInterface, filename: str, *, hinted: bool, any_stripes: bool = False) -> None:
    beside, interface = interface.beside, interface.of_program()
    axes = Axes(interface.axes, interface.sizes)
    steps = interface.meaning.steps if interface.meaning is not None else frozenset()
    typing = Typing(axes, filename, steps, hinted=hinted, any_stripes=any_stripes)
    program = load_program(source, filename)
    program.namespace["ops"] = TypedOperators(typing)
    for name, function in list(program.namespace.items()):
        if inspect.isfunction(function) and function.__code__.co_filename == filename and _is_of_region(function):
            program.namespace[name] = _once_a_type(function, typing)
    border = _Border(interface, typing, program, beside)
    border.meaning.border()
    border.meaning.before(source)
    try:
        with torch.no_grad(), typing:
            if interface.pipeline is None:
                border.check_step()
            else:
                border.check_stages()
            if not typing.inference.is_cut:
                border.meaning.check()
    except AutoparError as error:
        if error.where:
            raise
        raise typing.placed(error) from error
    except Exception as error:  # of the text: whatever Python says of it
        raise typing.error_of(error) from error
    finally:
        program.namespace.clear()  # of functions that know it: what was made goes at once, and nobody has to search


def _is_of_region(function: Callable[..., Any]) -> bool:
    """Whether it computes on a region's parameters: the same for every call of the region on tensors of these types."""
    code = function.__code__
    return "p" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _once_a_type(function: Callable[..., Any], typing: Typing) -> Callable[..., Any]:
    """The function, which is run once for arguments that lie alike; what it computes of others follows from that."""
    known: dict[Any, _Recorded] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        terms: list[Term] = []
        key = _key((args, kwargs), typing, terms)
        if key not in known:
            known[key] = _Recorded(function, args, kwargs, typing, terms)
        return known[key](terms)

    return run


class _Recorded:
    """One call of a function on arguments of which nothing is known but how they lie.

    given: the terms of the arguments of the first call.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, typing: Typing, given: Sequence[Term]
    ) -> None:
        self._axes, self._inference, terms = typing.axes, typing.inference, typing.inference.terms
        leaves: list[Term] = []

        def argument(x: Tensor) -> Tensor:
            types, _ = self._axes.said(x)
            own = tuple(terms.fresh() for _ in types)
            leaves.extend(own)
            return give_said(like(x), (types, own))

        with without_dispatch():
            args, kwargs = _mapped((args, kwargs), argument)
        with self._inference.standing_for(dict(zip(leaves, given, strict=True))):
            self._made = function(*args, **kwargs)
        results: list[Term] = []
        self._like: list[tuple[Tensor, tuple[Typed, ...]]] = []

        def result(x: Tensor) -> Tensor:
            types, own = self._axes.said(x)
            results.extend(own)
            self._like.append((like(x), types))
            return x

        with without_dispatch():
            self._made = _mapped(self._made, result)
        self._tape = Tape(terms, leaves, results)

    def __call__(self, given: Sequence[Term]) -> Any:
        """What it gives for arguments of other terms, in containers of the caller's own, which may take things out of
        them.
        """
        found, place = self._tape(given), 0
        with without_dispatch():
            made = [x.detach() for x, _ in self._like]
        for x, (_, types) in zip(made, self._like, strict=True):
            own = found[place : place + len(types)]
            place += len(types)
            if len(types) == 1:
                give_said(x, (types, own))
            else:
                give(x, self._meant(map(Typed.of, types, own)))
        each = iter(made)
        return _mapped(self._made, lambda _: next(each))

    def _meant(self, found: Iterable[Typed]) -> Iterator[Typed]:
        for typed, each in groupby(found, lambda typed: typed.bare):
            yield from map(typed.of, self._inference.meant({one.term for one in each}))


def _key(value: Any, typing: Typing, terms: list[Term]) -> Any:
    """What is equal for arguments that lie alike; of this process's communicator there is one. terms: theirs."""
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        types, own = typing.axes.said(value)
        terms += own
        return value.dtype, value.shape, typing.inference.number(types)
    if kind is dict:
        return tuple(value), tuple([_key(each, typing, terms) for each in value.values()])
    if kind is tuple or kind is list:
        return tuple([_key(each, typing, terms) for each in value])
    if isinstance(value, Places | Runs):
        return kind, value.sharding, value.shape if isinstance(value, Places) else value.size
    return (value.base, tuple(value.terms.items())) if isinstance(value, RankInt) else repr(value)


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value in new containers, with something in place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind is dict:
        return {name: _mapped(each, function) for name, each in value.items()}
    return kind([_mapped(each, function) for each in value]) if kind is tuple or kind is list else value


class _Border:
    """What goes into a program and what comes out."""

    def __init__(self, interface: ProgramInterface, typing: Typing, program: LoadedProgram, beside: str) -> None:
        self.interface, self.typing, self.program, self.beside = interface, typing, program, beside
        self.axes = typing.axes
        self.comm = TypedComm(typing)
        self.meaning = Compared(interface)
        self._parts: dict[Any, tuple[Tensor, tuple[Typed, ...]]] = {}
        self._lie: dict[Any, frozenset[Typed]] = {}
        self.holders = holders(interface)

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
            grads = tuple(self._tangents(range(len(interface.outputs))).values())
            found = program.backward(self.comm, state, held, saved, grads, sums, place == number)
            self.meaning.gradients(self._check_inputs_gradients(found))
            if place == number:
                self.meaning.gradients(self._check_gradients(found, interface.parameters))

    def check_stages(self) -> None:
        """A pipeline: every stage forward on what the one before sends, and backward on what the one behind returns."""
        pipeline = self.interface.pipeline
        assert pipeline is not None
        stages: list[_StageCheck] = []
        received: list[Tensor] = []
        for number, (stage, own) in enumerate(zip(self.program.stages, pipeline.stages, strict=True)):
            stages.append(_StageCheck(self, number, stage, own))
            received = stages[-1].forward(received)
        grads: list[Tensor] = []
        if self._trains():
            for each in reversed(stages):
                grads = each.backward(grads)
            for entry in self.interface.parameters:
                found = [each.gradients[entry.name] for each in stages if entry.name in each.gradients]
                if found:
                    self.meaning.gradients({entry.name: self._sums(entry, found)})
            for entry in self.interface.wanted:
                # The terms in the order in which a step adds them, the last stage's first.
                given = [each.of_inputs[entry.name] for each in reversed(stages) if entry.name in each.of_inputs]
                self.meaning.gradients({gradient_key(entry.name): self._sums(entry, given)})

    def _sums(self, entry: TensorInterface, given: Sequence[Iterable[Term]]) -> list[Term]:
        """What a gradient may be that several stages have a term of."""
        terms = self.typing.inference.terms
        shapes = {each.shape for each in self._types(entry, entry.sharding)}
        return [terms.total(each, shape) for shape in shapes for each in product(*given)]

    # -- what goes in

    def _trains(self) -> bool:
        return any(entry.differentiable for entry in self.interface.outputs) and self.interface.is_trained

    def _state(self, parameters: Iterable[TensorInterface]) -> Tensors:
        state: Tensors = {}
        for entry in (*parameters, *self.interface.buffers):
            made = self._made(entry, entry.sharding, [parameter_leaf(entry.name)])
            state.update(dict.fromkeys((entry.name, *entry.aliases), made))
        return state

    def _inputs(self) -> Tensors:
        inputs = self.interface.inputs
        whole = {entry.name: self._made(entry, self._whole(), [input_leaf(entry.name)]) for entry in inputs}
        return split_together(self.program, self.comm, whole, self.beside)

    def _seed(self) -> Any:
        """Of each microbatch that goes through at once, or of the one that does."""
        number = 2 if self.beside else 1
        seeds = tuple(self._empty((), "int64", self.axes.whole((), seed_leaf(place))) for place in range(number))
        return seeds if self.beside else seeds[0]

    def _tangents(self, places: Iterable[int]) -> dict[int, Tensor]:
        """The gradients that come in for these outputs, as far as any do."""
        outputs = [(place, self.interface.outputs[place]) for place in places]
        return {
            place: self._made(entry, entry.gradient or entry.sharding, [gradient_leaf(place)])
            for place, entry in outputs
            if entry.differentiable
        }

    def _made(self, entry: TensorInterface, sharding: Sharding, terms: Sequence[Term]) -> Tensor:
        key = (entry.shape, entry.block, entry.dtype, sharding)
        found = self._parts.get(key)
        if found is None:
            origin = (0,) * len(self.axes.sizes)
            shape = entry.block or local_part_shape(entry.shape, sharding, self.axes.sizes, origin)
            own = self._types(entry, sharding)
            found = self._parts[key] = self._empty(tuple(shape), entry.dtype, own), tuple(own)
        made, types = found
        if len(types) == 1 and len(terms) == 1:
            return give_said(alike(made), (types, tuple(terms)))
        return give(alike(made), [each.of(term) for each in types for term in terms])

    def _types(self, entry: TensorInterface, sharding: Sharding) -> frozenset[Typed]:
        """Of a tensor of the interface: where blocks are longer than the last piece, also that of the padded whole."""
        key = (entry.shape, entry.block, sharding)
        found = self._lie.get(key)
        if found is None:
            own = self.axes.typed(entry.shape, sharding)
            found = self._lie[key] = frozenset({own, *self._padded(entry, own)})
        return found

    def _padded(self, entry: TensorInterface, own: Typed) -> Iterator[Typed]:
        if entry.block is not None:
            padded = list(entry.block)
            for placement, size in zip(own.sharding, self.axes.sizes, strict=True):
                dim = getattr(placement, "dim", None)
                if dim is not None:
                    padded[dim] *= size
            yield self.axes.typed(padded, own.sharding)

    def _empty(self, shape: tuple[int, ...], dtype: str, types: Iterable[Typed]) -> Tensor:
        with self.typing.quietly():
            return give(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), types)

    def _whole(self) -> Sharding:
        return replicated(len(self.axes.sizes))

    # -- what comes out

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        count = len(self.interface.outputs)
        self.meaning.outputs(range(count), self._check_all(outputs[:count], self.interface.outputs, "output"))
        self._check_updates(dict(zip(self._updated, outputs[count:], strict=False)))

    @property
    def _updated(self) -> list[str]:
        return [entry.name for entry in self.interface.updates]

    def _check_updates(self, updates: Mapping[str, Tensor]) -> None:
        entries = [entry for entry in self.interface.updates if entry.name in updates]
        terms = self._check_all([updates[entry.name] for entry in entries], entries, "buffer")
        self.meaning.updates([entry.name for entry in entries], terms)

    def _check_gradients(
        self, found: Mapping[str, Tensor], parameters: Iterable[TensorInterface]
    ) -> dict[str, list[Term]]:
        trained = [entry for entry in parameters if entry.differentiable]
        missing = [entry.name for entry in trained if entry.name not in found]
        if missing:
            raise self._wrong("backward returns no gradient", missing[0], None)
        return {  # autograd sees to its dtype
            entry.name: self._check_type(found[entry.name], entry, entry.sharding, "the gradient") for entry in trained
        }

    def _check_inputs_gradients(self, found: Mapping[str, Tensor]) -> dict[str, list[Term]]:
        """Of the microbatch's inputs, each laid out as its input is."""
        wanted = self.interface.wanted
        if missing := [entry.name for entry in wanted if gradient_key(entry.name) not in found]:
            raise self._wrong("backward returns no gradient of an input", missing[0], None)
        keys = {gradient_key(entry.name): entry for entry in wanted}
        return {
            key: self._check_type(found[key], entry, entry.sharding, "the gradient of an input")
            for key, entry in keys.items()
        }

    def _check_all(
        self, found: Sequence[Tensor], wanted: Sequence[TensorInterface], what: str, *, gradients: bool = False
    ) -> list[list[Term]]:
        """The terms of each."""
        if len(found) != len(wanted):
            raise self._wrong(f"{what}: {len(found)} tensors for {len(wanted)}", "", None)
        terms = []
        for x, entry in zip(found, wanted, strict=True):
            sharding = (entry.gradient or entry.sharding) if gradients else entry.sharding
            terms.append(self._check_type(x, entry, sharding, what))
            if str(x.dtype).removeprefix("torch.") != entry.dtype:
                raise self._wrong(f"{what} has dtype {x.dtype}, not {entry.dtype}", entry.name, None)
        return terms

    def _check_type(self, x: Any, entry: TensorInterface, sharding: Sharding, what: str) -> list[Term]:
        types = self._types(entry, sharding)
        said = zip(*self.axes.said(x), strict=True) if isinstance(x, Tensor) else ()
        terms = [term for each, term in said if each in types]
        if not terms:
            raise self._wrong(f"{what} is not as its interface says", entry.name, (x, types))
        return terms

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


class _StageCheck:
    """One stage of a pipeline, with the one backward or its two halves, whichever there are."""

    def __init__(self, border: _Border, number: int, stage: LoadedStage, own: StageInterface) -> None:
        self.border, self.number, self.stage, self.own = border, number, stage, own
        interface, pipeline = border.interface, border.interface.pipeline
        assert pipeline is not None
        used, rank = frozenset(own.parameters), pipeline.rank_of[number]
        self.trained = [entry for entry in interface.parameters if entry.name in used]
        taken, inputs = own_inputs(interface, rank), border._inputs()
        self.state = border._state(entry for entry in interface.parameters if rank in border.holders[entry.name])
        self.inputs = {name: x for name, x in inputs.items() if name in taken}
        self.held: Tensors = {}
        self.gradients: dict[str, list[Term]] = {}
        self.of_inputs: dict[str, list[Term]] = {}
        for pending in stage.unshard(border.comm, self.state, self.held):
            pending.wait()

    def forward(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """What it sends on, of what it is sent."""
        border, own = self.border, self.own
        if len(sent) != len(own.receives):
            raise border._wrong(f"stage {self.number} receives {len(own.receives)} tensors of {len(sent)}", "", None)
        self.received = tuple(
            border._made(entry, entry.sharding, border._check_type(x, entry, entry.sharding, "what is sent"))
            for x, entry in zip(sent, own.receives, strict=True)
        )
        sends, self.saved = self._forward()
        return sends

    def _forward(self) -> tuple[list[Tensor], Any]:
        border, own, interface = self.border, self.own, self.border.interface
        sent, outputs, updates, saved = self.stage.forward(
            border.comm, self.state, self.held, self.inputs, self.received, border._seed()
        )
        border._check_all(sent, own.sends, f"what stage {self.number} sends")
        made = [place for place in own.outputs if place in outputs]
        terms = border._check_all([outputs[place] for place in made], [interface.outputs[p] for p in made], "output")
        border.meaning.outputs(made, terms)
        border._check_updates(updates)
        return list(sent), saved

    def backward(self, returned: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that it returns, of those that come back to it."""
        border, own, stage = self.border, self.own, self.stage
        wanted = [entry for entry in own.sends if entry.differentiable]
        if len(wanted) != len(returned):
            raise border._wrong(f"{len(returned)} gradients come back to stage {self.number}", "", None)
        grads = tuple(
            border._made(entry, entry.gradient or entry.sharding, [each.term for each in border.axes.of(x)])
            for x, entry in zip(returned, wanted, strict=True)
        )
        roots = border._tangents(own.outputs)
        ways: list[tuple[Sequence[Tensor], dict[str, list[Term]]]] = []
        if f"{stage.kind}_backward" in border.program.namespace:
            sums: Tensors = {}
            back = stage.backward(border.comm, self.state, self.held, self.saved, grads, roots, sums)
            ways.append((self._checked(back), self._reduced(sums)))
        if stage.backward_input is not None and stage.backward_weight is not None:
            sums = {}
            saved = self._forward()[1]
            back, kept = stage.backward_input(border.comm, self.state, self.held, saved, grads, roots)
            stage.backward_weight(border.comm, self.state, self.held, kept, sums)
            ways.append((self._checked(back), self._reduced(sums)))
        sent, self.gradients = ways[0]
        for _, other in ways[1:]:
            for name, terms in other.items():
                if not set(terms) & set(self.gradients[name]):
                    raise border._wrong("the two halves of the backward do not do what the whole one does", name, None)
        return list(sent)

    def _checked(self, back: Sequence[Tensor]) -> list[Tensor]:
        wanted = [entry for entry in self.own.receives if entry.differentiable]
        inputs = [entry for entry in self.border.interface.wanted if entry.name in self.own.wanted]
        what = f"the gradient that stage {self.number} returns"
        terms = self.border._check_all(back, [*wanted, *inputs], what, gradients=True)
        self.of_inputs = dict(zip((entry.name for entry in inputs), terms[len(wanted) :], strict=True))
        return list(back[: len(wanted)])

    def _reduced(self, sums: Tensors) -> dict[str, list[Term]]:
        return self.border._check_gradients(self.stage.reduce(self.border.comm, sums), self.trained)
