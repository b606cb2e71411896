"""What a token does to a cache is one operator: where, with the same numbers, and where it is left alone."""

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
from autopar.strategies import AUTO
from autopar.strategies.request import Attempt

LENGTH, SIZE = 12, 8


class _Token(nn.Module):
    """Rotates and writes. other: a way in which it is not what the operator does."""

    def __init__(self, storage: str, other: str = "") -> None:
        super().__init__()
        self.storage, self.other = storage, other

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, at: Tensor, **cache: Tensor) -> Any:
        fresh = k = self._rotated(k, cos, sin)
        q = self._rotated(q, *((sin, cos) if self.other == "other tables" else (cos, sin)))
        where = {"keys": at, "values": at + 1 - 1 if self.other == "other positions" else at}
        for name, new in (("keys", k), ("values", v)):
            parts = {name: new}
            if self.storage:
                own = (name, f"{name}_scales")
                parts = dict(zip(own, STORAGES[self.storage].encode(new), strict=True))
            for part, codes in parts.items():
                cache[part] = cache[part].index_copy(2, where[name], codes)
        k, v = cache["keys"], cache["values"]
        if self.storage:
            k, v = (STORAGES[self.storage].decode(x, cache[f"{n}_scales"]) for n, x in (("keys", k), ("values", v)))
        found = {"out": F.scaled_dot_product_attention(q, k, v, enable_gqa=True), **cache}
        return {**found, "fresh": fresh} if self.other == "keys are read before" else found

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = cos.shape[-1]
        x, rest = x[..., :wide], x[..., : SIZE - wide] if self.other == "another rest" else x[..., wide:]
        turned = torch.cat([-x[..., wide // 2 :], x[..., : wide // 2]], -1)
        y = x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
        return torch.cat([y, rest], -1) if rest.shape[-1] else y


def _traced(
    storage: str, new: int = 1, sizes: dict[str, int] | None = None, hardware: str = "h100", other: str = "",
    wide: int = SIZE,
) -> tuple[Program, Program, dict[str, Tensor]]:  # fmt: skip
    """Before the pass, behind it, and what went in. wide: of a head what is rotated."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = {"q": random(2, 4, new, SIZE), "k": random(2, 2, new, SIZE), "v": random(2, 2, new, SIZE)}
    inputs |= {"cos": random(2, new, wide), "sin": random(2, new, wide), "at": torch.arange(new) + 3}
    for name in ("keys", "values"):
        numbers = random(2, 2, 24, SIZE)
        inputs[name] = numbers
        if storage:
            inputs[name], inputs[f"{name}_scales"] = STORAGES[storage].encode(numbers)
    mesh = Mesh(sizes or {"tp": 2}, hardware=hardware)
    asked = Attempt(_Token(storage, other), inputs, mesh, (AUTO,) * len(mesh.sizes), training=False)
    steps = (*pipeline.TRACE, *(step for step in pipeline.RECOMPUTE if step.name != "fuse_writes"))
    before, _ = pipeline.run(asked, steps)
    after, _ = pipeline.run(asked, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    return before, after, inputs


def _operators(program: Program) -> list[str]:
    nodes = [node for region in program.regions for node in region.graph.nodes if node.op == "call_function"]
    return [format_target(node) for node in nodes]


@pytest.mark.moderate
@pytest.mark.parametrize("wide", [SIZE, 4])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("storage", ["", *STORAGES])
def test_one_operator(storage: str, new: int, wide: int) -> None:
    """Breaks if keys and values are taken for each other, scales for others, what is behind the part of a head that is
    rotated is left out or rotated, too, or a number changes.
    """
    before, after, inputs = _traced(storage, new, wide=wide)
    names = _operators(after)
    assert [name for name in names if "getitem" not in name] == ["autopar.rotary_write", "autopar.attention"]
    assert _operators(before).count("aten.index_copy") == (4 if storage else 2)
    (wanted, _), (found, _) = (interpret.run(program, {}, inputs) for program in (before, after))
    for name, a, b in zip(after.output_names, wanted, found, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.moderate
@pytest.mark.parametrize(
    "said",
    [
        {"new": 17},
        {"hardware": "cpu"},
        {"sizes": {"tp": 4}},
        {"other": "other tables"},
        {"other": "other positions"},
        {"other": "keys are read before"},
        {"other": "another rest", "wide": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("storage", ["", "int8"])
def test_what_stays(storage: str, said: dict[str, Any]) -> None:
    """Breaks if a prompt's cache is written so, heads of keys cannot be split that could be repeated, or what differs
    between keys, queries and values is overlooked.
    """
    before, after, _ = _traced(storage, **said)
    assert _operators(before) == _operators(after)


@pytest.mark.moderate
@pytest.mark.parametrize("storage", ["", "int4"])
def test_caches_that_lie_where_they_are_written_are_not_read(storage: str) -> None:
    """Breaks if the price of a token has its whole cache copied where a graph writes it in place."""
    _, after, inputs = _traced(storage)
    (node,) = (n for r in after.regions for n in r.graph.nodes if format_target(n) == "autopar.rotary_write")
    call = op_call(node)
    rule = rule_for(call)
    whole = NodeStrategy((), tuple(() for _ in call.operands), tuple(() for _ in call.results))
    work = local_work(call, rule, whole, (), in_place=True)(rule.flops)
    sizes = {name: x.numel() * x.element_size() for name, x in inputs.items()}
    caches = [name for name in inputs if name.startswith(("keys", "values"))]
    written = sum(sizes[name] for name in caches) / 24
    assert work.moved_bytes == sum(sizes[name] for name in inputs if name not in caches) + sizes["q"] + written
    assert local_work(call, rule, whole, ())(rule.flops).moved_bytes > sum(sizes[name] for name in caches)
