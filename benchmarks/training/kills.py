"""Is anything ever lost? Groups of ranks are killed at random moments of a run that saves after every step, and
checkpoints are damaged at random.

    python benchmarks/training/kills.py [--kills 100] [--damages 100] [--ranks 2,4] [--seed 0] [--write]

**Kills.** A run steps and saves, every second time while the next step runs. A random time after a random step all of
its ranks, or one of them alone, get SIGKILL. The same script then goes on in the same folder (`resume_or_start`), and
says: is the step that it goes on from the last one whose save had returned, or a later one; are its parameters and
states bit by bit those that a run without kills had at that step; and those of every step that it does from there on,
until it is killed in turn. **Damages.** Flipped bytes, files that are cut, lengthened, missing or exchanged, and
manifests that are well-formed and say something else: each has to be refused with the name of the file, tensor or
entry.

Ranks are forked from one process that has imported torch, so that a round takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor
from autopar.runtime.checkpoint.folders import steps_in
from autopar.runtime.checkpoint.manifest import NAME, PLAN, read_manifest
from autopar.runtime.checkpoint.offline import check

ROOT = Path(__file__).parents[2]
WIDTH, STEPS, BEGINS_WITHIN_S, LASTS_S = 384, 400, 120.0, 0.5
WRONG = 3
"""What a rank ends with that found something wrong."""
MESHES: dict[int, tuple[dict[str, int], Any]] = {
    1: ({"dp": 1}, "ddp"),
    2: ({"dp": 2}, "zero3"),
    4: ({"dp": 2, "tp": 2}, {"dp": "zero2", "tp": "tensor"}),
}


class Net(nn.Module):
    """With a tied weight, a buffer that a step changes, dropout: all that a step depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.drop(self.norm(self.first(x)).relu())) - x).square().mean()


def digest(model: Any, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits that this rank holds."""
    found = hashlib.blake2b(digest_size=8)
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        for each in (value, *(v for _, v in sorted(optimizer.state.get(value, {}).items()))):
            found.update(name.encode() + bytes(local_tensor_of(each).contiguous().view(torch.uint8).numpy()))
    return found.hexdigest()


def local_tensor_of(value: Any) -> Tensor:
    local: Tensor = local_tensor(value) if hasattr(value, "device_mesh") else value.detach()
    return local.detach().reshape(-1)


def work(rank: int, num: int, place: Path, known: dict[int, str] | None, steps: int) -> dict[int, str]:
    """One rank of a run. known: the digests of each step of a run without kills; without them, there are none yet."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=num, timeout=timedelta(seconds=60)
    )
    sizes, strategy = MESHES[num]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model: Any = autopar.compile(Net(), mesh, example_inputs={"x": torch.zeros(8, WIDTH)}, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = autopar.resume_or_start(model, place / "run", optimizer=optimizer)
    found: dict[int, str] = {}

    def see(step: int) -> None:
        if step:
            found[step] = digest(model, optimizer)
            if known is not None and known[step] != found[step]:
                (place / f"wrong-{rank}").write_text(f"step {step} is not that of the run without kills")
                os._exit(WRONG)

    see(run.step)
    saved = place / "saved"
    if known is not None:
        if saved.exists() and run.step < int(saved.read_text() or 0):
            (place / f"wrong-{rank}").write_text(f"it goes on from step {run.step}, {saved.read_text()} was saved")
            os._exit(WRONG)
        (place / f"begun-{rank}").write_text(str(run.step))
    for step in range(run.step + 1, steps + 1):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x=x).backward()
        optimizer.step()
        optimizer.zero_grad()
        see(step)
        if known is not None:
            model.save(place / "run", step=step, optimizer=optimizer, wait=step % 2 == 0)
            if rank == 0 and step % 2 == 0:
                (place / "saved.new").write_text(str(step))
                (place / "saved.new").rename(saved)
    model.autopar.background.finish()
    dist.destroy_process_group()
    return found


def forked(act: Callable[[], object]) -> int:
    """The process that does it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def reference(num: int, folder: Path) -> list[dict[int, str]]:
    """Each rank's digests of every step of a run without kills or checkpoints."""
    place = folder / f"reference-{num}"
    place.mkdir()

    def one(rank: int) -> None:
        (place / f"{rank}.json").write_text(json.dumps(work(rank, num, place, None, STEPS)))

    pids = [forked(lambda rank=rank: one(rank)) for rank in range(num)]
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(codes), codes
    return [{int(k): v for k, v in json.loads((place / f"{r}.json").read_text()).items()} for r in range(num)]


@dataclass
class Told:
    """Of all rounds. during: kills in which a save was under way, by what was killed."""

    kills: Counter[str] = field(default_factory=Counter)
    during: int = 0
    resumed: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)


