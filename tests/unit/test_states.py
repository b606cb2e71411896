"""What layers keep between calls of forward, beside keys and values of their own: windows, recurrent states, keys of an
indexer, and of an encoder.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.huggingface.layout import Layout, Part
from autopar.base.huggingface.masks_of_generate import spelled_out
from autopar.base.huggingface.states import StateCache
from autopar.base.torch_compat import tracing
from autopar.passes.capture import capture
from autopar.passes.emptied import meta_clone
from autopar.planner.inputs import family_key, shapes_key

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


@lru_cache
def _model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "lfm2":
        layers = ["conv", "full_attention"]
        made: Any = transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(**SIZES, num_hidden_layers=2, layer_types=layers)
        )
    elif name == "falcon_h1":
        made = transformers.FalconH1ForCausalLM(
            transformers.FalconH1Config(
                **SIZES, num_hidden_layers=1, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
                mamba_d_state=8, mamba_chunk_size=4, head_dim=8,
            )
        )  # fmt: skip
    elif name == "alibi":  # makes its biases of a mask of positions
        made = transformers.FalconForCausalLM(
            transformers.FalconConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, alibi=True, multi_query=False
            )
        )  # fmt: skip
    elif name == "t5":
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0
        )
        made = transformers.T5ForConditionalGeneration(config)
    else:
        made = transformers.MambaForCausalLM(
            transformers.MambaConfig(
                hidden_size=32, state_size=4, num_hidden_layers=1, vocab_size=64, time_step_rank=4, use_mambapy=False
            )
        )
    return made.double().eval()


def _cache(name: str, length: int = 8) -> Any:
    encoded = (torch.zeros(2, 6, 32, dtype=torch.float64),) if name == "t5" else None
    return caches.new_cache(meta_clone(_model(name)), 2, length, torch.device("cpu"), encoded)


@pytest.mark.parametrize(
    ("name", "kinds", "shapes"),
    [
        ("lfm2", ["linear", "attention"], [(2, 32, 3), (2, 2, 8, 8), (2, 2, 8, 8), ()]),
        ("mamba", ["linear"], [(2, 64, 4), (2, 64, 4)]),
        ("t5", ["attention"] * 2 + ["cross"] * 2, [*[(2, 4, 8, 8), (2, 4, 8, 8), ()] * 2, *[(2, 4, 6, 8)] * 4]),
        ("falcon_h1", ["hybrid"], [(2, 48, 4), (2, 4, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8), ()]),
    ],
)
def test_a_cache_holds_what_each_layer_keeps(name: str, kinds: list[str], shapes: list[tuple[int, ...]]) -> None:
    """Breaks if a state is left out, has another order than the layers take it in, or is lost in a pytree."""
    cache = _cache(name)
    assert [layout.kind for layout in cache.layouts()] == kinds
    assert [tuple(state.shape) for state in cache.states()] == shapes
    leaves, spec = tracing.tree_flatten({"past_key_values": cache})
    again = tracing.tree_unflatten(leaves, tracing.load_treespec(tracing.dump_treespec(spec)))["past_key_values"]
    assert again.layouts() == cache.layouts()
    assert all(one is other for one, other in zip(again.states(), cache.states(), strict=True))


@pytest.mark.parametrize("name", ["lfm2", "mamba", "falcon_h1"])
def test_a_model_goes_on_from_its_states(name: str) -> None:
    """Breaks if a window is that of the first tokens, a state is not handed on, or what was handed in is written."""
    model = _model(name)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    cache, found = _cache(name), []
    argument = caches.name_of(model)
    assert argument is not None
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for first, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            given = [state.clone() for state in cache.states()]
            held = StateCache(cache.layouts(), given)
            before = copy.deepcopy(given)
            positions = torch.arange(first, end)[None].expand(2, -1)
            named = {} if name == "mamba" else {"position_ids": positions}
            out = model(ids[:, first:end], use_cache=True, **{argument: held}, **named)
            assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
            found.append(out.logits)
            cache = cache.after(out[argument].states())
            assert out[argument].layouts() == cache.layouts()
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-9, atol=1e-9)


def test_what_an_encoder_gave_is_written_once() -> None:
    """Breaks if a decoder makes the keys of its encoder anew for each token, or reads them before they are."""
    cache = _cache("t5")
    assert cache.is_updated == {0: False, 1: False}
    after = caches.advanced(cache, 1)
    assert after.is_updated == {0: True, 1: True}
    assert [int(after.get_seq_length(layer)) for layer in (0, 1)] == [1, 1]
    assert cache.layouts() != after.layouts()


@pytest.mark.parametrize("name", ["lfm2", "mamba", "falcon_h1", "t5"])
def test_beams_take_every_state_of_their_row(name: str) -> None:
    """Breaks if a beam goes on from another's window, recurrent state, keys, or what the encoder gave another."""
    cache = _cache(name)
    generator = torch.Generator().manual_seed(1)
    found = [torch.rand(x.shape, generator=generator).to(x.dtype) if x.dim() else x + 1 for x in cache.states()]
    cache = cache.after(found)
    cache.reorder_cache(torch.tensor([1, 1]))
    for before, after in zip(found, cache.states(), strict=True):
        assert torch.equal(after, before[[1, 1]] if before.dim() else before)


