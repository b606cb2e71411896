"""Attention of a few queries, interpreted, against the formula in float64: cuts, heads, masks, codes, pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.base.errors import AutoparError
from autopar.operators import merge_attention
from tests.unit.kernels.attention_cases import Case, expected
from tests.unit.kernels.interpreted import assert_near, load
from tests.unit.tiers import mostly_slow

TOKEN = Case(B=2, H=6, G=2, S=1, T=90)
CASES = {
    "a token": TOKEN,
    "one key": replace(TOKEN, T=1),
    "one block of keys": replace(TOKEN, T=11),
    "padding on both sides": replace(TOKEN, B=3, keys=[(0, 90), (37, 61), (0, 0)]),
    "window": replace(TOKEN, options={"left": 20, "right": 0, "query_starts": [70]}),
    "window of the last": replace(TOKEN, S=5, options={"left": 9, "right": 0, "query_starts": [85]}),
    "window behind the keys": replace(TOKEN, options={"left": 20, "right": 0, "query_starts": [130]}),
    "prefix and window": replace(TOKEN, options={"left": 9, "right": 0, "prefix": 19, "query_starts": [80]}),
    "prefix alone": replace(TOKEN, S=3, options={"right": 0, "prefix": 40, "query_starts": [10]}),
    "drafts": replace(TOKEN, S=7, keys=[(0, 90), (12, 80)], options={"right": 0, "query_starts": [83]}),
    "keys from elsewhere on": replace(
        TOKEN, S=4, options={"left": 30, "right": 0, "query_starts": [100], "key_starts": [40]}
    ),
    "mask": replace(TOKEN, S=3, bias=(2, 1, 3, 90), bias_bool=True),
    "mask of each head": replace(TOKEN, S=3, bias=(1, 6, 3, 90), bias_bool=True),
    "mask of each key": replace(TOKEN, bias=(2, 1, 1, 90), bias_bool=True, keys=[(3, 90), (0, 50)]),
    "slopes": replace(TOKEN, bias=(1, 6, 1, 90)),
    "bias of each query": replace(TOKEN, S=2, bias=(2, 6, 2, 1)),
    "soft-cap": replace(TOKEN, options={"softcap": 1.5}),
    "sinks": replace(TOKEN, keys=[(0, 0), (10, 70)], sinks=True),
    "a head each": replace(TOKEN, G=6, S=2),
    "many heads of one": replace(TOKEN, B=1, H=71, G=1, D=8, E=8, S=2),
    "a run of heads": replace(TOKEN, H=5, G=4, options={"group": 3, "first": 2}),
    "other values": replace(TOKEN, D=24, E=40),
    "head of one": replace(TOKEN, D=1, E=3),
    "everything": replace(
        TOKEN, H=5, G=3, S=4, D=20, E=36, bias=(2, 5, 4, 90), keys=[(2, 90), (20, 70)], sinks=True,
        options={
            "left": 60, "right": 1, "prefix": 9, "softcap": 2.0, "group": 4, "first": 5, "query_starts": [84],
            "key_starts": [2],
        },
    ),
}  # fmt: skip


def computed(tensors: dict[str, Tensor | None], case: Case, **others: Any) -> dict[str, Tensor]:
    given = {name: tensors[name] for name in ("q", "k", "v", "bias", "keys", "sinks")}
    out, lse = load("decode_launch").decode_attention(**given, options=case.said(), **others)
    return {"out": out, "lse": lse}


def wanted(tensors: dict[str, Tensor | None], case: Case) -> dict[str, Tensor]:
    found = expected(tensors, case.said())
    return {name: found[name] for name in ("out", "lse")}


def assert_equal(actual: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        seen = value > -torch.inf
        assert torch.equal(seen, actual[name] > -torch.inf), name
        assert_near(torch.where(seen, actual[name], 0), torch.where(seen, value, 0))
    assert actual["lse"].dtype == torch.float32
    assert actual["out"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", mostly_slow(CASES, *list(CASES)[::4]))
def test_equal_to_float64(name: str) -> None:
    """Breaks if a cut is merged wrongly, a head reads another's keys, or what is seen is a key more or less."""
    case = CASES[name]
    tensors = case.tensors()
    assert_equal(computed(tensors, case), wanted(tensors, case))


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["a token", "drafts", "everything"])
def test_half_precision(name: str) -> None:
    """Breaks if a cut, or what merges them, is kept in half precision."""
    case = replace(CASES[name], dtype=torch.float16)
    tensors = case.tensors()
    assert_equal(computed(tensors, case), wanted(tensors, case))


Tensors = dict[str, Tensor | None]


