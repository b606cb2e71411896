"""Models by name: what is shipped, how they are shrunk, their batches, and what is particular to HuggingFace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import huggingface
from autopar.base.huggingface.tiny import kinds, shrunk
from autopar.cli.models import catalogue
from autopar.cli.models.plain import MLP

# Parameters of the published models.
NUM_PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "bert-base": 109_514_298, "bert-large": 335_174_458,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360, "qwen3-0.6b": 596_049_920, "mistral-7b": 7_241_732_096, "gemma-2-2b": 2_614_341_888,
    "gemma-2-27b": 27_227_128_320, "phi-3-mini": 3_821_079_552, "phi-3-medium": 13_960_238_080,
    "t5-base": 222_903_552, "t5-3b": 2_851_598_336, "vit-base": 86_567_656, "vit-large": 304_326_632,
    "whisper-small": 241_734_912, "whisper-large-v3": 1_543_490_560, "clip-vit-base-patch32": 151_277_313,
    "clip-vit-large-patch14": 427_616_513,
}  # fmt: skip


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shipped_configurations_are_the_published_models(name: str) -> None:
    """Breaks if a size in a bundled configuration is wrong, or a model no longer builds on meta."""
    loaded = catalogue.load(name, batch=(2, 8))
    assert sum(p.numel() for p in loaded.model.parameters()) == NUM_PARAMETERS[name]
    batch = [value for value in loaded.batch.values() if isinstance(value, torch.Tensor)]
    assert all(tensor.is_meta for tensor in (*loaded.model.parameters(), *batch))
    assert all(tensor.shape[0] == 2 for tensor in batch)
    if "input_ids" in loaded.batch:
        assert loaded.batch["input_ids"].shape == (2, 8)


def test_names_and_their_summaries() -> None:
    """Breaks if a name is lost, or `autopar models` cannot describe it."""
    assert {*NUM_PARAMETERS, "llama", "bert", "mlp", "cnn"} <= set(catalogue.names())
    summaries = {entry.name: entry for entry in catalogue.entries()}
    assert "126 layers, hidden 16384, 128 heads (8 KV)" in summaries["llama-3.1-405b"].summary
    assert summaries["llama"].summary.startswith("same as llama-3.1-8b: ")
    assert summaries["t5-3b"].summary == "24 + 24 layers, hidden 1024, 32 heads, vocabulary 32128"
    assert summaries["clip-vit-base-patch32"].summary.count("12 layers") == 2


@pytest.mark.parametrize("name", catalogue.names())
def test_tiny_models_run_with_their_batch(name: str) -> None:
    """Breaks if a tiny model does not give a finite loss on its own batch, or a gradient to every parameter."""
    loaded = catalogue.load(name, tiny=True, device="cpu", dtype="float64")
    output = loaded.model(**loaded.batch)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    logits = output.logits_per_image if name.startswith("clip") else output.logits
    assert logits.shape[0] == 8
    assert all((p.grad is not None) == p.requires_grad for p in loaded.model.parameters())
    assert all(p.dtype == torch.float64 for p in loaded.model.parameters())
    assert sum(p.numel() for p in loaded.model.parameters()) < 300_000


@pytest.mark.moderate
def test_tiny_keeps_what_is_particular() -> None:
    """Breaks if shrinking loses grouped KV heads, llama3's rope, GPT-2's awkward vocabulary or tied weights."""
    llama = catalogue.load("llama", tiny=True).model
    config = llama.config
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert sizes == (64, 8, 4, 8)
    assert (config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (2, 128, 128)
    assert config.rope_parameters["rope_type"] == "llama3"
    gpt2 = catalogue.load("gpt2", tiny=True).model
    assert (gpt2.config.n_embd, gpt2.config.n_head, gpt2.config.vocab_size, gpt2.config.n_positions) == (64, 8, 127, 64)
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    phi3 = catalogue.load("phi-3-medium", tiny=True).model
    assert phi3.model.layers[0].self_attn.qkv_proj.weight.shape == (64 + 2 * 32, 64)
    gemma2 = catalogue.load("gemma2", tiny=True).model.config
    assert gemma2.layer_types == ["sliding_attention", "full_attention"] and gemma2.sliding_window == 6
    assert gemma2.num_attention_heads * gemma2.head_dim == 2 * gemma2.hidden_size
    t5 = catalogue.load("t5-3b", tiny=True).model.config
    assert t5.num_heads * t5.d_kv == 2 * t5.d_model
    clip = catalogue.load("clip", tiny=True).model.config
    assert (clip.text_config.hidden_size, clip.vision_config.image_size, clip.projection_dim) == (64, 16, 32)
    assert catalogue.load("vit", tiny=True).model.config.num_labels == 16
    falcon = [shrunk(transformers.FalconConfig(num_kv_heads=kv_heads), 8) for kv_heads in (None, 6)]
    assert [config.num_kv_heads for config in falcon] == [8, 4]


KINDS: dict[str, tuple[str, int]] = {
    "DeepseekV3": ("DeepseekV3ForCausalLM", 4),  # three dense layers come before the first with experts
    "Jamba": ("JambaForCausalLM", 5),  # attention in every eighth layer from the fifth, experts in every second
    "Llama4Text": ("Llama4ForCausalLM", 4),  # every fourth layer has no positions
    "Qwen3Next": ("Qwen3NextForCausalLM", 2),  # its kinds are a list, of which one of each is kept
    "Qwen2Moe": ("Qwen2MoeForCausalLM", 2),
    "T5": ("T5ForConditionalGeneration", 2),
}


@pytest.mark.parametrize("name", KINDS)
def test_tiny_has_a_block_of_each_kind(name: str) -> None:
    """Breaks if what is proven of a tiny model leaves out a kind of layer that the large one has: its experts, its
    attention.
    """
    config: Any = getattr(transformers, f"{name}Config")()
    architecture, layers = KINDS[name]
    with torch.device("meta"):
        given = config.to_dict() | {"architectures": [architecture]}
        small = huggingface.build(given, huggingface.Settings(tiny=True))
        same = shrunk(config, 0, layers=None)
        large = getattr(transformers, architecture)(same)
    found, wanted = kinds(small), kinds(large)
    assert found.keys() == wanted.keys()
    assert {kind for each in found.values() for kind in each} == {kind for each in wanted.values() for kind in each}
    assert max(map(len, found.values())) == layers < max(map(len, wanted.values()))
    assert sum(each.numel() for each in small.parameters()) < 2_000_000


def test_kinds_of_blocks_are_told_apart_by_what_they_hold_not_by_sizes() -> None:
    """Breaks if blocks of other sizes are of another kind, or those with other modules, flags or weights are not."""

    def of(**flags: object) -> nn.Module:
        block = nn.Sequential(nn.Linear(4, 8, bias=bool(flags.get("bias", True))), nn.Linear(8, 4))
        block.sliding = flags.get("sliding", False)  # type: ignore[assignment]
        return block

    wider = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    wider.sliding = False  # type: ignore[assignment]
    model = nn.Module()
    model.layers = nn.ModuleList([of(), wider, of(sliding=True), of(bias=False), nn.Linear(4, 4)])
    model.experts = nn.ModuleList([nn.ModuleList([of(), of()]), nn.ModuleList([of(), of(), of()])])
    found = kinds(model)
    assert [found["layers"].index(kind) for kind in found["layers"]] == [0, 0, 2, 3, 4]
    assert list(found) == ["layers", "experts"] and len(set(found["experts"])) == 1


def test_the_seed_decides_and_the_callers_random_state_is_kept() -> None:
    """Breaks if two loads with one seed differ, two seeds agree, or loading draws from the caller's generator."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, same, other = (catalogue.load("gpt2", tiny=True, device="cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    weights = [loaded.model.transformer.wte.weight for loaded in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(first.batch["input_ids"], same.batch["input_ids"])


