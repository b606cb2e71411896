"""Two microbatches at a time, asked for from outside: the commands, and searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.base.errors import AutoparError
from tests.unit.commands import run

pytestmark = pytest.mark.unit
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "use_cache": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture's config.json."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    transformers.Qwen3MoeConfig(**SIZES, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    return str(folder)


@pytest.mark.moderate
def test_commands_take_it(config: str) -> None:
    """Breaks if `--halves` does not reach the plan, what comes next is another program, or the proof is of one."""
    small = (config, "--mesh", "dp=2", "--strategy", "expert", "--batch", "8x8")
    planned = run("plan", *small, "--hardware", "cpu", "--halves")[0]
    assert planned.strip().splitlines()[-1].endswith("--microbatches 2 --halves") and "two at a time" in planned
    proven = json.loads(run("verify", *small, "--halves", "--json")[0])
    assert proven["ok"] and (proven["together"], proven["microbatches"]) == (2, 2)
    alone = json.loads(run("plan", *small, "--no-halves", "--microbatches", "2", "--json")[0])
    assert (alone["together"], alone["microbatches"]) == (1, 2)


@pytest.mark.moderate
def test_commands_refuse_it(config: str) -> None:
    """Breaks if what cannot be had is left out silently."""
    why = run("plan", config, "--mesh", "dp=2", "--strategy", "zero3", "--batch", "8x8", "--halves", code=1)[1]
    assert "no tokens travel to experts" in why
    tokens = ("--generate", "2x4x2", "--halves")
    assert "leave --microbatches, --halves" in run("plan", config, "--mesh", "dp=2", *tokens, code=2)[1]
    assert "has no microbatches" in run("search", config, "--cluster", "h100x2", *tokens, code=2)[1]


def searched(halves: bool | None, **limits: int) -> Any:
    with torch.device("meta"):
        config = transformers.Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 1})  # one call: nothing is cut in two
        model = transformers.Qwen3MoeForCausalLM(config)
        ids = torch.zeros((8, 16), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return autopar.search(
        model, "h100x2", example_inputs=batch, limits={"pp": 1, "cp": 1, "tp": 1, **limits}, top=1, halves=halves
    )


@pytest.mark.moderate
def test_searches_take_it() -> None:
    """Breaks if a search plans what cannot go together, or together what was to go alone."""
    ((candidate, plan),) = searched(True).planned
    assert candidate.point.may_pair and plan.interface.together == 2
    assert plan.interface.microbatches == candidate.point.microbatches
    ((_, alone),) = searched(False).planned
    assert alone.interface.together == 1


@pytest.mark.moderate
def test_searches_refuse_it() -> None:
    """Breaks if a space without exchanges is searched, and what it has is told as two together."""
    with pytest.raises(AutoparError, match="sends tokens to experts in an even number of microbatches"):
        searched(True, dp=1, tp=2)
