"""What a token does to a cache is one operator: where, with the same numbers, and where it is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import pipeline
from autopar.api import interpret
from autopar.base.codes import STORAGES
from autopar.cost.local_work import local_work
from autopar.ir.graphs import caches_of, op_call
from autopar.ir.nodes import format_target
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy
from autopar.machine.mesh import Mesh
from autopar.operators.rules.lookup import rule_for
from autopar.passes.placement.pieces import factor_of_pieces
from autopar.strategies import AUTO
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import SPLIT_KV
from autopar.strategies.request import Attempt
from tests.unit.tiers import mostly_slow

LENGTH, SIZE = 12, 8


class _Token(nn.Module):
    """Rotates and writes. other: a way in which it is not what the operator does. way: how rows are rotated."""

    def __init__(self, storage: str, other: str = "", way: str = "halves") -> None:
        super().__init__()
        self.storage, self.other, self.way = storage, other, way

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, at: Tensor, **cache: Tensor) -> Any:
        fresh = k = self._rotated(k, cos, sin)
        q = self._rotated(q, *((sin, cos) if self.other == "other tables" else (cos, sin)))
        if self.other == "positions behind queries":
            at = at + (q.sum() * 0).long()
        q = q * 2 if self.other == "queries are scaled first" else q
        at = at + 1 if self.other == "queries are scaled first" else at
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
        if self.way == "nothing":
            return x
        heads, wide = 2 if self.way == "positions first" else 1, cos.shape[-1]
        x = x.transpose(1, 2) if heads == 2 else x.half().to(x.dtype) if self.way == "rounded before" else x
        x, rest = x[..., :wide], x[..., : SIZE - wide] if self.other == "another rest" else x[..., wide:]
        y = WAYS[self.way](x, cos.unsqueeze(heads), sin.unsqueeze(heads))
        y = torch.cat([y, rest], -1) if rest.shape[-1] or self.other == "an empty rest" else y
        return y.transpose(1, 2) if heads == 2 else y


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def _repeated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _neighbours(x, *(table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in (cos, sin)))


def _halves_of_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), half = x.chunk(2, -1), x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "halves": _halves,
    "neighbours": _neighbours,
    "repeated": _repeated,
    "half tables": _halves_of_tables,
    "positions first": _halves,
    "rounded before": _halves,
    "tables of float32": lambda x, cos, sin: _halves(x, cos.float(), sin.float()).to(x.dtype),
    "in float32": lambda x, cos, sin: _neighbours(x.float(), cos, sin).to(x.dtype),
    "backwards": lambda x, cos, sin: x * cos + torch.cat([x[..., SIZE // 2 :], -x[..., : SIZE // 2]], -1) * sin,
    "another type": lambda x, cos, sin: (x * cos).float().add((_halves(x, cos * 0, sin)).float()).to(x.dtype),
}
SAID: dict[str, dict[str, bool]] = {
    "halves": {}, "neighbours": {"interleaved": True}, "repeated": {"interleaved": True, "half_tables": True},
    "half tables": {"half_tables": True}, "positions first": {}, "rounded before": {},
    "tables of float32": {"in_float32": True}, "in float32": {"interleaved": True, "in_float32": True},
}  # fmt: skip


def _traced(
    storage: str, new: int = 1, sizes: dict[str, int] | None = None, hardware: str = "h100", other: str = "",
    wide: int = SIZE, way: str = "halves", dtype: torch.dtype = torch.float64, strategy: AxisStrategy = AUTO,
) -> tuple[Program, Program, dict[str, Tensor]]:  # fmt: skip
    """Before the pass, behind it, and what went in. wide: of a head what is rotated."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    inputs = {"q": random(2, 4, new, SIZE), "k": random(2, 2, new, SIZE), "v": random(2, 2, new, SIZE)}
    inputs |= {"cos": random(2, new, wide), "sin": random(2, new, wide), "at": torch.arange(new) + 3}
    for name in ("keys", "values"):
        numbers = random(2, 2, 24, SIZE)
        inputs[name] = numbers
        if storage:
            inputs[name], inputs[f"{name}_scales"] = STORAGES[storage].encode(numbers)
    mesh = Mesh(sizes or {"tp": 2}, hardware=hardware)
    asked = Attempt(_Token(storage, other, way), inputs, mesh, (strategy,) * len(mesh.sizes), training=False)
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
    _assert_same_numbers(before, after, inputs)


