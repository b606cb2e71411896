from __future__ import annotations

import pytest

from autopar.base.errors import AutoparError
from autopar.runtime.comm import RecordingComm
from autopar.runtime.dry_run import dry_events
from autopar.runtime.simulate import simulate
from tests.unit.runtime.programs import PLANS, make_batch, make_mlp, mlp_interface, mlp_source

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("plan", PLANS)
def test_a_dry_run_foresees_every_collective(plan: str) -> None:
    """Breaks when the check before the first step compares other collectives than the step issues."""
    sizes, zero3 = PLANS[plan]
    interface, source = mlp_interface(sizes, zero3), mlp_source(sizes, zero3)
    result = simulate(interface, source, make_mlp().state_dict(), make_batch())
    for rank, events in enumerate(result.events):
        comm = RecordingComm(interface.axes, interface.sizes, rank)
        assert dry_events(comm, interface, source) == list(events)


@pytest.mark.parametrize("reads", ["y.max().item() ** 0", "(y.nonzero().shape[0] > 0)", "y.view(-1)[:1].sort()[0]"])
def test_values_that_meta_tensors_lack_do_not_switch_it_off(reads: str) -> None:
    """Breaks when a program that reads values is refused, or compared by its text alone."""
    sizes, zero3 = PLANS["ddp"]
    source = mlp_source(sizes, zero3).replace("    error = logits - y", f"    error = logits - y * {reads}")
    comm = RecordingComm(("dp",), (2,), 0)
    assert dry_events(comm, mlp_interface(sizes, zero3), source)


def test_what_meta_tensors_cannot_run_is_not_an_error() -> None:
    """Breaks when a program is refused whose operators have no shapes without values."""
    sizes, zero3 = PLANS["ddp"]
    source = mlp_source(sizes, zero3).replace("    error = logits - y", "    error = logits - y * y.numpy().size ** 0")
    assert dry_events(RecordingComm(("dp",), (2,), 0), mlp_interface(sizes, zero3), source) is None


def test_a_program_that_cuts_what_does_not_divide_is_an_error() -> None:
    """Breaks when the dry run hides a mistake of the program."""
    sizes, zero3 = PLANS["ddp"]
    source = mlp_source(sizes, zero3).replace(
        "    error = logits - y", '    error = logits - y[:1].repeat(4, 1); comm.slice(y[:3], "dp", 0)'
    )
    with pytest.raises(AutoparError, match="cannot be cut into 2 pieces"):
        dry_events(RecordingComm(("dp",), (2,), 0), mlp_interface(sizes, zero3), source)
