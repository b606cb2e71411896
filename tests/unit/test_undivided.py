"""Batches of which the axes do not divide the rows."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.api.added_rows import even, rows_of
from autopar.api.additions import Additions
from autopar.api.stored import pins_of
from autopar.api.undivided import Undivided
from autopar.base.errors import AutoparError
from autopar.base.huggingface import caches
from autopar.cli.models import catalogue
from autopar.ir.sharding import REPLICATE, Shard
from autopar.strategies.context import SequenceDoesNotDivide
from autopar.strategies.names import Pin, by_name
from tests.unit.runtime.saved_run import one_rank as one_rank


class Net(nn.Module):
    """A loss that is a mean over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(self.norm(x)) - y).square().mean()


def batch(rows: int) -> dict[str, Tensor]:
    """A batch of `Net`."""
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows, 4)}


def mesh(text: str) -> autopar.Mesh:
    """A mesh of CPUs."""
    return autopar.Mesh.parse(text, hardware="cpu")


@pytest.mark.parametrize(
    ("axes", "strategy", "rows", "left"),
    [
        ("dp=2", "ddp", 4, ()),
        ("dp=2", "zero3", 3, (("dp", 2),)),
        ("dp=2,fsdp=2", "zero3", 6, (("fsdp", 2),)),
        ("dp=4,fsdp=2", "zero3", 2, (("dp", 4),)),
        ("dp=2,tp=4", {"dp": "ddp", "tp": "tensor"}, 3, (("dp", 2),)),
        ("dp=2,tp=4", "auto", 3, ()),
        ("pp=2,dp=2", {"pp": "1f1b", "dp": "ddp"}, 3, (("dp", 2),)),
    ],
)
def test_axes_that_do_not_split_a_batch(axes: str, strategy: Any, rows: int, left: object) -> None:
    """Breaks if an axis that divides what others leave counts as one that does not, or one that splits no rows."""
    assert Undivided.of(None, strategy, mesh(axes), None).left(batch(rows)) == left


def test_pieces_are_of_what_is_named_and_of_the_first_plan() -> None:
    """Breaks if a first batch that does not divide gets no rows, or if one that goes in parts gets some."""
    assert Undivided.of(None, "zero3", mesh("dp=2,fsdp=2"), None).pieces_by(None) == 4
    assert Undivided.of(None, "zero3", mesh("dp=2,fsdp=2"), 2).pieces_by(None) == 1
    plan = autopar.plan(nn.Linear(4, 4), mesh("dp=2"), example_inputs=(torch.randn(4, 4),), strategy="ddp")
    assert Undivided.of(None, "auto", mesh("dp=2"), None).pieces_by(plan.interface) == 2
    assert Undivided.of(plan, "auto", mesh("dp=2"), None).left(batch(3)) == (("dp", 2),)


@pytest.mark.moderate
def test_one_prompt_is_whole_where_nothing_is_trained() -> None:
    """Breaks if an input of fewer rows than ranks is refused where nothing is trained, or nobody hears what it costs;
    or if a plan for training takes it without being asked.
    """
    model = Net().eval()
    plan = autopar.plan(model, mesh("dp=2"), example_inputs=batch(3), strategy="zero3", inference=True)
    assert plan.verify().ok
    assert any(
        "input x f32[3, 4] is whole on every rank of dp: its 3 rows do not divide" in each for each in plan.notes
    )
    with pytest.raises(AutoparError, match="a batch of 3 cannot split over dp=2"):
        autopar.plan(model, mesh("dp=2"), example_inputs=batch(3), strategy="zero3")


@pytest.mark.moderate
@pytest.mark.parametrize(("axes", "rows", "split"), [("dp=2", 3, set()), ("dp=2,fsdp=2", 6, {"dp"})])
def test_pins_keep_a_batch_whole_in_training(axes: str, rows: int, split: set[str]) -> None:
    """Breaks if a gradient of rows that every rank has is summed over them, or an axis that divides splits nothing."""
    whole = Undivided.of(None, "zero3", mesh(axes), None)
    pins = whole.pins(batch(rows))
    assert {pin.pattern for pin in pins} == {"x", "y"}
    assert all(placement == REPLICATE for pin in pins for _, placement in pin.placements)
    plan = autopar.plan(Net(), mesh(axes), example_inputs=batch(rows), strategy="zero3", constraints=pins)
    assert plan.verify().ok
    names = [name for name, _ in plan.mesh.axes]
    for each in plan.interface.inputs:
        assert {name for name, p in zip(names, each.sharding, strict=True) if p != REPLICATE} == split


