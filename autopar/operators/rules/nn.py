"""Normalization, pooling, resampling and losses."""

from __future__ import annotations

import math

import torch

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import ArgPath, Rule
from autopar.operators.rules.registry import bind, make_rule, rule

_FIRST = (frozenset({0}),)


@rule("autopar.ctc_loss.default")
def _ctc_loss(call: OpCall) -> Rule:
    """Rows are independent; every step meets all classes and all of a target."""
    flops = 6.0 * call.operands[0].shape[0] * call.operands[1].numel
    return bind(call, "t n c, n s, n, n -> n | t !, c !, s !", op_class="reduction", flops=flops)


@rule("autopar.ctc_loss_grad.default")
def _ctc_loss_grad(call: OpCall) -> Rule:
    flops = 18.0 * call.operands[1].shape[0] * call.operands[2].numel + 3.0 * call.operands[1].numel
    text = "n, t n c, n s, n, n -> t n c | t !, c !, s ! | linear 0"
    return bind(call, text, op_class="reduction", flops=flops)


# ---------------------------------------------------------------------------------------------------------- recurrent


@rule("autopar.lstm.default", "autopar.rnn.default")
def _recurrent(call: OpCall) -> Rule:
    """Rows are independent; every step meets the whole hidden state."""
    weights, ends = _weights_of(call)
    states = ", b h" * (weights - 1)
    text = f"t b d{states}, g d, g h, g, g{ends} -> t b h{states} | t !, d !, h !, g !"
    return bind(call, text, op_class="matmul", flops=_recurrent_flops(call, 0, weights))


@rule("autopar.lstm_grad.default", "autopar.rnn_grad.default")
def _recurrent_grad(call: OpCall) -> Rule:
    """Rows that are split give terms of the weights' gradients. The layer is run once more."""
    weights, ends = _weights_of(call)
    count = (weights - 2) // 2
    states = ", b h" * count
    given = f"t b d{states}, g d, g h, g, g"
    linear = " ".join(str(i) for i in range(count + 1))
    text = f"t b h{states}, {given}{ends} -> {given} | t !, d !, h !, g !, b sum | linear {linear}"
    return bind(call, text, op_class="matmul", flops=3 * _recurrent_flops(call, count + 1, weights))


def _weights_of(call: OpCall) -> tuple[int, str]:
    """The place of the first of four weights among the operands, and what stands behind them: lengths, of rows that
    end where these say.
    """
    is_ended = call.arg("lengths") is not None
    return len(call.operands) - 4 - is_ended, ", b" * is_ended


def _recurrent_flops(call: OpCall, at: int, weights: int) -> float:
    """Two for each weight and row of time and batch; `at`, `weights`: the places of the input and of the first weight
    among the operands.
    """
    time, batch, _ = call.operands[at].shape
    return 2.0 * time * batch * (call.operands[weights].numel + call.operands[weights + 1].numel)


# ------------------------------------------------------------------------------------------------------ normalization


