"""The checker compares what a program computes with what was planned: edits that lie well and mean something else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import autopar
from autopar.api.plan import Plan
from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.cli.main import app
from autopar.cli.models import catalogue
from autopar.ir.meaning import Meaning
from autopar.machine.mesh import Mesh
from autopar.runtime.checker import infer, part, program
from autopar.runtime.checker.program import check_types
from tests.unit.runtime.test_checker import edited

pytestmark = pytest.mark.unit
CELLS = {
    "llama": {"dp": "zero3", "tp": "tensor"},
    "gpt2": {"dp": "zero2", "tp": "tensor+sequence"},
    "t5": {"pp": "pipeline(zero_bubble)", "dp": "zero3"},
    "resnet": {"dp": "ddp"},
}


@lru_cache(maxsize=8)
def planned(name: str, microbatches: int | None = None) -> Plan:
    strategy = CELLS[name]
    loaded = catalogue.load(name, tiny=True, device="cpu")
    mesh = Mesh(dict.fromkeys(strategy, 2), hardware="cpu")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, microbatches=microbatches)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("model", "pattern", "replacement", "line", "said"),
    [
        ("llama", r"loss = loss / count", "loss = loss", "", "another output"),
        ("llama", r"from_loss = grad_loss / count", "from_loss = grad_loss * 1.0", "", "another gradient"),
        ("llama", r"(\w+) \+ down_proj", r"\1 + down_proj + down_proj", "", "another output"),
        ("llama", r"hidden_states \+ o_proj", r"hidden_states", "", "another output"),
        ("llama", r"hidden_states \+ o_proj", r"hidden_states - o_proj", "", "another output"),
        ("llama", r"grad_mul \* act_fn", "grad_mul * up_proj", "grad_up_proj", "another gradient"),
        ("llama", r"up_proj\.weight", "gate_proj.weight", "up_proj = ops.linear", "another output"),
        ("llama", r"1e-05", "1e-06", "post_attention_layernorm", "another output"),
        ("llama", r"scale=0\.35\d+", "scale=0.125", "attn_output, lse", "another output"),
        ("llama", r", right=0", "", "attn_output, lse", "another output"),
        ("llama", r"labels_1\[:, 1:\]", "labels_1[:, :-1]", "", "another output"),
        ("llama", r"saved_of_calls\.pop\(\)", "saved_of_calls.pop(0)", "", "another gradient"),
        ("llama", r"(rotary_backward\(\w+), cos, sin\)", r"\1, sin, cos)", "", "another gradient"),
        ("llama", r"grad_hidden_states \+ from_", "grad_hidden_states + 2 * from_", "", "another gradient"),
        ("gpt2", r"(ops\.dropout\(\w+, 0\.1, seed), \d+", r"\1, 77", "grad", "another gradient"),
        ("gpt2", r"(ops\.dropout\(\w+), 0\.1", r"\1, 0.2", "", "another output"),
        ("gpt2", r"seed \+ i \+ 1", "seed + 1", "block_forward(", "another output"),
        ("t5", r"grad_hidden_states \+ from_layer_norm", "grad_hidden_states", "", ""),
    ],
)  # fmt: skip
def test_edits_that_lie_well_and_mean_something_else(
    model: str, pattern: str, replacement: str, line: str, said: str
) -> None:
    """Breaks when a program of other numbers passes. All these pass where only placements are asked."""
    plan = planned(model)
    text = edited(plan.source, pattern, replacement, line)
    check_types(text, plan.interface, identity=False)
    with pytest.raises(AutoparError, match="the program is not right") as found:
        check_types(text, plan.interface)
    assert said in str(found.value) and "AUTOPAR_CHECK=types" in str(found.value)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("pattern", "replacement", "line"),
    [
        (r"comm\.accumulate\(sums, g, ", "sums.update({name: x for name, x in g.items()}) or comm.at(", 'g, "")'),
        (r"comm\.accumulate\((.*)\)", r"comm.accumulate(\1); comm.accumulate(\1)", "model.layers"),
    ],
)
def test_what_is_added_up_over_microbatches(pattern: str, replacement: str, line: str) -> None:
    """Breaks when the last microbatch may stand for all, or one may be counted twice: two are followed."""
    loaded = catalogue.load("llama", tiny=True, device="cpu")
    mesh = Mesh({"dp": 2}, hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="zero2", microbatches=4)
    text = edited(plan.source, pattern, replacement, line)
    check_types(text, plan.interface, identity=False)
    with pytest.raises(AutoparError, match="another gradient"):
        check_types(text, plan.interface)


class Labelled(nn.Module):
    """An average over labels, and over those and all rows."""

    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.is_mixed = is_mixed

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        loss = F.cross_entropy(x, labels)
        return {"loss": loss + x.square().mean() if self.is_mixed else loss}


@lru_cache(maxsize=2)
def in_microbatches(is_mixed: bool) -> Plan:
    batch = {"x": torch.randn(8, 4), "labels": torch.tensor([0, 1, 2, -100, 3, 0, -100, -100])}
    strategy = {"pp": "pipeline(1f1b)"}
    return autopar.plan(Labelled(is_mixed), {"pp": 2}, example_inputs=batch, strategy=strategy, microbatches=4)


@pytest.mark.parametrize(
    ("is_mixed", "pattern", "replacement"),
    [
        (False, r"!= -100", "!= 0"),
        (False, r"    return (\w+)\.to", r"    return 2 * \1.to"),
        (False, r"def loss_weight", "def weight_of_loss"),
        (False, r"\ndef split_inputs", "\nloss_weight = lambda inputs: torch.ones(())\n\ndef split_inputs"),
        (True, r"!= -100", "!= 0"),
        (True, r"(\w+) = (\w+)\.sum\(\)", r"\1 = \2.sum() + 1"),
    ],
)
def test_what_microbatches_are_put_together_by(is_mixed: bool, pattern: str, replacement: str) -> None:
    """Breaks if the weight of a microbatch's loss, or what all of them read of the batch, may be another."""
    plan = in_microbatches(is_mixed)
    text = re.sub(pattern, replacement, str(plan.source), count=1)
    assert text != plan.source
    check_types(text, plan.interface, identity=False)
    name = "of_batch" if is_mixed else "loss_weight"
    with pytest.raises(AutoparError, match=f"its {name} is another than was planned") as found:
        check_types(text, plan.interface)
    assert "AUTOPAR_CHECK=types" in str(found.value)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_what_is_said_of_the_batch_in_other_words(is_mixed: bool, tmp_path: Path) -> None:
    """Breaks if comments are taken for code, or if what is said of the batch is lost with the plan's file."""
    plan = in_microbatches(is_mixed)
    head, name, tail = str(plan.source).partition("of_batch(" if is_mixed else "loss_weight(")
    check_types(
        head + name + tail.replace('"""', '"""In other words: ', 1).replace("  # i64[", "  # of ", 1), plan.interface
    )
    plan.save(tmp_path / "plan.json")
    meaning = Plan.load(tmp_path / "plan.json").interface.meaning
    assert meaning is not None and [each for each, _ in meaning.before] == [name.removesuffix("(")]
    assert meaning == plan.interface.meaning


