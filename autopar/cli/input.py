"""What the commands of `autopar` read: meshes, strategies, batches, sizes, models, plans.

Nothing here imports torch before it is called: see `cli.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autopar.base.errors import AutoparError
from autopar.base.progress import Steps

if TYPE_CHECKING:
    from autopar.api.generation import GenerationPlan
    from autopar.api.plan import Plan
    from autopar.cli.models.catalogue import LoadedModel
    from autopar.machine.mesh import Mesh
    from autopar.planner.generation import Generation
    from autopar.strategies.names import Strategy


def read_limits(texts: list[str]) -> dict[str, int]:
    """`tp=8` and the like, of a search."""
    found: dict[str, int] = {}
    for text in texts:
        match = re.fullmatch(r"(pp|dp|cp|tp)=(\d+)", text)
        if match is None or int(match[2]) < 1:
            raise AutoparError(f"{text!r} limits no axis", remedy="write tp=8, with pp, dp, cp or tp")
        found[match[1]] = int(match[2])
    return found


def parse_batch(text: str) -> tuple[int, int]:
    """`8x2048`, or `8` for models without tokens."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
    if match is None:
        raise AutoparError(f"{text!r} is not a batch", remedy="write SEQUENCESxTOKENS, as in 8x2048")
    return int(match[1]), int(match[2] or 1)


def parse_generate(text: str | None, cache: str | None = None, weights: str | None = None) -> Generation | None:
    """`8x2048x512`: sequences, tokens of the prompt, new tokens; `8x2048/256x512`: the prompt in chunks of 256.
    cache: how keys and values are stored.
    """
    from autopar.planner.generation import Generation

    if text is None:
        if cache is not None or weights is not None:
            name = "--weights" if cache is None else "--cache"
            raise AutoparError(f"{name} is of --generate", remedy="add --generate 8x2048x512")
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:/([1-9]\d*))?x([1-9]\d*)", text.strip())
    if match is None:
        raise AutoparError(
            f"{text!r} is nothing to generate",
            remedy="write SEQUENCESxPROMPTxNEW, as in 8x2048x512, or SEQUENCESxPROMPT/CHUNKxNEW",
        )
    chunk = None if match[3] is None else int(match[3])
    return Generation(int(match[1]), int(match[2]), int(match[4]), chunk=chunk, cache=cache)


def read_generate(
    generate: str | None, batches: str | None, batch: str | None, halves: bool | None = None
) -> tuple[Generation | None, tuple[int, ...] | None]:
    """What a search is for: None for training; and the batches that it compares, None for the usual ones."""
    if generate is None:
        if batches is not None:
            raise AutoparError("--batches goes with --generate", remedy="use --batch for training")
        return None, None
    if halves is not None:
        raise AutoparError("--halves is for training", remedy="leave it out: generate() has no microbatches")
    if batch is not None:
        raise AutoparError("--generate says the tokens", remedy="leave --batch out; --batches 1,8,64 names batches")
    if batches is None:
        return parse_generate(generate), None
    texts = [text.strip() for text in batches.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,8}", text) for text in texts):
        raise AutoparError(f"{batches!r} names no batches", remedy="write numbers of sequences, as in 1,8,64")
    return parse_generate(generate), tuple(map(int, texts))


def make_generation_plan(
    steps: Steps,
    loaded: LoadedModel,
    mesh: Mesh,
    strategy: Strategy,
    generate: Generation,
    precision: str | None = None,
    weights: str | None = None,
    **options: Any,
) -> GenerationPlan:
    """The plan of both phases, with the passes of each shown as they run. precision: what parameters are stored in;
    weights: those of linear layers.
    """
    import autopar
    from autopar.base.stored_weights import WAYS
    from autopar.planner.inputs import to_dtype

    loaded.model.eval().to(to_dtype(precision))
    if weights is not None:
        is_way = weights in WAYS or not Path(weights).exists()
        autopar.store_weights(loaded.model, weights if is_way else None, like=None if is_way else weights)

    def progress(name: str, number: int, total: int) -> None:
        steps.begin(name)

    return autopar.plan_generation(loaded.model, mesh, generate, strategy=strategy, progress=progress, **options)


def parse_bytes(text: str) -> float:
    """`60GiB`, `80GB`, `123456`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise AutoparError(f"{text!r} is not a number of bytes", remedy="write a number and a unit, as in 60GiB")
    if not match[2]:
        return float(match[1])
    return float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)


def read_mesh(text: str, hardware: str) -> Mesh:
    """The mesh, on this hardware."""
    from autopar.machine.mesh import Mesh

    return Mesh.parse(text, hardware=hardware)


def read_strategy(text: str, mesh: str, hardware: str) -> Strategy:
    """The strategy, known to exist and to fit the mesh's axes."""
    from autopar.strategies.names import parse, resolve

    found = parse(text)
    resolve(found, read_mesh(mesh, hardware))
    return found


