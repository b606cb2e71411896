from __future__ import annotations

import json

import pytest

from autopar.planner.plan.json import _interface_data, _interface_from
from tests.unit.runtime.programs import mlp_interface
from tests.unit.runtime.test_microbatches import weighted_interface

pytestmark = pytest.mark.unit


def test_an_interface_comes_back_from_json() -> None:
    """Breaks when a plan file loses microbatches, how outputs combine, or the buffers that forward changes."""
    for interface in (mlp_interface({"dp": 2, "tp": 2}, True, microbatches=2), weighted_interface(4, 16)):
        assert _interface_from(json.loads(json.dumps(_interface_data(interface))), interface.axes) == interface
