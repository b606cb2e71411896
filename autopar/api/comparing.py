"""What a program gives beside what eager gives: outputs, buffers, every gradient and their norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from autopar.ir.program import Program
from autopar.ir.values import gradient_of
from autopar.runtime.simulation import SimulationResult

if TYPE_CHECKING:
    pass


Expected = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Outputs; gradients and changed buffers by name."""
TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-4, 1e-6)}
"""dtype -> (rtol, atol): rounding of sums in another order, with room for the depth of the model."""

NOISE: Mapping[torch.dtype, float] = {torch.float64: 1e-6, torch.float32: 1e-3}
"""A gradient smaller than this fraction of all gradients' norm is compared on that scale: a key's bias under softmax
has the gradient 0, and what is there is rounding. The fraction is a few units of rounding of the whole norm, over rtol.
"""

ROUNDINGS = 16
"""A gradient so small may be further apart where the model rounds more: what cancels in a bias before a batch norm,
whose gradient is 0 too, is as much larger as the norm divides by. How much is measured, by the model alone: a program
that adds up in another order gives what the model gives of numbers that are a few units of rounding away (a backward
error), and, to first order, errs as many times as far as what it gives of numbers one unit away.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor: norm of the difference relative to the norm of the reference."""

    name: str
    error: float
    ok: bool


def compare(
    program: Program,
    wanted: Expected,
    found: SimulationResult,
    rtol: float,
    atol: float,
    noise: float,
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> list[Comparison]:
    """One row for each output, changed buffer and gradient, and one for the norm of all gradients.

    noise: the fraction of that norm below which a gradient is compared on this scale, or on that of how much it moves
    when parameters do by one unit of rounding (`rounding`, by name): it may never be further off than this fraction,
    so that a gradient that counts beside the others is always missed.
    """
    outputs, gradients, updates = wanted
    rows: list[Comparison] = []
    for name, want, have in zip(program.output_names, outputs, found.outputs, strict=True):
        rows.append(comparison(name, want, have, rtol, atol, 0.0))
    for name, want in updates.items():
        if name in found.updates:
            rows.append(comparison(f"buffer {name}", want, found.updates[name], rtol, atol, 0.0))
        else:  # the program leaves it as it was
            rows.append(Comparison(f"buffer {name}", math.inf, False))
    if not program.training:
        return rows
    total = _norm(list(gradients.values()))
    for name, want in gradients.items():
        have = found.gradients.get(name, torch.zeros_like(want))  # none for what forward does not use, as in eager
        floor = noise * total
        if name in rounding and rtol and float(_wide(want).norm()) < floor:
            floor = max(floor, min(ROUNDINGS * rounding[name], floor) / rtol)
        rows.append(comparison(f"gradient of {gradient_of(name)}", want, have, rtol, atol, floor))
    norm = torch.tensor(_norm(list(found.gradients.values())), dtype=torch.float64)
    rows.append(comparison("gradient norm", torch.tensor(total, dtype=torch.float64), norm, rtol, atol, 0.0))
    return rows


def change(what: str, exact: torch.Tensor, rounded: torch.Tensor) -> str:
    """How much storing something as codes changes logits [..., vocabulary]. what: is stored, and how."""
    logits = float((exact - rounded).abs().max())
    logprobs = float((exact.log_softmax(-1) - rounded.log_softmax(-1)).abs().max())
    return f"{what} changes logits by up to {logits:.2g}, log-probabilities by {logprobs:.2g}"


def _norm(tensors: list[torch.Tensor]) -> float:
    return sum(float(_wide(t).square().sum()) for t in tensors) ** 0.5


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of what two tensors of one shape differ by."""
    return float((_wide(one) - _wide(other)).norm())


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float64; complex numbers as pairs."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def comparison(name: str, want: torch.Tensor, have: torch.Tensor, rtol: float, atol: float, floor: float) -> Comparison:
    """One tensor, by its norm. floor: the least scale that it is compared on."""
    if want.shape != have.shape:
        return Comparison(f"{name}: shape {tuple(have.shape)} instead of {tuple(want.shape)}", float("inf"), False)
    difference = distance(want, have)
    scale = max(float(_wide(want).norm()), floor)
    error = difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
    return Comparison(name, error, difference <= rtol * scale + atol * want.numel() ** 0.5)
