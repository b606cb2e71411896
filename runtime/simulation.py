"""What simulations of ranks share: results, and tensors put together from their pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event
from autopar.runtime.layout import assemble, local_part_shape, shard
from autopar.runtime.pieces import coordinates


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What all ranks together computed.

    outputs: global tensors, in the interface's order. gradients: global, by parameter name, and of inputs by
    `gradient_key` (empty without backward).
    events: the collectives of each rank, in order; the first `num_forward_events` of each belong to the forward (with a
    pipeline, whose forwards and backwards alternate, 0 where there is a backward).
    updates: the new values of the buffers that forward changes, by name.
    """

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    events: tuple[tuple[Event, ...], ...]
    num_forward_events: int
    updates: dict[str, Tensor] = field(default_factory=dict)


def shard_state(
    comm: Communicator, interface: ProgramInterface, state: Mapping[str, Tensor], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Each parameter's and buffer's local part, by name and by alias. names: of the parameters that the rank holds."""
    local: dict[str, Tensor] = {}
    parameters = [entry for entry in interface.parameters if names is None or entry.name in names]
    for entry in (*parameters, *interface.buffers):
        found = next((state[name] for name in (entry.name, *entry.aliases) if name in state), None)
        if found is None:
            raise AutoparError(f"the state lacks {entry.name}", values=f"it has {len(state)} tensors")
        if tuple(found.shape) != entry.shape:
            raise AutoparError(f"{entry.name} is {tuple(found.shape)}, planned as {entry.shape}")
        piece = shard(found.detach(), entry.sharding, comm)
        local.update(dict.fromkeys((entry.name, *entry.aliases), piece))
    return local


def gradient_of(gradients: dict[str, Tensor], parameter: TensorInterface, rank: int) -> Tensor:
    """A parameter's gradient, under whichever of its names; or the error that names the rank that lacks it."""
    for name in (parameter.name, *parameter.aliases):
        if name in gradients:
            return gradients[name]
    raise AutoparError(f"backward returned no gradient for {parameter.name}", values=f"on rank {rank}")


def assemble_checked(pieces: list[Tensor], entry: TensorInterface, interface: ProgramInterface, what: str) -> Tensor:
    """The global tensor of the ranks' pieces (of one stage's mesh, in order), which must be as planned."""
    # The same operations on the same numbers: replicas are bit-equal but for kernels that reduce in parallel.
    tolerance = 1e-12 if pieces[0].dtype == torch.float64 else 1e-5
    for rank, piece in enumerate(pieces):
        planned = local_part_shape(entry.shape, entry.sharding, interface.sizes, coordinates(rank, interface.sizes))
        if tuple(piece.shape) != planned:
            raise AutoparError(
                f"the {what} {entry.name} is {tuple(piece.shape)} on rank {rank}, planned as {planned}",
                values=f"{entry.shape} as a whole",
            )
    try:
        whole = assemble(pieces, entry.sharding, interface.sizes, atol=tolerance, rtol=tolerance)
    except (AutoparError, RuntimeError) as error:
        raise AutoparError(f"the {what} {entry.name} does not fit together: {error}") from error
    if tuple(whole.shape) != entry.shape:
        raise AutoparError(f"the {what} {entry.name} is {tuple(whole.shape)}, planned as {entry.shape}")
    return whole
