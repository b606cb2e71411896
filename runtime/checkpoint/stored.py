"""Load HuggingFace folders that store weights otherwise than the model holds them: experts one by one, other names,
codes of other tools.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import has_table, made_of
from autopar.base.huggingface.experts import stacks_of
from autopar.base.stored_weights import StoredWeight, how_stored, is_turned
from autopar.base.torch_compat.distributed import local_boxes, local_tensor
from autopar.runtime.checkpoint import coded_stacks, pretrained, quantized
from autopar.runtime.checkpoint.boxes import Box, whole_of
from autopar.runtime.checkpoint.formats import Weight, as_held, weights_of


def load_pretrained(
    model: nn.Module,
    path: Path,
    device: torch.device,
    elsewhere: Sequence[tuple[str, ...]] = (),
) -> None:
    """As `pretrained.load_pretrained`, also where transformers stores a model's weights under other names or its
    experts one by one, or the checkpoint has codes (`quantized.py`). Each rank reads the experts, and of them the rows,
    that it holds.

    Raises:
        AutoparError: as there.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    model_type = model_type if isinstance(model_type, str) else ""
    stored = pretrained.files_by_name(path)
    if not has_codes(stored):
        if not model_type or not path.is_dir() or not has_table(model_type):
            pretrained.load_pretrained(model, path, device, elsewhere)
            return
        if all(not each.is_stack and each.parts == ((name,),) for name, each in made_of(model_type, stored).items()):
            pretrained.load_pretrained(model, path, device, elsewhere)
            return
    with weights_of(path) as found, torch.no_grad():
        weights = held_by(found.weights, path, model, model_type)
        rounded: set[tuple[torch.dtype, torch.dtype]] = set()
        for names, target in pretrained.wanted(model, device, elsewhere, weights, path):
            if target is None:
                continue
            name = next(name for name in names if name in weights)
            weight = weights[name]
            if weight.shape != tuple(target.shape):
                raise AutoparError(
                    f"{name} has another shape in the checkpoint",
                    where=str(path),
                    values=f"{weight.shape}, the model's is {tuple(target.shape)}",
                    remedy="Load the checkpoint of this configuration",
                )
            if name.endswith("_scales") and torch.promote_types(weight.dtype, target.dtype) != target.dtype:
                rounded.add((weight.dtype, target.dtype))
            if not isinstance(target, DTensor) or not target.ndim:
                local = local_tensor(target) if isinstance(target, DTensor) else target
                local.copy_(weight.read(whole_of(weight.shape)))
                continue
            local = local_tensor(target)
            for box in local_boxes(target):
                piece = weight.read(Box(tuple(run.start for run in box), tuple(run.length for run in box)))
                local[tuple(slice(run.place, run.place + run.length) for run in box)] = piece.to(local)
    for given, kept in rounded:
        warnings.warn(
            f"autopar: scales of {path} are {given}, and rounded to the model's {kept}; a model in "
            f"{given} has the checkpoint's own", stacklevel=3,
        )  # fmt: skip


def has_codes(names: Collection[str]) -> bool:
    """Whether a checkpoint with these names has weights as codes of another tool."""
    return quantized.has_codes(names) or any(name.endswith(coded_stacks.BLOCKS) for name in names)


def held_by(weights: Mapping[str, Weight], path: Path, model: nn.Module | None, model_type: str) -> dict[str, Weight]:
    """The weights of a checkpoint by the names, and in the form, in which a model has them. model: needed where the
    checkpoint has codes. model_type: transformers' word for it, "" for none.

    Raises:
        AutoparError: codes that cannot be read, or without a model.
    """
    found = dict(weights)
    if has_codes(found):
        if model is None:
            raise AutoparError(
                f"{path} has weights as codes, and how the model keeps them is not known",
                remedy="name the model: --model MODEL, or export the plan where it was made",
            )
        found = _read_codes(found, path, model, model_type)
    return as_held(found, model_type)


def _read_codes(weights: Mapping[str, Weight], path: Path, model: nn.Module, model_type: str) -> dict[str, Weight]:
    """The same with codes as the model has them, or as weights."""
    kept: dict[str, StoredWeight] = {}
    turned: set[str] = set()
    packed, blocks = quantized.packed_of(weights, path), coded_stacks.blocks_of(weights)
    made = made_of(model_type, [*packed, *blocks])
    stacks: dict[str, Weight] = {}
    used: set[str] = set()
    for prefix, module in model.named_modules():
        found = made.get(f"{prefix}.weight")
        if found is not None and not found.is_stack:
            name = found.parts[0][0]
            if "weight" in how_stored(module):
                kept[name] = how_stored(module)["weight"]
            elif is_turned(module):
                turned.add(name)
        for own, is_in_out in _stacks_of(module).items():
            found = made.get(f"{prefix}.{own}")
            how = how_stored(module).get(own)
            if found is not None and not found.is_stack and found.parts[0][0] in blocks:
                name = found.parts[0][0]
                stacks |= coded_stacks.held(blocks[name], how, is_in_out)
                used |= {f"{name}{coded_stacks.BLOCKS}", f"{name}{coded_stacks.SCALES}"}
            elif found is not None and how is not None:
                parts = coded_stacks.stack(how, found.parts, packed)
                stacks |= {f"{prefix}.{own}_{part}": each for part, each in parts.items()}
                used |= {name for names in found.parts for name in names}
    found_weights = quantized.held(weights, packed, path, kept, turned)
    return {name: each for name, each in found_weights.items() if name not in used} | stacks


def _stacks_of(module: nn.Module) -> dict[str, bool]:
    """Experts on top of each other, kept as codes or as they are, and whether their matrices are [in, out]."""
    held = {name: how.turned for name, how in how_stored(module).items() if how.experts}
    return stacks_of(module) | held
