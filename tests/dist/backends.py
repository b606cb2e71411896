"""What one rank does in the tests of `torch.compile(model, backend=autopar.backend(mesh))`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autopar
from tests.dist.training import batches, loss_of, message, model_and_batch


def prepared(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model in float64, so that sums in another order do not show; without a cache in its outputs."""
    torch._dynamo.reset()
    model, batch = model_and_batch(name, torch.float64, 0.0)
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model, batch


def steps(
    model: Any, parameters: list[nn.Parameter], batch: dict[str, Any], optimizer: str
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the gradients of the first."""
    made = getattr(torch.optim, optimizer)(parameters, lr=1e-2)
    losses, gradients = [], []
    for each in batches(batch, 3):
        made.zero_grad()
        loss = loss_of(model(**each))
        loss.backward()
        gradients = gradients or [p.grad.clone() for p in parameters if p.grad is not None]
        made.step()
        losses.append(float(loss.detach()))
    return losses, gradients


def train(name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, optimizer: str) -> dict[str, Any]:
    model, batch = prepared(name)
    own = autopar.backend(init_device_mesh("cpu", sizes, mesh_dim_names=axes), strategy=strategy)
    own.comm.log = []
    compiled = torch.compile(model, backend=own, dynamic=False)
    losses, gradients = steps(compiled, list(model.parameters()), batch, optimizer)
    return {
        "losses": losses,
        "gradients": gradients,
        "num_plans": len(own.plans),
        "regions": [[(region.module, region.calls) for region in plan.regions] for plan in own.plans],
        "parameters": [entry.name for plan in own.plans for entry in plan.interface.parameters],
        "events": [str(event) for event in own.comm.log],
    }


class Block(nn.Module):
    """Normalizes over the batch, reads a buffer and a table that is no parameter, drops, and adds."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x)))) * self.scale


class Broken(nn.Module):
    """Two graphs, and four outputs: a loss, another scalar, a choice, and what nobody uses."""

    def __init__(self, dropout: float = 0.0, breaks: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, dropout) for _ in range(4)])
        self.head = nn.Linear(8, 4)
        self.breaks = breaks
        self.head.bias.requires_grad_(False)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = batch["x"]
        for block in self.blocks[:2]:
            x = block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks[2:]:
            x = block(x)
        logits = self.head(x + torch.arange(8, device=x.device) / 8)
        loss = torch.nn.functional.cross_entropy(logits, batch["y"])
        return {"size": x.pow(2).mean(), "loss": loss, "choice": logits.argmax(-1), "logits": logits, "none": None}


def broken(**options: Any) -> tuple[Broken, dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Broken(**options).double()
    return model, {"x": torch.randn(8, 8, dtype=torch.float64), "y": torch.arange(8) % 4}


def broken_steps(model: Any, own: Broken, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Two steps on a loss of the user's own, and one without gradients: numbers, gradients, buffers."""
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    x = batch["x"].clone().requires_grad_()
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        x.grad = None
        output = model({**batch, "x": x})
        loss = output["loss"] + 0.1 * output["size"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    own.eval()
    with torch.no_grad():
        last = model(batch)
    assert output["none"] is None and not last["logits"].requires_grad
    return {
        "losses": [*losses, float(last["loss"])],
        "choice": last["choice"].clone(),
        "logits": last["logits"].clone(),
        "gradients": {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None},
        "input": x.grad.clone(),
        "buffers": {name: buffer.clone() for name, buffer in own.named_buffers()},
    }


def train_broken(strategy: str, sizes: tuple[int, ...]) -> tuple[dict[str, Any], list[tuple[bool, tuple[str, ...]]]]:
    """What `broken_steps` computes on this rank; whether each plan is for training, and its trained parameters."""
    model, batch = broken()
    own = autopar.backend(init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)]), strategy=strategy)
    found = broken_steps(torch.compile(model, backend=own, dynamic=False), model, batch)
    plans = [
        (plan.training, tuple(entry.name for entry in plan.interface.parameters if entry.differentiable))
        for plan in own.plans
    ]
    return found, plans


def one_rank_or_two(dropout: float) -> list[float]:
    """Losses with dropout: the seed decides, not the mesh."""
    model, batch = broken(dropout=dropout, breaks=False)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(5)
    compiled = torch.compile(model, backend=autopar.backend(mesh, strategy="ddp"), dynamic=False)
    return [float(compiled(batch)["loss"].detach()) for _ in range(3)]


