"""What a program computes, as terms: of its graphs on whole tensors, before anything is cut, moved or written.

The generated text is read again by `autopar/runtime/checker`, which finds the terms of what it returns. Both are equal
where the text computes the program's values, whatever it recomputes, saves, sends, and in which order.
"""

from __future__ import annotations

import ast
import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.base.garbage import without_collection
from autopar.ir.forms import form_of
from autopar.ir.graphs import op_call, operands_of, source_of
from autopar.ir.op_call import OpCall
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.terms import SCHEME, Tape, Term, Terms, leaf, shifted, short
from autopar.ir.values import ValueRef, gradient_key

BEFORE = ("loss_weight", "of_batch")
"""Functions of a program that say, of the batch alone, how its microbatches are put together (`ir/interface.py`)."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The terms of outputs and updated buffers, in order, and of gradients, by parameter; of inputs by `gradient_key`.

    Of one microbatch, or two where there are more: that tells what is added up from what is not. steps: every term on
    the way, short (`short`): where a part may be one of several wholes, what is meant is the one that is among them.
    shapes: of the outputs, as the user sees them. roots: the places of outputs for which a gradient comes in. Both None
    in a plan of an autopar that did not say. before: digests of the functions that run before the program, and have no
    terms (`BEFORE`), by name.
    """

    outputs: tuple[Term, ...]
    updates: tuple[Term, ...]
    gradients: tuple[tuple[str, Term], ...]
    steps: frozenset[int] = frozenset()
    scheme: int = SCHEME
    shapes: tuple[tuple[int, ...], ...] | None = None
    roots: tuple[int, ...] | None = None
    before: tuple[tuple[str, str], ...] = ()

    @property
    def is_comparable(self) -> bool:
        """Whether this Python makes terms as the one did that made these."""
        return self.scheme == SCHEME


def parameter_leaf(name: str) -> Term:
    """Of a parameter or buffer, by its canonical name."""
    return leaf("state", name)


def input_leaf(name: str) -> Term:
    """Of an input of the model."""
    return leaf("input", name)


def gradient_leaf(place: int) -> Term:
    """Of the gradient that comes in for the output at this place."""
    return leaf("gradient of output", str(place))


def seed_leaf(place: int) -> Term:
    """Of the seed of the microbatch at this place among those that go through at once."""
    return leaf("seed", str(place)) if place else leaf("seed")


def digest_of(source: str, name: str) -> str:
    """Of what a text says that a name is: code, whatever its comments are; also where it says so twice."""
    said = [statement for statement in ast.parse(source).body if _binds(statement, name)]
    for statement in said:
        if isinstance(statement, ast.FunctionDef) and ast.get_docstring(statement) is not None:
            del statement.body[0]
    return hashlib.sha256("\n".join(map(ast.unparse, said)).encode()).hexdigest()[:16]


