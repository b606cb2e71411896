"""Keys and values that a cache stores as codes with scales: of the same numbers as plain torch on one process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.api.cache_maker import maker
from autopar.base.codes import STORAGES
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.base.huggingface.coded_reference import Rounding, numbers_of
from autopar.base.huggingface.layout import Layout
from autopar.base.huggingface.reuse import fitting, position_dims
from autopar.base.huggingface.states import StateCache
from autopar.base.torch_compat import tracing
from autopar.cli.input import parse_generate
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.operators.rules.lookup import rule_for
from tests.unit.tiers import mostly_slow

LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def plainly(storage: str, x: Tensor) -> Tensor:
    """x [..., dim] as codes say it, a scale a row; what the tests compare with."""
    scale = x.abs().max(-1, keepdim=True).values / LARGEST[storage]
    scale[scale == 0] = 1.0
    steps = x / scale
    return (steps.to(torch.float8_e4m3fn).to(x.dtype) if storage == "fp8" else torch.round(steps)) * scale


@pytest.mark.parametrize("storage", STORAGES)
def test_codes_are_the_nearest(storage: str) -> None:
    """Breaks if a code is one further than the nearest, is clipped, is another element's (nibbles in another order),
    stands for another number than its bits say, or a row of zeros is divided by zero.
    """
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1, 0, 2] = 0.0
    kind = STORAGES[storage]
    codes, scales = kind.encode(x)
    assert codes.shape == kind.codes_shape(tuple(x.shape))
    assert scales.shape == (3, 2, 5, 1)
    found = kind.decode(codes, scales)
    torch.testing.assert_close(found, plainly(storage, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(numbers_of(storage, codes) * scales, found, rtol=0, atol=0)
    assert not found[1, 0, 2].any()
    assert codes.element_size() * codes[0, 0, 0].numel() == {"fp8": 8, "int8": 8, "int4": 4}[storage]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_of_narrow_types_lose_no_more_than_a_step(storage: str, dtype: torch.dtype) -> None:
    """Breaks if the division is done in the narrow type, where steps of a half are lost before rounding."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    kind = STORAGES[storage]
    codes, scales = kind.encode(x)
    assert scales.dtype == dtype
    assert kind.decode(codes, scales).dtype == dtype
    steps = x.double() / scales.double()
    half = steps.abs() / 16 + 2**-10 if storage == "fp8" else 0.5
    assert ((numbers_of(storage, codes) - steps).abs() <= half + 1e-4).all()


def test_what_cannot_be_stored_is_told() -> None:
    """Breaks if a name that is no storage is taken for none, or a byte is made of one nibble."""
    with pytest.raises(AutoparError, match=r"cannot be stored as 'fp4'(.|\n)*'int4'"):
        autopar.Generation(cache="fp4")
    with pytest.raises(AutoparError, match=r"2 numbers a byte, and a row has 5"):
        STORAGES["int4"].codes_shape((2, 2, 3, 5))
    with pytest.raises(AutoparError, match=r"stored as 'int8', and planned as 'fp8'"):
        maker(autopar.Generation(cache="fp8"), "int8")
    assert maker(autopar.Generation(cache="fp8"), None).storage == maker(None, "fp8").storage == "fp8"
    with pytest.raises(AutoparError, match="--cache is of --generate"):
        parse_generate(None, "int8")


@lru_cache
def _model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    if name == "t5":
        config: Any = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0
        )
        made: Any = transformers.T5ForConditionalGeneration(config)
    elif name == "lfm2":  # a layer of each kind
        layers = ["conv", "full_attention"]
        made = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, layer_types=layers))
    elif name == "gpt2":
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return made.double().eval()


