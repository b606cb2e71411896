"""Cost functions against the literature's closed forms."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.roofline import (
    COLLECTIVE_KINDS,
    Work,
    collective_bytes,
    collective_time_s,
    compute_time_s,
    optimizer_time_s,
)
from autopar.machine import profiles
from autopar.machine.curves import AttentionCurve, MatmulCurve
from autopar.machine.hardware import Hardware, Link
from autopar.machine.links import Measured

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
    halves = sum(collective_time_s(kind, num_bytes, n, LINK, 0.0) for kind in ("reduce_scatter", "all_gather"))
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


def test_an_all_to_all_leaves_a_node_with_what_others_get() -> None:
    """Breaks if what stays in a node takes the network's wire, or does not travel at the same time: 16 ranks, 8 a node,
    send 15 parts each, 8 of them to the other node.
    """
    link = Link(8e9, 0.0, wire_bandwidth_bytes_per_s=1e9, members=8, inside_bandwidth_bytes_per_s=10e9)
    assert collective_time_s("all_to_all", 16e9, 16, link, 0.0) == pytest.approx(8)
    slow = replace(link, inside_bandwidth_bytes_per_s=0.5e9)
    assert collective_time_s("all_to_all", 16e9, 16, slow, 0.0) == pytest.approx(14)
    own = replace(link, measured=(Measured("all_to_all", 0.0, 2e9),))
    assert collective_time_s("all_to_all", 16e9, 16, own, 0.0) == pytest.approx(4)
    for kind in ("all_gather", "permute"):
        assert collective_time_s(kind, 16e9, 16, link, 0.0) == collective_time_s(
            kind, 16e9, 16, replace(link, members=1), 0.0
        )


def test_bytes_around_a_product_wait_for_it() -> None:
    """Breaks if what kernels before and behind a product move hides beside it."""
    h100 = profiles.load("h100")
    work = Work("matmul", "bfloat16", 1e12, 1e6, (4096, 4096, 4096, 1))
    more = compute_time_s(replace(work, around_bytes=1e9), h100) - compute_time_s(work, h100)
    assert more == pytest.approx(1e9 / h100.memory_bytes_per_s(1e9))


def test_bad_arguments() -> None:
    """Breaks if an unknown collective or an empty group is priced as something."""
    with pytest.raises(ValueError, match="'gather'"):
        collective_bytes("gather", 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one rank"):
        collective_bytes("all_reduce", 1, 0)


def test_a_pair_has_one_wire_where_there_is_no_switch() -> None:
    """Breaks if two devices of a fully connected node are priced with the wires that lead to the others."""
    mesh = Link(bandwidth_bytes_per_s=7e9, latency_s=0.0, direct_bandwidth_bytes_per_s=1e9)
    assert collective_time_s("all_gather", 2e9, 2, mesh, 0.0) == pytest.approx(1.0)
    assert collective_time_s("all_gather", 8e9, 8, mesh, 0.0) == pytest.approx(1.0)
    assert collective_time_s("all_to_all", 4e9, 4, mesh, 0.0) == pytest.approx(1.0)
    assert collective_time_s("permute", 1e9, 8, mesh, 0.0) == pytest.approx(1.0)


def test_a_switch_sums_large_all_reduces() -> None:
    """Breaks if NVLS is charged where it is slower, to pairs, or for what is no sum; or is not charged at all."""
    h100 = profiles.load("h100")
    node, big = h100.node, 2**30
    assert collective_time_s("all_reduce", big, 8, node, 0.0) == pytest.approx(15e-6 + big / 275e9)
    plain = node.without_latency()
    for n, num_bytes in ((2, big), (8, 1024)):
        assert (
            collective_time_s("all_reduce", num_bytes, n, node, 0.0)
            < node.nvls_latency_s + num_bytes / 275e9 + (n == 2) * big
        )
        assert collective_time_s("all_reduce", num_bytes, n, plain, 0.0) == pytest.approx(
            2 * num_bytes * (n - 1) / n / node.bandwidth_bytes_per_s
        )
    assert collective_time_s("reduce_scatter", big, 8, node, 0.0) > big * 7 / 8 / 370e9
    # NCCL's published bus bandwidths (NVIDIA/nccl-tests issues 212, 272), within a few per cent.
    size = 4 * 2**30
    bus = 2 * 7 / 8 * size / collective_time_s("all_reduce", size, 8, node, h100.collective_launch_s)
    assert bus == pytest.approx(480e9, rel=0.02)
    bus = 7 / 8 * size / collective_time_s("all_gather", size, 8, node, h100.collective_launch_s)
    assert bus == pytest.approx(370e9, rel=0.02)


def test_a_measured_collective_has_its_own_line() -> None:
    """Breaks if what calibrate measured of one kind is not what that kind costs, or leaks into another."""
    link = Link(1e9, 1e-6, nvls_bandwidth_bytes_per_s=1e12, measured=(Measured("all_reduce", 1e-3, 5e8),))
    assert collective_time_s("all_reduce", 1e9, 4, link, 1e-2) == pytest.approx(1e-2 + 6e-3 + 3.0)
    assert collective_time_s("all_gather", 1e9, 4, link, 0.0) == pytest.approx(3e-6 + 0.75)
    assert collective_time_s("all_reduce", 1e9, 4, link.without_latency(), 0.0) == pytest.approx(1.5)


def test_a_link_survives_a_file() -> None:
    """Breaks if the link of a pipeline's plan, saved as JSON, comes back as another one, or can be no key."""
    for link in (LINK, profiles.load("h100").node, Link(1e9, 1e-6, measured=(Measured("permute", 1e-6, 2e9),))):
        again = Link(**json.loads(json.dumps(asdict(link))))
        assert again == link and hash(again) == hash(link)