@pytest.mark.sampled(2)
@pytest.mark.moderate
@pytest.mark.parametrize("name", CELLS)
def test_a_plan_s_file_keeps_what_is_meant(name: str, tmp_path: Path) -> None:
    """Breaks when a program is checked against less after its plan was saved, or old plans are not read."""
    plan = planned(name)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.interface.meaning == plan.interface.meaning and again.interface.meaning is not None
    again.check()


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("change", "said"),
    [({"shape": (8, 16, 256)}, r"\(8, 16, 256\)"), ({"differentiable": True}, "a gradient is handed in")],
)
def test_outputs_of_the_interface_that_were_not_planned(change: dict[str, Any], said: str) -> None:
    """Breaks when an interface may have an output with its padding, or take a gradient that the program then loses."""
    plan = planned("llama")
    outputs = list(plan.interface.outputs)
    place = next(i for i, entry in enumerate(outputs) if entry.name == "logits")
    outputs[place] = replace(outputs[place], **change)
    with pytest.raises(AutoparError, match=rf"an output of its interface .*\(logits\)\. .*{said}"):
        check_types(plan.source, replace(plan.interface, outputs=tuple(outputs)))


def test_plans_that_cannot_be_compared() -> None:
    """Breaks when a plan from before there were terms, or of a Python that counts otherwise, is refused."""
    plan = planned("llama")
    text = edited(plan.source, "loss = loss / count", "loss = loss")
    other = replace(plan.interface.meaning or Meaning((), (), ()), scheme=1)
    for meaning in (None, other):
        check_types(text, replace(plan.interface, meaning=meaning))


