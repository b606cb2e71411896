"""`autopar.search(…, generate=…)`: meshes and batches for `generate()`, and the frontier of latency and throughput."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from autopar.api.generation import GenerationPlan, phase_inputs, planned
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.ir.program import Program
from autopar.planner.generation import Generation
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.token_search import of_model
from autopar.planner.search.tokens import OtherWay, TokenCandidate, other_ways, spread_over, token_frontier
from autopar.views.token_frontier import draw_token_frontier, frontier_table, others_table, planned_table

logger = logging.getLogger("autopar.search")


@dataclass(frozen=True, slots=True)
class GenerationSearch:
    """What a search for `generate()` found. candidates: every mesh with every batch, estimated; planned: some of the
    frontier, from the fewest seconds a token to the most tokens a second, with the plans of both phases.

    generation: what was asked, of one of the batches. wall_s, cpu_s: of the search. others: of those planned, other
    ways on the same devices that can be had and fit (`other_ways`), with their plans.
    """

    cluster: Cluster
    generation: Generation
    candidates: tuple[TokenCandidate, ...]
    planned: tuple[tuple[TokenCandidate, GenerationPlan], ...]
    memory_limit_bytes: float
    wall_s: float
    cpu_s: float
    others: tuple[tuple[TokenCandidate, OtherWay, GenerationPlan], ...] = ()

    @property
    def best(self) -> GenerationPlan:
        """Of all that was planned what makes most tokens a second and device.

        Raises:
            ValueError: nothing was planned.
        """
        every = [*self.planned, *((each, plan) for each, _, plan in self.others)]
        _, found = max(every, key=lambda pair: pair[0].batch / pair[1].total_s)
        return found

    @property
    def frontier(self) -> list[TokenCandidate]:
        """The estimates that fit and that nothing beats in both seconds a token and tokens a second and device."""
        return token_frontier(self.candidates)

    @property
    def off_by(self) -> float:
        """The largest relative difference between an estimate and its plan, of seconds of either phase."""
        pairs = [
            pair for each, plan in self.planned
            for pair in (
                (each.time_to_first_token_s, plan.time_to_first_token_s),
                (each.time_per_token_s, plan.time_per_token_s),
            )
        ]  # fmt: skip
        return max((abs(estimated / found - 1) for estimated, found in pairs), default=0.0)

    def plot(self, path: str | Path) -> Path:
        """The frontier as a picture (.svg, .png, .pdf). Needs matplotlib.

        Raises:
            AutoparError: no matplotlib, or a path that cannot be written.
        """
        return draw_token_frontier(self.candidates, self.frontier, self._title, Path(path))

    @property
    def _title(self) -> str:
        asked = self.generation
        return f"{asked.prompt} + {asked.new_tokens} tokens on {self.cluster}"

    def __iter__(self) -> Iterator[GenerationPlan]:
        return (plan for _, plan in self.planned)

    def __len__(self) -> int:
        return len(self.planned)

    def __getitem__(self, index: int) -> GenerationPlan:
        return self.planned[index][1]

    def to_data(self) -> dict[str, Any]:
        """For machines: the frontier, the plans, and all that was estimated."""

        def row(each: TokenCandidate) -> dict[str, Any]:
            return {
                "mesh": each.point.axes, "strategy": each.point.strategy, "batch": each.batch,
                "time_to_first_token_s": each.time_to_first_token_s, "time_per_token_s": each.time_per_token_s,
                "tokens_per_s_per_device": each.tokens_per_s_per_device, "cache_bytes": each.cache_bytes,
                "peak_bytes": each.peak_bytes, "fits": each.fits,
            }  # fmt: skip

        return {
            "cluster": str(self.cluster),
            "generation": asdict(self.generation),
            "frontier": [row(each) for each in self.frontier],
            "plans": [{**row(each), "planned": plan.to_data()} for each, plan in self.planned],
            "others": [
                {"of": row(each), "mesh": dict(way.axes), "strategy": dict(way.strategy), "planned": plan.to_data()}
                for each, way, plan in self.others
            ],
            "candidates": [row(each) for each in self.candidates],
            "estimates_off_by": self.off_by,
            "memory_limit_bytes": self.memory_limit_bytes,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=160)
        console.print(frontier_table(self.frontier, [each for each, _ in self.planned]))
        rows = [
            (each, plan.time_to_first_token_s, plan.time_per_token_s, float(plan.peak_memory_bytes))
            for each, plan in self.planned
        ]
        if rows:
            console.print(planned_table(rows))
        if self.others:
            console.print(
                others_table([
                    (each, way.mesh, " ".join(way.strategy.values()), plan.time_to_first_token_s, plan.time_per_token_s,
                     float(plan.peak_memory_bytes))
                    for each, way, plan in self.others
                ])
            )  # fmt: skip
        batches = sorted({each.batch for each in self.candidates})
        console.print(
            f"{self._title}: {len({each.point for each in self.candidates})} meshes with "
            f"{', '.join(map(str, batches))} sequences, {sum(each.fits for each in self.candidates)} of "
            f"{len(self.candidates)} within {self.memory_limit_bytes / 2**30:.4g} GiB a rank; of what was planned (*) "
            f"estimates were off by {self.off_by:.1%} at most; {self.wall_s:.1f} s"
        )
        return out.getvalue().rstrip()


def search_generation(
    model: nn.Module,
    cluster: Cluster | str,
    generation: Generation,
    *,
    batches: Sequence[int] | None = None,
    precision: str | torch.dtype | None = None,
    memory_limit: float | None = None,
    top: int = 3,
    limits: Mapping[str, int] | None = None,
    others: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> GenerationSearch:
    """See `autopar.search`."""
    start = time.perf_counter(), time.process_time()
    tell = progress or (lambda what, number, count: None)
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    wanted = of_model(model, cluster, generation, batches, precision, memory_limit, limits)
    candidates = wanted.candidates(lambda asked: phase_inputs(model, asked), tell)
    plans: list[tuple[TokenCandidate, GenerationPlan]] = []
    chosen = spread_over(token_frontier(candidates), top)
    captured: dict[tuple[int, int], dict[str, dict[object, Program]]] = {}  # by batch and pieces of the length
    for number, each in enumerate(chosen):
        tell("plan", number, len(chosen))
        options = {"strategy": each.point.strategy, "precision": precision, "memory_limit": memory_limit}
        try:
            found = planned(
                model, wanted.cluster.mesh(each.point.axes), replace(generation, batch=each.batch), options, (),
                is_open=False, captured=captured.setdefault((each.batch, 1), {}),
            )  # fmt: skip
        except DoesNotFit:  # within what an estimate may be off
            continue
        plans.append((each, found))
    tried: list[tuple[TokenCandidate, OtherWay, GenerationPlan]] = []
    ways = [(each, way) for each in chosen for way in other_ways(each.point)] if others else []
    for number, (each, way) in enumerate(ways):
        tell("other ways", number, len(ways))
        traced = captured.setdefault((each.batch, way.ways), {})
        options = {"strategy": dict(way.strategy), "precision": precision, "memory_limit": memory_limit}
        try:
            found = planned(
                model, wanted.cluster.mesh(dict(way.axes)), replace(generation, batch=each.batch), options, (),
                is_open="auto" in way.strategy.values(), captured=traced,
            )  # fmt: skip
        except AutoparError as error:
            logger.info("%s on %s cannot be had: %s", way.name, way.mesh, error)
            continue
        tried.append((each, way, found))
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    return GenerationSearch(
        wanted.cluster, generation, tuple(candidates), tuple(plans), wanted.limit_bytes, *seconds, tuple(tried)
    )
