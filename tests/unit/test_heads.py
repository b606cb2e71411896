"""Models whose heads an axis does not divide: placed without error, and equal to eager in float64.

What breaks it: a plan that reads key heads of another rank, adds the terms of their gradients twice or not at all, or
keeps repeated key heads; a projection taken for one that may stay whole though its heads divide.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.torch_compat import tracing
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.group_heads import group_heads
from autopar.passes.heads import head_counts, may_stay_whole
from autopar.passes.place import place
from autopar.strategies.names import TENSOR, pin, resolve
from tests.unit.traced import Lowered, Traced, finish, trace_model

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.unit]
TWELVE = (("num_attention_heads", 12), ("num_key_value_heads", 6), ("hidden_size", 96))


@lru_cache(maxsize=16)
def traced(model: str, implementation: str, dropout: float, overrides: tuple[tuple[str, Any], ...]) -> Traced:
    """A tiny model with other heads."""
    settings = {"attention_dropout": dropout, **dict(overrides)} if dropout else dict(overrides)
    loaded = catalogue.load(model, tiny=True, device="cpu", dropout=dropout, overrides=settings)
    loaded.model.set_attn_implementation(implementation)  # type: ignore[operator]
    return trace_model(loaded.model, loaded.batch)


SPLIT = replace(TENSOR, required="none")
COLUMNS_AND_ROWS = {"*.q_proj.weight": 0, "*.o_proj.weight": 1}


def lower(source: Traced, mesh: str) -> Lowered:
    """Placed on a mesh whose last axis, tp, splits queries by columns and their output by rows; the rest is free."""
    program = annotate(source.program, mesh=Mesh.parse(mesh, hardware="cpu"))
    pinned = [pin(name, tp=Shard(dim)) for name, dim in COLUMNS_AND_ROWS.items()]
    strategies = resolve({axis: SPLIT if axis == "tp" else "ddp" for axis in program.mesh.axis_names}, program.mesh)
    return finish(source, place(program, strategies=strategies, pins=pinned, memory_limit_bytes=None), strategies)


def splits(program: Program) -> set[str]:
    """What the axes do to attention, or to repeated heads."""
    return {
        str(choice)
        for region in program.regions
        for name, strategy in region.strategies.items()
        if name.startswith(("attention", "repeat_heads"))
        for choice in strategy.choices
    }


def layer(program: Program) -> Region:
    return next(region for region in program.regions if region.module)


@pytest.mark.parametrize(("implementation", "dropout"), [("sdpa", 0.0), ("sdpa", 0.3), ("eager", 0.0)])
@pytest.mark.parametrize(("kv_heads", "mesh"), [(4, "tp=8"), (2, "tp=4"), (2, "dp=2,tp=4")])
def test_query_heads_are_split_where_their_key_heads_cannot_be(
    implementation: str, dropout: float, kv_heads: int, mesh: str
) -> None:
    source = traced("llama", implementation, dropout, (("num_key_value_heads", kv_heads),))
    low = lower(source, mesh)
    assert "(h r)" in splits(low.program)
    low.worst()


def test_heads_that_share_a_key_head_across_ranks() -> None:
    """12 query heads in pieces of 3, 2 to a key head: ranks read one and a half."""
    low = lower(traced("llama", "sdpa", 0.0, TWELVE), "tp=4")
    assert "(h r)" in splits(low.program) and "first=" in low.source
    low.worst()


def test_repeated_key_heads_are_never_made() -> None:
    region = layer(traced("llama", "sdpa", 0.0, (("num_key_value_heads", 2),)).program)
    attention = next(node for node in region.graph.nodes if "autopar.attention" in str(node.target))
    assert attention.args[1].meta["val"].shape[1] == attention.args[2].meta["val"].shape[1] == 2
    assert not any("expand" in str(n.target) and n.meta["val"].dim() == 5 for n in region.graph.nodes)


class Repeats(nn.Module):
    """Key heads repeated in three ways, one of which repeats something else."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, g, t, d = x.shape
        first = x[:, :, None, :, :].expand(b, g, 3, t, d).reshape(b, g * 3, t, d)
        tiled = x[:, None, :, :, :].expand(b, 3, g, t, d).reshape(b, g * 3, t, d)
        return first, x.repeat_interleave(3, dim=1), tiled


