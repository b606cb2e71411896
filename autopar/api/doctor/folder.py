"""Is a folder one that all ranks share, and does it do what checkpoints need: fsync, renames that are seen, names that
one alone gets. Tried, not asked: with small files in a folder of its own, which is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.api.doctor.findings import Finding, note, off, ok, who
from autopar.api.doctor.ranks import Ranks
from autopar.runtime.checkpoint.blocks import sync_folder

CHUNK, CHUNKS = 1 << 20, 8
_OLD, _NEW = b"old", b"new"


@dataclass(slots=True)
class Sight:
    """What one rank saw. unseen: ranks whose files it does not see. late_s: the longest until it saw one. write_s: of
    `CHUNKS` mebibytes with fsync. clock_s: the files' time less this rank's. renamed, step: whether it saw a file, and
    a folder, under its new name with the new content. got: whether it got the name that one alone may. locked: whether
    a lock that rank 0 held was held here. replaced: whether a folder took the place of one that is not empty.
    """

    cannot: str = ""
    unseen: tuple[int, ...] = ()
    late_s: float = 0.0
    write_s: float = 0.0
    clock_s: float = 0.0
    renamed: bool = True
    step: bool = True
    got: bool = False
    locked: bool | None = None
    replaced: bool = False


def look(folder: Path, ranks: Ranks, within_s: float, most_skew_s: float, hosts: Sequence[str]) -> list[Finding]:
    """Try the folder. Collective; it ends within a few times `within_s`, the time in which what one rank did must be
    seen by the others.
    """
    ranks.begin(f"the folder {folder}")
    name = ranks.all(f".doctor-{secrets.token_hex(6)}")[0]
    place, mine = folder / name, Sight()
    try:
        _try(place, ranks, within_s, mine)
        all_seen = ranks.all(mine)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return list(_judge(folder, all_seen, within_s, most_skew_s, hosts))


def free_bytes(folder: Path) -> int | None:
    """On the disk of a folder; None where that cannot be asked."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _try(place: Path, ranks: Ranks, within_s: float, mine: Sight) -> None:
    rank, num = ranks.rank, ranks.num

    def doing(act: Callable[[], object]) -> None:
        """What may fail on this rank alone; then all go on."""
        if not mine.cannot:
            try:
                act()
            except OSError as error:
                mine.cannot = f"{error.strerror or error} ({error.filename or place.parent})"
        ranks.all(None)

    if rank == 0:
        with suppress(OSError):  # told by what follows
            place.mkdir()
    ranks.all(None)
    doing(lambda: _write_own(place, rank, mine))
    others = range(num) if rank == 0 else sorted({0, (rank + 1) % num})
    doing(lambda: _see(place, others, within_s, mine))
    if rank == 0:
        doing(lambda: _commit(place, mine))
    else:
        doing(lambda: None)
    doing(lambda: _see_renamed(place, within_s, mine))
    doing(lambda: _take(place, mine))
    with ExitStack() as held:
        if rank == 0:
            doing(lambda: held.enter_context(_locked(place)))
        else:
            doing(lambda: None)
        if rank == 1:
            doing(lambda: _lock(place, mine))
        else:
            doing(lambda: None)


def _write_own(place: Path, rank: int, mine: Sight) -> None:
    if not place.is_dir():  # not the folder that rank 0 made: said by who does not see whom
        place.mkdir(exist_ok=True)
    path, content = place / f"rank-{rank}", b"\0" * CHUNK
    begun = time.perf_counter()
    with open(path, "xb") as file:
        file.write(str(rank).encode())
        for _ in range(CHUNKS):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(place)
    mine.write_s = time.perf_counter() - begun
    mine.clock_s = os.stat(path).st_mtime - time.time()


def _within(seconds: float, is_so: Callable[[], bool]) -> float | None:
    """After how long it was so; None: it was not."""
    begun = time.monotonic()
    while True:
        with suppress(OSError):
            if is_so():
                return time.monotonic() - begun
        if time.monotonic() - begun > seconds:
            return None
        time.sleep(0.02)


def _see(place: Path, others: Sequence[int], within_s: float, mine: Sight) -> None:
    until = time.monotonic() + within_s
    for other in others:
        said = str(other).encode()

        def is_whole(other: int = other, said: bytes = said) -> bool:
            path = place / f"rank-{other}"
            with open(path, "rb") as file:
                return file.read(len(said)) == said and os.fstat(file.fileno()).st_size == len(said) + CHUNK * CHUNKS

        took = _within(max(0.0, until - time.monotonic()), is_whole)
        if took is None:
            mine.unseen = (*mine.unseen, other)
        else:
            mine.late_s = max(mine.late_s, took)


