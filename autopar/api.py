"""`autopar.plan` and `autopar.compile`: what users call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from autopar import environment, pipeline, plan_cache
from autopar.comparison import best_of_named
from autopar.errors import AutoparError
from autopar.ir import MODES, Mode
from autopar.mesh import Mesh
from autopar.pipelining.microbatches import best_microbatches, check_microbatches
from autopar.pipelining.spec import AXIS
from autopar.plans import Plan
from autopar.strategies import AUTO, Pin, Strategy, pin, pipeline_of, resolve
from autopar.torch_compat import tracing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
from autopar.assembly import plan_once, with_source, without_padding
from autopar.planning import first_fit

Module = TypeVar("Module", bound=nn.Module)
PRECISIONS: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    *,
    example_inputs: Mapping[str, Any],
    strategy: Strategy = "auto",
    precision: str | torch.dtype | None = None,
    memory_limit: float | None = None,
    constraints: Sequence[Pin] = (),
    passes: Sequence[pipeline.Pass] | None = None,
    hardware: str | None = None,
    inference: bool = False,
    rematerialize: str = "auto",
    microbatches: int | None = None,
    progress: pipeline.Progress | None = None,
) -> Plan:
    """Decide how `model` runs on `mesh`. Needs no process group, no GPU, no weights (the model may be on meta).

    Args:
        example_inputs: keyword arguments of `forward`: the global batch (shapes and dtypes count, values do not).
        strategy: "auto", a name (`autopar strategies` lists them), or a mapping from axes to names.
        precision: compute dtype ("bf16", "fp32", …) of floating-point parameters and inputs; None keeps the model's.
        memory_limit: bytes one rank may use; None takes the hardware profile's.
        constraints: `autopar.pin(...)`s.
        passes: the list of passes (default `autopar.pipeline.DEFAULT`).
        inference: plan the forward alone.
        rematerialize: what repeated blocks compute again in the backward: "none", "selective", "full", or "auto", the
            first of these that fits the memory limit (under "auto" strategies also the next, where memory is short).
        microbatches: how many parts of the batch a step runs one after the other; gradients are reduced once, and the
            loss stays the whole batch's. None: 1, and with a pipeline as many as are predicted fastest.

    Raises:
        AutoparError: bad input; says what, where, the numbers, and the remedy.
    """
    mesh = mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh, hardware=hardware)
    asked = pipeline_of(strategy, mesh)
    asked = asked.read() if asked is not None else None
    if asked is not None and inference:
        raise AutoparError(
            "a pipeline is planned for training",
            values=f"mesh: {mesh}",
            remedy="plan with inference=False; compiled(**batch) under torch.no_grad() runs its forward alone",
        )
    if microbatches is not None and microbatches < 1:
        raise AutoparError(f"{microbatches} microbatches", remedy="use 1 or more")
    request = pipeline.Request(
        model,
        bind_inputs(model, (), example_inputs),
        mesh if asked is None else mesh.without(AXIS),
        resolve(strategy, mesh),
        tuple(constraints),
        float(mesh.hardware.memory_bytes) if memory_limit is None else float(memory_limit),
        to_dtype(precision),
        not inference,
        microbatches=1 if inference or microbatches is None else microbatches,
        pipeline=asked,
    )
    if rematerialize not in ("auto", *MODES):
        raise AutoparError(f"unknown rematerialize mode {rematerialize!r}", remedy=f"use auto, {', '.join(MODES)}")
    steps = tuple(pipeline.DEFAULT if passes is None else passes)
    modes: tuple[Mode, ...] = tuple(mode for mode in MODES if rematerialize in ("auto", mode))

    def make(request: pipeline.Request) -> Plan:
        """Decided and priced; the program's text is written of the last one alone."""
        found = first_fit(request, steps, rematerialize, progress)
        traced = found.traced
        if AUTO in request.strategies and not request.pins and not found.from_cache:
            found = without_padding(request, steps, best_of_named(request, steps, found, modes, plan_once))
        if rematerialize == "auto" and not found.from_cache and environment.read().cache_dir is not None:
            found = with_source(found)
            plan_cache.keep(request, replace(found, traced=traced))  # kept by what it is looked up with
        return found

    if asked is not None and microbatches is not None:
        check_microbatches(request)
    alone = asked is None or microbatches is not None
    return with_source(make(request) if alone else best_microbatches(request, make))


