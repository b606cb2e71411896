"""Load HuggingFace folders that store weights otherwise than the model holds them: experts one by one, other names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import has_table, made_of
from autopar.base.torch_compat.distributed import local_boxes, local_tensor
from autopar.runtime.checkpoint import pretrained
from autopar.runtime.checkpoint.boxes import Box, whole_of
from autopar.runtime.checkpoint.formats import as_held, weights_of


def load_pretrained(
    model: nn.Module, path: Path, device: torch.device, elsewhere: Sequence[tuple[str, ...]] = ()
) -> None:
    """As `pretrained.load_pretrained`, also where transformers stores a model's weights under other names or its
    experts one by one. Each rank reads the experts, and of them the rows, that it holds.

    Raises:
        AutoparError: as there.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if not isinstance(model_type, str) or not model_type or not path.is_dir() or not has_table(model_type):
        pretrained.load_pretrained(model, path, device, elsewhere)
        return
    stored = pretrained.files_by_name(path)
    if all(not each.is_stack and each.parts == ((name,),) for name, each in made_of(model_type, stored).items()):
        pretrained.load_pretrained(model, path, device, elsewhere)
        return
    with weights_of(path) as found, torch.no_grad():
        weights = as_held(found.weights, model_type)
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
            if not isinstance(target, DTensor) or not target.ndim:
                local = local_tensor(target) if isinstance(target, DTensor) else target
                local.copy_(weight.read(whole_of(weight.shape)))
                continue
            local = local_tensor(target)
            for box in local_boxes(target):
                piece = weight.read(Box(tuple(run.start for run in box), tuple(run.length for run in box)))
                local[tuple(slice(run.place, run.place + run.length) for run in box)] = piece.to(local)
