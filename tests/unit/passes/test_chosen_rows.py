"""Rows that a mask chooses: the program has all rows, and does what eager does for any number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.ir.program import Program
from autopar.passes.capture import capture
from autopar.passes.outline import outline

TOKENS, CLASSES, WIDTH = 12, 16, 8


class Words(nn.Module):
    """Hidden states and logits of tokens, of which `how` makes a loss."""

    def __init__(self, how: Callable[[Words, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.how = how

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.how(self, self.hidden(self.table(ids)), labels)


def _head_of_the_chosen(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    return F.cross_entropy(model.head(F.gelu(model.norm(x[mask]))), labels[mask], label_smoothing=0.1)


def _likelihoods(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    rows, wanted = model.head(x)[mask].log_softmax(-1), labels[labels != -100]
    return -rows[torch.arange(rows.shape[0]), wanted].sum() / wanted.numel()


def _their_mean(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    return model.head(x[labels != -100].mean(0)).square().sum()


def _numbers(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    rows = torch.relu(x)
    return torch.log(rows[rows > 0]).mean() + torch.masked_select(rows, rows > 0).sum()


def _two_kinds(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    mask, x = labels != -100, x.clone()
    x[mask] = model.norm(x[mask])
    x[~mask] += model.hidden(x[~mask])
    return x.masked_scatter(~mask.unsqueeze(-1), 2 * x[~mask]).square().mean()


def _places(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    rows, columns = (labels != -100).nonzero(as_tuple=True)
    flat = (labels.view(-1) != -100).nonzero().squeeze(-1)
    found = torch.zeros_like(x)
    found[rows, columns] = x[rows, columns] * 3
    return found.abs().mean() + F.cross_entropy(model.head(x).view(-1, CLASSES)[flat], labels.view(-1)[flat])


def _distances(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    chosen, wanted = x[mask], model.table(labels[mask]).detach()
    one_hot = F.one_hot(labels[mask], CLASSES).to(x.dtype)
    total = F.smooth_l1_loss(chosen, wanted) + F.mse_loss(chosen, wanted, reduction="sum") + chosen.norm()
    return total + F.binary_cross_entropy_with_logits(model.head(chosen), one_hot) + (chosen.T @ wanted).mean()


def _two_masks(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    return x[labels > 3].square().sum() + x[labels > 9].abs().sum()


def _drop_nothing(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    rows = F.dropout(x[labels != -100], 0.5, False)
    return F.dropout(model.hidden(rows), 0.0, True).square().mean()


def _with_others(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    """Edges of a graph of classes and one more to each class, as layers of graphs add up, weigh and norm them."""
    mask, flat = labels.view(-1) >= 0, x.flatten(0, 1)
    rows = torch.cat([flat[mask], model.table.weight])
    places = torch.cat([torch.stack([labels.view(-1)] * 2)[:, mask], torch.arange(CLASSES).repeat(2, 1)], 1)
    counts = rows.new_zeros(CLASSES).scatter_add_(0, places[0], rows.new_ones(places.shape[1]))
    wide = places[0].view(-1, 1).expand_as(rows)
    most = rows.new_zeros(2 * CLASSES, WIDTH).scatter_reduce_(0, wide, rows.detach(), "amax", include_self=False)
    shares = (rows - most[places[1]]).exp()
    sums = rows.new_zeros(CLASSES, WIDTH).index_add_(0, places[1], shares) + 1e-9
    sums = sums * flat[mask].max() + flat[mask].amin()
    messages = shares / sums[places[0]] / counts[places[1]].unsqueeze(-1) * model.hidden(rows)
    return (rows.new_zeros(CLASSES, WIDTH).scatter_add(0, wide, messages) * (1 + most[CLASSES:])).square().mean()


def _known(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    places = torch.arange(TOKENS)
    odd = x[:, places % 2 == 1]
    return (odd.cumsum(1) * x[:, places >= 0].softmax(1)[:, : odd.shape[1]]).mean()


def _counts(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    rows = x[labels != -100]
    return rows.sum() / (rows.shape[0] + 1)


def _halves(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    rows = x[labels != -100]
    return rows.sum() * (0.5 / rows.shape[0])


HOW: Mapping[str, Callable[[Words, Tensor, Tensor], Tensor]] = {
    "head": _head_of_the_chosen, "likelihoods": _likelihoods, "mean": _their_mean, "numbers": _numbers,
    "two kinds": _two_kinds, "places": _places, "distances": _distances,
    "two masks": _two_masks, "known": _known, "drop nothing": _drop_nothing,
    "with others": _with_others, "counts": _counts, "halves": _halves,
}  # fmt: skip


def _batch(share: float, seed: int = 0) -> dict[str, Tensor]:
    """share: of the tokens have a label."""
    torch.manual_seed(seed)
    labels = torch.randint(CLASSES, (4, TOKENS))
    return {
        "ids": torch.randint(CLASSES, (4, TOKENS)),
        "labels": labels.masked_fill(torch.rand(4, TOKENS) > share, -100),
    }


def _ran(model: nn.Module, program: Program, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What a captured program gives on a batch, and its gradients."""
    state = interpret.state_of(model, program)
    (found, *_), gradients = interpret.run(program, state, interpret.input_tensors(program, batch))
    return found, gradients


