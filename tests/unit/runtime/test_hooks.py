"""Which hooks inside a model are told of."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autopar.runtime.hooks import Hooks


def test_hooks_that_are_a_part_of_forward_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if each layer is named for how transformers collects hidden states, or a script's own hook is not."""
    capturing: Any = pytest.importorskip("transformers.utils.output_capturing")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    capturing.install_output_capuring_hook(model[0], "hidden_states", 0)
    model[1].register_forward_hook(lambda module, args, output: output)
    Hooks(model).check(())
    (record,) = caplog.records
    assert "of 1 ran while" in record.getMessage()
