"""The attention kernels, interpreted, against the formula in float64: forward and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.operators import attention, attention_backward, merge_attention
from autopar.operators.attention_options import AttentionOptions
from tests.unit.kernels.attention_cases import CASES, CAUSAL, Case, expected
from tests.unit.kernels.interpreted import assert_near, load
from tests.unit.tiers import mostly_slow

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")


def computed(tensors: dict[str, Tensor | None], options: AttentionOptions) -> dict[str, Tensor]:
    bias = tensors["bias"]
    rest = {name: x for name, x in tensors.items() if name != "g"}
    out, lse = load("attention_forward").attention_forward(**rest, options=options)
    needs_bias = bias is not None and bias.is_floating_point()
    grads = load("attention_backward").attention_backward(
        **tensors, out=out, lse=lse, options=options, bias_grad=needs_bias
    )
    return dict(zip(NAMES, (out, lse, *grads)))


def assert_equal(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, want in wanted.items():
        try:
            assert_near(actual[name], want)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.sampled(10)
@pytest.mark.moderate
@pytest.mark.parametrize("name", mostly_slow(CASES, *list(CASES)[::3]))
def test_equal_to_float64(name: str) -> None:
    """Breaks if a block that is seen is left out, one that is not is read, or an option enters a gradient wrongly."""
    case = CASES[name]
    tensors = case.tensors()
    actual = computed(tensors, case.said())
    assert_equal(actual, expected(tensors, case.said(), actual["out"]))
    assert actual["lse"].dtype == torch.float32
    for part in ("out", "dq", "dk", "dv"):
        assert actual[part].transpose(1, 2).is_contiguous()


@pytest.mark.moderate
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["causal", "window", "padding", "documents, causal", "bias per key", "uneven groups", "everything"],
        "causal",
        "padding",
    ),
)
def test_half_precision(name: str) -> None:
    """Breaks if sums or the log-sum-exp are kept in half precision."""
    case = replace(CASES[name], dtype=torch.float16)
    tensors = case.tensors()
    actual = computed(tensors, case.said())
    assert_equal(actual, expected(tensors, case.said(), actual["out"]))


@pytest.mark.moderate
@pytest.mark.parametrize(
    "name", ["full", "causal", "causal, even", "more keys than queries", "four queries a key head"]
)
def test_tensor_descriptors_read_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a descriptor begins at another row or head, or has other bounds, than the pointers."""
    case = replace(CASES[name], dtype=torch.float16, D=40)
    tensors = case.tensors()
    plain = computed(tensors, case.said())
    configs = load("attention_configs")
    for kind, config in configs.INTERPRETED.items():
        if kind != "dbias":
            monkeypatch.setitem(configs.INTERPRETED, kind, replace(config, tma=True))
    described = computed(tensors, case.said())
    for part, want in plain.items():
        assert torch.equal(described[part], want), part


