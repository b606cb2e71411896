"""Which of our nets catch which faults? Plants one after the other in a copy of the repository, never in the checkout.

    python benchmarks/mutations/plant.py [--only NAME|AREA,…] [--jobs 1] [--json FILE] [--write]
                                         [--first | --programs | --missed] [--trust] [--again]

Three nets for each fault: `checker`, which looks at generated programs; `verify`, which proves a few small plans
(subjects.py); the unit tests that the fault's entry names, up to the first that fails. A fault that is not through in
its time is told as one that hangs, and its processes are ended. Results are kept in a JSON file by name and digest of
the fault, so that a run goes on where one ended. Nothing planted comes first: there all has to pass.
What is refused of a subject is told apart by what the fault changed (`Result.program`): the expression that is planned,
the text that is written of it, or what runs the text.
Exits with 1 where a fault that something could tell from the right text is caught by nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from queue import Queue
from threading import Lock

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.mutations.table import ROOT, Fault, faults, wanted

VERIFY_S, TESTS_S, ALL_TESTS_S = 240.0, 600.0, 2400.0
"""How long proofs and a fault's tests may take, several times what they do without one; and the tests of all faults."""
MEMORY_BYTES = 8 << 30
"""Of data, of one process: what loops for ever often also grows for ever."""
NOTHING = "nothing planted"
WRITERS = ("passes/", "autopar/operators/rules/")
"""Folders of what is not run when a program runs."""
HANGS = "hangs"
NO_TESTS = 5
"""What pytest ends with where all tests of a file are of another tier."""


@dataclass(frozen=True, slots=True)
class Result:
    """What caught a fault: each "" for nothing, "-" for what was not asked. seconds: wall.

    program: what it changes of the first subject that is refused, or of any: its `meaning`, its `text` or border, or
    `none` of both; "-": there is no program, or none was asked for. subjects: how many were planned.
    """

    digest: str
    checker: str
    verify: str
    tests: str
    seconds: float
    program: str = "-"
    subjects: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether a subject's program is, by the checker or the proof."""
        return any(found not in ("", "-") for found in (self.checker, self.verify))

    @property
    def is_caught(self) -> bool:
        return any(found not in ("", "-") for found in (self.checker, self.verify, self.tests))


@dataclass(frozen=True, slots=True)
class Nets:
    """Which are asked. first: tests, and the others of what these let through. programs: checker and proof alone.

    missed: tests alone, of what the others let through.
    """

    first: bool = False
    programs: bool = False
    missed: bool = False

    def asks_tests(self, fault: Fault, known: Result | None) -> bool:
        wanted = not self.programs and not (self.missed and known is not None and known.is_refused)
        return bool(fault.tests) and wanted and (known is None or known.tests == "-")

    def asks_programs(self, fault: Fault, known: Result | None, tests: str) -> bool:
        caught = tests not in ("", "-")
        wanted = fault.runs and not self.missed and not (self.first and caught)
        return wanted and (known is None or known.verify == "-")


# ------------------------------------------------------------------------------------------------ a copy with a fault


@contextmanager
def copy_of_repository() -> Iterator[Copy]:
    """A folder with the files that git knows, links as links."""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, Path(folder, name)
            if source.is_symlink() or source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        copy = Copy(Path(folder))
        try:
            yield copy
        finally:
            copy.close()


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """The fault stands in the copy meanwhile."""
    path = folder / fault.file
    text, when = path.read_text(), path.stat().st_mtime
    path.write_text(fault.planted(text))
    # Python takes compiled text for current by the second of its change and by its length: each fault has its own.
    os.utime(path, (when, when + int(fault.digest, 16) % 10**6 + 2))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, (when, when))


def outcome_of(fault: Fault, copy: Copy, nets: Nets, known: Result | None) -> Result:
    """What the nets say of the copy. known: what was found before."""
    begun = time.monotonic()
    result = known or Result(fault.digest, "-", "-", "-", 0.0)
    with planted(fault, copy.folder):
        if nets.asks_tests(fault, known):
            result = replace(result, tests=tested(copy, fault.tests, TESTS_S))
        if nets.asks_programs(fault, known, result.tests):
            found = proven(copy, written=fault.file.startswith(WRITERS))
            result = replace(result, **dict(zip(("checker", "verify", "program", "subjects"), found, strict=True)))
    return replace(result, seconds=round(result.seconds + time.monotonic() - begun, 1))


