"""What a mixture's router gives beside tokens (`output_router_logits`), in calls with a cache.

transformers adds a loss of the routers to the output then, over a mask as long as the tokens of the call. `generate()`
reads neither, and with a cache the mask is longer: on one device such a call fails as soon as something is padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from autopar.base.errors import AutoparError

NAME = "output_router_logits"


def without_routers(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of whose output nobody reads what routers give."""
    return {**given, NAME: False} if _asks(model, given) else dict(given)


def check_routers(model: Any, given: Mapping[str, Any]) -> None:
    """Raises an AutoparError where a call of a script's own, with a cache, asks for what routers give."""
    if _asks(model, given):
        raise AutoparError(
            f"{type(model).__name__} was called with a cache and {NAME}",
            values="its loss of routers is over a mask as long as the tokens, a cache's is longer",
            remedy=f"hand in {NAME}=False; a call with use_cache=False gives the loss and the logits of the routers",
        )


def _asks(model: Any, given: Mapping[str, Any]) -> bool:
    asked = given.get(NAME)
    if asked is None:
        config = model.config
        asked = getattr(config, NAME, None) or getattr(config.get_text_config(decoder=True), NAME, None)
    if not asked:
        return False
    parameters = inspect.signature(type(model).forward).parameters
    return NAME in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
