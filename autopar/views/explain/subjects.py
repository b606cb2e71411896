"""What a name of a plan stands for, and the shardings it could have.

A *subject* is a class of parameters, an input, an output, an attention, or a value inside a region, under its name in
the generated program; attention by its module too. Nothing is solved here; `autopar.explain` prices what `candidates`
lists.
"""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from autopar.base.errors import AutoparError
from autopar.ir.choices import NONE, Choice
from autopar.ir.classes import Key, value_classes
from autopar.ir.collectives import COLLECTIVES
from autopar.ir.names import starred
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import REPLICATE, Placement, Shard, Sharding, is_valid
from autopar.ir.tensor_type import TensorType
from autopar.views.explain.attention_choices import Attention, Choices, attentions, choices_of, choices_text

Kind = Literal["parameter", "input", "output", "operator", "attention", "value"]
Layout = Sharding | Choices
"""One entry an axis: how a tensor lies; of attention, what is done to it."""
MAX_CLOSE = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """What is explained.

    kind: `value` is what a region reads from other calls; its layout follows from the operators around it. members: the
    parameters of the class, or the name of an input or output. aliases: other names. type: as operators see it.
    stored_dtype: a parameter's between steps. key: its class. region, node, result: where an operator's value is made.
    nodes: an attention's operators, its gradient's too.
    """

    kind: Kind
    name: str
    members: tuple[str, ...]
    type: TensorType
    stored_dtype: torch.dtype
    key: Key
    aliases: tuple[str, ...] = ()
    region: str = ""
    node: str = ""
    result: int = 0
    nodes: tuple[str, ...] = ()

    def text(self, sharding: Sharding, axes: Sequence[str], *, stored: bool = False) -> str:
        """`f32[64, 256/tp]`."""
        dtype = self.stored_dtype if stored else self.type.dtype
        return TensorType(self.type.shape, dtype).text(sharding, axes)


# -- names
# -----------------------------------------------------------------------------------------------------------------


def find(program: Program, name: str) -> Subject:
    """The subject that a name, an alias, or a pattern that matches one class, stands for.

    Raises:
        AutoparError: a name that nothing has (with close ones), a pattern that matches several classes, a buffer.
    """
    known = _names(program)
    if name in known:
        return _subject(program, known[name])
    if any(not v.is_parameter and name in (v.name, *v.aliases) for v in program.variables):
        raise AutoparError(f"{name} is a buffer", values="every rank has all of it, there is nothing to decide")
    if held := attentions_of(program, name):
        if len(held) == 1:
            return _attention(program, held[0])
        raise AutoparError(
            f"{name!r} holds {len(held)} attentions that are decided apart",
            values=", ".join(f"{each.label} ({each.modules[0]})" for each in held),
            remedy="name one of them",
        )
    found = {key: each for each, key in reversed(known.items()) if fnmatchcase(each, name)}
    if len(found) == 1:
        return _subject(program, next(iter(found)))
    modules = _modules(program)
    if found:
        names = list(dict.fromkeys(starred(each, modules) for each in reversed(found.values())))
        raise AutoparError(
            f"{name!r} matches {len(found)} things that are placed apart",
            values=f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}",
            remedy="name one of them",
        )
    for site in program.attention:
        if not site.fused and fnmatchcase(site.module, name):
            raise AutoparError(
                f"the attention of {site.place} stays as it is written: {site.why}",
                remedy="name one of its operators in the generated program",
            )
    close = difflib.get_close_matches(name, known, n=40, cutoff=0.5)
    close += [each for each in known if each.endswith(f".{name}") or name in each]
    distinct = list({known[each]: starred(each, modules) for each in reversed(close)}.values())[::-1]
    raise AutoparError(
        f"the plan has no parameter, input, output, operator or attention {name!r}",
        values=f"close names: {', '.join(distinct[:MAX_CLOSE])}" if distinct else None,
        remedy="use a name of model.named_parameters(), of the inputs or outputs, or of the generated program, as in "
        f"{program.regions[0].name}.{next(iter(program.regions[0].ops))}",
    )


