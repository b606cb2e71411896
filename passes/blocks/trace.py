"""Blocks that a model repeats are traced once: the others stand in the graph as calls, which are then written out.

    layers 0 … 125 of a Llama  →  one traced layer, 125 × `again`, then layers as if each had been traced

`alike.py` says when one block repeats another. Blocks with hooks are traced each for itself; what forward sets on a
block's modules goes in and comes out with its tensors (`attributes.py`). Blocks that will likely repeat another are not
even shown to the tracer (`hollow.py`); where one does not, the model is traced again with that one whole.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.base.torch_compat import tracing as compat
from autopar.base.watched import is_watched
from autopar.passes.blocks import alike
from autopar.passes.blocks.alike import PLAIN
from autopar.passes.blocks.attributes import put, set_since
from autopar.passes.blocks.cached import Lent, cache_among, flatten
from autopar.passes.blocks.hollow import NotRepeated, Running, Unshown, hollow
from autopar.passes.blocks.marks import AGAIN, AGAIN_ONE, ENTER, LEAVE, MARKS, made_by
from autopar.passes.blocks.recording import Place, Recording, has_slots, held
from autopar.passes.blocks.words import note, words_of
from autopar.passes.blocks.write import Traced, Written, write_out

LEAST_HIDDEN = 2
"""So many times the tensors that are shown those have to be that are not: one block that repeats no other costs a
trace, what is shown costs about what an operator of it does.
"""
MOST_MISSED = 1
"""So many blocks that were not shown to the tracer may turn out to repeat none; then all are shown."""


class Blocks:
    """The blocks of one model, while a copy of it is traced and after. with_cache: whether they are given one."""

    def __init__(self, model: nn.Module, *, with_cache: bool = False) -> None:
        self.traced: list[Traced] = []
        self.paths: dict[str, nn.Module] = {}
        self.repeats = 0
        self._structures: dict[str, alike.Structure] = {}
        self._hollow: set[str] = set()
        self._before: dict[str, dict[tuple[str, ...], Any]] = {}
        self._missing: list[str] = []
        self._running = Running()
        self._recording = Recording(self._running)
        self._heard: Callable[[Sequence[Tensor]], int] = len
        tied = alike.tied_tensors(model)
        hopeless = alike.shares_modules(model) or any(map(_counts, model.modules()))
        for elements in () if hopeless else alike.outermost_lists(model):
            blocks = {path: block for path, block in elements.items() if self._may_repeat(block, tied)}
            self._structures.update((path, alike.structure_of(block)) for path, block in blocks.items())
            self.paths.update(blocks)
            first: dict[object, str] = {}
            for path, kind in alike.kinds(blocks, self._structures).items():
                if first.setdefault(kind, path) != path:
                    self._hollow.add(path)
        hidden = sum(map(_count_tensors, map(self.paths.__getitem__, self._hollow)))
        if hidden < LEAST_HIDDEN * (_count_tensors(model) - hidden):
            self._hollow.clear()
        self._differences = alike.differences(self.paths, self._structures)
        self._numbers = alike.numbers(self.paths, self._structures) if with_cache else {}

    @staticmethod
    def _may_repeat(block: nn.Module, tied: set[int]) -> bool:
        hooked = any(alike.has_hooks(module) or "forward" in vars(module) for module in block.modules())
        shared = any(id(tensor) in tied for tensor in (*block.parameters(), *block.buffers()))
        return not hooked and not shared and not any(has_slots(module) for module in block.modules())

    def stand_ins(self) -> dict[nn.Module, nn.Module]:
        """For blocks that are not to be traced, what a copy of the model may have instead."""
        return {self.paths[path]: hollow(self.paths[path], self._running) for path in self._hollow}

    def learns(self, error: Exception) -> bool:
        """Whether the last trace failed for want of a block that was not shown; it will be the next time."""
        looked_into = bool(self._hollow) and (isinstance(error, Unshown) or bool(self._running.missed))
        if not looked_into and not any(path in self._hollow for path in self._missing):
            return False
        few = len(self._missing) <= MOST_MISSED and not looked_into
        self._hollow.difference_update(self._missing if few else self.paths)
        self.traced, self.repeats, self._running.missed = [], 0, ""
        return True

    @contextmanager
    def watched(self, clone: nn.Module, heard: Callable[[Sequence[Tensor]], int]) -> Iterator[None]:
        """While this lasts, a block of the model's copy that has been traced before is not traced again.

        heard: a number that changes where a block is told one of Python's, which others would not be; negative where
        one is among what it is given.
        """
        self._heard = heard
        blocks = {path: clone.get_submodule(path) for path in self.paths}
        self._recording = Recording(self._running)
        for path, block in blocks.items():
            if path not in self._hollow:
                self._recording.put_aside(block, self._differences[path], self._numbers.get(path, ()))
            block.forward = functools.partial(self._forward, block, path, block.forward)
        with made_by(self._made):
            try:
                yield
            finally:
                for block in blocks.values():
                    del block.forward

    def within(self, clone: nn.Module) -> Callable[..., Any]:
        """The forward of the model's copy, before which it is seen what its blocks hold; nothing else changes that
        between this and the model's own code.

        Raises:
            Unshown: it looked for what is inside of a block that is not shown, and went on without.
        """
        forward = clone.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._before = {path: held(clone.get_submodule(path)) for path in self.paths}
            self._running.now, self._running.missed = True, ""
            try:
                found = forward(*args, **kwargs)
            finally:
                self._running.now = False
            if self._running.missed:
                raise Unshown(self._running.missed)
            return found

        return run

    def _made(self, key: int) -> list[Tensor]:
        made = [what for kind, what in self.traced[key].results if kind == "made"]
        return [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in made]

    def _forward(self, block: nn.Module, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        own, count = set_since(self._before[path], held(block), path), len(leaves)
        leaves += own.values()
        call, cache = alike.signature(leaves, (spec, tuple(own))), cache_among(leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if (heard := self._heard(tensors)) < 0:
            raise NotRepeated(f"{path} is given a number that is another one in each step")
        for known in self.traced if call is not None else ():
            if known.call == call and self._is_same(known, path) and _holds_the_same(known, tensors):
                numbers = None if known.kept is None else known.kept.of(cache, self.paths[path])
                if known.kept is None or numbers is not None:
                    self.repeats += 1
                    given = _given(known, tensors, cache, numbers)
                    return _rebuilt(known, _again(known, given, path), given, block, cache, numbers)
        if path in self._hollow:
            self._missing.append(path)
            raise NotRepeated(f"{path} repeats no other block")
        if call is None:
            note(path, forward, args, kwargs)
            return forward(*args, **kwargs)
        lent = None if cache is None else Lent(cache, self._recording.numbers(block))
        states = [] if lent is None else lent.tensors()
        inner = list(ENTER([*tensors, *states], len(self.traced)))
        given, entered = inner[: len(tensors)], iter(inner)
        inside = [next(entered) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if lent is not None:
            seen = lent.seen(entered)
            inside = [seen if leaf is cache else leaf for leaf in inside]
        put(block, tuple(own), inside[count:])
        inner_args, inner_kwargs = compat.tree_unflatten(inside[:count], spec)
        with self._recording.of(block) as reads:
            result = forward(*inner_args, **inner_kwargs)
        if self._heard(tensors) != heard:
            raise NotRepeated(f"{path} is told numbers of its own")
        plain = [None if leaf is cache else leaf for leaf in leaves[:count]]
        words = words_of(forward, *compat.tree_unflatten(plain, spec))
        words += [""] * (len(tensors) + len(states) - len(words))
        found = Traced(len(self.traced), path, call, tuple(reads), words, len(tensors))
        results, found.result = flatten(result)
        found.sets, values = self._set_within(block, path, own)
        results += values
        if lent is not None:
            results = [cache if lent.is_it(leaf) else leaf for leaf in results]
            found.kept = lent.kept()
        same = {id(tensor): place for place, tensor in enumerate(inner)}
        changed = [] if lent is None else lent.results()
        made = [leaf for leaf in (*results, *changed) if isinstance(leaf, Tensor) and id(leaf) not in same]
        found.values = _values_asked(inner, [*tensors, *states], path)
        returned = results[: len(results) - len(values)]
        if any(is_watched(leaf) or not (leaf is cache or isinstance(leaf, (Tensor, *PLAIN))) for leaf in returned):
            raise NotRepeated(f"{path} returns what is neither a tensor nor plain")
        if any(compat.shares_storage(leaf, tensor) for leaf in made for tensor in inner):
            raise NotRepeated(f"{path} returns a view of what it is given")
        left = list(LEAVE(made, found.key))
        for leaf in (*results, *changed):
            if leaf is cache and leaf is not None:
                found.results.append(("cache", None))
            elif not isinstance(leaf, Tensor):
                found.results.append(("plain", leaf))
            elif id(leaf) in same:
                found.results.append(("given", same[id(leaf)]))
            else:
                found.results.append(("made", (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)))
        self.traced.append(found)
        numbers = None if found.kept is None else {number: number for number in found.kept.places.values()}
        return _rebuilt(found, left, [*tensors, *states], block, cache, numbers)

    def _set_within(
        self, block: nn.Module, path: str, given: Mapping[Place, Any]
    ) -> tuple[tuple[Place, ...], list[Any]]:
        """What is set on a block's modules once its forward has run. given: what was before."""
        now = held(block)
        found = set_since(self._before[path], now, path)
        places = tuple(sorted({*given, *found}))
        return places, [now[place] for place in places]

    def _is_same(self, known: Traced, path: str) -> bool:
        """Whether the forward of the block at `path` would read what that of the block that was traced did."""
        if self._structures[known.path] != self._structures[path]:
            return False
        return alike.reads_the_same(self.paths[known.path], self.paths[path], known.reads)

    def check_written(self, nodes: Iterable[fx.Node]) -> None:
        """Raises NotRepeated where one of these nodes changes what a block is given, or what it gives."""
        for node in nodes:
            target = node.args[0]
            while isinstance(target, fx.Node) and (target.target is operator.getitem or _may_alias(target)):
                target = target.all_input_nodes[0]
            if not isinstance(target, fx.Node) or target.op != "call_function" or target.target in MARKS:
                raise NotRepeated(f"{node} changes {target}")

    def write_out(
        self,
        graph: fx.Graph,
        origins: dict[str, str],
        names: Mapping[fx.Node, str],
        constants: set[str],
        inputs: Mapping[fx.Node, str],
    ) -> Written:
        """As `write.write_out`."""
        return write_out(graph, origins, names, self.traced, constants, inputs)


