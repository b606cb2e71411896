"""What ranks compare at every forward: each difference that makes them compute something else is told, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.runtime import agreement
from autopar.runtime.agreement import Agreement, Call
from autopar.runtime.comm import RecordingComm

BATCH = {"x": torch.arange(24.0).reshape(6, 4) / 7, "labels": torch.arange(6), "more": torch.arange(6) * 2}


@dataclass
class Rank:
    """What one rank is about to do."""

    batch: dict[str, Tensor] = field(default_factory=lambda: dict(BATCH))
    number: int = 1
    trains: tuple[bool, bool] = (True, True)
    settings: str = "SGD(lr=0.1)"
    graph: str = ""
    held: str = ""
    wants: tuple[bool, bool] = (True, True)
    has: tuple[bool, bool] = (False, False)
    steps: int = 0
    given: tuple[float, ...] = ()


class _Asked(Exception):
    """Details were asked for: the rows differ."""


class _Done:
    def wait(self, *_: Any) -> None:
        """Nothing is on its way."""


class _Ranks:
    """All ranks in this process, one after the other: what each sends is handed to all."""

    def __init__(self, ranks: Sequence[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks, self.patch = ranks, monkeypatch
        monkeypatch.setattr(agreement.dist, "get_world_size", lambda: len(ranks))
        self.rows: list[Tensor] = []

    def said(self) -> str:
        """What the first rank says: the error, or nothing where all agree."""
        for rank in self.ranks:
            self._begin(rank, lambda own: own.repeat(len(self.ranks)), self.rows.append)
        details: list[Any] = []
        for rank in self.ranks:
            self.patch.setattr(agreement, "gather_objects", lambda own: details.append(own) or self._stop())
            try:
                self._begin(rank, lambda _: torch.cat(self.rows))
            except _Asked:
                continue
            return ""
        self.patch.setattr(agreement, "gather_objects", lambda _: details)
        with pytest.raises(AutoparError) as caught:
            self._begin(self.ranks[0], lambda _: torch.cat(self.rows))
        return str(caught.value)

    def _stop(self) -> None:
        raise _Asked

    def _begin(
        self, rank: Rank, answer: Callable[[Tensor], Tensor], note: Callable[[Tensor], None] = lambda _: None
    ) -> None:
        def gather(found: Tensor, own: Tensor, **_: Any) -> _Done:
            note(own.clone())
            found.copy_(answer(own))
            return _Done()

        self.patch.setattr(agreement, "all_gather_single", gather)
        own = Agreement(RecordingComm(("dp",), (len(self.ranks),), 0, "cpu"))
        own.held = rank.held
        for _ in range(rank.steps):
            own.note(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
        own.settings = rank.settings
        for gradient in rank.given:
            own.note_gradient(torch.tensor(gradient))
        own.begin(Call(rank.number, rank.batch, rank.trains, rank.graph, rank.wants, rank.has))


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Rank:
    return Rank(batch=BATCH | {name: change(BATCH[name])})


def _at_end(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1] += 1
    return x


VALUES = "the values of the inputs differ on rank 1 from rank 0's"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (changed("labels", _at_end), f"{VALUES} (labels)"),
        (changed("x", lambda x: x + 1e-9), VALUES),
        (changed("x", lambda x: x.flip(0)), f"{VALUES} (x)"),
        (changed("labels", lambda x: x.flip(0)), f"{VALUES} (labels)"),
        (Rank(batch=BATCH | {"labels": BATCH["more"], "more": BATCH["labels"]}), f"{VALUES} (labels, more)"),
        (changed("x", lambda x: x.double()), "the kinds of the inputs differ on rank 1"),
        (Rank(number=2), "the numbers of forwards differ on rank 1"),
        (Rank(trains=(True, False)), "the modes of modules (train, eval) differ on rank 1"),
        (Rank(settings="SGD(lr=0.2)"), "the settings of the optimizer differ on rank 1"),
        (Rank(graph="relu"), "the traced graphs differ on rank 1"),
        (Rank(wants=(True, False)), "the parameters that are trained differ on rank 1"),
        (Rank(has=(False, True)), "which parameters have gradients differ on rank 1"),
        (Rank(steps=1), "the numbers of steps of optimizers differ on rank 1"),
        (Rank(given=(1.0,)), "the gradients of the losses differ on rank 1"),
    ],
    ids=[
        "the last",
        "fractions",
        "rows of floats",
        "rows",
        "exchanged",
        "dtypes",
        "numbers",
        "modes",
        "settings",
        "graph",
        "frozen",
        "gradients",
        "steps",
        "losses",
    ],
)
def test_a_difference_is_told_before_the_step(other: Rank, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if ranks with other batches, modes or settings go on, and train something that no rank has asked for."""
    if said == VALUES:  # float32 cannot tell 1e-9 at 3; its smallest step it can
        other.batch["x"] = torch.nextafter(BATCH["x"], torch.tensor(10.0))
    assert _Ranks([Rank(), other], monkeypatch).said().startswith(said)


def test_as_many_modules_in_training_but_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if ranks are asked how many modules train, not which."""
    ranks = [Rank(trains=(True, False)), Rank(trains=(False, True))]
    assert _Ranks(ranks, monkeypatch).said().startswith("the modes of modules")


def test_ranks_alike_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if ranks that do the same are stopped; the optimizers of two stages have other groups."""
    assert _Ranks([Rank(), Rank()], monkeypatch).said() == ""
    stages = [Rank(settings=f"SGD({stage})", held=f"stage {stage}", wants=(True, stage == 0)) for stage in (0, 0, 1, 1)]
    assert _Ranks(stages, monkeypatch).said() == ""


def test_ranks_that_differ_are_named_with_whom_they_differ_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a rank is told to differ from one that it need not be like."""
    settings = [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")]
    ranks = [Rank(settings=setting, held=held) for setting, held in settings]
    assert "differ on rank 1 from rank 0's" in _Ranks(ranks, monkeypatch).said()
    assert "differ on ranks 1, 2 from rank 0's" in _Ranks([Rank(), Rank(number=2), Rank(number=3)], monkeypatch).said()


def test_how_an_optimizer_computes_is_no_setting() -> None:
    """Breaks if a rank with another kernel is stopped, or if a learning rate of its own is not seen."""
    parameter = nn.Parameter(torch.zeros(2))
    found = []
    for options in ({"lr": 0.1, "foreach": True}, {"lr": 0.1, "foreach": False}, {"lr": 0.2}):
        own = Agreement(RecordingComm(("dp",), (2,), 0, "cpu"))
        own.note(torch.optim.SGD([parameter], **options))  # type: ignore[arg-type]
        found.append(own.settings)
    assert found[0] == found[1] != found[2]


def test_inputs_are_compared_by_name_in_whatever_order_they_come() -> None:
    """Breaks if ranks whose script walks through a set of names are said to have other inputs than each other."""
    model, batch = torch.nn.Linear(2, 2), {"ids": torch.zeros(2), "mask": torch.ones(2)}
    first = agreement.call_of(0, model, (), batch)
    other = agreement.call_of(0, model, (), dict(reversed(batch.items())))
    assert list(first.inputs) == list(other.inputs)
