"""What the compiled model runs for one kind of input: a generated program and the way in and out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.ir.hooked import HOOK
from autopar.ir.interface import ProgramInterface
from autopar.runtime.added import Added
from autopar.runtime.branches import check_same_ways, other_ways
from autopar.runtime.step import find_loss, is_scalar


class Tells(Protocol):
    """Who says what a step is told of Python's numbers."""

    def buffers(self, device: torch.device) -> Mapping[str, Tensor]:
        """What the program of the step reads."""
        ...

    def done(self) -> None:
        """The step has run."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """One generated program, its border, and the pytrees on both sides. Made once per kind of input, by the caller.

    flatten_inputs: (args, kwargs) of the user's call -> global (or DTensor) tensors by the interface's input names.
    rebuild_output: tensors in the order of `interface.outputs` -> what the model's own forward would return.
    compile_regions: run the regions' forward and backward through torch.compile (see `loader.load_program`).
    widened: names of outputs -> the executable for the same inputs whose backward takes gradients for all of them; runs
    in its place from then on. Collective.
    constants: the values of what the program calls buffers and the model has not.
    added: what `flatten_inputs` adds to the batch, for outputs to be cut back. leaves: of the model's output, in order:
    numbers of the interface's outputs, and what stands there as it is. key: of the program, which those
    have in common that differ in what is added. repeats: whether another batch of the same shapes and arguments, of
    the model in the same modes, gets this executable whatever is in it (`repeats.py`). goes: is told whether its
    batch went its way (None), else has the next one go these at the first branches that values decide (`branches.py`).
    told: says what the step is told of Python's numbers.
    """

    interface: ProgramInterface
    source: str
    filename: str
    rebuild_output: Callable[[Sequence[Any]], Any]
    flatten_inputs: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Tensor]]
    compile_regions: bool | str = False
    widened: Callable[[tuple[str, ...]], Executable] | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    added: Added | None = None
    leaves: Sequence[int | str | None] = ()
    key: object = field(default_factory=object)
    repeats: bool = False
    goes: Callable[[tuple[bool, ...] | None], None] | None = None
    told: Tells | None = None

    def output_of(self, values: Sequence[Any], model: nn.Module) -> Any:
        """What the model's own forward would return; what it leaves on modules is there."""
        for each, value in zip(self.interface.carried, self.carried_among(values), strict=True):
            if each.kind != HOOK:
                each.leave(model, value)
        return self.rebuild_output(values)

    def carried_among(self, values: Sequence[Any]) -> Sequence[Any]:
        """Of all outputs those that the step leaves."""
        carried = self.interface.carried
        first = len(values) - len(carried) - bool(self.interface.branches)
        return values[first : first + len(carried)]

    def place_of_loss(self, values: Sequence[Tensor]) -> int:
        """Where the loss stands among a microbatch's outputs.

        Raises:
            AutoparError: it is none of them.
        """
        loss = find_loss(self.rebuild_output(values), is_scalar)
        for place, value in enumerate(values):
            if value is loss:
                return place
        raise AutoparError(
            "train_step cannot tell which of the program's outputs is the loss", remedy="plan with one microbatch"
        )

    def goes_another_way(self, outputs: Sequence[Tensor | None], drawn: Tensor, device: torch.device) -> bool:
        """Whether a batch goes another way than this program, at a branch that values decide: then the next executable
        for it is another one, and random numbers are drawn again. Collective, of all ranks.

        drawn: the state of torch's generator before the program ran.

        Raises:
            AutoparError: ranks go different ways; there are too many programs.
        """
        branches = self.interface.branches
        ways = other_ways(branches, outputs)
        if branches:
            check_same_ways(ways, branches, device)
            assert self.goes is not None
            self.goes(ways)
        if ways is not None:
            torch.set_rng_state(drawn)
        elif self.told is not None:
            self.told.done()
        return ways is not None
