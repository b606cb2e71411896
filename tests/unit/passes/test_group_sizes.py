"""Groups of rows whose sizes Python reads (`tolist`, `item`, `numpy`): the program has all rows, for any sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.unit.passes.sorted_experts import CHOICES, EXPERTS, INNER, WIDTH, Net, compare, tokens_of


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """A router, and modules that get their rows side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, indices = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        return self.mixed(tokens, weights, indices).view_as(x)

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order = indices.flatten().argsort()
        made = self.made(tokens[order // CHOICES], torch.bincount(indices.flatten(), minlength=EXPERTS))
        back = torch.empty_like(made)
        back[order] = made
        return (back.view(-1, CHOICES, WIDTH) * weights[..., None]).sum(1)

    def made(self, rows: Tensor, counts: Tensor) -> Tensor:
        raise NotImplementedError


class ByList(Layer):
    def made(self, rows: Tensor, counts: Tensor) -> Tensor:
        out, start = torch.zeros_like(rows), 0
        for expert, count in enumerate(counts.tolist()):
            out[start : start + count] = self.experts[expert](rows[start : start + count])
            start += count
        return out


class ByItem(Layer):
    """What nobody needs is left out."""

    def made(self, rows: Tensor, counts: Tensor) -> Tensor:
        out, start = torch.zeros_like(rows), 0
        for expert in range(EXPERTS):
            count: Any = counts[expert].item()
            if count > 0:
                out[start : start + count] = self.experts[expert](rows[start : start + count])
                start = start + count
        return out


class ByNumpy(Layer):
    """DeepSeek-V3's own `moe_infer`."""

    def made(self, rows: Tensor, counts: Tensor) -> Tensor:
        outputs = []
        start = 0
        for expert, count in enumerate(counts.cpu().numpy()):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[expert](rows[start:end]))
            start = end
        return torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)


