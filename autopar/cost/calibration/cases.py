"""What is timed on one device: operators as programs run them, with the `Work` that the cost model sees in them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import autopar.operators  # noqa: F401  (registers torch.ops.autopar)
from autopar.cost.local_work import local_work
from autopar.cost.roofline import Work
from autopar.ir.op_call import op_call
from autopar.ir.region import NodeStrategy
from autopar.ir.tensor_type import TensorType
from autopar.operators.rules.lookup import rule_for

_ATEN, _OWN = torch.ops.aten, torch.ops.autopar
Make = Callable[[torch.device], tuple[Any, ...]]
"""The positional arguments of an operator, on a device."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operator on given sizes. kind: `matmul`, `attention`, `memory`, `operator`. label: for people.

    build: gives the function to time, and its work; nothing is allocated before.
    """

    kind: str
    label: str
    build: Callable[[torch.device], tuple[Callable[[], object], Work]]


_KEPT_BYTES, _MOST_KEPT = 64 * 2**20, 4096
"""Results that are kept on a CPU: more bytes than caches hold."""


def _case(kind: str, label: str, target: Any, make: Make, **kwargs: Any) -> Case:
    """A case of one operator; make: its positional arguments on a device."""

    def build(device: torch.device) -> tuple[Callable[[], object], Work]:
        args = make(device)
        call = op_call(target, args, kwargs, target(*args, **kwargs))
        rule = rule_for(call)
        results = tuple(None if result is None else () for result in call.results)
        alone = NodeStrategy((), ((),) * len(call.operands), results)
        work = local_work(call, rule, alone, ())(rule.flops)
        if device.type != "cpu" or kind not in ("memory", "operator"):
            return lambda: target(*args, **kwargs), work
        # In a step an operator reads what the one before has just made, and writes where nothing was for long.
        size = sum(TensorType(each.shape, each.dtype).num_bytes for each in call.results if each is not None)
        kept: deque[object] = deque(maxlen=max(1, min(_MOST_KEPT, _KEPT_BYTES // max(1, size))))
        return lambda: kept.append(target(*args, **kwargs)), work

    return Case(kind, label, build)


# ------------------------------------------------------------------------------------------------------------- products


def products(dtype: torch.dtype, device_type: str, quick: bool) -> Iterator[Case]:
    """x @ wᵀ as forwards have it, and both products of its gradient, of cubes and of shapes with one small dim."""
    cubes: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    if device_type == "cuda":
        cubes, shapes = (512, 1024, 2048, 4096, 8192), _SHAPES_CUDA
    else:
        cubes, shapes = (32, 64, 128, 256, 512, 768, 1024), _SHAPES_CPU
    wanted = [(n, n, n) for n in cubes] + list(shapes)
    for number, (m, n, k) in enumerate(wanted[::2] if quick else wanted):
        size = f"{m} x {n} x {k}"
        yield _case("matmul", f"linear {size}", _OWN.linear.default, _tensors(dtype, (m, k), (n, k)))
        if number % 3 == 0 and not quick:
            weight, x = _OWN.linear_grad_weight.default, _OWN.linear_grad_input.default
            yield _case("matmul", f"weight gradient {size}", weight, _tensors(dtype, (k, m), (k, n)))
            yield _case("matmul", f"input gradient {size}", x, _tensors(dtype, (m, k), (k, n)))
    for batch, n in ((16, 512), (32, 1024)) if device_type == "cuda" else ((32, 32), (16, 64), (8, 128)):
        yield _case("matmul", f"batch {batch} x {n}³", _OWN.matmul.default, _tensors(dtype, *[(batch, n, n)] * 2))


def _tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Make:
    """Random tensors of these shapes."""
    return lambda device: tuple(_random(device, dtype, *shape) for shape in shapes)


_SHAPES_CPU = (
    (512, 512, 16), (16, 512, 512), (512, 16, 512), (2048, 64, 256), (64, 2048, 256), (256, 256, 2048),
    (128, 512, 2048), (1024, 256, 128),
)  # fmt: skip
_SHAPES_CUDA = (
    (8192, 512, 4096), (8192, 4096, 512), (512, 8192, 4096), (4096, 14336, 1024), (128, 4096, 4096),
    (16384, 2048, 1024), (16384, 1024, 4096), (2048, 128256, 4096),
)  # fmt: skip


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


# --------------------------------------------------------------------------------------------------- memory, attention


def memory(dtype: torch.dtype, device_type: str, quick: bool) -> Iterator[Case]:
    """A product of two tensors element by element, into a new one, of many sizes."""
    sizes = [2**i for i in (range(18, 30, 2) if device_type == "cuda" else range(9, 25, 3 if quick else 1))]
    for size in sizes:
        yield _case("memory", f"multiply {size} elements", _ATEN.mul.Tensor, _tensors(dtype, (size,), (size,)))


def attention(dtype: torch.dtype, device_type: str, quick: bool) -> Iterator[Case]:
    """Causal and full attention, forward and backward, by head size and length."""
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    if device_type == "cuda":
        lengths, heads, rows = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256), 16_384
    else:
        lengths, heads, rows = (64, 256, 1024), (32, 64, 128), 1024
    if quick:
        lengths, heads = lengths[1::2], heads[1:2]
    for head in heads:
        for length in lengths:
            batch, num = max(1, rows // length), (2048 if device_type == "cuda" else 256) // head
            for right in (0, None):
                yield from _attention(dtype, (batch, num, length, head), right)
    # What kernels of libraries may not take: it is made of products, whose time the head size decides, and of operators
    # on all scores, whose time it does not.
    tokens, sizes = ((512, 2048), (64, 128)) if device_type == "cuda" else ((64, 256), (32, 128))
    for variant in () if quick else ("softcap", "dropout", "bias"):
        for head, length in itertools.product(sizes, tokens):
            shape = (max(1, rows // length), (2048 if device_type == "cuda" else 256) // head, length, head)
            for right in (None,) if variant == "dropout" else (0, None):
                yield from _attention(dtype, shape, right, variant)


def _attention(
    dtype: torch.dtype, shape: tuple[int, int, int, int], right: int | None, variant: str = ""
) -> Iterator[Case]:
    _, heads, tokens, _ = shape
    options: dict[str, Any] = {"scale": shape[-1] ** -0.5, "right": right}
    options |= {"softcap": {"softcap": 50.0}, "dropout": {"dropout_p": 0.1}}.get(variant, {})
    seen = "causal" if right == 0 else "full"

    def forward(device: torch.device) -> tuple[Any, ...]:
        q, k, v = (_random(device, dtype, *shape) for _ in range(3))
        bias = _random(device, dtype, 1, heads, tokens, tokens) if variant == "bias" else None
        seed = torch.tensor(7, device=device) if variant == "dropout" else None
        return q, k, v, bias, None, None, seed

    def backward(device: torch.device) -> tuple[Any, ...]:
        given = forward(device)
        out, lse = _OWN.attention.default(*given, **options)
        return torch.randn_like(out), *given, out, lse

    label = f"{variant}{' ' * bool(variant)}{seen}, {tokens} tokens, head size {shape[-1]}"
    yield _case("attention", f"attention {label}", _OWN.attention.default, forward, **options)
    yield _case("attention", f"attention backward {label}", _OWN.attention_backward.default, backward, **options)


# ------------------------------------------------------------------------------------------------------ other operators


def operators(dtype: torch.dtype, device_type: str, quick: bool) -> Iterator[Case]:
    """Operators that compute much for what they move, reduce, or read here and there."""
    rows, wide, vocabulary = (8192, 4096, 32_768) if device_type == "cuda" else (512, 512, 8192)

    def one(device: torch.device) -> tuple[Any, ...]:
        return (_random(device, dtype, rows, wide).abs_().add_(0.5),)

    def two(device: torch.device) -> tuple[Any, ...]:
        return (_random(device, dtype, rows, wide), *one(device))

    unary = ["gelu", "silu", "tanh", "rsqrt", "exp", "cos", "sin", "log", "sigmoid", "sqrt", "reciprocal", "erf", "neg"]
    for name in unary[:4] if quick else unary:
        yield _case("operator", name, getattr(_ATEN, name).default, one)
    binary = ["gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "div"]
    for name in binary[:2] if quick else binary:
        overload = "Tensor" if name == "div" else "default"
        yield _case("operator", name, getattr(getattr(_ATEN, name), overload), two)
    yield _case("operator", "gelu of tanh", _ATEN.gelu.default, one, approximate="tanh")
    yield _case("operator", "gelu_backward of tanh", _ATEN.gelu_backward.default, two, approximate="tanh")
    yield _case("operator", "pow", _ATEN.pow.Tensor_Scalar, lambda device: (*one(device), 3))
    yield _case("operator", "_softmax", _ATEN._softmax.default, lambda device: (*one(device), -1, False))
    yield _case("operator", "sum", _ATEN.sum.dim_IntList, lambda device: (*one(device), [-1], True))
    yield from _normalizations(dtype, rows, wide)
    yield from _vocabulary(dtype, rows, wide, vocabulary)
    if quick:
        return
    yield _case("operator", "relu", _ATEN.relu.default, one)
    yield _case("operator", "threshold_backward", _ATEN.threshold_backward.default, lambda device: (*two(device), 0))
    # Masks of models have few edges, which processors foresee.
    yield _case(
        "operator", "where", _ATEN.where.self,
        lambda device: (torch.ones(rows, wide, device=device, dtype=torch.bool).tril_(), *two(device)),
    )  # fmt: skip
    yield _case("operator", "mean", _ATEN.mean.dim, lambda device: (*one(device), [-1], True))
    yield _case("operator", "amax", _ATEN.amax.default, lambda device: (*one(device), [-1], True))
    yield _case("operator", "cat", _ATEN.cat.default, lambda device: (list(two(device)), -1))
    softmax_backward = _ATEN._softmax_backward_data.default
    yield _case("operator", "_softmax_backward_data", softmax_backward, lambda device: (*two(device), -1, dtype))
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    yield _case("operator", "_to_copy", _ATEN._to_copy.default, one, dtype=other)


def _normalizations(dtype: torch.dtype, rows: int, wide: int) -> Iterator[Case]:
    def given(device: torch.device) -> tuple[Any, ...]:
        return _random(device, dtype, rows, wide), [wide], _random(device, dtype, wide), _random(device, dtype, wide)

    def incoming(device: torch.device) -> tuple[Any, ...]:
        x, shape, weight, bias = given(device)
        out, mean, rstd = _ATEN.native_layer_norm.default(x, shape, weight, bias, 1e-5)
        return torch.randn_like(out), x, shape, mean, rstd, weight, bias, [True, True, True]

    yield _case("operator", "native_layer_norm", _ATEN.native_layer_norm.default, lambda device: (*given(device), 1e-5))
    yield _case("operator", "native_layer_norm_backward", _ATEN.native_layer_norm_backward.default, incoming)


def _vocabulary(dtype: torch.dtype, rows: int, wide: int, size: int) -> Iterator[Case]:
    def ids(device: torch.device) -> torch.Tensor:
        return torch.randint(size, (rows,), device=device)

    def logits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        x = _random(device, dtype, rows, size)
        return x, x.amax(-1)

    def gradient(device: torch.device) -> tuple[Any, ...]:
        x, most = logits(device)
        return torch.ones_like(most), x, ids(device), x.logsumexp(-1)

    yield _case(
        "operator",
        "embedding",
        _OWN.embedding.default,
        lambda device: (_random(device, dtype, size, wide), ids(device)),
    )
    yield _case(
        "operator", "embedding_grad", _OWN.embedding_grad.default,
        lambda device: (_random(device, dtype, rows, wide), ids(device), size),
    )  # fmt: skip
    yield _case("operator", "sum_exp", _OWN.sum_exp.default, logits)
    yield _case("operator", "cross_entropy_grad", _OWN.cross_entropy_grad.default, gradient)


def all_cases(dtype: torch.dtype, device_type: str, quick: bool) -> list[Case]:
    """Everything that one device runs alone, but for launches and the optimizer."""
    return [case for make in (products, memory, attention, operators) for case in make(dtype, device_type, quick)]
