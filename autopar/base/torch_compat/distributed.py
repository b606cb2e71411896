"""The one module that touches private or version-dependent torch names; each says what it needs and who needs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Replicate, Shard

# runtime/chosen_among.py: a part of a DTensor, for each token (`from_local` is slow).
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# runtime/placements.py: a placement that splits a middle factor of a dim (fused projections). Private in all versions.
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

# runtime/step.py, data.py: what a program saves for backward, and a batch, is any pytree.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# runtime/checker/types.py: tensors that stand for others are made past the mode that types a program's operators.
without_dispatch: Any = torch._C._DisableTorchDispatch

# runtime/comm.py: torch 2.13 deprecates `reduce_scatter_tensor` and `all_gather_into_tensor` in favour of these names;
# 2.11 has only the old ones. The arguments are the same: (output, input, [op], group=).
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The tensor inside, without autograd (all of runtime/: `to_local` records a node and copies Parameter flags)."""
    return dtensor._local_tensor


def settle(dtensor: DTensor) -> None:
    """Have a DTensor that ranks hold terms of (the norm of pieces) be their sum, or norm, on each (runtime/writes.py).
    Collective.
    """
    if any(placement.is_partial() for placement in dtensor.placements):
        placements = [Replicate() if each.is_partial() else each for each in dtensor.placements]
        whole: Any = dtensor.redistribute(placements=placements)
        dtensor._local_tensor, dtensor._spec = whole._local_tensor, whole._spec


def default_timeout_s(device: torch.device) -> float | None:
    """Seconds after which the default process group gives up a wait (runtime/comm.py); None where it does not say.

    The groups that init_device_mesh makes for the axes do not inherit it.
    """
    group: Any = dist.group.WORLD
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend without options
        return None
    return float(timeout.total_seconds())


def job_store() -> dist.Store:
    """The store that the job's ranks met through (runtime/agreement.py: whom they wait for)."""
    return _get_default_store()


def same_group() -> Callable[[], bool]:
    """Tells, later on, whether the job's process group is still that of now (runtime/watch/late.py)."""
    then: Any = dist.group.WORLD
    held = None if then is None else weakref.ref(then)  # a dead one is not the group of nobody

    def is_same() -> bool:
        return dist.group.WORLD is None if held is None else dist.group.WORLD is (held() or held)

    return is_same


_world: weakref.ref[Any] | None = None


def forget_ended_groups() -> None:
    """What DTensors remember of a process group that was destroyed (runtime/module.py: before parameters are made).

    DTensor's operators keep their results' placements by arguments, and two meshes of one shape count as equal. After
    `destroy_process_group` and `init_process_group`, as notebooks and test runs do, a DTensor came out with the first
    mesh, whose groups are gone or are other ranks'.
    """
    global _world
    world = dist.group.WORLD
    if world is not None and (_world is None or _world() is not world):
        # `torch.distributed.tensor.debug` has both as one, and imports torch's compiler, which takes a second.
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        _world = weakref.ref(world)


def own_store() -> dist.Store:
    """A client of the job's store that no other one's waits hold up (runtime/watch/late.py: a thread's)."""
    store: Any = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def is_split(placement: Placement) -> bool:
    """Whether the placement splits a dim (`placement.is_shard()` is false for StridedShard)."""
    return isinstance(placement, Shard | StridedShard)


def enable_strided_shards() -> None:
    """Mend what torch gets wrong about StridedShard; idempotent, and without effect on tensors that have none.

    1. Redistribution (`full_tensor` too). 2.11 raises unless the stripes say FSDP's order of axes; 2.13 returns wrong
       elements, without a word, for a dim that two axes split (its planner forgets strided splits in its shapes).
    2. torch.distributed.checkpoint writes a strided piece as one contiguous chunk at its first offset.
    """
    if not getattr(DTensor, "_autopar_strided_shards", False):
        DTensor._autopar_strided_shards = True  # type: ignore[attr-defined]
        _mend_redistribution()
        _mend_checkpoints()


