"""Bad input: each error says what was asked, where in the model, the numbers that decide, and the nearest remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.ir.sharding import REPLICATE, Partial, Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.names import pin
from tests.unit.commands import error_of

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")


def plan_mlp(mesh: Mesh = MESH, **options: Any) -> Plan:
    loaded = catalogue.load("mlp", tiny=True, device="cpu")
    options = {"example_inputs": loaded.batch, **options}
    return autopar.plan(loaded.model, mesh, **options)


@pytest.mark.moderate
def test_an_axis_that_does_not_divide_the_batch() -> None:
    """Breaks if an uneven batch is cut anyway, or the message does not say how large a batch must be."""
    assert error_of(plan_mlp, Mesh({"dp": 3}, hardware="cpu"), strategy="ddp") == (
        "x: a batch of 8 cannot split over dp=3 (input x f32[8, 32], strategy ddp). 8 is not a multiple of 3. "
        "use a global batch that is a multiple of 3, or smaller axes."
    )
    assert "cannot split over dp=2 × tp=8" in error_of(
        plan_mlp, Mesh({"dp": 2, "tp": 8}, hardware="cpu"), strategy="zero3"
    )


@pytest.mark.moderate
def test_auto_on_an_axis_that_divides_nothing() -> None:
    """Breaks if `auto` fails where keeping everything whole would work."""
    plan = plan_mlp(Mesh({"dp": 7}, hardware="cpu"))
    assert plan.verify().ok
    assert all(parameter.sharding == (REPLICATE,) for parameter in plan.interface.parameters)


class Branches(nn.Module):
    """Looks at a value to decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line to be named
            y = y * 2
        return y.sum()


@pytest.mark.moderate
def test_control_flow_that_depends_on_data() -> None:
    """Breaks if the message does not name the model's own line."""
    message = error_of(autopar.plan, Branches(), MESH, example_inputs={"x": torch.randn(4, 4)}, microbatches=2)
    assert message.startswith("forward() chooses what to do by the value of a tensor that is of the whole batch")
    assert re.search(r"\(test_bad_input\.py:61\)", message)
    assert "torch.where" in message


def test_a_refusal_prints_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Breaks if the tracer's graph of what is refused stands on stderr before the error that tells why."""
    error_of(autopar.plan, Branches(), MESH, example_inputs={"x": torch.randn(4, 4)}, microbatches=2)
    captured = capfd.readouterr()
    assert "aten" not in captured.out + captured.err


def test_a_model_that_fails_in_eager_too() -> None:
    """Breaks if a plain error of the model is reported as one of control flow, or loses its line."""
    message = error_of(autopar.plan, Branches(), MESH, example_inputs={"x": torch.randn(4, 5)})
    assert message.startswith("Branches cannot be traced: ") and "must have same reduction dim" in message
    assert re.search(r"\(test_bad_input\.py:\d+: y = self\.linear\(x\)\)", message)


class Careless(nn.Module):
    """Changes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1)).sum()


@pytest.mark.moderate
def test_a_model_that_writes_its_input() -> None:
    """Breaks if a write to an input is an error that does not say what to do."""
    message = error_of(autopar.plan, Careless(), MESH, example_inputs={"x": torch.randn(4, 4)})
    assert message == "the model changes its own input x in forward(). work on a copy: x = x.clone()."


class Weighted(nn.Linear):
    """Takes two inputs that are not alike."""

    def forward(self, input: Tensor, weight_of_rows: Tensor | None = None) -> Tensor:
        found = super().forward(input).sum(-1)
        return (found if weight_of_rows is None else found * weight_of_rows).sum()


@pytest.mark.moderate
def test_a_batch_in_order() -> None:
    """Breaks if a tuple of arguments, as torch.export takes it, or a single tensor plans something else than names."""
    x, weight = torch.randn(4, 4), torch.randn(4)

    def source(batch: Any) -> str:
        return autopar.plan(Weighted(4, 4), MESH, example_inputs=batch, strategy="ddp").source

    assert source((x, weight)) == source({"input": x, "weight_of_rows": weight}) != source({"input": x})
    assert source(x) == source((x,)) == source({"input": x})


def test_what_is_no_batch() -> None:
    """Breaks if a batch of another type surfaces as an error of Python."""
    message = error_of(autopar.plan, nn.Linear(4, 4), MESH, example_inputs=7)
    assert message.startswith("example_inputs is of type int. pass a mapping from the arguments of Linear.forward")


def test_a_sparse_batch_and_a_wrapped_model() -> None:
    """Breaks if a sparse tensor in a batch ends in an error of torch's kernels, or if who wraps a model before it is
    compiled is told to hand inputs in by names that the wrapper does not have.
    """
    graph = torch.eye(4).to_sparse()
    message = error_of(autopar.plan, Weighted(4, 4), MESH, example_inputs=(torch.randn(4, 4), graph))
    assert message.startswith("weight_of_rows is of layout sparse_coo") and "self.graph = graph" in message
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    message = error_of(autopar.plan, Weighted(4, 4), MESH, example_inputs=(rows,))
    assert message.startswith("input is a nested tensor") and "torch.nested.to_padded_tensor" in message
    message = error_of(autopar.plan, nn.DataParallel(nn.Linear(4, 4)), MESH, example_inputs=(torch.randn(4, 4),))
    assert message.startswith("DataParallel.forward takes *inputs. compile what DataParallel wraps, model.module;")


def test_parts_that_are_no_modules_yet_or_no_longer() -> None:
    """Breaks if a scripted part, or a lazy one, ends in an error of torch's about dicts or shapes."""
    x = torch.randn(4, 4)
    scripted: Any = torch.jit.script(nn.Linear(4, 4))
    message = error_of(autopar.plan, nn.Sequential(nn.ReLU(), scripted), MESH, example_inputs=(x,))
    assert message.startswith("1 is compiled by torch.jit") and "before torch.jit.script" in message
    for layer, name in ((nn.LazyLinear(4), "weight"), (nn.LazyBatchNorm1d(affine=False), "running_mean")):
        message = error_of(autopar.plan, nn.Sequential(layer), MESH, example_inputs=(x,))
        assert message.startswith(f"0.{name} has no shape yet") and "run the model once before" in message


