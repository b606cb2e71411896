"""fuse_elementwise: what it finds, where it lets things be, and that the numbers stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.passes.capture import capture
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.fuse_elementwise import fuse_elementwise
from autopar.passes.outline import outline
from autopar.strategies.names import Strategy, pin, resolve

H100 = Mesh({"dp": 2}, hardware="h100")
PRODUCT: Strategy = {"dp": "zero3", "tp": "tensor"}


class Norm(nn.Module):
    """An RMSNorm written out. casts: `llama`, `gemma`, `plain`, or what is no norm that the operator computes."""

    def __init__(self, casts: str) -> None:
        super().__init__()
        self.linear, self.weight, self.casts = nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5), casts

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        wide = x.float()
        variance = wide.pow(2).mean(0 if self.casts == "columns" else -1, keepdim=True)
        normal = wide * torch.rsqrt(variance + 1e-5)
        if self.casts == "gemma":
            return (normal * (1.0 + self.weight.float())).type_as(x).sum()
        if self.casts == "variance is read":
            return (self.weight * normal.to(x.dtype)).sum() + variance.sum()
        if self.casts == "half offset":
            return (normal.to(x.dtype) * (1.0 + self.weight)).sum()
        return (self.weight * normal.to(x.dtype)).sum()


class Called(nn.Module):
    def __init__(self, affine: bool = True, eps: float | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.RMSNorm(8, eps=eps, elementwise_affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().sum()


class Rotary(nn.Module):
    """Heads that are rotated; `turn` rotates half of x, with cos and sin of one row of the batch, or of each."""

    def __init__(self, turn: Callable[[Tensor], Tensor], rows: int = 1) -> None:
        super().__init__()
        self.linear, self.turn = nn.Linear(16, 16), turn
        angles = torch.rand(rows, 6, 4).repeat(1, 1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
        return (q * self.cos.unsqueeze(1) + self.turn(q) * self.sin.unsqueeze(1)).square().sum()


class Gelu(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(8, 8), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.linear(x)).square().sum()


def _tanh(x: Tensor, factor: float = 0.044715, power: int = 3) -> Tensor:
    return torch.tanh(math.sqrt(2 / math.pi) * (x + factor * x**power))


def by_slices(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def by_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def other_way(x: Tensor) -> Tensor:
    return torch.cat((x[..., x.shape[-1] // 2 :], -x[..., : x.shape[-1] // 2]), dim=-1)


def outlined(model: nn.Module, x: Tensor) -> Program:
    return outline(fuse_attention(capture(model, {"x": x})))


def calls(program: Program) -> list[str]:
    """The fused operators, and what of the others would show that one was left."""
    wanted = ("autopar.rms_norm", "autopar.rotary", "aten.rsqrt", "aten.rms_norm", "aten.neg")
    names = [str(node.target).removesuffix(".default") for r in program.regions for node in r.graph.nodes]
    return [name for name in names if name in wanted]


def options(program: Program) -> dict[str, object]:
    nodes = [n for r in program.regions for n in r.graph.nodes if str(n.target) == "autopar.rms_norm.default"]
    return dict(nodes[0].kwargs)


@pytest.mark.parametrize(
    ("casts", "dtype", "expected"),
    [
        ("llama", torch.bfloat16, {"round_first": True}),
        ("llama", torch.float32, {}),
        ("gemma", torch.bfloat16, {"offset": 1.0}),
        ("gemma", torch.float32, {"offset": 1.0}),
    ],
)
def test_written_norms(casts: str, dtype: torch.dtype, expected: dict[str, object]) -> None:
    """Breaks if a form of RMSNorm is not found, or found with the casts of another."""
    fused = fuse_elementwise(outlined(Norm(casts).to(dtype), torch.randn(4, 6, 8, dtype=dtype)), mesh=H100)
    assert calls(fused) == ["autopar.rms_norm"]
    assert options(fused) == expected


@pytest.mark.parametrize("casts", ["columns", "variance is read"])
def test_what_is_no_norm_of_rows_is_left(casts: str) -> None:
    """Breaks if another dim's mean counts as the operator, or a variance is made twice because another reads it."""
    program = outlined(Norm(casts).bfloat16(), torch.randn(4, 6, 8, dtype=torch.bfloat16))
    assert fuse_elementwise(program, mesh=H100) is program


