"""Regions of a generated program through torch.compile: each distinct region is compiled once.

The communicator is not traced: its calls end one graph and begin the next, so what is sent, and in which order, stays
as the program says.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.compiling import compiler_errors, is_layout_assertion, lookup_backend
from autopar.runtime.communicator import Communicator

logger = logging.getLogger("autopar")

_PHASES = ("_forward", "_backward", "_backward_input", "_backward_weight")
_TRACED = ("index", "size")
_RINGS = ("ring_attention", "ring_attention_backward", "ring_attention_backward_bias")
_EXCHANGES = (
    "send_tokens", "take_tokens", "exchange_experts", "exchange_experts_grad", "exchange_experts_grad_bias",
)  # fmt: skip
_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "transfers", *_RINGS, *_EXCHANGES)
_CALLS = ("at", "slice", "positions", "starts", "accumulate", *_COLLECTIVES)


def compile_regions(namespace: dict[str, Any], filename: str, backend: bool | str) -> None:
    """Replace the regions' functions in a program's namespace: `…_forward(comm, p, …)`, `…_backward(comm, p, …)`, and
    the two halves of the latter.

    backend: a name that torch.compile knows; True is "inductor", which needs a C++ compiler on CPU, Triton on CUDA.

    Raises:
        AutoparError: no backend of that name.
    """
    compiler = compiler_of(backend)
    for key, function in list(namespace.items()):
        if _is_region(key, function):
            namespace[key] = _Region(key, function, compiler, filename).wrapped()


def compiler_of(backend: bool | str) -> Any:
    """(graph, examples) -> a function, of a name or True, as in `compile_regions`. Raises as that does."""
    name = backend if isinstance(backend, str) else "inductor"
    try:
        return lookup_backend(name)
    except Exception as error:
        raise AutoparError(
            f"torch.compile has no backend {name!r}",
            values=str(error).splitlines()[0],
            remedy="choose one of torch.compiler.list_backends()",
        ) from error


def is_for_inference(namespace: Mapping[str, Any]) -> bool:
    """Whether the regions of a program have no backward."""
    return all(key.endswith(_PHASES[0]) for key, value in namespace.items() if _is_region(key, value))


def _is_region(name: str, function: Any) -> bool:
    if not name.endswith(_PHASES) or not inspect.isfunction(function):
        return False
    return list(inspect.signature(function).parameters)[:2] == ["comm", "p"]


class _Region:
    """One function of the program, compiled at its first call; run as it is where that fails."""

    def __init__(self, name: str, function: Callable[..., Any], compiler: Any, filename: str) -> None:
        self.name, self.function, self.compiler, self.filename = name, function, compiler, filename
        self.is_eager = self.has_warned = False
        self.compiled = torch.compile(function, dynamic=False, backend=self._compile_graph)

    def wrapped(self) -> Callable[..., Any]:
        """What stands in the function's place."""

        @wraps(self.function)
        def run(comm: Communicator, p: dict[str, Any], *args: Any) -> Any:
            if self.is_eager:
                return self.function(comm, p, *args)
            untraced = _untraced(comm)
            before = untraced.calls[0]
            try:
                return self.compiled(untraced, p, *args)
            except Exception as error:
                if not isinstance(error, compiler_errors()) and not is_layout_assertion(error):
                    raise
                self._warn(error)
                self.is_eager = True
                if untraced.calls[0] != before:
                    # Running it again would send again what other ranks have received already.
                    raise AutoparError(
                        f"torch.compile failed in the middle of {self.name}",
                        where=self.filename,
                        values=_first_line(error),
                        remedy="compile without compile_regions",
                    ) from error
                return self.function(comm, p, *args)

        return run

    def _compile_graph(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """The backend's code for the piece of the region between two calls of the communicator, or the piece itself."""
        try:
            return self.compiler(graph, example_inputs)
        except compiler_errors():
            raise  # some of these ask torch.compile to trace the function again in another way
        except Exception as error:
            self._warn(error)
            return graph.forward

    def _warn(self, error: Exception) -> None:
        if not self.has_warned:
            self.has_warned = True
            logger.warning(
                "autopar: torch.compile failed for the region function %s (%s); it runs uncompiled. %s",
                self.name,
                self.filename,
                _first_line(error),
            )


class _Untraced:
    """A communicator whose calls torch.compile leaves alone. calls: [how many there were that may send]."""

    def __init__(self, comm: Communicator) -> None:
        self.calls = calls = [0]
        self.axes, self.sizes, self.rank, self.device = comm.axes, comm.sizes, comm.rank, comm.device
        for name in _TRACED:
            setattr(self, name, getattr(comm, name))
        for name in _CALLS:
            method = getattr(comm, name)
            setattr(self, name, torch.compiler.disable(_counted(method, calls) if name in _COLLECTIVES else method))


def _counted(method: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return method(*args, **kwargs)

    return call


def _untraced(comm: Communicator) -> _Untraced:
    found = vars(comm).get("_untraced")
    if found is None:
        found = _Untraced(comm)
        vars(comm)["_untraced"] = found
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
