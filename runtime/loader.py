"""From the text of a generated program to its functions."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.attention import cudnn_first
from autopar.runtime import kernels
from autopar.runtime.communicator import Communicator
from autopar.runtime.draws import reads_seed
from autopar.runtime.regions import compile_regions as compile_in
from autopar.runtime.regions import compiler_of, is_for_inference
from autopar.runtime.replay import CompiledForward
from autopar.runtime.transfers import Transfers

Tensors = dict[str, Tensor]
SplitInputs = Callable[[Communicator, Tensors], Tensors]
LossWeight = Callable[[Mapping[str, Tensor]], Tensor]
OfBatch = Callable[[Any, Tensors], Tensors]
Seeds = Tensor | tuple[Tensor, ...]
Forward = Callable[[Communicator, Tensors, Tensors, Tensors, Seeds], tuple[tuple[Tensor, ...], Any]]
Backward = Callable[[Communicator, Tensors, Tensors, Any, tuple[Tensor | None, ...], Tensors, bool], Tensors]

Values = tuple[Tensor, ...]
ByPlace = dict[int, Tensor]
Unshard = Callable[[Communicator, Tensors, Tensors], list[Transfers]]
StageForward = Callable[
    [Communicator, Tensors, Tensors, Tensors, Values, Seeds], tuple[Values, ByPlace, Tensors, list[Any]]
]
StageBackward = Callable[[Communicator, Tensors, Tensors, list[Any], Values, ByPlace, Tensors], Values]
BackwardInput = Callable[[Communicator, Tensors, Tensors, list[Any], Values, ByPlace], tuple[Values, list[Any]]]
BackwardWeight = Callable[[Communicator, Tensors, Tensors, list[Any], Tensors], None]
Reduce = Callable[[Communicator, Tensors], Tensors]


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """The functions of one stage of a pipeline (contract: autopar/interface.py), its blocks bound to them.

    backward_input, backward_weight: None where the schedule does not split the backward.
    """

    kind: str
    unshard: Unshard
    forward: StageForward
    backward: StageBackward
    reduce: Reduce
    backward_input: BackwardInput | None = None
    backward_weight: BackwardWeight | None = None


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """The functions of a generated program (contract: autopar/interface.py) and its module namespace.

    stages: of a pipeline, whose `forward` and `backward` as a whole are errors.
    """

    filename: str
    split_inputs: SplitInputs
    forward: Forward
    backward: Backward
    namespace: dict[str, Any]
    loss_weight: LossWeight | None = None
    of_batch: OfBatch | None = None
    stages: tuple[LoadedStage, ...] = ()
    source: str = ""

    @property
    def draws(self) -> bool:
        """Whether it computes random numbers, so that a step needs a seed."""
        return reads_seed(self.source, tuple(f"{stage.kind}_forward" for stage in self.stages) or ("forward",))


def split_together(program: LoadedProgram, comm: Any, whole: Tensors, beside: str) -> Tensors:
    """This rank's part of the inputs of all microbatches that go through the program together.

    whole: by name; those of the second end with `beside`, "" where there is none.
    """
    if not beside:
        return program.split_inputs(comm, whole)
    others = {name.removesuffix(beside): x for name, x in whole.items() if name.endswith(beside)}
    own = program.split_inputs(comm, {name: whole[name] for name in others})
    found = program.split_inputs(comm, others)
    return {**own, **{name + beside: found[name] for name in others}}


def load_program(source: str, filename: str, compile_regions: bool | str = False) -> LoadedProgram:
    """Run the text as a module of its own. Tracebacks and debuggers show its lines, whether `filename` exists or not.

    compile_regions: run each region's forward and backward through torch.compile; a text names its backend.

    Raises:
        AutoparError: text that is no Python, or lacks one of its functions; no such backend.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    try:
        code = compile(source, filename, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise AutoparError(
            f"the generated program is not valid Python: {error.msg}",
            where=f"{filename}:{error.lineno}",
            values=f"the line is {line!r}" if line else None,
            remedy="Undo the last edit of the file",
        ) from error
    kernels.register()
    namespace: dict[str, Any] = {"__name__": "autopar_program", "__file__": filename}
    exec(code, namespace)
    is_pipeline = "STAGES" in namespace
    _require(namespace, filename, ("split_inputs",) if is_pipeline else ("split_inputs", "forward", "backward"))
    if compile_regions:
        compile_in(namespace, filename, compile_regions)
    is_alone = bool(compile_regions) and not is_pipeline and is_for_inference(namespace)
    whole = [_whole_step(name, filename) if is_pipeline else namespace[name] for name in ("forward", "backward")]
    stages = _load_stages(namespace, filename) if is_pipeline else ()
    told = namespace.get("loss_weight"), namespace.get("of_batch")
    if "ATTENTION" in namespace:
        whole, stages = _with_attention(namespace["ATTENTION"], filename, whole, stages)
    if is_alone:
        compiler, plain = compiler_of(compile_regions), partial(load_program, source, filename)
        whole[0] = CompiledForward(source, filename, compiler, lambda: plain().forward, whole[0])
    return LoadedProgram(filename, namespace["split_inputs"], whole[0], whole[1], namespace, *told, stages, source)


def _require(namespace: Mapping[str, Any], filename: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not callable(namespace.get(name))]
    if missing:
        raise AutoparError(
            f"the generated program does not define {', '.join(missing)}",
            where=filename,
            remedy="Restore the function, or let autopar write the program again",
        )


def _load_stages(namespace: Mapping[str, Any], filename: str) -> tuple[LoadedStage, ...]:
    table = namespace["STAGES"]
    try:
        rows = [(str(kind), {str(name): blocks for name, blocks in ranges.items()}) for kind, ranges in table]
    except (TypeError, ValueError, AttributeError) as error:
        raise AutoparError(
            "STAGES of the generated program is no table of kinds and their blocks",
            where=filename,
            values=str(table)[:200],
            remedy='Write it as (("first", {"layers": range(0, 8)}), …), one row a stage',
        ) from error
    return tuple(_load_stage(namespace, filename, kind, ranges) for kind, ranges in rows)


def _load_stage(namespace: Mapping[str, Any], filename: str, kind: str, ranges: dict[str, Any]) -> LoadedStage:
    _require(namespace, filename, (f"{kind}_unshard", f"{kind}_forward"))

    def bound(name: str) -> Any:
        function = namespace.get(f"{kind}_{name}")
        if function is None:
            return None
        taken = inspect.getfullargspec(function).kwonlyargs
        if set(taken) != set(ranges):
            raise AutoparError(
                f"{kind}_{name} takes the blocks {', '.join(taken) or '-'}, STAGES gives {', '.join(ranges) or '-'}",
                where=filename,
                remedy="Undo the last edit of the file",
            )
        return partial(function, **ranges)

    for_training = [bound(name) or _not_for_training(f"{kind}_{name}", filename) for name in ("backward", "reduce")]
    halves = bound("backward_input"), bound("backward_weight")
    return LoadedStage(kind, bound("unshard"), bound("forward"), for_training[0], for_training[1], *halves)


def _with_attention(
    kernel: object, filename: str, whole: Sequence[Callable[..., Any]], stages: Sequence[LoadedStage]
) -> tuple[list[Callable[..., Any]], tuple[LoadedStage, ...]]:
    """The functions with the kernel first that a program wants plain attention to go to."""
    if kernel not in ("cudnn", "flash"):
        raise AutoparError(
            "the generated program names no kernel of attention", where=filename, values=f"ATTENTION = {kernel!r}",
            remedy='Write ATTENTION = "cudnn", or leave the line out',
        )  # fmt: skip
    if kernel == "flash":
        return list(whole), tuple(stages)

    def first(function: Any) -> Any:
        return None if function is None else cudnn_first()(function)

    computing = ("forward", "backward", "backward_input", "backward_weight")
    return [first(each) for each in whole], tuple(
        replace(stage, **{name: first(getattr(stage, name)) for name in computing}) for stage in stages
    )


def _whole_step(name: str, filename: str) -> Callable[..., NoReturn]:
    def function(*_: Any) -> NoReturn:
        raise AutoparError(
            f"the generated program is a pipeline and has no {name} of the whole step",
            where=filename,
            remedy="run its stages in the order of its schedule, as train_step does",
        )

    return function


def _not_for_training(name: str, filename: str) -> Callable[..., NoReturn]:
    def function(*_: Any) -> NoReturn:
        raise AutoparError(
            f"the generated program does not define {name}",
            where=filename,
            values="it was planned for inference, or for a schedule that does without",
            remedy="plan the model in training mode, with the schedule that is to run",
        )

    return function
