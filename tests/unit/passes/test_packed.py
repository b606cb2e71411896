"""Sequences that are packed: what recurrent layers give of them, whichever rows end where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.passes.test_chosen_rows import assert_serves

ROWS, TIME, WIDTH, HIDDEN = 4, 7, 5, 6


class Packing(nn.Module):
    """Of whose packed sequences `how` makes a loss."""

    def __init__(self, how: Callable[..., Any], kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = getattr(nn, kind)(WIDTH, HIDDEN, batch_first=True, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.state = nn.Linear(WIDTH, options.get("num_layers", 1) * directions * HIDDEN)
        self.head = nn.Linear(directions * HIDDEN, 3)

    def forward(self, x: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        return self.how(self, x, lengths, labels)

    def packed(self, x: Tensor, lengths: Any) -> PackedSequence:
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def _batch(lengths: tuple[int, ...] = (3, TIME, 1, 5), seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), TIME, WIDTH, generator=made, dtype=torch.float64)
    labels = torch.randint(0, 3, (len(lengths), TIME), generator=made)
    return {"x": x, "lengths": torch.tensor(lengths), "labels": labels}


def _tagger(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """A label a step, padding left out by the lengths that come back; padding's zeros count in the last term."""
    y, _ = model.layers(model.packed(x, lengths.cpu()))
    out, ends = pad_packed_sequence(y, batch_first=True)
    counts = torch.arange(out.shape[1]) < ends[:, None]
    losses = F.cross_entropy(model.head(out).flatten(0, 1), labels[:, : out.size(1)].flatten(), reduction="none")
    return (losses.view_as(counts) * counts).sum() / counts.sum() + out.square().mean()


def _last(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """The last states, each row's by its own label, from states that the model makes."""
    rows = model.state(x[:, 0]).unflatten(-1, (-1, HIDDEN)).transpose(0, 1).contiguous()
    first: Any = (rows, rows.tanh()) if isinstance(model.layers, nn.LSTM) else rows
    _, last = model.layers(model.packed(x, lengths), first)
    each = last if isinstance(last, tuple) else (last,)
    return sum(((x.pow(3) * (labels[:, :1] + 1)).sum() for x in each), x.new_zeros(()))


def _steps(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """Steps as they are packed, and labels packed alike."""
    packed = model.packed(x, lengths)
    y, _ = model.layers(PackedSequence(model.first(packed.data).relu(), *packed[1:]))
    return F.cross_entropy(model.head(y.data), model.packed(labels, lengths).data) + y.data.mean() / len(y.data)


def _listed(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """Lengths as Python's numbers, time first, another number as padding, and more room than there is."""
    packed = pack_padded_sequence(x.transpose(0, 1), lengths.tolist(), enforce_sorted=False)
    y, _ = model.layers(packed)
    out, _ = pad_packed_sequence(y, padding_value=-1.5, total_length=TIME + 2)
    return (out.transpose(0, 1) * torch.arange(TIME + 2)[:, None]).square().mean()


def _sorted(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    """Sorted by hand, and put back."""
    ends, order = lengths.sort(0, descending=True)
    y, _ = model.layers(pack_padded_sequence(x[order], ends, batch_first=True))
    out, _ = pad_packed_sequence(y, batch_first=True)
    return F.cross_entropy(model.head(out[order.argsort()]).flatten(0, 1), labels.flatten())


HOW = {"tagger": _tagger, "last": _last, "steps": _steps, "listed": _listed, "sorted": _sorted}
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"bidirectional": True, "num_layers": 2}),
    ("GRU", {"bidirectional": True, "bias": False}),
    ("RNN", {"num_layers": 2}),
]


@pytest.mark.moderate
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=["LSTM", "GRU", "RNN"])
def test_the_program_for_one_batch_serves_others(name: str, kind: str, options: dict[str, Any]) -> None:
    """Breaks if a state goes on past a row's end, a backward direction begins elsewhere, or lengths stay in it."""
    torch.manual_seed(0)
    model = Packing(HOW[name], kind, **options).double()
    program = capture(model, _batch())
    assert not program.by_value
    for lengths in ((TIME, 2, 2, 4), (1, 1, TIME, TIME), (6, TIME, 3, 1)):
        assert_serves(model, program, _batch(lengths, seed=1))


