"""Measures this machine into the profile that step1b and accuracy predict with, as `autopar calibrate` does."""

from __future__ import annotations

from autopar.cost.calibration.run import Options, calibrate
from autopar.runtime import kernels
from benchmarks.first_light.section import Section


def run(section: Section) -> None:
    kernels.register()
    found = calibrate(Options(section.profile, section.quick, device=section.device.type), advance=print)
    assert found is not None
    for each in found.residuals:
        print(each)
    section.row("profile", None, **found.to_dict())
