"""The functions of one region: gather, forward, backward, its halves, reduce (the parameters' in parameters.py)."""

from __future__ import annotations

import operator
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF
from autopar.ir.local_bytes import local_bytes
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rings import num_results, sends_inside
from autopar.passes.emission.headings import headings
from autopar.passes.emission.literals import plain, quoted
from autopar.passes.emission.names import FunctionNames
from autopar.passes.emission.parameters import (
    Names,
    gather_function,
    has_own_backward_gather,
    parenthesized,
    reduce_function,
    tables_of,
)
from autopar.passes.emission.sizes import shaped
from autopar.passes.emission.statements import SHAPE, comment, statement_lines

FREE_AT_BYTES = 1 << 17
"""Local values of at least this size are deleted after their last use; smaller ones are not worth a line."""

WIDTH = 88
"""Where comments begin, and how long a line of names may be."""
WIDEST = 118

_NO_BREAK = "\N{NO-BREAK SPACE}"

_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')

_PHASES = ("forward", "backward", INPUT_HALF, WEIGHT_HALF)


Places = dict[str, dict[str, tuple[str, int]]]
"""Function -> node of its graph -> what the line that makes it assigns to, and how often that was assigned before."""


def region_functions(names: Names, region: Region, places: Places) -> list[str]:
    """All functions of a region, each a block of text. places: filled for each phase."""
    blocks = [table.text for table in tables_of(names, region)]
    blocks.append(gather_function(names, region, "gather"))
    if "backward" in region.lowered and has_own_backward_gather(region):
        blocks.append(gather_function(names, region, "gather_for_backward"))
    known: dict[str, list[str]] = {}
    blocks += [_phase(names, region, phase, known, places) for phase in _phases(names, region)]
    if "backward" in region.lowered and region.transfers["reduce"]:
        blocks.append(reduce_function(names, region))
    return blocks


def _phases(names: Names, region: Region) -> list[str]:
    """Those that run: a pipeline's schedule splits all backwards, some, or none."""
    unused: set[str] = set()
    if (pipeline := names.program.pipeline) is not None:
        unused |= set() if pipeline.schedule.runs_whole_backward else {"backward"}
        unused |= set() if pipeline.schedule.splits_backward else {INPUT_HALF, WEIGHT_HALF}
    return [phase for phase in _PHASES if phase in region.lowered and phase not in unused]


# -- forward, backward, and the halves of it
# ----------------------------------------------------------------------------------------------------