@pytest.mark.parametrize("strategy", ["tensor+sequence", "ring", "ulysses", "allgather_kv"])
def test_a_sequence_that_does_not_divide_is_whole(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if parameters lie elsewhere for it, other axes do something else, or nobody hears of it."""
    axis = "tp" if strategy.startswith("tensor") else "cp"
    over, asked = mesh(f"dp=2,{axis}=2"), {"dp": "ddp", axis: strategy}
    undivided = Undivided.of(None, asked, over, None)
    assert undivided.kind({"x": torch.zeros(4, 12)}) != undivided.kind({"x": torch.zeros(4, 11)})
    assert undivided.kind({"x": torch.zeros(4, 11)}) == undivided.kind({"x": torch.zeros(4, 7)})
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(options["strategy"])
        if len(made) == 1:
            raise SequenceDoesNotDivide("the sequence cannot split")
        return "a plan"

    options = {"example_inputs": batch(4), "constraints": (), "strategy": asked}
    found: Any = undivided.planned(over, options, make)
    assert found == "a plan"
    assert made[1]["dp"] is by_name("ddp")
    assert made[1][axis] is by_name("tensor" if axis == "tp" else f"{strategy}:whole")
    assert made[1][axis].parameters == by_name(strategy).parameters
    (text,) = caplog.messages
    assert "Each of its ranks computes all of it" in text


@pytest.mark.parametrize(
    ("axes", "strategy", "rows", "number"),
    [
        ("dp=1", "ddp", 8, 4),
        ("dp=1", "ddp", 6, 3),
        ("dp=1", "ddp", 5, 1),
        ("dp=2", "ddp", 4, 2),
        ("dp=2", "ddp", 3, 3),
        ("pp=2", "pipeline(1f1b)", 6, 3),
        ("pp=2,dp=2", {"pp": "pipeline(gpipe)", "dp": "zero2"}, 12, 3),
        ("pp=2", "pipeline(interleaved)", 6, 3),
        ("pp=2", "pipeline(dualpipev)", 6, 6),
    ],
)
def test_later_batches_go_through_in_fewer_microbatches(axes: str, strategy: Any, rows: int, number: int) -> None:
    """Breaks if the last batch of an epoch is refused, in a number that its schedule does not take, or that leaves no
    row for an axis.
    """
    options = {"microbatches": 4, "example_inputs": batch(rows), "strategy": strategy}
    assert Undivided.of(None, strategy, mesh(axes), 4).microbatches(options, mesh(axes)) == number


def test_a_compiled_model_takes_a_batch_that_microbatches_do_not_divide(one_rank: None) -> None:
    """Breaks if the last batch of an epoch is refused where a number of microbatches was asked for."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    compiled: Any = autopar.compile(
        copy.deepcopy(model), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), strategy="ddp", microbatches=2,
        loss=lambda outputs, given: outputs.square().mean(),
    )  # fmt: skip
    for rows in (4, 3):
        x = torch.randn(rows, 3)
        found: Any = compiled.train_step(x)
        torch.testing.assert_close(found[0].detach(), model(x).square().mean().detach())


@pytest.mark.parametrize("stored", [True, False])
def test_axes_are_the_solvers_where_a_strategy_cannot_do_without_rows(stored: bool) -> None:
    """Breaks if other axes are the solver's as well, parameters that lie nowhere yet are laid as nobody asked, or what
    is said is of the last attempt.
    """
    over, asked = mesh("dp=2,ep=2"), {"dp": "zero3", "ep": "expert"}
    tried: list[Any] = []

    def make(**options: Any) -> Any:
        tried.append(options["strategy"])
        if len(tried) == 1 or not stored:
            raise AutoparError(f"attempt {len(tried)}")
        return "a plan"

    constraints = [Pin("weight", (("ep", REPLICATE),), taken=stored)]
    options = {"example_inputs": batch(6), "constraints": constraints, "strategy": asked}
    planned = Undivided.of(None, asked, over, None).planned
    if stored:
        found: Any = planned(over, options, make)
        assert found == "a plan"
        assert tried == [asked, {"dp": by_name("zero3"), "ep": by_name("auto")}]
    else:
        with pytest.raises(AutoparError, match="attempt 1"):
            planned(over, options, make)
        assert tried == [asked]
    with pytest.raises(AutoparError, match="attempt 1"):  # of what divides nothing else is tried
        tried = []
        planned(over, {**options, "example_inputs": batch(4)}, make)


@pytest.mark.moderate
def test_tokens_that_no_axis_splits_find_their_experts() -> None:
    """Breaks if a batch that does not divide is wrong, or refused, where experts lie on the ranks of one axis; or if a
    plan for generate() says other than compile does.
    """
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 64, (2, 8))
    over = mesh("ep=2")
    first = autopar.plan(model, over, example_inputs={"input_ids": ids, "labels": ids}, strategy="zero3+expert")
    odd = {"input_ids": ids[:1], "labels": ids[:1]}
    options = {"example_inputs": odd, "constraints": pins_of(first.interface), "strategy": "zero3+expert"}
    undivided = Undivided.of(None, "zero3+expert", over, None)
    plan = undivided.planned(over, options, partial(autopar.plan, model, over))
    assert plan.verify().ok
    wanted = autopar.Generation(batch=1, prompt=5, new_tokens=3)
    generated = autopar.plan_generation(model.eval(), over, wanted, strategy="expert")
    assert all(
        each.decisions.placement.parameters["model.layers.0.mlp.experts.down_proj"].stored == (Shard(0),)
        for each in generated
    )
    generated.verify().raise_on_failure()
    with pytest.raises(AutoparError, match="ep=2, which does not divide these"):
        autopar.plan(model, over, example_inputs={"input_ids": ids[:1, :5]}, strategy="expert", inference=True)


