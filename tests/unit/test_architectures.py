"""Encoder-decoders, vision, two towers, fused projections, soft caps: plans of them compute what eager computes, and
`tensor` finds Megatron's layout in each.

The whole matrix is run by benchmarks/proofs/models.py; here is a slice that meets every model, strategy and mesh.
"""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.sharding import PARTIAL, REPLICATE, Shard
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.place import place
from autopar.strategies.names import resolve
from tests.unit.traced import finish, lower, trace_model

pytestmark = pytest.mark.slow

SLICE = [
    ("vit", "dp=2", "ddp"), ("vit", "tp=4", "auto"), ("vit", "dp=2,tp=2", "product"),
    ("t5", "dp=2", "ddp"), ("t5", "tp=2", "tensor"), ("t5-3b", "dp=2,tp=2", "product"),
    ("whisper", "dp=2", "ddp"), ("whisper", "dp=2,tp=4", "product"),
    ("clip", "dp=2", "ddp"), ("clip", "dp=2,tp=2", "zero3"), ("clip", "tp=2", "auto"), ("clip", "dp=2,tp=2", "product"),
    ("gemma2", "dp=2,tp=4", "product"), ("gemma2", "tp=2", "ddp"),
    ("phi3", "tp=4", "tensor"), ("phi-3-medium", "dp=2,tp=4", "product"), ("phi-3-medium", "tp=2", "auto"),
    ("qwen3-0.6b", "dp=2,tp=2", "product"),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "mesh", "strategy"), SLICE)
def test_equal_to_eager(name: str, mesh: str, strategy: str) -> None:
    """Breaks if a mask, a table of positions, a pooled token, a shared bias or a batch-wide loss is split wrongly."""
    assert lower(name, mesh, strategy).worst() < 1e-9


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_equal_with_dropout(name: str) -> None:
    """Breaks if dropout in a graph that was made functional is lost, or draws the same in encoder and decoder."""
    lowered = lower(name, "dp=2", "ddp", dropout=0.3)
    assert all(
        region.uses_dropout for region in lowered.program.regions if "layer" in region.name or "block" in region.name
    )
    assert lowered.worst() < 1e-9


@lru_cache(maxsize=8)
def collectives(name: str, mesh: str, strategy: str) -> dict[str, list[str]]:
    """function of the program -> its collectives on activations, as `kind shape`."""
    found: dict[str, list[str]] = {}
    function = ""
    for line in lower(name, mesh, strategy).source.splitlines():
        if begins := re.match(r"def (\w+)", line):
            function = begins[1]
            found[function] = []
        call = re.search(r"= comm\.(all_\w+|reduce_scatter)\(\w+, .*# \w+(\[.*\])", line)
        if call:
            found[function].append(f"{call[1]} {call[2]}")
    return found


HIDDEN = "all_reduce [8, 16, 64]"


@pytest.mark.parametrize(
    ("name", "layer", "hidden", "forward", "backward"),
    [
        ("vit", "layer", "all_reduce [8, 17, 64]", 2, 2),
        ("gemma2", "layer_1", HIDDEN, 2, 2),
        ("gemma2", "layer_2", HIDDEN, 2, 2),
        ("phi3", "layer", HIDDEN, 2, 2),
        ("phi-3-medium", "layer", HIDDEN, 2, 2),
        ("qwen3-0.6b", "layer", HIDDEN, 2, 2),
        ("whisper", "encoder_layer", HIDDEN, 2, 2),
        ("whisper", "decoder_layer", HIDDEN, 3, 4),  # the fourth: what the encoder gets back
        ("t5", "encoder_block_2", HIDDEN, 2, 2),
        ("t5", "decoder_block_2", "all_reduce [8, 8, 64]", 3, 3),
        ("clip", "encoder_layer_1", "all_reduce [8, 17, 64]", 2, 2),
        ("clip", "encoder_layer_2", HIDDEN, 2, 2),
    ],
)
def test_tensor_sums_the_hidden_state_once_a_branch(
    name: str, layer: str, hidden: str, forward: int, backward: int
) -> None:
    """Breaks if `tensor` gathers something, or sums a residual branch more than once."""
    found = collectives(name, "tp=2", "tensor")
    assert found[f"{layer}_forward"].count(hidden) == forward
    assert found[f"{layer}_backward"].count(hidden) == backward
    assert all(call.startswith("all_reduce") for calls in found.values() for call in calls)


