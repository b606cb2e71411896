"""Weight matrices that `tensor` cannot split: they alone stay whole, the user is told which and why, and all is equal
to eager. Only where nothing can be split is the strategy refused.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.ir.sharding import REPLICATE, Shard

NOTE = "is computed whole on every rank of"


class Block(nn.Module):
    """An MLP, which splits, and a matrix whose result is read whole, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.odd = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.odd(x).softmax(-1).cumsum(-1)


class Odd(nn.Module):
    """Nothing but matrices that do not split."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.odd(x).softmax(-1).cumsum(-1)


class Blocks(nn.Module):
    def __init__(self, *layers: nn.Module, embeds: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16) if embeds else None
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 32, bias=False) if embeds else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.head is None:
            return hidden.square().mean()
        return F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


def tokens() -> dict[str, Tensor]:
    return {"x": torch.arange(64).reshape(8, 8) % 32}


def planned(model: nn.Module, mesh: str, strategy: str = "tensor", batch: dict[str, Tensor] | None = None) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hardware = autopar.Mesh.parse(mesh, hardware="cpu")
        return autopar.plan(model, hardware, example_inputs=batch or tokens(), strategy=strategy)


def whole(plan: Plan) -> set[str]:
    """Weight matrices of blocks that no axis called tp splits."""
    assert plan.program is not None
    axes = [i for i, name in enumerate(plan.mesh.axis_names) if name.startswith("tp")]
    layouts = plan.program.placed.parameters.items()
    return {
        name
        for name, each in layouts
        if name.startswith("layers")
        and len(plan.program.variable(name).type.shape) == 2
        and not any(isinstance(each.stored[a], Shard) for a in axes)
    }


@pytest.mark.moderate
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_a_matrix_without_a_split_stays_whole_and_says_so(mesh: str) -> None:
    """Breaks if one odd matrix has the whole model refused, or others left whole, or nobody is told."""
    plan = planned(Blocks(Block(), Block()), mesh)
    assert whole(plan) == {"layers.0.odd.weight", "layers.1.odd.weight"}
    (note,) = plan.notes
    line = f"test_unsplit.py:{Block.forward.__code__.co_firstlineno + 2}"
    assert note.startswith(f"layers.*.odd at {line} {NOTE} tp: what lies from ")
    assert note.endswith(f"softmax at {line} allows no split of it over tp=2")
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_it_is_a_warning() -> None:
    """Breaks if who does not print the plan is not told, or of no line of theirs."""
    with pytest.warns(UserWarning, match=NOTE) as told:
        mesh = autopar.Mesh.parse("tp=2", hardware="cpu")
        autopar.plan(Blocks(Block(), Block()), mesh, example_inputs=tokens(), strategy="tensor")
    assert {each.filename for each in told if each.category is UserWarning} == {__file__}


@pytest.mark.moderate
def test_nothing_is_said_where_everything_splits() -> None:
    """Breaks if matrices are left whole that have a split."""
    layers = [Block(), Block()]
    for layer in layers:
        layer.odd = nn.Identity()  # type: ignore[assignment]
    plan = planned(Blocks(*layers), "tp=2")
    assert not plan.notes and not whole(plan)


@pytest.mark.moderate
def test_as_few_elements_as_can_be_stay_whole() -> None:
    """Breaks if of two matrices in a row, of which the second cannot be cut, the first is left whole with more."""

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(16, 64, bias=False), nn.Linear(16, 16, bias=False)
            self.down = nn.Linear(64, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.large(self.small(x))))

    assert whole(planned(Blocks(Row(), Row()), "tp=2")) == {"layers.0.small.weight", "layers.1.small.weight"}


@pytest.mark.moderate
def test_a_batch_that_must_be_gathered_and_a_matrix_that_stays_whole() -> None:
    """Breaks if only one of the two concessions is made."""

    class Both(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.cumsum(0)

    plan = planned(Blocks(Both(), Both()), "dp=2,tp=2", "tensor")
    assert whole(plan) == {"layers.0.odd.weight", "layers.1.odd.weight"}
    assert any("needs all rows of the batch" in note for note in plan.notes)
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_two_axes_of_one_grid() -> None:
    """Breaks if on a grid of two axes the matrix must be split by the one that could, or the other is not told."""
    plan = planned(Blocks(Block(), Block()), "tp0=2,tp1=2", "tensor2d")
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_heads_that_do_not_divide_leave_other_weights_split() -> None:
    """Breaks if three heads on two ranks, read by nothing but an unfused score, have the model refused."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.out = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(16, 16)
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k = (each(x).unflatten(-1, (3, 8)).transpose(1, 2) for each in (self.q, self.k))
            score = (q @ k.transpose(-1, -2)).cumsum(-1).sum(1)
            return x + score @ self.out(x) + self.down(F.silu(self.up(x)))

    plan = planned(Blocks(Heads(), Heads()), "tp=2")
    assert not whole(plan) & {"layers.0.up.weight", "layers.0.down.weight"}
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_blocks_without_a_split_stay_whole_and_say_so() -> None:
    """Breaks if a model is refused of which nothing can be split, or nobody is told that every rank computes all."""
    plan = planned(Blocks(Odd(), Odd(), embeds=False), "tp=2", batch={"x": torch.randn(8, 16)})
    line = f"test_unsplit.py:{Odd.forward.__code__.co_firstlineno + 1}"
    told, idle = plan.notes
    assert told.startswith(f"layers.*.odd at {line} is computed whole") and f"softmax at {line} allows no split" in told
    assert idle.startswith("no weight of the model is split over tp")
    plan.verify().raise_on_failure()


