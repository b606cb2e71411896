"""torch's private parts that tracing needs, each with its reason. Tested on torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx

# What torch.func wraps has no public test.
from torch._C._functorch import is_functorch_wrapped_tensor

# capture: tensors without data that torch.export traces on, and what it raises when control flow depends on data.
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# capture, differentiate: graphs whose code is written when they are called, which ours never are.
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

# capture: the tracer of modules, as torch.export makes it.
from torch.fx.experimental import proxy_tensor

# differentiate: the tracer below dispatch that records forward and backward of one region in one graph.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.fx.experimental.proxy_tensor import make_fx as _make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg

# capture: what a model makes of Python's own numbers is computed while it is traced.
from torch.utils._python_dispatch import _disable_current_modes

from autopar.base.torch_compat.autograd import inference_as_no_grad, saving_unseen
from autopar.base.torch_compat.control_flow import control_flow_as_python
from autopar.base.torch_compat.frames import Frame as Frame
from autopar.base.torch_compat.frames import is_tracer_file as is_tracer_file
from autopar.base.torch_compat.frames import model_frames as model_frames
from autopar.base.torch_compat.frames import model_source_line as model_source_line
from autopar.base.torch_compat.frames import own_frames
from autopar.base.torch_compat.handed_on import handed_in, note_asked
from autopar.base.torch_compat.handed_on import was_asked as was_asked
from autopar.base.torch_compat.joined import Computed, computed_by, nodes_in
from autopar.base.torch_compat.recorder import current, recorded
from autopar.base.torch_compat.stand_ins import another as another
from autopar.base.torch_compat.stand_ins import fake_mode as fake_mode
from autopar.base.torch_compat.stand_ins import model_running as model_running
from autopar.base.torch_compat.stand_ins import model_runs as model_runs
from autopar.base.torch_compat.stand_ins import on_meta as on_meta
from autopar.base.torch_compat.stand_ins import parameter as parameter
from autopar.base.torch_compat.stand_ins import stand_in as stand_in
from autopar.base.torch_compat.stand_ins import traced_in as traced_in
from autopar.base.torch_compat.stand_ins import traced_itself as traced_itself
from autopar.base.torch_compat.stand_ins import uncompiled as uncompiled
from autopar.base.torch_compat.trees import ReadNumber as ReadNumber
from autopar.base.torch_compat.trees import dump_treespec as dump_treespec
from autopar.base.torch_compat.trees import load_treespec as load_treespec
from autopar.base.torch_compat.trees import output_names as output_names
from autopar.base.torch_compat.trees import register_container as register_container
from autopar.base.torch_compat.trees import see_into as see_into
from autopar.base.torch_compat.trees import tree_flatten as tree_flatten
from autopar.base.torch_compat.trees import tree_leaves_with_path as tree_leaves_with_path
from autopar.base.torch_compat.trees import tree_unflatten as tree_unflatten
from autopar.base.torch_compat.warned import without_warnings
from autopar.base.torch_compat.written import buffers_as_assigned as buffers_as_assigned
from autopar.base.torch_compat.written import is_mutable as is_mutable
from autopar.base.torch_compat.written import made_with as made_with
from autopar.base.torch_compat.written import storage_id as storage_id
from autopar.base.torch_compat.written import writes_into

# capture, outline: how operators are told from higher-order ones.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator

pack_padded_sequence = torch._pack_padded_sequence  # what the functions of these names in torch.nn.utils.rnn call
pad_packed_sequence = torch._pad_packed_sequence


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, of meta too, lie in the same memory."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def known_value(value: torch.Tensor, of: Callable[[torch.Tensor], Any] = torch.Tensor.tolist) -> Any:
    """What `of` says, outside of the trace, of a traced tensor that is made of Python's own numbers alone: them, in
    nested lists. None where anything else goes into it, or nothing is traced.
    """
    known = value_from(value, {})
    with outside_of_tracing():
        return None if known is None else of(known)


def is_stand_in(value: torch.Tensor) -> bool:
    """Whether a tensor stands for another one while a model is traced."""
    return isinstance(value, FakeTensor)


def mode_of(value: object) -> FakeTensorMode | None:
    """The mode that a stand-in is of; None of anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def has_numbers(value: torch.Tensor) -> bool:
    """Whether a tensor is one of the script's, with values: no stand-in of a trace or of `torch.func`."""
    wrapped = is_functorch_wrapped_tensor(value)
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not (value.is_meta or wrapped)


