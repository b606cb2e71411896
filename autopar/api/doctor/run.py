"""`doctor`: everything that can be asked before a run, in one report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.api.doctor import folder, judging, links
from autopar.api.doctor.facts import Facts, collect
from autopar.api.doctor.findings import Finding
from autopar.api.doctor.ranks import Ranks
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.machine import profiles
from autopar.machine.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Options:
    """folder: where checkpoints are to go. needed_bytes: that have to be free there. hardware: a profile, by which
    links are judged; None: that of the GPU, and none on CPUs. share: of the profile's speed, below which a link is off.
    skew_s: by which clocks may differ. within_s: in which a rank must see what another one wrote. timeout_s: for which
    a rank is waited for.
    """

    folder: Path | None = None
    needed_bytes: int = 1 << 30
    hardware: str | None = None
    share: float = 0.5
    skew_s: float = 1.0
    within_s: float = 30.0
    timeout_s: float = 120.0
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """facts: of each rank."""

    findings: tuple[Finding, ...]
    facts: tuple[Facts, ...]

    @property
    def is_well(self) -> bool:
        """Whether nothing is off."""
        return not any(finding.state == "off" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "ok": self.is_well,
            "ranks": len(self.facts),
            "findings": [asdict(finding) for finding in self.findings],
            "facts": [asdict(facts) for facts in self.facts],
        }


def doctor(options: Options, begin: Callable[[str], None] = lambda text: None) -> Report:
    """Look at this machine, or, under `torchrun`, at all ranks: each calls it, and gets the same report.

    begin: told what is looked at.

    Raises:
        AutoparError: a profile or device that there is not; ranks that do not meet or answer in time, with what they
            are at.
    """
    launched = environment.launched()
    device = _device(options.device, launched)
    hardware = _hardware(options.hardware, device)
    begin("meeting all ranks")
    ranks = Ranks(launched, device, options.timeout_s)
    try:
        begin("versions, devices, limits")
        ranks.begin("versions, devices and limits")
        facts = ranks.all(collect(launched, device))
        hosts = [each.host for each in facts]
        found = judging.judge(facts)
        begin("clocks")
        found += judging.clocks(links.clock_offsets(ranks), hosts, options.skew_s)
        if options.folder is not None:
            begin(f"the folder {options.folder}")
            found += folder.look(options.folder, ranks, options.within_s, options.skew_s, hosts)
            found += judging.space(ranks.all(folder.free_bytes(options.folder)), hosts, options.needed_bytes)
        begin("links")
        found += links.look(ranks, launched.local_world_size, device, hardware, options.share, hosts)
        ranks.begin("the end")
        ranks.all(None)
    finally:
        ranks.end()
    return Report(tuple(found), tuple(facts))


def _device(name: str | None, launched: environment.Launched) -> torch.device:
    if name not in (None, "cpu", "cuda"):
        raise AutoparError(f"unknown device {name!r}", remedy="use cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise AutoparError("torch sees no CUDA device here", remedy="leave --device out, or use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", launched.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _hardware(name: str | None, device: torch.device) -> Hardware | None:
    if name is not None:
        return profiles.load(name)
    return profiles.guess("cuda") if device.type == "cuda" else None
