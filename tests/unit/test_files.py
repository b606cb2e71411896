"""Files are data: what is read from plans, profiles, schedules, configurations and checkpoints never runs anything, has
bounds, and where it does not serve is an AutoparError.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.base import files, typed
from autopar.base.errors import AutoparError
from autopar.cli.main import app
from autopar.cli.models import catalogue
from autopar.machine import profiles
from autopar.machine.mesh import Mesh
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.spec import PipelineSpec

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")


@lru_cache
def plan_text() -> str:
    """A plan's file; never changed."""
    loaded = catalogue.load("mlp", tiny=True)
    return autopar.plan(loaded.model, MESH, example_inputs=loaded.batch, strategy="zero3").to_json()


def plan_with(**changes: Any) -> str:
    """The same with other parts and a checksum that matches."""
    body = {**json.loads(plan_text())["plan"], **changes}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": 3, "sha256": digest, "plan": body})


def spec_of(name: str) -> dict[str, Any]:
    return {"spec": name, "tiny": False, "batch": None, "layers": None}


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(AutoparError) as caught:
        function(*args, **options)
    return str(caught.value)


@contextmanager
def modules_of(folder: Path, name: str, text: str) -> Iterator[None]:
    """A module that can be imported from here on."""
    folder.joinpath(f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


# -- plans


@pytest.mark.moderate
@pytest.mark.parametrize("command", ["explain", "report"])
def test_a_plan_calls_nothing_that_it_names(command: str, tmp_path: Path) -> None:
    """Breaks if a module that a plan's file names is imported, or a function of it called, when the plan is shown."""
    path, mark = tmp_path / "plan.json", tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w').close()\ndef make():\n    open({str(mark)!r}, 'w').close()\n"
    arguments = [command, str(path), *(["cost"] if command == "explain" else [str(tmp_path / "p.html")])]
    with modules_of(tmp_path, "hostile_model", code):
        path.write_text(plan_with(model_spec=spec_of("hostile_model:make")))
        result = CliRunner().invoke(app, arguments)
        assert not mark.exists() and "hostile_model" not in sys.modules
    assert "--model" in result.output
    assert result.exit_code == (2 if command == "explain" else 0), result.output


@pytest.mark.moderate
def test_a_plan_that_would_end_the_process() -> None:
    """Breaks if `os:abort` in a plan's file, found as it was, ends the process that explains the plan."""
    text = plan_with(model_spec=spec_of("os:abort"))
    code = (
        "import sys, tempfile, os\n"
        "from typer.testing import CliRunner\n"
        "from autopar.cli.main import app\n"
        "path = os.path.join(tempfile.mkdtemp(), 'p.json')\n"
        "open(path, 'w').write(sys.stdin.read())\n"
        "result = CliRunner().invoke(app, ['explain', path, 'cost'])\n"
        "print(result.exit_code, result.output)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ") and "does not name a model that comes with autopar" in done.stdout


@pytest.mark.moderate
def test_other_files_that_a_plan_names_stay_closed(tmp_path: Path) -> None:
    """Breaks if a plan's file makes explaining it read a configuration, or loading it a profile or a schedule."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    plan = tmp_path / "plan.json"
    plan.write_text(plan_with(model_spec=spec_of(str(config))))
    result = CliRunner().invoke(app, ["explain", str(plan), "cost"])
    assert result.exit_code == 2 and "does not name a model that comes with autopar" in result.output
    profile = tmp_path / "profile.toml"
    os.mkfifo(profile)  # reading it would wait for ever
    plan.write_text(plan_with(hardware=str(profile)))
    assert "There is no hardware profile" in error_of(Plan.load, plan)
    asked = {"schedule": f"{tmp_path}/own.csv", "stages_per_rank": None, "cut": [], "rows": "", "rank_of": []}
    plan.write_text(plan_with(asked=asked))
    assert "is damaged" in error_of(Plan.load, plan)


@pytest.mark.moderate
def test_a_plan_with_a_bundled_model_is_explained(tmp_path: Path) -> None:
    """Breaks if a plan that names a model of autopar's, or whose model the user gives, is not explained any more."""
    path = tmp_path / "plan.json"
    path.write_text(plan_with(model_spec={**spec_of("mlp"), "tiny": True}))
    assert CliRunner().invoke(app, ["explain", str(path), "cost"]).exit_code == 0
    code = "from autopar.cli.models import catalogue\ndef make():\n    m = catalogue.load('mlp', tiny=True)\n"
    with modules_of(tmp_path, "models_of_mine", code + "    return m.model, m.batch\n"):
        result = CliRunner().invoke(app, ["explain", str(path), "cost", "--model", "models_of_mine:make"])
    assert result.exit_code == 0, result.output


def test_programs_and_trees_of_a_plan_never_run(tmp_path: Path) -> None:
    """Breaks if a program, or a tree of outputs that names modules to import, is taken from a plan's file."""
    mark = tmp_path / "ran"
    source = f"open({str(mark)!r}, 'w')\n"
    with modules_of(tmp_path, "hostile_tree", source):
        context = '{"__enum__": true, "fqn": "hostile_tree:Colour", "name": "red"}'
        spec = json.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": []}])
        text = plan_with(source=source, source_is_edited=True, output_spec=spec)
        loaded = Plan.from_json(text)
        print(loaded)
        model = catalogue.load("mlp", tiny=True)
        again = replan(loaded, model.model, model.batch, MESH)
        assert source not in again.source and not again.source_is_edited
        assert "hostile_tree" not in again.output_spec
        assert "no model" in error_of(loaded.verify)
        assert not mark.exists() and "hostile_tree" not in sys.modules


_BODY = lambda: json.loads(plan_text())["plan"]  # noqa: E731


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": [["dp", 2], ["tp", 1 << 40]]},
        {"mesh": 3},
        {"mesh": [["dp", "2"]]},
        {"strategies": ["zero3"]},
        {"precision": "load"},
        {"collectives": [{}]},
        {"memory": {"parameters": float("nan"), "gradients": 0, "optimizer_states": 0, "peak": 0}},
        {"memory_limit_bytes": 10**400},
        {"output_leaves": [99]},
        {"times": {"a": 1}},
        {"title": None},
        {"unknown": 1},
        {"hardware": "h100" + ":x" * 5000},
        {"rematerialize": "never"},
        {"views": {"regions": []}},
        {"model_spec": {"spec": 3}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_damaged_plans(changes: dict[str, Any]) -> None:
    """Breaks if a plan with a matching checksum and wrong parts is a traceback, or is taken for a plan."""
    assert error_of(Plan.from_json, plan_with(**changes)).startswith("plan is damaged")


def test_a_parameter_is_reached_by_outputs_that_are_there() -> None:
    """Breaks if a place that is none is taken for an output's: the parameter would never have a gradient."""
    interface = _BODY()["interface"]
    interface["parameters"][0]["reached_by"] = [len(interface["outputs"])]
    assert "is reached by" in error_of(Plan.from_json, plan_with(interface=interface))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"plan": ' * 5000, "1" * 5000, '{"format": 3, "plan": 1}', "\ud800"])
def test_texts_that_are_no_plans(text: str) -> None:
    """Breaks if what is nested without end, or a number of thousands of digits, is a RecursionError or a ValueError."""
    assert error_of(Plan.from_json, text).startswith(("plan is damaged", "plan is no plan of autopar"))


# -- every reader


def readers(tmp_path: Path) -> dict[str, Callable[[Path], Any]]:
    return {
        "plan.json": Plan.load,
        "profile.toml": profiles.load,
        "schedule.csv": lambda path: schedules.from_csv(path, 2, 2),
        "own.csv": lambda path: PipelineSpec(str(path)).read(),
        "config.json": lambda path: catalogue.load(str(path)),
    }


@pytest.mark.parametrize("name", ["plan.json", "profile.toml", "schedule.csv", "own.csv", "config.json"])
def test_only_regular_files_of_bounded_size(name: str, tmp_path: Path) -> None:
    """Breaks if a reader waits for a pipe that nobody writes, reads a device without end or a file of any size."""
    read, path = readers(tmp_path)[name], tmp_path / name
    os.mkfifo(path)
    assert "a pipe, a socket or a device" in error_of(read, path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "a pipe, a socket or a device" in error_of(read, path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 33)  # takes no room on disk
    assert "too large" in error_of(read, path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in error_of(read, path)


def test_depth_and_count_of_json() -> None:
    """Breaks if deep texts, or texts of very many values, are parsed into memory."""
    said = {"where": "here", "remedy": "write less"}
    deep = "[" * (files.MOST_DEPTH + 1) + "]" * (files.MOST_DEPTH + 1)
    assert "nested too deep (here)" in error_of(files.parse_json, deep, "text", **said)
    assert files.parse_json(deep[1:-1], "text", **said) is not None
    assert "too many values (here)" in error_of(files.parse_json, "[1,1,1]", "text", most_values=2, **said)


def test_types() -> None:
    """Breaks if a value of another type passes, or the message does not say where it stands."""
    hint = list[tuple[str, int | None]]
    typed.check(hint, [["a", 1], ["b", None]], "rows")
    for wrong, message in (
        ([["a", True]], "rows[0][1] should be a whole number, and is True"),
        ([["a"]], "rows[0] should be a list of 2, and is a list"),
        ({}, "rows should be a list, and is a mapping"),
        ([["a", 1 << 63]], "rows[0][1] should be a whole number, and is inf"),
    ):
        with pytest.raises(typed.WrongType) as caught:
            typed.check(hint, wrong, "rows")
        assert str(caught.value).replace("null", "a whole number") == message


# -- profiles, schedules


def test_profiles_of_many_keys() -> None:
    """Breaks if keys whose reading takes minutes are read: 20,000 parts of one, or very many."""
    for text in (".".join("a" * 20_000) + " = 1", "\n".join(f"a{i}.b = 1" for i in range(20_000)), "x = " + "[" * 9000):
        assert "has too many" in error_of(profiles.parse, text, name="x", where="x.toml")
    deep = "x = " + "[" * 3000 + "]" * 3000
    assert "is not TOML" in error_of(profiles.parse, deep, name="x", where="x.toml")
    assert "is not TOML" in error_of(profiles.parse, "x = " + "1" * 5000, name="x", where="x.toml")


def test_a_profile_of_parts_of_devices() -> None:
    """Breaks if half a card a node becomes none, and every prediction a division by zero."""
    text = Path(autopar.__file__).parent.joinpath("machine/data/hardware/h100-sxm.toml").read_text()
    assert "at least 1 for node.devices" in error_of(
        profiles.parse, text.replace("devices = 8", "devices = 0.5", 1), name="x", where="x.toml"
    )


def test_cells_of_schedules() -> None:
    """Breaks if a long cell is a csv.Error, a stage's number the length of a list, or if parentheses recurse."""
    for text in (
        "0F0," + "x" * 200_000,
        "99999999999F0,0F0\n1F0",
        "0F" + "9" * 5000 + ",0F0\n1F0",
        "(" * 5000 + "0F0" + ")OVERLAP_F_B" * 5000 + ",0F0\n1F0",
        "," * (schedules.MOST_CELLS + 1),
        '"0F0\n,' * 5,
        "٣F٣,0F0\n1F0",
    ):
        assert error_of(schedules.from_csv, text, 2, 2)


# -- configurations


def config_with(tmp_path: Path, **changes: Any) -> str:
    """A file of GPT-2's with other fields."""
    data = Path(autopar.__file__).parent / "cli" / "models" / "data" / "gpt2.json"
    fields = {key: value for key, value in {**json.loads(data.read_text()), **changes}.items() if value != "absent"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 0}, "transformers makes no model of the configuration"),
        ({"n_head": "x"}, "transformers"),
        ({"n_embd": 7}, "transformers makes no model of the configuration"),
        ({"n_layer": 10**9}, "The configuration's n_layer does not serve"),
        ({"num_labels": 10**12}, "The configuration's num_labels does not serve"),
        ({"depths": [600, 600]}, "The configuration's depths does not serve"),
        ({"vocab_size": float("inf")}, "The configuration's vocab_size does not serve"),
        ({"n_ctx": {"__float__": "Infinity"}}, "The configuration's n_ctx.__float__ does not serve"),
        ({"architectures": ["pipeline"]}, "has no model class 'pipeline'"),
        ({"architectures": ["Trainer"]}, "has no model class 'Trainer'"),
        ({"architectures": ["GPT2Config"]}, "has no model class 'GPT2Config'"),
        ({"architectures": 3}, "The configuration's model_type does not serve"),
        ({"model_type": ["gpt2"]}, "The configuration's model_type does not serve"),
        ({"attn_implementation": "someone/kernel"}, "names code from elsewhere"),
        ({"_attn_implementation": "someone/kernel"}, "names code from elsewhere"),
        ({"model_type": "absent"}, "has no model_type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Breaks if a configuration is a traceback, calls a function of transformers, fetches code, or never ends."""
    assert message in error_of(catalogue.load, config_with(tmp_path, **changes), batch=(2, 8))


def test_limits_that_are_none_are_read() -> None:
    """Breaks if what transformers writes for an infinite limit (Mamba 2, Falcon-H1) is no number, or anything else is
    read as one.
    """
    from autopar.base.huggingface import configuration

    none, other = {"__float__": "Infinity"}, {"__float__": "1"}
    found = configuration.with_limits({"text": {"time_step_limit": [0.0, none]}, "a_limit": other, "x": none})
    assert found == {"text": {"time_step_limit": [0.0, float("inf")]}, "a_limit": other, "x": none}


def test_a_configuration_without_heads(tmp_path: Path) -> None:
    """Breaks if the small version of a configuration whose heads are missing or none is a traceback."""
    for heads in (0, None, "x", [1]):
        assert "transformers" in error_of(catalogue.load, config_with(tmp_path, n_head=heads), tiny=True, batch=(2, 8))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "whisper", "clip", "resnet", "llama", "gemma2", "bert", "cnn"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2"])
def test_good_plans_are_loaded(name: str, mesh: str) -> None:
    """Breaks if plans of models are held to be damaged: values that pass through, tied parameters, seeds."""
    loaded = catalogue.load(name, tiny=True)
    options: dict[str, Any] = {"strategy": "zero3"} if "pp" not in mesh else {"strategy": {"dp": "zero2"}}
    options |= {"microbatches": 2} if name not in ("clip", "resnet", "cnn") else {}
    try:
        plan = autopar.plan(loaded.model, Mesh.parse(mesh, hardware="h100"), example_inputs=loaded.batch, **options)
    except AutoparError:
        assert "pp" in mesh  # too few blocks, or rows that meet each other
        return
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
