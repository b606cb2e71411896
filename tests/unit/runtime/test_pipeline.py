from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface, StageInterface, TensorInterface
from autopar.ir.sharding import REPLICATE, Shard
from autopar.runtime.comm import RecordingComm
from autopar.runtime.dry_run import dry_events
from autopar.runtime.order import digests, first_difference
from autopar.runtime.pipeline import PipelineStep
from autopar.runtime.refused import check_same_storage, check_trains
from autopar.runtime.simulate import simulate
from autopar.runtime.simulation import SimulationResult
from autopar.runtime.stage import StageRun
from tests.unit.runtime.pipelines import chain_batch, chain_interface, chain_source, make_chain, run_chain, schedule_of

pytestmark = pytest.mark.unit

RUNS = [
    ("gpipe", 4, 4, 1, False),
    ("gpipe", 2, 8, 2, True),
    ("1f1b", 4, 4, 1, True),
    ("1f1b", 2, 8, 2, False),
    ("interleaved", 2, 4, 2, True),
    ("interleaved", 4, 8, 1, False),
    ("zero_bubble", 2, 4, 2, False),
    ("zero_bubble", 4, 8, 1, True),
    ("zbv", 2, 4, 2, True),
    ("zbv", 4, 8, 1, False),
    ("dualpipev", 2, 4, 2, False),
    ("dualpipev", 2, 8, 1, True),
]


def run(
    name: str, ranks: int, num: int, dp: int, zero: bool, batch: dict[str, Tensor] | None = None, **options: Any
) -> tuple[SimulationResult, Any, Any]:
    """The simulated step, the model with its gradients, and what it returned."""
    rows = 4 * num
    schedule = schedule_of(name, ranks, num)
    model = make_chain(schedule.num_stages + 1)
    batch = batch or chain_batch(rows)
    interface = chain_interface(schedule, rows, dp, zero)
    source = chain_source(schedule.num_stages, rows, num, zero)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = simulate(interface, source, state, batch, seed=3, timeout_s=20, **options)
    return result, model, run_chain(model, batch, num, dp, seed=3)


def check(result: SimulationResult, model: Any, expected: Any) -> None:
    for found, name in zip(result.outputs, ("loss", "logits", "first", "number"), strict=True):
        torch.testing.assert_close(found, expected[name].detach())
    torch.testing.assert_close(result.updates["seen"], model.seen)
    for name, parameter in model.named_parameters():
        if name != "unused":
            torch.testing.assert_close(result.gradients[name], parameter.grad)


@pytest.mark.parametrize(("name", "ranks", "num", "dp", "zero"), RUNS)
def test_a_pipelined_step_is_the_models(name: str, ranks: int, num: int, dp: int, zero: bool) -> None:
    """Breaks when a stage takes another microbatch's values, or a gradient is added twice or to the wrong one."""
    result, model, expected = run(name, ranks, num, dp, zero)
    expected["loss"].backward()
    check(result, model, expected)


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble", "zbv", "dualpipev"])
def test_microbatches_without_labels_are_left_out(name: str) -> None:
    """Breaks when a microbatch's 0 / 0 reaches the gradients, or one rank waits for what another leaves out."""
    batch = chain_batch(32)
    for empty in (0, 3, 7):
        batch["labels"].view(2, 8, 2)[:, empty] = -1
    result, model, expected = run(name, 2, 8, 2, True, batch)
    expected["loss"].backward()
    check(result, model, expected)
    sent = [event.tag for event in result.events[0] if event.kind == "receive" and "B" in event.tag]
    assert sent and not any(tag.endswith(("B0", "B3", "B7")) for tag in sent)


