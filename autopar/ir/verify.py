"""The verifier: what every program must satisfy, phase by phase. A failure is a bug of ours and carries the printed
program.
"""

from __future__ import annotations

import operator
from collections import Counter

from autopar.ir.collectives import COLLECTIVES
from autopar.ir.op_call import name_of
from autopar.ir.program import Phase, Program
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rings import sends_inside
from autopar.ir.sharding import is_valid, redistribution_steps
from autopar.ir.stages import Pipeline
from autopar.ir.values import ValueRef

_ORDER: tuple[Phase, ...] = ("captured", "outlined", "differentiated", "annotated", "placed", "lowered")


def check_program(program: Program, *, after: str) -> None:
    """Check the rules of the program's phase and of all earlier ones.

    Raises:
        AssertionError: names the broken rule, the pass `after` which it broke, and prints the program.
    """
    problems = list(_problems(program))
    if problems:
        listing = "\n".join(f"- {problem}" for problem in problems[:10])
        raise AssertionError(f"after {after}, the program breaks its rules:\n{listing}\n\n{program}")


def _problems(program: Program) -> list[str]:
    reached = _ORDER.index(program.phase)
    found = _calls(program)
    found += [f"the constant {name} has no values" for name, value in program.constants.items() if value.is_meta]
    for region in program.regions:
        found += _graph(region)
        if reached >= _ORDER.index("differentiated"):
            found += _differentiated(program, region)
        if reached >= _ORDER.index("annotated"):
            found += _annotated(region)
        if reached >= _ORDER.index("placed"):
            found += _placed(program, region)
        if reached >= _ORDER.index("lowered"):
            found += _lowered(program, region)
    if reached >= _ORDER.index("placed"):
        found += _layouts(program)
    if program.pipeline is not None:
        found += _stages(program, program.pipeline)
    return found


def _calls(program: Program) -> list[str]:
    """Every call names a region, fills its slots and inputs with values of the right type, and reads only earlier
    results.
    """
    found: list[str] = []
    names = [region.name for region in program.regions]
    if len(set(names)) != len(names):
        found.append(f"two regions share a name: {names}")
    variables = {variable.name: variable for variable in program.variables}
    for index, call in enumerate(program.calls):
        if call.region not in names:
            found.append(f"call {index} names region {call.region!r}, which does not exist")
            continue
        region = program.region(call.region)
        if len(call.slots) != len(region.slots) or len(call.arguments) != len(region.inputs):
            found.append(f"call {index} of {region.name} has {len(call.slots)} slots, {len(call.arguments)} arguments")
            continue
        for slot, name in zip(region.slots, call.slots, strict=True):
            if name not in variables or variables[name].seen != slot.type:
                found.append(f"call {index}: {name} does not fill slot {slot}")
        for port, ref in zip(region.inputs, call.arguments, strict=True):
            if ref.call >= index:
                found.append(f"call {index} reads {ref}, which is not computed yet")
            elif program.port(ref).type != port.type:
                found.append(f"call {index}: {ref} is {program.port(ref).type}, {port} is wanted")
    for name, ref in program.updates:
        if name not in variables or variables[name].is_parameter:
            found.append(f"{name} is updated, and is no buffer")
        elif program.port(ref).type != variables[name].type:
            found.append(f"buffer {name} is {variables[name].type}, its update {ref} {program.port(ref).type}")
        elif any(ref in call.arguments for call in program.calls) or ref in program.outputs:
            found.append(f"the update {ref} of {name} is read")
    return found


def _graph(region: Region) -> list[str]:
    found: list[str] = []
    region.graph.lint()
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    least = len(region.slots) + len(region.inputs)
    if len(holders) < least:
        found.append(f"{region.name} has {len(holders)} placeholders for {least} slots and inputs")
    seeds = holders[least : least + region.seeds]
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            found.append(f"{region.name}.{node.name} is a {node.op}")
        elif node.op != "output" and "val" not in node.meta and node not in seeds:
            found.append(f"{region.name}.{node.name} has no type")
    return found


def _differentiated(program: Program, region: Region) -> list[str]:
    """Results are outputs, gradients of trainable slots, gradients of differentiable inputs; forward reads no
    tangent.
    """
    output = next(node for node in region.graph.nodes if node.op == "output")
    wanted = len(region.outputs)
    if program.training:
        wanted += len(region.trainable_slots) + len(region.differentiable_inputs)
    found = []
    if len(output.args[0]) != wanted:
        found.append(f"{region.name} returns {len(output.args[0])} values, not {wanted}")
    for node in region.graph.nodes:
        if node.name in region.forward_nodes:
            late = [n for n in node.all_input_nodes if n.op == "call_function" and n.name not in region.forward_nodes]
            if late:
                found.append(f"{region.name}.{node.name} runs forward but reads {late[0].name}, which runs backward")
    return found


def _annotated(region: Region) -> list[str]:
    if region.annotated is None:
        return [f"{region.name} is not annotated"]
    found = []
    for node in region.graph.nodes:
        if node.op == "call_function" and "getitem" not in name_of(node.target) and node.name not in region.ops:
            found.append(f"{region.name}.{node.name} has no sharding rule")
    for name, (call, rule) in region.ops.items():
        if len(rule.operands) != len(call.operands) or len(rule.results) != len(call.results):
            found.append(f"{region.name}.{name}: rule {rule} does not fit {call.name}")
    return found