@pytest.mark.parametrize(("casts", "dtype"), [("half offset", torch.bfloat16), ("llama", torch.float64)])
def test_a_weight_behind_other_casts_stays_outside(casts: str, dtype: torch.dtype) -> None:
    """Breaks if 1 + w that the model rounds to half, or a norm in float32 of a float64 model, gets other digits."""
    fused = fuse_elementwise(outlined(Norm(casts).to(dtype), torch.randn(4, 6, 8, dtype=dtype)), mesh=H100)
    (norm,) = (n for r in fused.regions for n in r.graph.nodes if str(n.target) == "autopar.rms_norm.default")
    assert norm.args[1] is None and norm.args[0].meta["val"].dtype != torch.float64


@pytest.mark.moderate
@pytest.mark.parametrize(("affine", "eps"), [(True, 1e-6), (True, None), (False, 1e-6)])
def test_called_norms(affine: bool, eps: float | None) -> None:
    """Breaks if `nn.RMSNorm` is left as the dozen operators that tracing makes of it, or its own eps is lost."""
    model, x = Called(affine, eps), torch.randn(4, 6, 8)
    fused = fuse_elementwise(outlined(model, x), mesh=H100)
    assert calls(fused) == ["autopar.rms_norm"]
    plan = autopar.plan(model, H100, example_inputs={"x": x}, strategy="ddp")
    assert "ops.rms_norm_backward(" in plan.source and plan.verify().ok


@pytest.mark.moderate
@pytest.mark.parametrize("turn", [by_slices, by_chunks])
@pytest.mark.parametrize("rows", [1, 4])
def test_rotary(turn: Callable[[Tensor], Tensor], rows: int) -> None:
    """Breaks if a way to write rotate_half is not known, or the table of one row is taken for that of all."""
    model, x = Rotary(turn, rows), torch.randn(4, 6, 16)
    assert calls(fuse_elementwise(outlined(model, x), mesh=H100)) == ["autopar.rotary"]
    plan = autopar.plan(model, Mesh({"dp": 2, "tp": 2}), example_inputs={"x": x}, strategy="auto")
    assert "ops.rotary_backward(" in plan.source and plan.verify().ok