def test_an_axis_that_has_nothing_to_split_says_so() -> None:
    """Breaks if `tensor` on a model without weight matrices in blocks does nothing, and nobody is told."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x).softmax(-1).cumsum(-1).cumsum(-1).square().mean()

    plan = planned(Scores(), "tp=2", batch={"x": torch.randn(4, 8)})
    assert plan.notes == ("no weight of the model is split over tp: all of it is computed whole on every rank of tp",)
    assert plan.program is not None
    assert {each.stored for each in plan.program.placed.parameters.values()} == {(REPLICATE,)}


@pytest.mark.moderate
def test_explain_asks_for_other_shardings_of_such_a_plan() -> None:
    """Breaks if what was conceded to the plan is not conceded to its alternatives."""
    plan = planned(Blocks(Block(), Block()), "tp=2")
    assert "against tensor on tp: f32[32, 16]" in str(plan.explain("layers.*.up.weight"))


@pytest.mark.moderate
def test_rows_that_do_not_divide_are_told() -> None:
    """Breaks if `auto` leaves a batch whole, since its rows do not divide, without a word; or where they do."""
    notes = {rows: planned(Blocks(Block()), "dp=3", "auto", {"x": torch.arange(8 * rows).reshape(rows, 8) % 32}).notes
             for rows in (6, 8)}  # fmt: skip
    assert not any("do not divide" in note for note in notes[6])
    assert any("the batch's 8 rows do not divide over dp=3" in note and "6 or 9 rows" in note for note in notes[8])


class Scored(nn.Module):
    """A head whose result is read by more than a cross entropy of labels, beside targets that no rank has in pieces."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 16), nn.Linear(16, words)

    def forward(self, x: Tensor, taught: Tensor) -> Tensor:
        logs = F.log_softmax(self.head(self.table(x)) / 2, dim=-1)
        return F.kl_div(logs, (taught / 2).softmax(-1), reduction="batchmean") - logs.gather(2, x.unsqueeze(2)).mean()


def scored(words: int) -> Plan:
    batch = {"x": torch.arange(64).reshape(8, 8) % words, "taught": torch.linspace(0, 1, 64 * words).view(8, 8, words)}
    return planned(Scored(words), "tp=2", batch=batch)


@pytest.mark.moderate
def test_what_is_read_of_classes_splits() -> None:
    """Breaks if a softmax, what it takes at a label or targets beside it have a head computed whole."""
    plan = scored(32)
    assert not plan.notes and plan.program is not None
    assert plan.program.placed.parameters["head.weight"].stored == (Shard(0),)
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_a_head_whose_rows_do_not_divide_is_told() -> None:
    """Breaks if nobody learns why a head is whole, or how many rows would do."""
    plan = scored(31)
    told = [note for note in plan.notes if note.startswith("head.weight f32[31, 16] is whole on every rank of tp")]
    assert told and "31 rows do not divide over tp=2, 32 would" in told[0]
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_a_sum_over_more_than_classes_splits() -> None:
    """Breaks if a log-sum-exp over classes and another dim is taken for one of classes."""

    class Summed(Scored):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x)).logsumexp((1, 2)).mean()

    plan = planned(Summed(32), "tp=2")
    assert not plan.notes
    plan.verify().raise_on_failure()
