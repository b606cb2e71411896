"""A batch for a HuggingFace model, made by what its forward accepts.

Shape suffixes: B rows, S tokens, M mel bins, T frames, C channels, Y height, X width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from autopar.base.errors import AutoparError


def max_tokens(model: nn.Module) -> int:
    """The longest sequence that the model's positions allow; a large number where it has no limit."""
    config: Any = model.config
    found = (getattr(config.get_text_config(), name, None) for name in _POSITIONS)
    return next((limit for limit in found if limit), 2**30)


_POSITIONS = ("max_position_embeddings", "max_target_positions")


def make_batch(model: nn.Module, rows: int, tokens: int) -> dict[str, Any]:
    """Random inputs and labels for the model's loss, on torch's default device.

    Causal models get labels equal to input_ids. Masked ones get right padding in every row but the first
    (attention_mask) and labels on about a sixth of the tokens, -100 elsewhere. Image classifiers get pixel_values.
    Models of text to text get padded input_ids and half as many labels; those of speech to text get input_features of
    the one length they take, and `tokens` labels; the labels of all rows but the first end with -100. Models of images
    and texts get pairs of both, and return_loss.
    Raises AutoparError for more tokens than the model has positions, and for a model whose inputs are of another kind.
    """
    accepts = inspect.signature(model.forward).parameters
    config: Any = model.config
    if "pixel_values" in accepts and "input_ids" not in accepts:
        images_BCYX = _images(config, rows)
        return {"pixel_values": images_BCYX, "labels": torch.randint(config.num_labels, (rows,))}
    if not {"input_ids", "input_features"} & set(accepts):
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
    text = config.get_text_config()
    ids_BS = torch.randint(text.vocab_size, (rows, tokens))
    if "input_features" in accepts:
        features_BMT = torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features_BMT, "labels": _padded_labels(ids_BS)}
    if "return_loss" in accepts:
        return _pairs(config, ids_BS)
    if config.is_encoder_decoder:
        labels_BS = _padded_labels(torch.randint(text.vocab_size, (rows, max(1, tokens // 2))))
        return {"input_ids": ids_BS, "attention_mask": _right_padding(rows, tokens).long(), "labels": labels_BS}
    if type(model).__name__.endswith("ForMaskedLM"):
        return _masked_batch(ids_BS, text.vocab_size)
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"input_ids": ids_BS, "labels": torch.randint(config.num_labels, (rows,))}
    return {"input_ids": ids_BS, "labels": ids_BS.clone()} if "labels" in accepts else {"input_ids": ids_BS}


def _images(config: Any, rows: int) -> Tensor:
    wanted = getattr(config, "image_size", 224)  # a convolution takes any size, and its configuration names none
    size = wanted if isinstance(wanted, int) else wanted[0]
    return torch.randn(rows, config.num_channels, size, size)


def _lengths(rows: int, tokens: int) -> Tensor:
    """[B]: row r keeps between half and all of its tokens; the first keeps all."""
    return tokens - torch.arange(rows) * 3 % (tokens // 2 + 1)


def _right_padding(rows: int, tokens: int) -> Tensor:
    """[B, S] bool: what is no padding."""
    return torch.arange(tokens)[None, :] < _lengths(rows, tokens)[:, None]


def _padded_labels(labels_BS: Tensor) -> Tensor:
    return torch.where(_right_padding(*labels_BS.shape), labels_BS, -100)


def _masked_batch(ids_BS: Tensor, vocabulary: int) -> dict[str, Tensor]:
    rows, tokens = ids_BS.shape
    kept_BS = _right_padding(rows, tokens)
    # The first token of each row is always asked for, so that no row, and no rank's share, is without labels.
    asked_BS = (torch.rand(rows, tokens) < 1 / 6) & kept_BS
    asked_BS = asked_BS | (torch.arange(tokens) == 0)[None, :]
    labels_BS = torch.where(asked_BS, torch.randint(vocabulary, (rows, tokens)), -100)
    return {"input_ids": ids_BS, "attention_mask": kept_BS.long(), "labels": labels_BS}


def _pairs(config: Any, ids_BS: Tensor) -> dict[str, Any]:
    """Texts end with the token whose place is where the model reads their embedding, and are padded with it."""
    rows, tokens = ids_BS.shape
    end = config.text_config.eos_token_id
    before_BS = torch.arange(tokens)[None, :] < _lengths(rows, tokens)[:, None] - 1
    return {
        "input_ids": torch.where(before_BS, ids_BS % end, end),
        "attention_mask": _right_padding(rows, tokens).long(),
        "pixel_values": _images(config.vision_config, rows),
        "return_loss": True,
    }
