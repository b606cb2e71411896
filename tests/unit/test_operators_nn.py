"""Layers, functions and losses of torch.nn under strategies that split the batch: a slice of docs/operators.md, and
what was found by making it.

What would break these: a loss or a reduction that is not a sum of terms, or not as accurate as torch's; an operator
that no split serves and that is refused, or gathered where it need not be; an error that names the first linear layer.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.operators.decompositions import DECOMPOSITIONS
from autopar.operators.losses import AUTOGRAD, trace_cross_entropy_terms
from benchmarks.proofs.operators_nn import cases, run
from benchmarks.proofs.operators_nn_cases import ROWS, Layer, Loss, signs, unit

CASES = {case.name: case for case in cases()}
DP, BOTH = "dp=2", "dp=2,tp=2"
aten = torch.ops.aten

SLICE = (
    "MSELoss (mean)", "BCELoss (weights, mean)",
    "BCEWithLogitsLoss (both weights, mean)", "NLLLoss (images, weights, mean)",
    "CrossEntropyLoss (weights, smoothed, ignored, mean)", "CrossEntropyLoss (probabilities, smoothed, mean)",
    "MultiMarginLoss (p 2, mean)", "MultiLabelMarginLoss (mean)", "TripletMarginLoss (swap, mean)",
    "CosineEmbeddingLoss (mean)", "contrastive (both directions)", "var (all)",
    "vector_norm (batch and last dim, p 3)", "logsumexp (the batch)", "amin (all)",
    "Softmax (over the batch)", "LogSoftmax (over the batch)", "EmbeddingBag (mean)", "Unfold",
    "affine_grid", "made in forward (arange)",
)  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize("name", SLICE)
def test_a_slice_of_the_table_is_proven_under_ddp(name: str) -> None:
    assert run(CASES[name], "ddp", DP).partition(":")[0] == "ok"


@pytest.mark.moderate
@pytest.mark.parametrize(
    "name", ["MSELoss (mean)", "CrossEntropyLoss (weights, mean)", "var (the batch)", "sort (the batch)"]
)
@pytest.mark.parametrize(("strategy", "mesh"), [("zero3", BOTH), ("auto", DP)])
def test_so_it_is_under_zero3_on_two_axes_and_under_auto(name: str, strategy: str, mesh: str) -> None:
    assert run(CASES[name], strategy, mesh).partition(":")[0] in ("ok", "gathers")


# ------------------------------------------------------------------------------- as accurate as torch's own operators


def r(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator) * scale


X, Y, G = r(4, 6), r(4, 6, seed=1), r(4, 6, seed=2)
EXTREME = torch.cat([r(2, 6, scale=1e4), r(1, 6), torch.full((1, 6), -torch.inf, dtype=torch.float64)])
SHARE = torch.sigmoid(Y)
LABELS, IMAGES = torch.tensor([0, 5, -100, 2]), torch.tensor([[0, 5], [-100, 2], [1, 1], [3, 4]])
WEIGHTS = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
LOGS, LOG_IMAGES = X.log_softmax(1), r(4, 6, 2).log_softmax(1)
LIKE = ({"dtype": torch.float64},)
SOFT, LOG_SOFT = X.softmax(0), X.log_softmax(0)
ALONG: list[tuple[Any, ...]] = [
    (X, [0]),
    (X, [0], {"keepdim": True}),
    (r(4, 3, 2), [0, 2]),
    (X * 1e-3 + 1e3, [0]),
    (X, None),
]
DIMS = [each for each in ALONG if each[1] is not None]
SOME: list[tuple[Any, ...]] = [(X > 1,), (X * 0,), (EXTREME,), (X / 0,), ((X * 0) / 0,), (r(5) > 1,)]
SOME_ALONG: list[tuple[Any, ...]] = [
    (X > 1, [0]),
    (X > 1, [0, 1], True),
    (X > 1, None),
    (r(4, 3, 2) > 1, [0, 2]),
]
ELEMENTS = [(X, Y, reduction) for reduction in (1, 2)]
SAMPLES: dict[Any, list[tuple[Any, ...]]] = {
    aten.mean.dim: DIMS,
    aten.mean.default: [(X,)],
    aten.var.correction: [*ALONG, (X, [0], {"correction": 0}), (X, [0], {"correction": 4})],
    aten.std.correction: [*ALONG, (X, [0], {"correction": 0})],
    aten.var_mean.correction: ALONG,
    aten.std_mean.correction: ALONG,
    aten.amin.default: DIMS,
    aten.min.default: [(X,)],
    **dict.fromkeys((aten.any.default, aten.all.default), SOME),
    **dict.fromkeys((aten.any.dims, aten.all.dims), SOME_ALONG),
    **{op: [(x, 0, *rest) for x, *_ in SOME for rest in ((), (True,))] for op in (aten.any.dim, aten.all.dim)},
    aten._is_any_true.default: [(X > 1,), (X * 0 != 0,)],
    aten._is_all_true.default: [(X > 1,), (r(5) > -9,)],
    aten.linalg_vector_norm.default: [
        (x, p, [0]) for x in (X, X * 0) for p in (0, 1, 2, 3, 0.5, torch.inf, -torch.inf)
    ] + [(r(4, 3, 2), 2, [0, 1], True), (X.float(), 2, [0], {"dtype": torch.float64})],
    aten.norm.Scalar: [(X,), (X, 1)],
    aten.norm.ScalarOpt_dim: [(X, None, [0]), (X, 3, [0], True)],
    aten.norm.ScalarOpt_dtype: [(X.float(), 2, {"dtype": torch.float64})],
    aten.norm.ScalarOpt_dim_dtype: [(X.float(), 2, [0], True, {"dtype": torch.float64})],
    aten.logsumexp.default: [*DIMS, (EXTREME, [0]), (EXTREME.T.contiguous(), [0]), (-EXTREME, [0, 1])],
    aten._softmax.default: [(X, 0, False), (EXTREME, 0, False)],
    aten._softmax_backward_data.default: [(G, SOFT, 0, torch.float64)],
    aten._log_softmax.default: [(X, 0, False), (EXTREME[:3], 0, False)],
    aten._log_softmax_backward_data.default: [(G, LOG_SOFT, 0, torch.float64)],
    aten.mse_loss.default: ELEMENTS,
    aten.smooth_l1_loss.default: [(X, Y, 1, 0.3), (X, Y, 2), (EXTREME[:2], Y[:2])],
    aten.huber_loss.default: [(X, Y, 1, 0.3), (X, Y, 2), (EXTREME[:2], Y[:2])],
    aten.binary_cross_entropy.default: [(SHARE, SHARE.flip(0)), (SHARE, SHARE.flip(0), WEIGHTS, 2)],
    aten.binary_cross_entropy_with_logits.default: [
        (X, SHARE, WEIGHTS, WEIGHTS.flip(0)), (EXTREME[:2], SHARE[:2], None, None, 2),
    ],
    aten.soft_margin_loss.default: [(X, Y.sign()), (EXTREME[:2], Y[:2].sign(), 2)],
    aten.mse_loss_backward.default: [(r(), X, Y, 1), (r(), X, Y, 2)],
    aten.smooth_l1_loss_backward.default: [(r(), X, Y, 1, 0.3), (r(), X, Y, 2, 1.0)],
    aten.huber_loss_backward.default: [(r(), X, Y, 1, 0.3), (r(), X, Y, 2, 1.0)],
    aten.binary_cross_entropy_backward.default: [
        (r(), SHARE, SHARE.flip(0), WEIGHTS), (r(), SHARE, SHARE.flip(0), None, 2),
    ],
    aten.soft_margin_loss_backward.default: [(r(), X, Y.sign(), 1), (r(), X, Y.sign(), 2)],
    aten.nll_loss_forward.default: [(LOGS, LABELS, w, how, -100) for w in (None, WEIGHTS) for how in (0, 1, 2)]
    + [(LOGS[0], torch.tensor(3), None, 1, -100), (LOGS, LABELS.clamp(min=0), WEIGHTS, 1, 5)],
    aten.nll_loss2d_forward.default: [
        (LOG_IMAGES[..., None], IMAGES[..., None], w, how, -100) for w in (None, WEIGHTS) for how in (1, 2)
    ],
    aten.nll_loss_backward.default: [
        (r() if how else r(4), LOGS, LABELS, w, how, -100, torch.tensor(2.5, dtype=torch.float64))
        for w in (None, WEIGHTS) for how in (0, 1, 2)
    ],
    aten.linspace.Tensor_Tensor: [(X[0, 0], X[0, 1], 7, *LIKE), (X[0, 0], X[0, 0], 2, *LIKE)],
    aten.linspace.Tensor_Scalar: [(X[0, 0], 2.5, 6, *LIKE), (X[0, 0], -1, 5, *LIKE)],
    aten.linspace.Scalar_Tensor: [(2.5, X[0, 1], 6, *LIKE), (-1, X[0, 1], 5, *LIKE)],
    aten.nll_loss2d_backward.default: [
        (r(), LOG_IMAGES[..., None], IMAGES[..., None], w, how, -100, torch.tensor(2.5, dtype=torch.float64))
        for w in (None, WEIGHTS) for how in (1, 2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("target", list(DECOMPOSITIONS), ids=str)
def test_what_operators_are_made_of_is_as_accurate_as_they_are(target: Any) -> None:
    """Also at logits of 1e4, for -inf, for variances of large numbers, and for what is all zeros."""
    for sample in SAMPLES[target]:
        kwargs = sample[-1] if isinstance(sample[-1], dict) else {}
        args = sample[:-1] if kwargs else sample
        wanted, found = target(*args, **kwargs), DECOMPOSITIONS[target](*args, **kwargs)
        assert found is not NotImplemented
        both = zip(_tensors(wanted), _tensors(found), strict=True)
        for want, have in both:
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("target", [aten.any.dims, aten.all.dims], ids=str)
def test_no_dims_at_all_reduce_nothing(target: Any) -> None:
    """Sums over no dims are sums over all, and any and all over no dims are what they are given."""
    assert DECOMPOSITIONS[target](X > 1, []) is NotImplemented
    assert target(X > 1, []).shape == X.shape


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHTS])
@pytest.mark.parametrize("x", [X, EXTREME[:3].repeat(2, 1)[:4], r(4, 6, 2)], ids=["plain", "extreme", "images"])
@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropies_of_terms_are_torchs(
    x: Tensor, weight: Tensor | None, smoothing: float, reduction: int, soft: bool
) -> None:
    """Values and gradients, with ignored rows, weights of classes, smoothed labels and probabilities.

    Of logits of 1e4 a float64 difference is known to 1e4 · 2e-16 = 2e-12, which is what the tolerance allows.
    """
    target = x.roll(1, 0).clamp(-2, 2).softmax(1) if soft else (IMAGES if x.dim() == 3 else LABELS)
    results = []
    for call in (aten.cross_entropy_loss.default, trace_cross_entropy_terms):
        leaf = x.clone().requires_grad_()
        value = call(leaf, target, weight, reduction, -100, smoothing)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        results.append((value.detach(), gradient))
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.multi_margin_loss.default, (torch.tensor([0, 5, 1, 2]), 1, 1, None)),
        (aten.multi_margin_loss.default, (torch.tensor([0, 5, 1, 2]), 2, 0.3, WEIGHTS)),
        (aten.multilabel_margin_loss.default, (torch.tensor([[1, 2, 2, -1, 0, 3], [0, -1, 1, 1, 1, 1]] * 2),)),
    ],
)
def test_margins_are_torchs(target: Any, args: tuple[Any, ...], reduction: int) -> None:
    """Labels end at the first -1, repeated ones count each time, and the label's own class does not."""
    results = []
    for call in (target, AUTOGRAD[target]):
        leaf = X.clone().requires_grad_()
        value = call(leaf, *args, reduction)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        results.append((value.detach(), gradient))
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)


