"""What a forward keeps on its modules in Python: numbers are told, what else the next step goes by is refused, and the
rest noted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.passes.capture import capture

WIDTH = 4


class Net(nn.Module):
    """A layer that has counted its calls, and the last outputs."""

    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls, self.share = 0, 0.0
        self.last: Tensor | None = None
        self.table = None

    def loss(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made.square().mean()


class WarmsUp(Net):
    """A weight that grows with the calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.loss(x) * min(1.0, self.calls / 10)


class WarmsUpElsewhere(Net):
    """The number is counted in one function, and asked for in another."""

    def count(self) -> None:
        self.calls = self.calls + 1

    @property
    def is_warm(self) -> bool:
        return self.calls > 3

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.loss(x) * (2 if self.is_warm else 1)


class GoesByTheLast(Net):
    """A penalty on what changes from step to step."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x).mean(0)
        loss = self.loss(x)
        if self.last is not None:
            loss = loss + F.mse_loss(made, self.last)
        self.last = made.detach()
        return loss


class Counts(Net):
    """Nothing is done by the number, or by what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.layer(x).detach()
        return self.loss(x) + self.last.sum() * 0

    def summary(self) -> str:
        return f"{self.calls} calls"


class SetsAnew(Net):
    """A number that begins anew in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 0
        self.calls += 2
        return self.loss(x) * self.calls


class MakesATable(Net):
    """A table that is made once, of no input."""

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype).sin()
        return self.loss(x + self.table)


@pytest.mark.parametrize("kind", [WarmsUp, WarmsUpElsewhere, Counts])
def test_a_number_that_is_counted_is_told(kind: type[Net]) -> None:
    """Breaks if every step does what the first one did, or a counter stays where it was."""
    program = capture(kind(), {"x": torch.randn(3, WIDTH)})
    assert program.told is not None and program.told.words == ("calls",) and program.told.numbers() == [0]
    assert [after.of([7]) for after in program.told.after] == [8]
    assert [asked.of([7]) for asked in program.told.asked] == [] if kind is not WarmsUpElsewhere else [True]


def test_what_the_next_step_goes_by_is_refused() -> None:
    """Breaks if every step does what the first one did, without a word."""
    words = r"forward\(\) changes last, .*goes by what it was.*test_kept\.py:.*register_buffer"
    with pytest.raises(AutoparError, match=words):
        capture(GoesByTheLast(), {"x": torch.randn(3, WIDTH)})


@pytest.mark.parametrize(("kind", "names"), [(Counts, "last"), (SetsAnew, "calls"), (MakesATable, None)])
def test_what_nothing_goes_by_is_noted(kind: type[Net], names: str | None) -> None:
    """Breaks if a counter, or what is kept to be looked at, stands in the way, or is lost without a word."""
    program = capture(kind(), {"x": torch.randn(3, WIDTH)})
    wanted = () if names is None else (f"forward() sets {names}, which a program does not",)
    assert tuple(x for note in program.notes if "is told" not in (x := note.partition(":")[0])) == wanted


def test_a_second_trace_of_the_same_model_starts_anew() -> None:
    """Breaks if a trace leaves in the user's model what its forward has set."""
    model = Counts()
    capture(model, {"x": torch.randn(3, WIDTH)})
    assert model.calls == 0 and model.last is None


_CALLS, _SEEN = 0, 0


