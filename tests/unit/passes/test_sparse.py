"""Products with a sparse matrix that a model holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError


class Graph(nn.Module):
    """Two rounds over the edges of a graph, and a vector over those of another one."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        dense = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.4) * torch.arange(1.0, 9.0)
        self.graph, self.back = dense.to_sparse(layout=layout), dense.T.to_sparse(layout=layout)
        self.nodes = nn.Embedding(8, 4)

    def forward(self, users: Tensor) -> Tensor:
        found = torch.sparse.mm(self.back, self.graph @ self.nodes.weight)
        return (found * (self.back @ self.graph.mv(found[:, 0]))[:, None])[users].square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_graphs_that_a_model_holds(layout: torch.layout) -> None:
    """Breaks if a product is of the wrong elements, or ends in an error of torch's kernels for sparse tensors."""
    given = {"users": torch.arange(4)}
    plan = autopar.plan(Graph(layout), autopar.Mesh({"dp": 2}), strategy="zero3", example_inputs=given)
    assert plan.verify().ok


def test_a_sparse_buffer_is_refused() -> None:
    """Breaks if a buffer of which no rank can have a part is taken for a dense one."""
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    with pytest.raises(AutoparError, match=r"the buffer graph is of layout sparse_coo.*self\.graph = graph"):
        autopar.plan(model, autopar.Mesh({"dp": 2}), example_inputs=(torch.randn(4, 4),))
