"""Attention in whatever form it is written becomes one operator that computes the same, or stays, with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.api import interpret
from autopar.api.promote import only
from autopar.ir.program import Program
from autopar.passes.capture import capture
from autopar.passes.fuse_attention import fuse_attention
from tests.unit.test_masks import MASKS, Attention

S, H, D = 6, 4, 4


class Written(nn.Module):
    """Attention of four heads, or of four on two, from x [2, S, 16] to [2, S, 16]; `form` is what stands between."""

    def __init__(self, form: Callable[..., Any], key_heads: int = H) -> None:
        super().__init__()
        self.form, self.key_heads = form, key_heads
        self.q, self.k, self.v = nn.Linear(16, H * D), nn.Linear(16, key_heads * D), nn.Linear(16, key_heads * D)
        self.sinks, self.table = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(H, S, S))

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        q, k, v = (part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.form(self, q, k, v, padding)


def heads_joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def plain(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return heads_joined((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v)


def visible(x: Tensor, padding: Tensor) -> Tensor:
    causal = torch.ones(S, S, dtype=torch.bool, device=x.device).tril()
    return causal & padding.bool()[:, None, None, :]


def filled(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = ((q * 0.5) @ k.mT).masked_fill(~visible(q, padding), -math.inf)
    return heads_joined(functional.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v)


def repeated(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, H // m.key_heads, -1, -1).reshape(2, H, S, D) for x in (k, v))
    return filled(m, q, k, v, padding)


def capped(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * 0.5 / 3.0) * 3.0
    return heads_joined(torch.where(visible(q, padding), scores, -math.inf).softmax(-1) @ v)


def sunk(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.5).masked_fill(~visible(q, padding), -math.inf)
    both = torch.cat([scores, m.sinks.view(1, H, 1, 1).expand(2, -1, S, -1)], -1)
    both = both - both.max(-1, keepdim=True).values
    return heads_joined(functional.dropout(both.softmax(-1)[..., :-1], 0.0) @ v)


def biased(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    causal, zero = torch.ones(S, S, dtype=torch.bool, device=q.device).tril(), torch.zeros((), device=q.device)
    mask = torch.where(causal, zero.to(q.dtype), torch.finfo(q.dtype).min)
    return heads_joined(((q @ k.mT + m.table) * 0.5 + mask).softmax(-1) @ v)


def shifted(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5 - m.table
    return heads_joined((scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v)


def batched(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Batch and heads in one dim, the bias under the product."""
    q, k, v = (x.reshape(2 * H, S, D) for x in (q, k, v))
    bias = m.table.repeat(2, 1, 1)
    scores = torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=0.25).view(2, H, S, S)
    scores = scores.masked_fill(~visible(q, padding), -math.inf)
    return heads_joined(torch.bmm(scores.softmax(-1).view(2 * H, S, S), v).view(2, H, S, D))


def summed(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * 0.5
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).flatten(2)


def one_head(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    q, k, v = (heads_joined(x) for x in (q, k, v))
    return (q @ k.mT * 0.25).softmax(-1) @ v


FORMS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "plain": (plain, 4, "full"),
    "filled": (filled, 4, "causal, padding"),
    "repeated": (repeated, 2, "causal, padding, 4 heads on 2"),
    "capped": (capped, 4, "causal, padding, soft-cap 3"),
    "sunk": (sunk, 4, "causal, padding, sinks"),
    "biased": (biased, 4, "causal, bias"),
    "shifted": (shifted, 4, "bias"),
    "batched": (batched, 4, "causal, padding, bias"),
    "einsum": (summed, 4, "full"),
    "one head": (one_head, 4, "full"),
}


def batch_of(width: int, tokens: int) -> dict[str, Tensor]:
    """Right padding in the second row."""
    padding = torch.ones(2, tokens, dtype=torch.int64)
    padding[1, tokens - 2 :] = 0
    return {"x": torch.randn(2, tokens, width, dtype=torch.float64), "padding": padding}


def both(model: nn.Module, batch: dict[str, Tensor]) -> Program:
    """The fused program, once it has been found equal to the model: outputs and gradients, in float64."""
    model = model.double()
    with only(torch.float64):
        captured = capture(model, batch)
        expected = model(**batch)
    program = fuse_attention(captured)
    outputs, gradients = interpret.run(program, interpret.state_of(model, program), batch)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.autograd.backward([e for e in expected if e.requires_grad], [torch.ones_like(e) for e in expected])
    for have, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(have, want.detach(), rtol=1e-11, atol=1e-11)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-10)
    return program


@pytest.mark.moderate
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    """Breaks if a form is not recognized, or one operator computes something else than what was written."""
    form, key_heads, what = FORMS[name]
    program = both(Written(form, key_heads), batch_of(16, S))
    assert [(site.what, site.why) for site in program.attention] == [(what, "")]
    names = [str(node.target) for node in program.regions[0].graph.nodes]
    assert names.count("autopar.attention.default") == 1
    assert not any("softmax" in each or "bmm" in each or "einsum" in each for each in names)


