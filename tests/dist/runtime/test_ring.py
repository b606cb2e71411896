"""Ring attention between gloo processes: equal to whole attention, and what torch.distributed is asked to send."""

from __future__ import annotations

import pytest

from autopar.operators import positions
from autopar.runtime.comm import ProcessGroupComm
from benchmarks.training.count import CollectiveCounter
from tests.dist.launch import launch
from tests.dist.runtime.work import make_mesh
from tests.unit.runtime.ring_cases import LENGTH, SEEN, Case

pytestmark = pytest.mark.dist


def ring_on_this_rank(num: int) -> list[str]:
    """Several cases on axis cp of a mesh dp, cp: what is not as it should be."""
    world = {"dp": 4 // num, "cp": num} if num < 4 else {"cp": num}
    comm, wrong = ProcessGroupComm(make_mesh(world)), []
    cases = {
        "causal, zigzag": (Case(SEEN["causal"], with_sinks=True, num_key_heads=2), 2, True, ()),
        "window": (Case({"left": 3, "right": 0}), 1, False, (0, 1)),
        "bias and dropout": (Case(SEEN["prefix"], bias_shape=(1, 4, 16, 16), dropout_p=0.3), 1, False, ()),
    }
    for name, (case, outer, zigzag, visits) in cases.items():
        with CollectiveCounter() as counter:
            found = case.on(comm, outer=outer, zigzag=zigzag, visits=visits)
        here = positions(LENGTH, (comm.index("cp"), num, outer, zigzag))
        for index, (part, whole) in enumerate(zip(found, case.whole(), strict=True)):
            if not part.allclose(whole[:, :, here], rtol=1e-12, atol=1e-12):
                wrong.append(f"rank {comm.rank}, {name}: result {index} differs")
        block = (case.k.nbytes + case.v.nbytes) // num
        moves = len(visits or range(num)) - 1
        if counter.total_bytes() != (3 * moves + 1) * block:
            wrong.append(f"rank {comm.rank}, {name}: sent {counter.total_bytes()} bytes, not {(3 * moves + 1) * block}")
    return wrong


@pytest.mark.parametrize("num", [2, 4])
def test_ring_is_attention_to_everything(num: int) -> None:
    assert [line for rank in launch(ring_on_this_rank, 4, num) for line in rank] == []
