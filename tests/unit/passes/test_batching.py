"""batching: what microbatches give, put together as the analysis says, is what the whole batch gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import huggingface
from autopar.cli.models import catalogue, plain
from autopar.passes.batching import OutputBatching, analyse
from autopar.passes.capture import capture
from tests.unit.passes.microbatches import (
    ROWS,
    Batch,
    analysed,
    captured,
    labels_of,
    prove,
    randomized,
    weight_function,
)

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

# --------------------------------------------------------------------------------------------------------- whole models


def language_model(name: str) -> tuple[nn.Module, Batch]:
    loaded = catalogue.load(name, tiny=True, device="cpu", batch=(ROWS, 6), dropout=0.0)
    batch = dict(loaded.batch)
    batch["labels"] = labels_of(ROWS, 6, 50)
    if "attention_mask" in batch:
        mask = torch.ones(ROWS, 6, dtype=torch.int64)
        mask[1, 4:] = mask[6, 2:] = 0
        batch["attention_mask"] = mask
    return loaded.model, batch


def t5() -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    ids = torch.randint(32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(ROWS, 6, dtype=torch.int64)
    mask[2, 3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels_of(ROWS, 5, 32)}
    return transformers.T5ForConditionalGeneration(config), batch


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    images = torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(ROWS) % 5}


def gpt2_classifier() -> tuple[nn.Module, Batch]:
    """Its head picks the last token of each row: logits[arange(rows), last]."""
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, num_labels=3, pad_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(1, 32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    ids[1, 4:] = 0
    return transformers.GPT2ForSequenceClassification(config), {"input_ids": ids, "labels": torch.arange(ROWS) % 3}


def plain_model(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = (plain.make_mlp if name == "mlp" else plain.make_cnn)(tiny=True, rows=ROWS)
    batch["labels"][3] = batch["labels"][4] = -100
    return model, {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    **{name: partial(language_model, name) for name in ("llama", "gpt2", "bert")},
    **{name: partial(plain_model, name) for name in ("mlp", "cnn")},
    "t5": t5,
    "vit": vit,
    "gpt2_classifier": gpt2_classifier,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model, batch = MODELS[name]()
    model = randomized(model)
    batching = analysed(model, batch)
    assert set(batching.inputs.values()) == {0}
    assert batching.outputs[0] == OutputBatching("weighted")
    assert all(output == OutputBatching("concat", 0) for output in batching.outputs[1:])
    for m in (2, 4):  # the count's text names no number of rows
        prove(model, batch, batching, m)


@pytest.mark.parametrize("name", ["gpt2", "bert", "cnn", "vit"])
def test_one_capture_says_the_same(name: str) -> None:
    model, batch = MODELS[name]()
    model = randomized(model)
    assert analysed(model, batch, compare=False) == analysed(model, batch)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_one_row_a_microbatch(name: str) -> None:
    """What is left out of a graph for one row (expansions) does not disturb the comparison."""
    model, batch = MODELS[name]()
    batch["labels"] = torch.where(batch["labels"] < 0, 1, batch["labels"])
    model = randomized(model)
    prove(model, batch, analysed(model, batch, ROWS), ROWS)


class _RowDropout:
    """Dropout that draws the same for every row, so that microbatches can be compared with the whole batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        self.calls += 1
        keep = torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(self.calls)) >= p
        return x * keep.to(x.dtype) / (1 - p)


def test_dropout() -> None:
    loaded = catalogue.load("gpt2", tiny=True, device="cpu", batch=(ROWS, 6), dropout=0.3)
    model = randomized(loaded.model).train()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    batch = {**loaded.batch, "labels": labels_of(ROWS, 6, 50)}
    batching = analysed(model, batch)
    for m in (2, 4):
        prove(model, batch, batching, m, lambda: mock.patch.object(F, "dropout", _RowDropout()))


# --------------------------------------------------------------------------------------------------- losses by hand


