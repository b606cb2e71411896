"""Predicted beside measured, with the profile that calibrate wrote: the rows of benchmarks/training/accuracy.py."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from benchmarks.first_light.section import Section, alone
from benchmarks.training import accuracy

QUICK = ("bert",)


def run(section: Section) -> None:
    if not section.profile.exists():
        section.row("profile", False, error=f"there is no {section.profile}: run calibrate before")
        return
    rounds = 3 if section.quick else 11
    with alone(section):
        for case in accuracy.cases_of(section.device.type, QUICK if section.quick else ()):
            if case.ranks == 1:
                section.attempt(case.model, partial(_measure, section, case, rounds))


def _measure(section: Section, case: accuracy.Case, rounds: int) -> None:
    row = accuracy.measure(case, str(section.profile), section.device.type, rounds)
    print(accuracy.summary(row))
    errors = {"time_error": row.time_error, "memory_error": row.memory_error}
    section.row(case.model, None, **errors, **asdict(row), **section.memory())
