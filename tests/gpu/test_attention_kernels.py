"""The attention kernels, compiled, on a CUDA device: the cases that the unit tests interpret, and larger ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.attention_cases import CASES, CAUSAL, Case, expected

pytestmark = pytest.mark.gpu
# On the scale of the largest: float32 sums exactly rounded products, the others round p and ds to 11 and 8 bits.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
LARGE = {
    "plain": Case(B=2, H=4, G=2, S=512, T=512, D=64, E=64),
    "plain causal": Case(B=2, H=4, G=2, S=512, T=512, D=128, E=128, options=CAUSAL),
    "uneven": Case(B=2, H=4, G=1, S=391, T=515, D=128, E=128, options=CAUSAL),
    "wide head": Case(B=1, H=2, G=1, S=300, T=300, D=256, E=256, options=CAUSAL),
    "heads of two sizes": Case(B=1, H=2, G=2, S=300, T=300, D=192, E=128, options=CAUSAL),
    "head of 80": Case(B=2, H=3, G=3, S=260, T=260, D=80, E=80, options=CAUSAL),
    "window": Case(B=1, H=4, G=2, S=700, T=700, D=64, E=64, options={"left": 127, "right": 0}, sinks=True),
    "window at 128": Case(B=1, H=4, G=2, S=700, T=700, D=128, E=128, options={"left": 99, "right": 5, "prefix": 40}),
    "padding": Case(B=2, H=4, G=2, S=400, T=400, D=128, E=128, keys=[(150, 400), (0, 260)], options=CAUSAL),
    "bias": Case(B=2, H=4, G=4, S=320, T=320, D=64, E=64, bias=(1, 4, 320, 320)),
    "softcap": Case(B=1, H=4, G=2, S=320, T=320, D=128, E=128, options={**CAUSAL, "softcap": 2.0}),
    "dropout": Case(B=1, H=4, G=2, S=320, T=320, D=128, E=128, options={**CAUSAL, "dropout_p": 0.2}),
}


def moved(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"positions": [x.cuda() for x in options["positions"]]} if "positions" in options else options


@pytest.mark.parametrize("tma", [True, False], ids=["", "pointers"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_equal_to_float64(name: str, dtype: torch.dtype, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the compiled kernel is not what the interpreter runs."""
    from autopar.runtime.kernels import attention_configs
    from autopar.runtime.kernels.attention_backward import attention_backward
    from autopar.runtime.kernels.attention_forward import attention_forward

    if not tma:
        monkeypatch.setattr(attention_configs, "fits_descriptor", lambda _: False)
    case = replace({**CASES, **LARGE}[name], dtype=dtype, device="cuda")
    case = replace(case, options=moved(case.options))
    tensors = case.tensors()
    options, bias = case.said(), tensors["bias"]
    rest = {part: x for part, x in tensors.items() if part != "g"}
    out, lse = attention_forward(**rest, options=options)
    needs_bias = bias is not None and bias.is_floating_point()
    grads = attention_backward(**tensors, out=out, lse=lse, options=options, bias_grad=needs_bias)
    again = attention_backward(**tensors, out=out, lse=lse, options=options, bias_grad=needs_bias)
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True)), "not deterministic"
    actual = dict(zip(("out", "lse", "dq", "dk", "dv", "dbias"), (out, lse, *grads)))
    for part, want in expected(tensors, options, out).items():
        assert_near(actual[part], want, part)


def assert_near(actual: Tensor, want: Tensor, part: str) -> None:
    scale = max(1.0, float(want[want.isfinite()].abs().max())) if want.isfinite().any() else 1.0
    tolerance = TOLERANCES[actual.dtype]

    def say(message: str) -> str:
        return f"{part}: {message}"

    torch.testing.assert_close(actual.double(), want, rtol=tolerance, atol=tolerance * scale, msg=say)
