"""Rows that a sort has put in another order, as experts take them, cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.passes.batching import OutputBatching
from tests.unit.passes.microbatches import ROWS, analysed, prove, randomized

pytest.importorskip("transformers.integrations.moe")

WIDTH, EXPERTS, CHOSEN = 6, 3, 2


class Experts(nn.Module):
    """What a test does with the tokens, the experts that each one chose, and these sorted."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.router, self.matrices = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        tokens = x.flatten(0, 1)
        score, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        numbers, order = torch.sort(chosen.flatten())
        return self.function(self, tokens, score.flatten(), chosen.flatten(), numbers, order)


def ends(numbers: Tensor, experts: int = EXPERTS) -> Tensor:
    counts = torch.histc(numbers.double(), bins=experts, min=0, max=experts - 1)
    return counts.cumsum(0, dtype=torch.int32)


def taken(self: Experts, rows: Tensor, offsets: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, self.matrices, offsets)


def inverse_of(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


def experts(self: Experts, tokens: Tensor, score: Tensor, chosen: Tensor, numbers: Tensor, order: Tensor) -> Tensor:
    rows = taken(self, torch.tanh(tokens[order // CHOSEN]), ends(numbers)) * score[order][:, None]
    return rows[inverse_of(order)].view(-1, CHOSEN, WIDTH).sum(1)


ACCEPTED: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "experts": ("mean", lambda *args: experts(*args).square().mean()),
    "rows": ("concat", lambda *args: experts(*args)),
    "a sum in any order": ("sum", lambda self, t, s, c, n, order: t[order // CHOSEN].square().sum()),
}
REFUSED: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "left in order": ("in the order of a sort", lambda self, t, s, c, n, order: t[order // CHOSEN]),
    "neighbours": (
        "groups rows",
        lambda self, t, s, c, n, order: t[order // CHOSEN].view(-1, 2, WIDTH).sum(1).square().mean(),
    ),
    "with others": ("different orders", lambda self, t, s, c, n, order: (s[order] * s).mean()),
    "two orders": ("different orders", lambda self, t, s, c, n, order: (s[order] * s[c.sort()[1]]).mean()),
    "places as numbers": ("reads the places", lambda self, t, s, c, n, order: (order * s).mean()),
    "order, not its inverse": ("", lambda self, t, s, c, n, order: (s[order][order] * s).mean()),
    "ends of others": (
        "",
        lambda self, t, s, c, n, order: taken(self, t[order // CHOSEN], ends(c.clamp(max=1).sort()[0])).square().mean(),
    ),
    "a wrong divisor": ("", lambda self, t, s, c, n, order: t[order // 1 % len(t)].square().mean()),
    "sorted numbers": ("", lambda self, t, s, c, n, order: (s.sort()[0] * s).mean()),
}


def batch_of() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.moderate
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("name", ACCEPTED)
def test_rows_that_come_back_are_put_together(name: str, m: int) -> None:
    """Breaks if what experts do with rows in another order is refused, or put together otherwise than it is done."""
    combine, function = ACCEPTED[name]
    model, batch = randomized(Experts(function)), batch_of()
    batching = analysed(model, batch, m)
    assert [each.combine for each in batching.outputs] == [combine]
    assert combine != "concat" or batching.outputs == (OutputBatching("concat", 0),)
    prove(model, batch, batching, m)


@pytest.mark.parametrize("name", REFUSED)
def test_what_tells_the_order_is_refused(name: str) -> None:
    """Breaks if rows in another order pass for the batch's own, beside others, in groups, or as a result."""
    why, function = REFUSED[name]
    with pytest.raises(AutoparError, match=why or None) as caught:
        analysed(Experts(function).double(), batch_of())
    assert "microbatches=1" in str(caught.value)
