"""What a layer keeps for its backward falls with the ranks that share its sequence: as predicted, and as it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import autopar
from autopar.api import interpret
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.runtime.loader import load_program
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh
from autopar.strategies.names import by_name

pytestmark = pytest.mark.slow

ROWS, TOKENS = 2, 128
KEYS = 2 * ROWS * TOKENS * 4 * 8 * 4
"""Bytes of all keys and values of a layer: 4 heads of 8, float32."""


@lru_cache(maxsize=16)
def planned(num: int, strategy: str, layers: int) -> Plan:
    overrides = {"num_hidden_layers": layers}
    loaded = catalogue.load("llama", tiny=True, batch=(ROWS, TOKENS), device="cpu", overrides=overrides)
    mesh = Mesh({"cp": num}, hardware="cpu")
    whole = replace(by_name(strategy), parameters=frozenset({"replicate"}))
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy={"cp": whole}, rematerialize="none")


def predicted(num: int, strategy: str) -> float:
    """Bytes that each layer adds to the peak as the placement sees it, which holds all gradients beside activations;
    parameters and what belongs to them apart.
    """
    few, many = (_activations(planned(num, strategy, layers)) for layers in (2, 6))
    return (many - few) / 4


def _activations(plan: Plan) -> float:
    memory = plan.cost.memory
    return plan.program.result.peak_bytes - memory.parameters - memory.gradients - memory.optimizer_states


def measured(num: int, strategy: str) -> float:
    """Bytes of the storages that each layer's forward keeps for its backward, on the rank with most."""
    return (_kept(num, strategy, 6) - _kept(num, strategy, 2)) / 4


def _kept(num: int, strategy: str, layers: int) -> int:
    plan = planned(num, strategy, layers)
    assert plan.model is not None and plan.inputs is not None and plan.program is not None
    loaded = load_program(plan.source, "<kept>")
    state = interpret.state_of(plan.model, plan.program)
    inputs = interpret.input_tensors(plan.program, plan.inputs)

    def run(comm: SimulatedComm) -> int:
        local = loaded.split_inputs(comm, inputs)
        with torch.no_grad():
            _, saved = loaded.forward(comm, state, {}, local, torch.tensor(0))
        given = {tensor.untyped_storage()._cdata for tensor in (*state.values(), *local.values())}
        found = (leaf.untyped_storage() for leaf in tree_leaves(saved) if isinstance(leaf, Tensor))
        return sum({each._cdata: each.nbytes() for each in found if each._cdata not in given}.values())

    return max(SimulatedMesh(("cp",), (num,)).run(run))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv", "ring"])
def test_a_layer_keeps_its_part_of_the_sequence(strategy: str, num: int) -> None:
    """Breaks if anything but what is said here is kept of other ranks' tokens: nothing under ring; under allgather_kv
    keys and values, which are whole; under ulysses the result of attention by heads and by sequence, and each rank's
    key heads, of which 8 ranks read 4.
    """
    whole = {"predicted": predicted(1, "ring"), "measured": measured(1, "ring")}
    result = KEYS  # 8 heads of 8, one tensor
    extras = {"ring": 0.0, "allgather_kv": KEYS * (1 - 1 / num), "ulysses": result / num + KEYS / num * (num == 8)}
    extra = extras[strategy]
    for name, function in (("predicted", predicted), ("measured", measured)):
        assert function(num, strategy) == whole[name] / num + extra, name
