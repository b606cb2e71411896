from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import TorchDispatchMode
from autopar.ir.sharding import REPLICATE, Shard
from autopar.runtime.comm import ProcessGroupComm
from autopar.runtime.layout import shard
from autopar.runtime.module import take_over
from autopar.runtime.optimizers import SUPPORT
from autopar.runtime.placements import as_parameter, make_dtensor
from tests.dist.launch import launch
from tests.dist.runtime.work import make_mesh, mlp_executable

pytestmark = pytest.mark.dist

SHAPES = {"w": (8, 12), "b": (8,), "u": (7, 6), "v": (6, 5)}
LINE: dict[str, dict[str, Any]] = {
    "rows": {"w": (Shard(0),), "b": (Shard(0),)},
    "columns": {"w": (Shard(1),), "b": (REPLICATE,)},
    "whole": {"w": (REPLICATE,), "b": (REPLICATE,)},
    "uneven": {"u": (Shard(0),), "v": (Shard(1),)},
}
SQUARE: dict[str, dict[str, Any]] = {
    "stripes": {"w": (Shard(0, 2), Shard(0)), "b": (Shard(0, 2), Shard(0))},
    "both dims": {"w": (Shard(0), Shard(1)), "b": (Shard(0), REPLICATE)},
    "mixed": {"w": (REPLICATE, Shard(1)), "b": (REPLICATE, Shard(0)), "u": (REPLICATE, REPLICATE)},
    "uneven": {"u": (Shard(0), Shard(1)), "v": (REPLICATE, Shard(1))},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SUPPORT if name != "SparseAdam"},
    "Adam amsgrad": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW foreach": ("AdamW", {"foreach": True}),
    "AdamW fused": ("AdamW", {"fused": True}),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "RMSprop centered": ("RMSprop", {"centered": True, "momentum": 0.9, "foreach": True}),
    "LBFGS": ("LBFGS", {"lr": 0.1, "max_iter": 4}),
}