# ----------------------------------------------------------------------------------- operators that no split serves


def planned(
    model: nn.Module, *, strategy: str = "ddp", mesh: str = DP, **inputs: Tensor
) -> tuple[autopar.Plan, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = autopar.plan(model, autopar.Mesh.parse(mesh, hardware="cpu"), example_inputs=inputs, strategy=strategy)
    return plan, [str(each.message) for each in told]


def layer(call: Callable[..., Tensor], *shape: int) -> tuple[nn.Module, Tensor]:
    return Layer(shape[-1], call), torch.randn(ROWS, *shape)


@pytest.mark.moderate
def test_what_no_split_serves_is_gathered_and_nothing_else_is() -> None:
    model, x = layer(lambda x: x.cumsum(0), 4)
    plan, told = planned(model, x=x)
    assert plan.verify().ok
    assert plan.source.count("all_gather") == 1
    linear = next(line for line in plan.source.splitlines() if "ops.linear(" in line)
    assert "8/dp" in linear
    (message,) = [each for each in told if "whole on every rank" in each]
    line = re.search(r"cumsum at operators_nn_cases\.py:\d+", message)
    assert line is not None and "receives 64 B more a step" in message
    assert [note for note in plan.notes if "cumsum" in note] == [message.removeprefix("autopar: ")]


@pytest.mark.moderate
def test_a_value_that_several_gathered_operators_read_is_gathered_once() -> None:
    """A product's forward and backward read the same rows whole; it was refused, as only readers could gather."""
    model, x = layer(lambda x: x.prod(0), 4)
    plan, _ = planned(model, x=x)
    assert plan.verify().ok
    assert plan.source.count("all_gather") == 1


@pytest.mark.moderate
def test_operators_before_one_that_is_gathered_stay_split() -> None:
    """Gathering their narrow operand would be fewer bytes, and all that follows would be computed on every rank."""
    model, x = layer(lambda x: x.repeat(1, 16).cumsum(0), 4)
    plan, _ = planned(model, x=x)
    (gather,) = [text for text in plan.source.splitlines() if "all_gather(" in text]
    assert "f32[8, 64]" in gather


@pytest.mark.moderate
def test_what_splits_is_not_gathered() -> None:
    for name in ("MSELoss (mean)", "var (all)", "contrastive (both directions)", "Unfold"):
        case = CASES[name]
        plan, told = planned(case.model(), **dict[str, Any](case.batch()))
        assert "all_gather" not in plan.source
        assert not [each for each in told if "whole on every rank" in each]


def test_the_price_of_gathering_is_that_of_all_calls_and_operands() -> None:
    """Two sorts of f32[8, 4] on a line, and on each rank half of each is missing."""
    model, x = layer(lambda x: x.sort(0)[0] + (2 * x).sort(0)[0], 4)
    _, told = planned(model, x=x)
    assert any("sort at" in each and "receives 128 B more" in each for each in told)


@pytest.mark.moderate
def test_strategies_that_do_not_split_the_batch_gather_nothing_more() -> None:
    """Tensor parallelism may not gather activations, and what it cannot do is refused with the model's words."""

    class Summing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(-1)

    model = nn.Sequential(nn.Linear(6, 6), Summing(), nn.Linear(6, 6))
    pins = [autopar.pin("0.weight", tp=autopar.Shard(0)), autopar.pin("0.bias", tp=autopar.Shard(0))]
    with pytest.raises(AutoparError) as caught:
        autopar.plan(
            model, autopar.Mesh.parse("tp=2", hardware="cpu"), example_inputs={"input": torch.randn(8, 6)},
            strategy="tensor", constraints=pins,
        )  # fmt: skip
    text = str(caught.value)
    assert "cumsum at " in text
    assert not re.search(r"relay:|value:|model\.[a-z_]+_\d|autopar\.linear", text)


# --------------------------------------------------------------------------------------- what the table found besides


@pytest.mark.moderate
def test_a_check_before_a_raise_passes_while_the_model_is_traced() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            if torch.any(x > 100):
                raise ValueError("too large")
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
            assert torch.all(x > -100)
            return self.first(x).square().mean()

    plan, _ = planned(Checked(), x=torch.randn(8, 6))
    assert plan.verify().ok


@pytest.mark.moderate
def test_a_branch_on_values_that_does_more_than_raise_is_told() -> None:
    """Breaks if a test of inputs, or of what is computed, is decided by the example's without a word, or refused."""

    class Branching(nn.Module):
        def __init__(self, of_input: bool) -> None:
            super().__init__()
            self.first, self.of_input = nn.Linear(6, 6), of_input

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if torch.any((x if self.of_input else y) > 1):
                y = y * 2
            return y.mean()

    for of_input in (True, False):
        plan, _ = planned(Branching(of_input), x=torch.randn(8, 6))
        assert any("is as here (test_operators_nn.py:" in n for n in plan.notes)
        assert plan.interface.branches and plan.verify().ok


@pytest.mark.moderate
def test_a_gaussian_likelihood_passes_gradients_through_clamped_variances() -> None:
    """torch clamps them in place without a gradient: below eps the gradient passes as if they were not clamped."""
    model = Loss(6, lambda x, a: F.gaussian_nll_loss(x, a, F.softplus(x), eps=0.7))
    plan, _ = planned(model, x=torch.randn(8, 6), a=torch.randn(8, 6))
    assert plan.verify().ok


def test_what_changes_in_place_without_a_gradient_is_refused() -> None:
    """It was differentiated as if the change had a gradient, which eager does not do."""

    def clamped(x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            y.clamp_(min=0.1)
        return y

    model, x = layer(clamped, 6)
    with pytest.raises(AutoparError, match=r"in place under torch\.no_grad.*\.py:\d+"):
        planned(model, x=x)


@pytest.mark.moderate
def test_buffers_that_are_one_tensor_stay_one_in_a_proof() -> None:
    """The proof's cast made two of them, and the plan's decisions did not know the second."""
    weight = torch.linspace(0.5, 1.5, 6)
    model = Loss(6, nn.BCEWithLogitsLoss(weight=weight, pos_weight=weight))
    plan, _ = planned(model, x=torch.randn(8, 6), a=unit(6)(torch.Generator()))
    assert plan.verify().ok


@pytest.mark.moderate
def test_an_inverse_is_traced_without_its_check() -> None:
    """The check of its gradient gives nothing, and had no type."""
    model, x = layer(lambda x: torch.linalg.inv(x @ x.mT + 4 * torch.eye(3, dtype=x.dtype)), 3, 3)
    assert planned(model, x=x)[0].verify().ok


@torch.library.custom_op("autopar_tests::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return 2 * x


@torch.library.custom_op("autopar_tests::doubled_backward", mutates_args=())
def _doubled_backward(gradient: Tensor) -> Tensor:
    return 2 * gradient


_doubled.register_fake(torch.empty_like)
_doubled.register_autograd(lambda context, gradient: _doubled_backward(gradient))


def test_a_gradient_without_shapes_is_refused_by_name() -> None:
    model, x = layer(lambda x: _doubled(x), 3, 4)
    with pytest.raises(AutoparError, match=r"doubled_backward.* cannot be traced.*\.py:\d+"):
        planned(model, x=x)


def test_what_torch_itself_has_wrong_is_refused_with_what_to_use() -> None:
    model, x = layer(nn.CrossMapLRN2d(3), 4, 3, 3)
    with pytest.raises(AutoparError, match="use nn.LocalResponseNorm"):
        planned(model, x=x)


@pytest.mark.moderate
def test_a_mean_over_unequal_weights_is_that_of_the_whole_batch() -> None:
    """Each rank's own mean, averaged, is another number where ranks have other labels: what PyTorch's DDP computes."""
    weight = torch.tensor([0.1, 5.0, 1.0])
    model = Loss(3, nn.CrossEntropyLoss(weight=weight))
    labels = torch.tensor([0, 0, 0, -100, 1, 1, 1, 2])
    assert planned(model, x=torch.randn(8, 3), a=labels)[0].verify().ok


@pytest.mark.moderate
def test_losses_of_signs_need_no_rows_of_others() -> None:
    model = Loss(6, nn.SoftMarginLoss())
    plan, _ = planned(model, strategy="zero3", mesh=BOTH, x=torch.randn(8, 6), a=signs(6)(torch.Generator()))
    assert plan.verify().ok