class Loss(nn.Module):
    """A linear map of x, and a function of it and of the batch."""

    def __init__(self, function: Callable[..., Any], classes: int = 5) -> None:
        super().__init__()
        self.proj = nn.Linear(4, classes)
        self.function = function
        self.register_buffer("weights", torch.rand(classes, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor, **batch: Tensor) -> Any:
        return self.function(self, self.proj(x), **batch)


class Rowwise(nn.Module):
    """`Loss` with named inputs, as torch.export wants them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Loss(function)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, count: Tensor) -> Any:
        return self.inner.function(self.inner, self.inner.proj(x), labels=labels, mask=mask, count=count)


def batch_of(rows: int = ROWS, length: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.float64)
    for row in range(rows):
        mask[row, : row % length] = 0
    return {
        "x": torch.randn(rows, length, 4, generator=generator, dtype=torch.float64),
        "labels": labels_of(rows, length, 5),
        "mask": mask,
        "count": torch.tensor(17.0, dtype=torch.float64),
    }


def per_token(y: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="none", **options).view(labels.shape)


def flat(y: Tensor) -> Tensor:
    return y.flatten(0, 1)


def handmade_count(self: Loss, y: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    keep = labels != -100
    logp = y.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(logp * keep).sum() / keep.sum()


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25], dtype=torch.float64)

LOSSES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "mean": ("mean", lambda self, y, **_: y.square().mean()),
    "means of dims": ("mean", lambda self, y, **_: y.square().mean(-1).mean(1).mean(0)),
    "sum": ("sum", lambda self, y, **_: y.square().sum()),
    "sum by constant": ("sum", lambda self, y, **_: y.square().sum() / 7 * 3),
    "sum by parameter": ("sum", lambda self, y, **_: y.square().sum() * self.proj.bias.sum()),
    "sum by rows": ("mean", lambda self, y, **_: y.square().sum() / y.shape[0]),
    "sum by elements": ("mean", lambda self, y, **_: y.square().sum() * (1 / y.numel())),
    "rows by rows": ("mean", lambda self, y, **_: (y.square().sum((1, 2)) / len(y)).sum()),
    "mean by rows": ("sum", lambda self, y, **_: y.square().mean() * y.shape[0]),
    "sum by ones": ("mean", lambda self, y, **_: y.square().sum() / torch.ones(y.shape[0], device=y.device).sum()),
    "sum by full": ("mean", lambda self, y, **_: y.square().sum() / torch.full((), len(y), device=y.device)),
    "num_items_in_batch": ("sum", lambda self, y, labels, count, **_: per_token(y, labels).sum() / count),
    "sum reduction": (
        "sum",
        lambda self, y, labels, **_: F.cross_entropy(y.transpose(1, 2), labels, reduction="sum") / 128,
    ),
    "mask": ("weighted", lambda self, y, mask, **_: (y.square().sum(-1) * mask).sum() / mask.sum()),
    "mask means": ("weighted", lambda self, y, mask, **_: (y.square().mean(-1) * mask).mean() / mask.mean()),
    "labels": ("weighted", handmade_count),
    "places": ("weighted", lambda self, y, labels, **_: F.cross_entropy(y.transpose(1, 2), labels)),
    "ignore": ("weighted", lambda self, y, labels, **_: F.cross_entropy(flat(y), labels.flatten() % 5, ignore_index=2)),
    "smoothing": (
        "weighted",
        lambda self, y, labels, **_: F.cross_entropy(flat(y), labels.flatten(), label_smoothing=0.1),
    ),
    "nll": ("weighted", lambda self, y, labels, **_: F.nll_loss(y.log_softmax(-1).flatten(0, 1), labels.flatten())),
    "nll places": ("weighted", lambda self, y, labels, **_: F.nll_loss(y.log_softmax(-1).transpose(1, 2), labels)),
    "two heads": (
        "weighted",
        lambda self, y, labels, **_: (
            F.cross_entropy(y.flatten(0, 1), labels.flatten())
            + 0.5 * F.cross_entropy(-y.flatten(0, 1), labels.flatten())
        )
        / 2,
    ),
    "weighted and decay": (
        "weighted",
        lambda self, y, labels, **_: (
            F.cross_entropy(y.transpose(1, 2), labels) + 1e-2 * self.proj.weight.square().sum() + 1.0
        ),
    ),
    "times its count": (
        "sum",
        lambda self, y, labels, **_: F.cross_entropy(y.transpose(1, 2), labels) * (labels != -100).sum() / 9,
    ),
    "probabilities": ("mean", lambda self, y, **_: F.cross_entropy(flat(y), flat(y).softmax(1))),
    "mse": ("mean", lambda self, y, mask, **_: F.mse_loss(y.sum(-1), mask)),
    "mse sum": ("sum", lambda self, y, mask, **_: F.mse_loss(y.sum(-1), mask, reduction="sum")),
    "smooth l1": ("mean", lambda self, y, mask, **_: F.smooth_l1_loss(y.sum(-1), mask)),
    "bce": ("mean", lambda self, y, mask, **_: F.binary_cross_entropy_with_logits(y.sum(-1), mask)),
    "bce sum": ("sum", lambda self, y, mask, **_: F.binary_cross_entropy_with_logits(y.sum(-1), mask, reduction="sum")),
    "kl": ("mean", lambda self, y, **_: F.kl_div(y.log_softmax(-1), y.square().softmax(-1), reduction="batchmean")),
    "mean and decay": ("mean", lambda self, y, **_: y.square().mean() + self.proj.weight.square().sum()),
    "zero and sum": ("sum", lambda self, y, **_: torch.zeros((), dtype=y.dtype, device=y.device) + y.square().sum()),
    "accuracy": ("mean", lambda self, y, labels, **_: (y.argmax(-1) == labels).to(torch.float64).mean() + 0 * y.mean()),
    "whole": ("same", lambda self, y, **_: self.proj.weight.square().sum()),
    "positions": (
        "mean",
        lambda self, y, **_: (y.sum(-1) * torch.arange(3.0, device=y.device)).mean()
        + torch.arange(3.0, device=y.device).sum(),
    ),
    "one label": (
        "mean",
        lambda self, y, **_: F.cross_entropy(y[:, 0], torch.zeros(len(y), dtype=torch.int64, device=y.device)),
    ),
    "einsum": ("mean", lambda self, y, **_: torch.einsum("bsc,btc->bst", y, y).tanh().mean()),
    "attention": ("mean", lambda self, y, **_: F.scaled_dot_product_attention(y, y, y, is_causal=True).mean()),
    "class weights": (
        "weighted",
        lambda self, y, labels, **_: F.cross_entropy(y.transpose(1, 2), labels, weight=WEIGHTS.to(y.device)),
    ),
    "smoothing with class weights": (
        "weighted",
        lambda self, y, labels, **_: F.cross_entropy(
            y.transpose(1, 2), labels, weight=WEIGHTS.to(y.device), label_smoothing=0.2
        ),
    ),
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, m: int) -> None:
    combine, function = LOSSES[name]
    model, batch = Rowwise(function).double(), batch_of()
    batching = analysed(model, batch, m)
    assert batching.outputs == (OutputBatching(combine),)
    assert batching.inputs == {"x": 0, "labels": 0, "mask": 0, "count": None}
    prove(model, batch, batching, m)


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSED: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "nonlinear": ("not linear", lambda self, y, **_: y.square().mean().exp()),
    "sum and constant": ("mixes a sum", lambda self, y, **_: y.square().sum() + self.proj.weight.square().sum()),
    "sum and number": ("adds a number", lambda self, y, **_: y.square().sum() + 1),
    "sum and mean": ("mixes a sum over the rows with a mean", lambda self, y, **_: y.sum() + y.square().mean()),
    "two counts": (
        "another count",
        lambda self, y, labels, **_: F.cross_entropy(y.flatten(0, 1), labels.flatten())
        + F.cross_entropy(y.flatten(0, 1), labels.flatten() % 5, ignore_index=2),
    ),
    "mean and weighted": (
        "mixes",
        lambda self, y, labels, **_: F.cross_entropy(y.flatten(0, 1), labels.flatten()) + y.square().mean(),
    ),
    "count of the model": (
        "the inputs alone do not tell",
        lambda self, y, **_: (y * (y > 0)).sum() / (y > 0).sum(),
    ),
    "weights in a buffer": (
        "the inputs alone do not tell",
        lambda self, y, labels, **_: F.cross_entropy(y.transpose(1, 2), labels, weight=self.weights),
    ),
    "pairs": ("every other", lambda self, y, **_: (y[:, 0] @ y[:, 0].T).mean()),
    "two averages": (
        "averages weighted by different counts",
        lambda self, y, labels, **_: (
            F.cross_entropy(y.flatten(0, 1), labels.flatten()),
            F.cross_entropy(y.flatten(0, 1), labels.flatten() % 5, ignore_index=2),
        ),
    ),
    "rows in stripes": ("in stripes", lambda self, y, **_: y.transpose(0, 1).flatten(0, 1)),
    "maximum": ("all rows", lambda self, y, **_: y.max()),
    "softmax over rows": ("all rows", lambda self, y, **_: y.softmax(0).square().mean()),
    "shifted rows": ("roll needs all rows", lambda self, y, **_: (y * y.roll(1, 0)).mean()),
    "variance": ("var.correction needs all rows", lambda self, y, **_: y.var()),
    "less its mean": ("each row meet", lambda self, y, **_: (y - y.mean(0)).square().mean()),
    "numbers of rows": ("arange", lambda self, y, **_: (y.sum((1, 2)) * torch.arange(len(y), device=y.device)).sum()),
    "square of rows": ("scaled", lambda self, y, **_: y.square().sum() / len(y) ** 2),
    "plus rows": ("is given", lambda self, y, **_: (y + len(y)).mean()),
    "a window": ("for one number of rows", lambda self, y, **_: y[:, : len(y) // 4].mean()),
    "clamped": ("not linear", lambda self, y, mask, **_: y.square().sum() / mask.sum().clamp(min=1)),
    "half of the rows": ("output", lambda self, y, **_: y[: len(y) // 2].mean()),
    "first row": (r"x\[i\] needs all rows", lambda self, y, **_: y[0].mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    why, function = REFUSED[name]
    with pytest.raises(AutoparError, match=why) as caught:
        analysed(Rowwise(function).double(), batch_of())
    assert "test_batching.py:" in str(caught.value) and "microbatches=1" in str(caught.value)


class Scaled(nn.Module):
    """Trained on batches of rows alike, with the statistics of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()


def test_batch_norm_couples_the_batch() -> None:
    with pytest.raises(AutoparError, match=r"batch_norm needs all rows.*norm \(test_batching.py:\d+\)"):
        analysed(Scaled().double(), {"x": torch.randn(ROWS, 4, dtype=torch.float64)})


def test_batch_norm_with_given_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).double().eval()
    batch = {"input": torch.randn(ROWS, 4, dtype=torch.float64)}
    batching = analysed(model, batch)
    assert batching.outputs == (OutputBatching("concat", 0),)
    prove(model, batch, batching, 2)


