"""Work for test_packed: documents that lie behind one another in a row, beside the same documents each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, DataCollatorWithFlattening, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import autopar
from tests.dist.loss_terms import whole
from tests.dist.varying import count_solved

Losses = list[tuple[float, dict[str, Tensor]]]
VOCABULARY = 61
BATCHES = ([[5, 7, 4]], [[6, 10]], [[3, 3, 4, 6]])
"""Per batch its rows, as lengths of documents."""
PLAIN = ("input_ids", "labels", "position_ids")


def model(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, attn_implementation=attention,
        )
    ).double()  # fmt: skip


def documents(rows: list[list[int]]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(sum(map(len, rows)) + rows[0][0])
    return [[torch.randint(0, VOCABULARY, (length,), generator=generator) for length in row] for row in rows]


def packed(rows: list[list[Tensor]], with_limits: bool) -> dict[str, Any]:
    """As transformers' collator packs them; of several rows, what all have."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=with_limits)
    found = [collate([{"input_ids": each.tolist()} for each in row]) for row in rows]
    if len(rows) == 1:
        return dict(found[0])
    return {name: torch.cat([each[name] for each in found]) for name in PLAIN}


def losses_of(forward: Any, own: Any, batches: Any) -> Losses:
    """Losses and gradients, and steps between."""
    optimizer, found = torch.optim.SGD(own.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        loss = forward(batch)
        loss.backward()
        gradients = {name: whole(p.grad).clone() for name, p in own.named_parameters()}
        found.append((float(loss.detach()), gradients))
        optimizer.step()
    return found


def separate(batches: Any = BATCHES) -> Losses:
    """Each document in a forward of its own."""
    own = model()

    def forward(rows: list[list[Tensor]]) -> Tensor:
        every = [document[None] for row in rows for document in row]
        counted = [document.shape[1] - 1 for document in every]
        terms = [own(input_ids=x, labels=x).loss * num for x, num in zip(every, counted, strict=True)]
        return torch.stack(terms).sum() / sum(counted)

    return losses_of(forward, own, [documents(rows) for rows in batches])


def together(
    axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, batches: Any = BATCHES, attention: str = "sdpa"
) -> tuple[Losses, int]:
    """Packed, on this mesh; how many programs were planned."""
    own = model("sdpa" if attention.startswith("flash") else attention)
    own.config._attn_implementation_internal = attention
    planned = count_solved()
    compiled: Any = autopar.compile(own, init_device_mesh("cpu", sizes, mesh_dim_names=axes), strategy=strategy)
    given = [packed(documents(rows), with_limits=len(rows) == 1) for rows in batches]
    return losses_of(lambda batch: compiled(**batch).loss, compiled, given), planned[0]


def by_limits(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """A user's attention that is told where documents begin, as flash attention is."""
    starts, places = options["cu_seq_lens_q"], torch.arange(query.shape[2])
    number = torch.searchsorted(starts, places, right=True)
    shown = (number[:, None] == number[None, :]) & (places[None, :] <= places[:, None])
    return sdpa_attention_forward(module, query, key, value, shown[None, None], **options)


def with_limits_of_the_users(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any) -> tuple[Losses, str]:
    """A model whose attention reads where documents begin, and what the plan says of it."""
    AttentionInterface.register("by_limits", by_limits)
    ALL_MASK_ATTENTION_FUNCTIONS.register("by_limits", lambda *args, **kwargs: None)
    own = model("by_limits")
    compiled: Any = autopar.compile(own, init_device_mesh("cpu", sizes, mesh_dim_names=axes), strategy=strategy)
    given = [packed(documents(rows), with_limits=True) for rows in BATCHES]
    found = losses_of(lambda batch: compiled(**batch).loss, compiled, given)
    return found, str(compiled.plan)
