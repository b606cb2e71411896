"""What a watched run writes down: lines, the file of now, events; and what happens where it cannot."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autopar.runtime.added import Added, Grown
from autopar.runtime.watch.metrics import LINES, NOW, Metrics, Row, openmetrics, tokens_in

ROW = Row(
    step=3, time_s=1e9, loss=2.5, norm=None, step_s=0.5, plans_s=0.0, saves_s=0.125, waited_s=0.25, least_by=1,
    tokens=4096, tokens_per_s=8192.0, memory_bytes=1 << 30, rate=1e-3, skipped=False, num_skipped=2, num_late=0,
)  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LINES).read_text().splitlines()]


def test_a_line_for_each_step(tmp_path: Path) -> None:
    """Breaks if a step has no line of its own, or what a run wrote before is lost when it goes on."""
    for steps in ((0, 1), (1, 2)):
        metrics = Metrics(tmp_path / "run", {})
        for step in steps:
            metrics.write(replace(ROW, step=step))
        metrics.close()
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 1, 2]
    assert lines(tmp_path / "run")[0]["loss"] == 2.5 and lines(tmp_path / "run")[0]["norm"] is None


def test_half_a_line_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """Breaks if the first line of a run that goes on is glued to what a killed one had begun."""
    (tmp_path / LINES).write_text('{"step": 1, "lo')
    metrics = Metrics(tmp_path, {})
    metrics.write(ROW)
    metrics.close()
    torn, whole = (tmp_path / LINES).read_text().splitlines()
    assert torn == '{"step": 1, "lo' and json.loads(whole)["step"] == 3


def test_openmetrics(tmp_path: Path) -> None:
    """Breaks if the text is none of the format's: names, types, units, escapes, the end; or counters do not add up."""
    metrics = Metrics(tmp_path, {"run": 'a "b"\\c'})
    for _ in range(3):
        metrics.write(ROW)
    metrics.close()
    text = (tmp_path / NOW).read_text()
    assert text.endswith("# EOF\n") and not list(tmp_path.glob(".*"))
    samples = dict(re.findall(r'^(\w+)\{run="a \\"b\\"\\\\c"\} (\S+)$', text, re.M))
    assert samples["autopar_step"] == "3.0" and samples["autopar_gradient_norm"] == "NaN"
    assert samples["autopar_tokens_total"] == "12288.0" and samples["autopar_save_stall_seconds_total"] == "0.375"
    assert samples["autopar_skipped_steps_total"] == "2.0"
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M):
        assert f"{name}_total" in samples if kind == "counter" else name in samples


def test_the_official_parser_reads_it() -> None:
    """Breaks if Prometheus' own parser of OpenMetrics refuses the text."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = openmetrics(ROW, {}, {"run": "x"})
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["autopar_tokens"].type == "counter" and families["autopar_step_seconds"].unit == "seconds"


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if its writer, where there is one, does not get each number under the step's number."""
    got: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
            got.append((tag, value, step))

        def close(self) -> None:
            got.append(("closed", 0.0, 0))

    module: Any = ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter
    package: Any = ModuleType("torch.utils.tensorboard")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    metrics = Metrics(tmp_path, {})
    metrics.write(ROW)
    metrics.close()
    assert ("autopar/loss", 2.5, 3) in got and ("autopar/skipped", 0.0, 3) in got and got[-1][0] == "closed"
    assert not any(tag == "autopar/norm" for tag, _, _ in got)


def test_events_are_read_back(tmp_path: Path) -> None:
    """Breaks if TensorBoard itself, where it is installed, does not find the loss."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tmp_path, {})
    metrics.write(ROW)
    metrics.close()
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("autopar/loss")] == [(3, 2.5)]


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if a disk that is full, or a folder that is none, ends a run, or is told at every step."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "autopar"):
        metrics = Metrics(tmp_path / "file", {})
        for _ in range(3):
            metrics.write(ROW)
        metrics.close()
    assert len([record for record in caplog.records if "metrics are not written" in record.message]) == 1


def test_tokens() -> None:
    """Breaks if masks or pictures count as tokens, a row that was only added does, or batches without tokens do not."""
    ids, mask = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.bool)
    assert tokens_in({"mask": mask, "input_ids": ids}, None) == 32
    assert tokens_in({"input_ids": ids}, Added({"input_ids": (Grown(0, 3, 4),)}, ())) == 24
    both = Added({"input_ids": (Grown(1, 5, 8), Grown(0, 3, 4))}, ())
    assert tokens_in({"input_ids": ids}, both) == 15
    assert (
        tokens_in(
            {"scale": torch.zeros(()), "x": torch.zeros(5, 3, 2, 2), "y": torch.zeros(5, dtype=torch.int64)}, None
        )
        == 5
    )
