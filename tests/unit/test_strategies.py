"""Names of strategies: what each axis gets, what is refused, and that saved plans bring the same ones back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import ALLGATHER_KV, CONTEXT, RING, ULYSSES
from autopar.strategies.names import (
    AUTO,
    DDP,
    HSDP_ACROSS,
    HSDP_INSIDE,
    STRATEGIES,
    TENSOR,
    TENSOR_2D,
    TENSOR_SEQUENCE,
    ZERO3,
    Pin,
    Pins,
    Strategy,
    by_name,
    describe,
    is_context_axis,
    is_tensor_axis,
    parse,
    resolve,
)

MESHES = {
    text: Mesh.parse(text, hardware="cpu")
    for text in ("dp=2", "tp=2", "dp=2,tp=2", "a=2,b=2", "tp0=2,tp1=2", "node=2,dp=2,tp=2", "dp=2,tp0=2,tp1=2",
                 "cp=2", "dp=2,cp=2", "cp=2,tp=2", "cp0=2,cp1=2")
}  # fmt: skip


def expected(name: str, axes: tuple[str, ...]) -> tuple[AxisStrategy, ...] | None:
    """By the rules of `resolve`'s docstring, written down a second time; None for an error."""
    strategy = STRATEGIES[name]
    own = "cp" if strategy in CONTEXT else "tp"
    tensor_axes = [axis for axis in axes if axis.startswith(own)]
    if name == "hsdp":
        return (*[HSDP_ACROSS] * (len(axes) - 1), HSDP_INSIDE) if len(axes) > 1 else None
    if (name.startswith("tensor") or strategy in CONTEXT) and tensor_axes:
        served: list[AxisStrategy] = [strategy if axis in tensor_axes else DDP for axis in axes]
    elif strategy.experts == "exchange":
        own = [axis for axis in axes if not axis.startswith("tp")] or list(axes)
        data = STRATEGIES[name.removesuffix("+expert") if "+" in name else "ddp"]
        served = [strategy if axis == own[-1] else data for axis in axes]
    else:
        served = [strategy] * len(axes)
    if name == "tensor2d" and sum(each is TENSOR_2D for each in served) != 2:
        return None
    if sum(each is RING for each in served) > 1:
        return None
    return tuple(served)


