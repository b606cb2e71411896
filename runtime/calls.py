"""Calls of torch and of a communicator that one run of a program made, and which of them another run needs.

A value has a number, and so has the memory that it lies in: views share that of what they are views of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from autopar.base.torch_compat.calls import shortest, tensors_in
from autopar.base.torch_compat.tracing import storage_id

MOST_BYTES = 1 << 20
"""Of a value that depends on nothing: a larger one is computed each time."""
Layout = tuple[Any, ...]
"""Where in its memory a value lies, and as what."""
At = tuple[Callable[[str], None], str]
"""What a communicator is told, and how, before it sends."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value in the place of a tensor."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A function with its arguments, tensors as `Ref`s. refs: the values among them. outs: what it gives, in order;
    made: those that were not there before. is_several: they come in a sequence. writes: storages. is_sent: by a
    communicator, which is told `at` before. region: the number of the program's region that it is made in.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    refs: tuple[int, ...]
    outs: tuple[int, ...]
    made: frozenset[int]
    is_several: bool
    writes: frozenset[int]
    is_sent: bool
    at: At | None
    region: int = 0


class Calls:
    """What one run did, as `base/torch_compat/calls.py` tells it.

    inputs: the numbers of the program's inputs, in order; state: of its parameters, each once. held: these, and what
    depends on nothing, by number. why: what cannot be done again by the same calls, "" for nothing. at: what the
    communicator was told last; region: how many regions have begun.
    """

    def __init__(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        self.held: dict[int, Tensor] = {}
        self.why, self.at, self.region = "", cast("At | None", None), 0
        self._calls: list[Call] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._storage: list[int] = []
        self._layouts: list[Layout] = []
        self._kept: dict[int, Tensor] = {}
        self.state = tuple(self._hold(x) for x in {id(x): x for x in state.values()}.values())
        self.inputs = tuple(self._new(x) for x in inputs.values())
        lie = [storage_id(x) for x in inputs.values()]
        if len(set(lie)) < len(lie) or not {storage_id(x) for x in state.values()}.isdisjoint(lie):
            self.goes_by("memory that is handed in twice")

    def layout(self, number: int) -> Layout:
        """Where in its memory a value lies, and as what: offset, shape, strides, dtype, and more."""
        return self._layouts[number]

    def storage(self, number: int) -> int:
        """The memory that a value lies in."""
        return self._storage[number]

    def mark(self) -> tuple[int, int, str]:
        """How much was told."""
        return len(self._calls), len(self._storage), self.why

    def back_to(self, mark: tuple[int, int, str]) -> bool:
        """Forget what was told since `mark` where some of it cannot be done again; whether that is so."""
        num_calls, num_values, why = mark
        if self.why == why:
            return False
        self.why = why
        del self._calls[num_calls:], self._storage[num_values:], self._layouts[num_values:]
        self._seen = {key: known for key, known in self._seen.items() if known[1] < num_values}
        for known in (self.held, self._kept):
            for number in [number for number in known if number >= num_values]:
                del known[number]
        return True

    def goes_by(self, what: str) -> None:
        """What was done is not what these calls do."""
        self.why = self.why or what

    def called(self, function: Any, args: Any, kwargs: Any, found: Any, written: Sequence[Tensor]) -> None:
        """A call of torch. written: the tensors into which it wrote."""
        self._note(function, args, kwargs, found, written, is_sent=False)

    def sent(self, function: Any, args: Any, kwargs: Any, found: Any) -> None:
        """A call of the communicator: it is made again, whatever becomes of what it gives."""
        if isinstance(found, Tensor) or (isinstance(found, tuple) and all(isinstance(x, Tensor) for x in found)):
            self._note(function, args, kwargs, found, (), is_sent=True)
        else:
            self.goes_by(f"comm.{function.__name__}")

    def end(self, values: Sequence[Tensor]) -> None:
        """The run gave these outputs."""
        for x in values:
            number = self._known(x) if type(x) is Tensor else None
            if number is None or number in self.held:
                self.goes_by("an output that no call gave")

    def ref(self, x: Tensor) -> Ref:
        """The value that a tensor is. One that comes from nowhere is a table that operators keep, or a communicator."""
        number = self._known(x)
        return Ref(self._hold(x) if number is None else number)

    def needed(self, outputs: Sequence[Ref], at_once: bool = True) -> list[Call]:
        """The calls that these outputs need, or whoever is sent to, in order. at_once: parts of parts are taken of the
        whole, and views of the state are held; a compiler makes nothing of either, and serves other states.
        """
        values = {ref.number for ref in outputs}
        written = {storage for call in self._calls for storage in call.writes}
        written |= {self._storage[number] for number in values}
        storages = {self._storage[number] for number in (*values, *self.inputs)}
        found: list[Call] = []
        for call in reversed([*self._once(frozenset(written), frozenset(values), at_once)]):
            if call.is_sent or call.writes & storages or not values.isdisjoint(call.outs):
                found.append(call)
                values.update(call.refs)
                storages.update(self._storage[number] for number in (*call.refs, *call.outs))
        return found[::-1]

    def _once(self, written: frozenset[int], outputs: frozenset[int], at_once: bool) -> Iterator[Call]:
        """The calls without those that give what is known: what an equal one gave before, or what never changes, which
        is held: nobody writes into it, nor is it handed out. And the same part of the same memory, whoever writes.
        """
        instead: dict[int, int] = {}
        known: dict[str, tuple[int, ...]] = {}
        parts = {self._part(number): number for number in (*self.held, *self.inputs)}
        fixed, of_state = set(self.held) if at_once else {*self.held}.difference(self.state), set(self.state)
        views: set[int] = set()
        for each in self._calls:
            call = moved(each, instead)
            if (root := self._root(call)) is not None and outputs.isdisjoint(call.outs):
                (number,) = call.outs
                if self._part(number) in parts:
                    instead[number] = parts[self._part(number)]
                    continue
                views.add(number)
                call = self._at_once(call, root) if at_once and not views.isdisjoint(call.refs) else call
            around = {self._storage[number] for number in (*call.refs, *call.outs)}
            key = f"{id(call.function)} {_key_of(call.args)} {_key_of(call.kwargs)}"
            if call.is_sent or not call.made or around & written:
                yield call
            elif key in known:
                instead.update(zip(call.outs, known[key], strict=True))
                continue
            elif fixed.issuperset(call.refs) and self._never_changes(call, of_state):
                known[key] = call.outs
                fixed.update(call.outs)
                self.held.update((number, self._kept[number]) for number in call.outs)
                continue
            else:
                known[key] = call.outs
                yield call
            parts.update((self._part(number), number) for number in call.made)

    def _part(self, number: int) -> tuple[int, Layout]:
        return self._storage[number], self._layouts[number]

    def _root(self, call: Call) -> int | None:
        """The memory of which a call gives a part; None where it does anything else."""
        if call.is_sent or call.writes or len(call.outs) != 1 or not call.made:
            return None
        storage = self._storage[call.outs[0]]
        return storage if storage in [self._storage[number] for number in call.refs] else None

    def _at_once(self, call: Call, root: int) -> Call:
        """A part of a part of what a call gave as one part of that. Of inputs not: where these begin is not known."""
        (offset, shape, stride, *others), whole = self._layouts[call.outs[0]], self._layouts[root]
        if root in self.held or root in self.inputs or others != list(whole[3:]) or whole[0] != 0:
            return call
        given = (Ref(root), tuple(shape), tuple(stride), offset)
        return replace(call, function=torch.as_strided, args=given, kwargs={}, refs=(root,))

    def _never_changes(self, call: Call, of_state: set[int]) -> bool:
        """Whether what depends on what is held is the same for other values of that: views of it are."""
        if not all(number in self._kept for number in call.outs):
            return False
        values = of_state.intersection(call.refs)
        if not values:
            return True
        if not {self._storage[n] for n in call.outs} <= {self._storage[n] for n in values}:
            return False
        of_state.update(call.outs)
        return True

    def _note(
        self, function: Any, args: Any, kwargs: Any, found: Any, written: Sequence[Tensor], is_sent: bool
    ) -> None:
        refs: list[int] = []
        own = tuple(self._with_refs(x, refs) for x in args)
        named = {name: self._with_refs(x, refs) for name, x in kwargs.items()}
        several = (found,) if isinstance(found, Tensor) else tuple(found)
        before = [self._known(x) for x in several]
        lie = {storage_id(x): self._storage[self.ref(x).number] for x in tensors_in((args, kwargs))}
        outs = tuple(self._new(x, lie) if n is None else n for n, x in zip(before, several, strict=True))
        made = frozenset(n for n, known in zip(outs, before, strict=True) if known is None)
        writes = frozenset(lie[storage_id(x)] for x in written)
        if writes & {self._storage[number] for number in self.held}:
            self.goes_by("a write into what is held")
        if not made and not writes:
            return
        at, self.at = (self.at, None) if is_sent else (None, self.at)
        is_several = not isinstance(found, Tensor)
        how = (is_several, writes, is_sent, at, self.region)
        self._calls.append(Call(function, own, named, tuple(refs), outs, made, *how))
        here = {self._storage[n] for n in refs}
        is_small = all(x.nbytes <= MOST_BYTES or self._storage[n] in here for n, x in zip(outs, several, strict=True))
        if is_small and all(n in self.held or n in self._kept for n in refs):
            self._kept.update(zip(outs, several, strict=True))

    def _known(self, x: Tensor) -> int | None:
        there, number = self._seen.get(id(x), (None, 0))
        return number if there is not None and there() is x else None

    def _new(self, x: Tensor, lie: Mapping[int | None, int] = MappingProxyType({})) -> int:
        """The number of a new value. lie: the memory of what it may be a part of."""
        number = len(self._storage)
        self._storage.append(lie.get(storage_id(x), number))
        self._layouts.append((x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()))
        self._seen[id(x)] = weakref.ref(x), number
        return number

    def _hold(self, x: Tensor) -> int:
        number = self._new(x)
        self.held[number] = x
        return number

    def _with_refs(self, x: Any, refs: list[int]) -> Any:
        if isinstance(x, Tensor):
            ref = self.ref(x)
            refs.append(ref.number)
            return ref
        if type(x) in (tuple, list):
            return type(x)(self._with_refs(each, refs) for each in x)
        if type(x) is torch.Size:
            return tuple(x)
        return {name: self._with_refs(each, refs) for name, each in x.items()} if type(x) is dict else x


def moved(call: Call, instead: Mapping[int, int]) -> Call:
    """The call with other values in the place of some that it is given."""
    if instead.keys().isdisjoint(call.refs):
        return call

    def with_others(x: Any) -> Any:
        if isinstance(x, Ref):
            return Ref(instead.get(x.number, x.number))
        if type(x) in (tuple, list):
            return type(x)(map(with_others, x))
        return {name: with_others(each) for name, each in x.items()} if type(x) is dict else x

    refs = tuple(instead.get(number, number) for number in call.refs)
    return replace(call, args=with_others(call.args), kwargs=with_others(call.kwargs), refs=refs)


def _key_of(x: Any) -> str:
    """What tells an argument from others; of objects, which one it is."""
    if isinstance(x, Ref):
        return f"v{x.number}"
    if isinstance(x, slice):
        return f"slice{_key_of((x.start, x.stop, x.step))}"
    if type(x) in (tuple, list):
        return f"{type(x).__name__}({', '.join(map(_key_of, x))})"
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name}: {_key_of(x[name])}' for name in sorted(x))}}}"
    is_plain = type(x) in (bool, int, float, str, type(None), torch.device, torch.dtype)
    return repr(x) if is_plain else f"{type(x).__name__}@{id(x)}"


