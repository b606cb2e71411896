"""Plans exported with weights: a file for each rank, folders for engines, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import autopar
from autopar.api.exporting import check_readable
from autopar.base.errors import AutoparError
from autopar.cli.main import app
from autopar.runtime.checkpoint import offline, sharded
from autopar.runtime.checkpoint.boxes import whole_of
from autopar.runtime.checkpoint.convert import convert
from autopar.runtime.checkpoint.formats import weights_of
from tests.dist.architectures import KINDS
from tests.unit.runtime import test_quantized
from tests.unit.runtime.saved_run import Net
from tests.unit.runtime.saved_run import one_rank as one_rank


class Packed(Net):
    """`Net` with two matrices in one, of which a rank holds two parts, and a type of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 12, bias=False)
        self.down = nn.Linear(6, 6, bias=False)
        self.short = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return super().forward(self.down(up * gate.sigmoid()) * self.short)


def planned(model: nn.Module, mesh: str, strategy: Any) -> autopar.Plan:
    inputs = {"x": torch.zeros(4, 6)}
    return autopar.plan(model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=inputs, strategy=strategy)


def stored(model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Its state as a checkpoint, without the tied weight's second name."""
    weights = {name: each.clone() for name, each in model.state_dict().items() if name != "last.weight"}
    save_file(weights, path)
    return weights


def held(plan: autopar.Plan, weights: dict[str, Tensor], rank: int) -> dict[str, list[Tensor]]:
    """The parts of each tensor that a rank holds, cut by what `holds` says of it."""
    found = {}
    for name, whole in weights.items():
        holding: Any = plan.holds(name)
        ranges = holding.ranges(rank)
        boxes = product(*ranges) if ranges is not None else ()
        parts = [whole[tuple(slice(*each) for each in box)] for box in boxes]
        found[name] = [part for part in parts if part.numel()]
    return {name: parts for name, parts in found.items() if parts}


def parts_in(folder: Path, file: str) -> dict[str, list[Tensor]]:
    """Of each tensor, the parts that a rank's files have."""
    found: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob(f"{file.removesuffix('.safetensors')}*"), key=lambda path: (len(path.name), path)):
        for name, each in load_file(path).items():
            found.setdefault(name, []).append(each)
    return found