def test_clip_names_the_line() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 31, "bos_token_id": 0, "pad_token_id": 1}
    vision = {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config={**sizes, **text}, vision_config={**sizes, **vision}, projection_dim=6)
    model = transformers.CLIPModel(config).double()
    batch: dict[str, Any] = {
        "input_ids": torch.randint(32, (ROWS, 6)),
        "pixel_values": torch.randn(ROWS, 3, 8, 8, dtype=torch.float64),
        "return_loss": True,
    }
    with pytest.raises(AutoparError, match=r"'loss'.*combines each row.*\(modeling_clip.py:\d+\)"):
        with huggingface.training_capture(model):
            analyse(capture(model, batch))


def test_a_table_of_the_batch_s_rows() -> None:
    """Breaks if every microbatch meets the first rows of a constant that has a row for each of the whole batch: no
    smaller batch can be captured, which would show it.
    """
    table = torch.linspace(0, 1, ROWS, dtype=torch.float64)
    model = Rowwise(lambda self, y, **_: (y * table.to(y.device)[:, None, None]).mean()).double()
    with pytest.raises(AutoparError, match="sets rows of the batch against the dims of a constant"):
        analyse(captured(model, batch_of()))


def test_one_microbatch_is_never_refused() -> None:
    program = captured(Rowwise(REFUSED["pairs"][1]).double(), batch_of())
    assert analyse(program, 1).outputs == (OutputBatching("same"),)


