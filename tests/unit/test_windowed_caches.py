"""Caches whose keys have a scale a channel, and whose last tokens are as they are."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.base.codes import STORAGES
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.huggingface.layout import Layout
from autopar.base.huggingface.reuse import fitting, longer
from autopar.base.huggingface.states import StateCache
from autopar.base.huggingface.windows import Windowed, places
from tests.unit.tiers import mostly_slow

CPU = torch.device("cpu")
GREEDY = SimpleNamespace(value="greedy_search")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
SIZE = 8


def plainly(storage: str, x: Tensor, dim: int) -> Tensor:
    """x as codes say it, with a scale for what lies along `dim`."""
    scale = x.abs().amax(dim, keepdim=True) / LARGEST[storage]
    steps = x / scale
    rounded = steps.to(torch.float8_e4m3fn).to(x.dtype) if storage == "fp8" else torch.round(steps)
    return rounded * scale


def seen(storage: str, x: Tensor, before: int, of_keys: bool) -> Tensor:
    """What a call behind `before` tokens sees of all tokens x [1, heads, tokens, dim]: as the paper has it."""
    found = x.clone()
    for token in range(before // 128 * 128 if of_keys else max(0, before - 128)):
        group = slice(token // 32 * 32, token // 32 * 32 + 32)
        if of_keys:
            found[:, :, token] = plainly(storage, x[:, :, group], 2)[:, :, token % 32]
        else:
            found[:, :, token] = plainly(storage, x[:, :, token], 2)
    return found


@pytest.mark.parametrize("of_keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("storage", mostly_slow(STORAGES, "int4"))
@pytest.mark.parametrize("calls", [(126, 1, 1, 1, 128, 5, 250, 1), (1, 127, 256, 1)])
def test_a_call_sees_what_the_paper_says(storage: str, of_keys: bool, calls: tuple[int, ...]) -> None:
    """Breaks if a group is of other tokens, a token is rounded before its window is whole or is not afterwards, or a
    prompt that begins or ends inside a window leaves its codes or its window otherwise.
    """
    x = torch.randn(1, 2, sum(calls), SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    name = f"{storage}-channel"
    empty = Windowed.empty(name, of_keys, tuple(x.shape), x.dtype, x.device)
    kept, before = Windowed.take(name, of_keys, iter([each.contiguous() for each in empty])), 0
    for count in calls:
        at = torch.arange(before, before + count)
        kept, whole = kept.written(at, x[:, :, at], torch.tensor(before))
        want = seen(storage, x[:, :, : before + count], before, of_keys)
        torch.testing.assert_close(whole[:, :, : before + count], want, rtol=1e-12, atol=1e-12)
        before += count
    want = seen(storage, x, before, of_keys)
    torch.testing.assert_close(kept.read(torch.tensor(before))[:, :, :before], want, rtol=1e-12, atol=1e-12)
    assert kept.length == places(before)


def _model(name: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "mistral":  # a window of attention that is shorter than those of the cache
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=40)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


CASES = [
    ("llama", "int4", "tensor", None), ("llama", "fp8", "auto", 64), ("mistral", "int8", "ddp", None),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "storage", "strategy", "chunk"), CASES)
def test_programs_compute_what_a_model_with_such_a_cache_computes(
    name: str, storage: str, strategy: str, chunk: int | None
) -> None:
    """Breaks if a rank has scales or a window of other heads, or a proof compares with a model that sees otherwise."""
    wanted = autopar.Generation(2, 128 if chunk else 250, 9, chunk=chunk, cache=f"{storage}-channel")
    plan = autopar.plan_generation(_model(name), autopar.Mesh({"x": 2}), wanted, strategy=strategy)
    proof = plan.verify(tokens=9).raise_on_failure()
    said = re.fullmatch(rf"a cache in {storage}-channel changes logits by up to (\S+), .*", proof.notes[0])
    assert said is not None
    assert 0 < float(said[1]) < 0.5
    assert [each.name for each in proof.comparisons[:2]] == [
        "keys of layer 0 in the cache",
        "values of layer 0 in the cache",
    ]


def _cache(length: int = 20) -> Any:
    states = [
        x for of_keys in (True, False)
        for x in Windowed.empty("int8-channel", of_keys, (2, 1, length, SIZE), torch.float32, torch.device("cpu"))
    ]  # fmt: skip
    return StateCache([Layout("attention", (), "int8-channel")], [*states, torch.tensor(7)])


@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask"])
def test_padding_of_an_encoder_is_not_in_what_its_decoder_keeps(name: str) -> None:
    """Breaks if texts of different lengths are refused because a decoder's keys share scales; or its own padding is
    taken.
    """
    import transformers

    config: Any = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=16)
    model: Any = transformers.T5ForConditionalGeneration(config)
    prepare = caches.generating(
        None, lambda model, rows, length, encoded: caches.new_cache(model, rows, length, CPU, encoded, "int8-channel")
    )
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    given: Any = {"encoder_outputs": (torch.zeros(2, 3, 16),), name: mask}
    wanted: Any = transformers.GenerationConfig(max_new_tokens=2)
    its_own = nullcontext() if name == "attention_mask" else pytest.raises(AutoparError, match="different lengths")
    with its_own:
        prepare(model, wanted, given, GREEDY, 2, 4)
    assert given["past_key_values"].pair


def test_what_such_a_cache_cannot_do_is_told() -> None:
    """Breaks if padding shares scales with tokens, or a cache is cut, made longer, taken back or served from that has
    not kept what that takes.
    """
    with pytest.raises(AutoparError, match="cannot be padded"):
        autopar.Generation(2, 8, 4, padded=True, cache="int8-channel")
    with pytest.raises(AutoparError, match="not cut along its length"):
        wanted = autopar.Generation(2, 8, 4, cache="int8-channel")
        autopar.plan_generation(_model("llama"), autopar.Mesh({"cp": 2}), wanted, strategy="split_kv")
    cache = _cache()
    with pytest.raises(AutoparError, match="does not go back"):
        cache.layers[0].crop(-1)
    with pytest.raises(AutoparError, match="does not go back"):
        caches.check_forgets(cache)
    with pytest.raises(AutoparError, match="cannot be made longer"):
        longer(cache, 300)
    assert fitting(cache, 2, 255) is cache
    with pytest.raises(AutoparError, match="cannot be made longer"):
        fitting(cache, 2, 256)  # no window follows the last one
    with pytest.raises(AutoparError, match="come and go"):
        caches.check_serves(cache)
    with pytest.raises(AutoparError, match="different lengths"):
        caches._check_padding(cache, torch.tensor([[0, 1], [1, 1]]))
    caches._check_padding(cache, torch.ones(2, 2))
    for kept in cache.layers[0].kept:  # the last token that there is room for
        kept.written(torch.tensor([254]), torch.zeros(2, 1, 1, SIZE), torch.tensor(254))
    repeated = fitting(cache, 4, 20)
    assert [tuple(x.shape) for x in repeated.states()] == [
        (4, 1, 256, 8), (4, 1, 8, 8), (4, 1, 128, 8), (4, 1, 256, 8), (4, 1, 256, 1), (4, 1, 128, 8), ()
    ]  # fmt: skip
