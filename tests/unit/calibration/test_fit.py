"""Fits against the curves that the times were made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.calibration import fit
from autopar.cost.calibration.fit import CollectiveSample, Sample
from autopar.cost.roofline import COLLECTIVE_KINDS, CollectiveKind, Work, collective_time_s
from autopar.machine.curves import MatmulCurve, interpolate
from autopar.machine.hardware import Link

LAUNCH = 2e-6
POINTS = ((1e3, 1e11), (1e9, 1e11))
SHAPES = [(n, n, n, 1) for n in (32, 64, 128, 256, 512, 1024)]
SHAPES += [(512, 512, 16, 1), (16, 512, 512, 1), (512, 16, 512, 1), (64, 2048, 256, 1), (32, 32, 32, 32)]


def product(dims: tuple[int, int, int, int], top: float, curve: MatmulCurve) -> Sample:
    m, n, k, batch = dims
    flops = 2.0 * m * n * k * batch
    return Sample(
        "matmul", str(dims), Work("matmul", "fp32", flops, 0, dims), LAUNCH + flops / top * curve.slowdown(*dims)
    )


@pytest.mark.parametrize("halves", [(0, 0, 0, 0), (8, 8, 0, 0), (0, 20, 30, 0), (4, 4, 40, 5000)])
def test_the_curve_of_products_is_found(halves: tuple[float, ...]) -> None:
    """Breaks if a curve that products follow is not found again, to a per cent at the sizes measured."""
    curve, top = MatmulCurve(1.0, *halves), 8e10
    found_top, found = fit.fit_matmul([product(dims, top, curve) for dims in SHAPES], LAUNCH, POINTS)
    for dims in SHAPES:
        assert found.slowdown(*dims) / found_top == pytest.approx(curve.slowdown(*dims) / top, rel=0.02)


def test_a_library_that_prepares_each_product() -> None:
    """Breaks if what every call takes is put on the sizes of small products."""
    curve, top = MatmulCurve(1.0, 8, 0, 30, 0), 4e11
    made = [product(dims, top, curve) for dims in SHAPES]
    samples = [Sample(s.kind, s.label, s.work, s.seconds + 1e-5) for s in made]
    found_top, found = fit.fit_matmul(samples, LAUNCH, POINTS)
    assert 0.9e-5 < found.launch_s < 1.02e-5
    for sample in samples:
        assert sample.work.dims is not None
        predicted = LAUNCH + found.launch_s + sample.work.flops / found_top * found.slowdown(*sample.work.dims)
        assert predicted == pytest.approx(sample.seconds, rel=0.05)


def test_one_disturbed_time_does_not_move_the_curve() -> None:
    """Breaks if a product that something else slowed tenfold changes what others are taken for."""
    curve, top = MatmulCurve(1.0, 8, 8, 16, 0), 8e10
    samples = [product(dims, top, curve) for dims in SHAPES]
    samples[2] = Sample(samples[2].kind, "slow", samples[2].work, samples[2].seconds * 10)
    found_top, found = fit.fit_matmul(samples, LAUNCH, POINTS)
    assert found_top / found.slowdown(1024, 1024, 1024, 1) == pytest.approx(
        top / curve.slowdown(1024, 1024, 1024, 1), rel=0.05
    )


def moving(num_bytes: float, seconds: float) -> Sample:
    return Sample("memory", str(num_bytes), Work("elementwise", "fp32", num_bytes / 12, num_bytes, name="mul"), seconds)


def test_memory_is_what_was_measured_and_caches_only_help() -> None:
    """Breaks if a size gets another bandwidth than its time says, or a disturbed one stays slower than larger ones."""
    bandwidths = {1e3: 1e7, 1e5: 8e10, 1e6: 6e10, 1e7: 1e9, 1e8: 1e10}
    points = fit.fit_memory([moving(x, LAUNCH + x / y) for x, y in bandwidths.items()], LAUNCH)
    assert interpolate(points, 1e5) == pytest.approx(8e10, rel=0.01)
    assert interpolate(points, 1e6) == pytest.approx(6e10, rel=0.01)
    assert interpolate(points, 1e7) == pytest.approx(1e10, rel=0.01)
    assert interpolate(points, 1e9) == pytest.approx(1e10, rel=0.01)
    with pytest.raises(ValueError, match="no time is longer"):
        fit.fit_memory([moving(10, LAUNCH)], LAUNCH)


def test_slow_operators_get_numbers_of_their_own() -> None:
    """Breaks if an operator that computes longer than it moves has no rate, or one that does not has one."""

    def sample(name: str, op_class: str, flops: float, seconds: float) -> Sample:
        return Sample("operator", name, Work(op_class, "fp32", flops, 1e6, name=name), LAUNCH + seconds)

    moved_s = 1e6 / 1e11
    samples = [
        sample("tanh", "elementwise", 1e5, 10 * moved_s),
        sample("neg", "elementwise", 1e5, 1.02 * moved_s),
        sample("sum", "reduction", 1e5, 2 * moved_s),
        sample("mean", "reduction", 1e5, 4 * moved_s),
        sample("embedding", "gather", 0.0, 5 * moved_s),
        sample("embedding_grad", "gather", 0.0, 2 * moved_s),
    ]
    rates, shares = fit.fit_operators(samples, LAUNCH, POINTS)
    assert rates == {"tanh": pytest.approx(1e5 / (10 * moved_s)), "mean": pytest.approx(1e5 / (4 * moved_s))}
    assert shares == {"reduction": pytest.approx(0.5), "gather": pytest.approx(0.5), "embedding": pytest.approx(0.2)}


@given(
    st.sampled_from(COLLECTIVE_KINDS),
    st.floats(1e-6, 1e-3),
    st.floats(1e8, 1e11),
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=2, unique=True),
)
def test_a_collective_is_found_again(kind: CollectiveKind, latency: float, bandwidth: float, groups: list[int]) -> None:
    """Breaks if latency and bandwidth of a link are not found from its collectives' times."""
    link = Link(bandwidth, latency)
    samples = []
    for n in groups:
        for size in (2**12, 2**20, 2**25, 2**28):
            seconds = LAUNCH + 2 * latency * (n - 1) + 2 * size * (n - 1) / n / bandwidth
            if kind != "all_reduce":
                seconds = collective_time_s(kind, size, n, link, LAUNCH)
            samples.append(CollectiveSample("node", kind, n, size, seconds))
    found_latency, found_bandwidth = fit.fit_collective(samples, LAUNCH)
    assert found_bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert found_latency == pytest.approx(latency, rel=0.05)


def test_ranks_are_merged_by_their_medians() -> None:
    """Breaks if one slow rank decides."""
    assert fit.merge_ranks([{"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 2.0}, {"a": 2.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
