"""Calls of forward that a script makes with caches, over the plain model in the place of programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import by_hand, caches, transformers_caches
from autopar.base.huggingface.masks_of_generate import spelled_out
from autopar.base.huggingface.reuse import as_it_is, num_written, places
from autopar.base.huggingface.states import Layout, StateCache
from autopar.base.huggingface.unmade import Unmade
from autopar.passes.emptied import meta_clone

IDS = torch.tensor([[5, 6, 7, 8, 9], [11, 3, 17, 4, 21]])


class _Engine:
    """The plain model, of which caches are functions."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.on_meta = model, meta_clone(model)
        self.seen: list[dict[str, Any]] = []
        self.driven = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.append(kwargs)
        given = {name: as_it_is(x) if caches.is_cache(x) else x for name, x in kwargs.items()}
        if not any(map(caches.is_cache, given.values())):
            given["use_cache"] = False
        return self.model(*args, **given)

    def run_over(self, cache: Any, kwargs: dict[str, Any]) -> Any:
        return self.run((), kwargs)

    def new_cache(self, batch: int, length: int, encoded: Tensor | None) -> Any:
        return caches.new_cache(self.on_meta, batch, length, torch.device("cpu"), encoded)

    def whole_length(self, length: int) -> int:
        return length

    def gives_cache(self) -> bool:
        return caches.gives_cache(self.on_meta)

    def counts_positions(self) -> bool:
        return caches.counts_positions(self.on_meta)

    def is_driven(self) -> bool:
        return self.driven


class _Compiled:
    """A model whose forward is that of a compiled one."""

    def __init__(self, model: Any) -> None:
        self.model, self.engine = model, _Engine(model)
        found = by_hand.with_caches(type(model))
        assert found is not None
        self.forward: Callable[..., Any] = found
        self.config = model.config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(self.model, self.engine, args, kwargs)


def _model(name: str = "llama") -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    if name == "mistral":
        config: Any = transformers.MistralConfig(**sizes, num_key_value_heads=1, sliding_window=3)
        return transformers.MistralForCausalLM(config).double().eval()
    if name == "t5":
        config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        return transformers.T5ForConditionalGeneration(config).double().eval()
    if name == "bamba":
        sizes |= {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_chunk_size": 4}
        config = transformers.BambaConfig(**sizes, num_key_value_heads=1, attn_layer_indices=[1])
        return transformers.BambaForCausalLM(config).double().eval()
    if name == "roberta":
        config = transformers.RobertaConfig(**sizes, is_decoder=True, max_position_embeddings=24)
        return transformers.RobertaForCausalLM(config).double().eval()
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**sizes)).double().eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double().eval()


def _loop(model: Any, cache: Any = None, ids: Tensor = IDS, **first: Any) -> Tensor:
    """Logits of a prompt's last token and of three more; the cache is read from the first output alone."""
    with torch.no_grad():
        out = model(ids, **first) if cache is None else model(ids, past_key_values=cache, **first)
        cache = out.past_key_values if cache is None else cache
        found = [out.logits[:, -1:]]
        for _ in range(3):
            token = found[-1][:, -1].argmax(-1, keepdim=True)
            found.append(model(token, past_key_values=cache).logits)
    return torch.cat(found, 1)


def test_a_cache_has_no_more_room_than_a_model_has_positions() -> None:
    """Breaks if a model that has a table as long as its positions is handed a cache that is longer."""
    with torch.no_grad():
        assert places(_Compiled(_model("roberta"))(IDS, use_cache=True).past_key_values, 0) == 24


@pytest.mark.parametrize("name", ["llama", "mistral", "roberta", "bamba"])
@pytest.mark.parametrize("first", [{}, {"use_cache": True}])
def test_a_loop_by_hand(name: str, first: dict[str, Any]) -> None:
    """Breaks if a call that was handed no cache leaves none, or one that nobody can go on with; if the cache that a
    call was handed is not written; or if a token sees other positions than on one device.
    """
    model = _model(name)
    assert torch.allclose(_loop(_Compiled(model), **first), _loop(model, **first), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["DynamicCache", "without layers", "StaticCache"])