def test_one_row_cannot_be_cut() -> None:
    with pytest.raises(AutoparError, match="one row"):
        analyse(captured(Rowwise(LOSSES["sum"][1]).double(), batch_of(1)))


# ----------------------------------------------------------------------------------------------------------- any graph


def _steps() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6)


STEPS: Mapping[str, Callable[[Any, Tensor, Batch], Tensor]] = {
    "tanh": lambda self, y, b: y.tanh(),
    "square": lambda self, y, b: y.square(),
    "mask": lambda self, y, b: y * b["mask"].sum(-1).view(-1, *[1] * (y.dim() - 1)) if _by_rows(y, b) else y,
    "first": lambda self, y, b: y.select(-1, 0) if y.dim() else y,
    "sum last": lambda self, y, b: y.sum(-1) if y.dim() else y,
    "mean last": lambda self, y, b: y.mean(-1) if y.dim() else y,
    "sum first": lambda self, y, b: y.sum(0) if y.dim() else y,
    "mean first": lambda self, y, b: y.mean(0) if y.dim() else y,
    "flatten": lambda self, y, b: y.flatten(0, 1) if y.dim() > 1 else y,
    "unflatten": lambda self, y, b: y.view(len(b["x"]), -1) if _by_rows(y, b) else y,
    "transpose": lambda self, y, b: y.transpose(0, -1) if y.dim() > 1 else y,
    "by rows": lambda self, y, b: y / len(b["x"]),
    "times rows": lambda self, y, b: y * len(b["x"]),
    "double": lambda self, y, b: 2 * y,
    "plus one": lambda self, y, b: y + 1,
    "plus parameter": lambda self, y, b: y + self.proj.bias.sum(),
    "by mask": lambda self, y, b: y / b["mask"].sum(),
    "by mean mask": lambda self, y, b: y / b["mask"].mean(),
    "softmax": lambda self, y, b: y.softmax(-1) if y.dim() else y,
    "twice": lambda self, y, b: torch.cat([y, y]) if y.dim() else y,
    "repeat": lambda self, y, b: y.repeat(2, *[1] * (y.dim() - 1)) if y.dim() else y,
    "less mean": lambda self, y, b: y - y.mean(),
    "linear": lambda self, y, b: F.linear(y, self.proj.weight.T) if y.dim() and y.shape[-1] == 5 else y,
    "maximum": lambda self, y, b: y.amax(-1) if y.dim() else y,
}  # fmt: skip


def _by_rows(y: Tensor, b: Batch) -> bool:
    return bool(y.dim()) and y.shape[0] % len(b["x"]) == 0 and y.numel() % len(b["x"]) == 0


class Steps(nn.Module):
    """The steps of one example, one after another."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(4, 5)
        self.names = names

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.proj(x)
        for name in self.names:
            y = STEPS[name](self, y, {"x": x, "mask": mask})
        return y


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_steps())
def test_what_is_accepted_is_exact(names: list[str]) -> None:
    model = Steps(names).double()
    batch = {name: tensor for name, tensor in batch_of().items() if name in ("x", "mask")}
    try:
        batching = analysed(model, batch)
    except AutoparError:
        return
    prove(model, batch, batching, 2)


def test_counts_are_what_a_person_would_write() -> None:
    model, batch = MODELS["bert"]()
    weight = analysed(randomized(model), batch).weight
    assert "comm." not in weight
    assert float(weight_function(weight)(batch)) == int((batch["labels"] != -100).sum())
    assert math.isclose(float(weight_function(weight)({**batch, "labels": torch.full_like(batch["labels"], -100)})), 0)
