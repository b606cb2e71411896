"""What a taken-over model runs on: its placed parameters, its programs, its communicator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import swap_tensors

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import dtensor_like, local_tensor, set_tensor_hooks, tensor_hooks
from autopar.base.trace import Recorded
from autopar.ir.batching import is_of_batch
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import replicated
from autopar.ir.told import Held
from autopar.runtime import lost_writes
from autopar.runtime.added import Added
from autopar.runtime.agreement import Agreement, call_of
from autopar.runtime.alike import Alike
from autopar.runtime.alone import hook_modules
from autopar.runtime.branches import Late, add_gradients
from autopar.runtime.checkpoint.background import Background
from autopar.runtime.checks import check_order, check_same_batch, check_same_weights
from autopar.runtime.clipping import Stages, mark_stage
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.edits import Edits
from autopar.runtime.executable import Executable
from autopar.runtime.expert_layers import check_same_layers, mark_layers
from autopar.runtime.first_time import FirstTimes
from autopar.runtime.freed_memory import keep_freed_memory
from autopar.runtime.granted import Granted
from autopar.runtime.holders import Absent, held_by, holders, remove
from autopar.runtime.hooks import Hooks
from autopar.runtime.layout import shard
from autopar.runtime.loader import LoadedProgram, Tensors, load_program
from autopar.runtime.microbatches import Batch, make_batch
from autopar.runtime.own_caches import Caches
from autopar.runtime.pipeline import PipelineProgram, PipelineStep
from autopar.runtime.pipeline_run import PipelineRun, let_arrive, on_mesh, stand_ins
from autopar.runtime.placements import as_parameter, make_dtensor
from autopar.runtime.recording import Recorder
from autopar.runtime.refused import (
    check_autocast,
    check_made_apart,
    check_same_mesh,
    check_same_storage,
    check_trains,
    parameter_of,
    parameters_before,
    written_in,
)  # fmt: skip
from autopar.runtime.repeats import Repeat, Repeats, repeat_of
from autopar.runtime.seen_whole import SeenWhole, Term, as_changed, seen_whole
from autopar.runtime.step import Step, find_loss, is_scalar, run_step, run_step_in_turn

logger = logging.getLogger("autopar")

_NUMBERS = count()
Prepare = Callable[[tuple[Any, ...], dict[str, Any]], Executable]


class Watcher(Protocol):
    """Who looks at steps (runtime/watch). number: the order in which several are asked."""

    number: int

    def forward_ended(self, output: Any, inputs: Mapping[str, Tensor], added: Added | None) -> None:
        """After a forward that records gradients. inputs: the batch, whole. added: what of it does not count."""

    def clipped(self, norm: Tensor) -> None:
        """The norm that gradients had before they were clipped."""

    def close(self) -> None:
        """Look no longer."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Before every step of an optimizer of the model. Collective."""


