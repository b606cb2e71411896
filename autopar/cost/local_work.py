"""From an operator's rule and strategy to the `Work` of one rank: class, bytes, local m, n, k, or rows and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from autopar.cost import expert_kernels, iterated
from autopar.cost.roofline import Work
from autopar.ir.choices import Choice
from autopar.ir.graphs import CACHES
from autopar.ir.op_call import OpCall
from autopar.ir.region import NodeStrategy
from autopar.ir.rule import Dims, Rule
from autopar.ir.sharding import num_pieces
from autopar.ir.tensor_type import TensorType
from autopar.operators.expert_tiles import rows_of_tile
from autopar.operators.rules.exchange_cost import ranks_of_token
from autopar.operators.rules.experts import EXPERTS_BACKWARD, expert_width

_CLASSES = {"conv": "convolution"}
_BACKWARD = "autopar.attention_backward"
_EXPERTS = "autopar.experts"
_WRITES = ("aten.index_copy.default",)
"""What writes into its first operand, where that is a state's memory and its source comes last."""
FEW_QUERIES = 16
"""Queries of which kernels for a few take care: a token, or the drafts of one."""
Roles = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""The factors that make m, n, k and the batch of a product, and the groups that cut one of the first three."""


def local_work(
    call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int], *, in_place: bool = False,
    grouped: bool = False,
) -> Callable[[float], Work]:  # fmt: skip
    """What one call of the kernel does, given its floating point operations (of one block, where it is a ring).

    sizes: of the mesh's axes. in_place: whether states are written where they lie, not copied (`Hardware.graphs`).
    grouped: whether experts are grouped products (`expert_kernels.serves`, `serves_codes`).
    """
    dtype = _dtype_of(call)
    name = call.name.split(".")[1]
    if call.arg("approximate") == "tanh":  # a function of its own
        name += "_tanh"
    moved = _moved_bytes(call, rule, strategy, sizes)
    if in_place and call.name in _WRITES:
        moved = 2.0 * _bytes_of(call.operands, strategy.operands, sizes)[-1]
    if in_place and name in CACHES:
        moved = _token_bytes(call, strategy, sizes, CACHES[name])
    kind = _CLASSES.get(rule.op_class, rule.op_class)
    if kind == "attention":
        kind = "attention_backward" if call.name.startswith(_BACKWARD) else kind
        shape, variant = _attention_shape(rule, strategy.choices, sizes), _attention_variant(call)
        few = _few_rows(rule, strategy.choices, sizes) if kind == "attention" else 0.0
        dtype = call.operands[0].dtype  # what attention to pieces gives is wider
        return lambda flops: Work(
            kind, dtype, flops, moved, _attention_dims(kind, shape, flops), name, variant, few_rows=few
        )
    if call.name.startswith(_EXPERTS):
        own = expert_dims(call, rule, strategy.choices, sizes)
        around = _bytes_around(call, rule, strategy.choices, sizes)
        moved -= _unread_bytes(call, rule, strategy, sizes)
        moved += decoded_bytes(call, rule, strategy, sizes)
        if grouped:
            return _grouped_work(call, rule, strategy.choices, sizes, moved, name)
        return lambda flops: Work(kind, dtype, flops, moved, own, name, around_bytes=around * flops)
    if iterated.is_loop(call):
        launches, moved = iterated.kernels_and_bytes(call, strategy, sizes)
        return lambda flops: Work(kind, dtype, flops, moved, None, name, launches=launches)
    dims = _product_dims(rule, strategy.choices, sizes) if kind == "matmul" else None
    return lambda flops: Work(kind, dtype, flops, moved, dims, name)


def _dtype_of(call: OpCall) -> torch.dtype:
    return next((spec.dtype for spec in call.results if spec is not None), torch.float32)


def _moved_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> float:
    """Operands read and results written, once. A gather reads no more of an operand than it writes."""
    written = _bytes_of(call.results, strategy.results, sizes)
    read = _bytes_of(call.operands, strategy.operands, sizes)
    if rule.op_class == "gather":
        total = sum(written)
        return total + sum(min(each, total) for each in read)
    return sum(written) + sum(read)


def _token_bytes(call: OpCall, strategy: NodeStrategy, sizes: Sequence[int], caches: Sequence[int]) -> float:
    """Of a token that is written where its caches lie: these are not read, and written at its positions.

    caches: which operands are. What else it gives are the token's queries.
    """
    given = _bytes_of(call.operands, strategy.operands, sizes)
    share = call.operands[0].shape[2] / call.operands[caches[0]].shape[2]
    written = sum(size * share for place, size in enumerate(given) if place in caches)
    read = sum(size for place, size in enumerate(given) if place not in caches)
    results = _bytes_of(call.results, strategy.results, sizes)
    return read + written + sum(results[: len(results) - sum(place in caches for place in range(len(given)))])


def _bytes_of(specs: Sequence[object], layouts: Sequence[object], sizes: Sequence[int]) -> list[float]:
    return [
        TensorType(spec.shape, spec.dtype).num_bytes / num_pieces(layout, sizes)  # type: ignore[attr-defined, arg-type]
        for spec, layout in zip(specs, layouts, strict=True)
        if spec is not None and layout is not None
    ]


# ------------------------------------------------------------------------------------------------------------- products


def _product_dims(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[float, float, float, float]:
    """Local (m, n, k, batch)."""
    local = _local_sizes(rule, choices, sizes)
    m, n, k, batch, groups = (
        math.prod(local.get(name, 1.0) for name in names) for names in _roles(rule.operands, rule.results)
    )
    if groups > 1:
        # A dim is cut into groups, one product for each: a dim of the first operand alone, or the summed one.
        return (max(1.0, m / groups), n, k, batch * groups)
    return m, n, k, batch


def _width(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> float:
    """Local features of an expert between its products."""
    return _local_sizes(rule, choices, sizes)["f"] * expert_width(call, rule) / rule.sizes["f"]


def expert_dims(
    call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]
) -> tuple[float, float, float, float]:
    """Local (m, n, k, batch) of the first product of experts: a product for each expert here, of its share of all rows
    that come to these.
    """
    local, sent, share = _share_here(rule, choices, sizes)
    rows = local["t"] * sent * local["k"] / (rule.sizes["e"] * share)
    columns = _width(call, rule, choices, sizes) * local.get("g", 1.0)
    return max(1.0, rows), columns, local["d"], max(1.0, local["e"] * share)


def _share_here(
    rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]
) -> tuple[Mapping[str, float], float, float]:
    """Local sizes; how many ranks' tokens come to the experts here; what part of these is chosen by any."""
    local = _local_sizes(rule, choices, sizes)
    sent = math.prod(size for choice, size in zip(choices, sizes, strict=True) if choice.kind == "exchange")
    return local, sent, chosen_share(local["t"] * sent, local["k"], rule.sizes["e"])


