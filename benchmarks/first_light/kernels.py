"""Every kernel against float64: nothing left unwritten, two launches bit by bit the same, strides as the fakes say.

Empty tensors are filled with NaN first (torch's deterministic mode does so): an element that no program writes shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar.operators import rms_norm as rms_norm_reference
from autopar.operators import rotary as rotary_reference
from benchmarks.first_light.section import Section
from tests.unit.kernels.attention_cases import CAUSAL, Case, expected

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""On the scale of the largest: a few roundings of the dtype, and in float32 sums of some hundred terms."""


def run(section: Section) -> None:
    from autopar.runtime import kernels

    torch.use_deterministic_algorithms(True, warn_only=True)
    if section.on_cuda:
        assert kernels.register(), "no Triton"
    for name, work in _rows(section):
        section.attempt(name, work)
    length, size = (384, 128) if section.on_cuda else (24, 16)
    for kernel, options, dtype in itertools.product(("flash", "cudnn"), ({}, CAUSAL), _dtypes(section)[:2]):
        case = Case(B=2, H=4, G=2, S=length, T=length, D=size, E=size, device=section.device.type, dtype=dtype)
        label = f"plain {kernel} {'causal' if options else 'full'} {str(dtype).removeprefix('torch.')}"
        section.attempt(label, partial(_plain, section, label, replace(case, options=options), kernel))
    for dtype, name, tma, case in _attention(section):
        label = f"attention {name} {str(dtype).removeprefix('torch.')}{'' if tma else ' pointers'}"
        section.attempt(label, partial(_attend, section, label, replace(case, dtype=dtype), tma))


def _plain(section: Section, label: str, case: Case, kernel: str) -> None:
    """Plain attention as programs call it: by PyTorch's kernel of this name."""
    from autopar.operators import scaled_dot_product

    tensors, options = case.tensors(), case.said()
    g, rest = tensors.pop("g"), tensors
    takes = scaled_dot_product.takes_cudnn
    scaled_dot_product.takes_cudnn = lambda q: kernel == "cudnn"
    try:
        said = {"scale": options.scale, "left": options.left, "right": options.right}
        out, lse = scaled_dot_product.attention(**rest, **said)
        grads = scaled_dot_product.attention_backward(g, *rest.values(), out, lse, **said)
    finally:
        scaled_dot_product.takes_cudnn = takes
    wanted = expected({**rest, "g": g}, options, out)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    errors = {name: _error(part, wanted[name]) for name, part in found.items()}
    section.row(label, all(error <= TOLERANCES[case.dtype] for error in errors.values()), errors=errors)


def _dtypes(section: Section) -> Sequence[torch.dtype]:
    return (torch.bfloat16, torch.float16, torch.float32) if section.on_cuda else (torch.float16, torch.float32)


