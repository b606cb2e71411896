"""Attention of a few queries reads keys and values that are codes as they are: where, and with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import pipeline
from autopar.api import interpret
from autopar.base.codes import STORAGES
from autopar.cost.local_work import local_work
from autopar.ir.graphs import op_call
from autopar.ir.nodes import format_target
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy
from autopar.machine.mesh import Mesh
from autopar.operators.rules.lookup import rule_for
from autopar.strategies.context import SPLIT_KV
from autopar.strategies.request import Attempt

LENGTH, SIZE = 12, 8


class _Attention(nn.Module):
    """Reads a cache of codes; `twice`: the numbers of keys are an output, too; `other`: values are stored so; `torn`:
    the second half of a key is that of the value.
    """

    def __init__(self, storage: str, twice: bool = False, other: str | None = None, torn: bool = False) -> None:
        super().__init__()
        self.storages, self.twice, self.torn = (STORAGES[storage], STORAGES[other or storage]), twice, torn

    def forward(self, x: Tensor, at: Tensor, **cache: Tensor) -> dict[str, Tensor]:
        for name, storage in zip(("keys", "values"), self.storages, strict=True):
            new = storage.encode(x[:, :2, : len(at)])
            for part, own in zip((name, f"{name}_scales"), new, strict=True):
                cache[part] = cache[part].index_copy(2, at, own)
        k, v = (s.decode(cache[name], cache[f"{name}_scales"]) for name, s in zip(("keys", "values"), self.storages))
        if self.torn:
            halves = torch.cat([cache["keys"] & 15, cache["values"] >> 4], -1)
            k = (halves.to(torch.int8) - 8).to(x.dtype) * cache["keys_scales"]
        out = F.scaled_dot_product_attention(x, k, v, enable_gqa=True)
        return {"out": out, **cache, **({"numbers": k} if self.twice else {})}


def _traced(
    storage: str, queries: int = 1, pieces: int = 1, hardware: str = "h100", **said: Any
) -> tuple[Program, Program, dict[str, Tensor]]:
    """Before the pass, behind it, and what went in."""
    model = _Attention(storage, **said)
    generator = torch.Generator().manual_seed(0)
    x, k, v = (
        torch.randn(2, heads, length, SIZE, dtype=torch.float64, generator=generator)
        for heads, length in ((4, queries), (2, LENGTH), (2, LENGTH))
    )
    inputs = {"x": x, "at": torch.tensor([LENGTH - 1])}
    for name, kind, numbers in zip(("keys", "values"), model.storages, (k, v), strict=True):
        inputs[name], inputs[f"{name}_scales"] = kind.encode(numbers)
    asked = Attempt(model, inputs, Mesh({"cp": pieces}, hardware=hardware), (SPLIT_KV,), training=False)
    steps = (*pipeline.TRACE, *(step for step in pipeline.RECOMPUTE if step.name != "read_codes"))
    before, _ = pipeline.run(asked, steps)
    after, _ = pipeline.run(asked, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    return before, after, inputs


def _operators(program: Program) -> list[str]:
    return [
        format_target(node) for region in program.regions for node in region.graph.nodes if node.op == "call_function"
    ]


@pytest.mark.moderate
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("storage", STORAGES)
def test_codes_are_read_as_they_are(storage: str, pieces: int) -> None:
    """Breaks if a storage is not known by what decodes it, is taken for another, or a number changes."""
    before, after, inputs = _traced(storage, pieces=pieces)
    (node,) = (n for r in after.regions for n in r.graph.nodes if format_target(n).startswith("autopar.attention"))
    assert node.kwargs["storage"] == storage
    assert _operators(before).count("aten.mul.Tensor") == 2
    assert {"aten.mul.Tensor", "aten.cat.default", "aten.cat", "aten.sub.Tensor"}.isdisjoint(_operators(after))
    (wanted, _), (found, _) = (interpret.run(program, {}, inputs) for program in (before, after))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.moderate
@pytest.mark.parametrize(
    "said",
    [
        {"queries": 17},
        {"twice": True},
        {"other": "fp8"},
        {"hardware": "cpu"},
        {"torn": True},
    ],
    ids=["many queries", "numbers are read elsewhere", "values are stored otherwise", "a CPU", "two codes"],
)
def test_what_stays(said: dict[str, Any]) -> None:
    """Breaks if numbers are decoded twice, a prompt loses its kernel, or a CPU's program hides what it holds."""
    before, after, _ = _traced("int4" if said.get("torn") else "int8", **said)
    assert _operators(before) == _operators(after)


@pytest.mark.moderate
@pytest.mark.parametrize("storage", STORAGES)
def test_codes_count_as_codes(storage: str) -> None:
    """Breaks if the price of a token is that of the numbers, not of the codes and scales that are read once."""
    _, after, inputs = _traced(storage)
    (node,) = (n for r in after.regions for n in r.graph.nodes if format_target(n).startswith("autopar.attention"))
    call = op_call(node)
    rule = rule_for(call)
    whole = NodeStrategy((), tuple(() for _ in call.operands), tuple(() for _ in call.results))
    work = local_work(call, rule, whole, ())(rule.flops)
    read = sum(x.numel() * x.element_size() for name, x in inputs.items() if name != "at")
    written = 2 * 4 * SIZE * 8 + 2 * 4 * 8
    assert work.moved_bytes == read + written
    assert rule.flops == 2 * 2 * 4 * LENGTH * 2 * SIZE
    assert work.few_rows == 2
