"""Work for test_script_*: what users' scripts do around the step, in words that eager knows."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.runtime import meeting
from tests.dist import training

Model = Any
Losses = list[float]


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings of autopar inside."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("autopar").removeHandler(handler)


def compiled_model(
    name: str,
    strategy: Any = "zero3",
    axes: tuple[str, ...] = ("dp",),
    sizes: tuple[int, ...] = (2,),
    model: nn.Module | None = None,
    example: bool = True,
) -> tuple[Model, dict[str, Any]]:
    own, batch = training.model_and_batch(name, torch.float64, 0.0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    options = {"example_inputs": batch} if example else {}
    return autopar.compile(own if model is None else model, mesh, strategy=strategy, **options), batch


def run(model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, Any], steps: int) -> Losses:
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def adam(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses_outside(model: Model, batch: dict[str, Any]) -> list[Any]:
    """Per loss of the user's own: its value, and all gradients. Not a word of autopar's, or of DTensors."""
    ids, labels = batch["input_ids"], batch["labels"]
    torch.manual_seed(1)
    teacher, _ = training.model_and_batch("gpt2", torch.float64, 0.0)
    for parameter in teacher.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
    with torch.no_grad():
        wanted = F.softmax(teacher(input_ids=ids).logits, -1)

    def shifted() -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))

    def smoothed() -> Tensor:
        logits = model(input_ids=ids).logits
        return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, logits.shape[-1]), labels.view(-1))

    def distilled() -> Tensor:
        output = model(input_ids=ids, labels=labels)
        student = F.log_softmax(output.logits, -1)
        return output.loss + F.kl_div(student, wanted, reduction="batchmean")

    def masked() -> Tensor:
        logits = model(input_ids=ids).logits
        logits[:, :, 3] = -10.0
        return logits.logsumexp(-1).mean() + torch.stack([logits, 2 * logits]).square().mean()

    def decayed() -> Tensor:
        loss = model(input_ids=ids, labels=labels).loss
        return 0.01 * sum(p.pow(2).sum() for p in model.parameters()) + loss + loss * 0.5

    return [_with_gradients(model, each) for each in (shifted, smoothed, masked, distilled, decayed)]


def _with_gradients(model: Model, loss_of: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return loss.item(), {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def measured(model: Model, batch: dict[str, Any]) -> list[Any]:
    """What a script prints of the logits."""
    norm = sum(p.grad.norm(2).item() ** 2 for p in model.parameters()) ** 0.5
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    accuracy = (logits.argmax(-1) == batch["labels"]).float().mean().item()
    best = max(float(row.max()) for row in logits[0])
    return [
        norm, largest, f"{next(model.parameters()).sum():.4f}", accuracy, best, logits.float().mean().item(),
        logits.cpu().numpy().sum(), tuple(logits.shape), logits.dtype, logits[0, 0, :2].tolist(), len(logits),
        float(logits.sum()), float((1 - logits).pow(2).mean()),
    ]  # fmt: skip


def own_losses(strategy: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[list[Any], list[Any], list[str]]:
    with said() as texts:
        model, batch = compiled_model("gpt2", strategy, axes, sizes)
        return losses_outside(model, batch), measured(model, batch), [each for each in texts if "whole tensor" in each]


def gradients_asked_for(model: Model, batch: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Gradients that `torch.autograd.grad` gives, that come into `.grad` of some alone, and behind a hook."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(model(**batch).loss, parameters, allow_unused=True)
    asked = {name: whole(gradient) for name, gradient in zip(names, found, strict=True) if gradient is not None}
    some = parameters[: len(parameters) // 2]
    model(**batch).loss.backward(inputs=list(some))
    of_some = {name: whole(p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None}
    model.zero_grad()
    logits = model(**batch).logits
    logits.register_hook(lambda gradient: gradient * 3)
    logits.float().pow(2).mean().backward()
    behind = {name: whole(p.grad) for name, p in zip(names, parameters, strict=True) if p.grad is not None}
    model.zero_grad()
    return [asked, of_some, behind]


def asked_for_gradients(strategy: str) -> tuple[list[dict[str, Tensor]], str, str]:
    """`gradients_asked_for`, and what is said where one is differentiated again, or a hook sees a part of one."""
    compiled, batch = compiled_model("gpt2", strategy)
    found = gradients_asked_for(compiled, batch)

    def penalty() -> None:
        gradients = torch.autograd.grad(compiled(**batch).loss, list(compiled.parameters()), create_graph=True)
        torch.stack([whole(gradient).pow(2).sum() for gradient in gradients]).sum().backward()

    def hooked_beside_loss() -> None:
        output = compiled(**batch)
        output.logits.register_hook(lambda gradient: gradient * 2)
        (output.loss + output.logits.pow(2).mean()).backward()

    return found, training.message(penalty), training.message(hooked_beside_loss)


def looked_at_by_one() -> str:
    """What is said where rank 0 alone looks at the logits."""
    meeting.PATIENCE_S = 1.0
    model, batch = compiled_model("llama")
    with torch.no_grad():
        logits = model(**batch).logits
    text = training.message(lambda: logits.argmax(-1)) if dist.get_rank() == 0 else "not asked"
    meeting.PATIENCE_S = 120.0
    return text


def continued(folder: str) -> dict[str, Any]:
    """Losses of two steps from a checkpoint: of the model that wrote it, of a plain one, of another compiled one."""
    path = Path(folder)
    model, batch = compiled_model("gpt2")
    optimizer = adam(model)
    first = run(model, optimizer, batch, 2)
    own = str(path / f"checkpoint-{dist.get_rank()}.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, own)
    model.save_pretrained(path / "saved")
    held = torch.load(own)
    on = run(model, optimizer, batch, 2)

    plain, _ = training.model_and_batch("gpt2", torch.float64, 0.0)
    plain.load_state_dict(held["model"])
    plain_optimizer = adam(plain)
    plain_optimizer.load_state_dict(held["optimizer"])
    torch.manual_seed(9)
    other, _ = training.model_and_batch("gpt2", torch.float64, 0.0)
    for parameter in other.parameters():
        parameter.data.normal_(0, 0.02)
    again, _ = compiled_model("gpt2", model=other)
    again.load_state_dict(held["model"])
    again_optimizer = adam(again)
    again_optimizer.load_state_dict(torch.load(own)["optimizer"])  # torch does not copy what it loads
    read = type(plain).from_pretrained(path / "saved", dtype=torch.float64)
    reread = read(**batch).loss.item()
    read.load_state_dict(model.state_dict())
    return {
        "kinds": {type(value).__name__ for value in held["model"].values()},
        "tied": held["model"]["lm_head.weight"].data_ptr() == held["model"]["transformer.wte.weight"].data_ptr(),
        "first": first,
        "on": on,
        "plain": run(plain, plain_optimizer, batch, 2),
        "again": run(again, again_optimizer, batch, 2),
        "read": reread,
        "copied": read(**batch).loss.item(),
        "now": model(**batch).loss.item(),
        "files": sorted(os.listdir(path)) + sorted(os.listdir(path / "saved")),
    }


def loaded_by_torch(folder: str) -> list[float]:
    """Losses of models that torch's own tools have moved a state between."""
    model, batch = compiled_model("gpt2")
    run(model, adam(model), batch, 1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    found = [model(**batch).loss.item()]
    for how in ("dcp", "full"):
        again, _ = compiled_model("gpt2")
        if how == "dcp":
            state = {"model": again.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            again.load_state_dict(state["model"])
        else:
            given = full if dist.get_rank() == 0 else {}
            set_model_state_dict(
                again, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            )
        found.append(again(**batch).loss.item())
    held = copy.deepcopy(model.state_dict())
    run(model, adam(model), batch, 1)
    model.load_state_dict(held)
    model.state_dict()["lm_head.weight"].mul_(1.0)
    found.append(model(**batch).loss.item())
    return found


def saved_by_one(folder: str) -> tuple[str, str, list[str]]:
    """What is said where rank 0 alone saves; what is on disk then."""
    meeting.PATIENCE_S = 1.0
    model, _ = compiled_model("gpt2")
    texts = ["not asked", "not asked"]
    if dist.get_rank() == 0:
        texts = [
            training.message(lambda: model.save_pretrained(f"{folder}/saved")),
            training.message(lambda: model.state_dict()["lm_head.weight"].numpy()),
        ]
    meeting.PATIENCE_S = 120.0
    return texts[0], texts[1], os.listdir(folder)


def saved_stages(folder: str) -> tuple[float, float]:
    """The loss of a pipeline, and of the plain model that it saved."""
    model, batch = compiled_model("gpt2", {"pp": "pipeline"}, ("pp",))
    model.train_step(**batch)
    model.save_pretrained(folder)
    with torch.no_grad():
        loss = float(model(**batch).loss)
    kind = type(model).__mro__[2]
    return loss, float(kind.from_pretrained(folder, dtype=torch.float64)(**batch).loss.detach())


def averaged(make: Callable[[], tuple[Model, dict[str, Any]]]) -> dict[str, Any]:
    """Training with averaged weights beside, and a copy that goes its own way with a loss of its own."""
    model, batch = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = adam(model)
    losses = []
    for _ in range(3):
        losses += run(model, optimizer, batch, 1)
        average.update_parameters(model)
    other = copy.deepcopy(model)
    own = []
    other_optimizer = adam(other)
    for _ in range(2):
        logits = other(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        other_optimizer.step()
        other_optimizer.zero_grad()
        own.append(loss.item())
    with torch.no_grad():
        average_loss = float(average(**batch).loss)
        held = {name: value.cpu() for name, value in average.state_dict().items()}
    again = copy.deepcopy(average)
    again.load_state_dict(held)
    losses += [average_loss, float(again(**batch).loss.detach()), *own, float(model(**batch).loss.detach())]
    return {"losses": losses, "tied": other.lm_head.weight is other.transformer.wte.weight, "keys": sorted(held)}


def copied() -> tuple[dict[str, Any], dict[str, Any], list[float], str]:
    """Of a model planned at once, and at its first batch; losses through torch.compile; what a second compile says."""
    at_once = averaged(lambda: compiled_model("gpt2"))
    later = averaged(lambda: compiled_model("gpt2", example=False))
    model, batch = compiled_model("gpt2")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    text = training.message(lambda: autopar.compile(nn.Sequential(model), mesh, strategy="ddp"))
    wrapped = torch.compile(model, backend="aot_eager")
    losses = run(wrapped, adam(model), batch, 3)
    own, _ = training.model_and_batch("gpt2", torch.float64, 0.5)
    model, _ = compiled_model("gpt2", model=own)
    still = copy.deepcopy(model).eval()
    with torch.no_grad():
        losses += [float(still(**batch).loss), float(model.eval()(**batch).loss)]
    return at_once, later, losses, text


def double(*_: Any) -> Any:
    """A hook that somebody hung on a module."""


def hooked() -> dict[str, Any]:
    """Gradients with hooks on parameters, registered before compile, before the first batch, and after; warnings."""
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    plain = copy.deepcopy(own)
    seen: list[str] = []

    def hang(model: Model, name: str, factor: float) -> Any:
        weight = model.get_parameter(name)

        def scaled(gradient: Tensor) -> Tensor:
            seen.append(name)
            return gradient * (factor if factor != 3.0 else torch.linspace(0.5, 1, gradient.shape[-1]))

        return weight.register_hook(scaled)

    before, between, after = (
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.ln_f.bias",
    )
    removed = "transformer.ln_f.weight"
    handles = [hang(model, removed, 5.0) for model in (own, plain)]
    hang(own, before, 3.0)
    own.transformer.h[1].register_forward_hook(lambda module, args, output: output * 1.5)
    model, _ = compiled_model("gpt2", model=own, example=False)
    handles[0].remove()
    handles[1].remove()
    hang(model, between, 2.0)
    model.transformer.h[0].mlp.register_full_backward_hook(double)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("model"))
    with said() as texts:
        model(**batch).loss.backward()
        hang(model, after, 2.0)
        model.zero_grad()
        model(**batch).loss.backward()
    hang(plain, before, 3.0)
    hang(plain, between, 2.0)
    hang(plain, after, 2.0)
    plain.transformer.h[1].register_forward_hook(lambda module, args, output: output * 1.5)
    plain(**batch).loss.backward()
    wrong = [
        name
        for name, parameter in plain.named_parameters()
        if float((whole(model.get_parameter(name).grad) - parameter.grad).norm())
        > 1e-5 * float(parameter.grad.norm()) + 1e-12
    ]
    return {
        "wrong": wrong,
        "texts": [text for text in texts if "hook" in text],
        "calls": calls,
        "removed": removed in seen,
    }


def hooks_of_the_model(compiled: bool) -> tuple[float, float, int, list[str]]:
    """A loss that a forward hook doubles, the norm of gradients, and how often a hook of the backward ran, where nobody
    wants the gradient of what else the model returns; and what is said of a backward for that.
    """
    own, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    model: Any = compiled_model("gpt2", "zero3", ("dp",), (2,), model=own)[0] if compiled else own
    calls: list[int] = []
    model.register_forward_hook(lambda module, args, output: (output.loss * 2, output.logits))
    model.register_full_backward_hook(lambda module, received, given: calls.append(1))
    with said() as texts:
        loss, _ = model(**batch)
        loss.backward()
    norm = sum(float(whole(p.grad).square().sum()) for p in model.parameters())
    return float(loss.detach()), norm, len(calls), [text for text in texts if "gradients come for" in text]


class Casting(nn.Module):
    """Enters autocast in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(self.first(x))
        return y.float().pow(2).mean()


class Island(nn.Module):
    """Computes in float32 where it says so, whatever the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).float(), self.second.weight.float()).pow(2).mean()


