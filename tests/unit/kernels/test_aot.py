"""Compilation ahead of time, in processes of their own: where other tests interpret kernels there is no compiler."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton")

SPILLS = """
from dataclasses import replace
from autopar.runtime.kernels.aot import Outcome, compile_spec
from autopar.runtime.kernels.rms_norm import compile_specs
spec = next(s for s in compile_specs() if s.name == "rms_norm_backward 8192")
taken = compile_spec(replace(spec, num_warps=4), 80)
print(taken.spill_bytes > 0 and taken.stack_bytes > 0 and taken.registers > 0, taken)
"""
USUAL = """
from autopar.runtime.kernels import aot
for spec in aot.specs_of("attention_specs"):
    if aot.is_usual(spec):
        kind = spec.name.split()[0].removeprefix("attention_")
        print(kind, *spec.capabilities, aot._dtype(spec), aot._head_dim(spec))
"""


def run(*arguments: str, interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200)


def aot(*arguments: str, interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    return run("-m", "autopar.runtime.kernels.aot", "--workers", "1", *arguments, interpreted=interpreted)


@pytest.mark.slow
def test_compiles_for_both_architectures() -> None:
    """Breaks if a kernel cannot be compiled without a GPU, or the table lacks an architecture."""
    done = aot("--kernel", "sum_exp")
    assert done.returncode == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert head.split()[:3] == ["kernel", "arch", "dtype"]
    assert sorted(tuple(row.split()[:3]) for row in rows) == [
        ("sum_exp", f"sm_{arch}", dtype) for arch in (80, 90) for dtype in ("bf16", "fp32")
    ]
    assert last == "ahead of time: 4 kernels, 0 problems"


@pytest.mark.moderate
def test_bad_arguments() -> None:
    """Breaks if a misspelt kernel counts as "nothing to complain about"."""
    done = aot("--kernel", "no such")
    assert done.returncode == 2 and "sum_exp" in done.stderr and "no such" in done.stderr
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("autopar.runtime.kernels.aot").main(["--arch", "hopper"])


@pytest.mark.slow
def test_interpreted_kernels_are_an_error() -> None:
    """Breaks if the check passes without having compiled anything."""
    done = aot("--kernel", "sum_exp", "--arch", "90", interpreted=True)
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr


@pytest.mark.slow
def test_spills_are_seen() -> None:
    """Breaks if spilled registers are not read off the compiled kernel."""
    done = run("-c", SPILLS)
    assert done.stdout.startswith("True"), done.stdout + done.stderr


def test_what_counts_as_a_problem() -> None:
    """Breaks if a spill at a head dim that matters passes, or one at another does not."""
    from autopar.runtime.kernels.aot import Outcome, Resources

    good = Outcome("kernel", 90, "bf16", 128, 8, 3, 1.0, Resources(128, 100_000, 0, 0))
    assert good.problem == ""
    spilled = replace(good, resources=Resources(255, 100_000, 16, 32))
    assert "spills 32 bytes" in spilled.problem
    assert "spills" in replace(spilled, head_dim=None).problem
    assert replace(spilled, head_dim=256).problem == ""
    timed = replace(spilled, name="attention_dkv padding")
    assert timed.problem == "" and "spills" in replace(timed, dtype="fp32").problem
    assert "spills" in replace(timed, capability=80).problem
    assert "spills 1024" in replace(timed, resources=Resources(255, 100_000, 600, 1024)).problem
    assert "shared memory" in replace(good, capability=80, resources=Resources(128, 200_000, 0, 0)).problem
    assert "no such" in replace(good, resources=None, error="ValueError: no such").problem


@pytest.mark.slow
def test_usual_specifications_have_float32_attention() -> None:
    """Breaks if the check that CI runs leaves out a type, a head size, an architecture or a kernel of attention."""
    done = run("-c", USUAL)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        f"{kind} {arch} {dtype} {size}"
        for kind in ("forward", "dq", "dkv", "dbias")
        for arch in (80, 90)
        for dtype in ("bf16", "fp32")
        for size in (64, 128)
    }