@pytest.mark.moderate
@pytest.mark.parametrize(
    "form",
    [
        lambda x: 0.5 * x * (1.0 + _tanh(x)),
        lambda x: x * (0.5 * (1.0 + _tanh(x))),
        lambda x: 0.5 * (x * (_tanh(x) + 1.0)),
    ],
)
@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_gelu(form: Callable[[Tensor], Tensor], hardware: str) -> None:
    """Breaks if a way to write the approximation is not known, or one operator computes another function."""
    model, x = Gelu(form), torch.randn(4, 6, 8)
    plan = autopar.plan(model, Mesh({"dp": 2, "tp": 2}, hardware=hardware), example_inputs={"x": x}, strategy="auto")
    assert 'approximate="tanh"' in plan.source.replace("'", '"') and "tanh(" not in plan.source
    assert plan.verify().raise_on_failure().ok


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (lambda x: 0.5 * x * (1.0 + _tanh(x, 0.0447)), torch.float32),
        (lambda x: 0.5 * x * (1.0 + _tanh(x, power=2)), torch.float32),
        (lambda x: 0.5 * x * (2.0 + _tanh(x)), torch.float32),
        (lambda x: x * (1.0 + _tanh(x)) * x, torch.float32),
        (lambda x: 0.5 * x * (1.0 + _tanh(x)), torch.bfloat16),
    ],
)
def test_what_is_no_gelu_is_left(form: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Breaks if another function passes for GELU, or one that rounds every step is rounded once."""
    program = outlined(Gelu(form).to(dtype), torch.randn(4, 6, 8, dtype=dtype))
    assert fuse_elementwise(program, mesh=H100) is program


def test_a_rotation_the_other_way_is_left() -> None:
    """Breaks if the signs of the halves are not looked at."""
    program = outlined(Rotary(other_way), torch.randn(4, 6, 16))
    assert fuse_elementwise(program, mesh=H100) is program


@pytest.mark.parametrize("model", [Norm("llama"), Rotary(by_slices)])
def test_without_kernels(model: nn.Module) -> None:
    """Breaks if a program for a CPU spells out what is one operator there too, or one for a GPU or a compiler that has
    nothing better for it does not.
    """
    program = outlined(model, torch.randn(4, 6, 16 if isinstance(model, Rotary) else 8))
    cpu = Mesh({"dp": 2}, hardware="cpu")
    assert fuse_elementwise(program, mesh=cpu) is not program
    for hardware in (replace(cpu.hardware, compiled=True), replace(H100.hardware, fused_kernels=())):
        assert fuse_elementwise(program, mesh=Mesh({"dp": 2}, hardware=hardware)) is program


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_only_where_no_sharding_is_lost(hardware: str) -> None:
    """Breaks if a norm is fused whose rows an axis is to split."""
    program = outlined(Norm("llama"), torch.randn(4, 6, 8))
    mesh, grid = Mesh({"dp": 2}, hardware=hardware), Mesh({"tp0": 2, "tp1": 2}, hardware=hardware)
    assert fuse_elementwise(program, mesh=grid, strategies=resolve("tensor2d", grid)) is program
    assert fuse_elementwise(program, mesh=mesh, pins=[pin("weig*", dp=Shard(0))]) is program
    assert fuse_elementwise(program, mesh=mesh, pins=[pin("other", dp=Shard(0))]) is not program


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "strategy", "precision", "norms", "rotaries"),
    [
        ("llama", "tensor+sequence", None, 3, 2),
        ("llama", PRODUCT, "bf16", 3, 2),
        ("qwen3", "tensor+sequence", "bf16", 5, 2),
        ("gemma2", PRODUCT, "bf16", 9, 4),
        ("phi3", PRODUCT, None, 3, 2),
        ("t5", PRODUCT, None, 12, 0),
    ],
)
@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.slow
def test_equal_to_eager(
    name: str, strategy: Strategy, precision: str | None, norms: int, rotaries: int, hardware: str
) -> None:
    """Breaks if a fused program computes other numbers, or a model's norms are no longer found."""
    loaded = catalogue.load(name, tiny=True, device="cpu")
    mesh = Mesh({"dp": 2, "tp": 2}, hardware=hardware)
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, precision=precision)
    found = [plan.source.count(text) for text in ("ops.rms_norm(", "ops.rms_norm_backward(", "ops.rotary(", "rsqrt")]
    assert found == [norms, norms, rotaries, 0]
    assert plan.verify().raise_on_failure().ok


def test_half_precision_is_as_near_as_eager() -> None:
    """Breaks if the fused forward rounds where the model does not: in bfloat16 they are the same bit for bit."""
    from autopar.operators import rms_norm, rotary

    x, w = torch.randn(4, 6, 8).bfloat16(), torch.randn(8).bfloat16()
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, w, 1e-6, round_first=True)[0], w * normal.bfloat16())
    assert torch.equal(rms_norm(x, w, 1e-6, offset=1.0)[0], (normal * (1.0 + w.float())).bfloat16())
    q, cos, sin = torch.randn(2, 3, 6, 8).bfloat16(), *torch.randn(2, 1, 6, 8).bfloat16()
    assert torch.equal(rotary(q, cos, sin), q * cos.unsqueeze(1) + by_slices(q) * sin.unsqueeze(1))
