"""Options that several commands of `autopar` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str, typer.Argument(help="A shipped name (autopar models), a config.json or its folder, or module:callable.")
]
MeshText = Annotated[str, typer.Option("--mesh", help="Axes, slowest link first: dp=4,tp=2.")]
StrategyText = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="auto, a name (autopar strategies: ddp, zero1, zero2, zero3, hsdp, tensor, tensor+sequence, tensor2d, …), "
        "or one for each axis: dp=zero2,tp=tensor+sequence; node=hsdp,dp=hsdp; tp0=tensor2d,tp1=tensor2d; "
        "pp=pipeline(1f1b) (gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev, or a CSV of actions).",
    ),
]
Batch = Annotated[str | None, typer.Option("--batch", help="The global batch, sequences x tokens: 8x2048.")]
Imbalance = Annotated[
    float | None,
    typer.Option(
        "--expert-imbalance",
        help="Tokens of the busiest rank of experts, a mean rank's being 1. Default: the hardware's.",
    ),
]
HardwareName = Annotated[str, typer.Option("--hardware", help="A profile (autopar hardware) or a .toml file.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="The same architecture with small sizes.")]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        help="Parts of the batch that a step runs one after the other. Default: 1; with a pipeline the best number.",
    ),
]
Halves = Annotated[
    bool | None,
    typer.Option(
        "--halves/--no-halves",
        help="Of mixtures: two microbatches together, tokens of one travel while the other is computed; or never. "
        "Default: where that is faster.",
    ),
]
Generate = Annotated[
    str | None,
    typer.Option(
        "--generate",
        help="Plan generate(): sequences x tokens of the prompt (/ those of a chunk) x new tokens, 8x2048x512.",
    ),
]
Cache = Annotated[
    str | None, typer.Option("--cache", help="How generate() stores keys and values: fp8, int8, int4. Default: as is.")
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", help="How weights are stored: int8, int4, mxfp4, fp8, fp8-tensor, fp8-block, or as in FOLDER."
    ),
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Another number of layers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data for machines.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan's file (autopar plan MODEL --save plan.json).")]
OfPhase = Annotated[
    Literal["prefill", "decode"] | None,
    typer.Option("--of", help="Of a plan for generate() (--generate): the plan of the prompt, or that of a token."),
]
OfModel = Annotated[
    str | None,
    typer.Option("--model", help="The model, unless it is one of `autopar models`: module:callable, config.json."),
]
