"""batching: losses of several terms, which microbatches put together with what is known of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import operators
from autopar.api import interpret
from autopar.api.promote import only
from autopar.base.errors import AutoparError
from autopar.ir.program import Program
from autopar.passes.batching import RowsTogether, in_microbatches
from autopar.passes.capture import capture
from tests.unit.passes.microbatches import ROWS, Batch, captured, close, gradients, part, ran

Loss = Callable[..., Any]
CLASSES = 5
ALONE = "a buffer in a count alone"


class Scorer(nn.Module):
    """Scores of classes, and a value, for each of three places of a row."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.scores, self.value, self.function = nn.Linear(4, CLASSES), nn.Linear(4, 1), function
        self.register_buffer("weights", torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25]))

    def forward(self, x: Tensor, labels: Tensor, target: Tensor, mask: Tensor) -> Any:
        given = {"labels": labels, "target": target, "mask": mask}
        return self.function(self, y=self.scores(x), v=self.value(x).squeeze(-1), **given)


def batch_of() -> Batch:
    """The last two rows ignore all labels, and the mask leaves out all of the first two."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS, 3), generator=generator)
    labels[1, :2] = labels[4, 1:] = labels[6:] = -100
    mask = (torch.rand(ROWS, 3, generator=generator) > 0.4).double()
    mask[:2] = 0
    x, target = torch.randn(ROWS, 3, 4, generator=generator), torch.randn(ROWS, 3, generator=generator)
    return {"x": x.double(), "labels": labels, "target": target.double(), "mask": mask}


def scored(y: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), **options)


def masked(v: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((v - target).square() * mask).sum() / mask.sum()


def balanced(v: Tensor, labels: Tensor) -> Tensor:
    wanted = (labels > 2).to(v.dtype)
    return F.binary_cross_entropy_with_logits(v, wanted, pos_weight=(wanted == 0).sum() / (wanted == 1).sum())


LOSSES: Mapping[str, Loss] = {
    "average and mean": lambda self, y, v, labels, target, **_: scored(y, labels) + 0.5 * F.mse_loss(v, target),
    "and what is the same for all rows": lambda self, y, v, labels, target, **_: (
        2 * scored(y, labels) - F.l1_loss(v, target) + 0.1 * self.scores.weight.square().sum() + 1
    ),
    "two counts": lambda self, y, v, labels, target, mask: scored(y, labels) + masked(v, target, mask),
    "stacked": lambda self, y, v, labels, target, mask: torch.stack(
        [scored(y, labels), masked(v, target, mask), v.mean()]
    ).sum(),
    "two outputs": lambda self, y, v, labels, target, mask: (scored(y, labels), masked(v, target, mask), v.square()),
    "at least one": lambda self, v, target, mask, **_: (
        ((v - target).square() * mask).sum() / mask.sum().clamp(min=1) + v.mean()
    ),
    "class weights in a buffer": lambda self, y, labels, **_: F.cross_entropy(
        y.transpose(1, 2), labels, weight=self.weights
    ),
    "smoothed, with class weights": lambda self, y, v, labels, target, **_: (
        scored(y, labels, weight=self.weights, label_smoothing=0.2) + F.mse_loss(v, target)
    ),
    "sum and mean": lambda self, y, v, target, **_: y.square().sum() / 50 + F.mse_loss(v, target),
    ALONE: lambda self, v, mask, **_: v.square().sum() / (mask * self.weights[3]).sum() + v.mean(),
    "sum and number": lambda self, y, **_: y.square().sum() + 3,
    "share of a class": lambda self, v, labels, **_: balanced(v, labels),
    "less the greatest": lambda self, v, target, **_: (v - target.max()).square().mean(),
    "nll": lambda self, y, v, labels, **_: F.nll_loss(y.log_softmax(-1).transpose(1, 2), labels) + v.square().mean(),
}


def put_together(model: nn.Module, batch: Batch, m: int) -> Program:
    less = {name: x[: ROWS // m] for name, x in batch.items()}
    return in_microbatches(captured(model, less), m, captured(model, batch))


def of_batch(program: Program, model: nn.Module, batch: Batch) -> Batch:
    assert program.batching is not None
    names: dict[str, Any] = {"torch": torch, "F": F, "ops": operators, "aten": torch.ops.aten}
    exec(program.batching.of_batch, names)
    return names["of_batch"](batch, dict(model.named_buffers())) if "of_batch" in names else {}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_terms_of_one_mean(name: str, m: int) -> None:
    """Outputs and gradients of microbatches against eager's of the whole batch. Breaks if a term counts by another
    number of rows than its own, if one of which no row of a microbatch counts is no number, or if a constant or a sum
    is there as often as there are microbatches.
    """
    model, batch = Scorer(LOSSES[name]).double(), batch_of()
    whole = ran(model, batch)
    expected = gradients(model, whole, [torch.ones_like(each) for each in whole])
    program = put_together(model, batch, m)
    assert program.batching is not None and not program.batching.weight
    state = {**interpret.state_of(model, program), **of_batch(program, model, batch)}
    outputs = [torch.zeros_like(each) for each in whole]
    found = [torch.zeros_like(each) for each in expected]
    names = [name for name, _ in model.named_parameters()]
    for index in range(m):
        with only(torch.float64):
            values, grads = interpret.run(program, state, part(batch, program.batching, index, m))
        for place, how in enumerate(program.batching.outputs):
            assert how.combine in ("sum", "mean", "concat")
            if how.combine == "concat":
                outputs[place][index * ROWS // m : (index + 1) * ROWS // m] = values[place]
            else:
                outputs[place] += values[place].detach() / (m if how.combine == "mean" else 1)
        scale = m if program.batching.outputs[0].combine == "mean" else 1
        found = [a + grads[own] / scale if own in grads else a for a, own in zip(found, names, strict=True)]
    for place, value in enumerate(whole):
        close(outputs[place], value.detach(), f"output {place}")
    for own, a, b in zip(names, found, expected, strict=True) if len(whole) == 1 else ():
        close(a, b, own, max(float(each.norm()) for each in expected))


STRATEGIES: Mapping[str, tuple[dict[str, int], dict[str, str]]] = {
    "ddp": ({"dp": 2}, {"dp": "ddp"}),
    "zero3": ({"dp": 2}, {"dp": "zero3"}),
    "tensor": ({"tp": 2}, {"tp": "tensor"}),
    "stages": ({"pp": 2}, {"pp": "pipeline(1f1b)"}),
    "auto": ({"dp": 2, "tp": 2}, {"dp": "auto", "tp": "auto"}),
}


class Layers(nn.Module):
    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2)])
        self.scorer = Scorer(function)

    def forward(self, x: Tensor, labels: Tensor, target: Tensor, mask: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.scorer(x, labels, target, mask)}


def proven(name: str, strategy: str) -> None:
    mesh, asked = STRATEGIES[strategy]
    plan = autopar.plan(Layers(LOSSES[name]), mesh, strategy=asked, microbatches=4, example_inputs=batch_of())
    assert plan.interface.microbatches == 4 and "def of_batch(inputs, state):" in str(plan.source)
    plan.verify().raise_on_failure()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["zero3", "tensor", "auto"])
@pytest.mark.parametrize("name", ["average and mean", "two counts", "class weights in a buffer"])
def test_plans(name: str, strategy: str) -> None:
    """The program of all ranks against eager: the loss, and every gradient."""
    proven(name, strategy)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("class weights in a buffer", "ddp"), ("class weights in a buffer", "stages"), (ALONE, "stages")],
)
def test_what_a_count_is_made_of(name: str, strategy: str) -> None:
    """Breaks if a step, or a stage of a pipeline, reads something else of the whole batch, or lacks what it needs."""
    proven(name, strategy)


def test_what_the_program_reads_of_the_batch() -> None:
    """Golden: the text that a person reads, and what became of the loss."""
    program = put_together(Scorer(LOSSES["average and mean"]).double(), batch_of(), 4)
    assert program.batching is not None
    assert program.batching.of_batch == (
        "def of_batch(inputs, state):\n"
        '    """What microbatches read of the whole batch."""\n'
        '    labels = inputs["labels"]  # i64[8, 3]\n'
        "    flatten_1 = aten.flatten.using_ints(labels)  # i64[24]\n"
        "    ne_scalar = flatten_1 != -100  # b8[24]\n"
        "    sum_default = ne_scalar.sum()  # i64[]\n"
        '    return {"of_batch_0": sum_default}\n'
    )
    text = str(program)
    assert "aten.div.Tensor(cross_entropy_loss, of_batch_0)  # f64[]" in text
    assert "aten.mul.Tensor(div_tensor, 4)  # f64[]" in text


REFUSED: Mapping[str, tuple[str, Loss]] = {
    "product of means": (
        "multiplies a mean over the rows by a mean",
        lambda self, y, labels, **_: (
            scored(y, labels) + (y.softmax(-1).mean((0, 1)) * (y > 0).to(y.dtype).mean((0, 1))).sum()
        ),
    ),
    "not linear": (
        "not linear in an average",
        lambda self, y, labels, v, target, **_: scored(y, labels).exp() + F.mse_loss(v, target),
    ),
    "a count of the model": (
        "the inputs alone do not tell",
        lambda self, y, v, **_: (y * (y > 0)).sum() / (y > 0).sum() + v.mean(),
    ),
    "weights that are trained": (
        "the inputs alone do not tell",
        lambda self, y, labels, **_: F.cross_entropy(
            y.transpose(1, 2), labels, weight=self.scores.bias.detach().square()
        ),
    ),
    "half precision": (
        "mixes an average",
        lambda self, y, v, labels, **_: F.cross_entropy(y.flatten(0, 1).half(), labels.flatten()) + v.mean().half(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Breaks if what no microbatch can know (another factor's mean, a count that the model makes) is taken for a term,
    or if a loss in half precision is made a sum, which may not be finite where its average is.
    """
    message, function = REFUSED[name]
    model, batch = Scorer(function).double(), batch_of()
    less = {name: x[: ROWS // 2] for name, x in batch.items()}
    with pytest.raises(RowsTogether, match=message):
        in_microbatches(capture(model, less), 2, capture(model, batch))


@pytest.mark.parametrize("name", ["two counts", "mask alone"])
def test_gradients_of_what_a_count_is_made_of(name: str) -> None:
    """Breaks if the gradient of a mask lacks what comes through the count of all rows, which no microbatch has."""
    function = {**LOSSES, "mask alone": lambda self, v, target, mask, **_: masked(v, target, mask)}[name]
    batch = batch_of()
    batch["mask"].requires_grad_()
    with pytest.raises(AutoparError, match="the gradient of the input mask"):
        autopar.plan(Layers(function), {"dp": 2}, strategy="ddp", microbatches=4, example_inputs=batch)
