"""Triton kernels on the CPU, by Triton's interpreter, beside tests that have imported Triton (Dynamo does) without it.

Whether a kernel is interpreted is decided where `triton.jit` meets it, for Triton's own functions (`tl.sum`) when it is
imported. So a second Triton is imported with TRITON_INTERPRET=1, in place of the first; the variable does not stay.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

# On the scale of the largest. float32: sums of some hundred terms, 2^-24 · √n · a few, and exp2 of scores of tens,
# whose rounding counts times their size. float16: inputs are exact; the weights, ds and the result are each rounded to
# 11 bits (4.9e-4), and their products add up. float64: references that are not interpreted.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.float64: 1e-12}
_OURS = "autopar.runtime.kernels"


def load(name: str) -> ModuleType:
    """The module of this name in autopar/runtime/kernels, its kernels interpreted; skips where there is no Triton, or
    one whose interpreter fails with this NumPy (it makes numbers of arrays of one element, which NumPy 2.4 refuses).
    """
    pytest.importorskip("triton")
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    if not _is_interpreted():
        _import_triton_interpreted()
    return importlib.import_module(f"{_OURS}.{name}")


def _import_triton_interpreted() -> None:
    for module in [m for m in sys.modules if _is_within(m, "triton") or _is_within(m, _OURS)]:
        # The compiled extension can be loaded once only, and is the same for both.
        if not module.startswith("triton._C"):
            del sys.modules[module]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Kept by this copy of Triton alone, for what it imports and decorates later.
        importlib.import_module("triton").knobs.runtime.interpret = True
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """The same shape, and values as near as the dtype of `actual` allows, on the scale of the largest."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale)


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def _is_interpreted() -> bool:
    language = sys.modules.get("triton.language")
    return language is not None and type(language.sum).__name__ == "InterpretedFunction"


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
