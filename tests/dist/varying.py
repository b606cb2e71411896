"""Work for test_varying: training over batches of random lengths, with evaluations and short batches in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.api import compile as compiling
from autopar.base.errors import AutoparError
from autopar.runtime import granted
from tests.dist.script import said

Losses = list[float]
VOCABULARY, LONGEST = 96, 64
POSITIONS = 80
"""Of the models: at as many, a slice of their tables is no slice, and so the program another."""


def model_of(name: str, layers: int = 4) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=32, n_layer=layers, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = hf.GPT2LMHeadModel(config).double()
        model.loss_function = _causal_loss
        return model
    bert = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForMaskedLM(bert).double()


def _causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """As of transformers, but in the logits' own dtype, not in float32."""
    following = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), following.view(-1))


def collate(documents: list[Tensor]) -> dict[str, Tensor]:
    """As long as the longest, as data collators do it."""
    longest = max(map(len, documents))
    ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = labels[row, : len(document)] = document
        mask[row, : len(document)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches_of(count: int, rows: int = 4, last: int | None = None, multiple: int = 1) -> list[dict[str, Tensor]]:
    """Documents of random lengths; the last batch may have fewer. multiple: of every length."""
    draw, generator = random.Random(7), torch.Generator().manual_seed(7)
    found = []
    for number in range(count):
        have = last if last is not None and number == count - 1 else rows
        lengths = [draw.randrange(4, LONGEST + 1) for _ in range(have)]
        lengths[0] = -(-max(lengths) // multiple) * multiple
        found.append(collate([torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]))
    return found


def trained(model: Any, batches: list[dict[str, Tensor]], plain: bool) -> tuple[Losses, list[float]]:
    """A user's loop: a step a batch, an evaluation without labels every other one; losses, and sums of parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: Losses = []
    for number, batch in enumerate(batches):
        out = model(**batch) if plain else model.train_step(**batch)
        if plain:
            out.loss.backward()
        losses.append(out.loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                shown = logits if plain or not hasattr(logits, "full_tensor") else logits.full_tensor()
            losses.append(float(shown.abs().sum()))
            losses += [float(n) for n in shown.shape]
            model.train()
    named = dict(model.named_parameters()).values()
    return losses, [float((p if plain else p.full_tensor()).detach().abs().sum()) for p in named]


def loop(
    name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, count: int, last: int | None,
    multiple: int, options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The loop on ranks and in one process."""
    batches = batches_of(count, last=last, multiple=multiple)
    plain = model_of(name)
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    solved = count_solved()
    with said() as texts:
        compiled: Any = autopar.compile(model, mesh, strategy=strategy, **options)
        ours = trained(compiled, batches, False) if "pp" not in axes else _pipelined(compiled, batches)
    theirs = trained(plain, batches, True) if "pp" not in axes else _pipelined(plain, batches)
    return {"ours": ours, "theirs": theirs, "solved": solved[0], "said": texts, **_counts(compiled)}


def _pipelined(model: Any, batches: list[dict[str, Tensor]]) -> tuple[Losses, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        if hasattr(model, "train_step"):
            loss = model.train_step(**batch).loss
        else:
            loss = model(**batch).loss
            loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, []


FRESH = compiling.first_plan


def count_solved() -> list[int]:
    """How many placements are solved from now on, by this process."""
    found = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        found[0] += 1
        return FRESH(*args, **kwargs)

    compiling.first_plan = counted
    return found


def _counts(compiled: Any) -> dict[str, int]:
    found: dict[str, int] = compiled.autopar.prepare.__self__.counts()
    return found


def many(name: str, strategy: str, count: int) -> dict[str, Any]:
    """So many random lengths, each a forward: losses beside eager's."""
    lengths = random.Random(3).sample(range(4, LONGEST + 1), count)
    plain = model_of(name)
    compiled: Any = copy.deepcopy(plain)
    solved = count_solved()
    compiled = autopar.compile(compiled, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy=strategy)
    pairs = []
    for length in lengths:
        ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
        pairs.append((float(compiled(input_ids=ids, labels=ids).loss), float(plain(input_ids=ids, labels=ids).loss)))
    return {"pairs": pairs, "solved": solved[0], **_counts(compiled)}


class MeanOfRows(nn.Module):
    """Its loss counts every row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.linear(x)
        return {"loss": (out.sum(-1) - labels).pow(2).mean(), "out": out}


class Statistics(nn.Module):
    """Its results are of all rows: of their mean and variance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4).double(), nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.norm(self.linear(x))
        return {"loss": (out.sum(-1) - labels).abs().mean(), "out": out}


def whole_rows(strategy: str, sizes: dict[str, int], rows: list[int]) -> list[tuple[list[float], list[float]]]:
    """Batches of so many rows, to which none can be added: loss, an output's and every gradient's sum of squares, and
    a buffer after each step; of a model without statistics and of one with, ours and eager's.
    """
    pairs = []
    for kind in (MeanOfRows, Statistics):
        torch.manual_seed(0)
        plain = kind()
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        compiled: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy=strategy)
        pairs.append((_measured(compiled, rows), _measured(plain, rows)))
    return pairs


def split_again() -> list[list[bool]]:
    """Of each of three batches of 3, 4 and 6 rows, whether an output of it is in pieces."""
    torch.manual_seed(0)
    model: Any = autopar.compile(Statistics(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
    outs = [model(torch.ones(rows, 8).double(), torch.ones(rows).double())["out"] for rows in (3, 4, 6)]
    return [[isinstance(p, Shard) for p in out.placements] for out in outs]


def _measured(model: Any, rows: list[int]) -> list[float]:
    found, generator = [], torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count in rows:
        batch = [torch.randn(count, *shape, generator=generator, dtype=torch.float64) for shape in ((8,), ())]
        out = model(*batch)
        optimizer.zero_grad()
        out["loss"].backward()
        tensors = [out["loss"], out["out"], *(p.grad for p in model.parameters()), *model.buffers()]
        optimizer.step()
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
        found += [float(x.detach().double().square().sum()) for x in whole]
    return found


def different_shapes() -> str:
    """Each rank brings a batch of its own length."""
    import torch.distributed as dist

    model: Any = autopar.compile(
        model_of("gpt2", 2), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp"
    )
    ids = torch.ones(2, 8, dtype=torch.int64)
    model(input_ids=ids, labels=ids)
    ids = torch.ones(2, 9 + dist.get_rank(), dtype=torch.int64)
    try:
        model(input_ids=ids, labels=ids)
    except AutoparError as error:
        return str(error)
    return "nothing"


def loaders(own_rows: bool, overlap: bool = False) -> dict[str, Any]:
    """Losses over documents of random lengths that a collator pads, by `shard_loader`, beside whole batches'."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in range(8, 20)]
    if own_rows:
        documents = [document[:8] for document in documents]
    plain = model_of("gpt2", 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    example = collate(documents[:4])
    model: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="ddp", example_inputs=example)
    rank = 0 if overlap else dist.get_rank()
    sampler: Any = DistributedSampler(documents, 2, rank, shuffle=False) if own_rows else None  # type: ignore[arg-type]
    loader: Any = DataLoader(documents, 2 if own_rows else 4, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    try:
        found = [float(model(**batch).loss) for batch in model.shard_loader(loader, own_rows=own_rows)]
    except AutoparError as error:
        return {"error": str(error)}
    return {"ours": found, "eager": [float(plain(**collate(documents[i : i + 4])).loss) for i in (0, 4, 8)]}


class Normed(nn.Module):
    """A part of it is often frozen: batch norm in eval mode, beside dropout in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.linear(x))).square().mean()


class Followed(nn.Module):
    """A teacher follows in forward, as in momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                kept.data = kept.data * 0.9 + new.data * 0.1
            wanted = self.teacher(x)
        return (self.student(x) - wanted.tanh()).square().mean()


def _followed(x: Tensor, mesh: Any) -> list[tuple[float, float]]:
    """Losses of training, and the teacher's weights after it, here and on one process."""
    plain = Followed().double()
    compiled: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="zero3")
    found = []
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5) for model in (compiled, plain)
    ]
    for _ in range(3):
        losses = [compiled(x), plain(x)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((float(losses[0].detach()), float(losses[1].detach())))
    return [*found, (float(compiled.teacher.weight.full_tensor().sum()), float(plain.teacher.weight.sum()))]


def frozen_part() -> list[tuple[float, float]]:
    """Losses, and what batch norm has seen, here and on one process, with its mode changed after compile and back; and
    with a part that forward moves.
    """
    torch.manual_seed(0)
    plain = Normed().double()
    compiled: Any = copy.deepcopy(plain)
    x = torch.randn(4, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled = autopar.compile(compiled, mesh, strategy="ddp", example_inputs={"x": x})
    found = []
    for is_training in (False, True, False):
        for model in (plain, compiled):
            model.norm.train(is_training)
        found.append((float(compiled(x).detach()), float(plain(x).detach())))
        held = compiled.norm.running_mean
        found.append((float(held.detach().abs().sum()), float(plain.norm.running_mean.abs().sum())))
    return found + _followed(x, mesh)


class Branching(nn.Module):
    """counts: keeps a running mean of what its layer makes, and takes no negative pixels."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(8, 8), counts
        if counts:
            self.register_buffer("mean", torch.zeros(()))
            self.mean: Tensor

    def forward(self, pixels: Tensor) -> Tensor:
        if self.counts and pixels.min() < 0:
            raise ValueError("a pixel is negative")
        if not self.counts and pixels.min() < 0:
            pixels = (pixels + 1) / 2
        y = self.linear(pixels)
        if self.counts:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(), alpha=0.1)
        return y.square().mean()


def other_than_the_example() -> tuple[list[tuple[float, float]], int]:
    """Losses of batches that are as the example is, or not, here and on one process; how many programs there are."""
    torch.manual_seed(0)
    plain = Branching().double()
    x = torch.rand(4, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="zero3", example_inputs={"pixels": x})
    batches = (x / 2, x - 0.5, x, x - 0.6)
    return [(float(compiled(x).detach()), float(plain(x).detach())) for x in batches], len(compiled.autopar._programs)


def granted_late() -> tuple[str, str, bool, bool]:
    """What is said of a batch that is not as the example, before the optimizer steps and before the next forward, where
    answers are read late; whether the weights and a buffer are still as they were.
    """
    with patch.object(granted, "reads_at_once", lambda device: False):
        return _granted_late()


def _granted_late() -> tuple[str, str, bool, bool]:
    torch.manual_seed(0)
    x = torch.rand(4, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Branching(counts=True).double()
    compiled: Any = autopar.compile(model, mesh, strategy="zero3", example_inputs={"pixels": x})
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.full_tensor().clone() for p in compiled.parameters()]
    mean = compiled.get_buffer("mean").clone()
    compiled(x - 0.5).backward()
    at_step = _refused(optimizer.step)
    same = all(torch.equal(p.full_tensor(), old) for p, old in zip(compiled.parameters(), before, strict=True))
    kept = torch.equal(compiled.get_buffer("mean"), mean)
    compiled(x - 0.5)
    return at_step, _refused(lambda: compiled(x)), same, kept


def _refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except AutoparError as error:
        return str(error)
    return "nothing"


class Scaled(nn.Module):
    """Its forward reads one number of its, and not the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.scale, self.step = nn.Linear(8, 8), nn.BatchNorm1d(8), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x)) * self.scale - 1).square().mean()


