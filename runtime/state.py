"""States of a taken-over model and its optimizers, as one process has them: out, in, and onto the disk.

    torch.save(model.state_dict(), f)          tensors in pieces that are written whole, gathered one after the other
    model.load_state_dict(torch.load(f))       whole tensors, of which each rank keeps its piece
    model.save_pretrained(folder)              every rank calls it, rank 0 writes

What torch.distributed.checkpoint finds are DTensors, as before.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.huggingface.adapters import has_adapters, written_names
from autopar.base.torch_compat.distributed import dtensor_like, local_tensor, storage_key, tree_map
from autopar.runtime.checks import check_same_weights
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.expert_layers import LAYER, at_home, is_by_slots, layer_of, to_slots
from autopar.runtime.holders import holders
from autopar.runtime.layout import shard
from autopar.runtime.meeting import meet
from autopar.runtime.placements import from_dtensor_placements
from autopar.runtime.seen_whole import SeenWhole, seen_whole, whole

_EVERY_RANK = (
    "Call it on every rank, and write on one: torch.distributed.checkpoint.state_dict.get_model_state_dict with "
    "full_state_dict=True and cpu_offload=True gives rank 0 whole tensors; save_pretrained writes on rank 0 by itself"
)
_SHARD = re.compile(r"(.*)-\d{5}-of-\d{5}\.safetensors")


def show_whole(state: MutableMapping[str, Any], prefix: str, timeout_s: float) -> None:
    """Have the DTensors of a state dict, under this prefix, seen whole. Tied ones stay one."""
    gather_first = _once(partial(meet, "gather the state of the model", timeout_s, _EVERY_RANK))
    known: dict[Any, SeenWhole] = {}
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, DTensor) and not isinstance(value, SeenWhole):
            local = local_tensor(value)
            if local.is_meta:
                continue
            key = (storage_key(local), local.storage_offset())
            if key not in known:
                known[key] = seen_whole(value.detach(), gather_first, is_kept=False)
            state[name] = known[key]


def _once(act: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def first() -> None:
        if not done:
            act()
            done.append(True)

    return first


def take_whole(model: nn.Module, engine: Engine, state: MutableMapping[str, Any], prefix: str) -> None:
    """Make whole tensors of a state dict that is about to be loaded the pieces that this rank holds. Collective.

    Raises:
        AutoparError: ranks that did not come, or that load other values.
    """
    parameters = {prefix + name: p for name, p in model.named_parameters(remove_duplicate=False)}
    for absent in engine.absent:
        for name in absent.names:
            state.pop(prefix + name, None)
    for name, value in state.items():
        if (layer := layer_of(value)) is not None:  # a parameter of another model, whose experts are placed
            state[name] = at_home(value, layer)
    found = {
        name: value
        for name, value in state.items()
        if name in parameters and isinstance(value, Tensor) and not isinstance(value, DTensor)
    }
    if not found:
        return
    meet("load the state of the model", engine.comm.timeout_s, "Load the same state on every rank")
    check_same_weights({name: value for name, value in found.items() if not value.is_meta})
    late: dict[str, Tensor] = {}
    for name, value in found.items():
        parameter = parameters[name]
        assert isinstance(parameter, DTensor)
        if tuple(value.shape) != tuple(parameter.shape):
            continue  # the module itself says so, with all others
        if local_tensor(parameter).is_meta:
            late[name.removeprefix(prefix)] = value
        state[name] = _piece(value, parameter, engine.inner)
    if late:
        engine.when_placed(partial(_fill, model, engine, late))


def _fill(model: nn.Module, engine: Engine, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        local_tensor(parameter).copy_(local_tensor(_piece(value, parameter, engine.inner)))


def _piece(value: Tensor, like: DTensor, comm: Communicator) -> DTensor:
    local = shard(to_slots(value.detach(), like), from_dtensor_placements(like.placements), comm)
    return dtensor_like(like, local.to(comm.device, like.dtype, copy=True, memory_format=torch.contiguous_format))


def gathered_state(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, whole and on the CPU, on rank 0; nothing on others. One tensor after the other is gathered.

    Collective, in the order of `state`; then what only ranks of other stages hold, in the plan's order.
    """
    is_first = dist.get_rank() == 0
    found: dict[str, Any] = {}
    known: dict[int, Any] = {}
    for name, value in state.items():
        if id(value) not in known:
            full = whole(value)
            full = full.detach().cpu() if isinstance(full, Tensor) else full
            known[id(value)] = full if is_first else None
        if is_first:
            found[name] = known[id(value)]
    interface = engine.interface
    if interface is None or interface.pipeline is None:
        return found
    ranks_of, ranks = holders(interface), _first_ranks(engine)
    for entry in interface.parameters:
        source = ranks[ranks_of[entry.name][0]]
        if 0 in ranks_of[entry.name]:
            continue
        if dist.get_rank() == source:
            dist.send(whole(state[entry.name]).detach().contiguous(), dst=0)
        elif is_first:
            value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=engine.comm.device)
            dist.recv(value, src=source)
            found.update(dict.fromkeys((entry.name, *entry.aliases), value.cpu()))
    return found


