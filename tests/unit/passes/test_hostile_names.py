"""Names of modules, parameters and inputs are any text: programs, pictures and pages hold them as text and run nothing
of them.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.passes.emission.literals import inside, plain, quoted
from autopar.passes.emission.statements import identifier
from autopar.passes.emit import emit
from autopar.passes.outline import _identifier, _numbered

MARK = Path(tempfile.gettempdir(), "autopar_hostile_name")
RUNS = f'open("{MARK}", "w")'
NAMES = (
    'a"b', f'a"), {RUNS}, getattr(self, "b', f'x"); {RUNS}  #', f"{{{RUNS}}}", f'"""\n{RUNS}\n"""',
    "line\nbreak = 1", "back\\slash\\", "\\N{DASH}", "{0}", "%s", "</script><script>alert(1)//", "<!--", "-->", "&lt;",
    "class", "__import__", "ops", "comm", "torch", " two  spaces ", "r\r", "\x1b[31m", "[/b]", "\u2028", "\x7f",
    "\x01", "'", "`", "$",
)  # fmt: skip
"""Each a module's name. Letters beyond ASCII have a test of their own."""


class Block(nn.Module):
    """A sum over all names, parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(4, 4) for name in NAMES})
        for name in NAMES:
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for name in NAMES:
            y = y + self.inner[name](x) * getattr(self, name)
        return torch.tanh(y)


class Model(nn.Module):
    """Blocks under a hostile name, a parameter of two modules, inputs with any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList([Block(), Block()]))
        self.first, self.last = nn.ModuleDict({name: nn.Linear(4, 4)}), nn.ModuleDict({name: nn.Linear(4, 4)})
        self.last[name].weight = self.first[name].weight

    def forward(self, **inputs: Tensor) -> Tensor:
        x = self.first[self.name](inputs[self.name])
        for block in getattr(self, self.name):
            x = block(x)
        return self.last[self.name](x).square().mean()


class Writes(nn.Module):
    """A batch norm with a hostile name: its buffers are written."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inner = nn.ModuleDict({name: nn.BatchNorm1d(4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[self.name](x).square().mean()


class WritesAside(Writes):
    """It also counts where no gradients are recorded, which torch traces a second time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner[self.name].running_mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


MESHES = {
    "zero3": ({"dp": 2}, {"strategy": "zero3", "precision": "bf16"}),
    "parts": ({"dp": 2}, {"strategy": "zero2", "microbatches": 2}),
    "pipeline": ({"pp": 2, "dp": 2}, {"strategy": {"pp": "zero_bubble", "dp": "zero2"}, "microbatches": 2}),
}


@lru_cache
def plan_of(name: str, kind: str) -> Plan:
    """A plan of the model; never changed."""
    mesh, options = MESHES[kind]
    torch.manual_seed(0)
    batch = {name: torch.randn(8, 4)}
    return autopar.plan(Model(name), Mesh(mesh, hardware="cpu"), example_inputs=batch, **options)  # type: ignore[arg-type]


def strings_of(source: str) -> str:
    """All that a program's literals say."""
    found = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return "\0\0".join(text for text in found if isinstance(text, str))


@pytest.mark.moderate
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", [NAMES[2], NAMES[3], NAMES[4]], ids=["quote", "brace", "docstring"])
def test_programs_with_hostile_names(name: str, kind: str) -> None:
    """Breaks if a name ends a literal, a comment or an f-string: the program is broken, runs it, or names another."""
    plan = plan_of(name, kind)
    tree = ast.parse(plan.source)
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert "open" not in calls
    texts = strings_of(plan.source)
    assert all(f"inner.{each}.weight" in texts for each in NAMES)
    proof = plan.verify()
    assert proof.ok, str(proof)
    assert not MARK.exists()


@pytest.mark.moderate
@pytest.mark.parametrize("name", [f'a"), {RUNS}, getattr(self, "b', "a\nb", "a\\b", "a b{0}'"])
def test_names_that_torch_would_run(name: str) -> None:
    """Breaks if a model is traced through a program that torch writes with the names as they are, and runs."""
    mesh, batch = Mesh({"dp": 2}, hardware="cpu"), {"x": torch.randn(4, 4)}
    for model in (Writes(name), WritesAside(name)):  # the second is traced twice
        assert autopar.plan(model, mesh, example_inputs=batch).verify().ok
    assert not MARK.exists()
    with pytest.raises(AutoparError, match="inputs whose names torch cannot write down"):
        autopar.plan(Anything(name), mesh, example_inputs={name: torch.randn(4, 4)})
    assert not MARK.exists()


class Anything(WritesAside):
    """An input of any name."""

    def forward(self, **inputs: Tensor) -> Tensor:
        return super().forward(inputs[self.name])