def autocasts() -> dict[str, Any]:
    """What is said of autocast around and inside, and losses where the precision is the same."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found: dict[str, Any] = {}

    def make(**options: Any) -> tuple[Model, dict[str, Any]]:
        own, batch = training.model_and_batch("gpt2", torch.float32, 0.0)
        return autopar.compile(own, mesh, strategy="zero2", **options), batch

    def loss(model: Model, batch: dict[str, Any]) -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = model(**batch).loss
            value.backward()
        return [float(value.detach()), float(model.clip_grad_norm_(1e9))]

    model, batch = make()
    found["around"] = training.message(lambda: loss(model, batch))
    model, batch = make(precision="bf16")
    found["same"] = loss(model, batch)
    model.zero_grad()
    value = model(**batch).loss
    value.backward()
    found["plain"] = [float(value.detach()), float(model.clip_grad_norm_(1e9))]
    model, batch = make()
    for around in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        value = model(**batch).loss
        with around:
            value.backward()
        found["around backward"] = [*found.get("around backward", []), float(model.clip_grad_norm_(1e9))]
        model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for around in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        torch.manual_seed(2)
        with around:
            value = autopar.compile(Island(), mesh, strategy="ddp", precision="bf16")(x)
        found["island"] = [*found.get("island", []), float(value.detach())]
    found["inside"] = training.message(lambda: autopar.compile(Casting(), mesh, strategy="ddp")(x))
    found["moved"] = training.message(lambda: model.to(torch.bfloat16))
    model.to("cpu").float()
    normed = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))
    for parameter in normed.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    expected = normed(x).pow(2).mean()
    expected.backward()
    gradient = normed[0].weight_g.grad.norm()
    compiled = autopar.compile(normed, mesh, strategy="ddp")
    value = compiled(x).pow(2).mean()
    value.backward()
    found["normed"] = [float(value), float(whole(compiled[0].weight_g.grad).norm()), float(expected), float(gradient)]
    return found


class Lamb(torch.optim.Optimizer):
    """A user's own, which looks at norms of whole tensors, and counts in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                rows = state.setdefault("rows", torch.zeros(p.shape[0], dtype=p.dtype))
                rows.add_(p.grad.reshape(p.shape[0], -1).square().mean(1))
                update = mean / (1 - 0.9 ** group["step"]) / (rows.sqrt().reshape(-1, *[1] * (p.ndim - 1)) + 1e-6)
                p.sub_(update * (group["lr"] / group["step"] ** 0.5 * float(p.norm()) / (update.norm() + 1e-9)))