def _binds(statement: ast.AST, name: str) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name == name
    stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    names = {node.id for node in stored}
    names |= {node.asname or node.name for node in ast.walk(statement) if isinstance(node, ast.alias)}
    return name in names | {
        node.name for node in ast.walk(statement) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@without_collection()
def meaning_of(program: Program) -> Meaning:
    """The meaning of a program that is differentiated, or planned for inference."""
    reading = _Reading(program)
    outputs = tuple(reading.values[ref] for ref in program.outputs)
    updates = tuple(reading.values[ref] for _, ref in program.updates)
    gradients = tuple(sorted(reading.gradients().items()))
    ports = [program.port(ref) for ref in program.outputs]
    shapes = tuple(tuple(port.type.shape if port.logical is None else port.logical) for port in ports)
    roots = tuple(place for place, ref in enumerate(program.outputs) if ref in program.roots)
    steps = frozenset(map(short, reading.terms.made()))
    texts = ("", "") if program.batching is None else (program.batching.weight, program.batching.of_batch)
    before = tuple((name, digest_of(text, name)) for name, text in zip(BEFORE, texts, strict=True) if text)
    return Meaning(outputs, updates, gradients, steps, shapes=shapes, roots=roots, before=before)


class _Reading:
    """The terms of a program's values, call by call."""

    def __init__(self, program: Program) -> None:
        self.program, self.terms = program, Terms()
        self.canonical = {name: v.name for v in program.variables for name in (v.name, *v.aliases)}
        self.readers = {region.name: _Reader(region, self.terms) for region in program.regions}
        self.values: dict[ValueRef, Term] = {ValueRef(name=port.name): input_leaf(port.name) for port in program.inputs}
        for index, call in enumerate(program.calls):
            reader = self.readers[call.region]
            found = reader.forward(self._given(index))
            self.values.update({ValueRef(index, place): term for place, term in enumerate(found)})

    def _given(self, index: int) -> list[Term]:
        """What a call's placeholders are, but for gradients."""
        call = self.program.calls[index]
        seeds = range(self.program.region(call.region).seeds)
        given = [parameter_leaf(self.canonical[name]) for name in call.slots]
        given += [self.values[ref] for ref in call.arguments]
        return [*given, *(shifted(self.terms, seed_leaf(place), index) for place in seeds)]

    def gradients(self) -> dict[str, Term]:
        """By parameter, and of the inputs whose gradients are wanted."""
        if not self.program.training:
            return {}
        program, terms = self.program, self.terms
        due: dict[ValueRef, list[Term]] = {}
        for place, ref in enumerate(program.outputs):
            if ref in program.roots:
                due.setdefault(ref, []).append(gradient_leaf(place))
        found: dict[str, list[Term]] = {}
        for index in reversed(range(len(program.calls))):
            call, region = program.calls[index], program.region(program.calls[index].region)
            tangents = [
                terms.total(due.get(ValueRef(index, place), ()), region.outputs[place].type.shape)
                for place in region.tangents
            ]
            grads = self.readers[region.name].backward([*self._given(index), *tangents])
            trainable = [name for name, slot in zip(call.slots, region.slots, strict=True) if slot.trainable]
            into = [ref for ref, port in zip(call.arguments, region.inputs, strict=True) if port.differentiable]
            for name, term in zip(trainable, grads, strict=False):
                found.setdefault(self.canonical[name], []).append(term)
            for ref, term in zip(into, grads[len(trainable) :], strict=True):
                due.setdefault(ref, []).append(term)
        times = 1 if program.pipeline is not None else min(program.microbatches, 2)
        shapes = {name: program.variable(name).seen.shape for name in found}
        made = {name: terms.total(each * times, shapes[name]) for name, each in found.items()}
        for port in program.inputs:  # of each microbatch its own
            if port.differentiable:
                made[gradient_key(port.name)] = terms.total(due[ValueRef(name=port.name)], port.type.shape)
        return made


class _Reader:
    """One region's results, of the terms of its placeholders: slots, inputs, seeds, gradients of its outputs."""

    def __init__(self, region: Region, terms: Terms) -> None:
        self.terms = terms
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        fixed = len(region.slots) + len(region.inputs) + region.seeds
        leaves = [terms.fresh() for _ in holders]
        known: dict[tuple[fx.Node, int], Term] = {(node, 0): term for node, term in zip(holders, leaves, strict=True)}
        for node in region.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._read(node, region.ops, known)
        output = next(node for node in region.graph.nodes if node.op == "output")
        results = [known[source_of(node)] for node in output.args[0]]
        cut = len(region.outputs)
        self.forward = Tape(terms, leaves[:fixed], results[:cut])
        self.backward = Tape(terms, leaves, results[cut:])

    def _read(
        self, node: fx.Node, ops: Mapping[str, tuple[OpCall, Any]], known: dict[tuple[fx.Node, int], Term]
    ) -> None:
        call = ops[node.name][0] if node.name in ops else op_call(node)
        operands = [known[source_of(each)] for each in operands_of(node)]
        for index, spec in enumerate(call.results):
            if spec is not None:
                known[(node, index)] = self.terms.make(form_of(call, index), operands)
