"""Operators before dispatch: composite ones are replaced by what they are made of, or have a law of their own here.

softmax.int(x, -1)  →  _softmax(x, -1, False), which has a sharding rule
cross_entropy_loss(x, target)  →  itself, and beside it the nodes of its count: (target != -100).sum()
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.base.recent import Recent
from autopar.base.torch_compat import tracing
from autopar.ir.graphs import op_call, operands_of
from autopar.ir.nodes import frozen, map_nodes
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import Rule
from autopar.ir.tensor_type import TensorType
from autopar.operators.rules.lookup import registered, rule_for
from autopar.operators.rules.registry import bind, make_rule

aten = torch.ops.aten
MEAN = 1
ORIGINAL = "autopar_original"
"""In the meta of a copied node: the operator of the model's own graph that it is."""

CREATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format", "full.default", "ones.default", "scalar_tensor.default", "zeros.default",
        "new_empty.default", "new_full.default", "new_ones.default", "new_zeros.default",
    )
)  # fmt: skip
"""Filled tensors: of an operand only dtype and device count."""

_RANDOM_LIKE = frozenset(
    f"aten.{name}"
    for name in (
        "dropout.default", "native_dropout.default", "bernoulli.default", "bernoulli.p", "rand_like.default",
        "randn_like.default", "randint_like.default", "randint_like.low_dtype",
    )
)  # fmt: skip
_RANDOM_NEW = frozenset(f"aten.{name}" for name in ("rand.default", "randn.default", "randint.default", "randint.low"))
_LOSSES = frozenset(f"aten.{name}.default" for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"))
_MEANS = frozenset(
    f"aten.{name}"
    for name in (
        "mean.default", "mean.dim", "mse_loss.default", "l1_loss.default", "smooth_l1_loss.default",
        "huber_loss.default", "binary_cross_entropy.default", "binary_cross_entropy_with_logits.default",
    )
)  # fmt: skip
_OWN = _LOSSES | frozenset({"aten.matmul.default", "aten.scaled_dot_product_attention.default", "aten.dropout.default"})


@dataclass(frozen=True, slots=True)
class Law:
    """How an operator walks its operands. mean: a result without the rows is their mean, not their sum."""

    rule: Rule
    mean: bool = False
    random: bool = False


_LAWS: Recent[Any, Law] = Recent(4096)  # by operator and types; a model says the same of each of its layers


def law_of(call: OpCall) -> Law:
    """The law of an operator that `flatten` leaves in a graph."""
    key = (call.name, frozen(call.args), frozen(call.kwargs), call.results)
    return _LAWS.get(key, lambda: _find_law(call))


def _find_law(call: OpCall) -> Law:
    if call.name in _LOSSES:
        return Law(_loss_rule(call), mean=call.arg("reduction", MEAN) == MEAN)
    if call.name == "aten.matmul.default":
        return Law(_matmul_rule(call))
    if call.name == "aten.scaled_dot_product_attention.default":
        return Law(_attention_rule(call))
    if call.name in _RANDOM_LIKE or call.name in _RANDOM_NEW:
        return Law(_random_rule(call), random=_draws(call))
    rule = rule_for(call)
    if call.name in _MEANS:
        mean = call.name.startswith("aten.mean.") or call.arg("reduction") == MEAN
        return Law(_summed(rule) if mean else rule, mean)
    if call.name == "aten.squeeze.default" or _has_given_statistics(call):  # squeeze: there is more than one row
        return Law(replace(rule, factors=tuple(replace(factor, split=True) for factor in rule.factors)))
    random = torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())
    return Law(rule, random=random)


def _has_given_statistics(call: OpCall) -> bool:
    """Whether a batch norm takes its statistics from elsewhere, so that each row stays by itself."""
    if call.name in ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default"):
        return not call.arg("training", True)
    return call.name in ("aten._native_batch_norm_legit_no_training.default", "aten._batch_norm_no_update.default")


def _draws(call: OpCall) -> bool:
    if call.name in ("aten.dropout.default", "aten.native_dropout.default"):
        return bool(call.arg("train")) and call.arg("p") not in (0, 0.0)
    return True


def _summed(rule: Rule) -> Rule:
    """The rule of a mean, read as that of the sum it divides."""
    factors = tuple(replace(f, split=True, reduce="sum") if not _everywhere(rule, f.name) else f for f in rule.factors)
    return replace(rule, factors=factors)


def _everywhere(rule: Rule, name: str) -> bool:
    return all(dims is None or any(name in dim for dim in dims) for dims in rule.results)