class Engine:
    """Behind `compiled.autopar`. Until a first plan is known, parameters are replicated; then they are cut, once.

    comm: the communicator (set `comm.log = []` to write down what it sends). inner: of the mesh on which parameters
    lie: the same, or that of this rank's stages, where there is a pipeline. absent: the parameters that only ranks of
    other stages hold. record: set it to a list to write down when what ran (`finish_recording` completes it).
    background: the checkpoint that is being written while training goes on. number: of those made before.
    watch: None, or who looks at its steps. numbers: of Python's that steps leave on modules. planned_forward: what
    stood in place of the class's forward at compile.
    """

    def __init__(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        prepare: Prepare,
        prepare_for: Callable[[nn.Module], Prepare] | None = None,
    ) -> None:
        self.model, self.device_mesh, self.prepare, self.prepare_for = model, device_mesh, prepare, prepare_for
        self.number = next(_NUMBERS)
        self.comm = self.inner = ProcessGroupComm(device_mesh)
        self.agreement = Agreement(self.comm)
        self.granted = Granted()
        self.parameter_ids = frozenset(map(id, model.parameters()))
        self.interface: ProgramInterface | None = None
        self.absent: tuple[Absent, ...] = ()
        self.record: list[Recorded] | None = None
        self.watch: Watcher | None = None
        self._recorder: Recorder | None = None
        self.background = Background()
        self.placeholder = nn.Parameter(torch.zeros(0))
        self._programs: dict[object, LoadedProgram] = {}
        self._pipelines: dict[object, PipelineProgram] = {}
        self._received: dict[object, set[str]] = {}
        self._constants: dict[object, Tensors] = {}
        self._deferred: list[Callable[[], None]] = []
        self.repeats = Repeats()
        self.hooks = Hooks(model)
        self.precision: torch.dtype | None = None
        self.caches = Caches(self.comm.device, self.run)
        self.numbers: Callable[[], Collection[Held]] = tuple
        self.planned_forward: Callable[..., Any] | None = None
        self.first_times = FirstTimes(self.comm)
        self._known: dict[str, nn.Parameter] = {}
        self._num_forwards = 0
        self._wants_turns = self._had_turns = False
        if self.comm.device.type == "cpu":
            keep_freed_memory()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward on the user's inputs; the model's own kind of output.

        Inside `backward_in_turn`, where a step has several microbatches, their backwards too.
        """
        if torch.is_inference_mode_enabled():  # parameters that are cut in it, and what is traced, were never trained
            with torch.inference_mode(False), torch.no_grad():
                return self.run(args, kwargs)
        if not torch.is_autocast_enabled(kind := self.comm.device.type):
            return self._forward(args, kwargs)
        check_autocast(torch.get_autocast_dtype(kind), self.precision)
        with torch.autocast(kind, enabled=False):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.granted.settle()
        lost_writes.check()
        may_repeat = not args and not torch.is_grad_enabled() and self.record is None
        given = Repeats.given(kwargs) if may_repeat else None
        repeat = None if given is None else self.repeats.find(given)
        if given is not None and repeat is not None and (found := self._repeated(repeat, given.leaves)) is not None:
            return found
        call = call_of(self._num_forwards, self.model, args, kwargs)
        self.agreement.begin(call)
        if self.interface is None:
            check_made_apart(call.inputs, self.model)
        with self.comm.trail.doing("plans"):
            executable = self.prepare(args, kwargs)
            interface = executable.interface
            self.hooks.check(interface.carried)
            self.place(interface)
            inputs = {name: as_changed(x) for name, x in executable.flatten_inputs(args, kwargs).items()}
            program = self._program(executable, inputs)
        with torch.no_grad():
            if interface.pipeline is not None:
                inputs = {name: on_mesh(x, self.inner.device_mesh, name) for name, x in inputs.items()}
            batch = make_batch(program, interface, self.inner, inputs)
        before = torch.get_rng_state()
        seed = self.agreement.seed() if program.draws else 0
        self._num_forwards += 1
        constants = self._constants_of(executable)
        names = [entry.name for entry in interface.buffers if not is_of_batch(entry.name)]
        buffers = {name: constants[name] if name in constants else written_in(self.model, name) for name in names}
        buffers |= {each.name: buffers[each.name].clone() for each in interface.updates}  # a backward may read the old
        hooked: set[int] = set()
        late: Late = []
        outputs, updates = self._run(executable, batch, seed, buffers, hooked, late)
        if executable.goes_another_way(outputs, before, self.comm.device):
            return self._forward(args, kwargs)
        add_gradients(late)
        is_otherwise = self.granted.ask(interface.granted, outputs) if interface.granted else None
        with torch.no_grad():
            for name, value in updates.items():
                buffer = written_in(self.model, name)
                buffer.copy_(value if is_otherwise is None else torch.where(is_otherwise, buffer, value))
        if executable.added is not None:
            outputs = executable.added.cut(outputs)
        seen = [self._seen(x, e) for x, e in zip(outputs, interface.outputs, strict=True)]
        for place, each in enumerate(seen):
            if isinstance(each, SeenWhole):
                each._hooked = partial(hooked.add, place)
        if interface.pipeline is not None and not (self._wants_turns and torch.is_grad_enabled()):
            let_arrive(seen, self._pipelines[executable.key], self.comm, self.first_times.arrive)
        output = executable.output_of(seen, self.model)
        self.hooks.call(interface.carried, executable.carried_among(seen))
        if given is not None and executable.repeats and interface.pipeline is None:
            held = [parameter_of(self.model, entry, self._known) for entry in interface.parameters]
            with_what = (call, given.leaves, batch.inputs, seen, output, held, constants)
            self.repeats.keep(given, partial(repeat_of, executable, program, self.inner, self.model, *with_what))
        if self.watch is not None and torch.is_grad_enabled():
            self.watch.forward_ended(output, inputs, executable.added)
        return output

    def _repeated(self, repeat: Repeat, leaves: Mapping[str, Any]) -> Any:
        """The output of a call of a kind that was there before; None where it is none. Collective."""
        states, state = repeat.states_of(leaves), repeat.state()
        if states is None or state is None:
            self.repeats.drop(repeat)
            return None
        self.agreement.begin(repeat.call_of(self._num_forwards, leaves, states))
        self._num_forwards += 1
        self.finish_recording()
        with torch.no_grad():
            during = None if self.caches.generating is None else self.caches.generating()
            seen = repeat.run(leaves, states, state, self._scalar, during)
        self.repeats.limit_graphs()
        if repeat.executable.interface.granted:
            self.granted.ask(repeat.executable.interface.granted, seen)
        return repeat.output(seen, leaves)

    def ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The program for a batch of these shapes, before one comes. Collective."""
        with self.comm.trail.doing("plans"):
            executable = self.prepare(args, kwargs)
            self.place(executable.interface)
            self._program(executable, {})

    def _seen(self, value: Tensor | None, entry: TensorInterface) -> Tensor | None:
        """An output as the user has it: in pieces, and whole for whoever looks at it as at any tensor."""
        if not isinstance(value, DTensor):
            return None if value is None else self._scalar(value)
        gather_first = partial(self.first_times.gather, entry.name, value.shape, value.dtype)
        seen = seen_whole(value, gather_first, choose_first=partial(self.first_times.choose, entry.name))
        if local_tensor(value).is_meta:  # another stage keeps it: here it has a shape alone
            seen._whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return seen

    def _scalar(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():  # a count: nobody adds terms to it
            return value
        found = value.as_subclass(Term)
        if found.requires_grad:
            found.register_hook(self.agreement.note_gradient)
        return found

    def before_alone(self, name: str, module: nn.Module, num_bytes: int) -> None:
        """The first time that a module is called by itself: every rank has to, and it has a price."""
        if self.first_times.call(name, num_bytes) and self.agreement.alike is not None:
            self.agreement.alike.leave_out(module)

    def _constants_of(self, executable: Executable) -> Tensors:
        """On this device. Programs for other batches may have others under the same names."""
        if executable.key not in self._constants:
            moved = {name: value.to(self.comm.device) for name, value in executable.constants.items()}
            self._constants[executable.key] = moved
        found = self._constants[executable.key]
        return found if executable.told is None else {**found, **executable.told.buffers(self.comm.device)}

    def _run(
        self, executable: Executable, batch: Batch, seed: int | Tensor, buffers: Tensors, hooked: set[int], late: Late
    ) -> tuple[Sequence[Tensor | None], Tensors]:
        """The outputs of one step, and the new values of buffers. As `Step.hooked`, and `Late`."""
        interface = executable.interface
        wants_turns = self._wants_turns and torch.is_grad_enabled()
        if interface.pipeline is not None:
            program, place = self._pipelines[executable.key], self.place_along(interface)
            here = [entry for entry in interface.parameters if place in program.holders[entry.name]]
            held = {entry.name: parameter_of(self.model, entry, self._known) for entry in here}
            staged = PipelineStep(program, batch, self.comm, seed, self.record)
            run = PipelineRun(staged, self.inner.device_mesh, held, buffers)
            if not wants_turns:
                return run.forward()
            self._had_turns = True
            check_trains(interface, self.interface)
            return run.train(executable.place_of_loss(stand_ins(interface)), late)
        parameters = [parameter_of(self.model, entry, self._known) for entry in interface.parameters]
        widened = None if executable.widened is None else partial(self._widened, executable.widened, batch.inputs)
        received = self._received.setdefault(executable.key, set())
        step = Step(batch, seed, self._new_recorder(), widened, received, hooked)
        if wants_turns and batch.num > 1 and not interface.wanted:
            self._had_turns = True
            return run_step_in_turn(step, parameters, buffers, executable.place_of_loss, late)
        return run_step(step, parameters, buffers)

    def _widened(
        self,
        widened: Callable[[tuple[str, ...]], Executable],
        inputs: Mapping[str, Tensor],
        names: tuple[str, ...],
    ) -> Batch:
        """The batch with a program whose backward takes gradients for these outputs, too. Collective."""
        with torch.enable_grad(), self.comm.trail.doing("plans"):
            other = widened(names)
            check_same_storage(other.interface, self.interface, self.comm.axes)
            return make_batch(self._program(other, inputs), other.interface, self.inner, inputs)

    def _new_recorder(self) -> Recorder | None:
        """Of a step without a pipeline. Its backward may come later: it is finished when the next one begins."""
        self.finish_recording()
        if self.record is not None:
            self._recorder = Recorder(self.comm, None, self.record)
        return self._recorder

    def finish_recording(self) -> None:
        """Put what the last step did into `record`, too."""
        if self._recorder is not None:
            self._recorder.finish()
            self._recorder = None

    def train(self, forward: Callable[[], Any]) -> Any:
        """`forward()`, which calls the model, and the backward of its loss; the model's output.

        Several microbatches go forward and backward in turn, so that only one's activations live; with a pipeline, in
        the order of its schedule.

        Raises:
            AutoparError: the output has no loss.
        """
        self._wants_turns, self._had_turns = True, False
        try:
            output = forward()
        finally:
            self._wants_turns = False
        if not self._had_turns:
            find_loss(output, is_scalar).backward()
        return output

    def place(self, interface: ProgramInterface) -> None:
        """Cut the parameters as planned, in place: optimizers made since `take_over` keep them. Later plans must agree.

        Raises:
            AutoparError: another mesh than the process group's, shapes that differ, weights that differ between ranks.
        """
        if self.interface is not None:
            check_same_storage(interface, self.interface, self.comm.axes)
            check_same_layers(self.inner, interface)
            return
        check_same_mesh(interface, self.comm.axes, self.comm.sizes)
        found = parameters_before(self.model, interface.parameters)
        local = {name: local_tensor(p) for name, p in found.items() if isinstance(p, DTensor)}
        check_same_weights({name: value for name, value in local.items() if not value.is_meta})
        if interface.pipeline is not None:
            inner = self.comm.within(interface.axes)
            assert isinstance(inner, ProcessGroupComm)
            self.inner, self.first_times.is_apart = inner, True
            if len(interface.pipeline.order) > 1:
                mark_stage(inner.device_mesh)
        here = held_by(interface, self.place_along(interface))
        self.absent = tuple(
            self._drop(found[entry.name], entry, holders(interface)[entry.name])
            for entry in interface.parameters
            if entry not in here
        )
        self.agreement.held = repr([absent.names for absent in self.absent])
        self.agreement.alike = Alike(self.model, interface, here)
        for entry in here:
            self._cut(found[entry.name], entry)
        self.agreement.writes = Edits.of(self.model, interface, here)
        mark_layers(self.inner, interface, {entry.name: found[entry.name] for entry in here})
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(self.comm.device)
        self.interface = interface
        for action in self._deferred:
            action()
        self._deferred = []

    def copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter with values of its own that lies as this one does."""
        assert isinstance(parameter, DTensor)
        copied = nn.Parameter(dtensor_like(parameter, local_tensor(parameter).clone()), parameter.requires_grad)
        vars(copied).update(vars(parameter))
        return copied

    def copy_for(self, model: nn.Module, memo: Mapping[int, Any]) -> Engine:
        """The engine of a copy of the model. memo: the copies of its modules by the `id` of the original.

        Raises:
            AutoparError: something waits for the first plan.
        """
        if self._deferred:
            raise AutoparError(
                f"this {type(model).__name__} has no weights to copy before its first batch",
                remedy="Copy it after the first step, or give autopar.compile example_inputs",
            )
        prepare = self.prepare if self.prepare_for is None else self.prepare_for(model)
        other = Engine(model, self.device_mesh, prepare, self.prepare_for)
        other.inner, other.interface, other.precision = self.inner, self.interface, self.precision
        other.caches.like(self.caches)
        other.first_times.is_apart = self.first_times.is_apart
        other.hooks = Hooks(model, self.hooks)
        hook_modules(other)
        other.agreement.held = self.agreement.held
        if self.interface is not None:
            here = held_by(self.interface, self.place_along(self.interface))
            other.agreement.alike = Alike(model, self.interface, here)
            other.agreement.writes = Edits.of(model, self.interface, here)
        other.absent = tuple(
            replace(each, sites=tuple((memo[id(module)], name) for module, name in each.sites)) for each in self.absent
        )
        return other

    def when_placed(self, action: Callable[[], None]) -> None:
        """Run `action` now, or as soon as the first plan has cut the parameters."""
        if self.interface is not None:
            action()
        else:
            self._deferred.append(action)

    def _cut(self, parameter: nn.Parameter, entry: TensorInterface) -> None:
        if tuple(parameter.shape) != entry.shape:
            raise AutoparError(f"{entry.name} is {tuple(parameter.shape)}, planned as {entry.shape}")
        assert isinstance(parameter, DTensor)
        whole = local_tensor(parameter)
        piece = shard(whole, entry.sharding, self.inner)
        if whole.is_meta:
            local = torch.zeros(piece.shape, dtype=piece.dtype, device=self.comm.device)
        else:
            # Never a view: the whole tensor is to be freed.
            local = piece.to(self.comm.device, copy=True, memory_format=torch.contiguous_format)
        placed = as_parameter(local, self.inner.device_mesh, entry.sharding, parameter)
        hooks = tensor_hooks(parameter)
        set_tensor_hooks(parameter, None, None)
        try:
            swap_tensors(parameter, placed)
        except RuntimeError as error:
            raise AutoparError(
                f"{entry.name} cannot be cut: something was computed from it before the first batch",
                values=str(error).splitlines()[0][:200],
                remedy="Call the model first, or give autopar.compile example_inputs",
            ) from error
        set_tensor_hooks(parameter, *hooks)

    def _drop(self, parameter: nn.Parameter, entry: TensorInterface, ranks: tuple[int, ...]) -> Absent:
        """Take out of the model what only other pipeline ranks hold; an optimizer that has it keeps no memory."""
        absent = remove(parameter, (entry.name, *entry.aliases), self.model, ranks, self.comm.device)
        mesh, nothing = self.inner.device_mesh, torch.empty(0, dtype=parameter.dtype, device=self.comm.device)
        empty = make_dtensor(nothing, mesh, replicated(mesh.ndim), (0,))
        swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        return absent

    def place_along(self, interface: ProgramInterface) -> int:
        """This rank's place along the pipeline's axis; 0 where there is none."""
        return 0 if interface.pipeline is None else self.comm.index(interface.pipeline.axis)

    def absent_named(self, name: str) -> Absent | None:
        """The parameter of this name, if only ranks of other stages hold it."""
        return next((absent for absent in self.absent if name in absent.names), None)

    def trained_ids(self) -> frozenset[int]:
        """Of what tells that an optimizer is this model's, on every rank: its parameters, or what stands for none."""
        return self.parameter_ids | {id(self.placeholder)}

    def pipeline_axis(self) -> str | None:
        """The pipeline's axis; None where there is none, or before the first plan."""
        pipeline = None if self.interface is None else self.interface.pipeline
        return None if pipeline is None else pipeline.axis

    def stages(self) -> Stages | None:
        """What gradient norms must know of a pipeline."""
        interface = self.interface
        if interface is None or interface.pipeline is None:
            return None
        first = {name: ranks[0] for name, ranks in holders(interface).items()}
        place = self.place_along(interface)
        copies = {
            id(self.model.get_parameter(entry.name))
            for entry in held_by(interface, place)
            if first[entry.name] != place
        }
        is_wide = any(entry.dtype == "float64" for entry in interface.parameters)
        return Stages(self.comm, interface.pipeline.axis, copies, torch.float64 if is_wide else torch.float32)

    def _program(self, executable: Executable, inputs: Mapping[str, Tensor]) -> LoadedProgram:
        """Load a program at its first use, and check on all ranks that they are about to do the same."""
        if executable.key not in self._programs:
            check_same_batch({name: x for name, x in inputs.items() if name not in self.agreement.apart})
            peers = check_order(self.comm, executable.interface, executable.source)
            if executable.interface.pipeline is not None:
                self.comm.connect(executable.interface.pipeline.axis, peers)
            program = load_program(executable.source, executable.filename, executable.compile_regions)
            if executable.interface.pipeline is not None:
                self._pipelines[executable.key] = PipelineProgram(program, executable.interface)
                self.agreement.apart |= self._pipelines[executable.key].keepers.keys()
            self._programs[executable.key] = program
            if self.agreement.alike is not None:
                self.agreement.alike.keep(executable.interface)
        return self._programs[executable.key]
