"""The kernel that rotates a token and writes it into the cache, interpreted: to the bit what torch's operators do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.rotary_write import cache_write as plain_write
from autopar.operators.rotary_write import rotary_write as reference
from tests.unit.kernels.interpreted import load
from tests.unit.tiers import mostly_slow


def token(
    dtype: torch.dtype, storage: str = "", batch: int = 2, heads: int = 4, new: int = 1, length: int = 9, size: int = 8,
    value_size: int = 6, shared: bool = False, at: Sequence[int] = (5,), wide: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A call; rows of all sizes, one of zeros, and halves between two codes. wide: of a head what is rotated."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = (random(batch, new, n, s).transpose(1, 2) for n, s in ((heads, size), (2, size), (2, value_size)))
    v = v * torch.logspace(-3, 2, batch).to(dtype).view(-1, 1, 1, 1)
    v[0, 0, 0] = 0.0
    v[0, 1, 0, :3] = torch.tensor([7.0, 2.5, -1.5]).to(dtype)  # over 7: halves
    tables = [random(1 if shared else batch, new, wide or size) for _ in range(2)]
    caches = [random(batch, 2, length, s) for s in (size, value_size)]
    said: dict[str, Any] = {}
    if storage:
        (keys, key_scales), (values, value_scales) = (STORAGES[storage].encode(x) for x in caches)
        caches, said = [keys, values], {"key_scales": key_scales, "value_scales": value_scales, "storage": storage}
    named = zip(("q", "k", "v", "cos", "sin", "keys", "values"), (q, k, v, *tables, *caches), strict=True)
    return {**dict(named), "at": torch.tensor(at), **said}


def assert_same(found: list[Tensor], wanted: list[Tensor], exact: bool) -> None:
    assert len(found) == len(wanted)
    for number, (own, want) in enumerate(zip(found, wanted, strict=True)):
        assert (own.dtype, own.stride()) == (want.dtype, want.stride()), number
        if exact or not want.is_floating_point():
            assert torch.equal(own, want), number
        else:
            torch.testing.assert_close(own, want, rtol=1e-6, atol=1e-6)


CALLS: dict[str, dict[str, Any]] = {
    "a token": {},
    "several": {"new": 3, "at": (7, 0, 4)},
    "one table": {"shared": True, "new": 2, "at": (1, 2)},
    "odd values": {"value_size": 5},
    "odd sizes": {"size": 20, "value_size": 12, "heads": 6, "batch": 3},
    "a part": {"size": 10, "wide": 4, "new": 2, "at": (6, 1)},
    "most of it": {"size": 8, "wide": 6, "shared": True},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    """Breaks if a row is turned by another's table, written elsewhere, or rounded once where torch rounds twice."""
    given = token(dtype, **CALLS[name])
    before = {key: x.clone() for key, x in given.items()}
    found = load("rotary_write").rotary_write(**given)
    assert_same(found, reference(**given), exact=dtype == torch.float16)
    assert all(torch.equal(given[key], x) for key, x in before.items())


