"""Bad input where the mesh has a pipeline: each error says what was asked, the numbers that decide, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.cli.main import app
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.strategies.names import Strategy, pipeline
from tests.unit.commands import error_of


def plan_of(
    strategy: Strategy = "pipeline(1f1b)",
    mesh: str = "pp=2,dp=2",
    *,
    model: str = "mlp",
    layers: int = 4,
    rows: int = 8,
    **options: Any,
) -> Plan:
    overrides: Mapping[str, object] = {"num_layers": layers} if model == "mlp" else {}
    loaded = catalogue.load(model, tiny=True, device="cpu", batch=(rows, 16), overrides=dict(overrides))
    parsed = Mesh.parse(mesh, hardware="h100")
    return autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, strategy=strategy, **options)


@pytest.mark.moderate
def test_more_stages_than_pieces() -> None:
    """Breaks if the message does not say how many pieces there are, and what would do."""
    assert error_of(plan_of, mesh="pp=16", microbatches=1) == (
        "16 pipeline stages cannot be cut from a model of 13 pieces. blocks, calls of modules with parameters and "
        "operators that read some are pieces, pp=16, 1 stage a rank. use pp=13 or less or a model with more layers."
    )
    assert error_of(plan_of, "pipeline(interleaved, 7)", "pp=2", microbatches=4).endswith(
        "7 stages a rank. use a schedule with fewer stages a rank or a model with more layers."
    )
    assert "16 pipeline stages" in error_of(plan_of, "pipeline(greedy, 4)", "pp=4", microbatches=4)
    assert "16 pipeline stages" in error_of(plan_of, "pipeline", "pp=16")
    assert "a model of 3 pieces" in error_of(plan_of, mesh="pp=4", model="cnn", microbatches=1)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "message"),
    [
        ("1f1b", 3, "a batch of 8 rows cannot be cut into 3 microbatches. use 2 or 4 microbatches, or a batch that is"),
        ("1f1b", 16, "a batch of 8 rows cannot be cut into 16 microbatches. use 8 microbatches, or a batch"),
        ("dualpipev", 2, "does not take 2 microbatches.* Each stage needs one: there are 4. Take 4 microbatches"),
        ("interleaved", 0, "0 microbatches. use 1 or more"),
        ("pipeline(gpipe, 2)", None, "gpipe takes 1 stages per rank, not 2.* Take 1, or interleaved or zero_bubble"),
        ("pipeline(interleaved, 1)", None, "interleaved takes at least 2 stages per rank, not 1"),
        ("pipeline(greedy, 9)", None, "greedy takes 1 to 4 stages per rank, not 9. use fewer"),
        ("pipeline(zbv, 3)", 4, "zbv takes 2 stages per rank, not 3"),
        ("pipeline(interleaved, 0)", 4, "needs ranks, stages and microbatches"),
        ("pipeline(2f2b)", None, "unknown pipeline schedule '2f2b'. known: auto, gpipe, 1f1b"),
        ("pipeline(1f1b", None, "unknown strategy 'pipeline.1f1b'.* pp takes pipeline, or pipeline.1f1b."),
    ],
)
def test_numbers_that_do_not_go_together(strategy: str, microbatches: int | None, message: str) -> None:
    """Breaks if they surface as errors from inside a pass, or without the nearest numbers that would do."""
    assert re.match(f"[^.]*{message}", error_of(plan_of, strategy, microbatches=microbatches), re.DOTALL)


def test_a_schedule_that_no_number_of_microbatches_of_this_batch_suits() -> None:
    """Breaks if the error does not name the numbers into which the batch could be cut."""
    message = error_of(plan_of, "dualpipev", "pp=4", layers=8, rows=6)
    assert message.startswith("no number of microbatches suits pipeline(dualpipev). a batch of 6 rows over 1 rank")
    assert "1, 2, 3, 6" in message and "Take 8 microbatches" in message
    message = error_of(plan_of, "pipeline(interleaved)", "pp=4", layers=8, rows=9, microbatches=9)
    assert message.startswith("The schedule interleaved does not take 9 microbatches") and "Take 8 or 10" in message


@pytest.mark.parametrize(
    ("strategy", "mesh", "message"),
    [
        ({"pp": "zero2"}, "pp=2,dp=2", "the mesh axis pp is the pipeline's, it cannot be zero2"),
        ({"dp": "pipeline"}, "pp=2,dp=2", "a pipeline runs over the mesh axis pp, not over dp"),
        ({"dp": "zbv"}, "pp=2,dp=2", "a pipeline runs over the mesh axis pp, not over dp"),
        ("pipeline", "dp=2", "pipeline needs a mesh axis pp. mesh: dp=2. name one: --mesh pp=2,dp=2"),
        ({"pp": "1f1b"}, "dp=2", "pipeline(1f1b) needs a mesh axis pp"),
        ({"pp": "1f1b", "ep": "ddp"}, "pp=2,dp=2", "the strategy names axis 'ep', which the mesh does not have"),
    ],
)
def test_strategies_of_other_axes(strategy: Strategy, mesh: str, message: str) -> None:
    """Breaks if pp is given to another strategy, or a pipeline to another axis, without a word."""
    assert error_of(plan_of, strategy, mesh).startswith(message)


ROWS = {
    "good": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "one row": "0F0,0B0\n",
    "cell": "0F0,0Q0\n1F0,1B0\n",
    "unknown stage": "0F0,0B0\n2F0,2B0\n",
    "missing": "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
    "deadlock": "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
    "many": ",".join([f"{s}F0" for s in range(0, 14, 2)] + [f"{s}B0" for s in range(12, -1, -2)])
    + "\n"
    + ",".join([f"{s}F0" for s in range(1, 14, 2)] + [f"{s}B0" for s in range(13, 0, -2)]),
    "empty": "",
}


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("one row", "A pipeline schedule has one row for each rank (pipeline schedule {path}). It has 1 row"),
        ("cell", "'0Q0' is no action of a pipeline schedule (pipeline schedule {path}, row 1, column 2)."),
        ("unknown stage", "Stage 1 is nowhere computed (pipeline schedule {path}). There are 3 stages."),
        ("missing", "Stage 0 has no backward of microbatch 1 (pipeline schedule {path})."),
        ("deadlock", "The schedule deadlocks: 2 of its 2 ranks cannot go on (pipeline schedule {path}). rank 0 stands "
                     "at 0B0, which waits for 1B0 of rank 1; rank 1 stands at 1F1, which waits for 0F1 of rank 0."),
        ("many", "14 pipeline stages cannot be cut from a model of 13 pieces"),
        ("empty", "A pipeline schedule has one row for each rank (pipeline schedule {path})."),
    ],
)  # fmt: skip
def test_schedules_from_files(rows: str, message: str, tmp_path: Path) -> None:
    """Breaks if a file that is no schedule gets as far as the ranks, or the error does not name the place in it."""
    path = tmp_path / "schedule.csv"
    path.write_text(ROWS[rows])
    assert error_of(plan_of, f"pipeline({path})").startswith(message.format(path=path))


@pytest.mark.moderate
def test_a_file_that_is_not_there_and_one_for_another_batch(tmp_path: Path) -> None:
    """Breaks if the number of microbatches of a file is not its own."""
    assert error_of(plan_of, "pipeline(nothing.csv)").startswith("cannot read the pipeline schedule nothing.csv")
    path = tmp_path / "schedule.csv"
    path.write_text(ROWS["good"])
    assert plan_of(f"pipeline({path})").interface.microbatches == 2
    assert error_of(plan_of, f"pipeline({path})", microbatches=4) == (
        f"the pipeline schedule {path} has 2 microbatches, not 4. use microbatches=2, or write the others into it."
    )
    assert "no number of microbatches suits" in error_of(plan_of, f"pipeline({path})", "pp=2", rows=7)


@pytest.mark.slow
def test_cuts() -> None:
    """Breaks if a block that is not there, or one out of order, is cut somewhere else."""
    two = {"mesh": "pp=2", "microbatches": 2}
    assert error_of(plan_of, {"pp": pipeline("1f1b", cut=["layers.9"])}, **two) == (
        "the pipeline is to be cut at 'layers.9', which is no block of the model. "
        "blocks: layers.0, layers.1, layers.2, layers.3, epilogue. name blocks such as model.layers.8."
    )
    back = pipeline("1f1b", cut=["layers.2", "layers.1"])
    assert error_of(plan_of, {"pp": back}, "pp=3", microbatches=2).startswith(
        "the pipeline cannot be cut at layers.2, layers.1: layers.1 does not come after layers.2. the model has 5 "
        "pieces, in the order layers.0, layers.1"
    )
    assert "cannot be cut at -1" in error_of(plan_of, {"pp": pipeline("1f1b", cut=[-1])}, **two)
    assert error_of(plan_of, {"pp": pipeline("1f1b", cut=["layers.1", "layers.2"])}, **two) == (
        "2 cuts make 3 stages, 1f1b has 2. 2 ranks of pp. name 1 block, the first of each stage but the first."
    )
    assert error_of(plan_of, {"pp": pipeline(cut=["layers.1", "layers.2"])}, **two).startswith(
        "2 cuts make 3 stages, which auto cannot have"
    )
    program: Any = plan_of({"pp": pipeline("1f1b", cut=["layers.1.up"])}, **two).program
    first = program.pipeline.stages[1].calls[0]
    assert program.calls[first].path == "layers.1.up"  # inside a block, which is opened for it


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4, None])
def test_memory_that_no_pipeline_fits(microbatches: int | None) -> None:
    """Breaks if the message names no limit and schedule that would do, or planning with just that limit fails."""

    def planned(limit: float) -> Plan:
        strategy = {"pp": "pipeline(1f1b)", "dp": "zero2"}
        return plan_of(strategy, rows=16, memory_limit=limit, microbatches=microbatches)

    message = error_of(planned, 10_000)
    assert message.startswith("no pipeline over pp=2 fits the memory limit of 9.77 KiB a rank, with ")
    assert "with the schedule 1f1b; its fullest rank is " in message and "layers." in message
    found = re.search(r"the smallest limit found to do is [\d.]+ \w+ \((\d+) bytes\)", message)
    needed = int(found[1])
    plan = planned(needed)
    assert plan.cost.peak_memory_bytes <= needed and plan.rematerialize != "none"
    assert "no pipeline over pp=2 fits" in error_of(planned, needed * 0.9)


@pytest.mark.slow
def test_memory_from_the_command_line() -> None:
    """Breaks if the command prints a traceback, or a message without the limit that would do."""
    words = ["plan", "mlp", "--tiny", "--mesh", "pp=2", "--memory-limit", "4KiB", "--microbatches", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert re.search(r"autopar: no pipeline over pp=2 fits .*\(\d+ bytes\), with the schedule \w+", result.output)
    result = CliRunner().invoke(app, ["plan", "mlp", "--tiny", "--mesh", "pp=2,dp=2", "--strategy", "pp=zero2"])
    assert result.exit_code == 2 and "is the pipeline's" in result.output


@pytest.mark.moderate
def test_a_pipeline_of_one_rank() -> None:
    """Breaks if pp=1 is refused, or cut into stages that nobody asked for."""
    plan = plan_of("pipeline", "pp=1,dp=2")
    assert plan.pipeline is not None and len(plan.pipeline.stages) == 1
    assert plan.verify().ok
    assert "in the stage" not in str(plan) and "1 stage;" in str(plan)


@pytest.mark.moderate
def test_inference() -> None:
    """Breaks if the forward alone is planned with a backward's order, on more than one microbatch, or computes
    otherwise than the eager model.
    """
    plan = plan_of(inference=True)
    assert plan.pipeline is not None
    assert [list(map(str, row)) for row in plan.pipeline.schedule.order] == [
        ["0UNSHARD", "0F0", "0SEND_F0", "0RESHARD"],
        ["1UNSHARD", "1RECV_F0", "1F0", "1RESHARD"],
    ]
    assert plan.verify().raise_on_failure().ok


def test_the_backend_of_torch_compile() -> None:
    """Breaks if Dynamo's graphs are planned with stages, which a step in pieces cannot have."""
    mesh = SimpleNamespace(mesh_dim_names=("pp", "dp"), mesh=torch.arange(4).view(2, 2), device_type="cpu")
    message = error_of(autopar.backend, mesh, hardware="cpu")
    assert message.startswith("a torch.compile backend cannot run a pipeline") and "mesh: pp=2 × dp=2" in message
    assert "compiled.train_step" in message


