"""What the first tokens see of a cache is known without a look at it: it is empty, and after them it is not."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import autopar
from autopar.api.generation import GenerationPlan, phase_inputs
from autopar.base.huggingface import caches
from autopar.base.huggingface.generation import driven
from autopar.base.huggingface.layout import Layout
from autopar.base.huggingface.reuse import known_empty
from autopar.base.huggingface.states import Outputs
from autopar.base.torch_compat import tracing

WANTED = autopar.Generation(batch=2, prompt=6, new_tokens=3)
CPU = torch.device("cpu")


@lru_cache
def _model(name: str = "llama") -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    if name == "t5":
        own = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
        made: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**own, decoder_start_token_id=0))
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return made.double().eval()


def _kinds(cache: Any) -> list[bool]:
    return [layout.empty for layout in cache.layouts()]


@pytest.fixture(scope="module")
def plan() -> GenerationPlan:
    return autopar.plan_generation(_model(), autopar.Mesh({"tp": 2}), WANTED, strategy="tensor")


def test_a_cache_is_empty_until_tokens_are_written() -> None:
    """Breaks if what was written, counted or handed on is forgotten, or what an encoder gave counts positions."""
    cache = known_empty(caches.new_cache(_model(), 1, 8, CPU))
    assert _kinds(cache) == [True] and cache.get_seq_length() == 0
    assert _kinds(caches.advanced(cache, 3)) == [False] == _kinds(cache.after(cache.states()))
    assert _kinds(cache) == [True]
    cache.advance(3)
    assert _kinds(cache) == [False] and int(cache.get_seq_length()) == 3
    encoded = (torch.zeros(1, 4, 32, dtype=torch.float64),)
    assert _kinds(known_empty(caches.new_cache(_model("t5"), 1, 8, CPU, encoded))) == [True, False]


def test_pytrees_and_plans_keep_it() -> None:
    """Breaks if an empty cache and another one are of one kind, so that they share a program; or codes lose it."""
    for storage in (None, "int8"):
        made = caches.new_cache(_model(), 1, 8, CPU, storage=storage)
        leaves, spec = tracing.tree_flatten(known_empty(made))
        assert _kinds(tracing.tree_unflatten(leaves, spec)) == [True]
        assert spec != tracing.tree_flatten(made)[1]
    for layout in (Layout("attention", (), None, True), Layout("attention", (), "int4", True), Layout("attention")):
        assert Layout.of(layout.to_data()) == layout


def _handed(chunk: int | None = None, **given: Any) -> list[list[bool]]:
    """Whether the cache is empty in each call of forward of a `generate()` of two tokens."""
    seen: list[list[bool]] = []

    def answer(kwargs: dict[str, Any]) -> Any:
        name, cache = caches.of_call(kwargs)
        seen.append(_kinds(cache))
        after = caches.advanced(cache, caches.num_new(kwargs))
        return Outputs(logits=torch.zeros(2, 1, 64), **{name: after})

    prompt: dict[str, Any] = {"input_ids": torch.ones(2, 6, dtype=torch.long), **given}
    driven(
        _model(), prompt, 2, answer, lambda _, rows, length, __: caches.new_cache(_model(), rows, length, CPU),
        chunk=chunk, encoder=lambda each: each,
    )  # fmt: skip
    return seen


def test_only_the_call_that_begins_knows() -> None:
    """Breaks if a token, a later piece of a prompt or the next turn takes the cache for empty; pieces are of one kind,
    as they were planned.
    """
    assert _handed() == [[True], [False]]
    assert _handed(chunk=3) == [[False]] * 3
    used = caches.advanced(caches.new_cache(_model(), 2, 8, CPU), 4)
    assert _handed(past_key_values=used) == [[False], [False]]
    for chunk, first in ((None, True), (3, False)):
        inputs = phase_inputs(_model(), autopar.Generation(batch=2, prompt=6, new_tokens=3, chunk=chunk))
        assert _kinds(inputs["prefill"]["past_key_values"]) == [first]
        assert _kinds(inputs["decode"]["past_key_values"]) == [False]


@pytest.mark.moderate
def test_a_prompt_has_no_mask_as_long_as_the_cache(plan: GenerationPlan) -> None:
    """Breaks if attention reads, under a mask of every query and position, what nobody has written yet."""
    (line,) = [line for line in plan.prefill.source.splitlines() if "ops.attention(" in line]
    assert "right=0" in line and "[:, :, :6]" in line
    assert all(site.what.startswith("causal") for site in plan.prefill.program.attention)
    assert plan.verify().ok


@pytest.mark.moderate
def test_padding_on_the_left_is_still_hidden() -> None:
    """Breaks if a prompt whose rows begin late sees what stands before them."""
    wanted = autopar.Generation(batch=2, prompt=6, new_tokens=3, padded=True)
    padded = autopar.plan_generation(_model(), autopar.Mesh({"tp": 2}), wanted, strategy="tensor")
    assert padded.verify().ok