def test_only_repeated_heads_are_taken_for_such() -> None:
    x = torch.randn(2, 2, 4, 5)
    graph = torch.export.export(Repeats(), (x,), strict=False).graph
    grouped = group_heads(graph)
    names = [str(node.target) for node in grouped.nodes if node.op == "call_function"]
    assert names.count("autopar.repeat_heads.default") == 2
    found = torch.fx.Interpreter(torch.fx.GraphModule({}, grouped)).run(x)
    for have, want in zip(found, Repeats()(x), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0)
    assert group_heads(grouped) is grouped
    assert not any(tracing.is_mutable(node) for node in grouped.nodes)


@pytest.mark.parametrize(
    ("model", "overrides", "size", "whole"),
    [
        ("llama", (), 8, {"k_proj", "v_proj"}),
        ("llama", (), 4, set()),
        ("llama", TWELVE, 4, {"k_proj", "v_proj"}),
        ("llama", TWELVE, 8, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt2", (("n_head", 12), ("n_embd", 96)), 8, {"c_attn", "attn.c_proj"}),
        ("gpt2", (), 8, set()),
        ("bert", (("num_attention_heads", 12), ("hidden_size", 96)), 8, {"query", "key", "value", "attention.output"}),
    ],
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_may_stay_whole(
    model: str, implementation: str, overrides: tuple[tuple[str, Any], ...], size: int, whole: set[str]
) -> None:
    program = traced(model, implementation, 0.0, overrides).program
    region = layer(program)
    found = {
        slot.name
        for i, slot in enumerate(region.slots)
        if len(slot.type.shape) == 2 and may_stay_whole(program, ("slot", region.name, i), size)
    }
    assert len(found) == len(whole)
    assert all(any(part in name for name in found) for part in whole)
    mlp = next(i for i, slot in enumerate(region.slots) if "mlp" in slot.name or "intermediate" in slot.name)
    assert head_counts(region, mlp) == set()


TWELVE_WHOLE = (("num_attention_heads", 12), ("num_key_value_heads", 12), ("hidden_size", 96))


@pytest.mark.parametrize("strategy", ["tensor", "auto"])
@pytest.mark.parametrize(
    ("model", "overrides", "mesh"),
    [
        ("llama", (), "tp=8"),
        ("llama", (("num_key_value_heads", 2),), "tp=4"),
        ("llama", (("num_key_value_heads", 2),), "dp=2,tp=4"),
        ("llama", TWELVE_WHOLE, "tp=8"),
        ("gpt2", (("n_head", 12), ("n_embd", 96)), "tp=8"),
    ],
)
def test_named_strategies_plan_what_does_not_divide(
    model: str, overrides: tuple[tuple[str, Any], ...], mesh: str, strategy: str
) -> None:
    source = traced(model, "sdpa", 0.0, overrides)
    program = annotate(source.program, mesh=Mesh.parse(mesh, hardware="cpu"))
    assert program.mesh is not None
    strategies = resolve(strategy, program.mesh)
    low = finish(source, place(program, strategies=strategies, pins=(), memory_limit_bytes=None), strategies)
    low.worst()
    if strategy == "tensor":
        region = layer(low.program)
        _, call = next(low.program.calls_of(region.name))
        stored = dict(zip([slot.name for slot in region.slots], call.slots, strict=True))
        mlp = next(full for name, full in stored.items() if "mlp" in name and "weight" in name)
        assert isinstance(low.program.placement.parameters[mlp].stored[-1], Shard), "only attention may stay whole"