def shapes() -> tuple[list[float], list[float], int]:
    """Losses of batches of 8, 4, 2 and 8 with Dynamo's default, which makes sizes symbols at the second: eager's, ours,
    and how many plans that took.
    """
    model, batch = broken(breaks=False)
    model.eval()
    own = autopar.backend(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
    compiled = torch.compile(model, backend=own)
    parts = [{key: value[:rows] for key, value in batch.items()} for rows in (8, 4, 2, 8)]
    eager = [float(model(part)["loss"].detach()) for part in parts]
    return eager, [float(compiled(part)["loss"].detach()) for part in parts], len(own.plans)


def functions() -> list[tuple[str, bool, bool]]:
    """Functions of a tensor and one global weight: whether outputs and the weight's gradient are eager's."""
    torch._dynamo.reset()
    own = autopar.backend(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
    w = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def without_gradients(x: torch.Tensor) -> Any:
        return (x @ w).argmax(-1)

    def inputs_and_parameters_alone(x: torch.Tensor) -> Any:
        return x @ w, None, w.pow(2).sum(), x

    def aliases(x: torch.Tensor) -> Any:
        y = x @ w
        return y, y, y.t(), y.view(-1)

    def no_tensors(x: torch.Tensor) -> Any:
        return torch.arange(x.shape[0], device=x.device) * 2

    def part_without_gradients(x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = (x @ w).abs().amax()
        return (x @ w) / scale

    def checkpointed(x: torch.Tensor) -> Any:
        return checkpoint(lambda a: (a @ w).relu() @ w, x, use_reentrant=False)

    def in_place(x: torch.Tensor) -> Any:
        x = x.clone()
        x[:, 0] = 1
        x.add_(1)
        return x @ w

    kinds = (without_gradients, inputs_and_parameters_alone, aliases, no_tensors, part_without_gradients)
    found = []
    for function in (*kinds, checkpointed, in_place):
        got, want = (
            [each for each in (values if isinstance(values, tuple) else (values,)) if each is not None]
            for values in (torch.compile(function, backend=own, dynamic=False)(x), function(x))
        )
        same = all(
            torch.allclose(a, b) and (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad)
            for a, b in zip(got, want, strict=True)
        )
        gradients = []
        for values in (got, want):
            terms = [value.pow(2).sum() for value in values if value.requires_grad]
            gradients.append(torch.autograd.grad(sum(terms), w)[0] if terms else w)
        found.append((function.__name__, same, torch.allclose(*gradients)))
    return found


def branching() -> str:
    """A model that branches on the rank."""
    torch._dynamo.reset()
    rank = torch.distributed.get_rank()

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).relu() if rank else x @ weight

    own = autopar.backend(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
    compiled = torch.compile(forward, backend=own, dynamic=False)
    return message(lambda: compiled(torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)))


def other_from_the_second_call_on(habit: str) -> tuple[int, str]:
    """Plans that were made, and what is said when rank 1 has this habit at the second call."""
    model, batch = broken(breaks=False)
    own = autopar.backend(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
    compiled = torch.compile(model, backend=own, dynamic=False)
    compiled(batch)
    if torch.distributed.get_rank() == 1 and habit == "batch":
        batch["x"] = batch["x"].flip(0)
    if torch.distributed.get_rank() == 1 and habit == "shape":
        batch = {name: value[:4] for name, value in batch.items()}
    if torch.distributed.get_rank() == 1 and habit == "eval":
        model.eval()
    return len(own.plans), message(lambda: compiled(batch))


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    texts = [message(lambda name=name: autopar.backend(mesh, strategy=name)) for name in ("zero1", "zero3", "nothing")]
    texts.append(message(lambda: autopar.backend(autopar.Mesh.parse("dp=2"))))
    model, batch = broken(breaks=False)
    compiled = torch.compile(model, backend=autopar.backend(mesh, strategy="ddp"), dynamic=False)
    texts.append(message(lambda: compiled({key: value[:5] for key, value in batch.items()})))
    with torch.autocast("cpu", torch.bfloat16):
        texts.append(message(lambda: compiled({key: value[:4] for key, value in batch.items()})))
    batch["x"] = batch["x"] + torch.distributed.get_rank()
    texts.append(message(lambda: compiled(batch)))
    return texts


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class Scaled(torch.autograd.Function):
    """Its gradient is three times what it is, of one of two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor, power: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, by)
        ctx.power = power
        return x**power * by, x.argmax(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, by = ctx.saved_tensors
        return 3 * grads[0] * ctx.power * x ** (ctx.power - 1) * by, (grads[0] * x**ctx.power).sum(), None


class OfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.by = nn.Linear(8, 8), nn.Linear(8, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, place = Scaled.apply(Rounded.apply(3 * self.first(x)), self.by, 2)
        return (self.second(hidden) + place.unsqueeze(-1)).square().mean()


def own_gradients() -> list[tuple[float, float]]:
    """Norms of gradients, ours and eager's, of functions that say their gradient themselves."""
    torch.manual_seed(0)
    model = OfItsOwn().double()
    plain, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.compile(model, backend=autopar.backend(mesh, strategy="ddp"))(x).backward()
    plain(x).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [(float(whole(ours.grad).norm()), float(eager.grad.norm())) for ours, eager in pairs]


def whole(x: Any) -> torch.Tensor:
    found: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found
