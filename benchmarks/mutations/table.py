"""The faults of `faults/*.toml`: one a change of one place in one file, that somebody could make without noticing.

area.toml    ::= area = "…"  tests = ["tests/unit/…", …]  fault*
[[fault]]        name, file, what
old, new         the exact text, which the file has once, and what stands there instead
means            false where no generated program means, and no step computes, anything else: cost, words, refusals
runs             false where no program runs what is changed when it is proven: verify is not asked
tests            files or single tests; left out: those of the area
equivalent       why nothing can tell the fault from the right text; left out: something has to
"""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"


@dataclass(frozen=True, slots=True)
class Fault:
    """One change. what: what it makes wrong; means: of a program or a step."""

    name: str
    area: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]
    means: bool = True
    runs: bool = True
    equivalent: str = ""

    @property
    def digest(self) -> str:
        """Of all that a result depends on, but for the repository."""
        content = json.dumps([self.file, self.old, self.new, self.tests])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def planted(self, text: str) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text to replace is not there, or more than once.
            SyntaxError: what comes of it is no Python.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has the text to replace {count} times: {self.old!r}")
        changed = text.replace(self.old, self.new)
        ast.parse(changed)
        return changed


@cache
def faults() -> tuple[Fault, ...]:
    """All of them, in the order of areas and of their files.

    Raises:
        ValueError: two faults of one name.
    """
    found = [fault for path in sorted(FAULTS.glob("*.toml")) for fault in _read(path)]
    names = [fault.name for fault in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several faults are called {', '.join(twice)}")
    return tuple(found)


def wanted(only: str | None) -> tuple[Fault, ...]:
    """Those of a name or an area, or of several, which commas separate.

    Raises:
        ValueError: neither a name nor an area.
    """
    words = set(only.split(",")) if only else None
    if words is None:
        return faults()
    known = {word for fault in faults() for word in (fault.name, fault.area)}
    if unknown := sorted(words - known):
        raise ValueError(f"no fault and no area is called {', '.join(unknown)}")
    return tuple(fault for fault in faults() if words & {fault.name, fault.area})


def as_data(found: Iterable[Fault]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(fault) for fault in found]


def _read(path: Path) -> list[Fault]:
    content = tomllib.loads(path.read_text())
    area, tests = content["area"], content["tests"]
    entries: list[dict[str, Any]] = content["fault"]
    return [
        Fault(
            **(
                {"area": area, "tests": tests, "runs": content.get("runs", True)}
                | entry
                | {"tests": tuple(entry.get("tests", tests))}
            )
        )
        for entry in entries
    ]
