"""What the measured benchmarks share: local ranks, a step's peak memory and bytes sent, medians, the page's header."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.torch_compat.distributed import TorchDispatchMode, tree_leaves

MIB = 2**20


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def num_ranks() -> int:
    """Two, or one where there is one GPU."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def launch(work: Callable[..., Any], *args: Any, timeout_s: float = 1200.0, ranks: int | None = None) -> list[Any]:
    """`work(*args)` in one new process a rank, torch.distributed initialised; their results, by way of JSON.

    ranks: `num_ranks()`, unless given.

    Raises SystemExit with the traceback of the first rank that failed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    count = ranks or num_ranks()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(work, args, rank, count, folder), daemon=True) for rank in range(count)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + 5)
        for process in processes:
            process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        if errors:
            raise SystemExit(errors[0])
        results = [Path(folder, f"{rank}.json") for rank in range(count)]
        if not all(path.exists() for path in results):
            raise SystemExit(f"the ranks did not end within {timeout_s:.0f} s")
        return [json.loads(path.read_text()) for path in results]


def _rank(work: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, folder: str) -> None:
    try:
        torch.set_num_threads(1)
        if device_type() == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device_type() == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=300),
        )
        found = work(*args)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


def synchronize() -> None:
    if device_type() == "cuda":
        torch.cuda.synchronize()


def progress(text: str) -> None:
    """A line on stderr, from rank 0 or outside of the ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def local_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages that this rank holds of some tensors."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that live at one time, among those that an operator has made or read.

    held: what lives before. A storage seen first as an operand (a flat buffer of DDP) counts from then on.
    peak: bytes, the operator at which they were reached, and what lived then: (bytes, the operator that made it).
    Sees neither what an operator allocates and frees inside, nor the buffers of gloo's threads.
    """

    def __init__(self, held: Iterable[Tensor | None]) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, str, weakref.ref[Any]]] = {}
        self.now = self.peak = 0
        self.at = ""
        self.living: list[tuple[int, str]] = []
        for tensor in held:
            if tensor is not None:
                self._see(tensor, "held")
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs first; its local operators come here
        if threading.current_thread() is not threading.main_thread():
            return func(*args, **(kwargs or {}))
        for operand in tree_leaves((args, kwargs)):
            if isinstance(operand, Tensor):
                self._see(operand, f"operand of {func}")
        found = func(*args, **(kwargs or {}))
        for result in tree_leaves(found):
            if isinstance(result, Tensor):
                self._see(result, str(func))
        if self.now > self.peak:
            self.peak, self.at = self.now, str(func)
            # A copy first: other threads free storages.
            self.living = [(size, label) for size, label, _ in list(self.live.values())]
        return found

    def _see(self, tensor: Tensor, label: str) -> None:
        """Count a tensor's storage if it is new, or what it grew by."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self.live.get(key)
        if known is not None and known[2]() is not None:
            if known[0] != size:  # FSDP2 resizes
                self.now += size - known[0]
                self.live[key] = (size, known[1], known[2])
            return
        self.now += size
        self.live[key] = (size, label, weakref.ref(storage, lambda _: self._forget(key)))

    def _forget(self, key: int) -> None:
        self.now -= self.live.pop(key, (0, "", None))[0]


@contextmanager
def resizes_counted(live: LiveBytes) -> Iterator[None]:
    """See `UntypedStorage.resize_`, which is no operator."""
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        found = original(storage, size)
        known = live.live.get(storage._cdata)
        if known is not None:
            live.now += size - known[0]
            live.live[storage._cdata] = (size, known[1], known[2])
        return found

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def peak_bytes(step: Callable[[], object], held: Sequence[Tensor]) -> tuple[int, LiveBytes | None]:
    """The most bytes that live at one time during `step()`; on CPU with what lives then.

    held: the tensors that live before. On CUDA the allocator's number.
    """
    if device_type() == "cuda":
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronize()
        return torch.cuda.max_memory_allocated() - before + local_bytes(held), None
    with LiveBytes(held) as live, resizes_counted(live):
        step()
    return live.peak, live


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine(ranks: str | None = None) -> str:
    """Hardware and versions, for the head of a page of results. ranks: how many, unless `num_ranks()`."""
    if device_type() == "cuda":
        where = f"{num_ranks()} × {torch.cuda.get_device_name()}, NCCL"
    else:
        load = os.getloadavg()[0]
        where = f"{os.cpu_count()} CPU cores ({platform.machine()}), gloo, one thread a rank, load average {load:.1f}"
    versions = f"torch {torch.__version__}, transformers {version('transformers')}, Python {platform.python_version()}"
    return f"{where}; {ranks or num_ranks()} ranks; {versions}"
