"""What a block's forward calls the tensors that it is given: the parameters of its signature.

    layer(dropout, mask)   of   def forward(self, hidden_states, attention_mask)   →   hidden_states, attention_mask

A tensor inside of a tuple has no word here: its maker's is better than a number.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, fx, nn

from autopar.base.torch_compat import tracing
from autopar.ir.names import RESERVED
from autopar.ir.nodes import GIVEN as NOTE
from autopar.passes.blocks import alike
from autopar.passes.blocks.marks import GIVEN


def words_of(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """For each tensor among the arguments, as `tree_leaves_with_path` finds them, its word; "" where there is none."""
    names = _positional(forward, len(args))
    found: list[str] = []
    for path, leaf in tracing.tree_leaves_with_path((args, dict(kwargs))):
        if isinstance(leaf, Tensor):
            kind, first, *rest = path.split(".")
            name = rest[-1] if rest else first if kind == "1" else names[int(first)]
            found.append(name if _is_word(name) else "")
    return found


def _positional(forward: Callable[..., Any], count: int) -> list[str]:
    """The parameters that the first arguments fill; "" for those that have no name of their own."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return [""] * count
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*plain[:count], *[""] * (count - len(plain))]


def _is_word(name: str) -> bool:
    """Whether a variable may be called so: Python and the generated functions have no other use for it."""
    return name.isidentifier() and not hasattr(builtins, name) and name not in RESERVED


def note(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Mark the graph that is being traced with what the block at `path` calls its arguments."""
    words = words_of(forward, args, kwargs)
    if any(words):
        leaves = tracing.tree_leaves_with_path((args, dict(kwargs)))
        GIVEN([leaf for _, leaf in leaves if isinstance(leaf, Tensor)], path, words)


@contextmanager
def noted(model: nn.Module) -> Iterator[None]:
    """While this lasts, each call of a block of this copy of a model is marked, but for blocks that do that themselves:
    those whose forward has been replaced.
    """
    with ExitStack() as stack:
        for blocks in alike.outermost_lists(model):
            for path, block in blocks.items():
                if "forward" not in vars(block):
                    stack.callback(_mark_calls(block, path).remove)
        yield


def _mark_calls(block: nn.Module, path: str) -> Any:
    def mark(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(path, module.forward, args, kwargs)

    return block.register_forward_pre_hook(mark, with_kwargs=True)


def take_notes(graph: fx.Graph) -> None:
    """What marks say becomes a note at the values; the marks go."""
    for mark in [node for node in graph.nodes if node.target is GIVEN]:
        values, path, words = mark.args
        for value, word in zip(values, words, strict=True):
            if word and isinstance(value, fx.Node):
                value.meta[NOTE] = {path: word, **value.meta.get(NOTE, {})}
        graph.erase_node(mark)
