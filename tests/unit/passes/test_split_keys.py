"""Attention over a cache becomes attention to pieces of it, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import pipeline
from autopar.api import interpret
from autopar.ir.nodes import format_target
from autopar.ir.program import Program
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.passes.placement.problem import build_problem
from autopar.strategies.context import SPLIT_KV
from autopar.strategies.request import Attempt

LENGTH = 8


class _Attention(nn.Module):
    """Writes into a cache and reads of it what `read` says: all, or the first positions."""

    def __init__(self, read: int | None, causal: bool) -> None:
        super().__init__()
        self.read, self.causal = read, causal
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> dict[str, Tensor]:
        new = self.linear(x).unflatten(-1, (4, 4)).transpose(1, 2)
        keys, values = keys.index_copy(2, at, new), values.index_copy(2, at, new.tanh())
        k, v = (keys, values) if self.read is None else (keys[:, :, : self.read], values[:, :, : self.read])
        out = F.scaled_dot_product_attention(new, k, v, is_causal=self.causal)
        return {"out": out, "keys": keys, "values": values}


def _traced(
    model: nn.Module, tokens: int, pieces: int, training: bool = False, more: tuple[pipeline.Pass, ...] = ()
) -> tuple[Program, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = {"x": random(2, tokens, 16), "keys": random(2, 4, LENGTH, 4), "values": random(2, 4, LENGTH, 4)}
    inputs["at"] = torch.arange(tokens) + (LENGTH - tokens)
    asked = Attempt(model, inputs, Mesh({"cp": pieces}), (SPLIT_KV,), training=training)
    prepared = [step for step in pipeline.RECOMPUTE if more or step.name != "fuse_writes"]
    program, _ = pipeline.run(asked, (*pipeline.TRACE, *prepared, *more))
    return program, inputs


def _operators(program: Program) -> list[str]:
    names = [format_target(node) for region in program.regions for node in region.graph.nodes]
    return [name for name in names if "attention" in name or "piece" in name or "index_copy" in name]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("read", "causal", "tokens", "split"),
    [
        (None, False, 1, True),
        (None, True, 8, True),  # every query sees what is before it
        (6, True, 6, True),  # the first positions, and later ones are hidden from all: as good as the whole cache
        (4, True, 6, False),  # queries 4 and 5 would see keys 4 and 5, if these were there
        (4, False, 6, False),
    ],
)
def test_what_is_read_of_a_cache(read: int | None, causal: bool, tokens: int, split: bool) -> None:
    """Breaks if attention to the first positions of a cache is taken for attention to all of it where that is another
    thing, or is left alone where it is the same.
    """
    torch.manual_seed(0)
    model: Any = _Attention(read, causal).double()
    program, inputs = _traced(model, tokens, 2)
    names = _operators(program)
    wanted = ["autopar.attention_pieces", "autopar.pieces_top", "autopar.pieces_total", "autopar.pieces_merged"]
    writes = ["autopar.write_piece" if split else "aten.index_copy"] * 2
    assert names == [*writes, *(wanted if split else ["autopar.attention"])]
    found, _ = interpret.run(program, dict(model.state_dict()), inputs)
    with torch.no_grad():
        want = model(**inputs)
    for name, value in want.items():
        torch.testing.assert_close(found[program.output_names.index(name)], value, rtol=1e-12, atol=1e-12)


@pytest.mark.moderate
def test_a_cache_may_only_lie_in_pieces() -> None:
    """Breaks if a cache may lie whole, of which a slice would serve attention as well: it would not be smaller."""
    program, _ = _traced(_Attention(None, False).double(), 1, 2, more=pipeline.ANNOTATE)
    built = build_problem(program, (SPLIT_KV,), (), None)
    for name in ("keys", "values"):
        _, layouts = built.classes[built.value_classes.of["program", name, 0]]
        assert layouts == [(Shard(2),)]


@pytest.mark.moderate
def test_what_is_left_alone() -> None:
    """Breaks if pieces that do not divide a cache are cut, or a program with a backward is changed."""
    model = _Attention(None, False).double()
    assert _operators(_traced(model, 1, 3)[0])[0] == "aten.index_copy"
    assert "autopar.attention_pieces" not in _operators(_traced(model, 1, 2, training=True)[0])
