from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autopar.base.errors import AutoparError
from autopar.runtime.executable import Executable
from autopar.runtime.module import take_over
from benchmarks.training.count import CollectiveCounter
from tests.dist.launch import launch
from tests.dist.runtime.test_weights import Samples
from tests.dist.runtime.work import compiled_mlp, full, make_mesh
from tests.unit.runtime.programs import make_batch, make_mlp
from tests.unit.runtime.test_microbatches import WEIGHTED as WEIGHTED_PROGRAM
from tests.unit.runtime.test_microbatches import weighted_interface

pytestmark = pytest.mark.dist


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(full(found), full(expected), rtol=1e-11, atol=1e-13)


def against_eager(plan: str, microbatches: int) -> None:
    plain = make_mlp()
    plain.up.bias.requires_grad_(False)
    compiled = compiled_mlp(plan, microbatches=microbatches)
    compiled.up.bias.requires_grad_(False)
    hooked: list[str] = []
    compiled.up.weight.register_post_accumulate_grad_hook(lambda parameter: hooked.append("up.weight"))
    for number in range(2):  # gradients accumulate over steps, too
        output = plain(**make_batch(number))
        output["loss"].backward()
        mine = compiled.train_step(**make_batch(number))
        assert list(mine) == list(output)
        for name in output:
            close(mine[name], output[name])
    in_turn = {name: full(p.grad).clone() for name, p in compiled.named_parameters() if p.grad is not None}
    assert hooked == ["up.weight"] * 2 and compiled.up.bias.grad is None and len(in_turn) == 3
    compiled.zero_grad()
    for number in range(2):
        compiled(**make_batch(number))["loss"].backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            close(in_turn[name], parameter.grad)
            assert torch.equal(full(compiled.get_parameter(name).grad), in_turn[name])


@pytest.mark.parametrize(("plan", "microbatches"), [("zero3", 2), ("ddp+tensor", 4), ("zero3+tensor", 2)])
def test_both_ways_through_the_microbatches_equal_eager(plan: str, microbatches: int) -> None:
    """Breaks when train_step and loss.backward() disagree, or hooks, frozen weights and old gradients are passed by."""
    launch(against_eager, 2 if plan == "zero3" else 4, plan, microbatches)


def one_at_a_time() -> list[int]:
    """How many microbatches' saved tensors live when each backward begins."""
    compiled = compiled_mlp("zero3", microbatches=4)
    compiled.train_step(**make_batch())
    (program,) = compiled.autopar._programs.values()
    alive: list[weakref.ref[torch.Tensor]] = []
    found: list[int] = []
    forward, backward = program.forward, program.backward

    def watched_forward(*args: Any) -> Any:
        outputs, saved = forward(*args)
        alive.append(weakref.ref(saved[1]))
        return outputs, saved

    def watched_backward(*args: Any) -> Any:
        gc.collect()
        found.append(sum(reference() is not None for reference in alive))
        return backward(*args)

    object.__setattr__(program, "forward", watched_forward)
    object.__setattr__(program, "backward", watched_backward)
    compiled.train_step(**make_batch())
    return found


def test_a_training_step_keeps_the_activations_of_one_microbatch() -> None:
    """Breaks when all forwards run before the first backward: memory would not shrink with more microbatches."""
    assert launch(one_at_a_time, 2) == [[1, 1, 1, 1]] * 2


def graph_kept_and_freed() -> None:
    compiled = compiled_mlp("zero3", microbatches=2)
    compiled.autopar.comm.log = []
    output = compiled(**make_batch())
    loss = output["loss"]
    (logits, weights) = output["logits"], torch.randn(4, 4, dtype=torch.float64)
    loss.backward(retain_graph=True)
    gathers = [event for event in compiled.autopar.comm.log if event.kind == "all_gather"]
    assert len(gathers) == 1  # held from the first forward to the last backward
    once = {name: full(p.grad).clone() for name, p in compiled.named_parameters()}
    loss.backward()
    for name, parameter in compiled.named_parameters():
        close(parameter.grad, 2 * once[name])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    # Gradients of the logits, in the order of the rows.
    plain = make_mlp()
    compiled.zero_grad()
    weights = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (plain(**make_batch())["logits"] * weights).sum().backward()
    logits = compiled(**make_batch())["logits"]
    local = weights.chunk(2)[compiled.autopar.comm.rank]
    torch.autograd.backward([logits.to_local()], [local])
    for name, parameter in plain.named_parameters():
        close(compiled.get_parameter(name).grad, parameter.grad)
    with torch.no_grad():
        assert not compiled(**make_batch())["loss"].requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            compiled.train_step(**make_batch())
    with pytest.raises(AutoparError, match=r"the input x is \(6, 6\), planned as \(8, 6\)"):
        compiled(**{name: value[:6] for name, value in make_batch().items()})


