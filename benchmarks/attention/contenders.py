"""Who is compared in attention.py: each makes a forward, and a backward from what its forward kept, for one case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Forward = Callable[[], Tensor]
Backward = Callable[[], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: bfloat16 on CUDA, q, k, v and the gradient g of the output, all [batch, heads, length, head_dim]."""

    head_dim: int
    causal: bool
    length: int
    batch: int
    heads: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g: normal numbers, laid out [batch, length, heads, head_dim] as projections leave them."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.batch, self.length, self.heads, self.head_dim)

        def draw() -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.dtype).transpose(1, 2)

        return draw(), draw(), draw(), draw()

    def flops(self, backward: bool) -> float:
        """Of the products, as the FlashAttention papers count: 4 S² D a head, half of it under a causal mask; the
        backward has five products for the forward's two.
        """
        forward = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim / (2 if self.causal else 1)
        return 2.5 * forward if backward else forward

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"head dim {self.head_dim}, {mask}, {self.batch} × {self.heads} heads × {self.length}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A contender for one case. backward: None where it has none."""

    forward: Forward
    backward: Backward | None


Contender = Callable[[Case, Tensor, Tensor, Tensor, Tensor], Prepared]


def autopar(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Prepared:
    """autopar's Triton kernels, by their entry points."""
    from autopar.operators import AttentionOptions
    from autopar.runtime.kernels.attention_backward import attention_backward
    from autopar.runtime.kernels.attention_forward import attention_forward

    options = AttentionOptions(scale=case.head_dim**-0.5, right=0 if case.causal else None)
    out, lse = attention_forward(q, k, v, None, None, None, None, options=options)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = attention_backward(g, q, k, v, None, None, None, None, out, lse, options=options)
        return dq, dk, dv

    return Prepared(lambda: attention_forward(q, k, v, None, None, None, None, options=options)[0], backward)


def sdpa(backend: SDPBackend) -> Contender:
    """PyTorch's scaled_dot_product_attention with one backend."""

    def prepare(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Prepared:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

        return _by_autograd(attend, q, k, v, g)

    return prepare


def flex(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Prepared:
    """FlexAttention, compiled for these shapes; causal by its block mask.

    What was compiled for other cases is forgotten: after a few of them Dynamo would give up, and run it unfused.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if case.causal:
        mask = create_block_mask(
            lambda b, h, query, key: query >= key, None, None, case.length, case.length, device=case.device
        )
    return _by_autograd(lambda q, k, v: compiled(q, k, v, block_mask=mask), q, k, v, g)


def tutorial(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Prepared:
    """The plain Triton kernel of attention_tutorial.py; forward only."""
    from benchmarks.attention.tutorial import fastest_config, tutorial_attention

    config = fastest_config(q, k, v, case.causal)
    return Prepared(lambda: tutorial_attention(q, k, v, case.causal, config), None)


def _by_autograd(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Prepared:
    """The forward without a graph; the backward of a graph that is kept."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = attend(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(out, leaves, g, retain_graph=True)
        return dq, dk, dv

    return Prepared(forward, backward)


OURS = "autopar"
ON_CUDA: dict[str, Contender] = {
    OURS: autopar,
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": flex,
    "tutorial": tutorial,
}
INTERPRETED: dict[str, Contender] = {OURS: autopar, "SDPA math": sdpa(SDPBackend.MATH), "tutorial": tutorial}


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of one head, [length, head_dim] each, in float64, a block of queries at a time."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    scale = case.head_dim**-0.5
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    positions = torch.arange(case.length, device=q.device)
    for rows in positions.split(1024):
        x = q[rows] @ k.T * scale
        if case.causal:
            x = x.masked_fill(rows[:, None] < positions[None, :], -torch.inf)
        p = x.softmax(-1)
        out[rows] = p @ v
        dv += p.T @ g[rows]
        dx = p * (g[rows] @ v.T - (g[rows] * out[rows]).sum(-1, keepdim=True)) * scale
        dq[rows] = dx @ k
        dk += dx.T @ q[rows]
    return out, dq, dk, dv
