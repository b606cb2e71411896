"""What runs on each process of test_serving.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from tests.dist.generation import model_and_prompt

SIZES = {
    "qwen2": ((3, 6), (11, 3), (1, 9), (7, 1), (5, 7), (9, 5), (2, 8), (14, 4), (4, 6)),
    "gpt2": ((3, 6), (6, 3), (1, 9), (7, 1), (5, 7), (9, 5), (2, 8), (13, 4), (4, 6)),
    "lfm2": ((3, 6), (5, 3), (3, 9), (5, 1), (5, 7), (3, 4), (3, 5)),
}
"""Tokens of each prompt, and new ones."""
ENDS = {"qwen2": 3, "gpt2": 74, "lfm2": 77}
"""A token that ends some of the sequences."""


def sensitive_model(name: str) -> Any:
    """A model whose tokens depend on positions: random weights of transformers hardly look at them."""
    model, _ = model_and_prompt(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("q_proj.weight", "k_proj.weight", "c_attn.weight", "wpe.weight")):
                parameter *= 12
    return model


def requests(name: str) -> list[autopar.Request]:
    generator = torch.Generator().manual_seed(2)
    return [autopar.Request(torch.randint(5, 96, (size,), generator=generator), new) for size, new in SIZES[name]]


def drawing(name: str) -> list[autopar.Request]:
    """The same, of which two of three are drawn, each in its own way, and some end otherwise."""
    kinds: tuple[dict[str, Any], ...] = (
        {}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "seed": 5},
        {"do_sample": True, "top_p": 0.8, "eos_token_id": [7, 9, 11, 40, 56, 59]},
    )  # fmt: skip
    return [replace(each, **kinds[number % 3]) for number, each in enumerate(requests(name))]


def alone(name: str, asked: Callable[[str], list[autopar.Request]] = requests) -> list[tuple[int, ...]]:
    """The new tokens of each request, by transformers on one process."""
    model = sensitive_model(name)
    found = []
    for number, request in enumerate(asked(name)):
        ids: Any = request.prompt
        torch.manual_seed(number if request.seed is None else request.seed)
        tokens = model.generate(
            ids[None], max_new_tokens=request.max_new_tokens, pad_token_id=0, attention_mask=torch.ones_like(ids[None]),
            eos_token_id=ENDS[name] if request.eos_token_id is None else request.eos_token_id, **request.options(),
        )  # fmt: skip
        found.append(tuple(tokens[0, len(ids) :].tolist()))
    return found


def drawn(name: str, strategy: str) -> list[tuple[int, ...]]:
    """The new tokens of each request."""
    model = sensitive_model(name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    compiled: Any = autopar.compile(model, mesh, strategy=strategy)
    torch.manual_seed(torch.distributed.get_rank())
    found = compiled.serve(drawing(name), slots=4, chunk=4, length=18, eos_token_id=ENDS[name])
    return [each.tokens for each in sorted(found, key=lambda each: each.number)]


def told() -> list[str]:
    """What is said of outputs that are gathered, as it comes."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.extend([record.getMessage()] * ("whole tensor" in record.getMessage()))

    logging.getLogger("autopar").addHandler(Handler())
    return said


def served(name: str, strategy: str) -> tuple[list[tuple[int, ...]], list[list[int]], int, str]:
    """The new tokens of each request, the numbers of those that came at once in the order in which they began, how many
    programs there are, and what is said of a request without room.
    """
    model = sensitive_model(name)
    axis = "pp" if strategy == "stages" else "x"
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    compiled: Any = autopar.compile(model, mesh, strategy="auto" if strategy == "stages" else strategy)
    gathers = told()
    options: dict[str, Any] = {"slots": 4, "chunk": 4, "length": 18, "eos_token_id": ENDS[name]}
    # From a list, and again of requests that come one by one, whose slots others had before.
    found = list(compiled.serve(requests(name), **options))
    programs = len(compiled.autopar._programs)

    def coming() -> Iterator[autopar.Request]:
        yield from requests(name)

    again = []
    serving = compiled.serve(coming(), **options)
    for each in serving:
        again.append(each)
        if len(again) == 1:  # of the first ones some are done by now; others have tokens, are read, or wait
            for number in range(4):
                serving.cancel(number)
    tokens = [each.tokens for each in sorted(found, key=lambda each: each.number)]
    ended = sorted(again, key=lambda each: each.number)
    cut = [own[: len(each.tokens)] if each.is_cancelled else own for own, each in zip(tokens, ended, strict=True)]
    cancelled = [each.number for each in ended if each.is_cancelled]
    if not cancelled or cut == tokens or cut != [each.tokens for each in ended]:
        tokens = []
    if gathers:
        return tokens, [], 0, f"{gathers}"
    order = [
        [each.number for each in sorted(run, key=lambda each: (each.steps[0], each.number))] for run in (found, again)
    ]
    try:
        list(compiled.serve([[5] * 15], max_new_tokens=9, **options))
    except AutoparError as error:
        return tokens, order, programs, str(error)
    return tokens, order, programs, ""


def late() -> list[tuple[int, bool]]:
    """The numbers of requests as they end, and whether they were cancelled, by a clock that runs on rank 0 alone."""
    rank, calls = torch.distributed.get_rank(), count()
    clock = mock.patch("autopar.runtime.serving.serve.monotonic", lambda: 0.0 if rank else 10.0 * next(calls))
    compiled: Any = autopar.compile(
        sensitive_model("qwen2"), init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), strategy="tensor"
    )
    asked = [
        replace(each, timeout_s=time_s) for each, time_s in zip(requests("qwen2"), (None, 25.0, 1e3), strict=False)
    ]
    with clock:
        found = list(compiled.serve(asked, slots=1, eos_token_id=ENDS["qwen2"]))
    return [(each.number, each.is_cancelled) for each in found]
