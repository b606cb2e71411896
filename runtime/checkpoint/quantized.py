"""Checkpoints whose linear layers are codes in the layouts of other tools, read box by box.

    X.qweight, X.qzeros, X.scales [, X.g_idx]                GPTQ: codes [in/8, out]; AWQ (gemm): [in, out/8]
    X.weight_packed, X.weight_scale [, X.weight_zero_point]  compressed-tensors: codes [out, in/8]
    X.weight, X.weight_scale_inv | X.weight_scale            float8 or int8, a scale a block, an output or the weight

A model that keeps codes (`autopar.store_weights(model, like=folder)`) gets them as `X.weight_codes` and what belongs to
them; one that keeps weights gets `X.weight`, codes times scales. Sources: AutoGPTQ's and AutoAWQ's QuantLinear,
compressed-tensors' pack_to_int32, DeepSeek-V3's weight_dequant.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.base import files
from autopar.base.codes import pack
from autopar.base.errors import AutoparError
from autopar.base.stored_weights import StoredWeight
from autopar.runtime.checkpoint.boxes import Box, whole_of
from autopar.runtime.checkpoint.formats import Weight

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of a word AWQ has the output of each place."""
_ENDS = {
    "qweight": ("qzeros", "scales", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "weight": ("weight_scale_inv", "weight_scale"),
}
"""What codes are called -> what belongs to them."""
_MARKS = (".qweight", ".weight_packed", ".weight_scale_inv", ".weight_scale")
_REMEDY = "Load a checkpoint of 4 or 8 bits by AWQ (gemm), GPTQ or compressed-tensors, or of float8"
Range = tuple[int, int]


def has_codes(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these names has weights of linear layers as codes."""
    return any(name.endswith(_MARKS) for name in names)


@dataclass(frozen=True)
class Packed:
    """The weight of a linear layer, [out, in], as a checkpoint has it.

    kind: "gptq", "awq", "packed" (compressed-tensors) or "plain" (a code an element). block: outputs and inputs that
    share a scale. parts: by what their names end with. shift: what is added to stored zeros.
    """

    name: str
    kind: str
    bits: int
    shape: Range
    block: Range
    parts: Mapping[str, Weight]
    shift: int = 0

    @cached_property
    def order(self) -> Tensor | None:
        """Where each input is once they are sorted by their group; None where they are."""
        given = self.parts.get("g_idx") or self.parts.get("weight_g_idx")
        if given is None:
            return None
        groups = given.read(whole_of(given.shape)).long()
        size = self.block[1]
        if torch.equal(groups, torch.arange(len(groups)) // size):
            return None
        if len(groups) != self.shape[1] or not torch.equal(groups.sort()[0], torch.arange(len(groups)) // size):
            raise self._refused("its groups are of several sizes")
        return groups.argsort(stable=True).argsort()

    @property
    def dtype(self) -> torch.dtype:
        """Of what it is as a weight: that of its scales."""
        return self._scale.dtype

    def how(self, turned: bool, by_row: bool = False) -> StoredWeight:
        """As a model keeps it. turned: its module has the weight as [in, out]. by_row: with a scale for each output
        where all have one, so that it may lie beside others.
        """
        outputs, inputs = self.shape
        rows, columns = self.block
        if self.kind != "plain":
            way, cut, dims = f"int{self.bits}-zero", (outputs, inputs // columns, columns), (2,)
            return StoredWeight("weight", way, self.shape, cut, dims, turned, self.order is not None)
        way = "int8" if self.parts["weight"].dtype == torch.int8 else "fp8"
        if (rows, columns) in ((1, inputs), (outputs, inputs)):
            is_one = rows > 1 and not by_row
            name = f"{way}-tensor" if is_one else way
            return StoredWeight("weight", name, self.shape, self.shape, (0, 1) if is_one else (1,), turned)
        rows, columns = math.gcd(rows, outputs), math.gcd(columns, inputs)  # a last block may be cut
        blocks = (outputs // rows, rows, inputs // columns, columns)
        return StoredWeight("weight", f"{way}-block", self.shape, blocks, (1, 3), turned)

    def codes(self, outs: Range, ins: Range) -> Tensor:
        """Of some outputs and inputs [outs, ins], as uint8, int8 or float8."""
        fold = 32 // self.bits
        if self.kind == "gptq":
            words = _read(self.parts["qweight"], (ins[0] // fold, -(-ins[1] // fold)), outs)
            found = self._unpacked(words).movedim(-1, 1).flatten(0, 1)  # [inputs, outputs]
            return found[ins[0] % fold :][: ins[1] - ins[0]].t()
        if self.kind == "awq":
            found = self._awq("qweight", ins, outs)
            return found.t()
        if self.kind == "packed":
            words = _read(self.parts["weight_packed"], outs, (ins[0] // fold, -(-ins[1] // fold)))
            return self._unpacked(words).flatten(1)[:, ins[0] % fold :][:, : ins[1] - ins[0]]
        return _read(self.parts["weight"], outs, ins)

    def zeros(self, outs: Range, groups: Range) -> Tensor:
        """The codes that stand for zero, uint8 [outs, groups]."""
        fold = 32 // self.bits
        if self.kind == "gptq":
            words = _read(self.parts["qzeros"], groups, (outs[0] // fold, -(-outs[1] // fold)))
            found = self._unpacked(words).flatten(1)[:, outs[0] % fold :][:, : outs[1] - outs[0]]
            return ((found + self.shift) & (2**self.bits - 1)).t()
        if self.kind == "awq":
            return self._awq("qzeros", groups, outs).t()
        given = self.parts.get("weight_zero_point")
        if given is None:  # codes are signed, and stored with so much added
            return torch.full((outs[1] - outs[0], groups[1] - groups[0]), 2 ** (self.bits - 1), dtype=torch.uint8)
        words = _read(given, (outs[0] // fold, -(-outs[1] // fold)), groups)
        return self._unpacked(words).movedim(-1, 1).flatten(0, 1)[outs[0] % fold :][: outs[1] - outs[0]]

    def scales(self, rows: Range, columns: Range) -> Tensor:
        """Of some blocks [rows, columns]."""
        if "scales" in self.parts:
            return _read(self.parts["scales"], columns, rows).t()
        given = self._scale
        if len(given.shape) == 2:
            return _read(given, rows, columns)
        whole = given.read(whole_of(given.shape)).reshape(-1, 1)
        return whole[slice(*rows)]

    @property
    def _scale(self) -> Weight:
        return self.parts.get("weight_scale_inv") or self.parts.get("weight_scale") or self.parts["scales"]

    def plain(self, box: Box) -> Tensor:
        """Codes times scales, of a box [outputs, inputs], in the scales' type."""
        outs, ins = _ranges(box)
        rows, columns = self.block
        is_sorted = self.order is not None
        places = torch.arange(*ins) if self.order is None else self.order[slice(*ins)]
        first, last = (0, self.shape[1] // columns) if is_sorted else (ins[0] // columns, -(-ins[1] // columns))
        scales = self.scales((outs[0] // rows, -(-outs[1] // rows)), (first, last))
        at = (torch.arange(*outs) // rows - outs[0] // rows)[:, None], (places // columns - first)[None]
        found = self.codes(outs, ins).to(scales.dtype)
        if self.kind != "plain":
            zeros = self.zeros(outs, (first, last))
            found = found - zeros[torch.arange(len(zeros))[:, None], at[1]].to(scales.dtype)
        return found * scales[at]

    def part(self, how: StoredWeight, part: str, box: Box) -> Tensor:
        """A box of what a model keeps in the weight's place."""
        if part == "order":
            assert self.order is not None
            return self.order[box.slices()]
        if self.kind != "plain":
            return self._grouped(part, box)
        if len(how.cut) == 2:
            outs, ins = _ranges(box)
            if part == "scales" and how.dims == (1,) and self.block[0] > 1:
                return self.scales((0, 1), (0, 1)).expand(outs[1] - outs[0], 1)
            if part == "scales":
                return self.scales(outs, ins).to(self._scale.dtype)
            return _as_bytes(self.codes(outs, ins))
        (above, from_row, left, from_column), (many, deep, wide, long) = box
        _, rows, _, columns = how.cut
        if part == "scales":
            tall, broad = (torch.arange(at, at + size) * step // of for at, size, step, of in (
                (above, many, rows, self.block[0]), (left, wide, columns, self.block[1]),
            ))  # fmt: skip
            read = self.scales((int(tall[0]), int(tall[-1]) + 1), (int(broad[0]), int(broad[-1]) + 1))
            return read[(tall - tall[0])[:, None], broad - broad[0]][:, None, :, None]
        found = self.codes((above * rows, (above + many) * rows), (left * columns, (left + wide) * columns))
        found = _as_bytes(found).reshape(many, rows, wide, columns)
        return found[:, from_row : from_row + deep, :, from_column : from_column + long]

    def _grouped(self, part: str, box: Box) -> Tensor:
        (first, group, at), (many, groups, long) = box
        outs, size = (first, first + many), self.block[1]
        if part == "scales":
            return self.scales(outs, (group, group + groups))[..., None]
        if part == "zeros":
            return self.zeros(outs, (group, group + groups))[..., None]
        if self.order is None:
            found = self.codes(outs, (group * size, (group + groups) * size))
        else:
            found = self.codes(outs, (0, self.shape[1]))[:, self.order.argsort()]
            found = found[:, group * size : (group + groups) * size]
        found = found.reshape(many, groups, size)
        return (pack(found) if self.bits == 4 else found)[..., at : at + long]

    def _awq(self, part: str, rows: Range, outs: Range) -> Tensor:
        words = _read(self.parts[part], rows, (outs[0] // 8, -(-outs[1] // 8)))
        found = self._unpacked(words)[..., list(_PLACES)].flatten(1)
        return found[:, outs[0] % 8 :][:, : outs[1] - outs[0]]

    def _unpacked(self, words: Tensor) -> Tensor:
        """int32 [..., n] -> uint8 [..., n, 32 / bits], the lowest bits first."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        return ((words[..., None] >> shifts) & (2**self.bits - 1)).to(torch.uint8)

    def _refused(self, why: str) -> AutoparError:
        return AutoparError(f"the codes of {self.name} cannot be read", values=why, remedy=_REMEDY)


def packed_of(weights: Mapping[str, Weight], folder: Path) -> dict[str, Packed]:
    """All weights of a checkpoint that are codes, by the name of the weight (`X.weight`).

    Raises:
        AutoparError: layouts that are not known, parts that do not fit each other.
    """
    said = _said(folder)
    found: dict[str, Packed] = {}
    for name, weight in weights.items():
        prefix, _, end = name.rpartition(".")
        others = {each: weights[f"{prefix}.{each}"] for each in _ENDS.get(end, ()) if f"{prefix}.{each}" in weights}
        if others and (end != "weight" or weight.dtype.itemsize == 1):
            packed = _packed(f"{prefix}.weight", end, {end: weight, **others}, said)
            found[packed.name] = packed
    return found


def held(
    weights: Mapping[str, Weight],
    packed: Mapping[str, Packed],
    folder: Path,
    kept: Mapping[str, StoredWeight],
    turned: Collection[str] = (),
) -> dict[str, Weight]:
    """The weights of a checkpoint under names of models. packed: which of them are codes (`packed_of`). kept: of
    weights that the model keeps as codes, by their names in the checkpoint; others are whole. turned: those that it has
    as [in, out].
    """
    used = {f"{name.removesuffix('weight')}{part}" for name, each in packed.items() for part in each.parts}
    found = {name: each for name, each in weights.items() if name not in used}
    for name, each in packed.items():
        how = kept.get(name)
        if how is None:
            is_turned = name in turned
            shape = each.shape[::-1] if is_turned else each.shape
            found[name] = Weight(each._scale.dtype, shape, partial(_turned, each) if is_turned else each.plain)
        else:
            if replace(how, turned=False) != each.how(False):
                raise AutoparError(
                    f"the model keeps {name} otherwise than the checkpoint",
                    where=str(folder),
                    values=f"{how.way} {how.cut}, not {each.how(False).way} {each.how(False).cut}",
                    remedy="autopar.store_weights(model, like=folder) with this checkpoint's folder",
                )
            dtypes = how.dtypes(each._scale.dtype)
            for part, size in how.shapes().items():
                found[f"{name}_{part}"] = Weight(dtypes[part], size, partial(each.part, how, part))
    return found


def _turned(packed: Packed, box: Box) -> Tensor:
    return packed.plain(Box(box.offsets[::-1], box.sizes[::-1])).t()


def _packed(name: str, end: str, parts: dict[str, Weight], said: Mapping[str, Any]) -> Packed:
    """Of shapes alone, but for compressed-tensors' number of inputs."""
    first, is_right = parts[end].shape, len(parts[end].shape) == 2
    found = Packed(name, "", 0, (0, 0), (0, 0), parts)
    if not is_right:
        raise found._refused(f"{end} {first}")
    try:
        if end == "weight":
            found = _plain(found, said)
        elif end == "weight_packed":
            given = parts["weight_shape"]
            outputs, inputs = given.read(whole_of(given.shape)).tolist()
            groups = parts["weight_scale"].shape[1]
            found = replace(
                found, kind="packed", bits=32 * first[1] // inputs, shape=(outputs, inputs), block=(1, inputs // groups)
            )
        else:
            found = _of_words(found, said)
    except (KeyError, ZeroDivisionError, ValueError, IndexError) as error:
        raise found._refused(f"{ {part: each.shape for part, each in parts.items()} }") from error
    outputs, inputs = found.shape
    if found.kind != "plain" and (
        found.bits not in (4, 8) or not inputs or inputs % found.block[1] or found.block[1] % 2
    ):
        raise found._refused(f"{found.bits} bits, {inputs} inputs in groups of {found.block[1]}")
    return found


def _plain(found: Packed, said: Mapping[str, Any]) -> Packed:
    outputs, inputs = found.parts["weight"].shape
    scale = found._scale.shape
    if "weight_scale_inv" in found.parts and len(scale) == 2:
        rows, columns = said.get("weight_block_size") or (128, 128)
        if scale != (-(-outputs // rows), -(-inputs // columns)):
            raise ValueError(scale)
    elif math.prod(scale) == 1:
        rows, columns = outputs, inputs
    elif scale in ((outputs,), (outputs, 1)):
        rows, columns = 1, inputs
    else:
        raise ValueError(scale)
    return replace(found, kind="plain", bits=8, shape=(outputs, inputs), block=(rows, columns))


def _of_words(found: Packed, said: Mapping[str, Any]) -> Packed:
    """GPTQ's or AWQ's."""
    first, (groups, outputs) = found.parts["qweight"].shape, found.parts["scales"].shape
    zeros = found.parts["qzeros"].shape
    if first[1] == outputs:
        bits = 32 * zeros[1] // outputs
        inputs = 32 * first[0] // bits
        shift = 0 if str(said.get("checkpoint_format", "gptq")) == "gptq_v2" else 1
        kind = "gptq"
    elif first[1] * 8 == outputs and str(said.get("version", "gemm")).lower() == "gemm":
        bits, inputs, shift, kind = 4, first[0], 0, "awq"
    else:
        raise ValueError(first)
    if zeros != (groups, outputs * bits // 32) or outputs * bits % 32:
        raise ValueError(zeros)
    return replace(found, kind=kind, bits=bits, shape=(outputs, inputs), block=(1, inputs // groups), shift=shift)


def _said(folder: Path) -> Mapping[str, Any]:
    """What is said of the layout beside it."""
    if not folder.is_dir():
        return {}
    for name, key in (("config.json", "quantization_config"), ("quantize_config.json", ""), ("quant_config.json", "")):
        path = folder / name
        if not path.is_file():
            continue
        text = files.read_text(path, "configuration", most_bytes=1 << 24, remedy=_REMEDY)
        said = files.parse_json(text, "configuration", where=str(path), remedy=_REMEDY)
        said = said.get(key) if key and isinstance(said, dict) else said
        if isinstance(said, dict):
            return said
    return {}


def _read(weight: Weight, rows: Range, columns: Range) -> Tensor:
    return weight.read(Box((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])))


def _ranges(box: Box) -> tuple[Range, Range]:
    (first, second), (many, wide) = box
    return (first, first + many), (second, second + wide)


def _as_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.is_floating_point() else codes