def rounds(num: int, kills: int, folder: Path, draw: random.Random) -> Told:
    """Runs of `num` ranks that are killed so many times."""
    known, told = reference(num, folder), Told()
    place = folder / f"run-{num}"
    while sum(told.kills.values()) < kills:
        if not place.exists():
            place.mkdir()
        for path in place.glob("begun-*"):
            path.unlink()
        (place / "store").unlink(missing_ok=True)
        pids = [forked(lambda rank=rank: work(rank, num, place, known[rank], STEPS)) for rank in range(num)]
        until = time.monotonic() + BEGINS_WITHIN_S
        while len(list(place.glob("begun-*"))) < num and time.monotonic() < until and not _ended(pids):
            time.sleep(0.01)
        begun = [int(path.read_text() or 0) for path in place.glob("begun-*")]
        wanted, until = max(begun, default=0) + draw.randrange(5), time.monotonic() + BEGINS_WITHIN_S
        while _newest(place / "run") < wanted and time.monotonic() < until and not _ended(pids):
            time.sleep(0.005)
        time.sleep(draw.random() * LASTS_S)
        alone = draw.random() < 0.5
        is_saving = any(path.name.startswith(".new-") for path in (place / "run").glob(".new-*"))
        for pid in [draw.choice(pids)] if alone else pids:
            os.kill(pid, signal.SIGKILL)
        if alone:
            time.sleep(draw.random())  # the others find it, or save on
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        wrong = [path.read_text() for path in place.glob("wrong-*")]
        if len(begun) < num and not wrong:
            wrong = ["it did not begin again"]
        told.kills["one rank" if alone else "all ranks"] += 1
        told.during += is_saving
        told.resumed += bool(begun) and min(begun) > 0
        told.wrong += wrong
        last = int((place / "saved").read_text()) if (place / "saved").exists() else 0
        told.checked += max(0, last - min(begun, default=last))
        if wrong or last > STEPS - 60:
            shutil.rmtree(place)
        print(f"{num} ranks, kill {sum(told.kills.values())}: from step {begun}, saved {last} {wrong}", flush=True)
    return told


def _newest(folder: Path) -> int:
    """The last step that is there."""
    return max((saved.step for saved in steps_in(folder)), default=0)


def _ended(pids: list[int]) -> bool:
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in pids)


# ------------------------------------------------------------------------------------------------------------ damages


def _any_file(at: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(at.iterdir()))


def _flip(at: Path, draw: random.Random) -> str:
    path = _any_file(at, draw)
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"byte {place} of {path.name}"


def _cut(at: Path, draw: random.Random) -> str:
    path = _any_file(at, draw)
    size = draw.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def _lengthen(at: Path, draw: random.Random) -> str:
    path = _any_file(at, draw)
    with path.open("ab") as file:
        file.write(draw.randbytes(1 + draw.randrange(4096)))
    return f"{path.name} with more bytes"


def _lose(at: Path, draw: random.Random) -> str:
    path = _any_file(at, draw)
    path.unlink()
    return f"{path.name} missing"


def _exchange(at: Path, draw: random.Random) -> str:
    one, other = draw.sample(sorted(at.glob("*.safetensors")), 2)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return f"{one.name} and {other.name} exchanged"


def _double(at: Path, draw: random.Random) -> str:
    one, other = draw.sample(sorted(at.glob("*.safetensors")), 2)
    shutil.copyfile(one, other)
    return f"{one.name} in the place of {other.name}"


def _manifest(at: Path, draw: random.Random) -> str:
    """A manifest with its hash, that says something else of one piece."""
    manifest = read_manifest(at)
    name = draw.choice([name for name, each in manifest.model.items() if each.pieces and each.shape])
    tensor = manifest.model[name]
    number = draw.randrange(len(tensor.pieces))
    file, begin, offsets, sizes, hashes = tensor.pieces[number]
    how = draw.choice(["file", "begin", "offset", "size", "lost", "twice", "elsewhere", "dtype", "shape", "name"])
    if how == "lost":
        del tensor.pieces[number]
    elif how == "twice":
        tensor.pieces.append(tensor.pieces[number])
    elif how in ("dtype", "shape", "name"):
        changed: dict[str, dict[str, Any]] = {
            "dtype": {"dtype": "int32" if tensor.dtype == "float32" else "float32"},
            "shape": {"shape": [2 * tensor.shape[0], *tensor.shape[1:]]},
            "name": {"names": ["other.weight"]},
        }
        del manifest.model[name]
        manifest.model["other.weight" if how == "name" else name] = replace(tensor, **changed[how])
    else:
        others = [each for each in manifest.files if each != file]
        row = {
            "file": (others[0], begin, offsets, sizes, hashes),
            "begin": (file, begin + 4, offsets, sizes, hashes),
            "offset": (file, begin, [offsets[0] + 1, *offsets[1:]], sizes, hashes),
            "size": (file, begin, offsets, [sizes[0] + 1, *sizes[1:]], hashes),
            "elsewhere": ("../../secret.safetensors", begin, offsets, sizes, hashes),
        }[how]
        tensor.pieces[number] = row
    (at / NAME).write_bytes(manifest.encoded())
    return f"a manifest, {how} of {name}"