def test_a_batch_that_forward_does_not_take() -> None:
    """Breaks if a misspelt or missing argument surfaces as an error of the tracer."""
    message = error_of(plan_mlp, example_inputs={"x": torch.randn(8, 32), "label": torch.zeros(8)})
    assert "MLP.forward cannot be called with this batch: got an unexpected keyword argument 'label'" in message or (
        "MLP.forward cannot be called with this batch: missing a required argument: 'labels'" in message
    )
    assert "given: x, label" in message


@pytest.mark.moderate
def test_a_model_that_writes_its_own_parameter() -> None:
    """Breaks if what forward() does to a parameter is silently dropped."""

    class Drifting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(input)

    message = error_of(autopar.plan, Drifting(4, 4), MESH, example_inputs={"input": torch.randn(8, 4)})
    assert message.startswith("the model changes its own parameter weight in forward()") and "buffer" in message


@pytest.mark.moderate
def test_running_statistics_that_export_loses() -> None:
    """Breaks if an instance norm's running statistics are silently dropped."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    images = {"input": torch.randn(8, 3, 6, 6)}
    plan = autopar.plan(model, MESH, example_inputs=images)
    assert {"1.running_mean", "1.running_var"} <= {entry.name for entry in plan.interface.updates}
    assert plan.verify().ok
    assert autopar.plan(model.eval(), MESH, example_inputs=images).verify().ok


@pytest.mark.moderate
def test_unknown_names() -> None:
    """Breaks if a misspelt strategy, axis, precision or recomputation is guessed, not refused with the known ones."""
    assert error_of(plan_mlp, strategy="zero4").startswith(
        "unknown strategy 'zero4'. known: auto, ddp, zero1, zero2, zero3, zero3+keep, tensor, tensor+sequence, tensor2d"
    )
    assert error_of(plan_mlp, strategy={"ep": "ddp"}) == (
        "the strategy names axis 'ep', which the mesh does not have. mesh: dp=2 × tp=2. use dp, tp."
    )
    assert error_of(plan_mlp, precision="fp12") == "unknown precision 'fp12'. use one of bf16, fp16, fp32, fp64."
    assert error_of(plan_mlp, rematerialize="some").startswith("unknown rematerialize mode 'some'. use auto, none")


@pytest.mark.moderate
def test_pins() -> None:
    """Breaks if a pin without effect, against another, on a strange axis, or that cannot hold, is passed over."""
    assert error_of(plan_mlp, constraints=[pin("layers.*.upp.weight", tp=Shard(0))]).startswith(
        'pin("layers.*.upp.weight") matches no parameter, input or output. close names: layers.0'
    )
    two = [pin("layers.*.up.weight", tp=Shard(0)), pin("layers.1.*.weight", tp=REPLICATE)]
    assert error_of(plan_mlp, constraints=two) == (
        'two pins contradict each other on layers.1.up.weight. pin("layers.*.up.weight", tp=S(0)) and '
        'pin("layers.1.*.weight", tp=R). drop one of them.'
    )
    assert error_of(plan_mlp, constraints=[pin("layers.0.up.weight", ep=Shard(0))]) == (
        "pin(\"layers.0.up.weight\") names axis 'ep', which the mesh does not have. mesh: dp=2 × tp=2."
    )
    uneven = Mesh({"tp": 3}, hardware="cpu")
    rows = [pin("layers.*.up.weight", tp=Shard(0))]
    assert plan_mlp(uneven, constraints=rows).verify().ok  # stored in pieces of 22, 22 and 20 rows, gathered for use
    assert error_of(plan_mlp, uneven, strategy="tensor", constraints=rows) == (
        'layers.0.up.weight cannot be S(0) on tp (pin("layers.*.up.weight", tp=S(0))). '
        "layers.0.up.weight is f32[64, 32], tp=3, strategy tensor. "
        "pin a dim that the axis divides and the strategy allows, or drop the other pin."
    )
    assert "strategy ddp" in error_of(plan_mlp, strategy="ddp", constraints=[pin("layers.*.up.weight", dp=Shard(0))])
    assert "cannot be S(5) on dp" in error_of(plan_mlp, constraints=[pin("x", dp=Shard(5))])
    assert error_of(pin, "x").startswith("pin('x') says nothing")
    assert "is not a placement that can be pinned" in error_of(pin, "x", dp="S(0)")
    assert error_of(plan_mlp, constraints=[pin("logits", dp=Partial())]).startswith("logits cannot be P on dp")


@pytest.mark.sampled(1)
@pytest.mark.moderate
@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.slow), "zero3"])
def test_memory_that_cannot_suffice(strategy: str) -> None:
    """Breaks if the message does not name the smallest limit that would do, or planning with just that limit fails."""
    message = error_of(plan_mlp, strategy=strategy, memory_limit=10_000)
    assert message.startswith(f"strategy {strategy} on dp=2 × tp=2 does not fit: the memory limit is 9.766 KiB a rank")
    assert "largest: " in message and "layers.0." in message and "aten." not in message
    found = re.search(r"the smallest limit that would do is [\d.]+ \w+ \((\d+) bytes\)", message)
    needed = int(found[1])
    plan = plan_mlp(strategy=strategy, memory_limit=needed)
    assert plan.cost.peak_memory_bytes <= needed
    assert plan.verify().ok
    assert "does not fit" in error_of(plan_mlp, strategy=strategy, memory_limit=int(needed * 0.98))


@pytest.mark.moderate
def test_plan_files(tmp_path: Path) -> None:
    """Breaks if a damaged plan is loaded, an older format misread, or a good plan changes on its way through a file."""
    plan = plan_mlp(strategy="zero3", constraints=[pin("x", dp=Shard(0))], precision="bf16")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path).to_json() == plan.to_json()
    assert Plan.load(path).source == plan.source
    text = path.read_text()
    for damaged in (text[:-40], text.replace("layers.0", "layers.9", 1)):
        path.write_text(damaged)
        message = error_of(Plan.load, path)
        assert message.startswith(f"{path} is damaged") and message.endswith("make the plan again and save it.")
    for other in ("[]", "{}", "null", "3", "# A page", '{"model_type": "llama"}'):
        path.write_text(other)
        assert error_of(Plan.load, path).startswith(f"{path} is no plan of autopar. name a file that `autopar plan")
    path.write_text(json.dumps({**json.loads(text), "format": 99}))
    assert error_of(Plan.load, path) == f"{path} has plan format 99. this version reads format 3."
    assert error_of(Plan.load, tmp_path / "none.json").startswith(f"cannot read the plan {tmp_path / 'none.json'}")


@pytest.mark.moderate
def test_a_loaded_plan_cannot_be_verified() -> None:
    """Breaks if a plan without its model claims to be proven."""
    loaded = Plan.from_json(plan_mlp().to_json())
    assert error_of(loaded.verify).startswith("this plan was loaded from a file and has no model to compare with")


@pytest.mark.moderate
def test_a_plan_for_something_else() -> None:
    """Breaks if decisions are applied to another mesh, another model, or another batch."""
    plan = plan_mlp(strategy="zero3")
    loaded = catalogue.load("mlp", tiny=True, device="cpu")
    again = replan(Plan.from_json(plan.to_json()), loaded.model, loaded.batch, MESH)
    assert again.source == plan.source
    other = Mesh({"dp": 4}, hardware="cpu")
    assert error_of(replan, plan, loaded.model, loaded.batch, other) == (
        "the plan is for another mesh. planned dp=2 × tp=2, running on dp=4."
    )
    cnn = catalogue.load("cnn", tiny=True, device="cpu")
    assert error_of(replan, plan, cnn.model, cnn.batch, MESH).startswith("the plan was made for another")
    wide = catalogue.load("mlp", tiny=True, device="cpu", overrides={"features": 48})
    assert error_of(replan, plan, wide.model, wide.batch, MESH).startswith("the plan was made for another")
    deep = catalogue.load("mlp", tiny=True, device="cpu", overrides={"num_layers": 3})
    assert error_of(replan, plan, deep.model, deep.batch, MESH).startswith("the plan was made for another")
    small = catalogue.load("mlp", tiny=True, device="cpu", batch=(4, 1))
    assert error_of(replan, plan, small.model, small.batch, MESH) == (
        "the plan was made for another model or batch (x). planned (8, 32), given (4, 32). "
        "make the plan again for this model and batch."
    )
