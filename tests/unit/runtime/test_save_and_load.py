"""Saving and loading a run on one rank: what comes back, what is refused, and what is left in the folder."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import convert, folders, offline, writing
from autopar.runtime.checkpoint.manifest import NAME, hash_of, read_manifest
from tests.unit.commands import output, run
from tests.unit.runtime.saved_run import Net, Run
from tests.unit.runtime.saved_run import one_rank as one_rank


@pytest.mark.moderate
def test_a_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Breaks if anything that a step depends on is not in the checkpoint: states, rates, random numbers, buffers."""
    run = Run()
    run.train(range(2))
    extra = {"best": float("inf"), "seen": (1, 2), "big": torch.arange(5000)}
    path = run.save(tmp_path / "run", 2, extra=extra)
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
    losses = run.train(range(2, 5))
    other = Run(seed=9)
    other.train(range(1))
    found = other.load(tmp_path / "run")
    assert (found.step, found.folder) == (2, path) and found.extra["best"] == float("inf")
    assert found.extra["seen"] == (1, 2) and torch.equal(found.extra["big"], extra["big"])
    assert [torch.rand(1).item(), random.random(), np.random.rand()] == drawn
    assert other.train(range(2, 5)) == losses
    state = run.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in other.model.state_dict().items())
    assert other.rates.state_dict() == run.rates.state_dict()


@pytest.mark.moderate
def test_other_libraries_read_the_weights(tmp_path: Path) -> None:
    """Breaks if files are no safetensors, or tensors have other names than the model gives them."""
    run = Run()
    path = run.save(tmp_path, 0)
    with safe_open(path / "model-00000.safetensors", "pt") as file:
        names = set(file.keys())
        assert torch.equal(file.get_tensor("first.weight"), run.model.first.weight.full_tensor())
    assert names == {name for name in Net().state_dict() if name != "last.weight"}


@pytest.mark.moderate
def test_the_plan_lies_beside_and_is_not_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if the plan in a step is not the one that ran, a damaged one is not told, or a load depends on it."""
    run = Run()
    at = run.save(tmp_path, 1)
    assert Plan.load(at / "plan.json").source == run.model.plan.source
    assert offline.check(at, offline.read(at)) == []
    assert {"autopar", "torch", "python"} <= offline.read(at).run.versions.keys()
    (at / "plan.json").write_text("{}")
    assert run.load(tmp_path).step == 1 and "what was loaded is whole" in caplog.text
    (problem,) = offline.check(at, offline.read(at))
    assert "plan.json" in problem
    (at / "plan.json").unlink()
    assert run.load(tmp_path).step == 1 and len(offline.check(at, offline.read(at))) == 1


@pytest.mark.moderate
def test_a_model_on_meta_and_one_without_a_plan(tmp_path: Path) -> None:
    """Breaks if weights need values before they are loaded, or are lost where the first batch places them."""
    run = Run()
    run.train(range(2))
    run.save(tmp_path, 2)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model: Any = autopar.compile(Net(), mesh, strategy="ddp")
    optimizer = torch.optim.AdamW(model.parameters())
    assert model.load(tmp_path, optimizer=optimizer).step == 2
    x = torch.randn(4, 6)
    assert float(model(x=x)) == float(run.model(x=x))
    assert optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    assert torch.equal(
        optimizer.state[model.first.weight]["exp_avg"].full_tensor(),
        run.optimizer.state[run.model.first.weight]["exp_avg"].full_tensor(),
    )


@pytest.mark.moderate
def test_older_steps_are_kept_and_a_step_is_never_overwritten(tmp_path: Path) -> None:
    """Breaks if a save removes what it should keep, or the same step's before the new one is there."""
    run = Run()
    paths = [run.save(tmp_path, step, keep=2) for step in (1, 2, 3)]
    assert [path.exists() for path in paths] == [False, True, True]
    again = run.save(tmp_path, 3, keep=2)
    assert again != paths[2] and not paths[2].exists() and again.exists()
    assert run.load(tmp_path).folder == again
    assert run.load(tmp_path, step=2).folder == paths[1]
    late = run.save(tmp_path, 1, keep=1)
    assert late.exists() and sorted(each.step for each in folders.steps_in(tmp_path)) == [1, 3]
    with pytest.raises(AutoparError, match=r"there is no checkpoint of step 9 .*steps 1, 3"):
        run.load(tmp_path, step=9)


