"""Regions whose compiled code fails at run time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.guards import assert_size_stride

import autopar
from autopar.cli.models import catalogue
from autopar.runtime import loader, regions, simulate
from autopar.runtime.comm import RecordingComm

SOURCE = """
def layer_forward(comm, p, x):
    return x * p["w"] + 1
"""


def compiled(monkeypatch: pytest.MonkeyPatch, fail: Callable[[Tensor], object]) -> Callable[..., Any]:
    """The region function above, whose compiled code calls `fail` on its first tensor."""

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            fail(args[0])
            return graph.forward(*args)

        return run

    monkeypatch.setattr(regions, "lookup_backend", lambda name: backend)
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)
    regions.compile_regions(namespace, "<program>", "inductor")
    function: Callable[..., Any] = namespace["layer_forward"]
    return function


@pytest.mark.moderate
def test_other_strides_than_compiled_for_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if an operator's fake that is wrong about strides ends training, where eager would go on."""
    region = compiled(monkeypatch, lambda x: assert_size_stride(x, (3,), (7,)))
    comm, w = RecordingComm(("dp",), (1,), 0, "cpu"), torch.arange(3.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(region(comm, {"w": w}, torch.ones(3)), w + 1)
    assert caplog.text.count("runs uncompiled") == 1 and "layer_forward" in caplog.text


def test_other_assertions_are_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what a program itself asserts is taken for a fault of the compiler, and tried again."""

    def fail(x: Tensor) -> None:
        raise AssertionError("batches must be sorted")

    with pytest.raises(AssertionError, match="must be sorted"):
        compiled(monkeypatch, fail)(RecordingComm(("dp",), (1,), 0, "cpu"), {"w": torch.ones(3)}, torch.ones(3))


@pytest.mark.moderate
def test_a_region_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if Dynamo ends a graph at one of our operators: it then traces what implements it, for each launch anew.

    So it does where an argument is named `out`, which it takes for a tensor to write into.
    """
    loaded = catalogue.load("llama", tiny=True, batch=(2, 8), device="cpu", dropout=0.0)
    mesh = autopar.Mesh.parse("dp=1", hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="ddp")
    pieces: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        pieces.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(regions, "lookup_backend", lambda name: backend)
    monkeypatch.setattr(simulate, "load_program", partial(loader.load_program, compile_regions="inductor"))
    state = dict([*loaded.model.named_parameters(remove_duplicate=False), *loaded.model.named_buffers()])
    simulate.simulate(plan.interface, plan.source, state, loaded.batch)
    assert len(pieces) == len(re.findall(r"^def \w+_(forward|backward)\(comm, p", plan.source, re.MULTILINE)) > 3


EXCHANGE = """
def layer_forward(comm, p, x, indices, weights):
    sent = comm.send_tokens("dp", x, indices, weights, experts=4)
    y = x * 2
    made = comm.exchange_experts(
        "dp", x, indices, weights, p["first"], p["second"], act="mul(silu(gate), up)", sent=sent, later=True
    )
    y = y + 1
    made = comm.take_tokens(made)
    return made + y
"""


@pytest.mark.moderate
@pytest.mark.parametrize("ranks", [1, 2])
def test_exchanges_stand_between_compiled_pieces(ranks: int) -> None:
    """Breaks if a compiled region cannot call an exchange, or what is on its way does not get through to who waits."""
    namespace: dict[str, Any] = {}
    exec(EXCHANGE, namespace)
    plain = namespace["layer_forward"]
    torch._dynamo.reset()
    regions.compile_regions(namespace, "<program>", "eager")
    torch.manual_seed(0)
    p = {"first": torch.randn(4, 10, 6), "second": torch.randn(4, 6, 5)}
    x, indices, weights = torch.randn(5, 6), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    comm = RecordingComm(("dp",), (ranks,), 0, "cpu")
    found = namespace["layer_forward"](comm, p, x, indices, weights)
    assert torch.equal(found, plain(comm, p, x, indices, weights))


def test_no_operator_has_an_argument_named_out() -> None:
    """Breaks as the one above, of operators that it does not call."""
    for name in dir(torch.ops.autopar):
        operator = getattr(getattr(torch.ops.autopar, name), "default", None)
        names = [] if operator is None else [each.name for each in operator._schema.arguments]
        assert "out" not in names, name
