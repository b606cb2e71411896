"""What a configuration (config.json) may say, before transformers is given it: it is data, and makes a model of a size
that can be looked at.

transformers builds a module for each layer and expert and a name for each label, whatever their numbers, and takes a
kernel for attention from the hub, code that then runs, where a configuration names one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from autopar.base.errors import AutoparError

LARGEST = 1 << 40
"""Of any whole number in a configuration."""
MOST_MODULES = 1024
"""Layers, blocks of all stages, experts; the deepest models have a few hundred."""
MOST_LABELS = 1 << 20
_MODULES = re.compile(r"layer|depth|expert|block|stage|num_hidden|codebook")
_SHAPED = re.compile(r"size|dim|bins|types|position|window|norm|eps|id\b|interval|freq|step|period")
"""Fields with one of these words are numbers of elements, whatever else is in their names."""
_KERNELS = re.compile(r"attn_implementation|experts_implementation|kernel_config|auto_map|quantization_config")


_NO_NUMBER = "__float__"
"""Of an object that stands for a number that JSON has no word for: {"__float__": "Infinity"}."""
_UNBOUND = {"Infinity": math.inf, "-Infinity": -math.inf}


def with_limits(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields; limits that are none (`time_step_limit`), which transformers writes as objects, are infinities."""

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(each) for each in value]
        return _UNBOUND.get(value[_NO_NUMBER], value) if _is_no_number(value) else value

    return {
        name: read(value) if "limit" in str(name) else with_limits(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
    }


def _is_no_number(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {_NO_NUMBER} and isinstance(value[_NO_NUMBER], str)


def check(fields: Mapping[str, Any]) -> None:
    """Nothing for a configuration that can be handed on.

    Raises:
        AutoparError: a number beyond all bounds, code from elsewhere, a model_type or architectures that are no texts.
    """
    architectures = fields.get("architectures")
    if not isinstance(fields.get("model_type"), str) or not isinstance(architectures, list | None):
        raise _refusal("model_type", "it should be a text, and architectures a list of texts")
    depths = fields.get("depths")
    if isinstance(depths, list) and sum(each for each in depths if isinstance(each, int)) > MOST_MODULES:
        raise _refusal("depths", f"more than {MOST_MODULES} blocks")
    for name, value in _leaves("", fields):
        last = name.rpartition(".")[2]
        if _KERNELS.search(name) and isinstance(value, str) and "/" in value:
            raise _refusal(name, f"{value[:80]!r} names code from elsewhere")
        if last == _NO_NUMBER and "limit" not in name.removesuffix(f".{last}").rpartition(".")[2]:
            raise _refusal(name, f"{str(value)[:20]} is no number that a model has")
        if isinstance(value, float) and not math.isfinite(value):
            raise _refusal(name, f"{value} is no number that a model has")
        if isinstance(value, int | float) and not isinstance(value, bool):
            counts = _MODULES.search(last) and not _SHAPED.search(last)
            most = MOST_LABELS if last == "num_labels" else MOST_MODULES if counts else LARGEST
            if abs(value) > most:
                raise _refusal(name, f"{value:.6g}, at most {most} are taken")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(name, inner)
    else:
        yield name, value


def _refusal(name: str, why: str) -> AutoparError:
    return AutoparError(
        f"The configuration's {name[:80]} does not serve", values=why, remedy="Check it, or take another configuration"
    )


def configurations(model: nn.Module) -> dict[str, Any]:
    """The configurations that forwards of a model's modules read (`self.config.output_hidden_states`), each once, by
    the path of the first module that has it.
    """
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "__dict__") and not isinstance(config, nn.Module | type):
            found.setdefault(id(config), (f"{path}.config".lstrip("."), config))
    return dict(found.values())
