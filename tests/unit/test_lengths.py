"""Batches that are padded to a length: what leaves no trace, what does, and what is tried on a small model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import lengths
from autopar.api.lengths import Padding, checked, growing, grown_inputs, padding
from autopar.api.small_model import SMALL, small_model, twin_of
from autopar.base.errors import AutoparError
from autopar.planner.with_loss import with_loss
from autopar.runtime.added import Added, Grown, _stay

ROWS, LENGTH, WORDS = 3, 7, 19


class Tagger(nn.Module):
    """Of nobody's library. kind: what mixes its positions, or counts them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.places = nn.Embedding(WORDS, 8), nn.Embedding(32, 8)
        self.mix, self.head, self.norm = nn.Linear(8, 24), nn.Linear(8, WORDS), nn.BatchNorm1d(8)
        self.conv = nn.Conv1d(8, 8, 3)

    def forward(self, words: Tensor, seen: Tensor | None = None, wanted: Tensor | None = None) -> Any:
        x = self.table(words) + self.places(torch.arange(words.shape[1]))
        if self.kind == "from the end":
            x = self.table(words) + self.places(torch.arange(words.shape[1]).flip(0))
        if self.kind == "normed over positions":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "looks ahead":
            x = self.conv(F.pad(x.transpose(1, 2), (0, 2))).transpose(1, 2)
        if self.kind == "looks behind":
            x = self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        if self.kind == "drops":
            x = F.dropout(x, 0.5, self.training)
        q, k, v = self.mix(x).chunk(3, -1)
        mask = None if seen is None else seen[:, None, :].bool()
        causal = seen is None and self.kind != "sees all"
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        scores = self.head(x)
        if self.kind == "mean of all":
            scores = scores.mean(1)
        if self.kind == "mean of what is seen":
            assert seen is not None
            scores = (scores * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        if self.kind == "the last":
            scores = scores[:, -1]
        if wanted is None:
            return scores
        if self.kind == "of all tokens":
            return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum") / wanted.numel(), scores
        if self.kind == "ignores -1":
            return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-1), scores
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten()), scores


def _batch(*names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    seen = torch.ones_like(words)
    seen[1, 5:] = 0
    batch = {"words": words, "seen": seen, "wanted": words.roll(-1, 1)}
    return {name: batch[name] for name in names}


def _padding(model: nn.Module, batch: Mapping[str, Tensor], to: int = 12) -> Padding:
    return padding(model, batch, growing(batch, [to]), training=True, known=())


EXACT = [
    ("plain", ("words", "wanted"), (None, -100)),
    ("plain", ("words",), (None,)),
    ("plain", ("words", "seen", "wanted"), (None, 0, -100)),
    ("ignores -1", ("words", "wanted"), (None, -1)),
    ("mean of what is seen", ("words", "seen"), (None, 0)),
    ("looks behind", ("words", "wanted"), (None, -100)),
    ("drops", ("words", "wanted"), (None, -100)),
]


@pytest.mark.parametrize(("kind", "names", "fills"), EXACT)
def test_padding_that_leaves_no_trace(kind: str, names: tuple[str, ...], fills: tuple[int | None, ...]) -> None:
    """Breaks if a batch is not padded that may be, or if what is filled in says that added positions count."""
    batch = _batch(*names)
    found = _padding(Tagger(kind), batch)
    assert found.fills == fills
    model = Tagger(kind).double().eval()
    added = Added(found.inputs, found.leaves)
    one, other = model(**batch), model(**added.pad(batch))
    outputs = list(other) if isinstance(other, tuple) else [other]
    for x, y in zip(one if isinstance(one, tuple) else [one], added.cut(outputs), strict=True):
        assert y is not None
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


TRACES = [
    ("sees all", ("words", "wanted"), "output 0"),
    ("normed over positions", ("words", "wanted"), "output 0"),
    ("looks ahead", ("words", "wanted"), "output 0"),
    ("from the end", ("words", "wanted"), "output 0"),
    ("of all tokens", ("words", "wanted"), "output 0"),
    ("mean of all", ("words",), "output 0"),
    ("the last", ("words",), "output 0"),
]


@pytest.mark.parametrize(("kind", "names", "what"), TRACES)
def test_padding_that_would_leave_a_trace(kind: str, names: tuple[str, ...], what: str) -> None:
    """Breaks if a batch is padded although added positions are in a loss, in an output or in what others see."""
    with pytest.raises(AutoparError, match=what):
        _padding(Tagger(kind), _batch(*names))


def test_traces_in_gradients_and_buffers_alone() -> None:
    """Breaks if only what a forward returns is compared."""

    class Hidden(Tagger):
        def forward(self, words: Tensor, seen: Tensor | None = None, wanted: Tensor | None = None) -> Any:
            found = super().forward(words, seen, wanted)
            if self.kind == "counts":
                self.count += words.numel()
                return found
            penalty = self.table(words).pow(2).sum()
            return found + (penalty - penalty.detach())

    with pytest.raises(AutoparError, match=r"the gradient of table\.weight would be another"):
        _padding(Hidden("plain"), _batch("words"))
    counting = Hidden("counts")
    counting.register_buffer("count", torch.zeros(()))
    with pytest.raises(AutoparError, match="buffer count would be another"):
        _padding(counting, _batch("words"))


def test_other_values_are_drawn_where_copies_will_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if padding is shown with copies of the last alone, of which the largest is that of what is given."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, 8)

        def forward(self, words: Tensor) -> Tensor:
            return self.table(words).amax(1)

    with pytest.raises(AutoparError, match="output 0"):
        _padding(Largest(), _batch("words"))
    monkeypatch.setattr(lengths, "_drawn", lambda batch, _: batch)
    assert _padding(Largest(), _batch("words")).fills == (None,)


def test_which_dims_grow() -> None:
    """Breaks if images grow by their channels, columns of one, or masks by their rows alone."""
    tokens, image = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 3, 7, 7)
    mask, kind = torch.zeros(2, 1, 7, 7, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64)
    batch = {"tokens": tokens, "mask": mask, "kind": kind, "features": torch.zeros(2, 7, 7)}
    sizes = growing({**batch, "image": image[:, :, :5, :5]}, [8, 16])
    assert sizes == {7: 8}
    found = grown_inputs({**batch, "places": torch.arange(7)}, sizes)
    dims = {name: [each.dim for each in grown] for name, grown in found.items()}
    assert dims == {"tokens": [1], "mask": [2, 3], "features": [1], "places": [0]}
    assert growing({"x": torch.zeros(2, 9, 4)}, [8, 16]) == {9: 16}
    assert growing({"source": tokens, "target": tokens[:, :5]}, [6, 8]) == {7: 8, 5: 6}
    assert growing({"tokens": torch.zeros(2, 17, dtype=torch.int64)}, [8, 16]) == {}


