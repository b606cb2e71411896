"""`autopar.attention` against its definition, step by step in float64: values, gradients, blocks of keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar import operators as ops
from autopar.operators import scaled_dot_product
from autopar.operators.visibility import sees_every_key, sees_no_key, visible_keys

pytestmark = pytest.mark.unit
TRACED = ops.AUTOGRAD[torch.ops.autopar.attention.default]


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def defined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    scale: float,
    left: int | None = None,
    right: int | None = None,
    prefix: int = 0,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    **_: Any,
) -> Tensor:
    """The formulas of the operator's docstring, one loop over queries and keys for what is seen."""
    (batch, heads, queries, _), num_keys = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.zeros(queries, num_keys, dtype=torch.bool)
    for s in range(queries):
        for t in range(num_keys):
            inside = (left is None or t >= s - left) and (right is None or t <= s + right)
            seen[s, t] = inside or t < prefix
    seen = seen.expand(batch, heads, queries, num_keys)
    if keys is not None:
        seen = seen & keys.view(batch, 1, 1, num_keys)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -1e300)
    if sinks is not None:
        column = sinks.view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        probabilities = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    probabilities = probabilities * seen
    if dropout_p:
        assert seed is not None
        probabilities = ops.dropout(probabilities, dropout_p, seed, 0, [], probabilities.shape)
    return probabilities @ v


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Tensor | None], dict[str, Any]]:
    integers = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    batch, group, kv_heads = integers(1, 2), integers(1, 3), integers(1, 2)
    queries, keys, size, value_size = integers(1, 7), integers(1, 7), integers(1, 4), integers(1, 4)
    heads, seed = group * kv_heads, integers(0, 99)
    q, k = make(batch, heads, queries, size, seed=seed), make(batch, kv_heads, keys, size, seed=seed + 1)
    v = make(batch, kv_heads, keys, value_size, seed=seed + 2)
    kind = draw(st.sampled_from(["none", "float", "bool"]))
    shape = [draw(st.sampled_from([1, full])) for full in (batch, heads, queries, keys)]
    bias = None if kind == "none" else make(*shape, seed=seed + 3)
    bias = bias > 0 if kind == "bool" and bias is not None else bias
    there = make(batch, keys, seed=seed + 4) > -0.5 if draw(st.booleans()) else None
    sinks = make(heads, seed=seed + 5) if draw(st.booleans()) else None
    bound = st.one_of(st.none(), st.integers(0, 4))
    options = {"scale": 0.4, "left": draw(bound), "right": draw(bound), "prefix": draw(st.sampled_from([0, 0, 2]))}
    options["softcap"] = draw(st.sampled_from([0.0, 1.5]))
    options["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    return [q, k, v, bias, there, sinks, torch.tensor(seed)], options


@pytest.mark.moderate
@given(cases())
@settings(max_examples=150, deadline=None)
def test_values_and_gradients_are_those_of_the_definition(case: tuple[list[Tensor | None], dict[str, Any]]) -> None:
    operands, options = case
    shape = [*operands[0].shape[:3], operands[1].shape[2]]  # type: ignore[union-attr]
    leaves = [x.clone().requires_grad_() if x is not None and x.dtype == torch.float64 else x for x in operands]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    want = defined(*leaves, **options)  # type: ignore[arg-type]
    have, lse = TRACED(*leaves, **options, global_shape=shape)
    torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-11)
    assert not lse.isnan().any() and lse.dtype == torch.float64
    g = make(*want.shape, seed=7)
    grads = [torch.autograd.grad(y, wanted, g, allow_unused=True) for y in (have, want)]
    for ours, theirs in zip(*grads, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.moderate
@given(cases(), st.integers(0, 7))
@settings(max_examples=80, deadline=None)
def test_blocks_of_keys_merge_to_the_whole(case: tuple[list[Tensor | None], dict[str, Any]], cut: int) -> None:
    """Breaks if a block's log-sum-exp, its places or its gradients are not its own."""
    (q, k, v, bias, there, _, seed), options = case
    assert q is not None and k is not None and v is not None
    cut, num_keys = min(cut, k.shape[2]), k.shape[2]
    options = options | {"global_shape": [*q.shape[:3], num_keys]}
    whole = ops.attention(q, k, v, bias, there, None, seed, **options)
    g = make(*whole[0].shape, seed=9)
    merged, parts = None, []
    for start, stop in ((0, cut), (cut, num_keys)):
        own = [x[:, :, start:stop] for x in (k, v)]
        columns = bias if bias is None or bias.shape[3] == 1 else bias[..., start:stop]
        own += [columns, None if there is None else there[:, start:stop], None, seed]
        out, lse = ops.attention(q, *own, **options, key_starts=[start])
        merged = (out, lse) if merged is None else ops.merge_attention(*merged, out, lse)
        parts.append(ops.attention_backward(g, q, *own, *whole, **options, key_starts=[start]))
    assert merged is not None
    torch.testing.assert_close(merged, whole, rtol=1e-11, atol=1e-11)
    dq, dk, dv = ops.attention_backward(g, q, k, v, bias, there, None, seed, *whole, **options)
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]], 2), dk, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]], 2), dv, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("starts", [[0, 2, 4, 6], [2, 6], [1, 5, 3, 7], [4]])
def test_queries_in_runs_see_what_their_places_see(starts: list[int]) -> None:
    q, k, v, bias = make(1, 2, 8, 3), make(1, 2, 8, 3, seed=1), make(1, 2, 8, 3, seed=2), make(1, 1, 8, 8, seed=3)
    options = {"scale": 0.5, "left": 3, "right": 0, "dropout_p": 0.2, "global_shape": [1, 2, 8, 8]}
    length = 1 if starts in ([0, 2, 4, 6], [1, 5, 3, 7]) else 2
    rows = torch.cat([torch.arange(start, start + length) for start in starts])
    seed = torch.tensor(4)
    want, want_lse = ops.attention(q, k, v, bias, None, None, seed, **options)
    have, lse = ops.attention(q[:, :, rows], k, v, bias[:, :, rows], None, None, seed, **options, query_starts=starts)
    torch.testing.assert_close(have, want[:, :, rows])
    torch.testing.assert_close(lse, want_lse[..., rows])


