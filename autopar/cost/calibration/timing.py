"""Seconds of a function on this device: medians of samples over a fixed stretch of time, so that all ranks are busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from autopar.base.torch_compat.devices import sleep_on

_SAMPLE_S, _CROWDED_SAMPLE_S = 2e-3, 40e-3
"""A sample on a CPU lasts at least this long, so that the clock's steps do not count; and where more threads than cores
run, so that each sample has its share of waiting for a core.
"""
_FLUSH_BYTES = 512 * 2**20
"""More than any GPU's L2 cache: written before each sample on CUDA, so that operands come from memory."""


@dataclass(slots=True)
class Timer:
    """Times functions for `budget_s` each; at least five samples, at most a hundred.

    is_crowded: the processes of this machine run more threads than it has cores. Where they do not, and a process has
    one thread, its CPU time is taken: waiting for a core that others hold is not in it.
    """

    device: torch.device
    budget_s: float
    is_crowded: bool = False
    _flush: torch.Tensor | None = field(default=None)

    def seconds(self, function: Callable[[], object]) -> float:
        """The median time of one call, after warm-up."""
        return self._on_cuda(function) if self.device.type == "cuda" else self._on_cpu(function)

    def _on_cpu(self, function: Callable[[], object]) -> float:
        clock = self._clock()
        function()
        once = _elapsed(function, 1, clock)
        inner = max(1, int((_CROWDED_SAMPLE_S if self.is_crowded else _SAMPLE_S) / max(once, 1e-7)))
        samples: list[float] = []
        begun = time.perf_counter()
        while len(samples) < 5 or (time.perf_counter() - begun < self.budget_s and len(samples) < 100):
            samples.append(_elapsed(function, inner, clock))
        return statistics.median(samples)

    def _on_cuda(self, function: Callable[[], object], inner: int = 1) -> float:
        """Events around `inner` calls. The buffer is written, so that operands come from memory; then the device sleeps
        for longer than the host takes to launch all that is timed, so that launching is not in the time.
        """
        if self._flush is None:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(3):
            function()
        launching = launching_s(function, self.device) * inner
        samples: list[float] = []
        begun = time.perf_counter()
        while len(samples) < 5 or (time.perf_counter() - begun < self.budget_s and len(samples) < 100):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            sleep_on(self.device, launching)
            start.record()
            for _ in range(inner):
                function()
            end.record()
            torch.cuda.synchronize(self.device)
            samples.append(start.elapsed_time(end) * 1e-3 / inner)
        return statistics.median(samples)

    def launches_among_others_s(self) -> tuple[float, float]:
        """What a small operator takes, and a view, that other operators of another kind precede, as in a step: on a
        CPU what they need is then no longer in its caches. On CUDA the host runs ahead: `launch_s`, and nothing.
        """
        if self.device.type == "cuda":
            return self.launch_s(), 0.0
        large, x = torch.ones(2**19), torch.ones(8, 8)

        def preceded(functions: Sequence[Callable[[], object]]) -> float:
            clock = self._clock()

            def before() -> None:
                for _ in functions:
                    large.add_(1.0)

            def among() -> None:
                for function in functions:
                    large.add_(1.0)
                    function()

            among()
            pairs = [(_elapsed(among, 1, clock), _elapsed(before, 1, clock)) for _ in range(60)]
            return statistics.median(a - b for a, b in pairs) / len(functions)

        operators = [
            lambda: x * x, lambda: x + 1.0, lambda: x.sum([1], keepdim=True), lambda: x**2, lambda: torch.rsqrt(x),
            lambda: -x, lambda: torch.cat([x, x], -1), lambda: torch.tanh(x),
        ]  # fmt: skip
        views = [
            lambda: x.transpose(0, 1), lambda: x.reshape(4, 16), lambda: x.unsqueeze(1), lambda: x[:, :4],
        ]  # fmt: skip
        return max(1e-7, preceded(operators)), max(1e-8, preceded(views))

    def _clock(self) -> Callable[[], float]:
        return time.perf_counter if self.is_crowded or torch.get_num_threads() > 1 else time.thread_time

    def launch_s(self) -> float:
        """A kernel's floor: an addition of one element; on CUDA of one kernel after another in a stream."""
        x = torch.ones(1, device=self.device)
        if self.device.type == "cuda":
            return self._on_cuda(lambda: torch.add(x, x), inner=20)
        return self._on_cpu(lambda: torch.add(x, x))


_LEAST_ASLEEP_S, _MOST_ASLEEP_S = 20e-6, 50e-3


def launching_s(function: Callable[[], object], device: torch.device) -> float:
    """How long a CUDA device has to sleep before a call, for the host to be ahead of it: twice what the host takes to
    launch it while the device is asleep, within bounds (a function that waits for the device takes as long as that).
    """
    torch.cuda.synchronize(device)
    sleep_on(device, _MOST_ASLEEP_S)
    begun = time.perf_counter()
    function()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize(device)
    return min(max(2 * taken, _LEAST_ASLEEP_S), _MOST_ASLEEP_S)


def _elapsed(function: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Seconds of one of `times` calls."""
    begun = clock()
    for _ in range(times):
        function()
    return (clock() - begun) / times