@pytest.mark.parametrize(("name", "can"), [("t5", True), ("lfm2", False)])
def test_what_cannot_go_back_is_told(name: str, can: bool) -> None:
    """Breaks if a recurrent state is said to go back behind drafts, or forgotten positions are counted."""
    cache = _cache(name)
    if not can:
        with pytest.raises(AutoparError, match=r"layer 0(.|\n)*prompt_lookup_num_tokens"):
            caches.check_forgets(cache)
        return
    caches.check_forgets(cache)
    cache.advance(5)
    cache.crop(-2)
    assert int(cache.get_seq_length()) == 3
    assert cache.cross_attention_cache.get_seq_length() == 0


@pytest.mark.parametrize(("mode", "length"), [("assisted_generation", 12), ("greedy_search", 9)])
def test_drafts_of_a_prompt_have_room(mode: str, length: int) -> None:
    """Breaks if the last drafts of a prompt's own tokens, more than there are tokens to make, lie behind a cache."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import GenerationMode

    lengths: list[int] = []

    def make(model: Any, rows: int, length: int, encoded: Any) -> Any:
        lengths.append(length)
        return _cache("t5", length)

    prepare = caches.generating(None, make)
    prepare(_model("t5"), GenerationConfig(prompt_lookup_num_tokens=3), {}, GenerationMode(mode), 2, 9)
    assert lengths == [length]


def test_an_indexer_writes_its_keys_one_after_the_other() -> None:
    """Breaks if they are counted with the others' or not at all, or beams take those of other rows."""
    zeros = [torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2), torch.tensor(0), torch.zeros(2, 4, 3), torch.tensor(0)]
    cache: Any = StateCache([Layout("indexed")], zeros)
    first = cache.update_indexer(torch.ones(2, 2, 3), 0)
    then = cache.update_indexer(torch.full((2, 1, 3), 2.0), 0)
    assert first[:, :, 0].tolist() == [[1, 1, 0, 0]] * 2
    assert then[:, :, 0].tolist() == [[1, 1, 2, 0]] * 2
    rows: Tensor = torch.arange(2.0)[:, None, None].expand(2, 4, 3)
    cache.layers[0].indexer_keys = rows
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[0].indexer_keys, rows[[1, 1]])
    cache.crop(-1)
    assert int(cache.layers[0].indexer_cumulative_length) == 2


def test_a_prompt_of_one_token_is_no_token_after_it() -> None:
    """Both have the same shapes: breaks if one runs the program of the other, which begins from nothing."""
    model = _model("mamba")
    first = {"input_ids": torch.zeros(2, 1, dtype=torch.long), "cache_params": _cache("mamba")}
    then = {**first, "cache_params": caches.advanced(first["cache_params"], 1)}
    assert first["cache_params"].layouts()[0].parts == (Part(4, True, False),)
    assert then["cache_params"].layouts()[0].parts == (Part(4, True, True),)
    assert shapes_key(model, first) != shapes_key(model, then)
    assert family_key(model, first) != family_key(model, then)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "prompt"),
    [("lfm2", "tensor", 1), ("mamba", "ddp", 4), ("t5", "tensor", 5), ("alibi", "tensor", 5)],
)
def test_states_are_planned_and_proven(name: str, strategy: str, prompt: int) -> None:
    """Breaks if a token is planned as if nothing went before it, a state lies otherwise than the prompt left it, or a
    parameter that no token needs (those that make keys of what an encoder gave) otherwise than the prompt has it; or if
    positions before which biases count are counted otherwise than they are.
    """
    wanted = autopar.Generation(batch=2, prompt=prompt, new_tokens=3, padded=name in ("t5", "alibi"))
    plan = autopar.plan_generation(_model(name), autopar.Mesh({"x": 2}), wanted, strategy=strategy)
    assert plan.verify().raise_on_failure().ok
    first, then = (each.interface.parameters for each in plan)
    assert [each.sharding for each in first] == [each.sharding for each in then]


def test_a_model_that_warns_of_padding_is_asked_what_it_keeps() -> None:
    """Breaks if a padding token in its configuration, which it looks for among tokens, leaves a model without caches,
    or if it warns no more.
    """
    import transformers

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, pad_token_id=0))
    assert caches.new_cache(model, 1, 4, torch.device("cpu")).states()[0].shape == (1, 2, 4, 8)
    assert not any("warn_if_padding_and_no_attention_mask" in vars(module) for module in model.modules())


def test_a_model_that_keeps_no_cache_of_this_kind_is_told() -> None:
    """Breaks if states that a model keeps in its own way are left out without a word."""
    import transformers

    config = transformers.RwkvConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=32, attention_hidden_size=16, context_length=16
    )
    with torch.device("meta"):
        model = transformers.RwkvForCausalLM(config)
    with pytest.raises(AutoparError, match=r"takes no past_key_values(.|\n)*use_cache=False"):
        caches.new_cache(model, 1, 4, torch.device("cpu"))


