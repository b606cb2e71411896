"""For which other sizes of a batch the model does what it does for this one.

The model is traced once with sizes that are symbols. Every time that its Python looks at one (`if length > 512`, a
table of masks, `int(length)`) torch notes what was found; where all of that is so for another size, the model does the
same there, and every size in its graph is the same polynomial of the inputs' sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.base.huggingface import huggingface
from autopar.base.torch_compat import symbolic
from autopar.base.torch_compat import tracing as compat
from autopar.passes.checks import ChecksPass
from autopar.passes.emptied import empty_batch, traced_copy
from autopar.passes.experts import as_operators
from autopar.passes.seeds import Seeds

logger = logging.getLogger("autopar.sizes")


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """What a model's Python took for granted of the sizes of its inputs.

    symbols: of each size that may vary.
    """

    env: Any
    symbols: Mapping[tuple[str, int], Any]

    def holds(self, sizes: Mapping[tuple[str, int], int]) -> bool:
        """Whether the model does the same for these sizes."""
        values = {symbol: sizes[size] for size, symbol in self.symbols.items()}
        return symbolic.holds(self.env, values)


def size_guard(
    model: nn.Module,
    inputs: Mapping[str, Any],
    varying: Collection[tuple[str, int]],
    *,
    precision: torch.dtype | None = None,
) -> SizeGuard | None:
    """The guard for sizes that vary; None where the model cannot be traced so, or has sizes that are no polynomials.

    varying: (input, dim); others are as in `inputs`.
    """
    dynamic = dict.fromkeys(varying, symbolic.AUTO)
    try:
        with compat.exclusive():
            clone, batch = traced_copy(model, precision), empty_batch(inputs, precision)
            wanted = _wanted(batch, dynamic)
            with huggingface.training_capture(clone), as_operators(clone), Seeds(type(model).__name__), ChecksPass():
                exported = torch.export.export(clone, (), batch, dynamic_shapes=wanted, strict=False)
    except Exception as error:  # of the model's Python, of torch: then nothing is known
        logger.info("sizes cannot be symbols: %s", error)
        return None
    graph = exported.graph_module.graph
    symbols = symbolic.input_symbols(exported, batch)
    if symbols.keys() != dynamic.keys() or not symbolic.is_polynomial(graph):
        logger.info("the model's sizes are no polynomials of the batch's: %s", symbols)
        return None
    return SizeGuard(symbolic.shape_env_of(graph), symbols)


def _wanted(batch: Mapping[str, Any], dynamic: Mapping[tuple[str, int], Any]) -> Any:
    leaves, spec = compat.tree_flatten(dict(batch))
    paths = [path for path, _ in compat.tree_leaves_with_path(dict(batch))]
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        dims = {dim: kind for (name, dim), kind in dynamic.items() if name == path}
        found.append(dims or None if isinstance(leaf, torch.Tensor) else None)
    return compat.tree_unflatten(found, spec)
