"""Caches that go from one mesh to another: messages against DTensor's own cuts, both plans beside the eager model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

PIPELINE = {"pp": "pipeline(1f1b)", "dp": "zero3"}
PIECES = {"cp": "split_kv", "tp": "tensor"}


@cache
def plan(mesh: str, strategy: str, batch: int = 4, new_tokens: int = 8, width: int = 8) -> autopar.GenerationPlan:
    """Of prompts of 8 tokens, with a Llama of four layers and keys of so many numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=width, max_position_embeddings=64,
    )  # fmt: skip
    named: Any = {"pipeline": PIPELINE, "pieces": PIECES}.get(strategy, strategy)
    wanted = autopar.Generation(batch=batch, prompt=8, new_tokens=new_tokens)
    return autopar.plan_generation(LlamaForCausalLM(config), autopar.Mesh.parse(mesh), wanted, strategy=named)


def to_pieces() -> autopar.HandOver:
    return autopar.hand_over(plan("tp=2", "tensor", 1, 4), plan("cp=2,tp=2", "pieces", 4, 16), row=3)


def from_stages() -> autopar.HandOver:
    return autopar.hand_over(plan("pp=2,dp=2", "pipeline", 2), plan("tp=4", "tensor"), row=1)


@pytest.mark.moderate
@pytest.mark.parametrize("made", [to_pieces, from_stages])
def test_both_plans_and_what_goes_between_are_proven(made: Any) -> None:
    """Breaks if a program reads what the other one left otherwise than it lies, or an element comes not, or twice."""
    found = made().verify()
    assert found.ok, found
    said = [each.name for each in found.comparisons]
    assert any("logits of token" in each for each in said) and any("handed over" in each for each in said)


@pytest.mark.moderate
def test_every_rank_gets_what_dtensor_would_give_it() -> None:
    """Breaks if a box lies elsewhere in a local tensor, or is not of the rank that it is said to be of."""
    moved = to_pieces()
    source, target = (1, 4, 11, 8), (4, 4, 24, 8)  # rows, heads, positions, numbers of a head
    whole, wanted = torch.randn(source), torch.full(target, torch.nan)
    wanted[3, :, :8] = whole[0, :, :8]

    def cut(x: torch.Tensor, sizes: tuple[int, ...], at: list[int], placements: list[Any]) -> torch.Tensor:
        shape, offset = _compute_local_shape_and_global_offset(x.shape, sizes, at, placements)
        return x[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]

    held = [cut(whole, (2,), [rank], [Shard(1)]) for rank in range(2)]
    for rank in range(4):
        expected = cut(wanted, (2, 2), [rank // 2, rank % 2], [Shard(2), Shard(1)])
        local = torch.full_like(expected, torch.nan)
        for message in moved.of_receiver(rank):
            if message.cache == "past_key_values.0":
                local[message.to.slices()] = held[message.source][message.at.slices()]
        assert torch.equal(local.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.moderate
def test_bytes_are_those_of_the_prompt(tmp_path: Path) -> None:
    """Breaks if positions that nothing has filled are moved, or one rank sends what several hold."""
    moved = from_stages()
    of_keys = 4 * 2 * 2 * 4 * 8 * 8 * 4  # layers, keys and values, rows, heads, positions, numbers, bytes
    assert sum(m.num_bytes for m in moved.messages if len(m.given.sizes) == 4) == of_keys
    assert sum(moved.sent.values()) == sum(moved.received.values()) == moved.num_bytes
    of_layer = {
        each: {m.source for m in moved.messages if m.cache == f"past_key_values.{3 * each}"} for each in range(4)
    }
    assert of_layer == {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}  # two layers a stage
    assert max(moved.sent.values()) - min(moved.sent.values()) <= 64
    assert moved.seconds > 0 and moved.time_to_first_token_s > moved.prefill.time_to_first_token_s
    moved.save(tmp_path / "moved.json")
    data = json.loads((tmp_path / "moved.json").read_text())
    assert data["bytes"] == sum(message[-1] for message in data["messages"]) == moved.num_bytes
    assert "rank 0 -> rank" in str(moved)


@pytest.mark.moderate
def test_one_of_the_ranks_that_hold_the_same_sends() -> None:
    """Breaks if a rank that holds all of it sends it all, while another that does sends nothing."""
    moved = autopar.hand_over(plan("dp=2", "ddp", 1, 4), plan("tp=4", "tensor"))
    sent = moved.sent
    assert abs(sent[0] - sent[1]) <= max(message.num_bytes for message in moved.messages)


@pytest.mark.moderate
def test_what_is_not_moved_fails_the_proof() -> None:
    """Breaks if a message that is lost, doubled, or of other rows passes for what a rank needs."""
    moved = to_pieces()
    first, *others = moved.messages
    for messages in (
        others,
        (first, first, *others),
        (first._replace(at=first.at._replace(offsets=(0, 1, 0, 0))), *others),
    ):
        fields = {name: getattr(moved, name) for name in moved.__slots__}
        wrong = autopar.HandOver(**{**fields, "messages": tuple(messages)})
        assert not all(each.ok for each in wrong._moved())


@pytest.mark.moderate
def test_plans_that_do_not_fit_are_told() -> None:
    """Breaks if rows or positions are lost, or caches of another model are taken."""
    with pytest.raises(autopar.AutoparError, match="rows 3 to 4, of 4"):
        autopar.hand_over(plan("pp=2,dp=2", "pipeline", 2), plan("tp=4", "tensor"), row=3)
    with pytest.raises(autopar.AutoparError, match="caches do not fit: past_key_values.0"):
        autopar.hand_over(plan("tp=2", "tensor", 1, 4), plan("tp=2", "tensor", 4, 8, 16))
    with pytest.raises(autopar.AutoparError, match="positive number"):
        autopar.hand_over(plan("tp=2", "tensor", 1, 4), plan("tp=4", "tensor"), bandwidth_bytes_per_s=0.0)