def _count_tensors(module: nn.Module) -> int:
    """How many parameters and buffers a module has."""
    return sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())


def _counts(module: nn.Module) -> bool:
    """Whether a forward writes into a module's buffers, as torch's norms do that keep statistics: `check_written` would
    refuse that at the end of a trace.
    """
    keeps = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    return keeps and module.training and module.running_mean is not None


_SOMETIMES_VIEWS = frozenset({"reshape", "flatten", "contiguous", "to", "type_as", "ravel", "float", "unflatten"})


def _may_alias(node: fx.Node) -> bool:
    """Whether a node's result may lie where its first operand does."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload) or not node.all_input_nodes:
        return False
    schema = node.target._schema
    name = schema.name.rpartition("::")[2]
    return name in _SOMETIMES_VIEWS or any(result.alias_info is not None for result in schema.returns)


def _values_asked(inner: Sequence[Tensor], given: Sequence[Tensor], path: str) -> dict[int, Tensor]:
    """What those tensors hold, by their place, that a block's forward was traced for the values of."""
    found: dict[int, Tensor] = {}
    for place, tensor in enumerate(inner):
        if compat.was_asked(compat.node_of(tensor)):
            value = compat.value_from(given[place], {})
            if value is None:
                raise NotRepeated(f"{path} goes by values that are written later")
            found[place] = value
    return found


