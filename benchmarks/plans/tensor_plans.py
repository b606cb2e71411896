"""Compare strategy `tensor` with the tensor-parallel plans that transformers ships for its causal language models.

    python benchmarks/plans/tensor_plans.py [--models llama,qwen2] [--verify granite,cohere] [--rows FILE] [--write]

For every dense architecture with a `base_model_tp_plan`, a tiny model is built from its default configuration,
planned with `tensor` on tp=2, and each parameter's placement is compared with what the plan says. `--rows` keeps one
JSON line per architecture, so that a later run goes on where an earlier one stopped; `--write` writes
docs/tensor_plans.md from all of them.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

import autopar
from autopar.base.errors import AutoparError
from autopar.base.huggingface import huggingface, tiny
from autopar.cli.models import batches
from autopar.ir.sharding import Placement, Shard
from benchmarks import pages

TOKENS = 16
ROWS = 4

# transformers.distributed.tensor_parallel: what a style does to a linear's or embedding's (weight, bias). Whether it
# gathers what the linear makes is another matter; here it is where parameters lie that counts.
STYLES: dict[str, tuple[int | None, int | None]] = {
    "colwise": (0, 0),
    "colwise_gather_output": (0, 0),
    "packed_colwise": (0, 0),
    "rowwise": (1, None),
    "rowwise_split_input": (1, None),
    "packed_rowwise": (1, None),
    "embedding_rowwise": (0, None),
    "embedding_colwise": (1, None),
    "replicated_with_grad_allreduce": (None, None),
    "mla_kv_a_proj": (None, None),
    "local_params": (None, None),
    "all_reduce": (None, None),
    "replicate": (None, None),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where ours is not theirs, and may be so. models, parameter: shell patterns; ours, theirs: `S(0)`, `R`."""

    models: str
    parameter: str
    ours: str
    theirs: str
    reason: str


LARGE = ("hrm_text", "phi4_multimodal", "olmo_hybrid", "qwen3_5_text")
"""Too many operators even when tiny to prove along with all the others."""
# What transformers' own default configurations lack to run.
OVERRIDES: dict[str, dict[str, object]] = {
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "gemma4_unified_text": {"per_layer_config": None},
}
DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "olmo*", "model.layers.*.self_attn.[qk]_norm.weight", "S(0)", "R",
        "a norm over all heads together: ours keeps queries and keys split by heads, the norm's weight with them, and "
        "sums the squares over tp (one number a token); theirs gathers queries and keys whole before the norm",
    ),
    Difference(
        "gpt_neox", "gpt_neox.embed_in.weight", "S(0)", "R",
        "ours is vocabulary-parallel, as theirs is for every table called embed_tokens, which this one is not",
    ),
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """One architecture.

    split: parameters that their plan splits; split_equal: those of them that ours splits alike; equal: of all.
    differences: generic name, ours, theirs, how many layers. error: what stopped it. seconds: of CPU.
    """

    model: str
    architecture: str
    parameters: int = 0
    equal: int = 0
    split: int = 0
    split_equal: int = 0
    differences: list[tuple[str, str, str, int]] = field(default_factory=list)
    error: str = ""
    proof: str = ""
    seconds: float = 0.0


def architectures() -> Iterator[tuple[str, str, bool]]:
    """(model type, class, whether it has experts) of every causal language model with a plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    for name, architecture in CLASSES.items():
        config_class = CONFIG_MAPPING[name]
        if plan := getattr(config_class, "base_model_tp_plan", None):
            fields = config_class().to_dict()
            experts = any("expert" in key for key in (*plan, *fields, *(fields.get("text_config") or {})))
            yield name, architecture, experts


def build(name: str, architecture: str, *, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of the architecture, in training mode without dropout, and a batch."""
    import transformers

    with huggingface.quiet(), torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        config = tiny.shrunk(transformers.AutoConfig.for_model(name, **OVERRIDES.get(name, {})), TOKENS)
        for key, value in config.to_dict().items():
            if "dropout" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        model = getattr(transformers, architecture)(config).train()
        return model, batches.make_batch(model, ROWS, TOKENS)


