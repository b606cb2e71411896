"""Does `autopar.search` find what experts made by hand, or better? Those of benchmarks/published/choices.toml.

    python benchmarks/experts/choices.py [--only PATTERN,…] [--list] [--most-gpus N] [--layers N] [--limit AXIS=N,…]
                                 [--rows FILE] [--write]

Each is planned as its source describes it, then its cluster is searched, and both are set side by side: predicted
seconds and bytes, what makes up the difference, and what the configuration does that a search does not try. What a
source does not say is assumed, and said. Large clusters take minutes; `--most-gpus` leaves them out.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.program import MODES
from autopar.machine.mesh import Mesh
from autopar.planner.search.space import MOST_ROWS, MOST_STAGES, Space
from benchmarks import pages
from benchmarks.experts import priced
from benchmarks.experts.priced import Priced
from benchmarks.published import backtest
from benchmarks.published import rows as published_rows
from benchmarks.published import runs as published_runs
from benchmarks.published.rows import AXES, Machine, Row, Shape

FILE = published_rows.FOLDER / f"{published_rows.CHOICES}.toml"
H100 = Machine("h100", "H100 80 GB", network_gbit_per_s=400)
A100 = Machine("a100-80", "A100 80 GB", network_gbit_per_s=200)
OMNIPATH = Machine("a100-80", "A100 80 GB, four Omni-Path links of 100 Gb/s a node", network_gbit_per_s=50)
LLAMA_8B = Shape("llama", 32, 4096, 32, 8, 14336, 128256)
LLAMA_70B = Shape("llama", 80, 8192, 64, 8, 28672, 128256)
LLAMA_405B = Shape("llama", 126, 16384, 128, 8, 53248, 128256)
OPT_175B = Shape("gpt", 96, 12288, 96, 96, 49152, 50272, tied=True)
GPT3_175B = replace(OPT_175B, vocabulary=51200)
BLOOM = Shape("gpt", 70, 14336, 112, 112, 57344, 250680, tied=True)
SUBJECTS: Mapping[str, tuple[Shape, Machine, int]] = {
    "llama3-405b-8k-gpus": (LLAMA_405B, H100, 8192),
    "llama3-405b-16k-gpus": (LLAMA_405B, H100, 16384),
    "llama3-405b-long": (LLAMA_405B, H100, 16384),
    "bloom-176b": (BLOOM, OMNIPATH, 384),
    "opt-175b": (OPT_175B, A100, 992),
    "nemo-llama3-8b": (LLAMA_8B, H100, 8),
    "nemo-llama3-70b": (LLAMA_70B, H100, 64),
    "nemo-llama31-405b": (LLAMA_405B, H100, 1024),
    "nemo-gpt3-175b": (GPT3_175B, H100, 128),
}
"""What the file says in words: shape, machine, devices."""
CANNOT = {"nemo-nemotron4-340b": "squared ReLU with grouped heads: no bundled configuration has both"}
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "llama3": {"data_parallel": "zero2"},
    "nemo": {"data_parallel": "zero2"},
    "opt": {"sequence": 2048, "global_batch": 992, "sequence_parallel": False},
    "bloom": {"sequence": 2048, "sequence_parallel": False},
}
"""Where a source is silent, by the beginning of its name. Llama 3 shards as FSDP without resharding after the forward
(2407.21783, 3.3.2), NeMo's default is Megatron's distributed optimizer, overlapped: zero2 here. OPT's batch of 2
million tokens is no multiple of 124 ranks: 992 sequences.
"""
DEFAULT_LIMITS = {"tp": 16, "cp": 16}


@dataclass(frozen=True, slots=True)
class Compared:
    """A hand-made configuration, and what a search of its cluster found. estimate_s: what the search thought of the
    mesh and strategies made by hand at their best, None where they were not among its points. left_out: what the
    hand-made one does that no search tries. cpu_s: of the search.
    """

    id: str
    row: str
    hand: Priced
    found: tuple[Priced, ...]
    estimate_s: float | None
    left_out: tuple[str, ...]
    assumed: tuple[str, ...]
    cpu_s: float = 0.0
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Seconds made by hand over seconds found: above 1 the search is faster."""
        return self.hand.step_s / self.found[0].step_s if self.found and not self.hand.reason else None


def of_data(data: Mapping[str, Any]) -> Compared:
    """The inverse of `dataclasses.asdict`, read from JSON."""
    texts = {name: tuple(data[name]) for name in ("left_out", "assumed")}
    found = tuple(map(priced.of_data, data["found"]))
    return Compared(**{**data, **texts, "hand": priced.of_data(data["hand"]), "found": found})


def rows() -> dict[str, Row | str]:
    """The configurations by name; a text says why one cannot be expressed. megatron's ten are those of its own file."""
    found: dict[str, Row | str] = {}
    for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["choices"]:
        name = each["id"]
        if name in SUBJECTS:
            found[name] = row_of(name, each["choice"], each["citation"])
        elif name == "megatron-weak-scaling":
            own = published_rows.load(["megatron_a100"])
            found |= {row.id: row for row in own}
        else:
            found[name] = CANNOT.get(name, "no shape is given for it here")
    return found


