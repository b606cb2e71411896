"""`autopar.plan` and `autopar.compile`: what users call."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from autopar import environment, pipeline, plan_cache
from autopar.attention_axes import context_rows
from autopar.comparison import best_of_named
from autopar.context_strategies import splits_sequence
from autopar.decisions import Decisions
from autopar.errors import AutoparError, DoesNotFit
from autopar.ir import Mode, Program
from autopar.mesh import Mesh
from autopar.passes.emit import emit, interface_of
from autopar.passes.overlap import in_flight_bytes
from autopar.passes.rematerialize import MODES
from autopar.pipelining.least_memory import too_little
from autopar.pipelining.microbatches import best_microbatches, check_microbatches
from autopar.pipelining.spec import AXIS
from autopar.plans import Plan, RegionSummary, Solved
from autopar.sharding import local_shape
from autopar.strategies import AUTO, Pin, Strategy, pin, pipeline_of, resolve
from autopar.torch_compat import tracing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("autopar")
TIGHTER = 3
"""How often a placement is asked for less memory, or more, when a stage of a pipeline does not fit."""
OVERLAP_PRICE = 0.05
"""What a second of communication counts that may run beside the compute: the less of it, the better."""
WORTH_WAITING = 0.02
"""The part of a step that is waited for gathers and reductions from which on they are placed at their full price."""
MOST_PLACED = 1.4
"""Where a placement finds nothing within so many times the memory limit, no stages will fit it."""
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
        found = _plan_first_fit(request, steps, rematerialize, progress)
        if AUTO in request.strategies and not request.pins and not found.from_cache:
            found = best_of_named(request, steps, found, modes, _plan_once)
        if rematerialize == "auto" and not found.from_cache and environment.read().cache_dir is not None:
            found = _with_source(found)
            plan_cache.keep(request, found)
        return found

    if asked is not None and microbatches is not None:
        check_microbatches(request)
    alone = asked is None or microbatches is not None
    return _with_source(make(request) if alone else best_microbatches(request, make))


def plan_point(
    request: pipeline.Request,
    mesh: Mesh,
    strategy: Strategy,
    rematerialize: Mode,
    microbatches: int,
    captured: dict[object, Program],
) -> Plan:
    """The plan of one point of a search: everything is given but the cut and the order of its stages.

    captured: programs of the whole batch, shared by the points.

    Raises:
        DoesNotFit: it takes more than the memory limit.
    """
    asked = pipeline_of(strategy, mesh)
    asked = asked.read() if asked is not None else None
    own = mesh if asked is None else mesh.without(AXIS)
    wanted = replace(
        request,
        mesh=own,
        strategies=resolve(strategy, mesh),
        microbatches=microbatches,
        pipeline=asked,
        rematerialize=rematerialize,
        explain=False,
        checks_limit=True,
        captured=captured,
    )
    return _with_source(_plan_once(wanted, pipeline.DEFAULT))


def _plan_first_fit(
    request: pipeline.Request, steps: tuple[pipeline.Pass, ...], mode: str, progress: pipeline.Progress | None
) -> Plan:
    """Keep activations if they fit; else recompute the cheap ones; else whole blocks. The trace is shared."""
    names = [step.name for step in steps]
    chosen = mode if mode in MODES else "none"
    if "rematerialize" not in names:
        return _plan_once(replace(request, rematerialize=chosen), steps, progress=progress)
    cut = names.index("rematerialize")
    program, times = pipeline.run(request, steps[:cut], progress=progress)
    if mode != "auto" and request.pipeline is None:
        wanted = replace(request, rematerialize=chosen)
        alone = _plan_once(wanted, steps[cut:], program=program, all_steps=steps, progress=progress)
        return replace(alone, times=(*times, *alone.times), traced=program)
    modes = MODES if mode == "auto" else (chosen,)
    cached = plan_cache.find(request, program) if mode == "auto" else None
    if cached is not None:
        return redo(cached, request, steps, program, times)
    found: Plan | None = None
    named = AUTO not in request.strategies
    # Where strategies leave it to memory how parameters lie, the limit takes part from the beginning.
    bends = any(splits_sequence(each) for each in request.strategies)

    def tighter(wanted: pipeline.Request) -> Plan:
        return _plan_tighter(wanted, steps[cut:], program, steps, progress)

    for each in modes:
        last = each == modes[-1]
        # What a named strategy moves is not to change because memory is short: until nothing else is left to try, the
        # limit decides what is recomputed, not where things lie.
        explain, checks = request.explain and last and found is None, named and not last and not bends
        staged = request.pipeline is not None
        attempt = replace(request, rematerialize=each, explain=explain and not staged, checks_limit=checks)
        try:
            other = _plan_priced(attempt, tighter)
        except DoesNotFit:
            if found is None and last:
                if not (explain and staged):
                    raise
                raise too_little(attempt, tighter) from None
            if found is not None:
                break
            logger.info(
                "keeping %s does not fit: recomputing more", "all activations" if each == "none" else "products"
            )
            continue
        if found is None or other.cost.step_time_s < found.cost.step_time_s:
            found = other
        if named or found is not other or not found.solved.memory_price_s_per_byte:
            break  # memory costs nothing: recomputing would only add work
    assert found is not None
    return replace(found, times=(*times, *found.times), traced=program if mode == "auto" else found.traced)


def _plan_priced(request: pipeline.Request, plan: Callable[[pipeline.Request], Plan]) -> Plan:
    """Under `auto`, gathers and reductions cost next to nothing, as they may run beside the compute. Where much of them
    does not, they are placed again at their full price; where memory lets nothing run beside it, within what is left.
    """
    if AUTO not in request.strategies:
        return plan(request)
    beside = replace(request, overlap_price=OVERLAP_PRICE)
    found = plan(beside)
    others: list[pipeline.Request] = []
    if request.pipeline is not None or waited_for(found) > WORTH_WAITING * found.cost.step_time_s:
        others.append(request)
    limit = request.memory_limit_bytes
    over = found.cost.peak_memory_bytes + in_flight(found) - (limit or math.inf)
    if limit and over > 0 and request.pipeline is None:
        others.append(replace(beside, placement_limit=1 - over / limit))
    for other in others:
        with contextlib.suppress(DoesNotFit):
            found = min(found, plan(replace(other, explain=False)), key=lambda each: each.cost.step_time_s)
    return found


def waited_for(plan: Plan) -> float:
    """Seconds of gathers and reductions that nothing hides."""
    parameters_s = sum(row.seconds for row in plan.collectives if row.why in ("gather parameter", "reduce gradient"))
    return max(0.0, parameters_s - plan.cost.hidden_s)


def in_flight(plan: Plan) -> int:
    """Bytes that gathers and reductions beside the compute would take, where memory did not allow for them."""
    assert plan.program is not None and plan.program.overlap is not None
    return 0 if plan.program.overlap.prefetch else in_flight_bytes(plan.program)


def _plan_tighter(
    request: pipeline.Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program,
    all_steps: tuple[pipeline.Pass, ...],
    progress: pipeline.Progress | None,
) -> Plan:
    """The placement sees the stages of a pipeline on average: where it finds nothing, or the fullest stage does not
    fit, it is given more or less memory, a few times. What counts is what the stages then take.
    """
    low, high, limit = 0.0, math.inf, request.placement_limit
    for attempt in range(TIGHTER + 1):
        try:
            return _plan_once(
                replace(request, placement_limit=limit), steps, program=program, all_steps=all_steps, progress=progress
            )
        except DoesNotFit as error:
            if request.pipeline is None or request.checks_limit or attempt == TIGHTER:
                raise
            low, high = (limit, high) if error.ratio is None else (low, limit)
            if low > MOST_PLACED:
                raise
            limit = limit * 1.2 if error.ratio is None else limit / error.ratio * 0.97
            if not low < limit < high:
                limit = math.sqrt(low * high)
            logger.info("no pipeline was found: placing within %.3g of the memory limit", limit)
    raise AssertionError("unreachable")


def redo(
    plan: Plan,
    request: pipeline.Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program | None = None,
    times: tuple[pipeline.PassTime, ...] = (),
) -> Plan:
    """The decisions of `plan` on a model traced again (`program`: traced up to `rematerialize`). Nothing is solved.

    Raises:
        AutoparError: the plan was made for another program.
    """
    names = [step.name for step in steps]
    start = names.index("rematerialize") if program is not None else 0
    place = names.index("place")
    request = replace(request, rematerialize=plan.rematerialize, spread=plan.spread)
    program, before = pipeline.run(request, steps[start:place], program=program)
    _check_border(plan, program)
    program, after = pipeline.run(request, steps[place + 1 :], program=plan.decisions.apply(program))
    again = make_plan(request, program, steps, (*times, *before, *after))
    stages = again.pipeline
    if stages is not None and plan.pipeline is not None:
        stages = replace(stages, considered=plan.pipeline.considered)
    cost = replace(again.cost, memory=plan.cost.memory)
    done = replace(again, solved=plan.solved, cost=cost, pipeline=stages, notes=plan.notes, from_cache=True)
    return _with_source(done)


def _check_border(plan: Plan, program: Program) -> None:
    """Decisions may well fit other sizes; what was promised of them (time, memory) would not."""
    planned = {e.name: e.shape for e in (*plan.interface.parameters, *plan.interface.inputs)}
    given = {v.name: v.type.shape for v in program.variables if v.is_parameter}
    given.update((port.name, port.type.shape) for port in program.inputs)
    for name in (*planned, *given):
        if planned.get(name) != given.get(name):
            raise AutoparError(
                "the plan was made for another model or batch",
                where=name,
                values=f"planned {planned.get(name, 'without it')}, given {given.get(name, 'without it')}",
                remedy="make the plan again for this model and batch",
            )


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


def _plan_once(
    request: pipeline.Request,
    steps: tuple[pipeline.Pass, ...],
    *,
    program: Program | None = None,
    progress: pipeline.Progress | None = None,
    all_steps: tuple[pipeline.Pass, ...] = (),
) -> Plan:
    first = len(all_steps) - len(steps) if all_steps else 0
    program, times = pipeline.run(request, steps, program=program, progress=progress, first=first)
    return make_plan(request, program, all_steps or steps, times)


def make_plan(
    request: pipeline.Request, program: Program, steps: tuple[pipeline.Pass, ...], times: tuple[pipeline.PassTime, ...]
) -> Plan:
    """The plan of a lowered program, as yet without the program's text."""
    result = program.result
    cost, rows, summary = pipeline.price(program)
    solved = Solved(0, 0, 0, cost.step_time_s, 0.0, float("inf"), 0.0)
    if result is not None:
        solved = Solved(
            result.num_nodes, result.num_choices, result.num_edges, result.cost_s, result.bound_s, result.gap,
            result.memory_price_s_per_byte, result.overlap_price,
        )  # fmt: skip
    return Plan(
        type(request.model).__name__,
        request.whole_mesh,
        request.strategies,
        interface_of(program),
        "",
        cost,
        tuple(rows),
        tuple(_summary(program, region.name) for region in program.regions),
        solved,
        Decisions.of(program),
        tracing.dump_treespec(program.output_spec),
        program.output_leaves,
        times,
        request.pins,
        request.memory_limit_bytes,
        program.notes,
        precision=request.precision,
        training=request.training,
        rematerialize=request.rematerialize,
        spread=request.spread,
        model=request.model,
        inputs=request.inputs,
        program=program,
        passes=steps,
        asked=request.pipeline,
        pipeline=summary,
        attention=program.attention,
        context=context_rows(program, request.strategies),
    )


def _with_source(plan: Plan) -> Plan:
    if plan.source or plan.program is None:
        return plan
    return replace(plan, source=emit(plan.program, strategies=plan.strategies, title=plan.title))


def _summary(program: Program, name: str) -> RegionSummary:
    region = program.region(name)
    operators = [node.name for node in region.graph.nodes if node.name in region.ops]
    forward = sum(operator in region.forward_nodes for operator in operators)
    size = 0
    if "backward" in region.lowered:
        lowered = region.lowered["forward"]
        output = next(node for node in lowered.graph.nodes if node.op == "output")
        assert program.mesh is not None
        for node in list(output.args[0])[lowered.num_results :]:
            type_, sharding = node.meta["type"], node.meta["sharding"]
            size += math.prod(local_shape(type_.shape, sharding, program.mesh.sizes)) * type_.dtype.itemsize
    return RegionSummary(name, region.module, program.num_calls(name), forward, len(operators) - forward, size)


# -- compile
# -----------------------------------------------------------------------------------------------------------------


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
