"""Masks of scaled dot product attention are read as what they are, or left as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from autopar.ir.program import Program
from autopar.passes.attention import constants
from autopar.passes.attention.bands import Band, all_rows_see, read_band, shown_by
from autopar.passes.attention.constants import Constant, Diagonal
from autopar.passes.capture import capture
from autopar.passes.fuse_attention import fuse_attention

S = 8
MaskOf = Callable[[Tensor, Tensor], Tensor | None]


class Attention(nn.Module):
    """One attention of two heads, whose mask is made of x [2, S, 8] and of padding [2, S], int64."""

    def __init__(self, mask: MaskOf) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask
        self.table = nn.Embedding(2 * S, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = self.mask(x, padding)
        return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.arange(x.shape[1], device=x.device)
    return count[:, None], count[None, :]


def causal(x: Tensor) -> Tensor:
    query, key = places(x)
    return key <= query


def additive(visible: Tensor, x: Tensor, value: float | None = None) -> Tensor:
    value = torch.finfo(x.dtype).min if value is None else value
    return torch.where(visible, torch.zeros((), dtype=x.dtype, device=x.device), value)


def fused(mask: MaskOf) -> tuple[Program, fx.Node]:
    batch = {"x": torch.randn(2, S, 8), "padding": torch.ones(2, S, dtype=torch.int64)}
    program = fuse_attention(capture(Attention(mask), batch))
    nodes = program.regions[0].graph.nodes
    return program, next(node for node in nodes if node.target is torch.ops.autopar.attention.default)


def given_of(node: fx.Node) -> dict[str, Any]:
    """What the operator is given besides queries, keys, values and scale: options, and shapes of masks."""
    named = dict(zip(("bias", "keys"), node.args[3:], strict=False))
    shapes = {name: list(arg.meta["val"].shape) for name, arg in named.items() if isinstance(arg, fx.Node)}
    said = {name: value for name, value in node.kwargs.items() if name != "scale"}
    return shapes | {name: list(x.meta["val"].shape) if isinstance(x, fx.Node) else x for name, x in said.items()}


def padding_of(padding: Tensor) -> Tensor:
    return padding.bool()[:, None, None, :]


def window(x: Tensor, size: int) -> Tensor:
    query, key = places(x)
    return (key > query - size) & (key <= query)


def chunks(x: Tensor) -> Tensor:
    query, key = places(x)
    return query // 3 == key // 3


def equal(numbers: Tensor) -> Tensor:
    return numbers[:, None, :, None] == numbers[:, None, None, :]


def positions(padding: Tensor) -> Tensor:
    """Those that begin again at 0 now and then; one that stands still for padding."""
    return padding.cumsum(1) % 4


def restarts(count: Tensor) -> Tensor:
    """How often positions have not gone on by one, as transformers counts."""
    return (torch.diff(count, prepend=count[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def within(padding: Tensor, size: int, before: int = 0) -> Tensor:
    """Causal within documents, by positions, of which the last `size` are seen; `before` are seen in any case."""
    query, key = positions(padding)[:, None, :, None], positions(padding)[:, None, None, :]
    seen = (key <= query) & (key > query - size)
    return equal(restarts(positions(padding))) & (seen | (key < before) if before else seen)


def begun(x: Tensor, p: Tensor) -> Tensor:
    """Causal within documents that begin at the places that p[0] sums up to, of two dims."""
    place = places(x)[1].flatten()
    number = torch.searchsorted(p[0].cumsum(0), place, right=True)
    return (number[:, None] == number[None, :]) & (place[None, :] <= place[:, None])


DOCUMENTS = {"documents": [2, S], "key_documents": [2, S]}
MASKS: dict[str, tuple[MaskOf, dict[str, Any]]] = {
    "none": (lambda x, p: None, {}),
    "full": (lambda x, p: torch.ones(S, S, dtype=torch.bool, device=x.device), {}),
    "causal": (lambda x, p: causal(x), {"right": 0}),
    "tril": (lambda x, p: torch.ones(S, S, dtype=torch.bool, device=x.device).tril(), {"right": 0}),
    "not triu": (lambda x, p: ~torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1), {"right": 0}),
    "expanded": (lambda x, p: causal(x)[None, None].expand(2, 2, S, S), {"right": 0}),
    "window": (lambda x, p: window(x, 3), {"left": 2, "right": 0}),
    "wide window": (lambda x, p: window(x, S), {"right": 0}),
    "both sides": (lambda x, p: (places(x)[0] - places(x)[1]).abs() <= 2, {"left": 2, "right": 2}),
    "prefix": (lambda x, p: causal(x) | (places(x)[1] < 3), {"right": 0, "prefix": 3}),
    "padding": (lambda x, p: padding_of(p), {"keys": [2, S]}),
    "inverted padding": (lambda x, p: ~(p == 0)[:, None, None, :], {"keys": [2, S]}),
    "expanded padding": (lambda x, p: padding_of(p).expand(2, 1, S, S), {"keys": [2, S]}),
    "causal, padding": (lambda x, p: (causal(x) & padding_of(p)).expand(2, -1, S, S), {"keys": [2, S], "right": 0}),
    "nor": (lambda x, p: ~(~causal(x) | ~padding_of(p)), {"keys": [2, S], "right": 0}),
    "three dims": (lambda x, p: (causal(x)[None] & p.bool()[:, None, :])[:, None], {"keys": [2, S], "right": 0}),
    "chunks": (lambda x, p: chunks(x), DOCUMENTS),
    "causal chunks": (lambda x, p: chunks(x) & causal(x), DOCUMENTS | {"right": 0}),
    "holes": (lambda x, p: causal(x) & (places(x)[1] != 3), {"bias": [1, 1, 1, S], "right": 0}),
    "documents": (lambda x, p: causal(x) & equal(p.cumsum(1)), DOCUMENTS | {"right": 0}),
    "documents apart": (lambda x, p: ~(~causal(x) | ~equal(p.cumsum(1))).expand(2, 2, S, S), DOCUMENTS | {"right": 0}),
    "documents of three dims": (
        lambda x, p: ((p.cumsum(1)[:, None] == p.cumsum(1)[:, :, None]) & causal(x))[:, None], DOCUMENTS | {"right": 0},
    ),
    "documents by where they begin": (lambda x, p: begun(x, p)[None, None], DOCUMENTS | {"right": 0}),
    "where some begin, and padding": (
        lambda x, p: (begun(x, p)[None] & p.bool()[:, None, :]).unsqueeze(1), DOCUMENTS | {"keys": [2, S], "right": 0},
    ),
    "chunks of documents": (
        lambda x, p: causal(x) & ((p[:, None, :, None] + 1) // 2 == (p[:, None, None, :] + 1) // 2),
        DOCUMENTS | {"right": 0},
    ),
    "shifted chunks": (
        lambda x, p: (places(x)[0] - p.sum(1)[:, None, None, None]) // 3
        == (places(x)[1] - p.sum(1)[:, None, None, None]) // 3,
        DOCUMENTS,
    ),
    "transposed documents": (
        lambda x, p: p.cumsum(1)[:, None, None] == p.cumsum(1)[:, None, None].transpose(2, 3), DOCUMENTS,
    ),
    "documents, padding": (
        lambda x, p: causal(x) & equal(p.cumsum(1)) & padding_of(p), DOCUMENTS | {"keys": [2, S], "right": 0},
    ),
    "no documents": (
        lambda x, p: p.cumsum(1)[:, None, :, None] == p.flip(1).cumsum(1)[:, None, None, :], {"bias": [2, 1, S, S]},
    ),
    "two kinds of documents": (
        lambda x, p: equal(p.cumsum(1)) & equal(p), DOCUMENTS | {"bias": [2, 1, S, S]},
    ),
    "positions": (lambda x, p: within(p, S), DOCUMENTS | {"right": 0}),
    "positions, window": (lambda x, p: within(p, 2), DOCUMENTS | {"left": 1, "right": 0}),
    "positions, prefix": (lambda x, p: within(p, 2, before=1), DOCUMENTS | {"bias": [2, 1, S, S]}),
    "positions of others": (
        lambda x, p: equal(restarts(positions(p))) & (p[:, None, None, :] <= p[:, None, :, None]),
        DOCUMENTS | {"bias": [2, 1, S, S]},
    ),
    "positions alone": (
        lambda x, p: positions(p)[:, None, None, :] <= positions(p)[:, None, :, None], {"bias": [2, 1, S, S]},
    ),
    "additive documents": (lambda x, p: additive(within(p, S), x), DOCUMENTS | {"right": 0}),
    "additive documents, bias": (
        lambda x, p: additive(within(p, S), x) + (places(x)[1] - places(x)[0]) * 0.5,
        DOCUMENTS | {"bias": [1, 1, S, S], "right": 0},
    ),
    "additive documents, padding": (
        lambda x, p: additive(within(p, S) & padding_of(p), x), {"bias": [2, 1, S, S]},
    ),
    "additive documents, not itself": (
        lambda x, p: additive(equal(p) & (places(x)[1] != places(x)[0]), x), {"bias": [2, 1, S, S]},
    ),
    "padded queries": (lambda x, p: causal(x) & p.bool()[:, None, :, None], {"bias": [2, 1, S, 1], "right": 0}),
    "additive causal": (lambda x, p: additive(causal(x), x), {"right": 0}),
    "-inf causal": (lambda x, p: additive(causal(x), x, -math.inf), {"right": 0}),
    "full of -inf": (
        lambda x, p: torch.full((S, S), -math.inf, device=x.device).triu(1), {"right": 0},
    ),
    "additive window": (lambda x, p: additive(window(x, 3), x), {"left": 2, "right": 0}),
    # A query that sees nothing attends to all keys alike: not what `keys` say.
    "additive padding": (lambda x, p: additive(padding_of(p).expand(2, 1, S, S), x), {"bias": [2, 1, 1, S]}),
    "additive causal, padding": (lambda x, p: additive(causal(x) & padding_of(p), x), {"bias": [2, 1, S, S]}),
    "-inf padding": (lambda x, p: additive(padding_of(p), x, -math.inf), {"keys": [2, S]}),
    "additive, nothing seen": (lambda x, p: additive(causal(x) & (places(x)[0] > 0), x), {"bias": [1, 1, S, S]}),
    "hardly hidden": (lambda x, p: additive(causal(x), x, -1e4), {"bias": [1, 1, S, S]}),
    "zeros": (lambda x, p: torch.zeros(1, 1, S, S, device=x.device), {}),
    "distances": (lambda x, p: (places(x)[1] - places(x)[0]) * 0.5, {"bias": [1, 1, S, S]}),
    "distances, causal": (
        lambda x, p: ((places(x)[1] - places(x)[0]) * 0.5).masked_fill(~causal(x), -math.inf),
        {"bias": [1, 1, S, S], "right": 0},
    ),
    "counts, causal": (
        lambda x, p: p.cumsum(1)[:, None, None, :] * 0.5 + additive(causal(x), x), {"bias": [2, 1, 1, S], "right": 0},
    ),
    "padding, causal": (
        lambda x, p: additive(padding_of(p), x) + additive(causal(x), x), {"bias": [2, 1, S, S]},
    ),
    "logarithms, causal": (
        lambda x, p: p.to(x.dtype).log()[:, None, None, :] + additive(causal(x), x), {"bias": [2, 1, S, S]},
    ),
    "given": (lambda x, p: x[:, None, :, :S], {"bias": [2, 1, S, S]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_is(name: str) -> None:
    """Breaks if a mask is not recognized, is taken for another, or is kept larger than it needs to be."""
    mask, wanted = MASKS[name]
    program, node = fused(mask)
    assert given_of(node) == wanted
    assert [site.fused for site in program.attention] == [True]


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["causal", "window", "both sides", "expanded", "causal, padding", "causal chunks",
                                  "additive window", "full of -inf", "tril", "counts, causal"])  # fmt: skip
def test_long_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if masks too large to be worked out whole are read otherwise than small ones."""
    mask, wanted = MASKS[name]
    monkeypatch.setattr(constants, "MAX_ELEMENTS", 2 * S - 1)
    _, node = fused(mask)
    assert given_of(node) == wanted