def _phase(names: Names, region: Region, phase: str, known: dict[str, list[str]], places: Places) -> str:
    """known: what the phases before call what they leave for later ones; this one's is added, and its `places`."""
    lowered = region.lowered[phase]
    handed, saved = _handed_over(region, phase)
    given = dict(zip(saved, known.get(handed, ()), strict=False))
    output = next(node for node in lowered.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    for node, sizes in shaped(lowered):
        if shape := names.known_sizes.shape(region, node, sizes):
            node.meta[SHAPE] = shape
    results = returned[: lowered.num_results]
    slots = _slot_gradients(region, phase, returned)
    variables = FunctionNames(lowered.graph, given=given, owned=saved, targets=_targets(slots))
    holders = {node.name: node for node in lowered.graph.nodes if node.op == "placeholder"}
    inputs = [variables.name(holders[name]) for name in lowered.inputs if name not in saved]
    arguments = ", ".join(["comm", "p", *([handed] if handed else []), *inputs])
    lines = [f"def {region.name}_{phase}({arguments}):"]
    if saved:
        lines += wrapped(f"    {parenthesized([variables.name(holders[name]) for name in saved])} = {handed}")
        lines.append(f"    del {handed}  # so that each is freed after its last use")
    kept = [variables.expression(value) for value in returned[lowered.num_results :]]
    known["saved" if phase == "forward" else "kept"] = kept
    lines += ["    g = {}"] if slots is not None else []
    lines += _body(names, region, lowered, variables, saved)
    places[f"{region.name}_{phase}"] = _places(variables)
    if slots is None:
        values = [variables.expression(value) for value in results]
        text = parenthesized(values) if phase == "forward" else ", ".join(values)
        return "\n".join([*lines, *wrapped(f"    return {text}{', ' if text else ''}{parenthesized(kept)}")])
    for name, value in slots.items():
        if not variables.expression(value).startswith(f"g[{quoted(name)}]"):
            lines.append(f"    g[{quoted(name)}] = {variables.expression(value)}")
    rest = [variables.expression(value) for value in results[len(slots) :]]
    return "\n".join([*lines, f"    return {', '.join([*rest, 'g'])}"])


def _slot_gradients(region: Region, phase: str, returned: Sequence[fx.Node]) -> dict[str, fx.Node] | None:
    """The gradients of a region's parameters, by slot; None in a phase that gives none."""
    if phase in ("forward", INPUT_HALF):
        return None
    return {slot.name: value for slot, value in zip(region.trainable_slots, returned, strict=False)}


def _targets(slots: Mapping[str, fx.Node] | None) -> dict[fx.Node, str]:
    """Where gradients are put that nothing else reads: right into `g`."""
    found = {value: f"g[{quoted(name)}]" for name, value in (slots or {}).items()}
    several = [value for value in found if list((slots or {}).values()).count(value) > 1]
    return {value: text for value, text in found.items() if len(value.users) == 1 and value not in several}


def wrapped(text: str) -> list[str]:
    """A long line of a tuple as several, broken inside of its parentheses."""
    whole = text.replace(") = ", f"){_NO_BREAK}={_NO_BREAK}").replace("return (", f"return{_NO_BREAK}(")
    whole = whole.replace("), (", f"),{_NO_BREAK}(")
    whole = _LITERAL.sub(lambda found: found[0].replace(" ", _NO_BREAK), whole)
    lines = textwrap.wrap(whole, WIDEST, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _handed_over(region: Region, phase: str) -> tuple[str, Sequence[str]]:
    """The argument in which a phase gets what an earlier one left for it, and what that is."""
    if phase == "forward":
        return "", ()
    if phase == WEIGHT_HALF:
        return "kept", region.lowered[INPUT_HALF].saved
    return "saved", region.lowered["forward"].saved


def _body(
    names: Names, region: Region, lowered: LoweredFunction, variables: FunctionNames, owned: Sequence[str] = ()
) -> list[str]:
    """owned: inputs that nobody else holds."""
    lines: list[str] = []
    last_use = _last_uses(lowered, variables, names.sizes, owned)
    written = [
        node for node in variables.nodes if not variables.is_inside(node) and node.target is not operator.getitem
    ]
    for heading, nodes in headings(written, region.leaves - {region.module}):
        lines += [f"    # {plain(heading)}"] if heading else []
        for node in nodes:
            lines.append(_line(node, variables, names.axes))
            if dead := last_use.get(node):
                lines.append(f"    del {', '.join(dead)}")
    return lines


def _places(variables: FunctionNames) -> dict[str, tuple[str, int]]:
    """Where each node is made: also what is written inside of another's line, and the results of what has several."""
    lines: dict[fx.Node, tuple[str, int]] = {}
    counts: Counter[str] = Counter()
    for node in variables.nodes:
        if not variables.is_inside(node) and node.target is not operator.getitem:
            left = _left(node, variables)
            lines[node] = (left, counts[left])
            counts[left] += 1
    found = {}
    for node in variables.nodes:
        line = variables.line_of(node)
        line = line.all_input_nodes[0] if line.target is operator.getitem else line
        if line in lines:
            found[node.name] = lines[line]
    return found


def _left(node: fx.Node, variables: FunctionNames) -> str:
    """What a line assigns to."""
    picks = _picks(node)
    if not picks:
        return variables.name(node)
    targets = [variables.name(picks[i]) if i in picks else "_" for i in range(max(picks) + 1)]
    left = ", ".join(targets) + ("," if len(targets) == 1 else "")
    if len(targets) < _num_results(node):
        left += ", *_" if len(targets) > 1 else " *_"
    return left


def _picks(node: fx.Node) -> dict[int, fx.Node]:
    """The results that are used of an operator that has several, by their number."""
    return {pick_index(user): user for user in node.users if user.target is operator.getitem}


def _line(node: fx.Node, variables: FunctionNames, axes: Sequence[str]) -> str:
    picks, left = _picks(node), _left(node, variables)
    notes = [comment(picks[i], axes) for i in sorted(picks)] if picks else [comment(node, axes)]
    note = ", ".join(each for each in notes if each)
    if sends_inside(node):
        before, *arguments = statement_lines(node, variables.expression)
        last = f"    )  # {note}" if note else "    )"
        return "\n".join([f"    {left} = {before}", *(f"        {each}" for each in arguments), last])
    text = f"    {left} = {variables.statement(node)}"
    return f"{text.ljust(WIDTH if len(text) < WIDTH else 0)}  # {note}" if note else text


def pick_index(node: fx.Node) -> int:
    """Which result a getitem picks."""
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _num_results(node: fx.Node) -> int:
    return num_results(node) if sends_inside(node) else int(node.meta.get("num_results", 0))


def _last_uses(
    lowered: LoweredFunction, variables: FunctionNames, sizes: Sequence[int], owned: Sequence[str]
) -> dict[fx.Node, list[str]]:
    """node -> large values that nothing after its line reads."""
    output = next(node for node in lowered.graph.nodes if node.op == "output")
    kept = set(output.all_input_nodes)
    found: dict[fx.Node, list[str]] = {}
    for node in lowered.graph.nodes:
        is_value = node.op in ("call_function", "call_method") and not variables.is_inside(node)
        is_value = is_value and not _picks(node)  # no variable holds what its results are taken from
        is_value |= node.op == "placeholder" and node.name in owned
        if not is_value or node in kept or node in variables.continued or local_bytes(node, sizes) < FREE_AT_BYTES:
            continue
        last = variables.last_user(node)
        if last is not None and last.op != "output":
            found.setdefault(last, []).append(variables.name(node))
    return found
