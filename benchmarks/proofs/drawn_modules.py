"""Plain modules that are drawn: data that says which operations follow each other, and the module that it stands for.

A `Drawing` is a list of steps, each the name of an operation (`drawn_operations.py`) and numbers that pick what it
reads and how it is set; a step that nothing suits is left out, so that any drawing is a module and any part of one is a
smaller one. Shapes are tracked by running each step, as it is made, on the batch. Rows of the batch do not depend on
each other but through the loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.proofs.drawn_lines import MOST_A_ROW, TOKENS, Values, kind
from benchmarks.proofs.drawn_operations import OPERATIONS

ROWS, CLASSES = 8, 6
INPUTS = ("x", "image", "vector", "ids")
MOST_FITTED = 1 << 10
MOST = 1e3
"""Of any number: attention that reads larger ones loses digits, here as in other fused forms."""
PICKS = 8
"""Of a step."""

Step = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Steps before repeated blocks, of each block, and after. repeats: blocks; ends: picks of the loss, of what is
    returned, of how modules are held.
    """

    before: tuple[Step, ...] = ()
    block: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    repeats: int = 0
    ends: tuple[int, ...] = ()

    def smaller(self) -> Iterator[Drawing]:
        """Drawings with less in them, the least first."""
        if self.repeats:
            yield replace(self, repeats=0, block=())
            yield replace(self, repeats=self.repeats - 1) if self.repeats > 1 else replace(self, ends=())
        for name in ("before", "block", "after"):
            steps: tuple[Step, ...] = getattr(self, name)
            for at in range(len(steps)):
                yield replace(self, **{name: steps[:at] + steps[at + 1 :]})
        for at, pick in enumerate(self.ends):
            if pick:
                yield replace(self, ends=(*self.ends[:at], 0, *self.ends[at + 1 :]))


def drawn(seed: int) -> Drawing:
    """The drawing of a seed."""
    chosen = random.Random(seed)
    names = sorted(OPERATIONS)

    def steps(most: int) -> tuple[Step, ...]:
        picks = lambda: tuple(chosen.randrange(1 << 10) for _ in range(PICKS))  # noqa: E731
        return tuple((chosen.choice(names), picks()) for _ in range(chosen.randint(1, most)))

    repeats = chosen.choice([0, 0, 2, 3])
    ends = tuple(chosen.randrange(1 << 10) for _ in range(PICKS))
    return Drawing(steps(3), steps(2) if repeats else (), steps(3), repeats, ends)


def drawings() -> st.SearchStrategy[Drawing]:
    """The same for hypothesis, which shrinks what fails."""
    picks = st.lists(st.integers(0, 1 << 10), min_size=PICKS, max_size=PICKS).map(tuple)
    steps = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), picks), max_size=4).map(tuple)
    return st.builds(Drawing, steps, steps, steps, st.sampled_from([0, 2, 3]), picks)


# ------------------------------------------------------------------------------------------------------------ modules


class Steps(nn.Module):
    """Modules one after the other, each of which reads some of the values so far. held: how the modules lie."""

    def __init__(self, modules: Sequence[nn.Module], reads: Sequence[Sequence[int]], held: str) -> None:
        super().__init__()
        self.reads, self.held = [tuple(each) for each in reads], held
        named = {f"{type(each).__name__.lower()}_{i}": each for i, each in enumerate(modules)}
        if held == "list":
            self.steps = nn.ModuleList(modules)
        elif held == "dicts":
            self.outer = nn.ModuleDict({"inner": nn.ModuleDict(named)})
        else:
            for name, each in named.items():
                self.add_module(name, each)
            self.names = list(named)

    def parts(self) -> Iterator[nn.Module]:
        if self.held == "list":
            return iter(self.steps)
        if self.held == "dicts":
            inner = self.outer["inner"]
            assert isinstance(inner, nn.ModuleDict)
            return iter(inner.values())
        return (getattr(self, name) for name in self.names)

    def forward(self, *values: Any) -> list[Any]:
        known = list(values)
        for part, reads in zip(self.parts(), self.reads):
            known.append(part(*(known[i] for i in reads)))
        return known


