"""What a run holds at its fullest, where its framework keeps other things than autopar's program does.

The plan's step is walked as `autopar/cost/memory/step.py` walks it, with what `Keeps` says in place of what autopar's
program keeps. Each of these is read in the run's sources, which benchmarks/published/mixtures.toml names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.cost.memory.calls import CallCosts
from autopar.cost.memory.step import Step, _Life
from autopar.ir.program import Program
from autopar.ir.region import Call
from autopar.ir.values import Variable

STACKED = 3
"""Dims of the parameters of all experts of a layer, from which on a product takes a view of them."""


@dataclass(frozen=True, slots=True)
class Keeps:
    """What a run keeps on a rank where autopar's program keeps something else.

    added: the dtype in which gradients of microbatches are added up ("" for autopar's, which is the stored one's).
    weights: whether parameters lie in pieces in bf16, too, beside those that the optimizer updates.
    views: whether what is gathered of experts for a forward stays until its backward: autograd saves a view of it.
    buffer: elements, in bf16, of the buffers in which gradients travel.
    model_rows, expert_rows: what experts keep of each token's choice for the backward, in bf16: rows as wide as the
        model, and as wide as an expert.
    kernels: bytes that a module keeps of a token for the backward, by what its name ends with; all ranks of the axis
        that shares tokens together.
    """

    added: str = ""
    weights: bool = False
    views: bool = False
    buffer: float = 0.0
    model_rows: float = 0.0
    expert_rows: float = 0.0
    kernels: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what a rank computes at a time: tokens; how many ranks share them (an axis of tensor parallelism); choices
    of experts a token; widths of the model and of an expert.
    """

    tokens: float
    sharing: int
    chosen: int
    model: int
    expert: int


def run_peak_bytes(program: Program, keeps: Keeps, sizes: Sizes, *, reduced: bool, waited: bool) -> float:
    """Bytes of the fullest rank of the run. reduced: gradients are reduced in every microbatch, and added in pieces;
    the program is then of one microbatch. waited: nothing is gathered ahead.
    """
    return _Run(program, keeps, sizes, reduced, waited).peak()


class _Run(Step):
    """The step of a program, which keeps what the run does."""

    def __init__(self, program: Program, keeps: Keeps, sizes: Sizes, reduced: bool, waited: bool) -> None:
        super().__init__(program, CallCosts(program))
        self.keeps, self.at_a_time, self.reduced = keeps, sizes, reduced
        self.runs_beside = self.runs_beside and not waited
        for place, call in enumerate(self.calls):
            self._without_kernels(place, call)
            self._with_experts(place, call)

    def peak(self) -> float:
        """Bytes. Outputs of the microbatch before lie there while the next goes forward: the loop has their name."""
        always = sum(self.always().values()) + self.keeps.buffer * torch.bfloat16.itemsize
        if self.keeps.weights:
            always += sum(map(self._reduced, self._trained()))
        return always + self.sums() + max(self.forwards() + self.output_bytes(), self.backwards())

    def sums(self) -> float:
        """Gradients of all microbatches so far."""
        if self.reduced:
            return sum(map(self._reduced, self._trained()))
        return super().sums()

    def sum_of(self, variable: Variable) -> float:
        """Whole, as this rank computes it, in the dtype in which they are added."""
        if not self.keeps.added:
            return super().sum_of(variable)
        return self._raw(variable, getattr(torch, self.keeps.added).itemsize)

    def _gradients_from(self, calls: Sequence[Call]) -> list[_Life]:
        return [] if self.reduced else super()._gradients_from(calls)

    def _without_kernels(self, place: int, call: Call) -> None:
        """What modules of kernels keep, in place of what the program does of them."""
        origins = self.program.region(call.region).origins
        for module, of_token in self.keeps.kernels.items():
            found = [key for key in self.saved if key[:2] == ("own", self.stage.calls[place])]
            theirs = [key for key in found if _is_of(origins, key[2], module)]
            for key in theirs:
                del self.saved[key]
            if theirs:
                size = of_token * self.at_a_time.tokens / self.at_a_time.sharing
                self._keep(place, f"kernels of {module}", size)

    def _with_experts(self, place: int, call: Call) -> None:
        """What experts keep of choices and, of what is gathered of them, until the backward."""
        stacked = [
            variable for name in call.slots
            if len((variable := self.variables[name]).type.shape) >= STACKED and variable.trainable
            and _is_experts(variable.name)
        ]  # fmt: skip
        if not stacked:
            return
        sizes, keeps = self.at_a_time, self.keeps
        choices = sizes.tokens * sizes.chosen / sizes.sharing
        width = keeps.model_rows * sizes.model + keeps.expert_rows * sizes.expert
        self._keep(place, "choices", choices * width * torch.bfloat16.itemsize)
        if keeps.views:
            self._keep(place, "views", sum(map(self._raw, stacked)))

    def _keep(self, place: int, name: str, size: float) -> None:
        self.saved[("own", self.stage.calls[place], name)] = (size, place, place)


def _is_experts(name: str) -> bool:
    return ".experts." in name


def _is_of(origins: Mapping[str, str], held: str, module: str) -> bool:
    """Whether a storage, named by phase and node, is of a module whose name ends so."""
    origin = origins.get(held.split()[-1], "")
    return bool(re.match(rf"(.*\.)?{re.escape(module)} \(", origin))