def test_a_cache_that_a_script_made(name: str, kind: str) -> None:
    """Breaks if a cache of transformers is refused, forgotten by whoever made it, or shorter than it was made."""
    import transformers

    model = _model(name)

    def made() -> Any:
        if kind == "StaticCache":
            return transformers.StaticCache(config=model.config, max_cache_len=200)
        return transformers.DynamicCache(**({} if kind == "without layers" else {"config": model.config}))

    cache = made()
    assert torch.allclose(_loop(_Compiled(model), cache), _loop(model, made()), rtol=0, atol=1e-12)
    assert num_written(cache) == 8
    is_told = kind == "StaticCache" and name == "llama"  # layers with a window keep no more than that
    assert places(cache, 0) == (200 if is_told else by_hand.LEAST_ROOM)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_cache_that_the_plain_model_filled(name: str, is_static: bool) -> None:
    """Breaks if what a prefix left is lost or put at other positions, as where a window has the last ones alone."""
    import transformers

    model = _model(name)

    def filled() -> Any:
        cache: Any = transformers.DynamicCache(config=model.config)
        if is_static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            model(IDS.flip(1), past_key_values=cache)
        return cache

    first = IDS[:, :1]  # which sees the last of the prefix through a window, too
    found, want = _loop(_Compiled(model), filled(), first), _loop(model, filled(), first)
    assert torch.allclose(found, want, rtol=0, atol=1e-12)


def test_a_cache_that_is_full_is_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the cache is left as it is, or moved to another object than the script's."""
    monkeypatch.setattr(by_hand, "LEAST_ROOM", 6)
    model = _model()
    compiled = _Compiled(model)
    assert torch.allclose(_loop(compiled, use_cache=True), _loop(model), rtol=0, atol=1e-12)
    lengths = [places(given["past_key_values"], 0) for given in compiled.engine.seen]
    assert lengths == [8] * 4  # 5 and what may follow
    more = torch.ones(2, 4, dtype=torch.long)
    cache = compiled.engine.seen[-1]["past_key_values"]
    with torch.no_grad():
        compiled(more, past_key_values=cache)
    assert (places(cache, 0), num_written(cache)) == (16, 12)


def _padded(model: Any, with_positions: bool) -> Tensor:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found, cache, ids = [], None, IDS
    with torch.no_grad():
        for _ in range(3):
            given = {"position_ids": positions[:, -ids.shape[1] :]} if with_positions else {}
            out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given)
            cache = out.past_key_values
            found.append(out.logits[:, -1:])
            ids = found[-1][:, -1].argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    return torch.cat(found, 1)


