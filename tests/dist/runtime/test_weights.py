from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autopar.base.errors import AutoparError
from autopar.runtime.module import take_over
from tests.dist.launch import ChildError, launch
from tests.dist.runtime.work import compiled_mlp, full, make_mesh, mlp_executable
from tests.unit.runtime.programs import Mlp, make_batch, make_mlp

pytestmark = pytest.mark.dist


class Scaled(Mlp):
    """A parent that draws again a part of what its children drew, as GPT-2's blocks do."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.down.weight[:1].mul_(10.0)
        nn.init.zeros_(self.up.bias)


def meta_mlp(plan: str, cls: type[Mlp] = Mlp, lazy: bool = False) -> Any:
    with torch.device("meta"):
        model = cls().to(torch.float64)
    return compiled_mlp(plan, model, lazy=lazy)


def initialized(plan: str, seed: int, lazy: bool = False) -> dict[str, Tensor]:
    model = meta_mlp(plan, Scaled, lazy)
    model.init_weights(seed)
    if lazy:
        model(**make_batch())
    return {name: full(value) for name, value in model.state_dict().items()}


def test_fresh_weights_do_not_depend_on_the_mesh() -> None:
    """Breaks when a shard is drawn as a shard, or a parent's partial redraw starts from other numbers."""
    found = [
        launch(initialized, 2, "zero3", 3)[0],
        launch(initialized, 2, "tensor", 3, True)[1],
        launch(initialized, 4, "zero3+tensor", 3)[2],
    ]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    weight = found[0]["down.weight"]
    assert weight[0].std() > 5 * weight[1:].std()
    assert not found[0]["up.bias"].any() and found[0]["up.weight"].std() > 0.1
    assert torch.equal(found[0]["scale"], torch.full((4,), 0.5, dtype=torch.float64))
    assert not torch.equal(launch(initialized, 2, "zero3", 4)[0]["up.weight"], found[0]["up.weight"])


class Nameless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


def uninitializable() -> None:
    with torch.device("meta"):
        model = Nameless()
    executable = mlp_executable("ddp")
    compiled: Any = take_over(model, make_mesh({"dp": 2}), lambda args, kwargs: executable)
    compiled.autopar.interface = executable.interface
    with pytest.raises(AutoparError, match=r"nothing initializes the parameter weight \(Nameless\)"):
        compiled.init_weights()


def test_a_parameter_that_nothing_initializes_is_named() -> None:
    """Breaks when zeros, or memory's garbage, pass for initial weights."""
    launch(uninitializable, 2)


def loaded(folder: str) -> dict[str, Tensor]:
    model = meta_mlp("zero3+tensor")
    model.load_pretrained(folder)
    return {name: full(value) for name, value in model.state_dict().items()}


def refused(folder: str) -> str:
    with pytest.raises(AutoparError) as caught:
        loaded(folder)
    return str(caught.value)


def test_pretrained_weights_are_read_in_pieces() -> None:
    """Breaks when a (strided) piece is read from the wrong place, or a split checkpoint's index is ignored."""
    state = {name: value.clone() for name, value in make_mlp(seed=5).state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        names = list(state)
        for number, part in enumerate((names[:2], names[2:])):
            save_file({name: state[name] for name in part}, Path(folder, f"part{number}.safetensors"))
        where = {name: f"part{0 if name in names[:2] else 1}.safetensors" for name in names}
        Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        for found in launch(loaded, 4, folder):
            assert all(torch.equal(found[name], state[name]) for name in state)
        assert all("there is no checkpoint to load" in said for said in launch(refused, 4, folder + "/nothing"))
    for change, message in (
        ({"up.bias": None}, r"the checkpoint lacks up\.bias"),
        ({"extra": torch.zeros(1)}, "the checkpoint has names that the model does not have: extra"),
        ({"up.bias": torch.zeros(3)}, r"up\.bias has another shape in the checkpoint.*\(3,\), the model's is \(16,\)"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            changed = {name: value for name, value in (state | change).items() if value is not None}
            save_file(changed, Path(folder, "model.safetensors"))
            assert all(re.search(message, said) for said in launch(refused, 4, folder))


def resumed(folder: str) -> bool:
    """Save after two steps, go on; load into a fresh model of another plan, go on: the same weights."""

    def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            model.train_step(**make_batch(number))
            optimizer.step()
            optimizer.zero_grad()

    first = compiled_mlp("zero3+tensor")
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.05)
    steps(first, optimizer, range(2))
    names = {parameter: name for name, parameter in first.named_parameters()}

    def flat(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = dict(model.state_dict())
        for parameter, name in names.items():
            for key, value in optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        return state

    dcp.save(flat(first, optimizer), checkpoint_id=folder)
    steps(first, optimizer, range(2, 4))
    second = compiled_mlp("ddp+tensor", make_mlp(seed=9))
    other = torch.optim.AdamW(second.parameters(), lr=0.05)
    steps(second, other, range(1))  # so that there are states to load into
    names = {parameter: name for name, parameter in second.named_parameters()}
    dcp.load(flat(second, other), checkpoint_id=folder)
    steps(second, other, range(2, 4))
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.allclose(full(a), full(b), rtol=1e-12, atol=1e-14) for a, b in pairs)


def test_training_resumes_from_a_checkpoint_on_another_plan() -> None:
    """Breaks when parameters or optimizer states (strided on one side) are saved or loaded in the wrong places."""
    with tempfile.TemporaryDirectory() as folder:
        assert all(launch(resumed, 4, folder))


class Samples(Dataset[dict[str, Tensor]]):
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.batch = make_batch()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.fetched.append(index)
        return {name: value[index] for name, value in self.batch.items()}


def local_reading(plan: str) -> tuple[float, list[int]]:
    model, samples = compiled_mlp(plan), Samples()
    (batch,) = model.shard_loader(DataLoader(samples, batch_size=8))
    return float(model(**batch)["loss"].detach()), samples.fetched


def unequal_samplers() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    list(compiled_mlp("ddp").shard_loader(DataLoader(Samples(), batch_size=8, shuffle=True, generator=generator)))


def test_a_shard_loader_fetches_the_local_samples_only() -> None:
    """Breaks when every rank reads everything, or another part than planned."""
    expected = float(make_mlp()(**make_batch())["loss"].detach())
    for rank, (loss, fetched) in enumerate(launch(local_reading, 4, "zero3+tensor")):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert fetched == list(range(4) if rank < 2 else range(4, 8))
    with pytest.raises(ChildError, match="the sampler gives rank 1 other samples"):
        launch(unequal_samplers, 2)