def stored(tensors: Tensors, storage: str) -> tuple[Tensors, Tensors, Any]:
    """Keys and values as codes of magnitudes that differ by token, as the numbers that these are, and the scales."""
    codes, numbers, scales = dict(tensors), dict(tensors), []
    for name in ("k", "v"):
        x = tensors[name]
        assert x is not None
        sizes = torch.logspace(-3, 1, x.shape[2], dtype=x.dtype)[torch.arange(x.shape[2]) * 7 % x.shape[2]]
        codes[name], scale = STORAGES[storage].encode(x * sizes[:, None])
        wide = STORAGES[storage].decode(codes[name], scale.double())
        numbers[name] = wide
        scales.append(scale)
    return codes, numbers, load("decode_launch").Codes(storage, *scales)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", mostly_slow(["a token", "drafts", "sinks", "slopes", "everything"]))
def test_codes_are_the_numbers_that_they_say(name: str, storage: str, dtype: torch.dtype) -> None:
    """Breaks if codes are read as other numbers, a half of a byte lies elsewhere, or a scale is another head's."""
    case = replace(CASES[name], dtype=dtype)
    codes, numbers, said = stored(case.tensors(), storage)
    assert_equal(computed(codes, case, codes=said), wanted(numbers, case))


@pytest.mark.moderate
@pytest.mark.parametrize("storage", STORAGES)
def test_every_code(storage: str) -> None:
    """Breaks if a number that a code can say is read as another: a query attends to one token alone."""
    bits = torch.arange(256)
    if storage == "fp8":
        bits = bits[(bits & 127) != 127]
    elif storage == "int8":
        bits = bits[bits != 128]
    else:
        bits = bits[((bits & 15) > 0) & ((bits >> 4) > 0)]
    count = len(bits)
    kind = STORAGES[storage]
    v = torch.stack([bits.roll(-column) for column in range(16)], 1).to(torch.uint8).view(kind.dtype)[None, None]
    k = torch.zeros_like(v) if storage != "int4" else torch.full_like(v, 8 + (8 << 4))
    ones = torch.ones(1, 1, count, 1)
    q = torch.zeros(1, 1, 1, 16 * kind.per_byte)
    want = kind.decode(v, ones)
    module = load("decode_launch")
    for token in range(0, count, 16):
        keys = torch.zeros(1, count, dtype=torch.bool)
        keys[0, token] = True
        out, _ = module.decode_attention(
            q, k, v, keys=keys, options=Case(S=1, T=count).said(), codes=module.Codes(storage, ones, ones)
        )
        assert torch.equal(out[0, 0, 0], want[0, 0, token]), token


@pytest.mark.moderate
@pytest.mark.parametrize("storage", mostly_slow(["", "int4"], "int4"))
def test_pages(storage: str) -> None:
    """Breaks if a key is read from another page, or from another place of it."""
    case = replace(CASES["drafts"], T=96)
    tensors = case.tensors()
    codes, numbers, said = stored(tensors, storage) if storage else (tensors, tensors, None)
    table = torch.tensor([[7, 2, 9, 4], [1, 8, 3, 11]], dtype=torch.int32)

    def paged(x: Tensor) -> Tensor:
        """[B, G, 4 · 24, …] in twelve pages [G, 24, …], and numbers that nobody may read in the others."""
        pages = torch.full((12, x.shape[1], 24, x.shape[3]), 77, dtype=x.dtype)
        for row, places in enumerate(table.tolist()):
            for number, place in enumerate(places):
                pages[place] = x[row, :, number * 24 : number * 24 + 24]
        return pages

    apart = {**codes, **{name: paged(codes[name]) for name in ("k", "v")}}
    if said is not None:
        said = replace(said, key_scales=paged(said.key_scales), value_scales=paged(said.value_scales))
    assert_equal(computed(apart, case, codes=said, pages=table), wanted(numbers, case))


@pytest.mark.moderate
def test_what_is_hidden_from_all_is_not_read() -> None:
    """Breaks if blocks before the first key that a row sees, or after the last, are read: there are NaNs."""
    hidden = {
        "padding": replace(TOKEN, keys=[(50, 90), (0, 20)]),
        "mask": replace(TOKEN, S=2, bias=(2, 1, 2, 90), bias_bool=True),
        "window": replace(TOKEN, options={"left": 9, "right": 0, "query_starts": [60]}),
    }
    for name, case in hidden.items():
        tensors = case.tensors()
        if name == "mask":
            assert tensors["bias"] is not None
            tensors["bias"][0, ..., :48], tensors["bias"][1, ..., 30:] = False, False
        want = wanted(tensors, case)
        for x in (tensors["k"], tensors["v"]):
            assert x is not None
            x[0, :, :48] = torch.nan
            x[1, :, 64 if name == "window" else 32 :] = torch.nan
        assert_equal(computed(tensors, case), want)