Handle = tuple[str, str, int]
"""A class key; or ("output", name, 0), ("port", "region.value", input), ("node", "region.operator", result),
("attention", "region.operator", 0)."""


def names_of(program: Program) -> frozenset[str]:
    """Every name that `find` knows, patterns aside."""
    return frozenset(_names(program))


def _names(program: Program) -> dict[str, Handle]:
    """Every name and what it stands for; parameters first where names clash."""
    known = value_classes(program).of
    found: dict[str, Handle] = {}
    for variable in (v for v in program.variables if v.is_parameter):
        for name in (variable.name, *variable.aliases):
            found.setdefault(name, known.get(("var", variable.name, 0), ("var", variable.name, 0)))
    for port in program.inputs:
        found.setdefault(port.name, known.get(("program", port.name, 0), ("program", port.name, 0)))
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        key = ("program", ref.name, 0) if ref.call < 0 else ("out", program.calls[ref.call].region, ref.index)
        found.setdefault(name, known.get(key, key) if ref.call < 0 else ("output", name, 0))
    for region in program.regions:
        for name, key in _region_names(region, known).items():
            found.setdefault(f"{region.name}.{name}", key)
    for attention in attentions(program):
        operators = {("node", f"{attention.region}.{node}") for node in attention.nodes}
        found.update({name: ("attention", attention.label, 0) for name, at in found.items() if at[:2] in operators})
    return found


def attentions_of(program: Program, pattern: str) -> list[Attention]:
    """The attentions that a module holds, or that modules which match a pattern are."""
    return [
        each
        for each in attentions(program)
        if any(
            module == pattern or module.startswith(f"{pattern}.") or fnmatchcase(module, pattern)
            for module in (each.module, *each.modules)
        )
    ]


def _region_names(region: Region, known: Mapping[Key, Key]) -> dict[str, Handle]:
    """The values of a region by their names in the generated program; a moved value stands for what was moved."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    found: dict[str, Handle] = {}
    for index, slot in enumerate(region.slots):
        if slot.is_parameter:
            found[holders[index].name] = known.get(("slot", region.name, index), ("slot", region.name, index))
    for index in range(len(region.inputs)):
        name = holders[len(region.slots) + index].name
        found[name] = ("port", f"{region.name}.{name}", index)
    for node in region.graph.nodes:
        made, result = (node.args[0].name, node.args[1]) if node.target is operator.getitem else (node.name, 0)
        if made in region.ops and isinstance(result, int):
            specs = region.ops[made][0].results
            tensors = [i for i, spec in enumerate(specs) if spec is not None]
            if tensors:
                found[node.name] = ("node", f"{region.name}.{made}", result if result in tensors else tensors[0])
    for lowered in region.lowered.values():
        for node in lowered.graph.nodes:
            base: Any = node
            while base.op == "call_method" and base.target in (*COLLECTIVES, "slice"):
                base = base.args[1]
            if base is not node and base.name in found:
                found.setdefault(node.name, found[base.name])
    return found


def _subject(program: Program, handle: Handle) -> Subject:
    kind, label, index = handle
    if kind == "node":
        return _operator(program, label, index)
    if kind == "attention":
        return _attention(program, next(each for each in attentions(program) if each.label == label))
    if kind == "port":
        return _value(program, label, index)
    if kind == "output":
        ref = program.outputs[program.output_names.index(label)]
        type_ = program.port(ref).type
        key = value_classes(program).of[("out", program.calls[ref.call].region, ref.index)]
        return Subject("output", label, (label,), type_, type_.dtype, key)
    members = value_classes(program).members.get(handle)
    if members is None:
        raise AutoparError(f"{label} is not used", values="no operator reads it, so nothing is decided for it")
    inputs = tuple(name for each, name, _ in members if each == "program")
    if inputs:
        port = next(port for port in program.inputs if port.name == inputs[0])
        return Subject("input", inputs[0], inputs, port.type, port.type.dtype, handle)
    names = {name for each, name, _ in members if each == "var"}
    variables = [variable for variable in program.variables if variable.name in names]
    first = variables[0]
    shown = starred(first.name, _modules(program)) if len(variables) > 1 else first.name
    aliases = tuple(alias for variable in variables for alias in variable.aliases)
    every = tuple(variable.name for variable in variables)
    return Subject("parameter", shown, every, first.type, first.stored_dtype, handle, aliases)


def _operator(program: Program, label: str, result: int) -> Subject:
    region, node = label.rsplit(".", 1)
    specs = program.region(region).ops[node][0].results
    spec = specs[result]
    assert spec is not None
    name = f"{label}[{result}]" if sum(each is not None for each in specs) > 1 else label
    type_, key = TensorType(spec.shape, spec.dtype), ("node", label, result)
    return Subject("operator", name, (label,), type_, spec.dtype, key, region=region, node=node, result=result)


def _attention(program: Program, found: Attention) -> Subject:
    made = _operator(program, found.label, 0)
    name = f"{found.module} ({found.label})" if found.module else found.label
    return replace(made, kind="attention", name=name, members=found.modules, nodes=found.nodes)


def _value(program: Program, label: str, index: int) -> Subject:
    """What a region reads: the program's input, or what other calls made."""
    region = program.region(label.rsplit(".", 1)[0])
    classes = value_classes(program)
    key = classes.of[("in", region.name, index)]
    if any(kind == "program" for kind, _, _ in classes.members[key]):
        return _subject(program, key)
    type_ = region.inputs[index].type
    return Subject("value", label, (label,), type_, type_.dtype, key, region=region.name, result=index)


