"""Runs Python programs in a folder, each in a fork of a process that has loaded what is not ours: it begins at once.

    python benchmarks/mutations/server.py FOLDER        reads a request a line, writes an answer a line

A request says `arguments` (as python's: a file, or -m and a module), `limit_s`, and `memory_bytes`; the answer `code`
(None: not in time) and `text`. A program that takes too long is ended with all that it started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

OURS = ("autopar", "benchmarks", "tests")
"""What a fault may be in: never loaded here."""
LOADED = "modules that were loaded: "


def main() -> None:
    folder = sys.argv[1]
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path not in (folder, str(Path(__file__).parent)))]
    _load(run(["benchmarks/mutations/subjects.py", "modules"], 600.0, None)["text"])
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["arguments"], request["limit_s"], request["memory_bytes"])), flush=True)


def run(arguments: list[str], limit_s: float, memory_bytes: int | None) -> dict[str, Any]:
    """A program in a fork."""
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        child = os.fork()
        if not child:
            _in_child(arguments, written.fileno(), memory_bytes)
        code = _waited(child, time.monotonic() + limit_s)
        written.seek(0)
        return {"code": code, "text": written.read()[-200_000:]}


def _in_child(arguments: list[str], out: int, memory_bytes: int | None) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(error.code) if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _waited(child: int, until: float) -> int | None:
    """How it ended; None: it had to be ended."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            _end_group(child)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def _end_group(child: int) -> None:
    """What it has started, and itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _load(text: str) -> None:
    """What a clean run has loaded, as far as it is not ours."""
    names = next((line for line in text.splitlines() if line.startswith(LOADED)), "").removeprefix(LOADED).split()
    if not names:
        raise SystemExit(text)
    for name in (*names, "pytest", "hypothesis", "xdist.plugin", "pytest_timeout", "_pytest.assertion.rewrite"):
        if name.partition(".")[0] not in OURS:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


if __name__ == "__main__":
    main()