class BySplit(Layer):
    def made(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(rows, counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


class ByEnds(Layer):
    """Rows are taken by their numbers, and added where they come from; sizes are those of a scattered table."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        table = indices.new_zeros((len(indices), EXPERTS))
        table.scatter_(1, indices, 1)
        ends = table.sum(0).cpu().numpy().cumsum(0)
        order, out = indices.flatten().argsort(), torch.zeros_like(tokens)
        places = order // CHOICES
        for expert, end in enumerate(ends):
            start = 0 if expert == 0 else ends[expert - 1]
            if start == end:
                continue
            own = places[start:end]
            made = self.experts[expert](tokens[own]) * weights.view(-1, 1)[order[start:end]]
            out.index_add_(0, own, made)
        return out


class ByScatter(ByEnds):
    """As DeepSeek-MoE's first one, without writing into what has a gradient."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order, out = indices.flatten().argsort(), torch.zeros_like(tokens)
        places, start = order // CHOICES, 0
        for expert, count in enumerate(F.one_hot(indices, EXPERTS).sum((0, 1)).tolist()):
            if not count:
                continue
            own = places[start : start + count]
            made = self.experts[expert](tokens[own]) * weights.view(-1, 1)[order[start : start + count]]
            out = out.scatter_add(0, own.view(-1, 1).repeat(1, WIDTH), made)
            start += count
        return out


class ByDescending(Layer):
    """The last expert's rows come first."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        order, start = indices.flatten().argsort(descending=True), cast("Any", 0)
        counts, rows = torch.bincount(indices.flatten(), minlength=EXPERTS), tokens[order // CHOICES]
        made = torch.zeros_like(rows)
        for expert in reversed(range(EXPERTS)):
            end = start + counts[expert].item()
            made[start:end] = self.experts[expert](rows[start:end])
            start = end
        back = torch.zeros_like(made).index_copy(0, order, made)
        return (back.view(-1, CHOICES, WIDTH) * weights[..., None]).sum(1)


class ByPlace(Layer):
    """Nothing is sorted: DeepSeek's own way to train. No row is left as it was made."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        rows, numbers = tokens.repeat_interleave(CHOICES, 0), indices.view(-1)
        made = torch.empty_like(rows)
        for expert in range(EXPERTS):
            made[numbers == expert] = self.experts[expert](rows[numbers == expert])
        return (made.view(-1, CHOICES, WIDTH) * weights[..., None]).sum(1)


KINDS = (ByList, ByItem, ByNumpy, BySplit, ByEnds, ByScatter, ByDescending, ByPlace)
OPERATORS = (ByList, ByItem, ByNumpy, BySplit, ByPlace)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", KINDS)
def test_groups_whose_sizes_python_reads(kind: type[Layer]) -> None:
    """Breaks if the example's sizes are in the program, or a group that has no row there or here is another one."""
    torch.manual_seed(0)
    model = Net(kind).double()
    program = capture(model, tokens_of("all"))
    assert "sort" not in str(program) and ("autopar.experts" in str(program)) == (kind in OPERATORS)
    for which in ("all", "one"):
        compare(model, program, tokens_of(which))


class LeavesOne(ByPlace):
    """Rows of the last expert stay as they were made."""

    def mixed(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        rows, numbers = tokens.repeat_interleave(CHOICES, 0), indices.view(-1)
        made = torch.ones_like(rows)
        for expert in range(EXPERTS - 1):
            made[numbers == expert] = self.experts[expert](rows[numbers == expert])
        return (made.view(-1, CHOICES, WIDTH) * weights[..., None]).sum(1)


@pytest.mark.moderate
def test_rows_that_no_expert_has_stay_as_they_were() -> None:
    """Breaks if what is assigned to some rows is taken for what is added to nothing."""
    torch.manual_seed(0)
    model = Net(LeavesOne).double()
    compare(model, capture(model, tokens_of("all")), tokens_of("all"))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), [(ByNumpy, "zero3"), (ByEnds, "ddp"), (BySplit, "expert")])
def test_such_groups_are_split(kind: type[Layer], strategy: str) -> None:
    """Breaks if a rank takes the sizes of all rows for those of its own."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(
            Net(kind), autopar.Mesh.parse("dp=2", hardware="cpu"), strategy=strategy, example_inputs=tokens_of("all")
        )
    assert plan.verify(rtol=1e-9).ok


def _counts_rounds(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    out, start, used = torch.zeros_like(rows), 0, 0
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        out[start : start + count] = layer.experts[expert](rows[start : start + count])
        start += count
        used += 1
    return out / used


def _counts_what_it_collects(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    outputs, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        outputs.append(layer.experts[expert](rows[start : start + count]))
        start += count
    return torch.cat(outputs) / len(outputs)


def _adds_something_else(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    out, start = torch.zeros_like(rows), 0
    for expert, count in enumerate(counts.tolist()):
        if count > 0:
            out[start : start + count] = layer.experts[expert](rows[start : start + count])
            out[0] += cast("Expert", layer.experts[expert]).down.weight.sum()
            start += count
    return out


def _goes_on_elsewhere(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    out, start = torch.zeros_like(rows), 0
    for expert, count in enumerate(counts.tolist()):
        end = start + count + 1
        if count == 0:
            continue
        out[start : end - 1] = layer.experts[expert](rows[start : end - 1])
        start = end
    return out


def _keeps_on_the_module(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    out, start = torch.zeros_like(rows), 0
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        out[start : start + count] = layer.experts[expert](rows[start : start + count])
        layer.last = expert  # type: ignore[assignment]
        start += count
    return out


def _overwrites(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    out, start = torch.zeros_like(rows), 0
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        out = layer.experts[expert](rows) * (out + 1)
        start += count
    return out


def _asks_for_another_number(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    out, start = torch.zeros_like(rows), 0
    for expert, count in enumerate(counts.tolist()):
        if count < 2:
            continue
        out[start : start + count] = layer.experts[expert](rows[start : start + count])
        start += count
    return out


def _leaves_rows_out(layer: Layer, rows: Tensor, counts: Tensor) -> Tensor:
    parts, start = [], 0
    for expert, count in enumerate(counts.tolist()[1:]):
        parts.append(layer.experts[expert](rows[start : start + count]))
        start += count
    return torch.cat([*parts, rows[:0]]) if len(parts) == 1 else torch.cat(parts).sum(0, keepdim=True).expand_as(rows)


@pytest.mark.moderate
@pytest.mark.parametrize(
    "made",
    [
        _counts_rounds, _counts_what_it_collects, _adds_something_else, _goes_on_elsewhere, _keeps_on_the_module,
        _overwrites, _asks_for_another_number,
    ],
)  # fmt: skip
def test_what_more_comes_of_a_round_is_refused(made: Callable[..., Tensor]) -> None:
    """Breaks if a round that eager leaves out counts for something."""
    kind = type("Other", (Layer,), {"made": made})
    with pytest.raises(AutoparError):
        capture(Net(kind), tokens_of("all"))


@pytest.mark.moderate
def test_rows_that_are_no_groups_are_left_out() -> None:
    """Breaks if such rows are zeros among others."""
    torch.manual_seed(0)
    model = Net(type("Other", (Layer,), {"made": _leaves_rows_out})).double()
    program = capture(model, tokens_of("all"))
    for which in ("all", "one"):
        compare(model, program, tokens_of(which))


class Reads(nn.Module):
    """Numbers that Python reads of values."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.linear(x))


def _scales(x: Tensor) -> Tensor:
    return (x / x.abs().max().item()).square().sum()


def _divides_whole_numbers(x: Tensor) -> Tensor:
    some = (x > 0).sum().item()
    return x.sum() * (some / 7) + x.exp().mean() * (1 - some // 2) + (x[0, 0] - some)


def _keeps_what_it_read(x: Tensor) -> Tensor:
    first = some = (x > 0).sum().item()
    some += 3
    return x.sum() * first + x.square().sum() * some


HOW: Mapping[str, Callable[[Tensor], Tensor]] = {
    "scales": _scales, "divides": _divides_whole_numbers, "keeps": _keeps_what_it_read,
}  # fmt: skip


@pytest.mark.parametrize("name", HOW)
def test_numbers_that_python_reads(name: str) -> None:
    """Breaks if a number has a gradient, is rounded to a tensor's type, or is changed for who has read it before."""
    torch.manual_seed(0)
    model = Reads(HOW[name]).double()
    program = capture(model, {"x": torch.randn(5, WIDTH, dtype=torch.float64)})
    for _ in range(2):
        compare(model, program, {"x": torch.randn(5, WIDTH, dtype=torch.float64)})
    plain = Reads(HOW[name])
    program, batch = capture(plain, {"x": torch.ones(5, WIDTH)}), {"x": torch.randn(5, WIDTH)}
    (found, *_), _ = interpret.run(program, interpret.state_of(plain, program), batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain(**batch), rtol=1e-6, atol=1e-6)
