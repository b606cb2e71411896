"""Zigzag through the compiler: from an operator that asks where its elements lie to all values, and to the program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import operators as ops
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.ir.classes import value_classes
from autopar.ir.program import Program
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.operators.rules import axis_choices, op_call, rule_for
from autopar.operators.rules.verify import run, verify_rule
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate
from autopar.passes.outline import outline
from autopar.passes.placement.layouts import layouts_of
from autopar.planner.plan import decisions
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import DDP, TENSOR, ZERO3, Pin, pin
from tests.unit.passes.zigzag import FEATURES, VOCABULARY, Places, batch_of, known, weigh_places

ZIGZAG = Shard(1, 2, True)
RING = AxisStrategy("zigzag", "", "", "", parameters=frozenset({"replicate"}), hidden="split", zigzag=True)
PLAIN = replace(RING, zigzag=False, sequence=True)


@pytest.fixture(autouse=True, scope="module")
def operator_is_known() -> Iterator[None]:
    with known():
        yield


def pins(**placements: Shard) -> tuple[Pin, ...]:
    return pin("ids", **placements), pin("labels", **placements)


def plan_of(
    mesh: dict[str, int], strategy: dict[str, AxisStrategy], constraints: tuple[Pin, ...], **options: Any
) -> Plan:
    model = Places(0.3, **options)
    return autopar.plan(
        model, Mesh(mesh, hardware="cpu"), example_inputs=batch_of(4), strategy=strategy, constraints=constraints
    )


CASES: dict[str, tuple[dict[str, int], dict[str, AxisStrategy], dict[str, Shard], list[str]]] = {
    "cp": ({"cp": 2}, {"cp": RING}, {"cp": ZIGZAG}, ["16/2~cp, 8]", "64/8~cp, 16]"]),
    "cp4": ({"cp": 4}, {"cp": RING}, {"cp": ZIGZAG}, ["16/2~cp, 8]", "64/8~cp, 16]"]),
    # Rows that join batch and sequence: what dp leaves of the batch, each in two stripes.
    "dp cp": ({"dp": 2, "cp": 2}, {"dp": DDP, "cp": RING}, {"cp": ZIGZAG}, ["4/dp, 16/2~cp, 8]", "64/dp/4~cp, 16]"]),
    "cp dp": ({"cp": 2, "dp": 2}, {"cp": RING, "dp": ZERO3}, {"cp": ZIGZAG}, ["4/dp, 16/2~cp, 8]", "64/8~cp/dp, 16]"]),
    "cp tp": ({"cp": 2, "tp": 2}, {"cp": RING, "tp": TENSOR}, {"cp": ZIGZAG}, ["16/2~cp, 8]", "64/8~cp, 16/tp]"]),
    "twice": (
        {"cp0": 2, "cp1": 2},
        {"cp0": RING, "cp1": RING},
        {"cp0": ZIGZAG, "cp1": ZIGZAG},
        ["16/2~cp0/2~cp1, 8]", "64/8~cp0/8~cp1, 16]"],
    ),
    "then plain": (
        {"dp": 2, "cp0": 2, "cp1": 2},
        {"dp": DDP, "cp0": RING, "cp1": PLAIN},
        {"cp0": ZIGZAG, "cp1": Shard(1)},
        ["4/dp, 16/2~cp0/cp1, 8]", "64/dp/4~cp0/2:cp1, 16]"],
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_zigzag_program_computes_what_the_model_computes(name: str) -> None:
    """Breaks if a move, a start, a position or a joined dim deals a stripe to another rank than the rest does."""
    mesh, strategy, constraints, shapes = CASES[name]
    plan = plan_of(mesh, strategy, pins(**constraints))
    for shape in shapes:
        assert f"f32[{shape}" in plan.source.replace("f32[4, ", "f32["), shape
    assert set(re.findall(r'comm.starts\((.*?"[^"]*")\)', plan.source)) == {
        f'16, "{", ".join(f"{axis}={placement}" for axis, placement in constraints.items())}"'.replace("S(1", "S(0")
    }
    proof = plan.verify()
    assert proof.dropout
    assert proof.ok, str(proof)


@pytest.mark.slow
def test_what_leaves_the_program_is_not_zigzag() -> None:
    """Breaks if a user gets logits, or a parameter or its gradient is stored, in an order that DTensor cannot say."""
    plan = plan_of({"dp": 2, "cp": 2}, {"dp": DDP, "cp": RING}, pins(cp=ZIGZAG), logits=True)
    program = plan.program
    assert program is not None and program.placement is not None
    placement = program.placement
    assert placement.inputs["ids"][1] == placement.inputs["labels"][1] == ZIGZAG
    stored = [s for layout in placement.parameters.values() for s in (layout.stored, layout.compute, layout.gradient)]
    stored += [placement.values[(ref.call, ref.index)] for ref in program.outputs]
    assert not any(isinstance(p, Shard) and p.zigzag for sharding in stored for p in sharding)
    hidden = [placement.values[(call, 0)][1] for call, each in enumerate(program.calls) if each.region == "block"]
    assert hidden == [ZIGZAG] * 2
    moved = re.findall(r"= comm.all_to_all\(logits, .*from_outer=2, from_zigzag=True\)", plan.source)
    assert len(moved) == 1, "the move of the logits is part of the plan"
    assert plan.verify().ok
    with pytest.raises(AutoparError, match=r"logits cannot be S\(1, outer=2, zigzag\) on cp"):
        plan_of({"cp": 2}, {"cp": RING}, (pin("logits", cp=ZIGZAG),), logits=True)
    with pytest.raises(AutoparError, match=r"position cannot be S\(0, outer=2, zigzag\) on cp"):
        plan_of({"cp": 2}, {"cp": RING}, (pin("position", cp=Shard(0, 2, True)),))


@pytest.mark.moderate
def test_a_plan_file_keeps_it() -> None:
    """Breaks if a plan that was saved comes back with other shardings."""
    plan = plan_of({"cp": 2}, {"cp": RING}, pins(cp=ZIGZAG))
    assert plan.program is not None
    made = decisions.Decisions.of(plan.program)
    data = json.loads(json.dumps(decisions.to_data(made, ("cp",))))
    read = decisions.from_data(data, ("cp",))
    assert read == made
    assert any(choice.zigzag for nodes in read.operators.values() for (choice,) in nodes.values())


# -- hints


@lru_cache
def differentiated() -> Program:
    return differentiate(outline(capture(Places(), batch_of(4))))


@pytest.mark.moderate
def test_only_axes_that_ask_for_it_are_offered_zigzag() -> None:
    """Breaks if plans of other strategies, or their search, change."""
    mesh = Mesh({"dp": 2, "cp": 2}, hardware="cpu")
    plain, turned = (
        annotate(differentiated(), mesh=mesh),
        annotate(differentiated(), mesh=mesh, zigzag=frozenset({"cp"})),
    )
    for region, other in zip(plain.regions, turned.regions, strict=True):
        assert not any(region.zigzags.values())
        assert region.hints == other.hints
        for name, options in region.options.items():
            assert set(options.strategies) <= set(other.options[name].strategies)
            assert not any(choice.zigzag for s in options.strategies for choice in s.choices)
            assert not any(s.choices[0].zigzag for s in other.options[name].strategies)
        offered = {
            str(s.choices[1])
            for name, (call, _) in other.ops.items()
            for s in other.options[name].strategies
            if call.name == "autopar.linear.default" and s.choices[1].zigzag
        }
        # All rows of the batch, or the half of them that dp leaves.
        assert offered == {"block": {"8~_0", "4~_0"}, "epilogue": {"2~_1"}}.get(region.name, set())
    block = turned.region("block")
    found = {counts for hints in block.zigzags.values() for counts in hints.values()}
    assert found == {(2,), (8,)}, "two stripes of s, eight of (b s) with four rows"


def test_values_between_calls_and_inputs_may_be_zigzag() -> None:
    """Breaks if the hidden state has to be moved at the border of every block."""
    program = annotate(differentiated(), mesh=Mesh({"cp": 2}, hardware="cpu"), zigzag=frozenset({"cp"}))
    known_ = value_classes(program)
    for key in ("in", "block", 0), ("gin", "block", 0), ("program", "ids", 0), ("program", "labels", 0):
        ports = [each for each in known_.members[known_.of[key]] if each[0] in ("in", "out", "gin", "gout")]
        hints = []
        for kind, name, index in ports:
            region = program.region(name)
            holders = [node.name for node in region.graph.nodes if node.op == "placeholder"]
            label = holders[len(region.slots) + index] if kind == "in" else f"{kind}{index}"
            hints.append(region.zigzags.get(label, {}).get("1"))
        assert (2,) in hints, key
    type_ = program.region("block").inputs[0].type
    assert (ZIGZAG,) in layouts_of(type_, (2,), {}, zigzags={0: {"1": (2,)}})
    assert (ZIGZAG,) not in layouts_of(type_, (3,), {}, zigzags={0: {"1": (2,)}})


# -- rules


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


IDS = torch.randint(0, 8, (4, 8), generator=torch.Generator().manual_seed(0))
RULES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "pointwise": (torch.ops.aten.add.Tensor, (random(4, 8, 2), random(8, 1)), {}),
    "b s -> (b s)": (torch.ops.aten.view.default, (random(4, 8, 2), [32, 2]), {}),
    "(b s) -> b s": (torch.ops.aten.view.default, (random(32, 2), [4, 8, 2]), {}),
    "linear": (torch.ops.autopar.linear.default, (random(4, 8, 6), random(8, 6)), {}),
    "norm": (torch.ops.aten.native_layer_norm.default, (random(4, 8, 6), [6], random(6), random(6), 1e-5), {}),
    "embedding": (torch.ops.autopar.embedding.default, (random(8, 6), IDS), {}),
    "embedding_grad": (torch.ops.autopar.embedding_grad.default, (random(4, 8, 6), IDS, 8), {}),
    "sum_exp": (torch.ops.autopar.sum_exp.default, (random(4, 8, 8), random(4, 8)), {}),
    "take_label": (torch.ops.autopar.take_label.default, (random(4, 8, 8), IDS), {}),
    "cross_entropy_grad": (
        torch.ops.autopar.cross_entropy_grad.default,
        (random(4, 8), random(4, 8, 8), IDS, random(4, 8)),
        {},
    ),
    "dropout": (torch.ops.autopar.dropout.default, (random(4, 8, 6), 0.4, torch.tensor(5), 3, [], [4, 8, 6]), {}),
    "starts": (torch.ops.autopar.weigh_places.default, (random(4, 8, 2),), {}),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_hold_zigzag_on_two_axes(name: str) -> None:
    """Breaks if what several axes leave of a zigzag factor is not what positions, starts and stripes say."""
    target, args, kwargs = RULES[name]
    rule = rule_for(op_call(target, args, kwargs, run(target, args, kwargs)))
    stripes = {factor.name: (2, 4) for factor in rule.factors}
    assert verify_rule(target, args, kwargs, rule, outers=stripes, zigzags=stripes, num_pairs=80) == []
    contiguous = {name for _, name in rule.offset_args}
    offered = {choice.factor for choice in axis_choices(rule, 2, zigzags=stripes) if choice.zigzag}
    assert offered == {f.name for f in rule.factors if rule.can_split(f.name) and f.size % 4 == 0} - contiguous


def test_an_operator_that_is_told_wrong_starts_is_found_out() -> None:
    """Breaks if the proof of rules does not see where runs begin."""
    args = (random(2, 8, 2),)
    rule = rule_for(op_call(torch.ops.autopar.weigh_places.default, args, {}, args[0]))
    wrong = replace(rule, starts_args=())
    failures = verify_rule(torch.ops.autopar.weigh_places.default, args, {}, wrong, zigzags={"s": (2,)}, num_pairs=0)
    assert any("2~s" in failure and "differs" in failure for failure in failures)
    assert torch.equal(weigh_places(args[0], starts=[0]), weigh_places(args[0]))
    assert ops.starts(8, (1, 2, 2, True)) == [2, 4]
    assert FEATURES % 2 == VOCABULARY % 2 == 0
