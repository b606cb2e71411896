"""ATen's random operators, made of numbers by position: what tracing calls instead.

Each is the textbook transform of uniform or normal numbers (Devroye, Non-Uniform Random Variate Generation, 1986), so
that its distribution is torch's, and its numbers are the same on every mesh, in the backward that computes again, and
on every replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators.dropout_autograd import draw

_aten = torch.ops.aten
_ops = torch.ops.autopar


def _random(kind: str, size: Sequence[int], dtype: torch.dtype | None, device: Any) -> Tensor:
    wanted = dtype or torch.get_default_dtype()
    drawn = wanted if wanted.is_floating_point else torch.float32
    seed, salt = draw(f"{kind} random numbers", size)
    like = torch.zeros(list(size), dtype=drawn, device=device)
    found: Tensor = _ops.random(like, kind, seed, salt, [], list(size))
    return found if drawn == wanted else found.to(wanted)


def _of(x: Tensor, kind: str, options: dict[str, Any]) -> Tensor:
    return _random(kind, x.shape, options.get("dtype") or x.dtype, options.get("device") or x.device)


def _rand(size: Sequence[int], **options: Any) -> Tensor:
    return _random("uniform", size, options.get("dtype"), options.get("device"))


def _randn(size: Sequence[int], **options: Any) -> Tensor:
    return _random("normal", size, options.get("dtype"), options.get("device"))


def _rand_like(x: Tensor, **options: Any) -> Tensor:
    return _of(x, "uniform", options)


def _randn_like(x: Tensor, **options: Any) -> Tensor:
    return _of(x, "normal", options)


def _integers(low: int, high: int, size: Sequence[int], dtype: torch.dtype | None, device: Any) -> Tensor:
    found = _random("uniform", size, torch.float64, device)
    return (found * (high - low)).floor().add(low).to(dtype or torch.int64)


def _randint(high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _integers(0, high, size, options.get("dtype"), options.get("device"))


def _randint_low(low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _integers(low, high, size, options.get("dtype"), options.get("device"))


def _randint_like(x: Tensor, high: int, **options: Any) -> Tensor:
    return _integers(0, high, x.shape, options.get("dtype") or x.dtype, x.device)


def _randint_like_low(x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    return _integers(low, high, x.shape, options.get("dtype") or x.dtype, x.device)


def _bernoulli(p: Tensor) -> Tensor:
    with torch.no_grad():
        return (_of(p, "uniform", {}) < p).to(p.dtype)


def _bernoulli_p(x: Tensor, p: float = 0.5) -> Tensor:
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    return (_random("uniform", x.shape, wide, x.device) < p).to(x.dtype)


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return _of(x, "uniform", {}) * (high - low) + low


def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _of(x, "normal", {}) * std + mean


def _normal_of_means(mean: Tensor, std: float = 1.0) -> Tensor:
    with torch.no_grad():
        return _of(mean, "normal", {}) * std + mean


def _normal_of_deviations(mean: float, std: Tensor) -> Tensor:
    with torch.no_grad():
        return _of(std, "normal", {}) * std + mean


def _normal_of_both(mean: Tensor, std: Tensor) -> Tensor:
    with torch.no_grad():
        shape = torch.broadcast_shapes(mean.shape, std.shape)
        return _random("normal", shape, mean.dtype, mean.device) * std + mean


def _normal_floats(mean: float, std: float, size: Sequence[int], **options: Any) -> Tensor:
    return _randn(size, **options) * std + mean


def _exponential(x: Tensor, rate: float = 1.0) -> Tensor:
    return _of(x, "open", {}).log().neg() / rate


def _log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(x, mean, std).exp()


def _cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return ((_of(x, "open", {}) - 0.5) * math.pi).tan() * sigma + median


def _geometric(x: Tensor, p: float) -> Tensor:
    wide = x.dtype if x.dtype.is_floating_point else torch.float64
    return (_random("open", x.shape, wide, x.device).log() / math.log1p(-p)).ceil().clamp(min=1).to(x.dtype)


def _multinomial(p: Tensor, count: int, replacement: bool = False) -> Tensor:
    """A race of exponential clocks, one for each category, whose rates are the weights: the first `count` to ring."""
    with torch.no_grad():
        if replacement and count > 1:
            raced = p.unsqueeze(-2).expand(*p.shape[:-1], count, p.shape[-1])
            return (raced / _random("open", raced.shape, p.dtype, p.device).log().neg()).argmax(-1)
        raced = p / _random("open", p.shape, p.dtype, p.device).log().neg()
        return raced.argmax(-1, keepdim=True) if count == 1 else raced.topk(count, -1).indices


def _randperm(size: int, **options: Any) -> Tensor:
    found = _random("open", [size], torch.float64, options.get("device"))
    return found.argsort().to(options.get("dtype") or torch.int64)


def _kept(x: Tensor, p: float, size: Sequence[int]) -> Tensor:
    """As ATen draws it: 1 with probability 1 - p."""
    return _bernoulli_p(x.new_empty(list(size)), 1 - p)


def _channels(x: Tensor) -> list[int]:
    return [*x.shape[:2], *[1] * (x.dim() - 2)]


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    return x * 0 if p == 1 else x * (_kept(x, p, _channels(x)) / (1 - p))


def _alpha_dropped(x: Tensor, p: float, train: bool, size: Sequence[int]) -> Tensor:
    """Klambauer et al., Self-Normalizing Neural Networks, 1706.02515."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    alpha = 1.7580993408473766
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    kept = _kept(x, p, size)
    return x * (kept * scale) + ((kept - 1) * (alpha * scale) + alpha * scale * p)


def _alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha_dropped(x, p, train, x.shape)


def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha_dropped(x, p, train, _channels(x))


AUTOGRAD: dict[Any, Callable[..., Any]] = {
    _aten.rand.default: _rand,
    _aten.rand_like.default: _rand_like,
    _aten.randn.default: _randn,
    _aten.randn_like.default: _randn_like,
    _aten.randint.default: _randint,
    _aten.randint.low: _randint_low,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like_low,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli_p,
    _aten.uniform.default: _uniform,
    _aten.normal_functional.default: _normal,
    _aten.normal.Tensor_float: _normal_of_means,
    _aten.normal.float_Tensor: _normal_of_deviations,
    _aten.normal.Tensor_Tensor: _normal_of_both,
    _aten.normal.float_float: _normal_floats,
    _aten.exponential.default: _exponential,
    _aten.log_normal.default: _log_normal,
    _aten.cauchy.default: _cauchy,
    _aten.geometric.default: _geometric,
    _aten.multinomial.default: _multinomial,
    _aten.randperm.default: _randperm,
    _aten.feature_dropout.default: _feature_dropout,
    _aten.alpha_dropout.default: _alpha_dropout,
    _aten.feature_alpha_dropout.default: _feature_alpha_dropout,
}
