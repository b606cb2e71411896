from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import REPLICATE, Shard, Sharding, is_valid
from autopar.runtime.module import take_over
from tests.dist.launch import launch
from tests.dist.runtime.work import full, make_mesh

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 127}


def interface_of(model: nn.Module, sizes: dict[str, int]) -> ProgramInterface:
    """Parameters cut wherever they divide; no inputs or outputs."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parameters = []
    for same in names.values():
        shape = tuple(model.get_parameter(same[0]).shape)
        sharding: Sharding = (Shard(0), Shard(1) if len(shape) > 1 else REPLICATE)
        if not is_valid(shape, sharding, tuple(sizes.values())):
            sharding = (REPLICATE, REPLICATE)
        parameters.append(TensorInterface(same[0], shape, "float32", sharding, True, tuple(same[1:])))
    return ProgramInterface(tuple(sizes), tuple(sizes.values()), tuple(parameters), (), (), ())


def initialized(sizes: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    import transformers

    found = {}
    for name in ("GPT2", "Llama"):
        model_class: Any = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
        with torch.device("meta"):
            model = model_class(getattr(transformers, f"{name}Config")(bos_token_id=0, eos_token_id=0, **SIZES))
        interface = interface_of(model, sizes)
        compiled = take_over(model, make_mesh(sizes), lambda args, kwargs: None, interface)  # type: ignore[arg-type]
        compiled.init_weights(0)
        found[name] = {n: full(x) for n, x in (*compiled.named_parameters(), *compiled.named_buffers())}
    return found


def test_transformers_models_get_their_own_initialization() -> None:
    """Breaks when a mesh changes the numbers, a scaled projection is not scaled, or rotary frequencies stay on meta."""
    first, second = launch(initialized, 2, {"dp": 2, "tp": 1})[0], launch(initialized, 2, {"dp": 1, "tp": 2})[1]
    for name, tensors in first.items():
        assert all(torch.equal(value, second[name][key]) for key, value in tensors.items())
        assert not any(value.is_meta for value in tensors.values())
    gpt2, llama = first["GPT2"], first["Llama"]
    # GPT-2 scales the projections into the residual stream by 1/sqrt(2·layers).
    assert gpt2["transformer.h.0.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert gpt2["transformer.h.0.attn.c_proj.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    assert llama["model.rotary_emb.inv_freq"][0] == 1.0
