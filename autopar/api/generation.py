"""A plan for `generate()`: the prompt (*prefill*) and a token (*decode*) as phases that share parameters and caches.

    model, Generation ─ transformers' own generate(), another forward in it ─► a batch of each phase ─► a plan of each

What the second phase decides is bound to where the first stores parameters and leaves the cache, so nothing is moved
between them. Which of them decides first is what is predicted faster for the whole of it, where that is open. Then each
parameter is stored in the fewest bytes of which both read a slice (`planner/stored.py`). Of a prompt that goes through
the model in chunks, the first phase is one of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar import pipeline
from autopar.api.again import same_stages, unused_as_stored
from autopar.api.exporting import export
from autopar.api.generation_proof import verify_generation
from autopar.api.plan import Plan
from autopar.api.planning import dressed
from autopar.api.proof import Proof
from autopar.api.stored import pins_for, pins_of, states_of
from autopar.api.undivided import Undivided
from autopar.base import typed
from autopar.base.alike_rows import with_alike_rows
from autopar.base.errors import AutoparError
from autopar.base.files import MIB, parse_json, read_text
from autopar.base.huggingface import caches
from autopar.base.huggingface.generation import (
    Unfilled,
    check_generates,
    check_takes_chunks,
    driven,
    has_encoder,
    outputs,
    vocabulary,
)
from autopar.base.huggingface.masks_of_generate import shown
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.planner.decide import decide
from autopar.planner.generation import Generation, check_pieces, ways_of
from autopar.planner.plan.record import PlanRecord
from autopar.planner.stored import in_fewest_bytes, read_apart, stored_as, stored_bytes
from autopar.strategies.context import ways_of_cache
from autopar.strategies.names import Pin, Strategy
from autopar.strategies.request import Progress
from autopar.views import engines
from autopar.views.generation import phases_text
from autopar.views.report import phases_report

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PHASES = ("prefill", "decode")
PROVEN = 1.001
"""A placement may be so many times as slow as one that it is taken for equal to (`gap` of `passes/place.py`)."""


def phase_inputs(model: nn.Module, generation: Generation, ways: int = 1) -> dict[str, dict[str, Any]]:
    """What `generate()` hands to forward in each phase, by its name. model: may be on meta. ways: in how many pieces
    the length of the cache is cut.

    Raises:
        AutoparError: a model without `generate()`, or whose layers keep what is no state yet.
    """
    check_generates(model)
    if generation.chunk is not None:
        check_takes_chunks(model)
    found: list[dict[str, Any]] = []

    def answer(given: dict[str, Any]) -> Any:
        found.append(given if generation.padded else with_alike_rows(given))
        logits = torch.zeros(generation.rows, 1, vocabulary(model))
        name, cache = caches.of_call(given)
        return outputs(logits, caches.advanced(cache, caches.num_new(given)), name)

    length = generation.positions(behind_encoder=has_encoder(model), ways=ways)
    short = driven(
        model, generation.one_chunk().prompts(2), 2, answer,
        lambda _, rows, __, encoded: caches.new_cache(
            model, rows, length, torch.device("cpu"), encoded, generation.cache
        ),
        beams=generation.beams, chunk=generation.chunk, encoder=Unfilled,
    )  # fmt: skip
    assert short.shape[0] == generation.batch
    first = 1 if has_encoder(model) else generation.prompt
    caches.with_shown(found[1], shown(model, found[1], first, length))
    return dict(zip(PHASES, found, strict=False))


def ways_for(plan: Plan | None, strategy: Strategy, mesh: Mesh) -> int:
    """In how many pieces the length of a cache is cut, or may be. plan: that decides, where one was handed in.

    Raises:
        AutoparError: a strategy that the mesh cannot have.
    """
    return ways_of(strategy, mesh) if plan is None else ways_of_cache(plan.strategies, plan.stage_mesh)


def plan_generation(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str | Mapping[str, int],
    generate: Generation,
    *,
    strategy: Strategy = "auto",
    precision: str | torch.dtype | None = None,
    memory_limit: float | None = None,
    constraints: Sequence[Pin] = (),
    passes: Sequence[pipeline.Pass] | None = None,
    hardware: str | None = None,
    progress: Progress | None = None,
) -> GenerationPlan:
    """Decide how `model.generate()` runs on `mesh`: a plan for the prompt and one for a token (see the module's text).

    Needs no process group, no GPU, no weights (the model may be on meta). Arguments are those of `autopar.plan`.

    Raises:
        AutoparError: bad input; a model without `generate()`, or whose layers keep what is no state yet.
    """
    options: dict[str, Any] = dict(  # noqa: C408 (keywords read better)
        strategy=strategy, precision=precision, memory_limit=memory_limit, passes=passes, hardware=hardware,
        progress=progress,
    )  # fmt: skip
    return planned(model, mesh, generate, options, constraints, is_open=may_choose(strategy))


def may_choose(strategy: Strategy) -> bool:
    """Whether it decides by costs where parameters and caches lie."""
    named = list(strategy.values()) if isinstance(strategy, Mapping) else [strategy]
    return any(each == "auto" for each in named)


def planned(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str | Mapping[str, int],
    generation: Generation,
    options: Mapping[str, Any],
    pins: Sequence[Pin],
    *,
    is_open: bool,
    captured: dict[str, dict[object, Program]] | None = None,
) -> GenerationPlan:
    """The plans of both phases.

    options: of `autopar.plan`. pins: what the user asked for. is_open: whether costs decide where parameters and caches
    lie, so that it counts which phase goes first. captured: what was traced for these sizes before, by phase; gets what
    is.
    """
    mesh = Mesh.of(mesh, options.get("hardware"))
    check_pieces(generation, options["strategy"], mesh)
    mesh = mesh.in_chunks() if generation.chunks > 1 else mesh
    inputs = phase_inputs(model, generation, ways_of(options["strategy"], mesh))
    traced = {} if captured is None else captured

    undivided = Undivided.of(None, options["strategy"], mesh, None)
    # Axes of which rows are whole are left to the solver: they store what their strategies say for other batches.
    chooses = is_open and not any(undivided.left(each) for each in inputs.values())

    def make(phase: str, pins: Sequence[Pin], strategy: Strategy) -> PlanRecord:
        def decided(**asked: Any) -> PlanRecord:
            return decide(model, mesh, inference=True, captured=traced.setdefault(phase, {}), **asked)

        asked = {**options, "constraints": tuple(pins), "strategy": strategy, "example_inputs": inputs[phase]}
        try:
            return decided(**asked)
        except AutoparError:
            if not undivided.left(inputs[phase]):
                raise
        if not any(pinned.taken for pinned in pins):  # parameters lie as was asked for rows that axes divide
            pieces = undivided.pieces_by(None)
            even = replace(generation, batch=-(-generation.batch // pieces) * pieces)
            batch = phase_inputs(model, even, ways_of(options["strategy"], mesh))[phase]
            first = decide(model, mesh, inference=True, **{**asked, "example_inputs": batch})
            asked["constraints"] = (*pins, *pins_of(first.interface))
        return undivided.planned(mesh, asked, decided)

    def followed(first: str, own: PlanRecord, second: str) -> GenerationPlan:
        bound = [*pins_of(own.interface), *pins_for(states_of(own.interface), inputs[second])]
        other = make(second, bound, same_stages(own, options["strategy"]))
        if chooses:
            own, other = in_fewest_bytes([own, other], pins)
        plans = {first: own, second: unused_as_stored(other, own)}
        return GenerationPlan(generation, Plan.of(plans["prefill"]), Plan.of(plans["decode"]))

    found: list[GenerationPlan] = []
    refused: AutoparError | None = None
    orders = (PHASES, PHASES[::-1])
    for first, second in orders:
        if found and not is_open:
            break
        try:  # what serves one phase best may not serve the other
            found.append(followed(first, make(first, pins, options["strategy"]), second))
        except AutoparError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    best = min(found, key=lambda each: (each.total_s, stored_bytes(each.decode)))
    for first, second in orders if chooses else ():
        own, other = best.phases[first], best.phases[second]
        if apart := read_apart(own, other, pins):
            with contextlib.suppress(AutoparError):
                found.append(followed(first, stored_as(own, apart), second))
    best = _least_among(found, best)
    return replace(best, prefill=dressed(best.prefill), decode=dressed(best.decode))


def _least_among(found: Sequence[GenerationPlan], best: GenerationPlan) -> GenerationPlan:
    """The one that takes least memory of those that are no slower than the best one, as far as placements are proven;
    this one unless another takes less by more than that.
    """
    as_fast = [
        each for each in found
        if each.time_to_first_token_s <= PROVEN * best.time_to_first_token_s
        and each.time_per_token_s <= PROVEN * best.time_per_token_s
    ]  # fmt: skip
    least = min(as_fast, key=lambda each: each.peak_memory_bytes)
    return least if PROVEN * least.peak_memory_bytes < best.peak_memory_bytes else best


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The plans of both phases, and what they come to. Seconds are predicted; bytes are those of one rank."""

    generation: Generation
    prefill: Plan
    decode: Plan

    @property
    def phases(self) -> dict[str, Plan]:
        """By name, in the order in which they run."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def total_s(self) -> float:
        """Of all tokens of the batch: the prompt gives the first."""
        return self.time_to_first_token_s + (self.generation.new_tokens - 1) * self.time_per_token_s

    @property
    def time_to_first_token_s(self) -> float:
        return self.generation.chunks * (self.prefill.cost.step_time_s + self._between_s)

    @property
    def time_per_token_s(self) -> float:
        return self.decode.cost.step_time_s + self._between_s

    @property
    def _between_s(self) -> float:
        """What an engine's host takes before each call, while the device waits."""
        return self.decode.mesh.hardware.between_s(self.generation.rows)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of the whole batch."""
        return self.generation.batch * self.generation.new_tokens / self.total_s if self.total_s else 0.0

    @property
    def cache_bytes(self) -> int:
        """What one rank keeps of keys and values, for all positions."""
        return self.decode.cost.memory.states

    @property
    def peak_memory_bytes(self) -> int:
        return max(plan.cost.peak_memory_bytes for plan in self.phases.values())

    def verify(self, **options: Any) -> Proof:
        """Prove the programs together: see `autopar.api.generation_proof.verify_generation`."""
        return verify_generation(self.generation, self.phases, **options)

    def export(
        self,
        to: str,
        *,
        model: nn.Module | None = None,
        name: str = "MODEL",
        weights: str | Path | None = None,
        folder: str | Path | None = None,
        progress: Progress | None = None,
    ) -> engines.Exported:
        """The plan for an engine that serves it (see `Plan.export`), with the length that it was planned for, and the
        type in which keys and values are stored. Weights lie alike in both phases.

        Raises:
            AutoparError: as `Plan.export`.
        """
        wanted = self.generation
        asked = engines.Served(wanted.prompt + wanted.new_tokens, wanted.cache)
        return export(self.decode, to, model, name, asked, weights, folder, progress)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write everything about both phases as one offline HTML file (see `autopar.views.report.phases_report`)."""
        return phases_report(self.to_data(), self.phases, path, **options)

    def to_data(self) -> dict[str, Any]:
        """What it comes to, for machines."""
        return {
            "generation": asdict(self.generation),
            "time_to_first_token_s": self.time_to_first_token_s,
            "time_per_token_s": self.time_per_token_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / self.decode.mesh.num_devices,
            "cache_bytes": self.cache_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "total_s": self.total_s,
        }

    def to_json(self) -> str:
        """What `save` writes: each phase is a plan's text, with its checksum."""
        texts = {name: plan.to_json() for name, plan in self.phases.items()}
        return json.dumps({"generation": asdict(self.generation), "phases": texts})

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> GenerationPlan:
        """The inverse of `to_json`. Nothing in the text is run.

        Raises:
            AutoparError: text that is damaged or of another format; `where` it is from.
        """
        remedy = "save one with GenerationPlan.save"
        data = parse_json(text, "plan", where=where, remedy=remedy)
        try:
            texts = data["phases"]
            typed.check(Generation, data["generation"], "generation")
            found = Generation(**data["generation"])
            plans = [Plan.from_json(texts[name], where=f"{where}, {name}") for name in PHASES]
        except (KeyError, TypeError, AttributeError, typed.WrongType) as error:
            raise AutoparError(f"{where} is no plan for generate()", values=str(error)[:200], remedy=remedy) from error
        return GenerationPlan(found, *plans)

    @staticmethod
    def load(path: str | Path) -> GenerationPlan:
        """Read one that `save` wrote."""
        text = read_text(path, "plan", most_bytes=512 * MIB, remedy="save one with GenerationPlan.save")
        return GenerationPlan.from_json(text, where=str(path))

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.phases.values())

    def __str__(self) -> str:
        return phases_text(self.to_data(), self.phases)