def sound(copy: Copy, tests: Sequence[str], kept: Kept) -> None:
    """That all passes where nothing is planted: asked once of the same files.

    Raises:
        SystemExit: something does not.
    """
    content = hashlib.blake2b("\n".join(tests).encode(), digest_size=8)
    for path in sorted(copy.folder.rglob("*.py")):
        content.update(path.read_bytes())
    digest, known, begun = content.hexdigest(), kept.results.get(NOTHING), time.monotonic()
    if known is not None and known.digest == digest:
        return
    failed = tested(copy, tests, ALL_TESTS_S)
    found = Result(digest, *proven(copy)[:2], failed, round(time.monotonic() - begun, 1))
    if found.is_caught:
        raise SystemExit(f"{NOTHING}, and yet: {found}")
    kept.add(NOTHING, found)
    print(f"{NOTHING}: all pass ({found.seconds:.0f} s)", flush=True)


# ------------------------------------------------------------------------------------------------------------ the nets


def proven(copy: Copy, *, written: bool = False) -> tuple[str, str, str, int]:
    """What the checker and the proof found first, what of the program is another, and how many subjects were planned.

    written: what is planted only writes programs: those that are the same need no other proof.
    """
    known = [str(copy.texts())] if written else []
    code, text = copy.run(["benchmarks/mutations/subjects.py", *known], VERIFY_S)
    rows = _rows(text)
    told = [row["checker"] for row in rows]
    checker = "-" if set(told) <= {"-"} else next((each for each in told if each not in ("", "-")), "")
    found = next((f"{row['subject']}: {row['verify']}" for row in rows if row["verify"]), "")
    program = _changed(rows, copy.plain)
    if code is None:
        return checker, HANGS, program, len(rows)
    if code and not found:
        found = "does not start: " + (text.strip().splitlines() or [""])[-1][:160]
    return checker, found, program, len(rows)


