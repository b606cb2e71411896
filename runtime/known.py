"""The compiled models and optimizers of this process."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer

from autopar.runtime.engine import Engine

ENGINES: WeakSet[Engine] = WeakSet()
"""Of all compiled models, for optimizers to be told of."""
_optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def is_new(optimizer: Optimizer) -> bool:
    """Whether an optimizer is met for the first time; it is known from now on."""
    if optimizer in _optimizers:
        return False
    _optimizers[optimizer] = 1 + max(_optimizers.values(), default=0)
    return True


def optimizers() -> list[Optimizer]:
    """Those that have stepped, in the order in which they first did."""
    return sorted(_optimizers, key=_optimizers.__getitem__)


def copies_of(engine: Engine) -> list[Engine]:
    """The engine and those of copies of its model, in the order in which they were made."""
    return sorted((each for each in ENGINES if each.inner is engine.inner), key=lambda each: each.number)