def test_layers_say_how_they_store() -> None:
    """Breaks if a window or a recurrent state is taken for keys, what an encoder gave is left as it was, or a layout
    is another one behind a pytree.
    """
    lfm2 = caches.new_cache(_model("lfm2"), 2, 6, torch.device("cpu"), storage="int4")
    assert [layout.storage for layout in lfm2.layouts()] == [None, "int4"]
    assert [(tuple(x.shape), x.dtype) for x in lfm2.states()[1:3]] == [
        ((2, 2, 6, 4), torch.uint8), ((2, 2, 6, 1), torch.float64)
    ]  # fmt: skip
    encoded = (torch.zeros(2, 5, 32, dtype=torch.float64),)
    t5 = caches.new_cache(_model("t5"), 2, 6, torch.device("cpu"), encoded, "fp8")
    assert [(layout.kind, layout.storage) for layout in t5.layouts()] == [("attention", "fp8"), ("cross", "fp8")]
    leaves, spec = tracing.tree_flatten({"past_key_values": t5})
    again = tracing.tree_unflatten(leaves, tracing.load_treespec(tracing.dump_treespec(spec)))["past_key_values"]
    assert again.layouts() == t5.layouts()
    assert [layout.storage for layout in again.after(again.states()).layouts()] == ["fp8", "fp8"]
    assert Layout.of(["attention", []]) == Layout("attention")  # as plans of before have it


