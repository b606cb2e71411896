"""A token's kernels: attention of a few queries, of numbers, codes and pages, against float64; what a token writes, to
the bit beside torch's operators; microseconds of both beside what ran before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.rotary_write import rotary_write as reference
from benchmarks.first_light.kernels import TOLERANCES, _error
from benchmarks.first_light.section import Section
from tests.unit.kernels.attention_cases import CAUSAL, Case, expected


def run(section: Section) -> None:
    from autopar.runtime import kernels

    if section.on_cuda:
        assert kernels.register(), "no Triton"
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if section.on_cuda else (torch.float16,)
    for dtype, storage in itertools.product(dtypes, ("", *STORAGES)):
        text = f"{storage or 'numbers'} {str(dtype).removeprefix('torch.')}"
        for name, case in _cases(section).items():
            label = f"decode {name} {text}"
            section.attempt(label, partial(_attend, section, label, replace(case, dtype=dtype), storage))
        section.attempt(f"token {text}", partial(_write, section, f"token {text}", dtype, storage))
    if section.on_cuda:
        for rows, length in ((1, 32768), (8, 4096), (64, 2048))[: 1 if section.quick else 3]:
            for storage in ("", *STORAGES):
                label = f"{rows} rows of {length}, {storage or 'numbers'}"
                section.attempt(label, partial(_time, section, label, rows, length, storage))


def _cases(section: Section) -> dict[str, Case]:
    length, size = (2000, 128) if section.on_cuda else (50, 16)
    token = Case(B=2, H=8, G=2, S=1, T=length, D=size, E=size, device=section.device.type)
    found = {
        "a token": replace(token, keys=[(7, length), (0, length // 3)]),
        "window and sinks": replace(
            token, S=4, sinks=True, options={"left": length // 5, "right": 0, "query_starts": [length - 9]}
        ),
        "soft-cap and slopes": replace(token, bias=(1, 8, 1, length), options={"softcap": 2.0}),
        "many rows": replace(token, H=40, G=1, S=3, options={**CAUSAL, "query_starts": [length - 3]}),
        "head of 80": replace(token, D=80, E=80),
    }
    return found if section.on_cuda else dict(list(found.items())[:2])


def _stored(storage: str, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Keys and values as they are kept, as the numbers that these are, and the codes' scales."""
    from autopar.runtime.kernels.decode_launch import Codes

    if not storage:
        return dict(tensors), dict(tensors), None
    kept, numbers, scales = dict(tensors), dict(tensors), []
    for name in ("k", "v"):
        kept[name], scale = STORAGES[storage].encode(tensors[name])
        numbers[name] = STORAGES[storage].decode(kept[name], scale.double())
        scales.append(scale)
    return kept, numbers, Codes(storage, *scales)


def _attend(section: Section, label: str, case: Case, storage: str) -> None:
    from autopar.runtime.kernels.decode_launch import decode_attention

    tensors, options = case.tensors(), case.said()
    kept, numbers, codes = _stored(storage, tensors)
    given = {name: kept[name] for name in ("q", "k", "v", "bias", "keys", "sinks")}
    once, again = (decode_attention(**given, options=options, codes=codes) for _ in range(2))
    wanted = expected(numbers, options)
    errors = {name: _error(own, wanted[name]) for name, own in zip(("out", "lse"), once, strict=True)}
    same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    right = all(error <= TOLERANCES[case.dtype] for error in errors.values())
    section.row(label, right and same, errors=errors, bit_equal=same)


def _token(
    section: Section, dtype: torch.dtype, storage: str, rows: int, length: int, heads: int = 8, size: int = 128
) -> dict[str, Any]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(section.device)

    given: dict[str, Any] = {
        "q": random(rows, 1, 4 * heads, size).transpose(1, 2), "k": random(rows, 1, heads, size).transpose(1, 2),
        "v": random(rows, 1, heads, size).transpose(1, 2), "cos": random(rows, 1, size), "sin": random(rows, 1, size),
        "keys": random(rows, heads, length, size), "values": random(rows, heads, length, size),
        "at": torch.tensor([length // 2], device=section.device),
    }  # fmt: skip
    if storage:
        given["storage"] = storage
        for name, scales in (("keys", "key_scales"), ("values", "value_scales")):
            given[name], given[scales] = STORAGES[storage].encode(given[name])
    return given


def _write(section: Section, label: str, dtype: torch.dtype, storage: str) -> None:
    from autopar.runtime.kernels.rotary_write import rotary_write

    given = _token(section, dtype, storage, 3, 40, *(() if section.on_cuda else (2, 16)))
    found, wanted = rotary_write(**given), reference(**given)
    exact = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    # Of float32 torch may add products that it did not round: a code in a thousand may be the next one.
    near = dtype == torch.float32 and all(
        float((a.double() - b.double()).abs().gt(1e-5 if a.is_floating_point() else 0).double().mean()) < 1e-2
        for a, b in zip(found, wanted, strict=True)
    )
    section.row(label, exact or near, bit_equal=exact)


def _time(section: Section, label: str, rows: int, length: int, storage: str) -> None:
    """bfloat16, 32 heads on 8 of 128: a layer of Llama 3.1 8B."""
    from autopar.operators.attention_options import AttentionOptions
    from autopar.runtime.kernels.attention_forward import attention_forward
    from autopar.runtime.kernels.decode_launch import Codes, decode_attention
    from autopar.runtime.kernels.rotary_write import rotary_write_

    given = _token(section, torch.bfloat16, storage, rows, length)
    q, k, v = given["q"], given["keys"], given["values"]
    options, seen = AttentionOptions(scale=0.1), torch.ones(rows, length, dtype=torch.bool, device=section.device)
    codes = Codes(storage, given["key_scales"], given["value_scales"]) if storage else None
    kind = STORAGES[storage] if storage else None

    def numbers() -> tuple[Tensor, Tensor]:
        return (kind.decode(k, codes.key_scales), kind.decode(v, codes.value_scales)) if kind and codes else (k, v)

    contenders: dict[str, Callable[[], Any]] = {
        "decode": lambda: decode_attention(q, k, v, None, seen, options=options, codes=codes),
        "forward": lambda: attention_forward(q, *numbers(), None, seen, options=options),
        "token": lambda: rotary_write_(**given),
        "token by operators": lambda: reference(**given),
    }
    times = {name: _microseconds(work) for name, work in contenders.items()}
    stored = [x for x in (k, v, given.get("key_scales"), given.get("value_scales")) if x is not None]
    read = sum(x.numel() * x.element_size() for x in stored)
    section.row(label, None, us=times, gb_per_s=read / times["decode"] / 1e3)


def _microseconds(work: Callable[[], Any]) -> float:
    import triton

    taken: Any = triton.testing.do_bench(work, warmup=10, rep=50, return_mode="median")
    return 1e3 * float(taken)