@pytest.mark.moderate
def test_a_position_bias_beside_a_mask() -> None:
    """Breaks if a bias with a gradient keeps the causal mask that is added to it, or loses it."""

    class Biased(Attention):
        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            query, key = places(x)
            bias = self.table(key - query + S).permute(2, 0, 1)[None]
            self.mask = lambda x, p: bias + additive(causal(x), x)
            return super().forward(x, padding)

    batch = {"x": torch.randn(2, S, 8), "padding": torch.ones(2, S, dtype=torch.int64)}
    program = fuse_attention(capture(Biased(lambda x, p: None), batch))
    assert [site.what for site in program.attention] == ["causal, bias"]


def test_keys_are_the_padding_itself() -> None:
    """Breaks if `keys` are taken out of an expanded mask, which would then be made."""
    program, node = fused(MASKS["causal, padding"][0])
    keys = node.args[4]
    assert isinstance(keys, fx.Node) and isinstance(keys.args[0], fx.Node)
    assert keys.args[0].op == "placeholder"
    sizes = [each.meta["val"].numel() for each in program.regions[0].graph.nodes if each.op == "call_function"
             and isinstance(each.meta["val"], Tensor) and each.meta["val"].dtype == torch.bool]  # fmt: skip
    assert max(sizes) == 2 * S


