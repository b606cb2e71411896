"""Take a model over: it stays an instance of its own class, with its own names, and runs a generated program."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.huggingface.adapters import has_adapters
from autopar.base.huggingface.by_hand import with_caches
from autopar.base.torch_compat.compiling import leave_to_eager
from autopar.base.torch_compat.distributed import forget_ended_groups, read_reduced_numbers
from autopar.base.trace import Recorded
from autopar.ir.interface import ProgramInterface
from autopar.runtime import clipping, place_experts, recording, state, weights
from autopar.runtime.ahead import plan_ahead
from autopar.runtime.alone import hook_modules
from autopar.runtime.arrays import take_arrays
from autopar.runtime.checkpoint import loading, saving, stored
from autopar.runtime.checkpoint.background import Saving
from autopar.runtime.checkpoint.loading import Loaded, tuple_of
from autopar.runtime.checks import gather_objects
from autopar.runtime.data import ShardLoader
from autopar.runtime.engine import Engine, Prepare
from autopar.runtime.guard import guard_optimizers
from autopar.runtime.known import ENGINES
from autopar.runtime.own_caches import of_generate
from autopar.runtime.replaced import replace_parameters
from autopar.runtime.seen_whole import SeenWhole, Term
from autopar.runtime.serving.serve import Asked, Serving, serve
from autopar.runtime.step import StepNode
from autopar.runtime.uncompiled import beside, reduced, uncompiled
from autopar.runtime.writes import take_writes

Module = TypeVar("Module", bound=nn.Module)


class CompiledModule(nn.Module):
    """What `autopar.compile` adds to the model's class. `autopar` is the engine, `plan` is set by the caller.

    With a pipeline, a rank has the parameters of its own stages, and those that no stage uses: of the others modules
    have shape, dtype and device, no values; they are not among `parameters()` and in `state_dict()`. Buffers are on
    every rank.
    """

    autopar: Engine
    plan: Any
    expert_loads = place_experts.expert_loads
    experts_home = place_experts.experts_home
    place_experts = place_experts.place_experts  # the last: from here on the name is the method's

    def train_step(self, *args: Any, **batch: Any) -> Any:
        """Forward and `loss.backward()`; the model's output. The loss is `output.loss`, or the first scalar.

        Where the plan has several microbatches, only one's activations live at a time. With a pipeline it runs the
        schedule: there is no other way to a backward.

        Raises:
            AutoparError: the output has no loss.
        """
        return self.autopar.train(lambda: self(*args, **batch))

    def serve(
        self, requests: Iterable[Any], *, slots: int = 8, max_new_tokens: int = 128, length: int | None = None,
        chunk: int | None = None, eos_token_id: int | list[int] | None = None,
    ) -> Serving:  # fmt: skip
        """Generate for requests that come and go over `slots` rows: each gets the tokens of its own `generate()`, and
        is yielded when it is done. First come, first served. Collective: the same on every rank. What it gives has
        `cancel(number)`.

        Args:
            requests: prompts (token ids), or `autopar.Request`s with a number of new tokens of their own, which may be
                drawn; a list, or anything that gives the next one when a slot is free.
            length: tokens of a prompt and what is made of it that a slot has room for; None: of the longest of a list.
            chunk: tokens of prompts that go through the model between two tokens of all slots.

        Raises:
            AutoparError: a model in which rows depend on each other, an empty prompt, one that has no room.
        """
        return serve(self, self.autopar, requests, Asked(slots, max_new_tokens, length, chunk, eos_token_id))

    def plan_ahead(self, *batches: Mapping[str, Any] | Sequence[Any] | Tensor) -> None:
        """Plan for batches of these shapes now, and write and check their programs: no step waits for it. Collective.

            model.plan_ahead(*({"input_ids": ids[:, :n], "labels": ids[:, :n]} for n in (512, 1024, 2048)))

        For the mode that the model is in (train or eval, with gradients or under `torch.no_grad()`). The largest first:
        its placement serves the others.

        Args:
            batches: each as in `autopar.compile`'s example_inputs; shapes and dtypes count, tensors may be on meta.

        Raises:
            AutoparError: ranks ask for other shapes; what planning says.
        """
        plan_ahead(self, self.autopar, batches)

    @contextmanager
    def record(self, path: str | Path) -> Iterator[None]:
        """Write when what ran as a trace for Perfetto (ui.perfetto.dev), beside what was predicted.

            with compiled.record("run.perfetto.json"):
                compiled.train_step(**batch)

        Rank 0 writes what all ranks measured when the block ends. Of a pipeline these are its actions, else the calls
        of blocks, with what they wait for, and collectives; optimizers are not seen. The groups of processes are
        `predicted`, and `measured` for every step (and every pipeline of the mesh: `measured dp=1, step 2`), each from
        time 0; of a RECV the time that its stage waited. Ranks meet before every step recorded, which costs a little;
        record few, after the first. Collective; nothing is written where the block raises.

        Raises:
            AutoparError: a block without a step, a file that cannot be written.
        """
        engine = self.autopar
        records: list[Recorded] = []
        engine.record = records
        try:
            yield
        finally:
            engine.record = None
            engine.finish_recording()
        found = [each for every in gather_objects(records) for each in every]
        if not found:
            raise AutoparError(
                "no step ran, so nothing was recorded", remedy="Call compiled.train_step(**batch) inside"
            )
        if engine.comm.rank == 0:
            axis = engine.pipeline_axis()
            if axis is None:
                recording.write_steps(path, found, getattr(self, "plan", None), engine.comm.axes)
            else:
                groups = recording.measured(found, engine.comm.axes, engine.comm.sizes, axis)
                recording.write(path, groups, getattr(self, "plan", None), axis)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over all ranks, each element once; the norm before clipping."""
        engine = self.autopar
        norm = clipping.clip_grad_norm_(
            engine.inner, self.parameters(), max_norm, norm_type, error_if_nonfinite, engine.stages()
        )
        if engine.watch is not None:
            engine.watch.clipped(norm)
        return norm

    def init_weights(self, seed: int = 0) -> None:
        """The model's own initialization, the same for a seed whatever the mesh, one submodule in memory at a time."""
        engine = self.autopar
        self.experts_home()
        engine.when_placed(lambda: weights.init_weights(self, engine.inner, seed, absent=engine.absent))

    def load_pretrained(self, path: str | Path) -> None:
        """Read each rank's pieces from safetensors; buffers that are not stored are computed."""
        engine = self.autopar
        self.experts_home()

        def load() -> None:
            elsewhere = [absent.names for absent in engine.absent]
            stored.load_pretrained(self, Path(path), engine.comm.device, elsewhere)
            weights.materialize_buffers(self, engine.inner, engine.absent)

        engine.when_placed(load)

    @overload
    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        wait: Literal[True] = True,
    ) -> Path: ...
    @overload
    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        wait: Literal[False],
    ) -> Saving: ...
    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        wait: bool = True,
    ) -> Path | Saving:
        """Write the run's state after `step` steps into `folder/step-…`, for `load` on any mesh. Collective.

        Every rank writes its pieces as safetensors, each element once; a step has its name since all of it is on the
        disk, and nothing that was saved before is touched until then. Random states of torch, NumPy and Python are in
        it. docs/checkpoints.md says what lies where.

        Args:
            folder: of this run, on a disk that all machines share; made where it is not there.
            optimizer, scheduler: one or several (a list), schedulers being whatever has a `state_dict()`.
            loader: what says where the data is, by its `state_dict()`: `shard_loader`'s, torchdata's.
            extra: any data: numbers, texts, lists, mappings, tensors. Rank 0's counts; DTensors are put together.
            keep: how many steps are kept; older ones are removed when the new one is there.
            wait: False copies what is to be written into main memory, and gives a `Saving` at once: a thread writes
                while training goes on, and nothing that is done then gets into the checkpoint. The next save, a load
                and the end of the program wait for it; `Saving.wait()` gives the folder.

        Raises:
            AutoparError: on all ranks, what one of them failed at: no room, an entry that is no data (named), another
                job that saves there, a rank that did not come. Or what failed of a save before with wait=False.
        """
        given = saving.Given(step, tuple_of(optimizer), tuple_of(scheduler), loader, extra, keep)
        with self.autopar.comm.trail.doing("saves"):
            return saving.save(self, self.autopar, Path(folder), given, wait)

    def load(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        loader: Any = None,
    ) -> Loaded:
        """Go on from what `save` wrote, on this mesh, whatever the other was. Collective.

        Parameters, buffers and states are equal bit by bit. What is given is loaded: without `optimizer` only weights
        are. Each rank reads the bytes that it needs, and checks them. A model that has no plan yet reads its weights
        and optimizers at its first batch.

        Args:
            folder: as in `save`, or of one step. step: of those that are there; default the newest.

        Returns:
            The step that was saved, and `extra`.

        Raises:
            AutoparError: on all ranks, before a value changes: no such step, another model, optimizer, shape or dtype
                (named), files that are missing or of another length. Or, then, bytes that are not as they were written
                (named), after which the model's values are of neither.
        """
        optimizers, schedulers = tuple_of(optimizer), tuple_of(scheduler)
        self.experts_home()
        with self.autopar.comm.trail.doing("loads"):
            return loading.load(self, self.autopar, Path(folder), step, optimizers, schedulers, loader)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module. Its tensors are DTensors, and whole wherever plain code looks at them: `torch.save`,
        another model's `load_state_dict`, `.cpu().numpy()` (every rank looks; a gather each). With `keep_vars` the
        parameters. Experts that were placed by load go home before: collective, then.
        """
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        if keep_vars:
            return super().state_dict(*args, **kwargs)
        self.experts_home()
        return self.seen_state(*args, **kwargs)

    def seen_state(self, *args: Any, **kwargs: Any) -> Any:
        """`state_dict` for who sees tensors whole: experts stay where they are."""
        found = super().state_dict(*args, **kwargs)
        state.show_whole(found, kwargs.get("prefix", args[1] if len(args) > 1 else ""), self.autopar.comm.timeout_s)
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Whole tensors are taken, too: the same on every rank, which keeps its pieces. torch calls it for each module
        of a tree, this one before its children.
        """
        self.experts_home()
        state.take_whole(self, self.autopar, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    __copy__, __reduce_ex__ = beside, reduced  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A model of its own: other parameters that lie as these do, the same plans and programs (averaged weights, a
        teacher). Like these parameters before their first batch, they are cut at the copy's own.

        Raises:
            AutoparError: weights are still to be made, at the first batch.
        """
        engine, copied = self.autopar, type(self).__new__(type(self))
        memo[id(self)] = copied
        for parameter in dict.fromkeys(super().parameters()):
            memo[id(parameter)] = engine.copy_of(parameter)
        shared = {name: value for name, value in vars(self).items() if name in ("autopar", "plan", "generation_plan")}
        own = {name: value for name, value in vars(self).items() if name not in shared}
        vars(copied).update({**shared, **copy.deepcopy(own, memo)})
        object.__setattr__(copied, "autopar", engine.copy_for(copied, memo))
        ENGINES.add(copied.autopar)
        return copied

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()`, `.half()`, `.cuda()` and the like: nothing where nothing changes.

        Raises:
            AutoparError: another dtype or device, which the plan does not have.
        """
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            like = torch.empty(0, dtype=tensor.dtype, device=self.autopar.comm.device)
            found = fn(like)
            if (found.dtype, found.device) != (like.dtype, like.device):
                raise AutoparError(
                    f"a compiled {type(self).__name__} cannot change its dtype or device",
                    where=name,
                    values=f"{like.dtype} on {like.device}, asked for {found.dtype} on {found.device}",
                    remedy='Do it before autopar.compile; precision="bf16" computes in bf16 on parameters as they are',
                )
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The rank's own. Where its stages leave it none, an empty one: optimizers want at least one."""
        is_empty, engine = True, getattr(self, "autopar", None)
        for parameter in super().parameters(recurse):
            clipping.check_asks_for_all(() if engine is None else engine.comm.axes, sys._getframe(1))
            is_empty = False
            yield parameter
        if is_empty and recurse and self.autopar.absent:
            yield self.autopar.placeholder

    def get_parameter(self, target: str) -> nn.Parameter:
        """As of any module.

        Raises:
            AutoparError: the parameter is on ranks of other stages.
        """
        absent = self.autopar.absent_named(target) if "autopar" in vars(self) else None
        if absent is not None:
            ranks = ", ".join(map(str, absent.ranks))
            raise AutoparError(
                f"{target} is not on this rank",
                values=f"the stages that use it run on pipeline rank {ranks}",
                remedy="Look at it there, or save the whole model with torch.distributed.checkpoint",
            )
        return super().get_parameter(target)

    def shard_loader(self, dataloader: Iterable[Any], own_rows: bool = False) -> ShardLoader:
        """Iterate over `dataloader` reading only this rank's part of each batch; yields DTensors.

        own_rows: it gives this rank's rows already (`DistributedSampler`, streams), those of all ranks are the batch.
        """
        return ShardLoader(self.autopar, dataloader, own_rows)


def take_over(
    model: Module,
    device_mesh: DeviceMesh,
    prepare: Prepare,
    interface: ProgramInterface | None = None,
    prepare_for: Callable[[nn.Module], Prepare] | None = None,
) -> Module:
    """Make the model a distributed one, in place: all parameters DTensors under their names, `forward` the program's.

    prepare: called at each forward with (args, kwargs); returns the (cached) Executable for inputs of that kind.
    interface: of the first plan, where it is known. Without it parameters are cut at the first forward, in place.
    prepare_for: a copy of the model -> its `prepare`; without, copies share this one.

    Collective. An optimizer that holds the old parameters raises at its next step.

    Raises:
        AutoparError: a world of another size than the mesh, a model already taken over.
    """
    check_not_compiled(model)
    if not dist.is_initialized():
        raise AutoparError(
            "no process group is initialised", remedy="Start under torchrun and call init_device_mesh first"
        )
    if dist.get_world_size() != device_mesh.size():
        sizes = " × ".join(str(size) for size in device_mesh.shape)
        raise AutoparError(
            f"the mesh has {device_mesh.size()} ranks, {dist.get_world_size()} processes were started",
            values=f"mesh {sizes}",
            remedy=f"Use torchrun --nproc-per-node {device_mesh.size()}, or a mesh of {dist.get_world_size()}",
        )
    forget_ended_groups()
    guard_optimizers()
    read_reduced_numbers()
    take_arrays()
    take_writes()
    leave_to_eager(SeenWhole, Term, backward_of=StepNode)
    replace_parameters(model, device_mesh)
    original: Any = type(model)
    model.__class__ = _compiled_class(original)
    engine = Engine(model, device_mesh, prepare, prepare_for)
    engine.planned_forward = vars(model).pop("forward", None)  # one in place of the class's is in the program
    object.__setattr__(model, "autopar", engine)
    hook_modules(engine)
    ENGINES.add(engine)
    if interface is not None:
        engine.place(interface)
    return model


def check_not_compiled(model: nn.Module) -> None:
    """Raises an AutoparError where the model, or a part of it, is compiled already."""
    for name, module in model.named_modules():
        if isinstance(module, CompiledModule):
            whole_name = f"this {type(model).__name__}" if not name else f"{name} of this {type(model).__name__}"
            raise AutoparError(
                f"{whole_name} is compiled already",
                remedy="Compile a model once; for another mesh or strategy build it again, compile that, and hand it "
                "the state: other.load_state_dict({name: x.cpu() for name, x in model.state_dict().items()})",
            )


@cache
def _compiled_class(original: Any) -> type[Any]:
    """A subclass that looks like the original: its name, its module, its forward's signature."""
    by_hand = with_caches(original)

    @torch.compiler.disable  # it is compiled: torch.compile around it leaves it as it is
    @wraps(original.forward)
    def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        if by_hand is None:
            return self.autopar.run(args, kwargs)
        return by_hand(self, self.autopar.caches, args, kwargs)

    namespace: dict[str, Any] = {
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if hasattr(original, "save_pretrained"):

        @wraps(original.save_pretrained)
        def save_pretrained(self: CompiledModule, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original.save_pretrained).bind(self, save_directory, *args, **kwargs)
            others = {**dict(list(given.arguments.items())[2:]), **given.arguments.get("kwargs", {})}
            others.pop("kwargs", None)
            with self.autopar.comm.trail.doing("saves"):
                state.save_pretrained(self.autopar, partial(original.save_pretrained, self), save_directory, others)

        namespace["save_pretrained"] = save_pretrained
    if hasattr(original, "_prepare_cache_for_generation"):
        namespace.update(of_generate(original))
    if hasattr(original, "resize_token_embeddings"):

        @wraps(original.resize_token_embeddings)
        def resize(self: CompiledModule, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
            table: Any = self
            table = table.get_input_embeddings()
            rows = table.weight.shape[0]
            if new_num_tokens in (None, rows) and not (args or kwargs):
                return table
            raise AutoparError(
                f"the vocabulary of a {original.__name__} cannot change behind autopar.compile",
                values=f"{rows} rows, asked for {new_num_tokens}",
                remedy="Call model.resize_token_embeddings first, and compile then",
            )

        namespace["resize_token_embeddings"] = resize
    if hasattr(original, "set_attn_implementation"):

        @wraps(original.set_attn_implementation)
        def attend(self: CompiledModule, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
            now = self.config._attn_implementation  # type: ignore[union-attr]
            if attn_implementation != now:
                raise AutoparError(
                    f"the attention of a {original.__name__} cannot change behind autopar.compile",
                    values=f"{now}, asked for {attn_implementation}",
                    remedy="Call model.set_attn_implementation first (output_attentions=True wants eager), and compile "
                    "then",
                )

        namespace["set_attn_implementation"] = attend
    if has_adapters(original):
        namespace.update((name, _of_a_copy(name)) for name in ("merge_and_unload", "unload"))
    return type(original.__name__, (CompiledModule, original), namespace)


def _of_a_copy(name: str) -> Callable[..., Any]:
    """A method that takes a model apart, done to a plain copy; the compiled one stays as it is. Collective."""

    def on_copy(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return getattr(uncompiled(self, f"{name}()"), name)(*args, **kwargs)

    on_copy.__name__ = name
    return on_copy
