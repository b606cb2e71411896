"""Experts to which tokens go over an axis, on simulated ranks, against experts at one place, in float64."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar import operators as ops
from autopar.base.errors import AutoparError
from autopar.cost import expert_kernels
from autopar.cost.exchanges import (
    buffer_bytes,
    exchange_of,
    exposed_s,
    sending_bytes,
    taking_bytes,
    under_way_bytes,
)
from autopar.cost.roofline import collective_time_s
from autopar.ir.choices import Choice, shardings
from autopar.ir.op_call import OpCall, op_call
from autopar.ir.region import NodeStrategy
from autopar.ir.rule import Rule
from autopar.machine.mesh import Mesh
from autopar.operators import expert_tiles
from autopar.operators.rules import exchange_cost
from autopar.operators.rules.lookup import rule_for
from autopar.runtime import exchange
from autopar.runtime.comm import RecordingComm
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.runtime.streams import Streams
from tests.unit.kernels.interpreted import load
from tests.unit.kernels.test_experts import nothing
from tests.unit.passes.test_stage_costs import LiveBytes
from tests.unit.runtime.racing import RacingStreams

pytestmark = pytest.mark.unit
TOKENS, WIDTH, EXPERTS, INNER, CHOSEN = 16, 6, 8, 5, 2
OPTIONS = {"act": "mul(silu(gate), up)"}


def routing(name: str, tokens: int = TOKENS, experts: int = EXPERTS, chosen: int = CHOSEN) -> Tensor:
    """[tokens, chosen]: balanced; one expert for all; experts and ranks that nobody wants; none at all; by chance."""
    rows = torch.arange(tokens)[:, None] * chosen + torch.arange(chosen)
    if name == "balanced":
        return rows % experts
    if name == "hot":
        return torch.cat([torch.full((tokens, 1), 5), torch.zeros(tokens, chosen - 1, dtype=torch.int64)], 1)
    if name == "empty":
        return torch.arange(chosen).expand(tokens, chosen).clone()
    if name == "nowhere":
        return torch.where(torch.arange(tokens)[:, None] % 3 == 0, rows % experts, experts)
    if name == "twice":
        return (rows // chosen) % experts + 0 * rows
    assert name == "random"
    generator = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)])


ROUTINGS = ("balanced", "hot", "empty", "nowhere", "twice", "random")


class Case:
    """Whole tensors, and what a rank makes of its part."""

    def __init__(self, indices: Tensor, biased: bool = False, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)

        def r(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.indices = indices
        tokens, chosen = indices.shape
        self.g, self.x, self.weights = r(tokens, WIDTH), r(tokens, WIDTH), r(tokens, chosen)
        self.parameters = [r(EXPERTS, 2 * INNER, WIDTH), r(EXPERTS, WIDTH, INNER)]
        self.parameters += [r(EXPERTS, 2 * INNER)] if biased else []

    def whole(self) -> list[Tensor]:
        given = (self.x, self.indices, self.weights, *self.parameters)
        gradient = ops.experts_grad_bias if len(self.parameters) == 3 else ops.experts_grad
        return [ops.experts(*given, **OPTIONS), *gradient(self.g, *given, **OPTIONS)]

    def part(self, comm: Any) -> list[Tensor]:
        return [comm.slice(x, "dp", 0) for x in (self.g, self.x, self.indices, self.weights, *self.parameters)]

    def on(self, comm: Any) -> list[Tensor]:
        g, *given = self.part(comm)
        gradient = comm.exchange_experts_grad_bias if len(self.parameters) == 3 else comm.exchange_experts_grad
        return [comm.exchange_experts("dp", *given, **OPTIONS), *gradient("dp", g, *given, **OPTIONS)]

    def beside(self, comm: Any) -> list[Tensor]:
        """As `on`, tokens leaving before and coming home after other statements, forward and backward at once."""
        g, *given = self.part(comm)
        name = "exchange_experts_grad_bias" if len(self.parameters) == 3 else "exchange_experts_grad"
        experts = given[3].shape[0]
        sent = comm.send_tokens("dp", *given[:3], experts=experts)
        back = comm.send_tokens("dp", g, *given[:3], experts=experts)
        coming = comm.exchange_experts("dp", *given, sent=sent, later=True, **OPTIONS)
        home, *of_parameters = getattr(comm, name)("dp", g, *given, sent=back, later=True, **OPTIONS)
        made = comm.take_tokens(coming)
        return [made, *comm.take_tokens(home), *of_parameters]


def check(case: Case, num: int, tolerance: float = 1e-12, run: Callable[[Case, Any], list[Tensor]] = Case.on) -> None:
    pieces = SimulatedMesh(("dp",), (num,)).run(lambda comm: run(case, comm))
    for number, wanted in enumerate(case.whole()):
        found = torch.cat([each[number] for each in pieces])
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=number: f"{n}: {m}")


@pytest.mark.parametrize("run", [Case.on, Case.beside])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("name", ROUTINGS)
def test_is_experts_at_one_place(name: str, num: int, biased: bool, run: Callable[[Case, Any], list[Tensor]]) -> None:
    """Breaks if a token misses an expert, comes back to another place, is weighted twice, or a gradient of experts is
    of this rank's tokens alone; if two exchanges that are under way at once get each other's rows.
    """
    check(Case(routing(name), biased), num, run=run)


def test_one_token_with_one_expert() -> None:
    """Breaks if a row's weight, which lies behind four bytes of its expert's number, is read where it lies."""
    check(Case(torch.tensor([[3], [0]])), 2)


@pytest.mark.parametrize("run", [Case.on, Case.beside])
@pytest.mark.parametrize("name", ROUTINGS)
def test_in_several_rounds(
    name: str, run: Callable[[Case, Any], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if what is more than a round holds is dropped, or ranks take different numbers of rounds; if a later round
    comes home twice, or not at all, where the last one does by itself.
    """
    monkeypatch.setattr(exchange_cost, "SPARE", 0.1)
    rounds: set[int] = set()
    counted = exchange.rounds_of

    def count(rows: list[list[int]], at_once: int) -> int:
        rounds.add(counted(rows, at_once))
        return counted(rows, at_once)

    monkeypatch.setattr(exchange, "rounds_of", count)
    check(Case(routing(name), biased=True), 4, run=run)
    assert max(rounds) >= (4 if name == "hot" else 2)


