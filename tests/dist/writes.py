"""Work for test_writes: scripts that write into parameters and gradients themselves, on ranks and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune

import autopar
from tests.dist import training

Numbers = list[float]


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: Any, seed: int = 0) -> Tensor:
    return F.cross_entropy(model(drawn(seed, 8, 8)), torch.arange(8) % 4)


def rows(model: Any) -> Numbers:
    with torch.no_grad():
        weight = model[2].weight
        weight[3] = 0
        weight[5:7] = weight[8:10]
        weight[10].copy_(weight[11])
        weight[torch.tensor([20, 21])] = 0.25
        weight[weight > 0.1] = 0.1
        weight.index_fill_(0, torch.tensor([30]), 1.0)
        weight.T[4].mul_(2)
        weight.view(-1)[7:9].add_(torch.tensor([1.0, 2.0], dtype=torch.float64))
        first, *_ = weight.unbind(0)
        first[2:4].fill_(0.5)
        weight[[12, 13]].zero_()  # a copy, in eager too
    model[0].weight.data[1:3, :2] = 0.5
    model[0].bias.detach().narrow(0, 3, 2).zero_()
    return []


def initialised(model: Any) -> Numbers:
    nn.init.eye_(model[2].weight)
    nn.init.constant_(model[0].weight, 0.02)
    with torch.no_grad():
        model[2].weight.add_(drawn(1, 32, 32))
        model[4].weight.copy_(drawn(2, 4, 32))
        model[4].weight.div_(model[4].weight.norm(dim=1, keepdim=True))
    return []


def noise(model: Any) -> Numbers:
    torch.manual_seed(5)
    weight, found = model[2].weight.detach(), []
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1).mul_(torch.rand_like(p) > 0.1)
    for x in (torch.bernoulli(weight.sigmoid()), F.dropout(weight, 0.5), torch.normal(weight, 0.1), torch.rand(2)):
        found += [float(x.sum()), float((x * x).sum())]
    loss_of(model).backward()
    model[0].weight.grad += torch.randn_like(model[0].weight.grad)
    return [*found, float(model[0].weight.grad.norm()), float(torch.allclose(weight, weight.clone()))]


def assigned(model: Any) -> Numbers:
    kept = {name: p.data.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data * 0.5
    found = [float(loss_of(model).detach())]
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.01, dtype=p.dtype)
    found.append(float(loss_of(model).detach()))
    for name, p in model.named_parameters():
        p.data = kept[name]
    # Both are one memory now, as in eager.
    with torch.no_grad():
        model[0].bias.add_(1)
    return [*found, float(kept["0.bias"].sum())]


def flat(model: Any) -> Numbers:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return [float(vector.norm())]


def sharpness_aware(model: Any) -> Numbers:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for seed in range(3):
        loss_of(model, seed).backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
        kept = []
        for p in model.parameters():
            kept.append(p.data.clone())
            p.data.add_(p.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        for p, old in zip(model.parameters(), kept, strict=True):
            p.data = old
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(norm))
    return found


def momentum_teacher(model: Any) -> Numbers:
    teacher, found = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        with torch.no_grad():
            for own, p in zip(teacher.parameters(), model.parameters(), strict=True):
                own.data = own.data * 0.9 + p.data * 0.1
            wanted = teacher(drawn(seed, 8, 8))
        (model(drawn(seed, 8, 8)) - wanted - 0.1).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(wanted.sum()))
    return found


def masks(model: Any) -> Numbers:
    kept = {name: (drawn(5, *p.shape) > 0).double() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, mask=kept[name]: grad * mask)
    loss_of(model).backward()
    for name, p in model.named_parameters():
        p.grad += 0.1 * kept[name]
        p.grad[p.grad.abs() < 1e-3] = 0
    model[0].weight.grad[:4] = 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(kept[name]).sub_(p.grad)
    return [float(sum((p == 0).sum() for p in model.parameters()))]


def clipped_by_units(model: Any) -> Numbers:
    """Adaptive clipping of gradients (Brock et al., 2102.06171), as timm writes it."""

    def norm(x: Tensor) -> Tensor:
        return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)

    loss_of(model).backward()
    for p in model.parameters():
        most = norm(p.detach()).clamp_(min=1e-3).mul_(0.01)
        own = norm(p.grad.detach())
        clipped = p.grad.detach() * (most / own.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(own < most, p.grad.detach(), clipped))
        p.data.sub_(p.grad)
    return [float(sum(p.grad.detach().sum(0).abs_().sum() for p in model.parameters()))]


def penalties(model: Any) -> Numbers:
    old = [drawn(7, *p.shape) for p in model.parameters()]
    loss = model(drawn(0, 8, 8)).sum(1).mean()
    loss = torch.add(loss, (model[0].weight * 0.1).sum())
    loss = loss + sum(((p - before) ** 2 * 0.1).sum() for p, before in zip(model.parameters(), old, strict=True))
    loss.backward()
    return [float(loss.detach())]


def looked_at(model: Any) -> Numbers:
    weight = model[2].weight.detach()
    array = weight.cpu().numpy()
    return [float(np.linalg.norm(array)), float(np.asarray(weight)[3, 1]), weight.tolist()[4][2], float(array.std())]


def by_any_function(model: Any) -> Numbers:
    """Averages, thresholds and spectra, by functions that get plain tensors beside weights or know no pieces."""
    weight, other, found = model[2].weight, drawn(9, 32, 32), []
    average = other.clone()
    with torch.no_grad():
        average.lerp_(weight, 0.1).add_(weight.data, alpha=0.5).mul_(torch.where(other > 0, weight, other))
        torch._foreach_add_([average], [weight])
        torch.mul(weight, 2.0, out=other)
        torch.amax(weight, 0, out=(most := torch.zeros(32).double()))
        pruned = torch.where(weight.abs() < weight.abs().flatten().kthvalue(40).values, 0.0, weight)
        weight.copy_(torch.addcmul(pruned, average, average))
        torch.relu_(ones := torch.ones_like(weight.norm(dim=0)))
        kernel = F.conv1d(average[None], weight[:, :, None])
        largest = [torch.topk(weight.flatten(), k).values for k in (4, 6)]
        spectrum, rows = torch.linalg.svdvals(weight), weight.renorm(2, 0, 0.1)
        for x in (average, other, weight.unique(), spectrum, rows, kernel, ones, most, other @ weight[0], *largest):
            found += [float(x.sum()), *map(float, x.shape)]
    turned = F.cosine_embedding_loss(weight.T, average, torch.ones(32))
    found += [float(F.mse_loss(weight, average).detach()), float(turned.detach())]
    return [*found, float(torch.allclose(weight, average))]


def penalties_by_functions(model: Any) -> Numbers:
    weight, own = model[2].weight, nn.Parameter(drawn(8, 32, 32))
    terms = (
        lambda: F.mse_loss(weight, own), lambda: torch.dist(own, weight), lambda: torch.linalg.svdvals(weight).sum(),
        lambda: torch.topk(weight.abs().flatten(), 10).values.sum(), lambda: weight.quantile(0.3),
        lambda: F.cross_entropy(weight, torch.arange(32).masked_fill(torch.arange(32) < 9, -100)),
        lambda: F.conv1d(own[None], weight[:, :, None]).square().mean(),
    )  # fmt: skip
    torch.stack([each() for each in terms]).sum().backward()
    alike = [getattr(p, "placements", None) == getattr(p.grad, "placements", None) for p in (weight, own)]
    (loss_of(model) + sum(each() for each in terms)).backward()
    torch.optim.AdamW([*model.parameters(), own], lr=0.01).step()
    return [float(own.sum().detach()), float(own.grad.square().sum()), *map(float, alike)]  # type: ignore[union-attr]


SCRIPTS: tuple[Callable[[Any], Numbers], ...] = (
    rows, initialised, noise, assigned, flat, sharpness_aware, momentum_teacher, masks, penalties, looked_at,
    clipped_by_units, by_any_function, penalties_by_functions,
)  # fmt: skip


def outcome(script: Callable[[Any], Numbers], model: Any) -> Numbers:
    """What the script says, then the loss, and of each parameter and gradient a sum."""
    found = script(model)
    sums = [float((p.detach() * torch.arange(1, p.shape[0] + 1).view(-1, *[1] * (p.ndim - 1))).sum())
            for p in model.parameters()]  # fmt: skip
    grads = [float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None]
    return [*found, float(loss_of(model).detach()), *sums, *grads]


def on_ranks(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any) -> list[tuple[Numbers, Numbers]]:
    """Of each script what comes of it in one process, and here."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    found = []
    for script in SCRIPTS:
        model: Any = autopar.compile(net(), mesh, strategy=strategy, example_inputs=(drawn(0, 8, 8),))
        found.append((outcome(script, net()), outcome(script, model)))
    return found


