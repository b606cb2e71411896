"""Programs that write into states where their text asks for a copy: which memory is written, and what is given."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.runtime.comm import RecordingComm
from autopar.runtime.in_place import InPlace
from autopar.runtime.loader import load_program
from autopar.runtime.repeats import Repeat

pytestmark = pytest.mark.unit

TEXT = """
import torch

from autopar import operators as ops

aten = torch.ops.aten


def split_inputs(comm, inputs):
    return inputs


def forward(comm, state, held, inputs, seed):
    at, x = inputs["at"], inputs["x"]
    first = aten.index_copy(inputs["first"], 0, at, x)
    second = aten.index_copy(inputs["second"], 0, at, x)
    return (first, second, aten.add(first.sum(0), second.sum(0))), ()


def backward(comm, state, held, saved, grads, gradients, is_last):
    return {}
"""

TOKEN = """
from autopar import operators as ops


def split_inputs(comm, inputs):
    return inputs


def forward(comm, state, held, i, seed):
    return tuple(ops.rotary_write(i["q"], i["k"], i["v"], i["cos"], i["sin"], *CACHES, storage=STORAGE)), ()


def backward(comm, state, held, saved, grads, gradients, is_last):
    return {}
"""


def inputs(at: int) -> dict[str, Tensor]:
    caches = {name: torch.zeros(4, 2) for name in ("first", "second")}
    return {**caches, "at": torch.tensor([at]), "x": torch.full((1, 2), at + 1.0)}


def test_what_is_written_is_the_memory_that_was_given() -> None:
    """Breaks if a cache is copied for every token, if one is written that somebody may hold, or if what was written in
    one call is in the next.
    """
    comm: Any = RecordingComm(("dp",), (1,), 0, "cpu")
    program = load_program(TEXT, "a test")
    run, given = InPlace(program), inputs(1)
    want = program.forward(comm, {}, {}, {name: x.clone() for name, x in given.items()}, torch.tensor(0))[0]
    first, second, total = run(comm, {}, given, 0, ["first"])
    assert all(torch.equal(*pair) for pair in zip((first, second, total), want, strict=True))
    assert first is given["first"]
    assert not given["second"].any() and second.any()
    before = given["first"].clone()
    assert run(comm, {}, {**given, "at": torch.tensor([2])}, 0, [])[0] is not given["first"]
    assert torch.equal(given["first"], before)


def test_what_an_edited_text_copies_is_handed_out() -> None:
    """Breaks if a cache is said to be written that a text copies by another name: what is new in it is lost."""
    comm: Any = RecordingComm(("dp",), (1,), 0, "cpu")
    given = inputs(1)
    text = TEXT.replace('aten.index_copy(inputs["second"]', 'torch.index_copy(inputs["second"]')
    values = InPlace(load_program(text, "a test"))(comm, {}, given, 0, ["first", "second"])
    own: Any = SimpleNamespace(_written=frozenset({"first", "second"}), states={"first": 0, "second": 1})
    same = Repeat._in_same_memory(own, values, given, {"first": "first of the script", "second": "second of it"})
    assert same == {0: "first of the script"}
    assert values[1].any() and not given["second"].any()


@pytest.mark.parametrize(("storage", "turns"), [("", True), ("int8", True), ("int8", False)])
def test_a_token_and_its_rotary_embedding_are_written_where_they_lie(storage: str, turns: bool) -> None:
    """Breaks if caches or scales of codes are copied, or one of them is given for another."""
    torch.manual_seed(0)
    given = {name: torch.randn(2, heads, 1, 8) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    given |= {name: torch.randn(2, 1, 8) for name in ("cos", "sin")}
    caches = {name: torch.randn(2, 2, 6, 8) for name in ("keys", "values")}
    order = 'i["keys"], i["values"], i["at"]'
    if storage:
        coded = {name: STORAGES[storage].encode(x) for name, x in caches.items()}
        caches = {name: codes for name, (codes, _) in coded.items()}
        caches |= {f"{name}_scales": scales for name, (_, scales) in coded.items()}
        order += ', i["keys_scales"], i["values_scales"]'
    text = TOKEN.replace("*CACHES", order).replace("STORAGE", repr(storage))
    if not turns:
        text = text.replace("rotary_write", "cache_write").replace('i["q"], ', "").replace('i["cos"], i["sin"], ', "")
    given |= {**caches, "at": torch.tensor([3])}
    comm: Any = RecordingComm(("dp",), (1,), 0, "cpu")
    program = load_program(text, "a test")
    want = program.forward(comm, {}, {}, {name: x.clone() for name, x in given.items()}, torch.tensor(0))[0]
    found = InPlace(program)(comm, {}, given, 0, list(caches))
    assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
    assert [id(each) for each in found[turns:]] == [id(x) for x in caches.values()]


class _Call:
    """What stands for a call of `generate()`."""


def test_only_what_the_call_before_made_is_written() -> None:
    """Breaks if a cache of another `generate()`, of one that is over, or one that a script made of it, is written."""
    call, other, state = _Call(), _Call(), torch.zeros(2)
    made: dict[str, Any] = {"cache": state}
    own: Any = SimpleNamespace(_written=frozenset({"cache"}), _handed=None, program=SimpleNamespace(source="a text"))

    def may(given: dict[str, Any], during: object | None) -> bool:
        return Repeat._may_write(own, given, during)

    assert not may(made, call)
    own._handed = (weakref.ref(call), {"cache": weakref.ref(state)})
    assert may(made, call)
    assert not may(made, other) and not may(made, None)
    assert not may({"cache": state.clone()}, call)
    del call
    assert not may(made, other)
