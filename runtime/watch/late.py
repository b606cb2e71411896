"""Who is late, and who hangs: ranks that wait for long ask what the others do, before the process group gives up.

A thread of each rank looks at its trail (`runtime/trail.py`) every so often. Where its rank has waited for another for
much longer than a step takes, it asks, through the job's store; the threads of all ranks answer with what their rank
does: what it waits for, or at which line it is (`sys._current_frames`), in the generated program or outside. Whoever
waits for nobody is the one that is waited for. A rank whose thread does not answer is stopped, gone, or in code that
lets no other thread run.

Nothing is told while a rank plans, compiles, saves or loads, unless that takes ten times as long; nor while all do the
same for long: then nobody waits. The step itself does nothing for this but note what it waits for.
"""

from __future__ import annotations

import json
import linecache
import logging
import math
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.base.torch_compat.distributed import same_group
from autopar.runtime.trail import Trail
from autopar.runtime.watch.verdicts import Usual

logger = logging.getLogger("autopar")

STEPS = 5.0
"""A wait may take this many usual steps, and `late_s` beside."""
BUSY = 10
"""What takes long by itself (planning, saving) may take so many times `late_s`."""
SLOWEST_LOOK_S, LOOKS = 5.0, 8
"""How often a thread looks: so many times until its rank has waited for too long."""
ANSWERS_WITHIN = 4
"""For so many looks an answer is waited for."""
_OURS = ("autopar", "autopar_program", "torch")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "triton.compiler")


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank does. step: how many it has done. issued: transfers so far. waits_for: which, "" for none. for_s:
    since when. does: see `Trail`. line: where it is. host, pid: of its process.
    """

    rank: int
    step: int
    issued: int
    waits_for: str
    for_s: float
    does: str
    line: str
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Late:
    """What was found. step: of those who wait. ranks: who is late, or hangs. waited_s: for how long others have waited.

    text: all of it, in words.
    """

    step: int
    ranks: tuple[int, ...]
    waited_s: float
    text: str


class Watchdog:
    """Of one rank. late_s: seconds; what a wait may take beyond a few usual steps. timeout_s: of the process group.

    store: a client of its own, as another one's waits would be in the way. step: set by who knows it. found: what was
    found, told on all ranks that could answer.
    """

    def __init__(
        self, trail: Trail, store: Any, rank: int, num_ranks: int, late_s: float, timeout_s: float, name: str
    ) -> None:
        self.trail, self.store, self.rank, self.num_ranks = trail, store, rank, num_ranks
        self.late_s, self.timeout_s, self.root = late_s, timeout_s, f"autopar/late/{name}"
        self.step = 0
        self.found: list[Late] = []
        self._usual, self._stepped_at = Usual(), time.monotonic()
        self._usual_s: float | None = None
        self._answered = 0
        self._asked: _Asked | None = None
        self._times_asked, self._of_wait = 0, 0.0
        self._pending: set[int] = set()
        self._stop, self._goes_on = threading.Event(), same_group()
        self._thread = threading.Thread(target=self._run, name="autopar-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no longer."""
        self._stop.set()

    def stepped(self, step: int) -> None:
        """A step of the optimizer is about to be taken."""
        now = time.monotonic()
        self._usual.add(now - self._stepped_at)
        self._usual_s = self._usual.middle()  # here: the thread would meet a list that changes
        self.step, self._stepped_at = step, now

    @property
    def limit_s(self) -> float:
        """For how long a rank waits before it asks; half of what the process group allows at most."""
        return min(self.late_s + STEPS * (self._usual_s or 0.0), self.timeout_s / 2)

    @property
    def busy_limit_s(self) -> float:
        """For how long a rank may plan, compile, save or load until what all do is told."""
        return min(BUSY * self.late_s, self.timeout_s / 2)

    # In the thread.

    def _run(self) -> None:
        try:
            while not self._stop.wait(min(self.limit_s / LOOKS, SLOWEST_LOOK_S)) and self._goes_on():
                self.look()
        except RuntimeError as error:  # the store went with the job
            logger.debug("autopar: who is late is not looked for any more: %s", error)

    def look(self) -> None:
        """Answer who asks, ask where this rank has waited for too long, tell what came of it."""
        newest = self.store.add(f"{self.root}/asked", 0)
        if newest > self._answered:
            self._answered = newest
            self._pending.add(newest)
            self.store.set(f"{self.root}/{newest}/{self.rank}", json.dumps(asdict(self.report())))
        does, waits = self.trail.does, self.trail.waits_for is not None
        since = self.trail.since if does is None else self.trail.does_since
        if since != self._of_wait:
            self._of_wait, self._times_asked = since, 0
        limit_s = self.limit_s if does is None else self.busy_limit_s
        if self._asked is not None:
            self._conclude(self._asked)
        elif (waits or does is not None) and time.monotonic() - since > limit_s * 2**self._times_asked:
            self._ask(time.monotonic() - since, does or "")
        self._listen()

    def _ask(self, waited_s: float, does: str) -> None:
        """One of those who wait does, or of those who do the same for long: the first, of each step and time."""
        is_first = self.store.add(f"{self.root}/by/{self.step}/{does}/{self._times_asked}", 1) == 1
        self._times_asked += 1
        if is_first:
            number = self.store.add(f"{self.root}/asked", 1)
            self._asked = _Asked(number, waited_s, ANSWERS_WITHIN)

    def _conclude(self, asked: _Asked) -> None:
        keys = [f"{self.root}/{asked.number}/{rank}" for rank in range(self.num_ranks)]
        if not self.store.check(keys):
            asked.looks -= 1
            if asked.looks > 0:
                return
            keys = [key for key in keys if self.store.check([key])]
        self._asked = None
        reports = [Report(**json.loads(self.store.get(key))) for key in keys]
        late = verdict(
            reports, self.num_ranks, self.step, asked.waited_s, self._usual_s, self.timeout_s, self.busy_limit_s
        )
        said = None if late is None else asdict(late)
        teller = min((each.rank for each in reports), default=self.rank)
        self.store.set(f"{self.root}/{asked.number}/said", json.dumps([teller, said]))

    def _listen(self) -> None:
        for number in list(self._pending):
            if not self.store.check([f"{self.root}/{number}/said"]):
                continue
            self._pending.discard(number)
            teller, said = json.loads(self.store.get(f"{self.root}/{number}/said"))
            if said is not None:
                late = Late(**{**said, "ranks": tuple(said["ranks"])})
                self.found.append(late)
                if teller == self.rank:
                    logger.warning("autopar: %s", late.text)

    def report(self) -> Report:
        """What this rank does now."""
        trail = self.trail
        does, line = _at(sys._current_frames(), trail.does)
        since = trail.since if trail.does is None else trail.does_since
        return Report(
            self.rank, self.step, trail.issued, str(trail.waits_for or ""), time.monotonic() - since, does, line,
            socket.gethostname(), os.getpid(),
        )  # fmt: skip


