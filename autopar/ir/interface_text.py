"""A tensor of a program's border in the notation of shardings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from autopar.ir.interface import TensorInterface
from autopar.ir.sharding import format_shape
from autopar.ir.tensor_type import dtype_name


def format_tensor(tensor: TensorInterface, axes: Sequence[str]) -> str:
    """`f32[4096/tp, 4096/dp]`."""
    return format_shape(dtype_name(tensor.dtype), tensor.shape, tensor.sharding, axes)


def starred(name: str) -> str:
    """`model.layers.*.mlp.up_proj.weight`: the name of a tensor of any layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def format_tensors(tensors: Sequence[TensorInterface], axes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and types; of those that only a number in their names tells apart, such as the layers' caches, the kinds
    that there are: `past_key_values.*`, `64 × bf16[8, 8/tp, 2048, 128], 32 × i64[]`.
    """
    for name, group in groupby(tensors, lambda each: starred(each.name)):
        members = list(group)
        kinds = Counter(format_tensor(each, axes) for each in members)
        if len(members) == 1:
            yield members[0].name, format_tensor(members[0], axes)
        else:
            yield name, ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