def theirs_of(plan: dict[str, str], name: str) -> str:
    """`S(dim)` or `R`, by transformers' rule: the plan's key is the module's name, or the parameter's own."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    module, _, leaf = generic.rpartition(".")
    style = plan.get(generic) or plan.get(module)
    if style is None:
        return "R"
    dim = STYLES[style][leaf == "bias"]
    return "R" if dim is None else f"S({dim})"


def ours_of(placement: Placement) -> str:
    """Stripes of a fused weight are a split of that dim."""
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R"


def compare(row: Row, model: Any, plan: autopar.Plan) -> None:
    found: dict[tuple[str, str, str], int] = {}
    for parameter in plan.interface.parameters:
        for name in (parameter.name, *parameter.aliases):
            ours, theirs = ours_of(parameter.sharding[0]), theirs_of(model.tp_plan, name)
            row.parameters += 1
            row.split += theirs != "R"
            row.equal += ours == theirs
            row.split_equal += theirs != "R" and ours == theirs
            if ours != theirs:
                key = (re.sub(r"\.\d+(?=\.|$)", ".*", name), ours, theirs)
                found[key] = found.get(key, 0) + 1
    row.differences = [(*key, count) for key, count in found.items()]


def reason_of(model: str, parameter: str, ours: str, theirs: str) -> str:
    """Why ours may differ; empty where nothing says so."""
    for each in DIFFERENCES:
        named = fnmatchcase(model, each.models) and fnmatchcase(parameter, each.parameter)
        if named and (each.ours, each.theirs) == (ours, theirs):
            return each.reason
    return ""


def examine(name: str, architecture: str, verify: bool) -> Row:
    row, start = Row(name, architecture), time.process_time()
    try:
        model, batch = build(name, architecture, device="cpu" if verify else "meta")
        plan = autopar.plan(model, autopar.Mesh.parse("tp=2", hardware="cpu"), example_inputs=batch, strategy="tensor")
        compare(row, model, plan)
        if verify:
            proof = plan.verify()
            row.proof = f"{'ok' if proof.ok else 'NOT EQUAL'} {proof.worst.error:.1e}"
    except AutoparError as error:
        row.error = str(error)
    except Exception as error:  # a model that cannot even be built is a finding, not the end of the table
        row.error = f"{type(error).__name__}: {error}"
    row.seconds = time.process_time() - start
    return row


def text_of(row: Row) -> str:
    if row.error:
        return f"{row.model:20} error: {row.error}"
    alike = f"{row.split_equal}/{row.split} of theirs split alike, {row.equal}/{row.parameters} equal"
    lines = [f"{row.model:20} {alike} {row.proof} ({row.seconds:.1f} s CPU)"]
    for name, ours, theirs, count in row.differences:
        lines.append(
            f"    {name} x{count}: ours {ours}, theirs {theirs}: {reason_of(row.model, name, ours, theirs) or '?'}"
        )
    return "\n".join(lines)


def page(rows: list[Row], experts: list[str]) -> str:
    """docs/tensor_plans.md."""
    import transformers

    good = [row for row in rows if not row.error]
    alike = sum(row.equal == row.parameters for row in good)
    lines = [
        "# Strategy `tensor` beside the plans that transformers ships",
        "",
        f"Written by `python benchmarks/plans/tensor_plans.py --verify all` (transformers {transformers.__version__}, "
        "torch",
        f"{torch.__version__.split('+')[0]}). Every dense causal language model with a `base_model_tp_plan`: a tiny",
        "one of its default configuration, planned with `tensor` on tp=2. Nobody told the solver what these plans say:",
        "it knows that matrices are split and that activations may be summed. Compared is where each parameter lies:",
        "split on its first dim (`colwise`, `embedding_rowwise`, their gathered and packed kinds; stripes of a fused",
        "weight count as a split of their dim), on its second (`rowwise`), or whole.",
        "",
        f"{alike} of {len(good)} architectures are equal in every parameter, the others but for what is told below.",
        "*split alike*: of the parameters that their plan splits. *proven*: worst relative error of the float64 proof",
        "(loss, outputs, gradients), where it was run.",
        "",
        "| architecture | split alike | equal | proven |",
        "|---|---|---|---|",
    ]
    for row in good:
        lines.append(f"| {row.model} | {row.split_equal}/{row.split} | {row.equal}/{row.parameters} | {row.proof} |")
    lines += ["", "## Differences", ""]
    for row in good:
        for name, ours, theirs, count in row.differences:
            reason = reason_of(row.model, name, ours, theirs) or "not explained"
            lines.append(f"- {row.model}: `{name}` ({count}): ours `{ours}`, theirs `{theirs}`: {reason}.")
    lines += ["", "## Not planned", ""]
    lines += [f"- {row.model}: {row.error.splitlines()[0][:300]}" for row in rows if row.error]
    lines += ["", f"With experts, and so left out: {', '.join(experts)}.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="model types, separated by commas; default: all dense ones")
    parser.add_argument("--verify", default="", help="model types to prove in float64, separated by commas, or all")
    parser.add_argument("--rows", type=Path, help="file that keeps what was found, one JSON line per architecture")
    parser.add_argument("--write", action="store_true", help="write docs/tensor_plans.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.models.split(",") if options.models else None
    every = list(architectures())
    proven = [name for name, *_ in every if name not in LARGE] if options.verify == "all" else options.verify.split(",")
    rows = {row["model"]: Row(**row) for row in pages.kept(options.rows)}
    dense = [(name, cls) for name, cls, experts in every if not experts and (wanted is None or name in wanted)]
    for number, (name, architecture) in enumerate(dense, 1):
        if name not in rows or wanted:
            row = rows[name] = examine(name, architecture, name in proven)
            pages.keep(options.rows, row)
        print(f"[{number}/{len(dense)}] {text_of(rows[name])}", flush=True)
    if options.write:
        known = [rows[name] for name, _, moe in every if not moe and name in rows]
        text = page(known, [name for name, _, moe in every if moe])
        Path(__file__).parents[2].joinpath("docs", "tensor_plans.md").write_text(text)
    unexplained = sum(not reason_of(r.model, *d[:3]) for r in rows.values() for d in r.differences)
    print(f"{unexplained} differences without a reason, {sum(bool(row.error) for row in rows.values())} errors")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
