"""`autopar.compile`: rank 0 plans, every rank receives, the runtime takes the model over."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import pipeline
from autopar.api.added_rows import even
from autopar.api.additions import Additions, shapes
from autopar.api.again import replan, same_stages, unused_as_stored
from autopar.api.agreed import agreed_plan, agreed_plans
from autopar.api.cache_maker import maker
from autopar.api.devices import devices_of
from autopar.api.following import Following, numbers_of
from autopar.api.generation import Generation, GenerationPlan, may_choose, phase_inputs, planned, ways_for
from autopar.api.lengths import Padding
from autopar.api.numbers import Numbers
from autopar.api.plan import Plan
from autopar.api.planning import first_plan, written
from autopar.api.stored import pins_for, pins_of, states_of
from autopar.api.undivided import Undivided
from autopar.api.ways import Ways
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.base.huggingface import packing
from autopar.base.huggingface.caches import check_cache, states_among
from autopar.base.stored_weights import is_stored
from autopar.base.torch_compat import tracing
from autopar.ir.told import BUFFER, Held
from autopar.machine.mesh import Mesh
from autopar.passes.emptied import has_values_of, meta_clone
from autopar.planner.family import Family
from autopar.planner.inputs import (
    Batch,
    bind_inputs,
    by_name,
    family_key,
    kind_of,
    modes_key,
    shapes_key,
    to_dtype,
    values_key,
    without_graph,
)  # fmt: skip
from autopar.planner.unread import nobody_reads
from autopar.planner.with_loss import Loss, Watched, with_loss
from autopar.runtime.added import Added
from autopar.runtime.engine import Prepare
from autopar.runtime.executable import Executable
from autopar.runtime.module import check_not_compiled, take_over
from autopar.strategies.names import Pin, Strategy
from autopar.strategies.pipelining.spec import AXIS

logger = logging.getLogger("autopar")
Module = TypeVar("Module", bound=nn.Module)
Found = TypeVar("Found")


def compile(
    model: Module,
    mesh: DeviceMesh | str | Mapping[str, int],
    *,
    example_inputs: Batch | None = None,
    strategy: Strategy = "auto",
    precision: str | torch.dtype | None = None,
    memory_limit: float | None = None,
    constraints: Sequence[Pin] = (),
    passes: Sequence[pipeline.Pass] | None = None,
    rematerialize: str = "auto",
    microbatches: int | None = None,
    halves: bool | None = None,
    roots: Sequence[str] | None = None,
    compile_regions: bool | str | None = None,
    loss: Loss | None = None,
    plan: Plan | None = None,
    program: str | Path | None = None,
    hardware: str | None = None,
    generate: Generation | None = None,
    cache: str | None = None,
    lengths: Sequence[int] | None = None,
    expert_imbalance: float | None = None,
) -> Module:
    """Take the model over: the same object, of the same class, with the same names, running a distributed program.

    Plans and lowers now when there are `example_inputs`, else at the first call. Rank 0 plans, the others receive. A
    batch of another shape plans again (with the stored parameter shardings kept), is remembered, and says so once.

    Args:
        mesh: a torch DeviceMesh, or its axes (`"dp=2,tp=2"`, `{"dp": 2, "tp": 2}`), which make one over the ranks that
        torchrun started.
        compile_regions: run each region's forward and backward through torch.compile. True: with inductor (a C++
        compiler on the CPU, Triton on CUDA); False: not; a backend's name; None: True on CUDA. Plans stay the same.
        loss: a function of the outputs and the batch (a mapping from the inputs' names to tensors) that returns one
        number: it becomes a part of the program, and stands as `loss` in what the model returns. Where the model's
        outputs are no mapping with a `loss`, what comes back is `(loss, output)`, with these names. Inputs that
        `forward` does not take go to the loss alone. A batch without what it asks for gives the outputs alone.
        plan: decisions made before (`autopar.plan`, `Plan.load`): nothing is solved, the program is written from them
        afresh.
        program: a file with an edited generated program, run as it is.
        generate: plan `generate()` of these sizes now, prompt and tokens together (docs/inference.md). Others are when
        they come; caches are of this length at least, so that shorter ones need no programs of their own.
        cache: how `generate()` stores keys and values: "fp8", "int8", "int4" (docs/inference.md). None: as `generate`
        says, or as they are.
        lengths: that batches are padded to, each to the next, where what comes back is the same without: labels, masks
        and the causal order keep added positions out of losses, gradients and outputs, which are cut back. That is
        shown for every length by running a small model of the same architecture; where it is not so, the batch runs
        as it is, and a warning says why. The longest is planned for first. Others as in `autopar.plan`.

    Raises:
        AutoparError: bad input, on every rank alike; a world size that is not the mesh's.
    """
    if environment.read().disable:
        return model
    devices = devices_of(mesh, "compile")
    options: dict[str, Any] = dict(  # noqa: C408 (keywords read better)
        strategy=strategy, precision=precision, memory_limit=memory_limit, constraints=tuple(constraints),
        passes=passes, rematerialize=rematerialize, microbatches=microbatches, halves=halves, roots=roots,
        expert_imbalance=expert_imbalance,
    )  # fmt: skip
    text = Path(program).read_text() if program is not None else None
    return compile_model(
        model, devices, example_inputs, options, plan, text, hardware, compile_regions, loss, generate, lengths, cache
    )


def compile_model(
    model: Module,
    device_mesh: DeviceMesh,
    example_inputs: Batch | None,
    options: Mapping[str, Any],
    plan: Plan | None,
    program: str | None,
    hardware: str | None,
    compile_regions: bool | str | None = None,
    loss: Loss | None = None,
    generate: Generation | None = None,
    lengths: Sequence[int] | None = None,
    cache: str | None = None,
) -> Module:
    """See `autopar.compile`."""
    check_not_compiled(model)
    make_cache = maker(generate, cache)
    generate = generate and replace(generate, cache=make_cache.storage)
    mesh = Mesh.from_device_mesh(device_mesh, hardware=hardware)
    if compile_regions is None:
        compile_regions = device_mesh.device_type == "cuda"
    batch = None if example_inputs is None else by_name(model, example_inputs)
    blueprint = meta_clone(with_loss(model, loss, batch))
    has_values_of(blueprint, model)
    planner = _Planner(blueprint, mesh, options, plan, program, compile_regions, loss, lengths)
    interface = None
    if batch is not None:
        executable = planner.prepare_inputs(bind_inputs(blueprint, (), batch), True)
        interface = executable.interface
    if generate is not None:
        planner.prepare_generation(generate)
        assert planner.first is not None
        interface = interface or planner.first.interface
    compiled = take_over(model, device_mesh, planner.prepare, interface, planner.prepare_for)
    planner.model = compiled
    engine: Any = compiled.autopar
    engine.numbers = planner.numbers_left
    engine.precision = to_dtype(options["precision"]) if plan is None else plan.precision
    engine.caches.maker = replace(make_cache, model=planner.blueprint, ways=planner.ways)
    engine.caches.chunk = None if generate is None else generate.chunk
    planner.attach()
    return compiled


class _Planner:
    """Plans once per kind of input, on rank 0, from a copy of the model on meta."""

    def __init__(
        self,
        blueprint: nn.Module,
        mesh: Mesh,
        options: Mapping[str, Any],
        plan: Plan | None,
        program: str | None,
        compile_regions: bool | str,
        loss: Loss | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.compile_regions = compile_regions
        self.loss = None if loss is None else Watched(loss)
        self.blueprint, self.mesh, self.options, self.given, self.program = blueprint, mesh, options, plan, program
        self.ways = ways_for(plan, options["strategy"], mesh)
        self.undivided = Undivided.of(plan, options["strategy"], mesh, options["microbatches"])
        self.model: Any = None
        self._firsts: list[Plan] = []  # one at most, of this model and of all copies: their parameters lie alike
        self.latest: Plan | None = None
        self._executables: dict[tuple[Any, ...], Executable] = {}
        self._by_value: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._constants: dict[str, Tensor] = {}
        self._latest_constants: Mapping[str, Tensor] = {}
        self._families: dict[object, Family] = {}
        self._states: dict[tuple[str, tuple[int, ...]], Pin] = {}
        self.generation: GenerationPlan | None = None
        self._has_told = False
        self._following: Following | None = None
        self._compiled, self._numbers, self._ways = numbers_of(blueprint), Numbers(blueprint), Ways(blueprint)
        precision = to_dtype(options["precision"])
        self._additions = Additions(blueprint, lengths, precision, lambda small: with_loss(small, loss))
        self._unread: dict[object, bool] = {}
        self._with_additions: dict[tuple[object, ...], Executable] = {}

    @property
    def first(self) -> Plan | None:
        """The plan that decided where parameters are stored."""
        return self._firsts[0] if self._firsts else None

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """The executable for one call of the model."""
        return self.prepare_inputs(bind_inputs(self.blueprint, args, kwargs), torch.is_grad_enabled())

    def prepare_for(self, model: nn.Module) -> Prepare:
        """Of a copy of the model, which has the same plans."""
        other = copy.copy(self)
        other.model, other._following, other._constants = model, None, dict(self._constants)
        other._executables = {key: other._own(each, key) for key, each in self._executables.items()}
        return other.prepare

    def _own(self, executable: Executable, key: tuple[Any, ...]) -> Executable:
        if not isinstance(executable.widened, partial):
            return executable
        _, inputs = executable.widened.args
        return replace(executable, widened=partial(self._widen, key, inputs))

    def numbers_left(self) -> Collection[Held]:
        """The numbers of Python's that steps leave on modules; known on rank 0."""
        return self._ways.steps.left

    def _has_pipeline(self) -> bool:
        return AXIS in self.mesh.axis_names

    def prepare_inputs(self, inputs: Mapping[str, Any], differentiate: bool) -> Executable:
        check_cache(inputs)
        inputs = without_graph(inputs)
        if self.model is not None:
            self._following = self._following or Following(self.blueprint, self.model, self._compiled)
            self._numbers.follow(self._following.follow(), inputs, differentiate, self._ways.steps.names)
            has_values_of(self.blueprint, self.model)
        if self.loss is not None:
            self.loss.check()
        inputs = self._read(inputs, differentiate)
        # A pipeline's forward alone is the same program's: its parameters lie where the stages of training are. A
        # prompt and a token have programs of their own, on the same stages; weights that are codes train in none.
        differentiate |= self._has_pipeline() and not (states_among(inputs) or is_stored(self.blueprint))
        found = self._additions.positions(inputs, self._told, training=differentiate)
        if self.first is None and (longest := self._additions.longest(inputs, found)) is not None:
            self._prepared(longest, differentiate)  # whose placement, held against the memory limit, serves all
        batch = inputs if found is None else Added(found.inputs, ()).pad_tree(inputs)
        pieces = self.undivided.pieces_by(None if self.first is None else self.first.interface)
        rows = self._additions.rows(batch, pieces, self._told, training=differentiate)
        if self.first is None and rows is None and (divided := even(batch, pieces)) is not None:
            with suppress(AutoparError):  # inputs that are not by rows have no such batch
                self._prepared(divided, differentiate)  # by which parameters lie as was asked
        executable = self._prepared(batch if rows is None else rows.pad_tree(batch), differentiate)
        return executable if found is None and rows is None else self._with(executable, found, rows)

    def _with(self, executable: Executable, positions: Padding | None, rows: Added | None) -> Executable:
        """The executable with the batch padded on its way in, and outputs cut on their way out."""
        key = (executable, id(positions), id(rows))  # which are kept
        if key not in self._with_additions:
            outputs = executable.interface.outputs
            found = (
                Added({}, ((),) * len(outputs))
                if positions is None
                else positions.added(executable.leaves, len(outputs))
            )
            added = found if rows is None else found.then(rows)
            flatten = executable.flatten_inputs
            self._with_additions[key] = replace(
                executable, added=added, flatten_inputs=lambda args, kwargs: added.pad(flatten(args, kwargs))
            )
        return self._with_additions[key]

    def _read(self, inputs: Mapping[str, Any], differentiate: bool) -> Mapping[str, Any]:
        """The inputs without those that say again what positions say, where nothing reads them."""
        names = tuple(name for name in packing.LIMITS if inputs.get(name) is not None)
        if not names:
            return inputs
        key = (names, packing.POSITIONS in inputs, modes_key(self.blueprint), differentiate)
        if key not in self._unread:
            self._unread[key] = self._told(lambda: self._nobody_reads(names, inputs, differentiate))
        return {name: x for name, x in inputs.items() if name not in names} if self._unread[key] else inputs

    def _nobody_reads(self, names: tuple[str, ...], inputs: Mapping[str, Any], differentiate: bool) -> bool:
        dtype = to_dtype(self.options["precision"])
        found = nobody_reads(names, self.blueprint, inputs, precision=dtype, training=differentiate)
        if found and inputs.get(packing.POSITIONS) is None:
            logger.warning(
                "autopar: nothing in %s reads %s: documents are told apart by %s that restart, which this batch does "
                "not have (said once)", type(self.blueprint).__name__, ", ".join(names), packing.POSITIONS,
            )  # fmt: skip
        return found

    def _told(self, find: Callable[[], Found]) -> Found:
        """What rank 0 finds. Collective."""
        if self.model is not None:
            self.model.autopar.agreement.settle()
        box: list[Any] = [find() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        found: Found = box[0]
        return found

    def _prepared(self, inputs: Mapping[str, Any], differentiate: bool) -> Executable:
        kind = (*shapes_key(self.blueprint, inputs), differentiate)
        key = self._ways.key(kind, values_key(inputs, self._by_value.get(kind, ())))
        if key not in self._executables:
            self._ways.check_values(kind, self._by_value.get(kind, ()), self._executables)
            self._numbers.check(kind, self._executables)
            if self.model is not None:
                self.model.autopar.agreement.settle()  # no rank plans for what the others know
            with self._ways.asked(key):
                key = self._kept(self._agree(inputs, differentiate), kind, inputs)
            self.attach()
        else:
            self._ways.used(key, self._executables)
        return self._executables[key]

    def _kept(self, plan: Plan, kind: tuple[Any, ...], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Remember the executable of a plan that was just made; its key."""
        self._firsts.extend(() if self._firsts else (plan,))
        self._states = {**states_of(plan.interface), **self._states}
        self.latest = self.latest if plan.views is None and self.latest is not None else plan
        self._by_value[kind] = plan.interface.by_value
        self._ways.steps.learn(kind, plan)
        key = self._ways.key(kind, values_key(inputs, self._by_value[kind]))
        self._executables[key] = self._executable(plan, key, plan.inputs or kind_of(inputs))
        self._ways.used(key, self._executables, plan)
        if not (plan.interface.by_value or plan.interface.branches or plan.interface.told):
            self._numbers.planned(kind, self._executables)
        return key

    @torch.no_grad()
    def prepare_generation(self, generation: Generation) -> None:
        """Plan `generate()` of these sizes: the executables of both phases."""
        inputs = phase_inputs(self.blueprint, generation, self.ways)
        pins = self.options["constraints"] if self.first is None else pins_of(self.first.interface)

        strategy = self.options["strategy"]
        is_open = may_choose(strategy) and self.first is None

        def make() -> list[Plan]:
            own = strategy if self.first is None else same_stages(self.first, strategy)
            options = {**self.options, "strategy": own}
            found = planned(self.blueprint, self.mesh, generation, options, pins, is_open=is_open)
            return [self._verified(plan) for plan in found]

        agreed = agreed_plans(make)
        for batch, (plan, constants) in zip(inputs.values(), agreed, strict=True):
            self._constants.update(constants)
            self._latest_constants = constants
            self._kept(plan, (*shapes_key(self.blueprint, batch), False), batch)
            if dist.get_rank() == 0 and self.options["passes"] is None:
                self._families[self._family_of(batch, False)] = Family.of(plan)
        self.generation = GenerationPlan(generation, agreed[0][0], agreed[1][0])

    def _widen(self, key: tuple[Any, ...], inputs: Mapping[str, Any], names: tuple[str, ...]) -> Executable:
        """The executable for a kind of input from now on: its backward takes gradients for all of these outputs.

        What eager differentiates is differentiated: a term on the logits beside the loss, a loss of the user's own.
        """
        interface = self._executables[key].interface
        roots = tuple(each.name for each in interface.outputs if each.differentiable)
        if not set(names) <= set(roots):
            with self._ways.asked(key, interface.branches):
                plan = self._agree(inputs, True, names)
            self.latest = plan
            self._executables[key] = self._executable(plan, key, inputs)
            self.attach()
        return self._executables[key]

    def attach(self) -> None:
        """Give the model its plan, and the constants that the capture lifted as buffers."""
        if self.model is None:
            return
        if self.latest is not None:
            self.model.plan = self.latest
        if self.generation is not None:
            self.model.generation_plan = self.generation
        for name, value in self._constants.items():
            # One with a path is a tensor that a module keeps as a plain attribute, and has already.
            if "." not in name and name not in (*self.model._buffers, BUFFER):
                self.model.register_buffer(name, value.to(self.model.autopar.comm.device), persistent=False)

    def _agree(self, inputs: Mapping[str, Any], differentiate: bool, roots: tuple[str, ...] | None = None) -> Plan:
        def make() -> Plan:
            plan = self._plan(inputs, differentiate, roots)
            if self.loss is not None:
                self.loss.check_planned(plan)
            return plan

        plan, constants = agreed_plan(make)
        self._constants.update(constants)
        self._latest_constants = constants
        return plan

    def _family_of(self, inputs: Mapping[str, Any], differentiate: bool) -> object:
        return family_key(self.blueprint, inputs), differentiate, self.undivided.kind(inputs)

    def _plan(self, inputs: Mapping[str, Any], differentiate: bool, roots: tuple[str, ...] | None) -> Plan:
        key = self._family_of(inputs, differentiate)
        family = self._families.get(key)
        if family is not None and roots is not None and not set(roots) <= set(family.solved[0].roots or ()):
            family = None
        if family is not None:
            if roots is None:
                self._tell(inputs)
            try:
                return self._verified(self._as_stored(written(family.plan(self.blueprint, inputs))))
            except AutoparError as error:
                logger.info("the placement does not serve %s, it is solved anew: %s", shapes(inputs), error)
        plan = self._solved(inputs, differentiate, roots)
        if family is not None:
            family.add(plan)
        elif not (plan.source_is_edited or plan.interface.told) and self.options["passes"] is None:
            self._families[key] = Family.of(plan)
        return plan

    def counts(self) -> dict[str, int]:
        """Of how many batches the model was traced, or the program followed from others; on rank 0."""
        families = self._families.values()
        return {"traced": sum(each.traced for each in families), "read": sum(each.read for each in families)}

    def _tell(self, inputs: Mapping[str, Any]) -> None:
        """Once, what happens to batches of other shapes."""
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "autopar: %s is of another shape than the first batch. The placement stays; each further shape gets a "
                "program of its own, written and checked once (said once)", shapes(inputs),
            )  # fmt: skip

    def _solved(self, inputs: Mapping[str, Any], differentiate: bool, roots: tuple[str, ...] | None) -> Plan:
        options = dict(self.options)
        if roots is not None:
            options["roots"] = roots
        if self.first is not None:
            if roots is None:
                logger.info("autopar: %s is of another kind; solving for it", shapes(inputs))
            else:
                logger.warning(
                    "autopar: gradients come for %s; planning again, once, for a backward that takes them; parameters "
                    "stay where they are (roots=%r asks for it at once)", " and ".join(roots), roots,
                )  # fmt: skip
            options["constraints"] = [*pins_of(self.first.interface), *pins_for(self._states, inputs)]
            options["strategy"] = same_stages(self.first, options["strategy"])
        if self.given is not None and self.first is None:
            plan = replan(self.given, self.blueprint, inputs, self.mesh)
        else:
            options |= {"example_inputs": inputs, "inference": not differentiate}
            if self.first is not None:
                options["microbatches"] = self.undivided.microbatches(options, self.mesh)
            plan = self.undivided.planned(self.mesh, options, partial(first_plan, self.blueprint, self.mesh))
        plan = self._as_stored(plan)
        if self.program is not None and self.first is None:
            plan = plan.with_source(self.program)
        return self._verified(plan)

    def _as_stored(self, plan: Plan) -> Plan:
        return plan if self.first is None else unused_as_stored(plan, self.first)

    def _verified(self, plan: Plan) -> Plan:
        if environment.read().check:
            logger.warning("autopar: %s", plan.verify().raise_on_failure())
        return plan

    def _executable(self, plan: Plan, key: tuple[Any, ...], inputs: Mapping[str, Any]) -> Executable:
        spec = tracing.load_treespec(plan.output_spec)
        digest = hashlib.sha256(plan.source.encode()).hexdigest()[:12]

        def rebuild(values: Sequence[Any]) -> Any:
            return tracing.tree_unflatten([values[i] if isinstance(i, int) else i for i in plan.output_leaves], spec)

        def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
            read = self._read(bind_inputs(self.blueprint, args, kwargs), plan.training)
            leaves = tracing.tree_leaves_with_path(dict(read))
            return {path: value for path, value in leaves if isinstance(value, Tensor)}

        return Executable(
            plan.interface, plan.source, f"autopar_program_{digest}.py", rebuild, flatten, self.compile_regions,
            partial(self._widen, key, inputs) if plan.training and plan.pipeline is None else None,
            self._latest_constants, leaves=plan.output_leaves, repeats=not plan.training and self.loss is None,
            goes=partial(self._ways.go, key, self._executables), told=self._ways.steps if plan.interface.told else None,
        )  # fmt: skip