@pytest.mark.slow
def test_what_couples_the_rows_of_a_batch() -> None:
    """Breaks if batch norm in training or a contrastive loss is cut into microbatches, or not named."""
    message = error_of(plan_of, "1f1b", "pp=2", model="resnet", microbatches=2)
    assert "batch_norm" in message and "resnet.embedder.embedder.normalization" in message
    assert message.endswith("microbatches=1.")
    message = error_of(plan_of, "1f1b", "pp=2", model="clip", microbatches=2)
    assert "combines each row of the batch with every other" in message and "modeling_clip.py" in message
    assert plan_of("1f1b", "pp=2", model="clip", microbatches=1).verify().ok


@pytest.mark.slow
def test_a_batch_that_cannot_be_taken_apart_is_one_microbatch_where_nobody_asks_for_another_number() -> None:
    """Breaks if it is refused, computes other numbers than the whole batch, or nobody is told why and what it costs."""
    plan = plan_of("1f1b", "pp=2", model="clip")
    assert plan.interface.microbatches == 1 and plan.verify().ok
    (note,) = (note for note in plan.notes if note.startswith("the batch is one microbatch"))
    assert "wait for" in note and "of the step" in note and "modeling_clip.py" in note
    message = error_of(plan_of, "pipeline(dualpipev)", "pp=2", model="clip")
    assert "combines each row" in message and message.endswith("use pipeline(1f1b), which does.")


