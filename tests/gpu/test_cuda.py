"""On one CUDA device: attention's kernels against the plain formula, and a compiled model on a mesh of one rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli.models import catalogue
from autopar.runtime import kernels

pytestmark = pytest.mark.gpu


# Outputs are averages of values near 1: some 80 roundings of float32 (1.2e-7), 5 of bfloat16 (3.9e-3), which the inputs
# and the result go through. Gradients pass through twice as many products, and sum 128 of them in float32.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", ["full", "causal", "bool mask", "grouped"])
def test_attention_equals_the_formula(dtype: torch.dtype, tolerance: float, kind: str) -> None:
    """A kernel called with the wrong mask, scale or head order gives another result or other gradients."""
    assert kernels.register()
    torch.manual_seed(0)
    heads = 2 if kind == "grouped" else 4
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, heads, 128, 64, device="cuda", dtype=dtype) for _ in range(2))
    mask = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril() if kind == "bool mask" else None
    options = {"scale": 0.125, "right": 0 if kind == "causal" else None}
    out, lse = torch.ops.autopar.attention(q, k, v, mask, **options)
    grads = torch.ops.autopar.attention_backward(
        torch.ones_like(out), q, k, v, mask, None, None, None, out, lse, **options
    )
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        *wide, attn_mask=mask, is_causal=kind == "causal", scale=0.125, enable_gqa=kind == "grouped"
    )
    want.sum().backward()
    torch.testing.assert_close(out.double(), want.detach(), rtol=tolerance, atol=tolerance)
    for have, leaf in zip(grads, wide, strict=True):
        torch.testing.assert_close(have.double(), leaf.grad, rtol=4 * tolerance, atol=4 * tolerance)


def test_a_compiled_model_follows_eager(tmp_path: Path) -> None:
    """The generated program on CUDA and NCCL: devices of constants, casts, streams."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        loaded = catalogue.load("llama", tiny=True, device="cpu", seed=0)
        batch = {name: value.cuda() for name, value in loaded.batch.items()}
        model = loaded.model.cuda()
        want = float(model(**batch).loss.detach())
        compiled = autopar.compile(model, init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)), strategy="zero3")
        loss = compiled(**batch).loss
        loss.backward()
        assert float(loss.detach()) == pytest.approx(want, rel=1e-4)
    finally:
        dist.destroy_process_group()
