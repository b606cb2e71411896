"""What lies between the two products of an expert, inside a kernel: the text of `autopar.operators.activations` becomes
part of it when it is compiled, its derivatives too.

A text (`operators.compiled_activations.compilable`) is walked by functions that call themselves with its parts, which
are constants: what the compiler sees is plain arithmetic, in float32, whatever the dtype of gate and up (`wide` and
`narrow`, which cast, are nothing here). So every text of the operators below is served, not a list of activations. What
is equal in it is computed once: the compiler finds that.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def head(text):
    """The operator's name; "number", or the text itself where it is gate or up."""
    if text == "gate" or text == "up":
        return text
    return text[: text.index("(")] if "(" in text else "number"


@triton.constexpr_function
def part(text, number):
    """An operator's operand."""
    depth, start, found = 0, text.index("(") + 1, []
    for at in range(start, len(text)):
        if depth == 0 and text[at] in ",)":
            found.append(text[start:at])
            start = at + 1
        depth += (text[at] == "(") - (text[at] == ")")
    return found[number]


@triton.constexpr_function
def number_of(text):
    """0 where it is None."""
    return 0.0 if text == "None" else float(text)


@triton.jit
def activated(gate, up, TEXT: tl.constexpr):
    """The text's value, of gate and up in float32."""
    NAME: tl.constexpr = head(TEXT)
    if NAME == "gate":
        return gate
    elif NAME == "up":
        return up
    elif NAME == "number":
        return tl.full(gate.shape, number_of(TEXT), tl.float32)
    elif NAME == "mul":
        return activated(gate, up, part(TEXT, 0)) * activated(gate, up, part(TEXT, 1))
    elif NAME == "add":
        return activated(gate, up, part(TEXT, 0)) + activated(gate, up, part(TEXT, 1))
    elif NAME == "sub":
        return activated(gate, up, part(TEXT, 0)) - activated(gate, up, part(TEXT, 1))
    elif NAME == "div":
        return activated(gate, up, part(TEXT, 0)) / activated(gate, up, part(TEXT, 1))
    else:
        x = activated(gate, up, part(TEXT, 0))
        value, _ = _of_one(x, TEXT, NAME)
        return value


@triton.jit
def slopes(gate, up, TEXT: tl.constexpr):
    """The text's value, and its derivatives to gate and to up, in float32."""
    NAME: tl.constexpr = head(TEXT)
    if NAME == "gate":
        return gate, tl.full(gate.shape, 1.0, tl.float32), tl.zeros(gate.shape, tl.float32)
    elif NAME == "up":
        return up, tl.zeros(gate.shape, tl.float32), tl.full(gate.shape, 1.0, tl.float32)
    elif NAME == "number":
        zeros = tl.zeros(gate.shape, tl.float32)
        return tl.full(gate.shape, number_of(TEXT), tl.float32), zeros, zeros
    elif NAME == "mul":
        a, a_gate, a_up = slopes(gate, up, part(TEXT, 0))
        b, b_gate, b_up = slopes(gate, up, part(TEXT, 1))
        return a * b, a_gate * b + a * b_gate, a_up * b + a * b_up
    elif NAME == "add":
        a, a_gate, a_up = slopes(gate, up, part(TEXT, 0))
        b, b_gate, b_up = slopes(gate, up, part(TEXT, 1))
        return a + b, a_gate + b_gate, a_up + b_up
    elif NAME == "sub":
        a, a_gate, a_up = slopes(gate, up, part(TEXT, 0))
        b, b_gate, b_up = slopes(gate, up, part(TEXT, 1))
        return a - b, a_gate - b_gate, a_up - b_up
    elif NAME == "div":
        a, a_gate, a_up = slopes(gate, up, part(TEXT, 0))
        b, b_gate, b_up = slopes(gate, up, part(TEXT, 1))
        c = a / b
        return c, (a_gate - c * b_gate) / b, (a_up - c * b_up) / b
    else:
        x, x_gate, x_up = slopes(gate, up, part(TEXT, 0))
        value, slope = _of_one(x, TEXT, NAME)
        return value, slope * x_gate, slope * x_up


@triton.jit
def _of_one(x, TEXT: tl.constexpr, NAME: tl.constexpr):
    """An operator of one operand, and its derivative; what is not read, the compiler leaves out. NaN stays NaN."""
    if NAME == "silu":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * tl.sigmoid(-x))
    elif NAME == "sigmoid":
        s = tl.sigmoid(x)
        return s, s * tl.sigmoid(-x)
    elif NAME == "tanh":
        s = tl.sigmoid(2.0 * x)
        return 2.0 * s - 1.0, 4.0 * s * tl.sigmoid(-2.0 * x)
    elif NAME == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "exp":
        e = tl.exp(x)
        return e, e
    elif NAME == "neg":
        return -x, tl.full(x.shape, -1.0, tl.float32)
    elif NAME == "square":
        return x * x, 2.0 * x
    elif NAME == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * share, share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        share = tl.sigmoid(2.0 * inner)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return x * share, share + 2.0 * x * share * tl.sigmoid(-2.0 * inner) * slope
    elif NAME == "clamp":
        LOW: tl.constexpr = part(TEXT, 1)
        HIGH: tl.constexpr = part(TEXT, 2)
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
        if LOW != "None":
            value = tl.where(value < number_of(LOW), number_of(LOW), value)
            slope = tl.where(x < number_of(LOW), 0.0, slope)
        if HIGH != "None":
            value = tl.where(value > number_of(HIGH), number_of(HIGH), value)
            slope = tl.where(x > number_of(HIGH), 0.0, slope)
        return value, slope
    else:
        tl.static_assert(NAME == "wide" or NAME == "narrow", "no such activation")
        return x, tl.full(x.shape, 1.0, tl.float32)
