"""Compile every kernel for GPUs that are not here, and say what it takes of them.

    python -m autopar.runtime.kernels.aot [--arch 80,90] [--kernel NAME] [--usual] [--workers 2]

A module of this folder that has kernels lists the configurations that matter in `compile_specs()`; each is compiled for
each architecture it is meant for by Triton and the ptxas that comes with it. The table has, of one thread: registers,
bytes of stack, bytes of spilled registers; of one program: shared memory. Exit code 1: a kernel does not compile, takes
more than the architecture has, or spills (at head dims other than 64 and 128 it may, and what only tuning tries; a
little where blocks were chosen by time). All of them take many minutes on two cores; `--usual` are those that most
models run, with the heaviest of float32, and CI compiles (`make kernels`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from autopar.base.errors import AutoparError
from autopar.runtime import kernels
from autopar.runtime.kernels.compile_spec import CompileSpec

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes that one program can have (CUDA C++ Programming Guide, table of technical specifications per capability)."""
CHECKED_HEAD_DIMS = (64, 128)
_UNUSUAL = re.compile(r"\b(window|runs|uneven|tuned|rows)\b")
"""In names of specifications: attention at lengths that are no multiples of the blocks, of less common masks, or in
blocks that only tuning tries; of a few queries that are many rows.
"""
_MAY_SPILL = re.compile(r"\btuned\b")
"""In names of specifications: a candidate of tuning, which is taken where it is fastest, spilling or not."""
_BY_TIME = {90: 768}
"""Bytes that attention's kernels of half types may spill by default where their blocks were chosen by time: of those
measured, the fastest spill up to 644 a thread (results/first-light-2026-11-26.md); more is worth a look.
"""
_HEAVIEST = re.compile(r"\battention_.*\b(dropout|everything)\b")
"""In names of specifications: attention that takes most registers, by which a whole dtype can be judged."""
_COLUMNS = ("kernel", "arch", "dtype", "head dim", "warps", "stages", "registers", "shared", "stack", "spilled", "s")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes.

    registers, stack_bytes, spill_bytes (stores and loads): of one thread; shared_bytes: of one program.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One specification compiled for one architecture: its resources, or the error that stood in the way."""

    name: str
    capability: int
    dtype: str
    head_dim: int | None
    num_warps: int
    num_stages: int
    seconds: float
    resources: Resources | None
    error: str = ""

    @property
    def problem(self) -> str:
        """Why this outcome fails the check; empty where it does not."""
        if self.resources is None:
            return f"does not compile: {self.error}"
        limit = SHARED_MEMORY.get(self.capability)
        if limit is not None and self.resources.shared_bytes > limit:
            return f"takes {self.resources.shared_bytes} bytes of shared memory, sm_{self.capability} has {limit}"
        by_time = self.dtype in ("bf16", "fp16") and "attention" in self.name
        if (
            self.resources.spill_bytes > (_BY_TIME.get(self.capability, 0) if by_time else 0)
            and not _MAY_SPILL.search(self.name)
            and (self.head_dim is None or self.head_dim in CHECKED_HEAD_DIMS)
        ):
            return f"spills {self.resources.spill_bytes} bytes"
        return ""


def compile_spec(spec: CompileSpec, capability: int) -> Resources:
    """Compile one specification for one architecture, without a GPU.

    Raises:
        AutoparError: Triton's interpreter is on, so there is nothing to compile.
        Exception: what Triton raises where the kernel does not compile.
    """
    _refuse_interpreter()
    log = io.StringIO()
    with _printed_log(), contextlib.redirect_stdout(log):
        compiled = triton.compile(spec.source(), target=GPUTarget("cuda", capability, 32), options=spec.options())
    return read_log(log.getvalue(), compiled.metadata.shared)


def read_log(log: str, shared_bytes: int) -> Resources:
    """What `ptxas -v` says of a kernel: of the function that takes most, where it has several that are not inlined."""
    registers = [int(each) for each in re.findall(r"Used (\d+) registers", log)]
    stacks = [int(each) for each in re.findall(r"(\d+) bytes stack frame", log)]
    spills = [int(each) for each in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    if not registers or not stacks or not spills:
        raise RuntimeError(f"ptxas does not say what the kernel takes: {log!r}")
    return Resources(max(registers), shared_bytes, max(stacks), sum(spills))


@contextlib.contextmanager
def _printed_log() -> Iterator[None]:
    """Triton compiles afresh, and prints what ptxas says: run again by hand, its options could be others."""
    before = knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    try:
        yield
    finally:
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = before


def _refuse_interpreter() -> None:
    if knobs.runtime.interpret:
        raise AutoparError("kernels cannot be compiled while Triton interprets them", remedy="unset TRITON_INTERPRET")


def modules() -> tuple[str, ...]:
    """The modules of this folder, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(kernels.__path__)))