def to_dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype for API.md's names."""
    if precision is None or isinstance(precision, torch.dtype):
        return precision
    if precision not in PRECISIONS:
        raise AutoparError(f"unknown precision {precision!r}", remedy=f"use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def bind_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, in the order of `forward`'s signature.

    Raises:
        AutoparError: arguments that `forward` does not take, or that cannot be named.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise AutoparError(
            f"{type(model).__name__}.forward cannot be called with this batch: {error}",
            values=f"given: {', '.join([f'{len(args)} positional'] * bool(args) + list(kwargs))}",
            remedy="pass a batch as model(**batch) would take it",
        ) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise AutoparError(f"{type(model).__name__}.forward takes *{name}", remedy="pass inputs by keyword")
        else:
            named[name] = value
    return named


def compile(
    model: Module,
    mesh: DeviceMesh,
    *,
    example_inputs: Mapping[str, Any] | None = None,
    strategy: Strategy = "auto",
    precision: str | torch.dtype | None = None,
    memory_limit: float | None = None,
    constraints: Sequence[Pin] = (),
    passes: Sequence[pipeline.Pass] | None = None,
    rematerialize: str = "auto",
    microbatches: int | None = None,
    compile_regions: bool | str | None = None,
    plan: Plan | None = None,
    program: str | Path | None = None,
    hardware: str | None = None,
) -> Module:
    """Take the model over: the same object, of the same class, with the same names, running a distributed program.

    Plans and lowers now when there are `example_inputs`, else at the first call. Rank 0 plans, the others receive. A
    batch of another shape plans again (with the stored parameter shardings kept), is remembered, and says so once.

    Args:
        compile_regions: run each distinct region's forward and backward through torch.compile. True: with inductor,
        which needs a C++ compiler on the CPU, Triton on CUDA; False: not; a backend's name ("aot_eager"): with that;
        None: True on CUDA, else False. The plan, the program and what is sent stay the same.
        plan: decisions made before (`autopar.plan`, `Plan.load`): nothing is solved, the program is written from them
        afresh.
        program: a file with an edited generated program, run as it is.
        Others as in `autopar.plan`.

    Raises:
        AutoparError: bad input, on every rank alike; a world size that is not the mesh's.
    """
    from autopar.compiled import compile_model

    if environment.read().disable:
        return model
    if isinstance(mesh, Mesh):
        raise AutoparError(
            "compile needs the devices: a torch DeviceMesh",
            values=f"given autopar.Mesh {mesh}",
            remedy=(
                'use init_device_mesh("cuda", sizes, mesh_dim_names=names) under torchrun; autopar.plan takes this mesh'
            ),
        )
    options: dict[str, Any] = dict(  # noqa: C408 (keywords read better)
        strategy=strategy, precision=precision, memory_limit=memory_limit, constraints=tuple(constraints),
        passes=passes, rematerialize=rematerialize, microbatches=microbatches,
    )  # fmt: skip
    text = Path(program).read_text() if program is not None else None
    return compile_model(model, mesh, example_inputs, options, plan, text, hardware, compile_regions)


def shapes_key(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one program from another: shapes, dtypes and constants of the inputs, training or not."""
    leaves: list[Any] = []
    for path, value in tracing.tree_leaves_with_path(dict(inputs)):
        if isinstance(value, Tensor):
            leaves.append((path, tuple(value.shape), str(value.dtype)))
        else:
            leaves.append((path, repr(value)))
    return (model.training, torch.is_grad_enabled(), *leaves)


__all__ = ["bind_inputs", "compile", "pin", "plan", "shapes_key"]
