"""Rows of docs/operators.md: losses of torch.nn, with their reductions, weights and ignored rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.proofs.operators_nn_cases import (
    ANY,
    CLASSES,
    REDUCTIONS,
    Case,
    floats,
    function,
    labels,
    layer,
    lengths,
    loss,
    shares,
    signs,
    unit,
)


def _classification() -> Iterator[Case]:
    weight = torch.linspace(0.5, 1.5, CLASSES)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "": ((CLASSES,), ()),
        "images": ((CLASSES, 3, 4), (3, 4)),
    }
    settings: dict[str, dict[str, Any]] = {
        "": {}, "weights": {"weight": weight}, "ignored": {"ignore_index": 2}, "smoothed": {"label_smoothing": 0.1},
        "weights, smoothed, ignored": {"weight": weight, "label_smoothing": 0.1, "ignore_index": -100},
    }  # fmt: skip
    for (name, given), (kind, (own, target)), reduction in itertools.product(
        settings.items(), shapes.items(), REDUCTIONS
    ):
        setting = ", ".join(filter(None, (kind, name, reduction)))
        make = lambda g=given, r=reduction: nn.CrossEntropyLoss(**g, reduction=r)  # noqa: E731
        ignored = -100 if "smoothed, ignored" in name else None
        yield loss("CrossEntropyLoss", setting, make, *own, a=labels(*target, ignored=ignored))
        if "smoothed" not in name:
            make = lambda g=given, r=reduction: _Logs(nn.NLLLoss(**g, reduction=r))  # noqa: E731
            yield loss("NLLLoss", setting, make, *own, a=labels(*target))
    for name, reduction in itertools.product(("", "weights", "smoothed"), REDUCTIONS):
        setting = ", ".join(filter(None, ("probabilities", name, reduction)))
        make = lambda g=settings[name], r=reduction: nn.CrossEntropyLoss(**g, reduction=r)  # noqa: E731
        yield loss("CrossEntropyLoss", setting, make, CLASSES, a=shares(CLASSES))
    for reduction in (*REDUCTIONS, "batchmean"):
        for log in (False, True):
            make = lambda r=reduction, g=log: _Logs(nn.KLDivLoss(reduction=r, log_target=g), log=g)  # noqa: E731
            setting = f"{reduction}, log target" if log else reduction
            yield loss("KLDivLoss", setting, make, CLASSES, a=shares(CLASSES))
    yield loss(
        "cross_entropy", "sequences", lambda: lambda x, a: F.cross_entropy(x.flatten(0, 1), a.flatten()), 3, CLASSES,
        a=labels(3, ignored=-100),
    )  # fmt: skip
    yield loss("AdaptiveLogSoftmaxWithLoss", "", lambda: _Adaptive(), 6, a=labels(high=10))
    yield loss(
        "cross_entropy", "by hand", lambda: lambda x, a: -x.log_softmax(-1).gather(1, a[:, None]).mean(), CLASSES,
        a=labels(),
    )  # fmt: skip
    yield loss(
        "focal loss", "by hand",
        lambda: _focal, CLASSES, a=labels(),
    )  # fmt: skip
    yield loss("LinearCrossEntropyLoss", "", lambda: nn.LinearCrossEntropyLoss(6, CLASSES), 6, a=labels())


def _focal(x: Tensor, a: Tensor) -> Tensor:
    rows = F.cross_entropy(x, a, reduction="none")
    return ((1 - torch.exp(-rows)) ** 2 * rows).mean()


class _Logs(nn.Module):
    """A loss of logarithms of probabilities."""

    def __init__(self, loss: nn.Module, *, log: bool = False) -> None:
        super().__init__()
        self.loss, self.log = loss, log

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x.log_softmax(1), target.log() if self.log else target)


class _Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(6, 10, [3, 6])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x, target).loss


def _regression() -> Iterator[Case]:
    for reduction in REDUCTIONS:
        for name, given in (
            ("MSELoss", {}), ("L1Loss", {}), ("SmoothL1Loss", {}), ("SmoothL1Loss", {"beta": 0.3}),
            ("SmoothL1Loss", {"beta": 0.0}), ("HuberLoss", {}), ("HuberLoss", {"delta": 0.4}),
        ):  # fmt: skip
            setting = ", ".join([*(f"{key} {value}" for key, value in given.items()), reduction])
            make = lambda n=name, g=given, r=reduction: getattr(nn, n)(**g, reduction=r)  # noqa: E731
            yield loss(name, setting, make, 3, 6, a=floats(3, 6))
        yield loss(
            "mse_loss", f"weights, {reduction}",
            lambda r=reduction: lambda x, a, b: ANY.mse_loss(x, a, weight=b, reduction=r), 6, a=floats(6), b=unit(6),
        )  # fmt: skip
        for full in (False, True):
            yield loss(
                "GaussianNLLLoss", f"full, {reduction}" if full else reduction,
                lambda f=full, r=reduction: nn.GaussianNLLLoss(full=f, reduction=r), 6, a=floats(6), b=unit(6),
            )  # fmt: skip
        for log, full in itertools.product((False, True), repeat=2):
            yield loss(
                "PoissonNLLLoss", ", ".join(["log input"] * log + ["full"] * full + [reduction]),
                lambda i=log, f=full, r=reduction: _Positive(nn.PoissonNLLLoss(log_input=i, full=f, reduction=r)), 6,
                a=unit(6),
            )  # fmt: skip
    yield loss(
        "GaussianNLLLoss", "variances of the model, some below eps",
        lambda: lambda x, a: F.gaussian_nll_loss(x, a, F.softplus(x), eps=0.7), 6, a=floats(6),
    )  # fmt: skip
    yield loss("mse_loss", "by hand", lambda: lambda x, a: (x - a).pow(2).mean(), 6, a=floats(6))
    yield loss("mse_loss", "broadcast", lambda: lambda x, a: F.mse_loss(x, a.expand_as(x)), 6, a=floats(1))
    yield loss("log_cosh", "by hand", lambda: lambda x, a: torch.log(torch.cosh(x - a)).mean(), 6, a=floats(6))


class _Positive(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.loss(F.softplus(x), *rest)


class _Shares(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.loss(x.sigmoid(), *rest)


def _binary() -> Iterator[Case]:
    weight = torch.linspace(0.5, 1.5, 6)
    for reduction in REDUCTIONS:
        for name, given in (("", {}), ("weights", {"weight": weight})):
            setting = ", ".join(filter(None, (name, reduction)))
            yield loss(
                "BCELoss", setting, lambda g=given, r=reduction: _Shares(nn.BCELoss(**g, reduction=r)), 6, a=unit(6)
            )
        for name, given in (
            ("", {}), ("weights", {"weight": weight}), ("positive weights", {"pos_weight": weight}),
            ("both weights", {"weight": weight, "pos_weight": weight}),
        ):  # fmt: skip
            setting = ", ".join(filter(None, (name, reduction)))
            yield loss(
                "BCEWithLogitsLoss", setting, lambda g=given, r=reduction: nn.BCEWithLogitsLoss(**g, reduction=r), 6,
                a=unit(6),
            )  # fmt: skip
        yield loss(
            "binary_cross_entropy_with_logits", f"a weight for each row, {reduction}",
            lambda r=reduction: lambda x, a, b: F.binary_cross_entropy_with_logits(x, a, b, reduction=r), 6,
            a=unit(6), b=unit(6),
        )  # fmt: skip
    yield loss(
        "dice loss", "by hand",
        lambda: lambda x, a: 1 - (2 * (x.sigmoid() * a).sum() + 1) / (x.sigmoid().sum() + a.sum() + 1), 6, a=unit(6),
    )  # fmt: skip


def _margins() -> Iterator[Case]:
    weight = torch.linspace(0.5, 1.5, CLASSES)
    for reduction in REDUCTIONS:
        yield loss("SoftMarginLoss", reduction, lambda r=reduction: nn.SoftMarginLoss(reduction=r), 6, a=signs(6))
        yield loss(
            "HingeEmbeddingLoss", reduction, lambda r=reduction: nn.HingeEmbeddingLoss(0.7, reduction=r), 6, a=signs(6)
        )
        for name, given in {"": {}, "p 2": {"p": 2}, "weights": {"weight": weight}}.items():
            setting = ", ".join(filter(None, (name, reduction)))
            yield loss(
                "MultiMarginLoss", setting, lambda g=given, r=reduction: nn.MultiMarginLoss(**g, reduction=r), CLASSES,
                a=labels(),
            )  # fmt: skip
        yield loss(
            "MultiLabelMarginLoss", reduction, lambda r=reduction: nn.MultiLabelMarginLoss(reduction=r), CLASSES,
            a=labels(CLASSES, ignored=-1),
        )  # fmt: skip
        for name, given in {"": {}, "weights": {"weight": weight}}.items():
            setting = ", ".join(filter(None, (name, reduction)))
            yield loss(
                "MultiLabelSoftMarginLoss", setting,
                lambda g=given, r=reduction: nn.MultiLabelSoftMarginLoss(**g, reduction=r), CLASSES, a=unit(CLASSES),
            )  # fmt: skip
        yield loss(
            "MarginRankingLoss", reduction, lambda r=reduction: nn.MarginRankingLoss(0.3, reduction=r), 6,
            a=floats(6), b=signs(6),
        )  # fmt: skip


def _distances() -> Iterator[Case]:
    for reduction in REDUCTIONS:
        yield loss(
            "CosineEmbeddingLoss", reduction, lambda r=reduction: nn.CosineEmbeddingLoss(0.2, reduction=r), 6,
            a=floats(6), b=signs(),
        )  # fmt: skip
        for name, given in {"": {}, "p 1": {"p": 1.0}, "swap": {"swap": True}}.items():
            setting = ", ".join(filter(None, (name, reduction)))
            yield loss(
                "TripletMarginLoss", setting, lambda g=given, r=reduction: nn.TripletMarginLoss(**g, reduction=r), 6,
                a=floats(6), b=floats(6),
            )  # fmt: skip
        yield loss(
            "TripletMarginWithDistanceLoss", reduction,
            lambda r=reduction: nn.TripletMarginWithDistanceLoss(reduction=r), 6, a=floats(6), b=floats(6),
        )  # fmt: skip
    yield layer("CosineSimilarity", "", lambda: nn.CosineSimilarity(-1), 6, a=floats(6))
    yield layer("PairwiseDistance", "", nn.PairwiseDistance, 6, a=floats(6))
    yield layer("PairwiseDistance", "p 1", lambda: nn.PairwiseDistance(p=1.0), 6, a=floats(6))
    yield function("cdist", "in each row", lambda x, a: torch.cdist(x, a), 3, 6, a=floats(4, 6))


def _sequences() -> Iterator[Case]:
    for reduction in REDUCTIONS:
        yield loss(
            "CTCLoss", reduction, lambda r=reduction: _Ctc(r), 6, CLASSES, a=lambda g: labels(2, high=4)(g) + 1,
            b=lengths(5, 6), c=lengths(1, 2),
        )  # fmt: skip


class _Ctc(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.loss = nn.CTCLoss(reduction=reduction)

    def forward(self, x: Tensor, target: Tensor, own: Tensor, targets: Tensor) -> Tensor:
        return self.loss(x.log_softmax(-1).transpose(0, 1), target, own, targets)


KINDS = (_classification, _regression, _binary, _margins, _distances, _sequences)