def _commit(place: Path, mine: Sight) -> None:
    """As a step is: a file over another one, and a folder."""
    (place / "latest").write_bytes(_OLD)
    (place / ".latest").write_bytes(_NEW)
    os.replace(place / ".latest", place / "latest")
    (place / ".step").mkdir()
    (place / ".step" / "file").write_bytes(_NEW)
    sync_folder(place / ".step")
    os.rename(place / ".step", place / "step")
    sync_folder(place)
    (place / "another").mkdir()
    (place / "another" / "file").write_bytes(_OLD)
    try:
        os.rename(place / "another", place / "step")
        mine.replaced = True
    except OSError as error:
        mine.replaced = error.errno not in (errno.ENOTEMPTY, errno.EEXIST)


def _see_renamed(place: Path, within_s: float, mine: Sight) -> None:
    if mine.unseen:  # said already
        return
    mine.renamed = _within(within_s, lambda: (place / "latest").read_bytes() == _NEW) is not None
    seen = _within(within_s, lambda: (place / "step" / "file").read_bytes() == _NEW and not (place / ".step").exists())
    mine.step = seen is not None


def _take(place: Path, mine: Sight) -> None:
    try:
        open(place / "one", "xb").close()
        mine.got = True
    except FileExistsError:
        pass


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    with open(place / "lock", "wb") as file:
        with suppress(OSError):  # a file system without locks: seen by the next one
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _lock(place: Path, mine: Sight) -> None:
    with open(place / "lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine.locked = False
        except BlockingIOError:
            mine.locked = True
        except OSError:  # without locks
            mine.locked = False


def _judge(
    folder: Path, seen: Sequence[Sight], within_s: float, most_skew_s: float, hosts: Sequence[str]
) -> Iterator[Finding]:
    name = "folder"
    begun = list(enumerate(seen))
    for why, some in _grouped([(rank, each.cannot) for rank, each in begun if each.cannot]).items():
        yield off(
            name,
            f"{who(some, hosts)} cannot write there: {why}",
            f"Make {folder} on storage that all machines mount, with rights for this user and room on it",
        )
    blind = [rank for rank, each in begun if each.unseen and not each.cannot]
    if blind:
        first = seen[blind[0]].unseen
        yield off(
            name,
            f"{who(blind, hosts)} did not see within {within_s:g} s what {who(first, hosts)} wrote",
            f"{folder} is another folder on other machines: mount the same storage everywhere, or save elsewhere",
        )
    if any(each.cannot for each in seen) or blind:
        return
    if bad := [rank for rank, each in begun if not (each.renamed and each.step)]:
        yield off(
            name,
            f"{who(bad, hosts)} did not see within {within_s:g} s what rank 0 renamed",
            "Mount it with a shorter time of what it remembers (NFS: actimeo=3, lookupcache=positive)",
        )
    if seen[0].replaced:
        yield off(
            name,
            "a folder was renamed over one that is not empty, or could not be renamed otherwise than it should",
            "Save onto a file system with POSIX renames: a step is committed by one",
        )
    if (got := sum(each.got for each in seen)) != 1:
        yield off(name, f"{got} ranks got a name that one alone may get", "Save onto a file system with O_EXCL (NFS 4)")
    if ahead := [rank for rank, each in begun if abs(each.clock_s) > most_skew_s + each.write_s]:
        yield off(
            "clocks",
            f"files there have times {seen[ahead[0]].clock_s:+.1f} s from the clock of {who(ahead, hosts)}",
            "Have the machine and the file server keep time (chronyc makestep)",
        )
    speed = CHUNK * CHUNKS * len(seen) / max(max(each.write_s for each in seen), 1e-9)
    late = max(each.late_s for each in seen)
    others = f"what one rank wrote others saw after {late:.2g} s; " if len(seen) > 1 else ""
    yield ok(name, f"fsync, renames and exclusive names work; {others}{speed / 1e6:.0f} MB/s in all, with fsync")
    if any(each.locked is False for each in seen):
        yield note(name, "locks do not hold between ranks: a second job that saves there is not told")


def _grouped(pairs: Sequence[tuple[int, str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, text in pairs:
        found.setdefault(text, []).append(rank)
    return found
