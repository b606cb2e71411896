"""From the text of a generated program to its functions."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.comm import Communicator

Tensors = dict[str, Tensor]
SplitInputs = Callable[[Communicator, Tensors], Tensors]
LossWeight = Callable[[Mapping[str, Tensor]], Tensor]
Forward = Callable[[Communicator, Tensors, Tensors, Tensors, Tensor], tuple[tuple[Tensor, ...], Any]]
Backward = Callable[[Communicator, Tensors, Tensors, Any, tuple[Tensor | None, ...], Tensors, bool], Tensors]


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """The functions of a generated program (contract: autopar/interface.py) and its module namespace."""

    filename: str
    split_inputs: SplitInputs
    forward: Forward
    backward: Backward
    namespace: dict[str, Any]
    loss_weight: LossWeight | None = None


def load_program(source: str, filename: str, compile_regions: bool | str = False) -> LoadedProgram:
    """Run the text as a module of its own. Tracebacks and debuggers show its lines, whether `filename` exists or not.

    compile_regions: run each region's forward and backward through torch.compile; a text names its backend.

    Raises:
        AutoparError: text that is no Python, or lacks one of the three functions; no such backend.
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
    namespace: dict[str, Any] = {"__name__": "autopar_program", "__file__": filename}
    exec(code, namespace)
    missing = [name for name in ("split_inputs", "forward", "backward") if not callable(namespace.get(name))]
    if missing:
        raise AutoparError(
            f"the generated program does not define {', '.join(missing)}",
            where=filename,
            remedy="Restore the function, or let autopar write the program again",
        )
    if compile_regions:
        from autopar.runtime.regions import compile_regions as compile_in

        compile_in(namespace, filename, compile_regions)
    functions = (namespace["split_inputs"], namespace["forward"], namespace["backward"])
    return LoadedProgram(filename, *functions, namespace, namespace.get("loss_weight"))
