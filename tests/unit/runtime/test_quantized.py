"""Checkpoints whose layers are codes of other tools: models have the weights that these say, element by element."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.base.stored_weights import stored_modules
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.formats import weights_of
from autopar.runtime.checkpoint.quantized import packed_of

Parts = dict[str, Tensor]
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output lies in each nibble of AWQ's words."""


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m · bits / 32], code by code."""
    fold = 32 // bits
    found = torch.zeros(codes.shape[0], codes.shape[1] // fold, dtype=torch.int64)
    for row in range(codes.shape[0]):
        for word in range(found.shape[1]):
            for place in range(fold):
                column = word * fold + (order[place] if order else place)
                found[row, word] |= int(codes[row, column]) << (bits * place)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def drawn(rows: int, columns: int, groups: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns], zeros and scales [rows, groups]."""
    codes, zeros = torch.randint(0, 2**bits, (rows, columns)), torch.randint(1, 2**bits, (rows, groups))
    return codes, zeros, (torch.rand(rows, groups) / 20 + 0.001).half()


def said(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    found = torch.empty(codes.shape, dtype=scales.dtype)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            group = int(group_of[j])
            found[i, j] = (int(codes[i, j]) - int(zeros[i, group])) * scales[i, group]
    return found


def gptq(rows: int, columns: int, bits: int = 4, sorted: bool = False, version: str = "gptq") -> tuple[Parts, Tensor]:
    codes, zeros, scales = drawn(rows, columns, columns // 8, bits)
    groups = torch.arange(columns) // 8
    if sorted:
        groups = groups[torch.randperm(columns)]
    stored = (zeros - int(version == "gptq")) % 2**bits
    parts = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(stored.t(), bits), "scales": scales.t().contiguous(), "g_idx": groups.int(),
    }  # fmt: skip
    return parts, said(codes, zeros, scales, groups)


def awq(rows: int, columns: int) -> tuple[Parts, Tensor]:
    codes, zeros, scales = drawn(rows, columns, columns // 8)
    parts = {
        "qweight": words(codes.t(), 4, ORDER), "qzeros": words(zeros.t(), 4, ORDER), "scales": scales.t().contiguous()
    }  # fmt: skip
    return parts, said(codes, zeros, scales, torch.arange(columns) // 8)


def packed(rows: int, columns: int, signed: bool) -> tuple[Parts, Tensor]:
    codes, zeros, scales = drawn(rows, columns, columns // 8)
    parts = {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    if signed:
        zeros = torch.full_like(zeros, 8)
    else:
        parts["weight_zero_point"] = words(zeros.t(), 4).t().contiguous()
    return parts, said(codes, zeros, scales, torch.arange(columns) // 8)


def blocks(rows: int, columns: int) -> tuple[Parts, Tensor]:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 16), -(-columns // 16))
    want = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            want[i, j] = weight[i, j].float() * scales[i // 16, j // 16]
    return {"weight": weight, "weight_scale_inv": scales}, want


def by_row(rows: int, columns: int, one: bool) -> tuple[Parts, Tensor]:
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(()) if one else torch.rand(rows, 1)
    return {"weight": weight, "weight_scale": scales}, weight.float() * scales


KINDS: dict[str, tuple[Callable[[int, int], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {}), "gptq, 8 bits": (lambda rows, columns: gptq(rows, columns, 8), {}),
    "gptq, sorted": (lambda rows, columns: gptq(rows, columns, sorted=True), {}),
    "gptq_v2": (lambda *size: gptq(*size, version="gptq_v2"), {"checkpoint_format": "gptq_v2"}), "awq": (awq, {}),
    "packed": (lambda *size: packed(*size, signed=False), {}),
    "packed, signed": (lambda *size: packed(*size, signed=True), {}),
    "fp8 blocks": (blocks, {"weight_block_size": [16, 16]}), "int8": (lambda *size: by_row(*size, one=False), {}),
    "int8, one scale": (lambda *size: by_row(*size, one=True), {}),
}  # fmt: skip
"""What makes the parts of a layer of so many outputs and inputs, and its weight; and the configuration beside them."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(40), nn.Linear(40, 24), nn.Linear(24, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


def saved(kind: str, folder: Path) -> tuple[Net, torch.dtype]:
    """A checkpoint of `Net`, and the model with its weights."""
    make, config = KINDS[kind]
    torch.manual_seed(0)
    model, tensors = Net(), {}
    parts: dict[str, Parts] = {}
    for name in ("first", "second"):
        layer = model.get_submodule(name)
        parts[name], weight = make(*layer.weight.shape)  # type: ignore[misc]
        model = model.to(weight.dtype)
        layer.weight.data = weight
    for name, value in model.state_dict().items():
        if name not in ("first.weight", "second.weight"):
            tensors[name] = value
    for name, each in parts.items():
        tensors.update({f"{name}.{part}": value for part, value in each.items()})
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return model, model.first.weight.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_weights_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """Breaks if a nibble, a word, a zero, a scale or an input of another place is read."""
    want, dtype = saved(kind, tmp_path)
    model = autopar.store_weights(Net().to(dtype), like=tmp_path)
    assert len(list(stored_modules(model))) == 2
    torch.testing.assert_close(model.first.weight, want.first.weight, rtol=0, atol=0)
    torch.testing.assert_close(model.second.weight, want.second.weight, rtol=0, atol=0)
    x = torch.randn(3, 40, dtype=dtype)
    torch.testing.assert_close(model(x), want(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_box_is_read_as_of_the_whole(kind: str, tmp_path: Path) -> None:
    """Breaks where a piece does not begin with a word, a group or a block, of codes or of the weight."""
    want, _ = saved(kind, tmp_path)
    generator = torch.Generator().manual_seed(0)
    with weights_of(tmp_path) as found:
        for name, each in packed_of(found.weights, tmp_path).items():
            weight = want.get_parameter(name)
            how = each.how(False)
            whole = {part: each.part(how, part, Box((0,) * len(shape), shape)) for part, shape in how.shapes().items()}
            torch.testing.assert_close(how.decode(whole), weight, rtol=0, atol=0)
            for _ in range(20):
                box = _drawn_box(tuple(weight.shape), generator)
                torch.testing.assert_close(each.plain(box), weight[box.slices()], rtol=0, atol=0)
                for part, shape in how.shapes().items():
                    box = _drawn_box(shape, generator)
                    assert torch.equal(each.part(how, part, box), whole[part][box.slices()])


def _drawn_box(shape: tuple[int, ...], generator: torch.Generator) -> Box:
    ends = [sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in shape]
    ends = [(low, high) if low < high else (0, size) for (low, high), size in zip(ends, shape, strict=True)]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["gptq, sorted", "awq", "fp8 blocks"])
def test_programs_compute_what_the_codes_say(kind: str, tmp_path: Path) -> None:
    """Breaks if zeros lie otherwise than their codes, or sorted inputs are taken for those of the layer."""
    _, dtype = saved(kind, tmp_path)
    with torch.device("meta"):
        model = Net().to(dtype)
    model = autopar.store_weights(model, like=tmp_path)
    plan = autopar.plan(
        model, autopar.Mesh({"tp": 2}, hardware="cpu"), example_inputs={"x": torch.zeros(4, 40, dtype=dtype)},
        strategy="tensor", inference=True,
    )  # fmt: skip
    assert plan.verify(rtol=1e-9).ok


def test_what_is_no_checkpoint_of_the_model_is_refused(tmp_path: Path) -> None:
    """Breaks if shapes, layouts or parts that do not fit are read all the same."""
    saved("awq", tmp_path)
    with pytest.raises(AutoparError, match="another shape"):
        _with_other_sizes(tmp_path)
    with pytest.raises(AutoparError, match="as codes"):
        autopar.store_weights(nn.Sequential(nn.Linear(40, 24)), like=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"version": "gemv"}}))
    with pytest.raises(AutoparError, match=r"first\.weight cannot be read.*qweight"):
        autopar.store_weights(Net().half(), like=tmp_path)
    with pytest.raises(AutoparError, match="how are weights"):
        autopar.store_weights(Net())


def _with_other_sizes(folder: Path) -> None:
    model = Net().half()
    model.first = nn.Linear(40, 32).half()
    autopar.store_weights(model, like=folder)