@pytest.mark.parametrize("with_positions", [False, True])
def test_padding_on_the_left(with_positions: bool) -> None:
    """Breaks if a token sees padding, or is counted otherwise than the model counts it on one device."""
    model = _model()
    compiled = _Compiled(model)
    found, want = _padded(compiled, with_positions), _padded(model, with_positions)
    assert torch.allclose(found, want, rtol=0, atol=1e-12)
    # Models count in ways of their own where padding is.
    assert all(("position_ids" in given) is with_positions for given in compiled.engine.seen)
    with pytest.raises(AutoparError, match=r"a mask of 1 positions(.|\n)*5 positions are written, 1 are new"):
        compiled = _Compiled(model)
        cache = compiled(IDS, use_cache=True).past_key_values
        compiled(IDS[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)


def test_a_cache_that_nobody_asks_for_is_not_made() -> None:
    """Breaks if a script that scores texts pays for a cache, if a cache is printed on one rank alone (making it is
    collective), or if what was read before is made anew of other inputs or weights.
    """
    model = _model()
    compiled = _Compiled(model)
    with torch.no_grad():
        out = compiled(IDS)
        assert list(out.keys()) == list(model(IDS).keys())
        assert "made when it is used" in repr(out.past_key_values)
        assert len(compiled.engine.seen) == 1
        assert copy.deepcopy(out.past_key_values).get_seq_length() == 5
        assert type(out.past_key_values) is StateCache
        ids = IDS.clone()
        out = compiled(ids)
        ids[0, 0] = 1
        with pytest.raises(AutoparError, match="its inputs or the weights changed since"):
            compiled(IDS[:, :1], past_key_values=out.past_key_values)
        out = compiled(IDS)
        next(iter(model.parameters())).mul_(2)
        with pytest.raises(AutoparError, match="its inputs or the weights changed since"):
            len(out.past_key_values)


def test_what_was_read_in_inference_mode_is_kept_as_it_was() -> None:
    """Breaks if tensors whose writes torch does not count are asked for them, or read as they became."""
    model = _model()
    compiled = _Compiled(model)
    with torch.inference_mode():
        ids = IDS.clone()
        out = compiled(ids)
        ids.fill_(1)
        found = compiled(IDS[:, :1], past_key_values=out.past_key_values).logits
        torch.testing.assert_close(found, model(torch.cat([IDS, IDS[:, :1]], 1)).logits[:, -1:])


def test_training_makes_no_cache() -> None:
    """Breaks if a training step is run by a program that has no backward, or its cache is silently none."""
    model = _model().train()
    compiled = _Compiled(model)
    out = compiled(IDS, labels=IDS, use_cache=True)
    out.loss.backward()
    assert compiled.engine.seen[-1]["use_cache"] is False
    model.eval()
    with pytest.raises(AutoparError, match=r"in training mode(.|\n)*use_cache=True"):
        compiled(IDS, past_key_values=out.past_key_values)
    model.train()
    with pytest.raises(AutoparError, match="a cache in training"):
        compiled(IDS, past_key_values=compiled.engine.new_cache(2, 8, None))


def test_outputs_without_names() -> None:
    """Breaks if the places of a tuple's outputs are others than on one device."""
    model = _model()
    compiled = _Compiled(model)
    with torch.no_grad():
        logits, cache = compiled(IDS, use_cache=True, return_dict=False)
        found = compiled(IDS[:, :1], past_key_values=cache, return_dict=False)
        want = model(IDS[:, :1], past_key_values=model(IDS).past_key_values, return_dict=False)
        assert len(found) == len(want)
        assert torch.allclose(found[0], want[0], rtol=0, atol=1e-12)
        assert isinstance(compiled(IDS, return_dict=False)[1], Unmade)
    assert logits.shape == (2, 5, 32)


def test_behind_an_encoder() -> None:
    """Breaks if a decoder's tokens do not see those before them, or the encoder's output is another's."""
    model = _model("t5")

    def loop(model: Any) -> Tensor:
        out = model(input_ids=IDS, decoder_input_ids=IDS[:, :2])
        found, cache = [out.logits], out.past_key_values
        encoded = (out.encoder_last_hidden_state,)
        for number in (2, 3):
            given = {"encoder_outputs": encoded, "decoder_input_ids": IDS[:, number : number + 1]}
            out = model(**given, past_key_values=cache, use_cache=True)
            found.append(out.logits)
        return torch.cat(found, 1)

    with torch.no_grad():
        assert torch.allclose(loop(_Compiled(model)), loop(model), rtol=0, atol=1e-12)


def _generates(model: Any) -> Any:
    """The model with caches of ours in its generate()."""
    kind: Any = type(model)
    found = copy.copy(model)
    make = _Engine(model).new_cache
    prepare = caches.generating(kind._prepare_cache_for_generation, lambda _, rows, size, *of: make(rows, size, *of))
    namespace = {"_prepare_cache_for_generation": prepare, "create_masks_for_generate": spelled_out(kind)}
    found.__class__ = type(kind.__name__, (kind,), namespace)
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("handed", ["all", "what is new", "a decoder's", "a decoder's, marked"])
def test_generate_goes_on_with_a_cache(handed: str) -> None:
    """Breaks if a cache has no room for what is handed in beside what it has, where that is not all of a sequence, or
    where nothing says that it is: of a decoder behind an encoder transformers reads all of it once more.
    """
    import transformers

    model = _model("t5" if "decoder" in handed else "llama")
    said: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    said |= {"decoder_start_token_id": 0} if "decoder" in handed else {}

    def turns(model: Any) -> list[Tensor]:
        cache, ids, found = transformers.DynamicCache(config=model.config), IDS, []
        if "decoder" in handed:
            cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache(config=model.config))
            ids = IDS[:, :0].new_zeros(2, 1)
        for _ in range(2):
            ones = torch.ones_like(ids)
            new = ids[:, int(cache.get_seq_length()) :] if handed == "what is new" else ids
            given = {"attention_mask": ones} if "decoder" not in handed else {"decoder_input_ids": new}
            if "marked" in handed:
                given["decoder_attention_mask"] = ones
            made = model.generate(IDS if "decoder" in handed else new, **given, past_key_values=cache, **said)
            ids = torch.cat([ids, made[:, new.shape[1] :], torch.full_like(ids[:, :1], 9)], 1)
            found.append(ids)
        return found

    assert all(map(torch.equal, turns(_generates(model)), turns(model)))