def _random_rule(call: OpCall) -> Rule:
    """Elementwise; the numbers drawn are not compared, only where they stand."""
    shape = next(result.shape for result in call.results if result is not None)
    names = [f"d{i}" for i in range(len(shape))]
    sizes, operands = dict(zip(names, shape)), []
    for index, spec in enumerate(call.operands):
        operands.append(names if spec.shape == shape else [f"x{index}{i}" for i in range(spec.ndim)])
        sizes |= dict(zip(operands[-1], spec.shape))
    results = [None if result is None else names for result in call.results]
    linear = (frozenset({0}),) if "dropout" in call.name else ()
    blocked = set(sizes) - set(names)
    shape_args = ((call.path("size"), 0),)
    return make_rule(call, operands, results, sizes, blocked=blocked, linear=linear, shape_args=shape_args)


def _matmul_rule(call: OpCall) -> Rule:
    a, b = (spec.ndim for spec in call.operands)
    left = "k" if a == 1 else "... m k" if a > 2 or b > 2 else "m k"
    right = "k" if b == 1 else "... k n" if a > 2 or b > 2 else "k n"
    lead = "... " if "..." in left + right else ""
    result = f"{lead}{'m' if a > 1 else ''} {'n' if b > 1 else ''}".strip() or "."
    left = left.removeprefix("... ") if a == 2 else left
    right = right.removeprefix("... ") if b == 2 else right
    return bind(call, f"{left}, {right} -> {result} | k sum | linear 0; 1")


