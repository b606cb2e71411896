"""Every environment variable of autopar, read in this one place.

=================  ============================================================================================
AUTOPAR_DUMP       folder that gets the IR after every pass (``03_outline.txt`` …)
AUTOPAR_LOGS       ``+place,-emit``: more (debug) or less (errors only) from the named passes; a bare name is ``+``
AUTOPAR_CACHE      folder of cached plans (data, never code); the last few hundred are kept
AUTOPAR_CHECK      ``1``: verify the plan before the first step; ``types``: check only how the program's values lie, not
                   that they are the planned ones; ``0``: not even that
AUTOPAR_DISABLE    ``1``: ``compile`` returns the model as it is
AUTOPAR_ATTENTION  on CUDA: ``triton``, autopar's kernels; ``sdpa``, PyTorch's; ``auto``, these for plain calls only;
                   ``cudnn``, ``flash``, as ``auto``, with cuDNN's kernel before flash attention or never
AUTOPAR_EXPERTS    on CUDA: ``triton`` (or nothing), autopar's kernels; ``torch``, PyTorch's products
AUTOPAR_TUNE       ``1``: measure configurations of attention's kernels at their first calls (ranks may differ in bits)
AUTOPAR_GRAPHS     ``0``: on one GPU, what ``generate()`` runs for every token is no CUDA graph
AUTOPAR_NEARBY     ``0``: small messages between CPU ranks of one machine go through gloo, too
=================  ============================================================================================
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from autopar.base.errors import AutoparError


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment asks of autopar.

    dump_dir: folder for the IR after every pass; None writes nothing.
    log_levels: (name of a pass or module, ``logging`` level), in the order given.
    cache_dir: folder of cached plans; None keeps none on disk.
    check: verify before the first step. types: check the types of a program where it is written, and before its first
    step. identity: that it computes what was planned, too.
    disable: ``compile`` returns the model as it is.
    """

    dump_dir: Path | None = None
    log_levels: tuple[tuple[str, int], ...] = ()
    cache_dir: Path | None = None
    check: bool = False
    types: bool = True
    identity: bool = True
    disable: bool = False

    def apply_log_levels(self) -> None:
        """Set the levels of the loggers ``autopar.<name>``, and see to it that debug lines reach the terminal."""
        if self.log_levels and not logging.getLogger().handlers:
            logging.basicConfig(format="%(name)s: %(message)s")
        for name, level in self.log_levels:
            logging.getLogger(f"autopar.{name}").setLevel(level)


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """Read ``AUTOPAR_*`` from the given mapping (default ``os.environ``).

    Raises AutoparError for a flag that is neither on nor off, and for an item of AUTOPAR_LOGS without a name.
    """
    given = os.environ if variables is None else variables
    types_only = given.get("AUTOPAR_CHECK", "").strip().lower() == "types"
    return Environment(
        dump_dir=_path(given, "AUTOPAR_DUMP"),
        log_levels=parse_logs(given.get("AUTOPAR_LOGS", "")),
        cache_dir=_path(given, "AUTOPAR_CACHE"),
        check=not types_only and _flag(given, "AUTOPAR_CHECK"),
        types=types_only or _flag(given, "AUTOPAR_CHECK", default=True),
        identity=not types_only,
        disable=_flag(given, "AUTOPAR_DISABLE"),
    )


def attention_backend(variables: Mapping[str, str] | None = None) -> str:
    """AUTOPAR_ATTENTION: "auto", "triton", "sdpa", "cudnn" or "flash".

    Raises AutoparError for another word.
    """
    given = os.environ if variables is None else variables
    text = given.get("AUTOPAR_ATTENTION", "").strip().lower() or "auto"
    if text not in ("auto", "triton", "sdpa", "cudnn", "flash"):
        raise AutoparError(
            "AUTOPAR_ATTENTION names no implementation of attention",
            values=f"AUTOPAR_ATTENTION={text}",
            remedy="Set it to auto, triton, sdpa, cudnn or flash",
        )
    return text


