"""What a program takes for granted, read at once or late, as on a device; the order of launches of communicators."""

from __future__ import annotations

import pytest
import torch

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.runtime import granted
from autopar.runtime.granted import Granted

NAN, ONE = torch.full((3,), torch.nan), torch.ones(3)


@pytest.fixture
def _read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granted, "reads_at_once", lambda device: False)


def test_on_a_cpu_it_is_told_at_once() -> None:
    """Breaks if a batch that was otherwise goes on, or one output that is a number is not looked at."""
    with pytest.raises(AutoparError, match=r"takes for granted no pixel is negative \(model.py:3\)"):
        Granted().ask(("no pixel is negative (model.py:3)",), [NAN, None, NAN[0]])
    said = Granted().ask(("it",), [NAN, ONE])
    assert said is not None and not bool(said)
    assert Granted().ask(("it",), [None, torch.tensor(3), torch.empty(0)]) is None


@pytest.mark.usefixtures("_read_late")
def test_late_it_is_told_once() -> None:
    """Breaks if nobody tells, or it is told again of the next batch, which is as the example was."""
    asked = Granted()
    said = asked.ask(("it",), [NAN])
    assert said is not None and bool(said)
    with pytest.raises(AutoparError, match="takes for granted it"):
        asked.settle()
    asked.settle()
    asked.ask(("it",), [ONE])
    asked.settle()


def test_launches_are_ordered_where_nobody_said_otherwise() -> None:
    """Breaks if NCCL may begin with different communicators on different ranks, or a user's own word is overwritten."""
    variables = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    environment.order_launches(variables)
    assert variables == {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    environment.order_launches(empty := {})
    assert empty == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