def assert_same(found: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for name, parts in wanted.items():
        assert all(torch.equal(a, b) for a, b in zip(found[name], parts, strict=True)), name


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mesh", "strategy", "files"), [("dp=2,tp=2", {"dp": "ddp", "tp": "tensor"}, 2), ("dp=2,tp=2", "zero3", 4)]
)
def test_each_rank_has_what_it_holds(
    mesh: str, strategy: Any, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a file has another rank's part, or part of one, in another order or type; if ranks that hold the same
    have files of their own; if bytes are others than were planned; if torch's reader puts the parts elsewhere, or
    weights that are put together again differ by a bit.
    """
    torch.manual_seed(0)
    model = Packed()
    weights = stored(model, tmp_path / "model.safetensors")
    plan = planned(model, mesh, strategy)
    monkeypatch.setattr(sharded, "PART_BYTES", 40)  # rows by rows, and the columns of a rank of each
    monkeypatch.setattr(sharded, "MOST_FILES", 3)
    told: list[str] = []
    out = tmp_path / "out"
    exported = plan.export(
        "autopar", weights=tmp_path / "model.safetensors", folder=out, progress=lambda name, at, of: told.append(name)
    )
    firsts = sorted(path.name for path in out.glob("rank-?????-of-?????.safetensors"))
    assert len(firsts) == files and set(told) == set(weights)
    buffers = sum(each.nbytes for name, each in weights.items() if name.startswith("norm.") and "_" in name[5:])
    for rank in range(4):
        wanted = held(plan, weights, rank)
        assert_same(parts_in(out, firsts[rank % files]), wanted)
        assert exported.bytes_by_rank[rank] == sum(part.nbytes for parts in wanted.values() for part in parts)
        contents: Any = plan.holds(rank=rank)
        assert exported.bytes_by_rank[rank] == contents.num_bytes + buffers
    manifest = offline.read(out)
    for name, rows in manifest.copies.items():
        file, begin, offsets, *others = rows[0]
        moved: Any = (file, begin, [each + 1 for each in offsets], *others)
        (tmp_path / "manifest.json").write_bytes(replace(manifest, copies={name: [moved]}).encoded())
        with pytest.raises(AutoparError, match="is of no piece") if offsets else nullcontext():
            offline.read(tmp_path)
    assert "norm.running_mean" in manifest.copies
    assert max(exported.bytes_by_rank) == plan.cost.memory.parameters + buffers
    assert offline.check(out, manifest) == []
    state = {name: torch.zeros_like(each) for name, each in weights.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(out)), no_dist=True)
    assert all(torch.equal(state[name], each) for name, each in weights.items())
    convert(out, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[name], each) for name, each in weights.items())


@pytest.mark.moderate
def test_codes_keep_their_scales(tmp_path: Path) -> None:
    """Breaks if a rank has the scales or zeros of other codes than its own, or a plan that has weights gets codes; or
    if an engine is said to read codes that are none of its own.
    """
    _, dtype = test_quantized.saved("awq", tmp_path)
    mesh, batch = autopar.Mesh.parse("dp=2", hardware="cpu"), {"x": torch.zeros(4, 40, dtype=dtype)}
    for is_coded in (True, False):
        model: Any = test_quantized.Net().to(dtype)
        read: Any = autopar.store_weights(test_quantized.Net().to(dtype), like=tmp_path)
        model = read if is_coded else model
        plan = autopar.plan(model, mesh, example_inputs=batch, strategy="zero3", inference=True)
        out = tmp_path / f"out {is_coded}"
        plan.export("autopar", weights=tmp_path, folder=out)
        weights = {name: each if is_coded else attrgetter(name)(read) for name, each in model.state_dict().items()}
        for rank in range(2):
            assert_same(parts_in(out, f"rank-0000{rank}-of-00002.safetensors"), held(plan, weights, rank))
        assert any(name.endswith("weight_scales") for name in weights) == is_coded
        check_readable(plan, ["layer.qweight"], tmp_path)
        with pytest.raises(AutoparError, match="store_weights made codes") if is_coded else nullcontext():
            check_readable(plan, ["layer.weight"], tmp_path)


@pytest.mark.moderate
def test_another_mesh_loads_what_was_cut(tmp_path: Path) -> None:
    """Breaks if a rank of another mesh gets other values than those that its parts are put together of."""
    model = Packed()
    weights = stored(model, tmp_path / "model.safetensors")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    compiled: Any = autopar.compile(Packed(), mesh, example_inputs={"x": torch.zeros(4, 6)}, strategy="ddp")
    for name, strategy in (("split", "zero3"), ("whole", "ddp")):
        planned(model, "dp=2", strategy).export(
            "autopar", weights=tmp_path / "model.safetensors", folder=tmp_path / name
        )
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.zero_()
        compiled.load(tmp_path / name)
        found = {key: getattr(each, "_local_tensor", each) for key, each in compiled.state_dict().items()}
        assert all(torch.equal(found[key], each) for key, each in weights.items())


@pytest.mark.moderate
def test_weights_that_are_not_the_plans_are_refused(tmp_path: Path) -> None:
    """Breaks if a folder is left of weights that no rank can load, or one that is there is written into."""
    model = Net()
    weights = stored(model, tmp_path / "model.safetensors")
    plan = planned(model, "dp=2", "ddp")

    def refused(change: dict[str, Tensor | None], said: str, to: str = "autopar") -> None:
        changed = {name: each for name, each in {**weights, **change}.items() if each is not None}
        save_file(changed, tmp_path / "other.safetensors")
        with pytest.raises(AutoparError, match=said):
            plan.export(to, weights=tmp_path / "other.safetensors", folder=tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "other.safetensors"]

    refused({"first.weight": None}, r"lacks first\.weight")
    refused({"norm.running_mean": None}, r"lacks norm\.running_mean")
    refused({"first.bias": torch.zeros(7)}, r"first\.bias has another shape")
    refused({"more": torch.zeros(7)}, "has no more")
    refused({}, r"has no config\.json", "vllm")
    with pytest.raises(AutoparError, match="name both"):
        plan.export("autopar")
    with pytest.raises(AutoparError, match="unknown engine"):
        plan.export("vlm", weights=tmp_path / "model.safetensors", folder=tmp_path / "out")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "other.safetensors").write_bytes(content[:-4])
    with pytest.raises(AutoparError, match="damaged"):
        plan.export("autopar", weights=tmp_path / "other.safetensors", folder=tmp_path / "out")
    plan.export("autopar", weights=tmp_path / "model.safetensors", folder=tmp_path / "out")
    with pytest.raises(AutoparError, match="is there already"):
        plan.export("autopar", weights=tmp_path / "model.safetensors", folder=tmp_path / "out")
    path = next((tmp_path / "out").glob("rank-*"))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert any("not as they were written" in each for each in offline.check(path.parent, offline.read(path.parent)))


@pytest.mark.moderate
def test_a_folder_for_an_engine(tmp_path: Path) -> None:
    """Breaks if the command does not write what engines load: the weights of a checkpoint bit by bit under their
    names, its configuration and tokenizer but no code of it, and how to launch it from wherever the folder is.
    """
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    theirs = MixtralForCausalLM(MixtralConfig(**{**KINDS["mixtral"][1], "num_hidden_layers": 1}))
    source = tmp_path / "hf"
    theirs.save_pretrained(source, max_shard_size="40KB")
    for name in ("tokenizer.json", "modeling_own.py", "old.bin"):
        (source / name).write_text("{}")
    file, out = tmp_path / "plan.json", tmp_path / "out"

    def said(code: int, *words: str) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, done.output
        return done.output

    said(0, "plan", str(source), "--mesh", "tp=2", "--strategy", "tensor", "--generate", "2x8x4", "--save", str(file))
    engine = ["--to", "sglang", "--weights", str(source)]
    assert "--model" in said(
        2, "export", str(file), "--to", "transformers-tp-plan", "--weights", str(source), "-o", "x"
    )
    output = said(0, "export", str(file), *engine, "--model", str(source), "-o", str(out))
    assert f"--model-path {out} --tp-size 2 --context-length 12\n" in output and "sharded_state" in output
    assert '--model-path "$(dirname "$0")" --tp-size 2' in (out / "serve.sh").read_text()
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "serve.sh"} <= names
    assert not names & {"modeling_own.py", "old.bin", "model.safetensors.index.json"}
    with weights_of(source) as found:
        kept = load_file(out / "model.safetensors")
        assert kept.keys() == found.weights.keys()
        assert all(torch.equal(kept[name], each.read(whole_of(each.shape))) for name, each in found.weights.items())
    loaded: Any = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(each, theirs.state_dict()[name]) for name, each in loaded.state_dict().items())
    mine = ["export", str(file), "--to", "autopar", "--weights", str(source), "-o", str(tmp_path / "own")]
    assert "2 ranks" in said(0, *mine) and "is there already" in said(2, *mine)
    with safe_open(tmp_path / "own" / "rank-00001-of-00002.safetensors", "pt") as opened:
        said_of = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
        first = opened.get_slice("lm_head.weight").get_shape()[0]
        assert said_of["lm_head.weight"]["saved_offsets"] == [96 - first, 0]
