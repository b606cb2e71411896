"""Values of tensors that a forward makes of Python's numbers, asked for as sizes, written before, or drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture

MESH = autopar.Mesh.parse("dp=2", hardware="cpu")


class Base(nn.Module):
    """A linear layer, and columns of ones beside what it gives: as many as a number says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        beside = x.new_ones(len(x), self.count(x))  # type: ignore[call-overload]
        return torch.cat([self.linear(x), beside], 1).square().mean()

    def count(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Shapes(Base):
    """The way of detection models: sizes of levels in a tensor."""

    def count(self, x: Tensor) -> Tensor:
        return torch.tensor([(3, 4), (2, 5)])[0, 1]


class Places(nn.Module):
    """Places that are made for every row, of which the last says how often a token is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.token = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(5).unsqueeze(0).repeat(len(x), 1)
        tokens = self.token.repeat(len(x), places[0].max() + 1, 1)  # type: ignore[call-overload]
        chosen = torch.gather(tokens, 1, places[:, :, None].expand(-1, -1, 16))
        return (self.linear(x)[:, None] + chosen).square().mean()


class Drawn(Base):
    """As many as a draw says."""

    def count(self, x: Tensor) -> Tensor:
        return torch.randint(1, 5, (4,)).max()


class Written(Base):
    """A number that an input's value is added to, where it lies."""

    def count(self, x: Tensor) -> Tensor:
        n = torch.tensor([3, 4])
        n[:1].add_((x.sum() > 0).long())
        return n.max()


class Out(Base):
    """A number that an operator writes."""

    def count(self, x: Tensor) -> Tensor:
        n = torch.zeros(2, dtype=torch.int64)
        torch.add((x[0, :2] > 0).long(), 2, out=n)
        return n.max()


class Padded(nn.Module):
    """The way of audio codecs: how much is padded is computed of buffers of whole numbers."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 4), counts
        self.stride: Tensor
        self.register_buffer("stride", torch.tensor(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.ceil((x.shape[-1] - 1) / self.stride + 1).to(torch.int64)
        if self.counts:
            self.stride.add_(1)
        padded = nn.functional.pad(x, (self.stride - 1, frames * self.stride - x.shape[-1]))  # type: ignore[arg-type]
        return self.linear(padded.unfold(1, 4, 2)).square().mean()


class ReadBack(nn.Module):
    """A number written at a place of a tensor, or by an operator, and read from it as a number of Python's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: Tensor) -> Tensor:
        n, y = torch.tensor([3, 4]), self.linear(x)
        if self.kind == "out":
            torch.add((x[0, :2] > 0).long(), 5, out=n)
        else:
            n[0] = (x.sum() > 0).long() + 3
        return y[:, : n[0]].square().mean() if self.kind == "slice" else y.square().mean() * n[0].item()


@pytest.mark.parametrize("kind", [Shapes, Places])
def test_sizes_that_the_forward_says_itself_are_known(kind: type[nn.Module]) -> None:
    """Breaks if a size is taken for one of each batch because Python reads it of a tensor of more than one number."""
    plan = autopar.plan(kind(), MESH, example_inputs={"x": torch.randn(8, 16)}, strategy="ddp")
    assert plan.verify().ok
    assert plan.interface.by_value == ()


@pytest.mark.parametrize("kind", [Drawn, Written, Out])
def test_sizes_that_differ_from_step_to_step_are_refused(kind: type[Base]) -> None:
    """Breaks if one draw, or what a number was before it was written, becomes the size of every step; or if what is
    said of it are the tracer's own words.
    """
    with pytest.raises(AutoparError, match=r"makes a (number, or a )?size.* by the values of a tensor") as raised:
        capture(kind(), {"x": torch.randn(8, 16)})
    assert "test_made_values.py" in str(raised.value)


def test_sizes_by_buffers_are_known_and_guarded() -> None:
    """Breaks if sizes that small buffers say are refused, or if nobody looks whether the buffer is still so: the step
    would be another one.
    """
    x = torch.randn(8, 16)
    plan = autopar.plan(Padded(), MESH, example_inputs={"x": x}, strategy="ddp")
    assert any("takes for granted that stride is as here (test_made_values.py:" in note for note in plan.notes)
    assert plan.verify().ok
    with pytest.raises(AutoparError, match="the values? of"):
        capture(Padded(counts=True), {"x": x})


@pytest.mark.parametrize("kind", ["slice", "number", "out"])
def test_numbers_are_those_that_were_written_last(kind: str) -> None:
    """Breaks if a number that is read of a tensor is the one that it was made with, and not what was written there: no
    operand of the read has it.
    """
    plan = autopar.plan(ReadBack(kind), MESH, example_inputs={"x": torch.randn(8, 16).abs()}, strategy="ddp")
    assert plan.verify().ok


class ForCompilers(nn.Module):
    """Code for compilers that is not right, as transformers' Switch has without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones(16)
        return (self.linear(x) * mask[None]).square().mean()  # type: ignore[index]


def test_what_fails_in_code_for_compilers_is_traced_as_eager_runs_it() -> None:
    """Breaks if a model that eager runs is refused because it does otherwise where it is compiled, or if what asks is
    told something else behind the trace.
    """
    plan = autopar.plan(ForCompilers(), MESH, example_inputs={"x": torch.randn(8, 16)}, strategy="ddp")
    assert plan.verify().ok
    assert not torch.compiler.is_exporting()
