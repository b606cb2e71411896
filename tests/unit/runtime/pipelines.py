"""A small model in stages, and pipelined programs for it as `emit` would write them, each stage on `dp` ranks.

It has a tied matrix (table on the first stage, head on the last), a value with gradient and a boolean mask that every
stage relays, seeds that change with layer and microbatch, a buffer that each microbatch changes and the next one
multiplies with, an average over the labels that count, and an output that the first stage makes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.interface import PipelineInterface, ProgramInterface, StageInterface, TensorInterface
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import parse_sharding
from autopar.runtime.microbatches import seed_of, take_rows
from autopar.strategies.pipelining.schedules import build

VOCAB, WIDTH = 12, 4


class Chain(nn.Module):
    """ids [B], labels [B] (-1: does not count) -> loss, logits [B, VOCAB], first [B, WIDTH], number."""

    seen: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor(0.5))

    def forward(self, ids: Tensor, labels: Tensor, seed: Tensor | int = 0) -> dict[str, Tensor]:
        first = hidden = self.table(ids)
        for number, block in enumerate(self.blocks):
            hidden = hidden + torch.tanh(block(hidden)) * (1 + 0.1 * ((seed + number) % 7))
        with torch.no_grad():
            before = self.seen.clone()
            self.seen.copy_(0.5 * before + hidden.mean())
        hidden = torch.where((ids > 2)[:, None], hidden * (1 + 0.1 * before), 0.0) + first
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-1)
        return {"loss": loss, "logits": logits, "first": first, "number": (labels >= 0).sum()}

    def reset_parameters(self) -> None:
        nn.init.ones_(self.unused)
        nn.init.constant_(self.seen, 0.5)


def make_chain(num_layers: int, seed: int = 0) -> Chain:
    torch.manual_seed(seed)
    return Chain(num_layers).double()


def chain_batch(rows: int, seed: int = 1) -> dict[str, Tensor]:
    """The global batch; most labels of some microbatches do not count."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCAB, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = -1
    return {"ids": torch.randint(0, VOCAB, (rows,), generator=generator), "labels": labels}


