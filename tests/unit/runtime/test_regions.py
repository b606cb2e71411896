"""Regions whose compiled code fails at run time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.guards import assert_size_stride

from autopar.runtime import regions
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
