"""What a compiled model refuses before anything runs: inputs, autocast, meshes and plans that no program goes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import local_tensor
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import format_sharding
from autopar.runtime.holders import holders
from autopar.runtime.placements import to_dtensor_placements

PRECISION_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_made_apart(inputs: Mapping[Any, Any], model: nn.Module) -> None:
    """Raises an AutoparError where an input of the first batch was computed from the model's own parameters: they are
    cut at it, and a gradient would go to what they were.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    waiting = [(name, x.grad_fn) for name, x in inputs.items() if isinstance(x, Tensor) and x.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        name, node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (own := names.get(id(getattr(node, "variable", None)))) is not None:
            raise AutoparError(
                f"input {name} was computed from {own} before the first batch, at which that is cut",
                remedy="Give autopar.compile example_inputs, or call the model once before",
            )
        waiting += [(name, other) for other, _ in node.next_functions if other is not None]


def check_autocast(asked: torch.dtype, precision: torch.dtype | None) -> None:
    """Raises an AutoparError where autocast is on, and the program is not one of that precision."""
    if asked != precision:
        name = str(asked).removeprefix("torch.")
        raise AutoparError(
            f"the model is called under torch.autocast({name}), which casts nothing in a program",
            values=f"compiled with precision {str(precision).removeprefix('torch.')}",
            remedy=f'Compile with precision="{PRECISION_NAMES.get(asked, name)}": parameters stay as they are, '
            "forward and backward run in it; autocast may then stay around the call",
        )


def parameter_of(model: nn.Module, entry: TensorInterface, known: dict[str, nn.Parameter]) -> nn.Parameter:
    """The model's parameter that a program has under this name. known: those that were found to lie as planned.

    Raises:
        AutoparError: something else stands in its place, or in that of a name that is tied to it.
    """
    before = known.get(entry.name)
    names = [(name, *name.rpartition(".")) for name in (entry.name, *entry.aliases)]
    found = [(model.get_submodule(path) if path else model)._parameters.get(own) for _, path, _, own in names]
    if before is None or any(each is not before for each in found):
        for (name, *_), each in zip(names, found, strict=True):
            if each is None or each is not found[0] or not _lies_as(each, entry):
                raise _replaced(model, name, each)
        assert found[0] is not None
        known[entry.name] = found[0]
    return known[entry.name]


def written_in(model: nn.Module, name: str) -> Tensor:
    """What a program reads as a buffer: one, or a parameter that is not trained and that forward changes."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    held = module._buffers.get(own)
    found = module._parameters.get(own) if held is None else held
    if found is None:
        raise AutoparError(
            f"{name}, which forward() reads, is not there any more",
            remedy="compile the model again after its buffers are others",
        )
    return local_tensor(found) if isinstance(found, DTensor) else found


def parameters_before(model: nn.Module, entries: Sequence[TensorInterface]) -> dict[str, nn.Parameter]:
    """The model's parameters by their first names, before they are cut.

    Raises:
        AutoparError: since `compile` one was replaced, or tied to another.
    """
    found: dict[str, nn.Parameter] = {}
    names: dict[int, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            path, _, own = name.rpartition(".")
            each = (model.get_submodule(path) if path else model)._parameters.get(own)
            if not isinstance(each, DTensor) or names.setdefault(id(each), entry.name) != entry.name:
                raise _replaced(model, name, each)
            if found.setdefault(entry.name, each) is not each:
                raise _replaced(model, name, each)
    return found


def _lies_as(parameter: nn.Parameter, entry: TensorInterface) -> bool:
    if not isinstance(parameter, DTensor) or tuple(parameter.shape) != entry.shape:
        return False
    planned = to_dtensor_placements(entry.sharding, entry.shape, tuple(parameter.device_mesh.shape))
    return tuple(parameter.placements) == planned


def _replaced(model: nn.Module, name: str, found: object) -> AutoparError:
    kind = "another parameter" if isinstance(found, DTensor) else "a plain tensor"
    return AutoparError(
        f"{name} was replaced in a {type(model).__name__} that is compiled already",
        values=f"{kind if isinstance(found, Tensor) else 'no parameter'} stands there now",
        remedy="Replace, tie, prune or parametrize before autopar.compile. Values may be written behind it: "
        "weight.copy_(values) under torch.no_grad(), or weight.data = values",
    )


def check_same_mesh(interface: ProgramInterface, axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Raises an AutoparError where a plan is for another mesh than the one that it runs on."""
    planned = interface.pipeline or interface
    if (planned.axes, planned.sizes) != (axes, sizes):
        raise AutoparError(
            "the plan is for another mesh",
            values=f"planned {_mesh_text(planned.axes, planned.sizes)}, running on {_mesh_text(axes, sizes)}",
            remedy="Plan for this mesh, or start as many processes as the plan has ranks",
        )


def check_same_storage(new: ProgramInterface, first: ProgramInterface | None, axes: Sequence[str]) -> None:
    """Raises an AutoparError where a plan for another batch would store parameters otherwise than the first one.

    Fewer pipeline ranks may use one than hold it: of tied embeddings, which two stages hold, a batch that is embedded
    already is read by one of them.
    """
    assert first is not None
    if new is first:
        return
    if (new.axes, new.pipeline is None) != (first.axes, first.pipeline is None):
        raise AutoparError("this batch was planned with a pipeline and the first one without, or the other way round")
    now_on, then_on = holders(new), holders(first)
    for now, then in zip(new.parameters, first.parameters, strict=True):
        if now.name == then.name and not set(now_on[now.name]) <= set(then_on[then.name]):
            raise _on_other_ranks(now.name, now_on[now.name], then_on[then.name])
        if (now.name, now.sharding) != (then.name, then.sharding):
            raise AutoparError(
                f"{then.name} would have to be stored otherwise for this batch",
                values=f"{format_sharding(then.sharding, axes)}, now {now.name} {format_sharding(now.sharding, axes)}",
                remedy="Plan the new batch with the first plan's stored shardings",
            )


def check_trains(new: ProgramInterface, first: ProgramInterface | None) -> None:
    """Raises an AutoparError where a step over a pipeline would leave a rank that holds a parameter without its
    gradient, so that its copy stays behind: the stages of another batch use it on fewer ranks.
    """
    if first is None or new is first:
        return
    now_on, then_on = holders(new), holders(first)
    for entry in new.parameters:
        if entry.differentiable and now_on[entry.name] != then_on[entry.name]:
            raise _on_other_ranks(entry.name, now_on[entry.name], then_on[entry.name])


def _on_other_ranks(name: str, now: tuple[int, ...], then: tuple[int, ...]) -> AutoparError:
    return AutoparError(
        f"{name} would have to be on other pipeline ranks for this batch",
        values=f"on {_numbers(then)}, now {_numbers(now)}",
        remedy="Compile with example_inputs of the kind that uses it on most stages, and train on that kind alone",
    )


def _numbers(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _mesh_text(axes: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
