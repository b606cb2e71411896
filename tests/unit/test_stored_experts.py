"""Experts that a model stores as codes with scales: programs compute what the model with these codes computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.small_model import small_model
from autopar.base.codes import decoded
from autopar.base.errors import AutoparError
from autopar.base.huggingface.coded_reference import numbers_of
from autopar.base.stored_weights import WAYS, stored_modules
from autopar.cost.local_work import local_work
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.region import NodeStrategy
from autopar.operators.coded_experts import Held, of_few
from autopar.operators.expert_layout import Layout
from autopar.operators.rules.lookup import rule_for
from tests.unit.rules.tensors import CODED_EXPERTS
from tests.unit.tiers import mostly_slow

EXPERTS, WIDE, NARROW, STEP = 3, 256, 128, 21


class Layer(nn.Module):
    """One matrix of each expert, [in, out] if `turned`."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        shape = (EXPERTS, WIDE, NARROW) if turned else (EXPERTS, NARROW, WIDE)
        self.w = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.table = nn.Parameter(torch.randn(1, 4, 4))


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""What the lower three bits stand for: OCP MX 1.0, table 6."""


def plainly(layer: Any, way: str, group: int) -> Tensor:
    """The matrices [experts, out, in] that codes and scales say, element by element."""
    codes, scales = layer.w_codes.detach(), layer.w_scales.detach().double()
    numbers = codes if way == "mxfp4" else numbers_of(way.partition("-")[0], codes)
    found = torch.empty(EXPERTS, NARROW, WIDE, dtype=torch.float64)
    for e in range(EXPERTS):
        for i in range(0, NARROW, STEP):
            for j in range(WIDE):
                if way == "mxfp4":
                    nibble = int(codes[e, i, j // group, j % group // 2]) >> 4 * (j % 2) & 15
                    number = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
                    found[e, i, j] = number * 2 * scales[e, i, j // group, 0]
                elif way == "int4":
                    found[e, i, j] = numbers[e, i, j // group, j % group] * scales[e, i, j // group, 0]
                elif way == "fp8-block":
                    found[e, i, j] = numbers[e, i // 128, i % 128, j // 128, j % 128] * scales[e, 0, 0, j // 128, 0]
                else:
                    found[e, i, j] = numbers[e, i, j] * scales[e, 0 if way == "fp8-tensor" else i, 0]
    return found


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", mostly_slow(WAYS, "int4", "mxfp4"))
def test_codes_say_the_matrices(way: str, turned: bool) -> None:
    """Breaks if a scale is of another expert, row, group or block, if nibbles are swapped, or a matrix is turned."""
    torch.manual_seed(0)
    layer: Any = Layer(turned)
    before = layer.w.detach().clone()
    autopar.store_weights(layer, way, group=32, stacks={"w": "in out" if turned else "out in"})
    assert layer.w.shape == before.shape
    have, want = (x.transpose(1, 2) if turned else x for x in (layer.w, before))
    rows = slice(0, None, STEP)
    torch.testing.assert_close(have[:, rows], plainly(layer, way, 32)[:, rows], rtol=0, atol=0)
    ((_, how),) = stored_modules(layer)
    largest = want.reshape(EXPERTS, *how.cut).abs().amax([dim + 1 for dim in how.dims], keepdim=True)
    largest = largest.expand(EXPERTS, *how.cut).reshape(want.shape)
    step = {"int8": largest / 254, "int4": largest / 14, "mxfp4": largest / 4}.get(
        way, want.abs() / 16 + largest / 448 / 1024
    )
    assert ((have - want).abs() <= step * (1 + 1e-6)).all()
    if way == "mxfp4":  # OCP MX 1.0, 6.3: the largest exponent less that of the largest code, 4
        exponents = want.reshape(EXPERTS, *how.cut).abs().amax(3, keepdim=True).log2().floor()
        assert torch.equal(2 * layer.w_scales, 2.0 ** (exponents - 2))
    assert layer.table.is_floating_point()
    held = sum(x.numel() * x.element_size() for name, x in layer.named_parameters() if "codes" in name)
    assert held == before.numel() // (2 if way in ("int4", "mxfp4") else 1)


def test_which_parameters_are_experts_is_said() -> None:
    """Breaks if a table of three dims is rounded unasked, or a name that is none passes."""
    with pytest.raises(AutoparError, match="no linear layer"):
        autopar.store_weights(Layer(), "int8")
    with pytest.raises(AutoparError, match=r"no such experts(.|\n)*'\*\.w': 'out in'"):
        autopar.store_weights(Layer(), "int8", stacks={"*.w": "out in"})
    with pytest.raises(AutoparError, match=r"cannot lie so(.|\n)*'in out'"):
        autopar.store_weights(Layer(), "int8", stacks={"w": "in"})
    with pytest.raises(AutoparError, match="no linear layer"):
        autopar.store_weights(Layer(), "int8", stacks={"w": "out in"}, leave=("w",))
    tied: Any = nn.ModuleList([Layer(), Layer()])
    tied[1].w = tied[0].w
    with pytest.raises(AutoparError, match="no linear layer"):
        autopar.store_weights(tied, "int8", stacks={"*.w": "out in"})


class OwnCodes(nn.Module):
    """Experts of somebody's own codes, of which the operator has the numbers. kind: how these lie."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, wide, experts = kind, 8, 8
        shapes = {"outputs": (experts, wide // 2, wide), "more dims": (experts, 2, wide // 2, wide)}
        shape, codes = shapes.get(kind, (experts, wide, wide)), torch.uint8 if kind == "outputs" else torch.int8
        scales = {"more dims": (experts, 2, wide // 2, 1), "shared": (wide, 1)}.get(kind, (experts, wide, 1))
        for name in ("first", "second"):
            held = torch.randint(0, 127, shape).to(codes)
            self.register_parameter(name, nn.Parameter(held, requires_grad=False))
            self.register_parameter(f"{name}_scales", nn.Parameter(torch.rand(scales), requires_grad=False))

    def decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.kind == "outputs":  # two a byte of a column, not of a row
            codes = torch.cat([codes & 15, codes >> 4], 1)
        return (codes.to(scales.dtype) * scales).reshape(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = x.softmax(-1).topk(2)
        held = [self.decoded(getattr(self, name), getattr(self, f"{name}_scales")) for name in ("first", "second")]
        out: Tensor = torch.ops.autopar.experts(x, chosen, weights, *held, act="relu(gate)", gated=False)
        return out


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["outputs", "more dims", "shared"])
def test_codes_that_lie_otherwise_are_numbers(kind: str) -> None:
    """Breaks if codes are read as ours whose bytes hold outputs, whose dims are no groups, or whose scales are not of
    an expert; or if a proof has nothing but zeros for whole numbers that are no codes of ours.
    """
    torch.manual_seed(0)
    mesh = autopar.Mesh({"ep": 2})
    given = {"x": torch.randn(6, 8)}
    plan = autopar.plan(OwnCodes(kind), mesh, strategy="expert", example_inputs=given, inference=True)
    assert "storage=" not in plan.source
    plan.verify().raise_on_failure()
    model: Any = OwnCodes(kind)
    clone, _ = small_model(model, given, torch.float64, 0)
    assert torch.equal(clone.get_parameter("first"), model.first)


@pytest.mark.parametrize("sample", CODED_EXPERTS, ids=lambda sample: sample[-1]["storage"])
def test_experts_that_are_chosen_are_decoded(sample: tuple[Any, ...]) -> None:
    """Breaks if a number differs from that of matrices decoded before, or an expert is decoded that nobody chose."""
    x, indices, weights, first, second, *bias, said = sample
    size = x.shape[1]
    matrices = [
        decoded(said["storage"], codes, said[f"{name}_scales"], said.get(f"{name}_zeros")).reshape(4, *shape)
        for name, codes, shape in (("first", first, (-1, size)), ("second", second, (size, -1)))
    ]
    plain = {name: value for name, value in said.items() if name in ("act", "gated", "interleaved")}
    want = torch.ops.autopar.experts(x, indices, weights, *matrices, *bias, **plain)
    assert torch.equal(torch.ops.autopar.experts(x, indices, weights, first, second, *bias, **said), want)
    layout = Layout(said["act"], said.get("gated", True), said.get("interleaved", False), False)
    total = torch.zeros_like(want)
    for start in (0, 2):  # each rank has two experts
        here = slice(start, start + 2)
        ways = [
            Held(said["storage"], codes[here], said[f"{name}_scales"][here], zeros if zeros is None else zeros[here])
            for name, codes in (("first", first), ("second", second))
            for zeros in (said.get(f"{name}_zeros"),)
        ]
        own = bias[0][here] if bias else None
        total += of_few(x, indices, weights, ways[0], ways[1], own, layout, start)
    torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)
    spoilt = {name: value.index_fill(0, torch.tensor([2]), torch.nan) if name.endswith("scales") else value
              for name, value in said.items()}  # fmt: skip
    others = indices.masked_fill(indices == 2, 3)
    assert torch.ops.autopar.experts(x, others, weights, first, second, *bias, **spoilt).isfinite().all()


def test_what_is_read_is_codes() -> None:
    """Breaks if tokens are charged for codes of experts that they do not choose, or for numbers in their place."""
    experts, width, size = 64, 512, 256

    def moved(storage: str) -> float:
        held = torch.int8 if storage else torch.bfloat16
        shapes = [(experts, 2 * width, size), (experts, size, width)]
        tensors = [
            TensorSpec((1, size), torch.bfloat16), TensorSpec((1, 2), torch.int64), TensorSpec((1, 2), torch.bfloat16),
            *(TensorSpec(shape, held) for shape in shapes),
        ]  # fmt: skip
        scales = [TensorSpec((*shape[:2], 1), torch.bfloat16) for shape in shapes] if storage else []
        said: dict[str, Any] = {"act": "mul(silu(gate), up)"}
        if storage:
            said |= {"storage": storage, "first_scales": scales[0], "second_scales": scales[1]}
        operands = (*tensors, *scales)
        call = OpCall(torch.ops.autopar.experts.default, tuple(tensors), said, operands, (tensors[0],))
        rule = rule_for(call)
        return local_work(call, rule, NodeStrategy((), ((),) * len(operands), ((),)), ())(0.0).moved_bytes

    matrix = 3 * width * size
    share = 1 - (1 - 2 / experts) ** 1
    assert moved("") == pytest.approx(share * experts * 2 * matrix, rel=0.01)
    scales = 2 * (2 * width + size)
    assert moved("int8") == pytest.approx(share * experts * (matrix + scales + 2 * 2 * matrix), rel=0.01)


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Modules(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return x + out


def _model(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "modules":
        return Modules()
    if name == "gpt-oss":  # matrices are [in, out], with biases; gate and up alternate
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, head_dim=8)).eval()
    wide = {"hidden_size": 128, "intermediate_size": 256} if name == "wide" else {}  # of blocks
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **wide})).eval()


