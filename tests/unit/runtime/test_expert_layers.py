"""Experts in other slots than their numbers say, on simulated ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.cost.exchanges import buffer_bytes, guest_bytes
from autopar.ir.interface import ExpertsInterface
from autopar.runtime.expert_layers import ExpertLayer, inverse, moved
from autopar.runtime.simulated_comm import SimulatedMesh
from tests.unit.passes.test_pair_memory import as_processes_do
from tests.unit.passes.test_stage_costs import LiveBytes
from tests.unit.runtime.test_exchange import EXPERTS, OPTIONS, ROUTINGS, Case, adversaries, priced, routing

pytestmark = pytest.mark.unit
SLOTS = (3, 0, 6, 5, 1, 7, 2, 4)
PLANNED = ExpertsInterface("layers.1", "dp", ("layers.1.experts.up", "layers.1.experts.down"), ("dp",))


def layer_in(slots: tuple[int, ...], comm: Any) -> ExpertLayer:
    layer = ExpertLayer(PLANNED, EXPERTS, comm)
    layer.place(slots)
    return layer


def placed(
    case: Case, comm: Any, run: Any, slots: tuple[int, ...] = SLOTS, where: str = "layers.1",
    guests: tuple[tuple[int, ...], ...] = (),
) -> list[Tensor]:  # fmt: skip
    """What an exchange makes of parameters whose rows have moved; its gradients of them, back at home."""
    layer = layer_in(slots, comm)
    layer.place(slots, guests)
    comm.experts = {"layers.1": layer, "layers.0": layer_in(tuple(range(EXPERTS)), comm)}
    home = tuple(range(EXPERTS))
    part = case.part

    def with_rows(comm: Any) -> list[Tensor]:
        found = part(comm)
        return [*found[:4], *(moved(x, comm, "dp", home, slots) for x in found[4:])]

    case.part = with_rows  # type: ignore[method-assign]
    comm.at(f"{where} forward")
    made = run(case, comm)
    return [*made[:3], *(moved(x, comm, "dp", slots, home) for x in made[3:])]


@pytest.mark.parametrize("run", [Case.on, Case.beside])
@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("name", ROUTINGS)
def test_an_exchange_finds_experts_that_have_moved(name: str, num: int, run: Any) -> None:
    """Breaks if a token goes to the slot of its expert's number, is sent to one rank and computed for another, or if a
    number of no expert becomes one.
    """
    indices = routing(name)
    pieces = SimulatedMesh(("dp",), (num,)).run(lambda comm: placed(Case(indices, biased=True), comm, run))
    for number, wanted in enumerate(Case(indices, biased=True).whole()):
        found = torch.cat([each[number] for each in pieces])
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, n=number: f"{n}: {m}")


@pytest.mark.parametrize("run", [Case.on, Case.beside])
@pytest.mark.parametrize("slots", [SLOTS, tuple(range(EXPERTS))])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_that_visit_take_a_part_of_their_tokens(name: str, slots: tuple[int, ...], run: Any) -> None:
    """Breaks if a guest computes with another's parameters, its gradients are lost or added to another expert, or a
    token goes to none of its hosts or to two of them.
    """
    num, room = 4, 2
    hosts = {5: (0, 1, 2, 3), 0: (1, 2), 3: (3, 0)}
    guests = tuple(
        tuple(expert for expert in (3, 5, 0) if rank in hosts[expert] and slots[expert] // room != rank)
        for rank in range(num)
    )
    assert len(set(map(len, guests))) > 1  # some have more guests than others
    indices = routing(name)
    pieces = SimulatedMesh(("dp",), (num,)).run(
        lambda comm: placed(Case(indices, biased=True), comm, run, slots, guests=guests)
    )
    for number, wanted in enumerate(Case(indices, biased=True).whole()):
        found = torch.cat([each[number] for each in pieces])
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, n=number: f"{n}: {m}")


def test_guests_relieve_the_rank_of_a_hot_expert() -> None:
    """Breaks if tokens of an expert that visits others all go to its own rank, or to one of the others."""

    def rows(guests: tuple[tuple[int, ...], ...]) -> list[int]:
        def run(comm: Any) -> list[int]:
            layer = layer_in(tuple(range(EXPERTS)), comm)
            layer.place(layer.slots, guests)
            slots = layer.numbers(comm.slice(routing("hot"), "dp", 0)[:, :1])
            return slots.flatten().tolist()

        return [slot for each in SimulatedMesh(("dp",), (4,)).run(run) for slot in each]

    assert set(rows(((),) * 4)) == {5}
    found = rows(((5,), (5,), (), (5,)))
    ranks = [slot // 3 for slot in found]
    assert [ranks.count(rank) for rank in range(4)] == [4, 4, 4, 4]


@pytest.mark.moderate
@pytest.mark.parametrize("hosts", [(0, 1, 3), (0,)])
def test_guests_hold_what_is_said(hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what guests take is more than is said: parameters, gradients, and what they make of rows."""
    tokens, num, chosen = 64, 4, 2
    as_processes_do(monkeypatch)
    nodes = [priced(tokens, num, chosen, grad, torch.float64) for grad in (False, True)]
    bounds = [buffer_bytes(*node, (num,)) for node in nodes]
    more = [guest_bytes(*node, (num,)) for node in nodes]

    def run(comm: Any, case: Case) -> list[tuple[int, int]]:
        layer = layer_in(tuple(range(EXPERTS)), comm)
        layer.place(layer.slots, tuple((5,) if rank in hosts else () for rank in range(num)))
        comm.experts = {"layers.1": layer}
        g, *given = case.part(comm)
        found = []
        for phase, call in (
            ("forward", lambda: [comm.exchange_experts("dp", *given, **OPTIONS)]),
            ("backward", lambda: comm.exchange_experts_grad("dp", g, *given, **OPTIONS)),
        ):
            comm.at(f"layers.1 {phase}")
            with LiveBytes([g, *given]) as live:
                results = call()
            found.append((live.peak, sum(each.nbytes for each in results)))
        return found

    most = [0.0, 0.0]
    for indices in [
        torch.full((tokens * num, chosen), 5).index_fill_(1, torch.tensor([1]), 4),
        *adversaries(5, 256, 2),
    ]:
        case = Case(indices)
        for found in SimulatedMesh(("dp",), (num,)).run(lambda comm, case=case: run(comm, case)):
            for number, (peak, own) in enumerate(found):
                assert peak <= bounds[number] + more[number] + own, (number, peak, bounds, more, own)
                most[number] = max(most[number], (peak - own) / (bounds[number] + more[number]))
    assert min(most) > 0.4, most