class Text:
    """Calls as the text of a function of some values. held: values that it has by itself. namespace: what it names."""

    def __init__(self, parameters: Sequence[int], held: Mapping[int, Tensor], said: Sequence[str] = ()) -> None:
        self.namespace: dict[str, Any] = {}
        self._parameters, self._held, self._said = parameters, held, said
        self._names = {number: f"i{place}" for place, number in enumerate(parameters)}
        self._names |= {number: f"c{number}" for number in held}
        self._functions: dict[int, str] = {}

    def of(self, calls: Sequence[Call], outputs: Sequence[Ref]) -> str:
        """The function `forward` that gives these outputs. Each value is let go behind its last use."""
        self._names |= {number: f"v{number}" for call in calls for number in call.made}
        last = {number: place for place, call in enumerate(calls) for number in (*call.refs, *call.outs)}
        stays = {ref.number for ref in outputs} | {*self._parameters, *self._held}
        lines = [f"# i{place}: {name}" for place, name in enumerate(self._said)]
        lines.append(f"def forward({', '.join(f'i{place}' for place, _ in enumerate(self._parameters))}):")
        for place, call in enumerate(calls):
            if call.at is not None:
                lines.append(f"    {self._object(call.at[0])}({call.at[1]!r})")
            lines.append(f"    {self._line(call)}")
            ended = [n for n in dict.fromkeys((*call.refs, *call.outs)) if last[n] == place and n not in stays]
            if ended:
                lines.append(f"    del {', '.join(self._names[n] for n in ended)}")
        return "\n".join([*lines, f"    return {self._text(tuple(outputs))}", ""])

    def _line(self, call: Call) -> str:
        given = [*map(self._text, call.args), *(f"{name}={self._text(x)}" for name, x in call.kwargs.items())]
        text = f"{self._object(shortest(call.function))}({', '.join(given)})"
        if not call.made:
            return text
        taken = ", ".join(self._names[number] if number in call.made else "_" for number in call.outs)
        return f"{taken}{',' if call.is_several else ''} = {text}"

    def _text(self, x: Any) -> str:
        if isinstance(x, Ref):
            name = self._names[x.number]
            if x.number in self._held:
                self.namespace[name] = self._held[x.number]
            return name
        if isinstance(x, slice):
            return f"slice({', '.join(map(self._text, (x.start, x.stop, x.step)))})"
        if type(x) in (tuple, list):
            inside = ", ".join(map(self._text, x))
            return f"[{inside}]" if type(x) is list else f"({inside}{',' if x else ''})"
        if type(x) is dict:
            return f"{{{', '.join(f'{name!r}: {self._text(each)}' for name, each in x.items())}}}"
        is_plain = type(x) in (bool, int, str, type(None)) or (type(x) is float and x - x == 0)
        return repr(x) if is_plain else self._object(x)

    def _object(self, x: Any) -> str:
        if id(x) not in self._functions:
            word = str(getattr(x, "__name__", "") or type(x).__name__).replace(".", "_").lstrip("_")
            is_free = word.isidentifier() and not iskeyword(word) and word not in (*self.namespace, "slice", "forward")
            name = word if is_free else f"{word}_{len(self._functions)}"
            name = name if name.isidentifier() else f"k{len(self._functions)}"
            self._functions[id(x)] = name
            self.namespace[name] = x
        return self._functions[id(x)]
