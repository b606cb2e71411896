"""The communicator of a program that is checked: nothing is sent, every move is typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from autopar.ir.redistribution import StepKind
from autopar.ir.rings import METHODS
from autopar.ir.sharding import Partial, Replicate, Shard, Step, local_shape, parse_sharding
from autopar.runtime.checker.moves import after
from autopar.runtime.checker.part import ExchangeCall, RingCall
from autopar.runtime.checker.ranks import AxisSize, Places, RankInt, Runs
from autopar.runtime.checker.types import Typed, bare, give, give_said, in_order, like
from autopar.runtime.checker.typing_mode import Typing
from autopar.runtime.comm import RecordingComm
from autopar.runtime.transfers import Transfers, parse_bucket

_OPERATORS = {method: getattr(torch.ops.autopar, name.split(".")[1]).default for method, name in METHODS.items()}


class TypedComm(RecordingComm):
    """As rank 0 of the mesh sees it; what differs on other ranks is kept as an expression (`RankInt`)."""

    def __init__(self, typing: Typing) -> None:
        super().__init__(typing.axes.names, typing.axes.sizes, 0, "meta")
        self.typing = typing
        self._moved: dict[Any, tuple[Tensor, Mapping[Typed, Typed], tuple[Typed, ...]]] = {}
        self._chains: dict[Any, tuple[Step, ...]] = {}

    @property
    def rank(self) -> int:
        """The number of the rank: what must not decide anything."""
        terms, by = {}, 1
        for axis, size in reversed(list(zip(self.axes, self.sizes, strict=True))):
            terms[axis], by = by, by * size
        return RankInt(0, terms)

    @rank.setter
    def rank(self, value: int) -> None:
        del value

    def at(self, where: str) -> None:
        self.typing.where = self.where = where

    def index(self, axis: str) -> int:
        return RankInt(0, {axis: 1} if self.size(axis) > 1 else {})

    def size(self, axis: str) -> int:
        found = AxisSize(super().size(axis))
        found.axis, place = axis, self.axes.index(axis)

        def divided(x: Any, made: Tensor) -> None:
            if isinstance(x, Tensor) and found > 1:
                whole = [each for each in self.typing.axes.of(x) if isinstance(each.sharding[place], Replicate)]
                give(made, [*self.typing.axes.of(made), *(each.over(place, Partial()) for each in whole)])

        found.divided = divided
        return found

    def slice(self, x: Tensor, axis: str, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
        return self.moved(x, Step("slice", self._at(axis), dim, outer, zigzag=zigzag))

    def all_gather(self, x: Tensor, axis: str, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
        return self.moved(x, Step("all_gather", self._at(axis), dim, outer, zigzag=zigzag))

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        return self.moved(x, Step("all_reduce", self._at(axis), op=op))

    def reduce_scatter(
        self, x: Tensor, axis: str, dim: int, outer: int = 1, op: str = "sum", zigzag: bool = False
    ) -> Tensor:
        return self.moved(x, Step("reduce_scatter", self._at(axis), dim, outer, op=op, zigzag=zigzag))

    def all_to_all(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        outer: int = 1,
        from_dim: int = 0,
        from_outer: int = 1,
        zigzag: bool = False,
        from_zigzag: bool = False,
    ) -> Tensor:
        step = Step(
            "all_to_all", self._at(axis), dim, outer, from_dim, from_outer, zigzag=zigzag, from_zigzag=from_zigzag
        )
        return self.moved(x, step)

    def positions(self, global_shape: Sequence[int], sharding_text: str) -> list[Tensor]:
        sharding = parse_sharding(sharding_text, self.axes)
        local = local_shape(global_shape, sharding, self.sizes)
        with self.typing.quietly():
            found = Places(torch.empty(size, dtype=torch.int64, device="meta") for size in local)
        found.shape, found.sharding = tuple(global_shape), self.typing.axes.typed(global_shape, sharding).sharding
        return found

    def starts(self, size: int, sharding_text: str) -> list[int]:
        found = Runs(super().starts(size, sharding_text))
        sharding = parse_sharding(sharding_text, self.axes)
        found.size, found.sharding = size, self.typing.axes.typed((size,), sharding).sharding
        return found

    def transfers(self, held: dict[str, Tensor] | None = None, at: str = "") -> Transfers:
        return cast(Transfers, TypedTransfers(self, held, at))

    def ring_attention(self, axis: str, *tensors: Any, **options: Any) -> Any:
        return self._ring("ring_attention", axis, tensors, options)

    def ring_attention_backward(self, axis: str, *tensors: Any, **options: Any) -> Any:
        return self._ring("ring_attention_backward", axis, tensors, options)

    def ring_attention_backward_bias(self, axis: str, *tensors: Any, **options: Any) -> Any:
        return self._ring("ring_attention_backward_bias", axis, tensors, options)

    def send_tokens(self, axis: str, *tensors: Any, experts: int) -> Any:
        return TypedSent(self._at(axis), tensors, experts, self.typing.where)

    def take_tokens(self, coming: Any) -> Any:
        if not isinstance(coming, TypedComing) or coming.is_taken:
            what = "taken before" if isinstance(coming, TypedComing) else "no exchange with later=True"
            raise self.typing.error(f"what take_tokens waits for is {what}", [coming])
        coming.is_taken = True
        return coming.results[0] if len(coming.results) == 1 else coming.results

    def exchange_experts(self, axis: str, *tensors: Any, **options: Any) -> Any:
        return self._exchanged("exchange_experts", axis, tensors, **options)

    def exchange_experts_grad(self, axis: str, *tensors: Any, **options: Any) -> Any:
        return self._exchanged("exchange_experts_grad", axis, tensors, **options)

    def exchange_experts_grad_bias(self, axis: str, *tensors: Any, **options: Any) -> Any:
        return self._exchanged("exchange_experts_grad_bias", axis, tensors, **options)

    def moved(self, x: Tensor, *steps: Step) -> Tensor:
        """`moved_quietly`, where a mode types what is called."""
        with self.typing.quietly():
            return self.moved_quietly(x, *steps)

    def moved_quietly(self, x: Tensor, *steps: Step, said: Any = None) -> Tensor:
        """What moves, one after the other, make of a tensor. said: the steps, in what compares faster than they do.

        Raises:
            AutoparError: the tensor is not of a type that one of them takes.
        """
        types, terms = self.typing.axes.said(x)
        key = (x.dtype, x.shape, self.typing.inference.number(types), said or steps)
        known = self._moved.get(key)
        if known is None:
            whole, becomes = self._typed_moves(x, steps)
            known = self._moved[key] = whole, becomes, tuple(becomes[each] for each in types if each in becomes)
        whole, becomes, made = known
        if len(types) == 1:
            return give_said(like(whole), (made, terms))
        found = zip(types, terms, strict=True)
        return give(like(whole), [becomes[each].of(term) for each, term in found if each in becomes])

    def chain(self, steps: str, name: str, given: tuple[Any, ...]) -> tuple[Step, ...]:
        """The steps of a bucket's text, of a tensor of this name, which comes with these arguments: `given[1:]`.

        Raises:
            AutoparError: as `Transfers.bucket`.
        """
        key = steps, given[1:]
        found = self._chains.get(key)
        if found is None:
            moves, parts = parse_bucket(steps, self.axes, {name: given})
            found = self._chains[key] = _moves(self.axes, tuple(moves), parts[name][1])
        return found

    def _typed_moves(self, x: Tensor, steps: Sequence[Step]) -> tuple[Tensor, Mapping[Typed, Typed]]:
        """As `_typed_move`, of one after the other."""
        becomes = {each: each for each in bare(self.typing.axes.of(x))}
        for step in steps:
            x, then = self._typed_move(x, step)
            becomes = {first: then[last] for first, last in becomes.items() if last in then}
            give(x, becomes.values())
        return x, becomes

    def _typed_move(self, x: Tensor, step: Step) -> tuple[Tensor, Mapping[Typed, Typed]]:
        """A tensor like the result, and what each type of the operand becomes."""
        axes = self.typing.axes
        found = {each: after(step, each, axes) for each in sorted(bare(axes.of(x)), key=in_order)}
        becomes = {each: made for each, made in found.items() if isinstance(made, Typed)}
        if not becomes:
            why = next(each for each in found.values() if isinstance(each, str))
            raise self.typing.error(f"{step.kind} over {axes.names[step.axis]}: {why}", [x])
        with self.typing.quietly():
            return self._executed(x, step, next(iter(becomes.values()))), becomes

    def _executed(self, x: Tensor, step: Step, given: Typed) -> Tensor:
        axis, size = self.axes[step.axis], self.sizes[step.axis]
        if step.size % size:
            return x.new_empty(_first_piece(given, self.sizes))
        if step.kind == "slice":
            made = super().slice(x, axis, step.dim, step.outer, step.zigzag)
        elif step.kind == "all_gather":
            made = super().all_gather(x, axis, step.dim, step.outer, step.zigzag)
        elif step.kind == "all_reduce":
            made = super().all_reduce(x, axis, step.op)
        elif step.kind == "reduce_scatter":
            made = super().reduce_scatter(x, axis, step.dim, step.outer, step.op, step.zigzag)
        else:
            made = super().all_to_all(
                x, axis, step.dim, step.outer, step.from_dim, step.from_outer, step.zigzag, step.from_zigzag
            )
        return made if made is not x else x.view_as(x)

    def _at(self, axis: str) -> int:
        if axis not in self.axes:
            raise self.typing.error(f"the mesh has no axis {axis!r}", [])
        return self.axes.index(axis)

    def _ring(self, name: str, axis: str, tensors: Sequence[Any], options: Mapping[str, Any]) -> Any:
        visits = options.get("visits", range(self.size(axis)))
        ring = RingCall(self._at(axis), options.get("outer", 1), options.get("zigzag", False), tuple(visits))
        kept = {key: value for key, value in options.items() if key not in ("outer", "zigzag", "visits")}
        return self.typing.typed(_OPERATORS[name], tensors, kept, ring)

    def _exchanged(
        self, name: str, axis: str, tensors: Sequence[Any], sent: Any = None, later: bool = False, **options: Any
    ) -> Any:
        way = ExchangeCall(self._at(axis)) if self.size(axis) > 1 else None
        if sent is not None:
            self._arrive(name, axis, tensors, sent)
        found = self.typing.typed(_OPERATORS[name], tensors, options, way)
        if not later:
            return found
        if isinstance(found, Tensor):
            return TypedComing((found,))
        return TypedComing(tuple(found[:2])), *found[2:]

    def _arrive(self, name: str, axis: str, tensors: Sequence[Any], sent: Any) -> None:
        """Tokens that have left are those of the exchange that waits for them, which is one, and not over by now."""
        if not isinstance(sent, TypedSent):
            raise self.typing.error(f"{name} waits for what no send_tokens gave", [])
        given = tensors[: len(sent.tensors)]
        is_whole = len(sent.tensors) == (3 if name == "exchange_experts" else 4)
        same = is_whole and all(one is other for one, other in zip(sent.tensors, given, strict=True))
        if sent.is_taken or sent.where != self.typing.where or sent.axis != self._at(axis) or not same:
            raise self.typing.error(f"{name} waits for tokens that were sent for another exchange", given)
        if sent.experts != tensors[len(given)].shape[0]:
            have = tensors[len(given)].shape[0]
            raise self.typing.error(f"tokens were sent to {sent.experts} experts a rank, of which there are {have}", [])
        sent.is_taken = True


@dataclass(slots=True)
class TypedSent:
    """`Sent` of a program that is checked."""

    axis: int
    tensors: tuple[Any, ...]
    experts: int
    where: str
    is_taken: bool = False


@dataclass(slots=True)
class TypedComing:
    """`Coming` of a program that is checked."""

    results: tuple[Any, ...]
    is_taken: bool = False


class TypedTransfers:
    """`Transfers`, whose results are there at once."""

    def __init__(self, comm: TypedComm, held: dict[str, Tensor] | None, at: str) -> None:
        self._comm, self._held, self._at = comm, held, at
        self._values: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> TypedTransfers:
        self._values[name] = tensor
        return self

    def bucket(self, steps: str, tensors: Mapping[str, Any], keep: int = 0, owned: bool = False) -> TypedTransfers:
        del owned
        comm, own = self._comm, {name: x if isinstance(x, tuple) else (x,) for name, x in tensors.items()}
        if len({given[0].dtype for given in own.values()}) != 1:
            parse_bucket(steps, comm.axes, tensors, keep)
        held = self._held if self._held is not None and keep else {}
        is_held = bool(held) and all(self._at + name in held for name in own)
        with comm.typing.quietly():
            for name, given in own.items():
                tensor, chain, said = given[0], comm.chain(steps, name, given), (steps, given[1:], keep)
                if keep > len(chain):
                    parse_bucket(steps, comm.axes, tensors, keep)
                if is_held:
                    tensor = held[self._at + name]
                elif keep:
                    tensor = held[self._at + name] = comm.moved_quietly(tensor, *chain[:keep], said=(*said, "kept"))
                left = chain[keep:]
                self._values[name] = comm.moved_quietly(tensor, *left, said=said) if left else tensor
        return self

    def wait(self) -> dict[str, Tensor]:
        return self._values


@lru_cache(maxsize=1024)
def _moves(
    axes: tuple[str, ...], kinds: tuple[tuple[StepKind, str], ...], numbers: tuple[Any, ...]
) -> tuple[Step, ...]:
    return tuple(_move(kind, axes.index(axis), each) for (kind, axis), each in zip(kinds, numbers, strict=True))


def _move(kind: StepKind, at: int, numbers: Sequence[int]) -> Step:
    if kind == "all_reduce":
        return Step(kind, at)
    if kind == "all_to_all":
        dim, outer, from_dim, from_outer = numbers
        return Step(kind, at, dim, outer, from_dim, from_outer)
    return Step(kind, at, numbers[0], numbers[1], size=numbers[2] if len(numbers) > 2 else 0)


def _first_piece(given: Typed, sizes: Sequence[int]) -> tuple[int, ...]:
    """The local shape of rank 0, whose pieces are the longest."""
    shape = list(given.shape)
    for placement, size in zip(given.sharding, sizes, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return tuple(shape)
