"""Work for test_input_gradients: scripts whose batches require gradients, as they are written for eager models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from tests.dist import training

ROWS = 8
Found = dict[str, Any]


class Critic(nn.Module):
    """(rows, 8) -> (rows, 1), with blocks that repeat and share what stands beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(3)])
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h) if shift is None else layer(h) * shift
        return self.last(h)


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return generator().double(), Critic().double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def gan(make: Any, critic: Any) -> Found:
    """Two optimizers; the generator learns by the gradient of the critic's input."""
    bce = nn.functional.binary_cross_entropy_with_logits
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (make, critic)]
    real, ones, zeros = numbers(ROWS, 8), torch.ones(ROWS, 1).double(), torch.zeros(ROWS, 1).double()
    losses = []
    for step in range(3):
        fake = make(numbers(ROWS, 4) + step)
        optimizers[1].zero_grad()
        told = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
        told.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = bce(critic(fake), ones)
        fooled.backward()
        optimizers[0].step()
        losses += [told.item(), fooled.item()]
    return {"losses": losses, **{name: whole(p) for name, p in make.named_parameters()}}


def attack(critic: Any) -> Found:
    """FGSM, then what else a script asks of a graph with the input as its leaf."""
    x = numbers(ROWS, 8).requires_grad_()
    seen = []
    x.register_hook(lambda grad: seen.append(grad.norm().item()))
    critic(x).mean().backward()
    assert x.grad is not None
    found = {"fgsm": whole(x.grad), "adversarial": whole(critic(x.detach() + 0.1 * x.grad.sign()))}
    out = critic(x)
    (found["asked for"],) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (found["of a part"],) = torch.autograd.grad(out[0, 0] * 3, x, retain_graph=True)
    out.mean().backward()  # adds to what is there
    found["added up"] = whole(x.grad)
    with torch.no_grad():
        assert not critic(x).requires_grad
    shift = torch.ones(16).double().requires_grad_()
    critic(x, shift).pow(2).mean().backward()  # an input that every row has, and one that is added to once more
    assert shift.grad is not None
    for count in (2, 3, 4):  # of other sizes, whose programs follow from those that are known
        more = numbers(count * ROWS, 8).requires_grad_()
        critic(more).pow(2).mean().backward()
        assert more.grad is not None
        found[f"{count} times as many"] = whole(more.grad)
    found |= {"shift": whole(shift.grad), "thrice": whole(x.grad), "hooks": torch.tensor(seen)}
    return found | {name: whole(p.grad) for name, p in critic.named_parameters() if p.grad is not None}


def changed_between(make: Any, critic: Any) -> Found:
    """What a script changes in place of an output is what the next model gets."""
    fake = make(numbers(ROWS, 4))
    fake.mul_(2.0)
    critic(fake).sum().backward()
    with torch.no_grad():
        told = make(numbers(ROWS, 4))
        told.add_(1.0)
        after = critic(told)
    return {"after": whole(after), **{name: whole(p.grad) for name, p in make.named_parameters()}}


def both_ways(critic: Any) -> Found:
    """An input that goes to the model and around it; and rows that two ranks do not divide."""
    with torch.no_grad():
        critic(numbers(ROWS, 8))  # the first batch is one that the ranks divide
    x = numbers(ROWS - 1, 8).requires_grad_()
    (critic(x * 2).pow(2).sum() + x.pow(3).sum()).backward()
    assert x.grad is not None
    return {"x": whole(x.grad), **{name: whole(p.grad) for name, p in critic.named_parameters()}}


def style(critic: Any, by: str, scale: float = 1.0) -> Found:
    """The picture, `scale` times what it is, is what is trained; the model is frozen."""
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    picture = (scale * numbers(ROWS, 8)).requires_grad_()
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "lbfgs": partial(torch.optim.LBFGS, max_iter=3)}
    optimizer = kinds[by]([picture], lr=0.1)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (critic(picture) - 1).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert all(parameter.grad is None for parameter in critic.parameters())
    return {"picture": whole(picture), "losses": losses}


def rounding(by: str) -> float:
    """How far eager's picture comes to lie, relatively, from where it does of one that is a unit of rounding away."""
    plain, moved = (style(models()[1], by, scale)["picture"] for scale in (1.0, 1 + 2.0**-52))
    return float((moved - plain).norm() / plain.norm())