def _grouped_work(
    call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int], moved: float, name: str
) -> Callable[[float], Work]:
    """Of experts that are grouped products: tiles are computed whole, what lies between products is part of them."""
    local, _, _ = _share_here(rule, choices, sizes)
    rows, columns, hidden, chosen = expert_dims(call, rule, choices, sizes)
    ranks = [size for choice, size in zip(choices, sizes, strict=True) if choice.kind == "exchange"]
    tokens = local["t"] * (ranks_of_token(rule.sizes["e"], int(local["k"]), ranks[0]) if ranks else 1.0)
    places = tokens * local["k"] / max(1.0, local["e"])
    tiled = expert_kernels.tiled_rows(rows, chosen, places)
    dims = (tiled, columns, hidden, 1.0)
    num_rows, width = rows * chosen, _width(call, rule, choices, sizes)
    inside, behind = (num_rows * each for each in expert_kernels.bytes_of_row(call, hidden, width, columns))
    alone = _flops_of_rows(call, num_rows, hidden, width, columns)
    whole, launches = tiled / num_rows, expert_kernels.launches(call, tokens)
    decoded = tiled / rows_of_tile(places) * hidden * (columns + width) if call.arg("storage") else 0.0

    def work(flops: float) -> Work:
        busy = flops / alone  # more rows than on the average come to the busiest rank
        return Work(
            rule.op_class, _dtype_of(call), flops * whole, moved + busy * inside, dims, name,
            around_bytes=busy * behind, launches=launches, decoded=busy * decoded,
        )  # fmt: skip

    return work


def _flops_of_rows(call: OpCall, rows: float, hidden: float, width: float, columns: float) -> float:
    flops = 2 * rows * hidden * (columns + width)
    return flops if call.name == expert_kernels.FORWARD else flops * EXPERTS_BACKWARD


def decoded_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> float:
    """What codes of experts that are chosen stand for, written and read for the products; 0 where they are none."""
    if not call.arg("storage"):
        return 0.0
    _, columns, hidden, num = expert_dims(call, rule, strategy.choices, sizes)
    width = _width(call, rule, strategy.choices, sizes)
    return 2 * num * hidden * (columns + width) * _dtype_of(call).itemsize


def chosen_share(tokens: float, chosen: float, experts: float) -> float:
    """What part of the experts is chosen by any of so many tokens, on the average, where each chooses `chosen` of them
    and all as often: 1 - (1 - chosen / experts)^tokens. The others' weights are not read.
    """
    return float(1.0 - (1.0 - chosen / experts) ** tokens) if chosen < experts else 1.0


def _unread_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> float:
    """Of the weights of experts here, those of which no token comes. What a backward writes of these is written all the
    same: zeros.
    """
    _, _, share = _share_here(rule, strategy.choices, sizes)
    weights = [number for number, dims in enumerate(rule.operands) if dims[:1] == (("e",),)]
    own = [call.operands[number] for number in weights]
    return (1.0 - share) * sum(_bytes_of(own, [strategy.operands[number] for number in weights], sizes))


