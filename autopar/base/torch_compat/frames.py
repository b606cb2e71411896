"""Frames of the stack: which are the model's own, and what is told of them of the nodes that a trace records."""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

import sympy
import torch

_AUTOPAR = f"{Path(__file__).parents[2]}{os.sep}"
_TRACERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(sympy.__file__).parent}{os.sep}", _AUTOPAR)
_MODELS = f"{_AUTOPAR}cli{os.sep}models{os.sep}"
"""Models that autopar ships are models like the user's."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n(?!  File )\s*(.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the model that was running when a node was recorded, its text, and the function that it is of."""

    filename: str
    line: int
    text: str
    function: str

    @property
    def is_forward(self) -> bool:
        """Whether a module's `forward` was running, not a function that it calls."""
        return self.function == "forward"


@lru_cache(maxsize=4096)
def model_frames(stack_trace: str) -> tuple[Frame, ...]:
    """The frames of a node's stack trace that are the model's own, the innermost last."""
    frames = _FRAME.findall(stack_trace)
    return tuple(Frame(name, int(line), text, of) for name, line, of, text in frames if not is_tracer_file(name))


def model_source_line(stack_trace: str) -> str:
    """`modeling_llama.py:177`: where a module's `forward` stood, else the innermost frame that is the model's own."""
    frames = model_frames(stack_trace)
    frames = tuple(frame for frame in frames if frame.is_forward) or frames
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].line}" if frames else ""


def is_tracer_file(filename: str) -> bool:
    """Whether a traceback's file belongs to torch, to autopar or to Python itself, not to the model."""
    if filename.startswith("<") or filename.endswith("contextlib.py"):
        return True
    return filename.startswith(_TRACERS) and not filename.startswith(_MODELS)


def own_frames(frame: FrameType | None) -> str:
    """The model's own frames, those of functions that its modules call too (they have words for values), as Python
    prints them, the innermost last; none before a module's `forward` runs.
    """
    found = list[str]()
    whole = 0
    while frame is not None:
        code = frame.f_code
        if not _is_of_tracer(code.co_filename):
            found.append(_printed(code.co_filename, frame.f_lineno, code.co_name))
        if code.co_name == "forward":
            whole = len(found)
        frame = frame.f_back
    return "".join(reversed(found[:whole])).strip()


_is_of_tracer = lru_cache(maxsize=4096)(is_tracer_file)


@lru_cache(maxsize=4096)
def _printed(filename: str, line: int, function: str) -> str:
    """A frame, as Python prints it."""
    return traceback.StackSummary.from_list([(filename, line, function, None)]).format()[0]