class Block(nn.Module):
    """Steps, and what brings their last value back to the shape of what came in, to which it is added."""

    def __init__(self, steps: Steps, back: nn.Module | None) -> None:
        super().__init__()
        self.inside, self.back = steps, back

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x)[-1]
        return x + (y if self.back is None else self.back(y.flatten(1)).view(x.shape))


class Model(nn.Module):
    """What a drawing stands for."""

    def __init__(self, before: Steps, layers: Sequence[nn.Module], read: int, after: Steps, head: nn.Module | None,
                 ends: Sequence[int]) -> None:  # fmt: skip
        super().__init__()
        self.before, self.after = before, after
        self.layers = nn.ModuleList(layers)
        self.head, self.read = head, read
        self.loss, self.returned = ends

    def forward(
        self, x: Tensor | None = None, image: Tensor | None = None, vector: Tensor | None = None,
        ids: Tensor | None = None, label: Tensor | None = None, target: Tensor | None = None,
    ) -> Any:  # fmt: skip
        values = self.before(x, image, vector, ids)
        if len(self.layers):
            hidden = values[self.read]
            for layer in self.layers:
                hidden = layer(hidden)
            values.append(hidden)
        values = self.after(*values)
        y = values[-1]
        score = y if self.head is None else self.head(y.flatten(1))
        loss = LOSSES[self.loss](y, score, label, target)
        return RETURNED[self.returned](loss, y, score)


LOSSES: list[Any] = [
    lambda y, score, label, target: y.square().mean(),
    lambda y, score, label, target: F.cross_entropy(score, label),
    lambda y, score, label, target: F.mse_loss(score, target),
    lambda y, score, label, target: F.cross_entropy(score, label, ignore_index=2, label_smoothing=0.1),
    lambda y, score, label, target: F.mse_loss(score, target, reduction="sum"),
    lambda y, score, label, target: F.cross_entropy(score, label) + 0.1 * y.abs().mean(),
    lambda y, score, label, target: F.binary_cross_entropy_with_logits(score, target.sigmoid()),
    lambda y, score, label, target: (F.cross_entropy(score, label, reduction="none") * target[:, 0].sigmoid()).mean(),
    lambda y, score, label, target: F.smooth_l1_loss(score, target) + 1e-3 * score.square().sum(),
    lambda y, score, label, target: (y.flatten(1).sum(1) * (label > 2)).sum() / (label > 2).sum().clamp(min=1),
    lambda y, score, label, target: F.kl_div(score.log_softmax(1), target.softmax(1), reduction="batchmean"),
    lambda y, score, label, target: F.nll_loss(F.log_softmax(score, -1), label, reduction="sum") / len(label),
    lambda y, score, label, target: (score - target).abs().max(dim=1)[0].mean() + y.mean(),
    lambda y, score, label, target: torch.stack([F.l1_loss(score, target), y.var()]).sum(),
    lambda y, score, label, target: -score.softmax(-1)[torch.arange(len(label)), label].log().mean(),
]
NEEDS = ["", "l", "t", "l", "t", "l", "t", "lt", "t", "l", "t", "l", "t", "t", "l"]
"""Of a loss: whether it reads labels or targets; with either, or without, a head."""

RETURNED: list[Any] = [
    lambda loss, y, score: loss,
    lambda loss, y, score: (loss, y),
    lambda loss, y, score: {"loss": loss, "y": y, "score": score.detach()},
    lambda loss, y, score: {"loss": loss, "aux": [y.flatten(1), (score * 2,)]},
    lambda loss, y, score: {"loss": loss, "none": None, "norm": y.flatten(1).norm(dim=1)},
]
HELD = ("attributes", "list", "dicts")


@dataclass(frozen=True, slots=True)
class Made:
    """A module and its batch."""

    model: nn.Module
    batch: Mapping[str, Tensor]


def batch() -> dict[str, Tensor]:
    """Every input that a drawn module may read."""
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(ROWS, 6, 8, generator=g),
        "image": torch.randn(ROWS, 4, 6, 6, generator=g),
        "vector": torch.randn(ROWS, 12, generator=g),
        "ids": torch.randint(0, TOKENS, (ROWS, 5), generator=g),
        "label": torch.randint(0, CLASSES, (ROWS,), generator=g),
        "target": torch.randn(ROWS, CLASSES, generator=g),
    }


