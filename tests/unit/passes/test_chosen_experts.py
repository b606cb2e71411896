"""Loops over experts, and experts that are all given all tokens, become one operator and do what eager does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import interpret
from autopar.passes.capture import capture

pytestmark = pytest.mark.unit
EXPERTS, WIDTH, INNER, CHOSEN = 4, 6, 5, 2
Way = Callable[["Mixture", Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Experts as modules, and as stacks; `way` goes through them: x[T, D], logits[T, E]."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.gate, self.way = nn.Linear(WIDTH, EXPERTS), way
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 2 * INNER, bias=False) for _ in range(EXPERTS))
        self.gates = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.ups = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.downs = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.biases = nn.Parameter(torch.randn(EXPERTS, 1, INNER))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, WIDTH)
        return self.way(self, x, self.gate(x)).square().mean()

    def glu(self, x: Tensor, e: int) -> Tensor:
        return (F.gelu(x @ self.gates[e]) * (x @ self.ups[e])) @ self.downs[e]


def _rows_of_a_table(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """Weights that are taken of all scores by the number of the expert."""
    scores, indices = logits.softmax(-1), logits.topk(CHOSEN)[1]
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.where((indices == e).any(-1))[0]
        out.index_add_(0, rows, model.glu(x[rows], e) * scores[rows, e, None])
    return out


def _modules_plus_another(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """Added to what is there; a token has one expert, and no weight."""
    out, index = x * 2, logits.argmax(-1)
    for e, expert in enumerate(model.experts):
        mask = index == e
        out[mask] += expert(x[mask])
    return out


def _with_a_capacity(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """Fedus et al., Switch (2101.03961): tokens beyond a capacity have no expert."""
    scores, hot = logits.softmax(-1), F.one_hot(logits.argmax(-1), EXPERTS)
    kept, out = hot * (hot.cumsum(0) <= 2), torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        rows = torch.where(kept[:, e])[0]
        out.index_add_(0, rows, expert(x[rows]) * scores.max(-1).values[rows, None])
    return out


def _weighs_what_experts_get(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    scores, indices = logits.sigmoid().topk(CHOSEN)
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        rows, nth = torch.where(indices == e)
        out = out.index_add(0, rows, expert(x[rows] * scores[rows, nth, None]))
    return out


def _by_a_threshold(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """As many experts a token as are liked."""
    scores, out = logits.sigmoid(), torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = (scores[:, e] > 0.5).nonzero().squeeze(-1)
        out.index_add_(0, rows, model.glu(x[rows], e) * scores[rows, e, None])
    return out


def _by_a_table_of_many(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """A table in which a token has several experts, and not which is the first."""
    scores, indices = logits.sigmoid(), logits.topk(CHOSEN)[1]
    table, out = torch.zeros_like(indices.new_zeros(x.shape[0], EXPERTS)).scatter(1, indices, 1), torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.where(table[:, e])[0]
        out.index_add_(0, rows, model.glu(x[rows], e) * scores[rows, e, None])
    return out


def _halves_of_one_product(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    scores, indices = logits.softmax(-1).topk(CHOSEN)
    hit, out = F.one_hot(indices, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for number in hit.sum((-1, -2)).gt(0).nonzero():
        nth, rows = torch.where(hit[number[0]])
        up, gate = model.wide[int(number)](x[rows]).chunk(2, -1)
        out.index_add_(0, rows, (gate.relu() * up) @ model.downs[number[0]] * scores[rows, nth, None])
    return out


def _all_tokens_weighed_first(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """Llama 4's way: every expert gets all tokens, times a score that is 0 but for those that were chosen."""
    top, indices = logits.topk(CHOSEN, 1)
    scores = torch.full_like(logits, -torch.inf).scatter_(1, indices, top).sigmoid()
    given = (x.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)).view(EXPERTS, -1, WIDTH)
    made = torch.bmm(torch.bmm(given, model.gates).relu() * torch.bmm(given, model.ups), model.downs)
    return made.view(-1, WIDTH).reshape(EXPERTS, -1, WIDTH).sum(0)


