"""Programs over memory of their own, without a device: what is written in place, what is copied, what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.base.codes import STORAGES
from autopar.operators import cache_write, rotary_write
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


class _Called(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("storage", ["", "int4"])
def test_a_token_is_written_where_its_cache_lies(storage: str, turns: bool) -> None:
    """Breaks if caches that are written with a rotary embedding are copied, or one is written in place of another."""
    torch.manual_seed(0)
    parts = {"q": (2, 4), "k": (2, 2), "v": (2, 2)}
    inputs = {name: torch.randn(*shape, 1, 8) for name, shape in parts.items()}
    inputs |= {name: torch.randn(2, 1, 8) for name in ("cos", "sin")}
    numbers = {name: torch.randn(2, 2, 6, 8) for name in ("keys", "values")}
    states = dict(numbers)
    if storage:
        coded = {name: STORAGES[storage].encode(x) for name, x in numbers.items()}
        states = {name: codes for name, (codes, _) in coded.items()}
        states |= {f"{name.removesuffix('s')}_scales": scales for name, (_, scales) in coded.items()}
    names = list(states)

    def program(given: dict[str, Tensor]) -> list[Tensor]:
        scales = [given[name] for name in names[2:]]
        caches = (given["keys"], given["values"], given["at"], *scales)
        tables = (given["cos"], given["sin"])
        if not turns:
            return list(cache_write(given["k"], given["v"], *caches, storage=storage))
        return list(rotary_write(given["q"], given["k"], given["v"], *tables, *caches, storage=storage))

    inputs["at"] = torch.tensor([0])
    with StateUses(states) as uses:
        program({**inputs, **states})
    assert uses.only_written() == set(names)
    places = {name: place + turns for place, name in enumerate(names)}
    graph = Graph(program, {**inputs, **states}, places, uses.only_written(), [], on_the_same_memory)
    with _Called() as called:
        graph({**inputs, **states})
    name = "rotary_write" if turns else "cache_write"
    assert f"autopar.{name}_.default" in called.names and f"autopar.{name}.default" not in called.names
    memory = {name: graph.memory[name].data_ptr() for name in names}
    for at in range(3):
        own = {**inputs, "at": torch.tensor([at]), **states}
        want = program({name: x.clone() for name, x in own.items()})
        found = graph(own)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
        states = {name: found[place] for name, place in places.items()}
        assert {name: x.data_ptr() for name, x in states.items()} == memory
