"""Loops over experts that some token chose: the program has a round for each expert, and does what eager does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture

EXPERTS, WIDTH, CHOSEN = 5, 8, 2
Loop = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Experts of which each token chooses two; `how` goes through them: hidden[T, D], weights[T, K], indices[T, K]."""

    def __init__(self, how: Loop) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)) for _ in range(5)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, WIDTH)
        weights, indices = self.gate(x).softmax(-1).topk(CHOSEN)
        return self.how(self, x, weights, indices).square().mean()

    def add(self, out: Tensor, x: Tensor, weights: Tensor, mask: Tensor, expert: Tensor) -> None:
        """What one expert makes of its tokens, to these."""
        nth, rows = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, rows, self.experts[int(expert)](x[rows]) * weights[rows, nth, None])


def _hit(indices: Tensor, least: int = 0) -> tuple[Tensor, Tensor]:
    mask = F.one_hot(indices, EXPERTS).permute(2, 1, 0)
    return mask, (mask.sum((-1, -2)) > least).nonzero()


def _over_all(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rows, nth = torch.where(indices == number)
        out[rows] += weights[rows, nth, None] * expert(x[rows])
    return out


def _over_those_hit(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit) = torch.zeros_like(x), _hit(indices)
    for expert in hit:
        model.add(out, x, weights, mask, expert)
    return out


def _over_crowded(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit) = x.clone(), _hit(indices, least=2)
    for expert in hit:
        model.add(out, x, weights, mask, expert)
    return out


def _each_by_how_many(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit) = torch.zeros_like(x), _hit(indices)
    for expert in hit:
        nth, rows = torch.where(mask[expert[0]])
        made = model.experts[expert.item()](x[None, rows].reshape(-1, WIDTH))
        out.index_add_(0, rows, made * weights[rows, nth].unsqueeze(-1) / made.shape[0])
    return out


def _one_more_class(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """A number behind the last expert, which nobody chooses."""
    out, mask = torch.zeros_like(x), F.one_hot(indices, EXPERTS + 1).permute(2, 1, 0)
    stacked = torch.stack([each[0].weight for each in model.experts])
    for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        nth, rows = torch.where(mask[expert[0]])
        made = F.silu(x[rows] @ stacked[expert[0]].T) @ stacked[expert[0]]
        out.index_add_(0, rows, made * weights[rows, nth, None])
    return out


RIGHT: Mapping[str, Loop] = {
    "all": _over_all, "hit": _over_those_hit, "crowded": _over_crowded, "by how many": _each_by_how_many,
    "one more": _one_more_class,
}  # fmt: skip


@pytest.mark.moderate
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RIGHT)
def test_the_program_does_what_the_loop_does(name: str) -> None:
    """Breaks if a round that eager does not have writes, an expert without tokens gives NaN as a gradient, a token's
    two choices are mixed up, or rows of another batch.
    """
    torch.manual_seed(0)
    model = Mixture(RIGHT[name]).double()
    program = capture(model, {"x": torch.randn(4, 3, WIDTH).double()})
    for seed in range(4):
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        x = x if seed else x[:1, :1].expand(4, 3, WIDTH).contiguous()  # all choose the same two
        state = interpret.state_of(model, program)
        (found, *_), gradients = interpret.run(program, state, interpret.input_tensors(program, {"x": x}))
        wanted = model(x)
        torch.testing.assert_close(found, wanted)
        named = dict(model.named_parameters())
        of = torch.autograd.grad(wanted, list(named.values()), allow_unused=True)
        for parameter, gradient in zip(named, of, strict=True):
            expected = torch.zeros_like(named[parameter]) if gradient is None else gradient
            torch.testing.assert_close(gradients[parameter], expected) if parameter in gradients else None


@pytest.mark.moderate
def test_as_many_tokens_as_choices() -> None:
    """Breaks if places of a mask that lie in another order than a tensor's dims are taken as they are, where both have
    one size: a token would be weighed by another one's weight.
    """
    torch.manual_seed(0)
    model, x = Mixture(_over_those_hit).double(), torch.randn(1, CHOSEN, WIDTH).double()
    program = capture(model, {"x": x})
    (found, *_), _ = interpret.run(
        program, interpret.state_of(model, program), interpret.input_tensors(program, {"x": x})
    )
    torch.testing.assert_close(found, model(x))


def _counts(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit), number = torch.zeros_like(x), _hit(indices), 0
    for expert in hit:
        model.add(out, x, weights, mask, expert)
        number += 1
    return out / number


def _numbers_them(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit) = torch.zeros_like(x), _hit(indices)
    for number, expert in enumerate(hit):
        model.add(out, x * (number + 1), weights, mask, expert)
    return out


def _keeps_the_last(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit), last = torch.zeros_like(x), _hit(indices), 0
    for expert in hit:
        model.add(out, x, weights, mask, expert)
        last = int(expert)
    return out * last


def _adds_elsewhere(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit) = torch.zeros_like(x), _hit(indices)
    for expert in hit:
        model.add(out, x, weights, mask, expert)
        out += 1
    return out


def _collects(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit), means = torch.zeros_like(x), _hit(indices), []
    for expert in hit:
        model.add(out, x, weights, mask, expert)
        means.append(model.experts[int(expert)](x).mean())
    return out + torch.stack(means).sum()


def _leaves(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    out, (mask, hit) = torch.zeros_like(x), _hit(indices)
    for expert in hit:
        if int(expert) == 2:
            break
        model.add(out, x, weights, mask, expert)
    return out


def _twice_in_a_row(model: Mixture, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """A token may have chosen the same twice: which of both rows is written, is not said."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rows, nth = torch.where(indices % 3 == number)
        out[rows] = out[rows] + weights[rows, nth, None] * expert(x[rows])
    return out


@pytest.mark.moderate
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_counts, "how many rows a mask chooses"), (_numbers_them, "how many rows a mask chooses"),
        (_keeps_the_last, "how many rows a mask chooses"),
        (_adds_elsewhere, "one by one.*test_chosen_loops.py:"), (_collects, "one by one.*test_chosen_loops.py:"),
        (_leaves, "one by one.*test_chosen_loops.py:"), (_twice_in_a_row, r"x\[index\] = … does not treat alone"),
    ],
)  # fmt: skip
def test_what_else_comes_of_a_round_is_refused(how: Loop, said: str) -> None:
    """Breaks if a program does in every batch what eager does for the experts that were hit alone."""
    with pytest.raises(AutoparError, match=said):
        capture(Mixture(how), {"x": torch.randn(4, 3, WIDTH)})


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "auto"])
def test_a_loop_of_transformers_is_proven(strategy: str) -> None:
    """Breaks if DBRX's own loop, which no setting replaces, gives its router another gradient."""
    config = transformers.DbrxConfig(
        vocab_size=64, d_model=32, n_heads=4, n_layers=1, max_seq_len=64, eos_token_id=2, pad_token_id=0,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (4, 3))
    plan = autopar.plan(
        transformers.DbrxForCausalLM(config).train(), autopar.Mesh.parse("dp=2", hardware="cpu"), strategy=strategy,
        example_inputs={"input_ids": ids, "labels": ids},
    )  # fmt: skip
    assert plan.verify(rtol=1e-9).ok