def test_another_layer_stays_as_it_is() -> None:
    """Breaks if one layer's slots are taken for all."""

    def run(comm: Any) -> list[Tensor]:
        comm.experts = {"layers.1": layer_in(SLOTS, comm), "layers.0": layer_in(tuple(range(EXPERTS)), comm)}
        comm.at("layers.0 backward")
        return Case(routing("random")).on(comm)

    pieces = SimulatedMesh(("dp",), (2,)).run(run)
    for number, wanted in enumerate(Case(routing("random")).whole()):
        torch.testing.assert_close(torch.cat([each[number] for each in pieces]), wanted, rtol=1e-12, atol=1e-12)


def test_a_place_that_the_plan_does_not_know_is_refused() -> None:
    """Breaks if an exchange of an edited program takes slots for numbers."""
    with pytest.raises(AutoparError, match="at a place that its plan does not know") as error:
        SimulatedMesh(("dp",), (2,)).run(lambda comm: placed(Case(routing("random")), comm, Case.on, where="mine"))
    assert "experts_home" in str(error.value)


@given(st.permutations(range(EXPERTS)), st.permutations(range(EXPERTS)), st.sampled_from([1, 2, 4]))
@settings(max_examples=30, deadline=None)
def test_rows_move_with_their_experts(before: list[int], after: list[int], num: int) -> None:
    """Breaks if a row lands on another rank, or in another slot there; if what stays on its rank is sent."""
    rows = torch.arange(EXPERTS)[:, None] * torch.tensor([1.0, 10.0])

    def run(comm: Any) -> tuple[Tensor, float]:
        comm.log = []
        local = comm.slice(rows[list(inverse(before))], "dp", 0)
        found = moved(local, comm, "dp", before, after)
        return found, sum(event.bytes_sent for event in comm.log)

    pieces = SimulatedMesh(("dp",), (num,)).run(run)
    torch.testing.assert_close(torch.cat([x for x, _ in pieces]), rows[list(inverse(after))], rtol=0, atol=0)
    room = EXPERTS // num
    away = sum(one // room != other // room for one, other in zip(before, after, strict=True))
    assert sum(sent for _, sent in pieces) == away * 2 * 4


def test_counts_choices_by_the_models_numbers() -> None:
    """Breaks if slots are counted for numbers, a gradient's exchange counts again, or a number of no expert counts."""
    indices = routing("nowhere")

    def run(comm: Any) -> Tensor:
        layer = layer_in(SLOTS, comm)
        layer.loads = torch.zeros(EXPERTS, dtype=torch.int64)
        comm.experts = {"layers.1": layer}
        for phase in ("forward", "backward"):
            comm.at(f"layers.1 {phase}")
            Case(indices).on(comm)
        return layer.loads

    loads = torch.stack(SimulatedMesh(("dp",), (2,)).run(run)).sum(0)
    assert loads.tolist() == torch.bincount(indices.flatten(), minlength=EXPERTS + 1)[:EXPERTS].tolist()


def test_plain_tensors_beside_layers_that_are_away() -> None:
    """Breaks if torch takes a plain tensor's rows for those of experts that lie in other slots, or goes on refusing
    plain tensors when all are at home, or gone.
    """
    gc.collect()  # layers of other tests
    dispatcher: Any = DTensor._op_dispatcher
    axis: Any = _Axis()
    layer, other = ExpertLayer(PLANNED, EXPERTS, axis), ExpertLayer(PLANNED, EXPERTS, axis)
    taken = []
    for slots in (SLOTS, tuple(range(EXPERTS))):
        layer.place(slots)
        taken.append(dispatcher._allow_implicit_replication)
    other.place(SLOTS)
    layer.place(tuple(range(EXPERTS)))
    taken.append(dispatcher._allow_implicit_replication)
    del other
    gc.collect()
    assert [*taken, dispatcher._allow_implicit_replication] == [False, True, False, True]


class _Axis:
    """The ranks of an axis."""

    def size(self, axis: str) -> int:
        return 2
