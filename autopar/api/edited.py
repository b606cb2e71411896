"""What goes wrong in a program that a person has edited."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.base.errors import AutoparError


@contextmanager
def edited_program(filename: str, is_edited: bool) -> Iterator[None]:
    """Inside, errors of an edited program's own lines name the line. filename: that it was loaded by.

    Raises:
        AutoparError: in the place of an error of torch's, or of Python's, that such a line led to.
    """
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
        if not (is_edited and lines):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AutoparError(
            f"the edited program does not run: {said}",
            where=f"line {lines[-1].lineno}",
            values=f"the line is {(lines[-1].line or '').strip()!r}",
            remedy="undo the last edit of the program, or let autopar write it again",
        ) from error
