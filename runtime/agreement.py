"""What the ranks compare at every forward: that they are about to do the same step on the same batch.

Each rank sends six numbers, most of them hashes of what it is about to do, before anything else. Ranks that differ
would compute wrong numbers without a word (another batch, another learning rate), or wait for each other for ever (a
rank that plans for a batch that the others know). On a CPU the numbers are compared at once; on other devices nobody
waits for them: they are compared when the next forward begins, or before a plan is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.tracing import tree_leaves_with_path
from autopar.runtime.checks import gather_objects

SAMPLES = 256
"""Elements of each input that are compared."""
VALUES = "the values of the inputs"
FACTS: Mapping[str, str] = {
    "the numbers of forwards": "Run the same steps on every rank: a condition on the rank must not skip one",
    "the modes of modules (train, eval)": "Call train() and eval() on every rank alike",
    "the modes of recording gradients": "Enter torch.no_grad() on every rank alike",
    "the kinds of the inputs": "Pass inputs of the same shapes and dtypes on every rank",
    "the settings of the optimizer": "Set learning rates and the like from what is the same on every rank",
    VALUES: "Pass the same global batch on every rank (same sampler seed), or use compiled.shard_loader",
}
"""What is compared, in this order, and what to do where it differs."""


def _plain(value: Any) -> str:
    """What says the same on every rank, without looking at a device."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return repr(value.item())
    return type(value).__name__


Detail = Mapping[str, str]
"""What differs, by its name: of an input, or of the fact itself."""


class Agreement:
    """Of one compiled model: sends a step's facts, and compares them in time.

    settings: of the optimizer of its parameters that stepped last.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.settings = ""
        self._sent: tuple[Tensor, Callable[[], None] | None, Callable[[], list[Detail]]] | None = None

    def note(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer."""
        groups = [
            ", ".join(f"{name}={_plain(value)}" for name, value in sorted(group.items()) if name != "params")
            for group in optimizer.param_groups
        ]
        self.settings = f"{type(optimizer).__name__}({'; '.join(groups)})"

    def begin(self, number: int, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before anything else of a forward. Collective.

        Raises:
            AutoparError: ranks differ; says which, in what, and what each has.
        """
        self.settle()
        if dist.get_world_size() == 1:
            return
        named = dict(tree_leaves_with_path({**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}))
        modes, records = [module.training for module in model.modules()], torch.is_grad_enabled()
        kinds = {name: _kind(leaf) for name, leaf in named.items()}
        values = {name: _values(leaf, self.device) for name, leaf in named.items() if _is_compared(leaf)}
        known = (number, _hash(bytes(modes)), int(records), _hash(repr(kinds)), _hash(self.settings))
        odd = [torch.zeros((), dtype=torch.int64, device=self.device)]
        odd += [value * (2 * place + 1) for place, value in enumerate(values.values())]
        own = torch.cat([torch.tensor(known, dtype=torch.int64).to(self.device), torch.stack(odd).sum().view(1)])
        found = torch.empty(dist.get_world_size() * len(own), dtype=torch.int64, device=self.device)
        work = dist.all_gather_into_tensor(found, own, async_op=True)

        settings = self.settings

        def details() -> list[Detail]:
            training = f"{sum(modes)} of {len(modes)} modules train"
            return [
                {"": str(number)}, {"": training}, {"": str(records)}, kinds, {"": settings},
                {name: str(int(value)) for name, value in values.items()},
            ]  # fmt: skip

        self._sent = (found, None if work is None else work.wait, details)
        if self.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Compare what was sent last, unless that was done. Raises as `begin`."""
        if self._sent is None:
            return
        (found, wait, details), self._sent = self._sent, None
        if wait is not None:
            wait()
        rows = found.view(-1, len(FACTS)).tolist()
        for place, (fact, remedy) in enumerate(FACTS.items()):
            different = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
            if different:
                everywhere = [each[place] for each in gather_objects(details())]
                raise _disagreement(fact, remedy, different, everywhere[0], everywhere[different[0]])


def _disagreement(fact: str, remedy: str, ranks: list[int], here: Detail, there: Detail) -> AutoparError:
    names = [name for name in dict.fromkeys((*here, *there)) if here.get(name) != there.get(name)]
    where = ", ".join(name for name in names if name) or None
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    values = None
    if names and fact != VALUES:
        name = names[0]
        values = f"rank 0 {here.get(name, 'has none')}, rank {ranks[0]} {there.get(name, 'has none')}"
    return AutoparError(f"{fact} differ on {who} from rank 0's", where=where, values=values, remedy=remedy)


def _hash(content: str | bytes) -> int:
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, DTensor):
        return f"DTensor {tuple(leaf.shape)} {leaf.dtype} {leaf.placements}"
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else _plain(leaf)


def _is_compared(leaf: Any) -> bool:
    """Whether every rank has the input whole, with values."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.numel() > 0 and not leaf.is_meta


def _values(x: Tensor, device: torch.device) -> Tensor:
    """A hash of some elements, an int64 scalar on the device; nothing waits for it."""
    flat = x.detach().reshape(-1)
    taken = flat[:: max(1, flat.numel() // SAMPLES)][: 2 * SAMPLES]
    if taken.is_complex():
        taken = torch.view_as_real(taken).reshape(-1)
    bits = taken.double().view(torch.int64) if taken.is_floating_point() else taken.long()
    odd = torch.arange(1, 2 * len(bits), 2, device=bits.device) * 0x9E3779B97F4A7
    return (bits * odd).sum().to(device)