def tied_as_in_one_process(model: Any) -> str:
    """Whether biases that became one are trained as one, as in one process."""
    eager: Any = net()
    eager[0].bias = eager[2].bias
    for each in (eager, model):
        loss_of(each).backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    return str(torch.allclose(model[0].bias, eager[2].bias) and model[0].bias is model[2].bias)


def refused() -> list[str]:
    """What is said of parameters that are replaced, before the first batch and behind it, and of other data."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    example = (drawn(0, 8, 8),)
    found = []
    cases: tuple[dict[str, Any], ...] = ({}, {"example_inputs": example})
    for options in cases:
        pruned: Any = autopar.compile(net(), mesh, strategy="zero3", **options)
        prune.random_unstructured(pruned[0], "weight", amount=0.5)
        found.append(training.message(lambda model=pruned: model(*example)))
        tied: Any = autopar.compile(net(), mesh, strategy="zero3", **options)
        tied[0].bias = tied[2].bias
        found.append(tied_as_in_one_process(tied))
    plain: Any = autopar.compile(net(), mesh, strategy="zero3", example_inputs=example)
    plain[0].bias = nn.Parameter(torch.ones(32).double())
    found.append(training.message(lambda: plain(*example)))
    model: Any = autopar.compile(net(), mesh, strategy="zero3", example_inputs=example)
    found.append(training.message(lambda: setattr(model[0].bias, "data", torch.ones(31).double())))
    found.append(training.message(lambda: setattr(model[0].bias, "data", torch.ones(32))))
    return found


def by_functions() -> list[str]:
    """What is said after functions wrote into parts of a weight whose rows ranks share; of writes that are kept."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(net(), mesh, strategy="zero3", example_inputs=(drawn(0, 8, 8),))
    weight = model[0].weight

    def kept() -> None:
        weight[3].fill_(0.5)
        rows = weight[4]
        rows.mul_(2).add_(1)
        torch.Tensor.mul_(weight, 0.5)
        float(torch.relu(weight[5]).sum())
        state = model.state_dict()["0.weight"]
        state.T.square().add_(1)
        state[3] = 0.25

    def of_states() -> None:
        held.append(model.state_dict()["0.weight"][1:3])
        held[0].T.zero_()

    held: list[Tensor] = []
    writes = (
        lambda: torch.Tensor.fill_(weight[3], 0.5), lambda: torch.relu_(weight.data[20]),
        lambda: torch.Tensor.add_(weight[10:13], 1.0), lambda: torch.fill_(weight.view(-1)[5:9].detach(), 0.5),
        lambda: model.state_dict()["0.weight"].view(-1).mul_(2), of_states, kept,
    )  # fmt: skip
    found = []
    for write in writes:
        with torch.no_grad():
            write()
        found.append(training.message(lambda: loss_of(model)))
    return found


def resized() -> str:
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(own, mesh, strategy="zero3", example_inputs=batch)
    model.resize_token_embeddings(model.config.vocab_size)
    model.set_attn_implementation(model.config._attn_implementation)
    return training.message(lambda: model.resize_token_embeddings(model.config.vocab_size + 1)) + training.message(
        lambda: model.set_attn_implementation("eager")
    )
