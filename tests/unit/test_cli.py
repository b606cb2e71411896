"""The command line: exit codes, what is printed, what is written, and that help does not wait for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.input import parse_batch, parse_bytes
from tests.unit.commands import run

SMALL = ["mlp", "--tiny", "--batch", "8", "--mesh", "dp=2,tp=2"]


@pytest.mark.moderate
def test_help_and_tables_import_no_torch() -> None:
    """Breaks if a module-level import makes `autopar --help` wait seconds for torch."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom autopar.cli.main import app\n"
        "for arguments in (['--help'], ['plan', '--help'], ['strategies'], ['hardware'], ['models'], ['--version']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments\n"
        "print([name for name in ('torch', 'transformers', 'ortools', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.moderate
def test_tables_name_what_there_is() -> None:
    """Breaks if a strategy, a profile or a model is missing from its table, or --json is no JSON."""
    assert "2Ψ" in run("strategies")[0] and "fsdp" in run("strategies")[0]
    assert {row["name"] for row in json.loads(run("strategies", "--json")[0])} >= {"auto", "ddp", "zero3", "tensor"}
    strategies = json.loads(run("strategies", "--json")[0])
    assert [row["name"] for row in strategies].count("hsdp") == 1
    assert all(row["shards"] and row["communicates"] and row["source"] for row in strategies)
    profiles = {row["name"]: row["also"] for row in json.loads(run("hardware", "--json")[0])}
    assert (
        profiles["h100-sxm"] == "h100" and profiles["a100-80"] == "a100" and {"b200", "mi300x", "cpu"} <= set(profiles)
    )
    assert "llama-3.1-405b" in run("models")[0]


def test_one_profile_names_its_sources(tmp_path: Path) -> None:
    """Breaks if `hardware NAME` hides where a number is from, or takes a name that there is not."""
    out, _ = run("hardware", "h100:ethernet-25")
    assert "data sheet" in out and "FlashAttention" in out and "ethernet" in out
    data = json.loads(run("hardware", "v100", "--json")[0])
    assert data["network_cards"] == 8 and data["matmul"]["fp16"]["half_k"] > 0
    assert "no hardware profile 'v1000'" in run("hardware", "v1000", code=2)[1]
    assert "is a TOML file" in run("calibrate", "--save", str(tmp_path / "mine.json"), code=2)[1]


@pytest.mark.moderate
def test_plan_prints_the_table_one_line_and_the_next_command() -> None:
    """Breaks if `plan` ends without the result in one line and a command that can be pasted."""
    out, _ = run("plan", *SMALL, "--strategy", "zero3")
    assert "Collectives" in out and "precision  bf16" in out
    *_, line, following = out.strip().splitlines()
    assert line.startswith("MLP on dp=2 × tp=2 (h100), zero3")
    assert following == "Next: autopar verify mlp --tiny --mesh dp=2,tp=2 --strategy zero3"


@pytest.mark.moderate
def test_plan_writes_what_was_asked_for(tmp_path: Path) -> None:
    """Breaks if a file is not written, is not what the plan is, or --json prints anything but JSON."""
    files = [tmp_path / name for name in ("plan.json", "program.py", "plan.svg")]
    options = ["--save", str(files[0]), "--source", str(files[1]), "--picture", str(files[2])]
    out, _ = run("plan", *SMALL, "--strategy", "ddp", "--hardware", "cpu", "--layers", "3", "--json", *options)
    data = json.loads(out)
    assert data["written"] == [str(path) for path in files] and all(path.exists() for path in files)
    loaded = Plan.load(files[0])
    assert loaded.source == files[1].read_text() and "def forward(" in loaded.source
    assert {region["name"]: region["calls"] for region in data["regions"]}["layer"] == 3
    assert data["step_time_s"] == loaded.cost.step_time_s and data["strategy"] == "ddp"
    rows = loaded.interface.inputs[0].shape[0]
    assert data["tokens_per_s"] is None and data["rows_per_s"] == pytest.approx(rows / data["step_time_s"])
    assert 0 < data["mfu"] < 1 and data["recompute"] == loaded.rematerialize
    assert data["memory_bytes"]["limit"] == loaded.memory_limit_bytes and loaded.precision is not None


@pytest.mark.moderate
def test_a_folder_that_does_not_exist_is_no_crash(tmp_path: Path) -> None:
    """Breaks if a path that cannot be written ends in a traceback after all the planning."""
    _, err = run("plan", *SMALL, "--strategy", "ddp", "--save", str(tmp_path / "none" / "plan.json"), code=1)
    assert "cannot write" in err and "Traceback" not in err


@pytest.mark.moderate
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_verify_says_ok(dtype: str) -> None:
    """Breaks if a proof that holds does not print ok and end with 0."""
    out, _ = run("verify", *SMALL, "--strategy", "dp=zero3,tp=tensor", "--dtype", dtype)
    assert out.startswith("ok: ") and f"in {dtype}" in out


