"""What a plan says that each rank of a pipeline sends is what its part of the program sends."""

from __future__ import annotations

import math
from collections import Counter

import pytest

import autopar
from autopar.cli.models import catalogue
from autopar.cost.collectives import collectives
from autopar.runtime.comm import RecordingComm
from autopar.runtime.dry_run import dry_events

CASES = [
    # Both stages have the embedding, of 127 rows: a padded vocabulary, in pieces that tp may cut unevenly.
    ({"pp": 2, "tp": 2}, {"pp": "pipeline(1f1b)", "tp": "auto"}),
    # One rank has it twice, and each half of a backward gathers what it reads.
    ({"pp": 2, "dp": 2}, {"pp": "pipeline(dualpipev)", "dp": "zero3"}),
    ({"dp": 2, "pp": 4}, {"pp": "pipeline(zero_bubble)", "dp": "zero2"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), CASES)
def test_every_rank_sends_what_the_plan_says(sizes: dict[str, int], strategy: dict[str, str]) -> None:
    """Breaks if a tied gradient, a gather of a half, or a message is not counted, or is counted twice."""
    loaded = catalogue.load("gpt2", tiny=True, dropout=0.0, overrides={"n_layer": 4})
    mesh = autopar.Mesh(list(sizes.items()), hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, microbatches=4)
    assert plan.program is not None
    for rank in range(math.prod(sizes.values())):
        comm = RecordingComm(tuple(sizes), tuple(sizes.values()), rank)
        if any(comm.index(axis) for axis in sizes if axis != "pp"):
            continue  # what the plan says is the first rank's, whose pieces are the longest
        place = comm.index("pp")
        sent: Counter[tuple[str, str]] = Counter()
        said: Counter[tuple[str, str]] = Counter()
        for event in dry_events(comm, plan.interface, plan.source) or ():
            if event.kind != "receive" and event.where != "outputs":
                sent[event.kind, event.axis] += event.bytes_sent  # type: ignore[assignment]
        for row in collectives(plan.program, place):
            said[row.kind, row.axis] += row.bytes_sent  # type: ignore[assignment]
        assert sent["send", "pp"] > 0
        assert +sent == +said