def _attention_rule(call: OpCall) -> Rule:
    """Leading dims are free; one key head may serve several query heads."""
    q, k, v = call.operands[:3]
    (result,) = call.results
    assert result is not None
    lead = [f"b{i}" for i in range(result.ndim - 2)]
    sizes = dict(zip(lead, result.shape)) | {"s": q.shape[-2], "d": q.shape[-1], "t": k.shape[-2], "e": v.shape[-1]}
    own: list[Any] = list(lead)
    if lead and q.shape[-3] != k.shape[-3] and 1 not in (q.shape[-3], k.shape[-3]):
        sizes |= {"h": k.shape[-3], "r": q.shape[-3] // k.shape[-3]}
        own[-1] = ("h", "r")
    keys = [*own[:-1], "h" if own[-1] == ("h", "r") else own[-1]] if own else []

    def aligned(names: list[Any], spec: TensorSpec) -> list[Any]:
        dims = names[len(names) - spec.ndim :]
        return ["" if size == 1 and sizes.get(str(dim)) != 1 else dim for dim, size in zip(dims, spec.shape)]

    operands = [aligned([*own, "s", "d"], q), aligned([*keys, "t", "d"], k), aligned([*keys, "t", "e"], v)]
    operands += [aligned([*own, "s", "t"], mask) for mask in call.operands[3:]]
    return make_rule(call, operands, [[*own, "s", "e"]], sizes, blocked={"s", "t", "d", "e"})


def _loss_rule(call: OpCall) -> Rule:
    """The classes are whole; the rows, and the places behind the classes, are summed unless nothing is reduced."""
    x, target = call.operands[:2]
    names = [f"d{i}" for i in range(x.ndim)]
    classes = names[0] if x.ndim == 1 else names[1]
    places = [name for name in names if name != classes]
    operands = [names, names if target.shape == x.shape and target.dtype.is_floating_point else places]
    operands += [[classes]] * (len(call.operands) - 2)
    result = call.results[0]
    assert result is not None
    kept = places if result.ndim and call.arg("reduction", MEAN) == 0 else []
    rest: list[Any] = [[] for _ in call.results[1:]]
    return make_rule(
        call, operands, [kept, *rest], dict(zip(names, x.shape)), blocked={classes}, reduce=dict.fromkeys(places, "sum")
    )


# ---------------------------------------------------------------------------------------------------------- flattening


def flatten(graph: fx.Graph, origins: Mapping[str, str]) -> tuple[fx.Graph, dict[str, str]]:
    """A copy without composite operators, and where each of its nodes comes from.

    A cross entropy that averages over labels gets its count in `node.meta["count"]`. `getitem` stays where an operator
    has several results.
    """
    return _Flattener(graph, origins).run()


_DECOMPOSED: Recent[Any, fx.Graph | None] = Recent(1024)  # by operator and types; `make_fx` says the same of them


class _Flattener:
    def __init__(self, graph: fx.Graph, origins: Mapping[str, str]) -> None:
        self._old, self._origins = graph, origins
        self._new, self._found = fx.Graph(), dict[str, str]()
        self._env: dict[fx.Node, Any] = {}
        self._known = frozenset(registered())

    def run(self) -> tuple[fx.Graph, dict[str, str]]:
        for node in self._old.nodes:
            where = self._origins.get(node.name, "")
            if node.op == "output":
                self._new.output(map_nodes(node.args[0], lambda n: self._env[n]))
            elif node.target is operator.getitem and isinstance(self._env[node.args[0]], list | tuple):
                self._env[node] = self._env[node.args[0]][node.args[1]]
            elif (parts := self._parts(node)) is not None:
                self._env[node] = self._inlined(node, parts, where)
            else:
                self._env[node] = self._copied(node, self._env, where)
                self._env[node].meta[ORIGINAL] = node
                if str(node.target) in _LOSSES:
                    self._add_count(self._env[node], where)
        return self._new, self._found

    def _copied(self, node: fx.Node, env: Mapping[fx.Node, Any], where: str) -> fx.Node:
        made = self._new.node_copy(node, lambda n: env[n])
        self._found[made.name] = where
        types = made.meta.get("val")
        if isinstance(types, torch.Tensor):
            made.meta["type"] = TensorType.of(types)
        return made

    def _inlined(self, node: fx.Node, parts: fx.Graph, where: str) -> Any:
        env: dict[fx.Node, Any] = {}
        holders = [part for part in parts.nodes if part.op == "placeholder"]
        env.update(zip(holders, (self._env[n] for n in operands_of(node)), strict=True))
        for part in parts.nodes:
            if part.op == "output":
                return map_nodes(part.args[0], lambda n: env[n])
            if part.op != "placeholder":
                env[part] = self._copied(part, env, where)
        raise AssertionError("a graph without output")

    def _parts(self, node: fx.Node) -> fx.Graph | None:
        """What a composite operator is made of; None for operators that stay."""
        name = str(node.target)
        if node.op != "call_function" or not isinstance(node.target, tracing.OpOverload):
            return None
        tags = node.target.tags
        stays = name in _OWN or name in self._known or name in _RANDOM_LIKE or name in _RANDOM_NEW
        if stays or torch.Tag.pointwise in tags or torch.Tag.nondeterministic_seeded in tags:
            return None
        call = op_call(node)
        key = (name, frozen(call.args), frozen(call.kwargs))
        return _DECOMPOSED.get(key, lambda: _decompose(node, call))

    def _add_count(self, node: fx.Node, where: str) -> None:
        """The number of labels that count, or the sum of their weights, beside a loss that averages over labels."""
        call = op_call(node)
        target = node.args[1]
        assert isinstance(target, fx.Node)
        if call.arg("reduction", MEAN) != MEAN or target.meta["val"].is_floating_point():
            return
        weight, ignored = _argument(node, call, "weight"), call.arg("ignore_index", -100)
        counts = self._make(aten.ne.Scalar, (target, ignored), where)
        if isinstance(weight, fx.Node):
            taken = self._make(aten.mul.Tensor, (target, counts), where)
            weights = self._make(aten.index.Tensor, (weight, [taken]), where)
            counts = self._make(aten.mul.Tensor, (weights, counts), where)
        node.meta["count"] = self._make(aten.sum.default, (counts,), where)

    def _make(self, target: Callable[..., Any], args: tuple[Any, ...], where: str) -> fx.Node:
        made = self._new.call_function(target, args)
        meta = map_nodes(args, lambda n: torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta"))
        made.meta["val"] = target(*meta)
        made.meta["type"] = TensorType.of(made.meta["val"])
        self._found[made.name] = where
        return made


def _argument(node: fx.Node, call: OpCall, name: str) -> Any:
    path = call.path(name)
    if isinstance(path[0], int):
        return node.args[path[0]]
    return node.kwargs.get(str(path[0]))


def _decompose(node: fx.Node, call: OpCall) -> fx.Graph | None:
    """What make_fx records of one operator, or None where it records the operator itself."""
    operands = operands_of(node)
    examples = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in call.operands]

    def function(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = map_nodes((node.args, node.kwargs), lambda _: next(given))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    assert len(examples) == len(operands)
    with torch.no_grad():
        module = tracing.make_fx(function, {}, examples)
        if any(tracing.is_mutable(part) for part in module.graph.nodes):
            module = tracing.functional(module, examples)
    inner = [part for part in module.graph.nodes if part.op not in ("placeholder", "output")]
    same = any(part.target is node.target for part in inner)
    return None if same or any(part.op == "get_attr" for part in inner) else module.graph
