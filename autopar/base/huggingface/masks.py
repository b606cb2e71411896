"""Which attention masks transformers makes, decided while it is traced as it is in eager mode.

Without padding and packed sequences eager makes no mask and lets attention be causal, or not, as the module says. Under
export it makes one in any case, which is causal even where the module's attention is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from autopar.base.torch_compat import tracing


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Inside, only a mask that depends on the inputs is made where eager might make none.

    What eager does, in other threads too, stays as it is.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    packed = getattr(module, "find_packed_sequence_indices", None)
    exporting = getattr(module, "is_torchdynamo_exporting", None)
    if packed is None or exporting is None:
        yield
        return

    def known_packed(position_ids: Any) -> Any:
        return None if tracing.known_value(position_ids, _follow_each_other) else packed(position_ids)

    module.find_packed_sequence_indices, module.is_torchdynamo_exporting = known_packed, lambda: False
    try:
        yield
    finally:
        module.find_packed_sequence_indices, module.is_torchdynamo_exporting = packed, exporting


def _follow_each_other(rows: Tensor) -> bool:
    """Whether each number in rows[B, S] is one more than the one before it."""
    return bool((rows.diff(dim=-1) == 1).all())
