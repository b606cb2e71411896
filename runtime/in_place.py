"""A program that writes into states where its text asks for a copy of them that is written: where nobody else has them.

    keys = aten.index_copy(past_key_values_0, 2, at, new)     a copy of the cache of a layer, for every token
                                                        →     the same memory, with the token in it

The text is run a second time as a module of its own, in which the operators that write are others; what it says and
gives is the same. Whose states these are, `repeats.py` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import operators
from autopar.ir.graphs import CACHES
from autopar.runtime.communicator import Communicator
from autopar.runtime.loader import LoadedProgram, Tensors, load_program
from autopar.runtime.regions import compiler_of
from autopar.runtime.replay import Replay


class InPlace:
    """A program over some states of its own. Raises AutoparError as `load_program` does.

    compile_regions: as there; what lies between its sends is compiled (`compiled_calls.py`).
    """

    def __init__(self, program: LoadedProgram, compile_regions: bool | str = False) -> None:
        self._own = load_program(program.source, program.filename)
        self._written: set[int] = set()
        compiler = compiler_of(compile_regions) if compile_regions else None
        self._replay = Replay(program.source, program.filename, compiler)
        namespace = self._own.namespace
        for name, with_writes in (("aten", _Aten), ("ops", _Operators)):
            if name in namespace:
                namespace[name] = with_writes(namespace[name], self._written)

    def __call__(
        self, comm: Communicator, state: Tensors, inputs: Tensors, seed: Any, written: Iterable[str]
    ) -> Sequence[Tensor]:
        """The program's outputs; the inputs that are called `written` are those outputs' memory from now on."""

        def run(comm: Any, state: Tensors, inputs: Tensors) -> Sequence[Tensor]:
            self._written.update(id(inputs[name]) for name in written)
            try:
                return self._own.forward(comm, state, {}, inputs, seed)[0]
            finally:
                self._written.clear()

        return self._replay(run, comm, state, inputs)


class _Namespace:
    """What a text calls by a name, with some functions of it others."""

    def __init__(self, plain: Any, written: set[int]) -> None:
        self._plain, self._written = plain, written

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        setattr(self, name, found)
        return found


class _Aten(_Namespace):
    def index_copy(self, x: Tensor, dim: int, at: Tensor, source: Tensor) -> Tensor:
        if id(x) in self._written:
            x.index_copy_(dim, at, source)
            return x
        return torch.index_copy(x, dim, at, source)


class _Operators(_Namespace):
    def rotary_write(self, *given: Any, **options: Any) -> list[Tensor]:
        caches = self._caches("rotary_write", given, options)
        if caches is None:
            return operators.rotary_write(*given, **options)
        return [torch.ops.autopar.rotary_write_.default(*given, **options), *caches]

    def cache_write(self, *given: Any, **options: Any) -> list[Tensor]:
        caches = self._caches("cache_write", given, options)
        if caches is None:
            return operators.cache_write(*given, **options)
        torch.ops.autopar.cache_write_.default(*given, **options)
        return caches

    def _caches(self, name: str, given: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor] | None:
        """The caches of a call, where all of them may be written where they are."""
        found = [given[place] for place in CACHES[name] if place < len(given) and given[place] is not None]
        is_said = any(isinstance(each, Tensor) for each in options.values())
        return None if is_said or not all(id(each) in self._written for each in found) else found