def numbers_of_modules() -> tuple[list[str], list[tuple[float, float]], int]:
    """What is said where numbers of modules change behind `compile`; pairs of losses, and of what a norm keeps, here
    and in one process; how many plans were made.
    """
    torch.manual_seed(0)
    plain = Scaled().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(4, 8, dtype=torch.float64)
    model: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="zero3", example_inputs={"x": x})
    other: Any = copy.deepcopy(model)
    pairs, plans = [], count_solved()
    with said() as texts:
        for step in range(9):
            for each in (plain, model):
                each.step = step
                each.scale = 0.5 if step in (4, 5, 7) else 1.0
                each.norm.momentum = None if step > 6 else 0.1  # as update_bn has it
            pairs.append((float(model(x).detach()), float(plain(x).detach())))
            pairs.append((float(model.norm.running_var.sum()), float(plain.norm.running_var.sum())))
    other.scale, plain.scale = 0.25, 0.25
    pairs.append((float(other(x).detach()), float(plain(x).detach())))
    return [text for text in texts if "number" in text], pairs, plans[0]


def numbers_without_end() -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(4, 8, dtype=torch.float64)
    model: Any = autopar.compile(Scaled().double(), mesh, strategy="ddp", example_inputs={"x": x})
    try:
        for step in range(40):
            model.scale = 1.0 / (1 + step)
            model(x)
    except AutoparError as error:
        return f"{step}: {error}"
    return "nothing"