@dataclass(slots=True)
class _Asked:
    """A question that this rank asked. looks: for how many more answers are waited for."""

    number: int
    waited_s: float
    looks: int


def verdict(
    reports: Sequence[Report],
    num_ranks: int,
    step: int,
    waited_s: float,
    usual_s: float | None,
    timeout_s: float,
    busy_limit_s: float = math.inf,
) -> Late | None:
    """Who is late, by what all ranks say. None: nobody, or who is waited for plans, compiles, saves or loads, and not
    for longer than `busy_limit_s`.
    """
    of = {report.rank: report for report in reports}
    silent = [rank for rank in range(num_ranks) if rank not in of]
    waiting = [report for report in reports if report.waits_for]
    if busy := [report for report in reports if report.does]:
        return _busy(busy, waiting, silent, step, timeout_s) if _longest_s(busy) > busy_limit_s else None
    if not waiting:
        return None
    free = [report for report in reports if not report.waits_for]
    # Who does not move for as long as others wait, rather than who is under way from one wait to the next.
    free = [report for report in free if report.for_s > waited_s / 2] or free
    late = (*silent, *(report.rank for report in free))
    others = ranks_text([report.rank for report in waiting])
    usual = "" if usual_s is None else f"; a step takes {_seconds(usual_s)}"
    if late:
        names = ranks_text(late)
        what = f"{names} {'is' if len(late) == 1 else 'are'} late: {others} waited {_seconds(waited_s)} for "
        what += f"{'it' if len(late) == 1 else 'them'} at step {step}{usual}"
    else:
        what = f"all ranks wait for each other for {_seconds(waited_s)} at step {step}{usual}"
        behind = min(waiting, key=lambda report: (report.step, report.issued))
        if any((report.step, report.issued) != (behind.step, behind.issued) for report in waiting):
            late = (behind.rank,)
            what += f"; rank {behind.rank} has begun the fewest transfers"
    lines = [
        f"rank {rank} does not answer: its process is stopped, gone, or in code that lets no other thread run"
        for rank in silent
    ]
    lines += [f"rank {report.rank} is for {_seconds(report.for_s)} at {report.line}" for report in free]
    lines += list(_waits(waiting))
    remedy = f"The process group gives up after {_seconds(timeout_s)}. Look at what it does there"
    pids = [f"py-spy dump --pid {of[rank].pid} on {of[rank].host}" for rank in late if rank in of]
    text = ". ".join((what, *lines, f"{remedy} ({pids[0]})" if pids else remedy))
    return Late(step, late, waited_s, text)


