"""Models whose linear layers hold codes, as a way has them or as a checkpoint of another tool does."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface.conversion import Made, made_of
from autopar.base.stored_weights import StoredWeight, check_not_stored, is_turned, keep_as, stacks_in
from autopar.base.stored_weights import store_weights as store_by_way
from autopar.runtime.checkpoint import coded_stacks, quantized, stored
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
    """Keep the weights of a model's linear layers and experts as codes with scales: the same model, changed, for
    inference.

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
        like: instead, a folder of safetensors: layers and experts hold codes where it has codes, in the same groups or
            blocks (AWQ, GPTQ and compressed-tensors of 4 or 8 bits, float8 and int8 with scales, gpt-oss's MX blocks).
            Of a model on meta names and shapes are read, and its values come with `compiled.load_pretrained`; another
            one has the checkpoint's weights then, all of them. What it computes is what codes and scales say: where a
            tool rounds activations, too, this does not.
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
        packed, blocks = quantized.packed_of(found.weights, folder), coded_stacks.blocks_of(found.weights)
        made = made_of(model_type, [*packed, *blocks])
        kept = [
            *_layers(model, made, packed, leave),
            *((module, how) for module, name, turned, path in stacks_in(model, leave, stacks)
              if (how := _stack(name, made.get(path), turned, packed, blocks)) is not None),
        ]  # fmt: skip
        for module, how in kept:
            weight: torch.Tensor = module._parameters[how.name]
            if tuple(weight.shape) != how.held_shape:
                raise AutoparError(
                    f"{how.name} of {type(module).__name__} has another shape in the checkpoint",
                    where=str(folder),
                    values=f"{how.held_shape}, the model's is {tuple(weight.shape)}",
                    remedy="give the checkpoint of this configuration",
                )
            dtypes = how.dtypes(weight.dtype)
            keep_as(
                module, how,
                {part: torch.zeros(shape, dtype=dtypes[part], device=weight.device)
                 for part, shape in how.shapes().items()},
            )  # fmt: skip
    if not kept:
        raise AutoparError(
            f"{folder} has no linear layer or experts of {type(model).__name__} as codes",
            values=f"{len(packed) + len(blocks)} weights are codes there",
            remedy="give the folder of this model's quantized checkpoint, or a way",
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        stored.load_pretrained(model, folder, next(model.parameters()).device)
    return model.requires_grad_(False)


def _layers(
    model: nn.Module, made: Mapping[str, Made], packed: Mapping[str, quantized.Packed], leave: Sequence[str]
) -> Iterator[tuple[Any, StoredWeight]]:
    """The layers whose weights the checkpoint has as codes, and how."""
    for prefix, module in model.named_modules():
        found = made.get(f"{prefix}.weight")
        is_layer = isinstance(module, nn.Linear) or is_turned(module)
        if found is None or found.is_stack or not is_layer or module._parameters.get("weight") is None:
            continue
        if found.parts[0][0] in packed and not any(fnmatch.fnmatchcase(prefix, each) for each in leave):
            yield module, packed[found.parts[0][0]].how(is_turned(module))


def _stack(
    name: str, made: Made | None, turned: bool, packed: Mapping[str, quantized.Packed],
    blocks: Mapping[str, coded_stacks.Blocks],
) -> StoredWeight | None:  # fmt: skip
    """How the checkpoint has experts on top of each other; None where not as codes, or as no such codes lie."""
    if made is None:
        return None
    if not made.is_stack:
        found = blocks.get(made.parts[0][0])
        return None if found is None else found.how(turned)
    return None if turned else coded_stacks.how_stacked(name, made.parts, packed)