@rule("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
def _layer_norm(call: OpCall) -> Rule:
    """The normalized dims are whole, the leading ones free."""
    lead, norm, sizes = _norm_dims(call, 0)
    statistics = lead + [""] * len(norm)
    operands = [lead + norm] + [norm] * (len(call.operands) - 1)
    results = [lead + norm] + [statistics] * (len(call.results) - 1)
    flops = 8.0 * call.operands[0].numel
    return make_rule(call, operands, results, sizes, blocked=set(norm), op_class="reduction", flops=flops)


@rule("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default")
def _layer_norm_backward(call: OpCall) -> Rule:
    """Leading dims that are split give terms of the gradients to weight and bias."""
    lead, norm, sizes = _norm_dims(call, 1)
    num_statistics = 2 if call.name == "aten.native_layer_norm_backward.default" else 1
    statistics = lead + [""] * len(norm)
    rest = len(call.operands) - 2 - num_statistics
    operands = [lead + norm] * 2 + [statistics] * num_statistics + [norm] * rest
    results = [None if call.results[0] is None else lead + norm]
    results += [None if result is None else norm for result in call.results[1:]]
    return make_rule(
        call, operands, results, sizes, blocked=set(norm), reduce=dict.fromkeys(lead, "sum"), linear=_FIRST,
        op_class="reduction", flops=14.0 * call.operands[0].numel,
    )  # fmt: skip


def _norm_dims(call: OpCall, index: int) -> tuple[list[str], list[str], dict[str, int]]:
    shape = call.operands[index].shape
    split = len(shape) - len(call.arg("normalized_shape"))
    names = [f"b{i}" if i < split else f"d{i}" for i in range(len(shape))]
    return names[:split], names[split:], dict(zip(names, shape))


@rule("aten.native_group_norm.default")
def _group_norm(call: OpCall) -> Rule:
    """Images and groups are free; the channels of a group, and what lies behind them, are whole."""
    space = _space(call.operands[0].ndim - 2)
    affine = ", (g c)" * (len(call.operands) - 1)
    text = f"n (g c) {space}{affine} -> n (g c) {space}, n g, n g | g={call.arg('group')}, c !{_blocked(space)}"
    return bind(call, text, flops_per_point=8.0, op_class="reduction", size_args=_group_sizes(call))


@rule("aten.native_group_norm_backward.default")
def _group_norm_backward(call: OpCall) -> Rule:
    space = _space(call.operands[0].ndim - 2)
    affine = ", (g c)" * (len(call.operands) - 4)
    x = f"n (g c) {space}"
    results = ", ".join("_" if result is None else (x if i == 0 else "(g c)") for i, result in enumerate(call.results))
    text = f"{x}, {x}, n g, n g{affine} -> {results} | g={call.arg('group')}, n sum, c !{_blocked(space)} | linear 0"
    return bind(call, text, flops_per_point=14.0, op_class="reduction", size_args=_group_sizes(call))


def _group_sizes(call: OpCall) -> tuple[tuple[ArgPath, str], ...]:
    return ((call.path("N"), "n"), (call.path("C"), "g"), (call.path("group"), "g"))


def _space(ndim: int) -> str:
    return " ".join(f"x{i}" for i in range(ndim))


def _blocked(names: str) -> str:
    return "".join(f", {name} !" for name in names.split())


@rule(
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten._batch_norm_with_update.default",
    "aten._batch_norm_with_update_functional.default",
    "aten._batch_norm_no_update.default",
)
def _batch_norm(call: OpCall) -> Rule:
    """Channels are free; the batch only where the statistics are given, not taken from it."""
    never = ("aten._batch_norm_no_update.default", "aten._native_batch_norm_legit_no_training.default")
    training = call.name not in never and ("with_update" in call.name or bool(call.arg("training", False)))
    names, sizes = _image_dims(call, 0)
    operands = [names] + [["c"]] * (len(call.operands) - 1)
    results = [names] + [_channel_dims(call.results[i], i, sizes) for i in range(1, len(call.results))]
    return _batch_norm_rule(call, operands, results, sizes, training, 8.0 * call.operands[0].numel)


@rule("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
def _batch_norm_backward(call: OpCall) -> Rule:
    """Linear in the incoming gradient; with given statistics, split batches give terms of the weight gradients."""
    training = bool(call.arg("train", call.arg("update")))
    names, sizes = _image_dims(call, 0)
    operands = [names, names] + [_channel_dims(spec, i, sizes) or [] for i, spec in enumerate(call.operands[2:])]
    results = [None if call.results[0] is None else names]
    results += [None if result is None else ["c"] for result in call.results[1:]]
    blocked = {name for name in sizes if name.startswith("e")} | (set(names) - {"c"} if training else set())
    return make_rule(
        call, operands, results, sizes, blocked=blocked, reduce=dict.fromkeys(set(names) - {"c"}, "sum"), linear=_FIRST,
        op_class="reduction", flops=14.0 * call.operands[0].numel,
    )  # fmt: skip


def _image_dims(call: OpCall, index: int) -> tuple[list[str], dict[str, int]]:
    shape = call.operands[index].shape
    names = ["n", "c", *(f"x{i}" for i in range(len(shape) - 2))]
    return names, dict(zip(names, shape))


def _channel_dims(spec: TensorSpec | None, index: int, sizes: dict[str, int]) -> list[str] | None:
    """One value a channel; else something else in one dim (empty where statistics are not saved)."""
    if spec is None or not spec.ndim:
        return None if spec is None else []
    if spec.shape == (sizes["c"],) and spec.dtype != torch.uint8:
        return ["c"]
    sizes[f"e{index}"] = spec.shape[0]
    return [f"e{index}"]


def _batch_norm_rule(
    call: OpCall,
    operands: list[list[str]],
    results: list[list[str] | None],
    sizes: dict[str, int],
    training: bool,
    flops: float,
) -> Rule:
    extra = {name for name in sizes if name.startswith("e")}
    blocked = extra | (set(operands[0]) - {"c"} if training or ["c"] in results else set())
    # An empty result is the same on every rank, so it may as well be a term of a sum.
    empty = all(sizes[name] == 0 for name in extra)
    reduce = dict.fromkeys(set(operands[0]) - blocked, "sum") if extra and empty else {}
    return make_rule(
        call, operands, results, sizes, blocked=blocked, reduce=reduce, op_class="reduction", flops=flops
    )  # fmt: skip


@rule("autopar.channel_sum.default", "autopar.centred_squares.default")
def _channel_sums(call: OpCall) -> Rule:
    """Sums over batch and space, about a mean that is known: all but channels that is split gives terms."""
    x, sums = _image(call)
    mean = ", c" * (len(call.operands) - 1)
    linear = "" if mean else " | linear 0"
    return bind(call, f"{x}{mean} -> c | {sums}{linear}", op_class="reduction", flops=4.0 * call.operands[0].numel)


@rule("autopar.batch_norm.default")
def _normalized_channels(call: OpCall) -> Rule:
    """Elementwise, once the statistics are known."""
    x, _ = _image(call)
    return bind(call, f"{x}{', c' * (len(call.operands) - 1)} -> {x}", flops=4.0 * call.operands[0].numel)


@rule("autopar.batch_norm_grad_sums.default")
def _batch_norm_grad_sums(call: OpCall) -> Rule:
    x, sums = _image(call)
    text = f"{x}, {x}, c, c -> t c | t !, {sums} | linear 0"
    return bind(call, text, op_class="reduction", flops=5.0 * call.operands[0].numel)


@rule("autopar.batch_norm_grad_input.default")
def _batch_norm_grad_input(call: OpCall) -> Rule:
    """Elementwise, once the sums over the whole batch are known; linear in what comes in and in its sums together."""
    x, _ = _image(call)
    sums = call.operand_of("sums")
    weight = "" if call.operand_of("weight") is None else ", c"
    text = f"{x}, {x}, c, c{weight}{'' if sums is None else ', t c'} -> {x}"
    text += " | linear 0" if sums is None else f" | t ! | linear 0 {sums}"
    return bind(call, text, flops=8.0 * call.operands[0].numel)


@rule("autopar.moving_average.default")
def _moving_average(call: OpCall) -> Rule:
    """Each rank gives the channels whose statistic it has, and zeros for the others: summed, they are the whole."""
    offset = ((call.path("start"), "c"),)
    return bind(call, "d, c -> d | c sum, d !", offset_args=offset, flops=3.0 * call.operands[0].numel)


def _image(call: OpCall) -> tuple[str, str]:
    """The dims of operand 0, and the marks of what a sum over all but channels adds up."""
    space = [f"x{i}" for i in range(call.operands[0].ndim - 2)]
    return " ".join(["n", "c", *space]), ", ".join(f"{name} sum" for name in ("n", *space))


# ------------------------------------------------------------------------------------------------ pooling, resampling


def _resampling(backward: str | None, num_dims: int, *names: str) -> None:
    """Register operators on images whose last `num_dims` dims are whole, and their gradients."""
    space = " ".join(f"x{i}" for i in range(num_dims))
    smaller = " ".join(f"y{i}" for i in range(num_dims))
    blocked = ", ".join(f"{name} !" for name in f"{space} {smaller}".split())

    @rule(*names)
    def forward(call: OpCall) -> Rule:
        results = ", ".join([f"... {smaller}"] * len(call.results))
        linear = "" if len(call.results) > 1 else " | linear 0"  # a maximum also returns where it was
        return bind(call, f"... {space} -> {results} | {blocked}{linear}", op_class="reduction", flops_per_point=1.0)

    if backward is None:
        return

    @rule(backward)
    def gradient(call: OpCall) -> Rule:
        operands = [f"... {smaller}", f"... {space}", f"... {smaller}"][: len(call.operands)]
        result = call.results[0]
        text = f"{', '.join(operands)} -> ... {space} | {blocked} | linear 0"
        shape_args = ((call.path("input_size"), 0),) if call.arg("input_size") is not None else ()
        return bind(
            call, text, op_class="reduction", shape_args=shape_args, flops=float(result.numel if result else 0)
        )  # fmt: skip


_resampling("aten.max_pool2d_with_indices_backward.default", 2, "aten.max_pool2d_with_indices.default")
_resampling("aten.avg_pool2d_backward.default", 2, "aten.avg_pool2d.default")
_resampling("aten._adaptive_avg_pool2d_backward.default", 2, "aten._adaptive_avg_pool2d.default")
_resampling(None, 1, "aten.avg_pool1d.default", "aten.adaptive_avg_pool1d.default")
_resampling("aten.upsample_nearest1d_backward.default", 1, "aten.upsample_nearest1d.default")
_resampling(
    "aten.upsample_nearest2d_backward.default", 2, "aten.upsample_nearest2d.default", "aten.upsample_nearest2d.vec"
)
_resampling("aten.upsample_linear1d_backward.default", 1, "aten.upsample_linear1d.default")
_resampling(
    "aten.upsample_bilinear2d_backward.default", 2, "aten.upsample_bilinear2d.default", "aten.upsample_bilinear2d.vec"
)
_resampling(
    "aten.upsample_bicubic2d_backward.default", 2, "aten.upsample_bicubic2d.default", "aten.upsample_bicubic2d.vec"
)
_resampling(
    "aten.upsample_nearest3d_backward.default", 3, "aten.upsample_nearest3d.default", "aten.upsample_nearest3d.vec"
)
_resampling(
    "aten.upsample_trilinear3d_backward.default", 3,
    "aten.upsample_trilinear3d.default", "aten.upsample_trilinear3d.vec",
)  # fmt: skip
for _dims in (1, 2, 3):
    _name = f"aten._upsample_nearest_exact{_dims}d"
    _resampling(f"{_name}_backward.default", _dims, f"{_name}.default", f"{_name}.vec")
for _kind in ("bilinear", "bicubic"):
    _name = f"aten._upsample_{_kind}2d_aa"
    _resampling(f"{_name}_backward.default", 2, f"{_name}.default", f"{_name}.vec")
_resampling("aten.reflection_pad1d_backward.default", 1, "aten.reflection_pad1d.default")
_resampling("aten.reflection_pad2d_backward.default", 2, "aten.reflection_pad2d.default")
_resampling("aten.replication_pad2d_backward.default", 2, "aten.replication_pad2d.default")


@rule("aten.im2col.default", "aten.col2im.default")
def _patches(call: OpCall) -> Rule:
    """Images to patches and back: both are whole, the leading dims free."""
    image, patches = "c y x", "p q"
    ends = (image, patches) if call.name == "aten.im2col.default" else (patches, image)
    blocked = ", ".join(f"{name} !" for name in f"{image} {patches}".split())
    return bind(call, f"... {ends[0]} -> ... {ends[1]} | {blocked} | linear 0", op_class="gather")


@rule("aten.affine_grid_generator.default", "aten.affine_grid_generator_backward.default")
def _affine_grid(call: OpCall) -> Rule:
    """A grid for each image; the size that is given begins with how many there are."""
    grid = "n " + " ".join(f"x{i}" for i in range(len(call.arg("size")) - 2)) + " k"
    forward = call.name == "aten.affine_grid_generator.default"
    ends = ("n i j", grid) if forward else (grid, "n i j")
    blocked = ", ".join(f"{name} !" for name in f"{grid} i j".split() if name != "n")
    size_args = (((*call.path("size"), 0), "n"),)
    return bind(call, f"{ends[0]} -> {ends[1]} | {blocked} | linear 0", op_class="reduction", size_args=size_args)


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def _grid_sampler(call: OpCall) -> Rule:
    """Points are read one by one, from all of their image; channels side by side."""
    image, grid, seen, marks = _grid_dims(call, 0)
    return bind(call, f"{image}, {grid} -> {seen} | {marks} | linear 0", op_class="gather", flops=_grid_flops(call, 0))


@rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def _grid_sampler_backward(call: OpCall) -> Rule:
    """Points that are split give terms of the image's gradient, channels terms of the grid's."""
    image, grid, seen, marks = _grid_dims(call, 1)
    results = ", ".join("_" if result is None else dims for result, dims in zip(call.results, (image, grid)))
    sums = "".join(f", {name} sum" for name in seen.split() if name != "n")
    text = f"{seen}, {image}, {grid} -> {results} | {marks}{sums} | linear 0"
    return bind(call, text, op_class="gather", flops=2 * _grid_flops(call, 1))


def _grid_dims(call: OpCall, at: int) -> tuple[str, str, str, str]:
    """Image, grid, what is seen, and the marks of what is whole; `at`: the place of the image among the operands."""
    sides = range(call.operands[at].ndim - 2)
    space, points = (" ".join(f"{letter}{i}" for i in sides) for letter in "xy")
    return f"n c {space}", f"n {points} k", f"n c {points}", f"k !{_blocked(space)}"


def _grid_flops(call: OpCall, at: int) -> float:
    """Two for each neighbour of a point: 2 a side, or 4 of a cubic, 1 of the nearest."""
    image, grid = call.operands[at].shape, call.operands[at + 1].shape
    neighbours = (2, 1, 4)[call.arg("interpolation_mode")] ** len(image[2:])
    return 2.0 * neighbours * image[1] * math.prod(grid[:-1])


# ------------------------------------------------------------------------------------------------------------- losses

_MEAN, _SUM = 1, 2


@rule("aten.nll_loss_forward.default")
def _nll_loss(call: OpCall) -> Rule:
    """Classes are whole. A sum over rows is a sum of terms; a mean of a part divides by the wrong number."""
    weight = ", c" if len(call.operands) == 3 else ""
    rows = "n " if call.operands[0].ndim == 2 else ""
    reduction = call.arg("reduction")
    mark = {_MEAN: ", n !", _SUM: ", n sum"}.get(reduction, "") if rows else ""
    loss = "n" if rows and reduction not in (_MEAN, _SUM) else "."
    # Without a reduction the total weight is 0 everywhere.
    mark = ", n sum" if rows and loss == "n" else mark
    return bind(call, f"{rows}c, {rows or '.'}{weight} -> {loss}, . | c !{mark}", op_class="gather")


@rule("aten.nll_loss_backward.default")
def _nll_loss_backward(call: OpCall) -> Rule:
    weight = ", c" if len(call.operands) == 5 else ""
    rows = "n " if call.operands[1].ndim == 2 else ""
    g = "n" if call.operands[0].ndim else "."
    return bind(call, f"{g}, {rows}c, {rows or '.'}{weight}, . -> {rows}c | c ! | linear 0", op_class="gather")


@rule(
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.huber_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.binary_cross_entropy_with_logits.default",
    "aten.soft_margin_loss.default",
)
def _elementwise_loss(call: OpCall) -> Rule:
    reduction = call.arg("reduction")
    names = [f"d{i}" for i in range(call.operands[0].ndim)]
    return _loss_rule(call, names, [] if reduction in (_MEAN, _SUM) else names, blocked=reduction == _MEAN)


@rule(
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.huber_loss_backward.default",
    "aten.binary_cross_entropy_backward.default",
    "aten.soft_margin_loss_backward.default",
)
def _elementwise_loss_backward(call: OpCall) -> Rule:
    """The gradient of a mean divides by the number of elements, so nothing of it can be split."""
    names = [f"d{i}" for i in range(call.operands[1].ndim)]
    return _loss_rule(call, names, names, blocked=call.arg("reduction") == _MEAN, linear=_FIRST)


def _loss_rule(
    call: OpCall, names: list[str], result: list[str], *, blocked: bool, linear: tuple[frozenset[int], ...] = ()
) -> Rule:
    whole = max((spec for spec in call.operands), key=lambda spec: spec.ndim).shape
    operands = []
    for spec in call.operands:
        own = names[len(names) - spec.ndim :]
        operands.append(
            [name if a == b else "" for name, a, b in zip(own, spec.shape, whole[len(whole) - spec.ndim :])]
        )
    return make_rule(
        call, operands, [result], dict(zip(names, whole)), blocked=set(names) if blocked else frozenset(),
        reduce=dict.fromkeys(names, "sum"), linear=linear, flops=float(math.prod(whole)),
    )  # fmt: skip
