"""Operators of ours on fake tensors give the shapes, dtypes and strides that they give on real ones, by PyTorch's
operators or by the kernels (interpreted here) that take their place on CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import autopar.operators
from tests.unit.kernels import interpreted

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def layouts(*shape: int) -> dict[str, Tensor]:
    """Tensors of one shape as views, projections and slices leave them."""
    last = len(shape) - 1
    swapped = (shape[1], shape[0], *shape[2:])
    turned = (*shape[:-2], shape[last], shape[last - 1])
    inside = (shape[0], shape[last - 1], *shape[1:-2], shape[last])
    return {
        "contiguous": drawn(*shape),
        "first dims swapped": drawn(*swapped).transpose(0, 1),
        "heads inside": drawn(*inside).movedim(1, last - 1),
        "last dims swapped": drawn(*turned).transpose(-1, -2),
        "sliced": drawn(*shape[:-1], shape[last] + 4)[..., : shape[last]],
        "expanded": drawn(1, *shape[1:]).expand(shape),
    }


def heads_of(x: Tensor) -> Tensor:
    """Keys or values beside queries x[B, H, S, D], half as many heads."""
    return drawn(x.shape[0], x.shape[1] // 2, 9, x.shape[3])


def attended(x: Tensor) -> tuple[Any, ...]:
    return (x, heads_of(x), heads_of(x))


def attention_grads(x: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    q, k, v = attended(x)
    out, lse = autopar.operators.attention(q, k, v, bias, scale=0.5)
    return (x + 1, q, k, v, bias, None, None, None, out, lse)


def classes_of(x: Tensor) -> Tensor:
    return torch.randint(x.shape[-1], x.shape[:-1], generator=GENERATOR)


def written(x: Tensor) -> tuple[Any, ...]:
    """A token's queries, keys and values, and caches that it is written into."""
    batch, heads, new, size = x.shape
    token = drawn(batch, heads // 2, new, size), drawn(batch, heads // 2, new, size)
    caches = drawn(batch, heads // 2, 9, size), drawn(batch, heads // 2, 9, size)
    return (x, *token, *TABLES, *caches, torch.arange(new) + 1)


HEADS, ROWS = (2, 4, 6, 16), (4, 6, 16)
TABLES = drawn(1, 6, 16), drawn(1, 6, 16)
WEIGHT = drawn(16)
# What each operator is called with, for a tensor of this shape in one of the layouts; where its kernel is.
CASES: dict[str, tuple[tuple[int, ...], Any, str]] = {
    "rotary": (HEADS, lambda x: (x, *TABLES), "rotary"),
    "rotary_backward": (HEADS, lambda x: (x, *TABLES), "rotary"),
    "rotary_write": (HEADS, written, "rotary_write"),
    "rotary_write_": (HEADS, written, "rotary_write"),
    "cache_write": (HEADS, lambda x: (x[:, :2], x[:, 2:], *written(x)[5:]), "rotary_write"),
    "cache_write_": (HEADS, lambda x: (x[:, :2], x[:, 2:], *written(x)[5:]), "rotary_write"),
    "rms_norm": (ROWS, lambda x: (x, WEIGHT, 1e-5), "rms_norm"),
    "rms_norm_backward": (ROWS, lambda x: (x + 1, x, WEIGHT, drawn(*x.shape[:-1])), "rms_norm"),
    "sum_exp": (ROWS, lambda x: (x, x.amax(-1)), "cross_entropy"),
    "cross_entropy_grad": (
        ROWS, lambda x: (torch.ones(()), x, classes_of(x), x.logsumexp(-1)), "cross_entropy"
    ),
    "attention": (HEADS, attended, "attention_dispatch"),
    "attention_backward": (HEADS, attention_grads, "attention_dispatch"),
    "attention_backward_bias": (HEADS, lambda x: attention_grads(x, drawn(1, 4, 6, 9)), "attention_dispatch"),
}  # fmt: skip
LAYOUTS = tuple(layouts(2, 2, 2, 2))


def called(name: str, layout: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operator."""
    shape, arguments, _ = CASES[name]
    return arguments(layouts(*shape)[layout]), {"scale": 0.5} if name.startswith("attention") else {}


def described(value: Any) -> list[tuple[Any, ...]]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [(tuple(x.shape), x.dtype, x.stride()) for x in values if x is not None]


def on_fakes(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[Any, ...]]:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
        return described(getattr(torch.ops.autopar, name)(*fakes, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_fakes_are_as_operators(name: str, layout: str) -> None:
    """Breaks if a compiler is told another layout than an operator gives: inductor asserts strides, and stops."""
    given, options = called(name, layout)
    real = getattr(torch.ops.autopar, name)(*given, **options)
    assert on_fakes(name, given, options) == described(real)


@pytest.mark.moderate
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_fakes_are_as_kernels(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a kernel lays its results out as the fake does not say: what is compiled on CUDA stops there."""
    monkeypatch.setenv("AUTOPAR_ATTENTION", "triton")
    given, options = called(name, layout)
    kernel = getattr(interpreted.load(CASES[name][2]), name)
    assert on_fakes(name, given, options) == described(kernel(*given, **options))


def test_every_operator_with_a_kernel_is_compared() -> None:
    """Breaks if an operator gets a kernel and is not compared here."""

    class Written:
        """A library that notes what is implemented."""

        def __init__(self) -> None:
            self.names: set[str] = set()

        def impl(self, name: str, *_: Any) -> None:
            self.names.add(name)

    library = Written()
    interpreted.load("attention_dispatch").register_attention(library, "CUDA")
    interpreted.load("registration_elementwise").register_elementwise(library)
    assert library.names == set(CASES)
