"""Cost functions against the literature's closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import COLLECTIVE_KINDS, collective_bytes, collective_time_s, compute_time_s
from autopar.hardware import Link, load

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)


def test_bytes_of_ddp_and_zero3() -> None:
    """Breaks if ddp stops sending 2Ψ(n−1)/n a rank, or zero3 3Ψ(n−1)/n (Rajbhandari et al. 2020)."""
    psi, n = 1024, 8
    assert collective_bytes("all_reduce", psi, n) == 2 * psi * (n - 1) / n
    zero3 = 2 * collective_bytes("all_gather", psi, n) + collective_bytes("reduce_scatter", psi, n)
    assert zero3 == 3 * psi * (n - 1) / n
    assert collective_bytes("permute", psi, n) == psi


@given(st.sampled_from(COLLECTIVE_KINDS), st.integers(0, 10**9), st.integers(1, 512))
def test_time_is_at_least_bytes_over_bandwidth(kind: str, num_bytes: int, n: int) -> None:
    """Breaks if a collective is priced below its wire time, costs something for one rank, or a latency is negative."""
    time_s = collective_time_s(kind, num_bytes, n, LINK, launch_s=1e-5)  # type: ignore[arg-type]
    if n == 1:
        assert time_s == 0
    else:
        assert time_s >= 1e-5 + LINK.latency_s + collective_bytes(kind, num_bytes, n) / LINK.bandwidth_bytes_per_s  # type: ignore[arg-type]


@given(st.integers(1, 10**9), st.integers(2, 512))
def test_all_reduce_is_never_dearer_than_its_two_halves(num_bytes: int, n: int) -> None:
    """Breaks if the solver could gain by splitting an all-reduce into reduce-scatter and all-gather on the spot."""
    halves = sum(collective_time_s(kind, num_bytes, n, LINK, 0.0) for kind in ("reduce_scatter", "all_gather"))  # type: ignore[arg-type]
    assert collective_time_s("all_reduce", num_bytes, n, LINK, 0.0) <= halves * (1 + 1e-9)


def test_small_all_reduce_takes_the_tree() -> None:
    """Breaks if 256 ranks pay 510 ring steps for a scalar."""
    assert collective_time_s("all_reduce", 4, 256, LINK, 0.0) == pytest.approx(16e-6, rel=1e-2)
    big = 10**9
    ring_s = 2 * 255 * 1e-6 + 2 * big * 255 / 256 / 1e9
    assert collective_time_s("all_reduce", big, 256, LINK, 0.0) == pytest.approx(ring_s)


def test_all_to_all_gets_one_wire() -> None:
    """Breaks if an all-to-all between nodes is priced at the bandwidth that only a ring gets."""
    link = Link(bandwidth_bytes_per_s=8e9, latency_s=0.0, wire_bandwidth_bytes_per_s=1e9)
    assert collective_time_s("all_to_all", 16e9, 16, link, 0.0) == pytest.approx(15)
    assert collective_time_s("all_gather", 16e9, 16, link, 0.0) == pytest.approx(15 / 8)


def test_bad_arguments() -> None:
    """Breaks if an unknown collective or an empty group is priced as something."""
    with pytest.raises(ValueError, match="'gather'"):
        collective_bytes("gather", 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one rank"):
        collective_bytes("all_reduce", 1, 0)


def test_roofline() -> None:
    """Breaks if a large product is priced by its bytes, an addition by its FLOPs, or a view at all."""
    h100 = load("h100")
    n = 8192
    matmul_s = compute_time_s(2 * n**3, 3 * 2 * n * n, torch.bfloat16, "matmul", h100)
    assert matmul_s == pytest.approx(2 * n**3 / (989.4e12 * 0.70) + h100.launch_overhead_s)
    add_s = compute_time_s(n * n, 3 * 2 * n * n, "bfloat16", "elementwise", h100)
    assert add_s == pytest.approx(3 * 2 * n * n / (3.35e12 * 0.90) + h100.launch_overhead_s)
    assert compute_time_s(0, 0, "bfloat16", "elementwise", h100) == h100.launch_overhead_s
    assert compute_time_s(0, 10**9, "bfloat16", "view", h100) == 0
