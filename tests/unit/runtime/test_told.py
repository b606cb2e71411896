"""Numbers of Python's that differ from step to step: draws by which forward goes, and what it counts."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.api.ways import MOST_KEPT, TOLD, Ways
from autopar.base.errors import AutoparError
from autopar.passes import capture as capturing
from autopar.passes.capture import capture
from autopar.passes.told import START
from autopar.runtime.checkpoint.contents import put_numbers
from tests.unit.runtime.saved_run import one_rank as one_rank

WIDTH = 6


class Net(nn.Module):
    """Layers of which a way of going chooses some; see `forward`."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.calls, self.heat, self.is_new = 0, 1.0, True
        self.seen: dict[str, Any] = {"batches": 0, "last": []}
        self.losses: list[float] = []
        self.beside: Tensor | None = None

    def through(self, x: Tensor, *layers: nn.Module) -> Tensor:
        for layer in layers:
            x = x + torch.tanh(layer(x))
        return x


class DropsLayers(Net):
    """Of torch's draws: a number, one of a row of them, one that is filled in place, one of another distribution."""

    def forward(self, x: Tensor) -> Tensor:
        keeps = torch.rand(3).tolist()
        if torch.rand(1) < 0.5:
            x = self.through(x, self.layers[0])
        if self.training and (keeps[1] > 0.5 or torch.empty(()).uniform_(0, 2) > 1):
            x = self.through(x, self.layers[1])
        if torch.bernoulli(torch.tensor(0.5)) == 1:
            x = -x
        return self.through(x, *self.layers[: torch.randint(1, 3, (1,)).item()]).square().mean()


class DrawsInPython(Net):
    """Of Python's and NumPy's: a yes or no, a number to reckon with, which one, and in which order."""

    def forward(self, x: Tensor) -> Tensor:
        share = np.random.beta(0.4, 0.4)
        x = share * x + (1 - share) * x.flip(0)
        x = self.through(x, random.choice(self.layers), self.layers[random.randint(0, 1)])
        order = [0, 1]
        random.shuffle(order)
        x = self.through(x, *(self.layers[place] for place in order))
        return (x if np.random.rand() < 0.5 else 2 * x).square().mean() * random.uniform(1, 2)


class Counts(Net):
    """A number, one in a dict, one that cools down, and a flag."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        self.seen["batches"] += 1
        self.heat = max(0.5, self.heat * math.exp(-0.2))
        loss = F.mse_loss(self.through(x, *self.layers) / self.heat, x) * min(1.0, self.calls / 3)
        if self.is_new:
            loss, self.is_new = 3 * loss, False
        if self.calls % 2 == 0:
            loss = loss + self.layers[0](x).square().mean() / (1 + self.seen["batches"])
        return loss


class Leaves(Net):
    """A loss beside the loss, that of the last step, an average that is gone by, and what is looked at afterwards."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.through(x, *self.layers)
        loss = F.mse_loss(y, x)
        self.beside = y.square().mean()
        self.heat = 0.9 * self.heat + 0.1 * loss.item()
        self.losses.append(float(loss))
        self.seen["last"].append(loss.detach())
        loss = loss / (1 + self.heat)
        return {"loss": loss, "again": loss.detach()}


def steps(model: Any, number: int) -> list[Any]:
    """Losses of a script that steps, accumulates, and evaluates in between; what it leaves in Python; what comes next
    of the generators.
    """
    found: list[Any] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    batches = torch.randn(number, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(7)
    for place, x in enumerate(batches):
        found_now = model(x)
        loss = found_now["loss"] + 0.1 * model.beside if isinstance(found_now, dict) else found_now
        loss.backward()
        if place % 3:
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(loss.detach()))
        if place == 1:
            model.eval()
            with torch.no_grad():
                evaluated = model(x)
                found.append(float(evaluated["again"] if isinstance(evaluated, dict) else evaluated))
            model.train()
    held = [
        model.calls,
        model.heat,
        model.is_new,
        model.seen["batches"],
        *model.losses,
        *map(float, model.seen["last"]),
    ]
    return [*found, *held, torch.rand(1).item(), random.random(), np.random.rand()]


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [DropsLayers, DrawsInPython, Counts, Leaves])
def test_a_step_is_told_what_python_has_then(kind: type[Net]) -> None:
    """Breaks if a draw is not that of eager, a program goes on with the numbers of another step, an attribute is not
    what forward leaves, a layer that was left out gets a gradient, or what comes next of a generator is another number.
    """
    torch.manual_seed(0)
    model = kind()
    names = list(model.state_dict())
    compiled: Any = autopar.compile(
        copy.deepcopy(model), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), strategy="ddp"
    )
    have, want = steps(compiled, 4), steps(model, 4)
    assert have == pytest.approx(want, rel=1e-5)
    assert [type(x) for x in have] == [type(x) for x in want] and list(compiled.state_dict()) == names
    compiled.calls = model.calls = 20  # a script's own, from now on
    assert steps(compiled, 1) == pytest.approx(steps(model, 1), rel=1e-5)


class GoesByEach(Net):
    """A length that is another one in every step."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.through(sum((x * each for each in range(self.calls)), x), *self.layers).square().mean()


@pytest.mark.moderate
def test_a_number_that_needs_a_program_for_each_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if programs are made for ever, without a word."""
    monkeypatch.setattr("autopar.api.told.MOST_ANSWERS", 2)
    compiled: Any = autopar.compile(GoesByEach(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), strategy="ddp")
    with pytest.raises(AutoparError, match=r"another one in every step.*test_told\.py:\d+.*compare it"):
        for _ in range(3):
            compiled(torch.randn(2, WIDTH))


