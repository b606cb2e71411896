"""Attention of a token through a window, in plans for `generate()`: what masks show it is read when they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.api.generation import phase_inputs
from autopar.base.huggingface import caches
from autopar.cost.operator_time import operator_work
from autopar.cost.roofline import Work
from autopar.cost.windows import window_seconds
from autopar.ir.region import Region

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def _model(kinds: list[str] | None, window: int) -> Any:
    import transformers

    given = {**SIZES, "sliding_window": window, "layer_types": kinds}
    with torch.device("meta"):
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**given)).eval()


def _shown(model: Any, **wanted: Any) -> dict[str, float]:
    found = phase_inputs(model, autopar.Generation(batch=2, **wanted))
    assert not caches.shown_among(found["prefill"])
    return caches.shown_among(found["decode"])


@pytest.mark.moderate
def test_what_masks_show() -> None:
    """Breaks if only the first token's mask is looked at, which may be shorter than a window, or masks that show all
    that is written count as windows.
    """
    kinds = ["sliding_attention", "full_attention"]
    name = "attention_mask.sliding_attention"
    assert _shown(_model(kinds, 6), prompt=20, new_tokens=9) == {name: 6.0}
    assert _shown(_model(kinds, 6), prompt=20, new_tokens=9, padded=True) == {name: 6.0}
    tokens = range(2, 11)  # written before each of them: 3, 4, 5, then 6 are seen
    seen = sum(min(6, written + 1) for written in tokens) / len(tokens)
    assert _shown(_model(kinds, 6), prompt=2, new_tokens=10) == pytest.approx({name: seen})
    assert _shown(_model(kinds, 64), prompt=20, new_tokens=9) == {}


def _read(region: Region, mesh: autopar.Mesh) -> list[tuple[Work, Work]]:
    """What attention does by itself, and through windows."""
    read: list[Work] = []

    def work(name: str) -> Work:
        call, rule = region.ops[name]
        return operator_work(call, rule, region.strategies[name], mesh)

    def seconds(done: Work) -> float:
        read.append(done)
        return 0.0

    names = window_seconds(region, mesh.sizes, work, seconds)
    return list(zip(map(work, names), read, strict=True))


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["tensor", "split_kv"])
def test_a_token_reads_its_window(strategy: str) -> None:
    """Breaks if attention through a window is priced as reading its whole cache, or another layer's as reading less:
    one region serves both, and has the mean.
    """
    mesh, wanted = autopar.Mesh.parse("x=2", hardware="h100"), autopar.Generation(batch=2, prompt=20, new_tokens=21)
    model = _model(["sliding_attention", "full_attention"], 6)
    plan = autopar.plan_generation(model, mesh, wanted, strategy=strategy)
    program = plan.decode.program
    assert program is not None
    found = [
        (own, done, program.num_calls(region.name)) for region in program.regions for own, done in _read(region, mesh)
    ]
    whole = 40 // 2 if strategy == "split_kv" else 40
    mean = {1: 6.0, 2: (6 + whole) / 2}
    assert found
    for own, done, calls in found:
        assert own.dims is not None and done.dims is not None
        assert own.dims[1] == whole
        assert done.dims[1] == mean[calls]
        assert done.flops == pytest.approx(own.flops * mean[calls] / whole)
        kept = 2 * 2 * 2 * whole * 8 * 4 // (1 if strategy == "split_kv" else 2)  # rows, heads, keys and values
        assert own.moved_bytes - done.moved_bytes == pytest.approx(kept * (1 - mean[calls] / whole))
