"""Times of the tokens of `generate()`, contender by contender in turn."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import autopar
from autopar.base.torch_compat.distributed import local_tensor
from autopar.cli.models import catalogue
from benchmarks.serving.contenders import BUILT, Generate
from benchmarks.training.ranks import device_type, progress, synchronize


@dataclass(frozen=True, slots=True)
class Size:
    """Of a Llama, and of its prompts (rows, tokens)."""

    text: str
    prompt: tuple[int, int]
    overrides: Mapping[str, object]
    dtype: torch.dtype = torch.float32


SIZES = {
    "tiny": Size(
        "a Llama of 2 layers, 64 wide, float32; a prompt of 1 × 16", (1, 16),
        {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "small": Size(
        "a Llama of 8 layers, 512 wide, float32; prompts of 4 × 128", (4, 128),
        {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    ),
    "1b": Size(
        "a Llama of 1.2 billion parameters, bfloat16; prompts of 4 × 512", (4, 512),
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256},
        torch.bfloat16,
    ),
}  # fmt: skip


@dataclass(slots=True)
class Clock:
    """A criterion to stop that stops nothing and notes when each token was there."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        synchronize()
        self.walls.append(time.perf_counter())
        self.cpus.append(time.process_time())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generated(generate: Generate, prompt: Tensor, new_tokens: int) -> tuple[Tensor, list[float], list[float]]:
    """Tokens; seconds and CPU seconds: to the first token, then each one's."""
    from transformers import StoppingCriteriaList

    clock = Clock()
    synchronize()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    criteria: Any = StoppingCriteriaList([clock])
    found = generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        eos_token_id=None, stopping_criteria=criteria,
    )  # fmt: skip
    taken, own = ([b - a for a, b in zip([at, *times], times, strict=False)]
                  for at, times in ((begun, clock.walls), (begun_cpu, clock.cpus)))  # fmt: skip
    return found, taken, own


def _share_memory(model: Any, base: Any) -> None:
    """Have its weights in the memory of another's, where this rank has all of them: in which pages weights lie decides
    a fifth of a token's time on a CPU, and would be another matter for each contender.
    """
    weights = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        own = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
        if own.shape == weights[name].shape:
            own.data = weights[name].data


def measure(size: str, names: Sequence[str], new_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row a contender, on this rank: seconds of each round. same: the share of tokens that are those of the first."""
    chosen = SIZES[size]
    loaded = catalogue.load(
        "llama", batch=chosen.prompt, device="cpu", dropout=0.0, dtype=chosen.dtype, overrides=dict(chosen.overrides)
    )
    base: Any = loaded.model.eval().to(device_type())
    prompt = loaded.batch["input_ids"].to(device_type())
    wanted = autopar.Generation(batch=chosen.prompt[0], prompt=chosen.prompt[1], new_tokens=new_tokens)
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Generate] = {}
    first: Tensor | None = None
    for name in names:
        begun = time.perf_counter()
        try:
            model = copy.deepcopy(base)
            ready[name] = BUILT[name].make(model, wanted)
            _share_memory(model, base)
            generated(ready[name], prompt, new_tokens)
            found, *_ = generated(ready[name], prompt, new_tokens)
        except Exception as error:
            rows[name] = {"name": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]}
            ready.pop(name, None)
            continue
        first = found if first is None else first
        same = float((found == first)[:, prompt.shape[1] :].float().mean())
        rows[name] = {"name": name, "same": same, "first_s": [], "token_s": [], "token_cpu_s": []}
        progress(f"  {name}: ready after {time.perf_counter() - begun:.1f} s, {same:.0%} of tokens the same")
    order = list(ready)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            _, taken, cpu = generated(ready[name], prompt, new_tokens)
            rows[name]["first_s"].append(taken[0])
            rows[name]["token_s"].append(statistics.median(taken[1:]))
            rows[name]["token_cpu_s"].append(statistics.median(cpu[1:]))
    return [rows[name] for name in names]
