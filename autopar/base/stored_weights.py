"""Weights kept as codes with scales (`codes.py`), for inference: modules hold these in the place of a weight, which is
made of them whenever it is read.

    linear.weight [out, in]  →  linear.weight_codes, linear.weight_scales;  linear.weight = codes · scales

Codes are kept in the shape in which numbers share a scale, so that what splits whole rows, groups or blocks can split
codes and scales alike, and nothing else:

    "int8", "fp8"    [out, in], scales [out, 1]: one for each output
    "int4"           [out, in/g, g/2], scales [out, in/g, 1]: one for every g inputs of an output
    "fp8-tensor"     [out, in], scales [1, 1]
    "fp8-block"      [out/b, b, in/b, b], scales [out/b, 1, in/b, 1]: one for every block, as DeepSeek-V3 (2412.19437)
    "mxfp4"          as "int4", of e2m1 with scales that are powers of two, one for every 32 inputs (OCP MX)
    "int4-zero"      as "int4", and "int8-zero" [out, in/g, g], with linear.weight_zeros [out, in/g, 1]: the codes that
                     stand for zero, as AWQ and GPTQ have them (read from checkpoints alone)

Inputs may be sorted by their group (GPTQ's act-order): linear.weight_order [in] is where each of them is then.

Experts in one parameter [experts, out, in] are as many such weights on top of each other: every part has their dim in
front, and of `experts.gate_up_proj` is called `experts.gate_up_proj_codes`, and so on.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.base.codes import STORAGES_OF_WEIGHTS, Storage, decoded, pack
from autopar.base.errors import AutoparError
from autopar.base.huggingface.experts import stacks_of

Module = TypeVar("Module", bound=nn.Module)
WAYS = ("int8", "int4", "mxfp4", "fp8", "fp8-tensor", "fp8-block")
GROUPS = {"int4": 128, "mxfp4": 32}
"""Inputs that have one scale: those of GPTQ and AWQ, and OCP's."""
BLOCK = 128
"""Sides of a block: DeepSeek's."""
LIES = ("out in", "in out")
"""How each of the matrices of a stack may lie."""
_STORED = "_autopar_stored"
_PLAIN = "_autopar_plain"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How a weight is kept. way: of `WAYS`. shape: of the weight as [out, in]. cut: the same in rows, groups or blocks.
    dims: of `cut`, whose numbers share a scale. turned: the module has it as [in, out]. sorted: inputs are in another
    order, that of `weight_order`. experts: so many lie on top of each other, each as the others say; 0 where the weight
    is one matrix.
    """

    name: str
    way: str
    shape: tuple[int, int]
    cut: tuple[int, ...]
    dims: tuple[int, ...]
    turned: bool
    sorted: bool = False
    experts: int = 0

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Of the weight, as the module has it."""
        return (*self._stack, *(self.shape[::-1] if self.turned else self.shape))

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
        return {part: (*self._stack, *every[part]) for part in self.parts}

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The same. dtype: of the weight."""
        codes = torch.uint8 if self.has_zeros else self._storage.dtype
        every = {"codes": codes, "scales": dtype, "zeros": torch.uint8, "order": torch.int64}
        return {part: every[part] for part in self.parts}

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """The weight as the module has it -> its parts; inputs are sorted back to front, where they are."""
        plain = self._turned(weight)
        order = torch.arange(self.shape[1] - 1, -1, -1, device=weight.device)
        cut = (plain[..., order] if self.sorted else plain).reshape(*self._stack, *self.cut)
        dims = tuple(dim + len(self._stack) for dim in self.dims)
        if not self.has_zeros:
            codes, scales = self._storage.encode(cut, dims)
            return {"codes": codes, "scales": scales} | ({"order": order} if self.sorted else {})
        most = 15 if self._storage.per_byte == 2 else 255
        low, high = (each.clamp(**bound) for each, bound in (
            (cut.amin(dims, keepdim=True), {"max": 0}), (cut.amax(dims, keepdim=True), {"min": 0}),
        ))  # fmt: skip
        scales = ((high - low) / most).clamp(min=torch.finfo(weight.dtype).tiny)
        zeros = (-low / scales).round().clamp(0, most)
        codes = ((cut / scales).round() + zeros).clamp(0, most).to(torch.uint8)
        packed = pack(codes) if self._storage.per_byte == 2 else codes
        found = {"codes": packed, "scales": scales, "zeros": zeros.to(torch.uint8), "order": order}
        return {part: found[part] for part in self.parts}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse, but for rounding."""
        found = decoded(self._storage.name, parts["codes"], parts["scales"], parts.get("zeros"))
        found = found.reshape(*self._stack, *self.shape)
        if self.sorted:
            found = found.index_select(1, parts["order"])
        return self._turned(found)

    def _turned(self, weight: Tensor) -> Tensor:
        """From [out, in] to what the module has, and back."""
        if not self.turned:
            return weight
        return weight.transpose(1, 2) if self.experts else weight.t()

    @property
    def _stack(self) -> tuple[int, ...]:
        return (self.experts,) if self.experts else ()

    @property
    def _storage(self) -> Storage:
        return STORAGES_OF_WEIGHTS[self.way.partition("-")[0]]


