"""`autopar demo`: a small unmodified Llama on four local processes, beside one process; then the proof.

Everything is shown as it happens: the plan, each step's loss, where the generated program lies. Nothing waits for ever:
the four processes get a deadline, and what they print is shown when one of them fails.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

import autopar
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.base.text import new_table
from autopar.cli.demo_worker import (
    LEARNING_RATE,
    MAX_NORM,
    MESH,
    PLAN,
    ROWS,
    SIZES,
    TOKENS,
    TRACE,
    WEIGHTS,
    make_batch,
    make_model,
)
from autopar.views.text import plan_text

if TYPE_CHECKING:
    from autopar.api.plan import Plan

TIMEOUT_S = 300.0
EXPLAIN_S = 20.0
GRACE_S = 40.0
ROUNDING = 1e-4
"""Relative difference of losses that float32 rounding explains after some AdamW steps (an update divides by
|gradient|)."""
NEXT = "autopar plan llama-3.1-8b --mesh dp=32,tp=8 --hardware h100 --batch 64x8192 --report llama_8b.html"


@dataclass(frozen=True, slots=True)
class Step:
    """One step's loss, and its gradient norm before clipping."""

    loss: float
    norm: float


def run(folder: Path, num_steps: int = 10) -> bool:
    """Run the demo, leave the report, picture, trace, program and plan in `folder`; whether everything was equal.

    Raises:
        AutoparError: a process failed or did not end; the message ends with what it printed.
    """
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 120)
    begun = time.perf_counter()
    # As each of the four does: comparable, and faster than threads that wait for a core at these sizes.
    torch.set_num_threads(1)
    sizes = f"hidden {SIZES['hidden_size']}, {SIZES['num_hidden_layers']} layers, batch {ROWS}x{TOKENS}"
    console.print(
        f"An unmodified transformers LlamaForCausalLM ({sizes}) on {' × '.join(f'{a}={n}' for a, n in MESH.items())}"
    )
    with _timed(console, "planned on meta, without a process group"):
        plan = autopar.plan(
            make_model("meta"), autopar.Mesh(MESH, hardware="cpu"), example_inputs=make_batch(0), strategy="auto"
        )
    console.print(f"\n{plan_text(plan)}")
    with tempfile.TemporaryDirectory() as scratch:
        plan.save(Path(scratch, PLAN))
        with _timed(console, f"{num_steps} steps of AdamW in one process, plain PyTorch"):
            reference = _train_alone(Path(scratch, WEIGHTS), num_steps)
        with _timed(
            console, f"{num_steps} steps of AdamW on {plan.mesh.num_devices} processes (gloo), the generated program"
        ):
            found = _train_together(Path(scratch), num_steps, plan.mesh.num_devices)
        measured = Path(scratch, TRACE).read_text(encoding="utf-8")
    console.print()
    equal = _print_losses(console, reference, found)
    with _timed(console, "plan.verify(): all ranks in one process against the eager model"):
        proof = plan.verify()
    console.print(f"\n{proof}\n", style="bold green" if proof.ok else "bold red", soft_wrap=True)
    files = _write(console, plan, folder, measured)
    console.print("\nWritten, from the same plan:")
    for what, path, use in files:
        console.print(f"  {what:<18} {path}{f'   ({use})' if use else ''}", soft_wrap=True)
    console.print(
        f"Done in {time.perf_counter() - begun:.0f} s. Open {files[0][1]}, then try:\n\n  {NEXT}\n", soft_wrap=True
    )
    return equal and proof.ok


