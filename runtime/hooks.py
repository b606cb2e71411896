"""Hooks of a taken-over model: those of parameters move with them; those of modules inside run in no program, which is
said by name.

The model's own forward hooks run, as its `__call__` is the user's. A module inside is not called: its lines are in the
program. What a forward hook does that was there at `compile` is, too; what it does beside was done once, in the trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from autopar.base.copies import is_own_hook
from autopar.base.torch_compat.distributed import set_tensor_hooks, tensor_hooks
from autopar.runtime.seen_whole import in_pieces_as, seen_whole

logger = logging.getLogger("autopar")

FORWARD = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
BACKWARD = {"_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook"}
_OF_FORWARD = ("torch.", "transformers.utils.output_capturing")
"""Modules whose hooks are a part of what forward computes."""
Key = tuple[str, str, int]
"""The module's name, the kind, the handle's number."""


class Hooks:
    """Says once of each hook inside a model that it does not run. copied: those of the model that this one is copied
    from; without, what hooks are there now are in the program.
    """

    def __init__(self, model: nn.Module, copied: Hooks | None = None) -> None:
        self.modules = [(name, module) for name, module in model.named_modules() if module is not model]
        self.traced: frozenset[Key] = copied.traced if copied else frozenset(key for key, _ in self._found(FORWARD))
        self._said: set[Key] = set()

    def check(self) -> None:
        """Before a forward."""
        for key, hook in self._found({**FORWARD, **BACKWARD}):
            if key in self._said or _is_of_forward(hook):
                continue
            self._said.add(key)
            name, kind, _ = key
            what = f"the {(FORWARD | BACKWARD)[kind]} {getattr(hook, '__qualname__', type(hook).__name__)} of {name}"
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

    def _found(self, kinds: dict[str, str]) -> Iterator[tuple[Key, Any]]:
        for name, module in self.modules:
            for kind in kinds:
                for number, hook in getattr(module, kind).items():
                    if not is_own_hook(hook):
                        yield (name, kind, number), hook


def _is_of_forward(hook: Any) -> bool:
    """Of weight_norm and its like, and of how transformers collects hidden states, which are forward's."""
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(_OF_FORWARD)


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
