"""Buffers that forward changes, and batch norm above all: statistics of the whole batch on every mesh, as on one
device.

What breaks it: statistics per rank, running statistics that are dropped, doubled or updated in eval mode, a gather of
activations where sums per channel would do.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import operators as ops
from autopar import pipeline
from autopar.api import interpret
from autopar.api.proof import Proof
from autopar.cli.models import catalogue
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.runtime.simulate import simulate
from autopar.strategies.names import pin, resolve
from autopar.strategies.request import Request
from tests.unit.traced import lower

pytestmark = [pytest.mark.slow, pytest.mark.unit]
aten = torch.ops.aten
PRODUCT = {"dp": "zero3", "tp": "tensor"}


class Block(nn.Module):
    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Three blocks that one loop runs, and a batch norm without space behind them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block(8, **options) for _ in range(3))
        self.norm = nn.BatchNorm1d(8, **options)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), labels)}


BATCH = {"x": torch.randn(8, 3, 6, 6), "labels": torch.randint(0, 8, (8,))}


def plan(model: nn.Module, mesh: str, strategy: Any, batch: dict[str, Tensor], **options: Any) -> autopar.Plan:
    return autopar.plan(model, Mesh.parse(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy, **options)


def buffers(proof: Proof) -> list[str]:
    return [row.name.removeprefix("buffer ") for row in proof.comparisons if row.name.startswith("buffer ")]


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (4, 3, 5, 5)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_operators_equal_eager(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    """Breaks if a value, a gradient or a running statistic differs, far from the origin too, where squares cancel."""
    x = (torch.randn(shape, dtype=torch.float64) + 100).requires_grad_()
    weight, bias = (torch.randn(shape[1], dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [x, weight, bias] if affine else [x]
    given = (weight, bias) if affine else (None, None)
    mean, variance = torch.randn(shape[1], dtype=torch.float64), torch.rand(shape[1], dtype=torch.float64)
    own_mean, own_variance = mean.clone(), variance.clone()
    want = F.batch_norm(x, own_mean, own_variance, *given, training, 0.1, 1e-5)
    function = ops.AUTOGRAD[aten._native_batch_norm_legit_functional.default]
    have, _, _, new_mean, new_variance = function(x, *given, mean, variance, training, 0.1, 1e-5)
    g = torch.randn_like(want)
    pairs = [(have, want), (new_mean, own_mean), (new_variance, own_variance)]
    pairs += zip(torch.autograd.grad(have, inputs, g), torch.autograd.grad(want, inputs, g), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_types_are_wide(dtype: torch.dtype) -> None:
    """Breaks if sums over a batch are kept in a half type."""
    x = torch.randn(64, 4, 8, 8).to(dtype).requires_grad_()
    weight, bias = torch.ones(4, dtype=dtype, requires_grad=True), torch.zeros(4, dtype=dtype, requires_grad=True)
    running = torch.zeros(4), torch.ones(4)
    function = ops.AUTOGRAD[aten._native_batch_norm_legit_functional.default]
    out, mean, _, new_mean, _ = function(x, weight, bias, *running, True, 0.1, 1e-5)
    gradients = torch.autograd.grad(out.sum(), [x, weight, bias])
    assert out.dtype == dtype and all(gradient.dtype == dtype for gradient in gradients)
    assert mean.dtype == new_mean.dtype == torch.float32
    torch.testing.assert_close(mean, x.detach().double().mean((0, 2, 3)).float(), rtol=1e-5, atol=1e-6)


def test_an_empty_piece_of_a_batch_adds_nothing() -> None:
    """Breaks if a rank without rows makes every sum nan."""
    x, numbers = torch.empty(0, 4, 2, 2), torch.ones(4)
    assert not ops.channel_sum(x).any() and not ops.centred_squares(x, numbers).any()
    assert not ops.batch_norm_grad_sums(x, x, numbers, numbers, 1e-5).any()


@pytest.mark.parametrize(
    ("mesh", "strategy"), [("dp=2", "ddp"), ("dp=2", "zero3"), ("dp=2,tp=2", PRODUCT), ("dp=2,tp=2", "auto")]
)
def test_plain_modules(mesh: str, strategy: Any) -> None:
    """Breaks if loops over calls lose an update, or statistics are a rank's own."""
    planned = plan(Net(), mesh, strategy, BATCH)
    proof = planned.verify().raise_on_failure()
    assert len(buffers(proof)) == 12 and buffers(proof) == [update.name for update in planned.interface.updates]
    assert "for i in range(3):" in planned.source


@pytest.mark.parametrize(
    ("options", "count"),
    [({"momentum": None}, 12), ({"affine": False}, 12), ({"track_running_stats": False}, 0), ({"momentum": 0.5}, 12)],
)
def test_options_of_batch_norm(options: dict[str, Any], count: int) -> None:
    proof = plan(Net(**options), "dp=2", "ddp", BATCH).verify().raise_on_failure()
    assert len(buffers(proof)) == count


def test_cumulative_averages_count_batches() -> None:
    """Breaks if momentum None averages only the first batch: its factor is 1 / the number of batches."""
    model = Net(momentum=None)
    for _ in range(3):
        model(**{**BATCH, "x": torch.randn(8, 3, 6, 6)})
    plan(model, "dp=2", "ddp", BATCH).verify().raise_on_failure()


