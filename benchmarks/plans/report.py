"""How large a report is, how long it takes to write, and how soon a browser answers.

    .venv/bin/python benchmarks/plans/report.py                          # prints a table
    .venv/bin/python benchmarks/plans/report.py --save                   # and writes benchmarks/results/report-DATE.md
    .venv/bin/python benchmarks/plans/report.py --only llama-3.1-405b    # one model

A browser (Chromium or Chrome) opens the file from disk, five times: from the beginning of the navigation to the first
frame after the page's script has run (`interactive`), and from a click on each tab to the frame after it (`slowest
tab`). Nothing is explained: that takes as long as it is given.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from benchmarks import pages

CASES = (
    ("gpt2", "dp=4,tp=2", (32, 1024)),
    ("llama-3.1-8b", "dp=32,tp=8", (64, 8192)),
    ("t5-base", "dp=4,tp=2", (32, 512)),
    ("resnet-50", "dp=8", (256, 1)),
    ("llama-3.1-405b", "pp=16,dp=64,tp=8", (1024, 8192)),
)
REPEATS = 5
FRAME = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"


@dataclass(frozen=True, slots=True)
class Row:
    """One report. written_s: CPU seconds. interactive_s, tab_s: medians; of tabs the slowest."""

    name: str
    plan_bytes: int
    page_bytes: int
    written_s: float
    interactive_s: float | None
    tab_s: float | None
    tab: str


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/report-DATE.md")
    parser.add_argument("--only", help="one model")
    arguments = parser.parse_args()
    rows = [measure(*case) for case in CASES if arguments.only in (None, case[0])]
    text = table(rows)
    print(text)
    if arguments.save:
        head = f"# Reports: size, and how soon a browser answers\n\n{date.today()}, {pages.machine()}.\n\n"
        path = pages.write("report", f"{head}{text}\n\nWritten by `benchmarks/plans/report.py`.\n")
        print(f"wrote {path}")


def measure(name: str, mesh: str, batch: tuple[int, int]) -> Row:
    """One model's report, opened several times."""
    print(f"{name} on {mesh} …", flush=True)
    loaded = catalogue.load(name, batch=batch, device="meta")
    parsed = autopar.Mesh.parse(mesh, hardware="h100")
    plan = autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, precision="bf16")
    with tempfile.TemporaryDirectory() as folder:
        saved, page = Path(folder, "plan.json"), Path(folder, "plan.html")
        plan.save(saved)
        again = Plan.load(saved)
        begun = time.process_time()
        again.report(page)
        written_s = time.process_time() - begun
        interactive_s, tab_s, tab = opened(page)
        return Row(f"{name}, {mesh}", saved.stat().st_size, page.stat().st_size, written_s, interactive_s, tab_s, tab)


def opened(page: Path) -> tuple[float | None, float | None, str]:
    """Medians of (interactive, slowest tab), and which one that is; None without a browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return None, None, ""
    from playwright.sync_api import sync_playwright

    loads: list[float] = []
    tabs: dict[str, list[float]] = {}
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for _ in range(REPEATS):
            tab: Any = chromium.new_page(viewport={"width": 1280, "height": 800})
            begun = time.perf_counter()
            tab.goto(page.as_uri())
            tab.evaluate(FRAME)
            loads.append(time.perf_counter() - begun)
            for each in tab.locator("[role=tab]").all():
                begun = time.perf_counter()
                each.click()
                tab.evaluate(FRAME)
                tabs.setdefault(each.inner_text(), []).append(time.perf_counter() - begun)
            tab.close()
        chromium.close()
    slowest = max(tabs, key=lambda each: statistics.median(tabs[each]))
    return statistics.median(loads), statistics.median(tabs[slowest]), slowest


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = []
    for row in rows:
        times = [f"{value:.2f}" if value is not None else "no browser" for value in (row.interactive_s, row.tab_s)]
        tab = f" ({row.tab.lower()})" if row.tab else ""
        sizes = (f"{row.plan_bytes / 1e6:.2f} MB", f"{row.page_bytes / 1e6:.2f} MB")
        lines.append((row.name, *sizes, f"{row.written_s:.1f}", times[0], times[1] + tab))
    header = ("plan", "plan.json", "report", "written, CPU s", "interactive, s", "slowest tab, s")
    return pages.table(header, lines)


if __name__ == "__main__":
    main()
