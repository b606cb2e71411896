"""Constructors: a filled tensor may be split along any dim; a sequence, or anything random, is whole."""

from __future__ import annotations

from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import make_rule, replicate, rule


@rule(
    "aten.empty.memory_format",
    "aten.full.default",
    "aten.ones.default",
    "aten.scalar_tensor.default",
    "aten.zeros.default",
)
def _filled(call: OpCall) -> Rule:
    result = call.result
    names = [f"d{i}" for i in range(result.ndim)]
    shape_args = ((call.path("size"), 0),) if result.ndim else ()
    return make_rule(call, [], [names], dict(zip(names, result.shape)), shape_args=shape_args)


@rule(
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.new_full.default",
    "aten.new_ones.default",
    "aten.new_zeros.default",
)
def _new(call: OpCall) -> Rule:
    """Only dtype and device of the operand count; dims of the same size are taken to be the same.
    Strides of the whole do for a part.
    """
    source, result = call.operands[0], call.result
    names = [f"d{i}" for i in range(result.ndim)]
    own = [f"x{i}" for i in range(source.ndim)]
    sizes = dict(zip(names, result.shape)) | dict(zip(own, source.shape))
    if source.ndim == result.ndim:
        own = [name if a == b else mine for name, mine, a, b in zip(names, own, result.shape, source.shape)]
    blocked = {name for name in own if name not in names}
    rest: list[list[str]] = [[] for _ in call.operands[1:]]  # the fill value
    shape_args = ((call.path("size"), 0),)
    return make_rule(call, [own, *rest], [names], sizes, blocked=blocked, shape_args=shape_args)


@rule("aten.empty_like.default", "aten.full_like.default", "aten.ones_like.default", "aten.zeros_like.default")
def _like(call: OpCall) -> Rule:
    shape = call.operands[0].shape
    names = [f"d{i}" for i in range(len(shape))]
    zero = call.name == "aten.zeros_like.default" or call.arg("fill_value", 1) == 0
    linear = (frozenset({0}),) if zero else ()
    return make_rule(call, [names], [names], dict(zip(names, shape)), linear=linear)


@rule(
    "aten.arange.default",
    "aten.arange.start",
    "aten.arange.start_step",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
    "aten.eye.default",
    "aten.eye.m",
    "aten.blackman_window.default",
    "aten.blackman_window.periodic",
    "aten.hamming_window.default",
    "aten.hamming_window.periodic",
    "aten.hann_window.default",
    "aten.hann_window.periodic",
    "aten.linspace.default",
    "aten.native_dropout.default",
    "aten.normal_functional.default",
    "aten.rand.default",
    "aten.rand_like.default",
    "aten.randint.default",
    "aten.randint.low",
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
    "aten.randn.default",
    "aten.randn_like.default",
    "aten.randperm.default",
    "prims.iota.default",
)
def _whole(call: OpCall) -> Rule:
    """A part of these is not the operator on a smaller size; random ones must draw the same on every rank."""
    return replicate(call)