def run_chain(model: Chain, batch: dict[str, Tensor], num: int, groups: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """What a step of `num` microbatches computes, with torch's autograd: the loss of the whole batch."""
    parts = [{k: take_rows(x, 0, i, num, groups) for k, x in batch.items()} for i in range(num)]
    found, before, after = [], model.seen.clone(), []
    for i, part in enumerate(parts):
        model.seen.copy_(before)
        found.append(model(**part, seed=seed_of(seed, i, torch.device("cpu"))))
        after.append(model.seen.clone())
    model.seen.copy_(torch.stack(after).mean())
    weights = torch.stack([each["number"].double() for each in found])
    losses = [each["loss"] * w / weights.sum() for each, w in zip(found, weights, strict=True) if w]

    def joined(name: str) -> Tensor:
        split = [each[name].unflatten(0, (groups, -1)) for each in found]
        return torch.stack(split, 1).flatten(0, 2)

    whole = {"loss": torch.stack(losses).sum(), "number": sum(each["number"] for each in found)}
    return whole | {"logits": joined("logits"), "first": joined("first")}


def schedule_of(name: str, num_ranks: int, num: int) -> Schedule:
    return build(name, num_ranks, num)


def chain_interface(
    schedule: Schedule, rows: int, dp: int = 1, zero: bool = False, axes: tuple[str, ...] = ("pp", "dp")
) -> ProgramInterface:
    """rows: of the whole batch. The model has one layer per stage and one more, on the first stage."""
    num, stages = schedule.num_microbatches, schedule.num_stages
    split, whole = parse_sharding("dp=S(0)", ("dp",)), parse_sharding("", ("dp",))
    stored = split if zero else whole

    def tensor(name: str, shape: tuple[int, ...], sharding: Any = whole, **options: Any) -> TensorInterface:
        return TensorInterface(name, shape, options.pop("dtype", "float64"), sharding, **options)

    rows //= num
    table = tensor("table.weight", (VOCAB, WIDTH), stored, differentiable=True, aliases=("head.weight",))
    layers = [tensor("unused", (3,)), table]
    for number in range(stages + 1):
        layers.append(tensor(f"blocks.{number}.weight", (WIDTH, WIDTH), stored, differentiable=True))
        layers.append(tensor(f"blocks.{number}.bias", (WIDTH,), stored, differentiable=True))
    hidden = tensor("hidden", (rows, WIDTH), split, differentiable=True)
    between = (hidden, tensor("first", (rows, WIDTH), split, differentiable=True))
    between = (*between, tensor("mask", (rows,), split, dtype="bool"))
    inputs = tuple(tensor(name, (rows,), split, dtype="int64", batch_dim=0) for name in ("ids", "labels"))
    outputs = (
        tensor("loss", (), differentiable=True, combine="weighted"),
        tensor("logits", (rows, VOCAB), split, differentiable=True, batch_dim=0, combine="concat"),
        tensor("first", (rows, WIDTH), split, batch_dim=0, combine="concat"),
        tensor("number", (), dtype="int64", combine="sum"),
    )
    seen = tensor("seen", (), combine="mean")
    own = [tuple(f"blocks.{n}.{kind}" for n in _blocks(k) for kind in ("weight", "bias")) for k in range(stages)]
    parts = tuple(
        StageInterface(
            receives=between if k else (),
            sends=between if k < stages - 1 else (),
            outputs=(2,) if k == 0 else (0, 1, 3) if k == stages - 1 else (),
            updates=("seen",) if k == stages - 1 else (),
            parameters=(*own[k], *({0: ("table.weight",), stages - 1: ("head.weight",)}.get(k, ()))),
            buffers=("seen",) if k == stages - 1 else (),
        )
        for k in range(stages)
    )
    sizes = tuple({"pp": schedule.num_ranks, "dp": dp}[axis] for axis in axes)
    order = tuple(tuple(map(str, row)) for row in schedule.order)
    pipeline = PipelineInterface("pp", axes, sizes, schedule.name, order, schedule.rank_of, parts)
    return ProgramInterface(("dp",), (dp,), tuple(layers), (seen,), inputs, outputs, True, num, (seen,), pipeline)


def _blocks(stage: int) -> range:
    return range(2) if stage == 0 else range(stage + 1, stage + 2)


def chain_source(stages: int, rows: int, num: int, zero: bool = False) -> str:
    """The text of the generated program."""
    kinds = ["first", *(["middle"] * (stages - 2)), "last"]
    table = ", ".join(f'("{kind}", {{"blocks": {_blocks(k)}}})' for k, kind in enumerate(kinds))
    text = _TEXT.replace("@STAGES", table).replace("@ROWS", str(rows // num))
    gather = 'p.bucket("all_gather dp", {name: (state[name], 0) for name in names}, keep=1)'
    put = "held.update({name: state[name] for name in names})"
    scatter = 'r.bucket("reduce_scatter dp", {name: (g, 0) for name, g in sums.items()})'
    reduce = 'r.bucket("all_reduce dp", dict(sums))'
    return text.replace("@GATHER", gather if zero else put).replace("@REDUCE", scatter if zero else reduce)


_TEXT = """import torch

STAGES = (@STAGES,)


def split_inputs(comm, inputs):
    return {name: comm.slice(x, "dp", 0) for name, x in inputs.items()}


def loss_weight(inputs):
    return (inputs["labels"] >= 0).sum()


def unshard(comm, state, held, names):
    comm.at("unshard")
    p = comm.transfers(held)
    @GATHER
    return [p]


def reduce(comm, sums):
    comm.at("reduce")
    r = comm.transfers()
    @REDUCE
    found = dict(r.wait())
    sums.clear()
    return found


def names_of(blocks, *more):
    return [f"blocks.{i}.{kind}" for i in blocks for kind in ("weight", "bias")] + list(more)


def layers_forward(p, blocks, hidden, seed):
    saved = []
    for i in blocks:
        t = torch.tanh(hidden @ p[f"blocks.{i}.weight"].t() + p[f"blocks.{i}.bias"])
        factor = 1 + 0.1 * ((seed + i) % 7)
        saved.append((hidden, t, factor))
        hidden = hidden + t * factor
    return hidden, saved


def layers_backward_input(p, blocks, saved, d_hidden):
    kept = []
    for i in reversed(blocks):
        hidden, t, factor = saved.pop()
        d_a = d_hidden * factor * (1 - t * t)
        kept.append((d_a, hidden))
        d_hidden = d_hidden + d_a @ p[f"blocks.{i}.weight"]
    return d_hidden, kept


def layers_backward_weight(comm, blocks, kept, sums):
    for i in reversed(blocks):
        d_a, hidden = kept.pop(0)
        comm.accumulate(sums, {f"blocks.{i}.weight": d_a.t() @ hidden, f"blocks.{i}.bias": d_a.sum(0)}, "")


def first_unshard(comm, state, held, *, blocks):
    return unshard(comm, state, held, names_of(blocks, "table.weight"))


def first_forward(comm, state, held, inputs, received, seed, *, blocks):
    ids = inputs["ids"]
    first = held["table.weight"][ids]
    hidden, saved = layers_forward(held, blocks, first, seed)
    return (hidden, first, ids > 2), {2: first}, {}, [saved, ids]


def first_backward_input(comm, state, held, saved, grads, roots, *, blocks):
    d_hidden, d_first = grads
    layers, ids = saved
    d_hidden, kept = layers_backward_input(held, blocks, layers, d_hidden)
    return (), [kept, ids, d_hidden + d_first]


def first_backward_weight(comm, state, held, kept, sums, *, blocks):
    layers, ids, d_first = kept
    layers_backward_weight(comm, blocks, layers, sums)
    chosen = torch.arange(len(held["table.weight"]), device=comm.device).unsqueeze(1) == ids
    d_table = chosen.to(d_first.dtype) @ d_first
    comm.accumulate(sums, {"table.weight": d_table}, "")


def first_backward(comm, state, held, saved, grads, roots, sums, *, blocks):
    found, kept = first_backward_input(comm, state, held, saved, grads, roots, blocks=blocks)
    first_backward_weight(comm, state, held, kept, sums, blocks=blocks)
    return found


def first_reduce(comm, sums, *, blocks):
    return reduce(comm, sums)


def middle_unshard(comm, state, held, *, blocks):
    return unshard(comm, state, held, names_of(blocks))


def middle_forward(comm, state, held, inputs, received, seed, *, blocks):
    hidden, first, mask = received
    hidden, saved = layers_forward(held, blocks, hidden, seed)
    return (hidden, first, mask), {}, {}, [saved]


def middle_backward_input(comm, state, held, saved, grads, roots, *, blocks):
    d_hidden, d_first = grads
    d_hidden, kept = layers_backward_input(held, blocks, saved.pop(), d_hidden)
    return (d_hidden, d_first), [kept]


def middle_backward_weight(comm, state, held, kept, sums, *, blocks):
    layers_backward_weight(comm, blocks, kept.pop(), sums)


def middle_backward(comm, state, held, saved, grads, roots, sums, *, blocks):
    found, kept = middle_backward_input(comm, state, held, saved, grads, roots, blocks=blocks)
    middle_backward_weight(comm, state, held, kept, sums, blocks=blocks)
    return found


def middle_reduce(comm, sums, *, blocks):
    return reduce(comm, sums)


def last_unshard(comm, state, held, *, blocks):
    return unshard(comm, state, held, names_of(blocks, "head.weight"))


def last_forward(comm, state, held, inputs, received, seed, *, blocks):
    comm.at("last forward")
    hidden, first, mask = received
    hidden, layers = layers_forward(held, blocks, hidden, seed)
    seen = 0.5 * state["seen"] + comm.all_reduce(hidden.sum(), "dp") / (@ROWS * hidden.shape[1])
    out = torch.where(mask[:, None], hidden * (1 + 0.1 * state["seen"]), 0.0) + first
    logits = out @ held["head.weight"].t()
    label = inputs["labels"]
    counts = label >= 0
    number = comm.all_reduce(counts.sum(), "dp")
    logp = torch.log_softmax(logits, -1)
    picked = torch.where(counts, logp.gather(1, label.clamp(min=0)[:, None])[:, 0], 0.0)
    loss = comm.all_reduce(-picked.sum(), "dp") / number
    saved = [layers, out, mask, logp, label, counts, number]
    return (), {0: loss, 1: logits, 3: number}, {"seen": seen}, saved


def last_backward_input(comm, state, held, saved, grads, roots, *, blocks):
    layers, out, mask, logp, label, counts, number = saved
    d_logits = roots[1]
    if roots[0] is not None:
        one_hot = torch.nn.functional.one_hot(label.clamp(min=0), logp.shape[1])
        d_logits = d_logits + (logp.exp() - one_hot) * (counts.double() / number * roots[0])[:, None]
    d_out = d_logits @ held["head.weight"]
    d_hidden = torch.where(mask[:, None], d_out * (1 + 0.1 * state["seen"]), 0.0)
    d_hidden, kept = layers_backward_input(held, blocks, layers, d_hidden)
    return (d_hidden, d_out), [kept, d_logits, out]


def last_backward_weight(comm, state, held, kept, sums, *, blocks):
    layers, d_logits, out = kept
    layers_backward_weight(comm, blocks, layers, sums)
    comm.accumulate(sums, {"head.weight": d_logits.t() @ out}, "")


def last_backward(comm, state, held, saved, grads, roots, sums, *, blocks):
    found, kept = last_backward_input(comm, state, held, saved, grads, roots, blocks=blocks)
    last_backward_weight(comm, state, held, kept, sums, blocks=blocks)
    return found


def last_reduce(comm, sums, *, blocks):
    return reduce(comm, sums)
"""