def _rows(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"subject"')]


def _changed(rows: Sequence[Mapping[str, str]], plain: Mapping[str, Mapping[str, str]]) -> str:
    """`Result.program`."""
    refused = [row for row in rows if row["verify"] or row["checker"] not in ("", "-")]
    looked = [row for row in refused[:1] or rows if row["text"]]
    for part in ("meaning", "text"):
        if any(row[part] != plain[row["subject"]][part] for row in looked if row["subject"] in plain):
            return part
    return "none" if looked else "-"


def tested(copy: Copy, tests: Sequence[str], limit_s: float) -> str:
    """The first test that fails."""
    if not tests:
        return "-"
    tier = [] if any("::" in test for test in tests) else ["-m", "not slow"]
    given = ["-m", "pytest", *tests, *tier, "--every-case", "-x", "-q", "--show-capture=no", "-p", "no:cacheprovider"]
    code, text = copy.run([*given, "--tb=no", "--hypothesis-seed=0"], limit_s)
    if code is None:
        return HANGS
    if code in (0, NO_TESTS):
        return ""
    bad = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return bad[0].split(" - ")[0].strip()[:160] if bad else f"pytest ends with {code}"


class Copy:
    """A copy of the repository, and the process that runs programs in it (server.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plain: dict[str, dict[str, str]] = {}
        environment = {
            **os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self._server = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "server.py", folder],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """A Python program: how it ended (None: not in time) and what it wrote."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"arguments": list(arguments), "limit_s": limit_s, "memory_bytes": MEMORY_BYTES}
        print(json.dumps(request), file=self._server.stdin, flush=True)
        line = self._server.stdout.readline()
        if not line:
            raise SystemExit(f"the process that runs programs in {self.folder} ended with {self._server.wait()}")
        answer = json.loads(line)
        return answer["code"], answer["text"]

    def look(self) -> None:
        """What the subjects' programs are where nothing is planted.

        Raises:
            SystemExit: one is not right.
        """
        _, text = self.run(["benchmarks/mutations/subjects.py"], 2 * VERIFY_S)
        rows = _rows(text)
        if not rows or any(row["checker"] or row["verify"] for row in rows):
            raise SystemExit(f"{NOTHING}, and yet: {text[-600:]}")
        self.plain = {row["subject"]: row for row in rows}

    def texts(self) -> Path:
        """A file with the digests of right programs, by subject."""
        path = self.folder / "texts.json"
        path.write_text(json.dumps({name: row["text"] for name, row in self.plain.items()}))
        return path

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


# ------------------------------------------------------------------------------------------------------------ the runs


class Kept:
    """Results in a file, written whole after each."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, Lock()
        content = json.loads(path.read_text()) if path.exists() else {}
        self.results = {name: Result(**row) for name, row in content.items()}

    def add(self, name: str, result: Result) -> None:
        with self.lock:
            self.results[name] = result
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            rows = {name: asdict(row) for name, row in sorted(self.results.items())}
            part.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
            part.replace(self.path)

    def forget(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self.results.pop(fault.name, None)

    def is_through(self, fault: Fault, nets: Nets) -> bool:
        """Whether there is nothing left to ask about it."""
        known = self.of(fault)
        if known is None and fault.runs:
            return False
        tests = known.tests if known is not None else "-"
        return not nets.asks_tests(fault, known) and not nets.asks_programs(fault, known, tests)

    def of(self, fault: Fault) -> Result | None:
        """The result of this fault as it is now."""
        known = self.results.get(fault.name)
        return known if known is not None and known.digest == fault.digest else None


def run_all(found: Sequence[Fault], kept: Kept, jobs: int, nets: Nets, trusts: bool) -> None:
    """Each fault in one of `jobs` copies, those of all areas mixed. trusts: not `sound`."""
    copies: Queue[Copy] = Queue()
    done = 0

    def one(fault: Fault) -> None:
        nonlocal done
        copy = copies.get()
        try:
            result = outcome_of(fault, copy, nets, kept.of(fault))
        finally:
            copies.put(copy)
        kept.add(fault.name, result)
        done += 1
        said = (
            f"tests {result.tests or 'pass'}; verify {result.verify or 'passes'}; checker {result.checker or 'passes'}"
        )
        print(f"{done}/{len(found)} {fault.name} ({result.seconds:.0f} s): {said}"[:220], flush=True)

    with ExitStack() as stack:
        copy = stack.enter_context(copy_of_repository())
        if not trusts:
            sound(copy, sorted({test for fault in found for test in fault.tests}), kept)
        for each in (copy, *(stack.enter_context(copy_of_repository()) for _ in range(jobs - 1))):
            if not nets.missed:
                each.look()
            copies.put(each)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, sorted(found, key=lambda fault: fault.digest)))


# ------------------------------------------------------------------------------------------------------------ the page


def is_missed(fault: Fault, result: Result) -> bool:
    """Whether all that it was to be asked of lets a fault through that something could tell."""
    return not result.is_caught and not fault.equivalent and not (fault.tests and result.tests == "-")


def page(found: Sequence[Fault], kept: Kept) -> str:
    """Every fault with what caught it, by area."""
    rows = [(fault, result) for fault in found if (result := kept.of(fault)) is not None]
    missed = [fault.name for fault, result in rows if is_missed(fault, result)]
    unasked = [
        fault.name for fault, result in rows
        if not result.is_caught and fault.tests and result.tests == "-" and not fault.equivalent
    ]  # fmt: skip
    left = [fault.name for fault in found if kept.of(fault) is None]
    lines = [
        f"# Planted faults, {date.today()}", "",
        f"{len(rows)} of {len(found)} faults, {sum(fault.means for fault, _ in rows)} of which change what a generated "
        f"program means or a step computes. Each alone in a copy of the repository; {os.cpu_count()} cores, "
        f"{platform.machine()}, Python {platform.python_version()}. verify: {len(_subjects())} proofs of small plans, "
        "up to the first that fails. Tests: those that the fault's entry names, up to the first that fails. `-`: not "
        "asked: no program runs what is changed, there was no plan to look at, or another net had caught it. "
        f"{_few(rows)} of those that pass verify were asked of the first six proofs alone.", "",
        *_tally(rows), "",
        *_shares(rows), "",
        f"Caught by nothing: {', '.join(missed) or 'none but those that nothing can tell from the right text'}.", "",
        f"Passed by the programs, and no test was asked yet: {', '.join(unasked) or 'none'}.", "",
        f"Not planted yet: {', '.join(left) or 'none'}.",
    ]  # fmt: skip
    for area in dict.fromkeys(fault.area for fault, _ in rows):
        lines += ["", f"## {area}", "", "| fault | what | checker | verify | test |", "|---|---|---|---|---|"]
        lines += [_row(fault, result) for fault, result in rows if fault.area == area]
    return "\n".join([*lines, "", "Written by `benchmarks/mutations/plant.py --write`.", ""])


def _tally(rows: Sequence[tuple[Fault, Result]]) -> list[str]:
    lines = [
        "| area | faults | checker | verify | tests | verify alone | tests alone | equivalent |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for area in [*dict.fromkeys(fault.area for fault, _ in rows), ""]:
        own = [(fault, result) for fault, result in rows if area in ("", fault.area)]
        verify = [result.verify not in ("", "-") for _, result in own]
        tests = [result.tests not in ("", "-") for _, result in own]
        checker = sum(result.checker not in ("", "-") for _, result in own)
        numbers = (
            len(own), checker, sum(verify), sum(tests), sum(v and not t for v, t in zip(verify, tests)),
            sum(t and not v for v, t in zip(verify, tests)), sum(bool(fault.equivalent) for fault, _ in own),
        )  # fmt: skip
        lines.append(f"| {area or 'all'} | {' | '.join(map(str, numbers))} |")
    return lines


SHARES = (
    ("refused", "by the checker or by verify"),
    ("no program", "none was written: planning itself fails"),
    (
        "run",
        "text and meaning are as before: what runs them is wrong (operators' own arithmetic, communication, the step)",
    ),
    ("planned", "another expression is planned, which is what programs are compared with (autograd's formulas)"),
    ("written", "the planned expression is as before, the text or its border is not"),
    ("checker", "of those that are written wrongly, refused by the checker alone"),
    ("of programs", "of all that change a program, planned or written"),
    ("of all", "of all that are refused"),
)


def _shares(rows: Sequence[tuple[Fault, Result]]) -> list[str]:
    """What the checker alone sees of the faults that show in a subject."""
    shown = [(fault, result) for fault, result in rows if result.is_refused]
    lines = [
        "## What the checker sees alone", "",
        "Of faults that show in a subject, by what they change of the first program that is refused: "
        + "; ".join(f"*{word}*: {what}" for word, what in SHARES) + ".", "",
        f"| area | {' | '.join(word for word, _ in SHARES)} |", "|---|" + "--:|" * len(SHARES),
    ]  # fmt: skip
    for area in [*dict.fromkeys(fault.area for fault, _ in shown), ""]:
        own = [result for fault, result in shown if area in ("", fault.area)]
        kinds = [sum(each.program == kind for each in own) for kind in ("-", "none", "meaning", "text")]
        seen = [each for each in own if each.checker not in ("", "-")]
        text = sum(each.program == "text" for each in seen)
        cells = [str(len(own)), *map(str, kinds)]
        cells += [_share(text, kinds[-1]), _share(text, kinds[-1] + kinds[-2]), _share(len(seen), len(own))]
        lines.append(f"| {area or 'all'} | {' | '.join(cells)} |")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "-"


def _few(rows: Sequence[tuple[Fault, Result]]) -> int:
    """Faults that passed some of the subjects, and were not tried on all."""
    return sum(result.verify == "" and result.subjects < len(_subjects()) for _, result in rows)


def _row(fault: Fault, result: Result) -> str:
    cells = [result.checker or "passes", result.verify or "passes", result.tests or "pass"]
    if fault.equivalent and not result.is_caught:
        cells[2] = f"equivalent: {fault.equivalent}"
    what = fault.what if fault.means else f"{fault.what} (means the same)"
    name = f"`{fault.name}` in {fault.file.removeprefix('autopar/')}"
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in (name, what, *cells)) + " |"


def _subjects() -> Sequence[object]:
    from benchmarks.mutations.subjects import SUBJECTS

    return SUBJECTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names or areas, split by commas")
    parser.add_argument("--jobs", type=int, default=1, help="copies in which faults are planted at the same time")
    parser.add_argument(
        "--json", type=Path, default=ROOT / ".autopar" / "mutations.json", help="where results are kept"
    )
    parser.add_argument("--first", action="store_true", help="verify only what the tests let through")
    parser.add_argument("--programs", action="store_true", help="ask the checker and the proof alone, no tests")
    parser.add_argument("--missed", action="store_true", help="ask the tests alone, of what the programs let through")
    parser.add_argument("--trust", action="store_true", help="all passes where nothing is planted: do not ask")
    parser.add_argument("--again", action="store_true", help="also those whose results are kept")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/, of all results")
    options = parser.parse_args()
    kept, found = Kept(options.json), wanted(options.only)
    for fault in faults():
        fault.planted((ROOT / fault.file).read_text())
    if options.again:
        kept.forget(found)
    nets = Nets(options.first, options.programs, options.missed)
    if left := [fault for fault in found if not kept.is_through(fault, nets)]:
        run_all(left, kept, options.jobs, nets, options.trust)
    if options.write:
        path = Path(__file__).parents[1] / "results" / f"mutations-{date.today()}.md"
        path.write_text(page(faults(), kept))
    missed = [fault.name for fault in found if (row := kept.of(fault)) and is_missed(fault, row)]
    print(f"{len(found)} faults, caught by nothing: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
