"""What no mode of a trace minds. Breaks if it is still handed on, or if what a mode has an answer to is not."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.overrides import TorchFunctionMode

from autopar.base.torch_compat import tracing as compat
from autopar.ir.nodes import drop_dead
from autopar.passes.chosen_functions import Chosen
from autopar.passes.counted_rows import CountedRows
from autopar.passes.plain_reads import PlainReads
from autopar.passes.read_numbers import Numbers


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


READS: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "stride": lambda x: x.stride(),
    "dim": lambda x: x.dim(),
    "requires_grad": lambda x: x.requires_grad,
}
SIZES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape,
    "size": lambda x: x.size(),
    "numel": lambda x: x.numel(),
}


def _seen(read: Callable[[Tensor], Any], *, in_forward: bool, runs: bool = True) -> tuple[list[str], Any]:
    counted, seen = CountedRows(Chosen(), Numbers()), _Seen()
    counted.is_on = in_forward
    x = torch.zeros(2, 3, requires_grad=True)
    with compat.model_running() if runs else nullcontext(), seen, PlainReads(counted):
        found = read(x)
    return seen.names, found == read(x)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("in_forward", [False, True])
def test_what_no_mode_minds_is_answered_at_once(name: str, in_forward: bool) -> None:
    assert _seen(READS[name], in_forward=in_forward) == ([], True)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_handed_on_while_forward_runs(name: str) -> None:
    assert _seen(SIZES[name], in_forward=False) == ([], True)
    names, same = _seen(SIZES[name], in_forward=True)
    assert len(names) == 1 and same


def test_what_computes_is_handed_on_while_the_model_runs() -> None:
    def computes(x: Tensor) -> bool:
        return torch.equal(x + 1, x + 1)

    assert _seen(computes, in_forward=False) == (["add", "add", "equal"], True)
    assert _seen(computes, in_forward=False, runs=False) == ([], True)


def test_code_of_a_traced_graph_is_not_written() -> None:
    found = compat.make_fx(lambda x: x.relu(), {}, [torch.empty(2, device="meta")])
    assert isinstance(found, _LazyGraphModule) and found._needs_recompile()
    assert found(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_what_nobody_reads_is_dropped_and_writes_stay() -> None:
    graph = fx.Graph()
    x, unread = graph.placeholder("x"), graph.placeholder("unread")
    dead = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.call_function(torch.ops.aten.neg.default, (dead,))
    write = graph.call_function(torch.ops.aten.add_.Tensor, (unread, 1))
    kept = graph.call_function(torch.ops.aten.exp.default, (x,))
    output = graph.output((kept,))
    drop_dead(graph)
    assert list(graph.nodes) == [x, unread, write, kept, output]
