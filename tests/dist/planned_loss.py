"""Work for test_planned_loss: losses of the users' own, planned with the model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from benchmarks.training.count import CollectiveCounter
from tests.dist import training
from tests.dist.loss_terms import whole

Loss = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.logits.view(-1, outputs.logits.shape[-1]), batch["labels"].view(-1))


def smoothed(outputs: Any, batch: Any) -> Tensor:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return criterion(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def distilled(outputs: Any, batch: Any) -> Tensor:
    """Hinton et al. 2015, at temperature 2, with the model's own loss; the teacher's logits are in the batch."""
    soft = F.kl_div((outputs.logits / 2).log_softmax(-1), (batch["taught"] / 2).softmax(-1), reduction="batchmean")
    return outputs.loss + soft * 4 / outputs.logits.shape[1]


def of_logarithms(outputs: Any, batch: Any) -> Tensor:
    """Written out, and by what each label has."""
    logs = F.log_softmax(outputs.logits[:, :-1], -1)
    labels = batch["labels"][:, 1:]
    own = logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return F.nll_loss(logs.flatten(0, 1), labels.flatten()) - own.mean() - (logs.exp() * logs).sum(-1).mean()


def of_classes(outputs: Any, batch: Any) -> Tensor:
    """A penalty on the normalizer (PaLM's z), what each label has, weights of classes, and a confidence penalty
    (Pereyra et al. 2017), with classes in the last dim and in another.
    """
    logits, labels = outputs.logits, batch["labels"]
    weight = torch.linspace(0.5, 1.5, logits.shape[-1], dtype=logits.dtype)
    weighted = F.cross_entropy(logits.transpose(1, 2), labels, weight, ignore_index=3, label_smoothing=0.2)
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * F.log_softmax(logits, dim=-1)).sum(-1)
    own = probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return weighted + 0.1 * logits.logsumexp(-1).pow(2).mean() - 0.1 * entropy.mean() + ((1 - own) ** 2).mean()


LOSSES: dict[str, Loss] = {
    "cross entropy": cross_entropy, "smoothed": smoothed, "distilled": distilled, "of logarithms": of_logarithms,
    "of classes": of_classes,
}  # fmt: skip


def batch_for(name: str, batch: dict[str, Any], logits: Tensor | None) -> dict[str, Any]:
    return {**batch, "taught": logits} if name == "distilled" and logits is not None else batch


def eager(name: str, num_steps: int) -> list[Any]:
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    teacher, _ = training.model_and_batch("llama", torch.float64, 0.0)
    batch = batch_for(name, batch, teacher(**batch).logits.detach())

    def forward(**given: Any) -> Any:
        outputs = model(**{key: x for key, x in given.items() if key != "taught"})
        outputs.loss = LOSSES[name](outputs, given)
        return outputs

    return steps(forward, model, batch, num_steps)


def steps(forward: Callable[..., Any], model: Any, batch: dict[str, Any], num_steps: int) -> list[Any]:
    """Per step the loss and all gradients; the last on a shorter batch, and the logits without labels."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        rows = {key: x if step + 1 < num_steps else x[:, :12].contiguous() for key, x in batch.items()}
        loss = forward(**rows).loss
        loss.backward()
        gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss.detach()), gradients))
        optimizer.step()
    return found


def compiled(
    name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, options: dict[str, Any], num_steps: int
) -> list[Any]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    taught = None
    if name == "distilled":  # a second compiled model's, as they come back
        teacher, _ = training.model_and_batch("llama", torch.float64, 0.0)
        autopar.compile(teacher, mesh, strategy=strategy, example_inputs=batch)
        with torch.no_grad():
            taught = teacher(**batch).logits
    batch = batch_for(name, batch, taught)
    autopar.compile(model, mesh, strategy=strategy, loss=LOSSES[name], example_inputs=batch, **options)
    return steps(model, model, batch, num_steps)


class Classifier(nn.Module):
    """Returns a tensor, and takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 12]."""
        result: Tensor = self.second(self.first(x).tanh())
        return result


def classifier() -> tuple[Classifier, dict[str, Tensor], nn.Module]:
    torch.manual_seed(3)
    model, weight = Classifier().double(), torch.rand(6, dtype=torch.float64)
    batch = {"x": torch.randn(8, 12).double(), "y": torch.arange(8) % 6, "taught": torch.randn(8, 5).double()}
    return model, batch, nn.CrossEntropyLoss(weight)


def classified() -> tuple[float, list[float], list[str], list[str], bool]:
    """A criterion with weights of classes, inputs that forward does not take (one in uneven pieces), by place and by
    name: the loss, the sums of gradients, the names of parameters, what is said where Python's numbers change, and
    whether scores alone come back without labels.
    """
    model, batch, criterion = classifier()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    schedule = SimpleNamespace(weight=0.5)

    def loss(scores: Tensor, given: Any) -> Tensor:
        return criterion(scores, given["y"]) + schedule.weight * (scores[:, :5] - given["taught"]).pow(2).mean()

    compiled = autopar.compile(model, mesh, strategy="zero3", loss=loss, example_inputs=batch)
    pieces = distribute_tensor(batch["taught"], mesh, [Shard(1)])  # of 3 and of 2 columns
    value, scores = compiled(batch["x"], y=batch["y"], taught=pieces)
    assert scores.shape == (8, 6)
    value.backward()
    gradients = [float(p.grad.pow(2).sum()) for p in compiled.parameters() if p.grad is not None]
    alone = compiled(x=batch["x"])
    texts = []
    schedule.weight = 0.25
    texts.append(training.message(lambda: compiled(**batch)))
    names = [name for name, _ in compiled.named_parameters()]
    return float(value.detach()), gradients, names, texts, isinstance(alone, Tensor) and alone.shape == (8, 6)


def sent(planned: bool, name: str) -> tuple[int, list[str]]:
    """Bytes that a rank sends in a step with a loss on the logits of a split vocabulary, and the plan's notes."""
    model, batch = training.model_and_batch("llama", torch.float32, 0.0)
    given = batch_for(name, batch, model(**batch).logits.detach())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options: dict[str, Any] = {"loss": LOSSES[name]} if planned else {"roots": ("loss", "logits")}
    inputs = given if planned else batch
    compiled: Any = autopar.compile(model, mesh, strategy="tensor", example_inputs=inputs, **options)
    with CollectiveCounter() as counter:
        outputs = compiled(**inputs)
        (outputs.loss if planned else LOSSES[name](outputs, given)).backward()
    return int(counter.total_bytes()), list(compiled.plan.notes)


def refused() -> list[str]:
    """What is said of losses that cannot be, on this rank."""
    model, batch, _ = classifier()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    kept: list[Tensor] = []
    teacher = Classifier().double()

    def counting(scores: Tensor, given: Any) -> Tensor:
        loss = F.cross_entropy(scores, given["y"])
        kept.append(loss)
        return loss

    losses: list[Any] = [
        lambda scores, given: F.cross_entropy(scores, given["y"], reduction="none"),
        lambda scores, given: F.mse_loss(scores, teacher(given["x"])),
        lambda scores, given: F.cross_entropy(scores, given["labels"]),
        lambda scores, given: F.cross_entropy(scores, given["y"]).detach(),
        lambda scores, given: F.cross_entropy(scores, given["y"]) + sum(p.pow(2).sum() for p in model.parameters()),
        nn.CrossEntropyLoss(),
        counting,
        3,
    ]
    return [
        training.message(
            lambda loss=loss: autopar.compile(model, mesh, strategy="ddp", loss=loss, example_inputs=batch)
        )
        for loss in losses
    ]
