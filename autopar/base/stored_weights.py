"""Weights kept as codes with scales (`codes.py`), for inference: modules hold these in the place of a weight, which is
made of them whenever it is read.

    linear.weight [out, in]  →  linear.weight_codes, linear.weight_scales;  linear.weight = codes · scales

Codes are kept in the shape in which numbers share a scale, so that what splits whole rows, groups or blocks can split
codes and scales alike, and nothing else:

    "int8", "fp8"    [out, in], scales [out, 1]: one for each output
    "int4"           [out, in/g, g/2], scales [out, in/g, 1]: one for every g inputs of an output
    "fp8-tensor"     [out, in], scales [1, 1]
    "fp8-block"      [out/b, b, in/b, b], scales [out/b, 1, in/b, 1]: one for every block, as DeepSeek-V3 (2412.19437)
    "int4-zero"      as "int4", and "int8-zero" [out, in/g, g], with linear.weight_zeros [out, in/g, 1]: the codes that
                     stand for zero, as AWQ and GPTQ have them (read from checkpoints alone)

Inputs may be sorted by their group (GPTQ's act-order): linear.weight_order [in] is where each of them is then.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.base.codes import STORAGES, Storage, pack, unpack
from autopar.base.errors import AutoparError

Module = TypeVar("Module", bound=nn.Module)
WAYS = ("int8", "int4", "fp8", "fp8-tensor", "fp8-block")
GROUP, BLOCK = 128, 128
"""Inputs that have one scale in int4, and sides of a block: those of GPTQ, AWQ and DeepSeek's."""
_STORED = "_autopar_stored"
_PLAIN = "_autopar_plain"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How a weight is kept. way: of `WAYS`. shape: of the weight as [out, in]. cut: the same in rows, groups or blocks.
    dims: of `cut`, whose numbers share a scale. turned: the module has it as [in, out]. sorted: inputs are in another
    order, that of `weight_order`.
    """

    name: str
    way: str
    shape: tuple[int, int]
    cut: tuple[int, ...]
    dims: tuple[int, ...]
    turned: bool
    sorted: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Parameters that it is made of."""
        return ("codes", "scales", *(["zeros"] if self.has_zeros else []), *(["order"] if self.sorted else []))

    @property
    def has_zeros(self) -> bool:
        """Whether another code than zero may stand for zero."""
        return self.way.endswith("-zero")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its parts."""
        shared = tuple(1 if dim in self.dims else size for dim, size in enumerate(self.cut))
        every = {
            "codes": self._storage.codes_shape(self.cut),
            "scales": shared,
            "zeros": shared,
            "order": self.shape[1:],
        }
        return {part: every[part] for part in self.parts}

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The same. dtype: of the weight."""
        codes = torch.uint8 if self.has_zeros else self._storage.dtype
        every = {"codes": codes, "scales": dtype, "zeros": torch.uint8, "order": torch.int64}
        return {part: every[part] for part in self.parts}

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """The weight as the module has it -> its parts; inputs are sorted back to front, where they are."""
        plain = weight.t() if self.turned else weight
        order = torch.arange(self.shape[1] - 1, -1, -1, device=weight.device)
        cut = (plain[:, order] if self.sorted else plain).reshape(self.cut)
        if not self.has_zeros:
            codes, scales = self._storage.encode(cut, self.dims)
            return {"codes": codes, "scales": scales} | ({"order": order} if self.sorted else {})
        most = 15 if self._storage.per_byte == 2 else 255
        low, high = (each.clamp(**bound) for each, bound in (
            (cut.amin(self.dims, keepdim=True), {"max": 0}), (cut.amax(self.dims, keepdim=True), {"min": 0}),
        ))  # fmt: skip
        scales = ((high - low) / most).clamp(min=torch.finfo(weight.dtype).tiny)
        zeros = (-low / scales).round().clamp(0, most)
        codes = ((cut / scales).round() + zeros).clamp(0, most).to(torch.uint8)
        packed = pack(codes) if self._storage.per_byte == 2 else codes
        found = {"codes": packed, "scales": scales, "zeros": zeros.to(torch.uint8), "order": order}
        return {part: found[part] for part in self.parts}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse, but for rounding."""
        codes, scales = parts["codes"], parts["scales"]
        if self.has_zeros:
            raw = unpack(codes) if self._storage.per_byte == 2 else codes
            found = ((raw.to(scales.dtype) - parts["zeros"].to(scales.dtype)) * scales).reshape(self.shape)
        else:
            found = self._storage.decode(codes, scales).reshape(self.shape)
        if self.sorted:
            found = found.index_select(1, parts["order"])
        return found.t() if self.turned else found

    @property
    def _storage(self) -> Storage:
        return STORAGES[self.way.partition("-")[0]]


def store_weights(model: Module, way: str, *, group: int = GROUP, leave: Sequence[str] = ()) -> Module:
    """As `autopar.store_weights`, by one of `WAYS`."""
    if way not in WAYS or group < 2 or group % 2:
        raise AutoparError(
            f"weights cannot be stored as {way!r}" if way not in WAYS else f"a group of {group} inputs",
            remedy=f"one of {', '.join(map(repr, WAYS))}, with a group of an even number of inputs",
        )
    check_not_stored(model)
    chosen = list(_linear_layers(model, leave))
    if not chosen:
        raise AutoparError(f"{type(model).__name__} has no linear layer whose weight could be stored as {way}")
    for module, turned in chosen:
        _store(module, _how("weight", way, module.weight, turned, group))
    return model.requires_grad_(False)


def check_not_stored(model: nn.Module) -> None:
    """Raises an AutoparError for a model whose weights are codes."""
    if is_stored(model):
        raise AutoparError("the model's weights are stored as codes already", remedy="store them once")


def is_stored(model: nn.Module) -> bool:
    """Whether some of its weights are codes."""
    return any(_STORED in vars(module) for module in model.modules())


def ways_of(model: nn.Module) -> str:
    """The ways in which its weights are stored, in words; empty where none is."""
    return " and ".join(dict.fromkeys(how.way for _, how in stored_modules(model)))


def how_stored(module: nn.Module) -> StoredWeight | None:
    """How it keeps its weight; None for the weight itself."""
    found: StoredWeight | None = vars(module).get(_STORED)
    return found


def is_turned(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is [in, out] (GPT-2's Conv1D)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def stored_modules(model: nn.Module) -> Iterator[tuple[Any, StoredWeight]]:
    """The modules of which a weight is stored, and how."""
    for module in model.modules():
        found = how_stored(module)
        if found is not None:
            yield module, found


def fill(model: nn.Module, draw: Callable[[tuple[int, ...]], Tensor]) -> dict[nn.Module, Tensor]:
    """Write weights of its own into each that is stored; those, by module, before they were rounded. draw: one of a
    shape.
    """
    written: dict[nn.Module, Tensor] = {}
    for module, how in stored_modules(model):
        weight = draw(how.shape[::-1] if how.turned else how.shape)
        written[module] = weight
        for part, value in how.encode(weight).items():
            getattr(module, f"{how.name}_{part}").data.copy_(value)
    return written


@contextmanager
def unrounded(weights: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Inside, modules have these weights, not what their codes say."""
    for module, weight in weights.items():
        vars(module)[_PLAIN] = weight
    try:
        yield
    finally:
        for module in weights:
            del vars(module)[_PLAIN]


