"""The attentions of a program, what each axis of the mesh may do to them, and which strategy asks for it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.choices import Choice
from autopar.ir.program import AttentionSite, Program
from autopar.ir.region import Region
from autopar.ir.rings import NAMES
from autopar.ir.rule import Rule
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import AxisStrategy

Choices = tuple[Choice, ...]
"""One an axis: what it does to attention."""

_FACTORS = {
    "b": "batch",
    "h": "heads",
    "r": "query heads",
    "(h r)": "runs of query heads",
    "s": "queries",
    "e": "values",
}
_COUNTED = {"b": "rows", "h": "heads", "r": "query heads for each key head", "s": "queries", "t": "keys"}
_INSTEAD = {"heads": "ulysses", "queries": "allgather_kv", "ring": "ring"}
"""What axes may do to attention, and the strategies whose name says so."""
_ASKED = {
    "heads": "splits attention by heads, of keys too",
    "queries": "splits attention's queries and keeps all keys on every rank",
    "ring": "splits attention's queries and keys, which go round",
}
_FORMS = {"sdpa": "a call of scaled_dot_product_attention", "eager": "written out"}


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention of a region.

    node: of the forward; others: what computes it again, and its gradient. module: with `*` for the repeated block;
    modules: one for each call of the region.
    """

    region: str
    node: str
    others: tuple[str, ...]
    module: str
    modules: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in the generated program: `layer.attention`."""
        return f"{self.region}.{self.node}"

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node, *self.others)


# -- what there is
# -------------------------------------------------------------------------------------------------------


def attentions(program: Program) -> list[Attention]:
    """Every attention of the program that is one operator, in the order of the regions."""
    return [each for region in program.regions for each in _attentions_in(program, region)]


def _attentions_in(program: Program, region: Region) -> Iterator[Attention]:
    nodes = [node for node in region.graph.nodes if str(node.target) in NAMES]
    first = [node for node in nodes if not region.forward_nodes or node.name in region.forward_nodes]
    again = [node for node in nodes if node not in first and _is_forward(node)]
    paths = [call.path for _, call in program.calls_of(region.name)]
    for node in first:
        if not _is_forward(node):
            continue
        origin = region.origins.get(node.name, "")
        # A block computed again has the same attentions in the same order.
        alike = [each for each in first if region.origins.get(each.name, "") == origin]
        repeats = [each for each in again if region.origins.get(each.name, "") == origin]
        own = {node, *repeats[alike.index(node) : alike.index(node) + 1]}
        own |= {each for each in nodes if not _is_forward(each) and _source(each) in own}
        module = origin.split(" (")[0]
        tail = module.removeprefix(region.module) if region.module else ""
        modules = tuple(path + tail for path in paths) if region.module else (module,)
        others = tuple(each.name for each in nodes if each in own and each is not node)
        yield Attention(region.name, node.name, others, module, modules)


def _is_forward(node: fx.Node) -> bool:
    return str(node.target) == "autopar.attention.default"


def _source(node: fx.Node) -> fx.Node:
    """The attention that a gradient is of: the one that made its log-sum-exp, its last operand."""
    found = node.all_input_nodes[-1]
    return found.all_input_nodes[0] if found.target is operator.getitem else found


def found_text(sites: Sequence[AttentionSite], attention: Attention) -> str:
    """What was found in the model: `causal, window 4096, 32 heads on 8 (written out)`."""
    own = [site for site in sites if site.module in attention.modules and site.fused]
    return " | ".join(dict.fromkeys(f"{site.what} ({_FORMS.get(site.form, site.form)})" for site in own))


# -- choices
# -------------------------------------------------------------------------------------------------------------


def does(choice: Choice) -> str:
    """In a word: batch, heads, queries, ring, whole."""
    if choice.kind == "factor":
        return _FACTORS.get(str(choice.factor), f"factor {choice.factor}")
    return {"ring": "ring", "none": "whole"}.get(choice.kind, choice.kind)


def short(choice: Choice) -> str:
    """`ring zigzag`, `heads in 4 stripes`."""
    stripes = f" in {choice.outer} stripes" if choice.outer > 1 else ""
    return does(choice) + (" zigzag" if choice.zigzag else stripes)


def choices_text(choices: Choices, mesh: Mesh) -> str:
    """`dp: batch, cp: ring zigzag`; axes of one rank are left out."""
    named = zip(mesh.axes, choices, strict=True)
    return ", ".join(f"{axis}: {short(choice)}" for (axis, size), choice in named if size > 1) or "one rank has it all"


def indivisible(rule: Rule, choices: Choices, axis: int, mesh: Mesh) -> str | None:
    """What an axis would have to split and does not divide, in numbers; None where it does."""
    name, size = mesh.axes[axis]
    split = [str(choices[axis].factor)]
    if rule.ring is not None and choices[axis].kind == "ring":
        split = [rule.ring.query, rule.ring.key]
    for factor in split:
        others = [a for a, each in enumerate(choices) if each.factor == factor and a != axis and mesh.sizes[a] > 1]
        whole, left = rule.sizes.get(factor, 0), rule.sizes.get(factor, 0)
        for other in others:
            left //= mesh.sizes[other]
        if left % size:
            axes = " × ".join(f"{mesh.axis_names[a]}={mesh.sizes[a]}" for a in others)
            shared = f", of which {axes} leaves {left}" if others else ""
            noun = "key heads" if factor == "h" and "r" in rule.sizes else _COUNTED.get(factor, factor)
            noun = noun.removesuffix("s") if whole == 1 else noun
            return f"{whole} {noun}{shared}, which {name}={size} does not divide"
    return None


def choices_of(program: Program, region: str, node: str) -> Choices:
    """What a placed program's axes do to an operator."""
    return tuple(program.region(region).strategies[node].choices)


def asked_of_attention(strategy: AxisStrategy, axis: str) -> str:
    """What a strategy that splits the sequence does there: `ulysses on cp splits attention by heads`."""
    return f"{strategy.name} on {axis} {_ASKED[strategy.attention]}"


def forbidden(strategy: AxisStrategy, choice: Choice, axis: str) -> str | None:
    """Why the strategy of an axis has nothing like this in repeated blocks, with the one that has."""
    what = does(choice)
    if strategy.attention not in ("free", what):
        return asked_of_attention(strategy, axis) + (f"; this would be {_INSTEAD[what]}" if what in _INSTEAD else "")
    if what == "ring" and strategy.attention != "ring" and not strategy.leaves_storage:
        return f"{strategy.name} on {axis} has no rings; ring and auto have"
    return None


def reason(strategy: AxisStrategy, choice: Choice, axis: str) -> str:
    """Because of which strategy an axis does this, or whether the solver chose it."""
    what = does(choice)
    found = f"{axis}: chosen by the solver, within what {strategy.name} allows"
    if strategy.attention != "free":
        found = asked_of_attention(strategy, axis)
    elif strategy.name == "auto":
        found = f"{axis}: chosen by the solver (auto)"
    elif strategy.inputs == "batch" and what == "batch":
        found = f"{strategy.name} on {axis} splits the batch"
    elif strategy.required == "shard_matrices" and "heads" in what:
        found = f"{strategy.name} on {axis} splits the projections' weights, so each rank has the heads of its part"
    return found + ("; zigzag is the solver's: ranks see equally many keys" if choice.zigzag else "")