def row_of(name: str, choice: Mapping[str, Any], citation: str) -> Row:
    """A configuration as `backtest` takes it."""
    shape, machine, gpus = SUBJECTS[name]
    given: dict[str, Any] = {"sequence_parallel": choice.get("tp", 1) > 1}
    given |= next((fields for start, fields in ASSUMED.items() if name.startswith(start)), {})
    given |= {key: value for key, value in choice.items() if key not in (*AXES, "v", "precision")}
    sizes = {axis: int(choice.get(axis, 1)) for axis in AXES}
    sizes["dp"] = gpus // (sizes["pp"] * sizes["cp"] * sizes["tp"])
    stages = choice.get("v")
    return Row(
        id=name, source=published_rows.CHOICES, citation=citation, where="choices.toml", name=name, shape=shape,
        machine=machine, precision="bf16", sizes=sizes, published={}, stages_per_rank=stages,
        schedule="interleaved" if stages else None, **given,
    )  # fmt: skip


def left_out(row: Row, space: Space) -> tuple[str, ...]:
    """What the configuration does that no point of a search does."""
    found = []
    if (row.microbatch or 1) > MOST_ROWS:
        found.append(f"{row.microbatch} rows a microbatch (searched: up to {MOST_ROWS})")
    strategy = published_runs.STRATEGIES[row.data_parallel]
    if row.sizes["dp"] > 1 and strategy not in space.data:
        found.append(f"{strategy} (searched: {', '.join(space.data)})")
    if row.sizes["pp"] > 1 and (row.schedule or "1f1b") not in space.schedules:
        found.append(f"schedule {row.schedule} (searched: {', '.join(space.schedules)})")
    if row.sizes["pp"] > 1 and row.schedule == "interleaved" and (row.stages_per_rank or 2) > MOST_STAGES:
        found.append(f"{row.stages_per_rank} stages a rank (searched: up to {MOST_STAGES})")
    found += [
        f"{axis}={row.sizes[axis]} (limit {space.limits[axis]})"
        for axis in AXES
        if axis in space.limits and row.sizes[axis] > space.limits[axis]
    ]
    return tuple(found)