class Blocks(torch.optim.Optimizer):
    """A user's own, whose mean is kept in 8 bits, with a scale for each 16 elements, as bitsandbytes has it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, count = self.state[p], p.numel()
                rows = F.pad(p.grad.reshape(-1), (0, -count % 16)).view(-1, 16)
                before = state["mean"].to(rows.dtype) * state["scale"] if state else torch.zeros_like(rows)
                mean = before * 0.9 + rows * 0.1
                state["scale"] = mean.abs().amax(1, keepdim=True) / 127 + 1e-30
                state["mean"] = torch.round(mean / state["scale"]).to(torch.int8)
                p.sub_(mean.view(-1)[:count].view_as(p), alpha=group["lr"])


class Averaging(torch.optim.Optimizer):
    """A user's own, which treats each element by itself, and counts in its groups and on itself, as ScheduleFree."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight": 0.0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            group["weight"] += group["k"] ** 2
            trained = [p for p in group["params"] if p.grad is not None]
            fast = [self.state[p].setdefault("z", p.clone()) for p in trained]
            torch._foreach_add_(fast, [p.grad for p in trained], alpha=-group["lr"] / self.steps**0.5)
            torch._foreach_lerp_(trained, fast, group["k"] ** 2 / group["weight"])


def optimized(model: Model, batch: dict[str, Any], kind: str) -> tuple[Losses, dict[str, Tensor]]:
    """Losses of five steps in float64, with a schedule and clipping, and the parameters after them."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    made: list[Any] = {
        "muon": lambda: [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=1e-2)],
        "adafactor": lambda: [torch.optim.Adafactor(model.parameters(), lr=1e-2)],
        "blocks": lambda: [Blocks(model.parameters(), lr=1e-1)],
        "averaging": lambda: [Averaging([{"params": matrices}, {"params": others, "lr": 1e-2}], lr=2e-2)],
        "lamb": lambda: [Lamb([{"params": matrices}, {"params": others, "lr": 1e-2}], lr=2e-2)],
    }[kind]()
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in made]
    losses = []
    for step in range(5):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for each in (*made, *schedules):
            each.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
        if step == 2:
            states = [copy.deepcopy(each.state_dict()) for each in made]
            for each, state in zip(made, states, strict=True):
                each.load_state_dict(state)
    return losses, {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def optimizers(kind: str, strategy: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
    with said() as texts:
        model, batch = compiled_model("gpt2", strategy, axes, sizes)
        return *optimized(model, batch, kind), [text for text in texts if "looks at whole tensors" in text]


class Adapted(nn.Module):
    """A frozen layer and two small ones beside it, as a stranger would write LoRA."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        dtype = next(base.parameters()).dtype
        self.base, self.dropout = base, nn.Identity()
        self.lora_a = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        nn.init.normal_(self.lora_b.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(self.dropout(x))) * 2.0