def check_not_trained(model: nn.Module) -> None:
    """Raises an AutoparError for a model whose weights are codes, which take no gradients."""
    if is_stored(model):
        raise AutoparError(
            "weights that are stored as codes are not trained",
            where=type(model).__name__,
            remedy="plan with inference=True, and call the compiled model under torch.no_grad(); train it before "
            "store_weights",
        )


def _linear_layers(model: nn.Module, leave: Sequence[str]) -> Iterator[tuple[Any, bool]]:
    """Those whose weights are stored, and whether they have them as [in, out]."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        turned = is_turned(module)
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or not (turned or isinstance(module, nn.Linear)):
            continue
        if module is head or uses[id(weight)] > 1 or any(fnmatch.fnmatchcase(name, each) for each in leave):
            continue
        if weight.is_floating_point():
            yield module, turned


def _how(name: str, way: str, weight: Tensor, turned: bool, group: int) -> StoredWeight:
    outputs, inputs = weight.shape[::-1] if turned else weight.shape
    shape = (outputs, inputs)
    if way == "int4":
        size = group if inputs % group == 0 else inputs
        return StoredWeight(
            name, way if size % 2 == 0 else "int8", shape, (outputs, inputs // size, size), (2,), turned
        )
    if way == "fp8-block" and outputs % BLOCK == 0 and inputs % BLOCK == 0:
        cut = (outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
        return StoredWeight(name, way, shape, cut, (1, 3), turned)
    return StoredWeight(name, way, shape, shape, (0, 1) if way == "fp8-tensor" else (1,), turned)


def keep_as(module: nn.Module, how: StoredWeight, parts: Mapping[str, Tensor]) -> None:
    """Put the parts of a weight into its module, in its place."""
    del module._parameters[how.name]
    kind: Any = type(module)
    module.__class__ = _class_of(kind, how.name)
    vars(module)[_STORED] = how
    for part, value in parts.items():
        module.register_parameter(f"{how.name}_{part}", nn.Parameter(value.contiguous(), requires_grad=False))


def _store(module: nn.Module, how: StoredWeight) -> None:
    with torch.no_grad():
        parts = how.encode(module._parameters[how.name].detach())  # type: ignore[union-attr]
    keep_as(module, how, parts)


@cache
def _class_of(kind: Any, name: str) -> Any:
    """The class whose weight is made of codes: one for all layers of a kind, so that blocks that are alike stay so."""

    def read(self: Any) -> Tensor:
        plain = vars(self).get(_PLAIN)
        if plain is not None:
            return plain
        how: StoredWeight = vars(self)[_STORED]
        return how.decode({part: getattr(self, f"{name}_{part}") for part in how.parts})

    namespace = {name: property(read), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), namespace)
