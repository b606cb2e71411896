"""What forward writes in place, as values: batch norms, counters, memory that is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.torch_compat import tracing
from autopar.passes.capture import capture
from autopar.passes.functional import make_functional, written_apart


class Net(nn.Module):
    """A convolution and what `how` does with its result."""

    seen: Tensor
    mean: Tensor

    def __init__(self, how: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.how = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), how
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, self.conv(x) * 2)


def _counted(net: Net, y: Tensor) -> Tensor:
    """Statistics that are read between two uses of one norm, a counter, an average, and a dtype that stays."""
    mean = net.norm.running_mean
    assert mean is not None
    y = net.norm(net.norm(y).relu_() + mean[:, None, None])
    net.seen += 2
    net.mean.mul_(0.9)
    net.mean.add_(y.detach().double().mean((0, 2, 3)), alpha=0.1)
    means = y.mean((2, 3))
    means += net.mean
    return means.mul_(net.seen)


def _viewed_before(net: Net, y: Tensor) -> Tensor:
    sums = y.flatten(1).sum(1)
    y.add_(1)
    return y.mean((1, 2, 3)) * sums


def _viewed_after(net: Net, y: Tensor) -> Tensor:
    flat = y.flatten(1)
    y.relu_()
    return flat.mean(1)


def _idle_dropout(net: Net, y: Tensor) -> Tensor:
    same = F.dropout(y, 0.1, training=False)
    same.add_(1)
    return (y * same).mean((2, 3))


def _in_parts(net: Net, y: Tensor) -> Tensor:
    """Rows that read those before them, other dtypes and shapes, every other place, and pieces of a buffer."""
    for row in range(1, 4):
        y[:, :, row, :row] = y[:, :, row, :row] + y[:, :, :row, :row].sum(2)
    y[:, 1:, 0] = y[:, :1, 1].double()
    y[..., ::2].mul_(0.5)
    net.mean[1:3] = y.detach().mean((0, 2, 3))[:2]
    net.mean[0].add_(net.seen + 1)
    return y.mean((2, 3)) * net.mean


def _part_is_read_on(net: Net, y: Tensor) -> Tensor:
    part = y[:, :, 1:]
    part[:, :, 0] = y[:, :, 0] * 3
    return part.mean((2, 3)) + y.mean((2, 3))


def _views_are_read_on(net: Net, y: Tensor) -> Tensor:
    """Views of views that are read between two writes into one of them, and afterwards; and one that is not."""
    first, turned = y[:, 0], y.transpose(2, 3)
    row, old = turned[:, 1, :, 1].unsqueeze(1), y[:, :, 0].mean(2)
    first[:, 1] = y[:, 1, 2]
    once = row[:, 0] + first[:, 0]
    y[:, 1, :2].mul_(3)
    return (row[:, 0] * once).mean(1, keepdim=True) + first.mean((1, 2))[:, None] + turned[..., 1].mean(2) * old


def _table(net: Net, y: Tensor) -> Tensor:
    """A table that is made and written without gradients, seen through a view of it."""
    with torch.no_grad():
        table = (y[..., 0].detach() * 2).cos()
        first = table[:, 0]
        first[:, 1:] = table[:, 1, 1:]
        both = torch.cat([first, table[:, 0]], 1)
    return y.mean((2, 3)) * both.sum(1, keepdim=True)


def _given_to_no_grad(net: Net, y: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean[:2] = y.mean((0, 2, 3))[:2]
    return y.mean((2, 3)) + net.mean


def _what_was_written_is_read(net: Net, y: Tensor) -> Tensor:
    part = y[:, :, 1].add_(1)
    return part.mean(2) + y.mean((2, 3))


def _turned(net: Net, y: Tensor) -> Tensor:
    turned = torch.einsum("bchw->cbwh", y)
    turned.add_(1)
    return (y * 2).mean((2, 3))


def _dropped_in_place(net: Net, y: Tensor) -> Tensor:
    return F.dropout(F.dropout(y * 2, 0.5, inplace=True), 0.0, inplace=True).mean((2, 3))


def _shifted(net: Net, y: Tensor) -> Tensor:
    """A part of a view, of which nothing else is read any more; then pieces of it, and it again."""
    part = y.reshape(4, 16, 4).transpose(1, 2)[:, :, 1:]
    part *= net.mean.sum() + 0.5
    part[:, 1].add_(part[:, 0])
    part.mul_(2)
    return part.flatten(1)[:, 1:5]


def _read_on_through_another(net: Net, y: Tensor) -> Tensor:
    other, part = y.flatten(1)[:, 3:], y[:, :, 1:]
    part *= 2
    return part.mean((2, 3)) + other.sum(1, keepdim=True)


def _read_on_through_what_was_written(net: Net, y: Tensor) -> Tensor:
    part = y.permute(0, 2, 3, 1)
    first = part[:, 0]
    part.mul_(2)
    return part.mean((1, 2)) + first.mean(1)


def _written_twice(net: Net, y: Tensor) -> Tensor:
    part = y.permute(0, 2, 3, 1)
    once = part.mul_(2)
    part.add_(1)
    return once.mean((1, 2))


def _all_of_it(net: Net, y: Tensor) -> Tensor:
    """Slices that leave nothing out: of what was empty, of a view, of a buffer; one that is read on, and written."""
    found = y.new_empty(y.shape)
    found[..., :4].copy_(y * 3)
    found[:, :, :4][:, 1].mul_(2)
    whole = found[:, :4]
    found[:, :, :, 0:4].add_(1)
    net.mean[:4] = found.detach().mean((0, 2, 3))
    return whole.mean((2, 3)) * found[:, :, 0].mean(2) + net.mean


def _of_numbers(net: Net, y: Tensor) -> Tensor:
    """Python's own numbers, some of which are written; none at all; and those that are made without gradients."""
    plain, written = torch.tensor([1.0, 2.0, 3.0, 4.0]), y.new_tensor([4.0, 3.0, 2.0, 1.0])
    written[1:3] = y.mean((0, 2, 3))[:2]
    written.mul_(2)
    with torch.no_grad():
        table = torch.tensor([0.5, 0.25])
        table[0] = plain[3]
    return torch.cat([torch.tensor([]), (y.mean((2, 3)) * written + plain).flatten(), table])