def made(drawing: Drawing) -> Made | None:
    """The module of a drawing; None where there is none: no step is left, or its numbers are out of bounds."""
    torch.manual_seed(0)
    given = batch()
    picks = [*drawing.ends, *[0] * PICKS]
    tensors = [given[name] for name in INPUTS]
    modules: list[nn.Module] = []
    held = HELD[picks[0] % len(HELD)]
    with torch.no_grad():
        before = _steps(drawing.before, tensors, modules, held)
        layers: list[nn.Module] = []
        read = max((i for i, each in enumerate(tensors) if kind(each) == "float" and each.dim() > 1), default=0)
        shared = picks[1] % 5 == 1
        for _ in range(drawing.repeats):
            block = layers[0] if shared and layers else _block(drawing.block, tensors[read])
            if block is None:
                return None
            layers.append(block)
        if layers:
            tensors.append(tensors[read])
        after = _steps(drawing.after, tensors, modules, "attributes" if layers else held)
        if not before.reads and not after.reads and not layers:
            return None
        y = tensors[-1]
        if kind(y) != "float" or y.dim() < 2:
            return None
        loss = picks[2] % len(LOSSES)
        head = nn.Linear(y.flatten(1).shape[1], CLASSES)
    model = Model(before, layers, read, after, head, (loss, picks[3] % len(RETURNED)))
    used = {INPUTS[i] for steps in (before, after) for reads in steps.reads for i in reads if i < len(INPUTS)}
    used |= {INPUTS[read]} if layers and read < len(INPUTS) else set()
    used |= {name for mark, name in (("l", "label"), ("t", "target")) if mark in NEEDS[loss]}
    kept = {name: value for name, value in given.items() if name in used}
    return Made(model, kept) if _is_sound(model, kept) else None


def _steps(steps: Sequence[Step], tensors: list[Tensor], modules: list[nn.Module], held: str) -> Steps:
    """The modules of some steps; what they give is added to `tensors`."""
    found, reads = [], []
    for name, picks in steps:
        made = OPERATIONS[name](Values(tensors, list(picks), modules))
        if made is None:
            continue
        y = made.module(*(tensors[i] for i in made.reads))
        if not isinstance(y, Tensor) or y.dim() < 2 or y.shape[0] != ROWS or not 0 < y[0].numel() <= MOST_A_ROW:
            continue
        tensors.append(y)
        modules.append(made.module)
        found.append(made.module)
        reads.append(made.reads)
    return Steps(found, reads, held)


def _block(steps: Sequence[Step], x: Tensor) -> Block | None:
    tensors = [x]
    inside = _steps(steps, tensors, [], "attributes")
    y = tensors[-1]
    if not inside.reads or max(y[0].numel(), x[0].numel()) > MOST_FITTED:
        return None
    return Block(inside, None if y.shape == x.shape else nn.Linear(y[0].numel(), x[0].numel()))


def _is_sound(model: nn.Module, given: Mapping[str, Tensor]) -> bool:
    """Whether eager gives finite numbers and gradients, in the precision of the proof and with weights like its own,
    and they do not hang on rounding: weights that differ by some of it give the same (no ties, nothing that cancels).
    """
    from autopar.api.small_model import small_model

    clone, inputs = small_model(model, dict(given), torch.float64, 0)
    first = _results(clone, inputs)
    if not first or not all(each.isfinite().all() and each.abs().max() < MOST for each in first):
        return False
    with torch.no_grad():
        for number, parameter in enumerate(clone.parameters()):
            parameter.mul_(1 + 1e-14 * (1 - 2 * (number % 2)))
    total = sum(float(each.square().sum()) for each in first) ** 0.5
    pairs = zip(first, _results(clone, inputs), strict=True)
    return all((a - b).norm() <= 1e-10 * max(float(a.norm()), 1e-6 * total) for a, b in pairs)


def _results(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Outputs and gradients; nothing where there is no gradient."""
    torch.manual_seed(0)
    tensors = [each for each in tree_leaves(model(**inputs)) if isinstance(each, Tensor)]
    if not tensors[0].requires_grad:
        return []
    model.zero_grad()
    torch.stack([each.sum() for each in tensors if each.requires_grad]).sum().backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.detach() for each in tensors] + grads if grads else []
