"""The table of planted faults keeps pace with the code, and the nets are asked as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mutations import plant
from benchmarks.mutations.table import ROOT, Fault, faults, wanted

TREE = "def least(a, b):\n    return a if a < b else b\n"
TEST = "from small import least\n\n\ndef test_least() -> None:\n    assert least(2, 1) == least(1, 2) == 1\n"
OPTIONS = 'def pytest_addoption(parser) -> None:\n    parser.addoption("--every-case", action="store_true")\n'


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault: Fault) -> None:
    """Breaks if code moved away from under a fault, or what is planted is no Python: nothing would be learned of it."""
    text = (ROOT / fault.file).read_text()
    assert fault.planted(text) != text
    assert fault.what and all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)
    assert not (ROOT / fault.file).is_symlink() and not fault.file.startswith(("autopar/passes/", "autopar/runtime/"))


def test_the_table_is_about_what_programs_mean() -> None:
    """Breaks if the habit withers: few faults, or none but of words and costs."""
    assert len(faults()) >= 100
    assert sum(fault.means for fault in faults()) >= len(faults()) // 2
    assert len({fault.area for fault in faults()}) >= 10
    with pytest.raises(ValueError, match="no fault and no area is called nonsense"):
        wanted("rules,nonsense")


def small_fault(new: str, old: str = "a < b") -> Fault:
    return Fault("least", "small", "small.py", old, new, "the least is another", ("test_small.py",), runs=False)


def test_text_that_is_not_there_once() -> None:
    """Breaks if a fault is planted nowhere, or in two places, without a word."""
    for old in ("a > b", "a"):
        with pytest.raises(ValueError, match="has the text to replace"):
            small_fault("b", old).planted(TREE)
    with pytest.raises(SyntaxError):
        small_fault("a <").planted(TREE)


class Here:
    """A folder in the place of a copy, in which nothing but pytest is run."""

    def __init__(self, folder: Path, answers: list[tuple[int | None, str]]) -> None:
        self.folder, self.answers, self.seen = folder, answers, list[str]()

    def run(self, arguments: list[str], limit_s: float) -> tuple[int | None, str]:
        self.seen.append((self.folder / "small.py").read_text())
        return self.answers.pop(0)


def test_a_fault_stands_in_the_copy_while_it_is_asked(tmp_path: Path) -> None:
    """Breaks if a fault is not there when tests run, stays there, or how they end is read wrongly."""
    (tmp_path / "small.py").write_text(TREE)
    copy = Here(tmp_path, [(1, "FAILED test_small.py::test_least - assert 2 == 1"), (0, "1 passed"), (None, "")])
    found = [plant.outcome_of(small_fault("a > b"), copy, plant.Nets(), None).tests for _ in range(3)]  # type: ignore[arg-type]
    assert found == ["test_small.py::test_least", "", plant.HANGS]
    assert (tmp_path / "small.py").read_text() == TREE and all("a > b" in text for text in copy.seen)


@pytest.mark.slow
def test_a_fault_is_caught_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Breaks if compiled text of the right file is taken for that of the fault, or a fault that hangs is waited for."""
    (tmp_path / "small.py").write_text(TREE)
    (tmp_path / "test_small.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text(OPTIONS)
    (tmp_path / "benchmarks" / "mutations").mkdir(parents=True)
    (tmp_path / "benchmarks" / "mutations" / "subjects.py").write_text('print("modules that were loaded: json")\n')
    copy = plant.Copy(tmp_path)
    try:
        endless = "[a for _ in iter(int, 1)] and a < b"
        found = [
            plant.tested(copy, ["test_small.py"], 60.0) or "",
            plant.outcome_of(small_fault("a > b"), copy, plant.Nets(), None).tests,
            plant.tested(copy, ["test_small.py"], 60.0) or "",
        ]
        with plant.planted(small_fault(endless), tmp_path):
            found.append(plant.tested(copy, ["test_small.py"], 5.0))
    finally:
        copy.close()
    assert found == ["", "test_small.py::test_least", "", plant.HANGS]


def test_results_are_kept_by_fault(tmp_path: Path) -> None:
    """Breaks if a run begins anew where one ended, or takes the result of a fault that has changed since."""
    path, fault = tmp_path / "kept.json", small_fault("a > b")
    plant.Kept(path).add("least", plant.Result(fault.digest, "-", "-", "", 1.0))
    kept = plant.Kept(path)
    assert kept.is_through(fault, plant.Nets()) and list(json.loads(path.read_text())) == ["least"]
    assert not kept.is_through(small_fault("a >= b"), plant.Nets())
