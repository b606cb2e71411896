"""Buckets: every tensor in one, none too large, the order of the slots kept; overlap only where memory allows."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.collectives import collectives
from autopar.cost.memory.buckets import local_bytes, shared_names
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.program import Program
from autopar.ir.region import Bucket, Call
from autopar.ir.sharding import PARTIAL, REPLICATE, Partial, Shard, Sharding, redistribution_steps
from autopar.passes.emission.parameters import _arguments_of
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import BUCKET_BYTES, overlap
from autopar.passes.place import place
from autopar.runtime.layout import assemble, shard
from autopar.runtime.simulated_comm import SimulatedMesh
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import resolve
from tests.unit.traced import annotated, named

CASES = [
    ("llama", "dp=2,tp=2", "product"), ("gpt2", "dp=4", "zero3"), ("gpt2", "dp=2,tp=2", "dp=zero1,tp=tensor"),
    ("mlp", "node=2,dp=2", "hsdp"), ("cnn", "dp=4", "zero2"), ("mlp", "dp=2", "ddp"),
    ("bert", "tp=2", "tensor+sequence"),
]  # fmt: skip
_cache: dict[tuple[str, str, str], tuple[Program, tuple[AxisStrategy, ...]]] = {}


def lowered(case: tuple[str, str, str]) -> tuple[Program, tuple[AxisStrategy, ...]]:
    """A program before `overlap`."""
    if case not in _cache:
        name, mesh, strategy = case
        program = annotated(name, mesh)
        assert program.mesh is not None
        strategies = resolve(named(strategy), program.mesh)
        _cache[case] = insert_collectives(place(program, strategies=strategies)), strategies
    return _cache[case]


def sizes(program: Program, call: Call, bucket: Bucket, which: str) -> list[int]:
    assert program.placement is not None
    found = []
    for move in bucket.moves:
        variable = program.variable(call.slots[move.slot])
        layout = program.placement.parameters[variable.name]
        sharding = layout.compute if which != "reduce" else layout.gradient
        found.append(local_bytes(program, variable, sharding, variable.type.dtype))
    return found


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.sampled_from([1, 300, 4096, 20_000, 100_000, BUCKET_BYTES]))
def test_every_tensor_is_in_one_bucket(case: tuple[str, str, str], limit: int) -> None:
    """Breaks if a slot is lost, moved twice, shares a bucket with other steps, or a bucket grows beyond the limit."""
    before, strategies = lowered(case)
    program = overlap(before, strategies=strategies, bucket_bytes=limit)
    many = shared_names(program)
    gathered_once = {shared.name for shared in program.shared if shared.gather is not None}
    assert {shared.name for shared in program.shared} == many
    for region in program.regions:
        _, call = next(program.calls_of(region.name))
        variables = [program.variable(name) for name in call.slots]
        moved = {
            which: Counter(m.slot for b in buckets for m in b.moves) for which, buckets in region.transfers.items()
        }
        own = {i for i, v in enumerate(variables) if v.name not in gathered_once}
        assert moved["gather"] == Counter(own)
        assert set(moved["gather_for_backward"]) <= own and set(moved["gather_for_backward"].values()) <= {1}
        trained = {i for i, slot in enumerate(region.slots) if slot.trainable and variables[i].name not in many}
        assert moved["reduce"] == Counter(trained)
        for which, buckets in region.transfers.items():
            for bucket in buckets:
                for move in bucket.moves:
                    assert tuple((step.kind, step.axis) for step in move.steps) == bucket.chain
                assert len({variables[move.slot].type.dtype for move in bucket.moves}) == 1
                assert [m.slot for m in bucket.moves] == sorted(m.slot for m in bucket.moves)
                each = sizes(program, call, bucket, which)
                assert not bucket.chain or len(each) == 1 or sum(each) <= limit, (which, each)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.sampled_from([1, 4096, 20_000]))
def test_buckets_change_no_byte(case: tuple[str, str, str], limit: int) -> None:
    """Breaks if what is sent depends on how it is packed."""
    before, strategies = lowered(case)
    totals = []
    for size in (limit, BUCKET_BYTES):
        total: Counter[tuple[str, str, str]] = Counter()
        for row in collectives(overlap(before, strategies=strategies, bucket_bytes=size)):
            total[row.kind, row.axis, row.phase] += row.bytes_sent  # type: ignore[assignment]
        totals.append(total)
    assert totals[0] == totals[1]


def test_what_does_not_fit_does_not_overlap() -> None:
    """Breaks if prefetched parameters push a rank over its memory limit, or nobody is told that they were not."""
    before, strategies = lowered(CASES[0])
    assert before.result is not None
    free = overlap(before, strategies=strategies)
    assert free.overlap is not None and free.overlap.prefetch and free.overlap.extra_bytes > 0
    assert not any("overlaps" in note for note in free.notes)
    peak = int(before.result.peak_bytes)
    just = overlap(before, strategies=strategies, memory_limit_bytes=peak + free.overlap.extra_bytes)
    assert just.overlap == free.overlap
    tight = overlap(before, strategies=strategies, memory_limit_bytes=peak + free.overlap.extra_bytes - 1)
    assert tight.overlap == replace(free.overlap, prefetch=False, extra_bytes=0)
    assert any(note.startswith("nothing overlaps: ") for note in tight.notes)


def test_what_fits_as_the_step_is_walked_overlaps() -> None:
    """Breaks if what is in flight is counted beside a peak at which it is not, and nothing overlaps for its sake."""
    before, strategies = lowered(CASES[1])
    assert before.result is not None
    free = overlap(before, strategies=strategies)
    walked = step_peak_bytes(free)
    assert free.overlap is not None and walked < before.result.peak_bytes + free.overlap.extra_bytes
    just = overlap(before, strategies=strategies, memory_limit_bytes=walked, peak_bytes=step_peak_bytes)
    assert just.overlap == free.overlap
    tight = overlap(before, strategies=strategies, memory_limit_bytes=walked - 1, peak_bytes=step_peak_bytes)
    assert tight.overlap == replace(free.overlap, prefetch=False, extra_bytes=0)


@pytest.mark.parametrize(("strategy", "at_end"), [("zero1", True), ("zero2", False)])
def test_only_zero1_waits_for_the_end(strategy: str, at_end: bool) -> None:
    """Breaks if zero1 and zero2, which differ in nothing else, become one."""
    before, strategies = lowered(("mlp", "dp=2", strategy))
    found = overlap(before, strategies=strategies).overlap
    assert found is not None and found.at_end == at_end


LAYOUTS = (REPLICATE, Shard(0), Shard(1), Shard(0, 3), Shard(1, 2), Shard(0, 2))


@pytest.mark.parametrize("source", itertools.product((*LAYOUTS, PARTIAL), repeat=2), ids=str)
def test_a_buckets_text_is_its_steps(source: Sharding) -> None:
    """Breaks if what a bucket is written with (dims, stripes, what was and what will be) moves a tensor elsewhere."""
    axes, sizes, whole = ("dp", "tp"), (2, 2), torch.arange(24.0 * 24).reshape(24, 24)
    mesh = SimulatedMesh(axes, sizes)
    count = 2 ** sum(isinstance(each, Partial) for each in source)
    for target in itertools.product(LAYOUTS, repeat=2):
        steps = redistribution_steps(source, target, sizes)
        assert steps is not None
        text = ", ".join(f"{step.kind} {axes[step.axis]}" for step in steps)
        given = [ast.literal_eval(argument) for argument in _arguments_of(steps)]
        if not steps:
            continue
        pieces = mesh.run(
            lambda comm, text=text, given=given: (
                comm.transfers().bucket(text, {"x": (shard(whole, source, comm), *given)}).wait()["x"]
            )
        )
        assert torch.equal(assemble(pieces, target, sizes), whole * count), text