def test_the_batch_of_a_masked_model() -> None:
    """Breaks if padding stops being to the right, a label sits on padding, or a row is left without labels."""
    batch = catalogue.load("bert", tiny=True, device="cpu", batch=(8, 16)).batch
    mask, labels = batch["attention_mask"], batch["labels"]
    assert (mask.diff(dim=1) <= 0).all() and mask[0].all() and not mask.all()
    assert ((labels != -100) <= mask.bool()).all()
    assert (labels != -100).any(dim=1).all() and (labels == -100).any()


def test_batches_of_two_kinds() -> None:
    """Breaks if speech, pairs or translations lose their padding, or a text loses the token it is read at."""
    speech = catalogue.load("whisper", tiny=True, device="cpu").batch
    assert speech["input_features"].shape == (8, 16, 32) and speech["labels"].shape == (8, 16)
    translation = catalogue.load("t5", tiny=True, device="cpu").batch
    assert translation["labels"].shape == (8, 8) and not translation["attention_mask"].all()
    for labels in (speech["labels"], translation["labels"]):
        assert (labels[0] != -100).all() and (labels[:, 0] != -100).all() and (labels == -100).any()
    loaded = catalogue.load("clip", tiny=True, device="cpu")
    end = loaded.model.config.text_config.eos_token_id
    first = (loaded.batch["input_ids"] == end).int().argmax(-1)
    assert loaded.batch["return_loss"] is True
    assert torch.equal(first + 1, loaded.batch["attention_mask"].sum(-1)) and len(set(first.tolist())) > 2


@pytest.mark.moderate
def test_options() -> None:
    """Breaks if dropout, overrides, dtype or a longer tiny batch do not reach the model."""
    bert = catalogue.load("bert", tiny=True, dropout=0.0).model
    assert {module.p for module in bert.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}
    assert catalogue.load("bert", tiny=True).model.config.hidden_dropout_prob == 0.1
    deep = catalogue.load("llama", tiny=True, overrides={"num_hidden_layers": 5}).model
    assert len(deep.model.layers) == 5
    assert len(catalogue.load("qwen3", tiny=True, overrides={"num_hidden_layers": 5}).model.model.layers) == 5
    assert len(catalogue.load("gpt2", tiny=True, overrides={"num_hidden_layers": 3}).model.transformer.h) == 3
    clip = catalogue.load("clip", tiny=True, dropout=0.25).model.config
    assert clip.text_config.attention_dropout == clip.vision_config.attention_dropout == 0.25
    half = catalogue.load("llama", tiny=True, dtype=torch.bfloat16).model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert catalogue.load("gpt2", tiny=True, batch=(2, 100)).batch["input_ids"].shape == (2, 100)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3", "t5", "vit", "gemma2", "phi3", "whisper", "clip"])