def gathered(state: Any) -> Any:
    """A state's tree on rank 0, its DTensors whole and on the CPU; an empty one on others. One tensor after the other
    is gathered. Collective.

    Raises:
        AutoparError: a rank came alone.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def taken(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        full = whole(x) if isinstance(x, SeenWhole) else x.full_tensor() if isinstance(x, DTensor) else x
        return full.detach().cpu() if is_first else None

    found = tree_map(taken, state)
    return found if is_first else {}


def _first_ranks(engine: Engine) -> list[int]:
    """The rank of each place along the pipeline's axis that is first along all others."""
    axis = engine.pipeline_axis()
    assert axis is not None
    grid = engine.device_mesh.mesh
    at = tuple(slice(None) if name == axis else 0 for name in engine.comm.axes)
    return [int(rank) for rank in grid[at].tolist()]


def save_pretrained(engine: Engine, save: Callable[..., Any], folder: str | Path, kwargs: dict[str, Any]) -> None:
    """As transformers' `save_pretrained`. Every rank calls it; rank 0 writes, in a folder beside, which takes the
    place of the old files when all is written. Collective.

    save: the model's own, (folder, state_dict=…) -> nothing.

    Raises:
        AutoparError: a rank came alone, or rank 0 cannot write.
    """
    remedy = "Call save_pretrained on every rank: rank 0 writes, the others hand in their pieces"
    meet(f"save_pretrained({str(folder)!r})", engine.comm.timeout_s, remedy)
    given = kwargs.pop("state_dict", None)
    model: Any = engine.model
    state = model.seen_state() if given is None else given
    if given is None and has_adapters(type(engine.model)):
        state = {name: state[name] for name in written_names(engine.model, state, kwargs)}
    found = gathered_state(engine, state)
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _write(save, Path(folder), found, kwargs)
        except Exception as error:
            problem = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise AutoparError("rank 0 could not save the model", where=str(folder), values=problem[0][:500])


def _write(save: Callable[..., Any], folder: Path, state: dict[str, Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("push_to_hub"):
        save(folder, state_dict=state, **kwargs)
        return
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(made, state_dict=state, **kwargs)
        if not folder.exists():
            made.chmod(0o777 & ~_umask())
            made.rename(folder)
            return
        new = {path.name for path in made.iterdir()}
        # The index last: until it is there, a reader finds the old one.
        for path in sorted(made.iterdir(), key=lambda path: path.suffix == ".json"):
            os.replace(path, folder / path.name)
        _remove_old(folder, new)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_old(folder: Path, new: set[str]) -> None:
    """Weights of an earlier save in other files, of which nobody would know that they are old."""
    kinds = {name.partition(".")[0].partition("-")[0] for name in new if name.endswith(".safetensors")}
    for path in folder.iterdir():
        base = path.name.removesuffix(".index.json")
        is_old = base.endswith(".safetensors") and (_SHARD.fullmatch(base) or base != path.name or base not in new)
        if path.is_file() and path.name not in new and is_old and base.partition(".")[0].partition("-")[0] in kinds:
            path.unlink()


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def show_optimizer_whole(optimizer: Optimizer, timeout_s: float) -> None:
    """From now on, what its `state_dict()` gives is seen whole, too."""
    if getattr(optimizer, "_autopar_seen_whole", False):
        return
    optimizer._autopar_seen_whole = True  # type: ignore[attr-defined]

    def show(owner: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        gather_first = _once(partial(meet, "gather the state of the optimizer", timeout_s, _EVERY_RANK))
        layers = [vars(parameter).get(LAYER) for group in owner.param_groups for parameter in group["params"]]

        def seen(key: Any, value: Any) -> Any:
            layer = layers[key] if isinstance(key, int) else None
            if layer is not None and is_by_slots(value, layer):
                value = value.detach()
                setattr(value, LAYER, layer)
            return seen_whole(value, gather_first, is_kept=False) if isinstance(value, DTensor) else value

        states = {
            key: {name: seen(key, value) for name, value in each.items()} if isinstance(each, dict) else each
            for key, each in state["state"].items()
        }
        return {**state, "state": states}

    optimizer.register_state_dict_post_hook(show)


def cut_states(optimizer: Optimizer, comm: Communicator, parameter_ids: Collection[int]) -> None:
    """Whole states of these parameters, as a checkpoint of one process has them, become the pieces that lie as the
    parameters do.
    """
    for parameter, state in optimizer.state.items():
        if id(parameter) not in parameter_ids or not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.ndim or value.shape != parameter.shape:
                continue
            is_home = layer_of(parameter) is None
            if isinstance(value, SeenWhole) and value.placements == parameter.placements and is_home:
                state[name] = dtensor_like(parameter, local_tensor(value).clone())
            elif isinstance(value, SeenWhole) or not isinstance(value, DTensor):
                found = to_slots(whole(value).detach(), parameter)
                local = shard(found, from_dtensor_placements(parameter.placements), comm)
                state[name] = dtensor_like(parameter, local.to(comm.device, copy=True).contiguous())