def load_model(
    steps: Steps,
    model: str,
    batch: str | None,
    tiny: bool,
    layers: int | None,
    device: Any,
    dropout: float | None = None,
) -> LoadedModel:
    """The model and a batch of it, as the options say."""
    from autopar.cli.models import catalogue

    sizes = parse_batch(batch) if batch else None
    overrides = {}
    if layers is not None:
        overrides = {"num_layers" if model in catalogue.PLAIN else "num_hidden_layers": layers}
    steps.begin(f"building {model}")
    return catalogue.load(model, tiny=tiny, batch=sizes, device=device, dropout=dropout, overrides=overrides)


def with_spec(plan: Plan, model: str, batch: str | None, tiny: bool, layers: int | None) -> Plan:
    """The plan, with how its model was built, so that `autopar explain` can build it again."""
    from dataclasses import replace

    from autopar.planner.plan.record import ModelSpec

    return replace(plan, model_spec=ModelSpec(model, tiny, parse_batch(batch) if batch else None, layers))


def phases_with_spec(
    phases: GenerationPlan, model: str, batch: str | None, tiny: bool, layers: int | None
) -> GenerationPlan:
    """A plan for `generate()`, with how its model was built."""
    from dataclasses import replace

    prefill, decode = (with_spec(each, model, batch, tiny, layers) for each in phases)
    return replace(phases, prefill=prefill, decode=decode)


def read_plans(path: Path) -> Plan | GenerationPlan:
    """What a plan's file holds: one plan, or for `generate()` those of a prompt and a token."""
    from autopar.api.generation import GenerationPlan
    from autopar.api.plan import Plan
    from autopar.planner.plan.json import is_of_phases

    return GenerationPlan.load(path) if is_of_phases(path) else Plan.load(path)


def read_plan(path: Path, of: str | None) -> Plan:
    """One plan. of: which of those of a file for `generate()`."""
    from autopar.api.generation import GenerationPlan

    found = read_plans(path)
    if isinstance(found, GenerationPlan):
        if of is None:
            raise AutoparError(
                f"{path} has two plans, of a prompt and of a token", remedy="say which: --of prefill, or --of decode"
            )
        return found.phases[of]
    if of is not None:
        raise AutoparError(f"{path} is no plan for generate()", values=f"--of {of}", remedy="leave --of out")
    return found


def model_of_plan(
    steps: Steps, path: Path, plan: Plan, model: str | None, batch: str | None, tiny: bool, layers: int | None
) -> LoadedModel:
    """The model that a plan was made for: as the options say, else the bundled one that its file names."""
    if model is None:
        if batch is not None or tiny or layers is not None:
            raise AutoparError("--batch, --tiny and --layers say how --model is built", remedy="add --model MODEL")
        if not names_bundled_model(plan):
            raise AutoparError(
                f"{path} does not name a model that comes with autopar",
                values=f"it names {_named(plan)}; a plan's file is data: nothing that it names is imported or opened",
                remedy="add --model MODEL (package.module:function, a configuration), with --tiny, --batch, --layers",
            )
        spec = plan.model_spec
        assert spec is not None
        model, tiny, layers = spec.spec, spec.tiny, spec.layers
        batch = "x".join(map(str, spec.batch)) if spec.batch else None
    return load_model(steps, model, batch, tiny, layers, "meta")


def as_planned(model: Any, plan: Plan, weights: Path | None) -> Any:
    """The model, with its weights as codes where the plan has codes and the checkpoint, too."""
    if weights is None or not any(each.name.endswith("_codes") for each in plan.interface.parameters):
        return model
    import autopar

    return autopar.store_weights(model, like=weights)


def names_bundled_model(plan: Plan) -> bool:
    """Whether the plan says how its model is built, by a name of the catalogue: others may be anybody's code."""
    from autopar.cli.models import catalogue

    return plan.model_spec is not None and plan.model_spec.spec in catalogue.names()


def _named(plan: Plan) -> str:
    return repr(plan.model_spec.spec[:80]) if plan.model_spec is not None else "none"


def make_plan(steps: Steps, loaded: LoadedModel, mesh: Mesh, strategy: Strategy, **options: Any) -> Plan:
    """The plan, with its passes shown as they run."""
    import autopar

    def progress(name: str, number: int, total: int) -> None:
        steps.begin(name)

    return autopar.plan(
        loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, progress=progress, **options
    )


@contextmanager
def errors(code: int) -> Iterator[None]:
    """An AutoparError is one message on stderr and this exit code."""
    try:
        yield
    except AutoparError as error:
        typer.echo(f"autopar: {error}", err=True)
        raise typer.Exit(code) from None
