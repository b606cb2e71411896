"""Experts: the kernels against float64, two launches the same bits, nothing that waits for the device; milliseconds
forward and backward beside PyTorch's grouped product and the loop over experts, and of other tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.operators.expert_layout import Layout
from autopar.operators.grouped_experts import fits, grouped, grouped_gradients
from benchmarks.first_light.decode import _microseconds
from benchmarks.first_light.kernels import TOLERANCES, _error
from benchmarks.first_light.section import Section
from tests.unit.kernels.expert_cases import CLAMPED, GATED, Case

SIZES = {
    "Qwen3-30B, 8192 tokens": (8192, 8, 128, 2048, 768),
    "Mixtral, 4096 tokens": (4096, 2, 8, 4096, 14336),
    "DeepSeek-V3, a quarter of its experts, 4096 tokens": (4096, 8, 64, 7168, 2048),
    "Qwen3-30B, 1 token": (1, 8, 128, 2048, 768),
    "Qwen3-30B, 64 tokens": (64, 8, 128, 2048, 768),
}
"""Tokens, choices, experts, hidden, width."""
_TRIED = [(128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (128, 64, 64, 8, 4), (64, 128, 64, 4, 4), (128, 256, 64, 8, 3)]
"""Tiles beside those of the table: rows, columns, terms, warps, stages."""


def run(section: Section) -> None:
    from autopar.runtime import kernels

    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody writes is no number
    if section.on_cuda:
        assert kernels.register(), "no Triton"
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if section.on_cuda else (torch.float16,)
    for dtype, (name, case) in itertools.product(dtypes, _cases(section)):
        label = f"experts {name} {str(dtype).removeprefix('torch.')}"
        section.attempt(label, partial(_compare, section, label, replace(case, dtype=dtype)))
    torch.use_deterministic_algorithms(False)
    if section.on_cuda:
        for name, sizes in list(SIZES.items())[: 2 if section.quick else len(SIZES)]:
            section.attempt(name, partial(_time, section, name, sizes))
        for tile in _TRIED:
            section.attempt(f"tiles {tile}", partial(_time_tile, section, tile))


def _cases(section: Section) -> Iterator[tuple[str, Case]]:
    """Sizes that tiles divide, and not; on a CPU small and few."""
    tokens, hidden, width = (300, 256, 192) if section.on_cuda else (6, 16, 16)
    generator = torch.Generator().manual_seed(0)

    def routing(chosen: int, experts: int, rows: int = tokens) -> list[list[int]]:
        scores = torch.rand(rows, experts, generator=generator)
        found: list[list[int]] = scores.topk(min(chosen, experts)).indices.tolist()
        return found

    usual = Case(routing=routing(2, 8), D=hidden, F=width, E=8)
    yield "gated", usual
    yield "clamped", replace(usual, act=CLAMPED, interleaved=True, transposed=True, biased=True)
    if not section.on_cuda:
        return
    yield "without a gate", replace(usual, act="pow(relu(gate), 2)", gated=False)
    yield "activation between kernels", replace(usual, act="mul(softplus(gate), up)", biased=True)
    yield "odd sizes", replace(usual, D=hidden - 3, F=width - 5, biased=True)
    yield "some windows", replace(usual, routing=routing(8, 16), E=12, start=2)
    yield "one hot expert", replace(usual, routing=[[5, 1]] * tokens)
    yield "nothing here", replace(usual, routing=[[9, 11]] * tokens)
    yield "a few tokens", replace(usual, routing=routing(2, 8, 5))
    yield "a token", replace(usual, routing=routing(8, 64, 1), E=64)


def _compare(section: Section, label: str, case: Case) -> None:
    from autopar.runtime.graphs import waiting_for_device
    from autopar.runtime.kernels import experts as kernels

    given = [each.to(section.device) for each in case.tensors()]
    gradient = kernels.experts_grad_bias if case.biased else kernels.experts_grad
    names = ("y", "dx", "dweights", "dfirst", "dsecond", "dbias")

    def work() -> list[Tensor]:
        return [kernels.experts(*given[1:], **case.options()), *gradient(*given, **case.options())]

    once, again = work(), work()
    errors = {name: _error(a, b) for name, a, b in zip(names, once, case.dense(given), strict=False)}
    same = all(map(torch.equal, once, again))
    waits = waiting_for_device(work) if section.on_cuda else []
    right = all(error <= TOLERANCES[case.dtype] for error in errors.values())
    section.row(label, right and same and not waits, errors=errors, bit_equal=same, waits=waits)


def _drawn(section: Section, sizes: tuple[int, ...]) -> list[Tensor]:
    """g, x, indices, weights, first and second in bfloat16."""
    tokens, chosen, experts, hidden, width = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=section.device) * 0.1

    indices = torch.rand(tokens, experts, device=section.device).topk(chosen).indices
    tensors = [normal(tokens, hidden), normal(tokens, hidden), indices, normal(tokens, chosen)]
    return [*tensors, normal(experts, 2 * width, hidden), normal(experts, hidden, width)]


def _time(section: Section, name: str, sizes: tuple[int, ...]) -> None:
    from autopar.operators.experts import gradients_one_by_one, one_by_one
    from autopar.runtime.kernels import experts as kernels

    given = _drawn(section, sizes)
    _, x, indices, _, first, second = given
    layout = Layout(GATED, True, False, False)
    forward: dict[str, Callable[[], Any]] = {"autopar": lambda: kernels.experts(*given[1:], act=GATED)}
    backward: dict[str, Callable[[], Any]] = {"autopar": lambda: kernels.experts_grad(*given, act=GATED)}
    if fits(x, indices, first, second, None):
        forward["grouped_mm"] = lambda: grouped(*given[1:], None, layout, 0)
        backward["grouped_mm"] = lambda: grouped_gradients(*given, None, layout, 0)
    forward["loop"] = lambda: one_by_one(*given[1:], None, layout, 0)
    backward["loop"] = lambda: gradients_one_by_one(*given, None, layout, 0)
    for phase, contenders, factor in (("forward", forward, 1.0), ("backward", backward, 8 / 3)):
        flops = factor * 6 * sizes[0] * sizes[1] * sizes[3] * sizes[4]
        times = {contender: _microseconds(work) for contender, work in contenders.items()}
        tflops = {contender: flops / taken / 1e6 for contender, taken in times.items()}
        section.row(f"{phase}: {name}", None, us=times, tflops=tflops)


def _time_tile(section: Section, tile: tuple[int, ...]) -> None:
    """Of all products at once, in place of the table's for experts of many rows."""
    from autopar.runtime.kernels import experts as kernels
    from autopar.runtime.kernels.expert_configs import Tile, tile_of

    given, table = _drawn(section, SIZES["Qwen3-30B, 8192 tokens"]), tile_of
    for kind in ("up", "up_grad", "rows", "columns"):
        kernels.tile_of = lambda asked, *rest, own=kind: Tile(*tile) if asked == own else table(asked, *rest)
        try:
            work = kernels.experts if kind == "up" else kernels.experts_grad
            taken = _microseconds(lambda work=work: work(*(given[1:] if work is kernels.experts else given), act=GATED))
            section.row(f"tiles {kind} {tile}", None, us=taken)
        except Exception as error:  # a tile that a device has no room for is an answer, too
            section.row(f"tiles {kind} {tile}", None, refused=f"{type(error).__name__}: {error}"[:200])
        finally:
            kernels.tile_of = table
