"""Which implementation of attention a call goes to, and what the kernels refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.operators.attention_options import AttentionOptions
from tests.unit.kernels.attention_cases import Case
from tests.unit.kernels.interpreted import load

PLAIN = AttentionOptions(scale=0.3, right=0)


def takes_kernels(options: AttentionOptions = PLAIN, **others: object) -> bool:
    tensors = {**Case(S=16, T=16).tensors(), **others}
    names = ("q", "k", "v", "bias", "keys", "sinks")
    return load("attention_dispatch").takes_kernels(*(tensors[name] for name in names), options)


def test_plain_calls_go_to_pytorch_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the variable has no effect, or a call that PyTorch cannot do fast goes there."""
    monkeypatch.delenv("AUTOPAR_ATTENTION", raising=False)
    assert not takes_kernels()
    for options in ({"left": 3}, {"softcap": 2.0}, {"dropout_p": 0.1}, {"query_starts": [4]}, {"prefix": 3}):
        assert takes_kernels(replace(PLAIN, **options)), options
    assert takes_kernels(sinks=torch.zeros(2))
    assert takes_kernels(keys=torch.ones(1, 16, dtype=torch.bool))
    assert takes_kernels(bias=torch.zeros(1, 1, 16, 16))
    monkeypatch.setenv("AUTOPAR_ATTENTION", "triton")
    assert takes_kernels()
    monkeypatch.setenv("AUTOPAR_ATTENTION", "sdpa")
    assert not takes_kernels(replace(PLAIN, softcap=2.0))


def test_what_kernels_cannot_do_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a call that the kernels cannot do reaches them, or each call warns."""
    monkeypatch.setenv("AUTOPAR_ATTENTION", "triton")
    load("attention_dispatch")._warn.cache_clear()
    wide = {name: torch.randn(1, 2, 16, 320) for name in ("q", "k")}
    with pytest.warns(RuntimeWarning, match="head sizes of 320 and 32"):
        assert not takes_kernels(**wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not takes_kernels(**wide)


@pytest.mark.parametrize(
    "changed, options, reason",
    [
        ({"dtype": torch.float64}, {}, "float64 is none of"),
        ({"D": 257}, {}, "head sizes of 257"),
        ({}, {"scale": -0.5}, "scale -0.5"),
        ({}, {"softcap": -1.0}, "softcap -1.0"),
        ({}, {"key_starts": [2**31]}, "32 bits"),
    ],
)
def test_refused(changed: dict[str, object], options: dict[str, object], reason: str) -> None:
    """Breaks if a kernel computes what it cannot."""
    case = replace(Case(S=4, T=4), **changed)
    tensors = {name: x for name, x in case.tensors().items() if name != "g"}
    with pytest.raises(AutoparError, match=reason):
        load("attention_forward").attention_forward(**tensors, options=replace(case.said(), **options))


def test_mixed_types_are_refused() -> None:
    tensors = Case(S=4, T=4).tensors()
    q, k, v = tensors["q"], tensors["k"].half(), tensors["v"]
    assert "not of one type" in load("attention_problem").supports(q, k, v, PLAIN)


def test_dropout_needs_a_seed() -> None:
    tensors = Case(S=4, T=4).tensors()
    with pytest.raises(AutoparError, match="no seed"):
        load("attention_forward").attention_forward(
            tensors["q"], tensors["k"], tensors["v"], options=replace(PLAIN, dropout_p=0.5)
        )


def test_the_variable_has_three_values() -> None:
    assert environment.attention_backend({}) == "auto"
    assert environment.attention_backend({"AUTOPAR_ATTENTION": " Triton "}) == "triton"
    with pytest.raises(AutoparError, match="AUTOPAR_ATTENTION=flash"):
        environment.attention_backend({"AUTOPAR_ATTENTION": "flash"})


REGISTERED = """
import torch
from autopar.operators.attention_math import attention_math
from autopar.runtime import kernels
from autopar.operators import AttentionOptions
assert kernels.register() and kernels.register()
from autopar.runtime.kernels import attention_forward
called = []
kernel = attention_forward.attention_forward
attention_forward.attention_forward = lambda *args, **kwargs: called.append(1) or kernel(*args, **kwargs)
q, k, v = torch.randn(3, 1, 2, 8, 16)
out, lse = torch.ops.autopar.attention(q, k, v, scale=0.25, right=0, left=3)
want = attention_math(q, k, v, None, None, None, AttentionOptions(scale=0.25, right=0, left=3))
torch.testing.assert_close((out, lse), want)
arguments = (out, q, k, v, None, None, None, None, out, lse)
grads = torch.ops.autopar.attention_backward(*arguments, scale=0.25, right=0, left=3)
assert called == [1] and len(grads) == 3
"""


@pytest.mark.slow
def test_registered_in_the_interpreter() -> None:
    """Breaks if the operator does not reach the kernels once they are registered, or registering twice fails."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "AUTOPAR_ATTENTION": "triton"}
    done = subprocess.run([sys.executable, "-c", REGISTERED], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nothing_is_registered_without_a_device() -> None:
    """Breaks if loading a program on a CPU imports Triton."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code = "import sys\nfrom autopar.runtime import kernels\n"
    code += "assert not kernels.register()\nassert 'triton' not in sys.modules"
    variables = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "AUTOPAR_ATTENTION")
    }
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tuning_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a candidate does not go with the kernel's arguments, or lengths and features share one choice."""
    tuning, forward = load("attention_tuning"), load("attention_forward")
    configs, problems, launching = load("attention_configs"), load("attention_problem"), load("attention_launch")
    tried = []
    found = [configs.KernelConfig(16, 32), configs.KernelConfig(32, 16), configs.KernelConfig(16, 16)]
    monkeypatch.setattr(tuning, "candidates", lambda *_, **__: found)
    tuning.tuned.cache_clear()
    kernel = tuning.tuned(forward.attention_forward_kernel, "forward", 90, torch.float32, 32, 32, True, False)
    kernel._do_bench = lambda call, quantiles: tried.append(call()) or [1.0 / len(tried)]
    case = Case(S=32, T=40)
    tensors = {name: x for name, x in case.tensors().items() if name != "g"}
    wanted = forward.attention_forward(**tensors, options=case.said())
    problem = problems.AttentionProblem.build(**tensors, options=case.said())
    out, lse = (torch.full_like(x, torch.nan) for x in wanted)
    arguments = {**problem.arguments, **problem.switches, "out": out, "lse": lse}

    def count(meta: dict[str, int]) -> tuple[int]:
        return (launching.programs("forward", problem, meta["BLOCK_M"], meta["BLOCK_N"]),)

    for _ in range(2):
        load("launch").launch(kernel, count, out.device, arguments)
    assert len(tried) == len(found)
    assert kernel.best_config.kwargs["BLOCK_M"] == kernel.best_config.kwargs["BLOCK_N"] == 16
    torch.testing.assert_close((out, lse), wanted, rtol=1e-5, atol=1e-5)
