"""The functions of one region: gather, forward, backward, its halves, reduce (the parameters' in parameters.py)."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from autopar.ir import LoweredFunction, Region
from autopar.passes.emission.parameters import (
    Names,
    gather_function,
    has_own_backward_gather,
    parenthesized,
    reduce_function,
)
from autopar.passes.emission.statements import comment, identifier, local_bytes, statement, statement_lines
from autopar.passes.halves import INPUT_HALF, WEIGHT_HALF
from autopar.rings import is_ring, num_results

FREE_AT_BYTES = 1 << 17
"""Local values of at least this size are deleted after their last use; smaller ones are not worth a line."""

WIDTH = 88

_PHASES = ("forward", "backward", INPUT_HALF, WEIGHT_HALF)


def region_functions(names: Names, region: Region) -> list[str]:
    """All functions of a region, each a block of text."""
    blocks = [gather_function(names, region, "gather")]
    if "backward" in region.lowered and has_own_backward_gather(region):
        blocks.append(gather_function(names, region, "gather_for_backward"))
    blocks += [_phase(names, region, phase) for phase in _phases(names, region)]
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


def _phase(names: Names, region: Region, phase: str) -> str:
    lowered = region.lowered[phase]
    handed, saved = _handed_over(region, phase)
    inputs = [identifier(name) for name in lowered.inputs if name not in saved]
    arguments = ", ".join(["comm", "p", *([handed] if handed else []), *inputs])
    lines = [f"def {region.name}_{phase}({arguments}):"]
    if saved:
        lines.append(f"    {parenthesized([identifier(name) for name in saved])} = {handed}")
        lines.append(f"    del {handed}  # so that each is freed after its last use")
    return "\n".join(lines + _body(names, lowered, saved) + _returns(region, lowered, phase))


def _handed_over(region: Region, phase: str) -> tuple[str, Sequence[str]]:
    """The argument in which a phase gets what an earlier one left for it, and what that is."""
    if phase == "forward":
        return "", ()
    if phase == WEIGHT_HALF:
        return "kept", region.lowered[INPUT_HALF].saved
    return "saved", region.lowered["forward"].saved


def _body(names: Names, lowered: LoweredFunction, owned: Sequence[str] = ()) -> list[str]:
    """owned: inputs that nobody else holds."""
    lines: list[str] = []
    origin = ""
    output = next(node for node in lowered.graph.nodes if node.op == "output")
    last_use = _last_uses(lowered, output, names.sizes, owned)
    for node in lowered.graph.nodes:
        if node.op in ("placeholder", "output") or _is_inline(node):
            continue
        own = node.meta.get("origin", "")
        if own and own != origin:
            origin = own
            lines.append(f"    # {own}")
        lines.append(_line(node, names.axes))
        if dead := last_use.get(node):
            lines.append(f"    del {', '.join(dead)}")
    return lines


def _is_inline(node: fx.Node) -> bool:
    """Parameters read from `p`, picks of an operator with several results: written where they are used, or made."""
    return node.target is operator.getitem


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        key = node.args[1]
        if isinstance(key, str):
            return f'p["{key}"]'
    return identifier(node.name)


def _line(node: fx.Node, axes: Sequence[str]) -> str:
    picks = {pick_index(user): user for user in node.users if user.target is operator.getitem}
    if picks:
        targets = [identifier(picks[i].name) if i in picks else "_" for i in range(max(picks) + 1)]
        left = ", ".join(targets)
        several = _num_results(node)
        left += "," if len(targets) == 1 else ""
        if several and len(targets) < several:
            left += ", *_" if len(targets) > 1 else " *_"
        note = ", ".join(comment(picks[i], axes) for i in sorted(picks))
    else:
        left, note = identifier(node.name), comment(node, axes)
    if is_ring(node):
        before, *arguments = statement_lines(node, _name)
        return "\n".join([f"    {left} = {before}", *(f"        {each}" for each in arguments), f"    )  # {note}"])
    text = f"    {left} = {statement(node, _name)}"
    return f"{text.ljust(WIDTH if len(text) < WIDTH else 0)}  # {note}" if note else text


def pick_index(node: fx.Node) -> int:
    """Which result a getitem picks."""
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _num_results(node: fx.Node) -> int:
    if is_ring(node):
        return num_results(node)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return 0
    return 1 << 16 if len(schema.returns) == 1 else len(schema.returns)


def _last_uses(
    lowered: LoweredFunction, output: fx.Node, sizes: Sequence[int], owned: Sequence[str]
) -> dict[fx.Node, list[str]]:
    """node -> large values that nothing after it reads."""
    kept = set(output.all_input_nodes)
    order = {node: i for i, node in enumerate(lowered.graph.nodes)}
    found: dict[fx.Node, list[str]] = {}
    for node in lowered.graph.nodes:
        is_value = node.op in ("call_function", "call_method") and not _name(node).startswith("p[")
        is_value |= node.op == "placeholder" and node.name in owned
        if not is_value or node in kept or not node.users or local_bytes(node, sizes) < FREE_AT_BYTES:
            continue
        last = max((user for user in node.users), key=lambda user: order[user])
        if last.op != "output":
            found.setdefault(last, []).append(identifier(node.name))
    return found


def _returns(region: Region, lowered: LoweredFunction, phase: str) -> list[str]:
    output = next(node for node in lowered.graph.nodes if node.op == "output")
    values = [_name(node) for node in output.args[0]]
    results, saved = values[: lowered.num_results], values[lowered.num_results :]
    if phase == "forward":
        return [f"    return {parenthesized(results)}, {parenthesized(saved)}"]
    if phase == INPUT_HALF:
        return [f"    return {', '.join([*results, parenthesized(saved)])}"]
    slots = region.trainable_slots
    lines = ["    g = {"] + [f'        "{s.name}": {v},' for s, v in zip(slots, values, strict=False)] + ["    }"]
    rest = values[len(slots) :]
    return [*(lines if slots else ["    g = {}"]), f"    return {', '.join([*rest, 'g'])}"]