def test_nothing_is_updated_in_eval_mode_or_of_a_frozen_norm() -> None:
    model = Net()
    model.norm.eval()
    assert "norm.running_mean" not in buffers(plan(model, "dp=2", "ddp", BATCH).verify().raise_on_failure())
    evaluated = plan(model.eval(), "dp=2", "ddp", BATCH)
    assert not evaluated.interface.updates and evaluated.verify().ok
    assert not any(row.phase == "forward" and row.where.startswith("block") for row in evaluated.collectives)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_norms_of_half_types(strategy: str, dtype: torch.dtype) -> None:
    """Breaks if statistics leave their dtype, in which torch's fakes say that they would be float32, or lose more than
    one device's do: a mean is the rest of values that cancel, which kernels of other instructions round otherwise.
    """
    torch.manual_seed(0)
    model = Net().to(dtype)
    batch = {"x": BATCH["x"].to(dtype), "labels": BATCH["labels"]}
    made = plan(model, "dp=2", strategy, batch)
    assert made.verify().ok
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    eager(**batch)
    exact(x=batch["x"].double(), labels=batch["labels"])
    found = simulate(made.interface, made.source, dict(model.state_dict()), batch)
    truth = dict(exact.named_buffers())
    for name, want in eager.named_buffers():
        got, true = found.updates[name], truth[name].double()
        assert got.dtype == want.dtype
        lost, allowed = (got.double() - true).abs().max(), (want.double() - true).abs().max()
        assert lost <= 2 * allowed + torch.finfo(dtype).eps * true.abs().max(), name


def test_small_sums_are_all_that_moves() -> None:
    """Breaks if activations are gathered, or a layer sums more than twice forward and once backward."""
    planned = plan(Net(), "dp=2", "ddp", BATCH)
    moved = Counter((row.kind, row.phase) for row in planned.collectives if row.why == "sum" for _ in range(row.times))
    norms, losses = 4, 1
    assert moved == {("all_reduce", "forward"): 2 * norms + losses, ("all_reduce", "backward"): norms}
    assert {row.kind for row in planned.collectives} == {"all_reduce"}
    # saved: the convolution's result and two numbers a channel, as torch does; relu's result beside
    assert (
        "return (num_batches_tracked, running_mean, running_var, x_1), (x, conv, mean, variance, relu)"
        in planned.source
    )


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_statistics_are_not_summed_again(mode: str) -> None:
    planned = plan(Net(), "dp=2", "ddp", BATCH, rematerialize=mode)
    assert planned.verify().ok
    assert "ops.channel_sum" not in planned.source.partition("def block_backward")[2].partition("def block_reduce")[0]


def test_split_channels() -> None:
    """Breaks if ranks that hold some of the channels give running statistics of those alone."""
    first, second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False)
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(4))
    pins = [pin("0.weight", tp=Shard(0)), pin("3.weight", tp=Shard(1))]
    strategy = {"dp": "ddp", "tp": "tensor"}
    planned = plan(model, "dp=2,tp=2", strategy, {"input": BATCH["x"]}, constraints=pins)
    assert "start=" in planned.source
    planned.verify().raise_on_failure()


def test_any_buffer_may_change() -> None:
    """Breaks if only batch norms' buffers are carried: counters, copies of inputs, averages that the output reads."""

    class Keeps(nn.Module):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("last", torch.zeros(8, 4))
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.count = self.count + 1
            self.last.copy_(x)
            h = self.linear(x)
            self.average = self.average * 0.9 + 0.1 * h.detach().mean(0)
            return h * self.average, self.average

    planned = plan(Keeps(), "dp=2", "ddp", {"x": torch.randn(8, 4)})
    assert set(buffers(planned.verify().raise_on_failure())) == {"count", "last", "average"}


def test_dropout_beside_batch_norm() -> None:
    """Breaks if dropout is lost to torch's own operator when export makes the graph functional."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    proof = plan(model, "dp=2", "ddp", {"input": torch.randn(8, 4)}).verify().raise_on_failure()
    assert proof.dropout and len(buffers(proof)) == 3


def test_updates_survive_saving(tmp_path: Any) -> None:
    planned = plan(Net(), "dp=2", "ddp", BATCH)
    planned.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").interface == planned.interface


def test_every_phase_gives_the_same_updates() -> None:
    """Breaks if a pass before lowering loses or changes an update."""
    model = Net().double()
    batch = {"x": BATCH["x"].double(), "labels": BATCH["labels"]}
    mesh = Mesh({"dp": 1}, hardware="cpu")
    request = Request(model, batch, mesh, resolve("auto", mesh))
    program, found = None, []
    for step in pipeline.DEFAULT[:-1]:
        program, _ = pipeline.run(request, [step], program=program)
        state = interpret.state_of(model, program)
        found.append(interpret.run_with_updates(program, state, interpret.input_tensors(program, batch))[2])
    model(**batch)
    for updates in found:
        assert len(updates) == 12
        for name, value in updates.items():
            torch.testing.assert_close(value, model.get_buffer(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "ddp"), ("dp=2,tp=2", "product")])
def test_resnet(mesh: str, strategy: str) -> None:
    """Breaks if HuggingFace's ResNet differs from eager in loss, logits, gradients or running statistics."""
    assert lower("resnet", mesh, strategy).worst() < 1e-9


def test_resnet_by_name() -> None:
    """Breaks if the bundled sizes are not ResNet-50's, or tiny is another architecture."""
    loaded = catalogue.load("resnet")
    assert sum(p.numel() for p in loaded.model.parameters()) == 25_557_032
    assert tuple(loaded.batch["pixel_values"].shape) == (8, 3, 224, 224)
    tiny = catalogue.load("resnet", tiny=True)
    kinds = {type(module).__name__ for module in loaded.model.modules()}
    assert {type(module).__name__ for module in tiny.model.modules()} == kinds
    (entry,) = [entry for entry in catalogue.entries() if entry.name == "resnet-50"]
    assert "3, 4, 6, 3 blocks" in entry.summary and "1000 classes" in entry.summary