WAYS: dict[str, dict[str, Any]] = {
    "neighbours": {"interleaved": True},
    "neighbours, half tables": {"interleaved": True, "half_tables": True},
    "half tables": {"half_tables": True},
    "half tables in float32": {"half_tables": True, "in_float32": True},
    "neighbours in float32": {"interleaved": True, "in_float32": True},
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor, how: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """By pairs of columns, as models write it; products in this type."""
    pairs = cos.shape[-1] if how.get("half_tables") else cos.shape[-1] // 2
    y = x.clone()
    for pair in range(pairs):
        own = (2 * pair, 2 * pair + 1) if how.get("interleaved") else (pair, pair + pairs)
        a, b = (x[..., column].to(dtype) for column in own)
        for column, first, second in ((own[0], a, -b), (own[1], b, a)):
            place = pair if how.get("half_tables") else column
            along, across = (table[:, None, :, place].to(dtype) for table in (cos, sin))
            y[..., column] = (first * along + second * across).to(x.dtype)
    return y


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("call", "dtype"), [("several", torch.float32), ("a part", torch.float16)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_rotate(way: str, call: str, dtype: torch.dtype) -> None:
    """Breaks if a pair is of other columns, takes another pair's table, or is rounded elsewhere; by sums of products
    that are written out here.
    """
    how = WAYS[way]
    given = token(dtype, **CALLS[call])
    names = ("cos", "sin")
    if how.get("half_tables"):
        given |= {name: given[name][..., ::2].contiguous() for name in names}
    if how.get("in_float32") and "half" in way:
        given |= {name: given[name].float() * 1.001 for name in names}
    computed = torch.float32 if how.get("in_float32") else dtype
    q, k = (rotated(given[name], given["cos"], given["sin"], how, computed) for name in ("q", "k"))
    wanted = [q, given["keys"].index_copy(2, given["at"], k), given["values"].index_copy(2, given["at"], given["v"])]
    is_half = dtype == torch.float16
    assert_same(load("rotary_write").rotary_write(**given, **how), wanted, exact=is_half)
    assert_same(reference(**given, **how), wanted, exact=is_half)


@pytest.mark.moderate
@pytest.mark.parametrize(("start", "storage"), [(None, ""), (4, "int4"), (9, "")])
def test_what_is_not_rotated(start: int | None, storage: str) -> None:
    """Breaks if keys are turned, a piece of a cache gets positions of another, or its own are left out."""
    given = token(torch.float16, storage, new=3, at=(7, 0, 4))
    for name in ("q", "cos", "sin"):
        del given[name]
    named = ("keys", "values", "key_scales", "value_scales")
    codes = (STORAGES[storage].encode(given[name]) for name in ("k", "v")) if storage else ()
    new = [x for pair in zip(*codes, strict=True) for x in pair] if storage else [given["k"], given["v"]]
    wanted = [given[name].clone() for name in named if name in given]
    for cache, own in zip(wanted, new, strict=True):
        for number, place in enumerate(given["at"].tolist()):
            if 0 <= place - (start or 0) < cache.shape[2]:
                cache[:, :, place - (start or 0)] = own[:, :, number]
    module = load("rotary_write")
    assert_same(module.cache_write(**given, start=start), wanted, exact=True)
    assert_same(plain_write(**given, start=start), wanted, exact=True)
    module.cache_write_(**given, start=start)
    assert_same([given[name] for name in named if name in given], wanted, exact=True)


@pytest.mark.moderate
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", mostly_slow([name for name in CALLS if name != "odd values"], "a token", "several"))
def test_codes_are_those_of_torch(name: str, storage: str, dtype: torch.dtype) -> None:
    """Breaks if a code is not the nearest, halves go up, a byte's halves are swapped, or a scale is another row's."""
    given = token(dtype, storage, **CALLS[name])
    given["cos"], given["sin"] = torch.ones_like(given["cos"]), torch.zeros_like(given["sin"])  # the same to the bit
    assert_same(load("rotary_write").rotary_write(**given), reference(**given), exact=True)


@pytest.mark.moderate
def test_every_number_has_its_nearest_e4m3() -> None:
    """Breaks if a number between two, near zero, or at the end has another code than torch gives it."""
    steps = torch.arange(0, 2**13, dtype=torch.float32) * 2**-11  # through the subnormals, at quarters of their steps
    numbers = torch.cat([steps, *(steps[-4096:] * 2**n for n in range(1, 8)), torch.tensor([447.0, 448.0, 2e-6])])
    numbers = torch.cat([numbers, -numbers])
    width = 8190
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % width)]).view(1, 1, -1, width)
    rows = numbers.shape[2]
    given = token(torch.float32, "fp8", batch=1, heads=1, new=rows, length=rows, value_size=width + 2, at=range(rows))
    ends = torch.full((1, 1, rows, 2), 448.0)  # so that scales are 1
    given["v"] = torch.cat([numbers, ends], -1).expand(1, 2, rows, width + 2)
    assert torch.equal(load("rotary_write").rotary_write(**given)[2], reference(**given)[2])


@pytest.mark.parametrize("storage", ["", "fp8"])
def test_in_place(storage: str) -> None:
    """Breaks if the operator that writes caches where they lie does other things than that which copies them."""
    given = token(torch.float16, storage)
    wanted = reference(**given)
    rotated = load("rotary_write").rotary_write_(**given)
    names = ("keys", "values", "key_scales", "value_scales")
    assert_same([rotated, *(given[name] for name in names if name in given)], wanted, exact=True)


def test_what_the_kernel_has_not() -> None:
    """Breaks if float64 is computed in float32."""
    given = token(torch.float64)
    assert_same(load("rotary_write").rotary_write(**given), reference(**given), exact=True)