def _mend_redistribution() -> None:
    from torch.distributed.tensor import _redistribute

    if not can_redistribute_strided():
        return
    module: Any = _redistribute
    original: Callable[..., list[Any]] = module._gen_transform_infos_non_cached

    @wraps(original)
    def transforms(src_spec: Any, dst_spec: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not any(isinstance(p, StridedShard) for p in (*src_spec.placements, *dst_spec.placements)):
            return original(src_spec, dst_spec, *args, **kwargs)
        return _strided_transforms(module._TransformInfo, src_spec.mesh, src_spec, dst_spec)

    module._gen_transform_infos_non_cached = transforms


def _strided_transforms(info: Any, mesh: Any, src_spec: Any, dst_spec: Any) -> list[Any]:
    """Undo the splits of every dim that changes, last axis first; then make the target's, first axis first."""
    current, target = list(src_spec.placements), list(dst_spec.placements)
    changed = {p.dim for pair in zip(current, target) if pair[0] != pair[1] for p in pair if is_split(p)}

    def logical_shape(axis: int) -> list[int]:
        shape = list(src_spec.shape)
        for other in range(axis):
            if is_split(current[other]):
                shape[current[other].dim] //= mesh.size(other)
        return shape

    infos: list[Any] = []
    for axis in reversed(range(len(current))):
        if is_split(current[axis]) and current[axis].dim in changed:
            infos.append(info(axis, (current[axis], Replicate()), logical_shape(axis)))
            current[axis] = Replicate()
    for axis in range(len(current)):
        if current[axis] != target[axis]:
            infos.append(info(axis, (current[axis], target[axis]), logical_shape(axis)))
            current[axis] = target[axis]
    return infos


def read_reduced_numbers() -> None:
    """Have the number in a DTensor be the number, not this rank's term of it; idempotent.

    `p.grad.norm().item()` gives the norm of the rank's piece in torch 2.11 to 2.13, without a word, and so do float(),
    int(), bool(), and formatting. Here the terms are put together first, so that every rank has to ask. Lists, which
    torch refuses, are of the whole tensor, too (arrays: runtime/arrays.py).
    """
    if getattr(DTensor, "_autopar_reduced_numbers", False):
        return
    DTensor._autopar_reduced_numbers = True  # type: ignore[attr-defined]
    for name in ("item", "__float__", "__int__", "__bool__", "__index__", "__format__", "tolist"):
        setattr(DTensor, name, _reading_reduced(getattr(torch.Tensor, name)))


def _reading_reduced(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    @wraps(original)
    def read(self: DTensor, *args: Any) -> Any:
        is_read = self.numel() == 1 or (name == "tolist" and type(self) is DTensor)
        if not is_read:
            return original(self, *args)
        detached: Any = self.detach()  # an output that was looked at, or that has a gradient: the whole, plain
        return original(detached.full_tensor() if isinstance(detached, DTensor) else detached, *args)

    return read


def is_pointwise(name: str) -> bool:
    """Whether a method in place (`add_`) treats each element by itself, as torch's tags say (runtime/writes.py)."""
    packets = [getattr(torch.ops.aten, each, None) for each in (name, name.removesuffix("_"))]
    operators = [getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads()]
    return any(torch.Tag.pointwise in operator.tags for operator in operators)


def handle(operator: Any, act: Callable[[Any, Any, Any], Any]) -> None:
    """Have `act(operator, args, kwargs)` run in an operator's place where it meets a DTensor (runtime/writes.py: where
    torch would make the piece that is written to as large as the whole, or has no way at all).
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[operator] = act


def split_mixed_gradients(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Have torch's clipping, and `GradScaler`, take DTensors together with plain tensors, which every rank has
    (runtime/writes.py: a loss with parameters of its own beside a compiled model). They work on lists, of one kind.

    Norms of plain tensors are numbers, which DTensor takes for the same everywhere; a norm of both is a plain number.

    check: raises where a norm is asked of gradients that have none.
    """
    clipping: Any = torch.nn.utils.clip_grad
    dispatcher: Any = DTensor._op_dispatcher
    group, total, unscale = (
        clipping._group_tensors_by_device_and_dtype,
        clipping._get_total_norm,
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
    )
    unscale_all = dispatcher._custom_op_handlers[unscale]

    def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
        found = {}
        for (device, dtype), ([tensors], places) in group(lists, *args, **kwargs).items():
            for kind in (True, False):
                if some := [x for x in tensors if isinstance(x, DTensor) is kind]:
                    found[device, (dtype, kind)] = ([some], places)
        return found

    @wraps(total)
    def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        check(tensors)
        found = total(tensors, *args, **kwargs)
        is_mixed = isinstance(found, DTensor) and not all(isinstance(x, DTensor) for x in tensors)
        return found.full_tensor() if is_mixed else found

    def unscaled(operator: Any, args: Any, kwargs: Any) -> Any:
        tensors, *others = args
        if plain := [x for x in tensors if not isinstance(x, DTensor)]:
            operator(plain, *others, **kwargs)
        return unscale_all(operator, ([x for x in tensors if isinstance(x, DTensor)], *others), kwargs)

    clipping._group_tensors_by_device_and_dtype, clipping._get_total_norm = grouped, total_norm
    torch.nn.utils.get_total_norm = total_norm
    dispatcher._custom_op_handlers[unscale] = unscaled


def can_redistribute_strided() -> bool:
    """Whether `enable_strided_shards` can mend redistribution in this torch; else runtime/placements.py refuses."""
    from torch.distributed.tensor import _redistribute

    return hasattr(_redistribute, "_gen_transform_infos_non_cached") and hasattr(_redistribute, "_TransformInfo")


def _mend_checkpoints() -> None:
    """Give torch.distributed.checkpoint one chunk per contiguous run of a strided tensor, through its own dunders."""
    write_items, chunk_list, get_shard = (
        DTensor.__create_write_items__,
        DTensor.__create_chunk_list__,
        DTensor.__get_tensor_shard__,
    )

    def create_write_items(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
        if not _is_strided(self):
            return write_items(self, fqn, object)
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk, _ in _chunks(self)
        ]

    def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in _chunks(self)] if _is_strided(self) else chunk_list(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if not _is_strided(self) or index.offset is None:
            return get_shard(self, index)
        for chunk, starts in _chunks(self):
            if tuple(chunk.offsets) == tuple(index.offset):
                found = local_tensor(self).detach()
                for dim, (start, size) in enumerate(zip(starts, chunk.sizes)):
                    found = found.narrow(dim, start, size)
                return found
        raise ValueError(f"{index.fqn} has no chunk at {tuple(index.offset)}")

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


def _is_strided(dtensor: DTensor) -> bool:
    return any(isinstance(placement, StridedShard) for placement in dtensor.placements)


def _chunks(dtensor: DTensor) -> list[tuple[ChunkStorageMetadata, tuple[int, ...]]]:
    """`local_boxes` in the words of torch.distributed.checkpoint, each with its place in the local tensor."""
    return [
        (
            ChunkStorageMetadata(
                offsets=torch.Size(run.start for run in box), sizes=torch.Size(run.length for run in box)
            ),
            tuple(run.place for run in box),
        )
        for box in local_boxes(dtensor)
    ]


class Run(NamedTuple):
    """Consecutive global indices `start …` of a dim, which a rank holds at `place …` of its local dim."""

    start: int
    place: int
    length: int


def local_boxes(dtensor: DTensor) -> list[tuple[Run, ...]]:
    """The contiguous boxes of the global tensor that this rank holds: one `Run` per dim each."""
    coordinate = dtensor.device_mesh.get_coordinate()
    assert coordinate is not None
    positions = [torch.arange(size) for size in dtensor.shape]
    for axis, placement in enumerate(dtensor.placements):
        if isinstance(placement, Shard | StridedShard):
            held, num = positions[placement.dim], dtensor.device_mesh.size(axis)
            outer = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            if outer == 1:  # as torch.chunk: the last pieces may be short or empty
                most = -(-len(held) // num)
                positions[placement.dim] = held[coordinate[axis] * most : (coordinate[axis] + 1) * most]
            else:
                positions[placement.dim] = held.unflatten(0, (outer, num, -1))[:, coordinate[axis]].flatten()
    return list(product(*(_runs(index) for index in positions)))


def _runs(index: torch.Tensor) -> list[Run]:
    breaks = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    return [Run(int(index[start]), start, end - start) for start, end in pairwise(breaks) if end > start]


def dtensor_like(dtensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as `dtensor` around another local tensor (runtime/step.py: `from_local` is slow)."""
    return DTensor(local, dtensor._spec, requires_grad=False)  # pyright: ignore


def dtensor_of(local: torch.Tensor, like: DTensor, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """A contiguous DTensor of this shape on the mesh of another one, without autograd (runtime/chosen_among.py)."""
    stride = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        stride[dim - 1] = stride[dim] * max(shape[dim], 1)
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # pyright: ignore


def plain_functions() -> Any:
    """Inside, functions do not ask tensor subclasses of Python (runtime/seen_whole.py)."""
    return torch._C.DisableTorchFunctionSubclass()


def tensor_hooks(x: Any) -> tuple[Any, Any]:
    """What is to run with a leaf's gradient, and after it was added: dicts or None (runtime/hooks.py)."""
    return x._backward_hooks, x._post_accumulate_grad_hooks


def set_tensor_hooks(x: Any, hooks: Any, after: Any) -> None:
    """The same dicts for another tensor, so that their handles stay good."""
    # Setting registers a dict with autograd only where there is none.
    x._backward_hooks, x._post_accumulate_grad_hooks = None, None
    if hooks:
        x._backward_hooks = hooks
    if after:
        x._post_accumulate_grad_hooks = after


def num_step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks run before or after a step of the optimizer, global ones too (runtime/local_update.py)."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    own: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return sum(map(len, [*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]))


def storage_key(x: torch.Tensor) -> int:
    """A number that views of one storage share, on meta too (runtime/weights.py)."""
    return int(x.untyped_storage()._cdata)


class PlainDispatchMode(TorchDispatchMode):
    """A mode under which nothing is compiled, so that nothing of torch's compiler goes round its calls
    (runtime/checker/typing_mode.py: that would take longer than what it does).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class WriteRecorder(TorchDispatchMode):
    """Notes the storages that operators write to: `written` holds their `storage_key`s (runtime/weights.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator; its schema says which arguments it writes."""
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor):
                    self.written.add(storage_key(value))
        return func(*args, **kwargs)
