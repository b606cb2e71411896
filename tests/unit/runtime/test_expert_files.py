"""Files of experts, one by one and stacked: a rank reads the experts, and of them the rows, that it holds, no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from autopar.runtime.checkpoint.boxes import Box, whole_of
from autopar.runtime.checkpoint.convert import convert
from autopar.runtime.checkpoint.formats import Weight, as_held, weights_of

pytestmark = pytest.mark.unit
EXPERTS, RANKS = 8, 4


class Counted:
    """Bytes that are read of files."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.names: set[str] = set()

    def of(self, name: str, weight: Weight) -> Weight:
        def read(box: Box) -> Tensor:
            found = weight.read(box)
            self.num_bytes += found.nbytes
            self.names.add(name)
            return found

        return replace(weight, read=read)


@pytest.mark.parametrize("form", ["single", "stacked"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_rank_reads_its_experts_alone(form: str, parts: int, tmp_path: Path) -> None:
    """Breaks if a rank of experts reads others' to get its own, or all of their rows where a second axis splits them.

    parts: into how many the experts' widths are split, too.
    """
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=EXPERTS,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "single")
    if form == "stacked":
        convert(tmp_path / "single", tmp_path / "stacked", experts="stacked")
    held = {name: value for name, value in model.state_dict().items() if ".experts." in name}
    assert held and all(len(value) == EXPERTS for value in held.values())
    for rank in range(RANKS):
        counted = Counted()
        with weights_of(tmp_path / form) as found:
            weights = as_held({name: counted.of(name, each) for name, each in found.weights.items()}, "mixtral")
            wanted = 0
            for name, value in held.items():
                first, rows = rank * EXPERTS // RANKS, value.shape[1] // parts
                box = Box((first, 0, 0), (EXPERTS // RANKS, rows, value.shape[2]))
                own = value[first : first + EXPERTS // RANKS, :rows]
                assert torch.equal(weights[name].read(box), own)
                wanted += own.nbytes
        assert counted.num_bytes == wanted
        if form == "single":
            numbers = {int(each.split(".experts.")[1].split(".")[0]) for each in counted.names}
            assert numbers == {rank * EXPERTS // RANKS, rank * EXPERTS // RANKS + 1}


def test_all_experts_are_all_bytes(tmp_path: Path) -> None:
    """Breaks if a whole stack is read twice, or a count misses what is read."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=EXPERTS,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    counted = Counted()
    with weights_of(tmp_path) as found:
        for weight in as_held({n: counted.of(n, each) for n, each in found.weights.items()}, "mixtral").values():
            weight.read(whole_of(weight.shape))
    assert counted.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) - _heads(tmp_path)


def _heads(path: Path) -> int:
    """Bytes of what safetensors files say of their tensors."""
    return sum(8 + int.from_bytes(each.read_bytes()[:8], "little") for each in path.glob("*.safetensors"))