@pytest.mark.moderate
def test_damaged_plans_and_plans_for_something_else(tmp_path: Path) -> None:
    """Breaks if a file with a pipeline is loaded though it was changed, or its stages are run on another model."""
    plan = plan_of({"pp": "1f1b", "dp": "zero2"}, microbatches=2)
    text = plan.to_json()
    for damaged in (text[:-50], text.replace('"1f1b"', '"gpipe"', 1), text.replace("0F0", "0F1", 1)):
        path = tmp_path / "plan.json"
        path.write_text(damaged)
        assert error_of(Plan.load, path).startswith(f"{path} is damaged")
    loaded = catalogue.load("mlp", tiny=True, device="cpu", batch=(8, 16), overrides={"num_layers": 4})
    mesh = Mesh.parse("pp=2,dp=2", hardware="h100")
    assert replan(Plan.from_json(text), loaded.model, loaded.batch, mesh).source == plan.source
    other = Mesh.parse("dp=2,pp=2", hardware="h100")
    assert "for another mesh" in error_of(replan, plan, loaded.model, loaded.batch, other)
    deeper = catalogue.load("mlp", tiny=True, device="cpu", batch=(8, 16), overrides={"num_layers": 5})
    assert "for another" in error_of(replan, plan, deeper.model, deeper.batch, mesh)
    assert "no model to compare with" in error_of(Plan.from_json(text).verify)
