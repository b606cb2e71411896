"""annotate: give every operator its sharding rule, and every dim the stripes in which it may be cut.

Requires: phase `differentiated`.
Ensures: phase `annotated`; `Region.ops` holds the operator instance and its rule for every node, `Region.options` its
    strategies with their compute time, `Region.hints` the stripe counts (`outer` of `Shard`) that neighbours would
    understand, beside 1, and, where axes may be zigzag, `Region.zigzags` those that may lie zigzag; `Region.rounds`
    the operators that a loop repeats.

    qkv = linear(x, w); q, k, v = split(qkv, d)  →  qkv's last dim is (3 d): hint {3}, so w can be split by heads
    attention(q, …) knows where its queries lie  →  s may be zigzag in 2 stripes, and (b s), before it, in 2b
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from autopar.base.recent import Recent
from autopar.cost.operator_time import seconds_of_each
from autopar.ir.choices import Choice, axis_choices, each_sharding
from autopar.ir.classes import Classes, value_classes
from autopar.ir.graphs import op_call, operands_of, source_of
from autopar.ir.op_call import OpCall
from autopar.ir.program import Program
from autopar.ir.region import Annotated, NodeStrategy, Options, Region
from autopar.ir.rounds import rounds_of
from autopar.ir.rule import Rule
from autopar.ir.shown import shown_to
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh
from autopar.operators.rules.lookup import rules_for

MAX_STRIPES = 4
"""Stripe counts kept per dim; more would only widen the search."""

Value = tuple[str, str, int]
"""(region, node, result index)"""


def annotate(
    program: Program,
    *,
    mesh: Mesh,
    zigzag: frozenset[str] = frozenset(),
    sequence: frozenset[str] = frozenset(),
    parts: Mapping[str, int] = MappingProxyType({}),
    decided: bool = False,
) -> Program:
    """Attach rules and stripe hints.

    decided: every operator's strategy is known, from a plan for other sizes: rules alone, and nothing to choose from.
    sequence: axes that split sequences: of rows that join batch and sequence they may cut what earlier axes left of the
    batch in stripes. zigzag: those of them that may deal the stripes forwards and backwards. parts: axes that, in
    repeated blocks, may cut each of so many parts that later axes make of the same factor.
    """
    calls = {region.name: _calls(region) for region in program.regions}
    rules = iter(rules_for([call for own in calls.values() for call in own.values()]))
    ops = {name: {node: (call, next(rules)) for node, call in own.items()} for name, own in calls.items()}
    regions = {
        region.name: replace(region, annotated=Annotated(ops[region.name]), shown=shown_to(program, region))
        for region in program.regions
    }
    program = program.with_regions(regions, phase="annotated", mesh=mesh, zigzag=zigzag)
    if decided:
        return program
    classes = value_classes(program)
    hints = _propagate(program, classes)
    zigzags = _propagate(program, classes, zigzag=True) if zigzag else {region.name: {} for region in program.regions}
    found = {name: Annotated(own, hints[name], zigzags[name]) for name, own in ops.items()}
    ready = {region.name: replace(region, annotated=found[region.name]) for region in program.regions}
    offered = [
        _Offered(size, axis in zigzag | sequence, axis in zigzag, parts.get(axis, 1)) for axis, size in mesh.axes
    ]
    return program.with_regions({name: _with_options(region, mesh, offered) for name, region in ready.items()})


@dataclass(frozen=True, slots=True)
class _Offered:
    """What an axis of `size` ranks may do beside splitting in stripes that no axis split before: cut again in stripes
    what was cut contiguously, deal the stripes zigzag, and cut each of the parts that later axes make.
    """

    size: int
    again: bool
    zigzag: bool
    parts: int = 1


def _with_options(region: Region, mesh: Mesh, offered: Sequence[_Offered]) -> Region:
    options = _options(region, mesh, offered)
    known = region.annotated
    assert known is not None
    return replace(region, annotated=replace(known, options=options, rounds=rounds_of(region, options)))


def _options(region: Region, mesh: Mesh, offered: Sequence[_Offered]) -> dict[str, Options]:
    """What the axes may do to each operator, together: the product of what each may do, less what clashes."""
    found: dict[str, Options] = {}
    known = _known_on(mesh)
    nodes = {node.name: node for node in region.graph.nodes}
    whole = _needed_whole(region)
    if not region.module:
        offered = [replace(axis, parts=1) for axis in offered]
    for name, (call, rule) in region.ops.items():
        hints, zigzags = region.hints.get(name, {}), region.zigzags.get(name, {})
        needed = _positions_of(nodes[name], region.name, whole)
        own = _told_apart(offered, bool(hints), bool(zigzags))
        key = (
            call.name, call.operands, call.results, rule, tuple(own), tuple(sorted(hints.items())),
            tuple(sorted(zigzags.items())), tuple(sorted(needed)), _plain_arguments(call) if rule.ring else (),
        )  # fmt: skip
        make = functools.partial(_options_of, call, rule, mesh, own, hints, zigzags, needed)
        found[name] = known.get(key, make)
    return found


def _told_apart(offered: Sequence[_Offered], stripes: bool, zigzags: bool) -> list[_Offered]:
    """What axes may do to an operator whose neighbours understand stripes, or zigzag ones: without them nothing can be
    cut again, or dealt; nor can the first axis cut again.
    """
    return [
        replace(axis, again=axis.again and place > 0 and (stripes or zigzags), zigzag=axis.zigzag and zigzags)
        for place, axis in enumerate(offered)
    ]


def _options_of(
    call: OpCall,
    rule: Rule,
    mesh: Mesh,
    offered: Sequence[_Offered],
    hints: _StripeCounts,
    zigzags: _StripeCounts,
    needed: frozenset[int],
) -> Options:
    found_on = _choices(rule, offered, hints, zigzags)
    per_axis = [[choice for choice in each if not _reads_terms(rule, choice, needed)] for each in found_on]
    distinct: dict[object, NodeStrategy] = {}
    for choices, placed in each_sharding(rule, per_axis, mesh.sizes):
        if _are_stripes_known(choices, offered, hints, zigzags):
            split = tuple(choice.splits for choice in choices)
            distinct.setdefault((placed, split), NodeStrategy(choices, *placed))
    strategies = tuple(distinct.values())
    return Options(strategies, tuple(seconds_of_each(call, rule, strategies, mesh)))


_MOST_MESHES = 4
_MOST_OPERATORS = 4096
_KNOWN: Recent[tuple[object, ...], tuple[Hardware, Recent[tuple[object, ...], Options]]] = Recent(_MOST_MESHES)
"""The options of operators by what decides them, of the last few meshes: models repeat operators, and what is planned
again (recomputing more, other microbatches) repeats most of them.
"""


def _known_on(mesh: Mesh) -> Recent[tuple[object, ...], Options]:
    key = (mesh.axes, mesh.whole.axes if mesh.whole is not None else None, id(mesh.hardware))
    return _KNOWN.get(key, lambda: (mesh.hardware, Recent(_MOST_OPERATORS)))[1]  # the profile is kept: so is its id


def _plain_arguments(call: OpCall) -> str:
    return repr((call.args, sorted(call.kwargs.items())))


_StripeCounts = Mapping[str, Collection[int]]


def _choices(
    rule: Rule, offered: Sequence[_Offered], hints: _StripeCounts, zigzags: _StripeCounts
) -> list[list[Choice]]:
    """What each axis may do by itself. Of the stripes that neighbours understand an earlier axis may leave a part."""
    found: list[list[Choice]] = []
    parts = {1}
    for axis in offered:
        local = parts if axis.again else {1}
        own = {name: {n // part for n in counts for part in local if n % part == 0} for name, counts in hints.items()}
        for factor in rule.factors:
            own.setdefault(factor.name, set()).add(axis.parts)
        turned = {
            name: {n // part for n in counts for part in local if n % (2 * part) == 0}
            for name, counts in (zigzags.items() if axis.zigzag else ())
        }
        found.append(axis_choices(rule, axis.size, own, turned))
        parts |= {part * axis.size for part in parts}
    return found


def _are_stripes_known(
    choices: Sequence[Choice], offered: Sequence[_Offered], hints: _StripeCounts, zigzags: _StripeCounts
) -> bool:
    """Whether all stripes are those that neighbours understand, or what is left of them where earlier axes have cut
    contiguously; or the parts that later axes make; and that only where an axis may.
    """
    for place, choice in enumerate(choices):
        if choice.kind != "factor" or choice.outer == 1:
            continue
        assert choice.factor is not None
        behind = [axis.size for c, axis in zip(choices, offered, strict=True) if c == Choice("factor", choice.factor)]
        earlier = zip(choices[:place], offered[:place], strict=True)
        cut = math.prod(axis.size for c, axis in earlier if c.factor == choice.factor and c.outer == 1)
        parts = math.prod(behind) // cut
        if parts > 1 and not choice.zigzag:
            if choice.outer != parts or choice.outer != offered[place].parts:
                return False
            continue
        counts = (zigzags if choice.zigzag else hints).get(choice.factor, ())
        if choice.outer * cut not in counts or (cut > 1 and not offered[place].again):
            return False
    return True


def _needed_whole(region: Region) -> set[Value]:
    """Values that some operator cannot read as terms of a sum, itself or through views and casts.

    They are summed for that operator; whoever else reads them reads what is there then.
    """
    found: set[Value] = set()
    for node in reversed(region.graph.nodes):
        if node.name not in region.ops:
            continue
        _, rule = region.ops[node.name]
        operands = operands_of(node)
        passed_on = len(operands) == 1 and (region.name, node.name, 0) not in found
        for index, operand in enumerate(operands):
            source, result = source_of(operand)
            if not (any(index in group for group in rule.linear) and (passed_on or len(operands) > 1)):
                found.add((region.name, source.name, result))
    return found


def _positions_of(node: fx.Node, region: str, whole: set[Value]) -> frozenset[int]:
    """The operands of a node that are needed whole; none where there is one alone, which is read as it lies."""
    operands = operands_of(node)
    if len(operands) == 1:
        return frozenset()
    return frozenset(i for i, operand in enumerate(operands) if (region, *_named(source_of(operand))) in whole)


def _named(source: tuple[fx.Node, int]) -> tuple[str, int]:
    return source[0].name, source[1]


def _reads_terms(rule: Rule, choice: Choice, operands: frozenset[int]) -> bool:
    """Whether a choice takes one of these operands as terms of a sum."""
    return choice.group is not None and not operands.isdisjoint(rule.linear[choice.group])


def _calls(region: Region) -> dict[str, OpCall]:
    nodes = [node for node in region.graph.nodes if node.op == "call_function"]
    return {node.name: op_call(node) for node in nodes if node.target is not operator.getitem}


class _Stripes:
    """Stripe counts per dim of every value; values of one class share them."""

    def __init__(self, classes: Classes, program: Program) -> None:
        self._alias: dict[Value, Any] = {}
        self._found: dict[Any, dict[int, set[int]]] = {}
        for region in program.regions:
            holders = [node for node in region.graph.nodes if node.op == "placeholder"]
            kinds = _placeholder_keys(region)
            for node, key in zip(holders, kinds, strict=True):
                self._alias[(region.name, node.name, 0)] = classes.of.get(key, (region.name, node.name))
            output = next(node for node in region.graph.nodes if node.op == "output")
            for value, key in zip(output.args[0], _result_keys(region), strict=True):
                if key in classes.of:
                    source, index = source_of(value)
                    self._alias.setdefault((region.name, source.name, index), classes.of[key])

    def get(self, value: Value, dim: int) -> set[int]:
        key = self._alias.get(value, value)
        return self._found.setdefault(key, {}).setdefault(dim, set())


def _placeholder_keys(region: Region) -> list[tuple[str, str, int]]:
    keys = [("slot", region.name, i) for i in range(len(region.slots))]
    keys += [("in", region.name, i) for i in range(len(region.inputs))]
    keys += [("seed", region.name, i) for i in range(region.seeds)]
    return keys + [("gout", region.name, i) for i in region.tangents]


def _result_keys(region: Region) -> list[tuple[str, str, int]]:
    """The classes of a differentiated graph's results, in order."""
    keys = [("out", region.name, i) for i in range(len(region.outputs))]
    if region.tangents or _has_gradients(region):
        keys += [("slot", region.name, i) for i, slot in enumerate(region.slots) if slot.trainable]
        keys += [("gin", region.name, i) for i, port in enumerate(region.inputs) if port.differentiable]
    return keys