@pytest.mark.parametrize("text", MESHES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_name_on_every_mesh(name: str, text: str) -> None:
    """Breaks if a name serves other axes than it says, or too few axes are no error."""
    mesh = MESHES[text]
    wanted = expected(name, mesh.axis_names)
    if wanted is None:
        message = "cannot both be rings" if name == "ring" else f"{name} takes two axes, the mesh gives it"
        with pytest.raises(AutoparError, match=message):
            resolve(name, mesh)
        return
    found = resolve(name, mesh)
    assert found == wanted
    assert tuple(by_name(each.name) for each in found) == found
    if len(set(found)) == 1 or name == "hsdp":
        assert describe(found, mesh) == ("zero3" if name == "fsdp" else name)


def test_one_axis_exchanges_experts() -> None:
    """Breaks if two axes are to have experts and to send tokens to them: their numbers would be of two splits."""
    mesh = Mesh.parse("dp=2,ep=2", hardware="cpu")
    assert [each.name for each in resolve("zero3+expert", mesh)] == ["zero3", "zero3+expert"]
    assert [each.name for each in resolve("expert+sum", mesh)] == ["ddp", "expert+sum"]
    for second in ("zero3+expert", "expert+sum"):
        with pytest.raises(AutoparError, match="experts are exchanged over one axis, not over dp and ep"):
            resolve({"dp": "expert", "ep": second}, mesh)


def test_mappings() -> None:
    """Breaks if axes that a mapping leaves out are not `auto`, or parts of one strategy cannot be mixed with others."""
    three = MESHES["node=2,dp=2,tp=2"]
    assert resolve({"dp": "zero3"}, three) == (AUTO, ZERO3, AUTO)
    assert resolve({"node": "hsdp", "dp": "hsdp", "tp": "tensor"}, three) == (HSDP_ACROSS, HSDP_INSIDE, TENSOR)
    assert resolve({"node": "tensor2d", "dp": "ddp", "tp": "tensor2d"}, three) == (TENSOR_2D, DDP, TENSOR_2D)
    assert resolve({"tp": TENSOR_SEQUENCE}, MESHES["tp=2"]) == (TENSOR_SEQUENCE,)
    assert resolve(parse("dp=zero3, tp=tensor+sequence"), MESHES["dp=2,tp=2"]) == (ZERO3, TENSOR_SEQUENCE)
    assert describe((ZERO3, TENSOR_SEQUENCE), MESHES["dp=2,tp=2"]) == "dp=zero3, tp=tensor+sequence"


def test_sequences_are_split_in_an_order_that_can_be() -> None:
    """Breaks if an axis that is to be the innermost of the sequence, or of the heads, is not, and nobody says so."""
    two, three = MESHES["cp0=2,cp1=2"], Mesh.parse("tp=2,cp0=2,cp1=2", hardware="cpu")
    assert resolve({"cp0": "ring", "cp1": "ulysses"}, two) == (RING, ULYSSES)
    assert resolve({"cp0": "ring", "cp1": "allgather_kv"}, two) == (RING, ALLGATHER_KV)
    assert resolve("ulysses", three) == (DDP, ULYSSES, ULYSSES)
    either = {"cp": "ulysses", "tp": "tensor"}
    assert resolve(either, MESHES["cp=2,tp=2"]) == resolve(either, Mesh({"tp": 2, "cp": 2}, hardware="cpu"))[::-1]
    assert resolve({**either, "tp": "tensor+sequence"}, MESHES["cp=2,tp=2"]) == (ULYSSES, TENSOR_SEQUENCE)
    assert resolve({"tp": "tensor", "cp0": "ring", "cp1": "ulysses"}, three) == (TENSOR, RING, ULYSSES)
    alone = Mesh.parse("cp0=1,cp1=2", hardware="cpu")
    assert resolve({"cp0": "ulysses", "cp1": "ring"}, alone) == (ULYSSES, RING)
    for mesh, strategy, message in (
        (two, {"cp0": "ulysses", "cp1": "ring"}, "ring must come before ulysses in the mesh"),
        (two, {"cp0": "ulysses", "cp1": "allgather_kv"}, "allgather_kv must come before ulysses"),
        (two, {"cp0": "ring", "cp1": "ring"}, "cp0 and cp1 cannot both be rings"),
        (three, {"tp": "tensor+sequence", "cp0": "ring"}, "tensor.sequence on tp must come behind ring on cp0"),
    ):
        with pytest.raises(AutoparError, match=message):
            resolve(strategy, mesh)


def test_errors_say_what_there_is() -> None:
    """Breaks if a name that is none, an axis that is none, or the wrong number of axes is guessed."""
    two = MESHES["dp=2,tp=2"]
    for strategy, message in (
        ("zero4", "unknown strategy 'zero4'. known: auto, ddp, zero1"),
        ({"ep": "ddp"}, "the strategy names axis 'ep', which the mesh does not have. mesh: dp=2 × tp=2. use dp, tp."),
        ({"dp": "hsdp"}, "hsdp takes two axes, the mesh gives it 1. mesh: dp=2 × tp=2; hsdp on dp."),
        ("tensor2d", "tensor2d takes two axes, the mesh gives it 1. mesh: dp=2 × tp=2; tensor2d on tp."),
        ("hsdp:across", "unknown strategy 'hsdp:across'"),
    ):
        with pytest.raises(AutoparError) as caught:
            resolve(strategy, two)
        assert str(caught.value).startswith(message)
    with pytest.raises(AutoparError, match=r"did you mean pipeline\? .*pp takes pipeline"):
        resolve("pipline", two)
    with pytest.raises(AutoparError, match="tensor2d takes two axes, the mesh gives it 3"):
        resolve("tensor2d", Mesh({"a": 2, "b": 2, "c": 2}, hardware="cpu"))
    with pytest.raises(AutoparError, match="is not a strategy"):
        parse("dp=zero3,tensor")


@pytest.mark.moderate
def test_a_sequence_that_does_not_divide_says_so() -> None:
    """Breaks if `tensor+sequence` falls back to `tensor` without a word."""
    loaded = catalogue.load("llama", tiny=True, device="cpu", batch=(8, 15))
    with pytest.raises(AutoparError, match=r"the sequence cannot split over tp=2 .* use a sequence length"):
        autopar.plan(loaded.model, Mesh({"tp": 2}), example_inputs=loaded.batch, strategy="tensor+sequence")


@pytest.mark.moderate
@pytest.mark.parametrize(("strategy", "message"), [
    ("ring", r"the sequence cannot split over cp=4 .* pad the sequence to 20 tokens .*or cut it to 16"),
    ("ulysses", r"the sequence cannot split over cp=4 .* pad the sequence to 20 tokens .*or cut it to 16"),
])  # fmt: skip
def test_a_sequence_that_does_not_divide_says_what_would(strategy: str, message: str) -> None:
    """Breaks if it is not said which length would do."""
    loaded = catalogue.load("llama", tiny=True, device="cpu", batch=(8, 18))
    with pytest.raises(AutoparError, match=message):
        autopar.plan(loaded.model, Mesh({"cp": 4}), example_inputs=loaded.batch, strategy=strategy)


@pytest.mark.moderate
def test_heads_that_do_not_divide_say_what_would() -> None:
    """Breaks if ulysses on more ranks than heads names no way out."""
    loaded = catalogue.load("llama", tiny=True, device="cpu", batch=(1, 32))
    with pytest.raises(AutoparError, match=r"8 heads cannot split over cp=16.*use cp=8, or strategy ring or allgather"):
        autopar.plan(loaded.model, Mesh({"cp": 16}), example_inputs=loaded.batch, strategy="ulysses")


@pytest.mark.moderate
def test_models_without_attention_are_refused() -> None:
    """Breaks if a strategy that says what attention does is taken for one that does nothing."""
    loaded = catalogue.load("mlp", tiny=True, device="cpu")
    with pytest.raises(AutoparError, match="ring splits attention, and there is none that is recognized"):
        autopar.plan(loaded.model, Mesh({"cp": 2}), example_inputs=loaded.batch, strategy="ring")


@pytest.mark.parametrize("axis", ["cp", "sp", "context", "cp0", "cp_1", "sp_x"])
def test_axes_for_sequences(axis: str) -> None:
    """Breaks if an axis that is the sequence's by name gets the data's strategy."""
    assert is_context_axis(axis) and not is_tensor_axis(axis) and not is_context_axis(f"x{axis}")


@pytest.mark.parametrize("axis", ["tp", "tensor", "model", "mp", "tp0", "tp_1", "tp12", "mp_x", "tpy", "tensorz"])
def test_axes_for_tensors(axis: str) -> None:
    """Breaks if an axis that is tensor parallelism's by name gets the data's strategy."""
    assert is_tensor_axis(axis)


@pytest.mark.parametrize("axis", ["dp", "a", "node", "tpa", "tp_", "xtp", "modelparallel", "TP", "tp0x", ""])
def test_axes_for_anything_else(axis: str) -> None:
    """Breaks if a name that only looks alike is taken for tensor parallelism's."""
    assert not is_tensor_axis(axis)


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "strategy"), [
    ("node=2,dp=2", "hsdp"), ("dp=2", "zero3+keep"), ("dp=2", "zero1"), ("dp=2,tp=2", {"dp": "zero2", "tp": "tensor"}),
])  # fmt: skip
def test_saved_plans_bring_strategies_back(mesh: str, strategy: Strategy, tmp_path: Path) -> None:
    """Breaks if part of a strategy (`hsdp:across`), a kept layout or the overlap is lost on the way through a file."""
    loaded = catalogue.load("mlp", tiny=True, device="cpu")
    plan = autopar.plan(loaded.model, Mesh.parse(mesh, hardware="cpu"), example_inputs=loaded.batch, strategy=strategy)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert json.loads(path.read_text())["format"] == 3
    again = Plan.load(path)
    assert again.strategies == plan.strategies and again.strategy == plan.strategy
    assert again.decisions == plan.decisions and again.collectives == plan.collectives
    assert again.source == plan.source and again.to_json() == plan.to_json() and str(again) == str(plan)


@given(
    st.lists(st.sampled_from(["a.b", "a.*", "a.c", "*", "b?", "b1", "[ab]1", "logits"]), max_size=8),
    st.lists(st.sampled_from(["a.b", "a.c", "b1", "logits", "a1"]), max_size=3),
)
def test_pins_by_name_are_those_that_match(patterns: list[str], names: list[str]) -> None:
    """Breaks if a pin of one name, or one with wildcards, is passed over, or comes in another place."""
    pins = [Pin(pattern, (("tp", Shard(number)),)) for number, pattern in enumerate(patterns)]
    assert Pins(pins).of(*names) == [pin for pin in pins if any(map(pin.matches, names))]
