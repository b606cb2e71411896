"""The rows of docs/operators.md: layers, functions and losses of torch.nn, one tiny model each, in several settings.

A model is a linear layer, so that gradients pass through what it is for, and that layer, function or loss. Of a layer
the loss is the mean of the squares of what it gives. Nothing here is written for autopar.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 8
"""Of every batch."""

CLASSES = 5
REDUCTIONS = ("mean", "sum", "none")
ANY: Any = F  # of which torch's own types lack arguments
Inputs = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `of` is the layer, function or loss, `setting` how it is called."""

    of: str
    setting: str
    model: Callable[[], nn.Module]
    inputs: Mapping[str, Inputs]

    @property
    def name(self) -> str:
        return f"{self.of} ({self.setting})" if self.setting else self.of

    def batch(self) -> dict[str, Tensor]:
        """The inputs, seeded."""
        generator = torch.Generator().manual_seed(0)
        return {name: make(generator) for name, make in self.inputs.items()}


class Layer(nn.Module):
    """The mean of the squares of what a layer gives for a linear layer's result."""

    def __init__(self, width: int, layer: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layer = layer

    def forward(self, x: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> dict[str, Tensor]:
        """The loss, and what the layer gives."""
        given = [each for each in (a, b) if each is not None]
        y = self.layer(self.first(x), *given)
        y = y[0] if isinstance(y, tuple) else y
        return {"loss": (y * y).mean(), "y": y}


class Loss(nn.Module):
    """A loss of a linear layer's result; of a loss for each row, the mean."""

    def __init__(self, width: int, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.loss = loss

    def forward(
        self, x: Tensor, a: Tensor | None = None, b: Tensor | None = None, c: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss alone, or with the rows'."""
        given = [each for each in (a, b, c) if each is not None]
        loss = self.loss(self.first(x), *given)
        return {"loss": loss} if not loss.dim() else {"loss": loss.mean(), "rows": loss}


# ------------------------------------------------------------------------------------------------------------- inputs


def floats(*shape: int, scale: float = 1.0) -> Inputs:
    """Normal numbers, a row for each of the batch."""
    return lambda generator: torch.randn(ROWS, *shape, generator=generator) * scale


def unit(*shape: int) -> Inputs:
    """Numbers between 0 and 1."""
    return lambda generator: torch.rand(ROWS, *shape, generator=generator) * 0.9 + 0.05


def labels(*shape: int, high: int = CLASSES, ignored: int | None = None) -> Inputs:
    """Numbers of classes; two of them `ignored`."""

    def make(generator: torch.Generator) -> Tensor:
        found = torch.randint(0, high, (ROWS, *shape), generator=generator)
        if ignored is not None:
            found.view(-1)[[1, 2]] = ignored
        return found

    return make


def signs(*shape: int) -> Inputs:
    """1 and -1."""
    return lambda generator: torch.randint(0, 2, (ROWS, *shape), generator=generator).float() * 2 - 1


def shares(*shape: int) -> Inputs:
    """Probabilities of the classes, which are dim 1."""
    return lambda generator: torch.randn(ROWS, *shape, generator=generator).softmax(1)


def lengths(low: int, high: int) -> Inputs:
    """Lengths of sequences."""
    return lambda generator: torch.randint(low, high + 1, (ROWS,), generator=generator)


# -------------------------------------------------------------------------------------------------------- short forms


def layer(of: str, setting: str, make: Callable[[], Callable[..., Any]], *shape: int, **extra: Inputs) -> Case:
    """A case of `Layer`, for rows of this shape."""
    return Case(of, setting, lambda: Layer(shape[-1], make()), {"x": floats(*shape), **extra})


def function(of: str, setting: str, call: Callable[..., Any], *shape: int, **extra: Inputs) -> Case:
    """A case of `Layer` for a function."""
    return layer(of, setting, lambda: call, *shape, **extra)


def loss(of: str, setting: str, make: Callable[[], Callable[..., Any]], *shape: int, **extra: Inputs) -> Case:
    """A case of `Loss`, for rows of this shape."""
    return Case(of, setting, lambda: Loss(shape[-1], make()), {"x": floats(*shape), **extra})


def cases() -> list[Case]:
    """All rows."""
    kinds = (
        _activations, _dense, _convolutions, _pooling, _padding, _normalization, _recurrent, _attention, _embeddings,
        _shapes, _classification, _regression, _binary, _margins, _distances, _sequences, _reductions, _made, _coupled,
    )  # fmt: skip
    return [case for kind in kinds for case in kind()]


# -------------------------------------------------------------------------------------------------------------- layers


def _activations() -> Iterator[Case]:
    plain = (
        "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish",
        "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
        "Identity",
    )  # fmt: skip
    for name in plain:
        yield layer(name, "", getattr(nn, name), 6)
    yield layer("GELU", "tanh", lambda: nn.GELU(approximate="tanh"), 6)
    yield layer("PReLU", "a slope for each channel", lambda: nn.PReLU(3), 3, 6)
    yield layer("Threshold", "", lambda: nn.Threshold(0.1, 0.2), 6)
    yield layer("ReLU", "in place", lambda: nn.ReLU(inplace=True), 6)
    yield layer("GLU", "", lambda: nn.GLU(-1), 6)
    for name in ("Softmax", "Softmin", "LogSoftmax"):
        yield layer(name, "", lambda name=name: getattr(nn, name)(-1), 6)
        yield layer(name, "over the batch", lambda name=name: getattr(nn, name)(0), 6)
    yield layer("Softmax2d", "", nn.Softmax2d, 3, 4, 4)
    for name in ("Dropout", "AlphaDropout"):
        yield layer(name, "", lambda name=name: getattr(nn, name)(0.4), 6)
        yield layer(name, "eval", lambda name=name: getattr(nn, name)(0.4).eval(), 6)
    for name, shape in (("Dropout1d", (3, 6)), ("Dropout2d", (3, 4, 4)), ("Dropout3d", (3, 2, 4, 4))):
        yield layer(name, "", lambda name=name: getattr(nn, name)(0.4), *shape)
    yield layer("FeatureAlphaDropout", "", lambda: nn.FeatureAlphaDropout(0.4), 3, 4)
    yield layer("RReLU", "", nn.RReLU, 6)
    yield layer("RReLU", "eval", lambda: nn.RReLU().eval(), 6)
    yield function("gumbel_softmax", "", lambda x: F.gumbel_softmax(x, tau=0.7), 6)
    yield function("gumbel_softmax", "hard", lambda x: F.gumbel_softmax(x, hard=True), 6)


def _dense() -> Iterator[Case]:
    yield layer("Linear", "", lambda: nn.Linear(6, 4), 6)
    yield layer("Linear", "sequences, no bias", lambda: nn.Linear(6, 4, bias=False), 3, 6)
    yield layer("Bilinear", "", lambda: nn.Bilinear(6, 5, 4), 6, a=floats(5))
    yield function("bilinear", "with itself", lambda x: F.bilinear(x, x, torch.ones(2, 6, 6, dtype=x.dtype)), 6)
    yield layer("LazyLinear", "", lambda: _drawn(nn.LazyLinear(4), torch.zeros(2, 6)), 6)
    yield function("einsum", "bi,bj->bij", lambda x: torch.einsum("bi,bj->bij", x, x), 6)
    yield function("einsum", "bsh,bth->bst", lambda x: torch.einsum("bsh,bth->bst", x, x), 4, 6)


def _drawn(module: nn.Module, x: Tensor) -> nn.Module:
    """A lazy module with its parameters."""
    module(x)
    return module


def _convolutions() -> Iterator[Case]:
    spaces = {1: (6,), 2: (6, 6), 3: (4, 4, 4)}
    for dims, space in spaces.items():
        conv, turned = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
        settings: dict[str, dict[str, Any]] = {
            "": {}, "stride 2": {"stride": 2}, "dilated": {"dilation": 2}, "no bias": {"bias": False},
        }  # fmt: skip
        for name, given in settings.items():
            size = 2 if dims == 3 else 3
            yield layer(conv.__name__, name, lambda c=conv, g=given, k=size: c(4, 6, k, **g), 4, *space)
        yield layer(conv.__name__, "groups", lambda c=conv: c(4, 8, 2, groups=2), 4, *space)
        yield layer(conv.__name__, "depthwise", lambda c=conv: c(4, 4, 2, groups=4), 4, *space)
        yield layer(conv.__name__, "circular", lambda c=conv: c(4, 6, 3, padding=1, padding_mode="circular"), 4, *space)
        yield layer(conv.__name__, "padding same", lambda c=conv: c(4, 6, 3, padding="same"), 4, *space)
        yield layer(turned.__name__, "", lambda c=turned: c(4, 6, 2), 4, *space)
        yield layer(turned.__name__, "stride 2", lambda c=turned: c(4, 6, 2, stride=2, output_padding=1), 4, *space)
        yield layer(turned.__name__, "groups", lambda c=turned: c(4, 6, 2, groups=2), 4, *space)
        lazy = getattr(nn, f"LazyConv{dims}d")
        yield layer(lazy.__name__, "", lambda c=lazy, s=space: _drawn(c(6, 2), torch.zeros(2, 4, *s)), 4, *space)
    yield function("conv_tbc", "", lambda x: F.conv_tbc(x, torch.ones(2, 6, 3, dtype=x.dtype), torch.zeros(3)), 4, 6)
    yield layer("Fold", "", lambda: nn.Fold((4, 4), 2, stride=2), 8, 4)
    yield layer("Unfold", "", lambda: nn.Unfold(2, stride=2), 3, 4, 4)


def _pooling() -> Iterator[Case]:
    spaces = {1: (8,), 2: (8, 8), 3: (4, 4, 4)}
    for dims, space in spaces.items():
        for name, given in (("", {}), ("stride 1, padding", {"stride": 1, "padding": 1})):
            for kind in ("MaxPool", "AvgPool"):
                pool = getattr(nn, f"{kind}{dims}d")
                yield layer(pool.__name__, name, lambda p=pool, g=given: p(2, **g), 3, *space)
        for kind in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            for size in (1, 2, 3):
                pool = getattr(nn, f"{kind}{dims}d")
                yield layer(pool.__name__, f"to {size}", lambda p=pool, s=size: p(s), 3, *space)
        power = getattr(nn, f"LPPool{dims}d")
        yield layer(power.__name__, "", lambda p=power: nn.Sequential(nn.Softplus(), p(2.0, 2)), 3, *space)
        yield layer(f"MaxUnpool{dims}d", "", lambda d=dims: _Unpooled(d), 3, *space)
    yield layer("MaxPool2d", "ceil", lambda: nn.MaxPool2d(3, ceil_mode=True), 3, 8, 8)
    yield layer("AvgPool2d", "ceil, padding not counted", lambda: nn.AvgPool2d(3, 2, 1, True, False), 3, 8, 8)
    yield layer("MaxPool2d", "with indices", lambda: nn.MaxPool2d(2, return_indices=True), 3, 8, 8)
    yield layer("FractionalMaxPool2d", "", lambda: nn.FractionalMaxPool2d(2, output_size=3), 3, 8, 8)
    yield layer("FractionalMaxPool3d", "", lambda: nn.FractionalMaxPool3d(2, output_size=2), 3, 4, 4, 4)


class _Unpooled(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        values, indices = self.pool(x)
        return self.unpool(values, indices)


def _padding() -> Iterator[Case]:
    spaces = {1: (6,), 2: (6, 6), 3: (4, 4, 4)}
    for dims, space in spaces.items():
        for kind in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
            yield layer(f"{kind}{dims}d", "", lambda k=kind, d=dims: getattr(nn, f"{k}{d}d")(1), 3, *space)
        yield layer(f"ConstantPad{dims}d", "", lambda d=dims: getattr(nn, f"ConstantPad{d}d")(1, 0.5), 3, *space)
    yield function("pad", "of the last dim", lambda x: F.pad(x, (1, 2)), 6)
    yield function("pad", "cut", lambda x: F.pad(x, (-1, 2)), 6)


def _normalization() -> Iterator[Case]:
    for dims, space in {1: (6,), 2: (4, 4), 3: (2, 4, 4)}.items():
        batch, instance = getattr(nn, f"BatchNorm{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
        yield layer(batch.__name__, "", lambda n=batch: n(3), 3, *space)
        yield layer(batch.__name__, "eval", lambda n=batch: n(3).eval(), 3, *space)
        yield layer(batch.__name__, "no statistics", lambda n=batch: n(3, track_running_stats=False), 3, *space)
        yield layer(batch.__name__, "cumulative", lambda n=batch: n(3, momentum=None), 3, *space)
        yield layer(instance.__name__, "", lambda n=instance: n(3), 3, *space)
        yield layer(instance.__name__, "affine", lambda n=instance: n(3, affine=True), 3, *space)
        yield layer(instance.__name__, "statistics", lambda n=instance: n(3, track_running_stats=True), 3, *space)
    yield layer("BatchNorm1d", "rows", lambda: nn.BatchNorm1d(6), 6)
    yield layer("BatchNorm1d", "not affine", lambda: nn.BatchNorm1d(6, affine=False), 6)
    yield layer("LazyBatchNorm1d", "", lambda: _drawn(nn.LazyBatchNorm1d(), torch.randn(4, 6)), 6)
    yield layer("LayerNorm", "", lambda: nn.LayerNorm(6), 3, 6)
    yield layer("LayerNorm", "two dims", lambda: nn.LayerNorm([3, 6]), 3, 6)
    yield layer("LayerNorm", "not affine", lambda: nn.LayerNorm(6, elementwise_affine=False), 3, 6)
    yield layer("RMSNorm", "", lambda: nn.RMSNorm(6), 3, 6)
    yield layer("GroupNorm", "", lambda: nn.GroupNorm(2, 4), 4, 3, 3)
    yield layer("GroupNorm", "not affine", lambda: nn.GroupNorm(2, 4, affine=False), 4, 3, 3)
    yield layer("LocalResponseNorm", "", lambda: nn.LocalResponseNorm(3), 4, 3, 3)
    yield layer("LocalResponseNorm", "sequences", lambda: nn.LocalResponseNorm(3), 4, 6)
    yield layer("CrossMapLRN2d", "", lambda: nn.CrossMapLRN2d(3), 4, 3, 3)
    yield function("normalize", "", lambda x: F.normalize(x, dim=-1), 6)
    yield function("normalize", "p=1", lambda x: F.normalize(x, p=1.0, dim=-1), 6)
    yield function("normalize", "over the batch", lambda x: F.normalize(x, dim=0), 6)
    yield layer("weight_norm", "", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), 6)


def _recurrent() -> Iterator[Case]:
    for name in ("RNN", "LSTM", "GRU"):
        make = getattr(nn, name)
        yield layer(name, "batch first", lambda m=make: m(6, 5, batch_first=True), 4, 6)
        yield layer(name, "two layers", lambda m=make: m(6, 5, num_layers=2, batch_first=True), 4, 6)
        yield layer(name, "both directions", lambda m=make: m(6, 5, batch_first=True, bidirectional=True), 4, 6)
    yield layer("RNN", "relu", lambda: nn.RNN(6, 5, nonlinearity="relu", batch_first=True), 4, 6)
    yield layer("LSTM", "projected", lambda: nn.LSTM(6, 5, proj_size=3, batch_first=True), 4, 6)
    for name in ("RNNCell", "LSTMCell", "GRUCell"):
        yield layer(name, "", lambda n=name: getattr(nn, n)(6, 5), 6)


def _attention() -> Iterator[Case]:
    yield layer("MultiheadAttention", "", lambda: _SelfAttention(), 4, 6)
    yield layer("MultiheadAttention", "causal", lambda: _SelfAttention(causal=True), 4, 6)
    yield layer("MultiheadAttention", "bias of keys", lambda: _SelfAttention(add_bias_kv=True), 4, 6)
    yield layer("MultiheadAttention", "weights", lambda: _SelfAttention(weights=True), 4, 6)
    encoder = {"batch_first": True, "dropout": 0.0}
    yield layer("TransformerEncoderLayer", "", lambda: nn.TransformerEncoderLayer(6, 2, 8, **encoder), 4, 6)
    yield layer(
        "TransformerEncoderLayer", "norm first, GELU, dropout",
        lambda: nn.TransformerEncoderLayer(6, 2, 8, activation="gelu", batch_first=True, norm_first=True), 4, 6,
    )  # fmt: skip
    yield layer(
        "TransformerEncoder", "",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, **encoder), 2), 4, 6,
    )  # fmt: skip
    memory = {"a": floats(3, 6)}
    yield layer("TransformerDecoderLayer", "", lambda: nn.TransformerDecoderLayer(6, 2, 8, **encoder), 4, 6, **memory)
    yield layer(
        "TransformerDecoder", "",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 8, **encoder), 2), 4, 6, **memory,
    )  # fmt: skip
    yield layer("Transformer", "", lambda: nn.Transformer(6, 2, 1, 1, 8, **encoder), 4, 6, **memory)
    attend = F.scaled_dot_product_attention
    yield function("scaled_dot_product_attention", "", lambda x: attend(x, x, x), 2, 4, 6)
    yield function("scaled_dot_product_attention", "causal", lambda x: attend(x, x, x, is_causal=True), 2, 4, 6)


class _SelfAttention(nn.Module):
    def __init__(self, *, causal: bool = False, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
        self.causal, self.weights = causal, weights

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        y, weights = self.attention(x, x, x, attn_mask=mask, need_weights=self.weights)
        return weights if self.weights else y


class _Table(nn.Module):
    """A table read by numbers, added to the input."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, *ids: Tensor) -> Tensor:
        return x + self.table(*ids)


def _embeddings() -> Iterator[Case]:
    ids = {"a": labels(3, high=7)}
    for setting, given in {
        "": {}, "padding": {"padding_idx": 0}, "by frequency": {"scale_grad_by_freq": True}, "norm": {"max_norm": 1.0},
    }.items():  # fmt: skip
        yield layer("Embedding", setting, lambda g=given: _Table(nn.Embedding(7, 6, **g)), 3, 6, **ids)
    for mode in ("sum", "mean", "max"):
        yield layer("EmbeddingBag", mode, lambda m=mode: _Table(nn.EmbeddingBag(7, 6, mode=m)), 6, **ids)
    yield layer(
        "EmbeddingBag", "sum, padding", lambda: _Table(nn.EmbeddingBag(7, 6, mode="sum", padding_idx=0)), 6, **ids
    )
    yield layer(
        "EmbeddingBag", "weighted",
        lambda: _Table(_Weighted(nn.EmbeddingBag(7, 6, mode="sum"))), 6, **ids, b=floats(3),
    )  # fmt: skip
    yield function("one_hot", "", lambda x, a: x + F.one_hot(a, 6), 6, a=labels(high=6))
    yield function("one_hot", "embedding by hand", lambda x, a: F.one_hot(a, 6).to(x.dtype) @ x.mT, 6, 6, a=labels(3))


class _Weighted(nn.Module):
    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=weights)


def _shapes() -> Iterator[Case]:
    yield layer("Flatten", "", nn.Flatten, 3, 4)
    yield layer("Unflatten", "", lambda: nn.Unflatten(1, (2, 3)), 6)
    yield layer("ChannelShuffle", "", lambda: nn.ChannelShuffle(2), 4, 3, 3)
    yield layer("PixelShuffle", "", lambda: nn.PixelShuffle(2), 4, 3, 3)
    yield layer("PixelUnshuffle", "", lambda: nn.PixelUnshuffle(2), 2, 4, 4)
    for dims, modes in {
        1: ("nearest", "linear"),
        2: ("nearest", "bilinear", "bicubic"),
        3: ("nearest", "trilinear"),
    }.items():
        for mode in modes:
            space = (4,) * dims
            yield layer("Upsample", f"{dims}d, {mode}", lambda m=mode: nn.Upsample(scale_factor=2, mode=m), 3, *space)
    yield function("interpolate", "to a size", lambda x: F.interpolate(x, size=(5, 7), mode="bilinear"), 3, 4, 4)
    yield function(
        "interpolate", "antialias", lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True), 3, 6, 6
    )
    yield function("interpolate", "area", lambda x: F.interpolate(x, size=(2, 3), mode="area"), 3, 4, 6)
    yield function(
        "interpolate", "nearest-exact", lambda x: F.interpolate(x, size=(5, 7), mode="nearest-exact"), 3, 4, 4
    )
    yield layer("UpsamplingNearest2d", "", lambda: nn.UpsamplingNearest2d(scale_factor=2), 3, 4, 4)
    yield layer("UpsamplingBilinear2d", "", lambda: nn.UpsamplingBilinear2d(scale_factor=2), 3, 4, 4)
    yield function(
        "grid_sample", "", lambda x, a: F.grid_sample(x, a.tanh(), align_corners=False), 3, 4, 4, a=floats(2, 2, 2)
    )
    yield function(
        "affine_grid", "",
        lambda x, a: F.grid_sample(x, F.affine_grid(a, x.shape, align_corners=False), align_corners=False), 3, 4, 4,
        a=floats(2, 3),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- losses


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


# ------------------------------------------------------------------------------- reductions, and what a forward makes


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