def _write(console: Console, plan: Plan, folder: Path, measured: str) -> list[tuple[str, Path, str]]:
    """The files, each with what it is and what to do with it. measured: the trace of a step that ran."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "llama.py"
        program.write_text(plan.source, encoding="utf-8")
        plan.save(folder / PLAN)
        picture = plan.visualize(folder / "plan.svg")
        trace = folder / TRACE
        trace.write_text(measured, encoding="utf-8")
        with _timed(console, "the report: tensors explained, other memory limits planned"):
            report = plan.report(folder / "plan.html", explain_s=EXPLAIN_S)
    except OSError as error:
        raise AutoparError(f"cannot write into {folder}", values=str(error), remedy="use --folder") from error
    files = [("report", report, "open it in a browser"), ("picture", picture, "")]
    files += [("trace", trace, "predicted and measured; open it at ui.perfetto.dev")]
    files += [("generated program", program, "read it")]
    return [*files, ("plan", folder / PLAN, f"autopar holds {folder / PLAN} --rank 0")]


def _train_alone(weights: Path, num_steps: int) -> list[Step]:
    """Eager PyTorch on the whole batch; the initial weights are left in `weights` for the others."""
    from safetensors.torch import save_file

    model: Any = make_model("cpu")
    save_file({name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps = []
    for step in range(num_steps):
        loss = model(**make_batch(step)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(float(loss.detach()), float(norm)))
    return steps


def _train_together(folder: Path, num_steps: int, num_ranks: int) -> list[Step]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "autopar.cli.demo_worker", str(folder), str(num_steps)]
    # Four processes share the machine's cores; none needs a hub.
    variables = environment.of_child(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with (folder / "errors.txt").open("w+") as errors:
        process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        late = threading.Event()
        timer = threading.Timer(TIMEOUT_S, _end, (process, late))
        timer.start()
        try:
            assert process.stdout is not None
            lines = process.stdout.readlines()
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
        errors.seek(0)
        said = errors.read()
    steps = [Step(row["loss"], row["norm"]) for row in map(_parse, lines) if row is not None]
    if code or len(steps) != num_steps:
        why = f"did not end within {TIMEOUT_S:.0f} s" if late.is_set() else f"ended with exit code {code}"
        raise AutoparError(
            f"the demo's {num_ranks} processes {why} after {len(steps)} of {num_steps} steps",
            values=f"they printed:\n{_tail(lines, said)}\n",
            remedy="autopar verify llama --tiny --mesh dp=2,tp=2 needs no processes",
        )
    return steps


def _parse(line: str) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"loss", "norm"} <= set(row) else None


def _tail(lines: Sequence[str], said: str) -> str:
    """What was printed beside the losses: from the first traceback on, or the end of it."""
    others = [line.rstrip() for line in lines if _parse(line) is None]
    errors = said.rstrip().splitlines()
    first = next((number for number, line in enumerate(errors) if "Traceback (most recent" in line), len(errors) - 30)
    return "\n".join([*others[-10:], *errors[max(0, first) :][:30]])


def _end(process: subprocess.Popen[str], late: threading.Event | None = None) -> None:
    """Ask the launcher to end, for it ends its processes (sessions of their own); then end it."""
    if late is not None:
        late.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                continue


def _print_losses(console: Console, reference: Sequence[Step], found: Sequence[Step]) -> bool:
    many_processes = f">loss, {torch.Size(MESH.values()).numel()} processes"
    table = new_table("", ">step", ">loss, 1 process", many_processes, ">difference", ">gradient norm")
    equal = True
    for step, (one, many) in enumerate(zip(reference, found, strict=True)):
        equal = equal and abs(one.loss - many.loss) <= ROUNDING * abs(one.loss)
        table.add_row(
            str(step), f"{one.loss:.7f}", f"{many.loss:.7f}", f"{many.loss - one.loss:+.1e}", f"{many.norm:.4f}"
        )
    console.print(table)
    verdict = "equal to float32 rounding" if equal else "NOT EQUAL: this is a bug of autopar"
    console.print(f"The losses are {verdict}.\n", style="bold green" if equal else "bold red")
    return equal


@contextmanager
def _timed(console: Console, what: str) -> Iterator[None]:
    begun = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[{time.perf_counter() - begun:5.1f} s] {what}", soft_wrap=True)
