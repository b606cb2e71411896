"""Inputs that only a number in their names tells apart are said once, with how many of each kind there are."""

from __future__ import annotations

import torch

from autopar.ir.interface import TensorInterface
from autopar.ir.interface_text import format_tensors, starred
from autopar.ir.sharding import Replicate, Shard


def _input(name: str, shape: tuple[int, ...], split: int | None = None) -> TensorInterface:
    return TensorInterface(name, shape, torch.bfloat16, (Replicate() if split is None else Shard(split),))


def test_caches_of_all_layers_are_one_entry() -> None:
    """Breaks if a plan of a token lists hundreds of caches, or counts those that lie otherwise with the rest."""
    inputs = [
        _input("input_ids", (8, 1)),
        *(_input(f"past_key_values.{number}", (8, 8, 64, 128), 1 if number % 3 else None) for number in range(9)),
        _input("layers.0.state", (8, 4)),
    ]
    assert list(format_tensors(inputs, ("tp",))) == [
        ("input_ids", "bf16[8, 1]"),
        ("past_key_values.*", "3 × bf16[8, 8, 64, 128], 6 × bf16[8, 8/tp, 64, 128]"),
        ("layers.0.state", "bf16[8, 4]"),
    ]


def test_numbers_in_names_are_not_layers() -> None:
    """Breaks if `conv2d` and `conv3d` are taken for one tensor."""
    assert starred("model.layers.12.mlp.fc1.weight") == "model.layers.*.mlp.fc1.weight"
    assert starred("blocks.3") == "blocks.*"
    assert starred("conv2d") == "conv2d"