def _attention(section: Section) -> Iterator[tuple[torch.dtype, str, bool, Case]]:
    """What is usual first: where time ends, the rare is left out."""
    length, sizes = (384, (64, 128, 80, 256)) if section.on_cuda else (24, (16, 24))
    sizes = sizes[: 2 if section.on_cuda else 1] if section.quick else sizes
    for dtype in _dtypes(section)[0 if section.on_cuda or not section.quick else 1 :]:
        for size in sizes:
            plain = Case(B=2, H=4, G=2, S=length, T=length, D=size, E=size, device=section.device.type)
            cases = {
                "full": plain, "causal": replace(plain, options=CAUSAL),
                "uneven": replace(plain, S=length - 7, T=length + 5, G=1, options=CAUSAL),
                "window and sinks": replace(plain, options={"left": length // 5, "right": 0}, sinks=True),
                "padding": replace(plain, keys=[(length // 3, length), (0, length - 9)], options=CAUSAL),
                "bias": replace(plain, G=4, bias=(1, 4, length, length)),
                "soft-cap": replace(plain, options={**CAUSAL, "softcap": 2.0}),
                "dropout": replace(plain, options={**CAUSAL, "dropout_p": 0.2}),
            }  # fmt: skip
            for name, case in cases.items():
                for tma in (True, False) if section.on_cuda and name in ("full", "causal") else (True,):
                    yield dtype, f"{name} {size}", tma, case


def _attend(section: Section, label: str, case: Case, tma: bool) -> None:
    from autopar.runtime.kernels import attention_configs
    from autopar.runtime.kernels.attention_backward import attention_backward
    from autopar.runtime.kernels.attention_forward import attention_forward

    fits = attention_configs.fits_descriptor
    attention_configs.fits_descriptor = fits if tma else lambda _: False
    try:
        tensors, options = case.tensors(), case.said()
        bias = tensors["bias"]
        with_bias = bias is not None and bias.is_floating_point()
        rest = {name: x for name, x in tensors.items() if name != "g"}
        out, lse = attention_forward(**rest, options=options)
        found = [out, lse, *attention_backward(**tensors, out=out, lse=lse, options=options, bias_grad=with_bias)]
        again = [*attention_forward(**rest, options=options)]
        again += attention_backward(**tensors, out=out, lse=lse, options=options, bias_grad=with_bias)
    finally:
        attention_configs.fits_descriptor = fits
    wanted = expected(tensors, options, out)
    parts = dict(zip(("out", "lse", "dq", "dk", "dv", "dbias"), found))
    errors = {name: _error(parts[name], want) for name, want in wanted.items()}
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    laid = all(x.transpose(1, 2).is_contiguous() for x in (out, *found[2:5]))
    right = all(error <= TOLERANCES[case.dtype] for error in errors.values())
    section.row(label, right and same and laid, errors=errors, bit_equal=same, strides=laid)


def _rows(section: Section) -> Iterator[tuple[str, Callable[[], None]]]:
    """The kernels that go over rows."""
    widths = (128, 1000, 4096, 8192, 32768) if section.on_cuda else (48, 130)
    for dtype in _dtypes(section):
        text = str(dtype).removeprefix("torch.")
        for width in widths[:3] if section.quick else widths:
            yield f"rms_norm {width} {text}", partial(_norm, section, f"rms_norm {width} {text}", width, dtype)
        for layout in ("contiguous", "heads inside", "sliced", "last dims swapped"):
            name = f"rotary {layout} {text}"
            yield name, partial(_rotate, section, name, layout, dtype)
        classes = 128_256 if section.on_cuda else 300
        name = f"cross entropy {classes} {text}"
        yield name, partial(_classify, section, name, classes, dtype)


def _normal(section: Section, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(section.device)


def _norm(section: Section, name: str, width: int, dtype: torch.dtype) -> None:
    module = _module("rms_norm")
    x, g = (_normal(section, rows, 33, width, dtype=dtype)[:3] for rows in (3, 4))
    w = _normal(section, width, dtype=dtype)
    y, rstd = _twice(section, name, "rms_norm", module.rms_norm, x, w, 1e-5)
    dx, dw = _twice(section, name, "rms_norm_backward", module.rms_norm_backward, g, x, w, rstd)
    wide = [t.double().requires_grad_() for t in (x, w)]
    want = rms_norm_reference(wide[0].detach(), wide[1].detach(), 1e-5)[0]
    normal = wide[0] * (wide[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * wide[1]
    grads = torch.autograd.grad(normal, wide, g.double())
    _judge(section, name, dtype, y=(y, want), dx=(dx, grads[0]), dw=(dw, grads[1]))


def _rotate(section: Section, name: str, layout: str, dtype: torch.dtype) -> None:
    module = _module("rotary")
    size, positions = (128, 300) if section.on_cuda else (16, 11)
    x = {
        "contiguous": lambda: _normal(section, 2, 5, positions, size, dtype=dtype),
        "heads inside": lambda: _normal(section, 2, positions, 5, size, dtype=dtype).transpose(1, 2),
        "sliced": lambda: _normal(section, 2, 5, positions, size + 8, dtype=dtype)[..., :size],
        "last dims swapped": lambda: _normal(section, 2, 5, size, positions, dtype=dtype).transpose(-1, -2),
    }[layout]()
    cos, sin = (_normal(section, 1, positions, size, dtype=dtype) * factor for factor in (1, 0.5))
    y = _twice(section, name, "rotary", module.rotary, x, cos, sin)[0]
    dx = _twice(section, name, "rotary_backward", module.rotary_backward, x, cos, sin)[0]
    leaf = x.double().requires_grad_()
    want = rotary_reference(x.double(), cos.double(), sin.double())
    half = size // 2
    turned = torch.cat([-leaf[..., half:], leaf[..., :half]], -1)
    formula = leaf * cos.double()[:, None] + turned * sin.double()[:, None]
    (grad,) = torch.autograd.grad(formula, leaf, x.double())
    _judge(section, name, dtype, y=(y, want), formula=(want, formula.detach()), dx=(dx, grad))


def _classify(section: Section, name: str, classes: int, dtype: torch.dtype) -> None:
    module = _module("cross_entropy")
    x = _normal(section, 40, classes, dtype=dtype)
    target = (torch.arange(40, device=section.device) * 37) % classes
    top = x.amax(-1)
    total = _twice(section, name, "sum_exp", module.sum_exp, x, top)[0]
    wide = x.double().requires_grad_()
    lse = wide.logsumexp(-1)
    g = torch.full((), 0.5, device=section.device)
    dx = _twice(
        section, name, "cross_entropy_grad", module.cross_entropy_grad, g, x, target, lse.detach().float()
    )[0]  # fmt: skip
    loss = torch.nn.functional.cross_entropy(wide, target, reduction="sum") * 0.5
    (grad,) = torch.autograd.grad(loss, wide)
    _judge(section, name, dtype, sum_exp=(total.log() + top.float(), lse.detach()), dx=(dx, grad))


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(f"autopar.runtime.kernels.{name}")


def _twice(section: Section, label: str, name: str, kernel: Callable[..., Any], *given: Any) -> tuple[Tensor, ...]:
    """What the kernel gives; a wrong row where a second launch differs, or the operator's fake has other strides."""
    first, second = (found if isinstance(found, tuple) else (found,) for found in (kernel(*given), kernel(*given)))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
        told = getattr(torch.ops.autopar, name)(*fakes)
    told = told if isinstance(told, tuple) else (told,)
    laid = [tuple(x.stride()) for x in told] == [tuple(x.stride()) for x in first]
    if not (same and laid):
        section.row(f"{label}: {name}", False, bit_equal=same, strides=laid)
    return first


def _judge(section: Section, name: str, dtype: torch.dtype, **pairs: tuple[Tensor, Tensor]) -> None:
    errors = {part: _error(actual, want) for part, (actual, want) in pairs.items()}
    section.row(name, all(error <= TOLERANCES[dtype] for error in errors.values()), errors=errors)


def _error(actual: Tensor, want: Tensor) -> float:
    """The largest difference on the scale of the largest number; infinite where one is not a number and should be."""
    if actual.shape != want.shape:
        return float("inf")
    finite = want.isfinite()
    if not torch.equal(actual.double()[~finite], want[~finite]):
        return float("inf")
    scale = max(1.0, float(want[finite].abs().max())) if finite.any() else 1.0
    error = float((actual.double()[finite] - want[finite]).abs().max()) / scale if finite.any() else 0.0
    return error if error == error else float("inf")
