"""Weights that a model stores as codes with scales: programs compute what the model with these codes computes."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.base.huggingface.coded_reference import numbers_of
from autopar.base.stored_weights import WAYS, is_stored, stored_modules
from tests.unit.tiers import mostly_slow


def plainly(module: Any, way: str, rows: int, columns: int, group: int) -> Tensor:
    """The weight [rows, columns] that codes and scales say, element by element."""
    numbers = numbers_of(way.partition("-")[0], module.weight_codes.detach())
    scales = module.weight_scales.detach().double()
    found = torch.empty(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            if way == "int4":
                found[i, j] = numbers[i, j // group, j % group] * scales[i, j // group, 0]
            elif way == "fp8-block":
                found[i, j] = numbers[i // 128, i % 128, j // 128, j % 128] * scales[i // 128, 0, j // 128, 0]
            else:
                found[i, j] = numbers[i, j] * (scales[0, 0] if way == "fp8-tensor" else scales[i, 0])
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("way", [way for way in WAYS if way != "mxfp4"])  # that one: test_stored_experts.py
def test_codes_say_the_weight(way: str) -> None:
    """Breaks if a scale is of another row, group or block, is left out, or a code further from its number than half a
    step.
    """
    torch.manual_seed(0)
    rows, columns = (128, 256) if way == "fp8-block" else (6, 16)
    model = nn.Sequential(nn.Linear(columns, rows)).double()
    before = model[0].weight.detach().clone()  # type: ignore[operator]
    stored: Any = autopar.store_weights(model, way, group=4)
    assert stored is model
    layer: Any = model[0]
    want = plainly(layer, way, rows, columns, 4)
    torch.testing.assert_close(layer.weight, want, rtol=0, atol=0)
    ((_, how),) = stored_modules(model)
    most = before.reshape(how.cut).abs().amax(how.dims, keepdim=True).expand(how.cut).reshape(rows, columns)
    step = before.abs() / 16 + most / 448 / 1024 if way.startswith("fp8") else most / {"int8": 254, "int4": 14}[way]
    assert ((want - before).abs() <= step * (1 + 1e-6)).all()
    assert ((want - before) != 0).any()
    x = torch.randn(3, columns, dtype=torch.float64)
    torch.testing.assert_close(model(x), x @ want.t() + layer.bias, rtol=1e-12, atol=1e-12)
    held = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "codes" in name)
    assert held == rows * columns // (2 if way == "int4" else 1)


def test_what_is_stored_and_what_is_not() -> None:
    """Breaks if a head, a tied weight, an embedding or a layer that was named is rounded; if the model is of another
    class; or if a copy shares its codes.
    """
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    model: Any = autopar.store_weights(made, "int8", leave=("*.down_proj",))
    names = {name for name, _ in model.named_parameters() if name.endswith("weight_codes")}
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    assert names == {f"model.layers.0.{part}_proj.weight_codes" for part in parts}
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.up_proj, nn.Linear)
    assert type(mlp.up_proj) is type(mlp.gate_proj)
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.up_proj.weight_codes.zero_()
    assert mlp.up_proj.weight.any()
    assert is_stored(other)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    stored = autopar.store_weights(tied, "int4")
    assert [name for name, _ in stored.named_parameters() if "codes" in name] == ["2.weight_codes"]


def test_what_cannot_be_stored_is_told() -> None:
    """Breaks if a way that is none is taken for another, or a model is rounded twice, or trained."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(AutoparError, match=r"'int3'(.|\n)*'int8'"):
        autopar.store_weights(model, "int3")
    with pytest.raises(AutoparError, match="a group of 3 inputs"):
        autopar.store_weights(model, "int4", group=3)
    with pytest.raises(AutoparError, match="no linear layer"):
        autopar.store_weights(nn.Sequential(nn.Conv1d(2, 2, 1)), "int8")
    autopar.store_weights(model, "int8")
    with pytest.raises(AutoparError, match="stored as codes already"):
        autopar.store_weights(model, "int8")
    with pytest.raises(AutoparError, match=r"are not trained(.|\n)*inference=True"):
        autopar.plan(model, autopar.Mesh({"x": 2}), example_inputs=(torch.zeros(2, 4),))


def _model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":  # weights as [in, out], of queries, keys and values in one
        config: Any = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
        return transformers.GPT2LMHeadModel(config).eval()
    wide = name == "wide"  # with blocks of 128
    config = transformers.Qwen2Config(
        hidden_size=256 if wide else 32, intermediate_size=256 if wide else 48, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=4 if wide else 2,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


CASES = [
    ("qwen2", "int8", "tensor"), ("qwen2", "int4", "tensor"), ("gpt2", "int4", "tensor"), ("gpt2", "fp8", "tensor"),
    ("wide", "fp8-block", "tensor"), ("qwen2", "fp8-tensor", "auto"), ("qwen2", "int8", "zero3"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.moderate
@pytest.mark.parametrize(("name", "way", "strategy"), mostly_slow(CASES, ("qwen2", "int4", "tensor")))
def test_programs_compute_what_the_model_with_such_weights_computes(name: str, way: str, strategy: str) -> None:
    """Breaks if scales are of another rank's rows or groups, a group or a block is cut, halves of a packed row are
    split, or an axis that is to split weights leaves codes whole.
    """
    model = autopar.store_weights(_model(name), way, group=8)
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "use_cache": False}
    plan = autopar.plan(model, autopar.Mesh({"x": 2}), example_inputs=batch, strategy=strategy, inference=True)
    proof = plan.verify().raise_on_failure()
    (note,) = proof.notes
    said = re.fullmatch(rf"weights in {way} changes logits by up to (\S+), log-probabilities by (\S+)", note)
    assert said is not None
    assert 0 < float(said[1]) < 1  # not of weights that are zero
    if strategy == "tensor":
        held = {each.name: each for each in plan.interface.parameters}
        codes = [each for each in held.values() if each.name.endswith("weight_codes")]
        assert codes
        assert all(isinstance(each.sharding[0], autopar.Shard) for each in codes)
        if way == "int4":  # groups go with their scales
            assert all(each.sharding == held[each.name.replace("codes", "scales")].sharding for each in codes)