def experts_backend(variables: Mapping[str, str] | None = None) -> str:
    """AUTOPAR_EXPERTS: "triton", "torch", or "" where it is not set.

    Raises AutoparError for another word.
    """
    given = os.environ if variables is None else variables
    text = given.get("AUTOPAR_EXPERTS", "").strip().lower()
    if text not in ("", "triton", "torch"):
        raise AutoparError(
            "AUTOPAR_EXPERTS names no implementation of experts",
            values=f"AUTOPAR_EXPERTS={text}",
            remedy="Set it to triton or torch",
        )
    return text


def tunes(variables: Mapping[str, str] | None = None) -> bool:
    """AUTOPAR_TUNE: whether kernels measure their configurations, instead of taking those of a table."""
    return _flag(os.environ if variables is None else variables, "AUTOPAR_TUNE")


def cuda_graphs(variables: Mapping[str, str] | None = None) -> bool:
    """AUTOPAR_GRAPHS: whether a program that runs again and again may be a CUDA graph."""
    return _flag(os.environ if variables is None else variables, "AUTOPAR_GRAPHS", default=True)


def nearby(variables: Mapping[str, str] | None = None) -> bool:
    """AUTOPAR_NEARBY: whether CPU ranks of one machine may have sockets of their own for small messages."""
    return _flag(os.environ if variables is None else variables, "AUTOPAR_NEARBY", default=True)


def interprets_triton(variables: Mapping[str, str] | None = None) -> bool:
    """Whether Triton's own switch TRITON_INTERPRET is on: kernels then run on the CPU, slowly."""
    return _flag(os.environ if variables is None else variables, "TRITON_INTERPRET")


@dataclass(frozen=True, slots=True)
class Launched:
    """How torchrun started this process: which of how many it is, over all and on its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launched(variables: Mapping[str, str] | None = None) -> Launched:
    """Read torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without it, a process is the only one."""
    given = os.environ if variables is None else variables
    world_size = int(given.get("WORLD_SIZE", "1"))
    local_world_size = int(given.get("LOCAL_WORLD_SIZE", str(world_size)))
    return Launched(int(given.get("RANK", "0")), world_size, int(given.get("LOCAL_RANK", "0")), local_world_size)


def order_launches(variables: MutableMapping[str, str] | None = None) -> None:
    """Have NCCL run operations of several communicators of one device in the order in which the host launches them.

    Without it two ranks may begin with different ones, each of which waits for the other rank ("Using multiple NCCL
    communicators concurrently", NCCL's user guide; since 2.26, before without effect). Read at NCCL's first operation:
    a script that has one before must set the variable itself. What is set stays.
    """
    given = os.environ if variables is None else variables
    given.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def of_child(**changes: str) -> dict[str, str]:
    """The variables of a process to start: this one's, but for some."""
    return {**os.environ, **changes}


def parse_logs(text: str) -> tuple[tuple[str, int], ...]:
    """``+place,-emit`` to (("place", DEBUG), ("emit", ERROR)); a bare name means ``+``."""
    levels = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name = item.lstrip("+-")
        if not name.replace(".", "_").isidentifier() or len(item) - len(name) > 1:
            raise AutoparError(
                f"AUTOPAR_LOGS has the item {item!r}, which names no pass",
                values=f"AUTOPAR_LOGS={text}",
                remedy="Write names of passes with + (debug) or - (errors only), as in AUTOPAR_LOGS=+place,-emit",
            )
        levels.append((name, logging.ERROR if item.startswith("-") else logging.DEBUG))
    return tuple(levels)


def _path(given: Mapping[str, str], name: str) -> Path | None:
    text = given.get(name, "").strip()
    return Path(text).expanduser() if text else None


def _flag(given: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    text = given.get(name, "").strip().lower()
    if not text:
        return default
    if text in ("0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise AutoparError(f"{name} is a switch", values=f"{name}={text}", remedy=f"Set {name}=1 or {name}=0")