def _placed(program: Program, region: Region) -> list[str]:
    if region.annotated is None or region.placed is None:
        return [f"{region.name} is not placed"]
    sizes = program.on_mesh.sizes
    found = []
    for name, (call, _) in region.ops.items():
        if name not in region.strategies:
            found.append(f"{region.name}.{name} has no strategy")
            continue
        strategy = region.strategies[name]
        pairs = [*zip(call.operands, strategy.operands, strict=True), *zip(call.results, strategy.results, strict=True)]
        for spec, layout in pairs:
            if spec is not None and layout is not None and not is_valid(spec.shape, layout, sizes):
                found.append(f"{region.name}.{name}: {spec.shape} cannot be {layout} on {program.on_mesh}")
    return found


def _layouts(program: Program) -> list[str]:
    """Every parameter can be gathered, and its gradient reduced; those of equal blocks lie alike."""
    found, sizes = [], program.on_mesh.sizes
    distinct = {kept: name for name, kept in program.placed.parameters.items()}
    for kept, name in distinct.items():
        for source, target in ((kept.stored, kept.held), (kept.held, kept.compute)):
            if redistribution_steps(source, target, sizes) is None:
                found.append(f"{name} cannot be gathered from {source} to {target}")
        if redistribution_steps(kept.gradient, kept.stored, sizes) is None:
            found.append(f"the gradient of {name} cannot be reduced from {kept.gradient} to {kept.stored}")
    return found


def _lowered(program: Program, region: Region) -> list[str]:
    """A forward; a backward's two halves come together, compute what it does, and send no more than it does."""
    found = [] if "forward" in region.lowered else [f"{region.name} has no lowered forward"]
    halves = [region.lowered[name] for name in ("backward_input", "backward_weight") if name in region.lowered]
    if not halves:
        return found
    if len(halves) == 1 or "backward" not in region.lowered:
        return [*found, f"{region.name} is lowered as {', '.join(region.lowered)}"]
    first, last = halves
    wanted = len(region.differentiable_inputs), len(region.trainable_slots)
    if (first.num_results, last.num_results) != wanted or last.saved:
        found.append(f"the halves of {region.name} give {first.num_results} and {last.num_results} gradients")
    if first.saved != last.inputs:
        found.append(f"{region.name}: its weight half reads {last.inputs}, its input half keeps {first.saved}")
    whole = _operators(region.lowered["backward"])
    for missing, count in (whole - _operators(first) - _operators(last)).items():
        found.append(f"{region.name}: {count} of {whole[missing]} {missing} run in neither half of the backward")
    sent, allowed = (sum((_sent(each) for each in some), Counter()) for some in (halves, [region.lowered["backward"]]))
    for kind, axis in sorted(sent - allowed):
        found.append(f"{region.name}: its halves have {sent[kind, axis]} {kind} on {axis}, not {allowed[kind, axis]}")
    return found


def _operators(lowered: LoweredFunction) -> Counter[str]:
    """How often a function has each operator."""
    nodes = [n for n in lowered.graph.nodes if n.op == "call_function" and "joins" not in n.meta]
    return Counter(str(n.target) for n in nodes if n.target is not operator.getitem)


def _sent(lowered: LoweredFunction) -> Counter[tuple[str, str]]:
    """How many collectives of each kind a function has on each axis; those that are joined count as apart."""
    found: Counter[tuple[str, str]] = Counter()
    for node in lowered.graph.nodes:
        if sends_inside(node):
            found[str(node.target), str(node.args[1])] += 1
        elif node.op == "call_method" and node.target in COLLECTIVES:
            found[str(node.target), str(node.args[2])] += node.meta.get("joins", 1)
    return found


def _stages(program: Program, pipeline: Pipeline) -> list[str]:
    """Every call belongs to one stage, in order; a stage has what it reads and sends; what is sent is received."""
    found: list[str] = []
    owned = [call for stage in pipeline.stages for call in stage.calls if call not in stage.recomputed]
    if owned != list(range(len(program.calls))):
        found.append(f"the stages run the calls {owned}, the program has {len(program.calls)}")
    if pipeline.schedule.num_stages != len(pipeline.stages):
        found.append(f"the schedule is of {pipeline.schedule.num_stages} stages, there are {len(pipeline.stages)}")
    sent: tuple[ValueRef, ...] = ()
    for number, stage in enumerate(pipeline.stages):
        if stage.receives != sent:
            found.append(f"stage {number} receives {stage.receives}, the one before sends {sent}")
        read = [ref for call in stage.calls for ref in program.calls[call].arguments if ref.call >= 0]
        for ref in (*read, *stage.sends):
            if ref.call not in stage.calls and ref not in stage.receives:
                found.append(f"stage {number} lacks {ref}")
        sent = stage.sends
    return [*found, *([f"the last stage sends {sent}"] if sent else [])]
