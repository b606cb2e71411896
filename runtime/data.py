"""Read only this rank's part of each batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import tree_map
from autopar.ir.interface import ProgramInterface
from autopar.ir.sharding import REPLICATE, Sharding, format_sharding, splits_of
from autopar.runtime.checks import gather_objects
from autopar.runtime.engine import Engine
from autopar.runtime.layout import shard
from autopar.runtime.placements import make_dtensor


class ShardLoader:
    """The batches of a loader, as DTensors in the planned placement of their first dim. All ranks of a pipeline's axis
    get the same rows.

    From a DataLoader over a map-style dataset each rank fetches and collates its own samples only; the sampler must
    give the same order on every rank (checked at the first batch). Other loaders are read in full and cut.
    """

    def __init__(self, engine: Engine, loader: Iterable[Any]) -> None:
        self.engine, self.loader = engine, loader

    def __len__(self) -> int:
        """As many batches as the loader has."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        interface = self.engine.interface
        loader = self.loader
        if interface is not None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
            yield from self._fetch(loader, loader.batch_sampler, batch_sharding(interface))
            return
        for batch in loader:
            yield batch if self.engine.interface is None else self._cut(batch, self.engine.interface)

    def _fetch(self, loader: DataLoader[Any], batches: Iterable[Any], sharding: Sharding) -> Iterator[Any]:
        comm = self.engine.inner
        # A DataLoader's iterator takes a number for its workers: what is drawn afterwards is what it is without us.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        for number, batch in enumerate(batches):
            indices = list(batch)
            if number == 0:
                _check_same_samples(indices)
            places = comm.positions((len(indices),), format_sharding(sharding, comm.axes))[0].tolist()
            local = loader.collate_fn([loader.dataset[indices[place]] for place in places])
            yield tree_map(partial(self._whole, sharding=sharding, batch_size=len(indices)), local)

    def _whole(self, local: Any, sharding: Sharding, batch_size: int) -> Any:
        if not isinstance(local, Tensor):
            return local
        engine = self.engine
        shape = (batch_size, *local.shape[1:])
        return make_dtensor(local.to(engine.comm.device), engine.inner.device_mesh, sharding, shape)

    def _cut(self, batch: Any, interface: ProgramInterface) -> Any:
        sharding = batch_sharding(interface)

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.ndim:
                return x
            return self._whole(shard(x, sharding, self.engine.inner), sharding, len(x))

        return tree_map(cut, batch)


def batch_sharding(interface: ProgramInterface) -> Sharding:
    """How the inputs' first dim is split; other dims, and a zigzag one, are cut later, where they are."""
    shardings = {_of_rows(entry.sharding) for entry in interface.inputs if entry.shape}
    if len(shardings) != 1:
        raise AutoparError(
            "shard_loader needs inputs whose first dim is split alike",
            values=", ".join(f"{entry.name}: {entry.shape}" for entry in interface.inputs),
            remedy="Pass the global batch on every rank instead",
        )
    return shardings.pop()


def _of_rows(sharding: Sharding) -> Sharding:
    splits = splits_of(sharding, 0)
    is_zigzag = any(zigzag for _, _, zigzag in splits)
    axes = {axis for axis, _, _ in splits if not is_zigzag}
    return tuple(p if axis in axes else REPLICATE for axis, p in enumerate(sharding))


def _check_same_samples(indices: list[Any]) -> None:
    for rank, theirs in enumerate(gather_objects(indices)):
        if theirs != indices:
            raise AutoparError(
                f"the sampler gives rank {rank} other samples",
                values=f"here {indices[:4]}…, there {theirs[:4]}…",
                remedy="Seed the loader's sampler (generator=) the same on every rank",
            )