def _numbers_detached_later(net: Net, y: Tensor) -> Tensor:
    """Numbers that had a gradient when they were detached, through a part of them."""
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=y.dtype)
    numbers[:2].mul_(y.mean())
    numbers.detach_()
    return y.mean((2, 3)) * numbers


def _detached(net: Net, y: Tensor) -> Tensor:
    """What was made of it before has a gradient, as has a view; what is written afterwards has one of its own."""
    once = y * 2
    before, part = once.sum((2, 3)), once[:, 1:]
    once.detach_()
    again = y * 3
    again.detach_().mul_(2)
    again[:, 0] = y[:, 1]
    return before * once.mean((2, 3)) + part.square().mean() + (again * y).mean((2, 3))


@pytest.mark.moderate
@pytest.mark.parametrize(
    "how",
    [_counted, _viewed_before, _viewed_after, _idle_dropout, _turned, _in_parts, _part_is_read_on,
     _views_are_read_on, _table, _given_to_no_grad, _what_was_written_is_read, _dropped_in_place, _shifted,
     _read_on_through_another, _read_on_through_what_was_written, _written_twice, _all_of_it,
     _of_numbers, _numbers_detached_later, _detached],
    ids=lambda how: how.__name__,
)  # fmt: skip
def test_what_is_written_is_what_eager_writes(how: Callable[[Net, Tensor], Tensor]) -> None:
    """Breaks if an operator reads a value before or after its time, or what two names share becomes two values."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(Net(how), mesh, example_inputs={"x": torch.randn(4, 3, 6, 6)}, strategy="ddp")
    assert plan.verify().ok


@pytest.mark.parametrize(
    "how",
    [_counted, _viewed_before, _viewed_after, _turned, _in_parts, _part_is_read_on, _views_are_read_on,
     _table, _given_to_no_grad, _what_was_written_is_read, _dropped_in_place, _shifted, _read_on_through_another,
     _read_on_through_what_was_written, _written_twice, _all_of_it],
    ids=lambda how: how.__name__,
)  # fmt: skip
def test_plain_writes_are_not_traced_again(how: Callable[[Net, Tensor], Tensor]) -> None:
    """Breaks if statistics of thousands of norms go through torch's own trace, which takes as long as the first; or if
    views are taken for plain.
    """
    exported = torch.export.export(Net(how), (torch.randn(4, 3, 6, 6),), strict=False)
    plain = (_counted, _viewed_before, _in_parts, _part_is_read_on, _views_are_read_on, _table, _dropped_in_place,
             _shifted, _written_twice, _all_of_it)  # fmt: skip
    assert make_functional(exported) is (how in plain)
    kinds = [spec.kind.name for spec in exported.graph_signature.output_specs]
    assert kinds == ["BUFFER_MUTATION"] * {_counted: 5, _in_parts: 1, _all_of_it: 1}.get(how, 0) + ["USER_OUTPUT"]


def test_numbers_of_pythons_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a model that makes a tensor of Python's own numbers goes through torch's own trace."""
    monkeypatch.setattr("autopar.passes.capture.retraced", None)
    assert capture(Net(_of_numbers), {"x": torch.randn(4, 3, 6, 6)})


