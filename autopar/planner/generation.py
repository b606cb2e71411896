"""What `generate()` is planned for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import check_storage, is_by_channel
from autopar.base.errors import AutoparError
from autopar.base.huggingface.caches import states_among
from autopar.base.huggingface.reuse import position_dims
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.context import of_cache, ways_of_cache
from autopar.strategies.names import Pin, Strategy, pipeline_of, resolve
from autopar.strategies.pipelining.spec import AXIS


def ways_of(strategy: Strategy, mesh: Mesh) -> int:
    """In how many pieces a strategy cuts the length of a cache, or may.

    Raises:
        AutoparError: a strategy that the mesh cannot have.
    """
    stage = mesh if pipeline_of(strategy, mesh) is None else mesh.without(AXIS)
    return ways_of_cache(resolve(strategy, mesh), stage)


def check_pieces(generation: Generation, strategy: Strategy, mesh: Mesh) -> None:
    """Raises an AutoparError where a cache is to be cut along its length that cannot be."""
    stage = mesh if pipeline_of(strategy, mesh) is None else mesh.without(AXIS)
    named = zip(stage.axes, of_cache(resolve(strategy, mesh)), strict=True)
    cut = [axis for (axis, _), each in named if each.attention == "keys"]
    if cut and is_by_channel(generation.cache):
        raise AutoparError(
            "a cache whose keys have a scale a channel is not cut along its length",
            where=f"axis {cut[0]}",
            values=f"cache={generation.cache!r}",
            remedy="cache='int8', 'int4' or 'fp8', or a strategy that splits heads or rows",
        )


def pieces_pinned(inputs: Mapping[str, Any], pins: Sequence[Pin], mesh: Mesh) -> int:
    """In how many pieces the length of the caches among inputs is cut by pins, as an earlier phase left them.

    mesh: of a stage.
    """
    dims = {
        f"{name}.{number}": dim
        for name in states_among(inputs)
        for number, dim in enumerate(position_dims(inputs[name]))
        if dim is not None
    }
    axes = {
        axis
        for pin in pins
        for axis, placement in pin.placements
        if pin.pattern in dims and placement == Shard(dims[pin.pattern])
    }
    return math.prod(size for axis, size in mesh.axes if axis in axes)


def whole_pieces(length: int, ways: int) -> int:
    """The least length of a cache from `length` on that is so many equal pieces."""
    return -(-length // ways) * ways


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate()` is planned for.

    batch: sequences. prompt: tokens of each, and new_tokens that are made of it. beams: of each sequence, where
    `generate(num_beams=…)` searches. padded: whether prompts have different lengths, with padding on the left. chunk:
    how many tokens of a prompt go through the model in one call, as `prefill_chunk_size=` of `generate()`; None: all.
    cache: how keys and values are stored, "fp8", "int8" or "int4", with a scale a head and token; "int8-channel" and so
    on: keys with a scale a channel of 32 tokens, the last tokens as they are (KIVI); None: as they are.
    """

    batch: int = 1
    prompt: int = 128
    new_tokens: int = 128
    beams: int = 1
    padded: bool = False
    chunk: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        check_storage(self.cache, "a cache")
        if min(self.batch, self.prompt, self.beams) < 1 or self.new_tokens < 2:
            raise AutoparError(
                "nothing to generate",
                values=f"{self}",
                remedy="batch, prompt and beams are 1 or more, new_tokens 2 or more: for one, plan(inference=True)",
            )
        if self.padded and is_by_channel(self.cache):
            raise AutoparError(
                "prompts of different lengths cannot be padded where keys have a scale a channel",
                values=f"cache={self.cache!r}",
                remedy="cache='int8', 'int4' or 'fp8', or padded=False",
            )
        if self.chunk is not None and self.chunk < 1:
            raise AutoparError(
                "a prompt cannot go through the model in chunks of no tokens",
                values=f"chunk={self.chunk}",
                remedy="chunk is 1 or more; None: the whole prompt in one call",
            )

    @property
    def rows(self) -> int:
        """Rows of the cache."""
        return self.batch * self.beams

    @property
    def chunks(self) -> int:
        """Calls of forward for the prompt."""
        return 1 if self.chunk is None else -(-self.prompt // self.chunk)

    def in_whole_chunks(self) -> Generation:
        """The same with a prompt that ends where a chunk does."""
        chunk = min(self.chunk or self.prompt, self.prompt)
        return replace(self, prompt=self.prompt // chunk * chunk)

    def one_chunk(self) -> Generation:
        """The same with a prompt of one call."""
        return replace(self, prompt=min(self.chunk or self.prompt, self.prompt))

    def positions(self, *, behind_encoder: bool, ways: int = 1) -> int:
        """Of the cache: the last token is not read any more. An encoder has the prompt, its decoder a first token.

        ways: in how many pieces its length is cut, of which it is then a multiple.
        """
        return whole_pieces((1 if behind_encoder else self.prompt) + self.new_tokens - 1, ways)

    def prompts(self, tokens: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """A batch of random prompts, of a vocabulary of so many."""
        ids = torch.randint(0, tokens, (self.batch, self.prompt), generator=generator)
        mask = torch.ones_like(ids)
        if self.padded:
            mask[0, : self.prompt // 2] = 0
        return {"input_ids": ids, "attention_mask": mask}