@pytest.mark.moderate
def test_a_save_that_fails_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if half a step is left under a step's name, or the last whole one is touched."""
    run = Run()
    path = run.save(tmp_path, 1)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(AutoparError, match=r"extra\['f'\] cannot be saved: it is a builtins\.function"):
        run.save(tmp_path, 2, extra={"f": lambda: 0})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for place in ("write_file", "sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(writing, place, full)
            with pytest.raises(AutoparError, match=r"rank 0 could not save a checkpoint: OSError: .*No space left"):
                run.save(tmp_path, 2)
    assert {each.name for each in tmp_path.iterdir()} == {path.name, ".lock"}
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert run.load(tmp_path).step == 1


def test_what_a_killed_job_left_is_no_step(tmp_path: Path) -> None:
    """Breaks if what was being written is loaded, or stays for ever."""
    run = Run()
    path = run.save(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".new-000000002-1234")
    assert run.load(tmp_path).step == 1
    run.save(tmp_path, 3)
    assert not list(tmp_path.glob(".new*"))


@pytest.mark.moderate
def test_two_jobs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if one job removes another's steps."""
    monkeypatch.setattr(folders, "PATIENCE_S", 0.2)
    code = f"import fcntl, os, sys; f = os.open({str(tmp_path / '.lock')!r}, os.O_RDWR | os.O_CREAT); "
    code += "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    run = Run()
    with pytest.raises(AutoparError, match="another job saves into this folder"):
        run.save(tmp_path, 1)
    other.communicate("")
    assert run.save(tmp_path, 1).exists()


@pytest.mark.moderate
@pytest.mark.parametrize("seeded", [False, True])
def test_a_loader_goes_on_behind_what_was_taken(seeded: bool, tmp_path: Path) -> None:
    """Breaks if a run that goes on sees samples twice or never, in this round or the next, or draws other numbers."""

    def drawn(run: Run, loader: Any, rounds: int, save_at: int | None) -> list[Any]:
        found: list[Any] = []
        for _ in range(rounds):
            for batch in loader:
                found.append((batch["x"].full_tensor()[:, 0].tolist(), torch.rand(1).item()))
                if len(found) == save_at:
                    run.save(tmp_path, len(found), loader=loader)
        return found

    def parts() -> tuple[Run, Any]:
        run = Run()
        generator = torch.Generator().manual_seed(3) if seeded else None
        rows: Any = [{"x": torch.full((6,), float(number))} for number in range(20)]
        data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, generator=generator)
        return run, run.model.shard_loader(data)

    torch.manual_seed(5)
    whole = drawn(*parts(), 3, 8)
    torch.manual_seed(99)
    run, loader = parts()
    run.load(tmp_path, loader=loader)
    assert drawn(run, loader, 2, None) == whole[8:]