def product(n: int, dtype: str = "bfloat16", num_bytes: int = 2) -> Work:
    return Work("matmul", dtype, 2 * n**3, 3 * num_bytes * n * n, (n, n, n, 1))


def test_roofline() -> None:
    """Breaks if a large product is priced by its bytes, an addition by its FLOPs, or a view at all."""
    h100 = profiles.load("h100")
    n = 8192
    curve = h100.matmul["bf16"]
    expected = 2 * n**3 / (989.4e12 * curve.efficiency) * curve.slowdown(n, n, n, 1) + h100.launch_overhead_s
    assert compute_time_s(product(n), h100) == pytest.approx(expected)
    assert 680e12 < 2 * n**3 / compute_time_s(product(n), h100) < 795e12
    add_s = compute_time_s(Work("elementwise", "bfloat16", n * n, 3 * 2 * n * n), h100)
    assert add_s == pytest.approx(3 * 2 * n * n / (3.35e12 * 0.90) + h100.launch_overhead_s)
    assert compute_time_s(Work("elementwise", "bfloat16", 0, 0), h100) == h100.launch_overhead_s
    assert compute_time_s(Work("view", "bfloat16", 0, 10**9), h100) == 0


@pytest.mark.parametrize(
    ("shape", "tflops"),
    [((2048, 2048, 2048), 1006), ((4096, 4096, 4096), 1532), ((4096, 8192, 8192), 1652), ((8192, 8192, 8192), 1610)],
)
def test_the_curve_of_products_follows_cublas(shape: tuple[int, int, int], tflops: float) -> None:
    """Breaks if the B200's curve leaves the published cuBLAS numbers (pyptx.dev/performance), measured back to back."""
    b200 = profiles.load("b200")
    m, n, k = shape
    work = Work("matmul", "bf16", 2 * m * n * k, 2 * (m * n + n * k + m * k), (m, n, k, 1))
    seconds = compute_time_s(work, b200) - b200.launch_overhead_s
    assert work.flops / seconds == pytest.approx(tflops * 1e12, rel=0.07)


