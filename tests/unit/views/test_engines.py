"""Plans told to other engines: sizes, styles, and what they have no word for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.main import app
from autopar.cli.models import catalogue


def planned(name: str, mesh: str, strategy: Any) -> autopar.Plan:
    loaded = catalogue.load(name, tiny=True, device="meta")
    return autopar.plan(
        loaded.model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=loaded.batch, strategy=strategy
    )


@pytest.mark.moderate
def test_transformers_takes_its_own_plan_back() -> None:
    """Breaks if a style is another than the one that transformers ships for the same split, or a size is lost."""
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = planned("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"})
    data = json.loads(plan.export("transformers-tp-plan").text)
    config = DistributedConfig(**data)
    assert (config.tp_size, config.fsdp_size, config.pp_size) == (2, 2, 1)
    assert plan.model is not None
    theirs = {key: style for key, style in plan.model.tp_plan.items() if key.startswith(("model.", "lm_head"))}
    assert {key: data["tp_plan"][key] for key in theirs} == theirs
    assert data["tp_plan"].keys() - theirs.keys() <= {"model.embed_tokens"}


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("vllm", "vllm serve 'my model' --tensor-parallel-size 2 --pipeline-parallel-size 2\n"),
        ("sglang", "python -m sglang.launch_server --model-path 'my model' --tp-size 2 --pp-size 2\n"),
        ("tensorrt-llm", "tensor_parallel_size: 2\npipeline_parallel_size: 2\n"),
    ],
)
def test_servers_are_told_sizes(to: str, words: str) -> None:
    """Breaks if a size goes to another flag, or a name breaks out of the command."""
    exported = planned("llama", "pp=2,tp=2", {"pp": "pipeline", "tp": "tensor"}).export(to, name="my model")
    assert exported.text.endswith(words)
    assert any("rules of its own" in note for note in exported.notes)


@pytest.mark.moderate
def test_replicas_that_gather_are_said() -> None:
    """Breaks if zero3, which no server has, is left out without a word, or counts as tensor parallelism."""
    exported = planned("llama", "dp=4", "zero3").export("vllm")
    assert "--tensor-parallel-size 1 --data-parallel-size 4" in exported.text
    assert any(note.startswith("dp gathers parameters") for note in exported.notes)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "said"),
    [
        ("phi3", "tp=2", "tensor", r"qkv_proj\.weight is S\(0, outer=3\) over the tensor axis"),
        ("gpt2", "tp=2", "tensor", "belongs to a Conv1D"),
        ("llama", "dp=2,cp=2", {"dp": "ddp", "cp": "ring"}, "cp splits sequences"),
    ],
)
def test_what_has_no_style_is_named(name: str, mesh: str, strategy: Any, said: str) -> None:
    """Breaks if a split that the engine does not have is dropped, and the weights there lie otherwise than said."""
    with pytest.raises(AutoparError, match=said):
        planned(name, mesh, strategy).export("transformers-tp-plan")


@pytest.mark.moderate
def test_an_unknown_engine() -> None:
    with pytest.raises(AutoparError, match="did you mean"):
        planned("llama", "tp=2", "tensor").export("vlm")


@pytest.mark.moderate
def test_the_command(tmp_path: Path) -> None:
    """Breaks if a plan's file cannot be exported by hand, to a file and to the terminal."""
    file, out = tmp_path / "plan.json", tmp_path / "tp.json"
    made = CliRunner().invoke(
        app, ["plan", "llama", "--tiny", "--mesh", "tp=2", "--strategy", "tensor", "--save", str(file)]
    )
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(app, ["export", str(file), "--to", "transformers-tp-plan", "-o", str(out)])
    assert done.exit_code == 0 and json.loads(out.read_text())["tp_plan"]["lm_head"] == "colwise_gather_output"
    done = CliRunner().invoke(app, ["export", str(file), "--to", "vllm", "--name", "x/y"])
    assert done.exit_code == 0 and "vllm serve x/y --tensor-parallel-size 2\n" in done.output
    done = CliRunner().invoke(app, ["export", str(file), "--to", "vllm", "-o", str(tmp_path / "no" / "x")])
    assert done.exit_code == 2 and "autopar: cannot write" in done.output
    done = CliRunner().invoke(app, ["export", str(file), "--to", "tensorrt-llm", "--name", "x\ny: z"])
    assert done.exit_code == 2 and "names no weights" in done.output


@pytest.mark.moderate
def test_a_plan_for_generate_is_a_file_like_others(tmp_path: Path) -> None:
    """Breaks if what `--generate --save` writes is read by no command, a cache's heads are taken for a split sequence
    or its split length is not, or an engine is not told how long sequences get and how keys are stored.
    """
    file, out = tmp_path / "plan.json", tmp_path / "tp.json"

    def said(code: int, *words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        return done.output

    asked = ["--layers", "1", "--generate", "2x8x4", "--save", str(file)]
    said(0, "plan", "llama", "--tiny", "--mesh", "tp=2", "--strategy", "tensor", "--cache", "fp8", *asked)
    assert "--tensor-parallel-size 2 --max-model-len 12 --kv-cache-dtype fp8\n" in said(
        0, "export", str(file), "--to", "vllm"
    )
    assert "--context-length 12 --kv-cache-dtype fp8_e4m3\n" in said(0, "export", str(file), "--to", "sglang")
    assert "max_seq_len: 12\nkv_cache_config:\n  dtype: fp8\n" in said(0, "export", str(file), "--to", "tensorrt-llm")
    said(0, "export", str(file), "--to", "transformers-tp-plan", "-o", str(out))
    assert json.loads(out.read_text())["tp_plan"]["lm_head"] == "colwise_gather_output"
    assert "first token" in said(0, "show", str(file)) and "attention_mask" in said(
        0, "show", str(file), "--of", "decode"
    )
    assert "--of decode" in said(2, "holds", str(file), "--rank", "0")
    assert "lm_head.weight" in said(0, "holds", str(file), "--rank", "0", "--of", "decode")
    assert "decode.explain('cost')" in said(2, "explain", str(file), "cost")
    with pytest.raises(AutoparError, match=r"GenerationPlan\.load"):
        autopar.Plan.load(file)
    data = json.loads(file.read_text())
    data["generation"]["new_tokens"] = 1e30
    file.write_text(json.dumps(data))
    assert "no plan for generate()" in said(2, "export", str(file), "--to", "vllm")
    said(0, "plan", "llama", "--tiny", "--mesh", "cp=2", "--strategy", "split_kv", *asked)
    assert "cp splits sequences" in said(2, "export", str(file), "--to", "vllm")
