"""What is particular to peft: what of a model's state its adapters are, and what they are switched by."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

SWITCHES = ("_disable_adapters", "_adapters_disabled", "_active_adapter", "active_adapter", "merged_adapters")
"""Attributes of modules that decide, as `training` does, what a forward computes (`disable_adapter()`)."""


def switches(model: nn.Module) -> tuple[Any, ...]:
    """How the model's adapters are switched; nothing where it has none."""
    found = [
        (number, switch, repr(vars(module)[switch]))
        for number, module in enumerate(model.modules())
        for switch in SWITCHES
        if switch in vars(module)
    ]
    return tuple(found)


def has_adapters(kind: type[nn.Module]) -> bool:
    """Whether it is one of peft's models. Imports nothing."""
    return any(base.__module__.startswith("peft.") for base in kind.__mro__)


def written_names(model: Any, state: Mapping[str, Any], options: Mapping[str, Any]) -> Collection[str]:
    """The names of what peft's `save_pretrained(**options)` writes of a model's state: the adapters, not the base."""
    from peft import get_peft_model_state_dict

    taken: set[int] = set()
    layers = options.get("save_embedding_layers", "auto")
    for adapter in options.get("selected_adapters") or model.peft_config:
        written = get_peft_model_state_dict(
            model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=layers
        )
        taken.update(map(id, written.values()))
    names = [name for name, value in state.items() if id(value) in taken]
    return names if {id(state[name]) for name in names} == taken else list(state)