def test_fused_projections_of_unequal_pieces() -> None:
    """Breaks if queries and fewer keys in one matrix need activations to move, or the stored parameter is not the
    user's.
    """
    lowered = lower("phi-3-medium", "tp=2", "tensor")
    qkv = lowered.program.placement.parameters["model.layers.0.self_attn.qkv_proj.weight"]
    assert (qkv.stored, qkv.gradient) == ((Shard(0),), (PARTIAL,))
    up = lowered.program.placement.parameters["model.layers.0.mlp.gate_up_proj.weight"]
    assert up.stored == (Shard(0, outer=2),)
    equal = lower("phi3", "tp=4", "tensor").program.placement
    assert equal.parameters["model.layers.0.self_attn.qkv_proj.weight"].stored == (Shard(0, outer=3),)


def test_a_loss_over_all_pairs_of_the_batch() -> None:
    """Breaks if `ddp` compares the texts of a rank with its own images alone, or moves more than one embedding."""
    found = collectives("clip", "dp=2", "ddp")
    assert found["epilogue_forward"].count("all_reduce [32, 8]") == 1
    assert not [call for function, calls in found.items() if "layer" in function for call in calls]


@pytest.mark.parametrize("name", ["gemma2", "vit", "whisper", "phi3"])
def test_layers_send_nothing_under_ddp(name: str) -> None:
    """Breaks if a mask or a class token makes a rank need other ranks' rows."""
    found = collectives(name, "dp=2", "ddp")
    assert not [call for function, calls in found.items() if "layer" in function for call in calls]
    epilogue = found["epilogue_forward"] + found["epilogue_backward"]
    assert set(epilogue) <= {"all_reduce []", "all_reduce [], f64[]"}, "the loss and its count, in one message"


def test_alternating_windows_are_two_regions() -> None:
    """Breaks if layers of one window are planned, and written, twice, or those of another take it over."""
    program = lower("gemma2", "tp=2", "ddp").program
    assert [region.name for region in program.regions] == ["prologue", "layer_1", "layer_2", "epilogue"]
    calls = [call.region for call in program.calls if call.region.startswith("layer")]
    assert calls == ["layer_1", "layer_2"] * (len(calls) // 2)
    windows = {
        name: [n.kwargs.get("left") for n in program.region(name).graph.nodes if "autopar.attention" in str(n.target)]
        for name in ("layer_1", "layer_2")
    }
    assert windows == {"layer_1": [5, 5], "layer_2": [None, None]}  # forward, backward


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["vit", "clip", "whisper"])
def test_what_does_not_divide_is_named(name: str) -> None:
    """Breaks if a batch of 6 on 4 ranks is anything but an error that names it, or 8 heads on 16 one at all."""
    loaded = catalogue.load(name, tiny=True, batch=(6, 16))
    with pytest.raises(AutoparError, match="a batch of 6 cannot split over dp=4"):
        autopar.plan(loaded.model, Mesh({"dp": 4}, hardware="cpu"), example_inputs=loaded.batch, strategy="ddp")
    planned = autopar.plan(
        loaded.model, Mesh({"tp": 16}, hardware="cpu"), example_inputs=loaded.batch, strategy="tensor"
    )
    assert planned.collectives


class Pooled(nn.Module):
    """One token of each row, by number from either end; a mask of rows; a loss over pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.fused = nn.Linear(8, 16)

    def forward(self, ids: Tensor, place: Tensor) -> dict[str, Tensor]:
        x_BSD = self.out(self.table(ids)).clone()
        rows = torch.arange(ids.shape[0], device=ids.device)
        picked_BD = x_BSD[rows, place]
        last_BD = x_BSD[rows, (ids > 3).int().argmax(-1)]
        a, b, c = self.fused(picked_BD).split([8, 4, 4], -1)
        scores_BB = torch.nn.functional.linear(torch.tanh(a), last_BD)
        weights = self.out.weight[place.abs()]
        return {"loss": scores_BB.logsumexp(1).sum() + (b * c).sum() + (weights * last_BD).sum(), "scores": scores_BB}


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "ddp"), ("dp=2,tp=2", "auto"), ("tp=2", "zero3")])
def test_rows_by_number(mesh: str, strategy: str) -> None:
    """Breaks if a place counted from the end is another one once the batch is split, or a pair of rows is lost."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "ids": torch.randint(16, (8, 6), generator=generator),
        "place": torch.tensor([0, -1, 5, -6, 2, 3, -2, 1], dtype=torch.int32),
    }
    traced = trace_model(Pooled(), batch)
    assert "aten.index.Tensor" not in {str(n.target) for r in traced.program.regions for n in r.graph.nodes}
    program = annotate(traced.program, mesh=Mesh.parse(mesh, hardware="cpu"))
    assert program.mesh is not None
    strategies = resolve(strategy, program.mesh)
    lowered = finish(traced, place(program, strategies=strategies, pins=(), memory_limit_bytes=None), strategies)
    assert lowered.worst() < 1e-9
    if strategy == "ddp":
        assert lowered.program.placement.parameters["fused.weight"].stored == (REPLICATE,)