def _all_tokens_weighed_last(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    top, indices = logits.softmax(-1).topk(CHOSEN, -1)
    scores = torch.zeros_like(logits).scatter(1, indices, top)
    given = x.unsqueeze(0).expand(EXPERTS, -1, -1)
    made = (torch.sigmoid(given @ model.gates + model.biases) * (given @ model.ups + model.biases)) @ model.downs
    return (made * scores.t().unsqueeze(-1)).sum(0)


ONE: Mapping[str, Way] = {
    way.__name__.strip("_").replace("_", " "): way
    for way in (
        _rows_of_a_table, _modules_plus_another, _with_a_capacity, _weighs_what_experts_get, _by_a_threshold,
        _by_a_table_of_many,
        _halves_of_one_product, _all_tokens_weighed_first, _all_tokens_weighed_last,
    )
}  # fmt: skip


def _agrees(way: Way) -> str:
    """The program's text, when its output and all gradients are eager's for batches of several kinds."""
    torch.manual_seed(0)
    model = Mixture(way).double()
    program = capture(model, {"x": torch.randn(3, 4, WIDTH).double()})
    for seed in range(3):
        x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        x = x if seed else x[:1, :1].expand(3, 4, WIDTH).contiguous()  # all choose the same
        (found, *_), gradients = interpret.run(
            program, interpret.state_of(model, program), interpret.input_tensors(program, {"x": x})
        )
        wanted, named = model(x), dict(model.named_parameters())
        torch.testing.assert_close(found, wanted)
        of = torch.autograd.grad(wanted, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, of, strict=True):
            expected = torch.zeros_like(named[name]) if gradient is None else gradient
            assert name in gradients or gradient is None
            torch.testing.assert_close(gradients.get(name, torch.zeros_like(expected)), expected)
    return str(program)


@pytest.mark.moderate
@pytest.mark.parametrize("name", ONE)
def test_experts_are_one_operator(name: str) -> None:
    """Breaks if a loop, or a product of all experts, is left as it is, or if a token meets another expert or weight."""
    assert _agrees(ONE[name]).count("autopar.experts(") == 1


def _of_two_kinds(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """The last two experts are others."""
    index, out = logits.argmax(-1), torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.where(index == e)[0]
        out.index_add_(0, rows, model.experts[e](x[rows]) if e < 2 else model.glu(x[rows], e))
    return out


def _in_another_order(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    index, out = logits.argmax(-1), torch.zeros_like(x)
    for e in reversed(range(EXPERTS)):
        rows = torch.where(index == e)[0]
        out.index_add_(0, rows, model.glu(x[rows], e))
    return out


def _scores_of_others(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """Experts make something of what is 0: those that were not chosen count, too."""
    top, indices = logits.topk(CHOSEN, 1)
    scores = torch.full_like(logits, -torch.inf).scatter(1, indices, top).sigmoid()
    given = x.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH) * scores.t().reshape(EXPERTS, -1, 1)
    return torch.bmm(torch.bmm(given, model.gates).cos(), model.downs).sum(0)


def _scores_that_are_not_0(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    top, indices = logits.topk(CHOSEN, 1)
    scores = torch.zeros_like(logits).scatter(1, indices, top).sigmoid()
    given = x.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH) * scores.t().reshape(EXPERTS, -1, 1)
    return torch.bmm(torch.bmm(given, model.gates).relu(), model.downs).sum(0)


def _counted_inside(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """What an expert is depends on the rows that it gets."""
    index, out = logits.argmax(-1), torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = index == e
        out[mask] += torch.relu(x[mask] @ (model.gates[e] + x[mask].sum() / 10)) @ model.downs[e]
    return out


def _left_between(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
    """What there is after two rounds is read."""
    index, out, seen = logits.argmax(-1), torch.zeros_like(x), torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.where(index == e)[0]
        out = out.index_add(0, rows, model.glu(x[rows], e))
        seen = out if e == 1 else seen
    return out + seen.square()


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("way", "operators"),
    [(_of_two_kinds, 2), (_in_another_order, 1), (_scores_of_others, 0), (_scores_that_are_not_0, 0),
     (_counted_inside, 0), (_left_between, 2)],
)  # fmt: skip
def test_what_is_something_else_stays_right(way: Way, operators: int) -> None:
    """Breaks if experts of several kinds are taken for one, if those that were not chosen are left out where they
    count, or if what a round leaves is lost.
    """
    assert _agrees(way).count("autopar.experts(") == operators


@pytest.mark.moderate
def test_wide_sums_stay_wide() -> None:
    """Breaks if rows that are added up in float32 are added in the experts' own narrower dtype."""

    def way(model: Mixture, x: Tensor, logits: Tensor) -> Tensor:
        index, out = logits.argmax(-1), torch.zeros(x.shape, dtype=torch.float32)
        for e in range(EXPERTS):
            rows = torch.where(index == e)[0]
            out.index_add_(0, rows, model.glu(x[rows], e).float())
        return out

    program = capture(Mixture(way).bfloat16(), {"x": torch.randn(3, 4, WIDTH).bfloat16()})
    assert "autopar.experts(" not in str(program)
