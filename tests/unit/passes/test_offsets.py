"""Where a rank's elements begin, as lowered programs compute it: against all elements, cut axis by axis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx, nn

from autopar.ir.choices import Offset
from autopar.passes.lowering import PhaseBuilder
from autopar.runtime.comm import RecordingComm

AXES, SIZES = ("dp", "cp", "tp"), (2, 3, 4)


@pytest.mark.parametrize("base", [0, 24])
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("each", [1, 5])
def test_where_a_rank_begins(base: int, axes: tuple[int, ...], each: int) -> None:
    """Breaks if axes of unequal sizes are mixed up, or a part in the middle of a dim is taken for its beginning."""
    sizes = tuple(SIZES[axis] for axis in axes)
    graph = fx.Graph()
    comm = graph.placeholder("comm")
    builder = SimpleNamespace(graph=graph, comm=comm, layouts=SimpleNamespace(axes=AXES))
    graph.output(PhaseBuilder._offset(cast(Any, builder), Offset(base, axes, sizes, each)))
    run = fx.GraphModule(nn.Module(), graph)
    whole = torch.arange(200)[base : base + each * torch.Size(sizes).numel()]
    for rank in range(24):
        here, held = RecordingComm(AXES, SIZES, rank, "cpu"), whole
        for axis in axes:
            held = held.chunk(SIZES[axis])[here.index(AXES[axis])]
        assert run(here) == int(held[0])
