"""Mixtures of experts: an operator for each layer of them, whose router's gradient is that of the model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar import operators as ops
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.ir.sharding import Shard
from autopar.operators.activations import activate, described

VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
NARROW = {"intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": 4}),
    "qwen3": ("Qwen3Moe", {**NARROW, "num_experts": 8}),
    "gpt_oss": ("GptOss", {"intermediate_size": 48, "num_local_experts": 4, "head_dim": 8, "sliding_window": 4}),
    "olmoe": ("Olmoe", {"intermediate_size": 16, "num_experts": 8}),
    "glm4": (
        "Glm4Moe",
        {**NARROW, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
         "topk_group": 1},
    ),
    "deepseek": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8,
         "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
}  # fmt: skip
"""transformers' name, and what its configuration has besides `COMMON`."""


def model_of(kind: str, **options: Any) -> nn.Module:
    """With weights so large that experts, and the router, matter."""
    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **own, **options})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def planned(model: nn.Module, strategy: Any, mesh: str, rows: int = 4, **options: Any) -> Plan:
    ids = torch.randint(0, VOCABULARY, (rows, 6), generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autopar.plan(
            model, autopar.Mesh.parse(mesh, hardware="cpu"), strategy=strategy,
            example_inputs={"input_ids": ids, "labels": ids}, **options,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- the operator


class Experts(nn.Module):
    """As transformers' loop over the experts that are hit: plain, with autograd's own gradient."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 10, 6)), nn.Parameter(torch.randn(4, 6, 5))
        self.bias = nn.Parameter(torch.randn(4, 10)) if biased else None

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(4):
            tokens, places = torch.where(indices == expert)
            gate, up = F.linear(x[tokens], self.first[expert], None if self.bias is None else self.bias[expert]).chunk(
                2, -1
            )
            made = F.linear(F.silu(gate) * up, self.second[expert])
            out = out.index_add(0, tokens, made * weights[tokens, places, None])
        return out


ROUTINGS = {
    "balanced": [[0, 1], [2, 3], [1, 0], [3, 2], [0, 2]],
    "hot": [[1, 0], [1, 2], [1, 3], [1, 0], [1, 2]],
    "empty": [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]],
    "one twice": [[2, 2], [0, 2], [3, 3], [0, 0], [1, 1]],
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_operator_follows_a_loop_over_experts(routing: str, biased: bool) -> None:
    """Breaks if a row goes to another expert, a weight to another row, or an expert without rows keeps a gradient."""
    torch.manual_seed(0)
    model = Experts(biased).double()
    x, weights = torch.randn(5, 6).double().requires_grad_(), torch.rand(5, 2).double().requires_grad_()
    indices, g = torch.tensor(ROUTINGS[routing]), torch.randn(5, 6).double()
    wanted = model(x, indices, weights)
    given = [x, weights, *model.parameters()]
    of = torch.autograd.grad(wanted, given, g)
    bias = () if model.bias is None else (model.bias,)
    act = "mul(silu(gate), up)"
    found = ops.experts(x, indices, weights, model.first, model.second, *bias, act=act)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradient = ops.experts_grad_bias if biased else ops.experts_grad
    grads = gradient(g, x.detach(), indices, weights.detach(), *(each.detach() for each in model.parameters()), act=act)
    for one, other in zip(grads, of, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_of_the_router_are_not_rounded_first() -> None:
    """Breaks if weights in float32 are cast to the dtype of tokens before they are multiplied: eager does so after."""
    torch.manual_seed(0)
    model, x = Experts(False).bfloat16(), torch.randn(5, 6).bfloat16()
    indices, weights, g = torch.tensor([[1], [1], [0], [3], [0]]), torch.rand(5, 1) + 0.5, torch.randn(5, 6).bfloat16()
    made = model(x, indices, torch.ones(5, 1, dtype=torch.bfloat16))
    given = (indices, weights, model.first, model.second)
    found = ops.experts(x, *given, act="mul(silu(gate), up)")
    assert torch.equal(found, (made * weights).bfloat16())
    _, _, _, of_second = ops.experts_grad(g, x, *(each.detach() for each in given), act="mul(silu(gate), up)")
    x1 = F.linear(x[3:4], model.first[3]).chunk(2, -1)
    wanted = (g[3:4] * weights[3:4]).bfloat16().t() @ (F.silu(x1[0]) * x1[1])
    assert torch.equal(of_second[3], wanted)


def test_number_of_no_expert_adds_nothing() -> None:
    """Breaks if tokens that a router sends nowhere, by a number behind the last, meet an expert."""
    model, x, weights = Experts(False), torch.randn(2, 6), torch.ones(2, 2)
    given = (model.first, model.second)
    found = ops.experts(x, torch.tensor([[4, 4], [4, 0]]), weights, *given, act="mul(silu(gate), up)")
    assert torch.equal(found[0], torch.zeros(6)) and found[1].abs().sum() > 0


# --------------------------------------------------------------------------------------------------- the activation


def clamped(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def test_activation_is_read_off_what_it_does() -> None:
    """Breaks if columns that alternate are taken for halves, a clamp is lost, or a cast."""
    halves = described(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], gated=True, dtype=torch.float32)
    assert halves == ("mul(silu(gate), up)", False)
    found = described(clamped, gated=True, dtype=torch.float32)
    assert found is not None and found[1] is True
    x = torch.randn(3, 8) * 9
    assert torch.equal(activate(found[0], x[:, ::2], x[:, 1::2]), clamped(x))
    assert described(F.relu, gated=False, dtype=torch.float32) == ("relu(gate)", False)
    cast = described(lambda x: F.gelu(x.float(), approximate="tanh").to(x.dtype), gated=False, dtype=torch.bfloat16)
    assert cast == ("narrow(gelu(wide(gate), approximate='tanh'))", False)


def test_what_is_no_pointwise_function_is_not_described() -> None:
    """Breaks if a norm, a learned slope or a product of columns is taken for a function of gate and up."""
    weight = torch.randn(4)
    for function in (lambda x: x.softmax(-1), lambda x: x * weight, lambda x: x.flip(-1), lambda x: x @ x.t() @ x):
        assert described(function, gated=False, dtype=torch.float32) is None


@pytest.mark.parametrize(
    "text", ["gate.sum()", "mm(gate, up)", "__import__('os')", "relu_(gate)", "silu(gate", "x", "(" * 500]
)
def test_other_text_is_refused(text: str) -> None:
    """Breaks if a program's text can call what is no pointwise operator."""
    with pytest.raises(AutoparError, match="no activation of experts"):
        activate(text, torch.ones(2), torch.ones(2))


# -------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("ddp", "dp=2"), ("zero3", "dp=2"), ("tensor", "tp=2"), ("auto", "a=2"),
        ({"dp": "zero2", "tp": "tensor"}, "dp=2,tp=2"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_models_are_proven(kind: str, strategy: Any, mesh: str) -> None:
    """Breaks if tokens, experts or their widths are split otherwise than the gradients say."""
    plan = planned(model_of(kind), strategy, mesh)
    assert plan.verify(rtol=1e-9).ok and plan.source is not None and "ops.experts(" in plan.source


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mixtral", "qwen3")])
def test_other_models_are_proven(kind: str) -> None:
    """Breaks if biases, columns that alternate, shared experts or groups of experts get lost."""
    for strategy, mesh in (("zero3", "dp=2"), ("tensor", "tp=2"), ("expert+sum", "ep=2"), ("expert", "ep=2")):
        plan = planned(model_of(kind), strategy, mesh)
        called = "comm.exchange_experts(" if strategy == "expert" else "ops.experts("
        assert plan.verify(rtol=1e-9).ok and plan.source is not None and called in plan.source


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "lies"),
    [
        ("expert+sum", "ep=4", "f32[4/ep, 96, 32]"),
        ("expert+sum", "dp=2,ep=2", "f32[4/ep, 96, 32]"),
        ({"dp": "zero3", "ep": "expert+sum"}, "dp=2,ep=2", "f32[4/ep, 96/dp, 32]"),
        ({"ep": "expert+sum", "tp": "tensor"}, "ep=2,tp=2", "f32[4/ep, 96/2:tp, 32]"),
        ({"ep": "expert+sum"}, "pp=2,ep=2", "f32[4/ep, 96, 32]"),
        ("expert", "dp=4", "f32[4/dp, 96, 32]"),
        ("zero3+expert", "node=2,ep=2", "f32[4/ep, 96/node, 32]"),
        ({"dp": "expert", "tp": "tensor"}, "dp=2,tp=2", "f32[4/dp, 96/2:tp, 32]"),
        ({"ep": "expert"}, "pp=2,ep=2", "f32[4/ep, 96, 32]"),
    ],
    ids=str,
)
def test_experts_are_split(strategy: Any, mesh: str, lies: str) -> None:
    """Breaks if `expert` leaves experts whole, sums their gradients over the axis whose tokens came to them, or if what
    each rank's experts add is not summed once; with the auxiliary loss, which is of the whole batch.
    """
    auxiliary = {} if "pp" in mesh else {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    plan = planned(model_of("mixtral", **auxiliary), strategy, mesh)
    assert plan.verify(rtol=1e-9).ok
    assert any("gate_up_proj" in line and lies in line for line in str(plan).splitlines())


@pytest.mark.slow
def test_tensor_splits_widths() -> None:
    """Breaks if ranks of `tensor` have some experts each, and so unequal work, where widths would divide."""
    plan = planned(model_of("mixtral"), "tensor", "tp=2")
    assert any("gate_up_proj" in line and "f32[4, 96/2:tp, 32]" in line for line in str(plan).splitlines())


@pytest.mark.moderate
@pytest.mark.parametrize("inference", [False, True])
def test_no_rank_of_tensor_keeps_experts_whole(inference: bool) -> None:
    """Breaks if ranks that compute a part of each expert's width store all of it: where nothing is trained, that takes
    no longer, and a model's experts are nearly all of it.
    """
    with torch.device("meta"):
        model = model_of("mixtral")
    plan = planned(model, "tensor", "tp=2", inference=inference)
    own = {each.name: each.sharding for each in plan.interface.parameters if "experts" in each.name}
    assert len(own) == 2 * COMMON["num_hidden_layers"]
    assert all(isinstance(placement, Shard) for (placement,) in own.values())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["expert", "expert+sum"])
def test_experts_that_do_not_divide(strategy: str) -> None:
    with pytest.raises(AutoparError, match=r"4 experts do not divide over ep=3.*experts.*strategy tensor"):
        planned(model_of("mixtral"), strategy, "ep=3", rows=6)


@pytest.mark.slow
def test_auto_exchanges_where_that_is_cheaper() -> None:
    """Breaks if `auto` cannot send tokens to their experts, or does not where experts are many times larger than what
    their tokens are, and each token goes to two of eight ranks at most (to four, all of them everywhere cost the same).
    """
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=4, num_experts=64, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
        ids = torch.zeros(8, 2048, dtype=torch.int64)
    plans = [
        autopar.plan(
            model, autopar.Mesh.parse("dp=8", hardware="h100"), strategy=strategy,
            example_inputs={"input_ids": ids, "labels": ids},
        )
        for strategy in ("auto", "zero3", "expert")
    ]  # fmt: skip
    steps = [plan.cost.step_time_s for plan in plans]
    assert plans[0].source is not None and "comm.exchange_experts(" in plans[0].source
    assert steps[0] <= 1.02 * steps[2] and steps[2] < steps[1] < 1.0


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "strategy"), [("ep=2", "expert"), ("dp=2,ep=2", {"dp": "ddp", "ep": "expert+sum"})])
def test_no_experts_to_split(mesh: str, strategy: Any) -> None:
    """Breaks if a model whose experts nothing recognizes is refused, or an axis does nothing without a word."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.warns(
        UserWarning, match="finds no experts that are recognized .* is computed whole on every rank of ep"
    ):
        plan = autopar.plan(
            model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs={"input": torch.ones(4, 4)},
            strategy=strategy,
        )  # fmt: skip
    assert plan.verify(rtol=1e-9).ok


class Casting(nn.Module):
    """A router that is cast in forward, as those of T5's mixtures are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.register = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(self.dtype)
        scores = self.register.to(x.device)(self.gate.float()(x.to(self.dtype)))
        return scores.softmax(-1).square().sum()


