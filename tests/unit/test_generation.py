"""Prefill and decode as two programs that hand on a cache: logits against the eager model on the whole sequence."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.stored import pins_for, pins_of, states_of
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.ir.sharding import REPLICATE, Shard
from autopar.runtime.simulate import simulate

ROWS, PROMPT, TOKENS, LENGTH = 2, 5, 3, 10


@lru_cache
def _model(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
        made: Any = transformers.GPT2LMHeadModel(config)
    elif name == "olmo2":  # norms of all heads together, which are fused in one dtype alone
        made = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes, **heads, eos_token_id=2))
    elif name == "mixtral":  # whose routers' loss is asked for
        experts: dict[str, Any] = {"num_local_experts": 2, "output_router_logits": True}
        made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))
    elif name == "mistral":  # with a window shorter than the sequence
        made = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads, sliding_window=3))
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return made.double().eval()


def _batch(model: Any, ids: Tensor, at: int, count: int, cache: Any) -> dict[str, Any]:
    """What `generate()` hands to forward for `count` tokens from position `at`."""
    positions = torch.arange(at, at + count)[None].expand(len(ids), count)
    return dict(
        model.prepare_inputs_for_generation(
            ids[:, at : at + count], past_key_values=cache, attention_mask=torch.ones(len(ids), at + count),
            position_ids=positions, use_cache=True,
        )
    )  # fmt: skip


def _cache(model: nn.Module) -> Any:
    return caches.new_cache(model, ROWS, LENGTH, torch.device("cpu"))


def _run(plan: Any, state: dict[str, Tensor], batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Logits and the cache after it, whole, of a program on all ranks."""
    cache = batch.pop("past_key_values")
    given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    given.update({f"past_key_values.{i}": value for i, value in enumerate(cache.states())})
    found = simulate(plan.interface, plan.source, state, given, backward=False)
    names = [entry.name for entry in plan.interface.outputs]
    values = dict(zip(names, found.outputs, strict=True))
    return values["logits"], [values[f"past_key_values.{i}"] for i in range(len(cache.states()))]


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "ddp", "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_teacher_forced_logits_are_those_of_the_whole_sequence(name: str, strategy: str) -> None:
    """A write to the cache that is dropped, a position off by one, a row or a head of another rank, or a decode that
    reads the cache otherwise than prefill left it would give other logits than the model without a cache.
    """
    model: Any = _model(name)
    blueprint = _on_meta(model)
    ids = torch.randint(0, 64, (ROWS, PROMPT + TOKENS), generator=torch.Generator().manual_seed(1))
    state: dict[str, Tensor] = dict(model.state_dict(keep_vars=False))
    state.update(dict(model.named_buffers()))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    cache, at = _cache(blueprint), 0
    plans: dict[int, Any] = {}
    states: list[Any] = []
    for count in (PROMPT, *[1] * TOKENS):
        batch = _batch(model, ids, at, count, cache)
        if count not in plans:
            first = plans.get(PROMPT)
            pins = [] if first is None else [*pins_of(first.interface), *pins_for(states_of(first.interface), batch)]
            plans[count] = autopar.plan(
                model, autopar.Mesh({"x": 2}), example_inputs=batch, strategy=strategy, inference=True, constraints=pins
            )
        plan = plans[count]
        logits, values = _run(plan, state, batch)
        torch.testing.assert_close(logits, want[:, at : at + count], rtol=1e-9, atol=1e-9)
        states.append([e.sharding for e in plan.interface.inputs if e.name.startswith("past_key_values")])
        states.append([e.sharding for e in plan.interface.outputs if e.name.startswith("past_key_values")])
        cache, at = cache.after(values), at + count
    assert all(each == states[0] for each in states)
    if strategy != "auto":
        dim = {"tensor": 1, "ddp": 0}[strategy]
        assert states[0][:3] == [(Shard(dim),), (Shard(dim),), (REPLICATE,)]


def _on_meta(model: nn.Module) -> nn.Module:
    from autopar.passes.emptied import meta_clone

    return meta_clone(model)


def test_a_cache_of_another_kind_is_told() -> None:
    """transformers' own caches are changed in place, which torch says as `Unsupported input type DynamicCache`."""
    from transformers import DynamicCache

    with pytest.raises(AutoparError, match=r"DynamicCache(.|\n)*generate\(\) makes its own"):
        caches.check_cache({"past_key_values": DynamicCache()})