def test_a_query_that_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros and -inf by every path, and no NaN in a gradient."""
    q, k, v = make(2, 2, 4, 4), make(2, 2, 4, 4, seed=1), make(2, 2, 4, 4, seed=2)
    there = torch.tensor([[False, True, True, True], [False] * 4])
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(scaled_dot_product, "_fits_cpu_flash", lambda *_: False)
        out, lse = ops.attention(q, k, v, None, there, scale=0.5, right=0)
        assert not out[0, :, 0].any() and not out[1].any() and out[0, :, 1:].all()
        assert (lse[0, :, 0] == -math.inf).all() and (lse[1] == -math.inf).all() and lse[0, :, 1:].isfinite().all()
        grads = ops.attention_backward(
            torch.ones_like(out), q, k, v, None, there, None, None, out, lse, scale=0.5, right=0
        )
        assert all(grad.isfinite().all() for grad in grads) and not grads[1][1].any()


def test_a_sink_of_nothing_has_no_gradient() -> None:
    """Breaks if a sink of -inf, of a query that sees no key, makes a NaN."""
    q, k, v = (make(2, 2, 4, 4, seed=seed).requires_grad_() for seed in range(3))
    sinks = torch.tensor([-math.inf, 0.5], dtype=q.dtype, requires_grad=True)
    there = torch.tensor([[False, True, True, True], [False] * 4])
    out, _ = TRACED(q, k, v, None, there, sinks, scale=0.5, right=0)
    out.sum().backward()
    assert sinks.grad is not None and sinks.grad[0] == 0 and sinks.grad[1] != 0
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_what_is_seen_of_runs() -> None:
    options = [ops.AttentionOptions(1.0, left, right, prefix) for left in (None, 0, 3) for right in (None, 0, 2)
               for prefix in (0, 3)]  # fmt: skip
    for said in options:
        for query in range(0, 8, 2):
            for key in range(0, 8, 2):
                seen = visible_keys(said, torch.arange(query, query + 2), torch.arange(key, key + 2))
                runs = [(query, 2)], [(key, 2)]
                assert not sees_every_key(said, *runs) or seen.all()
                assert sees_no_key(said, *runs) == (not seen.any())
    causal = ops.AttentionOptions(1.0, None, 0)
    assert sees_every_key(causal, [(4, 4)], [(0, 4)]) and not sees_every_key(causal, [(4, 4)], [(4, 4)])


def test_dropout_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout_p=0\.5 needs a seed"):
        ops.attention(make(1, 1, 2, 2), make(1, 1, 2, 2), make(1, 1, 2, 2), scale=1.0, dropout_p=0.5)


def lying(x: Tensor, order: str) -> Tensor:
    """The same numbers, with the dims of [B, H, S, D] in another order in memory."""
    places = ["bhsd".index(dim) for dim in order]
    return x.permute(places).contiguous().permute([places.index(dim) for dim in range(4)])


@pytest.mark.parametrize("order", ["bhds", "bdhs", "dbsh"])
@pytest.mark.parametrize("turned", ["q", "k", "v", "g", "qkvg"])
def test_heads_that_lie_anyhow_in_memory(order: str, turned: str) -> None:
    """Breaks if a kernel reads channels that lie apart, as behind a convolution, as if they lay side by side."""
    given = {name: make(2, 4, 8, 16, seed=place) for place, name in enumerate("qkvg")}
    expected = ops.attention(*(given[name] for name in "qkv"), scale=0.25)
    laid = {name: lying(x, order) if name in turned else x for name, x in given.items()}
    found = ops.attention(*(laid[name] for name in "qkv"), scale=0.25)
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own)
    torch.testing.assert_close(found[0], defined(given["q"], given["k"], given["v"], scale=0.25))
    backward = [
        ops.attention_backward(
            each["g"], each["q"], each["k"], each["v"], None, None, None, None, *expected, scale=0.25
        )
        for each in (laid, given)
    ]
    for ours, own in zip(*backward, strict=True):
        torch.testing.assert_close(ours, own)
