"""HuggingFace's models, as they are written: what is found of their attention, and that the programs are theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar import pipeline
from autopar.api import interpret, proof
from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.base.huggingface import huggingface
from autopar.base.torch_compat import tracing
from autopar.cli.models import batches
from autopar.ir.nodes import copy_graph
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.capture import capture
from autopar.passes.fuse_attention import fuse_attention
from autopar.strategies.request import Request

pytestmark = pytest.mark.slow

ROWS, TOKENS = 4, 16
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
TOWERS: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "dropout": 0.0,
}  # fmt: skip
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

# The class, its configuration, and what is found without padding, with `sdpa` and `eager` where both are there.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", GROUPED, "2 × causal, 4 heads on 2"),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}, "2 × causal, window 5, 4 heads on 2"),
    "gemma2": (
        "Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 6},
        "1 × causal, window 6, soft-cap 50, 4 heads on 2; 1 × causal, soft-cap 50, 4 heads on 2",
    ),
    "gpt2": (
        "GPT2LMHeadModel", NO_DROPOUT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
        "2 × causal",
    ),
    "opt": (
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.0}, "2 × causal",
    ),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "hidden_dropout": 0.0,
         "attention_dropout": 0.0},
        "2 × causal, bias",
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        GROUPED | {"head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1,
                   "layer_types": ["sliding_attention", "full_attention"], "experts_implementation": "batched_mm"},
        "1 × causal, window 5, sinks, 4 heads on 2; 1 × causal, sinks, 4 heads on 2",
    ),
    "bert": (
        "BertForMaskedLM", SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "2 × full",
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
        "1 × bias; 1 × causal, bias; 1 × full",
    ),
    "bart": ("BartForConditionalGeneration", TOWERS | {"max_position_embeddings": 64}, "2 × full; 1 × causal"),
}  # fmt: skip
EAGER_ONLY = ("gemma2", "bloom", "gpt_oss")


def padding(kind: str, rows: int, tokens: int) -> Tensor:
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    for row in range(1, rows):
        if kind == "right":
            mask[row, tokens - 3 * row :] = 0
        else:
            mask[row, : 3 * row] = 0
    return mask


def build(name: str, form: str, **fields: Any) -> nn.Module:
    architecture, config, _ = MODELS[name]
    config = {"architectures": [architecture], **config, **fields}
    experts = config.pop("experts_implementation", None)
    made = getattr(transformers, architecture).config_class(**config)
    made._attn_implementation = form
    if experts:
        made._experts_implementation = experts
    with huggingface.quiet():
        model: nn.Module = getattr(transformers, architecture)._from_config(made, attn_implementation=form)
    return model.train()


@lru_cache(maxsize=64)
def fused(name: str, form: str, kind: str) -> tuple[Program, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = build(name, form)
    batch = batches.make_batch(model, ROWS, TOKENS)
    batch.pop("attention_mask", None)
    if kind != "none":
        batch["attention_mask"] = padding(kind, *batch["input_ids"].shape)
    model, batch = small_model(model, batch, torch.float64, 0)
    with only(torch.float64), huggingface.training_capture(model):
        return fuse_attention(capture(model, batch)), model, batch


def forms() -> list[tuple[str, str, str]]:
    every = [(n, f, k) for n in MODELS for f in ("sdpa", "eager") for k in ("none", "right", "left")]
    return [row for row in every if row[1] == "eager" or row[0] not in EAGER_ONLY]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "form", "kind"), forms())
def test_equal_to_the_model(name: str, form: str, kind: str) -> None:
    """Breaks if one number of a model differs once its attention is one operator: outputs, or any gradient."""
    program, model, batch = fused(name, form, kind)
    state, inputs = interpret.state_of(model, program), interpret.input_tensors(program, batch)
    outputs, gradients = interpret.run(program, state, inputs)
    with only(torch.float64), huggingface.training_capture(model):
        expected = model(**batch)
    flat = [value for value in tracing.tree_flatten(expected)[0] if isinstance(value, Tensor)]
    flat[program.output_names.index("loss")].backward()
    for have, want in zip(outputs, flat, strict=True):
        torch.testing.assert_close(have, want.detach(), rtol=1e-10, atol=1e-10)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    scale = sum(float(grad.square().sum()) for grad in wanted.values()) ** 0.5
    assert all(float((gradients[n] - grad).norm()) < 1e-10 * scale for n, grad in wanted.items())
    assert all(site.fused for site in program.attention)


@pytest.mark.parametrize("form", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_found(name: str, form: str) -> None:
    """Breaks if a window, a soft-cap, sinks or repeated heads of a model are not seen any more."""
    from autopar.views.text import attention_line

    if form == "sdpa" and name in EAGER_ONLY:
        pytest.skip("the model has no sdpa")
    program, _, _ = fused(name, form, "none")
    count = len(program.attention)
    assert attention_line(program.attention) == f"{count} found, {count} fused: {MODELS[name][2]}"


@pytest.mark.parametrize(("name", "form", "what"), [
    ("llama", "sdpa", "2 × causal, padding, 4 heads on 2"),
    ("mistral", "sdpa", "2 × causal, window 5, padding, 4 heads on 2"),
    ("bert", "sdpa", "2 × padding"),
    # A query of padding, whose keys are all hidden, attends to all alike: a bias, not `keys`.
    ("mistral", "eager", "2 × bias, 4 heads on 2"),
    ("bert", "eager", "2 × bias"),
    ("t5", "eager", "2 × bias; 1 × causal, bias"),
])  # fmt: skip
def test_what_is_found_of_padding(name: str, form: str, what: str) -> None:
    """Breaks if padding is no longer read as keys, or is where that is not the same."""
    from autopar.views.text import attention_line

    program, _, _ = fused(name, form, "left")
    count = len(program.attention)
    assert attention_line(program.attention) == f"{count} found, {count} fused: {what}"


def test_masks_of_encoders_are_small() -> None:
    """Breaks if a padding mask that is added is kept, or saved, for every query."""
    program, _, _ = fused("bert", "eager", "left")
    nodes = [n for n in program.regions[0].graph.nodes if str(n.target) == "autopar.attention.default"]
    assert [tuple(n.args[3].meta["val"].shape) for n in nodes] == [(ROWS, 1, 1, TOKENS)] * 2


# -- what a proof says of a program that has lost something ------------------------------------------------------------


def _without(option: str) -> pipeline.Pass:
    """A broken pass: every attention loses an option, or (`keys`) its padding."""

    def apply(program: Program, request: Request) -> Program:
        (region,) = program.regions
        graph, _ = copy_graph(region.graph)
        for node in graph.nodes:
            if str(node.target) == "autopar.attention.default":
                if option == "keys":
                    node.args = (*node.args[:4], None)
                else:
                    assert option in node.kwargs
                    node.kwargs = {name: value for name, value in node.kwargs.items() if name != option}
        return replace(program, regions=(replace(region, graph=graph),))

    return pipeline.Pass("breaks", apply)


def _proof(name: str, *broken: pipeline.Pass, **fields: Any) -> proof.Proof:
    torch.manual_seed(0)
    model = build(name, "eager" if name in EAGER_ONLY else "sdpa", **fields)
    batch = batches.make_batch(model, ROWS, TOKENS)
    batch["attention_mask"] = padding("left", ROWS, TOKENS)
    if name in EAGER_ONLY:
        del batch["attention_mask"]
    steps = [each for step in pipeline.DEFAULT for each in (step, *(broken if step.name == "fuse_attention" else ()))]
    mesh = Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(model, mesh, example_inputs=batch, strategy="ddp", passes=steps)
    return plan.verify()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "option"), [
    ("mistral", "left"), ("mistral", "right"), ("mistral", "keys"), ("gemma2", "softcap"), ("gemma2", "left"),
])  # fmt: skip
def test_a_proof_finds_what_is_lost(name: str, option: str) -> None:
    """Breaks if a program without a model's window, causality, padding or soft-cap is called equal to it."""
    fields = {"attn_logit_softcapping": 0.5} if option == "softcap" else {}
    if option == "left" and name == "gemma2":
        fields = {"layer_types": ["sliding_attention", "sliding_attention"]}
    assert _proof(name, **fields).ok
    assert not _proof(name, _without(option), **fields).ok


def test_a_window_that_hides_nothing_is_none() -> None:
    """Breaks if a window as wide as the sequence is not the same as none: its program must then be that without one."""
    fields = {"sliding_window": TOKENS}
    assert _proof("mistral", **fields).ok
    model = build("mistral", "sdpa", **fields)
    batch = batches.make_batch(model, ROWS, TOKENS)
    with huggingface.training_capture(model):
        program = fuse_attention(capture(model, batch))
    assert {site.what for site in program.attention} == {"causal, 4 heads on 2"}