def store_weights(
    model: Module,
    way: str,
    *,
    group: int | None = None,
    leave: Sequence[str] = (),
    stacks: Mapping[str, str] = MappingProxyType({}),
) -> Module:
    """As `autopar.store_weights`, by one of `WAYS`."""
    if way not in WAYS or (group is not None and (group < 2 or group % 2)):
        raise AutoparError(
            f"weights cannot be stored as {way!r}" if way not in WAYS else f"a group of {group} inputs",
            remedy=f"one of {', '.join(map(repr, WAYS))}, with a group of an even number of inputs",
        )
    check_not_stored(model)
    size = group or GROUPS.get(way, 0)
    chosen = [
        (module, _how("weight", way, module.weight, turned, size)) for module, turned in _linear_layers(model, leave)
    ]
    for module, name, turned, _ in stacks_in(model, leave, stacks):
        chosen.append((module, _how(name, way, module._parameters[name], turned, size)))
    if not chosen:
        raise AutoparError(
            f"{type(model).__name__} has no linear layer or experts whose weights could be stored as {way}"
        )
    for module, how in chosen:
        _store(module, how)
    return model.requires_grad_(False)


def stacks_in(
    model: nn.Module, leave: Sequence[str] = (), stacks: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[Any, str, bool, str]]:
    """The parameters that are experts on top of each other, as transformers has them and as `stacks` names them: the
    module, the parameter's name in it, whether its matrices are [in, out], and its full name.

    Raises:
        AutoparError: `stacks` names no such parameter, or says something else of how they lie.
    """
    uses, unmet = _uses(model), set(stacks)
    found = []
    for path, module in model.named_modules():
        known = stacks_of(module)
        for name, parameter in module._parameters.items():
            full = f"{path}.{name}" if path else name
            said = [pattern for pattern in stacks if fnmatch.fnmatchcase(full, pattern)]
            if parameter is None or parameter.dim() != 3 or not parameter.is_floating_point():
                continue
            unmet -= set(said)
            if uses[id(parameter)] > 1 or any(
                fnmatch.fnmatchcase(each, pattern) for each in (path, full) for pattern in leave
            ):
                continue
            if said or name in known:
                found.append((module, name, stacks[said[0]] == LIES[1] if said else known[name], full))
    if unmet or not set(stacks.values()) <= set(LIES):
        raise AutoparError(
            "there are no such experts" if unmet else "matrices of experts cannot lie so",
            values=", ".join(f"{pattern!r}: {lies!r}" for pattern, lies in stacks.items()),
            remedy="name parameters of three dims and say how the last two lie: "
            "stacks={'*.experts.w1': 'out in', '*.experts.w2': 'in out'}",
        )
    return found


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


def how_stored(module: nn.Module) -> Mapping[str, StoredWeight]:
    """How it keeps its weights that are codes, by their names."""
    found: dict[str, StoredWeight] = vars(module).get(_STORED, {})
    return found


def is_turned(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is [in, out] (GPT-2's Conv1D)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def stored_modules(model: nn.Module) -> Iterator[tuple[Any, StoredWeight]]:
    """The modules of which a weight is stored, and how."""
    for module in model.modules():
        for found in how_stored(module).values():
            yield module, found


Place = tuple[nn.Module, str]
"""Of a weight: its module, and its name there."""


def fill(model: nn.Module, draw: Callable[[tuple[int, ...]], Tensor]) -> dict[Place, Tensor]:
    """Write weights of its own into each that is stored; those, before they were rounded. draw: one of a shape."""
    written: dict[Place, Tensor] = {}
    for module, how in stored_modules(model):
        weight = draw(how.held_shape)
        written[module, how.name] = weight
        for part, value in how.encode(weight).items():
            getattr(module, f"{how.name}_{part}").data.copy_(value)
    return written


@contextmanager
def unrounded(weights: Mapping[Place, Tensor]) -> Iterator[None]:
    """Inside, modules have these weights, not what their codes say."""
    for (module, name), weight in weights.items():
        vars(module).setdefault(_PLAIN, {})[name] = weight
    try:
        yield
    finally:
        for module in {module for module, _ in weights}:
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
    uses = _uses(model)
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


def _uses(model: nn.Module) -> Counter[int]:
    """In how many places a model has each of its parameters, by identity."""
    return Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())


def _how(name: str, way: str, weight: Tensor, turned: bool, group: int) -> StoredWeight:
    outputs, inputs = weight.shape[:-3:-1] if turned else weight.shape[-2:]
    shape, experts = (outputs, inputs), weight.shape[0] if weight.dim() == 3 else 0
    if way in GROUPS:
        size = group if inputs % group == 0 else inputs
        groups = (outputs, inputs // size, size)
        return StoredWeight(name, way if size % 2 == 0 else "int8", shape, groups, (2,), turned, experts=experts)
    if way == "fp8-block" and outputs % BLOCK == 0 and inputs % BLOCK == 0:
        blocks = (outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
        return StoredWeight(name, way, shape, blocks, (1, 3), turned, experts=experts)
    dims = (0, 1) if way == "fp8-tensor" else (1,)
    return StoredWeight(name, way, shape, shape, dims, turned, experts=experts)


def keep_as(module: nn.Module, how: StoredWeight, parts: Mapping[str, Tensor]) -> None:
    """Put the parts of a weight into its module, in its place."""
    del module._parameters[how.name]
    kind: Any = type(module)
    module.__class__ = _class_of(kind, how.name)
    vars(module)[_STORED] = {**how_stored(module), how.name: how}
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
        plain: dict[str, Tensor] = vars(self).get(_PLAIN, {})
        if name in plain:
            return plain[name]
        how: StoredWeight = vars(self)[_STORED][name]
        return how.decode({part: getattr(self, f"{name}_{part}") for part in how.parts})

    namespace = {name: property(read), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), namespace)