# -- damage


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest of somebody who knows how to hash."""
    content = json.loads((folder / NAME).read_bytes())["content"]
    change(content)
    text = json.dumps(content)
    (folder / NAME).write_text(f'{{"hash":"{hash_of(text.encode())}","content":{text}}}')


def lose_a_piece(content: dict[str, Any]) -> None:
    content["model"]["first.weight"]["pieces"].pop()


def double_a_piece(content: dict[str, Any]) -> None:
    content["model"]["first.weight"]["pieces"] *= 2


def swap_pieces(content: dict[str, Any]) -> None:
    one, other = (content["model"][name]["pieces"] for name in ("first.bias", "last.bias"))
    one[0][1], other[0][1] = other[0][1], one[0][1]


def lead_to(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("model-00000.safetensors")
        for tensor in content["model"].values():
            for piece in tensor["pieces"]:
                piece[0] = name

    return change


def reshape(content: dict[str, Any]) -> None:
    tensor = content["model"]["first.bias"]
    tensor["shape"], tensor["pieces"][0][3] = [3, 2], [3, 2]
    tensor["pieces"][0][2] = [0, 0]


def retype(content: dict[str, Any]) -> None:
    content["model"]["first.bias"]["dtype"] = "int32"


def rename(content: dict[str, Any]) -> None:
    content["model"]["other"] = content["model"].pop("first.bias") | {"names": ["other"]}


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a piece is lost": (lose_a_piece, r"first\.weight: its pieces do not have each element once: .* 0 of its 36"),
    "a piece is doubled": (double_a_piece, r"first\.weight: its pieces .*: two pieces have \[0:6, 0:6\]"),
    "pieces are swapped": (swap_pieces, r"(first|last)\.bias: bytes \d+ … \d+ are not as they were written"),
    "above": (lead_to("../model-00000.safetensors"), r"names the file '\.\./model.*, which is not in its folder"),
    "absolute": (lead_to("/etc/passwd"), "names the file '/etc/passwd', which is not in its folder"),
    "another shape": (reshape, r"first\.bias is another one in the checkpoint .*float32 \(3, 2\), here float32 \(6,\)"),
    "another dtype": (retype, r"first\.bias is another one in the checkpoint .*int32 \(6,\), here float32 \(6,\)"),
    "another name": (rename, r"the checkpoint lacks first\.bias"),
    "no format": (lambda content: content.update(format=2), r"the checkpoint is of format 2"),
    "more": (lambda content: content.update(code="x"), r"has 'code', which it should not"),
    "beyond": (lambda c: c["model"]["first.bias"]["pieces"][0].__setitem__(1, 10**9), r"first\.bias: its piece is at"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    run = Run()
    run.train(range(2))
    run.save(folder, 2)
    dist.destroy_process_group()
    return folder / "step-000000002"


def refused(folder: Path) -> str:
    with pytest.raises(AutoparError) as caught:
        Run().load(folder)
    return str(caught.value)


@pytest.mark.moderate
@pytest.mark.parametrize("change", MANIFESTS)
def test_manifests_that_do_not_fit(change: str, saved: Path, tmp_path: Path) -> None:
    """Breaks if a manifest that somebody changed is followed: other files, tensors in part, twice or of other kinds."""
    folder = shutil.copytree(saved, tmp_path / "copy")
    rewrite(folder, MANIFESTS[change][0])
    message = refused(folder)
    assert re.search(MANIFESTS[change][1], message), message


@pytest.mark.moderate
def test_every_flipped_bit_is_found(saved: Path, tmp_path: Path) -> None:
    """Breaks if a byte of weights, states, headers or the manifest is not looked at."""
    run, draw = Run(), random.Random(0)
    for number in range(40):
        folder = shutil.copytree(saved, tmp_path / str(number))
        file = draw.choice(sorted(folder.iterdir()))
        flip(file, draw.randrange(file.stat().st_size))
        said = f"the checkpoint is damaged .*{file.name}"
        if file.name == "plan.json":  # which no load needs
            assert re.search(said, offline.check(folder, offline.read(folder))[0])
        else:
            with pytest.raises(AutoparError, match=said):
                run.load(folder)
        shutil.rmtree(folder)


@pytest.mark.moderate
def test_files_that_are_gone_short_long_or_exchanged(saved: Path, tmp_path: Path) -> None:
    """Breaks if a file of another length, another's content, or a pipe is read."""
    folder = shutil.copytree(saved, tmp_path / "copy")
    model, state = folder / "model-00000.safetensors", folder / "state-00000.safetensors"
    content = model.read_bytes()
    model.write_bytes(content[:-1])
    assert f"it has {len(content) - 1} bytes, {len(content)} were written" in refused(folder)
    model.write_bytes(content + b"\0")
    assert "the checkpoint is damaged" in refused(folder)
    model.write_bytes(content)
    swap(model, state)
    assert "model-00000.safetensors" in refused(folder)
    swap(model, state)
    model.unlink()
    assert "cannot read a file of the checkpoint, model-00000.safetensors" in refused(folder)
    os.mkfifo(model)
    assert "a pipe, a socket or a device" in refused(folder)
    model.unlink()
    model.write_bytes(content)
    Run().load(folder)
    (folder / NAME).unlink()
    assert "there is no checkpoint to load" in refused(folder)