def compare(row: Row, limits: Mapping[str, int], layers: int | None = None) -> Compared:
    """Plan the configuration, search its cluster."""
    hardware = published_runs.machine_of(row.machine)
    name, overrides = published_runs.overrides_of(row, layers)
    batch = (row.global_batch, row.sequence)
    loaded = catalogue.load(name, batch=batch, overrides=overrides, dropout=0.0)
    limit = float(hardware.memory_bytes)
    said(f"  {row.id}: made by hand")
    hand = by_hand(row, loaded, Mesh(published_runs.axes_of(row), hardware=hardware), limit)
    nodes = max(1, row.gpus // hardware.devices_per_node)
    cluster = autopar.Cluster(hardware, nodes=nodes, gpus_per_node=min(row.gpus, hardware.devices_per_node))
    said(f"  {row.id}: searching {cluster}")
    space = Space(limits)
    start, estimate, reason = time.process_time(), None, ""
    found: tuple[Priced, ...] = ()
    try:
        result = autopar.search(
            loaded.model, cluster, example_inputs=loaded.batch, memory_limit=limit, limits=limits,
            progress=lambda what, *_: said(f"    {what}"),
        )  # fmt: skip
        found = tuple(priced.of_plan(f"search, {n}.", plan, limit) for n, plan in enumerate(result, 1))
        estimate = estimate_of(row, result)
    except AutoparError as error:
        reason = str(error).splitlines()[0]
    seconds = time.process_time() - start
    # A back-test assumes none; here memory decides.
    said_of = (each.replace("published: none", "published: the fastest that fits") for each in row.assumptions)
    return Compared(
        row.id, backtest.describe(row), hand, found, estimate, left_out(row, space), tuple(said_of), seconds, reason
    )


def by_hand(row: Row, loaded: Any, mesh: Mesh, limit: float) -> Priced:
    """The configuration as its source describes it. Where that does not say what is recomputed, the fastest of what
    fits: what fits with less recomputed may do so with stages that are far from even.
    """

    def with_recomputed(mode: str) -> Priced:
        return priced.price(
            "by hand", loaded, mesh, published_runs.strategy_of(row), limit_bytes=limit,
            microbatches=row.microbatches, rematerialize=mode,
        )  # fmt: skip

    if row.recompute is not None:
        return with_recomputed(published_runs.REMATERIALIZE[row.recompute])
    least = with_recomputed("auto")
    if least.reason or not least.fits:
        return least
    modes: list[str] = [*MODES]
    others = map(with_recomputed, modes[modes.index(least.rematerialize) + 1 :])
    return min([least, *(each for each in others if each.fits and not each.reason)], key=lambda each: each.step_s)


def estimate_of(row: Row, result: Any) -> float | None:
    """The fastest estimate of the row's mesh and of what it does to data, whatever its schedule and recomputation."""
    strategy = published_runs.STRATEGIES[row.data_parallel]
    if row.sizes["pp"] > 1:  # zero1 is zero2 there
        strategy = strategy.replace("zero1", "zero2")
    wanted = ({axis: size for axis, size in row.sizes.items() if size > 1}, strategy)
    own = [each.step_s for each in result.candidates if each.fits and (each.point.axes, each.point.data) == wanted]
    return min(own, default=None)


# -- what is printed


def table(compared: Sequence[Compared]) -> str:
    lines = []
    for each in compared:
        hand = priced.cells(each.hand)
        own = (each.reason, "", "", "", "")
        if each.found:
            best, ratio = priced.cells(each.found[0]), "–" if each.ratio is None else f"{each.ratio:.3f}"
            own = (best["configuration"], best["step"], best["GiB"], ratio, priced.why(each.found[0], each.hand))
        left = "; ".join(each.left_out) or "–"
        lines.append((f"{each.id}: {each.row}", hand["step"], hand["GiB"], *own, left))
    header = ("configuration", "by hand: step", "GiB", "found", "step", "GiB", "by hand / found")
    return pages.table((*header, "by hand against found", "not searched"), lines)


def details(each: Compared) -> str:
    """All that was found for one configuration, and what was assumed of it."""
    lines = []
    for one in (each.hand, *each.found):
        own = priced.cells(one)
        lines.append((own["configuration"], ", ".join(one.traits), own["step"], own["GiB"], own["of it"]))
    rows = pages.table(("configuration", "what it does", "step", "GiB", "of it"), lines)
    estimate = "was not among the points that fit" if each.estimate_s is None else priced.seconds(each.estimate_s)
    notes = [f"The search's own estimate of the mesh made by hand, at its best: {estimate}."]
    notes += [f"Assumed: {'; '.join(each.assumed)}."] * bool(each.assumed)
    return "\n\n".join([f"## {each.id}", rows, "\n".join([*notes, f"{each.cpu_s:.0f} s CPU of the search."])])


def report(compared: Sequence[Compared], unexpressed: Mapping[str, str]) -> str:
    ratios = [each.ratio for each in compared if each.ratio is not None]
    as_fast = sum(ratio >= 1 - 1e-9 for ratio in ratios)
    parts = [
        table(compared),
        f"The search is at least as fast in {as_fast} of {len(ratios)}. Predicted, bf16; a ratio above 1: the "
        "search is faster. What does not fit by hand is shown with everything recomputed.",
    ]
    if unexpressed:
        parts.append("Not expressed: " + "; ".join(f"{name} ({why})" for name, why in unexpressed.items()) + ".")
    return "\n\n".join([*parts, *map(details, compared)])


def said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _limits(text: str | None) -> dict[str, int]:
    pairs = [item.split("=") for item in text.split(",")] if text else []
    if any(len(pair) != 2 or pair[0] not in AXES or not pair[1].isdigit() for pair in pairs):
        raise SystemExit(f"--limit is AXIS=N,…, as in tp=8,cp=2, not {text!r}")
    return DEFAULT_LIMITS | {axis: int(size) for axis, size in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="patterns of names, such as 'nemo-*'")
    parser.add_argument("--list", action="store_true", help="show the configurations and plan nothing")
    parser.add_argument("--most-gpus", type=int, default=1024, help="leave out larger clusters (default 1024)")
    parser.add_argument("--layers", type=int, help="plan with so many blocks: says what can be expressed, nothing else")
    parser.add_argument("--limit", metavar="AXIS=N,…", help="the largest size of an axis (default tp=16,cp=16)")
    parser.add_argument("--rows", type=Path, help="file that keeps what was found, one JSON line per configuration")
    parser.add_argument("--write", action="store_true", help="a dated file under benchmarks/results")
    options = parser.parse_args()
    patterns = options.only.split(",") if options.only else ["*"]
    every = {name: row for name, row in rows().items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    limits, unexpressed = _limits(options.limit), {name: row for name, row in every.items() if isinstance(row, str)}
    known = [row for row in every.values() if isinstance(row, Row)]
    if options.list:
        print("\n".join(f"{row.id}: {backtest.describe(row)}, {row.gpus} devices" for row in known))
        return 0
    unexpressed |= {row.id: f"{row.gpus} devices: left out" for row in known if row.gpus > options.most_gpus}
    torch.set_num_threads(1)
    before = {each.id: each for each in map(of_data, pages.kept(options.rows))}
    compared = []
    for row in (row for row in known if row.gpus <= options.most_gpus):
        said(f"{row.id}: {backtest.describe(row)}")
        compared.append(before.get(row.id) or compare(row, limits, options.layers))
        if row.id not in before:
            pages.keep(options.rows, compared[-1])
        said(f"  by hand / found: {compared[-1].ratio}")
    text = report(compared, unexpressed)
    print(text)
    if options.write:
        version = torch.__version__.split("+")[0]
        title = f"# Hand-made configurations against the search's, {date.today()}\n\n"
        title += "by `benchmarks/experts/choices.py`, torch"
        pages.write("choices", f"{title} {version}, one thread.\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
