"""Checkpoints of mixtures whose experts are codes, one by one or all in one: models have the weights that these say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import autopar
from autopar.base.errors import AutoparError
from autopar.base.stored_weights import stored_modules
from autopar.runtime.checkpoint import coded_stacks
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.formats import weights_of
from autopar.runtime.checkpoint.stored import load_pretrained
from tests.unit.runtime.test_quantized import KINDS, _drawn_box
from tests.unit.tiers import mostly_slow

HIDDEN, WIDTH, EXPERTS = 40, 24, 3


def mixtral(dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=2, vocab_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config)
    return model.to(dtype).eval()


def saved(kind: str, folder: Path) -> Any:
    """A checkpoint whose experts are codes one by one, and the model with their weights."""
    make, config = KINDS[kind]
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    weights: dict[str, list[Tensor]] = {"w1": [], "w2": [], "w3": []}
    for expert in range(EXPERTS):
        for name, shape in (("w1", (WIDTH, HIDDEN)), ("w3", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH))):
            parts, weight = make(*shape)
            weights[name].append(weight)
            prefix = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            tensors |= {f"{prefix}.{part}": value for part, value in parts.items()}
    model = mixtral(weights["w1"][0].dtype)
    experts = model.model.layers[0].mlp.experts
    both = [torch.cat(each) for each in zip(weights["w1"], weights["w3"], strict=True)]
    experts.gate_up_proj.data, experts.down_proj.data = torch.stack(both), torch.stack(weights["w2"])
    tensors |= {name: value for name, value in model.state_dict().items() if ".experts." not in name}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "quantization_config": config}))
    return model


def _agrees(model: Any, want: Any) -> None:
    for name in ("gate_up_proj", "down_proj"):
        have, wanted = (getattr(each.model.layers[0].mlp.experts, name) for each in (model, want))
        torch.testing.assert_close(have, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "awq", "fp8 blocks", "int8, one scale"))
def test_experts_have_the_weights_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """Breaks if an expert is another one, gate is taken for up, or a scale of one expert or matrix is another's."""
    want = saved(kind, tmp_path)
    dtype = want.dtype
    model = autopar.store_weights(mixtral(dtype), like=tmp_path) if kind != "gptq, sorted" else mixtral(dtype)
    if kind == "gptq, sorted":  # inputs in an order of each expert's own are not kept so
        with pytest.raises(AutoparError, match="no linear layer or experts"):
            autopar.store_weights(model, like=tmp_path)
        load_pretrained(model, tmp_path, torch.device("cpu"))
    else:
        assert [how.experts for _, how in stored_modules(model)] == [EXPERTS, EXPERTS]
    _agrees(model, want)
    plain = mixtral(dtype)
    load_pretrained(plain, tmp_path, torch.device("cpu"))
    _agrees(plain, want)


def gpt_oss(width: int = 32) -> Any:
    import transformers

    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=width, num_local_experts=EXPERTS, num_experts_per_tok=2, vocab_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config).eval()


def in_blocks(folder: Path) -> dict[str, Tensor]:
    """A checkpoint of gpt-oss's in MX blocks; its experts' parameters, by transformers' own function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    tensors = {name: value for name, value in gpt_oss().state_dict().items() if not name.endswith("_proj")}
    want = {}
    for name, out, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        blocks = torch.randint(0, 256, (EXPERTS, out, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 130, (EXPERTS, out, inputs // 32), dtype=torch.uint8)
        want[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        prefix = f"model.layers.0.mlp.experts.{name}"
        tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    tensors |= {name: value for name, value in gpt_oss().state_dict().items() if "self_attn" in name}
    save_file(tensors, folder / "model.safetensors")
    return want


def test_blocks_of_all_experts_are_read(tmp_path: Path) -> None:
    """Breaks if a nibble, an exponent or a block is another's, matrices are not turned, or a box begins elsewhere."""
    want = in_blocks(tmp_path)
    plain = gpt_oss()
    load_pretrained(plain, tmp_path, torch.device("cpu"))
    model = autopar.store_weights(gpt_oss(), like=tmp_path)
    for name, value in want.items():
        for each in (plain, model):
            torch.testing.assert_close(getattr(each.model.layers[0].mlp.experts, name), value, rtol=0, atol=0)
    generator = torch.Generator().manual_seed(0)
    with weights_of(tmp_path) as found:
        for name, blocks in coded_stacks.blocks_of(found.weights).items():
            whole = want[name.rpartition(".")[2]]
            how = blocks.how(True)
            for _ in range(20):
                box = _drawn_box(tuple(whole.shape), generator)
                torch.testing.assert_close(blocks.plain(True, box).float(), whole[box.slices()], rtol=0, atol=0)
                for part, shape in how.shapes().items():
                    box = _drawn_box(shape, generator)
                    all_of_it = blocks.part(part, Box((0,) * 4, shape))
                    assert torch.equal(blocks.part(part, box), all_of_it[box.slices()])


@pytest.mark.moderate
def test_experts_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    """Breaks if shapes or cuts that do not fit are filled all the same."""
    in_blocks(tmp_path)
    with pytest.raises(AutoparError, match="another shape"):
        autopar.store_weights(gpt_oss(64), like=tmp_path)
    model = autopar.store_weights(gpt_oss(), "mxfp4", group=16, leave=("*.self_attn.*",))
    with pytest.raises(AutoparError, match="keeps experts otherwise"):
        load_pretrained(model, tmp_path, torch.device("cpu"))
    other = tmp_path / "mixtral"
    other.mkdir()
    saved("awq", other)
    model = autopar.store_weights(mixtral(torch.half), "int8", leave=("*.self_attn.*",))
    with pytest.raises(AutoparError, match="keeps experts otherwise"):
        load_pretrained(model, other, torch.device("cpu"))
