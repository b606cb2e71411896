"""overlap: parameter gathers and gradient reductions travel in buckets, beside the compute.

Requires: phase `lowered`.
Ensures: the same phase and numbers; `Region.transfers` holds the buckets of every region's gathers and reductions,
    `Program.shared` those of parameters that several calls use, `Program.overlap` whether the next call's gathers start
    before a call computes and a call's reductions run on while the next one does. No byte more or less is sent.

    gather q, k, v, o, up, down: six all-gathers  →  one bucket "all_gather dp", started while the layer before computes

Buckets save launches, at the price of a copy in and out; a tensor whose copy takes longer than a launch travels alone,
and a gradient that nothing else reads is then reduced where it is. As in PyTorch's DDP (Li et al., 2006.15704) a bucket
is bounded, so that it can leave early. What is in flight must fit the memory limit, else nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.cost.memory.buckets import local_bytes, shared_names
from autopar.ir.graphs import is_view
from autopar.ir.placement import Overlap, ParameterLayout, SharedParameter
from autopar.ir.program import Program
from autopar.ir.reads import reads_in_backward
from autopar.ir.region import Bucket, Call, Move, Region
from autopar.ir.rings import is_beside
from autopar.ir.sharding import Sharding, Step, redistribution_steps
from autopar.ir.values import Variable
from autopar.strategies.axis import AxisStrategy

BUCKET_BYTES = 32 << 20
"""Tensors travel together up to this size (of the whole local tensor); DDP's default is 25 MB."""

NOTE = "nothing overlaps"


def overlap(
    program: Program,
    *,
    strategies: Sequence[AxisStrategy],
    memory_limit_bytes: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    peak_bytes: Callable[[Program], float] | None = None,
) -> Program:
    """Fill buckets, and start them early where memory allows.

    peak_bytes: what a rank holds at most in a step of a program whose overlap is decided (`step_memory.py`); None: the
    placement's peak, and beside it all that is in flight.
    """
    builder = _Buckets(program, strategies, bucket_bytes)
    regions = {region.name: replace(region, transfers=builder.of_region(region)) for region in program.regions}
    program = program.with_regions(regions, shared=tuple(builder.shared()))
    extra = in_flight_bytes(program)
    at_end = any(strategy.reduces == "at_end" for strategy in strategies)
    if program.overlap is not None:  # decided before: the program of a saved plan
        fits = program.overlap.prefetch
    elif memory_limit_bytes is None:
        fits = True
    elif peak_bytes is not None:
        fits = peak_bytes(replace(program, overlap=Overlap(True, at_end, extra))) <= memory_limit_bytes
    else:
        peak = program.result.peak_bytes if program.result is not None else 0.0
        fits = peak + extra <= memory_limit_bytes
    notes = tuple(note for note in program.notes if not note.startswith(NOTE))
    if extra and not fits:
        notes += (f"{NOTE}: {extra / 2**20:.4g} MiB more in flight would not fit the memory limit",)
    beside = any(is_beside(lowered) for region in program.regions for lowered in region.lowered.values())
    return replace(program, overlap=Overlap(fits, at_end, extra if fits else 0, beside), notes=notes)


