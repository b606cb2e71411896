"""Hooks of a taken-over model: those of parameters move with them; those of modules inside run in no program, which is
said by name.

The model's own forward hooks run, as its `__call__` is the user's. A module inside is not called: its lines are in the
program, and so is what a forward hook gives back that was there at `compile`. One that gives nothing back is called
behind the program, with what it would have been given (`ir/hooked.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.base.copies import is_own_hook
from autopar.base.errors import AutoparError
from autopar.base.hooks import is_of_forward, name_of
from autopar.base.torch_compat.distributed import set_tensor_hooks, tensor_hooks
from autopar.ir.hooked import HOOK, looks
from autopar.ir.told import Carried
from autopar.runtime.seen_whole import in_pieces_as, seen_whole

logger = logging.getLogger("autopar")

FORWARD = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
BACKWARD = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}
Key = tuple[str, str, int]
"""The module's name, the kind, the handle's number."""


class Hooks:
    """Says once of each hook inside a model that it does not run. copied: those of the model that this one is copied
    from; without, what hooks are there now are in the program.
    """

    def __init__(self, model: nn.Module, copied: Hooks | None = None) -> None:
        self.modules = [(name, module) for name, module in model.named_modules() if module is not model]
        self.traced: frozenset[Key] = copied.traced if copied else frozenset(key for key, _ in self._found(FORWARD))
        self._counts = Counter((*key[:2], name_of(hook)) for key, hook in self._found(FORWARD) if key in self.traced)
        self._said: set[Key] = set()

    def check(self, carried: Sequence[Carried]) -> None:
        """Before a forward. carried: what its program leaves."""
        called = {(each.held.path, each.held.name, each.held.keys[0]) for each in carried if each.kind == HOOK}
        for key, hook in self._found({**FORWARD, **BACKWARD}):
            if key in self._said or is_of_forward(hook):
                continue
            if key in self.traced and (*key[:2], name_of(hook)) in called:
                continue
            self._said.add(key)
            name, kind, _ = key
            what = f"the {(FORWARD | BACKWARD)[kind]} {name_of(hook)} of {name}"
            if key in self.traced:
                logger.warning(
                    "autopar: %s ran while the model was traced: what it returns is in the program, what it does "
                    "beside is not done again", what,
                )  # fmt: skip
            else:
                logger.warning(
                    "autopar: %s does not run: its module is not called, its lines are in the program; hooks of the "
                    "model itself and of parameters run, and a value that forward returns can be looked at", what,
                )  # fmt: skip

    def call(self, carried: Sequence[Carried], values: Sequence[Any]) -> None:
        """Behind a forward: the hooks that give nothing back. values: what its program left, in order.

        Raises:
            AutoparError: of several hooks of one name on a module only some are left.
        """
        modules = dict(self.modules)
        for look, given in looks(carried, values):
            now = [
                (number, hook) for number, hook in getattr(modules[look.path], look.table).items()
                if (look.path, look.table, number) in self.traced and name_of(hook) == look.name
            ]  # fmt: skip
            if not now:
                continue  # taken off
            if len(now) != self._counts[look.path, look.table, look.name]:
                raise AutoparError(
                    f"{look.path} had several hooks {look.name} at autopar.compile, and some were taken off",
                    remedy="take all of them off, or give them names of their own",
                )
            now[look.number][1](modules[look.path], *given)

    def _found(self, kinds: dict[str, str]) -> Iterator[tuple[Key, Any]]:
        for name, module in self.modules:
            for kind in kinds:
                for number, hook in getattr(module, kind).items():
                    if not is_own_hook(hook):
                        yield (name, kind, number), hook


def keep_hooks(source: Tensor, target: Tensor) -> None:
    """The hooks of a tensor become another one's that takes its place, with their handles.

    Gradients of taken-over parameters are DTensors. A hook that was made for plain ones gets them whole.
    """
    hooks, after = tensor_hooks(source)
    set_tensor_hooks(source, None, None)
    set_tensor_hooks(target, hooks, after)


def for_pieces(parameter: Tensor) -> None:
    """Hooks that were registered on a plain parameter from now on meet DTensors."""
    hooks, _ = tensor_hooks(parameter)
    for number, hook in (hooks or {}).items():
        hooks[number] = _on_whole(hook)


def _on_whole(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    def on_whole(gradient: Tensor) -> Tensor | None:
        found = hook(seen_whole(gradient.detach()))
        return None if found is None else in_pieces_as(found, gradient)

    return on_whole
