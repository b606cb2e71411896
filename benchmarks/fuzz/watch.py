"""What a reader may not do meanwhile: run code, write, start processes, open sockets; take for ever, or all memory."""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_NEVER = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect",
    "socket.bind", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
    "os.kill", "os.putenv", "shutil.rmtree", "shutil.move", "shutil.copyfile", "pickle.find_class", "ctypes.dlopen",
    "sys.addaudithook", "webbrowser.open", "urllib.Request",
)  # fmt: skip


class Hang(BaseException):
    """An input took longer than it may. No Exception, so that nobody takes it for an error of the input."""


@dataclass
class Watch:
    """folder: where may be written. imports: what may be imported late, as prefixes, beside Python's own modules. seen:
    what was done against it.
    """

    folder: Path = Path("/dev/null")
    imports: tuple[str, ...] = ()
    seen: list[str] = field(default_factory=list)
    is_on: bool = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in _NEVER:
            self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "import":
            name = str(arguments[0])
            known = name in sys.modules or name.partition(".")[0] in sys.stdlib_module_names
            if not known and not name.startswith(self.imports or ("\0",)):
                self.seen.append(f"import {name}")
        elif event == "open" and len(arguments) == 3:
            path, mode, flags = arguments
            writes = (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or (
                isinstance(mode, str) and set(mode) & set("wax+")
            )
            if writes and not str(path).startswith((str(self.folder), "/dev/null")):
                self.seen.append(f"open {str(path)[:200]} {mode}")

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """Watch what is done within, which may take so many seconds of CPU time, ten times that while it waits.

        Raises:
            Hang: it takes longer.
        """
        self.seen.clear()

        def late(number: int, frame: FrameType | None) -> None:
            raise Hang

        timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 10 * seconds))
        before = [signal.signal(number, late) for number, _, _ in timers]
        for _, timer, limit_s in timers:
            signal.setitimer(timer, limit_s)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            for (number, timer, _), handler in zip(timers, before, strict=True):
                signal.setitimer(timer, 0)
                signal.signal(number, handler)


@functools.cache
def installed() -> Watch:
    """The one of this process: hooks cannot be taken away."""
    watch = Watch()
    sys.addaudithook(watch.hook)
    return watch


def limit_memory(more_bytes: int) -> None:
    """The process may take so much more than it has: what asks for more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