@pytest.mark.parametrize("given", [[], [0], ["long"], [8.0], -1])
def test_lengths_that_are_none(given: Any) -> None:
    """Breaks if they are taken for lengths."""
    with pytest.raises(AutoparError, match=r"lengths=\[512, 1024, 2048\]"):
        checked(given)


def test_where_pieces_stay() -> None:
    """Breaks if an output that an axis splits is cut where its pieces would be others."""
    assert _stay(4, 3, [2]) and _stay(8, 5, [4]) and _stay(8, 7, [2, 2])
    assert not _stay(16, 9, [2]) and not _stay(8, 4, [4]) and not _stay(8, 5, [2, 2])


def test_both_are_added_one_after_the_other() -> None:
    """Breaks if rows are filled with what fills positions, or outputs are cut in one dim only."""
    mask = torch.ones(3, 5, dtype=torch.int64)
    positions, rows = Added({"m": (Grown(1, 5, 8, 0),)}, (((1, 5),),)), Added({"m": (Grown(0, 3, 4),)}, (((0, 3),),))
    both = positions.then(rows)
    padded = both.pad({"m": mask})["m"]
    assert padded.shape == (4, 8) and padded.sum() == 20 and both.given("m", padded.shape) == (3, 5)
    (cut,) = both.cut([padded])
    assert cut is not None and torch.equal(cut, mask)


def _llama(**more: Any) -> nn.Module:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=5_000, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, **more,
    )  # fmt: skip
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config)


@pytest.mark.moderate
def test_a_large_model_has_a_small_twin() -> None:
    """Breaks if a model of transformers runs in full size, its loss is left out, or one with other modules is taken for
    one that its configuration makes.
    """
    model = _llama()
    assert sum(p.numel() for p in model.parameters()) > SMALL

    def loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        return F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), reduction="mean")

    def scaled(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        return loss(outputs, batch) * batch["labels"].numel()

    ids = torch.randint(0, 5_000, (ROWS, 50))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for own, is_exact in ((loss, True), (scaled, False)):
        twin = twin_of(with_loss(model, own), lambda small, own=own: with_loss(small, own), 64)
        assert type(twin) is type(model) and sum(p.numel() for p in twin.parameters()) < 200_000
        if is_exact:
            assert _padding(twin, batch, 64).fills == (None, 0, -100)
        else:
            with pytest.raises(AutoparError, match="output 0"):
                _padding(twin, batch, 64)
    model.add_module("other", nn.Identity())
    assert twin_of(model, lambda small: small, 64) is model


def test_the_small_model_is_the_same_whatever_ran_before() -> None:
    """Breaks if what a run writes into buffers is still there at the next."""
    model = Tagger("normed over positions")
    clone, batch = small_model(model, _batch("words"), torch.float64, 0)
    proof = lengths._Proof(clone, batch, True)
    again = proof._ran(batch, None)
    assert all(torch.equal(x, again[name]) for name, x in proof.wanted.items())
