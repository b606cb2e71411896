"""autopar's operators against eager PyTorch, in float64, as values, as gradients and as traced graphs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import operators as ops
from autopar.base.errors import AutoparError
from autopar.operators import losses, scaled_dot_product
from autopar.operators.autograd import _trace_cross_entropy as trace_cross_entropy
from autopar.operators.classes import trace_gather
from autopar.operators.matmul_autograd import trace_matmul

pytestmark = pytest.mark.unit
aten = torch.ops.aten


def make(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def assert_same_gradients(eager, ours, *inputs: Tensor) -> None:
    want, have = eager(*inputs), ours(*inputs)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(have, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def joint_targets(function, *inputs: Tensor) -> list[str]:
    def joint(*args: Tensor):
        out = function(*args)
        return torch.autograd.grad(out.sum(), [a for a in args if a.requires_grad])

    graph = make_fx(joint, tracing_mode="fake")(*inputs).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_linear(leading: tuple[int, ...]) -> None:
    x, w, b = make(*leading, 4), make(5, 4), make(5)
    assert_same_gradients(F.linear, ops.AUTOGRAD[aten.linear.default], x, w, b)
    assert_same_gradients(F.linear, ops.AUTOGRAD[aten.linear.default], x, w)


def test_linear_traces_as_three_products() -> None:
    targets = joint_targets(ops.AUTOGRAD[aten.linear.default], make(2, 3, 4), make(5, 4))
    assert sorted(target for target in targets if target.startswith("autopar")) == [
        "autopar.linear.default",
        "autopar.linear_grad_input.default",
        "autopar.linear_grad_weight.default",
    ]
    assert not any("view" in target for target in targets)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 0.5), (1, 0)])
def test_addmm(alpha: float, beta: float) -> None:
    bias, a, b = make(5), make(3, 4), make(4, 5)
    if beta:
        assert_same_gradients(
            lambda *t: torch.addmm(*t, alpha=alpha, beta=beta),
            lambda *t: ops.AUTOGRAD[aten.addmm.default](*t, alpha=alpha, beta=beta),
            bias,
            a,
            b,
        )
    c, d = make(2, 3, 4), make(2, 4, 5)
    have = ops.AUTOGRAD[aten.baddbmm.default](bias, c, d, alpha=alpha, beta=beta)
    torch.testing.assert_close(have, torch.baddbmm(bias, c, d, alpha=alpha, beta=beta))


@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_embedding(padding_idx: int) -> None:
    ids = torch.randint(0, 7, (2, 5))
    ids[0, 0] = 2
    weight = make(7, 3)
    assert_same_gradients(
        lambda w: aten.embedding.default(w, ids, padding_idx),
        lambda w: ops.AUTOGRAD[aten.embedding.default](w, ids, padding_idx),
        weight,
    )


def test_embedding_shards_sum_to_the_whole() -> None:
    weight, ids, g = make(8, 3, grad=False), torch.randint(0, 8, (2, 5)), make(2, 5, 3, grad=False)
    parts = [ops.embedding(weight[i : i + 4], ids, i) for i in (0, 4)]
    torch.testing.assert_close(parts[0] + parts[1], weight[ids])
    grads = torch.cat([ops.embedding_grad(g, ids, 4, i, padding_idx=5) for i in (0, 4)])
    torch.testing.assert_close(grads, aten.embedding_dense_backward(g, ids, 8, 5, False))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(6, 7), (7,), (2, 7, 3)])
def test_cross_entropy(reduction: int, shape: tuple[int, ...]) -> None:
    x = make(*shape)
    target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if len(shape) > 1:
        target.view(-1)[1] = -100
    assert_same_gradients(
        lambda t: aten.cross_entropy_loss.default(t, target, None, reduction),
        lambda t: ops.AUTOGRAD[aten.cross_entropy_loss.default](t, target, None, reduction),
        x,
    )


def test_cross_entropy_is_vocabulary_parallel() -> None:
    x, target = make(6, 8), torch.randint(0, 8, (6,))
    target[2] = -100
    m = x.amax(-1).detach()
    pieces = [(start, x[:, start : start + 4].detach()) for start in (0, 4)]
    lse = (ops.sum_exp(pieces[0][1], m) + ops.sum_exp(pieces[1][1], m)).log() + m
    loss = (lse - sum(ops.take_label(p, target, start) for start, p in pieces)).masked_fill(target == -100, 0)
    want = F.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(loss, want)
    g = make(6, grad=False).masked_fill(target == -100, 0)
    grad = torch.cat([ops.cross_entropy_grad(g, p, target, lse.detach(), start) for start, p in pieces], -1)
    torch.testing.assert_close(grad, torch.autograd.grad(want, x, g)[0])


OVER_CLASSES = {
    "log_softmax": (aten.log_softmax.int, ()), "_log_softmax": (aten._log_softmax.default, (False,)),
    "softmax": (aten.softmax.int, ()), "_softmax": (aten._softmax.default, (False,)),
    "logsumexp": (aten.logsumexp.default, ()), "logsumexp kept": (aten.logsumexp.default, (True,)),
}  # fmt: skip


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_that_is_no_class_is_told(label: int) -> None:
    """Eager refuses it; breaks if its row counts as if the model gave it a logit of 0, or the error names another."""
    x, target = torch.randn(3, 5), torch.tensor([0, label, -100])
    parts = x.amax(-1), ops.sum_exp(x, x.amax(-1)), ops.take_label(x, target)
    with pytest.raises(AutoparError, match=rf"label {label} is no class(.|\n)*there are 5"):
        ops.cross_entropy(*parts, target, -100, 5)
    loss, count, _ = ops.cross_entropy(*parts, torch.tensor([0, 4, -100]), -100, 5)
    assert loss.isfinite() and count == 2
    every = torch.tensor([0, label, 2])
    for found in (
        trace_cross_entropy(x, target, None, losses.NONE, -100, 0.0),
        losses.trace_cross_entropy_terms(x, target, None, losses.MEAN, -100, 0.1),
        losses._nll_loss(x, target, None, losses.SUM, -100)[0],
        trace_gather(x, 1, every.unsqueeze(1)),
    ):
        assert found.isnan().any()
    assert trace_gather(x, 1, every.clamp(0, 4).unsqueeze(1)).isfinite().all()


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("name", OVER_CLASSES)
def test_functions_of_classes(name: str, dim: int) -> None:
    """Breaks if a function that is made of pieces is another, far from zero too, or along another dim."""
    target, rest = OVER_CLASSES[name]
    along = [dim] if target is aten.logsumexp.default else dim
    x = (make(3, 5, 7) + 1000).detach().requires_grad_()
    assert_same_gradients(lambda t: target(t, along, *rest), lambda t: ops.OVER_CLASSES[target](t, along, *rest), x)
    labels = torch.randint(0, 5, (3, 1, 7) if dim == 1 else (3, 5, 1))
    ours = ops.OVER_CLASSES[aten.gather.default]
    assert_same_gradients(lambda t: t.gather(dim, labels), lambda t: ours(t, dim, labels), x)


def test_logsumexp_of_nothing_but_infinities() -> None:
    """Breaks if a row without a finite element gives no number where torch gives -inf."""
    x = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    assert ops.OVER_CLASSES[aten.logsumexp.default](x, [-1]).tolist() == [-math.inf, 0.0]


@pytest.mark.parametrize("name", ["log_softmax", "softmax"])
def test_half_types_are_rounded_once(name: str) -> None:
    """Breaks if classes in half types are added, or their gradients are made, in half types."""
    target, _ = OVER_CLASSES[name]
    x = make(6, 300).detach().to(torch.bfloat16).requires_grad_()
    g, wide = torch.randn(6, 300, dtype=torch.bfloat16), x.detach().double().requires_grad_()
    have, want = ops.OVER_CLASSES[target](x, -1), target(wide, -1)
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.double(), want, rtol=2**-8, atol=0)
    # Gradients are made of the result as it is rounded, as torch makes them.
    (found,) = torch.autograd.grad(have, x, g)
    y, upper = have.detach().double(), g.double()
    exact = upper - y.exp() * upper.sum(-1, keepdim=True)
    if name == "softmax":
        exact = y * (upper - (upper * y).sum(-1, keepdim=True))
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_of_parts_of_rows_and_vocabulary_add_up(dtype: torch.dtype) -> None:
    """Breaks if a part of the rows counts another's, an ignored row counts, or a row that a part of the logits ends in
    is left out (there are more than are handled at a time).
    """
    x, target = torch.randn(300, 1000).to(dtype), torch.randint(0, 1000, (300,))
    target[::7] = 3
    maximum, total = x.amax(-1), sum(ops.sum_exp(half, x.amax(-1)) for half in x.split(500, -1))
    label = sum(ops.take_label(half, target, start) for start, half in zip((0, 500), x.split(500, -1), strict=True))
    rows = [each.split(100) for each in (maximum, total, label, target)]
    parts = [ops.cross_entropy(*each, 3) for each in zip(*rows, strict=True)]
    loss, count = (torch.stack(each).sum() for each in list(zip(*parts, strict=True))[:2])
    wide = x.double().clone().requires_grad_()
    want = F.cross_entropy(wide, target, ignore_index=3)
    tolerance = {"rtol": 1e-12, "atol": 0.0} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 0.0}
    torch.testing.assert_close((loss / count).double(), want.detach(), **tolerance)
    assert count == (target != 3).sum() and count.dtype == loss.dtype
    lse = torch.cat([each[2] for each in parts])
    halves = zip((0, 500), x.split(500, -1), strict=True)
    have = [ops.cross_entropy_grad(1 / count, half, target, lse, start, 3) for start, half in halves]
    # A result of half type is rounded once, to 8 bits.
    tolerance = {"rtol": 2**-8, "atol": 0.0} if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(torch.cat(have, -1).double(), torch.autograd.grad(want, wide)[0], **tolerance)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": True}])
def test_cross_entropy_falls_back_to_aten(options: dict) -> None:
    x, target = make(6, 7), torch.randint(0, 7, (6,))
    if "weight" in options:
        options = {"weight": torch.rand(7, dtype=torch.float64)}
    assert_same_gradients(
        lambda t: aten.cross_entropy_loss.default(t, target, **options),
        lambda t: ops.AUTOGRAD[aten.cross_entropy_loss.default](t, target, **options),
        x,
    )


def test_cross_entropy_reduces_half_types_in_float32() -> None:
    x, target = torch.randn(4, 5000).bfloat16(), torch.randint(0, 5000, (4,))
    have = ops.AUTOGRAD[aten.cross_entropy_loss.default](x, target)
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.float(), F.cross_entropy(x.float(), target), rtol=4e-3, atol=0)


def masks(batch: int, heads: int, queries: int, keys: int):
    yield "none", None
    full = torch.rand(batch, heads, queries, keys) > 0.3
    full[..., 0] = True
    yield "bool", full
    padding = torch.rand(batch, 1, 1, keys) > 0.4
    yield "padding", padding | (torch.arange(keys) == 0)
    dead = full[:, :1].clone()
    dead[:, :, 1] = False
    yield "dead", dead
    yield "float", torch.randn(queries, keys, dtype=torch.float64)
    yield "dead float", torch.zeros(dead.shape, dtype=torch.float64).masked_fill(~dead, -torch.inf)


@pytest.mark.parametrize("value_size", [4, 6])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("keys", [5, 7])
def test_attention(value_size: int, kv_heads: int, keys: int) -> None:
    q, k, v = make(2, 4, 5, 4), make(2, kv_heads, keys, 4), make(2, kv_heads, keys, value_size)
    for name, mask in masks(2, 4, 5, keys):
        for is_causal, scale in itertools.product((False, True) if name == "none" else (False,), (None, 0.3)):
            options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
            assert_same_gradients(
                lambda *t, o=options: F.scaled_dot_product_attention(*t, **o, enable_gqa=True),
                lambda *t, o=options: ops.AUTOGRAD[aten.scaled_dot_product_attention.default](*t, **o),
                q,
                k,
                v,
            )


def test_attention_of_three_dims_and_of_a_mask_with_gradient() -> None:
    ours = ops.AUTOGRAD[aten.scaled_dot_product_attention.default]
    q, k, v, mask = make(2, 5, 4), make(2, 7, 4), make(2, 7, 4), make(2, 5, 7)
    assert_same_gradients(F.scaled_dot_product_attention, ours, q, k, v, mask)
    assert_same_gradients(
        lambda *t: F.scaled_dot_product_attention(*t, mask.detach()), lambda *t: ours(*t, mask.detach()), q, k, v
    )
    q, k, v, mask = make(2, 4, 5, 4), make(2, 2, 7, 4), make(2, 2, 7, 4), make(1, 4, 5, 7)
    assert_same_gradients(lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True), ours, q, k, v, mask)


def test_attention_math_path_equals_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, g = make(2, 4, 5, 4), make(2, 2, 7, 4), make(2, 2, 7, 4), make(2, 4, 5, 4)
    for _, mask in masks(2, 4, 5, 7):
        while mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(0)
        args = (q.detach(), k.detach(), v.detach(), mask, None, None, None)
        kernel = ops.attention(*args, scale=0.5)
        kernel_grads = ops.attention_backward(g.detach(), *args, *kernel, scale=0.5)
        with monkeypatch.context() as patch:
            patch.setattr(scaled_dot_product, "_fits_cpu_flash", lambda *_: False)
            plain = ops.attention(*args, scale=0.5)
            plain_grads = ops.attention_backward(g.detach(), *args, *kernel, scale=0.5)
        torch.testing.assert_close(plain, kernel, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(plain_grads, kernel_grads, rtol=1e-12, atol=1e-12)


def test_columns_of_padding_count_for_nothing() -> None:
    x, w = make(3, 4, grad=False), make(6, 4, grad=False)
    out = ops.linear(x, w, valid=9, start=6)
    assert torch.equal(out[:, :3], (x @ w.mT)[:, :3]) and (out[:, 3:] == -math.inf).all()
    assert (ops.linear(x, w, valid=9, start=12) == -math.inf).all()
    assert torch.equal(ops.linear(x, w, valid=9), x @ w.mT)
    lse = ops.sum_exp(out, out.amax(-1)).log() + out.amax(-1)
    torch.testing.assert_close(lse, out[:, :3].logsumexp(-1))
    grad = ops.cross_entropy_grad(torch.ones(3).double(), out, torch.tensor([6, 8, 2]), lse, 6)
    assert not grad[:, 3:].any() and grad.isfinite().all()


def test_attention_traces_as_two_operators() -> None:
    targets = joint_targets(
        ops.AUTOGRAD[aten.scaled_dot_product_attention.default], make(2, 4, 5, 4), make(2, 2, 7, 4), make(2, 2, 7, 4)
    )
    assert [t for t in targets if t.startswith("autopar")] == [
        "autopar.attention.default",
        "autopar.attention_backward.default",
    ]


def test_gradients_of_products_of_square_matrices() -> None:
    """Breaks if a factor of a gradient is not transposed: of square matrices no shape tells."""
    a, b = (torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    g = torch.randn(2, 4, 4, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(product(a, b), (a, b), g) for product in (trace_matmul, torch.matmul))
    torch.testing.assert_close(found, wanted)


def test_attention_with_dropout_is_one_operator_too() -> None:
    ours = ops.AUTOGRAD[aten.scaled_dot_product_attention.default]

    def function(q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Tensor:
        with ops.tracing_seed(seed):
            return ours(q, k, v, None, 0.5, True)

    targets = joint_targets(function, make(2, 4, 5, 4), make(2, 2, 5, 4), make(2, 2, 5, 4), torch.tensor(1))
    assert [t for t in targets if t.startswith("autopar")] == [
        "autopar.attention.default",
        "autopar.attention_backward.default",
    ]


OPCHECK = {
    "linear": (make(2, 3, 4, grad=False), make(5, 4, grad=False), make(5, grad=False)),
    "linear_grad_input": (make(2, 3, 5, grad=False), make(5, 4, grad=False)),
    "linear_grad_weight": (make(2, 3, 5, grad=False), make(2, 3, 4, grad=False)),
    "embedding": (make(7, 3, grad=False), torch.randint(0, 9, (2, 4)), 1),
    "embedding_grad": (make(2, 4, 3, grad=False), torch.randint(0, 9, (2, 4)), 5, 2, 3),
    "take_label": (make(2, 4, grad=False), torch.tensor([1, -100]), 0),
    "put_label": (make(2, grad=False), torch.tensor([1, -100]), 4, 0),
    "log_softmax": (make(2, 4, grad=False), make(2, grad=False), make(2, grad=False).exp()),
    "log_softmax_grad": (make(2, 4, grad=False), make(2, 4, grad=False), make(2, grad=False)),
    "softmax": (make(2, 4, grad=False), make(2, grad=False), make(2, grad=False).exp()),
    "softmax_grad": (make(2, 4, grad=False), make(2, 4, grad=False), make(2, grad=False)),
    "sum_exp": (make(2, 4, grad=False), make(2, grad=False)),
    "cross_entropy_grad": (make(2, grad=False), make(2, 4, grad=False), torch.tensor([1, 3]), make(2, grad=False)),
    "attention": (*(make(2, 4, 5, 4, grad=False) for _ in range(3)), None, None, make(4, grad=False), {"scale": 0.5}),
    "attention_backward": (
        *(make(2, 4, 5, 4, grad=False) for _ in range(4)), None, None, None, None, make(2, 4, 5, 4, grad=False),
        make(2, 4, 5, grad=False), {"scale": 0.5, "right": 0},
    ),
    "attention_backward_bias": (
        *(make(2, 4, 5, 4, grad=False) for _ in range(4)), make(1, 4, 5, 5, grad=False), None, None, None,
        make(2, 4, 5, 4, grad=False), make(2, 4, 5, grad=False), {"scale": 0.5},
    ),
    "dropout": (make(4, 6, grad=False), 0.5, torch.tensor(1), 2, [], [4, 6]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPCHECK)
def test_schema_and_fake_implementation(name: str) -> None:
    operator = getattr(torch.ops.autopar, name).default
    args, kwargs = OPCHECK[name], {}
    if isinstance(args[-1], dict):
        *args, kwargs = args
    torch.library.opcheck(operator, tuple(args), kwargs, test_utils=("test_schema", "test_faketensor"))


def test_pieces_of_a_fused_linear() -> None:
    """Breaks if a piece takes other rows of the weight, or its gradient lands on them."""
    x, w, b = make(2, 3, 4), make(10, 4), make(10)

    def eager(*inputs: Tensor) -> Tensor:
        q, k, v = F.linear(*inputs).split([6, 2, 2], -1)
        return torch.cat([q * 2, k, v * 3], -1)

    def ours(*inputs: Tensor) -> Tensor:
        fused = ops.FusedLinear(*inputs)
        return torch.cat([fused.piece(0, 6) * 2, fused.piece(6, 2), fused.piece(8, 2) * 3], -1)

    assert_same_gradients(eager, ours, x, w, b)
    assert_same_gradients(eager, ours, x, w)


def test_products_of_rows_with_rows() -> None:
    a, b = make(4, 3), make(4, 3)
    assert_same_gradients(F.linear, lambda x, y: ops.trace_coupled_product(aten.linear.default, x, y), a, b)
    assert_same_gradients(
        torch.matmul, lambda x, y: ops.trace_coupled_product(aten.matmul.default, x, y), a, make(3, 4)
    )


def test_whole_makes_terms_of_pieces() -> None:
    x = make(6, 2, grad=False)
    assert ops.whole(x, 0, 6) is x
    torch.testing.assert_close(sum(ops.whole(x[i : i + 2], 0, 6, i) for i in (0, 2, 4)), x)


@pytest.mark.parametrize("rows", [torch.tensor([[3, 0], [-1, 3]]), torch.tensor([2, -4], dtype=torch.int32)])
def test_rows_of_a_table_by_number(rows: Tensor) -> None:
    """Breaks if a number that counts from the end, or one that comes twice, is lost."""
    table = make(4, 5)
    traced = ops.AUTOGRAD[aten.index.Tensor]
    assert_same_gradients(lambda x: x[rows], lambda x: traced(x, [rows]), table)
    cube = make(4, 5, 2)
    assert_same_gradients(lambda x: x[rows.long()], lambda x: traced(x, [rows.long()]), cube)
