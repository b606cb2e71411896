"""One section of first_light, in its process: python -m benchmarks.first_light.section NAME OUT SECONDS PROFILE …"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import pages

MARGIN_S = 15.0
"""What a section leaves of its time, so that it ends by itself."""


@dataclass(frozen=True, slots=True)
class Section:
    """What a section is asked. ends: on `time.monotonic`'s clock.

    share: (i, n): of its cases every n-th, from the i-th on; other processes have the others.
    """

    name: str
    out: Path
    ends: float
    profile: Path
    device: torch.device
    quick: bool
    share: tuple[int, int] = (0, 1)
    _begun: Iterator[int] = field(default_factory=itertools.count, repr=False)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_late(self) -> bool:
        """Whether no other case should be begun."""
        return time.monotonic() > self.ends - MARGIN_S

    def row(self, case: str, ok: bool | None, **found: Any) -> None:
        """Keep a row. ok: whether it is right; None: nothing to be right about."""
        found = {name: str(x) if isinstance(x, torch.dtype) else x for name, x in found.items()}
        pages.keep(self.out / f"{self.name}.jsonl", {"section": self.name, "case": case, "ok": ok, **found})
        print(case, "" if ok is None else "ok" if ok else "WRONG", found, flush=True)

    def attempt(self, case: str, work: Callable[[], Any]) -> Any:
        """`work()`; a row that is wrong where it raises. One case that fails is no reason to leave out the others."""
        if next(self._begun) % self.share[1] != self.share[0]:
            return None
        if self.is_late:
            self.row(case, None, left_out="out of time")
            return None
        try:
            return work()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.row(case, False, error=f"{type(error).__name__}: {lines[0]}"[:400])
            return None

    def held(self) -> int:
        """Bytes that tensors take now."""
        return torch.cuda.memory_allocated(self.device) if self.on_cuda else 0

    def memory(self, held: int = 0) -> dict[str, float]:
        """Peaks since they were reset, in GiB, and how often the allocator had to try again. held: by others, which
        what is allocated leaves out.
        """
        if not self.on_cuda:
            return {}
        stats = torch.cuda.memory_stats(self.device)
        return {
            "allocated_gib": (stats["allocated_bytes.all.peak"] - held) / 2**30,
            "active_gib": stats["active_bytes.all.peak"] / 2**30,
            "reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
            "alloc_retries": stats["num_alloc_retries"],
        }

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


@contextmanager
def alone(section: Section) -> Iterator[None]:
    """A process group of this process."""
    backend = "nccl" if section.on_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    name, out, seconds, profile, device, quick, share = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(0)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    number, shares = map(int, share.split("/"))
    ends = time.monotonic() + float(seconds)
    section = Section(name, Path(out), ends, Path(profile), place, quick == "1", (number, shares))
    importlib.import_module(f"benchmarks.first_light.{name}").run(section)


if __name__ == "__main__":
    main()