@given(st.sampled_from(["h100", "a100", "b200", "v100", "cpu", "mi300x"]), st.integers(16, 8192))
def test_small_products_reach_less(name: str, n: int) -> None:
    """Breaks if an eighth of a product takes less than an eighth of the time: splitting would look better than free."""
    hardware = profiles.load(name)
    dtype = "fp16" if name == "v100" else "bf16"
    whole = Work("matmul", dtype, 2 * 8192 * 8192 * n, 0, (8192, n, 8192, 1))
    part = Work("matmul", dtype, 2 * 1024 * 8192 * n, 0, (1024, n, 8192, 1))
    assert compute_time_s(part, hardware) >= compute_time_s(whole, hardware) / 8 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kind", "seen", "head", "full", "tflops"),
    [
        ("attention", 2048, 128, 0.0, 319),
        ("attention", 4096, 128, 1.0, 368),
        ("attention", 512, 64, 1.0, 282),
        ("attention_backward", 4096, 128, 1.0, 310),
    ],
)
def test_attention_follows_the_papers(kind: str, seen: int, head: int, full: float, tflops: float) -> None:
    """Breaks if the H100's attention leaves FlashAttention-2's bars in FlashAttention-3's figures 5 and 6."""
    h100 = with_fields(profiles.load("h100"), plain_attention_s={})
    rows = 16_384 * 2048 / head
    work = Work(kind, "bfloat16", 1e15, 0, (rows, seen, head, full))
    assert work.flops / compute_time_s(work, h100) == pytest.approx(tflops * 1e12, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "seen", "full", "tflops"),
    [("attention", 2048, 0.0, 480), ("attention", 8192, 1.0, 630), ("attention_backward", 8192, 1.0, 545)],
)
def test_plain_attention_goes_to_the_faster_kernel(kind: str, seen: int, full: float, tflops: float) -> None:
    """Breaks if programs that run cuDNN's kernel are priced as FlashAttention-2, or what is masked as cuDNN's."""
    h100 = profiles.load("h100")
    rows = 16_384 * 2048 / 128
    plain, masked = (Work(kind, "bfloat16", 1e15, 0, (rows, seen, 128, full), variant=v) for v in ("", "masked"))
    assert plain.flops / compute_time_s(plain, h100) == pytest.approx(tflops * 1e12, rel=0.05)
    assert compute_time_s(masked, h100) > 1.3 * compute_time_s(plain, h100)


def test_an_operator_with_a_rate_of_its_own(tmp_path: object) -> None:
    """Breaks if a measured rate is not used, or is used for other operators."""
    cpu = profiles.load("cpu")
    mine = with_fields(cpu, rates={"gelu": 1e8})
    work = Work("elementwise", "float32", 1e8, 8e8, name="gelu")
    assert compute_time_s(work, mine) == pytest.approx(1.0 + mine.launch_overhead_s)
    other = Work("elementwise", "float32", 1e8, 8e8, name="add")
    assert compute_time_s(other, mine) == compute_time_s(other, with_fields(cpu, rates={}))


def with_fields(profile: Hardware, **fields: object) -> Hardware:
    from dataclasses import replace

    return replace(profile, **fields)  # type: ignore[arg-type]


def test_caches_make_small_tensors_faster() -> None:
    """Breaks if the memory's points are not those between which a size is interpolated, or a share is not a factor."""
    mine = with_fields(
        profiles.load("cpu"),
        memory_points=((1e3, 4e10), (1e5, 1e10)),
        memory_share={"reduction": 0.5},
        launch_overhead_s=1e-9,
    )
    for size, bandwidth in ((1.0, 4e10), (1e3, 4e10), (1e4, 2e10), (1e9, 1e10)):
        assert mine.memory_bytes_per_s(size) == pytest.approx(bandwidth)
        assert mine.memory_bytes_per_s(size, "reduction") == pytest.approx(bandwidth / 2)


