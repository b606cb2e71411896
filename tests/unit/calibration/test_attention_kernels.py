"""Flash attention or cuDNN's kernel: what is measured of a device decides what programs for it run."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.attention import prefers_cudnn
from autopar.cost.calibration import Options, attention_kernels, calibrate
from autopar.machine import hardware_data, profiles
from autopar.machine.hardware import Hardware
from autopar.operators import scaled_dot_product
from autopar.runtime.loader import load_program
from tests.unit.calibration.test_profile import quickly  # a fixture

CUDNN_FASTER = "\n[plain_attention]\nflash_s = 0.002\ncudnn_s = 0.001\n"
__all__ = ["quickly"]


def hardware(planted: str = CUDNN_FASTER) -> Hardware:
    """The shipped profile of an A100 with a planted measurement."""
    text = (Path(profiles.__file__).parent / "data" / "hardware" / "a100-80.toml").read_text()
    return profiles.parse(text + planted, name="planted", where="planted.toml")


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).mean()


def planned(device: Hardware, model: nn.Module | None = None) -> autopar.Plan:
    mesh = autopar.Mesh({"dp": 2}, hardware=device)
    return autopar.plan(model or Attends(), mesh, example_inputs=(torch.randn(4, 8, 16),), strategy="ddp")


@pytest.mark.moderate
def test_a_program_says_which_kernel_was_faster() -> None:
    """Breaks if a measurement does not reach programs, or what was not measured, or says the contrary, does."""
    assert (hardware().plain_attention, profiles.load("a100-80").plain_attention) == ("cudnn", "")
    assert 'ATTENTION = "cudnn"' in planned(hardware()).source
    slower = hardware("\n[plain_attention]\nflash_s = 0.001\ncudnn_s = 0.002\n")
    alone = hardware("\n[plain_attention]\ncudnn_s = 0.002\n")
    for device in (slower, alone, profiles.load("a100-80")):
        assert "ATTENTION" not in planned(device).source
    assert "ATTENTION" not in planned(hardware(), nn.Linear(16, 2)).source
    assert 'ATTENTION = "cudnn"' in planned(profiles.load("h100-sxm")).source  # as measured there


@pytest.mark.moderate
def test_the_program_runs_it_forward_and_backward_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a part of the step asks for the other kernel, or torch's order is another one after it."""
    asked: list[bool] = []
    plain = scaled_dot_product._read

    def seen(q: Tensor, *args: Any) -> Any:
        if q.device.type == "cpu":
            asked.append(scaled_dot_product.takes_cudnn(q))
        return plain(q, *args)

    monkeypatch.setattr(scaled_dot_product, "_read", seen)
    for device, wanted in ((hardware(), True), (profiles.load("a100-80"), False)):
        asked.clear()
        assert planned(device).verify().ok
        assert set(asked) == {wanted} and len(asked) >= 2
        assert not prefers_cudnn()


@pytest.mark.parametrize("word", ["auto", "cudnn", "flash"])
def test_a_variable_has_the_last_word(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if AUTOPAR_ATTENTION=flash or =cudnn does not overrule what a program says."""
    monkeypatch.setenv("AUTOPAR_ATTENTION", word)
    program: Any = load_program(_program('ATTENTION = "cudnn"'), f"<{word}>")
    assert program.forward() == (word != "flash", None)


def test_an_unknown_kernel_in_a_program_or_a_profile_is_refused() -> None:
    with pytest.raises(AutoparError, match="ATTENTION = 'fast'"):
        load_program(_program('ATTENTION = "fast"'), "<edited>")
    with pytest.raises(AutoparError, match="fast_s in plain_attention"):
        hardware("\n[plain_attention]\nfast_s = 1.0\n")
    with pytest.raises(AutoparError, match=r"plain_attention\.cudnn_s"):
        hardware('\n[plain_attention]\ncudnn_s = "quick"\n')


def test_a_stage_of_a_pipeline_asks_for_it_in_each_of_its_parts() -> None:
    """Breaks if one of a stage's functions runs attention by another kernel than the others."""
    parts = ("unshard", "forward", "backward", "backward_input", "backward_weight", "reduce")
    text = 'ATTENTION = "cudnn"\nSTAGES = (("first", {"layers": range(0, 2)}),)\ndef split_inputs(comm, inputs): ...\n'
    text += "from autopar.base.torch_compat.attention import prefers_cudnn\n"
    text += "".join(f"def first_{name}(*_, layers):\n    return prefers_cudnn()\n" for name in parts)
    stage: Any = load_program(text, "<stages>").stages[0]
    halves = stage.backward_input, stage.backward_weight
    assert [each() for each in (stage.forward, stage.backward, *halves)] == [True] * 4
    assert not prefers_cudnn()


@pytest.mark.moderate
def test_a_calibration_keeps_both_and_times_the_rest_by_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickly: None
) -> None:
    """Breaks if what was measured does not come back from the file, through ranks' medians and a plan's data."""
    times = {"flash": 0.002, "cudnn": 0.001}
    monkeypatch.setattr(attention_kernels, "measured", lambda *_: times)
    found = calibrate(Options(tmp_path / "mine.toml"))
    assert found is not None and found.hardware.plain_attention_s == times
    assert "measured" in tomllib.loads(found.text)["plain_attention"]["source"]
    again = hardware_data.from_data(hardware_data.to_data(found.hardware))
    assert again.plain_attention == "cudnn"
    with attention_kernels.first(times):
        assert prefers_cudnn()
    with attention_kernels.first({"flash": 0.001, "cudnn": 0.002}):
        assert not prefers_cudnn()


def test_what_does_not_run_or_gives_other_numbers_is_not_timed() -> None:
    """Breaks if a kernel that is wrong, or is not there, could be the fastest."""
    right = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)

    def missing() -> tuple[Tensor, ...]:
        raise RuntimeError("no available kernel")

    calls = {"flash": lambda: (right,), "cudnn": lambda: (right + 2**-7,)}
    assert attention_kernels.compared(calls, torch.bfloat16, lambda call: 1.0) == {"flash": 1.0, "cudnn": 1.0}
    for other in (lambda: (right * 2,), lambda: (right * float("nan"),), missing):
        assert attention_kernels.compared({**calls, "cudnn": other}, torch.bfloat16, lambda call: 1.0) == {}
    assert attention_kernels.measured(torch.bfloat16, torch.device("cpu"), lambda call: 1.0) == {}


def _program(first_line: str) -> str:
    return f"""{first_line}
import torch
from autopar.operators.scaled_dot_product import takes_cudnn
def split_inputs(comm, inputs): ...
def forward(*_):
    return takes_cudnn(torch.empty(1, 8)), None
def backward(*_): ...
"""


def test_replacing_a_profile_keeps_its_numbers() -> None:
    assert replace(hardware(), power_limit_w=300.0).plain_attention == "cudnn"
