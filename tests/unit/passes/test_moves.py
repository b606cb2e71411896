"""The table of redistributions against the steps, one pair at a time."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.roofline import collective_time_s
from autopar.ir.sharding import Partial, Replicate, Shard, Sharding, num_pieces, redistribution_steps
from autopar.machine.mesh import Mesh
from autopar.passes.placement.moves import Moves, Redistribution, moves_on
from autopar.strategies.names import ANY_COLLECTIVE

ALL = (1 << 5) - 1
PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 2), st.sampled_from([1, 1, 1, 2, 3])),
    st.builds(Shard, st.integers(0, 2), st.sampled_from([2, 4]), st.just(True)),
    st.sampled_from([Partial(), Partial("max")]),
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Mesh, tuple[Sharding, ...], tuple[Sharding, ...], int]:
    """A mesh of 1 to 4 axes, two lists of layouts on it, and the bytes of a tensor."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 8]), min_size=1, max_size=4))
    lists = [tuple(tuple(draw(PLACEMENTS) for _ in sizes) for _ in range(draw(st.integers(1, 4)))) for _ in range(2)]
    mesh = Mesh({f"a{i}": size for i, size in enumerate(sizes)}, hardware=draw(st.sampled_from(["cpu", "h100"])))
    return mesh, lists[0], lists[1], draw(st.sampled_from([8, 4096, 1 << 20, 1 << 30]))


def step_by_step(
    mesh: Mesh, source: Sharding, target: Sharding, num_bytes: float
) -> tuple[float, set[tuple[str, int]]]:
    """Seconds of all collectives, each handling its local operand or gathered result; what kinds each axis uses."""
    steps = redistribution_steps(source, target, mesh.sizes)
    if steps is None:
        return math.inf, set()
    now, seconds = list(source), 0.0
    for step in steps:
        handled = num_bytes / num_pieces(tuple(now), mesh.sizes)
        if step.kind == "all_gather":
            handled *= mesh.sizes[step.axis]
        if step.kind != "slice":
            link = mesh.link(mesh.axis_names[step.axis])
            size = mesh.sizes[step.axis]
            seconds += collective_time_s(step.kind, handled, size, link, mesh.hardware.collective_launch_s)
        now[step.axis] = step.placement
    return seconds, {(step.kind, step.axis) for step in steps}


@pytest.mark.moderate
@settings(max_examples=200, deadline=None, derandomize=True)
@given(tables())
def test_the_table_is_the_sum_over_the_steps(
    table: tuple[Mesh, tuple[Sharding, ...], tuple[Sharding, ...], int],
) -> None:
    """Breaks if patterns mix pairs up, or a step is priced for another operand than it moves."""
    mesh, sources, targets, num_bytes = table
    found = Moves(mesh).seconds(num_bytes, sources, targets, [ALL] * len(mesh.sizes))
    for i, j in itertools.product(range(len(sources)), range(len(targets))):
        wanted, _ = step_by_step(mesh, sources[i], targets[j], num_bytes)
        assert found[i, j] == pytest.approx(wanted, rel=1e-9), (sources[i], targets[j])


@pytest.mark.moderate
@settings(max_examples=100, deadline=None, derandomize=True)
@given(tables(), st.sets(st.sampled_from(sorted(ANY_COLLECTIVE))))
def test_what_an_axis_may_not_use_costs_infinity(
    table: tuple[Mesh, tuple[Sharding, ...], tuple[Sharding, ...], int], kinds: set[str]
) -> None:
    """Breaks if a strategy's collectives are not what its moves are made of."""
    mesh, sources, targets, num_bytes = table
    order = ("slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    bits = sum(1 << order.index(kind) for kind in kinds)
    found = Moves(mesh).seconds(num_bytes, sources, targets, [bits] * len(mesh.sizes))
    for i, j in itertools.product(range(len(sources)), range(len(targets))):
        wanted, used = step_by_step(mesh, sources[i], targets[j], num_bytes)
        assert np.isfinite(found[i, j]) == (math.isfinite(wanted) and {kind for kind, _ in used} <= kinds)


def test_zigzag_costs_what_stripes_cost_and_is_not_the_same() -> None:
    """Breaks if a plan is bent by the price of a move that sends the same bytes, or moves nothing where it should."""
    mesh = small_mesh()
    zigzag, stripes, plain = Shard(1, 4, True), Shard(1, 4), Shard(1)
    others = (Replicate(), Partial(), Shard(0), Shard(2), plain)
    for other in others:
        pairs = [((each, plain), (other, plain)) for each in (zigzag, stripes)]
        there = [Moves(mesh).seconds(1 << 20, (a,), (b,), [ALL] * 2) for a, b in pairs]
        back = [Moves(mesh).seconds(1 << 20, (b,), (a,), [ALL] * 2) for a, b in pairs]
        assert there[0] == there[1] and back[0] == back[1]
    between = Moves(mesh).seconds(1 << 20, ((zigzag, plain),), ((stripes, plain),), [ALL] * 2)
    assert 0 < between < np.inf
    assert Moves(mesh).seconds(1 << 20, ((zigzag, plain),), ((zigzag, plain),), [ALL] * 2) == 0


@lru_cache(maxsize=1)
def small_mesh() -> Mesh:
    return Mesh({"a": 2, "b": 2}, hardware="cpu")


def test_tables_are_shared_and_latency_can_be_left_out() -> None:
    """Breaks if named strategies are compared by latency, or if problems or ways to count have tables of their own."""
    mesh = small_mesh()
    assert moves_on(mesh, True) is moves_on(Mesh({"a": 2, "b": 2}, hardware="cpu"), True)
    layouts = ((Shard(0), Replicate()),), ((Replicate(), Replicate()),)
    for latency in (True, False):
        seconds = Moves(mesh, latency).seconds(0.0, *layouts, [ALL, ALL])
        assert (seconds[0, 0] > 0) == latency
    assert moves_on(mesh, True)._shapes is moves_on(mesh, False)._shapes
    assert Redistribution(mesh, [frozenset({"slice"})] * 2)._moves is moves_on(mesh, True)