@pytest.mark.slow
def test_microbatches_are_planned_and_proven() -> None:
    """Breaks if --microbatches is dropped on the way, or the proof is of another program than the plan."""
    plain = ["mlp", "--tiny", "--batch", "16", "--mesh", "dp=2,tp=2", "--strategy", "ddp", "--microbatches", "2"]
    out, _ = run("plan", *plain)
    assert "x bf16[8/dp/tp, 32]" in out and "in each of 2 microbatches a step" in out
    assert out.strip().endswith("autopar verify mlp --tiny --mesh dp=2,tp=2 --strategy ddp --microbatches 2")
    data = json.loads(run("verify", *plain, "--json")[0])
    assert data["ok"] and data["microbatches"] == 2
    _, err = run("plan", *plain[:-1], "3", code=1)
    assert "16 rows cannot be cut into 3 microbatches" in err
    out, _ = run("verify", "gpt2", "--tiny", *plain[4:], "--dropout", "0.1")
    assert "with the same random draws" in out


@pytest.mark.moderate
def test_verify_json() -> None:
    """Breaks if machines cannot read the proof."""
    data = json.loads(run("verify", *SMALL, "--strategy", "ddp", "--json")[0])
    assert data["ok"] and data["worst"]["error"] < 1e-9 and data["num_collectives"] > 0
    assert "loss" in {row["name"] for row in data["comparisons"]}


@pytest.mark.moderate
def test_verify_ends_with_1_where_the_program_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a failed proof looks like success to a script."""
    from dataclasses import replace

    def wrong(plan: Plan, **options: object) -> object:
        from autopar.api.proof import verify

        proof = verify(plan, **options)  # type: ignore[arg-type]
        bad = replace(proof.comparisons[0], name="logits", error=0.5, ok=False)
        return replace(proof, comparisons=(bad, *proof.comparisons))

    monkeypatch.setattr(Plan, "verify", wrong)
    out, _ = run("verify", *SMALL, "--strategy", "ddp", code=1)
    assert out.startswith("NOT EQUAL") and "logits: relative error 0.5" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--mesh", "dp:2"], "no name=size"),
        (["--mesh", "dp=0"], "Sizes start at 1"),
        (["--strategy", "zero9"], "unknown strategy 'zero9'"),
        (["--strategy", "tensr"], "did you mean tensor or tensor2d? "),
        (["--hardware", "H200x"], "did you mean h200"),
        (["--strategy", "megatron"], "known: auto, ddp"),
        (["--strategy", "xx=ddp"], "names axis 'xx'"),
        (["--hardware", "b9"], "no hardware profile 'b9'"),
        (["--batch", "axb"], "'axb' is not a batch"),
        (["--precision", "int4"], "unknown precision 'int4'"),
        (["--memory-limit", "lots"], "'lots' is not a number of bytes"),
    ],
)
def test_bad_usage_ends_with_2(change: list[str], message: str) -> None:
    """Breaks if a mistyped option is a traceback, or an exit code that says the answer is no."""
    _, err = run("plan", *SMALL, *change, code=2)
    assert message in err and err.startswith("autopar: ") and "Traceback" not in err


def test_an_unknown_model_ends_with_2() -> None:
    """Breaks if a name that is nothing is not told apart from a model that cannot be planned."""
    _, err = run("plan", "no-such-model", "--mesh", "dp=2", code=2)
    assert "There is no model 'no-such-model'" in err and "did you mean" not in err
    assert "did you mean gpt2? " in run("plan", "gtp2", "--mesh", "dp=2", code=2)[1]


@pytest.mark.moderate
def test_what_cannot_be_planned_ends_with_1() -> None:
    """Breaks if an infeasible plan is a traceback, or looks like success."""
    _, err = run("plan", *SMALL, "--strategy", "ddp", "--memory-limit", "1KiB", code=1)
    # On a busy machine slow passes are named before.
    assert any(line.startswith("autopar: ") for line in err.splitlines()) and "Traceback" not in err


def test_sizes() -> None:
    """Breaks if GB and GiB are mixed up, or a batch without tokens is refused."""
    assert parse_bytes("60GiB") == 60 * 2**30 and parse_bytes("80 gb") == 80e9 and parse_bytes("1.5K") == 1500
    assert parse_bytes("4096") == parse_bytes("4096B") == 4096
    assert parse_batch("8x2048") == (8, 2048) and parse_batch("32") == (32, 1)
    for text in ("", "0x3", "8x", "x8", "8x2048x1"):
        with pytest.raises(AutoparError):
            parse_batch(text)


@pytest.mark.slow
def test_both_phases_of_generation_are_planned_and_proven(tmp_path: Path) -> None:
    """Breaks if --generate plans a training step, loses a file, or proves nothing; or if a text of no sizes passes."""
    saved = tmp_path / "plan.json"
    small = ("llama", "--tiny", "--mesh", "tp=2", "--strategy", "tensor", "--generate", "2x4x3")
    data = json.loads(run("plan", *small, "--save", str(saved), "--json")[0])
    assert list(data["phases"]) == ["prefill", "decode"]
    assert data["cache_bytes"] == data["phases"]["decode"]["memory_bytes"]["states"] > 0
    assert saved.exists()
    assert "ok: 3 tensors" in run("verify", *small)[0]
    assert "write SEQUENCESxPROMPTxNEW" in run("plan", *small[:-1], "2x4", code=2)[1]