def test_generate_with_a_cache_of_more_than_its_sequence() -> None:
    """Breaks if a cache that an earlier call wrote into is taken for the beginning of a shorter sequence."""
    import transformers

    model = _generates(_model())
    cache, given = transformers.DynamicCache(config=model.config), {"attention_mask": torch.ones_like(IDS)}
    said: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(IDS, **given, past_key_values=cache, **said)
    with pytest.raises(AutoparError, match=r"cache of 6 positions(.|\n)*sequence of 5(.|\n)*copy\.deepcopy"):
        model.generate(IDS, **given, past_key_values=cache, **said)


def test_what_gives_no_cache_gives_none() -> None:
    """Breaks if an encoder, whose forward takes a cache and whose configuration asks for one, seems to give it."""
    with torch.no_grad():
        assert _Compiled(_model("bert"))(IDS).past_key_values is None


def test_generate_hands_over_what_it_made() -> None:
    """Breaks if masks that generate() made are made once more, or the cache that it was handed is not written."""
    compiled = _Compiled(_model())
    compiled.engine.driven = True
    cache = compiled.engine.new_cache(2, 8, None)
    with torch.no_grad():
        compiled(IDS, past_key_values=cache, use_cache=True)
        assert set(compiled.engine.seen[-1]) == {"past_key_values", "use_cache"}
        assert num_written(cache) == 5
        compiled(IDS[:, :1], attention_mask=torch.ones(2, 6), past_key_values=cache, use_cache=True)
    assert compiled.engine.seen[-1]["attention_mask"].shape == (2, 1, 1, 8)  # guidance by another prompt makes none


@pytest.mark.parametrize(
    ("name", "says"),
    [("offloaded", "stay on their devices"), ("offloaded_static", "stay on"), ("quantized", "cache='int8'")],
)
def test_other_numbers_are_refused(name: str, says: str) -> None:
    """Breaks if a cache that keeps other numbers, or elsewhere, is silently one of ours."""
    with pytest.raises(AutoparError, match=f"cache_implementation='{name}'(.|\n)*{says}"):
        transformers_caches.check_implementation(name)
    for known in transformers_caches.IMPLEMENTATIONS:
        transformers_caches.check_implementation(known)


def test_what_routers_give_is_asked_for_without_a_cache() -> None:
    """Breaks if the loss of routers, over a mask as long as a cache, ends in a message of an inner operator, or a call
    whose output nobody reads it in is refused.
    """
    import transformers

    from autopar.base.huggingface import routers

    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                num_key_value_heads=1, num_local_experts=2,
            )
        )  # fmt: skip
    asked = {"output_router_logits": True}
    with pytest.raises(AutoparError, match=r"output_router_logits(.|\n)*use_cache=False"):
        _Compiled(model.eval())(torch.zeros(1, 2, dtype=torch.long), use_cache=True, **asked)
    assert routers.without_routers(model, asked) == {"output_router_logits": False}
    assert routers.without_routers(model, {}) == {}
    model.config.output_router_logits = True
    assert routers.without_routers(model, {}) == {"output_router_logits": False}
    assert routers.without_routers(_model(), asked | {"x": 1}) == {"output_router_logits": False, "x": 1}


def test_a_cache_of_another_kind_is_refused() -> None:
    """Breaks if somebody's own kind of cache, whose rules are not ours, is taken for one of ours."""
    import transformers

    class Own(transformers.DynamicCache):
        pass

    with pytest.raises(AutoparError, match="cannot take a cache of type Own"):
        _Compiled(_model())(IDS, past_key_values=Own())


def test_a_model_that_takes_no_cache_but_its_own() -> None:
    """Breaks if what such a model says of it ends a call of generate() in its own words, without a remedy."""
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.MiniMaxConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)
    with torch.device("meta"):
        model = transformers.MiniMaxForCausalLM(config).eval()
    with pytest.raises(AutoparError, match=r"cache of its own(.|\n)*use_cache=False"):
        caches.new_cache(model, 2, 8, torch.device("cpu"))


def test_a_cache_goes_back_and_not_forth() -> None:
    """Breaks if a number of positions to keep, as earlier versions had it, is added to what is written."""
    cache = StateCache([Layout("attention")], [*torch.zeros(2, 1, 1, 9, 2), torch.tensor(5)])
    cache.crop(-2)
    assert num_written(cache) == 3
    with pytest.raises(AutoparError, match=r"crop\(-2\)"):
        cache.crop(2)
