"""When one block repeats another: what a forward reads of its modules, and what it is called with.

A block is another one's repetition where everything that the first one's forward read is the same: classes, shapes and
dtypes of parameters, plain attributes (`training`, `num_heads`, …; only those that were read, so a layer's number does
not count unless it matters), and what it is called with, but for the tensors' values.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.huggingface import caches
from autopar.base.opaque import Opaque

MISSING = object()
PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None), type(Ellipsis), Opaque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
OWN = frozenset(vars(nn.Module())) - {"training"}
"""What `nn.Module` keeps for itself: parameters, buffers, modules and hooks are compared apart."""


def outermost_lists(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The elements, by path, of each module list of more than one that lies in no other one. Where a model has put
    None, there is none.
    """

    def walk(module: nn.Module, path: str) -> Iterator[dict[str, nn.Module]]:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                yield {f"{below}.{i}": each for i, each in enumerate(child) if isinstance(each, nn.Module)}
            else:
                yield from walk(child, below)

    return walk(model, "")


def shares_modules(model: nn.Module) -> bool:
    """Whether a module lies in several places: the tracer then calls it through proxies, each made where it is read."""
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    return len(modules) != len({*map(id, modules)})


def tied_tensors(model: nn.Module) -> set[int]:
    """Tensors with several names, by `id`."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    seen: set[int] = set()
    return {id(tensor) for _, tensor in named if id(tensor) in seen or seen.add(id(tensor))}  # type: ignore[func-returns-value]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than its forward."""
    return any(value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict))


def signature(leaves: list[Any], spec: Any) -> tuple[object, ...] | None:
    """What a block is called with, but for the values, and for what it keeps in a cache; None where that cannot be
    told.
    """
    described: list[object] = [spec, torch.is_grad_enabled(), torch.is_autocast_enabled()]
    seen: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            alike = seen.setdefault(id(leaf), place)
            described.append((alike, leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif caches.of_blocks(leaf):
            described.append("cache")
        elif (plain := _plain(leaf)) is not None:
            described.append(plain)
        else:
            return None
    return tuple(described)


def _plain(value: Any) -> object | None:
    """A value that can be compared at any time, with its type; None for any other."""
    if isinstance(value, (*PLAIN, *_FUNCTIONS)):  # a function is equal to itself alone
        return type(value), value
    if isinstance(value, functools.partial):
        value = [value.func, value.args, sorted(value.keywords.items())]
    if isinstance(value, (list, tuple, torch.Size)):
        parts = [_plain(part) for part in value]
        return None if any(part is None for part in parts) else (type(value), *parts)
    return None


def comparable(value: Any) -> Any:
    """As attributes are compared: plain ones by value, any other as itself."""
    plain = _plain(value)
    return value if plain is None else plain


Structure = tuple[tuple[tuple[str, type], ...], tuple[object, ...]]


def structure_of(block: nn.Module) -> Structure:
    """The classes of a block's modules, and what its parameters and buffers are."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    tensors = (*parameters, *((name, b.shape, b.dtype) for name, b in block.named_buffers()))
    return tuple((path, type(module)) for path, module in block.named_modules()), tensors


def reads_the_same(one: nn.Module, other: nn.Module, reads: Iterable[tuple[str, str]]) -> bool:
    """Whether the attributes `reads` (module's path, name) of two blocks of one structure are the same."""
    if one is other:
        return True
    ours, theirs = dict(one.named_modules()), dict(other.named_modules())
    for path, name in reads:
        before, now = vars(ours[path]).get(name, MISSING), vars(theirs[path]).get(name, MISSING)
        if now is not before and comparable(now) != comparable(before):
            return False
    return True


def differences(
    blocks: Mapping[str, nn.Module], structures: Mapping[str, Structure]
) -> dict[str, list[tuple[str, str]]]:
    """For each block the attributes (module's path, name) that are not the same in all blocks of its structure."""
    groups: dict[Structure, list[str]] = {}
    for path in blocks:
        groups.setdefault(structures[path], []).append(path)
    found: dict[str, list[tuple[str, str]]] = {}
    for paths in groups.values():
        first, *others = (_attributes(blocks[path]) for path in paths)
        places = {
            place: None
            for own in others
            for place in (*first, *own)
            if not _are_same(first.get(place, MISSING), own.get(place, MISSING))
        }
        found.update((path, list(places)) for path in paths)
    return found


def numbers(blocks: Mapping[str, nn.Module], structures: Mapping[str, Structure]) -> dict[str, set[tuple[str, str]]]:
    """For each block the attributes (module's path, name) that are whole numbers in all blocks of its structure."""
    found: dict[Structure, set[tuple[str, str]]] = {}
    for path, block in blocks.items():
        own = {place for place, value in _attributes(block).items() if type(value) is int}
        found[structures[path]] = found.get(structures[path], own) & own
    return {path: found[structures[path]] for path in blocks}


def _attributes(block: nn.Module) -> dict[tuple[str, str], Any]:
    """Plain attributes of all modules of a block."""
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in OWN
    }


def _are_same(one: Any, other: Any) -> bool:
    return one is other or ((plain := _plain(one)) is not None and plain == _plain(other))


def kinds(blocks: Mapping[str, nn.Module], structures: Mapping[str, Structure]) -> dict[str, object]:
    """Which blocks of one list will likely do the same, by path: equal kinds. Attributes that are different in every
    block, such as its number, are taken not to matter.
    """
    numbers: dict[Structure, int] = {}
    number = {path: numbers.setdefault(structures[path], len(numbers)) for path in blocks}
    attributes: dict[tuple[int, str, str], dict[str, object]] = {}
    for path, block in blocks.items():
        for below, module in block.named_modules():
            for name, value in vars(module).items():
                if name not in OWN and isinstance(value, PLAIN):
                    attributes.setdefault((number[path], below, name), {})[path] = value
    found: dict[str, list[object]] = {path: [number[path]] for path in blocks}
    for values in attributes.values():
        if 1 < len({*values.values()}) < len(values):
            for path, value in values.items():
                found[path].append(value)
    return {path: tuple(parts) for path, parts in found.items()}
