"""Which implementation of attention a call goes to, and what the kernels refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.base import environment
from autopar.base.codes import STORAGES
from autopar.base.errors import AutoparError
from autopar.operators import scaled_dot_product
from autopar.operators.attention_options import AttentionOptions
from tests.unit.kernels.attention_cases import Case
from tests.unit.kernels.interpreted import assert_near, load

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
    monkeypatch.setenv("AUTOPAR_ATTENTION", "cudnn")
    assert not takes_kernels() and takes_kernels(replace(PLAIN, softcap=2.0))


@pytest.mark.parametrize(
    "queries, options, few", [(1, {}, True), (16, {}, True), (17, {}, False), (1, {"dropout_p": 0.1}, False)]
)
def test_a_few_queries_have_kernels_of_their_own(
    queries: int, options: dict[str, Any], few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a token's attention goes to programs of one head and a block of queries, or dropout to one without."""
    monkeypatch.setenv("AUTOPAR_ATTENTION", "triton")
    module, called = load("attention_dispatch"), []
    monkeypatch.setattr(module.forward_kernel, "attention_forward", lambda *_, **__: called.append(False))
    monkeypatch.setattr(module.decode_launch, "decode_attention", lambda *_, **__: called.append(True))
    tensors = {name: x for name, x in Case(S=queries, T=40).tensors().items() if name in ("q", "k", "v")}
    module.attention(**tensors, scale=0.3, **options)
    assert called == [few]


@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("queries", [1, 17])
def test_codes_are_numbers_wherever_they_go(queries: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if codes go to a kernel that takes them for numbers, or a token's keys are written out before it."""
    monkeypatch.setenv("AUTOPAR_ATTENTION", backend)
    module, called = load("attention_dispatch"), []
    kernel = module.decode_launch.decode_attention
    monkeypatch.setattr(
        module.decode_launch, "decode_attention", lambda *given, **said: called.append(said) or kernel(*given, **said)
    )
    tensors = {name: x for name, x in Case(S=queries, T=40).tensors().items() if name in ("q", "k", "v")}
    (k, key_scales), (v, value_scales) = (STORAGES["int4"].encode(tensors[name]) for name in ("k", "v"))
    said = {"scale": 0.3, "storage": "int4", "key_scales": key_scales, "value_scales": value_scales}
    out, lse = module.attention(tensors["q"], k, v, **said)
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in said.items()}
    want, want_lse = scaled_dot_product.attention(tensors["q"].double(), k, v, **wide)
    assert_near(out, want)
    assert_near(lse, want_lse)
    assert len(called) == (queries == 1 and backend != "sdpa")


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


class Called(TorchDispatchMode):
    """The names of PyTorch's kernels of attention that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_attention" in func.__name__:
            self.names.append(func.__name__.split(".")[0].removeprefix("_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


def kernels_called(monkeypatch: pytest.MonkeyPatch, size: int = 128) -> list[str]:
    """Those of a plain call and its gradient, on tensors without data: shapes and schemas are checked, too."""
    monkeypatch.setattr(scaled_dot_product, "_fits_cuda_flash", lambda *_: True)
    with Called() as called:
        q, g = (torch.empty(2, 4, 64, size, dtype=torch.bfloat16, device="meta") for _ in range(2))
        k, v = (torch.empty(2, 2, 64, size, dtype=torch.bfloat16, device="meta") for _ in range(2))
        options = {"scale": 0.3, "right": 0}
        out, lse = scaled_dot_product.attention(q, k, v, **options)
        grads = scaled_dot_product.attention_backward(g, q, k, v, None, None, None, None, out, lse, **options)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    return called.names


FLASH, CUDNN = ([f"{name}_attention", f"{name}_attention_backward"] for name in ("flash", "cudnn"))


def test_plain_calls_go_to_cudnn_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if cuDNN's kernel is called otherwise than its schema says, or taken where nobody asked for it, where it
    does not serve, or where it is not deterministic.
    """
    monkeypatch.delenv("AUTOPAR_ATTENTION", raising=False)
    assert kernels_called(monkeypatch) == FLASH
    monkeypatch.setenv("AUTOPAR_ATTENTION", "cudnn")
    assert (kernels_called(monkeypatch), kernels_called(monkeypatch, 256)) == (CUDNN, FLASH)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels_called(monkeypatch) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_order_of_torchs_own_kernels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a script's own `sdpa_kernel` is not heeded: with a priority, or by leaving flash attention out."""
    monkeypatch.delenv("AUTOPAR_ATTENTION", raising=False)
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for backends, wanted in (([cudnn, flash], CUDNN), ([flash, cudnn], FLASH), ([cudnn], CUDNN)):
        with sdpa_kernel(backends, set_priority=True):
            assert kernels_called(monkeypatch) == wanted, backends
    assert kernels_called(monkeypatch) == FLASH


