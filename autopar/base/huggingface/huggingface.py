"""What of HuggingFace a plan goes through: configurations, models on meta, twins, refusals.

Works with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import configuration, masks, packing, stages
from autopar.base.huggingface.library import library, quiet
from autopar.base.huggingface.tiny import trimmed, twin


@dataclass(frozen=True, slots=True)
class Settings:
    """What to change in a configuration before the model is built."""

    tiny: bool = False
    dropout: float | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)


def is_hf(model: nn.Module) -> bool:
    """Whether the model is a transformers one. Imports nothing: where transformers is not loaded, nothing can be."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def training_capture(model: nn.Module) -> Iterator[None]:
    """Turn ``use_cache`` off in every configuration of the model for the duration, flash attention and warnings too.

    With the cache on, a `DynamicCache` in the output stops torch.export. Nothing happens to models in which none is of
    transformers (one may be wrapped in another's module): give it a copy, whose configurations nobody else reads.
    """
    if not any(is_hf(module) for module in model.modules()):
        yield
        return
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(config, config.use_cache) for config in configs.values() if getattr(config, "use_cache", None)]
    for config, _ in before:
        config.use_cache = False
    try:
        with quiet(), masks.as_in_eager(), packing.without_flash_attention([*configs.values()]):
            yield
    finally:
        for config, value in before:
            config.use_cache = value


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """A function that gives one submodule the random weights and the buffers (rotary frequencies …) of a fresh model.

    The submodule's own parameters and buffers, and those that the model initializes with it (GPT-2's attention scales
    its projection), must be real tensors; they are written in place, drawing from torch's global generator. Call it in
    the order of ``model.apply``, children first: a parent may draw a child's weight again. Modules that belong to no
    transformers model get their ``reset_parameters()``, where they have one.
    """
    owners: dict[int, Any] = {}
    for candidate in model.modules():
        if is_hf(candidate):
            # Inner models of a composite come later and know their own parts better.
            owners.update((id(module), candidate) for module in candidate.modules())

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        if id(module) not in owners:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            return
        for tensor in (*module.parameters(), *module.buffers()):
            # A model built on meta marks its tensors as done, and transformers' initializers then skip them.
            if getattr(tensor, "_is_hf_initialized", False):
                delattr(tensor, "_is_hf_initialized")
        owners[id(module)]._init_weights(module)
        scale = getattr(module, "logit_scale", None)
        if isinstance(scale, nn.Parameter):  # set where it is made (CLIP), so that transformers never does it again
            scale.fill_(owners[id(module)].config.logit_scale_init_value)

    return initialize


def initialize_module(module: nn.Module, model: nn.Module) -> None:
    """`initializer` for a single submodule; for a whole model, make the initializer once."""
    initializer(model)(module)


class NotOnDisk(AutoparError):
    """A HuggingFace id that is not on disk."""


def build(config: dict[str, Any] | str, settings: Settings, tokens: int | None = None) -> nn.Module:
    """The model of ``architectures[0]`` with fresh weights, on torch's default device and in its default dtype.

    config: the fields of a configuration, or a HuggingFace id that is on disk. tokens: the longest sequence wanted, for
    which a tiny model makes room.
    Raises AutoparError when transformers is missing, the id is not on disk, or the architecture is unknown; for a
    configuration that makes no model, or whose numbers are beyond all bounds (`configuration.check`).
    """
    transformers = library()
    with quiet(), refusals():
        made = _read_config(transformers, config)
        model_class = _model_class(transformers, made)
        if settings.tiny:
            made = stages.shrunk(made) if stages.is_staged(made.to_dict()) else _twin(model_class, made, tokens or 0)
        if settings.dropout is not None:
            _set_dropout(made, settings.dropout)
        for key, value in settings.overrides.items():
            if not hasattr(made, key):
                raise AutoparError(f"{type(made).__name__} has no field {key!r}", remedy="Check the overrides")
            setattr(made, key, value)
        if settings.overrides:
            # Lengths that follow a field (one entry a layer) are worked out again.
            layers = getattr(made.get_text_config(), "num_hidden_layers", 0)
            made = type(made).from_dict(trimmed(made.to_dict(), layers))
        return model_class(made)


def _model_class(transformers: Any, config: Any) -> Any:
    architecture = str((config.architectures or [""])[0])[:200]
    # Asked of transformers' table of names, where it has one: getattr loads what has the name, and trainers load more.
    module = getattr(transformers, "_class_to_module", {}).get(architecture, "modeling_")
    model_class = getattr(transformers, architecture, None) if "modeling_" in module else None
    # Among the names of transformers are functions and classes that do something else when they are called.
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise AutoparError(
            f"transformers {transformers.__version__} has no model class {architecture!r}",
            where="architectures in the configuration",
            remedy='Name a class of transformers there, as in ["LlamaForCausalLM"]',
        )
    return model_class


def _twin(model_class: Any, config: Any, tokens: int) -> Any:
    def build(small: Any) -> nn.Module:
        with torch.device("meta"):
            return model_class(small)

    return twin(config, tokens, build)


def twin_of(model: nn.Module, tokens: int) -> nn.Module | None:
    """A model of the same class and modes with small sizes, without values; None where the model has modules or
    functions that its configuration does not make. tokens: the longest sequence wanted.
    """
    config: Any = model.config
    with quiet(), torch.device("meta"):
        if stages.is_staged(config.to_dict()):
            return None
        small: nn.Module = type(model)(_twin(type(model), config, tokens))
    if {type(module) for module in small.modules()} != {type(module) for module in model.modules()}:
        return None
    if any(module.training != model.training for module in model.modules()) or _overridden(model):
        return None
    own = {name: x for name, x in vars(model).items() if callable(x) and name != "forward"}
    vars(small).update(own)  # a loss that was set
    return small.train(model.training)


def _overridden(model: nn.Module) -> bool:
    return any("forward" in vars(module) for name, module in model.named_modules() if name)


@contextmanager
def refusals() -> Iterator[None]:
    """Whatever transformers raises over a configuration as an error of ours: it checks little of one by itself."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        raise AutoparError(
            f"transformers makes no model of the configuration: {type(error).__name__}: {str(error)[:300]}",
            remedy="Check its fields: heads, sizes, numbers of layers",
        ) from error


def _read_config(transformers: Any, config: dict[str, Any] | str) -> Any:
    if isinstance(config, str):
        try:
            return transformers.AutoConfig.from_pretrained(config, local_files_only=True)
        except (OSError, ValueError) as error:
            raise NotOnDisk(f"there is no HuggingFace model {config!r} on disk") from error
    if "model_type" not in config:
        raise AutoparError(
            "The configuration has no model_type", remedy="Give a HuggingFace configuration, as in config.json"
        )
    configuration.check(config)
    try:
        return transformers.AutoConfig.for_model(**configuration.with_limits(config))
    except Exception as error:  # of checks of its own, which are of many kinds
        raise AutoparError(
            f"transformers refuses the configuration: {str(error)[:300]}", remedy="Check its fields"
        ) from error


def _set_dropout(config: Any, probability: float) -> None:
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            _set_dropout(getattr(config, name), probability)
    for key, value in config.to_dict().items():
        named = "dropout" in key or key.endswith("pdrop")
        if named and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, probability)


def max_token(model: nn.Module) -> int:
    """The size of the vocabulary, or of the set of labels: ids are below it."""
    config: Any = model.config
    return int(getattr(config.get_text_config(), "vocab_size", None) or config.num_labels)
