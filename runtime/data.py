"""Read only this rank's part of each batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.trees import tree_leaves, tree_map
from autopar.ir.interface import ProgramInterface
from autopar.ir.sharding import REPLICATE, Sharding, format_sharding, num_pieces, splits_of
from autopar.runtime.checks import digest_of, gather_objects
from autopar.runtime.engine import Engine
from autopar.runtime.layout import shard
from autopar.runtime.placements import make_dtensor


class ShardLoader:
    """The batches of a loader, as DTensors in the planned placement of their first dim. All ranks of a pipeline's axis
    get the same rows.

    From a DataLoader over a map-style dataset each rank fetches and collates its own samples only; the sampler must
    give the same order on every rank (checked at the first batch). Where they come out of the collator in other shapes
    than another rank's (it pads to the longest), whole batches are collated from then on, and cut. Other loaders are
    read in full and cut.

    own_rows: the loader gives this rank's rows already (a DistributedSampler, a stream of its own); those of all ranks
    together are the batch.
    """

    def __init__(self, engine: Engine, loader: Iterable[Any], own_rows: bool = False) -> None:
        self.engine, self.loader, self.own_rows = engine, loader, own_rows
        self._is_padded = False
        self._taken = 0
        self._begun: Tensor | None = None
        self._waiting: tuple[int, Tensor | None] = (0, None)

    def state_dict(self) -> dict[str, Any]:
        """How many batches of this round were taken, and the random state that it began with: what the sampler draws
        from, at the beginning of a round.
        """
        own = getattr(self.loader, "generator", None)
        taken, begun = self._waiting if self._waiting[0] or self._begun is None else (self._taken, self._begun)
        if not taken:
            begun = None if own is None else own.get_state()
        return {"batches": taken, "random": begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next round goes on behind the batches that were taken, in their order.

        Raises:
            AutoparError: a state of something else.
        """
        taken, begun = state.get("batches"), state.get("random")
        if set(state) != {"batches", "random"} or type(taken) is not int or not isinstance(begun, Tensor | None):
            raise AutoparError("the state is none of a shard_loader", values=", ".join(map(str, state))[:200])
        self._waiting, self._begun, self._taken = (taken, begun), None, 0

    def __len__(self) -> int:
        """As many batches as the loader has."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        (skipped, random), self._waiting = self._waiting, (0, None)
        own = getattr(self.loader, "generator", None)
        generator = torch.default_generator if own is None else own
        now = generator.get_state()
        if random is not None:
            generator.set_state(random)
        self._begun, self._taken = generator.get_state(), 0
        for batch in self._batches(skipped):
            self._taken += 1
            if self._taken == skipped and own is None:
                generator.set_state(now)  # what was drawn since the round began was drawn before
            if self._taken > skipped:
                yield batch
        self._begun, self._taken = None, 0

    def _batches(self, skipped: int) -> Iterator[Any]:
        """All of a round; of those that are skipped something may stand in their place."""
        interface = self.engine.interface
        loader = self.loader
        if self.own_rows:
            yield from map(self._joined, loader)
            return
        if interface is not None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
            yield from self._fetch(loader, loader.batch_sampler, batch_sharding(interface), skipped)
            return
        for batch in loader:
            interface = self.engine.interface
            yield batch if interface is None else self._cut(batch, batch_sharding(interface))

    def _fetch(
        self, loader: DataLoader[Any], batches: Iterable[Any], sharding: Sharding, skipped: int
    ) -> Iterator[Any]:
        comm = self.engine.inner
        # A DataLoader's iterator takes a number for its workers: what is drawn afterwards is what it is without us.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        for number, batch in enumerate(batches):
            indices = list(batch)
            if number < skipped:
                yield None
                continue
            if number == skipped:
                _check_same_samples(indices)
            places = comm.positions((len(indices),), format_sharding(sharding, comm.axes))[0].tolist()
            if self._is_padded:
                yield self._cut(loader.collate_fn([loader.dataset[index] for index in indices]), sharding)
                continue
            local = loader.collate_fn([loader.dataset[indices[place]] for place in places])
            if len(set(gather_objects(_shapes(local)))) > 1:
                self._is_padded = True
                yield self._cut(loader.collate_fn([loader.dataset[index] for index in indices]), sharding)
                continue
            yield tree_map(partial(self._whole, sharding=sharding, batch_size=len(indices)), local)

    def _whole(self, local: Any, sharding: Sharding, batch_size: int) -> Any:
        if not isinstance(local, Tensor):
            return local
        engine = self.engine
        shape = (batch_size, *local.shape[1:])
        return make_dtensor(local.to(engine.comm.device), engine.inner.device_mesh, sharding, shape)

    def _joined(self, batch: Any) -> Any:
        """The rows of all ranks as one batch.

        Raises:
            AutoparError: before the first plan; shapes that differ; rows that two ranks have that are to have others,
                or that differ where they are to be the same.
        """
        engine = self.engine
        if engine.interface is None:
            raise AutoparError(
                "own rows can be joined when it is known how a batch is split",
                remedy="Give autopar.compile example_inputs: the batch of all ranks",
            )
        sharding, comm = batch_sharding(engine.interface), engine.inner
        pieces = num_pieces(sharding, comm.sizes)
        at = tuple(comm.index(axis) if p != REPLICATE else 0 for axis, p in zip(comm.axes, sharding, strict=True))
        tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
        _check_own_rows(gather_objects((at, _shapes(batch), digest_of(tensors))))

        def joined(x: Any) -> Any:
            is_rows = isinstance(x, Tensor) and x.ndim
            return self._whole(x, sharding, len(x) * pieces) if is_rows else x

        return tree_map(joined, batch)

    def _cut(self, batch: Any, sharding: Sharding) -> Any:
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


def _shapes(batch: Any) -> str:
    """Of a batch, by rows' shapes: ranks may have other numbers of rows of an uneven batch."""
    return ", ".join(str(tuple(x.shape[1:])) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim)


def _check_own_rows(ranks: list[tuple[tuple[int, ...], str, str]]) -> None:
    """What each rank has: its place, shapes, and a digest of its rows."""
    remedy = "Give a DistributedSampler the ranks that split rows: num_replicas and rank of those axes of the mesh"
    for rank, (place, shapes, digest) in enumerate(ranks):
        for other, (its_place, its_shapes, its_digest) in enumerate(ranks[:rank]):
            if shapes != its_shapes:
                raise AutoparError(
                    f"ranks {other} and {rank} have rows of other shapes",
                    values=f"{its_shapes}; {shapes}",
                    remedy="Let the collator pad to one length on every rank, or hand in whole batches",
                )
            if (place == its_place) != (digest == its_digest):
                what = "the same rows, each is to have its own" if place != its_place else "other rows, of one piece"
                raise AutoparError(f"ranks {other} and {rank} have {what}", remedy=remedy)


def _check_same_samples(indices: list[Any]) -> None:
    for rank, theirs in enumerate(gather_objects(indices)):
        if theirs != indices:
            raise AutoparError(
                f"the sampler gives rank {rank} other samples",
                values=f"here {indices[:4]}…, there {theirs[:4]}…",
                remedy="Seed the loader's sampler (generator=) the same on every rank",
            )