def test_the_graph_holds_gathered_parameters_as_long_as_activations() -> None:
    """Breaks when `held` is dropped before the backward, survives it, or is spoilt for a second one."""
    launch(graph_kept_and_freed, 2)


def log_and_reality() -> tuple[dict[str, float], dict[str, float]]:
    compiled = compiled_mlp("zero3+tensor", microbatches=2)
    compiled.train_step(**make_batch())
    compiled.autopar.comm.log = []
    with CollectiveCounter() as counter:
        compiled.train_step(**make_batch())
    logged: dict[str, float] = {}
    for event in compiled.autopar.comm.log:
        logged[event.kind] = logged.get(event.kind, 0) + event.bytes_sent
    return logged, counter.bytes_by_kind()


def test_the_log_of_microbatches_is_what_was_sent() -> None:
    """Breaks when a step of several microbatches sends more, or other, than it logs."""
    for logged, counted in launch(log_and_reality, 4):
        assert logged == counted and logged["all_gather"] > 0


def local_reading() -> tuple[float, list[int]]:
    model, samples = compiled_mlp("zero3+tensor", microbatches=2), Samples()
    (batch,) = model.shard_loader(DataLoader(samples, batch_size=8))
    return float(model.train_step(**batch)["loss"]), samples.fetched


def test_a_shard_loaders_batch_is_cut_where_it_lies() -> None:
    """Breaks when the rows of a DTensor batch are cut otherwise than those of a global one."""
    expected = float(make_mlp()(**make_batch())["loss"].detach())
    for rank, (loss, fetched) in enumerate(launch(local_reading, 4)):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert fetched == list(range(4) if rank < 2 else range(4, 8))


WEIGHTED = """
def loss_weight(inputs):
    return inputs["y"][:, 0].clamp(min=0).sum()
"""


def weighted(from_loader: bool) -> list[float]:
    """The weights that the runtime finds for a global batch and for a DTensor one."""
    from dataclasses import replace

    from autopar.runtime.loader import load_program
    from autopar.runtime.microbatches import make_batch as cut_batch
    from tests.dist.runtime.work import mlp_executable

    model = compiled_mlp("zero3+tensor", microbatches=2)
    executable = mlp_executable("zero3+tensor", microbatches=2)
    loss, logits = executable.interface.outputs
    interface = replace(executable.interface, outputs=(replace(loss, combine="weighted"), logits))
    batch: Any = make_batch()
    if from_loader:
        (batch,) = model.shard_loader(DataLoader(Samples(), batch_size=8))
    program = load_program(executable.source + WEIGHTED, "<mlp>")
    return list(cut_batch(program, interface, model.autopar.comm, batch).weights)


def test_weights_of_a_split_batch_are_those_of_the_whole() -> None:
    """Breaks when each rank weighs its own labels only."""
    y = make_batch()["y"][:, 0].clamp(min=0).view(2, 2, 2)
    expected = [float(y[:, i].sum()) for i in range(2)]
    for from_loader in (False, True):
        assert all(found == pytest.approx(expected) for found in launch(weighted, 4, from_loader))


class Weighing(nn.Module):
    """The model behind the unit tests' program of a weighted loss and a buffer that forward changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = label >= 0
        return {"loss": ((x * self.w - label)[counts] ** 2).mean()}


def updated_buffers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, generator=generator, dtype=torch.float64)
    label = torch.rand(16, generator=generator).double()
    label.view(2, 4, 2)[:, 3] = -1  # the last microbatch has no labels
    label[0] = -1
    executable = Executable(
        weighted_interface(4, 16),
        WEIGHTED_PROGRAM,
        "<weighing>",
        lambda values: {"loss": values[0]},
        lambda args, kwargs: kwargs,
    )
    plain = Weighing()
    expected = plain(x, label)["loss"]
    expected.backward()
    model: Any = take_over(Weighing(), make_mesh({"dp": 2}), lambda args, kwargs: executable, executable.interface)
    buffer = model.seen
    parts = [float(x.view(2, 4, 2)[:, i].sum()) for i in range(4)]
    seen = 1.0
    for step in range(3):
        model.zero_grad()
        if step == 2:
            # The graph keeps the old value; writing the buffer is not writing what backward reads.
            loss = model(x=x, label=label)["loss"]
            loss.backward()
        else:
            loss = model.train_step(x=x, label=label)["loss"]
        seen = seen * 2 + sum(parts) / len(parts)  # each microbatch begins with what the step found
        close(loss, expected)
        close(model.w.grad, plain.w.grad)
        assert model.seen is buffer and float(buffer) == pytest.approx(seen)
    with torch.no_grad():
        model(x=x, label=label)
    assert float(buffer) != pytest.approx(seen)


def test_buffers_that_forward_changes_are_written_in_place() -> None:
    """Breaks when a microbatch begins with what another left in a buffer, or one without labels gives 0 / 0."""
    launch(updated_buffers, 2)