def _modules(program: Program) -> list[str]:
    return [region.module for region in program.regions if "*" in region.module]


# -- layouts
# ---------------------------------------------------------------------------------------------------------------


def layout_of(program: Program, subject: Subject) -> Layout:
    """What a placed program decided for the subject: how it is stored, or what the axes do to an attention."""
    if subject.kind == "attention":
        return choices_of(program, subject.region, subject.node)
    return layouts_in(program, subject)["stored"]


def layouts_in(program: Program, subject: Subject) -> dict[str, Sharding]:
    """The shardings that a placed program gives the subject: a parameter's by the names of its layout's fields, else
    `stored` alone.
    """
    placement = program.placement
    assert placement is not None
    if subject.kind == "parameter":
        layout = placement.parameters[subject.members[0]]
        found = {each.name: getattr(layout, each.name) for each in fields(layout)}
        return {name: sharding for name, sharding in found.items() if isinstance(sharding, tuple)}
    if subject.kind == "input":
        return {"stored": placement.inputs[subject.members[0]]}
    if subject.kind in ("operator", "attention"):
        sharding = program.region(subject.region).strategies[subject.node].results[subject.result]
        assert sharding is not None
        return {"stored": sharding}
    if subject.kind == "output":
        ref = program.outputs[program.output_names.index(subject.name)]
    else:
        _, call = next(program.calls_of(subject.region))
        ref = call.arguments[subject.result]
    return {"stored": placement.values[(ref.call, ref.index)]}


def layout_text(program: Program, subject: Subject, layout: Layout) -> str:
    """`f32[64, 256/tp]`, or `dp: batch, cp: ring zigzag`."""
    if subject.kind == "attention":
        return choices_text(choices_in(layout), program.on_mesh)
    return subject.text(sharding_in(layout), program.on_mesh.axis_names, stored=True)


def choices_in(layout: Layout) -> Choices:
    """What is done to an attention: its layout as what it is."""
    return tuple(each for each in layout if isinstance(each, Choice))


def sharding_in(layout: Layout) -> Sharding:
    """How a tensor lies: its layout as what it is."""
    return tuple(each for each in layout if not isinstance(each, Choice))