def test_narrow_tokens_and_weights_of_another_dtype() -> None:
    """Breaks if weights in float32 are read as tokens are on their way, or rounded to their dtype."""
    case = Case(routing("random"), dtype=torch.bfloat16)
    case.weights = case.weights.float()
    # A term is rounded where it is computed, and a sum of two ranks' terms again: half an eps each, and twice that for
    # the products of gradients, which are made of such sums.
    check(case, 2, tolerance=2 * torch.finfo(torch.bfloat16).eps)
    _, _, dweights, *_ = SimulatedMesh(("dp",), (2,)).run(case.on)[0]
    assert dweights.dtype == torch.float32


def test_two_exchanges_race_with_nothing() -> None:
    """Breaks if what comes is read, or what leaves is changed, before streams have waited for each other."""
    streams = RacingStreams()
    case = Case(routing("random"), biased=True)
    mesh = SimulatedMesh(("dp",), (4,), device="cpu", streams=cast(Streams, streams), late_s=1e-3)
    found = mesh.run(lambda comm: [each * 1 for each in case.beside(comm)])
    assert streams.races == []
    plain = SimulatedMesh(("dp",), (4,)).run(case.beside)
    assert all(torch.equal(a, b) for one, other in zip(found, plain, strict=True) for a, b in zip(one, other))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("tokens twice", "waits for tokens that were taken by another exchange before"),
        ("another kind", "waits for tokens that were sent over dp"),
        ("home twice", "what comes home from experts was taken before"),
    ],
)
def test_what_is_under_way_is_taken_once(what: str, says: str) -> None:
    """Breaks if rows of one exchange are what another computes with, or sums are handed out again."""
    case = Case(routing("balanced"))

    def run(comm: Any) -> None:
        g, *given = case.part(comm)
        sent = comm.send_tokens("dp", *given[:3], experts=EXPERTS // 2)
        if what == "another kind":
            comm.exchange_experts_grad("dp", g, *given, sent=sent, **OPTIONS)
        coming = comm.exchange_experts("dp", *given, sent=sent, later=True, **OPTIONS)
        if what == "tokens twice":
            comm.exchange_experts("dp", *given, sent=sent, **OPTIONS)
        comm.take_tokens(coming)
        comm.take_tokens(coming)

    with pytest.raises(AutoparError, match=says):
        SimulatedMesh(("dp",), (2,)).run(run)


# -------------------------------------------------------------------------------------------------- what it costs


def priced(tokens: int, num: int, chosen: int, grad: bool, dtype: torch.dtype) -> tuple[OpCall, Rule, NodeStrategy]:
    """The operator under an exchange over one axis of this size."""
    meta = {"device": "meta", "dtype": dtype}
    x, weights = torch.empty(tokens * num, WIDTH, **meta), torch.empty(tokens * num, chosen, **meta)
    indices = torch.empty(tokens * num, chosen, dtype=torch.int64, device="meta")
    first = torch.empty(EXPERTS, 2 * INNER, WIDTH, **meta)
    args = (*([x] if grad else []), x, indices, weights, first, torch.empty(EXPERTS, WIDTH, INNER, **meta))
    target = torch.ops.autopar.experts_grad.default if grad else torch.ops.autopar.experts.default
    call = op_call(target, args, OPTIONS, target(*args, **OPTIONS))
    rule, choices = rule_for(call), (Choice("exchange", "t"),)
    lie = shardings(rule, choices, (num,))
    assert lie is not None
    return call, rule, NodeStrategy(choices, *lie)


def planned(tokens: int, num: int, chosen: int, grad: bool, dtype: torch.dtype = torch.float64) -> tuple[float, int]:
    """Bytes that a rank sends, and the most that it holds, as planned."""
    node = priced(tokens, num, chosen, grad, dtype)
    way = exchange_of(*node, (num,))
    assert way is not None
    return way.bytes_sent, buffer_bytes(*node, (num,))


@pytest.mark.parametrize("grad", [False, True])
def test_seconds_are_those_of_the_busiest_rank(grad: bool) -> None:
    """Breaks if a way, or what the busiest rank has more than others, costs no time: of long messages bytes count."""
    mesh = Mesh({"ep": 4}, hardware="h100")
    tokens = 1 << 28
    seconds = [exposed_s(*priced(tokens, 4, CHOSEN, grad, torch.bfloat16), mesh, share) for share in (1.0, 1.5)]
    sent, _ = planned(tokens, 4, CHOSEN, grad, torch.bfloat16)
    numbers = 4 * 4 * 8  # bytes: how many rows for whom, int64
    link, launch_s = mesh.link("ep"), mesh.hardware.collective_launch_s
    start_s = launch_s + 3 * link.latency_s  # of any message
    bytes_s = collective_time_s("all_to_all", sent * 4 / 3 - numbers, 4, link, launch_s) - start_s
    others_s = collective_time_s("all_gather", numbers, 4, link, launch_s)
    others_s += (4 if grad else 3) * start_s
    assert seconds == pytest.approx([bytes_s + others_s, 1.5 * bytes_s + others_s], rel=1e-12)


def test_balanced_routing_sends_what_was_planned() -> None:
    """Breaks if a row, a message or the numbers of rows are left out of the plan's bytes, or a token is sent twice to
    one rank. With an expert a rank each token goes to as many ranks as it has experts, and evenly.
    """
    case = Case(routing("balanced"))
    events = SimulatedMesh(("dp",), (EXPERTS,)).run(lambda comm: (case.on(comm), list(comm.log or ()))[1])
    wanted = sum(planned(TOKENS // EXPERTS, EXPERTS, CHOSEN, grad)[0] for grad in (False, True))
    mean = sum(event.bytes_sent for each in events for event in each) / EXPERTS
    assert mean == pytest.approx(wanted, rel=1e-12)


def test_a_token_goes_once_to_each_rank() -> None:
    """Breaks if a token with two experts on one rank is sent there twice."""
    case = Case(routing("empty"))  # all of both experts are the first rank's
    logs = SimulatedMesh(("dp",), (2,)).run(lambda comm: (case.on(comm), list(comm.log or ()))[1])
    first = next(event for event in logs[1] if event.kind == "exchange")
    assert first.bytes_sent == TOKENS // 2 * WIDTH * 8 and not any(e.bytes_sent for e in logs[0][1:3])


@pytest.mark.parametrize("run", [Case.on, Case.beside])
def test_dry_run_sends_what_was_planned(run: Callable[[Case, Any], list[Tensor]]) -> None:
    """Breaks if a program that is run without peers logs other bytes than the plan has, or other shapes come out."""
    comm = RecordingComm(("dp",), (2,), 0)
    case = Case(routing("random"))
    for name in ("g", "x", "indices", "weights"):
        setattr(case, name, getattr(case, name).to("meta"))
    case.parameters = [each.to("meta") for each in case.parameters]
    shapes = [tuple(each.shape) for each in run(case, comm)]
    assert shapes == [(8, WIDTH), (8, WIDTH), (8, CHOSEN), (4, 2 * INNER, WIDTH), (4, WIDTH, INNER)]
    wanted = sum(planned(8, 2, CHOSEN, grad)[0] for grad in (False, True))
    assert sum(event.bytes_sent for event in comm.log or ()) == pytest.approx(wanted, rel=1e-12)


def test_ranks_of_a_token_are_counted() -> None:
    """Breaks if the planned number of ranks is not the mean over all choices of experts."""
    for experts, chosen, num in ((8, 2, 4), (8, 3, 2), (6, 6, 3), (4, 1, 4)):
        local = experts // num
        ways = list(itertools.combinations(range(experts), chosen))
        mean = sum(len({e // local for e in way}) for way in ways) / len(ways)
        assert exchange_cost.ranks_of_token(experts, chosen, num) == pytest.approx(mean)


def adversaries(count: int, tokens: int, chosen: int) -> Iterator[Tensor]:
    """Routings that send most to few: all to one expert or two, most to these, some by chance."""
    for seed in range(count):
        draw = random.Random(seed)
        few = draw.sample(range(EXPERTS), draw.choice([chosen, chosen, chosen + 1, EXPERTS]))
        rows = [[*few[:chosen]] if draw.random() < 0.8 else draw.sample(few, chosen) for _ in range(tokens)]
        yield torch.tensor(rows)


def rows_between(indices: Tensor, num: int) -> list[list[int]]:
    """How many tokens of each rank have an expert of each, token by token."""
    rows = [[0] * num for _ in range(num)]
    for rank, part in enumerate(indices.chunk(num)):
        for chosen in part.tolist():
            for home in {each * num // EXPERTS for each in chosen}:
                rows[rank][home] += 1
    return rows


@pytest.mark.moderate
@pytest.mark.parametrize("chosen", [1, 2])
def test_adversaries_send_and_hold_what_was_planned(
    chosen: int, monkeypatch: pytest.MonkeyPatch, count: int = 50
) -> None:
    """Breaks if a rank to which most tokens go holds more at once than the plan says, whatever the router does; or if
    a rank sends other bytes than the plan has for this very routing. A hundred routings, of one and of two experts.
    """
    tokens, num = 64, 4
    module = importlib.import_module("autopar.operators.experts")  # whose inner operators are seen
    plain = SimpleNamespace(experts=module.experts, experts_grad=module.experts_grad)
    monkeypatch.setattr(exchange, "_operators", plain)
    send = SimulatedComm._exchange_rows

    def received(self: SimulatedComm, x: Tensor, event: Any, rows: list[list[int]]) -> Tensor:
        with _disable_current_modes():
            found = send(self, x, event, rows)
        return found.clone()  # this rank's, where the last one to come makes all ranks' pieces

    monkeypatch.setattr(SimulatedComm, "_exchange_rows", received)
    nodes = [priced(tokens, num, chosen, grad, torch.float64) for grad in (False, True)]
    bounds = [buffer_bytes(*node, (num,)) for node in nodes]
    ways = [way for node in nodes if (way := exchange_of(*node, (num,))) is not None]

    def run(comm: SimulatedComm, case: Case) -> list[tuple[int, int, int]]:
        g, *given = case.part(comm)
        found = []
        for call in (
            lambda: [comm.exchange_experts("dp", *given, **OPTIONS)],
            lambda: comm.exchange_experts_grad("dp", g, *given, **OPTIONS),
        ):
            before = len(comm.log or ())
            with LiveBytes([g, *given]) as live:
                results = call()
            sent = sum(event.bytes_sent for event in (comm.log or [])[before:])
            found.append((live.peak, sum(each.nbytes for each in results), int(sent)))
        return found

    most = [0.0, 0.0]
    for indices in adversaries(count, tokens * num, chosen):
        case = Case(indices)
        rows = rows_between(indices, num)
        ranks = SimulatedMesh(("dp",), (num,)).run(lambda comm, case=case: run(comm, case))
        for rank, found in enumerate(ranks):
            for number, ((peak, own, sent), bound) in enumerate(zip(found, bounds, strict=True)):
                assert peak <= bound + own, (number, peak, bound, own)
                assert sent == ways[number].bytes_routed(rows, rank), (number, rank, rows)
                most[number] = max(most[number], peak / (bound + own))
    assert min(most) > 0.4, most  # a bound that says something


@pytest.mark.parametrize("few", [1, 1024])
def test_adversaries_hold_what_was_planned_with_kernels(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the kernels of experts hold more of the rows that a round brings than the plan says, in one turn or in
    several, forward or backward. Launches are left out: what is held does not depend on numbers.
    """
    tokens, num, chosen, kernels = 64, 4, 4, load("experts")
    for module in (expert_tiles, kernels, expert_kernels):
        monkeypatch.setattr(module, "FEW_PLACES", few)
    monkeypatch.setattr(kernels, "launch", nothing)
    plain = SimpleNamespace(experts=kernels.experts, experts_grad=kernels.experts_grad)
    monkeypatch.setattr(exchange, "_operators", plain)
    send = SimulatedComm._exchange_rows

    def received(self: SimulatedComm, x: Tensor, event: Any, rows: list[list[int]]) -> Tensor:
        with _disable_current_modes():
            found = send(self, x, event, rows)
        return found.clone()

    monkeypatch.setattr(SimulatedComm, "_exchange_rows", received)
    nodes = [priced(tokens, num, chosen, grad, torch.float32) for grad in (False, True)]
    bounds = [buffer_bytes(*node, (num,), holds=expert_kernels.held_bytes) for node in nodes]

    def run(comm: SimulatedComm, case: Case) -> list[float]:
        g, *given = case.part(comm)
        shares = []
        for grad, bound in enumerate(bounds):
            with LiveBytes([g, *given]) as live:
                if grad:
                    made = comm.exchange_experts_grad("dp", g, *given, **OPTIONS)
                else:
                    made = (comm.exchange_experts("dp", *given, **OPTIONS),)
            shares.append(live.peak / (bound + sum(each.nbytes for each in made)))
        return shares

    most = [0.0, 0.0]
    for indices in adversaries(8, tokens * num, chosen):
        case = Case(indices, dtype=torch.float32)
        for shares in SimulatedMesh(("dp",), (num,)).run(lambda comm, case=case: run(comm, case)):
            most = [max(pair) for pair in zip(most, shares, strict=True)]
    assert all(0.5 < each <= 1 for each in most), most


@pytest.mark.moderate
@pytest.mark.parametrize("grad", [False, True])
def test_adversaries_hold_what_was_planned_under_way(
    grad: bool, monkeypatch: pytest.MonkeyPatch, count: int = 25
) -> None:
    """Breaks if tokens that have left, or come home, while something else runs hold more than the plan says, or if the
    exchange between them, or the statements themselves, do.
    """
    tokens, num, chosen = 64, 4, 2
    module = importlib.import_module("autopar.operators.experts")
    plain = SimpleNamespace(experts=module.experts, experts_grad=module.experts_grad)
    monkeypatch.setattr(exchange, "_operators", plain)
    send = SimulatedComm._exchange_rows

    def begun(self: SimulatedComm, x: Tensor, event: Any, rows: list[list[int]]) -> Callable[[], Tensor]:
        with _disable_current_modes():
            found = send(self, x, event, rows)
        kept = [x, found.clone()]  # as processes do, until it has come

        def wait() -> Tensor:
            here = kept.pop()
            kept.clear()
            return here

        return wait

    monkeypatch.setattr(SimulatedComm, "_begin_rows", begun)
    monkeypatch.setattr(SimulatedComm, "_exchange_rows", lambda *args: begun(*args)())
    node = priced(tokens, num, chosen, grad, torch.float64)
    there, back = (under_way_bytes(way, *node, (num,)) for way in ("there", "back"))
    bounds = [sending_bytes(*node, (num,)), there, buffer_bytes(*node, (num,)), back, taking_bytes(*node, (num,))]

    def run(comm: SimulatedComm, case: Case) -> list[tuple[int, int]]:
        g, *given = case.part(comm)
        given = [g, *given] if grad else given
        call = comm.exchange_experts_grad if grad else comm.exchange_experts
        with LiveBytes([g, *given]) as live:
            sent = comm.send_tokens("dp", *given[: len(given) - 2], experts=given[-1].shape[0])
            found = [(live.peak, 0), (live.now, 0)]
            live.peak = live.now
            made: Any = call("dp", *given, sent=sent, later=True, **OPTIONS)
            del sent
            coming, own = (made[0], made[1:]) if grad else (made, [])
            del made
            size = sum(each.nbytes for each in own)
            found += [(live.peak, size), (live.now, size)]
            live.peak = live.now
            results = comm.take_tokens(coming)
            size += sum(each.nbytes for each in (results if grad else [results]))
            return [*found, (live.peak, size)]

    most = [0.0] * len(bounds)
    for indices in adversaries(count, tokens * num, chosen):
        case = Case(indices)
        for found in SimulatedMesh(("dp",), (num,)).run(lambda comm, case=case: run(comm, case)):
            for number, ((held, own), bound) in enumerate(zip(found, bounds, strict=True)):
                assert held <= bound + own, (number, held, bound, own)
                most[number] = max(most[number], held / (bound + own))
    assert min(most) > 0.4, most
