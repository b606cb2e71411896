"""Rows of docs/operators.md: layers and functions of torch.nn that are no losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.proofs.operators_nn_cases import (
    Case,
    floats,
    function,
    labels,
    layer,
)


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
        for lazy in (getattr(nn, f"LazyConv{dims}d"), getattr(nn, f"LazyConvTranspose{dims}d")):
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
    for dims, space in {2: (4, 4), 3: (2, 4, 4)}.items():
        lazy = getattr(nn, f"LazyBatchNorm{dims}d")
        yield layer(lazy.__name__, "", lambda c=lazy, s=space: _drawn(c(), torch.randn(4, 3, *s)), 3, *space)
    for dims, space in {1: (6,), 2: (4, 4), 3: (2, 4, 4)}.items():
        lazy = getattr(nn, f"LazyInstanceNorm{dims}d")
        yield layer(lazy.__name__, "", lambda c=lazy, s=space: _drawn(c(), torch.randn(4, 3, *s)), 3, *space)
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
        "grid_sample",
        "points of the layer",
        lambda x, a: F.grid_sample(a, x.tanh()[:, :, None], align_corners=True),
        3,
        2,
        a=floats(3, 4, 4),
    )
    yield function(
        "grid_sample",
        "cubic, border",
        lambda x, a: F.grid_sample(x, a, mode="bicubic", padding_mode="border", align_corners=True),
        3,
        4,
        4,
        a=floats(2, 2, 2),
    )
    yield function(
        "grid_sample",
        "nearest, one pixel, reflected",
        lambda x, a: F.grid_sample(x, a, mode="nearest", padding_mode="reflection", align_corners=False),
        3,
        1,
        1,
        a=floats(2, 2, 2),
    )
    yield function(
        "grid_sample",
        "volumes",
        lambda x, a: F.grid_sample(x, a.tanh(), align_corners=False),
        2,
        3,
        4,
        4,
        a=floats(2, 2, 2, 3),
    )
    yield function(
        "affine_grid", "",
        lambda x, a: F.grid_sample(x, F.affine_grid(a, x.shape, align_corners=False), align_corners=False), 3, 4, 4,
        a=floats(2, 3),
    )  # fmt: skip


def _containers() -> Iterator[Case]:
    yield layer("Sequential", "", lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)), 6)
    yield layer("ModuleList", "", lambda: _Held(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])), 6)
    yield layer("ModuleDict", "", lambda: _Held(nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})), 6)
    yield layer("ParameterList", "", lambda: _Held(nn.ParameterList([torch.randn(6, 6), torch.randn(6, 6)])), 6)
    yield layer(
        "ParameterDict", "", lambda: _Held(nn.ParameterDict({"a": torch.randn(6, 6), "b": torch.ones(6, 6)})), 6
    )


class _Held(nn.Module):
    """What a container holds, one after the other."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        for each in self.held.values() if hasattr(self.held, "values") else self.held:
            x = x @ each if isinstance(each, Tensor) else each(x)
        return x


KINDS = (
    _activations, _dense, _convolutions, _pooling, _padding, _normalization, _recurrent, _attention, _embeddings,
    _shapes, _containers,
)  # fmt: skip