def _bytes_around(call: OpCall, rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> float:
    """For each floating point operation of experts here, what is read and written beside their products: rows are
    brought together by experts, activated, and brought back to tokens, each once. The gradient does the first two
    again, brings the gradients' rows too, and the activation's backward and that of the weights read both.

    Of a row of D features whose products have C columns and F behind the activation: forward 2 D + C + F elements,
    backward 3 D + 3 C + 4 F.
    """
    local = _local_sizes(rule, choices, sizes)
    hidden, width = local["d"], _width(call, rule, choices, sizes)
    columns = width * local.get("g", 1.0)
    flops, elements = 2 * hidden * (columns + width), 2 * hidden + columns + width
    if call.name != "autopar.experts.default":
        flops, elements = flops * EXPERTS_BACKWARD, 3 * hidden + 3 * columns + 4 * width
    return elements * call.operands[0].dtype.itemsize / flops


def _local_sizes(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> dict[str, float]:
    """The size of each factor on one rank; of a product of factors that is split, the first one is the smaller."""
    local = {factor.name: float(factor.size) for factor in rule.factors}
    for choice, size in zip(choices, sizes, strict=True):
        if size == 1 or choice.factor is None:
            continue
        name = choice.factor
        if name not in local:
            name = name.strip("()").split()[0]
        local[name] /= size
        if choice.splits_two and rule.pair is not None:
            local[rule.pair.key] /= size
    return local


@lru_cache(maxsize=4096)
def _roles(operands: tuple[Dims, ...], results: tuple[Dims | None, ...]) -> Roles:
    """In both operands and the result: batch; in the first and the result: m; in the second and the result: n; summed:
    k; in one operand alone, or in the second alone and the result where the first is flat: groups.
    """
    result = _names(next((dims for dims in results if dims is not None), ()))
    names = [_names(dims) for dims in operands]
    first, second = _factors_of_product(names, result)
    every = dict.fromkeys((*first, *second))
    m = tuple(name for name in every if name in first and name not in second and name in result)
    n = tuple(name for name in every if name in second and name not in first and name in result)
    k = tuple(name for name in every if name in first and name in second and name not in result)
    batch = tuple(name for name in every if name in first and name in second and name in result)
    groups = tuple(name for name in every if name not in (*m, *n, *k, *batch))
    return m, n, k, batch, groups


def _factors_of_product(names: Sequence[Sequence[str]], result: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The two operands that are multiplied: the first two that share a factor which the result has not."""
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if any(name in second and name not in result for name in first):
                return first, second
    return (names[0], names[1]) if len(names) > 1 else (names[0] if names else (), ())


def _names(dims: Dims) -> tuple[str, ...]:
    return tuple(name for dim in dims for name in dim)


# ------------------------------------------------------------------------------------------------------------ attention


def _attention_shape(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[float, float, float, float]:
    """Local rows (batch · heads · queries), keys, and the head sizes of keys and values."""
    local = _local_sizes(rule, choices, sizes)
    rows = math.prod(size for name, size in local.items() if name in ("b", "h", "r", "s"))
    keys = math.prod(size for name, size in local.items() if name in ("t", "p", "c"))  # in pieces: p of c
    return rows, keys, local.get("d", 1.0), local.get("e", local.get("d", 1.0))


def _few_rows(rule: Rule, choices: Sequence[Choice], sizes: Sequence[int]) -> float:
    """Local rows that read one key head, where queries are few; else 0."""
    local = _local_sizes(rule, choices, sizes)
    queries = local.get("s", 1.0)
    return queries * local.get("r", 1.0) if queries <= FEW_QUERIES else 0.0


def bytes_of_caches(call: OpCall, strategy: NodeStrategy, sizes: Sequence[int]) -> float:
    """Of attention, the local bytes of keys and values, and of their scales where they are codes."""
    given = zip(call.operands, strategy.operands, strict=True)
    keys = call.operands[1].shape[2]
    kept = [(spec, layout) for spec, layout in list(given)[1:] if len(spec.shape) == 4 and spec.shape[2] == keys]
    return sum(_bytes_of([spec for spec, _ in kept], [layout for _, layout in kept], sizes))


def _attention_variant(call: OpCall) -> str:
    """What may keep it from a library's kernel (operators/scaled_dot_product.py), the dearest first."""
    for name, option in (("softcap", "softcap"), ("dropout", "dropout_p")):
        if call.arg(option):
            return name
    bias = call.arg("bias")
    if bias is not None and bias.dtype != torch.bool:
        return "bias"
    masks = ("bias", "keys", "sinks", "documents")
    limited = call.arg("left") is not None or call.arg("prefix")
    return "masked" if limited or any(call.arg(name) is not None for name in masks) else ""


def _attention_dims(
    kind: str, shape: tuple[float, float, float, float], flops: float
) -> tuple[float, float, float, float]:
    """(rows, keys seen on the average, head size, whether all are seen). The backward counts two and a half times the
    forward's FLOPs (`rules/attention.py`).
    """
    rows, keys, head, value = shape
    per_pair = 2.0 * (head + value) * (2.5 if kind == "attention_backward" else 1.0)
    seen = min(keys, max(1.0, flops / (rows * per_pair)))
    return rows, seen, head, float(seen >= 0.99 * keys)