def specs_of(module: str) -> tuple[CompileSpec, ...]:
    """The specifications that a module of this folder lists."""
    listed: Callable[[], Sequence[CompileSpec]] | None = getattr(
        importlib.import_module(f"{kernels.__name__}.{module}"), "compile_specs", None
    )
    return tuple(listed()) if listed is not None else ()


def is_usual(spec: CompileSpec) -> bool:
    """Whether most models run it (bfloat16, head dims 64 and 128), or it is of float32 and takes most registers."""
    if _head_dim(spec) not in (None, *CHECKED_HEAD_DIMS):
        return False
    if _dtype(spec) == "fp32":
        return bool(_HEAVIEST.search(spec.name))
    return _dtype(spec) in ("bf16", "-") and not _UNUSUAL.search(spec.name)


def jobs(capabilities: Sequence[int], name: str = "", usual: bool = False) -> list[tuple[str, int, int]]:
    """(module, number of the specification in it, capability): all that is to be compiled.

    Raises:
        AutoparError: no kernel has this in its name, or none is meant for these architectures.
    """
    found = [
        (module, number, capability)
        for module in modules()
        for number, spec in enumerate(specs_of(module))
        for capability in capabilities
        if capability in spec.capabilities and name in spec.name and (not usual or is_usual(spec))
    ]
    if not found:
        known = sorted({spec.name for module in modules() for spec in specs_of(module)})
        raise AutoparError(
            f"no kernel {name!r} for {', '.join(f'sm_{each}' for each in capabilities)}",
            values=f"kernels: {', '.join(known)}",
            remedy="name a part of one of these, and architectures it is meant for",
        )
    return found


def run_job(job: tuple[str, int, int]) -> Outcome:
    """Compile one specification (in a process of a pool, which finds it by its number)."""
    module, number, capability = job
    spec = specs_of(module)[number]
    start = time.perf_counter()
    resources, error = None, ""
    try:
        resources = compile_spec(spec, capability)
    except Exception as problem:  # whatever a compiler raises: the table goes on, and the exit code says so
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(
        spec.name, capability, _dtype(spec), _head_dim(spec), spec.num_warps, spec.num_stages,
        time.perf_counter() - start, resources, error,
    )  # fmt: skip


def _dtype(spec: CompileSpec) -> str:
    """That of the tensors that are not kept wide: the narrowest floating-point one."""
    pointers = [text[1:] for text in spec.signature.values() if text.startswith(("*fp", "*bf"))]
    return min(pointers, key=lambda name: int(re.sub(r"\D", "", name)), default="-")


def _head_dim(spec: CompileSpec) -> int | None:
    if "HALF" in spec.constexprs:
        return 2 * int(spec.constexprs["HALF"])
    return spec.constexprs.get("D")


def outcomes(wanted: Sequence[tuple[str, int, int]], workers: int = 2) -> Iterator[Outcome]:
    """Compile these `jobs` in `workers` processes; in their order, as they are done."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_job, wanted)


def table_row(outcome: Outcome) -> tuple[str, ...]:
    """The cells of one line of the table."""
    head_dim = "-" if outcome.head_dim is None else str(outcome.head_dim)
    cells = (outcome.name, f"sm_{outcome.capability}", outcome.dtype, head_dim, outcome.num_warps, outcome.num_stages)
    taken = outcome.resources
    numbers = (taken.registers, taken.shared_bytes, taken.stack_bytes, taken.spill_bytes) if taken else ("-",) * 4
    return tuple(str(cell) for cell in (*cells, *numbers, f"{outcome.seconds:.1f}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 when every kernel compiles and none spills that should not."""
    parser = argparse.ArgumentParser(
        prog="python -m autopar.runtime.kernels.aot", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", default="80,90", help="compute capabilities without the dot (default: %(default)s)")
    parser.add_argument("--kernel", default="", help="only kernels that have this in their name")
    parser.add_argument("--usual", action="store_true", help="only what most models run, as CI does")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"\d+(,\d+)*", options.arch):
        parser.error(f"--arch {options.arch!r}: numbers with commas between, as in 80,90")
    capabilities = [int(text) for text in options.arch.split(",")]
    try:
        _refuse_interpreter()
        wanted = jobs(capabilities, options.kernel, options.usual)
    except AutoparError as error:
        print(error, file=sys.stderr)
        return 2
    width = max(len(specs_of(module)[number].name) for module, number, _ in wanted)
    widths = [width, *(max(7, len(column) + 1) for column in _COLUMNS[1:])]
    problems: list[str] = []
    count = 0
    print(_line(_COLUMNS, widths))
    for outcome in outcomes(wanted, options.workers):
        count += 1
        print(_line(table_row(outcome), widths), flush=True)
        if outcome.problem:
            problems.append(f"{outcome.name}, sm_{outcome.capability}: {outcome.problem}")
    print("\n".join([*problems, f"ahead of time: {count} kernels, {len(problems)} problems"]))
    return 1 if problems else 0


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths))]
    return " ".join([first, *rest]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
