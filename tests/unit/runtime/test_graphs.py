"""Programs over memory of their own, without a device: what is written in place, what is copied, what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autopar.runtime.graphs import Graph, StateUses
from tests.dist.repeats import on_the_same_memory

aten = torch.ops.aten


def _once(inputs: dict[str, Tensor]) -> list[Tensor]:
    written = aten.index_copy(inputs["cache"], 0, inputs["at"], inputs["x"])
    return [written.sum(0), written]


def _read_later(inputs: dict[str, Tensor]) -> list[Tensor]:
    written = aten.index_copy(inputs["cache"], 0, inputs["at"], inputs["x"])
    return [inputs["cache"].sum(0), written]


def _inputs(at: int) -> dict[str, Tensor]:
    return {"cache": torch.zeros(4, 2), "at": torch.tensor([at]), "x": torch.full((1, 2), at + 1.0)}


def _written(program: Callable[[dict[str, Tensor]], Sequence[Tensor]]) -> frozenset[str]:
    inputs = _inputs(0)
    with StateUses({"cache": inputs["cache"]}) as uses:
        program(inputs)
    return uses.only_written()


def test_what_is_only_written_is_written_in_place() -> None:
    """Breaks if a cache is copied for every token, or counted as read where it is not; or if what a run hands out
    beside it becomes that of the next.
    """
    assert _written(_once) == {"cache"}
    graph = Graph(_once, _inputs(0), {"cache": 1}, _written(_once), [], on_the_same_memory)
    cache, memory = torch.zeros(4, 2), graph.memory["cache"].data_ptr()
    totals: list[tuple[Tensor, Tensor]] = []
    for at in range(3):
        inputs = {**_inputs(at), "cache": cache}
        want = _once({name: x.clone() for name, x in inputs.items()})
        total, cache = graph(inputs)
        totals.append((total, want[0]))
        assert all(torch.equal(*pair) for pair in totals)
        assert torch.equal(cache, want[1])
        assert cache.data_ptr() == memory


def test_what_is_read_later_is_not_written_in_place() -> None:
    """Breaks if a program sees a state's new value where it asks for the one from before."""
    assert _written(_read_later) == frozenset()
    graph = Graph(_read_later, _inputs(0), {"cache": 1}, _written(_read_later), [], on_the_same_memory)
    cache = torch.zeros(4, 2)
    for at in range(3):
        inputs = {**_inputs(at), "cache": cache}
        want = _read_later({name: x.clone() for name, x in inputs.items()})
        total, cache = graph(inputs)
        assert torch.equal(total, want[0])
        assert torch.equal(cache, want[1])


def test_two_states_in_one_memory_are_not_written_in_place() -> None:
    """Breaks if a write into one is seen in the other."""
    whole = torch.zeros(2, 4, 2)
    with StateUses({"a": whole[0], "b": whole[1]}) as uses:
        aten.index_copy(whole[0], 0, torch.tensor([1]), torch.ones(1, 2))
    assert uses.only_written() == frozenset()


def test_what_somebody_holds_is_left_alone() -> None:
    """Breaks if a run writes into what an earlier one handed out, or if it stays plain once nobody holds it."""
    graph = Graph(_once, _inputs(0), {"cache": 1}, frozenset({"cache"}), [], on_the_same_memory)
    held = graph(_inputs(0))
    graph.hand_out(held)
    assert graph.fits({**_inputs(1), "cache": held[1]}, [])
    assert not graph.fits(_inputs(1), [])
    assert not graph.fits({**_inputs(1), "cache": held[1]}, [7])
    del held
    assert graph.fits(_inputs(1), [])
