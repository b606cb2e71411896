"""What a token of `generate()` is priced by: weights and caches that are read, small messages, launches."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar.operators  # noqa: F401 (registers them)
from autopar.cost.local_work import local_work
from autopar.cost.roofline import Work, collective_time_s, compute_time_s
from autopar.ir.choices import NONE, Choice, shardings
from autopar.ir.op_call import op_call
from autopar.ir.region import NodeStrategy
from autopar.machine import hardware_data, profiles
from autopar.operators.rules.lookup import rule_for

OWN, ATEN = torch.ops.autopar, torch.ops.aten
GPUS = ("h100", "a100", "h200", "b200", "mi300x", "l40s")


def work_of(target: Any, *args: Any, in_place: bool = False, choice: Choice = NONE, **kwargs: Any) -> Work:
    """Of an operator on meta tensors, of one rank of two."""
    call = op_call(target, list(args), kwargs, target(*args, **kwargs))
    rule = rule_for(call)
    placed = shardings(rule, (choice,), (2,))
    assert placed is not None
    split = 2 if choice.kind == "factor" else 1
    return local_work(call, rule, NodeStrategy((choice,), *placed), (2,), in_place=in_place)(rule.flops / split)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_product_of_few_rows_takes_what_its_weights_take(gpu: str) -> None:
    """Breaks if one row is priced as a tile that keeps a few cores busy: a token of one sequence then takes longer than
    one of eight.
    """
    hardware = profiles.load(gpu)
    before = 0.0
    for rows in (1, 2, 8, 16, 32):
        moved = 2.0 * (rows * 4096 + 14336 * 4096 + rows * 14336)
        work = Work("matmul", "bfloat16", 2.0 * rows * 4096 * 14336, moved, (rows, 14336, 4096, 1))
        seconds = compute_time_s(work, hardware, in_step=True)
        weights_s = 2 * 14336 * 4096 / hardware.memory_bytes_per_s(moved)
        assert weights_s < seconds - hardware.launch_overhead_s < 1.05 * weights_s
        assert seconds >= before
        before = seconds


MEASURED = {
    512: (3.7, 4.8, 5.9), 4096: (3.9, 3.7, 5.7), 32768: (4.5, 4.8, 7.8), 262144: (7.9, 13.9, 16.7),
    524288: (12.5, 20.2, 22.1),
}  # fmt: skip
"""Microseconds of an all-reduce of so many bytes over 2, 4 and 8 H100: sgl-project/sglang, pull request 2904."""


def test_all_reduces_by_peers_memory_are_those_that_were_measured() -> None:
    """Breaks if the bytes of one shot or of two, the meeting, or the other ranks are left out; without such kernels
    NCCL's are taken.
    """
    plain, engine = profiles.load("h100"), profiles.load("h100:engine")
    off = []
    for size, row in MEASURED.items():
        for ranks, microseconds in zip((2, 4, 8), row, strict=True):
            found = collective_time_s("all_reduce", size, ranks, engine.node, engine.collective_launch_s)
            off.append(abs(1e6 * found / microseconds - 1))
            assert found < collective_time_s("all_reduce", size, ranks, plain.node, plain.collective_launch_s)
    assert statistics.median(off) < 0.06 and max(off) < 0.26
    large = [collective_time_s("all_reduce", 1e9, 8, each.node, 0.0) for each in (plain, engine)]
    assert large[0] == large[1]
    assert engine.network == plain.network and not engine.network.by_peers


def test_a_token_reads_the_experts_that_are_chosen() -> None:
    """Breaks if all experts' weights are read for a token that two of eight serve, or the two that serve many."""
    weights = 8 * (24 * 12 + 12 * 12) * 2

    def moved(tokens: int) -> float:
        numbers = empty(tokens, 2, dtype=torch.int64)
        given = (empty(tokens, 12), numbers, empty(tokens, 2), empty(8, 24, 12), empty(8, 12, 12))
        own = 2 * (2 * tokens * 12 + 2 * tokens) + 8 * 2 * tokens
        return work_of(OWN.experts.default, *given, act="mul(silu(gate), up)").moved_bytes - own

    assert moved(1) == pytest.approx(weights * 2 / 8)
    assert moved(2) == pytest.approx(weights * (1 - (6 / 8) ** 2))
    assert moved(400) == pytest.approx(weights)


