"""Lists with tensors in them, of which `torch.tensor` and its like, and indices, read the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.passes.capture import capture


class Lists(nn.Module):
    """What `how` makes of hidden values, beside a loss that they scale."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 8), nn.Linear(8, 4), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).relu()
        made = self.how(self, h)
        return (self.last(h) * made.sum()).square().mean(), made


def _written(h: Tensor) -> Tensor:
    """Pairs that are taken apart, as coordinates are."""
    there = torch.full_like(h, True).bool()
    pairs = torch.stack([torch.arange(len(h), device=h.device), h.argmax(1)], 1)
    rows, columns = zip(*pairs, strict=True)
    there[rows, columns] = False
    return torch.where(there, h, 0.0)


HOWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "values": lambda _, h: torch.tensor([h.max(), 2 * h.min()]),
    "parameters": lambda m, _: torch.tensor([p.max() for p in m.parameters()]),
    "nested": lambda _, h: torch.as_tensor([[h.sum(), 1.0], (h[0, 0], h[:1, 1].mean(0, keepdim=True))]),
    "items": lambda _, h: torch.tensor([h.max().item(), 0.5]),
    "like": lambda _, h: h.new_tensor([h.argmax(), 3]),
    "whole": lambda _, h: torch.tensor([h.argmax(), (h > 0).sum(), True]),
    "truths": lambda _, h: torch.asarray([(h > 0).all(), (h < 1).any(), False]),
    "half": lambda _, h: torch.tensor([h.max().half(), h.min().half()]),
    "half-and-python": lambda _, h: torch.tensor([h.max().half(), 1.0]),
    "double": lambda _, h: torch.tensor([h.max(), 1], dtype=torch.float64),
    "rows": lambda _, h: h[[h[:, 0].argmax(), h[:, 1].argmin(), 2],],
    "rows-and-columns": lambda _, h: h[list(h.argmax(0)[:4]), tuple(h.argmax(1))],
    "columns": lambda _, h: h[1:, [[h[0].argmax(), 3], [h[1].argmax(), h[2].argmax()]]],
    "written": lambda _, h: _written(h),
    "one-row": lambda _, h: h[h[:, 0].argmax()],
    "one-column": lambda _, h: h[..., h[0].argmax() - 8],
    "one-of-each": lambda _, h: h[None, h[:, 0].argmax(), h[0].argmax().item()],
    "vector": lambda m, h: nn.functional.linear(h, m.last.weight[0]),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_lists_are_what_torch_makes_of_them(how: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Breaks if numbers are in another order, shape or dtype than eager's."""
    torch.manual_seed(0)
    model, batch = Lists(how), {"x": torch.randn(4, 4)}
    program = capture(model, batch)
    found, _ = interpret.run(program, interpret.state_of(model, program), interpret.input_tensors(program, batch))
    wanted = model(**batch)
    assert len(found) == 2
    torch.testing.assert_close(found[1], wanted[1])
    torch.testing.assert_close(found[0].to(wanted[0].dtype), wanted[0])


@pytest.mark.moderate
@pytest.mark.parametrize(
    "name", ["values", "parameters", "rows-and-columns", "written", "one-row", "one-column", "vector"]
)
def test_lists_have_no_gradient(name: str) -> None:
    """Breaks if a gradient passes through numbers that eager reads, or none through what places choose, or if numbers
    are those of a rank's rows.
    """
    mesh = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
    strategy = {"dp": "zero3", "tp": "tensor"}
    plan = autopar.plan(Lists(HOWS[name]), mesh, example_inputs={"x": torch.randn(4, 4)}, strategy=strategy)
    proof = plan.verify()
    assert proof.ok, str(proof)


def test_what_reads_numbers_unseen_is_told() -> None:
    """Breaks if words are of memory, which is no help, in place of what to write."""
    model = Lists(lambda _, h: torch.FloatTensor([h.max(), h.min()]))
    with pytest.raises(AutoparError, match=r"numbers that it reads of others(.|\n)*torch.stack"):
        capture(model, {"x": torch.randn(4, 4)})