class CountsGlobally(Net):
    """A number of the file, by which more is done, or nothing."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        global _CALLS, _SEEN
        if self.reads:
            _CALLS = _CALLS + 1
        _SEEN += 1
        return self.loss(x) * (2 if _CALLS > 3 else 1)


def test_a_global_by_which_forward_goes_is_refused() -> None:
    """Breaks if a program goes on as in its first step, or a number that nothing is done by is refused."""
    capture(CountsGlobally(False), {"x": torch.randn(2, WIDTH)})
    with pytest.raises(AutoparError, match=r"changes _CALLS, a global .*test_kept\.py:\d+"):
        capture(CountsGlobally(True), {"x": torch.randn(2, WIDTH)})


class Carries(Net):
    """The states of a recurrent layer go on with the next batch."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.rnn, self.together = nn.LSTM(WIDTH, WIDTH), together
        self.states: tuple[Tensor, Tensor] | None = None
        self.h, self.c = torch.zeros(2, 1, 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            y, states = self.rnn(x[None], self.states)
            self.states = (states[0].detach(), states[1].detach())
        else:
            y, (h, c) = self.rnn(x[None], (self.h, self.c))
            self.h, self.c = h.detach(), c.detach()
        return self.loss(y)


@pytest.mark.parametrize("together", [True, False])
def test_states_that_are_carried_on_are_refused(together: bool) -> None:
    """Breaks if a program begins with the first states in every step, as they are in a tuple or set with others."""
    with pytest.raises(AutoparError, match=r"an attribute in Python, and goes by what it was.*test_kept\.py:\d+"):
        capture(Carries(together), {"x": torch.randn(2, WIDTH)})


class Scan(nn.Module):
    """A scan that goes on from its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) if self.state is None else self.layer(x) + self.state
        self.state = y.detach().mean(0)
        return y


class ScanApart(Scan):
    """One that hands it to another function, which sets the next."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scanned(x, self.state)

    def scanned(self, x: Tensor, state: Tensor | None) -> Tensor:
        y = self.layer(x) if state is None else self.layer(x) + state
        self.state = y.detach().mean(0)
        return y


class Recurrent(nn.Module):
    """Layers with states, which may begin anew in every forward."""

    def __init__(self, begins_anew: bool, kind: type[Scan]) -> None:
        super().__init__()
        self.layers, self.begins_anew = nn.ModuleList(kind() for _ in range(2)), begins_anew

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.begins_anew:
                layer.state = None  # type: ignore[assignment]
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", [Scan, ScanApart])
def test_states_that_begin_anew_are_none(kind: type[Scan]) -> None:
    """Breaks if a state is taken for carried on that forward sets before anything reads it; if one that is carried on
    from one function to another is not seen; or if modules look up their attributes otherwise behind a trace.
    """
    looks_up = nn.Module.__getattr__
    x = {"x": torch.randn(2, WIDTH)}
    assert any(note.startswith("forward() sets layers.0.state") for note in capture(Recurrent(True, kind), x).notes)
    with pytest.raises(AutoparError, match=r"an attribute in Python, and goes by what it was.*test_kept\.py:\d+"):
        capture(Recurrent(False, kind), x)
    assert nn.Module.__getattr__ is looks_up


class First(Scan):
    """Goes by what its first batch has."""

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = x.mean(0)
        return self.layer(x) + self.state


def test_what_the_first_batch_says_is_kept() -> None:
    """Breaks if what is made of the first batch, where there is none yet, is made of each."""
    with pytest.raises(AutoparError, match=r"state, an attribute in Python, and goes by what it was.*test_kept\.py"):
        capture(First(), {"x": torch.randn(2, WIDTH)})


def test_states_that_may_begin_anew_are_watched_from_the_first_trace_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a model with states is traced once more to see whether it reads what it sets."""
    export, traces = torch.export.export, list[str]()

    def traced(model: nn.Module, *args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        traces.append(type(model).__name__)
        return export(model, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", traced)
    capture(Recurrent(True, Scan), {"x": torch.randn(2, WIDTH)})
    assert traces == ["Recurrent"]


class KeepsInPlace(nn.Module):
    """A state that is written at places of a tensor which forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.state
        new = torch.zeros(WIDTH)
        new[1:3] = y.detach().mean(0)[1:3]
        self.state = new
        return y.square().mean()


def test_a_state_that_is_written_in_place_is_of_the_batch() -> None:
    """Breaks if a state is taken for the same in every step because no operand of it is of the batch."""
    with pytest.raises(AutoparError, match=r"changes state, an attribute in Python, and goes by what it was"):
        capture(KeepsInPlace(), {"x": torch.randn(2, WIDTH)})
