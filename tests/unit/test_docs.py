"""The pages name files that exist, and the pass that CONTRIBUTING.md shows works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
ROOMS = sorted(path.name for path in (ROOT / "autopar").iterdir() if path.is_dir() and path.name != "__pycache__")
OURS = {"autopar", "benchmarks", "docs", "examples", "tests", ".ci", *ROOMS}
"""What the paths of ours begin with."""
SUFFIXES = (".py", ".md", ".toml")
USERS = {"program.py", "plan.py", "measured.toml"}
"""Files that a reader is to write, or has written."""


def paths_of(text: str) -> Iterator[tuple[str, str]]:
    """The paths that a page names in backticks, alone or in a command, each with the folders named before it in its
    paragraph: `ir/sharding.py`, `tensor_type.py` is one folder.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\||\*\*))", prose):
        folders: list[str] = []
        for quoted in re.findall(r"`([^`\n]+)`", paragraph):
            for word in quoted.split():
                path = word.rstrip("/")
                if is_path(word):
                    yield path, " ".join(folders)
                if "/" in word and re.fullmatch(r"[\w./-]+", word):
                    folders.append(path.rpartition("/")[0] if path.endswith(SUFFIXES) else path)


def is_path(word: str) -> bool:
    """Whether a word is a path of ours: it begins with a folder of ours, or is the name of a file."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", word) or word in USERS:
        return False
    first, *others = word.split("/")
    if others:
        return first in OURS or word.endswith(SUFFIXES)
    return first.endswith(SUFFIXES) and not first.startswith("*")


def exists(path: str, folders: str, page: Path) -> bool:
    """Whether a path is there: from the root, from `autopar/`, from the page's folder, or from one named before it."""
    places = [Path(), Path("autopar"), page.parent.relative_to(ROOT)]
    places += [place / folder for folder in folders.split() for place in (Path(), Path("autopar"))]
    return any(any(ROOT.glob((place / path).as_posix())) for place in places)


def missing(text: str, page: Path) -> list[str]:
    return [path for path, folders in paths_of(text) if not exists(path, folders, page)]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    """Breaks if a file moves and a page still names its old place."""
    assert missing(page.read_text(encoding="utf-8"), page) == []


def test_paths_are_found_at_all() -> None:
    """Breaks if the reader of pages overlooks paths: the page of rooms names a hundred."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = {path for path, _ in paths_of(text)}
    assert len(found) > 90 and {"passes/place.py", "ir/redistribution.py", "decisions.py"} <= found


@pytest.mark.parametrize(
    "planted",
    ["passes/plaice.py", "autopar/ir/regions.py", "benchmarks/gaps.py", "autopar/rules/", "searching/worth.py",
     "regime.py", "planner/explain", "benchmarks/published/*.json"],
)  # fmt: skip
def test_a_path_that_is_not_there_is_found(planted: str) -> None:
    """Breaks if a wrong path passes: moved, of a folder that is gone, a bare name, a folder, a pattern."""
    page = ROOT / "docs" / "cost.md"
    text = f"{page.read_text(encoding='utf-8')}\nAs said (`{planted}`), and `python {planted}`.\n"
    assert missing(text, page) == [planted.rstrip("/")] * 2


def test_a_name_belongs_to_the_folders_of_its_paragraph() -> None:
    """Breaks if a bare name is looked for anywhere: then no name would ever be wrong."""
    page = ROOT / "docs" / "cost.md"
    assert missing("`ir/sharding.py`, `tensor_type.py`", page) == []
    assert missing("`ir/sharding.py`\n\n`tensor_type.py`", page) == ["tensor_type.py"]


class Repeats(nn.Module):
    """A model that does a thing twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu().relu().sum()


@pytest.mark.moderate
def test_the_pass_that_contributing_shows_works() -> None:
    """Breaks if what it imports moves, if it leaves the second relu in, or if the plan computes something else."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text[text.index("## Add a pass") :], flags=re.M | re.S)
    model, mesh, batch = Repeats(), autopar.Mesh({"dp": 2}, hardware="h100"), {"x": torch.ones(4, 8)}
    names: dict[str, Any] = {"autopar": autopar, "model": model, "mesh": mesh, "batch": batch}
    for block in blocks:
        exec(block, names)
    assert num_relus(names["plan"]) == 1 and names["plan"].verify().ok
    assert num_relus(autopar.plan(model, mesh, example_inputs=batch)) == 2


def num_relus(plan: autopar.Plan) -> int:
    """How many of them a plan's program has."""
    return sum(
        str(node.target) == "aten.relu.default" for region in plan.program.regions for node in region.graph.nodes
    )