@pytest.mark.parametrize("gpu", ["h100", "a100"])
@pytest.mark.parametrize(("batch", "keys"), [(1, 512), (1, 8192), (64, 4096)])
def test_attention_of_a_token_takes_what_its_cache_takes(gpu: str, batch: int, keys: int) -> None:
    """Breaks if so few queries are priced as leaving cores idle, as kernels do that cut queries alone."""
    hardware = profiles.load(gpu)
    q, cache = empty(batch, 32, 1, 128), empty(batch, 8, keys, 128)
    work = work_of(OWN.attention.default, q, cache, cache, scale=0.1)
    assert work.few_rows == 4
    cache_s = 2 * 2 * batch * 8 * keys * 128 / hardware.memory_bytes_per_s(work.moved_bytes)
    seconds = compute_time_s(work, hardware) - hardware.launch_overhead_s
    assert cache_s < seconds < 1.1 * cache_s
    many = work_of(OWN.attention.default, empty(batch, 32, 64, 128), cache, cache, scale=0.1)
    assert many.few_rows == 0


def test_attention_that_goes_head_by_head_reads_keys_again() -> None:
    """Breaks if kernels without grouped heads are priced as others, read from memory what the shared cache has, or a
    head that has keys of its own is charged for them twice.
    """
    own = profiles.load("a100")
    by_head = replace(own, head_by_head=True)
    cache = empty(16, 8, 4096, 128)
    grouped = work_of(OWN.attention.default, empty(16, 64, 1, 128), cache, cache, scale=0.1)
    again_s = 7 * grouped.moved_bytes / 5.4e12
    alone_s = grouped.moved_bytes / own.memory_bytes_per_s(grouped.moved_bytes)
    seconds = compute_time_s(grouped, by_head) - by_head.launch_overhead_s
    assert seconds == pytest.approx(alone_s + again_s, rel=1e-12)
    unknown = replace(by_head, cache_bandwidth_bytes_per_s=None)
    assert compute_time_s(grouped, unknown) - own.launch_overhead_s == pytest.approx(8 * alone_s, rel=1e-12)
    single = work_of(OWN.attention.default, empty(16, 8, 1, 128), cache, cache, scale=0.1)
    assert compute_time_s(single, by_head) == compute_time_s(single, own)
    assert hardware_data.from_data(hardware_data.to_data(by_head)) == by_head


def test_a_tile_of_a_few_queries_is_computed_whole() -> None:
    """Breaks if the rows of a tile are not the profile's: of eight rows an H200 waits for its memory, of 64 for
    its cores.
    """
    wide = profiles.load("h200")
    narrow = replace(wide, attention_rows=8)
    cache = empty(140, 4, 5120, 128)
    work = work_of(OWN.attention.default, empty(140, 32, 1, 128), cache, cache, scale=0.1)
    work = replace(work, moved_bytes=work.moved_bytes / 4)  # codes of four bits
    memory_s = work.moved_bytes / wide.memory_bytes_per_s(work.moved_bytes)
    assert compute_time_s(work, narrow) - narrow.launch_overhead_s == pytest.approx(memory_s, rel=1e-12)
    assert compute_time_s(work, wide) > 1.3 * memory_s


def test_attention_to_pieces_of_a_cache_is_of_the_type_that_it_reads() -> None:
    """Breaks if a prompt whose cache lies in pieces is priced by the type of the sums that are merged, float32: at the
    speed of cores that it does not use.
    """
    q, k = empty(1, 8, 4096, 128), empty(1, 2, 4096, 128)
    pieces = work_of(OWN.attention_pieces.default, q, k, k, count=2, scale=0.1, group=4, choice=Choice("factor", "p"))
    assert pieces.dtype == torch.bfloat16 and pieces.dims == (8 * 4096, 2048, 128, 1.0)


def test_graphs_write_a_state_in_place() -> None:
    """Breaks if a cache that a graph writes one position of is copied, or one that is not in a graph is not."""
    cache, at, new = empty(4, 8, 1024, 128), torch.empty(1, device="meta", dtype=torch.int64), empty(4, 8, 1, 128)
    copied, written = (work_of(ATEN.index_copy.default, cache, 2, at, new, in_place=each) for each in (False, True))
    assert written.moved_bytes == 2 * 2 * 4 * 8 * 128
    assert copied.moved_bytes > 2 * 2 * 4 * 8 * 1024 * 128


def test_graphs_and_engines_are_profiles_of_their_own() -> None:
    """Breaks if a graph's kernels cost what launched ones do, a CPU gets graphs, or a plan's file forgets that."""
    plain, engine = profiles.load("h100"), profiles.load("h100:engine")
    graphs = plain.in_graphs()
    assert graphs.launch_overhead_s == plain.graph_kernel_s and graphs.graphs
    assert graphs.launch_overhead_s < plain.launch_overhead_s
    assert engine == engine.as_engine() and engine.compiled and engine.graphs and engine.node.by_peers
    for each in (graphs, engine, profiles.load("h100:ethernet-25:engine")):
        assert hardware_data.from_data(hardware_data.to_data(each)) == each
    cpu = profiles.load("cpu")
    assert cpu.in_graphs() == cpu
    assert replace(engine, name=plain.name) != plain
