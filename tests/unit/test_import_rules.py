"""The checker of imports (.ci/check_imports.py), on trees with faults planted in them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

CHECKER = Path(__file__).parents[2] / ".ci" / "check_imports.py"


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", CHECKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rules_of(checker: ModuleType, path: str, text: str) -> list[str]:
    return [rule for _, rule in checker.of_file(path, checker.reached_by(ast.parse(text)))]


@pytest.mark.parametrize(
    ("module", "target", "breach"),
    [
        ("autopar.planner.decide", "autopar.views.text", "does not stand below"),
        ("autopar.views.text", "autopar.planner.decide", None),
        ("autopar.passes.place", "autopar.runtime.comm", "does not stand below"),
        ("autopar.base.text", "autopar.solver.problem", "does not stand below"),
        ("autopar.passes.emit", "autopar.passes.place", "step of the pipeline"),
        ("autopar.passes.emission.functions", "autopar.passes.place", "step of the pipeline"),
        ("autopar.passes.emit", "autopar.passes.placement.problem", "serves place only"),
        ("autopar.passes.place", "autopar.passes.placement.problem", None),
        ("autopar.passes.place", "autopar.passes.nodes", None),
    ],
)
def test_rooms_stand_in_an_order(checker: ModuleType, module: str, target: str, breach: str | None) -> None:
    """Breaks if a room may import what does not stand below it, or a pass another pass."""
    floor = {room: number for number, rooms in enumerate(checker.ORDER) for room in rooms}
    found = list(checker.of_edge(module, target, floor, {"place", "emit"}))
    assert (not found) if breach is None else (len(found) == 1 and breach in found[0])


def test_imports_for_types_and_inside_functions_count(checker: ModuleType) -> None:
    """Breaks if an edge can hide under TYPE_CHECKING, in a function, or behind a name that a module defines."""
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from autopar.b import Name
def late():
    import autopar.c
    from autopar import d
"""
    modules = {f"autopar.{name}": f"autopar/{name}.py" for name in "abcd"}
    edges = dict(checker.edges_of("autopar.a", checker.reached_by(ast.parse(text)), modules))
    assert edges == {"autopar.b": 4, "autopar.c": 6, "autopar.d": 7}


def test_circles_are_found_wherever_they_begin(checker: ModuleType) -> None:
    """Breaks if a circle is missed that does not go through the file where the search begins."""
    line = {"a": {"b": 1}, "b": {"c": 1}, "c": {"d": 1}, "d": {}}
    assert not list(checker.circles(line))
    (circle,) = checker.circles({**line, "d": {"b": 1}})
    assert circle == ["b", "c", "d", "b"]


def test_what_one_file_may_not_do(checker: ModuleType) -> None:
    """Breaks if private torch, transformers, the environment or late imports pass outside their rooms."""
    assert rules_of(checker, "autopar/ir/a.py", "import torch\ntorch._guards") != []
    assert rules_of(checker, "autopar/ir/a.py", "from torch._guards import x") != []
    assert rules_of(checker, "autopar/base/torch_compat/a.py", "from torch._guards import x") == []
    assert rules_of(checker, "autopar/cli/a.py", "import transformers") != []
    assert rules_of(checker, "autopar/runtime/a.py", "import accelerate") != []
    assert rules_of(checker, "autopar/integrations/a.py", "import transformers, accelerate") == []
    assert rules_of(checker, "autopar/cost/a.py", "import os\nos.environ['RANK']") != []
    late = "def f():\n    from autopar.ir import program"
    assert rules_of(checker, "autopar/cost/a.py", late) == ["autopar.ir.program is imported inside a function"]
    assert rules_of(checker, "autopar/cli/a.py", late) == []
    deep = "class A:\n async def f(self):\n  if self:\n   def g():\n    import autopar.ir.program"
    assert rules_of(checker, "autopar/cost/a.py", deep) == ["autopar.ir.program is imported inside a function"]
    called = "def f():\n    return importlib.import_module('transformers')"
    assert "transformers is imported in" in rules_of(checker, "autopar/cost/a.py", called)[0]
    assert rules_of(checker, "autopar/views/a.py", "def f():\n    import matplotlib") == []


@pytest.mark.moderate
def test_lists_name_what_exists(checker: ModuleType) -> None:
    """Breaks if a list keeps a name that is gone, which would let a new file of that name in unseen."""
    trees, _ = checker.read()
    modules = {checker.module_of(path): path for path in trees}
    assert list(checker.of_lists(modules, {"place"})) == []
    assert any("no_such_pass" in breach for breach in checker.of_lists(modules, {"no_such_pass"}))
