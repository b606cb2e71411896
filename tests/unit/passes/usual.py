"""What tests of the usual case ask of a model: its plan, and its captured program run on another batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.passes.capture import capture


def planned(model: nn.Module, **batch: Tensor) -> Plan:
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    return autopar.plan(model, mesh, example_inputs=batch, strategy="ddp")


def ran(model: nn.Module, traced_for: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """What the program that is captured for one batch gives on another."""
    program = capture(model, traced_for)
    (region,) = program.regions
    module = torch.fx.GraphModule(nn.Module(), region.graph)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **program.constants}
    given = [held[slot.name] for slot in region.slots]
    found: Tensor = module(*given, *(batch[port.name] for port in region.inputs))[0]
    return found
