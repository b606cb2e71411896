"""`generate()` on a device: tokens of small models against eager, then the time of a token of a larger one.

What runs for every token is a CUDA graph there (`AUTOPAR_GRAPHS=0`: not): whether it was one is said, and that a cache
which a script keeps is not written by the next run.
"""

from __future__ import annotations

import copy
import statistics
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli.models import catalogue
from autopar.runtime.graphs import cuda_graph
from benchmarks.first_light.section import Section, alone
from benchmarks.serving.contenders import BUILT, Generate
from benchmarks.serving.tokens import SIZES, generated

MODELS = ("qwen2", "gpt2", "mamba", "lfm2", "t5")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 2}, "sampled": {"do_sample": True},
}  # fmt: skip
CONTENDERS = (
    "transformers", "autopar", "transformers, static cache, torch.compile", "autopar, compile_regions",
    "transformers, static cache",
)  # fmt: skip
NEW_TOKENS = 48
ROUNDS = 4


def run(section: Section) -> None:
    with alone(section):
        for name in MODELS[:1] if section.quick else MODELS:
            section.attempt(f"tokens: {name}", partial(_tokens, section, name))
        section.attempt("kept", partial(_kept, section))
        if section.on_cuda:
            section.attempt("no graph", partial(_no_graph, section))
        _times(section)


def _graphs(compiled: Any) -> int:
    """How many of its programs are graphs."""
    return compiled.autopar.repeats.num_graphs()


def _compiled(section: Section, model: Any, **options: Any) -> Any:
    mesh = init_device_mesh(section.device.type, (1,), mesh_dim_names=("dp",))
    return autopar.compile(copy.deepcopy(model), mesh, strategy="ddp", **options)


def _small(section: Section, name: str) -> tuple[Any, dict[str, Any]]:
    from tests.dist import generation

    model, prompt = generation.model_and_prompt(name)
    return model.to(section.device), {key: x.to(section.device) for key, x in prompt.items()}


def _tokens(section: Section, name: str) -> None:
    model, prompt = _small(section, name)
    compiled = _compiled(section, model)
    same: dict[str, bool] = {}
    for way, said in WAYS.items():
        wanted, *found = (_drawn(each, prompt, said) for each in (model, compiled, compiled))
        same[way] = all(torch.equal(each, wanted) for each in found)
    section.row(f"tokens: {name}", all(same.values()), same=same, graphs=_graphs(compiled))


def _drawn(model: Any, prompt: dict[str, Any], said: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    return model.generate(**prompt, **said, max_new_tokens=10, pad_token_id=0)


def _kept(section: Section) -> None:
    """A cache and logits that a script keeps, after others were generated."""
    model, prompt = _small(section, "qwen2")
    compiled = _compiled(section, model)
    said: dict[str, Any] = {
        "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    for _ in range(2):
        compiled.generate(**prompt, **said)
    first, plain = (each.generate(**prompt, **said) for each in (compiled, model))
    logits = max(float((a - b).abs().max()) for a, b in zip(first.logits, plain.logits, strict=True))
    states = [x.to_local() if hasattr(x, "to_local") else x for x in first.past_key_values.states()]
    before = [x.clone() for x in states]
    compiled.generate(**{**prompt, "input_ids": (prompt["input_ids"] * 7 + 3) % 90 + 5}, **said)
    same = all(torch.equal(a, b) for a, b in zip(before, states, strict=True))
    section.row("kept", same and logits < 1e-3, same=same, logits=logits, graphs=_graphs(compiled))


def _no_graph(section: Section) -> None:
    """Work that waits for the device is told before it is recorded, and one that fails while it is leaves no trace."""
    x = torch.rand(64, device=section.device)

    def waits() -> list[torch.Tensor]:
        return [x * float(x.sum())]

    said = ""
    try:
        cuda_graph(waits, waits)
    except RuntimeError as error:
        said = str(error)
    failed = False
    try:
        cuda_graph(lambda: [x], waits)
    except RuntimeError:
        failed = True
    torch.cuda.synchronize()
    drawn = torch.rand(4, device=section.device)
    values, replay = cuda_graph(lambda: [x + 1], lambda: [x + 1])
    replay()
    right = torch.equal(values[0], x + 1) and bool((drawn < 1).all())
    section.row("no graph", "waits for the device" in said and failed and right, said=said, failed=failed)


def _times(section: Section) -> None:
    """Milliseconds of a token, in turn; rows of each contender as soon as it has made tokens."""
    size = SIZES["1b" if section.on_cuda and not section.quick else "tiny"]
    loaded = catalogue.load(
        "llama", batch=size.prompt, device="cuda" if section.on_cuda else "cpu", dropout=0.0, dtype=size.dtype,
        overrides=dict(size.overrides),
    )  # fmt: skip
    base, prompt = loaded.model.eval(), loaded.batch["input_ids"]
    wanted = autopar.Generation(batch=size.prompt[0], prompt=size.prompt[1], new_tokens=NEW_TOKENS)
    ready: dict[str, Generate] = {}
    for name in CONTENDERS if section.on_cuda else CONTENDERS[:2]:
        made = section.attempt(f"made: {name}", partial(_made, section, name, base, wanted, prompt))
        if made is not None:
            ready[name] = made
    names = list(ready)
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if not section.is_late:
                taken[name].append(generated(ready[name], prompt, NEW_TOKENS)[1])
    for name, rounds in taken.items():
        if rounds:
            token, first = (1e3 * statistics.median(map(part, rounds)) for part in (_a_token, _first))
            section.row(f"token: {name}", None, ms=token, first_ms=first, rounds=len(rounds))


def _a_token(seconds: list[float]) -> float:
    return statistics.median(seconds[1:])


def _first(seconds: list[float]) -> float:
    return seconds[0]


def _made(section: Section, name: str, base: Any, wanted: autopar.Generation, prompt: Any) -> Generate:
    held = section.held()
    made = BUILT[name].make(copy.deepcopy(base), wanted)
    generated(made, prompt, NEW_TOKENS)
    _, seconds, cpu = generated(made, prompt, NEW_TOKENS)
    found: dict[str, Any] = {"ms": 1e3 * _a_token(seconds), "cpu_ms": 1e3 * _a_token(cpu), **section.memory(held)}
    model = getattr(made, "__self__", None)
    if hasattr(model, "autopar"):
        found |= {"graphs": _graphs(model), "predicted_ms": 1e3 * model.generation_plan.time_per_token_s}  # type: ignore[union-attr]
    section.row(f"made: {name}", None, **found)
    return made
