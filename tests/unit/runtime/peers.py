"""One rank of a mesh, in this process: its peers are torch's fake ones, which send nothing and answer at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(sizes: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """The DeviceMesh as this rank sees it. What a collective gives there is of the right shape, and nothing else.

    A process sees a mesh of the same sizes always as one and the same rank: DTensor keeps the first mesh that equals.
    """
    num_ranks = 1
    for size in sizes.values():
        num_ranks *= size
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
