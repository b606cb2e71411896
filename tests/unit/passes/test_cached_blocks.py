"""Blocks that keep something in a cache are traced once where each keeps it in a layer of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.generation import phase_inputs
from autopar.base.watched import Watched, is_watched
from tests.unit.passes.repeated import texts

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
WANTED = autopar.Generation(batch=2, prompt=5, new_tokens=3)


def _model(name: str, layers: int) -> nn.Module:
    import transformers

    sizes = {**SIZES, "num_hidden_layers": layers}
    if name == "gemma2":  # windows and whole attention in turn
        made: Any = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=8))
    elif name == "mamba":
        made = transformers.MambaForCausalLM(
            transformers.MambaConfig(hidden_size=32, vocab_size=64, num_hidden_layers=layers, state_size=4)
        )
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return made.eval()


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("name", "layers", "repeated"), [("llama", 5, 4), ("gemma2", 8, 6), ("mamba", 4, 3)])
def test_programs_are_those_of_whole_traces(
    name: str, layers: int, repeated: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of another layer, or one that is returned in the place of another, would be another program."""
    model = _model(name, layers)
    once, whole, found = texts(model, phase_inputs(model, WANTED)[phase], monkeypatch)
    assert once == whole
    assert found == repeated


class _Block(nn.Module):
    """Writes what a linear layer makes into its layer of a cache."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, past_key_values: Any) -> Tensor:
        new = self.linear(x)[:, None]
        keys, _ = past_key_values.update(new, new, self.number)
        return self.more(x + keys.sum(dim=(1, 2), keepdim=False)[:, None], past_key_values)

    def more(self, x: Tensor, cache: Any) -> Tensor:
        return x


class _Scaled(_Block):
    def more(self, x: Tensor, cache: Any) -> Tensor:
        return x * (1 + self.number)


class _Picked(_Block):
    def more(self, x: Tensor, cache: Any) -> Tensor:
        return x + [1.0, 3.0, 5.0, 7.0][self.number]


class _Counting(_Block):
    def more(self, x: Tensor, cache: Any) -> Tensor:
        return x + len(cache)


class _OfTheFirst(_Block):
    def more(self, x: Tensor, cache: Any) -> Tensor:
        return x + cache.get_seq_length()


class _OfTheNext(_Block):
    def more(self, x: Tensor, cache: Any) -> Tensor:
        return x + cache.layers[min(self.number + 1, 3)].keys.sum()


class _Stack(nn.Module):
    def __init__(self, kind: type[_Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(number) for number in range(4)])

    def forward(self, x: Tensor, past_key_values: Any) -> Any:
        for block in self.blocks:
            x = block(x, past_key_values=past_key_values)
        return x, past_key_values


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("kind", "repeated"),
    [(_Block, 3), (_Scaled, 0), (_Picked, 0), (_Counting, 0), (_OfTheFirst, 0), (_OfTheNext, 0)],
)
def test_a_block_that_does_more_with_its_number_is_traced_itself(
    kind: type[_Block], repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a block computes with its number, or asks a cache for what is not its own, is to be seen."""
    from autopar.base.huggingface.layout import Layout
    from autopar.base.huggingface.states import StateCache

    states = [each for _ in range(4) for each in (torch.zeros(2, 1, 6, 4), torch.zeros(2, 1, 6, 4), torch.tensor(1))]
    cache = StateCache([Layout("attention")] * 4, states)
    batch = {"x": torch.ones(2, 1, 4), "past_key_values": cache}
    once, whole, found = texts(_Stack(kind), batch, monkeypatch)
    assert once == whole
    assert found == repeated


def test_a_watched_number_is_a_number_that_tells() -> None:
    """Whatever is made of it without a word would make one block stand for another that differs."""
    looks: list[int] = []
    number: Any = Watched(3, ("", "number"), lambda: looks.append(1))
    assert is_watched(number)
    assert isinstance(number, int)
    assert not looks
    uses: list[Any] = [
        lambda: number + 1 == 4, lambda: 1 + number == 4, lambda: [0, 1, 2, 7][number] == 7, lambda: number == 3,
        lambda: {3: True}[number], lambda: f"{number}" == "3", lambda: str(number) == "3", lambda: bool(number),
        lambda: number % 2 == 1, lambda: list(range(number)) == [0, 1, 2], lambda: int(number) == 3,
        lambda: number > 2, lambda: number in {3}, lambda: number in [3], lambda: f"{number:02d}" == "03",
        lambda: -number == -3, lambda: number.bit_length() == 2, lambda: number.real == 3,
        lambda: torch.ones(4).narrow(0, 0, int(number)).numel() == 3,
    ]  # fmt: skip
    for count, use in enumerate(uses, start=1):
        before = len(looks)
        assert use(), count
        assert len(looks) > before, count