class Counts(nn.Module):
    """A buffer, one that is not saved, a parameter and a plain tensor, beside numbers that forward writes down; what
    it writes is traced twice.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.layer = nn.Linear(4, 4)
        self.register_buffer(names[0], torch.zeros(4))
        self.register_buffer(names[1], torch.zeros(4), persistent=False)
        self.register_parameter(names[2], nn.Parameter(torch.ones(4)))
        object.__setattr__(self, names[3], torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        kept, passing, scale, plain = (getattr(self, name) for name in self.names)
        h = self.layer(x)
        with torch.no_grad():
            kept.mul_(0.9).add_(0.1 * h.mean(0))
            passing.view(2, 2).add_(torch.tensor([1.0, 2.0]))
        return ((h - kept - passing) * scale + plain).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(
    "names",
    [("code", "_graph", "recompile", "graph"), ("held_4", "held_5", "held_6", "meta")],
    ids=["public", "ours"],
)
def test_names_that_torchs_graphs_have(names: tuple[str, ...]) -> None:
    """Breaks if what torch traces a second time keeps the model's names, which are attributes of its own module; if a
    name comes back as another's, or if checks of dtypes are read as others in the proof.
    """
    model = Counts(*names)
    plan = autopar.plan(model, Mesh({"dp": 2}, hardware="cpu"), example_inputs={"x": torch.randn(4, 4)})
    proof = plan.verify()
    assert proof.ok, str(proof)
    assert {f"buffer {name}" for name in names[:2]} <= {row.name for row in proof.comparisons}


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["zero3", "pipeline"])
def test_what_is_shown_of_hostile_names(kind: str, tmp_path: Path) -> None:
    """Breaks if a name ends a script, a label of a picture or a text of a trace, or if a plan's file changes it."""
    plan = plan_of(NAMES[1], kind)
    loaded = Plan.from_json(plan.to_json())
    assert loaded.to_json() == plan.to_json()
    for text in (str(loaded), str(loaded.holds(rank=0)), str(plan.explain("cost"))):
        assert "\x1b" not in text
    assert "[/b]" in str(loaded.holds(rank=0))
    for detail in ("overview", "operator"):
        drawn = loaded.visualize(tmp_path / f"{detail}.svg", detail=detail)
        if drawn.suffix == ".gv":
            continue  # nothing on this machine draws
        picture = ElementTree.parse(drawn)
        assert not [each.tag for each in picture.iter() if each.tag.endswith("script")]
    page = loaded.report(tmp_path / "page.html", explain_s=0.0, memory_factors=()).read_text()
    assert len(re.findall("<script", page)) == len(re.findall("</script>", page))
    assert "<script>alert" not in page and "<!--" not in page.replace("<!-- ", "")
    trace = json.loads(loaded.trace(tmp_path / "trace.json").read_text())
    assert trace["traceEvents"]
    assert not MARK.exists()


@pytest.mark.parametrize("text", [*NAMES, "\0", "größe ☃", "ﬁ", "\ud800", "²", "𝔘", "", "1a", 'b\\"'])
def test_literals(text: str) -> None:
    """Breaks if a literal is read back as another text, a comment has two lines, or a variable is no identifier."""
    assert ast.literal_eval(quoted(text)) == text
    assert eval(f'f"{inside(text)}"', {"__builtins__": {}}) == text
    assert len(f"# {plain(text)}".splitlines()) == 1
    for name in (identifier(text), _identifier(text)):
        assert name.isidentifier() and "\n" not in name


def test_identifiers_stay() -> None:
    """Breaks if a name that serves is changed."""
    assert [identifier(each) for each in ("q_proj", "größe", "x.0", "_1")] == ["q_proj", "größe", "x_0", "_1"]


def test_regions_of_one_name() -> None:
    """Breaks if the number behind a name that serves twice makes it that of a third."""
    found = _numbered({"a": "x", "b": "x", "c": "x_1"})
    assert len(set(found.values())) == 3


class Cased(nn.Module):
    """Two lists whose names differ in their case, one that is called as a table of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("part", 8), ("Part", 4), ("stagess", 2), ("STAGES", 6)):
            self.add_module(name, nn.ModuleList([nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for _ in "ab"]))

    def forward(self, x: Tensor) -> Tensor:
        for name in ("part", "Part", "stagess", "STAGES"):
            for block in getattr(self, name):
                x = block(x)
        return x.sum()


@pytest.mark.moderate
def test_tables_of_one_name() -> None:
    """Breaks if tables of two regions have one name, so that the last serves both, or one is taken for the stages'."""
    model: Any = Cased()
    batch = {"x": torch.randn(4, 8)}
    plan = autopar.plan(model, Mesh({"dp": 2}, hardware="cpu"), example_inputs=batch, strategy="zero3")
    titles = re.findall(r"^(\w+) = \{", plan.source, re.MULTILINE)
    assert len(titles) == len(set(titles)) and "STAGES" not in titles
    assert plan.verify().ok


@pytest.mark.moderate
def test_a_title_stays_in_its_docstring() -> None:
    """Breaks if the name of a model's class ends the docstring on top of the program."""
    plan = plan_of(NAMES[0], "zero3")
    assert plan.program is not None
    title = f'"""\n{RUNS}\n"""\\'
    source = emit(plan.program, strategies=plan.strategies, title=title)
    assert (ast.get_docstring(ast.parse(source), clean=False) or "").startswith(title)
