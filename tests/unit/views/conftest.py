"""The `golden` fixture of Graphviz texts, and small plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`golden(text)`: the text equals golden/<test's name>.gv; `--update-golden` writes it instead."""
    name = request.node.name.removeprefix("test_").replace("[", "_").removesuffix("]")
    path = Path(__file__).parent / "golden" / f"{name}.gv"

    def check(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path.name} yet: run with --update-golden and look at what it draws"
        assert text == path.read_text("utf-8"), f"{path.name} differs: if that is meant, run with --update-golden"

    return check


def make_plan(name: str, mesh: str = "dp=2,tp=2", **options: object) -> Plan:
    """The plan of a tiny model."""
    loaded = catalogue.load(name, tiny=True)
    parsed = autopar.Mesh.parse(mesh, hardware="h100")
    return autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def mlp() -> Plan:
    return make_plan("mlp", strategy={"dp": "zero3", "tp": "tensor"})


@pytest.fixture(scope="session")
def llama() -> Plan:
    return make_plan("llama", strategy={"dp": "zero3", "tp": "tensor+sequence"}, microbatches=2)