class _Buckets:
    def __init__(self, program: Program, strategies: Sequence[AxisStrategy], bucket_bytes: int) -> None:
        self.program, self.strategies, self.bucket_bytes = program, strategies, bucket_bytes
        hardware = program.on_mesh.hardware
        # The latency of what is in flight hides behind the compute; its launch does not. A copy reads and writes.
        self.alone_bytes = min(bucket_bytes, hardware.collective_launch_s * hardware.memory_bandwidth_bytes_per_s / 2)
        self.many = shared_names(program)
        self.gathered_once = {v.name for v in program.variables if v.name in self.many and self._needs_gather(v)}

    def of_region(self, region: Region) -> dict[str, tuple[Bucket, ...]]:
        _, call = next(self.program.calls_of(region.name))
        slots = [(i, self.program.variable(name)) for i, name in enumerate(call.slots)]
        own = [(i, variable) for i, variable in slots if variable.name not in self.gathered_once]
        found = {"gather": self._pack(self._gathers(own))}
        if "backward" in region.lowered:
            again = [(i, v) for i, v in own if reads_in_backward(region, i) or self.gathers_all(v)]
            found["gather_for_backward"] = self._pack(self._gathers(again))
            trained = [(i, v) for i, v in slots if region.slots[i].trainable and v.name not in self.many]
            found["reduce"] = self._in_place(region, self._pack(self._reductions(trained)))
        return found

    def _in_place(self, region: Region, buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        """Single gradients that are reduced where they are: fresh results that nothing else reads."""
        adds_up = self.program.microbatches > 1 or self.program.pipeline is not None
        if adds_up or any(strategy.reduces == "at_end" for strategy in self.strategies):
            return buckets
        output = next(node for node in region.lowered["backward"].graph.nodes if node.op == "output")
        trained = [i for i, slot in enumerate(region.slots) if slot.trainable]
        results = list(output.args[0])
        # Two parameters may have one gradient: the output is one user of a value however often it gives it.
        fresh = {i for i, x in zip(trained, results, strict=False) if results.count(x) == 1 and _is_fresh(x)}
        return tuple(
            replace(b, owned=True) if len(b.moves) == 1 and _reduces_first(b) and b.moves[0].slot in fresh else b
            for b in buckets
        )

    def shared(self) -> Iterator[SharedParameter]:
        for variable in self.program.variables:
            if variable.name in self.many:
                gather = next(iter(self._gathers([(0, variable)])))[0]
                reduce = next(iter(self._reductions([(0, variable)])))[0] if variable.trainable else None
                yield SharedParameter(variable.name, gather if variable.name in self.gathered_once else None, reduce)

    def _needs_gather(self, variable: Variable) -> bool:
        layout = self.layout(variable)
        return layout is not None and (layout.stored != layout.compute or variable.stored_dtype != variable.type.dtype)

    def layout(self, variable: Variable) -> ParameterLayout | None:
        return self.program.placed.parameters.get(variable.name)

    def gathers_all(self, variable: Variable) -> bool:
        """Whether an axis gathers this parameter for the backward whether or not it is read there."""
        layout = self.layout(variable)
        return layout is not None and any(
            strategy.regather == "all" and held != compute
            for strategy, held, compute in zip(self.strategies, layout.held, layout.compute, strict=True)
        )

    def _steps(self, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        steps = redistribution_steps(source, target, self.program.on_mesh.sizes)
        assert steps is not None, f"no way from {source} to {target}"
        return steps

    def _gathers(self, slots: Iterable[tuple[int, Variable]]) -> Iterator[tuple[Bucket, Variable, Sharding]]:
        for index, variable in slots:
            layout = self.layout(variable)
            assert layout is not None
            kept = self._steps(layout.stored, layout.held)
            steps = kept + self._steps(layout.held, layout.compute)
            yield Bucket(_chain(steps), (Move(index, steps),), len(kept)), variable, layout.compute

    def _reductions(self, slots: Iterable[tuple[int, Variable]]) -> Iterator[tuple[Bucket, Variable, Sharding]]:
        for index, variable in slots:
            layout = self.layout(variable)
            assert layout is not None
            steps = self._steps(layout.gradient, layout.stored)
            yield Bucket(_chain(steps), (Move(index, steps),)), variable, layout.gradient

    def _pack(self, singles: Iterable[tuple[Bucket, Variable, Sharding]]) -> tuple[Bucket, ...]:
        """Buckets of one chain and dtype, in the order of their first slots."""
        packed: list[Bucket] = []
        open_: dict[tuple[object, ...], tuple[int, int]] = {}
        for single, variable, largest in singles:
            size = local_bytes(self.program, variable, largest, variable.type.dtype)
            key = (single.chain, single.keep, variable.type.dtype)
            place, filled = open_.get(key, (-1, 0))
            if single.chain and size >= self.alone_bytes:
                packed.append(single)
            elif place >= 0 and (not single.chain or filled + size <= self.bucket_bytes):
                packed[place] = replace(packed[place], moves=packed[place].moves + single.moves)
                open_[key] = (place, filled + size)
            else:
                packed.append(single)
                open_[key] = (len(packed) - 1, size)
        return tuple(packed)


_FRESH = frozenset(
    {
        torch.ops.autopar.linear_grad_weight.default,
        torch.ops.autopar.embedding_grad.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.sum.dim_IntList,
    }
)


def _is_fresh(value: object) -> bool:
    """Whether a region's result, or what it is a view of, was allocated for it alone."""
    while isinstance(value, fx.Node) and len(value.users) == 1:
        if value.target in _FRESH:
            return True
        if not is_view(value) or len(value.all_input_nodes) != 1:
            return False
        value = value.all_input_nodes[0]
    return False


def _reduces_first(bucket: Bucket) -> bool:
    return bool(bucket.chain) and bucket.chain[0][0] == "all_reduce"


def _chain(steps: Sequence[Step]) -> tuple[tuple[str, int], ...]:
    return tuple((step.kind, step.axis) for step in steps)


def in_flight_bytes(program: Program) -> int:
    """The most that prefetched parameters and gradients under way hold beside those of the call that computes."""
    most = 0
    for region in program.regions:
        _, call = next(program.calls_of(region.name))
        gathered = sum(_bucket_bytes(program, call, each, "compute") for each in region.transfers["gather"])
        reduced = sum(_bucket_bytes(program, call, each, "gradient") for each in region.transfers.get("reduce", ()))
        most = max(most, gathered + reduced)
    return most


def _bucket_bytes(program: Program, call: Call, bucket: Bucket, which: str) -> int:
    if not bucket.chain:
        return 0
    total = 0
    for move in bucket.moves:
        variable = program.variable(call.slots[move.slot])
        sharding = getattr(program.placed.parameters[variable.name], which)
        total += local_bytes(program, variable, sharding, variable.type.dtype)
    return total