def prompted(model: Any, batch: dict[str, Any]) -> Found:
    """Embeddings and a learned prompt outside of the model, which takes what comes of them."""
    torch.manual_seed(1)
    size = batch["input_ids"].shape[1]
    table = nn.Embedding(model.config.vocab_size, model.config.hidden_size).double()
    prompt = nn.Parameter(0.1 * numbers(2, model.config.hidden_size))
    optimizer = torch.optim.SGD([*table.parameters(), prompt, *model.parameters()], 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        rows = table(batch["input_ids"])
        rows = torch.cat([prompt.expand(len(rows), -1, -1), rows[:, : size - 2]], 1)
        loss = model(inputs_embeds=rows, labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert prompt.grad is not None
    return {"losses": losses, "prompt": whole(prompt), "table": whole(table.weight), "grad": whole(prompt.grad)}


def own_table(model: Any, batch: dict[str, Any]) -> Found:
    """The model's own embedding, called by a script."""
    with torch.no_grad():
        model(**batch)  # parameters are cut at the first batch
    rows = model.get_input_embeddings()(batch["input_ids"])
    loss = model(inputs_embeds=rows * 1.5, labels=batch["labels"]).loss
    loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def scripts(kind: str, compile_: Any) -> Found:
    """The script of this kind; compile_: what is done to each model before."""
    if kind in ("prompted", "own table"):
        model, batch = training.model_and_batch("llama", torch.float64, 0.0)
        return (prompted if kind == "prompted" else own_table)(compile_(model), batch)
    make, critic = models()
    if kind == "gan":
        return gan(compile_(make), compile_(critic))
    if kind == "changed":
        return changed_between(compile_(make), compile_(critic))
    if kind == "attack":
        return attack(compile_(critic))
    return both_ways(compile_(critic)) if kind == "both ways" else style(compile_(critic), kind)


def compiled(kinds: list[str], axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, options: Any) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    return [scripts(kind, lambda model: autopar.compile(model, mesh, strategy=strategy, **options)) for kind in kinds]


def in_pieces() -> list[Tensor]:
    """Gradients of a batch that is handed in as pieces, those of either dim; the plain one first."""
    _, critic = models()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    planned: Any = autopar.compile(critic, mesh, strategy="zero3")
    found = []
    for placement in (None, Shard(0), Shard(1)):
        x: Tensor = numbers(ROWS, 8)
        if placement is not None:
            x = distribute_tensor(x, mesh, [placement])
        x.requires_grad_()
        planned(x).pow(2).sum().backward()
        assert x.grad is not None and (placement is None or x.grad.placements == (placement,))  # type: ignore[attr-defined]
        found.append(whole(x.grad))
    return found


def narrow() -> list[str]:
    """The dtypes of gradients where the program computes in another one; and whether it did."""
    _, critic = models()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    planned: Any = autopar.compile(critic.float(), mesh, strategy="ddp", precision="bf16")
    x = numbers(ROWS, 8).float().requires_grad_()
    planned(x).float().sum().backward()
    assert x.grad is not None
    return [str(x.grad.dtype), str(bool(torch.equal(x.grad, x.grad.bfloat16().float())))]


def refused() -> dict[str, str]:
    """What is said of second derivatives, and of ranks that differ."""
    _, critic = models()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    planned: Any = autopar.compile(critic, mesh, strategy="ddp")
    x = numbers(ROWS, 8).requires_grad_()

    def penalty() -> None:
        (slope,) = torch.autograd.grad(planned(x).sum(), x, create_graph=True)
        ((slope.norm(2, dim=1) - 1) ** 2).mean().backward()

    found = {"penalty": training.message(penalty)}
    fresh: Any = autopar.compile(generator().double(), mesh, strategy="ddp")
    found["before"] = training.message(lambda: fresh(fresh[0](x[:, :4])[:, :4]))
    mine = x if dist.get_rank() else x.detach()
    found["differ"] = training.message(lambda: planned(mine))
    return found


class Fooled(nn.Module):
    """Its forward is the loss."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return nn.functional.softplus(self.critic(x, shift)).mean()


def staged() -> str:
    """Over stages of a pipeline: the input of a graph in front, and one that all stages read. What is said of a norm
    that is one stage's.
    """
    make, critic = models()
    eager, (plain, _) = Fooled(critic), models()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    compiled: Any = autopar.compile(Fooled(models()[1]), mesh, strategy="pipeline(1f1b)", microbatches=2)
    shifts = [numbers(16).requires_grad_() for _ in range(2)]
    for step in range(2):
        eager(make(numbers(ROWS, 4) + step), shifts[0]).backward()
        compiled.train_step(plain(numbers(ROWS, 4) + step), shifts[1])
        ours, theirs = [*plain.parameters(), shifts[1]], [*make.parameters(), shifts[0]]
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad)
    wanted_norm = nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
    own = [parameter for _, parameter in compiled.named_parameters()]
    by_hand = lambda: torch.norm(torch.stack([each.grad.norm() for each in own]))  # noqa: E731
    listed = {training.message(each) for each in (lambda: nn.utils.clip_grad_norm_(own, 1.0), by_hand) if len(own) > 1}
    torch.testing.assert_close(compiled.clip_grad_norm_(1.0), wanted_norm)
    for parameter in own:
        parameter.grad = None
    said = training.message(lambda: nn.utils.clip_grad_norm_(compiled.parameters(), 1.0))
    assert listed <= {said}
    return said
