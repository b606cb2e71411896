from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import REPLICATE, Shard, parse_sharding
from autopar.runtime.comm import RecordingComm
from autopar.runtime.dry_run import dry_events
from autopar.runtime.layout import assemble, shard
from autopar.runtime.microbatches import Batch, join_rows, make_batch, seed_of, take_rows
from autopar.runtime.simulate import simulate
from autopar.runtime.simulated_comm import SimulatedMesh
from tests.unit.runtime.programs import PLANS, make_mlp, mlp_interface, mlp_source
from tests.unit.runtime.programs import make_batch as make_mlp_batch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_microbatches_add_up_to_the_batch(plan: str, microbatches: int) -> None:
    """Breaks when rows go to the wrong microbatch or come back in another order, or a gradient is scaled wrongly."""
    sizes, zero3 = PLANS[plan]
    model, batch = make_mlp(), make_mlp_batch()
    weights = torch.randn(8, 4, dtype=torch.float64)
    expected = model(**batch)
    (expected["loss"] * 3 + (expected["logits"] * weights).sum()).backward()
    interface = mlp_interface(sizes, zero3, microbatches=microbatches)
    source = mlp_source(sizes, zero3, microbatches)
    grads = (torch.tensor(3.0, dtype=torch.float64), weights)
    result = simulate(interface, source, model.state_dict(), batch, grads)
    for found, name in zip(result.outputs, ("loss", "logits"), strict=True):
        torch.testing.assert_close(found, expected[name].detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.gradients[name], parameter.grad)
    for rank, events in enumerate(result.events):
        comm = RecordingComm(interface.axes, interface.sizes, rank)
        assert dry_events(comm, interface, source) == list(events)


def test_parameters_move_once_a_step() -> None:
    """Breaks when each microbatch gathers or reduces: the bytes would grow with their number."""
    sizes, zero3 = PLANS["zero3"]
    model, batch = make_mlp(), make_mlp_batch()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for microbatches in (2, 4):
        interface = mlp_interface(sizes, zero3, microbatches=microbatches)
        result = simulate(interface, mlp_source(sizes, zero3, microbatches), model.state_dict(), batch)
        assert sum(event.bytes_sent for event in result.events[0] if event.shape) == 2 * size_bytes / 2


@pytest.mark.moderate
@settings(max_examples=80, deadline=None)
@given(
    num=st.integers(1, 4),
    rest=st.integers(1, 3),
    dim=st.integers(0, 1),
    rows=st.sampled_from([(REPLICATE, REPLICATE), (Shard(0), REPLICATE), (Shard(0), Shard(0)), (REPLICATE, Shard(0))]),
    out=st.sampled_from(
        [
            (REPLICATE, REPLICATE),
            (Shard(0), REPLICATE),
            (Shard(0), Shard(0)),
            (REPLICATE, Shard(0)),
            (Shard(0, 2), REPLICATE),
            (Shard(1), Shard(0)),
            (Shard(1), Shard(1)),
        ]
    ),
)
def test_outputs_and_gradients_return_in_the_order_of_the_rows(
    num: int, rest: int, dim: int, rows: Any, out: Any
) -> None:
    """Breaks when an output that lies otherwise than the inputs is put together in another order."""

    def turned(sharding: Any) -> Any:
        return tuple(Shard(1 - p.dim if dim else p.dim, p.outer) if isinstance(p, Shard) else p for p in sharding)

    sizes, one = (2, 2), 4 * rest
    shape = (one, 4) if dim == 0 else (4, one)
    entry = TensorInterface("x", shape, "float64", turned(rows), False, (), dim)
    output = replace(entry, name="y", sharding=turned(out), combine="concat", differentiable=True)
    interface = ProgramInterface(("a", "b"), sizes, (), (), (entry,), (output,), microbatches=num)
    whole = torch.arange(num * one * 4.0, dtype=torch.float64).reshape((num * one, 4) if dim == 0 else (4, num * one))

    def work(comm: Any) -> Tensor:
        batch = make_batch(Identity(), interface, comm, {"x": whole})  # type: ignore[arg-type]
        groups = batch.groups
        globals_ = [take_rows(whole, dim, i, num, groups) if num > 1 else whole for i in range(num)]
        for i, part in enumerate(globals_):
            # Nothing moves: the rank's rows of a microbatch are among its rows of the batch.
            mine, all_mine = shard(part, entry.sharding, comm), shard(whole, entry.sharding, comm)
            assert torch.isin(mine, all_mine).all()
            assert torch.equal(batch.local_inputs(i)["x"], part)
        values = [shard(part, output.sharding, comm) for part in globals_]
        combined = batch.output(0, values)
        for i, value in enumerate(values):
            found = batch.gradient(0, combined, i)
            assert found is not None and torch.equal(found, value)
        return combined

    pieces = SimulatedMesh(("a", "b"), sizes).run(work)
    assert torch.equal(assemble(pieces, output.sharding, sizes), whole)