def test_a_decoder_reads_what_its_encoder_gave_beside_hidden_states() -> None:
    """Breaks if a model is asked what it keeps with less than its encoder gave: a mask that is shorter than the sound,
    which the decoder looks for, or as many rows as the encoder had where beams have more.
    """
    import transformers

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    }  # fmt: skip
    model = transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**sizes)).eval()
    sounds = {"input_values": torch.zeros(2, 1600), "attention_mask": torch.ones(2, 1600, dtype=torch.long)}
    encoded = model.get_encoder()(**sounds)
    assert encoded.attention_mask is not None
    made = caches.new_cache(meta_clone(model), 6, 4, torch.device("cpu"), encoded)
    length = encoded.last_hidden_state.shape[1]
    assert [tuple(x.shape) for x in made.states() if x.dim()] == [(6, 4, 4, 8)] * 2 + [(6, 4, length, 8)] * 2


def test_a_model_that_gives_no_cache_back_is_told() -> None:
    """Breaks if tokens are generated over a cache that forward writes and does not return: each sees itself."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    looks_back, both_ways = (
        transformers.BertLMHeadModel(transformers.BertConfig(**sizes, intermediate_size=16, is_decoder=decodes)).eval()
        for decodes in (True, False)
    )
    assert caches.new_cache(looks_back, 1, 4, torch.device("cpu")).states()
    with pytest.raises(AutoparError, match=r"gives no cache back(.|\n)*use_cache=False"):
        caches.new_cache(both_ways, 1, 4, torch.device("cpu"))


def test_a_model_that_takes_no_cache_of_a_fixed_length_is_told() -> None:
    """Breaks if words are of what eager does with the batch, which it takes, and not of the cache."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 16}
    config = transformers.CpmAntConfig(**sizes, vocab_size=32, prompt_types=1, prompt_length=2)
    model = transformers.CpmAntForCausalLM(config).eval()
    cache = caches.new_cache(model, 1, 8, torch.device("cpu"))
    ids = torch.randint(1, 32, (1, 4))
    with pytest.raises(AutoparError, match=r"over a cache of a fixed length(.|\n)*use_cache=False"):
        capture(model, {"input_ids": ids, "past_key_values": cache, "use_cache": True})


def _two_rotations() -> Any:
    """A model that is rotated otherwise from the seventeenth position on, and begins anew there."""
    import transformers

    torch.manual_seed(0)
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rotation = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16, **factors}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "pad_token_id": 0}
    config = transformers.Phi3Config(**SIZES, **sizes, num_hidden_layers=1, rope_parameters=rotation)
    return transformers.Phi3ForCausalLM(config).double().eval()


def test_tables_that_forward_makes_once_have_their_values() -> None:
    """Breaks if asking a model, without data, what it keeps leaves on it what forward made: a table without values."""
    plan = autopar.plan_generation(
        _two_rotations(), autopar.Mesh({"x": 2}), autopar.Generation(batch=2, prompt=6, new_tokens=3), strategy="tensor"
    )
    assert plan.verify().raise_on_failure().ok


def test_a_model_is_asked_without_a_trace() -> None:
    """Breaks if what a forward without data leaves on modules stays there, or what was there before does not."""

    class Counting(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.made, self.number = x + 1, self.number + 1
            return self.made

    model = Counting()
    model.number = 3
    before = dict(vars(model))
    assert caches.called_without_data(model, {"x": torch.ones(2)}).is_meta
    assert vars(model) == before


@pytest.mark.parametrize(("prompt", "new_tokens"), [(20, 4), (16, 3)])
def test_a_model_that_begins_anew_is_told(prompt: int, new_tokens: int) -> None:
    """Breaks if a call without a cache, of a prompt or behind it, is planned or proven as one that has one."""
    wanted = autopar.Generation(batch=2, prompt=prompt, new_tokens=new_tokens)
    with pytest.raises(AutoparError, match=r"without the cache that it was given(.|\n)*without generate="):
        autopar.plan_generation(_two_rotations(), autopar.Mesh({"x": 2}), wanted, strategy="tensor").verify()


def test_windows_that_caches_of_transformers_keep_are_masked() -> None:
    """Breaks if layers of which transformers masks no window, since their cache keeps no more than it, see all of
    ours.
    """
    import transformers

    config = transformers.InklingTextConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=3, d_rel=4,
        intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "dense"], max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.InklingForCausalLM(config).eval()
    cache = caches.advanced(caches.new_cache(model, 1, 8, torch.device("cpu")), 5)
    made = spelled_out(type(model))(model, config, torch.empty(1, 1, 0), torch.ones(1, 6, dtype=torch.long), cache)
    seen = {name: mask[0, 0, 0].int().tolist() for name, mask in made.items() if mask is not None}
    assert seen == {"sliding_attention": [0, 0, 0, 1, 1, 1, 0, 0], "full_attention": [1, 1, 1, 1, 1, 1, 0, 0]}
