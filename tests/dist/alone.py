"""Work for test_alone: modules of a compiled model that a script calls by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import meeting
from tests.dist import script, training

Found = list[tuple[float, dict[str, Tensor]]]


def _norm(model: Any, batch: dict[str, Any]) -> Tensor:
    """A contrastive loss on hidden states, as sentence encoders are trained with."""
    hidden = model.model(batch["input_ids"]).last_hidden_state.mean(1)
    found: Tensor = (hidden @ hidden.mT).logsumexp(1).mean() - hidden.square().sum(1).mean()
    return found


def _of_parts(model: Any, batch: dict[str, Any]) -> Tensor:
    """The body, then the head on some of its rows; and what is embedded."""
    hidden = model.base_model(input_ids=batch["input_ids"])[0]
    embedded = model.get_input_embeddings()(batch["labels"])
    found: Tensor = model.lm_head(hidden[:, -1]).square().mean() + model.model.layers[1].mlp(embedded).sum()
    return found


def _beside(model: Any, batch: dict[str, Any]) -> Tensor:
    """Beside the model's own forward, and with what that gives."""
    outputs = model(**batch, output_hidden_states=True)
    found: Tensor = outputs.loss + model.get_output_embeddings()(outputs.hidden_states[1]).square().mean()
    return found


LOSSES: Sequence[Callable[[Any, dict[str, Any]], Tensor]] = (_norm, _of_parts, _beside, _norm)


def steps(
    model: Any, batch: dict[str, Any], losses: Sequence[Callable[[Any, dict[str, Any]], Tensor]] = LOSSES
) -> Found:
    """Losses and gradients, a step each; the last under `no_grad` beside."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: Found = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        gradients = {name: script.whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss.detach()), gradients))
        optimizer.step()
    with torch.no_grad():
        found.append((float(model.model(batch["input_ids"])[0].sum()), {}))
    return found


def compiled(strategy: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Found, list[str], float, list[str]]:
    """What `steps` finds, what is said meanwhile, the same loss of a copy, and which parameters are not in pieces."""
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    planned: Any = autopar.compile(model, mesh, strategy=strategy, example_inputs=batch)
    with script.said() as texts:
        found = steps(planned, batch)
    other = copy.deepcopy(planned)
    with torch.no_grad():
        again = float(other.model(batch["input_ids"])[0].sum())
    plain = [name for name, p in planned.named_parameters() if not hasattr(p, "placements")]
    return found, [text for text in texts if "called by itself" in text or "does not run" in text], again, plain


def refused() -> list[str]:
    """What is said of a rank that comes alone, and of other inputs on each."""
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    planned: Any = autopar.compile(model, mesh, strategy="zero3", example_inputs=batch)
    rank = dist.get_rank()
    texts = [training.message(lambda: planned.model(batch["input_ids"] + rank))]
    meeting.PATIENCE_S = 1.0
    texts.append("" if rank else training.message(lambda: planned.lm_head(torch.ones(2, 32).double())))
    meeting.PATIENCE_S = 120.0
    return texts


def over_stages() -> tuple[Found, list[bool]]:
    """What `steps` finds of losses on modules alone, over two stages; of each parameter of the model whether this rank
    holds it in the end.
    """
    model, batch = training.model_and_batch("llama", torch.float64, 0.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    planned: Any = autopar.compile(model, mesh, strategy="pipeline(1f1b)", example_inputs=batch)
    found = steps(planned, batch, LOSSES[:2])
    assert planned.resize_token_embeddings(model.config.vocab_size) is planned.model.embed_tokens
    weights: list[Any] = [each.weight for each in (planned.model.embed_tokens, planned.lm_head)]
    eager: Any = training.model_and_batch("llama", torch.float64, 0.0)[0]
    size = tuple(eager.lm_head.weight.shape)
    for each in weights:  # of those of other stages, too
        assert (tuple(each.shape), each.dtype, each.device.type) == (size, torch.float64, "cpu")
    assert "Embedding" in repr(planned)
    assert copy.deepcopy(planned).lm_head.weight.shape == size
    return found, [hasattr(each, "placements") for each in weights]