DAMAGES = (_flip, _cut, _lose, _flip, _exchange, _double, _manifest, _flip, _manifest, _lengthen)


def damaged(num: int, at: Path, folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """What was done, and what was said; "" where it was loaded."""
    model, optimizer = _reader(folder)
    named = set(read_manifest(at).tensors())
    for number in range(num):
        place = folder / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(at, place)
        did = DAMAGES[number % len(DAMAGES)](place, draw)
        try:
            model.load(place, optimizer=optimizer)
            # The plan of the run that saved is not needed to load: whoever asks for all is told.
            said = "; ".join(check(place, read_manifest(place))).replace(f"{place}/", "")
            said = said if PLAN in did and PLAN in said else ""
        except AutoparError as error:
            said = str(error).replace(f"{place}/", "")
            if not any(name in said for name in (*named, "other.weight", ".safetensors", "manifest", "step-", PLAN)):
                said = f"NOT NAMED: {said}"
        yield did, said


def _reader(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/reader", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = autopar.compile(Net(), mesh, example_inputs={"x": torch.zeros(8, WIDTH)}, strategy="ddp")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def all_damages(num: int, folder: Path, seed: int) -> list[tuple[str, str]]:
    """In a process of its own, of a checkpoint of two ranks."""
    place = folder / "whole"
    place.mkdir()
    pids = [forked(lambda rank=rank: work(rank, 2, place, _Any(), 2)) for rank in range(2)]
    assert not any(os.waitpid(pid, 0)[1] for pid in pids)
    result = folder / "damages.json"

    def act() -> None:
        torch.set_num_threads(1)
        at = place / "run" / "step-000000002"
        result.write_text(json.dumps(list(damaged(num, at, folder, random.Random(seed)))))

    code = os.waitpid(forked(act), 0)[1]
    assert not code, code
    found: list[tuple[str, str]] = [(did, said) for did, said in json.loads(result.read_text())]
    return found


class _Any(dict[int, str]):
    """Whatever a step's digest is."""

    def __getitem__(self, step: int) -> Any:
        return _Like()


class _Like:
    def __ne__(self, other: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="for each number of ranks")
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="benchmarks/results/kills-DATE.md")
    options = parser.parse_args()
    lines, is_wrong = [f"# Kills and damages, {date.today()}", ""], False
    lines += [
        f"`python benchmarks/training/kills.py --kills {options.kills} --damages {options.damages} --ranks "
        f"{options.ranks} --seed {options.seed}`; torch {torch.__version__}, Python {platform.python_version()}, gloo, "
        "local disk.",
        "",
        "| ranks | kills (all ranks, one rank) | during a save | went on from a checkpoint | steps compared | wrong |",
        "| --: | --: | --: | --: | --: | --: |",
    ]
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        for num in map(int, filter(None, options.ranks.split(","))):
            told = rounds(num, options.kills, folder, random.Random(options.seed + num))
            is_wrong = is_wrong or bool(told.wrong)
            lines.append(
                f"| {num} | {sum(told.kills.values())} ({told.kills['all ranks']}, {told.kills['one rank']}) | "
                f"{told.during} | {told.resumed} | {told.checked} | {len(told.wrong)} |"
            )
            lines += [f"WRONG: {each}" for each in told.wrong]
        found = all_damages(options.damages, folder, options.seed) if options.damages else []
    bad = [(did, said) for did, said in found if not said or said.startswith("NOT NAMED")]
    lines += ["", f"{len(found)} damages: {len(found) - len(bad)} refused by name, {len(bad)} not.", ""]
    lines += [f"NOT REFUSED BY NAME: {did}: {said}" for did, said in bad]
    lines += ["The first of each kind, and what was said:", ""]
    lines += [f"- {did}: {said.splitlines()[0][:220]}" for did, said in found[:10] if said]
    if options.write:
        (ROOT / "benchmarks" / "results" / f"kills-{date.today()}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(1 if bad or is_wrong else 0)


if __name__ == "__main__":
    main()