class Identity:
    filename = "<identity>"
    loss_weight = None

    @staticmethod
    def split_inputs(comm: Any, inputs: Any) -> Any:
        return inputs


@given(groups=st.integers(1, 3), num=st.integers(1, 4), rest=st.integers(1, 3))
def test_rows_are_cut_within_each_group(groups: int, num: int, rest: int) -> None:
    """Breaks when the layout is not (groups, microbatches, rest)."""
    x = torch.arange(groups * num * rest)
    parts = [take_rows(x, 0, i, num, groups) for i in range(num)]
    assert parts[0].tolist() == [g * num * rest + r for g in range(groups) for r in range(rest)]
    assert torch.equal(join_rows(parts, 0, groups), x)


WEIGHTED = """import torch


def split_inputs(comm, inputs):
    return {name: comm.slice(x, "dp", 0) for name, x in inputs.items()}


def loss_weight(inputs):
    return (inputs["label"] >= 0).sum()


def forward(comm, state, held, inputs, seed):
    counts = inputs["label"] >= 0
    error = torch.where(counts, inputs["x"] * state["w"] - inputs["label"], 0.0)
    number = comm.all_reduce(counts.sum(), "dp")
    loss = comm.all_reduce((error * error).sum(), "dp") / number
    seen = state["seen"] * 2 + comm.all_reduce(inputs["x"].sum(), "dp")
    total = comm.all_reduce(inputs["x"].sum(), "dp")
    return (loss, number, total, state["w"] * 1.0, seen), (inputs["x"], error, number, state["seen"])


def backward(comm, state, held, saved, grads, sums, last):
    x, error, number, seen = saved
    assert torch.equal(seen, state["seen"])
    d_loss, d_w = grads
    g = torch.zeros(())  if d_loss is None else (2 * error * x).sum() / number * d_loss
    g = g.to(x.dtype) / 1
    if d_w is not None:
        g = g + d_w / comm.size("dp")
    comm.accumulate(sums, {"w": g}, "")
    return {"w": comm.all_reduce(sums["w"], "dp")} if last else {}
"""


