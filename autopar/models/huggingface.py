"""All that is particular to HuggingFace, and the only file that imports transformers (late: it is an extra).

Works with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.models import stages

# Tiny sizes, by the names that every configuration's attribute_map leads to its own. A fused or awkward model keeps
# what makes it so: grouped KV heads stay grouped, GPT-2's vocabulary divides by nothing.
_TINY_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}
_TINY_VOCABULARY = {"gpt2": 127}
_TINY_MAX_TOKENS = 64


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
    """Turn ``use_cache`` off in every configuration of the model for the duration, and warnings too.

    With the cache on, a `DynamicCache` in the output stops torch.export. Nothing happens to other models.
    """
    if not is_hf(model):
        yield
        return
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    before = [(config, config.use_cache) for config in configs.values() if getattr(config, "use_cache", None)]
    for config, _ in before:
        config.use_cache = False
    try:
        with quiet():
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

    return initialize


def initialize_module(module: nn.Module, model: nn.Module) -> None:
    """`initializer` for a single submodule; for a whole model, make the initializer once."""
    initializer(model)(module)


def build(config: dict[str, Any] | str, settings: Settings, tokens: int | None = None) -> nn.Module:
    """The model of ``architectures[0]`` with fresh weights, on torch's default device and in its default dtype.

    config: the fields of a configuration, or a HuggingFace id that is on disk. tokens: the longest sequence wanted, for
    which a tiny model makes room.
    Raises AutoparError when transformers is missing, the id is not on disk, or the architecture is unknown.
    """
    transformers = _import()
    with quiet():
        made = _read_config(transformers, config)
        if settings.tiny:
            made = stages.shrunk(made) if stages.is_staged(made.to_dict()) else _shrunk(made, tokens or 0)
        if settings.dropout is not None:
            _set_dropout(made, settings.dropout)
        for key, value in settings.overrides.items():
            if not hasattr(made, key):
                raise AutoparError(f"{type(made).__name__} has no field {key!r}", remedy="Check the overrides")
            setattr(made, key, value)
        if settings.overrides:
            # Lengths that follow a field (one entry a layer) are worked out again.
            layers = getattr(made.get_text_config(), "num_hidden_layers", 0)
            made = type(made).from_dict(_trimmed(made.to_dict(), layers))
        architecture = (made.architectures or [None])[0]
        model_class = getattr(transformers, architecture or "", None)
        if model_class is None:
            raise AutoparError(
                f"transformers {transformers.__version__} has no model class {architecture!r}",
                where="architectures in the configuration",
                remedy='Name a class of transformers there, as in ["LlamaForCausalLM"]',
            )
        return model_class(made)


def max_tokens(model: nn.Module) -> int:
    """The longest sequence that the model's positions allow; a large number where it has no limit."""
    config: Any = model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**30


def make_batch(model: nn.Module, rows: int, tokens: int) -> dict[str, Tensor]:
    """Random inputs and labels for the model's loss, on torch's default device.

    Causal models get labels equal to input_ids. Masked ones get right padding in every row but the first
    (attention_mask) and labels on about a sixth of the tokens, -100 elsewhere. Image classifiers get pixel_values.
    Raises AutoparError for more tokens than the model has positions, and for a model whose inputs are of another kind.
    """
    config: Any = model.config
    accepts = inspect.signature(model.forward).parameters
    if "pixel_values" in accepts and "input_ids" not in accepts:
        wanted = getattr(config, "image_size", 224)  # a convolution takes any size, and its configuration names none
        size = wanted if isinstance(wanted, int) else wanted[0]
        images = torch.randn(rows, config.num_channels, size, size)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (rows,))}
    if "input_ids" not in accepts:
        raise AutoparError(
            f"No batch can be made for {type(model).__name__}: its forward takes {', '.join(accepts)}",
            remedy="Give module:callable, a function of yours that returns the model and a batch",
        )
    if tokens > max_tokens(model):
        raise AutoparError(
            f"{type(model).__name__} cannot take {tokens} tokens",
            values=f"max_position_embeddings is {max_tokens(model)}",
            remedy=f"Use --batch {rows}x{max_tokens(model)}",
        )
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, tokens))
    if type(model).__name__.endswith("ForMaskedLM"):
        return _masked_batch(ids, vocabulary)
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"input_ids": ids, "labels": torch.randint(config.num_labels, (rows,))}
    return {"input_ids": ids, "labels": ids.clone()} if "labels" in accepts else {"input_ids": ids}


