"""Train a plain torch.nn model, sharded by autopar: no transformers, no base class, no annotations.

torchrun --nproc-per-node 4 examples/train_mlp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autopar


class Block(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, features: int = 64, hidden: int = 256, num_layers: int = 4, num_classes: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(features, hidden) for _ in range(num_layers))
        self.head = nn.Linear(features, num_classes)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Classifier()
    with torch.no_grad():
        teacher = torch.randn(64, 8)

    model = autopar.compile(model, mesh, strategy={"dp": "zero3", "tp": "tensor"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        output = model(x=x, labels=(x @ teacher).argmax(1))  # the first call plans
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step}  loss {output['loss'].item():.4f}", flush=True)

    if dist.get_rank() == 0:
        weight = model.head.weight
        print(f"{type(model).__name__}.head.weight is a {type(weight).__name__}: {weight.placements}")
        print(f"a rank sends {sum(row.bytes_sent for row in model.plan.collectives):.0f} bytes a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
