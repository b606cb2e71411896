"""What runs on each process of test_choosing.py."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar
from autopar.runtime.along import window
from autopar.runtime.seen_whole import SeenWhole, seen_whole
from tests.dist.generation import model_and_prompt

R = Replicate()
LAYOUTS: tuple[tuple[Any, ...], ...] = (
    (R, Shard(2)), (Shard(2), R), (Shard(0), Shard(2)), (Shard(2), Shard(2)), (Shard(1), Shard(2)),
    (Shard(2), Shard(0)), (Shard(0), R), (Shard(0), Shard(1)),
)  # fmt: skip


def values(size: int) -> dict[str, Tensor]:
    """What the largest is sought in: [2, 3, size]."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 3, size, generator=generator, dtype=torch.float64)
    ties = torch.randint(0, 2, (2, 3, size), generator=generator).double()
    unknown, low = drawn.clone(), torch.full_like(drawn, -math.inf)
    unknown[0, 1, size - 1] = math.nan
    low[1, 2, size // 2] = -1.0
    return {"drawn": drawn, "ties": ties, "unknown": unknown, "low": low, "bf16": drawn.bfloat16(), "same": ties * 0}


def questions(x: Any) -> list[Any]:
    """What scripts ask of logits, and how they pick some first."""
    last = x[:, -1, :].to(copy=True, dtype=torch.float64)
    return [
        last.argmax(-1), torch.argmax(last, dim=-1), torch.argmax(x, -1, keepdim=True), x[:, 1:].argmax(dim=2),
        x[:, None, -1].argmax(-1), x[..., :].argmax(-1),
    ]  # fmt: skip


def of_pieces() -> list[str]:
    """What is not as on one device, of all layouts, sizes and values; and what was gathered."""
    mesh = init_device_mesh("cpu", (2, 2))
    wrong: list[str] = []
    for layout, size in itertools.product(LAYOUTS, (8, 7, 3)):  # uneven pieces, and ranks without one
        for name, whole in values(size).items():
            what = f"{name} of {size} in {layout}"
            x = seen_whole(distribute_tensor(whole, mesh, layout), functools.partial(wrong.append, f"{what}: gathered"))
            if Shard(1) not in layout:
                pairs = zip(questions(x), questions(whole), strict=True)
                wrong += [
                    f"{what}: question {number}"
                    for number, (found, want) in enumerate(pairs)
                    if type(found) is not Tensor or not torch.equal(found, want)
                ]
            wrong += _top(x, whole, what)
    return wrong


def _top(x: Any, whole: Tensor, what: str) -> list[str]:
    found, want = torch.topk(x, 3), torch.topk(whole, 3)
    same = torch.equal(found.values.nan_to_num(9.0), want.values.nan_to_num(9.0))
    same = same and torch.equal(whole.gather(-1, found[1]).nan_to_num(9.0), want[0].nan_to_num(9.0))
    apart = all(len(set(row)) == 3 for row in found.indices.reshape(-1, 3).tolist())
    return [] if same and apart else [f"{what}: the three largest"]


def along_positions() -> list[str]:
    """What is not as on one device where positions of a cache lie in pieces: rolled, or some of them taken."""
    mesh = init_device_mesh("cpu", (2, 2))
    wrong: list[str] = []
    codes = torch.randint(0, 255, (3, 2, 12, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values = -codes.double() / 7
    kept = {
        "codes": codes,
        "fp8": codes.clamp(max=120).view(torch.float8_e4m3fn),
        "float64": values,
        "half": values.half(),
    }
    layouts: tuple[Any, ...] = ((R, Shard(2)), (Shard(2), R), (Shard(1), Shard(2)))
    for (name, whole), layout in itertools.product(kept.items(), layouts):
        what, axis = f"{name} in {layout}", layout.index(Shard(2))
        lies = distribute_tensor(whole.view(torch.uint8) if name == "fp8" else whole, mesh, layout)
        local = lies.to_local().view(whole.dtype)
        x = DTensor.from_local(local, mesh, layout, run_check=False, shape=whole.shape, stride=whole.stride())
        seen = seen_whole(x, functools.partial(wrong.append, f"{what}: gathered"))
        for by in (0, 1, 5, 6, 7, 12, -1, -5, -6, -7, 25):
            want = distribute_tensor(_bytes(whole).roll(by, 2), mesh, layout).to_local()
            found: Any = torch.roll(seen, by, 2)
            if found.placements != layout or not torch.equal(_bytes(found.to_local()), want):
                wrong.append(f"{what}: rolled by {by}")
        group, own = mesh.get_group(axis), mesh.get_local_rank(axis)
        heads = whole[:, [mesh.get_local_rank(0)]] if layout[0] == Shard(1) else whole
        for begin, count in ((0, 12), (0, 3), (4, 5), (6, 2), (5, 1), (11, 1)):
            taken = window(local, 2, begin, count, own * local.shape[2], group)
            if not torch.equal(_bytes(taken), _bytes(heads[:, :, begin : begin + count])):
                wrong.append(f"{what}: {count} from {begin}")
    return wrong


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).unflatten(-1, (-1, x.dtype.itemsize))


def greedily() -> tuple[list[list[int]], list[str], bool]:
    """Tokens of a model whose logits lie in pieces, what was said meanwhile, and whether they did."""
    model, prompt = model_and_prompt("qwen2")
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("autopar").addHandler(Handler())
    compiled = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), strategy="tensor")
    seen: list[bool] = []
    answer = compiled.forward

    def forward(**kwargs: Any) -> Any:
        found = answer(**kwargs)
        seen.append(isinstance(found.logits, SeenWhole) and any(isinstance(p, Shard) for p in found.logits.placements))
        return found

    compiled.forward = forward
    tokens = compiled.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokens.tolist(), [each for each in said if "whole tensor" in each], all(seen)
