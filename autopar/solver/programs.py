"""The solver of linear and integer programs: MathOpt, of OR-Tools, where this machine has it."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

logger = logging.getLogger("autopar.solver")


@lru_cache
def mathopt() -> Any:
    """MathOpt's module; None where it cannot be imported, which is said once.

    Without it choices come from message passing, prices from steps along their gradient (`prices.Master`), and bounds
    are those of the messages: plans may be a little dearer than the best, and say by how much at most.
    """
    try:
        from ortools.math_opt.python import mathopt as module
    except Exception as error:  # ImportError; another protobuf than it was made with raises errors of its own
        logger.warning(
            "autopar: OR-Tools cannot be imported (%s: %s), so plans are made by message passing alone, within a gap "
            "that they state; pip install ortools for exact ones",
            type(error).__name__,
            error,
        )
        return None
    return module