@pytest.mark.moderate
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 6),
    st.integers(0, 6),
)
@settings(max_examples=300, deadline=None)
def test_bands_show_what_they_were_read_from(
    queries: int, keys: int, left: int | None, right: int | None, prefix: int
) -> None:
    """Breaks if limits are read that show another key, or hide one."""
    plane = shown_by(Band(left, right, prefix), queries, keys)
    band = read_band(Constant(plane, (queries, keys)), queries, keys)
    assert band is None or torch.equal(shown_by(band, queries, keys), plane)
    offset = torch.arange(1 - queries, keys)
    if not prefix:
        shown = torch.ones_like(offset, dtype=torch.bool)
        shown = shown & (offset >= -left) if left is not None else shown
        shown = shown & (offset <= right) if right is not None else shown
        diagonal = Diagonal(shown, (queries, keys))
        assert read_band(diagonal, queries, keys) == band
        assert all_rows_see(diagonal, queries, keys) == bool(plane.any(1).all())


@pytest.mark.moderate
@given(st.lists(st.booleans(), min_size=12, max_size=12))
@settings(max_examples=300, deadline=None)
def test_any_plane_is_read_exactly_or_not(cells: list[bool]) -> None:
    """Breaks if limits are read where none show the same."""
    plane = torch.tensor(cells).view(3, 4)
    band = read_band(Constant(plane, (3, 4)), 3, 4)
    assert band is None or torch.equal(shown_by(band, 3, 4), plane)
