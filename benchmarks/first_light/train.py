"""Small models of several families: five AdamW steps against eager, and how often a step waits for the device.

Then what scripts do beside training: generation, a batch that is otherwise than the program takes for granted.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.runtime.graphs import waiting_for_device
from benchmarks.first_light.section import Section, alone

MIXTURE = "qwen3_moe"
"""Of experts: waits where it groups tokens by expert, as eager does."""
NORMS = "resnet"
"""Of convolutions before batch norms, whose gradients cancel: AdamW makes steps of what rounding leaves.
In float32 alone, in which rounding stays small, and without cuDNN, whose gradients of such a model were off by 5% on an
H100, without TF32 too (docs/gpu.md).
"""
MODELS = ("llama", "qwen3", "gpt2", "bert", "t5", MIXTURE, "vit", NORMS)
STEPS = 5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the losses of five steps, relative."""


def run(section: Section) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.enabled = False
    with alone(section):
        for name in MODELS[:2] if section.quick else MODELS:
            for dtype, compiled in _ways(section)[: 2 if name == NORMS else 4]:
                text = f"{name} {str(dtype).removeprefix('torch.')} {'compiled' if compiled else 'uncompiled'}"
                section.attempt(text, partial(_train, section, text, name, dtype, compiled))
        for name in ("llama", "gpt2", "t5"):
            section.attempt(f"generate {name}", partial(_generate, section, f"generate {name}", name))
        section.attempt("taken for granted", partial(_granted, section))


def _model(section: Section, name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """The model on the CPU, its batch on the device."""
    if name == MIXTURE:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            output_router_logits=True, router_aux_loss_coef=0.1,
        )  # fmt: skip
        ids = torch.randint(0, 256, (4, 48))
        model, batch = Qwen3MoeForCausalLM(config).to(dtype), {"input_ids": ids, "labels": ids}
    else:
        loaded = catalogue.load(name, tiny=True, batch=(4, 48), device="cpu", dropout=0.0, dtype=dtype)
        model, batch = loaded.model, dict(loaded.batch)
    return model, {key: value.to(section.device) for key, value in batch.items()}


def _generate(section: Section, text: str, name: str) -> None:
    """Greedy tokens of the compiled model and of eager, in float32."""
    model, batch = _model(section, name, torch.float32)
    eager = model.to(section.device).eval()
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    ours = autopar.compile(copy.deepcopy(eager), mesh, example_inputs=batch, strategy="zero3")
    said = {"max_new_tokens": 12, "do_sample": False}
    wanted, found = (each.generate(batch["input_ids"], **said) for each in (eager, ours))
    section.row(text, torch.equal(wanted, found), tokens=found[0].tolist(), eager=wanted[0].tolist())


class _Branching(nn.Module):
    """Decides by its input's values, which a program takes for granted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.min() < 0:
            pixels = (pixels + 1) / 2
        return self.linear(pixels).square().mean()


def _granted(section: Section) -> None:
    """A batch that is otherwise than the program takes for granted: told before a weight gets its NaN, nobody waits."""
    x = torch.rand(4, 8).to(section.device)
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(_Branching().to(section.device), mesh, strategy="zero3", example_inputs={"pixels": x})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).backward()
    waits = waiting_for_device(lambda: model(x).backward()) if section.on_cuda else None
    said = ""
    try:
        model(x - 0.5).backward()
        optimizer.step()
    except AutoparError as error:
        said = str(error)
    finite = all(bool(p.to_local().isfinite().all()) for p in model.parameters())
    section.row("taken for granted", "takes for granted" in said and finite and not waits, said=said[:200], waits=waits)


def _ways(section: Section) -> list[tuple[torch.dtype, bool | str]]:
    """Without a GPU regions go through Dynamo and AOTAutograd, not through a C++ compiler."""
    compiler: bool | str = True if section.on_cuda else "aot_eager"
    ways: list[tuple[torch.dtype, bool | str]] = [(torch.float32, False), (torch.float32, compiler)]
    return ways if not section.on_cuda else [*ways, (torch.bfloat16, False), (torch.bfloat16, compiler)]


def _train(section: Section, text: str, name: str, dtype: torch.dtype, compiled: bool | str) -> None:
    model, batch = _model(section, name, dtype)
    eager = model.to(section.device)
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    ours = autopar.compile(copy.deepcopy(eager), mesh, example_inputs=batch, strategy="zero3", compile_regions=compiled)
    if section.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    wanted, found = (_losses(each, batch, name == NORMS) for each in (eager, ours))
    difference = max(abs(a - b) / abs(a) for a, b in zip(wanted, found, strict=True))
    waits = waiting_for_device(lambda: ours(**batch).loss.backward()) if section.on_cuda else None
    right = difference <= TOLERANCES[dtype] and (name == MIXTURE or not waits)
    section.row(text, right, difference=difference, eager=wanted, ours=found, waits=waits, **section.memory())


def _losses(model: Any, batch: dict[str, Any], plainly: bool) -> list[float]:
    """Of five steps of AdamW, or plainly of SGD."""
    make = partial(torch.optim.SGD, lr=1e-2) if plainly else partial(torch.optim.AdamW, lr=1e-3)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