def initial(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def optimize(
    cls: Any, options: dict[str, Any], parameters: dict[str, nn.Parameter], put: Callable[..., Tensor]
) -> None:
    """Four steps on noisy gradients of ½‖p‖²."""
    optimizer = cls([p for p in parameters.values() if p.ndim == 2 or cls.__name__ != "Muon"], **options)
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            loss = torch.zeros((), dtype=torch.float64)
            for name, parameter in parameters.items():
                now = whole(parameter)
                noise = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                parameter.grad = put(name, 0.1 * noise + now)
                loss = loss + 0.5 * now.square().sum()
            return loss

        if cls.__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def differences(sizes: dict[str, int]) -> dict[str, dict[str, float | str]]:
    """Optimizer -> layout -> the largest difference from one process, relative to the largest step; or the error."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    mesh = make_mesh(sizes)
    comm = ProcessGroupComm(mesh)
    # Registers the guard.
    take_over(nn.Linear(2, 2), mesh, lambda args, kwargs: mlp_executable("ddp"))
    bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self  # type: ignore[method-assign]  # Muon's rounding would hide a mistake
    found: dict[str, dict[str, float | str]] = {}
    try:
        for case, (name, options) in CASES.items():
            cls, found[case] = getattr(torch.optim, name), {}
            for layout, shardings in (LINE if len(sizes) == 1 else SQUARE).items():

                def put(name: str, x: Tensor, shardings: dict[str, Any] = shardings) -> DTensor:
                    return make_dtensor(shard(x, shardings[name], comm).clone(), mesh, shardings[name], x.shape)

                expected = {name: nn.Parameter(initial(name)) for name in shardings}
                optimize(cls, options, expected, lambda name, x: x)
                mine = {
                    name: as_parameter(shard(p, shardings[name], comm).clone(), mesh, shardings[name], p)
                    for name, p in ((name, nn.Parameter(initial(name))) for name in shardings)
                }
                try:
                    optimize(cls, options, mine, put)
                except AutoparError as error:
                    found[case][layout] = str(error)
                    continue
                moved = max(float((expected[name] - initial(name)).abs().max()) for name in shardings)
                error = max(float((whole(mine[name]) - expected[name]).abs().max()) for name in shardings)
                found[case][layout] = error / moved
    finally:
        torch.Tensor.bfloat16 = bfloat16  # type: ignore[method-assign]
    return found


def rows(found: dict[str, dict[str, float | str]]) -> Iterator[tuple[str, str, float | str]]:
    for case, by_layout in found.items():
        for layout, result in by_layout.items():
            yield case, layout, result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 4}, {"a": 2, "b": 2}])
def test_optimizers_follow_one_process_or_are_refused(sizes: dict[str, int]) -> None:
    """Breaks when an optimizer takes a piece's norms or means for the whole tensor's, or dies deep inside DTensor."""
    num_ranks = 4 if len(sizes) == 2 else sizes["a"]
    for found in launch(differences, num_ranks, sizes, timeout_s=200):
        for case, layout, result in rows(found):
            support = SUPPORT[CASES[case][0]].layouts
            refused = layout != "whole" and (support == "whole" or (support == "even" and layout == "uneven"))
            if refused:
                assert "cannot update" in str(result) and "AdamW" in str(result), (case, layout, result)
            else:
                assert isinstance(result, float) and result < 1e-12, (case, layout, result)


def local_steps() -> dict[str, object]:
    """What a split parameter's AdamW looks like around its steps."""
    mesh = make_mesh({"a": 2})
    comm, sharding = ProcessGroupComm(mesh), (Shard(0),)
    take_over(nn.Linear(2, 2), mesh, lambda args, kwargs: mlp_executable("ddp"))
    original = nn.Parameter(initial("w"))

    def placed(x: Tensor, layout: Any = sharding) -> DTensor:
        return make_dtensor(shard(x, layout, comm).clone(), mesh, layout, x.shape)

    parameter = as_parameter(shard(original, sharding, comm).clone(), mesh, sharding, original)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = placed(initial("w"))
    held, version = parameter.grad, parameter._version
    seen: list[int] = []
    with CountDTensorOperators() as counter:
        optimizer.step()
    found: dict[str, object] = {"on DTensors": counter.count, "written": parameter._version > version}
    state = optimizer.state[parameter]
    found["states"] = sorted(name for name, value in state.items() if isinstance(value, DTensor))
    found["owners"] = list(optimizer.state) == [parameter] and optimizer.param_groups[0]["params"] == [parameter]
    found["gradient"] = bool(torch.equal(whole(held), initial("w"))) and parameter.grad is held
    average = state["exp_avg"]
    optimizer.step()
    found["kept"] = state["exp_avg"] is average and float(state["step"]) == 2
    # A gradient that lies otherwise than its parameter must not be taken for the rank's piece of it.
    expected = whole(parameter) - initial("w")
    sgd = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = placed(initial("w"), (REPLICATE,))
    sgd.step()
    found["other layout"] = bool(torch.equal(whole(parameter), expected))
    parameter.grad = placed(initial("w"))
    # Others' hooks see the user's optimizer, and what they change counts.
    handle = optimizer.register_step_pre_hook(lambda own, args, kwargs: seen.append(args[0] is own))
    optimizer.step()
    handle.remove()
    found["hooks"] = seen

    def closure() -> Tensor:
        parameter.grad = placed(torch.zeros_like(initial("w")))
        return torch.zeros(())

    before = whole(parameter).clone()
    sgd.step(closure)
    found["closure"] = bool(torch.equal(whole(parameter), before))
    return found


class CountDTensorOperators(TorchDispatchMode):
    """How many operators were called on DTensors, but for views and factories."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


def test_elementwise_updates_run_on_local_tensors() -> None:
    """Breaks when a step dispatches DTensors, leaves plain states or none to the user's optimizer, hides from autograd
    that parameters were written, or takes tensors for local pieces that are not.
    """
    for found in launch(local_steps, 2):
        assert found == {
            "on DTensors": 0,
            "written": True,
            "states": ["exp_avg", "exp_avg_sq"],
            "owners": True,
            "gradient": True,
            "kept": True,
            "other layout": True,
            "hooks": [True],
            "closure": True,
        }


class Lamb(torch.optim.SGD):
    """Another library's, by its name and a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return None


class Lion(Lamb):
    def step(self, closure: Any = None) -> Any:
        return None


class Tuned(torch.optim.AdamW):
    """Changes defaults only."""


def guards() -> list[str]:
    mesh = make_mesh({"a": 2})
    comm, sharding = ProcessGroupComm(mesh), (Shard(0),)
    take_over(nn.Linear(2, 2), mesh, lambda args, kwargs: mlp_executable("ddp"))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)

    def parameter(placed: Any) -> nn.Parameter:
        original = nn.Parameter(initial("w"))
        made = as_parameter(shard(original, placed, comm).clone(), mesh, placed, original)
        made.grad = make_dtensor(shard(initial("w"), placed, comm).clone(), mesh, placed, (8, 12))
        return made

    split, replicated = parameter(sharding), parameter((REPLICATE,))
    try:
        for optimizer, message in (
            (torch.optim.SGD([split], fused=True), "SGD with fused=True cannot update distributed parameters"),
            (torch.optim.SparseAdam([replicated]), "SparseAdam cannot update parameters with dense gradients"),
        ):
            with pytest.raises(AutoparError, match=message):
                optimizer.step()
        with pytest.raises(AutoparError, match="Lamb cannot step with a closure"):
            Lamb([split]).step(lambda: 0.0)
        for optimizer in (Lamb([replicated]), Lamb([split]), Lion([split]), Lion([split]), Tuned([split])):
            optimizer.step()
        # Parameters of others are none of our business.
        theirs = nn.Parameter(initial("w"))
        theirs.grad = initial("w")
        torch.optim.Adafactor([theirs]).step()
        late = torch.optim.Adafactor([replicated])
        late.step()
        late.add_param_group({"params": [split]})
        late.step()
    finally:
        logging.getLogger("autopar").removeHandler(handler)
    return messages


def test_what_is_not_known_to_be_right_is_told() -> None:
    """Breaks when the price of whole tensors is not said, or is where there is none, or a harmless one is refused."""
    for lamb, lion, adafactor in launch(guards, 2):
        assert "Lamb looks at whole tensors" in lamb and "Adafactor looks at whole tensors" in adafactor
        assert "Lion is not known" in lion