WANTED = autopar.Generation(batch=2, prompt=4, new_tokens=3)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"), [("mistral", "tensor"), ("gpt2", "auto"), ("olmo2", "tensor"), ("mixtral", "ddp")]
)
def test_both_phases_are_planned_and_proven_together(name: str, strategy: str) -> None:
    """Breaks if the phases lie otherwise, if `generate()` hands them other inputs than they were planned for, or if
    what they come to is not the sum of its parts; a file gives the same plan.
    """
    plan = autopar.plan_generation(_model(name), autopar.Mesh({"x": 2}), WANTED, strategy=strategy)
    assert plan.verify().raise_on_failure().ok
    first, then = (each.interface.parameters for each in plan)
    assert [each.sharding for each in first] == [each.sharding for each in then]
    assert states_of(plan.prefill.interface) == states_of(plan.decode.interface)
    assert plan.total_s == plan.time_to_first_token_s + 2 * plan.time_per_token_s
    rows = [each for each in plan.decode.interface.inputs if each.name.startswith("past_key_values")]
    split = sum(isinstance(each.sharding[0], Shard) for each in rows)
    # Of two layers keys and values [2, heads, 6, 8] of eight bytes, and two counts of eight bytes.
    heads = {"mistral": 2, "gpt2": 4, "olmo2": 2, "mixtral": 2}[name]
    whole = 2 * heads * 6 * 8 * 8
    assert plan.cache_bytes == split * whole // 2 + (4 - split) * whole + 2 * 8
    again = autopar.GenerationPlan.from_json(plan.to_json())
    assert str(again) == str(plan)
    assert again.to_data() == plan.to_data()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("mistral", "tensor"), ("llama", "ddp")])
def test_a_prompt_in_chunks_is_planned_and_proven(name: str, strategy: str) -> None:
    """Breaks if a chunk reads what is not written yet, or not what the chunk before it wrote, if the plan is that of
    another number of tokens, or if the time to the first token is that of one chunk.
    """
    wanted = autopar.Generation(batch=2, prompt=7, new_tokens=3, chunk=3)
    plan = autopar.plan_generation(_model(name), autopar.Mesh({"x": 2}), wanted, strategy=strategy)
    proof = plan.verify().raise_on_failure()
    own = [row.name for row in proof.comparisons if row.name.endswith("(the plan's own text)")]
    assert len(own) == 14  # of two programs, whose norms cast in float64
    assert [row.name for row in proof.comparisons if row.name not in own] == [
        "logits of chunk 1 of the prompt", "logits of chunk 2 of the prompt", "logits of token 1", "logits of token 2"
    ]  # fmt: skip
    assert plan.time_to_first_token_s == 3 * plan.prefill.cost.step_time_s
    given = {each.name: each.shape for each in plan.prefill.interface.inputs}
    assert given["input_ids"] == (2, 3)
    assert given["past_key_values.0"][2] == 7 + 3 - 1
    assert autopar.GenerationPlan.from_json(plan.to_json()).generation == wanted
    assert "of 7 tokens in chunks of 3, 3 new tokens" in str(plan)


@pytest.mark.slow
def test_a_cache_that_lies_otherwise_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the proof says ok where a token reads the rows of another sequence."""
    plan = autopar.plan_generation(_model("llama"), autopar.Mesh({"x": 2}), WANTED, strategy="ddp")

    def swapped(cache: Any, values: dict[str, Tensor], name: str) -> Any:
        states = [values[f"{name}.{number}"] for number in range(len(cache.states()))]
        return cache.after([state.flip(0) if state.dim() else state for state in states])

    monkeypatch.setattr(caches, "with_states", swapped)
    proof = plan.verify()
    assert proof.comparisons[0].ok
    assert not proof.ok


def _encoding() -> nn.Module:
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    )


def test_what_cannot_be_generated_is_told() -> None:
    """Breaks if a model without generate(), one token, or a plan's file that is none ends in a trace of Python's."""
    with pytest.raises(AutoparError, match=r"no generate\(\)"):
        autopar.plan_generation(nn.Linear(2, 2), autopar.Mesh({"x": 2}), WANTED)
    with pytest.raises(AutoparError, match="new_tokens 2 or more"):
        autopar.Generation(new_tokens=1)
    with pytest.raises(AutoparError, match="chunks of no tokens"):
        autopar.Generation(chunk=0)
    with pytest.raises(AutoparError, match="takes no chunks(.|\n)*no prompt"):
        autopar.plan_generation(_encoding(), autopar.Mesh({"x": 2}), autopar.Generation(chunk=4))
    with pytest.raises(AutoparError, match="no plan for generate"):
        autopar.GenerationPlan.from_json("{}")