def _has_gradients(region: Region) -> bool:
    output = next(node for node in region.graph.nodes if node.op == "output")
    return len(output.args[0]) > len(region.outputs)


def _propagate(
    program: Program, classes: Classes, *, zigzag: bool = False
) -> dict[str, dict[str, dict[str, tuple[int, ...]]]]:
    """Spread stripe counts through factors until nothing changes.

    zigzag: those of zigzag splits, which begin, as two, where an operator can be told where its elements lie.
    """
    stripes = _Stripes(classes, program)
    factors: dict[tuple[str, str, str], set[int]] = {}
    if zigzag:
        named = [(r.name, n, name) for r in program.regions for n, (_, rule) in r.ops.items() for name in _seeds(rule)]
        factors = {key: {2} for key in named}
    visits = [
        _Visit.of(region, node, stripes, zigzag)
        for region in program.regions
        for node in region.graph.nodes
        if node.name in region.ops
    ]
    changed = True
    while changed:
        changed = False
        for visit in visits:
            if visit.is_news(factors):
                changed |= visit.spread(factors, zigzag)
    hints: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {region.name: {} for region in program.regions}
    for (name, node, factor), outers in factors.items():
        if outers:
            hints[name].setdefault(node, {})[factor] = tuple(sorted(outers))
    for region in program.regions:
        for holder in (n for n in region.graph.nodes if n.op == "placeholder"):
            dims = range(len(holder.meta["val"].shape))
            per_dim = {str(d): tuple(sorted(stripes.get((region.name, holder.name, 0), d))) for d in dims}
            hints[region.name][holder.name] = {d: found for d, found in per_dim.items() if found}
        output = next(n for n in region.graph.nodes if n.op == "output")
        for value, key in zip(output.args[0], _result_keys(region), strict=True):
            source, index = source_of(value)
            dims = range(len(value.meta["val"].shape))
            per_dim = {str(d): tuple(sorted(stripes.get((region.name, source.name, index), d))) for d in dims}
            hints[region.name][f"{key[0]}{key[2]}"] = {d: found for d, found in per_dim.items() if found}
    return hints


