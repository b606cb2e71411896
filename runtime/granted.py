"""Whether a batch was what its program takes for granted: where it was not, all that the program returns is NaN.

On a CPU that is seen at once. On a device nobody waits for it: the answer is read before an optimizer steps, so that no
weight gets it, or before the next forward; buffers that the forward changes keep their values on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor


class Granted:
    """Of one compiled model."""

    def __init__(self) -> None:
        self._asked: tuple[tuple[str, ...], Callable[[], bool]] | None = None

    def ask(self, granted: Sequence[str], outputs: Sequence[Tensor | None]) -> Tensor | None:
        """After a forward: whether its batch was otherwise, a bool scalar where the outputs are. None: nothing tells.

        granted: what the program takes for granted, in words.

        Raises:
            AutoparError: it was otherwise, where that is seen at once.
        """
        found = [None if x is None else local_tensor(x) if isinstance(x, DTensor) else x.detach() for x in outputs]
        floating = [x for x in found if x is not None and x.is_floating_point() and x.numel()]
        if not floating:
            return None
        with torch.no_grad():
            is_otherwise = torch.stack([x.isnan().all() for x in floating]).all()
        self._asked = tuple(granted), read_later(is_otherwise)
        if reads_at_once(is_otherwise.device):
            self.settle()
        return is_otherwise

    def settle(self) -> None:
        """Read what was asked last, unless that was done. Raises as `ask`."""
        if self._asked is None:
            return
        (granted, read), self._asked = self._asked, None
        if read():
            raise AutoparError(
                f"all that the model returns is NaN: the program takes for granted {'; '.join(granted)}, as it is for "
                "the example inputs, and this batch may be otherwise",
                remedy="Compile with example_inputs for which it is as in training, or keep the decision out of "
                "forward()",
            )


def reads_at_once(device: torch.device) -> bool:
    """Whether reading a number there is no wait."""
    return device.type == "cpu"


def read_later(flag: Tensor) -> Callable[[], bool]:
    """What reads a bool scalar: on CUDA it is copied behind the work that makes it, and only the reader waits."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        copied.synchronize()
        return bool(host)

    return read
