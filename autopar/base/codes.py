"""Numbers kept as codes of a byte or less, with scales: how keys, values and weights are stored.

    x [..., n]  →  codes [..., n] (int4: two a byte, [..., n/2]), scales [..., 1];  x ≈ codes · scales

A scale is the largest magnitude of its row over the largest code, so that no code is clipped; rows are those of the
last dim, or of several together. Zero stays zero. Both ways are plain operators of torch on whole tensors: programs
hold them as any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from autopar.base.errors import AutoparError


@dataclass(frozen=True, slots=True)
class Storage:
    """How numbers are kept. dtype: of what is stored. largest: magnitude of a code. per_byte: codes in a byte."""

    name: str
    dtype: torch.dtype
    largest: float
    per_byte: int = 1

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the codes of numbers of this shape.

        Raises:
            AutoparError: rows of an odd length, where a byte holds two codes.
        """
        if shape[-1] % self.per_byte:
            raise AutoparError(
                f"{self.name} keeps {self.per_byte} numbers a byte, and a row has {shape[-1]}",
                values=f"shape {tuple(shape)}",
                remedy="store them as int8 or fp8",
            )
        return (*shape[:-1], shape[-1] // self.per_byte)

    def encode(self, x: Tensor, dims: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
        """x [..., n] -> codes, of `codes_shape`, and scales [..., 1] of x's dtype. Computed in float32 at least. dims:
        of numbers that have one scale.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        most = wide.abs().amax(dims, keepdim=True) / self.largest
        scales = most.clamp(min=torch.finfo(x.dtype).tiny).to(x.dtype)
        steps = (wide / scales.to(wide.dtype)).clamp(-self.largest, self.largest)
        return self._stored(steps), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The inverse, but for rounding: [..., n], of the scales' dtype."""
        return self._read(codes).to(scales.dtype) * scales

    def _stored(self, steps: Tensor) -> Tensor:
        if self.name == "fp8":  # as bytes: few operators and no collective of gloo take float8
            return steps.to(torch.float8_e4m3fn).view(torch.uint8)
        whole = steps.round()
        if self.per_byte == 1:
            return whole.to(self.dtype)
        return pack((whole + _MIDDLE).to(torch.uint8))

    def _read(self, codes: Tensor) -> Tensor:
        if self.name == "fp8":
            return codes.view(torch.float8_e4m3fn)
        if self.per_byte == 1:
            return codes
        return unpack(codes).to(torch.int8) - _MIDDLE


def pack(codes: Tensor) -> Tensor:
    """Codes below 16, uint8 [..., n] -> two a byte [..., n/2], the first half of a row in the lower bits."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def unpack(both: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.cat([both & 15, both >> 4], -1)


_MIDDLE = 8
"""The nibble of zero."""
STORAGES: Mapping[str, Storage] = MappingProxyType(
    {
        "fp8": Storage("fp8", torch.uint8, 448.0),  # e4m3: OCP 8-bit floating point, table 1
        "int8": Storage("int8", torch.int8, 127.0),
        "int4": Storage("int4", torch.uint8, 7.0, per_byte=2),
    }
)
"""By the name that a user gives."""


_BY_CHANNEL = "-channel"
CACHES = (*STORAGES, *(f"{name}{_BY_CHANNEL}" for name in STORAGES))
"""How keys and values may be stored: with a scale a token; or keys with one a channel of a group of tokens."""


def is_by_channel(storage: str | None) -> bool:
    """Whether keys have a scale a channel, and the last tokens are kept as they are. storage: of `CACHES`."""
    return storage is not None and storage.endswith(_BY_CHANNEL)


def codes_of(storage: str) -> Storage:
    """What codes a cache holds. storage: of `CACHES`."""
    return STORAGES[storage.removesuffix(_BY_CHANNEL)]


def check_storage(name: str | None, what: str) -> None:
    """Raises an AutoparError for a name that is none of `CACHES`. what: is stored."""
    if name is not None and name not in CACHES:
        raise AutoparError(
            f"{what} cannot be stored as {name!r}",
            remedy=f"one of {', '.join(map(repr, CACHES))}; leave it out to store them as they are",
        )


class _E2M1(Storage):
    """Four bits as OCP's MX formats have them: a sign, two of an exponent, one of a fraction; two a byte, the earlier
    one in the lower bits. Codes are read as twice what they stand for, whole numbers up to 12, so that a scale is half
    of the format's: a power of two, by the largest magnitude (OCP MX 1.0, 6.3), above which numbers may be clipped.
    """

    __slots__ = ()

    def encode(self, x: Tensor, dims: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        exponents = torch.frexp(wide.abs().amax(dims, keepdim=True))[1]
        scales = torch.ldexp(torch.ones_like(wide[..., :1]).expand_as(exponents), (exponents - 4).clamp(min=-100))
        steps = (wide / scales).abs()
        # In the middle of two the one with an even code.
        codes = (wide < 0).to(torch.uint8) << 3
        for middle in (0.5, 2.5, 5.0, 10.0):
            codes = codes + (steps > middle).to(torch.uint8)
        for middle in (1.5, 3.5, 7.0):
            codes = codes + (steps >= middle).to(torch.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4, scales.to(x.dtype)

    def _read(self, codes: Tensor) -> Tensor:
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8)
        size = both & 7
        size = size + (size - 4).clamp(min=0) + 2 * (size - 6).clamp(min=0)
        return size * (1 - 2 * (both >> 3))


E2M1: Storage = _E2M1("mxfp4", torch.uint8, 12.0, per_byte=2)
"""Of weights alone."""
STORAGES_OF_WEIGHTS: Mapping[str, Storage] = MappingProxyType({**STORAGES, E2M1.name: E2M1})


def decoded(storage: str, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """What the codes of a weight say, of the scales' dtype. storage: of `STORAGES_OF_WEIGHTS`. zeros: the codes that
    stand for zero, uint8, of the scales' shape; codes are not signed then.
    """
    kind = STORAGES_OF_WEIGHTS[storage]
    if zeros is None:
        return kind.decode(codes, scales)
    raw = unpack(codes) if kind.per_byte == 2 else codes
    return (raw.to(scales.dtype) - zeros.to(scales.dtype)) * scales
