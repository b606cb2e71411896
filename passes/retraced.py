"""torch traces what torch.export made once more, with a value of its own for whatever is written, under names of ours.

It writes a module for that and runs it, with names as they are: one of `torch.fx.GraphModule`'s own (`code`, `graph`,
`meta`) would be in the way there, and one with a quote in it would be code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.passes import mutation
from autopar.passes.exported import graph_modules

_CHECK = torch.ops.aten._assert_tensor_metadata.default


def retraced(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with a value of its own for whatever is written; parameters, buffers and constants have their names.

    The one that is handed in is of no use any more.
    """
    specs = exported.graph_signature.input_specs
    every = dict.fromkeys(
        (*(str(spec.target) for spec in specs if spec.target), *exported.state_dict, *exported.constants)
    )
    prefix = "held"
    while any(name.startswith(prefix) for name in every):
        prefix += "_"
    ours = {name: f"{prefix}_{number}" for number, name in enumerate(every)}
    for spec in (*specs, *exported.graph_signature.output_specs):
        spec.target = ours.get(str(spec.target), spec.target)
    for held in (exported.state_dict, exported.constants):
        _rename(held, ours)
    # Checks of dtypes before casts: a proof reads those that code names as others, and these with them.
    for module in graph_modules(exported.graph_module):
        for node in [each for each in module.graph.nodes if each.target is _CHECK]:
            module.graph.erase_node(node)
        module.recompile()
    apart = mutation.unsaid_views(exported.graph_module.graph)
    known = torch.export.default_decompositions() if apart else {}
    found = exported.run_decompositions({target: known[target] for target in apart if target in known})
    theirs = {other: name for name, other in ours.items()}
    # Constants of the second trace have names that were free in it.
    theirs |= {name: f"{name}_again" for name in found.constants if name in ours}
    for spec in (*found.graph_signature.input_specs, *found.graph_signature.output_specs):
        spec.target = theirs.get(str(spec.target), spec.target)
    for held in (found.state_dict, found.constants):
        _rename(held, theirs)
    return found


def _rename(held: dict[str, Any], names: Mapping[str, str]) -> None:
    kept = [(names.get(name, name), value) for name, value in held.items()]
    held.clear()
    held.update(kept)