def _seeds(rule: Rule) -> set[str]:
    """The factors of which an operator can be told where its elements lie, in two stripes at least."""
    return {name for _, name in rule.starts_args if rule.factor(name).size % 2 == 0}


@dataclass(slots=True)
class _Visit:
    """One operator: what its dims know to its factors, and back.

    places: each of its dims' factors, with the stripe counts that the dim is known in, which only grow. seen: how many
    were known when it was here last; with no more there is nothing new to tell.
    """

    key: tuple[str, str]
    sizes: Mapping[str, int]
    splittable: frozenset[str]
    places: Sequence[tuple[set[int], tuple[str, ...]]]
    seen: int = -1

    @staticmethod
    def of(region: Region, node: fx.Node, stripes: _Stripes, zigzag: bool) -> _Visit:
        _, rule = region.ops[node.name]
        sizes = {factor.name: factor.size for factor in rule.factors}
        splittable = {factor.name for factor in rule.factors if factor.split} | (_seeds(rule) if zigzag else set())
        places = [(stripes.get(value, dim), names) for value, dim, names in _dims_of(region, node, rule)]
        return _Visit((region.name, node.name), sizes, frozenset(splittable), places)

    def is_news(self, factors: Mapping[tuple[str, str, str], set[int]]) -> bool:
        """Whether more is known than when it was here last."""
        known = sum(len(counts) for counts, _ in self.places)
        known += sum(len(factors.get((*self.key, name), ())) for name in self.splittable)
        news, self.seen = known != self.seen, known
        return news

    def spread(self, factors: dict[tuple[str, str, str], set[int]], zigzag: bool) -> bool:
        """Whether something new was told.

        Zigzag passes through a factor only as an even number of its own stripes: which of them are odd is then the same
        for the dim and for the factor.
        """
        changed = False
        for counts, names in self.places:
            for outer in list(counts):
                before = 1
                for name in names:
                    inner = outer // before
                    fits = outer % before == 0 and 1 < inner < self.sizes[name] and self.sizes[name] % inner == 0
                    if name in self.splittable and fits and not (zigzag and inner % 2):
                        changed |= _add(factors.setdefault((*self.key, name), set()), inner)
                    before *= self.sizes[name]
        for counts, names in self.places:
            before = 1
            for name in names:
                if name in self.splittable:
                    for outer in (set() if zigzag else {1}) | factors.get((*self.key, name), set()):
                        changed |= before * outer > 1 and _add(counts, before * outer)
                before *= self.sizes[name]
        return changed


def _add(known: set[int], outer: int) -> bool:
    """Keep a stripe count; whether there is one more."""
    if outer in known or len(known) >= MAX_STRIPES:
        return False
    known.add(outer)
    return True


def _dims_of(region: Region, node: fx.Node, rule: Rule) -> list[tuple[Value, int, tuple[str, ...]]]:
    places: list[tuple[Value, int, tuple[str, ...]]] = []
    for source, dims in zip(operands_of(node), rule.operands, strict=True):
        producer, index = source_of(source)
        places += [((region.name, producer.name, index), dim, names) for dim, names in enumerate(dims)]
    for index, result in enumerate(rule.results):
        places += [((region.name, node.name, index), dim, names) for dim, names in enumerate(result or ())]
    return places
