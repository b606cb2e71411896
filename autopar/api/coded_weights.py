"""Models whose linear layers hold codes, as a way has them or as a checkpoint of another tool does."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import Made, made_of
from autopar.base.stored_weights import StoredWeight, check_not_stored, is_turned, keep_as, stacks_in
from autopar.base.stored_weights import store_weights as store_by_way
from autopar.runtime.checkpoint import quantized, stored
from autopar.runtime.checkpoint.formats import weights_of

Module = TypeVar("Module", bound=nn.Module)


def store_weights(
    model: Module,
    way: str | None = None,
    *,
    like: str | Path | None = None,
    group: int | None = None,
    leave: Sequence[str] = (),
    stacks: Mapping[str, str] = MappingProxyType({}),
) -> Module:
    """Keep the weights of a model's linear layers and experts as codes with scales: the same model, changed, for inference.

        model = autopar.store_weights(AutoModelForCausalLM.from_pretrained(name), "int8")
        compiled = autopar.compile(model, mesh)  # and plan, plan_generation, generate()

        model = autopar.store_weights(AutoModelForCausalLM.from_config(config), like="Llama-3.1-8B-AWQ/")  # on meta
        compiled = autopar.compile(model, mesh)
        compiled.load_pretrained("Llama-3.1-8B-AWQ/")

    Of `nn.Linear`, GPT-2's `Conv1D` and experts in one tensor as transformers has them; norms, biases, embeddings, the
    head, routers that are no `nn.Linear` and weights that two modules share stay as they are. Parameters take no
    gradients any more. A model on meta stays there.

    Args:
        way: "int8" (a scale for each output), "int4" and "mxfp4" (for every `group` inputs of an output), "fp8" (e4m3,
            for each output), "fp8-tensor" (one, for each expert), "fp8-block" (for 128 × 128).
        like: instead, a folder of safetensors: layers hold codes where it has codes, in the same groups or blocks (AWQ,
            GPTQ and compressed-tensors of 4 or 8 bits, float8 and int8 with scales). Of a model on meta names and
            shapes are read, and its values come with `compiled.load_pretrained`; another one has the checkpoint's
            weights then, all of them. What it computes is what codes and scales say: where a tool rounds activations,
            too, this does not.
        group: of int4 (128) and mxfp4 (32). Where it does not divide a layer's inputs, a row is one group (of int8 if
            they are odd); where 128 does not divide both sides of a weight, it has a scale for each output.
        leave: names of modules that stay as they are, with `*` and `?`.
        stacks: other parameters [experts, …, …] that are matrices of experts, by patterns of their names, and how these
            lie: {"*.experts.w1": "out in", "*.experts.w2": "in out"}.

    Raises:
        AutoparError: an unknown way, a group that no byte holds, a model without such layers, or stored already; stacks
            that it does not have; a checkpoint that has no codes, or such as are not known, or is another model's.
    """
    if (way is None) == (like is None):
        raise AutoparError("how are weights to be stored?", remedy='a way, as "int8", or like=, a checkpoint\'s folder')
    if way is not None:
        return store_by_way(model, way, group=group, leave=leave, stacks=stacks)
    assert like is not None
    check_not_stored(model)
    folder = Path(like)
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    with torch.device("cpu"), weights_of(folder) as found:  # whatever the default device is
        packed = quantized.packed_of(found.weights, folder)
        names = {name: each.parts[0][0] for name, each in made_of(model_type, packed).items() if not each.is_stack}
        num = 0
        for prefix, module in list(model.named_modules()):
            name = names.get(f"{prefix}.weight")
            weight = module._parameters.get("weight")
            if name is None or weight is None or any(fnmatch.fnmatchcase(prefix, each) for each in leave):
                continue
            if isinstance(module, nn.Linear) or is_turned(module):
                how = packed[name].how(is_turned(module))
                given = tuple(weight.shape[::-1] if how.turned else weight.shape)
                if given != how.shape:
                    raise AutoparError(
                        f"{name} has another shape in the checkpoint",
                        where=str(folder),
                        values=f"{how.shape}, the model's is {given}",
                        remedy="give the checkpoint of this configuration",
                    )
                dtypes = how.dtypes(weight.dtype)
                keep_as(
                    module, how,
                    {part: torch.zeros(shape, dtype=dtypes[part], device=weight.device)
                     for part, shape in how.shapes().items()},
                )  # fmt: skip
                num += 1
    if not num:
        raise AutoparError(
            f"{folder} has no linear layer of {type(model).__name__} as codes",
            values=f"{len(packed)} weights are codes there",
            remedy="give the folder of this model's quantized checkpoint, or a way",
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        stored.load_pretrained(model, folder, next(model.parameters()).device)
    return model.requires_grad_(False)
