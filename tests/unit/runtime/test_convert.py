"""Weights of one kind of folder as another kind: equal to the bit, no more of them in memory than a part."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import convert as converting
from autopar.runtime.checkpoint import formats, offline
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.convert import convert
from autopar.runtime.checkpoint.formats import weights_of
from tests.unit.commands import output
from tests.unit.runtime.saved_run import Net, Run
from tests.unit.runtime.saved_run import one_rank as one_rank

WEIGHTS = {
    "a.weight": torch.arange(7 * 5 * 3, dtype=torch.float32).view(7, 5, 3),
    "a.bias": torch.arange(9, dtype=torch.bfloat16),
    "b": torch.tensor(3, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
}


def huggingface(folder: Path, weights: dict[str, Tensor] = WEIGHTS) -> Path:
    """Two files with an index."""
    folder.mkdir()
    names = list(weights)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: weights[name] for name in some}, folder / file)
    where = {name: file for file, some in halves.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def read(folder: Path, **options: Any) -> dict[str, Tensor]:
    """All of it, in parts of at most a few elements."""
    with weights_of(folder, **options) as found:
        return {
            name: torch.cat([part.reshape(-1) for part in each.parts()]).view(each.shape)
            for name, each in found.weights.items()
        }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize("part_bytes", [8, 50, 1 << 20])
def test_each_kind_becomes_each(part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if an element, dtype or name of a weight is lost or moved on a way through all three kinds of folders,
    in parts of rows, of pieces of rows, or whole; or torch or safetensors do not read what was made.
    """
    monkeypatch.setattr(formats, "PART_BYTES", part_bytes)
    monkeypatch.setattr(converting, "PART_BYTES", part_bytes)
    monkeypatch.setattr(converting, "SHARD_BYTES", 300)
    way = [huggingface(tmp_path / "0")]
    kinds: tuple[formats.Kind, ...] = ("torch", "autopar", "huggingface", "autopar", "torch", "huggingface")
    for number, to in enumerate(kinds, 1):
        way.append(tmp_path / str(number))
        convert(way[-2], way[-1], to=to)
        assert same(read(way[-1]), WEIGHTS), to
    into = {name: torch.full_like(each, 1) for name, each in WEIGHTS.items()}
    dcp.load(into, checkpoint_id=way[1], no_dist=True)
    assert same(into, WEIGHTS)
    loaded: dict[str, Tensor] = {}
    for path in way[3].glob("*.safetensors"):
        loaded |= load_file(path)
    assert same(loaded, WEIGHTS)
    step = way[2] / "step-000000000"
    assert offline.check(step, offline.read(step)) == []


def test_boxes(tmp_path: Path) -> None:
    """Breaks if a part of rows, or of one row, is read from another place."""
    for folder in (huggingface(tmp_path / "hf"), tmp_path / "torch", tmp_path / "own"):
        if not folder.exists():
            convert(tmp_path / "hf", folder, to="torch" if folder.name == "torch" else "autopar")
        with weights_of(folder) as found:
            for offsets, sizes in (((2, 1, 0), (3, 2, 3)), ((6, 4, 1), (1, 1, 2)), ((0, 0, 2), (7, 5, 1))):
                box = Box(offsets, sizes)
                assert torch.equal(found.weights["a.weight"].read(box), WEIGHTS["a.weight"][box.slices()])


@pytest.mark.moderate
def test_a_run_that_began_elsewhere(tmp_path: Path) -> None:
    """Breaks if what was converted from HuggingFace's or torch's folders is not loaded into a compiled model, by any of
    a tied weight's names.
    """
    whole = {name: each.clone() for name, each in Net().state_dict().items() if name != "first.weight"}
    dcp.save({"model": whole, "optimizer": {"step": 3}}, checkpoint_id=tmp_path / "torch", no_dist=True)
    convert(tmp_path / "torch", tmp_path / "own", to="autopar", prefix="model.")
    run = Run(seed=4)
    assert run.model.load(tmp_path / "own").step == 0
    plain = Net()
    plain.load_state_dict(run.model.state_dict())
    assert torch.equal(plain.first.weight, whole["last.weight"])
    assert same({name: each for name, each in plain.state_dict().items() if name != "first.weight"}, whole)