def test_the_variable_has_five_values() -> None:
    assert environment.attention_backend({}) == "auto"
    assert environment.attention_backend({"AUTOPAR_ATTENTION": " Triton "}) == "triton"
    with pytest.raises(AutoparError, match="AUTOPAR_ATTENTION=fast"):
        environment.attention_backend({"AUTOPAR_ATTENTION": "fast"})


REGISTERED = """
import torch
from autopar.operators.attention_math import attention_math
from autopar.runtime import kernels
from autopar.operators import AttentionOptions
assert kernels.register() and kernels.register()
from autopar.runtime.kernels import attention_forward, decode_launch
called = []
kernel, few = attention_forward.attention_forward, decode_launch.decode_attention
attention_forward.attention_forward = lambda *args, **kwargs: called.append(1) or kernel(*args, **kwargs)
decode_launch.decode_attention = lambda *args, **kwargs: called.append("few") or few(*args, **kwargs)
q, k, v = torch.randn(3, 1, 2, 24, 16)
out, lse = torch.ops.autopar.attention(q, k, v, scale=0.25, right=0, left=3)
want = attention_math(q, k, v, None, None, None, AttentionOptions(scale=0.25, right=0, left=3))
torch.testing.assert_close((out, lse), want)
arguments = (out, q, k, v, None, None, None, None, out, lse)
grads = torch.ops.autopar.attention_backward(*arguments, scale=0.25, right=0, left=3)
assert called == [1] and len(grads) == 3
out, lse = torch.ops.autopar.attention(q[:, :, :4], k, v, scale=0.25, right=20, left=3)
want = attention_math(q[:, :, :4], k, v, None, None, None, AttentionOptions(scale=0.25, right=20, left=3))
torch.testing.assert_close((out, lse), want)
assert called == [1, "few"]
"""


@pytest.mark.slow
def test_registered_in_the_interpreter() -> None:
    """Breaks if the operator does not reach the kernels once they are registered, or registering twice fails."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "AUTOPAR_ATTENTION": "triton"}
    done = subprocess.run([sys.executable, "-c", REGISTERED], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EXPERTS = """
import torch
from autopar import operators as ops
from autopar.runtime import kernels
assert kernels.register()
from autopar.runtime.kernels import experts
called, launch = [], experts.launch
experts.launch = lambda kernel, *given, **options: called.append(kernel) or launch(kernel, *given, **options)
x, weights, first, second = torch.randn(4, 16), torch.randn(4, 1), torch.randn(2, 32, 16), torch.randn(2, 16, 16)
indices, bias, act = torch.tensor([[0], [1], [1], [0]]), torch.randn(2, 32), "mul(silu(gate), up)"
counts = []
for operator, given in (
    (ops.experts, (x, indices, weights, first, second)), (ops.experts_grad, (x, x, indices, weights, first, second)),
    (ops.experts_grad_bias, (x, x, indices, weights, first, second, bias)),
):
    operator(*given, act=act)
    counts.append(len(called))
assert counts == [4, 11, 19], counts
"""


@pytest.mark.slow
def test_experts_of_programs_reach_their_kernels() -> None:
    """Breaks if what programs write (`ops.experts`) goes past the kernels that are registered."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "AUTOPAR_EXPERTS": "triton"}
    done = subprocess.run([sys.executable, "-c", EXPERTS], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AutoparError, match="AUTOPAR_EXPERTS=fast"):
        environment.experts_backend({"AUTOPAR_EXPERTS": "fast"})
    assert [environment.experts_backend({"AUTOPAR_EXPERTS": each}) for each in ("", "Torch")] == ["", "torch"]


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


@pytest.mark.moderate
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
