"""What every pass writes, on the smallest model that it has something to do on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import autopar
from autopar.ir.nodes import format_target
from autopar.ir.program import Program
from autopar.ir.sharding import format_shape, format_sharding
from autopar.machine.mesh import Mesh
from autopar.passes.emit import emit
from tests.unit.passes.small import MESH, Case, SmallSequence, make, placed, sequence_batch

Golden = Callable[[str], None]


def region_text(program: Program, name: str) -> str:
    """The part of the printed program that describes one region."""
    blocks = str(program).split("\n  region ")[1:]
    found = next(block for block in blocks if block.startswith(f"{name} "))
    return "region " + found.split("\n  call ")[0]


def function_text(source: str, *names: str) -> str:
    """Some functions of a generated program."""
    blocks = [re.sub(r"^# =.*\n", "", block) for block in source.strip().replace("\n\n\n", "\n\n").split("\n\n")]
    return "\n\n".join(block for block in blocks if block.startswith(tuple(f"def {name}(" for name in names)))


def test_capture(case: Case, golden: Golden) -> None:
    """Breaks if capture changes the order of slots or inputs, loses a parameter, or takes operators apart too early."""
    golden(str(case.programs["capture"]))


def test_outline(case: Case, golden: Golden) -> None:
    """Breaks if equal blocks are no longer one region called three times, or what lies around them is cut elsewhere."""
    golden(str(case.programs["outline"]))


def test_differentiate(case: Case, golden: Golden) -> None:
    """Breaks if the backward of a block computes more, saves more, or orders its gradients differently."""
    golden(region_text(case.programs["differentiate"], "block"))


def test_annotate(case: Case, golden: Golden) -> None:
    """Breaks if an operator of the block gets another rule: other factors, sums or linear operands."""
    region = case.programs["annotate"].region("block")
    golden("\n".join(f"{name}: {rule}" for name, (_, rule) in region.ops.items()))


def test_place(case: Case, golden: Golden) -> None:
    """Breaks if Megatron's columns and rows, or where partial sums are formed, change for dp=zero3, tp=tensor."""
    golden(region_text(case.programs["place"], "block"))


def test_place_parameters(case: Case, golden: Golden) -> None:
    """Breaks if a parameter is stored, used or reduced in another layout."""
    placement = case.programs["place"].placement
    assert placement is not None
    axes = MESH.axis_names
    lines = []
    for name, layout in placement.parameters.items():
        if name.startswith(("enter", "blocks.0")):
            parts = (layout.stored, layout.compute, layout.gradient)
            lines.append(f"{name}: " + " | ".join(format_sharding(part, axes) for part in parts))
    golden("\n".join(lines))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_insert_collectives(case: Case, phase: str, golden: Golden) -> None:
    """Breaks if a collective is added, lost or moved, or a local shape is wrong."""
    lowered = case.programs["insert_collectives"].region("block").lowered[phase]
    lines = [f"inputs {', '.join(lowered.inputs)}; saves {', '.join(lowered.saved) or '-'}"]
    for node in lowered.graph.nodes:
        if "type" in node.meta and node.op != "placeholder":
            type_, sharding = node.meta["type"], node.meta["sharding"]
            shape = format_shape("", type_.shape, sharding, MESH.axis_names)
            lines.append(f"{node.name} = {format_target(node)}({', '.join(map(str, node.args))})  # {shape}")
    golden("\n".join(lines))


def test_emit_block(case: Case, golden: Golden) -> None:
    """Breaks if the text of a region's functions changes: statements, order, comments."""
    source = emit(case.programs["overlap"], strategies=case.strategies)
    golden(function_text(source, "block_gather", "block_forward", "block_reduce"))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_emit_step(case: Case, phase: str, golden: Golden) -> None:
    """Breaks if the loops over the calls change: what is gathered when, what is carried, what is saved."""
    source = emit(case.programs["overlap"], strategies=case.strategies)
    golden(function_text(source, phase))


def test_overlap(case: Case, golden: Golden) -> None:
    """Breaks if tensors of one chain of collectives no longer share a bucket, or others do."""
    program = case.programs["overlap"]
    assert program.overlap is not None
    lines = [f"prefetch {program.overlap.prefetch}, at end {program.overlap.at_end}"]
    for region in program.regions:
        for which, buckets in region.transfers.items():
            for bucket in buckets:
                chain = ", ".join(f"{kind} {MESH.axis_names[axis]}" for kind, axis in bucket.chain) or "nothing to move"
                names = ", ".join(region.slots[move.slot].name for move in bucket.moves)
                lines.append(f"{region.name} {which}: {chain}: {names}")
    golden("\n".join(lines))


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_emit_kept(strategy: str, golden: Golden) -> None:
    """Breaks if parameters are gathered more than once a step, or zero1 reduces before the backward is through."""
    case = placed(make(), strategy, Mesh({"dp": 4}, hardware="cpu"))
    source = emit(case.programs["overlap"], strategies=case.strategies)
    golden(function_text(source, "block_gather", "backward"))


@pytest.mark.moderate
def test_emit_sequence(golden: Golden) -> None:
    """Breaks if `tensor+sequence` leaves an all-reduce in a block, or gathers a value more than once."""
    case = placed(make(SmallSequence(), sequence_batch()), "tensor+sequence", Mesh({"tp": 2}, hardware="cpu"))
    source = emit(case.programs["overlap"], strategies=case.strategies)
    golden(function_text(source, "block_forward"))


@pytest.mark.moderate
def test_inference_drops_what_was_read(golden: Golden) -> None:
    """Breaks if a forward alone keeps names of values that nothing will read: they would live to its end."""
    plan = autopar.plan(SmallSequence(), MESH, example_inputs=sequence_batch(), inference=True)
    golden(function_text(plan.source, "forward"))