def weighted_interface(microbatches: int, rows: int) -> ProgramInterface:
    axes = ("dp",)
    whole, split = parse_sharding("", axes), parse_sharding("dp=S(0)", axes)

    def scalar(
        name: str, combine: str = "same", differentiable: bool = False, dtype: str = "float64"
    ) -> TensorInterface:
        return TensorInterface(name, (), dtype, whole, differentiable, (), None, combine)

    return ProgramInterface(
        axes,
        (2,),
        (scalar("w", differentiable=True),),
        (scalar("seen"),),
        tuple(
            TensorInterface(name, (rows // microbatches,), "float64", split, False, (), 0) for name in ("x", "label")
        ),
        (
            scalar("loss", "weighted", True),
            scalar("number", "sum", dtype="int64"),
            scalar("total", "mean"),
            scalar("weight", "same", True),
        ),
        microbatches=microbatches,
        updates=(scalar("seen", "mean"),),
    )


@pytest.mark.parametrize("empty", [None, 0, 3, "all"])
def test_a_weighted_average_is_that_of_the_whole_batch(empty: Any) -> None:
    """Breaks when labels that do not count shift the average, or a microbatch without labels makes it 0 / 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, generator=generator, dtype=torch.float64)
    label = torch.where(torch.rand(16, generator=generator) < 0.4, -1.0, torch.rand(16, generator=generator)).double()
    if empty == "all":
        label[:] = -1
    elif empty is not None:
        label.view(2, 4, 2)[:, empty] = -1
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    counts = label >= 0
    loss = ((x * w - label)[counts] ** 2).mean()
    (loss * 2 + w * 5).backward()
    state = {"w": w.detach(), "seen": torch.tensor(1.0, dtype=torch.float64)}
    one = torch.ones((), dtype=torch.float64)
    result = simulate(weighted_interface(4, 16), WEIGHTED, state, {"x": x, "label": label}, (one * 2, one * 5))
    torch.testing.assert_close(result.outputs[0], loss.detach(), equal_nan=True)
    assert result.outputs[1].item() == int(counts.sum()) and result.outputs[1].dtype == torch.int64
    torch.testing.assert_close(result.outputs[2], x.sum() / 4)
    assert result.outputs[3].item() == pytest.approx(0.7)
    if empty != "all":
        torch.testing.assert_close(result.gradients["w"], w.grad, equal_nan=True)
    assert result.updates["seen"].item() == pytest.approx(2.0 + float(x.sum()) / 4)  # of the buffer as it was
    assert state["seen"].item() == 1.0


def test_losses_in_half_precision_are_added_in_float32() -> None:
    """Breaks if small losses are lost beside the sum of those before: 256 + 1 is 256 in bfloat16."""
    interface = replace(mlp_interface(*PLANS["ddp"], microbatches=3))
    loss = TensorInterface("loss", (), "bfloat16", (REPLICATE,), True, combine="sum")
    batch = Batch(None, replace(interface, outputs=(loss,)), RecordingComm(("dp",), (1,), 0, "cpu"), {}, (), 1)  # type: ignore[arg-type]
    values = [torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert batch.output(0, values).item() == 258.0


def test_seeds_of_microbatches_differ_and_stay_in_range() -> None:
    """Breaks when two microbatches draw the same dropout, or a seed overflows int64."""
    device = torch.device("cpu")
    assert seed_of(5, 0, device).item() == 5 and seed_of(5, 3, device).item() == 5 + 3 * 2**40
    assert 0 <= seed_of(2**62 - 1, 2**20, device).item() < 2**62


def test_what_cannot_be_cut_is_named() -> None:
    """Breaks when a batch of another size, or inputs that cannot be cut alike, give silently mixed samples."""
    comm = RecordingComm(("a", "b"), (2, 3), 0, "cpu")
    program: Any = Identity()
    x = TensorInterface("x", (6, 2), "float32", parse_sharding("a=S(0)", comm.axes), batch_dim=0)
    y = replace(x, name="y", sharding=parse_sharding("b=S(0)", comm.axes))
    interface = ProgramInterface(comm.axes, comm.sizes, (), (), (x,), (), microbatches=2)
    with pytest.raises(
        AutoparError, match=r"the input x is \(11, 2\), planned as \(12, 2\)\. 2 microbatches of \(6, 2\)"
    ):
        make_batch(program, interface, comm, {"x": torch.zeros(11, 2)})
    with pytest.raises(AutoparError, match=r"cannot be cut alike from all inputs: the batch of x is in 2 pieces"):
        make_batch(program, replace(interface, inputs=(x, y)), comm, {"x": torch.zeros(12, 2), "y": torch.zeros(12, 2)})
    loss = TensorInterface("loss", (), "float32", parse_sharding("", comm.axes), True, combine="weighted")
    with pytest.raises(AutoparError, match="does not define loss_weight"):
        make_batch(program, replace(interface, outputs=(loss,)), comm, {"x": torch.zeros(12, 2)})
    with pytest.raises(
        AutoparError, match=r"a batch \(10,\) cannot be cut into 4 microbatches. dim 0 has 10 rows in 2"
    ):
        take_rows(torch.zeros(10), 0, 0, 4, 2)
