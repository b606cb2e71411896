"""Batches and outputs in classes of a script's own: taken apart, put together, written down, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import autopar
from autopar.base.errors import AutoparError
from autopar.base.torch_compat import trees


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Loss:
    loss: Tensor
    parts: dict[str, Any] = field(default_factory=dict)
    note: str = "none"


@dataclass(frozen=True, slots=True)
class Slots:
    x: Tensor
    pair: Pair


class Attributes(dict[str, Any]):
    """As configuration libraries have it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Both(dict[str, Any]):
    """Items, and an attribute beside them."""

    def __init__(self, note: Tensor, **items: Any) -> None:
        super().__init__(items)
        self.note = note


class Plain:
    """What it is made with is not what it holds; making one counts."""

    made = 0

    def __init__(self, rows: Tensor) -> None:
        type(self).made += 1
        self.double, self.size, self.dtype = rows * 2, rows.shape, rows.dtype

    class Inner:
        def __init__(self, x: Tensor) -> None:
            self.x = x


X = torch.arange(3.0)
FOUND: dict[str, tuple[Any, list[str]]] = {
    "dataclass": (Loss(X, {"a": X + 1}), ["loss", "parts.a", "note"]),
    "slots": (Slots(X, Pair(X + 1, 2)), ["x", "pair.one", "pair.other"]),
    "dict": (Attributes(loss=X, n=3), ["loss", "n"]),
    "both": (Both(X + 1, loss=X), ["loss", "note"]),
    "plain": (Plain(X), ["double", "size.0"]),
    "inner": ([Plain.Inner(X)], ["0.x"]),
    "namespace": (SimpleNamespace(x=X, y=(X, None)), ["x", "y.0", "y.1"]),
    "nested": ({"a": Loss(X, {"b": Plain(X)})}, ["a.loss", "a.parts.b.double", "a.parts.b.size.0", "a.note"]),
}


def same(one: Any, other: Any) -> bool:
    """Whether two objects hold the same, and are of the same classes."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if type(one) is not type(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    parts = [{**trees._items(each), **trees._attributes(each)} for each in (one, other)]
    return bool(one == other) if not parts[0] else all(same(parts[0][key], parts[1][key]) for key in parts[0])


@pytest.mark.parametrize("kind", FOUND)
def test_objects_are_taken_apart_and_put_together(kind: str) -> None:
    """Breaks if an attribute is lost, comes in another order than its name, or a plan cannot hold the class."""
    value, names = FOUND[kind]
    made = Plain.made
    leaves, spec = trees.tree_flatten(value)
    assert [path for path, _ in trees.tree_leaves_with_path(value)] == names
    assert all(a is b for a, (_, b) in zip(leaves, trees.tree_leaves_with_path(value), strict=True))
    text = trees.dump_treespec(spec)
    for each in (spec, trees.load_treespec(text)):
        assert same(trees.tree_unflatten(leaves, each), value)
        assert trees.output_names(each, len(leaves)) == tuple(names)
    assert Plain.made == made, "a constructor ran"


def test_attributes_that_are_items_stay_so() -> None:
    """Breaks if a dict that is its own attributes comes back as two things."""
    leaves, spec = trees.tree_flatten(Attributes(loss=X))
    again = trees.tree_unflatten(leaves, spec)
    again.more = 1
    assert again["more"] == 1 and again.loss is leaves[0]


class Later:
    """Of which this process has seen no object."""


class Deletes:
    def __del__(self) -> None:
        raise AssertionError("code ran")


class Sets:
    ran = False

    @property
    def x(self) -> int:
        type(self).ran = True
        return 1

    @x.setter
    def x(self, value: Any) -> None:
        type(self).ran = True


def written(kind: str) -> str:
    """A spec of an object with one attribute x, as a plan has it."""
    leaf = {"type": None, "context": None, "children_spec": list[Any]()}
    named = {"type": f"{__name__}.{kind}", "context": json.dumps([[], ["x"], [], {}, False]), "children_spec": [leaf]}
    return json.dumps([1, named])


def test_a_class_that_another_process_saw_is_found_by_its_name() -> None:
    """Breaks if a rank that did not trace the model cannot make its output."""
    again = trees.tree_unflatten([X], trees.load_treespec(written("Later")))
    assert type(again) is Later and vars(again) == {"x": X}


def test_a_file_runs_nothing_of_a_class() -> None:
    """Breaks if a class that a file names has its constructor, a property or a destructor run."""
    with pytest.raises(AutoparError, match="is not known in this process"):
        trees.load_treespec(written("Deletes"))
    spec = trees.load_treespec(written("Sets"))
    trees.output_names(spec, 1)
    assert vars(trees.tree_unflatten([X], spec)) == {"x": X} and not Sets.ran


def test_keys_that_no_plan_can_hold_are_named() -> None:
    """Breaks if an item of a dict comes back under another key."""
    odd: Any = Attributes(x=X)
    odd[2.5] = 1
    with pytest.raises(AutoparError, match="keys of a Attributes"):
        trees.tree_flatten(odd)


@pytest.mark.parametrize("value", [iter([X]), nn.Linear(1, 1), object(), print])
def test_others_stay_leaves(value: Any) -> None:
    """Breaks if what holds no tensors, or is a module or an iterator, is taken apart."""
    assert trees.tree_leaves([value])[0] is value


def test_distributions() -> None:
    """Breaks if a distribution that a policy returns loses its shapes."""
    for given in (Normal(X, X + 1, validate_args=False), Categorical(logits=X.expand(2, 3), validate_args=False)):
        leaves, spec = trees.tree_flatten(given)
        again = trees.tree_unflatten(leaves, trees.load_treespec(trees.dump_treespec(spec)))
        assert again.batch_shape == given.batch_shape and torch.equal(again.entropy(), given.entropy())


@dataclass
class Batch:
    x: Tensor
    target: Tensor
    names: list[str]


class Model(nn.Module):
    """Takes an object, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.GroupNorm(3, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 4)

    def forward(self, batch: Batch, scale: float = 1.0) -> Loss:
        # Turned, so that what the norm gets does not lie row by row in memory.
        hidden = self.first(self.norm(batch.x.transpose(1, 2))).mean(-1)
        found = self.last(hidden) * scale
        return Loss(nn.functional.mse_loss(found, batch.target), {"found": found})


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "auto"])
def test_a_model_of_objects_is_proven(strategy: str) -> None:
    """Breaks if a model whose batch and output are a script's own classes cannot be planned, or is another one."""
    torch.manual_seed(0)
    batch = Batch(torch.randn(4, 5, 6), torch.randn(4, 4), ["a", "b", "c", "d"])
    mesh = autopar.Mesh({"dp": 2})
    plan = autopar.plan(Model(), mesh, example_inputs={"batch": batch, "scale": 0.5}, strategy=strategy)
    assert {output.name for output in plan.interface.outputs} == {"loss", "parts.found"}
    assert plan.verify().ok