def _holds_the_same(known: Traced, given: Sequence[Tensor]) -> bool:
    """Whether what a block is given holds the values that one was traced for."""
    for place, value in known.values.items():
        other = compat.value_from(given[place], {})
        with compat.outside_of_tracing():
            if other is None or not torch.equal(value, other):
                return False
    return True


def _again(known: Traced, given: list[Tensor], path: str) -> list[Tensor]:
    """What a call of a block like `known` makes."""
    if sum(kind == "made" for kind, _ in known.results) == 1:
        return [AGAIN_ONE(given, known.key, path)]
    return list(AGAIN(given, known.key, path))


def _given(known: Traced, tensors: list[Tensor], cache: Any, numbers: Mapping[int, int] | None) -> list[Tensor]:
    """What a block like `known` is given: of a cache, too."""
    if known.kept is None or numbers is None:
        return tensors
    return [*tensors, *known.kept.given(cache, numbers, tensors[0])]


def _rebuilt(
    found: Traced,
    made: list[Tensor],
    given: list[Tensor],
    block: nn.Module,
    cache: Any,
    numbers: Mapping[int, int] | None,
) -> Any:
    """A block's result. block: gets what it sets. cache: gets what it made of its layers, of these numbers."""
    rest = iter(made)
    leaves = [
        next(rest) if kind == "made" else given[what] if kind == "given" else cache if kind == "cache" else what
        for kind, what in found.results
    ]
    count = found.result.num_leaves
    behind = count + len(found.sets)
    put(block, found.sets, leaves[count:behind])
    if found.kept is not None and numbers is not None:
        found.kept.put(cache, numbers, leaves[behind:])
    return compat.tree_unflatten(leaves[:count], found.result)