@pytest.mark.moderate
def test_torch_finds_a_prefix(tmp_path: Path) -> None:
    """Breaks if a script that saves {"model": …} cannot load what was made of our checkpoint."""
    run = Run()
    run.save(tmp_path / "run", 2)
    convert(tmp_path / "run", tmp_path / "torch", to="torch", prefix="model.")
    plain = Net()
    state = {"model": {name: each for name, each in plain.state_dict().items() if name != "last.weight"}}
    dcp.load(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    assert torch.equal(plain.first.weight, run.model.first.weight.full_tensor())


def test_inspect_reads_all_kinds(tmp_path: Path) -> None:
    """Breaks if a folder of others is taken for a damaged one of ours, or what is no weight goes unsaid."""
    huggingface(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    said = output("checkpoint", "inspect", tmp_path / "hf", "--tensors")
    assert "HuggingFace's safetensors" in said and "llama" in said and "a.weight  float32 (7, 5, 3)" in said
    dcp.save({"model": WEIGHTS, "step": 3}, checkpoint_id=tmp_path / "torch", no_dist=True)
    data = json.loads(output("checkpoint", "inspect", tmp_path / "torch", "--json"))
    assert data["kind"] == "torch" and data["others"] == ["step"] and data["model"]["model.b"]["shape"] == []
    assert "model-00001-of" not in output("checkpoint", "convert", tmp_path / "hf", tmp_path / "out", "--to", "torch")
    assert "torchh" in output("checkpoint", "convert", tmp_path / "hf", tmp_path / "no", "--to", "torchh", code=1)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_of_a_folder_runs(tmp_path: Path) -> None:
    """Breaks if metadata or a tensor of torch's folder is unpickled as its author likes, or what is damaged leaves a
    folder behind.
    """
    mark, folder = tmp_path / "ran", tmp_path / "torch"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    assert "somebody may want to run code here" in output("checkpoint", "inspect", folder, code=1)
    (folder / ".metadata").write_bytes(metadata)
    (path,) = folder.glob("*.distcp")
    path.write_bytes(pickle.dumps(Runs(mark)).ljust(path.stat().st_size, b"\0"))
    assert "w: " in output("checkpoint", "convert", folder, tmp_path / "out", code=1)
    assert not mark.exists() and not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}},
        {"w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": "4", "data_offsets": 16}},
        {"w": 3},
    ],
)
def test_headers_that_do_not_fit(header: dict[str, Any], tmp_path: Path) -> None:
    """Breaks if a header of a safetensors file is followed where it says bytes that are not the tensor's."""
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(AutoparError, match="damaged"):
        read(tmp_path)


def moe(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip
    configs = {
        "mixtral": lambda: transformers.MixtralConfig(**small, num_local_experts=11),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **small, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8
        ),
        "gemma": lambda: transformers.GemmaConfig(**small, head_dim=8, tie_word_embeddings=True),
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[name]())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_one_by_one_and_stacked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if experts that transformers stores one by one are not those of its model, in their order (11 of them: 10
    is not behind 1), gate before up; or the way back gives other names or numbers than transformers writes.
    """
    monkeypatch.setattr(formats, "PART_BYTES", 100)
    model = moe(name)
    model.save_pretrained(tmp_path / "single")
    assert any(".experts.1." in each for each in read(tmp_path / "single"))
    convert(tmp_path / "single", tmp_path / "stacked", experts="stacked")
    held = dict(model.state_dict())
    assert same(read(tmp_path / "stacked"), held)
    convert(tmp_path / "stacked", tmp_path / "again", experts="single")
    assert same(read(tmp_path / "again"), read(tmp_path / "single"))
    assert (tmp_path / "again" / "config.json").exists()
    loaded = type(model).from_pretrained(tmp_path / "again")
    assert all(torch.equal(value, held[key]) for key, value in loaded.state_dict().items())
    with pytest.raises(AutoparError, match="--model-type"):
        convert(huggingface(tmp_path / "plain"), tmp_path / "no", experts="single")


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    """Breaks if a HuggingFace folder with tied embeddings gets a second copy, or loses one, on the way."""
    model = moe("gemma")
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "own", to="autopar")
    convert(tmp_path / "own", tmp_path / "back")
    assert same(read(tmp_path / "back"), read(tmp_path / "hf")) and "lm_head.weight" not in read(tmp_path / "back")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("to", ["huggingface", "torch", "autopar"])
def test_a_model_larger_than_memory(to: str, tmp_path: Path) -> None:
    """Breaks if more than a part of the weights is in memory: 320 MiB, one tensor of 256 among them, within 150 MiB
    beyond what the process has at the beginning (the kernel refuses more). Each tensor has pages of its own: what
    malloc keeps between others for later counts, too, and is more one time and less the next.
    """
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"large": torch.ones(1 << 9, 1 << 17), "small": torch.ones(1 << 24)}, folder / "model.safetensors")
    script = f"""
import resource
from pathlib import Path
import torch
from autopar.runtime.checkpoint.convert import convert
import torch.distributed.checkpoint, transformers.conversion_mapping
rows = dict(row.split(":") for row in open("/proc/self/status").read().splitlines())
used = int(rows["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 150 * 2**20,) * 2)
try:
    torch.empty(200 * 2**20, dtype=torch.uint8)
    raise SystemExit("no limit")
except RuntimeError:
    pass
convert(Path({str(folder)!r}), Path({str(tmp_path / "first")!r}), to={to!r})
convert(Path({str(tmp_path / "first")!r}), Path({str(tmp_path / "second")!r}))
"""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_file(tmp_path / "second" / "model.safetensors")
    assert found["large"].shape == (1 << 9, 1 << 17) and all(bool((each == 1).all()) for each in found.values())


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_compiled_mixture_reads_experts_one_by_one(name: str, tmp_path: Path) -> None:
    """Breaks if compiled.load_pretrained does not read a mixture as transformers stores it, or reads other experts."""
    model = moe(name)
    model.save_pretrained(tmp_path)
    held = {key: each.clone() for key, each in model.state_dict().items()}
    with torch.device("meta"):
        other = type(model)(model.config)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    compiled: Any = autopar.compile(other, mesh, example_inputs=batch, strategy="zero3")
    compiled.load_pretrained(tmp_path)
    found = {key: each.full_tensor() for key, each in compiled.state_dict(keep_vars=True).items()}
    assert all(torch.equal(found[key], held[key]) for key in held)