def planned(model: nn.Module, strategy: str, mesh: str) -> Plan:
    return autopar.plan(model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=_batch(), strategy=strategy)


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", "dp=2"), ("zero3", "dp=2"), ("auto", "dp=2,tp=2")])
@pytest.mark.parametrize("name", ["tagger", "last", "steps"])
def test_rows_split_with_the_batch(name: str, strategy: str, mesh: str) -> None:
    """Breaks if rows are sorted over all ranks, or a rank has the lengths of another."""
    plan = planned(Packing(HOW[name], bidirectional=True).double(), strategy, mesh)
    assert plan.verify().ok and plan.source is not None and "ops.lstm(" in plan.source
    assert not any("all rows of the batch" in note for note in plan.notes)


@pytest.mark.moderate
def test_dropout_between_layers() -> None:
    """Breaks if what is dropped of packed steps is not what is dropped of their places."""
    assert planned(Packing(_last, num_layers=2, dropout=0.4).double(), "ddp", "dp=2").verify().ok


@pytest.mark.moderate
def test_a_batch_whose_sequences_all_end_early_is_not_given_other_numbers() -> None:
    """Breaks if a program hands out more steps than eager has; with `total_length`, or without them, it has as many."""
    model = Packing(_tagger).double()
    program, short = capture(model, _batch()), _batch((3, 2, 1, 5))
    assert program.granted
    with pytest.raises(AssertionError, match="nan"):
        assert_serves(model, program, short)
    for how in (_last, _steps, _listed):
        model = Packing(how).double()
        assert_serves(model, capture(model, _batch()), short)


def test_an_example_whose_sequences_all_end_early_is_refused() -> None:
    """Breaks if that is found out when it runs; lengths of Python's are known."""
    with pytest.raises(AutoparError, match=r"end before the batch.*test_packed\.py:\d+.*total_length"):
        capture(Packing(_tagger).double(), _batch((3, 2, 1, 5)))


@pytest.mark.moderate
def test_lengths_of_pythons_own() -> None:
    """Breaks if what is shorter than the batch is not cut off."""

    def known(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        y, last = model.layers(pack_padded_sequence(x, [6, 4, 4, 1], batch_first=True))
        return pad_packed_sequence(y, batch_first=True)[0].square().mean() + last.sum() + y.data[0].sum()

    model = Packing(known, "GRU").double()
    program = capture(model, _batch())
    assert not program.granted
    assert_serves(model, program, _batch(seed=2))


def _first_steps(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    return model.first(model.packed(x, lengths).data[:ROWS]).sum()


def _by_sizes(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    packed = model.packed(x, lengths)
    return model.first(packed.data[: packed.batch_sizes[0]]).sum()


def _joined_steps(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    packed = model.packed(x, lengths)
    return model.first(torch.cat([packed.data, x[0]])[:ROWS]).sum()


def _few_of_some(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    data = model.packed(x, lengths).data
    return model.first(data[data[:, 0] > 0][:2]).sum()


def _beside_other_rows(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    counts = torch.arange(TIME) < lengths[:, None]
    return (model.first(model.packed(x, lengths).data) * x[counts]).sum()


def _handed_out(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    return model.packed(model.first(x), lengths).data


def _order(model: Packing, x: Tensor, lengths: Tensor, labels: Tensor) -> Any:
    return model.first(x).sum(), model.packed(x, lengths).sorted_indices


@pytest.mark.parametrize(
    "how", [_first_steps, _by_sizes, _joined_steps, _few_of_some, _beside_other_rows, _handed_out, _order]
)
def test_what_goes_by_the_order_of_steps_is_refused(how: Callable[..., Any]) -> None:
    """Breaks if steps are taken by their place, which is another one in a program."""
    with pytest.raises(AutoparError, match=r"test_packed\.py:\d+|returns the order|returns rows"):
        capture(Packing(how).double(), _batch())


def test_projected_states_are_refused_with_a_way() -> None:
    """Breaks if five weights of a layer are taken for four."""
    with pytest.raises(AutoparError, match=r"proj_size.*nn\.Linear"):
        capture(Packing(_tagger, proj_size=3).double(), _batch())