class Odd(nn.Module):
    """Of no library, with a bias whose elements no two ranks share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(53, 20), nn.GRU(20, 20, batch_first=True), nn.Linear(20, 53)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.head(self.cell(self.table(tokens))[0])
        return scores if labels is None else (F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores)


def evaluated_without_labels(compiled: bool) -> list[Any]:
    """A loss, then scores without labels, of a whole batch and of three short rows."""
    torch.manual_seed(0)
    model, tokens = Odd().double(), torch.arange(28).reshape(4, 7)
    if compiled:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        autopar.compile(model, mesh, strategy="zero3", example_inputs={"tokens": tokens, "labels": tokens})
    loss, _ = model(tokens, labels=tokens)
    with torch.no_grad():
        found = [model(tokens), model(tokens[:3, :5])]
    return [float(loss.detach()), *(x.cpu().numpy().tolist() for x in found)]


def ahead() -> tuple[list[tuple[float, float]], int, int, str]:
    """Losses here and in one process of lengths that were planned for ahead, from shapes alone; how many programs were
    made then, and in the steps; what is said where ranks ask for other shapes.
    """
    import torch.distributed as dist

    plain = model_of("gpt2", 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="zero3")
    shapes = [{name: torch.empty(4, n, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
              for n in (16, 12, 8)]  # fmt: skip
    model.plan_ahead(*shapes)
    before = len(model.autopar._programs)
    batches = [collate([torch.arange(n) % 7 for _ in range(4)]) for n in (8, 16, 12)]
    for batch in batches:
        batch.pop("attention_mask")
    losses = [(float(model(**batch).loss.detach()), float(plain(**batch).loss.detach())) for batch in batches]
    after = len(model.autopar._programs)
    with torch.no_grad():
        model.eval().plan_ahead(torch.empty(4, 10, dtype=torch.int64, device="meta"))
    try:
        model.plan_ahead(shapes[dist.get_rank()])
    except AutoparError as error:
        return losses, before, after, str(error)
    return losses, before, after, "nothing"
