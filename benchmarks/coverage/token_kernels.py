"""What a token's program rotates and writes by one kernel, of every causal architecture of transformers in tiny form.

    python benchmarks/coverage/token_kernels.py --json FILE [--only 'causal | *;*bert*'] [--dtype bfloat16] [--write]
        [--before FILE]

Each is traced for one token of two sequences on two H100 under `tensor`, up to the pass `fuse_writes`; a later run goes
on from FILE. `--write` makes a dated page of it; `--before`: beside what an earlier version of autopar had.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import autopar
from autopar import pipeline
from autopar.api.generation import phase_inputs
from autopar.ir.nodes import format_target, shape_of
from autopar.planner.decide import bind_inputs, of_cache, resolve, without_graph
from autopar.strategies.request import Attempt
from benchmarks import pages
from benchmarks.coverage import discovery, shrinking
from benchmarks.coverage.discovery import Pair
from benchmarks.proofs.matrix import matches

WANTED = autopar.Generation(batch=2, prompt=5, new_tokens=3)
CPU_S, TRIES_S, MEMORY_BYTES = 90, 12.0, 8 << 30
"""Of one architecture; and after which no other configuration is tried."""
STATES = {
    "rotated": "rotated and written by one kernel in every layer",
    "partly": "in some layers, written by one kernel in the others",
    "written": "written by one kernel; nothing is rotated, or in a way of its own",
    "left": "operators of torch in some layers or all",
    "none": "no cache of keys and values by position",
    "no program": "no token's program of a tiny configuration",
}


def counted(pair: Pair, dtype: torch.dtype) -> dict[str, int]:
    """Of a token's program, how many of each operator that writes; and in which ways rows are rotated."""
    model, inputs = _generating(pair, dtype)
    mesh = autopar.Mesh({"tp": 2}, hardware="h100")
    given = without_graph(bind_inputs(model, (), inputs))
    asked = Attempt(model, given, mesh, of_cache(resolve("tensor", mesh)), training=False, explain=False)
    program, _ = pipeline.run(asked, (*pipeline.TRACE, *pipeline.RECOMPUTE))
    regions, found = {region.name: region for region in program.regions}, Counter[str]()
    for call in program.calls:
        for node in regions[call.region].graph.nodes:
            name = format_target(node) if node.op == "call_function" else ""
            if name in ("autopar.rotary_write", "autopar.cache_write", "autopar.attention"):
                found[name] += 1
                found.update(f"{name} {each}" for each in node.kwargs if name == "autopar.rotary_write")
            elif name == "aten.index_copy" and len(shape_of(node)) == 4:
                found["aten.index_copy"] += 1
    return dict(found)


def _generating(pair: Pair, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The first tiny model that generates, and what it is given for a token."""
    failed, began = None, time.process_time()
    for model, _ in shrinking.models(pair):
        model = model.to(dtype).eval()
        try:
            return model, phase_inputs(model, WANTED)["decode"]
        except Exception as error:
            failed = failed or error
            if time.process_time() - began > TRIES_S:
                break
    raise failed or ValueError("there is no tiny model")


def row(pair: Pair, dtype: torch.dtype) -> dict[str, Any]:
    """What is counted, in a process of its own that may take so much CPU and memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            said: dict[str, Any] = {"counts": counted(pair, dtype)}
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:240]}
        with os.fdopen(writing, "w") as file:
            file.write(json.dumps(said))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    found = json.loads(text) if text else {"error": "the process ended"}
    return {"model_type": pair.model_type, "architecture": pair.architecture, **found}


def state(counts: Mapping[str, int] | None) -> str:
    """Which of `STATES` it is. counts: None where there is no program."""
    if counts is None:
        return "no program"
    rotated, written, left = (
        counts.get(name, 0) for name in ("autopar.rotary_write", "autopar.cache_write", "aten.index_copy")
    )
    if left:
        return "left"
    if rotated:
        return "partly" if written else "rotated"
    return "written" if written else "none"


def page(rows: Sequence[Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]], dtype: str) -> str:
    """How many architectures are in which state, and each of them."""
    states = {each["model_type"]: state(each.get("counts")) for each in rows}
    earlier = {name: state(before[name].get("counts")) for name in states if name in before}
    left_out = Counter(state(each.get("counts")) for name, each in before.items() if name not in states)
    not_asked = "".join(f" {number} that were {name} before were not asked again." for name, number in left_out.items())
    now, then = Counter(states.values()), Counter(earlier.values())
    heading = ("a token's keys and values", *(["before"] if before else []), "now")
    table = [(text, *([then[name]] if before else []), now[name]) for name, text in STATES.items()]
    lines = []
    for each in rows:
        counts = each.get("counts") or {}
        ways = [name.split()[1] for name in counts if name.startswith("autopar.rotary_write ")]
        numbers = [counts.get(name, "") for name in ("autopar.rotary_write", "autopar.cache_write", "aten.index_copy")]
        told = each.get("error", ", ".join(ways)).replace("|", "\\|")
        was = [earlier.get(each["model_type"], "")] if before else []
        lines.append((each["model_type"], each["architecture"], *was, states[each["model_type"]], *numbers, told))
    columns = ("kind", "class", *(["before"] if before else []), "now", "rotated", "written", "`index_copy`", "how")
    return (
        f"# A token's rotation and writes by one kernel\n\n{pages.machine()}. {len(rows)} causal architectures of "
        f"transformers in tiny form, {dtype}, one token of two sequences, traced for two H100 under `tensor` "
        f"(`benchmarks/coverage/token_kernels.py`); nothing was run. Numbers are of calls in it.{not_asked}\n\n"
        f"{pages.table(heading, table)}\n\n{pages.table(columns, lines)}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="patterns of `task | model type | class`, separated by semicolons")
    parser.add_argument("--json", type=Path, required=True, help="a file from which a later run goes on")
    parser.add_argument("--before", type=Path, help="such a file of an earlier version")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {each["model_type"] for each in pages.kept(options.json)}
    chosen = [each for each in discovery.pairs() if each.task == "causal" and matches(each.key, options.only)]
    for pair in sorted(chosen, key=lambda each: each.model_type):
        if pair.model_type not in known:
            found = row(pair, getattr(torch, options.dtype))
            pages.keep(options.json, found)
            print(found, file=sys.stderr, flush=True)
    rows = pages.kept(options.json)
    before = {each["model_type"]: each for each in pages.kept(options.before)}
    text = page(rows, before, options.dtype)
    print(pages.write("token-kernels", text) if options.write else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
