"""Plans kept on disk (AUTOPAR_CACHE=dir), found again by content: the traced program with its shapes, the mesh, all
that was asked, and the versions of what made them. The folder keeps the last few hundred.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.ir.program import Program
from autopar.planner.plan.json import FORMAT, load, save
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.request import Request

logger = logging.getLogger("autopar")
MOST_FILES = 256
"""Plans in the folder; those that were not asked for longest go first."""
_NAME = re.compile(r"[0-9a-f]{32}\.json")


def find(request: Request, program: Program) -> PlanRecord | None:
    """The plan made before for the same differentiated program and request; None when there is none.

    A damaged file is named in a warning and left out; nothing in a file is ever run.
    """
    path = _path(request, program)
    if path is None or not path.exists():
        return None
    try:
        found = load(path)
        if (wrong := _other_than_asked(found, request)) is not None:
            logger.warning("autopar: %s is a plan for %s, not for what is asked; planning again", path, wrong)
            return None
        with suppress(OSError):  # a folder of somebody else's may be read
            os.utime(path)
        return found
    except AutoparError as error:
        logger.warning("autopar: %s; planning again", error)
        return None


def _other_than_asked(found: PlanRecord, request: Request) -> str | None:
    """What a file says that the request does not, as one that was put under another's name does."""
    if found.stage_mesh.axes != request.mesh.axes or found.mesh.axes != request.whole_mesh.axes:
        return f"a mesh {found.mesh}"
    if found.strategies != request.strategies or found.asked != request.pipeline:
        return "other strategies"
    if (found.precision, found.training, found.memory_limit_bytes) != (
        request.precision, request.training, request.memory_limit_bytes
    ):  # fmt: skip
        return "another precision, mode or memory limit"
    return None


def keep(request: Request, plan: PlanRecord, traced: Program) -> None:
    """Write a plan where `find` will look for it; traced: what it was first made of."""
    path = _path(request, traced)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}.part")
        save(plan, half)
        half.replace(path)
        _forget_oldest(path.parent)


def _forget_oldest(folder: Path) -> None:
    """Files that this cache wrote, beyond `MOST_FILES`. Others may do so at the same time."""
    with suppress(OSError):
        files = sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: p.stat().st_mtime)
        for path in files[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def _path(request: Request, program: Program) -> Path | None:
    folder = environment.read().cache_dir
    if folder is None:
        return None
    asked = (
        FORMAT, torch.__version__, _version(), str(program),
        request.mesh.axes, request.mesh.hardware, _strategies(request), request.pins,
        request.memory_limit_bytes, str(request.precision), request.training, request.microbatches, request.halves,
        request.whole_mesh.axes, request.pipeline, request.roots, sorted(request.wanted),
    )  # fmt: skip
    return Path(folder) / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:32]}.json"


def _version() -> str:
    try:
        return version("autopar")
    except PackageNotFoundError:  # run from its folder
        return ""


def _strategies(request: Request) -> list[object]:
    """The fields that decide, in a fixed order (a frozenset prints in any)."""

    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, frozenset) else value

    return [[plain(getattr(each, field.name)) for field in fields(AxisStrategy)] for each in request.strategies]
