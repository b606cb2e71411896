"""Work for test_loss_terms: losses of the users' own beside, or instead of, the model's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.base.errors import AutoparError
from tests.dist import training


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def z_loss(output: Any) -> Tensor:
    """As published for PaLM: the normalizer of the softmax is kept near 1."""
    return 0.1 * whole(output.logits).logsumexp(-1).pow(2).mean()


def smoothed(output: Any, labels: Tensor) -> Tensor:
    """Label smoothing over the logits alone, as HuggingFace's Trainer has it."""
    rows = whole(output.logits)[:, :-1].flatten(0, 1).log_softmax(-1)
    wanted = labels[:, 1:].flatten()
    return -0.9 * rows.gather(1, wanted[:, None]).mean() - 0.1 * rows.mean()


def steps(model: Any, batch: dict[str, Any], terms: list[str], optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Per step of these terms: the loss, and all gradients."""
    found = []
    for term in terms:
        model.zero_grad()
        output = model(**batch)
        z = z_loss(output) if "z" in term else torch.zeros(())
        if term == "smooth":
            loss = smoothed(output, batch["labels"])
            loss.backward()
        elif term == "loss, then z":
            loss = output.loss
            loss.backward(retain_graph=True)
            z.backward()
        else:
            loss = output.loss + z
            loss.backward()
        gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss.detach()), gradients))
        if optimizer is not None:
            optimizer.step()
    return found


def compiled_steps(
    name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, terms: list[str], options: dict[str, Any]
) -> tuple[list[Any], list[str]]:
    """What `steps` finds, and the warnings about planning again."""
    said = _Said()
    logging.getLogger("autopar").addHandler(said)
    try:
        torch.manual_seed(5)
        model, batch = training.model_and_batch(name, torch.float64, options.pop("dropout", 0.0))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        compiled = autopar.compile(model, mesh, example_inputs=batch, strategy=strategy, **options)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        return steps(compiled, batch, terms, optimizer), said.texts
    finally:
        logging.getLogger("autopar").removeHandler(said)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "gradients come for" in record.getMessage():
            self.texts.append(record.getMessage())


def eager_steps(name: str, terms: list[str]) -> list[Any]:
    model, batch = training.model_and_batch(name, torch.float64, 0.0)
    return steps(model, batch, terms, torch.optim.SGD(model.parameters(), lr=0.1))


def unknown_root() -> str:
    """The error for a root that no parameter leads to."""
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    try:
        autopar.compile(model, mesh, example_inputs=batch, strategy="ddp", roots=("loss", "hidden"))
    except AutoparError as error:
        return str(error)
    return "no error"


class Head(nn.Module):
    """A model whose auxiliary output feeds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.extra = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).tanh()
        return {"loss": (self.main(hidden)[:, 0] - y).pow(2).mean(), "extra": self.extra(hidden)}


def through_backend() -> list[tuple[float, dict[str, Tensor]]]:
    """An auxiliary output through torch.compile's backend: loss and gradients, twice."""
    model, x, y = head_and_batch()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled = torch.compile(model, backend=autopar.backend(mesh, strategy="ddp"))
    return [auxiliary(compiled, model, x, y) for _ in range(2)]


def head_and_batch() -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(3)
    return Head().double(), torch.randn(6, 8, dtype=torch.float64), torch.randn(6, dtype=torch.float64)


def auxiliary(call: Any, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    output = call(x, y)
    loss = output["loss"] + output["extra"].pow(2).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Probed(nn.Module):
    """Layers whose hidden states are returned, and heads of which a loss uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head, self.probe, self.spare = nn.Linear(8, 5), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        loss = nn.functional.cross_entropy(self.head(x), y)
        return {"loss": loss, "hidden": hidden, "probe": self.probe(hidden[1]), "spare": self.spare(hidden[0])}


PROBES = {
    "loss": lambda output: output["loss"],
    "both": lambda output: output["loss"] + whole(output["hidden"][0]).pow(2).mean() + whole(output["probe"]).mean(),
    "probe": lambda output: whole(output["probe"]).tanh().mean(),
}


def probed(compile_it: Any, losses: list[str]) -> list[tuple[float, dict[str, Tensor | None]]]:
    """A loss and gradients, None where there is none, for each of these, with AdamW's decay between; last the weights.

    compile_it: model, batch -> what is trained.
    """
    torch.manual_seed(3)
    model, x, y = Probed().double(), torch.randn(8, 8, dtype=torch.float64), torch.randint(5, (8,))
    y[:2] = -100  # the first of four microbatches has no part in the loss
    called = compile_it(model, {"x": x, "y": y})
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.1, weight_decay=0.5)
    found: list[tuple[float, dict[str, Tensor | None]]] = []
    for name in losses:
        optimizer.zero_grad()
        loss = PROBES[name](called(x=x, y=y))
        loss.backward()
        gradients = {n: None if p.grad is None else whole(p.grad).clone() for n, p in called.named_parameters()}
        found.append((float(loss.detach()), gradients))
        optimizer.step()
    return [*found, (0.0, {n: whole(p.detach()).clone() for n, p in called.named_parameters()})]


def probed_in_pieces(losses: list[str], options: dict[str, Any]) -> list[tuple[float, dict[str, Tensor | None]]]:
    """`probed` on these ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return probed(lambda model, batch: autopar.compile(model, mesh, example_inputs=batch, **options), losses)


def probed_in_turn(axis: str, options: dict[str, Any]) -> list[str]:
    """The parameters without a gradient after `train_step`."""
    torch.manual_seed(3)
    model, x, y = Probed().double(), torch.randn(8, 8, dtype=torch.float64), torch.randint(5, (8,))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    compiled = autopar.compile(model, mesh, example_inputs={"x": x, "y": y}, **options)
    compiled.train_step(x=x, y=y)
    return [name for name, p in compiled.named_parameters() if p.grad is None]