def assert_serves(model: nn.Module, program: Program, batch: dict[str, Tensor]) -> None:
    """The program gives what the model gives on a batch, and its gradients."""
    found, gradients = _ran(model, program, batch)
    wanted = model(**batch)
    torch.testing.assert_close(found, wanted)
    named = dict(model.named_parameters())
    for parameter, gradient in zip(named, torch.autograd.grad(wanted, list(named.values()), allow_unused=True)):
        assert gradient is not None or not gradients[parameter].any()
        torch.testing.assert_close(gradients[parameter], gradient) if gradient is not None else None


@pytest.mark.moderate
@pytest.mark.parametrize("name", HOW)
def test_the_program_for_one_batch_serves_others(name: str) -> None:
    """Breaks if rows that are not chosen count, make a gradient NaN, or how many there are stays in the program."""
    model = Words(HOW[name]).double()
    program = capture(model, _batch(0.5))
    for share in (0.1, 0.5, 1.0):
        batch = _batch(share, seed=1)
        assert_serves(model, program, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("head", "tensor"), ("two kinds", "ddp"), ("places", "zero3")])
def test_chosen_rows_are_split_with_the_batch(name: str, strategy: str) -> None:
    """Breaks if a rank counts its own rows alone."""
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="cpu")
    plan = autopar.plan(Words(HOW[name]), mesh, example_inputs=_batch(0.4), strategy=strategy)
    assert plan.verify().ok


@pytest.mark.moderate
def test_no_rows_give_what_eager_gives() -> None:
    """Breaks if a mean of nothing is a number."""
    model = Words(_head_of_the_chosen)
    found, _ = _ran(model, capture(model, _batch(0.5)), _batch(0.0))
    assert found.isnan() and model(**_batch(0.0)).isnan()


class Layers(nn.Module):
    """Blocks that repeat, each of which chooses rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Chooses() for _ in range(3)])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, labels != -100)
        return x.square().mean()


class Chooses(nn.Module):
    """Another layer for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.masked_scatter(mask.unsqueeze(-1), self.one(x[mask]))
        return x.masked_scatter(~mask.unsqueeze(-1), self.other(x[~mask]))


@pytest.mark.moderate
def test_repeated_blocks_choose_by_one_mask() -> None:
    """Breaks if the rows of a block that was traced once are those of another."""
    model, labels = Layers(), {"labels": _batch(0.3)["labels"]}
    x, other = torch.randn(4, TOKENS, WIDTH), _batch(0.7, seed=1)["labels"]
    found, _ = _ran(model, outline(capture(model, {"x": x, **labels})), {"x": x, "labels": other})
    torch.testing.assert_close(found, model(x, other))


def _returns(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    return x[labels != -100]


def _mixes(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    rows = x[labels != -100]
    return (rows.softmax(0) * rows.cumsum(0)).mean()


def _finds_the_most(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    return x[labels != -100].topk(50, 0).values.mean()  # of 12 there are


def _draws(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    return F.dropout(x[labels != -100], 0.5, True).mean()


def _writes_elsewhere(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    found, mask = torch.zeros_like(x), labels != -100
    found[mask.flip(0)] = x[mask]
    return found.mean()


def _loops(model: Words, x: Tensor, labels: Tensor) -> Tensor:
    for place in (labels[:, 0] != -100).nonzero():
        x = x + model.hidden(x[place])
    return x.mean()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_returns, "the model returns rows that a mask chooses"),
        (_mixes, "cumsum does not treat alone each row that a mask chooses .*test_chosen_rows.py:"),
        (_finds_the_most, "topk cannot be of all rows, .*test_chosen_rows.py:"),
        (_draws, "dropout draws numbers for rows that a mask chooses .*draw for all rows"),
        (_loops, "goes through the rows that a mask chooses one by one.*test_chosen_rows.py:"),
        (_writes_elsewhere, r"x\[index\] = … does not treat alone each row"),
    ],
)
def test_what_does_not_treat_each_row_alone_is_refused(how: Callable[..., Tensor], said: str) -> None:
    """Breaks if rows that are not chosen get into what the others give, or a number of one batch stays."""
    with pytest.raises(AutoparError, match=said):
        capture(Words(how), _batch(0.5))
