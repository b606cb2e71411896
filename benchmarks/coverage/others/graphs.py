"""Layers and networks of torch_geometric on one graph: its nodes are one batch whose rows are not independent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.others.entry import Entry, Made, numbered

NODES, EDGES, FEATURES, GRAPHS = 24, 64, 8, 4


def _graph() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randn(NODES, FEATURES, generator=made), torch.randint(0, NODES, (2, EDGES), generator=made)


class TwoLayers(nn.Module):
    """The network of torch_geometric's introduction."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.conv2 = layer(FEATURES, 16), layer(16, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """f32[nodes, 8]"""
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Pooled(nn.Module):
    """The network of its tutorial for classifying graphs."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.conv, self.lin = GCNConv(FEATURES, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """f32[graphs, 3]"""
        from torch_geometric.nn import global_mean_pool

        return self.lin(global_mean_pool(self.conv(x, edge_index).relu(), batch, size=GRAPHS))


def _layer(name: str, kwargs: dict[str, Any]) -> Made:
    from torch_geometric import nn as layers

    return TwoLayers(lambda a, b: getattr(layers, name)(a, b, **kwargs)), _graph()


def _gin() -> Made:
    from torch_geometric.nn import GINConv

    def layer(a: int, b: int) -> nn.Module:
        return GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)))

    return TwoLayers(layer), _graph()


def _model(name: str, kwargs: dict[str, Any]) -> Made:
    from torch_geometric.nn import models

    return getattr(models, name)(FEATURES, 16, 2, 4, **kwargs), _graph()


def _pooled() -> Made:
    return Pooled(), (*_graph(), torch.arange(NODES) * GRAPHS // NODES)


LAYERS: dict[str, dict[str, Any]] = {
    "GCNConv": {}, "GATConv": {"heads": 2, "concat": False}, "GATv2Conv": {"heads": 2, "concat": False},
        "SAGEConv": {},
    "GraphConv": {}, "TransformerConv": {"heads": 2, "concat": False}, "ChebConv": {"K": 2}, "SGConv": {},
        "TAGConv": {},
    "ARMAConv": {}, "LEConv": {},
}  # fmt: skip


def entries() -> list[Entry]:
    """All of them."""
    layers = {name: partial(_layer, name, kwargs) for name, kwargs in LAYERS.items()}
    models = {name: partial(_model, name, {}) for name in ("GCN", "GraphSAGE", "GAT")}
    return numbered("torch_geometric", "graphs", layers | models | {"GINConv": _gin, "mean pool": _pooled})