class Overlapping(nn.Module):
    """Counts in a buffer of which another one is a piece."""

    whole: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1)
        return x * self.part.sum()


def test_buffers_in_one_memory_are_left_to_torch() -> None:
    """Breaks if one of them is read as it was before the other one was written."""
    exported = torch.export.export(Overlapping(), (torch.randn(4),), strict=False)
    assert not make_functional(exported)


class Coded(nn.Module):
    """Keeps an average in a buffer that has the name of what torch keeps a graph's text in."""

    code: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("code", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.code.lerp_(x.mean(0), 0.1)
        return x


def test_norms_of_other_widths_have_statistics_of_their_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    exported = torch.export.export(model, (torch.randn(4, 3),), strict=False)
    assert make_functional(exported)
    norms = [node for node in exported.graph.nodes if str(node.target).startswith("aten._native_batch_norm")]
    assert [[tuple(each.shape) for each in node.meta["val"]] for node in norms] == [
        [(4, width)] + [(width,)] * 4 for width in (3, 5, 5)
    ]
    assert len({tracing.storage_id(each) for node in norms for each in node.meta["val"]}) == 15


def test_a_name_that_torch_has_taken_is_free() -> None:
    """Breaks if a buffer called `code` ends in torch's own "attribute already exists"."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    proof = autopar.plan(Coded(), mesh, example_inputs={"x": torch.randn(4, 4)}, strategy="ddp").verify()
    assert proof.ok, str(proof)


class Largest(nn.Module):
    """Rows that are the largest so far: torch's gradient of `maximum` writes into what it has just made."""

    def forward(self, x: Tensor) -> Tensor:
        best = x[:, 0]
        for row in range(1, 4):
            best = torch.maximum(best * 0.9, x[:, row])
        return best.square().mean()


@pytest.mark.moderate
def test_what_gradients_write_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if long recurrences are differentiated twice, or if what is written is another gradient."""
    again: list[object] = []
    monkeypatch.setattr(tracing, "functional", lambda *given, **more: again.append(given))
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    model = nn.Sequential(nn.Linear(8, 8), Largest())
    plan = autopar.plan(model, mesh, example_inputs=(torch.randn(4, 4, 8),), strategy="ddp")
    assert not again
    assert "masked_fill_" not in plan.source
    assert plan.verify().ok


def _written_once(x: Tensor) -> Tensor:
    return (x * 2).masked_fill_(x < 0, 0.0) + x


def _kept_narrow(x: Tensor) -> Tensor:
    return (x * 2).bfloat16().mul_(x)


def _before_it_was_written(x: Tensor) -> Tensor:
    y = x * 2
    return y.sum() + y.add_(1)


def _after_it_was_written(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    return y * 3


def _seen_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    seen = y.view(-1)
    y.add_(1)
    return seen * 3


def _to_a_power(x: Tensor) -> Tensor:
    return (x * 2).abs_().add_(0.5).pow_(3.0)


def _handed_in(x: Tensor) -> Tensor:
    return x.add_(1)


@pytest.mark.parametrize(
    "how",
    [_written_once, _kept_narrow, _before_it_was_written, _after_it_was_written, _to_a_power, _seen_through_a_view,
     _handed_in],
    ids=lambda how: how.__name__,
)  # fmt: skip
def test_writes_of_a_recorded_graph(how: Callable[[Tensor], Tensor]) -> None:
    """Breaks if what is read through a view, or is the caller's, is taken for a value of its own; if reads see another
    time; or if what is written has another dtype than what it is written into.
    """
    module = tracing.make_fx(how, {}, [torch.randn(3, 4)])
    plain = how not in (_seen_through_a_view, _handed_in)
    assert written_apart(module.graph) is plain
    assert any(map(tracing.is_mutable, module.graph.nodes)) is not plain
    module.recompile()
    x = torch.randn(3, 4)
    found, wanted = module(x.clone()), how(x.clone())
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


class Tower(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Towers(nn.Module):
    """Two towers that share a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.one, self.other = Tower(norm), Tower(norm)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) * self.other(x)).square().mean()


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), Centred()])
def test_modules_that_share_a_norm(norm: nn.Module) -> None:
    """Breaks if statistics that two modules have under two names cannot be traced, or one's update is lost."""
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(Towers(norm), mesh, example_inputs={"x": torch.randn(8, 4)}, strategy="ddp")
    proof = plan.verify().raise_on_failure()
    names = {row.name for row in proof.comparisons if row.name.startswith("buffer ")}
    assert names == {f"buffer one.norm.{name}" for name, _ in norm.named_buffers()}