@pytest.mark.moderate
def test_modules_that_are_cast_in_forward() -> None:
    """Breaks if a cast that changes nothing is refused, one that changes a parameter for good is passed over, or whole
    numbers are taken to be cast, too.
    """
    x = torch.randn(4, 4)
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(Casting(torch.float32), mesh, strategy="zero3", example_inputs={"x": x})
    assert plan.verify(rtol=1e-9).ok
    model = Casting(torch.float32)
    model.gate.to(torch.bfloat16)
    with pytest.raises(AutoparError, match=r"casts a module for good: Linear\.to\(\) makes weight, bfloat16, float32"):
        autopar.plan(model, mesh, strategy="zero3", example_inputs={"x": x})


class Own(nn.Module):
    """A person's model around a layer of transformers, with biases and columns that alternate."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

        config = transformers.GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
        self.inner = GptOssMLP(config)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, scores = self.inner(x)
        return self.head(x + mixed).square().mean() + scores.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("strategy", "mesh", "called"),
    [
        ("ddp", "dp=2", "ops.experts("), ("expert+sum", "ep=2", 'start=comm.index("ep") * 2'),
        ("tensor", "tp=2", "ops.experts("), ("expert", "dp=2", "comm.exchange_experts("),
        ("zero2+expert", "dp=2", "comm.exchange_experts_grad_bias("),
    ],
)  # fmt: skip
def test_a_layer_in_another_model(strategy: str, mesh: str, called: str) -> None:
    """Breaks if layers are found in transformers' own models alone, or a bias behind the experts is lost or counted on
    every rank; if `expert+sum` has no rank begin with another expert.
    """
    plan = autopar.plan(
        Own(), autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs={"x": torch.randn(4, 6, 8)}, strategy=strategy
    )
    assert plan.verify(rtol=1e-9).ok and plan.source is not None and called in plan.source


@pytest.mark.moderate
def test_a_layer_of_an_earlier_transformers() -> None:
    """Breaks if layers of experts are known by what only later versions say of them (5.17 says nothing of norms behind
    experts): loops that ask for values, and programs without exchange.
    """
    model = Own()
    for name in ("has_post_expert_norm", "_is_expert_parallel"):
        if hasattr(model.inner.experts, name):
            delattr(model.inner.experts, name)
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(model, mesh, example_inputs={"x": torch.randn(4, 6, 8)}, strategy="ddp")
    assert plan.source is not None and "ops.experts(" in plan.source


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("routing", ["hot", "empty"])
@pytest.mark.parametrize(
    ("strategy", "mesh"), [("zero3", "dp=2"), ("tensor", "tp=2"), ("expert+sum", "ep=2"), ("zero3+expert", "dp=4")]
)
def test_gradients_whatever_the_routing(strategy: str, mesh: str, routing: str) -> None:
    """Breaks if an expert that every token chooses, or none, gives the router another gradient. What is added to scores
    before the choice alone, a buffer of the model's, decides it, whatever the weights.
    """
    plan = planned(model_of("glm4"), strategy, mesh)
    assert plan.verify(rtol=1e-9, prepare=lambda model, batch: crowd(model, routing)).ok


def crowd(model: nn.Module, routing: str) -> None:
    """Have every token choose one expert, or none of five (of two, where there are four)."""
    states = [*model.named_buffers(), *model.named_parameters()]
    found = [x for name, x in states if name.endswith(("e_score_correction_bias", "router.bias"))]
    assert found
    for bias in found:
        with torch.no_grad():
            hot, empty = (5, slice(2, 7)) if len(bias) == 8 else (1, slice(1, 3))
            bias[hot if routing == "hot" else empty] += 100.0 if routing == "hot" else -100.0


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek"])
@pytest.mark.parametrize("routing", ["hot", "empty"])
def test_gradients_of_an_exchange_whatever_the_routing(kind: str, routing: str) -> None:
    """Breaks if ranks to which nobody, or everybody, sends tokens give experts, biases or the router another gradient.
    With a bias of the router's own, or groups of experts.
    """
    plan = planned(model_of(kind), "expert", "dp=4")
    assert plan.verify(rtol=1e-9, prepare=lambda model, batch: crowd(model, routing)).ok


@pytest.mark.slow
def test_layers_that_compute_something_else_do_not_share_an_activation() -> None:
    """Breaks if a block is taken for a repetition of one whose experts clamp elsewhere."""
    model: Any = model_of("gpt_oss", layer_types=["full_attention"] * 2)
    model.model.layers[1].mlp.experts.limit = 0.25
    plan = planned(model, "ddp", "dp=2")
    assert plan.verify(rtol=1e-9).ok and plan.source is not None and "0.25" in plan.source


@pytest.mark.slow
def test_configurations_stay_as_they_were() -> None:
    """Breaks if planning changes how the user's own model goes through experts."""
    from transformers.integrations import moe

    model: Any = model_of("mixtral")
    before = model.config._experts_implementation, list(moe.ALL_EXPERTS_FUNCTIONS)
    planned(model, "ddp", "dp=2")
    assert (model.config._experts_implementation, list(moe.ALL_EXPERTS_FUNCTIONS)) == before