@pytest.mark.parametrize("storage", STORAGES)
def test_a_token_is_the_same_in_the_prompt_and_alone(storage: str) -> None:
    """Breaks if the prompt's attention reads keys that were not rounded, codes are written without their scales, or
    a row's beam takes the scales of another.
    """
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 2, 2, 6, 8, dtype=torch.float64, generator=generator)
    cache = caches.new_cache(_model("llama"), 2, 8, torch.device("cpu"), storage=storage)
    whole = StateCache(cache.layouts(), cache.states())
    read = whole.update(keys, values, 0)
    parts = StateCache(cache.layouts(), cache.states())
    for first, end in ((0, 4), (4, 5), (5, 6)):
        seen = parts.update(keys[:, :, first:end], values[:, :, first:end], 0)
    assert all(torch.equal(one, other) for one, other in zip(whole.states(), parts.states(), strict=True))
    for have, again, want in zip(read, seen, (keys, values), strict=True):
        assert torch.equal(have, again)
        torch.testing.assert_close(have[:, :, :6], plainly(storage, want), rtol=1e-12, atol=1e-12)
        assert not have[:, :, 6:].any()
    whole.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(whole.layers[0].keys[:, :, :6], plainly(storage, keys).flip(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("storage", STORAGES)
def test_codes_are_taken_up_again(storage: str) -> None:
    """Breaks if a cache that is made longer or repeated has its codes without their scales, or counts for positions."""
    keys, values = torch.randn(2, 1, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cache = caches.new_cache(_model("llama"), 1, 4, torch.device("cpu"), storage=storage)
    cache.update(keys, values, 0)
    assert position_dims(cache) == [2, 2, 2, 2, None] * 2
    again = fitting(cache, 2, 6)
    read = again.update(keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1), 0)
    for have, want in zip(read, (keys, values), strict=True):
        expected = plainly(storage, want).repeat(2, 1, 2, 1)
        torch.testing.assert_close(have, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("storage", STORAGES)
def test_what_an_encoder_gave_is_rounded_for_the_first_token_too(storage: str) -> None:
    """Breaks if the first token sees keys of an encoder's output as they came, and those after it as they are kept."""
    encoded = (torch.zeros(2, 5, 32, dtype=torch.float64),)
    cache = caches.new_cache(_model("t5"), 2, 6, torch.device("cpu"), encoded, storage)
    keys, values = torch.randn(2, 2, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = cache.cross_attention_cache.update(keys, values, 0)
    kept = cache.cross_attention_cache.layers[0]
    for have, stored, want in zip(seen, (kept.keys, kept.values), (keys, values), strict=True):
        assert torch.equal(have, stored)
        torch.testing.assert_close(have, plainly(storage, want), rtol=1e-12, atol=1e-12)


def test_bytes_read_as_another_type_split_where_elements_stay() -> None:
    """Breaks if a tensor whose last dim changes with the type is split there."""
    for source, width, splits in ((torch.float8_e4m3fn, 4, True), (torch.float32, 1, False)):
        x, result = TensorSpec((2, width), source), TensorSpec((2, 4), torch.uint8)
        rule = rule_for(OpCall(torch.ops.aten.view.dtype, (x, torch.uint8), {}, (x,), (result,)))
        assert {factor.split for factor in rule.factors} == {splits}


def test_a_proof_takes_either_code_in_the_middle_and_no_other_anywhere_else() -> None:
    """Breaks if codes of the program are believed where they are not right, or a last bit makes a proof fail."""
    x = torch.tensor([127.0, 2.5 + 1e-12, 2.5 - 1e-12, 3.4], dtype=torch.float64)[None, None, None]
    cache = caches.new_cache(_model("llama"), 1, 1, torch.device("cpu"), storage="int8")

    def rounded(*codes: int) -> tuple[list[float], int]:
        states = cache.states()
        layer = StateCache(cache.layouts(), [torch.tensor(codes, dtype=torch.int8)[None, None, None], *states[1:]])
        rounding = Rounding("int8", layer, 1e-9)
        return rounding.round(0, 0, x).flatten().tolist(), rounding.edges

    states = cache.states()
    other = torch.tensor([127, 3, 2, 99], dtype=torch.int8)[None, None, None]
    rounding = Rounding("int8", StateCache(cache.layouts(), [other, torch.ones(1, 1, 1, 1), *states[2:]]), 1e-9)
    rounding.round(0, 0, x)
    for seen in (torch.ones(1, 1), torch.zeros(1, 1)):  # what is padded may be anything, what is not may not
        ((_, want, have),) = rounding.compared(seen)
        assert torch.equal(want, have) is not bool(seen.any())
    assert rounded(127, 3, 2, 3) == ([127.0, 3.0, 2.0, 3.0], 0)
    assert rounded(127, 2, 3, 3) == ([127.0, 2.0, 3.0, 3.0], 2)
    assert rounded(126, 4, 1, 4) == ([127.0, 3.0, 2.0, 3.0], 0)


def rounded_cache(model: Any, storage: str) -> Any:
    """transformers' own cache, whose layers keep what codes say of their tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Rounded(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(plainly(storage, key_states), plainly(storage, value_states), *args, **kwargs)

    cache = DynamicCache()
    cache.layers = [Rounded() for _ in range(model.config.num_hidden_layers)]
    return cache


@pytest.mark.sampled(2)
@pytest.mark.moderate
@pytest.mark.parametrize(
    ("name", "storage", "strategy"),
    mostly_slow(
        [("llama", "int8", "tensor"), ("llama", "fp8", "auto"), ("gpt2", "int4", "tensor"), ("lfm2", "int8", "ddp")],
        ("llama", "int8", "tensor"),
    ),
)
def test_programs_compute_what_a_model_with_such_a_cache_computes(name: str, storage: str, strategy: str) -> None:
    """Breaks if a scale is of another head, token or rank, or is left out; if codes are cut otherwise than scales; or
    if a rank keeps a byte more or less than is said.
    """
    model = _model(name)
    wanted = autopar.Generation(batch=2, prompt=4, new_tokens=3, cache=storage)
    plan = autopar.plan_generation(model, autopar.Mesh({"x": 2}), wanted, strategy=strategy)
    proof = plan.verify().raise_on_failure()
    assert f"a cache in {storage} changes logits by up to" in str(proof)
    assert (
        sum("in the cache" in each.name for each in proof.comparisons) == 2 * {"llama": 2, "gpt2": 1, "lfm2": 1}[name]
    )
    heads, layers = {"llama": (2, 2), "gpt2": (4, 1), "lfm2": (2, 1)}[name]
    codes = 4 if storage == "int4" else 8  # bytes of a row of eight, beside a scale of eight bytes
    attention = layers * 2 * (2 * heads * 6 * (codes + 8)) // 2 + 8 * layers
    window = 2 * 32 * 3 * 8 // 2 if name == "lfm2" else 0
    assert plan.cache_bytes == attention + window
    assert f"keys and values in {storage}" in str(plan)
    again = autopar.GenerationPlan.from_json(plan.to_json())
    assert again.generation == wanted


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_eager_generate_with_such_a_cache_is_the_reference(storage: str) -> None:
    """Breaks if what proofs compare with is not what plain torch computes with a cache that rounds."""
    from autopar.base.huggingface.coded_reference import rounding_cache

    model = _model("llama")
    ids = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    ours = caches.new_cache(model, 2, 6, torch.device("cpu"), storage=storage)
    with torch.no_grad():
        want = model(ids, past_key_values=rounded_cache(model, storage), use_cache=True).logits
        reference = model(ids, past_key_values=rounding_cache(model, Rounding(storage, ours, 0.0)), use_cache=True)
        found = model(ids, past_key_values=StateCache(ours.layouts(), ours.states()), use_cache=True).logits
    torch.testing.assert_close(reference.logits, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