def candidates(program: Program, subject: Subject) -> Sequence[Layout]:
    """Every sharding that could be asked of the subject, whether or not its sizes allow it.

    Each axis splits one dim (in any of its stripes), or none, or, for an operator, holds terms. Of an attention: what
    one of the axes could do to it instead.
    """
    if subject.kind == "attention":
        return _attention_candidates(program, subject)
    if subject.kind == "value":
        return []
    stripes = {} if subject.kind == "operator" else _stripes(program, subject)
    zigzags = _stripes(program, subject, zigzag=True) if subject.kind == "input" else {}
    options: list[list[Placement]] = []
    for axis, size in program.on_mesh.axes:
        found: list[Placement] = [REPLICATE]
        for dim in range(len(subject.type.shape)) if size > 1 else ():
            found += [Shard(dim, outer) for outer in (1, *stripes.get(dim, ()))]
            found += [Shard(dim, outer, True) for outer in zigzags.get(dim, ()) if axis in program.zigzag]
        options.append(found)
    listed = list(itertools.product(*options))
    if subject.kind == "operator":
        listed += sorted(operator_layouts(program, subject) - set(listed), key=str)
    return listed


def _attention_candidates(program: Program, subject: Subject) -> list[Choices]:
    region, chosen = program.region(subject.region), choices_of(program, subject.region, subject.node)
    rule = region.ops[subject.node][1]
    known = [strategy.choices for strategy in region.options[subject.node].strategies]
    listed = [each for each in known if sum(a != b for a, b in zip(each, chosen, strict=True)) == 1]
    asked = [NONE, *(Choice("factor", each.name) for each in rule.factors if rule.can_split(each.name))]
    asked += [Choice("ring", rule.ring.query)] if rule.ring is not None else []
    axes = [axis for axis, size in enumerate(program.on_mesh.sizes) if size > 1]
    listed += [(*chosen[:axis], each, *chosen[axis + 1 :]) for axis in axes for each in asked if each != chosen[axis]]
    return list(dict.fromkeys(listed))


def operator_layouts(program: Program, subject: Subject) -> set[Sharding]:
    """The shardings that the operator's rule can give its result."""
    strategies = program.region(subject.region).options[subject.node].strategies
    return {s for strategy in strategies if (s := strategy.results[subject.result]) is not None}


def _stripes(program: Program, subject: Subject, *, zigzag: bool = False) -> dict[int, tuple[int, ...]]:
    """dim -> the stripe counts beside 1 that neighbours understand (`Region.hints`, of zigzag splits `zigzags`)."""
    found: dict[int, set[int]] = {}
    for kind, name, index in value_classes(program).members[subject.key]:
        if kind not in ("slot", "in", "out"):
            continue
        region = program.region(name)
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        places = {"slot": index, "in": len(region.slots) + index}
        label = f"out{index}" if kind == "out" else holders[places[kind]].name
        for dim, outers in (region.zigzags if zigzag else region.hints).get(label, {}).items():
            if str(dim).isdigit():
                found.setdefault(int(dim), set()).update(outers)
    return {dim: tuple(sorted(outers - {1})) for dim, outers in found.items()}


def indivisible(program: Program, type_: TensorType, sharding: Sharding) -> str | None:
    """Which axis does not divide which dim, in numbers; None for a sharding that divides."""
    sizes, axes = program.on_mesh.sizes, program.on_mesh.axis_names
    if is_valid(type_.shape, sharding, sizes):
        return None
    for axis, placement in enumerate(sharding):
        if not isinstance(placement, Shard):
            continue
        alone = tuple(p if a == axis else REPLICATE for a, p in enumerate(sharding))
        upto = tuple(p if a <= axis else REPLICATE for a, p in enumerate(sharding))
        whole, stripes = type_.shape[placement.dim], placement.outer
        pieces = f"{stripes} stripes × " if stripes > 1 else ""
        if not is_valid(type_.shape, alone, sizes):
            return f"dim {placement.dim} is {whole}, which {pieces}{axes[axis]}={sizes[axis]} does not divide"
        if not is_valid(type_.shape, upto, sizes):
            before = [a for a in range(axis) if isinstance(p := sharding[a], Shard) and p.dim == placement.dim]
            local = whole
            for each in before:
                local //= sizes[each]
            named = " × ".join(f"{axes[a]}={sizes[a]}" for a in before)
            return (
                f"dim {placement.dim} is {whole}, over {named} {local}, "
                f"which {pieces}{axes[axis]}={sizes[axis]} does not divide"
            )
    return "its splits do not divide it"
