"""Find a model by what the user typed, build it, and make a batch for it.

A specification is a name shipped with autopar (`names`), a configuration (its JSON file or the folder that holds
config.json), a HuggingFace id that is on disk, or ``module:callable`` that returns a model and a batch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.base.errors import AutoparError
from autopar.base.files import MIB, parse_json, read_text
from autopar.base.huggingface import stages
from autopar.base.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

ALIASES = {
    "llama": "llama-3.1-8b", "bert": "bert-base", "qwen3": "qwen3-8b", "gemma2": "gemma-2-2b", "phi3": "phi-3-mini",
    "t5": "t5-base", "vit": "vit-base", "whisper": "whisper-small", "clip": "clip-vit-base-patch32",
    "resnet": "resnet-50", "mistral": "mistral-7b",
}  # fmt: skip
PLAIN = ("mlp", "cnn")
MOST_BYTES, MOST_VALUES = 4 * MIB, 200_000
"""Of a configuration: one with the names of 21,000 classes has a mebibyte and 42,000 values."""
_REMEDY = "give a HuggingFace configuration, as in config.json"
TINY_BATCH = (8, 16)
DEFAULT_BATCH = (8, 2048)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and one global batch for it, as keyword arguments of its forward; both on the device asked for.

    name: for titles and file names; the specification, shortened. batch: tensors, and for some models a flag.
    """

    name: str
    model: torch.nn.Module
    batch: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of `autopar models`."""

    name: str
    architecture: str
    summary: str


def names() -> tuple[str, ...]:
    """Every name that `load` knows, aliases included, sorted."""
    return tuple(sorted({*_bundled(), *ALIASES, *PLAIN}))


def entries() -> tuple[Entry, ...]:
    """What the names stand for. Needs neither torch nor transformers."""
    return tuple(_entry(name) for name in names())


def load(
    spec: str,
    *,
    tiny: bool = False,
    batch: tuple[int, int] | None = None,
    dtype: torch.dtype | str | None = None,
    device: Literal["meta", "cpu", "cuda"] = "meta",
    seed: int = 0,
    dropout: float | None = None,
    overrides: Mapping[str, object] | None = None,
) -> LoadedModel:
    """Build the model with random weights, in training mode, and a batch for it.

    tiny: the same architecture with small sizes (hidden 64, 8 heads, 2 layers).
    batch: (sequences, tokens); images and vectors use the first number. Default 8x2048, 8x16 when tiny.
    dtype: of the parameters, default float32. device: "meta" holds no numbers, enough for planning; a callable decides
    for itself where it builds.
    seed: of weights and batch; the caller's random state is left as it was.
    dropout: every dropout probability, instead of the configuration's. overrides: other fields of the configuration.

    Raises AutoparError for a specification that names nothing, a configuration that is damaged, a batch that the model
    cannot take, and options that mean nothing for this kind of model.
    """
    if batch is not None and min(batch) < 1:
        raise AutoparError("A batch needs at least one row of one token", values=f"Given: {batch[0]}x{batch[1]}")
    name = ALIASES.get(spec, spec)
    if ":" in spec and not Path(spec).exists():
        if tiny or batch or dtype or dropout is not None or overrides:
            raise AutoparError(
                f"{spec} makes its own model and batch, so tiny, batch, dtype, dropout and overrides do not apply",
                remedy="Leave them out, and let the callable choose",
            )
        return _load_callable(spec)
    with _build_context(device, dtype, seed):
        if name in PLAIN:
            return _load_plain(spec, name, tiny, batch, dropout, overrides)
        from autopar.base.huggingface import huggingface
        from autopar.cli.models import batches

        config = _find_config(spec, name)
        settings = huggingface.Settings(tiny=tiny, dropout=dropout, overrides=dict(overrides or {}))
        try:
            model = huggingface.build(config, settings, tokens=batch[1] if batch else None)
        except huggingface.NotOnDisk as error:
            raise AutoparError(
                f"There is no model {config!r}",
                values=f"It is no file, folder or HuggingFace id on disk, and none of {', '.join(names())}",
                remedy=did_you_mean(str(config), names()) + "Name one of these, or module:callable",
            ) from error
        rows, tokens = batch or (TINY_BATCH if tiny else DEFAULT_BATCH)
        with huggingface.refusals():
            made = batches.make_batch(model, rows, tokens if batch else min(tokens, batches.max_tokens(model)))
        return LoadedModel(Path(spec).stem if spec.endswith(".json") else spec, model, made)


def _find_config(spec: str, name: str) -> dict[str, Any] | str:
    """The configuration as a dict, or the id that transformers shall look for on disk."""
    path = Path(os.path.expanduser(spec))
    if name in _bundled():
        text, where = resources.files("autopar.cli.models").joinpath("data", f"{name}.json").read_text("utf-8"), name
    elif (path.exists() and not path.is_dir()) or (path / "config.json").exists():
        path = path / "config.json" if path.is_dir() else path
        text, where = read_text(path, "configuration", most_bytes=MOST_BYTES, remedy=_REMEDY), str(path)
    elif path.exists():
        raise AutoparError(
            f"{spec!r} is a folder without a config.json", remedy="Name the folder or the JSON file of a configuration"
        )
    else:
        return spec
    config = parse_json(text, "model's configuration", where=where, remedy=_REMEDY, most_values=MOST_VALUES)
    if not isinstance(config, dict):
        raise AutoparError("The model's configuration is not a JSON object", where=where, remedy=_REMEDY)
    return config


def _load_plain(
    spec: str,
    name: str,
    tiny: bool,
    batch: tuple[int, int] | None,
    dropout: float | None,
    overrides: Mapping[str, object] | None,
) -> LoadedModel:
    from autopar.cli.models import plain

    if dropout:
        raise AutoparError(f"{spec} has no dropout", values=f"Given: dropout={dropout}")
    make: Any = plain.make_mlp if name == "mlp" else plain.make_cnn
    try:
        model, made = make(tiny=tiny, rows=(batch or TINY_BATCH)[0], **(overrides or {}))
    except TypeError as error:
        raise AutoparError(f"{spec} has other settings than {', '.join(overrides or {})}", values=str(error)) from error
    return LoadedModel(spec, model, made)


def _load_callable(spec: str) -> LoadedModel:
    """``module:callable``; the module is looked up as ``python -m`` does, the current folder included."""
    import torch

    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise AutoparError(
            f"{spec!r} names no callable", values=str(error), remedy="Write module:callable, as in train:make_model"
        ) from error
    finally:
        sys.path.remove("")
    result = value()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)):
        raise AutoparError(
            f"{spec} must return a torch.nn.Module and a batch (a dict of tensors by argument name)",
            values=f"It returned {type(result).__name__}",
        )
    model, made = result
    if not isinstance(made, Mapping):
        raise AutoparError(f"{spec} must return the batch as a dict of tensors", values=f"It is {type(made).__name__}")
    return LoadedModel(attribute, model, dict(made))


@contextmanager
def _build_context(device: str, dtype: torch.dtype | str | None, seed: int) -> Iterator[None]:
    """Default device, default dtype and random seed while a model is built; all as before afterwards."""
    import torch

    wanted = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise AutoparError(
            f"{dtype} cannot be the dtype of parameters", remedy="Use float32, bfloat16, float16 or float64"
        )
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(wanted or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _bundled() -> tuple[str, ...]:
    files = resources.files("autopar.cli.models").joinpath("data").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def _entry(name: str) -> Entry:
    target = ALIASES.get(name, name)
    if target in PLAIN:
        return Entry(name, "torch.nn", "a residual MLP" if target == "mlp" else "two convolutions and a classifier")
    config = json.loads(resources.files("autopar.cli.models").joinpath("data", f"{target}.json").read_text("utf-8"))
    same = f"same as {target}: " if target != name else ""
    if stages.is_staged(config):
        return Entry(name, config["architectures"][0], same + stages.sizes(config))
    towers = {key.removesuffix("_config"): value for key, value in config.items() if key.endswith("_config")}
    summary = "; ".join(f"{tower}: {_sizes(own)}" for tower, own in towers.items()) if towers else _sizes(config)
    return Entry(name, config["architectures"][0], same + summary)


def _sizes(config: Mapping[str, Any]) -> str:
    """`12 layers, hidden 768, 12 heads, vocabulary 30522`"""
    hidden, layers, decoder, heads, kv_heads = (
        next((config[key] for key in keys if key in config), None)
        for keys in (
            ("hidden_size", "n_embd", "d_model"),
            ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"),
            ("num_decoder_layers", "decoder_layers"),
            ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"),
            ("num_key_value_heads",),
        )
    )
    counts = f"{layers} layers" if decoder is None else f"{layers} + {decoder} layers"
    grouped = f" ({kv_heads} KV)" if kv_heads else ""
    last = f"vocabulary {config['vocab_size']}" if "vocab_size" in config else f"images of {config['image_size']}"
    return f"{counts}, hidden {hidden}, {heads} heads{grouped}, {last}"