CASES: list[tuple[str, str, dict[str, str]]] = [
    ("mixtral", "int4", {"ep": "expert", "tp": "tensor"}), ("gpt-oss", "mxfp4", {"tp": "tensor"}),
    ("wide", "fp8-block", {"tp": "tensor"}), ("mixtral", "int8", {"dp": "zero3"}),
    ("gpt-oss", "fp8-tensor", {"x": "auto"}), ("modules", "int4", {"ep": "expert", "tp": "tensor"}),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "strategies"), CASES, ids=lambda each: str(each))
def test_programs_compute_what_the_model_with_such_experts_computes(
    name: str, way: str, strategies: dict[str, str]
) -> None:
    """Breaks if codes and scales lie on different ranks, a group or a block is cut, gate's rows are taken for up's, or
    an axis that is to split experts, widths or storage leaves codes whole.
    """
    model = autopar.store_weights(_model(name), way, group=8)
    tokens = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "use_cache": False}
    batch: Any = (torch.zeros(8, 16),) if name == "modules" else tokens
    mesh = autopar.Mesh(dict.fromkeys(strategies, 2))
    plan = autopar.plan(model, mesh, example_inputs=batch, strategy=strategies, inference=True)
    proof = plan.verify().raise_on_failure()
    if name == "modules":
        return
    (note,) = proof.notes
    said = re.fullmatch(rf"weights in {way} changes logits by up to (\S+), log-probabilities by (\S+)", note)
    assert said is not None
    assert 0 < float(said[1]) < 1
    held = {each.name: each.sharding for each in plan.interface.parameters if ".experts." in each.name}
    codes = {each: lies for each, lies in held.items() if each.endswith("_codes")}
    assert len(codes) == 4
    if "auto" not in strategies.values():
        assert all(isinstance(lies, autopar.Shard) for each in codes.values() for lies in each)
    if way in ("int4", "mxfp4", "fp8-block"):  # what shares a scale goes with it
        assert all(held[each.replace("_codes", "_scales")] == lies for each, lies in codes.items())
    assert "storage=" in plan.source
