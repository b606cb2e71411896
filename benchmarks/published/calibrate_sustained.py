"""What products keep of their speed in a run of minutes (`sustained` of a hardware profile), from published rows.

    python benchmarks/published/calibrate_sustained.py [PROFILE,…]

For each profile the one number with which the rows that say `calibrates = true` are right on the average (mean of the
logarithms of predicted over published). No other row is looked at, and no other number is fitted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.machine import profiles
from benchmarks.published import rows as published_rows
from benchmarks.published.rows import Row
from benchmarks.published.runs import predict

NEAR = 0.002
"""A mean error below which the search ends."""


def errors(rows: Sequence[Row], sustained: float) -> list[float]:
    """Logarithms of predicted over published speed."""
    peak = profiles.load(rows[0].machine.profile).peak_flops["bf16"]
    found = [predict(row, sustained=sustained).tokens_per_s / published_rows.tokens_per_s(row, peak) for row in rows]
    said = [f"{row.id} {each - 1:+.1%}" for row, each in zip(rows, found, strict=True)]
    print(f"  {sustained:.3f}: {', '.join(said)}")
    return [math.log(each) for each in found]


def calibrated(rows: Sequence[Row]) -> float:
    """By the secant method: speed is nearly a power of `sustained`."""
    near, far = 0.8, 0.7
    before = statistics.mean(errors(rows, far))
    while abs(error := statistics.mean(errors(rows, near))) > NEAR:
        slope = (error - before) / math.log(near / far)
        near, far, before = near * math.exp(-error / slope), near, error
    return near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="?", help="names, as the rows' machines have them")
    wanted = parser.parse_args().profiles
    rows = [row for row in published_rows.load() if row.calibrates]
    for profile in wanted.split(",") if wanted else dict.fromkeys(row.machine.profile for row in rows):
        print(profile)
        print(f"{profile}: sustained = {calibrated([row for row in rows if row.machine.profile == profile]):.2f}")


if __name__ == "__main__":
    main()
