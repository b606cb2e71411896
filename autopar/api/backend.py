"""`torch.compile(model, backend=autopar.backend(mesh))`: the second way in, for models whose parameters stay whole."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.api.agreed import agreed_plan
from autopar.api.devices import devices_of
from autopar.api.plan import Plan
from autopar.api.planning import first_plan
from autopar.api.subgraph import GraphModel, Role, Subgraph, autocast_error, subgraph_of
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.ir.batching import is_of_batch
from autopar.ir.sharding import Replicate
from autopar.machine.mesh import Mesh
from autopar.runtime.agreement import Agreement, Call
from autopar.runtime.checks import check_order, check_same_batch, check_same_weights
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.loader import LoadedProgram, Tensors, load_program
from autopar.runtime.microbatches import Batch, make_batch
from autopar.runtime.plain import run_plain
from autopar.runtime.step import Step
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import AUTO, Pin, Strategy, resolve
from autopar.strategies.pipelining.spec import AXIS

logger = logging.getLogger("autopar")


def backend(
    mesh: DeviceMesh | str | Mapping[str, int],
    *,
    strategy: Strategy = "auto",
    memory_limit: float | None = None,
    constraints: Sequence[Pin] = (),
    rematerialize: str = "auto",
    hardware: str | None = None,
) -> Backend:
    """A backend for torch.compile: `torch.compile(model, backend=autopar.backend(mesh), dynamic=False)`.

    Parameters stay as they are, plain and whole on every rank; what is computed is split. Every rank passes the global
    batch and gets global outputs, and gradients come back whole and reduced: losses, optimizers and checkpoints are
    those of one device. Each graph that Dynamo traces is planned by itself, for each shape of its inputs, and what
    passes between two graphs is whole. To store parameters, gradients or optimizer states in pieces, use
    `autopar.compile`.

    Args:
        mesh: a torch DeviceMesh over all ranks, or its axes, as in `autopar.compile`.
        strategy: as in `autopar.plan`, of those that store parameters whole: auto, ddp, tensor, tensor+sequence,
            tensor2d. With whole parameters `tensor` may split an operator and need not: what is faster is taken.
        Others as in `autopar.plan`.

    Returns:
        The backend; `backend.plans` are the plans it made, in order.

    Raises:
        AutoparError: a strategy that stores pieces, a mesh with a pipeline or not torch's, a world size that is not the
            mesh's.
    """
    device_mesh = devices_of(mesh, "backend")
    own = Mesh.from_device_mesh(device_mesh, hardware=hardware)
    if AXIS in own.axis_names:
        raise AutoparError(
            f"a torch.compile backend cannot run a pipeline: its graphs are parts of a step, {AXIS} cuts a whole one",
            values=f"mesh: {own}",
            remedy="use autopar.compile(model, mesh) and compiled.train_step(**batch), or a mesh without it",
        )
    strategies = resolve(strategy, own)
    _check_stores_whole(strategies, own)
    options = {"memory_limit": memory_limit, "constraints": tuple(constraints), "rematerialize": rematerialize}
    return Backend(own, strategies, options, ProcessGroupComm(device_mesh))


def _check_stores_whole(strategies: Sequence[AxisStrategy], mesh: Mesh) -> None:
    for axis, each in zip(mesh.axis_names, strategies, strict=True):
        if each.required in ("gather", "keep"):
            raise AutoparError(
                f"a torch.compile backend cannot store parameters in pieces, which {each.name.split(':')[0]} does",
                values=f"axis {axis} of {mesh}",
                remedy="use autopar.compile(model, mesh, strategy=...), or strategy auto, ddp or tensor here",
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """A planned subgraph. names: of its arguments; None for those that are no tensors or that the plan does not know.

    constants: tensors that the capture lifted out of the graph. received: the outputs for which gradients came.
    """

    plan: Plan
    loaded: LoadedProgram
    names: tuple[str | None, ...]
    constants: Mapping[str, Tensor]
    received: set[str] = field(default_factory=set)


class Backend:
    """What `autopar.backend` returns: called by Dynamo with each graph.

    plans: every plan made so far, in order. comm: the communicator (set `comm.log = []` to write down what it sends).
    """

    def __init__(
        self, mesh: Mesh, strategies: tuple[AxisStrategy, ...], options: Mapping[str, Any], comm: ProcessGroupComm
    ) -> None:
        self.mesh, self.strategies, self.options, self.comm = mesh, strategies, options, comm
        self.plans: list[Plan] = []
        self._programs: dict[object, _Program] = {}
        self._agreement = Agreement(comm)
        self._num_forwards = 0

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Dynamo's call. Planning waits for the first call of what is returned, and so for real shapes."""
        if environment.read().disable:
            return module.forward
        try:
            subgraph = subgraph_of(module)
        except AutoparError as error:
            refused = error  # raised by the first call: here Dynamo would wrap it in an error of its own
            return lambda *values: _refuse(refused)
        scalars = _scalars(module.graph)
        return lambda *values: self._run(subgraph, scalars, values)

    def _run(self, subgraph: Subgraph, scalars: Sequence[bool | None], values: Sequence[Any]) -> list[Any]:
        if torch.is_autocast_enabled(self.comm.device.type):
            raise autocast_error()
        roles = subgraph.roles(values)
        key = _key(subgraph, roles, values)
        self._agreement.begin(Call(self._num_forwards, _inputs(subgraph, roles, values), graph=repr(key)))
        self._num_forwards += 1
        if key not in self._programs:
            self._agreement.settle()  # no rank plans for what the others know
            self._programs[key] = self._prepare(subgraph, roles, values, key)
        program = self._programs[key]
        interface = program.plan.interface
        held: Tensors = {name: value for name, value in zip(program.names, values, strict=True) if name is not None}
        inputs = {entry.name: held[entry.name].detach() for entry in interface.inputs}
        state: Tensors = {}
        for entry in (*interface.parameters, *(each for each in interface.buffers if not is_of_batch(each.name))):
            found = next((held[name] for name in (entry.name, *entry.aliases) if name in held), None)
            value = program.constants[entry.name] if found is None else found
            state.update(dict.fromkeys((entry.name, *entry.aliases), value))
        for entry in interface.updates:  # the program keeps the old value, which its backward may read
            state[entry.name] = state[entry.name].detach().clone()
        with torch.no_grad():
            batch = make_batch(program.loaded, interface, self.comm, inputs)

        def widened(roots: tuple[str, ...]) -> Batch:
            with torch.enable_grad():
                other = self._widened(key, subgraph, roles, values, roots)
            return make_batch(other.loaded, other.plan.interface, self.comm, inputs)

        seed = self._agreement.seed() if program.loaded.draws else 0
        step = Step(batch, seed, None, widened, program.received)
        outputs, updates = run_plain(step, state)
        with torch.no_grad():
            for name, value in updates.items():
                held[name].copy_(value)
        leaves = [outputs[i] if isinstance(i, int) else None for i in program.plan.output_leaves]
        return [
            leaf.reshape(()) if leaf is not None and is_scalar else leaf
            for leaf, is_scalar in zip(leaves, scalars, strict=True)
        ]

    def _widened(
        self, key: object, subgraph: Subgraph, roles: Sequence[Role], values: Sequence[Any], roots: tuple[str, ...]
    ) -> _Program:
        """The program for this graph from now on, whose backward takes gradients for all of these outputs."""
        planned = self._programs[key].plan.roots or ()
        if not set(roots) <= set(planned):
            logger.warning("autopar: gradients come for outputs %s; planning again, once", " and ".join(roots))
            self._programs[key] = self._prepare(subgraph, roles, values, key, roots)
        return self._programs[key]

    def _prepare(
        self,
        subgraph: Subgraph,
        roles: Sequence[Role],
        values: Sequence[Any],
        key: object,
        roots: tuple[str, ...] | None = None,
    ) -> _Program:
        """Plan on rank 0, load, and check that all ranks are about to send the same. Collective."""
        self._check_values(subgraph, roles, values)
        plan, constants = agreed_plan(lambda: self._plan(subgraph, roles, values, roots))
        self.plans.append(plan)
        interface = plan.interface
        known = {name for entry in (*interface.parameters, *interface.buffers) for name in (entry.name, *entry.aliases)}
        known |= {entry.name for entry in interface.inputs}
        names = tuple(
            argument.name if role != "constant" and argument.name in known else None
            for argument, role in zip(subgraph.arguments, roles, strict=True)
        )
        check_order(self.comm, interface, plan.source)
        filename = f"autopar_program_{hashlib.sha256(plan.source.encode()).hexdigest()[:12]}.py"
        on_device = {name: value.to(self.comm.device) for name, value in constants.items()}
        return _Program(plan, load_program(plan.source, filename), names, on_device)

    def _check_values(self, subgraph: Subgraph, roles: Sequence[Role], values: Sequence[Any]) -> None:
        for argument, value in zip(subgraph.arguments, values, strict=True):
            if isinstance(value, DTensor):
                raise AutoparError(
                    f"{argument.name} is a DTensor; this backend takes plain tensors, whole on every rank",
                    remedy="use either autopar.compile or torch.compile with autopar.backend, not both",
                )
            if isinstance(value, Tensor) and argument.in_module and value.device.type != self.comm.device.type:
                raise AutoparError(
                    f"{argument.name} is on {value.device}, the mesh is of {self.comm.device.type} devices",
                    remedy=f"move the model: model.to({self.comm.device.type!r})",
                )
        check_same_batch(_inputs(subgraph, roles, values))
        named = zip(subgraph.arguments, values, strict=True)
        check_same_weights({argument.name: value for argument, value in named if isinstance(value, nn.Parameter)})

    def _plan(
        self, subgraph: Subgraph, roles: Sequence[Role], values: Sequence[Any], roots: tuple[str, ...] | None
    ) -> Plan:
        model = GraphModel(subgraph, roles, values)
        inputs = _inputs(subgraph, roles, values)
        pins = (*self.options["constraints"], *self._stored_whole(model), *self._returned_whole(subgraph))
        plan = first_plan(
            model,
            self.mesh,
            example_inputs=inputs,
            strategy=dict(zip(self.mesh.axis_names, self.strategies, strict=True)),
            inference="trained" not in roles,
            roots=roots,
            **{**self.options, "constraints": pins},
        )
        if environment.read().check:
            logger.warning("autopar: %s", plan.verify().raise_on_failure())
        return plan

    def _stored_whole(self, model: GraphModel) -> list[Pin]:
        placements = tuple((axis, Replicate()) for axis in self.mesh.axis_names)
        names = [name for name, _ in model.named_parameters()]
        # One pattern for all parameters of a child; inputs have no dots in their names.
        patterns = dict.fromkeys(f"{name.split('.')[0]}.*" if "." in name else name for name in names)
        return [Pin(pattern, placements) for pattern in patterns]

    def _returned_whole(self, subgraph: Subgraph) -> list[Pin]:
        """What is returned is gathered: by the plan where an axis is `auto`, which may then choose another way; else by
        the runtime, because a named strategy may have no such collective.
        """
        pairs = zip(self.mesh.axis_names, self.strategies, strict=True)
        placements = tuple((axis, Replicate()) for axis, strategy in pairs if strategy is AUTO)
        output = next(node for node in subgraph.module.graph.nodes if node.op == "output")
        returned: Sequence[Any] = output.args[0]
        names = [str(i) for i, node in enumerate(returned) if isinstance(node, fx.Node)]
        return [Pin(name, placements) for name in names] if placements else []


def _inputs(subgraph: Subgraph, roles: Sequence[Role], values: Sequence[Any]) -> dict[str, Tensor]:
    """What of the arguments is of the batch, by name."""
    named = zip(subgraph.arguments, roles, values, strict=True)
    return {argument.name: value for argument, role, value in named if role == "input"}


def _refuse(error: AutoparError) -> NoReturn:
    raise error


def _scalars(graph: fx.Graph) -> tuple[bool | None, ...]:
    """Whether each output is a tensor without dims; None for those that are None."""
    output = next(node for node in graph.nodes if node.op == "output")
    returned: Sequence[Any] = output.args[0]
    return tuple(node.meta["example_value"].dim() == 0 if isinstance(node, fx.Node) else None for node in returned)


def _key(subgraph: Subgraph, roles: Sequence[Role], values: Sequence[Any]) -> tuple[object, ...]:
    """What tells one program from another: the graph, what its arguments are, shapes, constants."""
    rows = [
        (role, tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else (role, repr(value))
        for role, value in zip(roles, values, strict=True)
    ]
    return (subgraph.digest, *rows)
