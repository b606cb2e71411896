"""torch's operators of control flow are what eager does with them."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.torch_compat import control_flow
from tests.unit.runtime.saved_run import one_rank as one_rank


class Flows(nn.Module):
    """A branch by values, a loop of so many rounds, a scan over time from the end, of dicts, and a map over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def step(carry: dict[str, Tensor], now: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            h = torch.tanh(self.cell(now["x"]) + carry["h"])
            return {"h": 0.5 * h}, {"y": h, "twice": 2 * h}

        y = torch.cond(x.sum() > 0, lambda v: self.layer(v).relu(), lambda v: -self.layer(v).tanh(), (x,))
        rounds, y = while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v * 0.6), (torch.tensor(0), y))
        last, found = scan(step, {"h": torch.zeros(x.shape[0], 6)}, {"x": y}, dim=1, reverse=True)
        z = cast("Any", mapped)(lambda row: (row.square(), self.layer(row)), found["y"] + found["twice"])
        return (z[0] + z[1]).mean() * (1 + rounds) + last["h"].sum()


class Plain(Flows):
    """The same, written in Python."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu() if x.sum() > 0 else -self.layer(x).tanh()
        y, h, found = y * 0.6 * 0.6, torch.zeros(x.shape[0], 6), list[Tensor]()
        for now in reversed(y.unbind(1)):
            found.insert(0, torch.tanh(self.cell(now) + h))
            h = 0.5 * found[0]
        z = 3 * torch.stack(found, 1)
        return (z.square() + self.layer(z)).mean() * 3 + h.sum()


@pytest.mark.moderate
def test_control_flow_is_pythons() -> None:
    """Breaks if such an operator is refused, if a batch that goes the other way gets the first one's program, or if a
    program gives anything else than torch's own operator gives in eager, or has another gradient than Python's own
    branches and loops (that of torch 2.11's own scan is wrong).
    """
    torch.manual_seed(0)
    model, plain, x = Flows(), Plain(), torch.rand(2, 2, 6)
    compiled = cast(
        "Any",
        autopar.compile(copy.deepcopy(model), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), strategy="ddp"),
    )
    plain.load_state_dict(model.state_dict())
    for batch in (x, -x):
        have = compiled(batch)
        have.backward()
        plain(batch).backward()
        torch.testing.assert_close(have.detach(), model(batch).detach())
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None and float(other.grad.abs().sum()) > 0
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    autopar.plan(model, autopar.Mesh({"dp": 2}), example_inputs={"x": x}, strategy="zero3").verify().raise_on_failure()


class Carried(nn.Module):
    """A loop that carries trees, one of them for no round, around what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        def body(i: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            return i + 1, {"x": self.drop(self.layer(state["x"])), "sum": state["sum"] + state["x"].sum()}

        start = (torch.tensor(0), {"x": x, "sum": x.sum()})
        _, state = while_loop(lambda i, state: i < 2, body, start)
        _, none = while_loop(lambda i, state: i < 0, body, start)
        _, rows = scan(lambda h, now: (h + self.drop(now), h * 1.0), torch.zeros(4), state["x"])
        return state["sum"] + (none["x"] * rows).square().sum()


@pytest.mark.moderate
def test_the_proof_asks_torchs_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if what a trace takes such an operator for is taken for right in the reference, too; if trees that a loop
    carries, or draws within one, are refused.
    """
    mesh, inputs = autopar.Mesh({"dp": 1}), {"x": torch.rand(3, 4)}
    proof = autopar.plan(Carried(), mesh, example_inputs=inputs, strategy="ddp").verify()
    assert proof.raise_on_failure().dropout
    ours = control_flow._scan

    def backwards(step: Any, init: Any, xs: Any, **others: Any) -> Any:
        return ours(step, init, [x.flip(0) for x in xs], **others)

    monkeypatch.setattr(control_flow, "_scan", backwards)
    assert not autopar.plan(Carried(), mesh, example_inputs=inputs, strategy="ddp").verify().ok
