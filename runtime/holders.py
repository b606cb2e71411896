"""Which ranks of a pipeline hold a parameter or a state, and what a rank remembers of parameters that others hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.runtime.elsewhere import Elsewhere, stand_in


@dataclass(frozen=True, slots=True, eq=False)
class Absent:
    """A parameter that other ranks hold, without values, with its names, its places in the model, and their pipeline
    ranks.
    """

    names: tuple[str, ...]
    parameter: Elsewhere
    sites: tuple[tuple[nn.Module, str], ...]
    ranks: tuple[int, ...]

    def is_missing(self, modules: Iterable[nn.Module]) -> bool:
        """Whether one of these is without it."""
        wanted = set(map(id, modules))
        return any(id(module) in wanted and module._parameters.get(name) is None for module, name in self.sites)

    def put(self, parameter: nn.Parameter | None) -> None:
        """Into all its places."""
        for module, name in self.sites:
            module._parameters[name] = parameter


def holders(interface: ProgramInterface) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks of each parameter, in order: those whose stages use it; all of them where none does."""
    pipeline = interface.pipeline
    if pipeline is None:
        return {entry.name: (0,) for entry in interface.parameters}
    used: dict[str, set[int]] = {}
    for stage, rank in zip(pipeline.stages, pipeline.rank_of, strict=True):
        for name in stage.parameters:
            used.setdefault(name, set()).add(rank)
    found: dict[str, tuple[int, ...]] = {}
    for entry in interface.parameters:
        ranks = {rank for name in (entry.name, *entry.aliases) for rank in used.get(name, ())}
        found[entry.name] = tuple(sorted(ranks or range(len(pipeline.order))))
    return found


def apart(interface: ProgramInterface | None, module: str) -> list[tuple[tuple[str, ...], int]]:
    """The parameters of a module that some pipeline ranks lack: their names, and the first rank that holds them; alike
    on every rank.
    """
    if interface is None or interface.pipeline is None:
        return []
    ranks, num = holders(interface), len(interface.pipeline.order)
    named = (((entry.name, *entry.aliases), ranks[entry.name]) for entry in interface.parameters)
    begin = f"{module}."
    return [(names, held[0]) for names, held in named if len(held) < num and any(x.startswith(begin) for x in names)]


def held_by(interface: ProgramInterface, rank: int) -> list[TensorInterface]:
    """The parameters that one pipeline rank holds, in the interface's order."""
    ranks = holders(interface)
    return [entry for entry in interface.parameters if interface.pipeline is None or rank in ranks[entry.name]]


def keepers(interface: ProgramInterface) -> dict[str, int]:
    """Of each state (cache) the pipeline rank that keeps it: the one whose stage makes it. Its stages alone take it.

    A state that is a single number is left out: as a scalar output, every rank has it.
    """
    pipeline, states = interface.pipeline, interface.states
    if pipeline is None:
        return {}
    found: dict[str, int] = {}
    outputs = interface.of_program().outputs
    for stage, rank in zip(pipeline.stages, pipeline.rank_of, strict=True):
        made = (outputs[place] for place in stage.outputs)
        found.update({entry.name: rank for entry in made if entry.shape and entry.name in states})
    return found


def own_inputs(interface: ProgramInterface, rank: int) -> frozenset[str]:
    """The inputs that the stages of a pipeline rank take: the batch, and of the states those that it keeps."""
    kept = keepers(interface)
    return frozenset(entry.name for entry in interface.inputs if kept.get(entry.name, rank) == rank)


def remove(
    parameter: nn.Parameter, names: Iterable[str], model: nn.Module, ranks: tuple[int, ...], device: torch.device
) -> Absent:
    """Take a parameter out of the model: None stands in its places, and what says all but its values for whoever asks a
    module for it. device: of those that stay.
    """
    names = tuple(names)
    sites = tuple(
        (module, name) for module in model.modules() for name, found in module._parameters.items() if found is parameter
    )
    absent = Absent(names, Elsewhere.of(parameter, names[0], ranks, device), sites, ranks)
    for module, name in sites:
        stand_in(module, name, absent.parameter)
    return absent
