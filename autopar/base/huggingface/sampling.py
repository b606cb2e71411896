"""The next token of one request, as `generate()` of it alone would choose it: the model's rules for tokens, temperature
and what goes with it, and draws of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.errors import AutoparError


class Chooser:
    """Of one request. has_rules: whether it is anything else than the token with the largest logit.

    options: of `generate()` that are said (`do_sample`, `temperature`, `top_k`, `top_p`); others are the model's, as
    its generation configuration says. seed: of the draws, as `torch.manual_seed` before `generate()`.
    """

    def __init__(
        self, model: Any, prompt: Sequence[int], new_tokens: int, options: Mapping[str, Any], seed: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        from transformers.generation.logits_process import LogitsProcessorList

        try:
            config, _ = model._prepare_generation_config(None, **options)
            config.max_length = len(prompt) + new_tokens
            model._prepare_special_tokens(config, device=device)
            self._rules = model._get_logits_processor(
                generation_config=config, input_ids_seq_length=len(prompt), device=device, model_kwargs={},
                encoder_input_ids=torch.tensor([prompt], device=device), logits_processor=LogitsProcessorList(),
            )  # fmt: skip
        except ValueError as error:
            raise AutoparError(
                f"a request cannot be answered so: {error}", values=", ".join(f"{n}={x}" for n, x in options.items())
            ) from error
        self._prompt, self._draws = tuple(prompt), bool(config.do_sample)
        self._generator = torch.Generator(device).manual_seed(seed) if self._draws else None
        self.has_rules = self._draws or len(self._rules) > 0

    def choose(self, logits_V: Tensor, tokens: Sequence[int]) -> int:
        """The token that follows the prompt and what came of it so far; of logits as the model gives them."""
        logits = logits_V[None].to(torch.float32)
        scores = self._rules(torch.tensor([[*self._prompt, *tokens]], device=logits.device), logits)
        if not self._draws:
            return int(scores.argmax(-1))
        return int(torch.multinomial(F.softmax(scores, dim=-1), num_samples=1, generator=self._generator))
