"""Who generates in `benchmarks/generate.py`: a model, made ready, and its `generate`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import autopar
from benchmarks.training.ranks import device_type

Generate = Callable[..., Any]
"""Of prompts and arguments, as the model's own `generate`."""


@dataclass(frozen=True, slots=True)
class Built:
    """How a contender is made of a model, and on how many ranks it takes part."""

    make: Callable[[Any, autopar.Generation], Generate]
    ranks: Sequence[int] = (1,)


def _plain(model: Any, _: autopar.Generation) -> Generate:
    return model.generate


def _static(model: Any, _: autopar.Generation) -> Generate:
    return partial(model.generate, cache_implementation="static", disable_compile=True)


def _compiled(model: Any, _: autopar.Generation) -> Generate:
    """As transformers compiles a static cache by itself on a GPU; elsewhere it has to be told."""
    from transformers import CompileConfig

    config: Any = CompileConfig()
    config._compile_all_devices = True
    return partial(model.generate, cache_implementation="static", compile_config=config)


def _dtensor(model: Any, _: autopar.Generation) -> Generate:
    """The tensor parallelism of PyTorch's tutorials: columns, then rows."""
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("tp",))
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    plan: dict[str, ParallelStyle] = {f"model.layers.*.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.*.{name}": RowwiseParallel() for name in rows}
    parallelize_module(model, mesh, plan)
    return model.generate


def _tp_plan(model: Any, _: autopar.Generation) -> Generate:
    """transformers' own tensor parallelism, `tp_plan="auto"`: weights go through a folder, since it splits a checkpoint
    while it reads it.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun says it
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    config: Any = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    found: Any = type(model).from_pretrained(folder[0], distributed_config=config, dtype=model.dtype)
    return found.eval().generate


def _ours(model: Any, wanted: autopar.Generation, compiled: bool = False) -> Generate:
    name, strategy = ("tp", "tensor") if dist.get_world_size() > 1 else ("dp", "ddp")
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=(name,))
    found: Any = autopar.compile(model, mesh, generate=wanted, strategy=strategy, compile_regions=compiled)
    return found.generate


BUILT = {
    "transformers": Built(_plain),
    "transformers, static cache": Built(_static),
    "transformers, static cache, torch.compile": Built(_compiled),
    "DTensor": Built(_dtensor, (2,)),
    "transformers, tp_plan": Built(_tp_plan, (2,)),
    "autopar": Built(_ours, (1, 2)),
    "autopar, compile_regions": Built(partial(_ours, compiled=True), (1, 2)),
}
