"""A cache in pieces along its length: what is written where, what attention to pieces gives, plans of `generate()`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import operators as ops
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.ir.sharding import Shard
from autopar.machine import profiles
from autopar.machine.hardware import Hardware
from autopar.machine.links import Link
from autopar.planner.generation import pieces_pinned

WANTED = autopar.Generation(batch=2, prompt=5, new_tokens=4)
TENSOR = {"cp": "split_kv", "tp": "tensor"}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _merged(pieces: list[Tensor], sinks: Tensor | None = None) -> Tensor:
    """As ranks do it: each has some of the pieces."""
    top = torch.stack([ops.pieces_top(each) for each in pieces]).amax(0)
    total = sum(ops.pieces_total(each, top) for each in pieces)
    assert isinstance(total, Tensor)
    return ops.pieces_merged(total, top, sinks)


@pytest.mark.parametrize("new", [[3], [0], [7], [6, 7], [2, 3, 4, 5], [7, 0, 3], list(range(8))])
def test_each_piece_is_written_what_belongs_to_it(new: list[int]) -> None:
    """Breaks if a token is written by the wrong rank, or by two, or if one that belongs to another is put at an end."""
    x, source, at = _random(2, 3, 8, 4), _random(2, 3, len(new), 4, seed=1), torch.tensor(new)
    for count in (1, 2, 4, 8):
        size = 8 // count
        parts = [ops.write_piece(x.narrow(2, i * size, size), 2, at, source, start=i * size) for i in range(count)]
        assert torch.equal(torch.cat(parts, 2), x.index_copy(2, at, source))


@pytest.mark.parametrize(
    "options",
    [{}, {"right": 0}, {"left": 2, "right": 1}, {"right": 0, "prefix": 5}, {"softcap": 3.0}],
    ids=["all", "causal", "window", "prefix", "soft-cap"],
)
@pytest.mark.parametrize("masks", ["none", "padding", "bias", "mask", "documents", "sinks"])
def test_pieces_merge_to_attention(options: dict[str, Any], masks: str) -> None:
    """Breaks if a piece does not know where its keys lie, reads the mask of another, or a sink counts once a piece; the
    padding hides a whole piece from everyone, and all keys from one row.
    """
    q, k, v = _random(2, 4, 5, 8), _random(2, 2, 12, 8, seed=1), _random(2, 2, 12, 6, seed=2)
    padding, sinks = torch.arange(12) > torch.tensor([[4], [11]]), _random(4, seed=3)
    bias = {"bias": _random(1, 4, 5, 12, seed=4), "mask": _random(2, 1, 5, 12, seed=5) > 0}.get(masks)
    keys = padding if masks in ("padding", "sinks") else None
    said = {"scale": 0.4, **options}
    if masks == "documents":
        said |= {"documents": torch.arange(5).expand(2, 5) // 2, "key_documents": torch.arange(12).expand(2, 12) // 3}
    sinks_given = sinks if masks == "sinks" else None
    want = ops.attention(q, k, v, bias, keys, sinks_given, None, **said)[0]
    for ranks, count in ((1, 3), (3, 1), (2, 2), (6, 2)):
        parts, size = [], 12 // ranks
        for rank in range(ranks):
            own = slice(rank * size, (rank + 1) * size)
            local = dict(said)
            if masks == "documents":
                local["key_documents"] = said["key_documents"][:, own]
            part = ops.attention_pieces(
                q, k[:, :, own], v[:, :, own], None if bias is None else bias[..., own],
                None if keys is None else keys[:, own], count=count, start=rank * count, **local,
            )  # fmt: skip
            parts.append(part)
        torch.testing.assert_close(_merged(parts, sinks_given), want, rtol=1e-12, atol=1e-13)


def test_large_scores_of_any_piece_do_not_overflow() -> None:
    """Breaks if pieces are weighed without the largest score, or each by its own: in float32 exp(300) is infinite."""
    q = torch.full((1, 1, 1, 4), 10.0)
    k, v = torch.cat([torch.full((1, 1, 4, 4), x) for x in (7.0, 30.0, -30.0)], 2), torch.randn(1, 1, 12, 4)
    want, _ = ops.attention(q, k, v, scale=1.0)
    pieces = [ops.attention_pieces(q, *(x.narrow(2, 4 * i, 4) for x in (k, v)), scale=1.0, count=1) for i in range(3)]
    for order in itertools.permutations(pieces):
        torch.testing.assert_close(_merged(list(order)), want)
    hidden = torch.zeros(1, 4, dtype=torch.bool)
    nothing = ops.attention_pieces(q, k[:, :, :4], v[:, :, :4], None, hidden, scale=1.0, count=2)
    assert torch.equal(_merged([nothing]), torch.zeros(1, 1, 1, 4))
    sinks = torch.tensor([-2000.0])  # nobody may see anything of what is hidden, however small the sink
    assert torch.equal(_merged([nothing], sinks), torch.zeros(1, 1, 1, 4))


@lru_cache
def _model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    if name == "mamba":
        own = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 64, "time_step_rank": 4}
        made: Any = transformers.MambaForCausalLM(transformers.MambaConfig(**own, use_mambapy=False))
    elif name == "mistral":
        made = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=3))
    elif name == "gpt_oss":
        own = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 3}
        made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **own))
    elif name == "deepseek_v3":  # keeps one latent vector a position, of which heads' keys and values are made
        own = {
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
            "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
        }  # fmt: skip
        made = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**sizes, **own}))
    elif name == "t5":
        own = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        made = transformers.T5ForConditionalGeneration(transformers.T5Config(**own, decoder_start_token_id=0))
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return made.double().eval()


def _planned(name: str, sizes: dict[str, int], strategy: Any, wanted: autopar.Generation = WANTED) -> Any:
    return autopar.plan_generation(_model(name), autopar.Mesh(sizes), wanted, strategy=strategy)


@pytest.mark.moderate
def test_each_rank_keeps_its_piece() -> None:
    """Breaks if a cache lies whole, if phases leave it otherwise than each other, or a rank keeps a byte more: keys and
    values [2, 2, 8, 8] of two layers in float64, a half of each, and two counts.
    """
    plan = _planned("llama", {"cp": 2}, "split_kv")
    assert plan.cache_bytes == 2 * 2 * (2 * 2 * 8 * 8) * 8 // 2 + 2 * 8
    for phase in plan:
        lie = {each.name: each.sharding for each in phase.interface.inputs if each.name in phase.program.states}
        assert [lie[f"past_key_values.{i}"] for i in (0, 1, 3, 4)] == [(Shard(2),)] * 4
        assert "ops.cache_write" in phase.source and 'start=comm.index("cp") * 4' in phase.source
    assert plan.verify().ok


@pytest.mark.moderate
def test_what_an_encoder_gave_lies_in_pieces_too() -> None:
    """Breaks if a cache that nothing is written into, which a slice of the whole would serve as well, lies whole; or if
    one of a length that does not divide is refused.
    """
    for prompt, pieces in ((6, True), (5, False)):
        wanted = autopar.Generation(batch=2, prompt=prompt, new_tokens=4)
        plan = _planned("t5", {"cp": 2}, "split_kv", wanted)
        for phase in plan:
            entries = [each for each in phase.interface.inputs if each.name in phase.program.states]
            across = [each for each in entries if len(each.shape) == 4 and each.shape[2] == prompt]
            assert len(across) == (4 if phase is plan.decode else 0) or phase is plan.prefill
            assert all((each.sharding == (Shard(2),)) == pieces for each in across)


@pytest.mark.moderate
def test_one_message_where_that_is_faster() -> None:
    """Breaks if latencies are left out: one token takes a gather a layer, not a maximum and a sum."""
    plan = _planned("llama", {"cp": 2}, "split_kv").decode
    rows = [row for row in plan.collectives if row.axis == "cp" and "layers" in row.where]
    assert [(row.kind, row.times) for row in rows] == [("all_gather", 2)]


@lru_cache
def _free_links() -> Hardware:
    """Where messages and launches cost nothing, so that whatever is split saves time."""
    own = profiles.load("h100")

    def free(link: Link) -> Link:
        return replace(Link(1e18, 1e-15), kind=link.kind)

    return replace(
        own, node=free(own.node), network=free(own.network), collective_launch_s=0.0, launch_overhead_s=1e-12
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "padded"), [("llama", True), ("mistral", False), ("gpt_oss", False)])
def test_tokens_of_a_prompt_are_split_where_that_pays(name: str, padded: bool) -> None:
    """Breaks if each rank of a cache's length multiplies every token of a prompt, or tokens are not those of the whole:
    their places, what they see, whose they are in the cache.
    """
    wanted = autopar.Generation(batch=1, prompt=8, new_tokens=5, padded=padded)
    mesh = autopar.Mesh({"cp": 2}, hardware=_free_links())
    plan = autopar.plan_generation(_model(name), mesh, wanted, strategy="split_kv")
    assert any("ops.linear(" in line and "[1, 8/cp, 32]" in line for line in plan.prefill.source.splitlines())
    assert plan.verify().ok


@pytest.mark.sampled(2)
@pytest.mark.moderate
@pytest.mark.parametrize(("prompt", "length"), [(5, 8), (6, 12), (9, 12)])
def test_a_length_is_rounded_up_to_pieces(prompt: int, length: int) -> None:
    """Breaks if a length that does not divide is refused, or a rank has more positions than another."""
    wanted = autopar.Generation(batch=1, prompt=prompt, new_tokens=4)
    plan = _planned("llama", {"cp": 4}, "split_kv", wanted)
    shapes = {each.name: each.shape for each in plan.decode.interface.inputs}
    assert shapes["past_key_values.0"] == (1, 2, length, 8)
    assert plan.verify(tokens=2).ok


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["split_kv", "split_kv, tensor", "ring"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "t5", "deepseek_v3"])
def test_teacher_forced_logits_are_those_of_the_whole_sequence(name: str, strategy: str) -> None:
    """A maximum of one rank's own, a token that no rank or two write, a piece that takes itself for the first, sinks
    that count once a rank: other logits than those of the model without a cache. What splits the sequence in training
    splits the cache.
    """
    asked: Any = TENSOR if "," in strategy else strategy
    wanted = autopar.Generation(batch=2, prompt=5, new_tokens=4, padded=name == "llama")
    plan = _planned(name, {"cp": 2, "tp": 2} if "," in strategy else {"cp": 2}, asked, wanted)
    proof = plan.verify()
    assert proof.ok, str(proof)[-2000:]
    assert max(each.error for each in proof.comparisons) < 1e-9


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "matrices", "mesh"),
    [
        ("llama", "mlp.", {"cp": 2}), ("gpt_oss", "_proj", {"cp": 2}), ("gpt_oss", "_proj", {"cp": 2, "tp": 2}),
        ("deepseek_v3", "experts.", {"cp": 2, "tp": 2}),
    ],
    ids=["llama", "gpt_oss", "gpt_oss-tp", "deepseek_v3-tp"],
)  # fmt: skip
def test_ranks_of_a_cache_split_products_too(name: str, matrices: str, mesh: dict[str, int]) -> None:
    """Breaks if under `helix` a rank keeps the weights behind attention whole, or a cache whole; or if what two ranks
    each have of a product, or of an expert's width, is not summed once.
    """
    strategy = {"cp": "helix", "tp": "tensor"} if "tp" in mesh else "helix"
    wanted = autopar.Generation(batch=2, prompt=5, new_tokens=4)
    hardware = _free_links()
    plan = autopar.plan_generation(_model(name), autopar.Mesh(mesh, hardware=hardware), wanted, strategy=strategy)
    for phase in plan:
        states = [each for each in phase.interface.inputs if each.name in phase.program.states and len(each.shape) > 2]
        assert states and all(each.sharding[0] == Shard(2) for each in states)
        weights = [each for each in phase.interface.parameters if len(each.shape) >= 2 and ".layers." in each.name]
        own = [
            each for each in weights if matrices in each.name and "bias" not in each.name and "attn" not in each.name
        ]
        assert own and all(isinstance(each.sharding[0], Shard) for each in own)
    assert any(row.kind == "all_reduce" and row.axis == "cp" for row in plan.decode.collectives)
    proof = plan.verify()
    assert proof.ok, str(proof)[-2000:]
    assert max(each.error for each in proof.comparisons) < 1e-9


@pytest.mark.moderate
def test_what_has_no_cache_is_told() -> None:
    """Breaks if a plan for training, or of a model without keys and values, splits nothing and says nothing."""
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}
    with pytest.raises(AutoparError, match=r"splits the cache of generate\(\), and this program has none.*ring"):
        autopar.plan(_model("llama"), autopar.Mesh({"cp": 2}), example_inputs=batch, strategy="split_kv")
    for strategy in ("split_kv", "helix"):
        with pytest.raises(AutoparError, match=f"{strategy} on cp=2 finds no keys and values to split"):
            _planned("mamba", {"cp": 2}, strategy)


@pytest.mark.slow
def test_auto_splits_a_long_cache_of_one_key_head() -> None:
    """Breaks if `auto` does not try it, if the phase that comes second knows nothing of pieces, or if merging is priced
    higher than reading half a million positions: one key head, of which `tensor` reads all on every rank.
    """
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
    }  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    wanted = autopar.Generation(batch=1, prompt=8, new_tokens=500_001)
    plan = autopar.plan_generation(model, autopar.Mesh({"cp": 2}), wanted)
    assert plan.cache_bytes == 2 * 2 * 500_008 * 64 * 4 // 2 + 2 * 8
    for phase in plan:
        assert phase.spread is not None and phase.spread.pieces == 2


@pytest.mark.moderate
def test_later_phases_know_how_a_cache_was_left() -> None:
    """Breaks if a program knows nothing of the pieces in which it gets a cache or takes another dim for its length."""
    inputs = {"past_key_values": caches.new_cache(_model("llama"), 2, 8, torch.device("cpu"))}
    mesh = autopar.Mesh({"cp": 2, "tp": 4})

    def pieces(*pins: Any) -> int:
        return pieces_pinned(inputs, pins, mesh)

    keys, values, count = (f"past_key_values.{number}" for number in range(3))
    assert pieces() == pieces(autopar.pin(keys, cp=Shard(1)), autopar.pin("weight", cp=Shard(2))) == 1
    assert pieces(autopar.pin(keys, cp=Shard(2)), autopar.pin(values, cp=Shard(2), tp=Shard(1))) == 2
    assert pieces(autopar.pin(values, cp=Shard(2), tp=Shard(2)), autopar.pin(count, cp=Shard(0))) == 8
