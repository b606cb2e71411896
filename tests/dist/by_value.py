"""A model of tiles, whose sizes are an input, and what one rank does with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.api import ways as limits
from autopar.base.errors import AutoparError


class Tiles(nn.Module):
    """Attention within each tile; the model adds where in its tile a row lies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        rows = torch.cat([torch.arange(h).repeat_interleave(w) for h, w in grid.tolist()])
        y = self.linear(x) * (1 + rows[:, None])
        parts = torch.split(y, grid.prod(-1).tolist())
        return torch.cat([torch.softmax(part @ part.T, -1) @ part for part in parts]).square().mean()


GRIDS = ([[2, 2], [1, 4]], [[1, 2], [2, 3]], [[2, 2], [1, 4]])


def losses() -> tuple[list[float], list[float], int, str]:
    """Of eager and of the compiled model on batches of one shape; how many programs there are then; and what is said
    where there would be more than may be.
    """
    torch.manual_seed(0)
    model, x = Tiles(), torch.randn(8, 4)
    grids = [torch.tensor(grid) for grid in GRIDS]
    eager = [float(model(x, grid)) for grid in grids]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled: Any = autopar.compile(model, mesh, strategy="ddp", example_inputs={"x": x, "grid": grids[0]})
    found = [float(compiled(x=x, grid=grid).detach()) for grid in grids]
    programs, said = len(compiled.autopar._programs), ""
    limits.MOST_VALUES = programs
    try:
        compiled(x=x, grid=torch.tensor([[1, 1], [1, 7]]))
    except AutoparError as error:
        said = str(error)
    return eager, found, programs, said