@pytest.mark.moderate
@pytest.mark.parametrize("other", ["an empty rest", "queries are scaled first"])
def test_what_stands_between(other: str) -> None:
    """Breaks if keys are not known for rotated that have nothing behind what is rotated, or where queries are read
    before positions are counted.
    """
    before, after, inputs = _traced("", other=other)
    names = _operators(after)
    assert "autopar.rotary_write" in names and "aten.index_copy" not in names
    _assert_same_numbers(before, after, inputs)


def _assert_same_numbers(before: Program, after: Program, inputs: dict[str, Tensor]) -> None:
    (wanted, _), (found, _) = (interpret.run(program, {}, inputs) for program in (before, after))
    for name, a, b in zip(after.output_names, wanted, found, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.moderate
@pytest.mark.parametrize("wide", mostly_slow([SIZE, 4], SIZE))
@pytest.mark.parametrize("way", [way for way in SAID if way != "halves"])
def test_ways_to_rotate(way: str, wide: int) -> None:
    """Breaks if neighbours are taken for halves, a table for one of twice its width, or what is rounded once is rounded
    several times.
    """
    dtype = torch.float32 if way == "rounded before" else torch.bfloat16
    before, after, inputs = _traced("", way=way, wide=wide, dtype=dtype)
    names = [name for name in _operators(after) if "autopar" in name]
    assert names == ["autopar.rotary_write", "autopar.attention"]
    (node,) = (n for r in after.regions for n in r.graph.nodes if format_target(n) == "autopar.rotary_write")
    assert dict(node.kwargs) == SAID[way]
    _assert_same_numbers(before, after, inputs)


@pytest.mark.moderate
@pytest.mark.parametrize(
    "said",
    [
        {"way": "nothing"},
        {"way": "nothing", "storage": "int4", "new": 3},
        {"way": "backwards"},
        {"way": "another type", "dtype": torch.bfloat16},
        {"other": "other tables"},
        {"other": "other tables", "storage": "int8"},
        {"sizes": {"tp": 4}},
        {"other": "keys are read before"},
        {"other": "another rest", "wide": 4},
        {"other": "positions behind queries"},
    ],
    ids=str,
)
def test_what_is_written_as_it_is(said: dict[str, Any]) -> None:
    """Breaks if what is rotated in another way, or read elsewhere, is rotated by the operator, queries cannot be split
    by heads for the sake of keys that are too few, or what is not rotated is written by two.
    """
    before, after, inputs = _traced(**{"storage": "", **said})
    names = _operators(after)
    assert names.count("autopar.cache_write") == 1
    assert not {"autopar.rotary_write", "aten.index_copy"} & set(names)
    _assert_same_numbers(before, after, inputs)


@pytest.mark.moderate
@pytest.mark.parametrize("way", ["halves", "nothing"])
def test_pieces_of_a_cache(way: str) -> None:
    """Breaks if a cache in pieces is written by two operators, as if it were whole, or positions are left out."""
    before, after, inputs = _traced("", way=way, sizes={"cp": 3}, strategy=SPLIT_KV)
    assert _operators(before).count("autopar.write_piece") == 2 and "autopar.write_piece" not in _operators(after)
    (node,) = (n for r in after.regions for n in r.graph.nodes if caches_of(n))
    assert (
        format_target(node) == "autopar.cache_write" and node.kwargs == {"start": 0} and factor_of_pieces(node) == "t"
    )
    _assert_same_numbers(before, after, inputs)


@pytest.mark.moderate
@pytest.mark.parametrize(
    "said",
    [
        {"new": 17},
        {"hardware": "cpu"},
        {"other": "other positions"},
    ],
    ids=str,
)
@pytest.mark.parametrize("storage", ["", "int8"])
def test_what_stays(storage: str, said: dict[str, Any]) -> None:
    """Breaks if a prompt's cache is written so, or values at other positions than keys."""
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