@pytest.mark.moderate
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("name", ["causal", "four queries a key head"])
def test_keys_walk_as_many_queries_at_a_time_as_a_device_does(
    name: str, tma: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a block of many rows reads another head's, or hides other keys, than one of few."""
    case = replace(CASES[name], dtype=torch.float16, D=24, S=80, T=80)
    tensors = case.tensors()
    configs = load("attention_configs")
    monkeypatch.setitem(configs.INTERPRETED, "dkv", configs.KernelConfig(rows, 64, tma=tma))
    actual = computed(tensors, case.said())
    assert_equal(actual, expected(tensors, case.said(), actual["out"]))


@pytest.mark.moderate
@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("name", mostly_slow(["odd heads", "head of one", "everything"], "odd heads"))
def test_slices_of_a_head(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if products of float32 need slices to be right, or a slice wider than the head reads beyond it."""
    case = CASES[name]
    monkeypatch.setattr(load("attention_configs"), "INTERPRETED_CHUNK", chunk)
    tensors = case.tensors()
    actual = computed(tensors, case.said())
    assert_equal(actual, expected(tensors, case.said(), actual["out"]))


def test_a_slice_of_float32_reads_no_other_row() -> None:
    """Breaks if the slices of a head that is no power of two, or a row beyond the last, take what lies behind them."""
    case = Case(S=21, T=37, D=40, E=24, options=CAUSAL)
    tensors = case.tensors()
    want = expected(tensors, case.said())
    for name in ("g", "q", "k", "v"):
        x = tensors[name]
        room = torch.full((*x.shape[:2], x.shape[2] + 20, x.shape[3] + 30), torch.nan)
        room[:, :, : x.shape[2], : x.shape[3]] = x
        tensors[name] = room[:, :, : x.shape[2], : x.shape[3]]
    actual = computed(tensors, case.said())
    assert_equal(actual, want)


def test_what_is_not_seen_is_not_read() -> None:
    """Breaks if blocks outside the window are read: there are NaNs."""
    case = Case(S=16, T=96, options={"left": 15, "right": 0, "query_starts": [64]})
    tensors = case.tensors()
    want = expected(tensors, case.said())
    for name in ("k", "v"):
        tensors[name][:, :, :32] = torch.nan  # queries 64 .. 79 see keys from 49 on
    actual = computed(tensors, case.said())
    assert_equal(actual, want)
    assert not actual["dk"][:, :, :32].any()


@pytest.mark.moderate
def test_padding_is_not_read() -> None:
    """Breaks if blocks before the first valid key, or after the last, are read."""
    case = Case(B=2, S=20, T=128, keys=[(70, 128), (0, 30)])
    tensors = case.tensors()
    want = expected(tensors, case.said())
    tensors["k"][0, :, :64], tensors["v"][1, :, 32:] = torch.nan, torch.nan
    assert_equal(computed(tensors, case.said()), want)


@pytest.mark.moderate
def test_other_documents_are_not_read() -> None:
    """Breaks if blocks of keys, or of queries, that are of other documents are read: there are NaNs."""
    case = Case(B=2, S=128, T=192, documents=((64, 64), (64, 128)))
    tensors = case.tensors()
    here = {name: x if name in ("sinks", "seed", "bias", "keys") else x[:, :, 64:] for name, x in tensors.items()}
    said = case.said()
    want = expected(here, replace(said, documents=said.documents[:, 64:], key_documents=said.key_documents[:, 64:]))
    for name in ("k", "v"):
        tensors[name][:, :, :64] = torch.nan
    assert_near(
        load("attention_forward").attention_forward(**without(tensors, "g"), options=said)[0][:, :, 64:], want["out"]
    )
    tensors = case.tensors()
    bare = {**tensors, "out": torch.zeros_like(tensors["g"]), "lse": torch.zeros(2, 2, 128)}
    bare["out"][:, :, 64:], bare["lse"][:, :, 64:] = want["out"].float(), want["lse"].float()
    for name in ("q", "g"):
        bare[name][:, :, :64] = torch.nan
    _, dk, dv = load("attention_backward").attention_backward(**bare, options=said)
    assert_near(dk[:, :, 64:], want["dk"])
    assert_near(dv[:, :, 64:], want["dv"])


def without(tensors: dict[str, Tensor | None], name: str) -> dict[str, Tensor | None]:
    return {each: x for each, x in tensors.items() if each != name}


def test_queries_that_see_a_key_block_not_are_not_read() -> None:
    """Breaks if the kernel of dk and dv walks queries before the diagonal, or those that a window has left behind."""
    case = Case(S=128, T=32, options={"left": 15, "right": 0, "key_starts": [48]})
    tensors = case.tensors()
    want = expected(tensors, case.said())
    for name in ("q", "g"):
        tensors[name][:, :, :32] = torch.nan
        tensors[name][:, :, 96:] = torch.nan
    bare = {**tensors, "out": want["out"].float(), "lse": want["lse"].float()}
    _, dk, dv = load("attention_backward").attention_backward(**bare, options=case.said())
    assert_near(dk, want["dk"])
    assert_near(dv, want["dv"])


@pytest.mark.moderate
def test_nothing_is_seen() -> None:
    """Breaks if rows without keys give NaN, or an lse that a merge would count."""
    case = Case(B=2, S=40, keys=[(0, 0), (0, 56)], options={**CAUSAL, "key_starts": [20]})
    tensors = case.tensors()
    tensors["keys"][1] = True
    actual = computed(tensors, case.said())
    assert not actual["out"][0].any() and not actual["out"][1, :, :20].any()
    assert (actual["lse"][0] == -torch.inf).all() and (actual["lse"][1, :, :20] == -torch.inf).all()
    assert actual["lse"][1, :, 20:].isfinite().all()
    assert all(not actual[part][0].any() and actual[part].isfinite().all() for part in ("dq", "dk", "dv"))


@pytest.mark.moderate
def test_blocks_of_keys_merge() -> None:
    """Breaks if the gradients of a block of keys take its own log-sum-exp for that of all."""
    case = Case(S=48, T=48, sinks=False, options={"right": 0, "query_starts": [0, 72]})
    tensors = case.tensors()
    whole = AttentionOptions(scale=0.3, right=0, query_starts=[0, 72], key_starts=[0, 24, 48])
    tensors["k"], tensors["v"] = (torch.cat([tensors[n], tensors[n][:, :, :24].flip(2)], 2) for n in ("k", "v"))
    want = expected(tensors, whole)
    forward, backward = load("attention_forward").attention_forward, load("attention_backward").attention_backward
    blocks = [
        (replace(whole, key_starts=[begin]), {n: tensors[n][:, :, begin : begin + 24] for n in ("k", "v")})
        for begin in (0, 24, 48)
    ]
    parts = [forward(tensors["q"], block["k"], block["v"], options=options) for options, block in blocks]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_attention(out, lse, *part)
    assert_near(out, want["out"])
    assert_near(lse, want["lse"])
    grads = [backward(**{**tensors, **block, "out": out, "lse": lse}, options=options) for options, block in blocks]
    assert_near(sum(dq for dq, _, _ in grads), want["dq"])
    assert_near(torch.cat([dk for _, dk, _ in grads], 2), want["dk"])
    assert_near(torch.cat([dv for _, _, dv in grads], 2), want["dv"])


@pytest.mark.moderate
def test_a_query_whose_keys_a_bias_hides_attends_to_all_alike() -> None:
    """Breaks if finfo.min swallows the logarithm of how many keys there are. Row 3 sees nothing, row 5 one key."""
    case = Case(S=20, T=40, bias=(1, 1, 20, 40))
    tensors = case.tensors()
    assert tensors["bias"] is not None and tensors["g"] is not None and tensors["v"] is not None
    lowest = torch.finfo(torch.float32).min
    tensors["bias"][..., 3, :] = lowest
    tensors["bias"][..., 5, 1:] = lowest
    actual = computed(tensors, case.said())
    assert_near(actual["out"][:, :, 3], tensors["v"].double().mean(2).expand(1, 2, 32))
    assert_near(actual["out"][:, :, 5], tensors["v"][:, :, 0].double().expand(1, 2, 32))
    wide = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in tensors.items()}
    g, options = wide.pop("g"), case.said().kwargs()
    out, lse = attention(**wide, **options)
    wanted = attention_backward(g, **wide, output=out, lse=lse, **options)
    others = [row for row in range(20) if row != 3]
    assert_near(actual["dq"][:, :, others], wanted[0][:, :, others])
    for name, want in zip(("dq", "dk", "dv"), wanted, strict=True):
        have = actual[name].double()
        # Of that one row: half a unit in the last place of the log-sum-exp near -16384 (4.9e-4) and of the score in
        # units of log2 near -23637 (9.8e-4 · ln 2) are 1.2e-3 of a probability, which is to be exact otherwise.
        error = (have - want).abs().max() / want.abs().max()
        assert error < 2e-3, name
