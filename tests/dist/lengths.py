"""Work for test_lengths: training over batches that are padded to a few lengths, beside one process that is not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import varying
from tests.dist.script import said

LENGTHS = [16, 32]


def _t5() -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=varying.VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config).double()


def _model(name: str) -> nn.Module:
    return _t5() if name == "t5" else varying.model_of(name, 2)


def batch_of(name: str, length: int, rows: int = 4, masked: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, varying.VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length // 2 + 1 :] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    if name == "t5":
        batch["labels"] = batch["labels"][:, : length // 2 + 2].contiguous()
    return {**batch, "attention_mask": mask} if masked and name != "gpt2" else batch


def _number(x: Any) -> float:
    return float(x.detach())


def _steps(model: Any, name: str, lengths: list[int], masked: bool) -> list[float]:
    """Five steps and more: losses, a term on the outputs beside the last, evaluations, sums of parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[float] = []
    for number, length in enumerate(lengths):
        batch = batch_of(name, length, 3 if number == 3 else 4, masked)
        out = model(**batch)
        loss = out.loss + (0.1 * out.logits[:, -1].pow(2).mean() if number == len(lengths) - 1 else 0)
        loss.backward()
        found += [_number(loss), *map(float, out.logits.shape), _number(out.logits.detach().abs().sum())]
        found.append(_number(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 1 and name != "t5":
            model.eval()
            with torch.no_grad():
                logits = model(**{key: x for key, x in batch.items() if key != "labels"}).logits
                found += [*map(float, logits.shape), float((logits.argmax(-1) == batch["input_ids"]).sum())]
            model.train()
    for p in model.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found.append(_number(whole.detach().abs().sum()))
    return found


def loop(name: str, axis: str, strategy: Any, masked: bool, lengths: list[int]) -> dict[str, Any]:
    plain = _model(name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    with said() as texts:
        model: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy=strategy, lengths=LENGTHS)
        ours = _steps(model, name, lengths, masked)
    programs = len(model.autopar._programs)
    return {"ours": ours, "eager": _steps(plain, name, lengths, masked), "said": texts, "programs": programs}


def in_turn(axis: str, strategy: Any, lengths: list[int]) -> dict[str, Any]:
    """With microbatches, or a pipeline: losses and sums of parameters that a rank has."""
    plain = _model("gpt2")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy=strategy, lengths=LENGTHS, microbatches=2)
    pairs = []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for length in lengths:
        batch = batch_of("gpt2", length)
        ours, theirs = model.train_step(**batch).loss, plain(**batch).loss
        theirs.backward()
        pairs.append((None if ours is None else _number(ours), _number(theirs)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = dict(plain.named_parameters())
    sums = [
        (_number(p.full_tensor().abs().sum()), _number(own[name].abs().sum()))
        for name, p in model.named_parameters() if name in own and p.numel()
    ]  # fmt: skip
    return {"pairs": pairs, "sums": sums, "programs": len(model.autopar._programs)}


class Own(nn.Module):
    """Of nobody's library: its loss is a function of the script's, its outputs a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.cell(self.table(tokens))[0])
        return found


def with_loss_and_more() -> dict[str, Any]:
    """A loss that is planned with the model; a copy; shapes that were planned ahead; rows by a loader."""
    torch.manual_seed(0)
    plain: Any = Own().double()

    def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["wanted"].flatten())

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    example = {"tokens": torch.arange(40).reshape(4, 10), "wanted": torch.arange(40).reshape(4, 10)}
    model: Any = autopar.compile(
        copy.deepcopy(plain), mesh, strategy="zero3", example_inputs=example, loss=loss, lengths=LENGTHS
    )
    model.plan_ahead(*({key: torch.empty(4, n, dtype=torch.int64, device="meta") for key in example} for n in (20, 9)))
    planned = len(model.autopar._programs)
    other = copy.deepcopy(model)
    pairs = []
    for n in (9, 13, 16, 29, 20):
        tokens = torch.randint(0, 50, (4, n), generator=torch.Generator().manual_seed(n))
        scores = plain(tokens)
        for each in (model, other):
            out = each(tokens, wanted=tokens)
            pairs.append((_number(out.loss), _number(loss(scores, {"wanted": tokens}))))
            assert tuple(out.output.shape) == (4, n, 50)
        with torch.no_grad():
            pairs.append((_number(model(tokens).sum()), _number(scores.sum())))
    rows = [{"tokens": torch.full((11,), i), "wanted": torch.full((11,), i)} for i in range(8)]
    for batch in model.shard_loader(torch.utils.data.DataLoader(rows, 4)):  # type: ignore[arg-type]
        tokens = batch["tokens"].full_tensor()
        pairs.append((_number(model(**batch).loss), _number(loss(plain(tokens), {"wanted": tokens}))))
    return {"pairs": pairs, "planned": planned, "programs": len(model.autopar._programs)}


class LossAlone(Own):
    """Gives its loss, and nothing that is as long as the batch."""

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), wanted.flatten())


def of_a_loss_alone(lengths: list[int]) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    plain = LossAlone().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(copy.deepcopy(plain), mesh, strategy="ddp", lengths=LENGTHS)
    pairs, state = [], torch.get_rng_state()
    for n in lengths:
        tokens = torch.randint(0, 50, (4, n), generator=torch.Generator().manual_seed(n))
        pairs.append((_number(model(tokens, tokens)), _number(plain(tokens, tokens))))
    assert len(model.autopar._programs) == 1, "all are padded to one length"
    assert torch.equal(torch.get_rng_state(), state), "what a script draws next is what it was, on every rank"
    return pairs