def test_a_model_from_meta_initializes_module_by_module(name: str) -> None:
    """Breaks if a model built on meta keeps unset buffers (rotary frequencies) or other weights' distributions."""
    expected = catalogue.load(name, tiny=True, device="cpu").model
    model = catalogue.load(name, tiny=True).model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    model.tie_weights()
    torch.manual_seed(0)
    model.apply(huggingface.initializer(model))
    reference = dict(expected.named_parameters())
    for key, parameter in model.named_parameters():
        std = reference[key].std(correction=0).item()
        # Two standard deviations of n draws each differ by 1/√n of theirs, in the mean.
        spread = max(0.15, 4 / parameter.numel() ** 0.5)
        assert parameter.std(correction=0).item() == pytest.approx(std, rel=spread, abs=1e-3), key
        # Two means of as many draws lie within four deviations of their difference.
        room = max(0.01, 4 * std * (2 / parameter.numel()) ** 0.5) if std else 1e-6
        assert parameter.mean().item() == pytest.approx(reference[key].mean().item(), abs=room), key
    for key, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


def test_a_plain_model_resets_its_parameters() -> None:
    """Breaks if modules outside transformers are left as they are."""
    model = MLP(8, 8, 1, 4)
    with torch.no_grad():
        model.classifier.weight.fill_(77)
    huggingface.initialize_module(model.classifier, model)
    assert model.classifier.weight.abs().max() < 1


def test_the_cache_is_off_for_capture_only() -> None:
    """Breaks if training capture leaves a cache in the output, or changes the model's configuration for good."""
    loaded = catalogue.load("llama", tiny=True, device="cpu")
    assert loaded.model(**loaded.batch).past_key_values is not None
    with pytest.raises(RuntimeError, match="stop"), huggingface.training_capture(loaded.model):
        assert loaded.model(**loaded.batch).past_key_values is None
        raise RuntimeError("stop")
    assert loaded.model.config.use_cache
    assert huggingface.is_hf(loaded.model) and not huggingface.is_hf(torch.nn.Linear(1, 1))
    with huggingface.training_capture(torch.nn.Linear(1, 1)):
        pass


def test_a_configuration_of_the_users_own(tmp_path: Path) -> None:
    """Breaks if a JSON file, or a folder with config.json, no longer serves as a model."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for spec in (str(tmp_path), str(tmp_path / "config.json")):
        loaded = catalogue.load(spec)
        assert type(loaded.model).__name__ == "LlamaForCausalLM"
        assert loaded.batch["input_ids"].shape == (8, 32)


def test_a_callable_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if module:callable in the current folder is not found, or its options are silently dropped."""
    (tmp_path / "my_training.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Linear(2, 2), {'input': torch.ones(1, 2)}\n"
        "def bad():\n    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    loaded = catalogue.load("my_training:make")
    assert loaded.name == "make" and list(loaded.batch) == ["input"] and sys.path == path
    with pytest.raises(AutoparError, match="do not apply"):
        catalogue.load("my_training:make", tiny=True)
    with pytest.raises(AutoparError, match="must return a torch.nn.Module and a batch"):
        catalogue.load("my_training:bad")
    with pytest.raises(AutoparError, match="'my_training:nothing' names no callable"):
        catalogue.load("my_training:nothing")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("lama", {}, "no model 'lama'.*llama-3.1-8b"),
        ("org/not-on-disk", {}, "no model 'org/not-on-disk'"),
        ("gpt2", {"batch": (8, 2048)}, "cannot take 2048 tokens.*1024.*--batch 8x1024"),
        ("gpt2", {"batch": (0, 8)}, "at least one row"),
        ("gpt2", {"dtype": "int8"}, "int8 cannot be the dtype"),
        ("gpt2", {"dtype": "float23"}, "float23 cannot be the dtype"),
        ("gpt2", {"overrides": {"num_layer": 3}}, "no field 'num_layer'"),
        ("mlp", {"overrides": {"depth": 3}}, "mlp has other settings than depth"),
    ],
)
def test_bad_questions(spec: str, options: dict, message: str) -> None:
    """Breaks if a mistake gives a traceback from inside transformers instead of the remedy."""
    with pytest.raises(AutoparError, match=message):
        catalogue.load(spec, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"hidden_size": 8}', "no model_type"),
        ('{"model_type": "llama", "architectures": ["LlamaForNothing"]}', "no model class 'LlamaForNothing'"),
        ('{"model_type": "nothing"}', "transformers refuses the configuration"),
    ],
)
def test_damaged_configurations(tmp_path: Path, text: str, message: str) -> None:
    """Breaks if a damaged file is not named as such."""
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(AutoparError, match=message):
        catalogue.load(str(path))
