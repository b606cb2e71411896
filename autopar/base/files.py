"""Files that others wrote, read as data: regular files of bounded size, and texts of bounded depth and count.

What a file says is never imported, called or run; what does not serve is an AutoparError that names the file, what is
wrong and what to do. A folder or a file may be a symbolic link (a HuggingFace cache is made of them); what counts is
what the link leads to. Pipes, sockets and devices are refused unread: they may never end.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from autopar.base.errors import AutoparError

MIB = 1 << 20
MOST_DEPTH = 64
"""Of objects and lists inside each other in a JSON text."""
MOST_VALUES = 20_000_000
"""In a JSON text: a comma or an opening bracket stands before each but the first."""


def read_bytes(path: str | Path, what: str, *, most_bytes: int, remedy: str) -> bytes:
    """The content of a regular file. what: for errors, as in `plan`.

    Raises:
        AutoparError: no such file, no regular one, or one of more than `most_bytes`.
    """
    try:
        _check(os.stat(path), path, what, most_bytes)  # before it is opened: opening a device may do something
        with open(path, "rb", opener=_without_waiting) as file:
            _check(os.fstat(file.fileno()), path, what, most_bytes)
            # A read takes memory for all that is asked for. What grows meanwhile is read to its end.
            content = file.read(min(os.fstat(file.fileno()).st_size, most_bytes) + 1)
            if more := file.read(1):
                content += more + file.read(max(0, most_bytes - len(content)))
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise AutoparError(f"cannot read the {what} {_short(path)}", values=str(error)[:300], remedy=remedy) from error
    if len(content) > most_bytes:
        _too_large(path, what, len(content), most_bytes)
    return content


def read_text(path: str | Path, what: str, *, most_bytes: int, remedy: str) -> str:
    """The same as text.

    Raises:
        AutoparError: as `read_bytes`; and bytes that are no UTF-8.
    """
    content = read_bytes(path, what, most_bytes=most_bytes, remedy=remedy)
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise AutoparError(
            f"cannot read the {what} {_short(path)}", values=f"not UTF-8: {error}", remedy=remedy
        ) from error


def parse_json(
    text: str, what: str, *, where: str, remedy: str, most_values: int = MOST_VALUES, once: bool = False
) -> Any:
    """The value of a JSON text. once: an object that has a name twice, of which the last would win, is no JSON either.

    Raises:
        AutoparError: no JSON, or more than MOST_DEPTH deep, or of more than `most_values` values.
    """
    count = text.count(",") + text.count("[") + text.count("{")  # what stands inside of strings counts as well
    if count > most_values:
        raise AutoparError(
            f"the {what} has too many values",
            where=where,
            values=f"up to {count}, at most {most_values}",
            remedy=remedy,
        )
    try:
        value = json.loads(text, object_pairs_hook=_each_once if once else None)
    except RecursionError:
        value = _Deep
    except ValueError as error:  # also a number of thousands of digits
        raise AutoparError(f"the {what} is not JSON", where=where, values=str(error), remedy=remedy) from error
    if value is _Deep or _depth_exceeds(value, MOST_DEPTH):
        raise AutoparError(
            f"the {what} is nested too deep", where=where, values=f"more than {MOST_DEPTH} levels", remedy=remedy
        )
    return value


def regular_file(path: str | Path, what: str, *, remedy: str) -> None:
    """Nothing for a file that other libraries may open.

    Raises:
        AutoparError: no such file, or no regular one.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise AutoparError(f"cannot read the {what} {_short(path)}", values=str(error)[:300], remedy=remedy) from error
    _check(found, path, what, None)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        values = [str(value)[:80] for name, value in pairs if name == twice]
        raise ValueError(f"it has {twice[:200]!r} more than once: {', '.join(values[:4])}")
    return found


class _Deep:
    """Stands for what is nested too deep to be read at all."""


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe that nobody writes into would wait for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check(found: os.stat_result, path: str | Path, what: str, most_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise AutoparError(f"the {what} {_short(path)} is {kind}", remedy="give the path of a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        _too_large(path, what, found.st_size, most_bytes)


def _short(path: str | Path) -> str:
    text = str(path)
    return text if len(text) < 500 else f"{text[:300]} … {text[-100:]}"


def _too_large(path: str | Path, what: str, size: int, most_bytes: int) -> NoReturn:
    raise AutoparError(
        f"the {what} {_short(path)} is too large",
        values=f"{size} bytes, at most {most_bytes} are read",
        remedy="see that it is the file you mean",
    )


def _depth_exceeds(value: Any, most: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return bool(level)
