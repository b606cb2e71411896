"""What flows between regions, and the parameters and buffers that fill their slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.ir.tensor_type import TensorType


def gradient_key(name: str) -> str:
    """What `backward` calls the gradient of an input: no parameter's name begins with a dot."""
    return f".{name}"


def gradient_of(key: str) -> str:
    """What a gradient is of, in words: a parameter's name, or an input by its `gradient_key`."""
    return f"input {key[1:]}" if key.startswith(".") else key


@dataclass(frozen=True, slots=True)
class Port:
    """A named value that enters or leaves a region or the program.

    differentiable: a gradient flows here. logical: the user's shape, where `type` has padding at the end of a dim.
    word: what the `forward` of a block calls what it is given; of a result, what the block that reads it does.
    """

    name: str
    type: TensorType
    differentiable: bool = False
    logical: tuple[int, ...] | None = None
    word: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{' ∂' if self.differentiable else ''}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of a region, by its name inside the region's module (`q_proj.weight`)."""

    name: str
    type: TensorType
    trainable: bool
    is_parameter: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class ValueRef:
    """What a call reads: the program's input `name`, or result `index` of call `call`."""

    call: int = -1
    index: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"%{self.name}" if self.call < 0 else f"{self.call}.{self.index}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter or buffer of the model: its canonical name, the other names it is tied to, stored and compute
    types.

    padded: the shape that operators see, where that has rows of zeros behind those of `type` (`passes/pad.py`).
    """

    name: str
    type: TensorType
    stored_dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    aliases: tuple[str, ...] = ()
    padded: tuple[int, ...] | None = None

    @property
    def seen(self) -> TensorType:
        """The type that operators see."""
        return self.type if self.padded is None else TensorType(self.padded, self.type.dtype)