def test_batches_that_divide_are_planned_for_before_one_that_does_not() -> None:
    """Breaks if parameters lie as a batch has them that no axis splits, or what has other dims is made longer."""
    given = {"x": torch.zeros(3, 4), "y": [torch.zeros(3), torch.zeros(5, 3)], "flag": True}
    found = even(given, 2)
    assert found is not None
    assert (found["x"].shape, found["x"].device.type) == ((4, 4), "meta")
    assert [each.shape for each in found["y"]] == [(4,), (5, 3)] and found["flag"] is True
    assert even(given, 3) is None and even(given, 1) is None


@pytest.mark.moderate
def test_nothing_is_added_to_caches() -> None:
    """Breaks if each call makes a longer copy of a cache, of which parts are cut off again."""
    model = catalogue.load("gpt2", tiny=True, batch=(2, 8), device="cpu").model.eval()
    cache = caches.new_cache(model, 3, 8, torch.device("cpu"))
    given = {"input_ids": torch.ones(3, 2, dtype=torch.long), "past_key_values": cache}
    assert rows_of(given) == 3
    assert Additions(model, None, None, lambda net: net).rows(given, 2, lambda find: find(), training=False) is None


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["tensor+sequence", "ring"])
def test_what_is_not_trained_may_have_any_length(strategy: str) -> None:
    """Breaks if a token, a sequence of one, is refused under a strategy that splits a prompt's; or if training has a
    slip in a length computed whole on each rank.
    """
    loaded = catalogue.load("gpt2", tiny=True, batch=(2, 11), device="cpu")
    given: dict[str, Any] = {"example_inputs": {"input_ids": loaded.batch["input_ids"]}, "strategy": strategy}
    plan = autopar.plan(loaded.model.eval(), mesh("cp=2"), inference=True, **given)
    assert plan.verify().ok
    with pytest.raises(AutoparError, match="the sequence cannot split over cp=2"):
        autopar.plan(loaded.model.train(), mesh("cp=2"), **given)


def test_the_price_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if nobody hears that ranks compute the same, or everybody does with each batch."""
    whole = Undivided.of(None, "zero3", mesh("dp=2,fsdp=2"), None)
    with caplog.at_level(logging.WARNING, "autopar"):
        whole.tell(batch(4))
        assert not caplog.messages
        for _ in range(2):
            whole.tell(batch(3))
    (text,) = caplog.messages
    assert "3 rows do not divide over dp=2 × fsdp=2" in text and "4 times the work" in text


class Several(nn.Module):
    """Takes images one by one, each with labels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: list[Tensor], y: list[Tensor]) -> Tensor:
        rows = torch.stack([self.linear(image).mean(0) for image in x])
        return (rows * torch.stack([each.sum() for each in y])[:, None]).square().sum()


def test_inputs_of_unlike_rows_are_whole_together() -> None:
    """Breaks if an input whose own rows an axis divides is split where those of the others keep the batch whole."""
    given = {"x": [torch.randn(3, 4) for _ in range(3)], "y": [torch.randn(n) for n in (1, 2, 3)]}
    pins = Undivided.of(None, "zero3", mesh("dp=2"), None).pins(given)
    plan = autopar.plan(Several(), mesh("dp=2"), strategy="zero3", example_inputs=given, constraints=pins)
    assert plan.verify().ok


def test_a_frozen_bias_that_no_axis_divides() -> None:
    """Breaks if the step's memory counts the gradient of a parameter that has none: a teacher beside its student, a
    frozen head of seven classes, were refused under `zero3`.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7).requires_grad_(False))
    given = {"input": torch.randn(4, 4)}
    assert autopar.plan(model, mesh("dp=2"), strategy="zero3", example_inputs=given).verify().ok


class Codebooks(nn.Module):
    """Rows of four codebooks each beside one another, as of music: they are taken apart in fours."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        codes = ids.reshape(-1, 4, ids.shape[-1])
        return self.linear(sum(self.table(codes[:, k]) for k in range(4))).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_rows_that_two_axes_divide_but_not_together_are_gathered(strategy: str) -> None:
    """Breaks if 8 rows in fours, of which each axis of 2 × 2 gets whole ones by itself, are refused on both."""
    ids = torch.randint(0, 32, (8, 6))
    with pytest.warns(UserWarning, match=r"needs all rows of the batch: it is computed whole on every rank"):
        plan = autopar.plan(Codebooks(), mesh("dp=2,tp=2"), example_inputs={"ids": ids}, strategy=strategy)
    assert plan.verify().ok
