"""Experts that a checkpoint has as codes: one by one (`quantized.py`), or on top of each other in OCP's MX format.

    X.0.w1.weight_packed, X.1.w1.weight_packed, …    →  X.gate_up_proj_codes [experts, …], as transformers stacks them
    X_blocks [experts, out, in/32, 16], X_scales [experts, out, in/32]    e2m1, two a byte, and exponents: gpt-oss

Sources: OCP Microscaling Formats (MX) 1.0; transformers' integrations/mxfp4.py, `convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autopar.base.codes import decoded
from autopar.base.errors import AutoparError
from autopar.base.stored_weights import StoredWeight
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.formats import Weight, stacked
from autopar.runtime.checkpoint.quantized import Packed

BLOCKS, SCALES = "_blocks", "_scales"
_BIAS = 127
"""Of an exponent of eight bits."""
Parts = tuple[tuple[str, ...], ...]
"""What lies side by side, each the names of what is on top of each other: `conversion.Made`."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The matrices of all experts, [experts, out, in], in blocks of an output's inputs that share an exponent.

    name: of the parameter. codes: uint8 [experts, out, blocks, bytes]. exponents: uint8 [experts, out, blocks].
    """

    name: str
    codes: Weight
    exponents: Weight

    @property
    def dtype(self) -> torch.dtype:
        """Of what it is as weights: one that has all scales, halved, and codes times these."""
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, int, int]:
        """[experts, out, in]."""
        experts, outputs, blocks, wide = self.codes.shape
        return experts, outputs, blocks * wide * 2

    def how(self, turned: bool) -> StoredWeight:
        """As a model keeps it. turned: it has the matrices as [in, out]."""
        experts, outputs, inputs = self.shape
        cut = (outputs, self.codes.shape[2], 2 * self.codes.shape[3])
        name = self.name.rpartition(".")[2]
        return StoredWeight(name, "mxfp4", (outputs, inputs), cut, (2,), turned, experts=experts)

    def part(self, part: str, box: Box) -> Tensor:
        """A box of what a model keeps in the parameter's place."""
        if part == "codes":
            return self.codes.read(box)
        found = self.exponents.read(Box(box.offsets[:3], box.sizes[:3])).int()
        scales = torch.ldexp(torch.ones(found.shape), found - _BIAS - 1)  # of half a step: `base/codes.py`
        return scales.masked_fill(found == 255, torch.nan).to(self.dtype)[..., None]

    def plain(self, turned: bool, box: Box) -> Tensor:
        """Codes times scales, of a box [experts, out, in]; [experts, in, out] if `turned`."""
        if turned:
            box = Box(_swapped(box.offsets), _swapped(box.sizes))
        (expert, row, column), (many, rows, columns) = box
        wide = 2 * self.codes.shape[3]
        first, last = column // wide, -(-(column + columns) // wide)
        parts = {
            part: self.part(part, Box((expert, row, first, 0), (many, rows, last - first, size)))
            for part, size in (("codes", wide // 2), ("scales", 1))
        }
        found = decoded("mxfp4", parts["codes"], parts["scales"]).flatten(2)[..., column - first * wide :][
            ..., :columns
        ]
        return found.transpose(1, 2) if turned else found


def _swapped(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (numbers[0], numbers[2], numbers[1])


def blocks_of(weights: Mapping[str, Weight]) -> dict[str, Blocks]:
    """The parameters of a checkpoint that are such blocks, by their names."""
    found = {}
    for name, codes in weights.items():
        exponents = weights.get(f"{name.removesuffix(BLOCKS)}{SCALES}") if name.endswith(BLOCKS) else None
        if exponents is None or codes.dtype != torch.uint8 or exponents.dtype != torch.uint8:
            continue
        if len(codes.shape) == 4 and codes.shape[:3] == exponents.shape:
            own = name.removesuffix(BLOCKS)
            found[own] = Blocks(own, codes, exponents)
    return found


def held(blocks: Blocks, how: StoredWeight | None, turned: bool) -> dict[str, Weight]:
    """Such a parameter as a model has it: in the parts that it keeps, or, of none, as weights.

    Raises:
        AutoparError: the model keeps it otherwise.
    """
    if how is None:
        shape = _swapped(blocks.shape) if turned else blocks.shape
        return {blocks.name: Weight(blocks.dtype, shape, partial(blocks.plain, turned))}
    if blocks.how(turned) != how:
        raise _otherwise(blocks.name, how)
    dtypes = how.dtypes(blocks.dtype)
    return {
        f"{blocks.name}_{part}": Weight(dtypes[part], shape, partial(blocks.part, part))
        for part, shape in how.shapes().items()
    }


def how_stacked(name: str, parts: Parts, packed: Mapping[str, Packed]) -> StoredWeight | None:
    """As a model keeps experts [experts, out, in] that are stored one by one; None where these are not cut alike, or
    have inputs in an order of their own. name: of the parameter in its module.
    """
    each = [packed[name] for names in parts for name in names if name in packed]
    first = each[0].how(False, by_row=True) if each else None
    if first is None or first.sorted or len(each) != sum(map(len, parts)):
        return None
    if any(other.how(False, by_row=True) != first for other in each[1:]):
        return None
    cut = (first.cut[0] * len(parts), *first.cut[1:])
    shape = (first.shape[0] * len(parts), first.shape[1])
    return replace(first, name=name, shape=shape, cut=cut, experts=len(parts[0]))


def stack(how: StoredWeight, parts: Parts, packed: Mapping[str, Packed]) -> dict[str, Weight]:
    """The parts of such experts, as they are kept.

    Raises:
        AutoparError: the checkpoint has them otherwise.
    """
    if how_stacked(how.name, parts, packed) != how:
        raise _otherwise(parts[0][0], how)
    one = packed[parts[0][0]].how(False, by_row=True)
    found = {}
    for part, shape in one.shapes().items():
        singles = {
            name: Weight(one.dtypes(packed[name].dtype)[part], shape, partial(packed[name].part, one, part))
            for names in parts
            for name in names
        }
        found[part] = stacked(singles, parts)
    return found


def _otherwise(name: str, how: StoredWeight) -> AutoparError:
    return AutoparError(
        f"the model keeps experts otherwise than the checkpoint has {name}",
        values=f"{how.way} {how.cut}",
        remedy="autopar.store_weights(model, like=folder) with this checkpoint's folder",
    )