class GoesByItsLosses(Net):
    """What is done hangs on a list that grows."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.through(x, *self.layers).square().mean()
        self.losses.append(loss.item())
        return loss * len(self.losses)


class Logs(Net):
    """Blocks that repeat, and a loss that is kept."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.through(x, *self.layers).square().mean()
        self.losses.append(loss.detach())  # type: ignore[arg-type]
        return loss


def test_what_a_model_of_blocks_leaves_is_no_result_of_its_own() -> None:
    """Breaks if a model that is traced block by block returns what it leaves."""
    program = capture(Logs(3), {"x": torch.randn(2, WIDTH)}, tells_ways=True)
    assert [str(each.held) for each in program.carried] == ["losses"] and program.output_leaves == (0,)
    program = capture(Logs(3), {"x": torch.randn(2, WIDTH)})
    assert not program.carried and any("forward() sets losses" in note for note in program.notes)


def test_a_list_that_grows_and_is_gone_by_is_refused() -> None:
    """Breaks if every step has the list as it was when its program was made."""
    with pytest.raises(AutoparError, match=r"adds to losses, a list in Python, .*test_told\.py:\d+.*buffer"):
        capture(GoesByItsLosses(), {"x": torch.randn(2, WIDTH)}, tells_ways=True)


class Block(nn.Module):
    """A block that may draw itself, or be given what was drawn."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor, share: Any = 1.0) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y if self.how == "inside" and torch.rand(1) < 0.5 else x + y * share


class Blocks(nn.Module):
    """Blocks that repeat, which draws leave out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(Block(how) for _ in range(5)), how

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.4:
                continue
            x = layer(x, random.random()) if self.how == "given" else layer(x)
        return x.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(("how", "whole"), [("beside", 0), ("inside", 1), ("given", 1)])
def test_a_new_way_among_blocks_is_traced_block_by_block(how: str, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if every layer is traced anew for each way of leaving some out; or if a block that draws, or is given what
    was drawn, stands for the others.
    """
    torch.manual_seed(4)  # leaves out one of them
    model, inputs, ways = Blocks(how), {"x": torch.randn(2, WIDTH)}, list[Any]()
    first = capture(model, inputs, tells_ways=True)
    assert first.told is not None and {x.answer for x in first.told.asked} == {False, True}
    vars(model)[START] = first.told.start
    traced_whole = capturing._whole

    def counted(*args: Any) -> Any:
        ways.append(how)
        return traced_whole(*args)

    monkeypatch.setattr(capturing, "_whole", counted)
    again = capture(model, inputs, tells_ways=True)
    assert len(ways) == whole and capturing.say_the_same(first, again)
    assert again.told is not None and again.told.numbers() == first.told.numbers()
    assert [x.answer for x in again.told.asked] == [x.answer for x in first.told.asked]


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [DropsLayers, DrawsInPython, Counts, Leaves])
def test_the_proof_goes_by_the_same_numbers(kind: type[Net]) -> None:
    """Breaks if eager is compared with a program that was told other numbers, or is left with others than before."""
    model = kind()
    plan = autopar.plan(model, autopar.Mesh({"dp": 2}), example_inputs={"x": torch.randn(4, WIDTH)}, strategy="zero3")
    plan.verify().raise_on_failure()
    assert (model.calls, model.heat, model.is_new, model.losses) == (0, 1.0, True, [])
    assert model.seen == {"batches": 0, "last": []}


@pytest.mark.moderate
def test_a_run_that_goes_on_counts_on(tmp_path: Path) -> None:
    """Breaks if a saved step goes on with counters as a fresh model has them, or a file can put a number in the place
    of a method.
    """
    mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), torch.ones(2, WIDTH)
    torch.manual_seed(0)
    one, other = (cast("Any", autopar.compile(Counts(), mesh, strategy="ddp")) for _ in range(2))
    for _ in range(2):
        one(x)
    one.save(tmp_path, step=2)
    other.load(tmp_path)
    assert (other.calls, other.heat, other.is_new, other.seen["batches"]) == (2, one.heat, False, 2)
    assert float(other(x)) == float(one(x)) and other.calls == one.calls == 3
    for entry in (
        ["", "forward", [], 1],
        ["layers.7", "calls", [], 1],
        ["", "calls", [], "1"],
        ["", "seen", ["at", 0], 1],
    ):
        with pytest.raises(AutoparError, match="python numbers cannot be loaded"):
            put_numbers(other, [entry])


def test_programs_that_nobody_used_for_long_are_dropped() -> None:
    """Breaks if a program is kept for every draw that there ever was, or if one that is used again and again goes."""
    ways, executables = Ways(nn.Linear(1, 1)), dict[Any, Any]()
    keys = [("kind", (((TOLD, (answer,)),), ())) for answer in range(MOST_KEPT + 5)]
    others = {("kind", ((), ())): "of batches that are told nothing", ("other", (((TOLD, (0,)),), ())): "other"}
    executables |= others
    for key in keys:
        executables[key] = "program"
        ways.used(key, executables)
        ways.used(keys[0], executables)
    assert set(executables) - set(others) == {keys[0], *keys[6:]}
    assert set(others) <= set(executables)