def node_of(value: torch.Tensor) -> fx.Node | None:
    """The node that stands for a traced tensor; None where nothing is traced."""
    mode = get_proxy_mode()
    last = None if mode is None else get_proxy_slot(value, mode.tracer, None, lambda slot: slot.proxy.node)
    return last if isinstance(last, fx.Node) else None


def count_recorded() -> int:
    """How many nodes the trace that is under way has recorded; 0 where nothing is traced."""
    if (recorder := current()) is not None:
        return recorder.count
    mode = get_proxy_mode()
    return 0 if mode is None else len(mode.tracer.graph.nodes)


def recorded_since(count: int) -> Iterator[fx.Node]:
    """The nodes that the trace recorded since `count_recorded` said so many, the last one first."""
    recorder, mode = current(), get_proxy_mode()
    graph = recorder.graph if recorder is not None else None if mode is None else mode.tracer.graph
    if graph is not None:
        yield from itertools.islice(reversed(graph.nodes), len(graph.nodes) - count)


def called_beside_gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function that is called under `no_grad`. Where it is its own first argument (a cast to what it
    is already), it stands for what it stood for before: not for an operator of this place, which has no gradient.
    """
    mode = get_proxy_mode()
    held = None if mode is None else get_proxy_slot(args[0], mode.tracer, None)
    found = func(*args, **kwargs)
    if found is args[0] and mode is not None and held is not None:
        set_proxy_slot(found, mode.tracer, held)
    return found


def value_from(value: torch.Tensor, given: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a traced tensor that is made of Python's own numbers and of the given nodes alone; None where
    anything else goes into it.
    """
    last = node_of(value)
    return None if last is None else value_of(last, given)


