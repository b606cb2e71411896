"""Configurations of convolutional models, which have stages of given widths and depths in place of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EMBEDDING, _WIDTHS, _DEPTHS, _IMAGE, _LABELS = 16, (32, 64), (2, 3), 32, 16


def is_staged(fields: Mapping[str, Any]) -> bool:
    """Whether a configuration, as a dict, is of stages (ResNet and its like)."""
    return bool(fields.get("hidden_sizes")) and bool(fields.get("depths"))


def shrunk(config: Any) -> Any:
    """The same architecture with two narrow stages, for images of 32 × 32 pixels in 16 classes."""
    fields = config.to_dict()
    named = ("stage_names", "out_features", "out_indices")  # worked out from the depths
    fields = {key: value for key, value in fields.items() if key not in named}
    fields |= {"hidden_sizes": list(_WIDTHS), "depths": list(_DEPTHS), "image_size": _IMAGE}
    if "embedding_size" in fields:
        fields["embedding_size"] = _EMBEDDING
    if len(fields.get("id2label") or ()) > _LABELS:
        fields["id2label"] = {i: f"LABEL_{i}" for i in range(_LABELS)}
        fields["label2id"] = {label: i for i, label in fields["id2label"].items()}
    return type(config).from_dict(fields)


def sizes(fields: Mapping[str, Any]) -> str:
    """`stages of 3, 4, 6, 3 blocks, widths 256, 512, 1024, 2048, 1000 classes`"""
    depths, widths = (", ".join(map(str, fields[key])) for key in ("depths", "hidden_sizes"))
    return f"stages of {depths} blocks, widths {widths}, {fields.get('num_labels', 2)} classes"