UNLIKE = ("additive, nothing seen", "additive documents, padding")  # torch's gradients are wrong there


@pytest.mark.moderate
@pytest.mark.parametrize("name", [name for name in MASKS if name not in UNLIKE])
def test_masks(name: str) -> None:
    """Breaks if a mask that was recognized shows another key, or hides one."""
    program = both(Attention(MASKS[name][0]), batch_of(8, 8))
    assert all(site.fused for site in program.attention)


def dropped(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return heads_joined(functional.dropout((q @ k.mT).softmax(-1), 0.25) @ v)


@pytest.mark.moderate
def test_dropout_keeps_its_probability() -> None:
    """Breaks if the dropout of probabilities is lost, or drawn twice."""
    batch = batch_of(16, S)
    for form, wanted in ((dropped, 0.25), (plain, None)):
        program = fuse_attention(capture(Written(form).double(), batch))
        (node,) = (n for n in program.regions[0].graph.nodes if str(n.target) == "autopar.attention.default")
        assert node.kwargs.get("dropout_p") == wanted
        assert not any(str(n.target) == "aten.dropout.default" for n in program.regions[0].graph.nodes)


def returned(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
    weights = (q @ k.mT * 0.5).softmax(-1)
    return heads_joined(weights @ v), weights


def read_twice(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5
    return heads_joined(scores.softmax(-1) @ v) + scores.mean((1, 3))[..., None]


def softly_filled(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return heads_joined((q @ k.mT).masked_fill(~visible(q, padding), -100.0).softmax(-1) @ v)


def finitely_filled(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    least = torch.finfo(q.dtype).min
    return heads_joined((q @ k.mT).masked_fill(~visible(q, padding), least).softmax(-1) @ v)


def mixed(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    mixing = m.table[:, :H, 0]
    scores = torch.einsum("bhst,gh->bgst", q @ k.mT, mixing)  # talking heads
    return heads_joined(scores.softmax(-1) @ v)


def filled_again(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    hidden = ~visible(q, padding)
    return heads_joined((q @ k.mT).masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0.0) @ v)


LEFT: dict[str, tuple[Callable[..., Any], str]] = {
    "returned": (returned, "its probabilities are an output of the model"),
    "read twice": (read_twice, "its scores are read by softmax, mean"),
    "softly filled": (softly_filled, "its scores are filled with -100, which hides no key for sure"),
    "finitely filled": (finitely_filled, "its mask, which may hide all keys of a query, fills scores with"),
    "filled again": (filled_again, "its probabilities are read by masked_fill"),
    "mixed": (mixed, "its scores are made by einsum"),
}


@pytest.mark.moderate
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    """Breaks if something that is no plain attention, or is read elsewhere, is fused, or left without a reason."""
    form, why = LEFT[name]
    program = both(Written(form), batch_of(16, S))
    (site,) = program.attention
    assert not site.fused and site.why.startswith(why)
    assert program.notes == (f"attention in the model stays as it is written: {site.why}",)
    assert not any("autopar" in str(node.target) for node in program.regions[0].graph.nodes)


def test_a_product_that_is_no_attention() -> None:
    """Breaks if any softmax counts as attention."""

    class Gate(nn.Module):
        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return x.softmax(-1) @ x.mT

    assert fuse_attention(capture(Gate(), batch_of(4, 3))).attention == ()


@pytest.mark.moderate
def test_a_query_whose_keys_are_all_hidden() -> None:
    """Breaks if hiding by a large number is taken for leaving out: such a query attends to all keys alike."""

    def hidden(m: Written, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        mask = torch.where(
            visible(q, padding), torch.zeros((), dtype=q.dtype, device=q.device), torch.finfo(q.dtype).min
        )
        return heads_joined((q @ k.mT * 0.5 + mask).softmax(-1) @ v)

    batch = batch_of(16, S)
    batch["padding"] = torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6])
    program = both(Written(hidden), batch)
    assert [site.what for site in program.attention] == ["bias"]


@pytest.mark.moderate
def test_constants_that_nobody_reads_are_gone() -> None:
    """Breaks if a mask that became an option is still made, or a constant is still declared."""

    class Constant(Attention):
        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            mask = torch.tensor([[True, False], [True, True]], device="cpu").to(x.device)
            self.mask = lambda x, p: mask
            return super().forward(x[:, :2], padding)

    batch = batch_of(8, 2)
    captured = capture(Constant(lambda x, p: None).double(), batch)
    program = fuse_attention(captured)
    assert [site.what for site in program.attention] == ["causal"]
    assert captured.constants and not program.constants
    assert {v.name for v in captured.variables} - {v.name for v in program.variables} == set(captured.constants)
    assert not any(slot.name in captured.constants for slot in program.regions[0].slots)


def test_layers_that_share_a_mask_read_the_same_keys() -> None:
    """Breaks if each layer makes keys of its own out of one padding mask."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Written(filled) for _ in range(2))

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, padding)
            return x

    graph = both(Two(), batch_of(16, S)).regions[0].graph
    nodes = [node for node in graph.nodes if str(node.target) == "autopar.attention.default"]
    assert len(nodes) == 2