@pytest.mark.moderate
def test_another_program_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when there is no way to run what computes something else on purpose."""
    plan, program, file = planned("llama"), tmp_path / "program.py", tmp_path / "plan.json"
    plan.save(file)
    program.write_text(edited(plan.source, "loss = loss / count", "loss = loss"))
    run = CliRunner().invoke
    assert run(app, ["check", str(program), "--plan", str(file)]).exit_code == 1
    assert run(app, ["check", str(program), "--plan", str(file), "--types-only"]).exit_code == 0
    monkeypatch.setenv("AUTOPAR_CHECK", "types")
    found = environment.read()
    assert found.types and not found.identity and not found.check


def test_an_error_names_what_differs() -> None:
    """Breaks when one who edited a program does not learn which gradients are others."""
    plan = planned("llama")
    text = edited(plan.source, r"grad_mul \* act_fn", "grad_mul * up_proj", "grad_up_proj")
    with pytest.raises(AutoparError, match=r"another gradient .*\(model\.layers\.1\..* and \d+ more\)"):
        check_types(text, plan.interface)


@pytest.mark.moderate
@pytest.mark.parametrize("name", CELLS)
def test_what_was_planned_is_enough(name: str) -> None:
    """Breaks when all that something may be is looked for, where what was planned would do: a check took three times as
    long.
    """
    plan = planned(name)
    program._check(plan.source, plan.interface, "<planned>", hinted=True)


@pytest.mark.moderate
def test_what_another_program_asked_of_such_operands() -> None:
    """Breaks when a call that some other plan has on operands of the same shapes is taken for this one's: what was
    planned is not enough then, and all is looked for.
    """
    loaded = catalogue.load("llama", tiny=True, device="meta")
    strategy = {"pp": "pipeline", "tp": "tensor"}
    autopar.plan(loaded.model, Mesh({"pp": 2, "tp": 2}, hardware="cpu"), example_inputs=loaded.batch, strategy=strategy)
    test_what_was_planned_is_enough("t5")


@pytest.mark.moderate
def test_rows_of_which_only_later_is_seen_whose_they_are() -> None:
    """Breaks when positions that may be those of either axis are taken for the first one's: they turn out to be the
    other's, and all is asked a second time.
    """
    loaded = catalogue.load("whisper", tiny=True, device="cpu")
    strategy = {"dp": "ddp", "tp": "tensor"}
    mesh = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)
    program._check(plan.source, plan.interface, "<planned>", hinted=True)


def test_what_is_something_else_than_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a program is refused because something in it may be a thing that was planned, and is another one."""
    plan = planned("llama")
    monkeypatch.setattr(part, "calls_on", lambda target, operands: ())
    monkeypatch.setattr(infer.Inference, "_is_planned", lambda self, term: True)
    with pytest.raises(AutoparError, match="the program is not right"):
        program._check(plan.source, plan.interface, "<planned>", hinted=True)
    check_types(plan.source + "\n# read again\n", plan.interface)


@pytest.mark.moderate
def test_whole_tensors_and_an_offset() -> None:
    """Breaks when an operator on whole tensors counts as a whole one, though each rank is told another place."""
    loaded = catalogue.load("gpt2", tiny=True, device="cpu")
    plan = autopar.plan(loaded.model, Mesh({"dp": 2}, hardware="cpu"), example_inputs=loaded.batch, strategy="ddp")
    text = edited(plan.source, r"(ops\.embedding\(.*)\)\s*$", r'\1, start=comm.index("dp"))', "wpe = ops")
    with pytest.raises(AutoparError, match="embedding on these parts is no part"):
        check_types(text, plan.interface)