def _masked_batch(ids_BS: Tensor, vocabulary: int) -> dict[str, Tensor]:
    rows, tokens = ids_BS.shape
    # Row r keeps between half and all of its tokens; the first keeps all.
    lengths_B = tokens - torch.arange(rows) * 3 % (tokens // 2 + 1)
    kept_BS = torch.arange(tokens)[None, :] < lengths_B[:, None]
    # The first token of each row is always asked for, so that no row, and no rank's share, is without labels.
    asked_BS = (torch.rand(rows, tokens) < 1 / 6) & kept_BS
    asked_BS = asked_BS | (torch.arange(tokens) == 0)[None, :]
    labels_BS = torch.where(asked_BS, torch.randint(vocabulary, (rows, tokens)), -100)
    return {"input_ids": ids_BS, "attention_mask": kept_BS.long(), "labels": labels_BS}


def _read_config(transformers: Any, config: dict[str, Any] | str) -> Any:
    if isinstance(config, str):
        try:
            return transformers.AutoConfig.from_pretrained(config, local_files_only=True)
        except (OSError, ValueError) as error:
            from autopar.models import catalogue

            raise AutoparError(
                f"There is no model {config!r}",
                values=f"It is no file, folder or HuggingFace id on disk, and none of {', '.join(catalogue.names())}",
                remedy="Name one of these, or module:callable",
            ) from error
    if "model_type" not in config:
        raise AutoparError(
            "The configuration has no model_type", remedy="Give a HuggingFace configuration, as in config.json"
        )
    try:
        return transformers.AutoConfig.for_model(**config)
    except (ValueError, TypeError, AttributeError) as error:
        raise AutoparError(f"transformers refuses the configuration: {error}", remedy="Check its fields") from error


def _shrunk(config: Any, tokens: int) -> Any:
    """The same architecture with small sizes: KV heads stay grouped, layer types mixed, ids in the vocabulary."""
    fields, attribute_map = config.to_dict(), config.attribute_map
    if config.get_text_config() is not config:
        raise AutoparError(
            f"{config.model_type} is made of several models, which --tiny cannot shrink",
            remedy="Give a small configuration, or module:callable",
        )

    def replace(name: str, value: object) -> None:
        key = attribute_map.get(name, name)
        if fields.get(key) is not None:
            fields[key] = value

    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    for name, value in _TINY_SIZES.items():
        replace(name, value)
    if kv_heads is not None:
        replace("num_key_value_heads", 8 if kv_heads == heads else max(1, min(4, kv_heads)))
    replace("head_dim", 8)
    vocabulary = _TINY_VOCABULARY.get(config.model_type, 128)
    positions = max(_TINY_MAX_TOKENS, tokens)
    replace("vocab_size", vocabulary)
    replace("max_position_embeddings", positions)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(name)
        if value is not None and not (isinstance(value, int) and value < vocabulary):
            fields[name] = vocabulary - 1
    rope = fields.get("rope_parameters") or {}
    if "original_max_position_embeddings" in rope:
        shrink = config.max_position_embeddings // rope["original_max_position_embeddings"]
        fields["rope_parameters"] = rope | {"original_max_position_embeddings": max(1, positions // max(1, shrink))}
    return type(config).from_dict(_trimmed(fields, _TINY_SIZES["num_hidden_layers"]))


def _trimmed(fields: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Cut ``layer_types`` to the number of layers, keeping one of each kind where there is room."""
    types = fields.get("layer_types")
    if not types:
        return fields
    if len(types) < num_layers:
        return {key: value for key, value in fields.items() if key != "layer_types"}
    kinds = list(dict.fromkeys(types))
    kept = types[:num_layers] if set(types[:num_layers]) == set(kinds) else (kinds * num_layers)[:num_layers]
    return fields | {"layer_types": kept}


def _set_dropout(config: Any, probability: float) -> None:
    for key, value in config.to_dict().items():
        named = "dropout" in key or key.endswith("pdrop")
        if named and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, probability)


@contextmanager
def quiet() -> Iterator[None]:
    """Errors only from transformers for the duration."""
    logging = _import().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _import() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise AutoparError(
            "This model needs transformers, which is not installed", remedy="pip install 'autopar[hf]'"
        ) from error
    return transformers


def max_token(model: nn.Module) -> int:
    """The size of the vocabulary, or of the set of labels: ids are below it."""
    config: Any = model.config
    return int(getattr(config.get_text_config(), "vocab_size", None) or config.num_labels)