def test_gradients_of_several_outputs_reach_all_stages() -> None:
    """Breaks when a root on one stage, or a root that a microbatch has no part in, is lost."""
    batch = chain_batch(16)
    batch["labels"].view(2, 4, 2)[:, 2] = -1
    weights = torch.randn(16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grads = (torch.tensor(3.0, dtype=torch.float64), weights)
    result, model, expected = run("1f1b", 2, 4, 2, True, batch, grads=grads)
    (expected["loss"] * 3 + (expected["logits"] * weights).sum()).backward()
    check(result, model, expected)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_forwards_alone(name: str) -> None:
    """Breaks when an evaluation waits for a backward, or gives other outputs."""
    result, model, expected = run(name, 2, 4, 2, True, backward=False)
    assert result.gradients == {} and not any("_B" in event.where for event in result.events[0])
    for found, key in zip(result.outputs, ("loss", "logits", "first", "number"), strict=True):
        torch.testing.assert_close(found, expected[key].detach())
    torch.testing.assert_close(result.updates["seen"], model.seen)


@pytest.mark.moderate
@pytest.mark.parametrize(("name", "ranks", "num", "dp", "zero"), RUNS[:8])
def test_a_dry_run_foresees_every_message(name: str, ranks: int, num: int, dp: int, zero: bool) -> None:
    """Breaks when the check before the first step looks at other messages than the step sends."""
    batch = chain_batch(4 * num)
    batch["labels"].clamp_(min=0)  # a microbatch without labels sends less
    result, _, _ = run(name, ranks, num, dp, zero, batch)
    schedule = schedule_of(name, ranks, num)
    interface = chain_interface(schedule, 4 * num, dp, zero)
    source = chain_source(schedule.num_stages, 4 * num, num, zero)
    seen: list[dict[Any, str]] = []
    for rank, events in enumerate(result.events):
        comm = RecordingComm(("pp", "dp"), (ranks, dp), rank)
        assert dry_events(comm, interface, source) == list(events)
        seen.append(digests(events))
    assert first_difference(comm, "pp", seen) is None
    moved = dict(seen[0])
    key = next(key for key in moved if key[2] == "send")
    seen[0][key] = "other"
    difference = first_difference(comm, "pp", seen)
    assert difference is not None and difference[0] == 0 and difference[1] == key


def with_order(interface: ProgramInterface, change: Any) -> ProgramInterface:
    order = [list(row) for row in interface.pipeline.order]
    change(order)
    return replace(interface, pipeline=replace(interface.pipeline, order=tuple(map(tuple, order))))


def simulate_changed(change: Any, name: str = "gpipe", edit: Any = None) -> None:
    schedule = schedule_of(name, 2, 4)
    interface = with_order(chain_interface(schedule, 16), change)
    source = chain_source(2, 16, 4)
    state = dict(make_chain(3).state_dict())
    simulate(interface, edit(source) if edit else source, state, chain_batch(16), timeout_s=20)


def late_send(order: list[list[str]]) -> None:
    order[0].remove("0SEND_F3")
    order[0].insert(order[0].index("0B0") + 1, "0SEND_F3")


def swapped_sends(order: list[list[str]]) -> None:
    at = [order[0].index(f"0SEND_F{i}") for i in (1, 2)]
    order[0][at[1]], order[0][at[0]] = "", "0SEND_F2"
    order[0][at[1]] = "0SEND_F1"
    order[0].remove("0F2")
    order[0].insert(at[0], "0F2")


def no_receive(order: list[list[str]]) -> None:
    order[1].remove("1RECV_F2")


def no_last_backward(order: list[list[str]]) -> None:
    order[1].remove("1B3")
    order[1].remove("1SEND_B3")


def nothing_reduced(order: list[list[str]]) -> None:
    order[0].remove("0REDUCE_GRAD")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (late_send, r"rank 0 waits over axis pp for rank 1, which waits in receive of 1F3 .* \(0RECV_B0\)"),
        (swapped_sends, r"rank 1 receives from rank 0 in another order than it sends .*1F2.*1F1"),
        (no_receive, r"runs 1F2 before what it needs"),
        (no_last_backward, r"rank 0 waits .*rank 1|ends on rank 1 before all is done.*1B3"),
        (nothing_reduced, r"ends on rank 0 before all is done. what 0REDUCE_GRAD would use is left"),
    ],
)
def test_orders_that_cannot_run_are_told(change: Any, message: str) -> None:
    """Breaks when a wrong schedule hangs, mixes up microbatches, or leaves gradients out in silence."""
    with pytest.raises(AutoparError, match=message):
        simulate_changed(change)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "return (hidden, first, ids > 2)",
            "return (hidden, first)",
            r"returned 2 values to send, 3 are planned \(0F0",
        ),
        ("(hidden, first, ids > 2)", "(hidden, first, ids)", r"number 2 of the values to send is torch.int64 \(4,\)"),
        ("{2: first}", "{}", r"returned other outputs than planned \(0F0.*\[\], planned \[2\]"),
        ("return (d_hidden, d_out)", "return (d_hidden,)", r"1 gradients to send back, 2 are planned \(1B"),
        ('("last",', '("last", {"blocks": range(2, 2)}), ("last",', r"3 stages in the text, 2 stages planned"),
    ],
)
def test_text_and_border_that_differ_are_told(before: str, after: str, message: str) -> None:
    """Breaks when an edited program sends what the next stage does not expect."""

    def edit(source: str) -> str:
        assert before in source
        return source.replace(before, after)

    with pytest.raises(AutoparError, match=f"(?s){message}"):
        simulate_changed(lambda order: None, "1f1b", edit)