def value_of(last: fx.Node, given: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """As `value_from`, of what a node of the trace gives."""
    sources = made_of(last, given)
    if sources is None:
        return None
    needed, held, _ = sources
    note_asked(needed)
    with outside_of_tracing():
        writes = any(map(is_mutable, needed))
        made: dict[fx.Node, Any] = {node: x.clone() if writes else x for node, x in {**given, **held}.items()}
        for node in last.graph.nodes:
            if node in needed:
                target, args, kwargs = needed[node]
                made[node] = target(*map_arg(args, made.__getitem__), **map_arg(kwargs, made.__getitem__))
    found: torch.Tensor = made[last]
    return found


def sources_from(value: torch.Tensor, given: Container[fx.Node]) -> list[fx.Node] | None:
    """Which of the given nodes a traced tensor is made of; None as of `value_from`."""
    last = node_of(value)
    found = None if last is None else made_of(last, given)
    return None if found is None else list(found[2])


def made_of(
    last: fx.Node, given: Container[fx.Node]
) -> tuple[dict[fx.Node, Computed], dict[fx.Node, torch.Tensor], dict[fx.Node, None]] | None:
    """What is computed, and how, which constants are read, and which of the given nodes, for what a node gives; None
    where anything else is needed.
    """
    needed: dict[fx.Node, Computed] = {}
    held: dict[fx.Node, torch.Tensor] = {}
    read: dict[fx.Node, None] = {}
    waiting = [last]
    while waiting or (waiting := writes_into((*needed, *held, *read), last.graph)):
        node = waiting.pop()
        if node in held or node in read:
            continue
        if node in given:
            read[node] = None
            continue
        if node.op == "get_attr" and (constant := _constant(node)) is not None:
            held[node] = constant
            continue
        if node.op != "call_function" or not _is_computed(node.target):
            return None
        if (source := handed_in(node)) is not None and made_of(source, ()) is None:
            return None  # what is given here may be other values for the next block
        needed[node] = computed_by(node)
        waiting += [each for each in nodes_in(needed[node]) if each not in needed]
    return needed, held, read


def _constant(node: fx.Node) -> torch.Tensor | None:
    """A tensor that the trace under way holds, made of Python's own numbers; None where it has no values."""
    mode = get_proxy_mode()
    found = None if mode is None else getattr(getattr(mode.tracer, "root", None), str(node.target), None)
    if isinstance(found, FakeTensor):
        found = found.constant
    return found if isinstance(found, torch.Tensor) and not found.is_meta else None


def _is_computed(target: Any) -> bool:
    """Whether a node's function gives the same whenever it is asked; what stands for others while models are traced
    has no values.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    if target.namespace in ("autopar_chosen", "autopar_capture"):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """What runs inside is computed, not traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def is_count_of(value: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a traced value is how many of each row of a traced mask are set, as `mask.sum(-1)` says."""
    node, of = node_of(value), node_of(mask)
    while node is not None and node.target in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default):
        node = node.all_input_nodes[0]
    if node is None or of is None or node.target != torch.ops.aten.sum.dim_IntList or node.args[0] is not of:
        return False
    return [int(dim) % mask.dim() for dim in node.args[1]] == [mask.dim() - 1]  # type: ignore[union-attr,arg-type]


def asks_of_all(value: torch.Tensor) -> bool:
    """Whether a traced value says if any, or all, elements of a tensor are set, or that it is not so."""
    node = node_of(value)
    while node is not None and node.target in _SAME_OR_NOT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node is not None and node.target in (torch.ops.aten.any.default, torch.ops.aten.all.default)


_SAME_OR_NOT = (
    torch.ops.aten.logical_not.default, torch.ops.aten.bitwise_not.default, torch.ops.aten.to.dtype,
    torch.ops.aten.alias.default, torch.ops.aten.detach.default,
)  # fmt: skip


def is_data_dependent(error: BaseException) -> bool:
    """Whether an export failed because Python asked for the value of a tensor."""
    seen: BaseException | None = error
    while seen is not None:
        if (
            isinstance(seen, GuardOnDataDependentSymNode)
            or "data-dependent" in str(seen)
            or "meta tensors" in str(seen)
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_unknown(value: Any) -> bool:
    """Whether a traced value is a number, or a tensor of a size, that tracing could not know."""
    if isinstance(value, torch.Tensor):
        return any(is_unknown(size) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not value.node.is_constant()


def model_line(error: BaseException) -> str | None:
    """The model's own line at which an error was raised: the innermost one outside of torch and autopar."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_tracer_file(f.filename)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def caller_of_builtins(frame: FrameType) -> FrameType:
    """Who calls `max`, `min` or `math.pow`, for which torch has its own while it exports."""
    while frame.f_code.co_filename.endswith("non_strict_utils.py") and frame.f_code.co_name in _BUILTINS:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


_BUILTINS = ("_tensor_min_max", "<lambda>")


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """The tracer to this thread alone; others wait. It says nothing: autopar reports failures itself.

    While torch traces, it has a `__call__` and a `__getattr__` of its own on `nn.Module`, and flags and log levels are
    the process's: two traces that overlapped would each put back what the other had set.
    """
    names = (
        "torch.fx.experimental.symbolic_shapes", "torch._export", "torch.export", "torch._dynamo",
        "torch._subclasses.fake_tensor",
    )  # fmt: skip
    with _LOCK, contextlib.ExitStack() as stack:
        for name in names:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        stack.callback(setattr, proxy_tensor, "_ModuleStackTracer", proxy_tensor._ModuleStackTracer)
        proxy_tensor._ModuleStackTracer = _OfItsThread  # type: ignore[assignment, misc]
        for name, nothing in _NOT_NOTED.items():
            stack.callback(setattr, proxy_tensor, name, made := getattr(proxy_tensor, name))
            setattr(proxy_tensor, name, _of_other_threads(made, nothing))
        stack.enter_context(without_warnings())
        stack.enter_context(saving_unseen())
        stack.enter_context(inference_as_no_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # which asks for values, and there are none
        stack.enter_context(control_flow_as_python())
        stack.enter_context(_use_lazy_graph_module(True))
        yield


_LOCK = threading.RLock()
_NOT_NOTED: Mapping[str, Any] = {
    "_extract_tensor_metadata": None,
    "TorchFunctionMetadataMode": contextlib.nullcontext(),
}
"""What torch notes of each node and nobody here reads, with what stands for it: how a value lies, which `val` says too,
and which function of torch it is of, for which every read of a tensor's type goes through a mode.
"""


def _of_other_threads(made: Callable[[Any], Any], nothing: Any) -> Callable[[Any], Any]:
    """A function that gives this thread `nothing`, and others what `made` gives."""
    own = threading.get_ident()
    return lambda given: nothing if threading.get_ident() == own else made(given)


class _OfItsThread(proxy_tensor._ModuleStackTracer):
    """torch's tracer, which minds modules that its own thread calls. Otherwise, where the model that is traced shares a
    module, the modules of every thread turn into the tracer's proxies, and their calls count as the model's.
    """

    def __init__(self, *args: Any) -> None:
        self._thread = threading.get_ident()
        super().__init__(*args)

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        """As torch's, which has `torch.export` print the graph so far of what it refuses, before autopar says why."""
        try:
            return super().trace(*args, **kwargs)
        except RuntimeError as error:
            vars(error).pop("partial_fx_graph", None)
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """As torch's, which asks for all frames of the stack to be told by name to leave most of them out: of a deep
        model a fifth of what its trace takes.
        """
        records, self.record_stack_traces = self.record_stack_traces, False
        try:
            node = super().create_node(*args, **kwargs)
        finally:
            self.record_stack_traces = records
        if records and not node.stack_trace and (frames := own_frames(sys._getframe(1))):
            node.stack_trace = frames
        return node

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: Any) -> object:
        """What reading a module's attribute gives."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What calling a module gives."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        with model_running():
            return super().call_module(m, forward, args, kwargs)


def make_fx(
    function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]], arguments: list[torch.Tensor]
) -> fx.GraphModule:
    """Record `function` on tensors without data as a flat graph of ATen operators. It is called again where something
    is not plain, which only torch's own recording knows how to go about, or says what is wrong.
    """
    with exclusive():
        if all(each.is_meta for each in arguments):
            with contextlib.suppress(Exception):
                graph = recorded(function, decompositions, arguments)
                return _make_graph_module(torch.nn.Module(), graph, "recorded")
        return _make_fx(function, decomposition_table=dict(decompositions), tracing_mode="fake")(*arguments)


def functional(module: fx.GraphModule, arguments: list[torch.Tensor], *, kept: Iterable[str] = ()) -> fx.GraphModule:
    """The same graph without operators that change their operands (some gradient formulas of torch have them).

    kept: what nodes' meta has beside origins that is to stay.
    """
    return make_fx(torch.func.functionalize(_Again(module, kept).run, remove="mutations"), {}, arguments)


class _Again(fx.Interpreter):
    """Runs a recorded graph, and marks what is recorded now with the origins and other notes that it has."""

    def __init__(self, module: fx.GraphModule, kept: Iterable[str]) -> None:
        super().__init__(module)
        self.kept = tuple(kept)

    def run_node(self, n: fx.Node) -> Any:
        with tag_new_nodes(n.meta.get(ORIGIN_KEY, "")):
            result = super().run_node(n)
        for key in self.kept:
            if key in n.meta and (node := recorded_node(result)) is not None:
                node.meta.setdefault(key, n.meta[key])
        return result


ORIGIN_KEY = "autopar_origin"


def recorded_node(value: object) -> fx.Node | None:
    """The node that stands for a tensor in the graph that the surrounding `make_fx` records."""
    if (recorder := current()) is not None:
        return recorder.node_of(value)
    mode = get_proxy_mode()
    if mode is None or not isinstance(value, torch.Tensor):
        return None
    found = get_proxy_slot(value, mode.tracer, None, lambda slot: slot.proxy.node)
    return found if isinstance(found, fx.Node) else None


def autograd_nodes(value: object, known: Container[object]) -> Iterator[Any]:
    """The nodes of autograd's graph that a tensor is made by, as far as they are not known yet."""
    waiting = [value.grad_fn] if isinstance(value, torch.Tensor) else []
    seen: set[object] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


class BackwardWatch:
    """Tells, while `make_fx` records a backward, which nodes each step of autograd records.

    Autograd runs its graph's nodes one by one; between two of them it adds up what a value gets from several readers.
    begins: called with autograd's node and the recorded gradients that it gets. ends: with it, the gradients that it
    gives, and all nodes it recorded.
    """

    def __init__(
        self,
        begins: Callable[[Any, list[fx.Node | None]], None],
        ends: Callable[[Any, list[fx.Node | None], list[fx.Node]], None],
    ) -> None:
        self._begins, self._ends = begins, ends
        self._start = 0

    def add(self, node: Any) -> None:
        """Watch one node of autograd's graph."""
        node.register_prehook(lambda given, node=node: self._before(node, given))
        node.register_hook(lambda made, _, node=node: self._after(node, made))

    def _before(self, node: Any, given: Iterable[Any]) -> None:
        self._begins(node, [recorded_node(value) for value in given])
        self._start = count_recorded()

    def _after(self, node: Any, made: Iterable[Any]) -> None:
        if current() is not None or get_proxy_mode() is not None:
            self._ends(node, [recorded_node(value) for value in made], list(recorded_since(self._start)))


@contextlib.contextmanager
def tag_new_nodes(origin: str) -> Iterator[None]:
    """Mark the nodes that the surrounding `make_fx` records inside the block with where they come from."""
    before = count_recorded()
    yield
    for node in recorded_since(before):
        node.meta[ORIGIN_KEY] = origin


def no_torch_functions() -> Any:
    """A context in which functions of torch go past all `__torch_function__`, of modes too."""
    return torch._C.DisableTorchFunction()