def test_the_optimizer() -> None:
    """Breaks if an update is not 20 passes at the memory's speed, a measurement is not preferred, or nothing costs."""
    h100 = profiles.load("h100")
    expected = 20 * 4e9 / (3.35e12 * 0.90) + h100.launch_overhead_s
    assert optimizer_time_s(10**9, 4e9, h100) == pytest.approx(expected)
    measured = with_fields(h100, optimizer_s_per_byte=1e-9)
    assert optimizer_time_s(10**9, 4e9, measured) == pytest.approx(4.0 + h100.launch_overhead_s)
    assert optimizer_time_s(0, 0, h100) == 0
    hosted = with_fields(measured, optimizer_s_per_tensor=1e-4)
    assert optimizer_time_s(10**9, 4e9, hosted, 50) == pytest.approx(4.005 + h100.launch_overhead_s)


def test_what_the_host_takes_for_a_view() -> None:
    """Breaks if views cost nothing where the host is waited for, or anything where it runs ahead."""
    view = Work("view", "fp32", 0, 1e9, name="view")
    assert compute_time_s(view, profiles.load("h100")) == 0
    assert compute_time_s(view, with_fields(profiles.load("cpu"), view_s=4e-6)) == 4e-6


def test_attention_that_no_kernel_takes_has_curves_of_its_own() -> None:
    """Breaks if a soft-cap is priced as plain attention where it was measured, or has no price where it was not."""
    plain = AttentionCurve(((64, ((1.0, 0.5),)),))
    slow = AttentionCurve(((64, ((1.0, 0.1),)),))
    mine = with_fields(profiles.load("cpu"), attention={"fp32.forward": plain, "fp32.forward_softcap": slow})
    work = Work("attention", "fp32", 1e12, 1.0, (1024.0, 128.0, 64.0, 0.0), "attention")
    seconds = [compute_time_s(replace(work, variant=variant), mine) for variant in ("", "softcap", "bias")]
    assert seconds[1] == pytest.approx(5 * seconds[0], rel=1e-3) and seconds[2] == seconds[0]


def test_products_keep_a_part_of_their_speed_in_a_run() -> None:
    """Breaks if what is measured in moments stands for a run of minutes, or a limit slows what waits for memory."""
    h100 = with_fields(profiles.load("h100"), launch_overhead_s=0.0)
    alone, in_step = (compute_time_s(product(8192), h100, in_step=each) for each in (False, True))
    assert alone / in_step == pytest.approx(h100.sustained) and 0.5 < h100.sustained < 1
    assert h100.power_w is not None
    limited = with_fields(h100, power_limit_w=h100.power_w / 8)
    assert compute_time_s(product(8192), limited, in_step=True) == pytest.approx(2 * in_step)
    assert compute_time_s(product(8192), limited) == alone
    add = Work("elementwise", "bfloat16", 1.0, 2**30)
    assert compute_time_s(add, limited, in_step=True) == compute_time_s(add, h100)
    assert with_fields(h100, power_limit_w=10 * h100.power_w).kept_speed("attention") == 1.0


def test_waves_of_tiles() -> None:
    """Full waves cost nothing more; one tile more than a wave takes as long as two, or smaller tiles serve."""
    curve = MatmulCurve(1.0, multiprocessors=108)
    assert curve.slowdown(256 * 108, 128 * 10, 1e9, 1) == 1.0
    assert curve.slowdown(256, 128 * 108, 1e9, 1) == curve.slowdown(256, 128, 1e9, 108) == 1.0
    assert 1.4 < curve.slowdown(256 * 109, 128, 1e9, 1) < 2.0
    # One of 2048 rows beside its weights, cut eight ways (NVIDIA's guide, section 3.2): 3.1 waves take 4.
    assert 1.2 < curve.slowdown(2048, 5376, 1e9, 1) <= 4 / (336 / 108)
    assert all(curve.slowdown(m, n, 1e9, 1) >= 1.0 for m in (1, 100, 3000) for n in (1, 777, 9999))
