"""Which rank holds which part: ranges agree with how the runtime cuts tensors, and with what a plan says."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.runtime.pieces import piece_of, take
from autopar.views.holds import Holding, RankContents, Split, ranks_text


@pytest.fixture(scope="module")
def plan() -> Plan:
    loaded = catalogue.load("mlp", tiny=True, batch=(8, 1))
    mesh = autopar.Mesh({"dp": 2, "tp": 2}, hardware="h100")
    strategy = {"dp": "zero3", "tp": "tensor"}
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)


def holding(shape: tuple[int, ...], splits: list[Split]) -> Holding:
    mesh = autopar.Mesh([(split.axis, split.size) for split in splits], hardware="h100")
    return Holding("x", "parameter", "", shape, 4, tuple(splits), mesh)


@st.composite
def holdings(draw: st.DrawFn) -> Holding:
    """Up to three axes on two dims; dims in stripes divide, others need not."""
    splits = []
    for axis in range(draw(st.integers(1, 3))):
        size, dim = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([None, 0, 1]))
        outer = draw(st.sampled_from([1, 1, 2, 4])) if dim is not None else 1
        zigzag = outer > 1 and draw(st.booleans())
        splits.append(Split(f"a{axis}", size, dim, outer, zigzag))
    shape = []
    for dim in range(2):
        own = [split for split in splits if split.dim == dim]
        even = math.prod(split.size * split.outer for split in own)
        uneven = all(split.outer == 1 for split in own)
        shape.append(draw(st.integers(1, 40)) if uneven else even * draw(st.integers(1, 2)))
    return holding((shape[0], shape[1]), splits)


@given(holdings())
def test_ranges_are_what_the_runtime_cuts(found: Holding) -> None:
    """Breaks if splits apply in another order, stripes are dealt otherwise, or uneven pieces are cut elsewhere."""
    for rank in range(found.mesh.num_devices):
        place = found.mesh.coordinates(rank)
        for dim, length in enumerate(found.shape):
            left = torch.arange(length)
            uneven = all(split.outer == 1 for split in found.splits if split.dim == dim)
            for split in (split for split in found.splits if split.dim == dim):
                if uneven:
                    left = left.narrow(0, *piece_of(len(left), split.size, place[split.axis]))
                else:
                    left = take(left, split.size, place[split.axis], 0, split.outer, split.zigzag)
            ranges = found.ranges(rank)
            assert list(itertools.chain(*(range(*each) for each in ranges[dim]))) == left.tolist()


def test_every_element_has_as_many_holders_as_copies(plan: Plan) -> None:
    """Breaks if a part of a parameter is on no rank, or bytes of ranks do not add up to the plan's."""
    for name in ("layers.0.up.weight", "layers.*.down.weight", "classifier.weight"):
        found: Any = plan.holds(name)
        copies = math.prod(split.size for split in found.splits if split.dim is None)
        whole = math.prod(found.shape) * found.itemsize
        assert sum(found.num_bytes(rank) for rank in range(plan.mesh.num_devices)) == whole * copies
    contents: Any = plan.holds(rank=3)
    assert isinstance(contents, RankContents) and contents.num_bytes == plan.cost.memory.parameters


def test_boxes_show_ranks_and_indices(plan: Plan) -> None:
    """Breaks if the drawing loses the ranks, the index ranges, or what each axis does."""
    text = str(plan.holds("layers.0.up.weight"))
    assert "f32[" in text and "dp: cuts dim 1 into 2 pieces" in text and "tp: cuts dim 0 into 2 pieces" in text
    box = text[text.index("┌") - 80 :]
    assert all(f" {rank} " in box for rank in range(4)) and "0–15" in box
    assert text.count("┌") == 1 and "┼" in text


def test_large_meshes_are_drawn_in_part() -> None:
    """Breaks if a dim in thousands of pieces becomes thousands of lines."""
    found = holding((4096, 64), [Split("dp", 512, 0), Split("tp", 8, 1)])
    lines = found.boxes()
    assert len(lines) < 20 and any("…" in line for line in lines) and "4088–4095" in "\n".join(lines)
    assert found.ranges(0) == (((0, 8),), ((0, 8),)) and found.ranges(4095) == (((4088, 4096),), ((56, 64),))


def test_data_and_errors(plan: Plan) -> None:
    """Breaks if the data loses ranks, or a wrong name, rank or use is not said plainly."""
    found: Any = plan.holds("layers.0.up.weight")
    data = found.to_dict()
    assert len(data["ranks"]) == 4 and data["lies"] == found.text
    with pytest.raises(AutoparError, match="nothing in the plan is called 'nope'"):
        plan.holds("nope")
    with pytest.raises(AutoparError, match="Rank 9 is not in the mesh"):
        plan.holds(rank=9)
    with pytest.raises(AutoparError, match="takes a name or a rank"):
        plan.holds()
    with pytest.raises(AutoparError, match="Rank 4 is not in the mesh"):
        found.ranges(4)


def test_runs_of_ranks() -> None:
    """Breaks if runs and steps of ranks read otherwise."""
    assert ranks_text([0, 1, 2, 3, 8]) == "0–3, 8"
    assert ranks_text([0, 2, 4, 6]) == "0, 2 … 6"
    assert ranks_text([5]) == "5"


@pytest.mark.slow
def test_a_pipeline_says_which_stages_hold_it() -> None:
    """Breaks if ranks of other stages are said to hold a parameter."""
    loaded = catalogue.load("gpt2", tiny=True)
    mesh = autopar.Mesh.parse("pp=2,dp=2", hardware="h100")
    plan = autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, strategy={"pp": "pipeline(1f1b)", "dp": "zero3"},
        microbatches=2,
    )  # fmt: skip
    pipeline, found = plan.interface.pipeline, plan.holds("transformer.ln_f.weight")
    assert pipeline is not None and "transformer.ln_f.weight" in pipeline.stages[-1].parameters
    assert isinstance(found, Holding) and found.stages == (1,)
    assert found.ranges(0) is None and found.ranges(2) is not None
    assert "on the ranks with pp = 1" in str(found)
