"""Plain data with tensors in it as JSON, and back: what schedulers, loaders and users' own entries are made of.

    None, True, 3, "text", [..], {"name": ..}    as they are
    {"$float": "nan"}                            floats that JSON has no word for
    {"$tuple": [..]}, {"$pairs": [[k, v], ..]}   tuples; mappings with keys that are no texts, or begin with $
    {"$counter": [[k, n], ..]}                   collections.Counter
    {"$bytes": "base64"}
    {"$tensor": ["int64", [2], "base64"]}        small tensors, by their bytes
    {"$at": "name"}                              other tensors: in a file of the checkpoint, under this name
    {"$like": "name"}                            the same, one that lies as its parameter does

Nothing here imports, calls or runs what a file says. Functions and objects have no place: an error names the entry.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor

INLINE_BYTES = 1024
"""Of the largest tensor that is written into the manifest itself."""
MOST_INLINE_BYTES = 1 << 24
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Put = Callable[[str, Tensor], dict[str, Any]]
Get = Callable[[str, bool], Tensor]


def encode(value: Any, where: str, put: Put) -> Any:
    """The value as JSON. where: the entry, for errors. put: keeps a tensor that is not small; gives what stands for it.

    Raises:
        AutoparError: something that is neither plain data nor a tensor; names the entry.
    """
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, int):  # NumPy's float64 is a float, enums of numbers are numbers
        return bool(value) if isinstance(value, bool) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _tensor(value, where, put)
    if isinstance(value, list):
        return [encode(each, f"{where}[{number}]", put) for number, each in enumerate(value)]
    if isinstance(value, tuple) and (type(value) is tuple or isinstance(value, torch.Size)):
        return {"$tuple": [encode(each, f"{where}[{number}]", put) for number, each in enumerate(value)]}
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, where, put), int(n)] for key, n in value.items()]}
    if isinstance(value, dict):
        entries = {key: encode(each, f"{where}[{key!r}]", put) for key, each in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in entries):
            return entries
        return {"$pairs": [[encode(key, f"a key of {where}", put), each] for key, each in entries.items()]}
    raise AutoparError(
        f"{where} cannot be saved: it is a {type(value).__module__}.{type(value).__qualname__}",
        remedy="A checkpoint holds numbers, texts, lists, tuples, mappings and tensors: hand in what of it is needed "
        "as these (state_dict(), .tolist(), torch.from_numpy)",
    )


def decode(value: Any, get: Get) -> Any:
    """What was encoded. get: the tensor of a name, and whether it lies as a parameter does.

    Raises:
        ValueError: no such encoding; says what is wrong.
    """
    if isinstance(value, list):
        return [decode(each, get) for each in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: decode(each, get) for key, each in value.items()}
    if len(value) != 1 or marks[0] not in _DECODERS:
        raise ValueError(f"{str(sorted(value))[:80]} stands for nothing")
    return _DECODERS[marks[0]](value[marks[0]], get)


def names_in(value: Any) -> dict[str, bool]:
    """The tensors that a tree names, and whether they lie as a parameter does."""
    found: dict[str, bool] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            for mark in ("$at", "$like"):
                if isinstance(each.get(mark), str):
                    found[each[mark]] = mark == "$like"
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return found


def _tensor(value: Tensor, where: str, put: Put) -> dict[str, Any]:
    if value.dtype not in NAMES or value.layout != torch.strided or value.is_quantized:
        raise AutoparError(
            f"{where} cannot be saved: it is a tensor of {value.dtype}, {value.layout}",
            remedy="Convert it to a dense tensor of a plain dtype",
        )
    held = local_tensor(value) if isinstance(value, DTensor) else value
    if held.is_meta:
        raise AutoparError(f"{where} cannot be saved: it has no values yet", remedy="Give it values first")
    if isinstance(value, DTensor) or value.numel() * value.element_size() > INLINE_BYTES:
        return put(where, value)
    return inline(value)


def inline(value: Tensor) -> dict[str, Any]:
    """A tensor by its bytes."""
    return {"$tensor": [NAMES[value.dtype], list(value.shape), base64.b64encode(bytes_of(value)).decode()]}


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor, row-major; of its own memory where that is possible."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def _decoded_tensor(value: Any, get: Get) -> Tensor:
    name, shape, text = _list_of(value, 3)
    if not isinstance(name, str) or name not in DTYPES or not isinstance(text, str) or not isinstance(shape, list):
        raise ValueError("a tensor is its dtype, shape and bytes")
    sizes = [size for size in shape if type(size) is int and 0 <= size <= MOST_INLINE_BYTES]
    content = _bytes(text)
    if len(sizes) != len(shape) or len(shape) > 32 or math.prod(sizes) * DTYPES[name].itemsize != len(content):
        raise ValueError(f"a tensor of {len(content)} bytes is said to be {name} {str(shape)[:80]}")
    if not content:
        return torch.empty(sizes, dtype=DTYPES[name])
    if name == "bool" and max(content) > 1:
        raise ValueError("a tensor of bool has other bytes than 0 and 1")
    return torch.frombuffer(bytearray(content), dtype=DTYPES[name]).reshape(sizes).clone()


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * MOST_INLINE_BYTES:
        raise ValueError("bytes are a text in base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"bytes are no base64: {error}") from error


def _list_of(value: Any, num: int | None = None) -> list[Any]:
    if not isinstance(value, list) or num not in (None, len(value)):
        raise ValueError(f"a list of {num if num is not None else 'values'} is asked for")
    return value


def _float(value: Any, get: Get) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError("a float is nan, inf or -inf")
    return float(value)


def _pairs(value: Any, get: Get) -> dict[Any, Any]:
    found = {}
    for pair in _list_of(value):
        key, each = _list_of(pair, 2)
        try:
            found[decode(key, get)] = decode(each, get)
        except TypeError as error:
            raise ValueError("a key is a number, a text or a tuple") from error
    return found


def _counter(value: Any, get: Get) -> Counter[Any]:
    found = _pairs(value, get)
    if not all(type(number) is int for number in found.values()):
        raise ValueError("a counter has whole numbers")
    return Counter(found)


def _named(like: bool) -> Callable[[Any, Get], Tensor]:
    def tensor(value: Any, get: Get) -> Tensor:
        if not isinstance(value, str):
            raise ValueError("the name of a tensor is a text")
        return get(value, like)

    return tensor


_DECODERS: Mapping[str, Callable[[Any, Get], Any]] = {
    "$float": _float,
    "$tuple": lambda value, get: tuple(decode(each, get) for each in _list_of(value)),
    "$pairs": _pairs,
    "$counter": _counter,
    "$bytes": lambda value, get: _bytes(value),
    "$tensor": _decoded_tensor,
    "$at": _named(False),
    "$like": _named(True),
}
