"""What experts choose in well-known situations, and what `auto` and `search` choose there, from costs alone.

    python benchmarks/experts/experts.py [--only NAME,NAME] [--rows FILE] [--list] [--write]

Every row of the table is a situation of the literature: a model on meta, devices, links, memory
(situations.py). autopar plans it, or searches its cluster; then the literature's choice and the wrong ones
are planned too, so that each comes with its price, and with what makes it slower. `--rows` keeps one
JSON line per situation, so that a later run goes on where an earlier one stopped; `--write` adds a dated table under
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.cli.models.catalogue import LoadedModel
from autopar.machine import links
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from benchmarks import pages
from benchmarks.experts import priced
from benchmarks.experts.priced import GIB, Priced
from benchmarks.experts.situations import SITUATIONS, Situation


@dataclass(frozen=True, slots=True)
class Outcome:
    """One situation. chosen: the fastest of what `auto` and `search` found; tried: all that they found; others: what
    else there would be. agrees: whether the choice is the literature's. notes: computed. cpu_s: of all of it.
    """

    situation: str
    row: str
    expected: str
    about: str
    chosen: Priced
    tried: tuple[Priced, ...]
    others: tuple[Priced, ...]
    agrees: bool
    notes: tuple[str, ...]
    cpu_s: float

    @property
    def verdict(self) -> str:
        """In a word, and by how much the nearest other one is missed."""
        nearest = min((each for each in self.others if each.fits), key=lambda each: each.step_s, default=None)
        said = "yes" if self.agrees else "no"
        if nearest is None:
            return said
        ratio = nearest.step_s / self.chosen.step_s - 1
        return f"{said}; {nearest.name} " + (f"{ratio:+.1%}" if abs(ratio) >= 5e-4 else "as fast")


def of_data(data: Mapping[str, Any]) -> Outcome:
    """The inverse of `dataclasses.asdict`, read from JSON."""
    own = {name: tuple(map(priced.of_data, data[name])) for name in ("tried", "others")}
    return Outcome(**{**data, **own, "chosen": priced.of_data(data["chosen"]), "notes": tuple(data["notes"])})


def cluster_of(situation: Situation) -> autopar.Cluster:
    return autopar.Cluster.parse(f"{situation.hardware}x{situation.gpus}")


def measure(situation: Situation) -> Outcome:
    """Let autopar choose, and price the rest."""
    start = time.process_time()
    loaded = catalogue.load(
        situation.model, batch=situation.batch, dropout=0.0, overrides=dict(situation.overrides) or None
    )
    cluster = cluster_of(situation)
    limit = situation.limit_gb * 1e9 if situation.limit_gb else float(cluster.hardware.memory_bytes)
    tried = tuple(_tried(situation, loaded, cluster, limit))
    found = [each for each in tried if each.fits]
    if not found:
        raise AutoparError("autopar found nothing that fits", where=situation.name, values=str(tried))
    chosen = min(found, key=lambda each: each.step_s)
    others = []
    for other in situation.others:
        said(f"  {situation.name}: {other.name} on {other.mesh}")
        mesh = Mesh.parse(other.mesh, hardware=cluster.hardware)
        others.append(
            priced.price(
                other.name, loaded, mesh, other.strategy, limit_bytes=limit, microbatches=other.microbatches,
                rematerialize=other.rematerialize,
            )
        )  # fmt: skip
    notes = notes_of(situation, chosen, tried, others, cluster.hardware)
    return Outcome(
        situation.name,
        situation.row,
        situation.expected,
        situation.about,
        chosen,
        tried,
        tuple(others),
        situation.agrees(chosen.traits),
        notes,
        time.process_time() - start,
    )


def _tried(situation: Situation, loaded: LoadedModel, cluster: autopar.Cluster, limit: float) -> Iterator[Priced]:
    for text in situation.auto:
        said(f"  {situation.name}: auto on {text}")
        mesh = Mesh.parse(text, hardware=cluster.hardware)
        yield priced.price("auto", loaded, mesh, "auto", limit_bytes=limit)
    if situation.searched:
        said(f"  {situation.name}: search on {cluster}")
        found = autopar.search(
            loaded.model, cluster, example_inputs=loaded.batch, memory_limit=limit, limits=situation.limits
        )
        for number, plan in enumerate(found, 1):
            yield priced.of_plan(f"search, {number}.", plan, limit)


def notes_of(
    situation: Situation, chosen: Priced, tried: Sequence[Priced], others: Sequence[Priced], hardware: Hardware
) -> tuple[str, ...]:
    """What the numbers say beside the table: why the choice is another one than the literature's, and what autopar
    lacks.
    """
    notes = [situation.lacks] if situation.lacks else []
    if not situation.agrees(chosen.traits):
        own = [each for each in (*tried, *others) if each.fits and situation.agrees(each.traits)]
        if own:
            best = min(own, key=lambda each: each.step_s)
            notes.append(
                f"the literature's choice at its best is {best.name} on {best.mesh}: {priced.why(chosen, best)}"
            )
        else:
            notes.append("none of what was priced is the literature's choice and fits")
    whole = next((each for each in others if each.name == "nothing recomputed" and not each.reason), None)
    if whole is not None:
        notes.append(offload_note(chosen, whole, hardware))
    return tuple(notes)


def offload_note(chosen: Priced, whole: Priced, hardware: Hardware) -> str:
    """What recomputation takes, and what one way to and from the host would: bytes over PCIe 5, as its data sheet says.

    whole: the plan that keeps everything, which does not fit.
    """
    wire = links.catalogue()["pcie5"]
    over = max(0.0, whole.peak_bytes - chosen.peak_bytes)
    moved_s = 2 * over / (wire.bandwidth_bytes_per_s * wire.efficiency)
    again_s = chosen.compute_s - whole.compute_s
    return (
        f"recomputing saves {over / GIB:.3g} GiB for {priced.seconds(again_s)}; the same bytes to the host and back "
        f"over {wire.name} would take {priced.seconds(moved_s)} (arithmetic, no plan), beside "
        f"{priced.seconds(chosen.compute_s)} of compute on {hardware.name}"
    )


# -- what is printed


def table(outcomes: Sequence[Outcome]) -> str:
    header = "situation", "literature", "autopar chooses", "what it does", "step", "GiB"
    lines = []
    for each in outcomes:
        own = priced.cells(each.chosen)
        row = (each.row, each.expected, own["configuration"], ", ".join(each.chosen.traits), own["step"], own["GiB"])
        lines.append((*row, each.verdict))
    return pages.table((*header, "as the literature; nearest other"), lines)


def details(outcome: Outcome) -> str:
    """Every configuration of a situation beside the chosen one, and why it is slower."""
    lines = []
    rows = [outcome.chosen, *(each for each in (*outcome.tried, *outcome.others) if each is not outcome.chosen)]
    for each in rows:
        own = priced.cells(each)
        said = "**chosen**" if each is outcome.chosen else priced.why(outcome.chosen, each)
        lines.append((own["configuration"], ", ".join(each.traits), own["step"], own["GiB"], own["of it"], said))
    return "\n\n".join([
        f"## {outcome.situation}: {outcome.row}", f"{outcome.about}. Literature: {outcome.expected}.",
        pages.table(("configuration", "what it does", "step", "GiB", "of it", "against the choice"), lines),
        *["\n".join(f"- {note}" for note in outcome.notes)] * bool(outcome.notes), f"{outcome.cpu_s:.0f} s CPU.",
    ])  # fmt: skip


def report(outcomes: Sequence[Outcome]) -> str:
    agreeing = sum(each.agrees for each in outcomes)
    parts = [
        table(outcomes),
        f"{agreeing} of {len(outcomes)} choices are the literature's. Step: predicted, bf16. Chosen: the fastest of "
        "what `auto` and `search` found. Of what does not fit, the numbers are of everything recomputed.",
        *map(details, outcomes),
    ]
    return "\n\n".join(parts)


def write(outcomes: Sequence[Outcome]) -> Path:
    """A dated file under benchmarks/results, with what it ran on."""
    return pages.write(
        "experts",
        f"# What experts choose, and what autopar finds from costs, {date.today()}\n\n"
        f"by `benchmarks/experts/experts.py`; {pages.machine()}, one thread; "
        f"{sum(each.cpu_s for each in outcomes):.0f} s CPU in all. The table: what the "
        "literature says of each situation (ZeRO 1910.02054, ZeRO++ 2306.10209, FSDP 2304.11277, Megatron-LM "
        f"2104.04473, Ulysses 2309.14509, ring attention 2310.01889, ZeRO-Offload 2101.06840).\n\n{report(outcomes)}\n",
    )


def said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"names of situations: {', '.join(each.name for each in SITUATIONS)}")
    parser.add_argument("--rows", type=Path, help="file that keeps what was found, one JSON line per situation")
    parser.add_argument("--list", action="store_true", help="show the situations and plan nothing")
    parser.add_argument("--write", action="store_true", help="a dated file under benchmarks/results")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [each.name for each in SITUATIONS]
    if unknown := set(wanted) - {each.name for each in SITUATIONS}:
        raise SystemExit(f"no situation is called {', '.join(sorted(unknown))}; see --list")
    chosen = [each for each in SITUATIONS if each.name in wanted]
    if options.list:
        print("\n".join(f"{each.name}: {each.row} -> {each.expected}. {each.about}" for each in chosen))
        return 0
    torch.set_num_threads(1)
    known = {each.situation: each for each in map(of_data, pages.kept(options.rows))}
    outcomes = []
    for number, each in enumerate(chosen, 1):
        said(f"{number}/{len(chosen)} {each.name}: {each.row}")
        found = known.get(each.name) or measure(each)
        outcomes.append(found)
        if each.name not in known:
            pages.keep(options.rows, found)
        said(f"  {priced.cells(found.chosen)['configuration']}: {found.verdict}")
    print(report(outcomes))
    if options.write:
        said(f"wrote {write(outcomes).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