class Peft(nn.Module):
    """A wrapper that hides what it wraps, as peft's does: it is no model of transformers itself."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def adapted() -> tuple[Model, dict[str, Any]]:
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            base = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Adapted(base, base.in_features, base.out_features))
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj, layer.mlp.down_proj.in_features, model.config.hidden_size)
    return Peft(model), batch


def adapters_trained(model: Model, batch: dict[str, Any]) -> dict[str, Any]:
    """Losses of five steps of the adapters, which tensors have gradients and states, and the adapters as saved."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = run(model, optimizer, batch, 5)
    model(**batch).loss.backward()
    return {
        "losses": losses,
        "gradients": sorted(name for name, p in model.named_parameters() if p.grad is not None),
        "states": len(optimizer.state),
        "saved": {name: value.cpu() for name, value in model.state_dict().items() if "lora" in name},
    }


def adapters(strategy: str) -> tuple[dict[str, Any], float, float]:
    """Also the loss of the compiled model now, and of a plain one that has its adapters merged."""
    own, batch = adapted()
    model, _ = compiled_model("llama", strategy, model=own, example=False)
    found = adapters_trained(model, batch)
    plain, _ = adapted()
    plain.load_state_dict(found["saved"], strict=False)
    for module in list(plain.modules()):
        for name, child in module.named_children():
            if isinstance(child, Adapted):
                child.base.weight.data += 2.0 * child.lora_b.weight.data @ child.lora_a.weight.data
                setattr(module, name, child.base)
    return found, float(model(**batch).loss.detach()), float(plain(**batch).loss.detach())


def replaced_forwards(compiled: bool) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of models whose forward, or a block's, is another function since before compile."""
    found = []
    for replace in (_by_method, _by_function, _of_a_block):
        own, batch = training.model_and_batch("llama", torch.float64, 0.0)
        replace(own)
        if compiled:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            autopar.compile(own, mesh, strategy="zero3", example_inputs=batch)
        found.append(_with_gradients(own, lambda own=own, batch=batch: own(**batch).loss))
    return found


def _by_method(model: Model) -> None:
    def forward(self: Model, *args: Any, **kwargs: Any) -> Any:
        output = type(self).forward(self, *args, **kwargs)
        output.loss = output.loss + output.logits.square().mean()
        return output

    model.forward = MethodType(forward, model)


def _by_function(model: Model) -> None:
    before = model.forward

    @wraps(before)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = before(*args, **kwargs)
        output.loss = 2 * output.loss + model.lm_head.weight.square().sum()
        return output

    model.forward = forward


def _of_a_block(model: Model) -> None:
    mlp = model.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 1.5 * before(x)
