"""All ranks together, in bounded time: who does not come is named, with what it is at."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.base.environment import Launched
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import job_store
from autopar.runtime.meeting import gathered
from autopar.runtime.watch.late import ranks_text

T = TypeVar("T")


class Ranks:
    """Of a job, or of this process alone. at: how often this rank has waited for all. what: it is at."""

    def __init__(self, launched: Launched, device: torch.device, timeout_s: float) -> None:
        self.rank, self.num, self.timeout_s = launched.rank, launched.world_size, timeout_s
        self.at, self.what = 0, "the beginning"
        self.is_owner = self.num > 1 and not dist.is_initialized()
        if self.is_owner:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise AutoparError(
                    f"rank {self.rank} of {self.num} did not meet the others within {timeout_s:g} s",
                    values=str(error).splitlines()[0][:300],
                    remedy="See whether all machines have started, MASTER_ADDR and MASTER_PORT, and firewalls between "
                    "them; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network card",
                ) from error

    def begin(self, what: str) -> None:
        """This rank is at `what` from now on."""
        self.what = what
        self._say()

    def _say(self) -> None:
        if self.num > 1:
            job_store().set(f"autopar/doctor/{self.rank}", f"{self.at} {self.what}")

    def all(self, mine: T) -> list[T]:
        """Every rank's, in rank order. Collective.

        Raises:
            AutoparError: ranks that did not come in time; names them.
        """
        if self.num == 1:
            return [mine]
        self.at += 1
        self._say()
        try:
            return gathered("be looked at", mine)
        except AutoparError as error:
            raise AutoparError(
                f"rank {self.rank} waited {self.timeout_s:g} s for others: {self._behind() or error.values}",
                remedy="See what it is at there: a file system that does not answer, a device that hangs, a network "
                "between two machines",
            ) from error

    def _behind(self) -> str:
        store, at = job_store(), {}
        for rank in range(self.num):
            key = f"autopar/doctor/{rank}"
            at[rank] = store.get(key).decode().split(" ", 1) if store.check([key]) else ["0", "the beginning"]
        late: dict[str, list[int]] = {}
        for rank, (number, what) in at.items():
            if int(number) < self.at:
                late.setdefault(what, []).append(rank)
        return "; ".join(f"{ranks_text(ranks)} at {what}" for what, ranks in late.items())

    def end(self) -> None:
        """Nobody is waited for any more."""
        if self.is_owner and dist.is_initialized():
            dist.destroy_process_group()
