"""The generated program as a text: short however deep the model, deterministic, readable, and what really runs."""

from __future__ import annotations

import ast
import re

import pytest
import torch

import autopar
from autopar.api import proof
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from tests.unit.traced import MODELS, lower

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")


def plan_of(name: str, strategy: object = "product", **overrides: object) -> Plan:
    chosen = {"dp": "zero3", "tp": "tensor"} if strategy == "product" else strategy
    loaded = catalogue.load(name, tiny=True, device="cpu", overrides=overrides or None)
    return autopar.plan(loaded.model, MESH, example_inputs=loaded.batch, strategy=chosen)  # type: ignore[arg-type]


def functions(source: str) -> dict[str, str]:
    """name -> text, comments included."""
    lines = source.splitlines()
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in found}


@pytest.mark.slow
def test_depth_changes_only_counts() -> None:
    """Breaks if the program grows with depth: 2 and 32 layers differ in the header's and the loops' numbers alone."""
    shallow, deep = (plan_of("llama", num_hidden_layers=count).source for count in (2, 32))
    assert functions(shallow).keys() == functions(deep).keys()

    def without_counts(source: str) -> str:
        text = re.sub(r"× \d+", "× N", re.sub(r"called \d+ times", "", source))
        for count in r"(range\()\d+", r"(if i < )\d+", r"(layers\.)\d+":
            text = re.sub(count, r"\1N", text)
        return text

    assert "range(32)" in deep and "range(2)" in shallow
    assert without_counts(shallow) == without_counts(deep)


@pytest.mark.parametrize("name", MODELS)
def test_one_function_set_for_each_distinct_region(name: str) -> None:
    """Breaks if a layer is written twice, or a region lacks its functions."""
    lowered = lower(name, "dp=2,tp=2", "product")
    found = functions(lowered.source)
    for region in lowered.program.regions:
        assert {f"{region.name}_gather", f"{region.name}_forward", f"{region.name}_backward"} <= found.keys()
    names = [node.name for node in ast.parse(lowered.source).body if isinstance(node, ast.FunctionDef)]
    assert len(names) == len(set(names))
    owners = {region.name for region in lowered.program.regions}
    loose = {n for n in names if not any(n.startswith(f"{owner}_") for owner in owners)}
    assert loose == {"split_inputs", "forward", "backward"}


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("name", "strategy"), [pytest.param("gpt2", "auto", marks=pytest.mark.slow), ("cnn", "product")]
)
def test_two_plans_give_one_text(name: str, strategy: str) -> None:
    """Breaks if anything between capture and emission depends on ids, hashes or time."""
    assert plan_of(name, strategy).source == plan_of(name, strategy).source


def test_every_value_has_its_shape_and_origin() -> None:
    """Breaks if comments stop to say how values lie, or which line of the model they come from."""
    text = functions(lower("llama", "dp=2,tp=2", "product").source)["layer_forward"]
    statements = [line for line in text.splitlines()[1:] if " = " in line and not line.strip().startswith("#")]
    assert all(re.search(r"# \w+\[", line) for line in statements)
    assert re.search(r"# model\.layers\.\*\.self_attn \(modeling_llama\.py:\d+-\d+\)", text)
    assert "+tp" in text and "/dp" in text


@pytest.mark.moderate
def test_the_text_is_what_runs() -> None:
    """Breaks if something beside the text runs: an edit must change the numbers, and the proof must notice; or if one
    with which the text does not run ends in an error of Python's that names no line.
    """
    plan = plan_of("mlp")
    assert plan.verify().ok
    same = plan.with_source(plan.source.replace("Written by autopar", "Edited by hand"))
    assert same.source_is_edited and same.verify().ok
    line = next(line for line in functions(plan.source)["layer_forward"].splitlines() if "all_reduce" in line)
    assert plan.source.count(line) == 1
    wrong = plan.with_source(plan.source.replace(line, line.replace(")  ", ") * 1.001  ")))
    assert wrong.source != plan.source
    proof = wrong.verify()
    assert not proof.ok
    with pytest.raises(AutoparError, match=r"does not compute what the model computes: \d+ of \d+ tensors differ"):
        proof.raise_on_failure()
    torn = plan.with_source(plan.source.replace(line, line.replace(" = ", " = nowhere + ")))
    with pytest.raises(AutoparError, match=r"does not run: name 'nowhere' is not defined \(line \d+\)"):
        torn.verify()


@pytest.mark.moderate
def test_an_edit_that_drops_a_collective_is_noticed() -> None:
    """Breaks if a lost reduction goes unnoticed: replicas that should be equal are compared."""
    plan = plan_of("mlp")
    call = re.search(r"comm\.all_reduce\((\w+), \"tp\"\)", functions(plan.source)["layer_backward"])
    edited = plan.with_source(plan.source.replace(call[0], call[1]))
    try:
        assert not edited.verify().ok
    except AutoparError as error:
        assert "replicas differ" in str(error)


@pytest.mark.moderate
def test_precision_is_in_the_text_that_runs() -> None:
    """Breaks if parameters that are stored in float32 are computed with as stored, gradients of microbatches are added
    in bfloat16, or the runtime takes parameters for what they are computed with.
    """
    loaded = catalogue.load("mlp", tiny=True, device="cpu")
    mesh, batch = Mesh({"dp": 2}, hardware="cpu"), loaded.batch
    state = dict(loaded.model.state_dict())
    found = {}
    for precision in ("fp32", "bf16"):
        plan = autopar.plan(
            loaded.model, mesh, example_inputs=batch, strategy="zero3", precision=precision, microbatches=2
        )
        found[precision] = proof.run_all_ranks(plan.interface, plan.source, state, batch, 0)
        assert {entry.dtype for entry in plan.interface.parameters} == {"float32"}
    text = functions(plan.source)
    assert "state[at + name].to(torch.bfloat16)" in text["layer_gather"]
    assert "sums.pop(at + name).to(torch.bfloat16)" in text["layer_reduce"]
    assert text["backward"].count("comm.accumulate(") == text["backward"].count("dict.fromkeys(g, torch.float32)") == 2
    for name, wide in found["fp32"].gradients.items():
        narrow = found["bf16"].gradients[name].float()
        assert torch.linalg.norm(narrow - wide) < 2**-4 * torch.linalg.norm(wide)
    assert not torch.equal(found["bf16"].gradients["classifier.bias"], found["fp32"].gradients["classifier.bias"])


@torch.library.custom_op("autopar_tests::sin", mutates_args=())
def _thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


_thrice.register_fake(torch.empty_like)
_thrice.register_autograd(lambda context, gradient: 3 * gradient)


class Borrowed(torch.nn.Module):
    """Uses an operator of a library of its own, which has the name of one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _thrice(self.up(x)).square().sum()


@pytest.mark.moderate
def test_operators_of_other_libraries_are_called_by_their_own_names() -> None:
    """Breaks if a library's operator is written as torch's of that name, or by a name that the program does not know:
    `mylib::sin` was `torch.sin`, and `mylib::other` a NameError.
    """
    plan = autopar.plan(
        Borrowed(), Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(4, 8)}, strategy="ddp"
    )
    assert "torch.ops.autopar_tests.sin.default(" in plan.source
    assert plan.verify().ok
