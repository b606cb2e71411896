"""Rows of docs/operators.md: reductions, what a forward makes itself, and losses that compare rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.proofs.operators_nn_cases import (
    Case,
    floats,
    function,
    loss,
)


def _reductions() -> Iterator[Case]:
    dims: dict[str, Any] = {"all": None, "the batch": 0, "within a row": -1, "batch and last dim": (0, 2)}
    for setting, dim in dims.items():
        for name in ("mean", "var", "std", "logsumexp", "amax", "amin"):
            given = tuple(range(3)) if dim is None and name in ("logsumexp", "amax", "amin") else dim
            call = getattr(torch, name)
            yield function(name, setting, lambda x, c=call, d=given: c(x, dim=d), 3, 4)
        yield function("vector_norm", setting, lambda x, d=dim: torch.linalg.vector_norm(x, dim=d), 3, 4)
        yield function("vector_norm", f"{setting}, p 1", lambda x, d=dim: torch.linalg.vector_norm(x, 1, dim=d), 3, 4)
        yield function("vector_norm", f"{setting}, p 3", lambda x, d=dim: torch.linalg.vector_norm(x, 3, dim=d), 3, 4)
        yield function(
            "vector_norm", f"{setting}, p inf", lambda x, d=dim: torch.linalg.vector_norm(x, torch.inf, dim=d), 3, 4
        )
        if not isinstance(dim, tuple):
            for name in ("prod", "median", "max", "min"):
                yield function(name, setting, lambda x, n=name, d=dim: _of(x, n, d), 3, 4)
    yield function("var", "the batch, kept, biased", lambda x: x / x.var(0, correction=0, keepdim=True), 3, 4)
    yield function("var_mean", "the batch", lambda x: torch.var_mean(x, 0), 3, 4)
    yield function("std_mean", "all", lambda x: torch.std_mean(x), 3, 4)
    yield function("norm", "all", lambda x: x.norm(), 3, 4)
    yield function("norm", "the batch", lambda x: x.norm(dim=0), 3, 4)
    yield function("matrix_norm", "within a row", lambda x: torch.linalg.matrix_norm(x), 3, 4)
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        for setting, dim in {"the batch": 0, "within a row": 1}.items():
            yield function(name, setting, lambda x, n=name, d=dim: getattr(torch, n)(x, d), 3, 4)
    for setting, dim in {"the batch": 0, "within a row": -1}.items():
        yield function("sort", setting, lambda x, d=dim: x.sort(dim=d)[0], 3, 4)
        yield function("topk", setting, lambda x, d=dim: x.topk(2, dim=d)[0], 3, 4)
        yield function("kthvalue", setting, lambda x, d=dim: x.kthvalue(2, dim=d)[0], 3, 4)
        yield function("flip", setting, lambda x, d=dim: x.flip(d) * x, 3, 4)
        yield function("roll", setting, lambda x, d=dim: x.roll(1, d) * x, 3, 4)


def _of(x: Tensor, name: str, dim: int | None) -> Tensor:
    found = getattr(x, name)() if dim is None else getattr(x, name)(dim)
    return found if isinstance(found, Tensor) else found[0]


def _made() -> Iterator[Case]:
    """What a forward makes on the default device."""
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "arange": lambda x: x + torch.arange(x.shape[-1]),
        "zeros": lambda x: torch.cat([x, torch.zeros(x.shape[0], 2, dtype=x.dtype)], 1),
        "eye": lambda x: x @ torch.eye(x.shape[-1], dtype=x.dtype),
        "eye of the batch": lambda x: x * torch.eye(x.shape[0], 6, dtype=x.dtype),
        "linspace": lambda x: x * torch.linspace(0, 1, 6, dtype=x.dtype),
        "tril": lambda x: x * torch.tril(torch.ones(6, 6, dtype=x.dtype))[2],
        "index tensors": lambda x: x[:, torch.tensor([0, 2, 4])],
        "rows by number": lambda x: x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) % 6],
        "full_like": lambda x: x * torch.full_like(x, 2.0),
        "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
        "randn_like": lambda x: x + torch.randn_like(x),
        "rand": lambda x: x * torch.rand(x.shape[0], 1, dtype=x.dtype),
        "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
        "mask by comparison": lambda x: torch.where(torch.arange(6) < 3, x, 0.0),
        "positions of the batch": lambda x: x * torch.arange(x.shape[0], dtype=x.dtype)[:, None],
    }
    for name, call in calls.items():
        yield function("made in forward", name, call, 6)


def _coupled() -> Iterator[Case]:
    """Rows that meet."""
    yield loss(
        "contrastive", "one direction",
        lambda: lambda x, a: F.cross_entropy(F.normalize(x) @ F.normalize(a).T, torch.arange(len(x))), 6, a=floats(6),
    )  # fmt: skip
    yield loss("contrastive", "both directions", lambda: _clip, 6, a=floats(6))
    yield loss("contrastive", "with itself, masked", lambda: _simclr, 6)
    yield loss("covariance", "Barlow twins", lambda: _barlow, 6, a=floats(6))
    yield function("cdist", "between rows", lambda x: torch.cdist(x, x + 1), 6)
    yield function("pdist", "", F.pdist, 6)
    yield function("cov", "", lambda x: torch.cov(x.T), 6)
    yield function("corrcoef", "", lambda x: torch.corrcoef(x.T), 6)
    yield function("matmul", "rows with rows", lambda x: x @ x.T, 6)
    yield function("rows shuffled", "by flip", lambda x: x - x.flip(0), 6)
    yield function("rows shuffled", "by a permutation", lambda x: x - x[torch.tensor([3, 2, 1, 0, 7, 6, 5, 4])], 6)
    yield function("triplets", "hardest", lambda x: (x @ x.T).amax(1), 6)
    yield function(
        "linalg.inv", "in each row", lambda x: torch.linalg.inv(x @ x.mT + 4 * torch.eye(3, dtype=x.dtype)), 3, 3
    )
    yield function("linalg.svdvals", "in each row", lambda x: torch.linalg.svdvals(x), 3, 4)
    yield function(
        "linalg.solve",
        "in each row",
        lambda x, a: torch.linalg.solve(x + 4 * torch.eye(3, dtype=x.dtype), a),
        3,
        3,
        a=floats(3, 2),
    )
    yield function("fft.rfft", "in each row", lambda x: torch.fft.rfft(x).abs(), 6)


def _clip(x: Tensor, a: Tensor) -> Tensor:
    scores, own = F.normalize(x) @ F.normalize(a).T, torch.arange(len(x))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def _simclr(x: Tensor) -> Tensor:
    x = F.normalize(x)
    scores = (x @ x.T / 0.5).masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, (torch.arange(len(x)) + len(x) // 2) % len(x))


def _barlow(x: Tensor, a: Tensor) -> Tensor:
    x, a = (x - x.mean(0)) / x.std(0), (a - a.mean(0)) / a.std(0)
    c = x.T @ a / len(x)
    return (c - torch.eye(len(c), dtype=c.dtype)).pow(2).sum()


KINDS = (_reductions, _made, _coupled)