@pytest.mark.moderate
def test_the_command_line(saved: Path, tmp_path: Path) -> None:
    """Breaks if a command tells other things than are there, or weights are converted to others."""
    said = output("checkpoint", "inspect", saved.parent, "--tensors")
    assert "Net, 9 tensors" in said and "AdamW, 1 groups, 6 parameters" in said
    assert "first.weight  float32 (6, 6)  1 piece" in said
    assert json.loads(run("checkpoint", "inspect", saved, "--json")[0])["step"] == 2
    assert "are whole" in output("checkpoint", "verify", saved)
    out = tmp_path / "weights"
    assert "model.safetensors" in output("checkpoint", "convert", saved, out)
    model = Run(seed=4).model
    model.load_pretrained(out)
    other = Run(seed=5).model
    other.load(saved)
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "is there already" in output("checkpoint", "convert", saved, out, code=1)
    output("checkpoint", "convert", saved, tmp_path / "half", "--dtype", "bfloat16")
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert file.get_tensor("first.bias").dtype == torch.bfloat16
        assert file.get_tensor("norm.num_batches_tracked").dtype == torch.int64


def test_verify_names_all_that_is_damaged(saved: Path, tmp_path: Path) -> None:
    """Breaks if the command stops at the first problem, or damaged weights are converted."""
    folder = shutil.copytree(saved, tmp_path / "copy")
    manifest = read_manifest(folder)
    for name in ("first.bias", "last.bias"):
        file, begin = manifest.model[name].pieces[0][:2]
        flip(folder / file, begin + 3)
    flip(folder / "state-00000.safetensors", 12)
    said = output("checkpoint", "verify", folder, code=1)
    assert "first.bias: bytes" in said and "last.bias: bytes" in said and "its header is not" in said
    assert "3 problems" in said
    assert "first.bias" in output("checkpoint", "convert", folder, tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    assert "there is no checkpoint" in output("checkpoint", "verify", tmp_path / "none", code=1)


@pytest.mark.moderate
def test_shards_of_weights_have_an_index(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if weights of several files are not found, or in none of them."""
    monkeypatch.setattr(convert, "SHARD_BYTES", 100)
    files = convert.convert(saved, tmp_path / "out")
    assert len(files) > 3 and files[-1].name == "model.safetensors.index.json"
    model = Run(seed=4).model
    model.load_pretrained(tmp_path / "out")
    other = Run(seed=5).model
    other.load(saved)
    assert torch.equal(model.first.weight.full_tensor(), other.first.weight.full_tensor())


@pytest.mark.moderate
def test_prune(tmp_path: Path) -> None:
    """Breaks if the command removes other steps than the oldest."""
    job = Run()
    for step in (1, 2, 3):
        job.save(tmp_path, step)
    assert output("checkpoint", "prune", tmp_path, "--keep", "1").count("removed") == 2
    assert [each.step for each in folders.steps_in(tmp_path)] == [3]


@pytest.mark.moderate
def test_what_is_not_this_run(saved: Path) -> None:
    """Breaks if another optimizer takes the states, or one that lacks parameters is loaded in part."""
    run = Run()
    with pytest.raises(AutoparError, match="optimizer 0 of the checkpoint is a AdamW, this one a SGD"):
        run.model.load(saved, optimizer=torch.optim.SGD(run.model.parameters()))
    some = torch.optim.AdamW(run.model.first.parameters())
    with pytest.raises(AutoparError, match="the checkpoint's AdamW trains .*, which this one does not"):
        run.model.load(saved, optimizer=some)
    with pytest.raises(AutoparError, match="the checkpoint has 0 loaders, 1 are to be loaded"):
        run.model.load(saved, loader=object())
    strange = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(AutoparError, match=r"trains a parameter \(2,\) that is none of the model's"):
        run.model.save(saved.parent / "other", step=1, optimizer=strange)
    manifest = read_manifest(saved)
    assert manifest.run.model == "Net" and manifest.step == 2
