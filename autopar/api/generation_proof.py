"""Proof of a plan for `generate()`: transformers' own loop over the programs of all ranks, its tokens given
(*teacher-forced*), beside the eager model on the whole sequence without a cache.

Compared are the logits of every step, in float64; where keys and values are stored as codes, with a model that rounds
them alike (`base/huggingface/coded_reference.py`), and they too. A write to the cache that is lost or late, a row or a
head of another rank, a decode that reads what prefill left otherwise than it lies: each gives other logits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api.comparing import TOLERANCES, Comparison, change, comparison
from autopar.api.interpret import state_of
from autopar.api.planned_text import border_in, has_shapes_of, is_proven_text, own_text, state_for
from autopar.api.promote import default_dtype, only
from autopar.api.proof import Proof, fits_here, program_of, scaled_mesh
from autopar.api.reference import NotEager
from autopar.api.small_model import as_drawn, small_model
from autopar.base.codes import is_by_channel
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches, experts, huggingface
from autopar.base.huggingface.generation import Within, driven, has_encoder, outputs, vocabulary
from autopar.base.stored_weights import ways_of
from autopar.base.torch_compat import tracing
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.emit import interface_of
from autopar.planner.generation import Generation
from autopar.planner.plan.record import PlanRecord
from autopar.runtime.simulate import simulate
from autopar.strategies.context import ways_of_cache
from autopar.strategies.pipelining.spec import AXIS

MOST_TOKENS = 16
"""That are proven: each is the same program of one token."""


def verify_generation(
    wanted: Generation,
    phases: Mapping[str, PlanRecord],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    tokens: int | None = None,
) -> Proof:
    """Prove a plan (see the module's text), on its mesh where that has at most 16 ranks, else on one scaled down.

    phases: the plans of `prefill` and `decode`. tokens: how many new ones; None: all, up to 16. A prompt in chunks is
    proven up to where the last whole one ends, a plan with beams row by row: each is a sequence.

    Raises:
        AutoparError: the plan was loaded without its model, or the model is too large to run here.
    """
    decode = phases["decode"]
    for plan in phases.values():
        fits_here(plan)
    assert decode.model is not None
    count = min(wanted.new_tokens, MOST_TOKENS) if tokens is None else tokens
    meshes = {name: _scaled(plan) for name, plan in phases.items()}
    ways = math.lcm(*(_ways(phases[name], mesh) for name, (mesh, _) in meshes.items()))
    length = wanted.positions(behind_encoder=has_encoder(decode.model), ways=ways)
    wanted = wanted.in_whole_chunks()
    model, _ = small_model(decode.model, {}, dtype, seed)
    words = vocabulary(model)
    generator = torch.Generator().manual_seed(seed)
    prompt = wanted.prompts(words, generator)
    if wanted.beams > 1:
        prompt = {name: value.repeat_interleave(wanted.beams, 0) for name, value in prompt.items()}
    following = torch.randint(1, words, (wanted.rows, count), generator=generator)
    run = _Run(length, wanted.chunks, wanted.cache, phases, model, meshes, dtype, following)
    around = partial(_eager, model, dtype)
    tokens_found = driven(
        model, prompt, count, run.step, run.cache, chunk=wanted.chunk, encoder=lambda each: Within(each, around)
    )
    first = tokens_found.shape[1] - count
    assert torch.equal(tokens_found[:, first:], following), "generate() took other tokens than it was given"
    rtol, atol = TOLERANCES[dtype]
    ids = tokens_found[:, :-1]
    whole = exact = _whole(model, prompt, ids, dtype)
    rows: list[Comparison] = []
    notes: tuple[str, ...] = ()
    if wanted.cache is not None:
        from autopar.base.huggingface.coded_reference import Rounding, rounding_cache
        from autopar.base.huggingface.windowed_reference import WindowedRounding

        mask = None if has_encoder(model) else prompt["attention_mask"]
        if is_by_channel(wanted.cache):
            rounding: Rounding = WindowedRounding.of(wanted.cache, run.kept, rtol)
            calls = [first // wanted.chunks] * wanted.chunks + [1] * (ids.shape[1] - first)
            whole = _by_calls(model, prompt, ids, dtype, rounding_cache(model, rounding), calls)
        else:
            rounding = Rounding(wanted.cache, run.kept, rtol)
            whole = _whole(model, prompt, ids, dtype, rounding_cache(model, rounding))
        rows += [comparison(name, want, have, rtol, atol, 0.0) for name, want, have in rounding.compared(mask)]
        notes = _notes(wanted.cache, rounding, exact[:, first - 1 :], whole[:, first - 1 :])
    if stored := ways_of(model):
        with as_drawn(model):
            plain = _whole(model, prompt, ids, dtype)
        notes += (change(f"weights in {stored}", plain[:, first - 1 :], exact[:, first - 1 :]),)
    for number, logits in enumerate(run.logits):
        token = number - wanted.chunks + 1
        part = f"chunk {number + 1} of the prompt" if wanted.chunks > 1 else "the prompt"
        name = f"logits of {part}" if token <= 0 else f"logits of token {token}"
        last = first - 1 + (token if token > 0 else token * (wanted.chunk or 1))
        want = whole[:, last - logits.shape[1] + 1 : last + 1]
        rows.append(comparison(name, want, logits, rtol, atol, 0.0))
    rows += run.rows
    mesh = ", then ".join(dict.fromkeys(str(mesh) for mesh, _ in meshes.values()))
    scaled = any(each for _, each in meshes.values())
    return Proof(tuple(rows), mesh, scaled, str(dtype).removeprefix("torch."), run.events, False, rtol, notes)


def _scaled(plan: PlanRecord) -> tuple[Mesh, bool]:
    """The mesh on which a plan is proven, and whether it is a smaller one."""
    return scaled_mesh(plan.mesh, {AXIS: min(2, dict(plan.mesh.axes).get(AXIS, 1))})


def _ways(plan: PlanRecord, mesh: Mesh) -> int:
    return ways_of_cache(plan.strategies, mesh.without(AXIS) if AXIS in mesh.axis_names else mesh)


class _Run:
    """The programs of all ranks in the model's place. Each is written once; what follows is the cache's."""

    def __init__(
        self, length: int, chunks: int, storage: str | None, phases: Mapping[str, PlanRecord], model: nn.Module,
        meshes: Mapping[str, tuple[Mesh, bool]], dtype: torch.dtype, following: Tensor,
    ) -> None:  # fmt: skip
        self.phases, self.model, self.meshes = phases, model, meshes
        self.dtype, self.following = dtype, following
        self.length, self.chunks, self.storage = length, chunks, storage
        self.logits: list[Tensor] = []
        self.rows: list[Comparison] = []
        self.seen: set[tuple[Any, ...]] = set()
        self.events = 0
        self.programs: dict[tuple[Any, ...], tuple[Program, str]] = {}
        self.kept: Any = None

    def cache(self, model: Any, rows: int, length: int, encoded: Any) -> Any:
        return caches.new_cache(self.model, rows, self.length, torch.device("cpu"), encoded, self.storage)

    def step(self, given: dict[str, Any]) -> Any:
        """One forward: the program of the phase, on all ranks."""
        name, given_cache = caches.of_call(given)
        token = len(self.logits) - self.chunks + 1
        phase = "decode" if token > 0 else "prefill"
        shapes = tuple((path, x.shape) for path, x in tracing.tree_leaves_with_path(given) if isinstance(x, Tensor))
        kind = (phase, caches.layouts_among(given), shapes)
        if kind not in self.programs:
            with only(self.dtype):
                found = self.phases[phase]
                ordered = {name: given[name] for name in found.inputs or () if name in given} | given
                self.programs[kind] = program_of(found, self.model, ordered, *self.meshes[phase], self.dtype)
        program, source = self.programs[kind]
        if any(region.draws for region in program.regions):
            raise AutoparError(
                "a model in training mode drops other numbers in each run, so that there is nothing to compare with",
                where=next(filter(None, (region.module for region in program.regions if region.draws)), None),
                remedy="call model.eval() before plan_generation, as before generate()",
            )
        leaves = dict(tracing.tree_leaves_with_path(given))
        tensors = {port.name: leaves[port.name] for port in program.inputs}
        state, mesh_is_smaller = state_of(self.model, program), self.meshes[phase][1]
        with default_dtype(self.dtype), torch.no_grad():
            done = simulate(interface_of(program), source, state, tensors, backward=False)
            if kind not in self.seen and not mesh_is_smaller and has_shapes_of(self.phases[phase], tensors):
                self._with_own_text(phase, program, source, state, tensors, done.outputs)
        self.seen.add(kind)
        values = dict(zip(program.output_names, done.outputs, strict=True))
        self.events += max((len(events) for events in done.events), default=0)
        cache = self.kept = caches.with_states(given_cache, values, name)
        self.logits.append(values["logits"])
        wanted = torch.full((len(self.following), 1, values["logits"].shape[-1]), -1.0)
        wanted[torch.arange(len(self.following)), 0, self.following[:, max(token, 0)]] = 1.0
        return outputs(wanted, cache, name)

    def _with_own_text(
        self, phase: str, program: Program, source: str, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor],
        made: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Has the plan's own text run, where that is another than what was traced for the proof, beside what this made:
        once of each program.
        """
        plan = self.phases[phase]
        if is_proven_text(plan, program, source, state, self.dtype):
            return
        own, text = border_in(plan.interface, self.dtype), own_text(plan, source, self.dtype)
        done = simulate(own, text, state_for(plan, state, self.dtype), tensors, backward=False)
        for name, want, have in zip(program.output_names, made, done.outputs, strict=True):
            row = comparison(f"{name} of {phase} (the plan's own text)", want, have, *TOLERANCES[self.dtype], 0.0)
            self.rows.append(row)


def _notes(storage: str, rounding: Any, exact: Tensor, rounded: Tensor) -> tuple[str, ...]:
    """What storing the cache so does to the model. exact, rounded: logits [batch, positions, vocabulary]."""
    said = change(f"a cache in {storage}", exact, rounded)
    edges = f"{rounding.edges} codes lie between two that are both right" if rounding.edges else ""
    return (said, edges) if edges else (said,)


def _whole(model: Any, prompt: Mapping[str, Tensor], ids: Tensor, dtype: torch.dtype, cache: Any = None) -> Tensor:
    """The eager model's logits of all positions. ids: of the decoder, where there is an encoder, too. cache: an empty
    one of transformers', which is written; None: without.
    """
    given: dict[str, Any] = {"use_cache": False}
    if cache is not None:
        given = {"use_cache": True, str(caches.name_of(model)): cache}
    if has_encoder(model):
        given |= {**prompt, "decoder_input_ids": ids}
    else:
        more = ids.shape[1] - prompt["input_ids"].shape[1]
        mask = torch.cat([prompt["attention_mask"], torch.ones_like(ids[:, :more])], 1)
        given |= {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in inspect.signature(model.forward).parameters:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with _eager(model, dtype):
        try:
            found = model(**given)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise NotEager(
                f"{type(model).__name__} does not run on the CPU without a cache: {error}",
                remedy="check that model(input_ids=…, use_cache=False) runs in eager mode",
            ) from error
    assert isinstance(found.logits, Tensor)
    return found.logits


def _by_calls(
    model: Any, prompt: Mapping[str, Tensor], ids: Tensor, dtype: torch.dtype, cache: Any, calls: Sequence[int]
) -> Tensor:
    """The same, of so many tokens a call, as a cache is written. cache: an empty one of transformers'."""
    found, end = [], 0
    for count in calls:
        begin, end = end, end + count
        given: dict[str, Any] = {"use_cache": True, str(caches.name_of(model)): cache}
        if has_encoder(model):
            given |= {**prompt, "decoder_input_ids": ids[:, begin:end]}
        else:
            given |= {"input_ids": ids[:, begin:end], "attention_mask": torch.ones_like(ids[:, :end])}
            if "position_ids" in inspect.signature(model.forward).parameters:
                given["position_ids"] = torch.arange(begin, end).expand(len(ids), -1)
        with _eager(model, dtype):
            found.append(model(**given).logits)
    return torch.cat(found, 1)


@contextmanager
def _eager(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model is what a proof compares with."""
    with only(dtype), huggingface.training_capture(model), experts.wide(), torch.no_grad():
        yield