@pytest.mark.moderate
def test_keys_that_one_query_alone_sees_are_read() -> None:
    """Breaks if what is hidden from the first query, or from one head's, is left out for all of them."""
    case = replace(TOKEN, S=3, bias=(2, 1, 3, 90), bias_bool=True)
    tensors = case.tensors()
    assert tensors["bias"] is not None
    tensors["bias"][:, :, 0, :50], tensors["bias"][:, :, 2, 30:] = False, False
    assert_equal(computed(tensors, case), wanted(tensors, case))
    apart = tensors["bias"].expand(2, 6, 3, 90).clone()
    apart[:, 0, :, :70], apart[:, 5, :, 20:] = False, False
    tensors["bias"] = apart
    assert_equal(computed(tensors, case), wanted(tensors, case))


@pytest.mark.moderate
@pytest.mark.parametrize("cuts", mostly_slow([1, 2, 4, 64], 1, 2))
def test_any_number_of_cuts(cuts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a cut without keys counts, or a key falls between two."""
    case = CASES["everything"]
    tensors = case.tensors()
    monkeypatch.setattr(load("decode_launch"), "INTERPRETED_CUTS", cuts)
    assert_equal(computed(tensors, case), wanted(tensors, case))


@pytest.mark.parametrize("name", mostly_slow(["sinks", "padding on both sides", "many heads of one"], "sinks"))
@pytest.mark.parametrize("storage", ["", "int4"])
def test_one_cut_is_merged_with_nothing(name: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a single cut forgets the sinks, a query that sees nothing, or the second half of a byte."""
    monkeypatch.setattr(load("decode_launch"), "INTERPRETED_CUTS", 1)
    tensors = CASES[name].tensors()
    kept, numbers, said = stored(tensors, storage) if storage else (tensors, tensors, None)
    assert_equal(computed(kept, CASES[name], codes=said), wanted(numbers, CASES[name]))


@pytest.mark.moderate
def test_pieces_of_a_cache_merge() -> None:
    """Breaks if the log-sum-exp of a part is not that of its scores: parts of the keys on two ranks merge by it."""
    case = replace(CASES["drafts"], keys=None)
    tensors = case.tensors()
    parts = []
    for begin, end in ((0, 32), (32, 90)):
        own = replace(case, options={**case.options, "key_starts": [begin]})
        here = {**tensors, **{name: tensors[name][:, :, begin:end] for name in ("k", "v")}}
        parts.append(computed(here, own))
    out, lse = merge_attention(parts[0]["out"], parts[0]["lse"], parts[1]["out"], parts[1]["lse"])
    want = wanted(tensors, case)
    assert_near(out, want["out"])
    assert_near(lse, want["lse"])


def test_a_cache_of_a_larger_one_is_read_where_it_lies() -> None:
    """Breaks if strides of batch, heads or positions are taken for those of a tensor that lies by itself."""
    case = replace(TOKEN, dtype=torch.float16, D=24, E=24)
    tensors = case.tensors()
    want = wanted(tensors, case)
    for name in ("k", "v"):
        x = tensors[name]
        room = torch.full((3, 5, 100, 30), torch.nan, dtype=x.dtype)
        room[1:, 2:4, 4:94, :24] = x
        tensors[name] = room[1:, 2:4, 4:94, :24]
    assert_equal(computed(tensors, case), want)


@pytest.mark.parametrize(
    "changed, options, reason",
    [
        ({"dtype": torch.float64}, {}, "float64 is none of"),
        ({"S": 17}, {}, "17 queries are not from 1 to 16"),
        ({"D": 257, "E": 257}, {}, "head sizes of 257"),
        ({"T": 0}, {}, "no keys"),
        ({}, {"dropout_p": 0.5}, "dropout"),
        ({}, {"query_starts": [0], "key_starts": [0, 50]}, "several runs"),
        ({}, {"scale": -1.0}, "scale -1.0"),
        ({}, {"key_starts": [2**31]}, "32 bits"),
    ],
)
def test_refused(changed: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    """Breaks if a kernel computes what it cannot."""
    case = replace(TOKEN, **changed)
    tensors = {name: x for name, x in case.tensors().items() if name not in ("g", "seed")}
    with pytest.raises(AutoparError, match=reason):
        load("decode_launch").decode_attention(**tensors, options=replace(case.said(), **options))
