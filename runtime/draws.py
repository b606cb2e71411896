"""Seeds of random draws, taken from torch's own generator: what repeats or restores that, repeats the draws.

A program computes its random numbers from one seed a step (`autopar/operators/random_numbers.py`). The seed is the next
number of the CPU's default generator, whatever the device: `torch.manual_seed`, `torch.set_rng_state`, `fork_rng` and
activation checkpoints mean for it what they mean in eager. Programs that draw nothing leave the generator alone.
"""

from __future__ import annotations

import ast
from functools import lru_cache

import torch

RANGE = 2**62
"""Seeds are below this."""


def peek() -> int:
    """The number that the generator gives next, which it still gives then."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    return _next(copy)


def take() -> None:
    """Have the generator give that number."""
    _next(torch.default_generator)


def _next(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(RANGE, generator=generator))


@lru_cache(maxsize=64)
def reads_seed(source: str, names: tuple[str, ...]) -> bool:
    """Whether one of these functions of a program's text does anything with its last argument, which is the seed."""
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or function.name not in names or not function.args.args:
            continue
        seed = function.args.args[-1].arg
        if any(isinstance(node, ast.Name) and node.id == seed for node in ast.walk(function)):
            return True
    return False