def test_values_are_freed_after_their_last_use() -> None:
    """Breaks when activations, or what travels, of more microbatches than are in flight live at once."""
    most: dict[str, list[int]] = {}
    line = "    return (hidden, first, ids > 2), {2: first}, {}, [saved, ids]"
    for name in ("gpipe", "1f1b"):
        alive: list[list[weakref.ref[Tensor]]] = [[], []]
        most[name] = [0, 0]

        def track(*values: Tensor, alive: Any = alive, name: str = name) -> None:
            for number, x in enumerate(values):
                alive[number].append(weakref.ref(x))
                most[name][number] = max(most[name][number], sum(ref() is not None for ref in alive[number]))

        torch.track_alive = track  # type: ignore[attr-defined]
        try:
            schedule = schedule_of(name, 2, 8)
            source = chain_source(2, 32, 8)
            assert line in source
            source = source.replace(line, f"    torch.track_alive(saved[0][1], hidden)\n{line}")
            simulate(chain_interface(schedule, 32), source, dict(make_chain(3).state_dict()), chain_batch(32))
        finally:
            del torch.track_alive  # type: ignore[attr-defined]
    assert most["gpipe"][0] == 8 and most["1f1b"][0] == 2
    assert most["1f1b"][1] <= 2


def test_gradients_are_received_as_they_lie() -> None:
    """Breaks if a stage waits for a gradient in the shape of its value's pieces, though it lies otherwise."""
    value = TensorInterface("x", (8, 4), "float32", (REPLICATE,), differentiable=True, gradient=(Shard(0),))
    run = object.__new__(StageRun)
    run.comm = RecordingComm(("dp",), (2,), 0, "cpu")
    run.interface = StageInterface((value,), (value,), (), (), (), ())
    assert run._gradient_shapes(sends=True) == run._gradient_shapes(sends=False) == [((4, 4), torch.float32)]
    assert run._sent_shapes() == [((8, 4), torch.float32)]


def test_tied_gradients_are_added_in_one_order() -> None:
    """Breaks if ranks add the terms of a tied parameter in different orders: their copies drift apart by rounding."""
    terms = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]

    def added(rank: int) -> Tensor:
        others = [terms[peer] for peer in range(3) if peer != rank]
        exchange = SimpleNamespace(exchange=lambda *_: SimpleNamespace(wait=lambda: others), at=lambda _: None)
        program = SimpleNamespace(
            holders={"w": [0, 1, 2]},
            tied=["w"],
            pipeline=SimpleNamespace(axis="pp"),
            program=SimpleNamespace(filename=""),
        )
        step: Any = SimpleNamespace(program=program, comm=exchange)
        return PipelineStep._with_tied(step, {"w": terms[rank]}, rank)["w"]

    assert len({float(added(rank)) for rank in range(3)}) == 1


def test_a_batch_may_use_a_parameter_on_fewer_ranks_and_not_train_it() -> None:
    """Breaks if a batch that is embedded already is refused where the embedding is tied, if it is trained on with one
    rank's copy left as it was, or if one that needs parameters where they are not is run.
    """
    first = chain_interface(schedule_of("gpipe", 2, 4), 16)
    assert first.pipeline is not None
    stages = list(first.pipeline.stages)
    others = tuple(name for name in stages[0].parameters if name != "table.weight")
    stages[0] = replace(stages[0], parameters=others)
    fewer = replace(first, pipeline=replace(first.pipeline, stages=tuple(stages)))
    check_same_storage(fewer, first, ("pp", "dp"))
    check_trains(first, first)
    for check in (lambda: check_trains(fewer, first), lambda: check_same_storage(first, fewer, ("pp", "dp"))):
        with pytest.raises(AutoparError, match=r"table.weight would have to be on other pipeline ranks"):
            check()
