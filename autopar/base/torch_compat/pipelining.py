"""What strategies/pipelining and runtime/pipeline.py need of torch's pipeline schedules and their runtime, all private.

Seen the same in torch 2.11 to 2.13: the schedule classes make `pipeline_order` when they are built, from stages of
which they read plain attributes only; `_add_send_recv` adds communication to orders of computation;
`_PipelineScheduleRuntime` runs `pipeline_order_with_comms`. Actions cross this border as text, as torch prints them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from autopar.base.errors import AutoparError

Order = list[list[str]]
_OVERLAP = "OVERLAP_F_B"
COMPUTES = frozenset({"F", "B", "I", "W", _OVERLAP})
CUSTOM = COMPUTES | {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
"""What torch's runtime hands to functions of ours; it does the rest by asking stages for their sends and receives."""
_TRANSFERS = frozenset({"get_fwd_send_ops", "get_fwd_recv_ops", "get_bwd_send_ops", "get_bwd_recv_ops"})


def compute_order(torch_class_name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Order:
    """Per rank, the computations of one of torch's schedules in order: `ScheduleGPipe`, `ScheduleInterleaved1F1B`, ….

    Raises:
        AutoparError: torch refuses these numbers; it carries torch's reason.
    """
    from torch.distributed.pipelining import schedules

    original: Any = getattr(schedules, torch_class_name)

    class OrderOnly(original):
        def _prepare_schedule_with_comms(self, *args: Any, **kwargs: Any) -> None:
            """Nothing: communication is added by `add_send_recv`."""

    stages = [_stage(num_ranks, num_ranks * stages_per_rank, local) for local in range(stages_per_rank)]
    single = issubclass(original, schedules.PipelineScheduleSingle)
    try:
        built: Any = OrderOnly(stages[0] if single else stages, num_microbatches, loss_fn=lambda *_: None)
    except ValueError as error:
        raise AutoparError(
            f"torch's {torch_class_name} refuses {num_microbatches} microbatches on {num_ranks} ranks",
            values=" ".join(str(error).split()),
            remedy="Choose another number of microbatches, or another schedule",
        ) from error
    return [
        [str(each) for each in built.pipeline_order[rank] if each is not None and _kind(each) in COMPUTES]
        for rank in range(num_ranks)
    ]


def _stage(num_ranks: int, num_stages: int, local: int) -> SimpleNamespace:
    """What a schedule class reads of a stage of rank 0."""
    index = local * num_ranks
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=0,
        submod=None,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        has_backward=True,
    )


def add_send_recv(order: Order, rank_of: Sequence[int]) -> Order:
    """The order with SEND and RECV between stages on different ranks. Every message enters both ranks' lists at once.

    So no rank's transfers, even made strictly one after the other, can wait in a circle.

    Raises:
        AssertionError: the computations wait for each other in a circle, or for one that is missing.
    """
    from torch.distributed.pipelining import schedules

    parse = schedules._Action.from_str
    actions: dict[int, list[Any]] = {rank: [parse(text) for text in texts] for rank, texts in enumerate(order)}
    lowered = schedules._add_send_recv(actions, rank_of.__getitem__, len(rank_of))
    return [[str(action) for action in lowered[rank]] for rank in range(len(order))]


class _Carried(BaseException):
    """Carries an error past torch's `except Exception`, which logs the schedules of all ranks."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def _carried(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not isinstance(error, AutoparError):
            error.add_note(f"in a pipeline schedule, {what}")
        raise _Carried(error) from error


class _Guarded:
    """A stage whose errors in transfers are carried; all else of it is its own."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name not in _TRANSFERS:
            return value

        def guarded(microbatch: int) -> Any:
            with _carried(f"{name} of stage {self._stage.stage_index}, microbatch {microbatch}"):
                return value(microbatch)

        return guarded


class PipelineRuntime:
    """One rank's part of a schedule, run by torch's `_PipelineScheduleRuntime`. Needs no process group.

    Stages are duck-typed: stage_index, num_stages, group_size, group_rank, submod (None), is_first, is_last,
    has_backward, clear_runtime_states(), and get_fwd_send_ops, get_fwd_recv_ops, get_bwd_send_ops, get_bwd_recv_ops of
    a microbatch, which communicate themselves and return [].
    """

    def __init__(self, runtime: Any, stages: Sequence[Any]) -> None:
        self._runtime = runtime
        self._stages = stages

    def run(self) -> None:
        """All actions of the rank, once.

        Raises:
            Exception: what a function or a stage raised, as it was; one that is no AutoparError with a note of where.
        """
        runtime = self._runtime
        for stage in self._stages:
            stage.clear_runtime_states()
        # An earlier run may have ended with an error; and our functions wait for what they need, not torch's runtime.
        runtime.fwd_recv_ops.clear()
        runtime.bwd_recv_ops.clear()
        error: Exception | None = None
        try:
            runtime._step_microbatches()
        except _Carried as carried:
            error = carried.error
        if error is not None:
            raise error


def make_runtime(
    stages: Sequence[Any],
    num_microbatches: int,
    order_texts_per_rank: Sequence[Sequence[str]],
    rank: int,
    functions: Mapping[str, Callable[[str], None]],
) -> PipelineRuntime:
    """The runtime of `rank`, which runs the stages `stages`. functions: by kind (`F`, `UNSHARD`, …), called with the
    text of each action in its turn.

    Where there is none for OVERLAP_F_B, its parts' functions run one after the other.
    """
    from torch.distributed.pipelining import schedules

    texts = order_texts_per_rank[rank]
    row = [schedules._Action.from_str(text) for text in texts]
    functions = {_OVERLAP: _one_after_the_other(functions), **functions}
    missing = {_kind(each) for each in row} & CUSTOM - functions.keys()
    assert not missing, f"no function for {sorted(missing)}"
    assert stages and all(stage.group_rank == rank for stage in stages), "stages of another rank"
    runtime: Any = _runtime_class()([_Guarded(stage) for stage in stages], num_microbatches)
    runtime.pipeline_order_with_comms = {rank: row}
    for kind, function in functions.items():
        runtime.register_custom_function(
            schedules._ComputationType(str(kind)), functools.partial(_call, rank, function)
        )
    return PipelineRuntime(runtime, stages)


def _kind(action: Any) -> str:
    """`F` of torch's `0F0`."""
    return str(action.computation_type.value)


def _one_after_the_other(functions: Mapping[str, Callable[[str], None]]) -> Callable[[str], None]:
    def overlap(text: str) -> None:
        from torch.distributed.pipelining import schedules

        action: Any = schedules._Action.from_str(text)
        for part in action.sub_actions or ():
            functions[_kind(part)](str(part))

    return overlap


def _call(rank: int, function: Callable[[str], None], action: Any, _context: Any) -> None:
    with _carried(f"action {action} of rank {rank}"):
        function(str(action))


@functools.cache
def _runtime_class() -> type:
    from torch.distributed.pipelining import schedules

    class Runtime(schedules._PipelineScheduleRuntime):
        def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
            """Nothing: shapes are known, and the stages communicate themselves."""

    return Runtime