def _longest_s(reports: Sequence[Report]) -> float:
    return max(report.for_s for report in reports)


def _busy(
    busy: Sequence[Report], waiting: Sequence[Report], silent: Sequence[int], step: int, timeout_s: float
) -> Late:
    """What all do while some plan, compile, save or load for very long."""
    same: dict[tuple[str, str], list[Report]] = {}
    for report in busy:
        same.setdefault((report.does, report.line), []).append(report)
    ranks = tuple(report.rank for report in busy) if waiting else ()
    what = f"{ranks_text([report.rank for report in busy])} {_plural(busy[0].does, len(busy))} for "
    what += f"{_seconds(_longest_s(busy))} at step {step}"
    lines = [f"{ranks_text([each.rank for each in some])} at {line} ({does})" for (does, line), some in same.items()]
    lines += [f"rank {rank} does not answer: its process is stopped or gone" for rank in silent]
    lines += list(_waits(waiting))
    remedy = "Look whether they get on"
    pids = [f"py-spy dump --pid {report.pid} on {report.host}" for report in busy[:1]]
    remedy += f" ({pids[0]}); the process group gives up after {_seconds(timeout_s)}"
    return Late(step, (*silent, *ranks), _longest_s(busy), ". ".join((what, *lines[:8], remedy)))


def _plural(does: str, num: int) -> str:
    return does if num == 1 else does.removesuffix("s")


def _waits(waiting: Sequence[Report]) -> Iterator[str]:
    """What ranks wait for, those with the same together."""
    same: dict[tuple[str, str], list[int]] = {}
    for report in waiting:
        same.setdefault((report.waits_for, report.line), []).append(report.rank)
    for (what, line), ranks in list(same.items())[:8]:
        yield f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} at {what}, {line}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _at(threads: Mapping[int, FrameType], does: str | None) -> tuple[str, str]:
    """What a rank does that is no reason to worry, or "", and the line where it is: of the generated program, wherever
    a thread runs it (on CUDA, autograd's own); else the innermost of somebody's own code in the main thread.
    """
    main = threads.get(threading.main_thread().ident or 0)
    inside = [frame for top in threads.values() for frame in _frames(top) if _is_program(frame)]
    stack = list(_frames(main))
    if does is None and any(str(frame.f_globals.get("__name__", "")).startswith(_COMPILERS) for frame in stack):
        does = "compiles"
    own = next((frame for frame in stack if _is_theirs(frame)), None)
    if inside:
        own = inside[0]
    if own is None:
        return does or "", _line(stack[0]) if stack else "no line of Python"
    inside_it = f", there at {_line(stack[0])}" if does is not None and stack and stack[0] is not own else ""
    return does or "", f"{_line(own)}{inside_it}"


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def _is_program(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "autopar_program"


def _is_theirs(frame: FrameType) -> bool:
    """Neither ours nor a library's."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    file = frame.f_code.co_filename
    return package not in _OURS and not file.startswith(("<", *_LIBRARIES))


def _line(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number).partition("  #")[0].strip()
    shown = f": {text[:160]}" if text else ""
    return f"line {number} of {Path(file).name}, in {frame.f_code.co_name}{shown}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0 to 511`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        few = f"{', '.join(map(str, ranks[:7]))} and {len(ranks) - 7} more"
        return f"ranks {few}" if ranks[-1] - ranks[0] >= len(ranks) else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
