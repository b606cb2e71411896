"""recorder: graphs of what functions compute on meta. Breaks if they are others than torch's own tracer records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import operators
from autopar.base.torch_compat import recorder, tracing
from autopar.passes import emptied
from autopar.passes.capture import capture
from autopar.passes.differentiate import simplify

aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _with_gradients(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def joint(*given: Tensor) -> Any:
        wanted = [each for each in given if each.requires_grad]
        out = function(*given)
        return out, *torch.autograd.grad(out.sum(), wanted)

    return joint


def _lines(graph: fx.Graph) -> list[str]:
    """Nodes with names, operands and types, without what differentiation drops."""
    graph = simplify(graph)
    types = [_types(node.meta.get("val")) for node in graph.nodes]
    return [f"{node.format_node()} {of}" for node, of in zip(graph.nodes, types, strict=True)]


def _types(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_types(each) for each in value]
    return (value.shape, value.dtype, value.stride(), value.device) if isinstance(value, Tensor) else value


def _mixed(x: Tensor, w: Tensor) -> Tensor:
    first, second = (x @ w).split(4, dim=1)
    y = torch.cat([first.relu(), second.transpose(0, 1).reshape(3, 4)]).softmax(-1)
    values, _ = y.topk(2)
    return F.layer_norm(values * 2.5 + torch.zeros(2, device="meta"), (2,))


def _convolved(x: Tensor, w: Tensor) -> Tensor:
    """A gradient that is reshaped as it lies."""
    y = F.conv2d(x.permute(0, 3, 1, 2), w, groups=4).permute(0, 2, 3, 1).reshape(-1, 4)
    return F.layer_norm(y, (4,))


def _written(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = w
    return y.mul_(2).exp()


def _sinh(x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, x.shape[-1]), x).exp().mean(-1, keepdim=True).expand_as(x)


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "pieces, several results, constants": (_mixed, [(3, 5), (5, 8)]),
    "convolutions, and what they lie like": (_convolved, [(2, 6, 6, 4), (4, 1, 3, 3)]),
    "writes": (_written, [(3, 5), (3,)]),
    "composite below autograd": (lambda x, w: torch.sinh(x * w), [(3, 5), (5,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_are_those_of_torchs_tracer(name: str) -> None:
    function, shapes = CASES[name]
    given = [_meta(*shape).requires_grad_() for shape in shapes]
    joint, table = _with_gradients(function), {**operators.DECOMPOSITIONS, aten.sinh.default: _sinh}
    own = recorder.recorded(joint, table, given)
    assert _lines(own) == _lines(make_fx(joint, table, tracing_mode="fake")(*given).graph)


def test_what_is_not_plain_is_left_to_torch() -> None:
    """A tensor of elsewhere, one with values, and sizes that values say."""
    held = _meta(2)
    for function in (lambda x: x * held, lambda x: x * torch.arange(2), lambda x: x.nonzero()):
        with pytest.raises((recorder.NotPlain, NotImplementedError, RuntimeError)):
            recorder.recorded(function, {}, [_meta(2)])
        assert recorder.current() is None
    graph = tracing.make_fx(lambda x: x * torch.arange(2).sum(), {}, [_meta(2)]).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.arange.default, aten.sum.default, aten.mul.Tensor,
    ]  # fmt: skip


def test_a_tensor_of_elsewhere_is_not_taken_for_one_that_is_gone() -> None:
    """Breaks if nodes are looked up by numbers of objects that are no more: those are given again."""
    numbers: set[int] = set()

    def function(x: Tensor) -> Tensor:
        gone = id(x.mul(2))
        with tracing.outside_of_tracing():
            others = [_meta(2) for _ in range(100)]
        numbers.update({gone} & set(map(id, others)))
        return x

    recorder.recorded(function, {}, [_meta(2)])
    assert not numbers


def test_parameters_stand_for_themselves_in_an_export() -> None:
    """Breaks if torch.export makes others of parameters and buffers, or if a name for two of them is not one."""
    mode = tracing.fake_mode()
    model = emptied.meta_clone(torch.nn.BatchNorm1d(3), None, mode)
    for value in (*model.parameters(), *model.buffers()):
        assert mode.from_tensor(value, static_shapes=True) is value
        assert value.device.type == "cpu" and tracing.is_stand_in(value)
    assert isinstance(model.weight, torch.nn.Parameter) and model.weight.requires_grad
    with tracing.traced_in(mode):
        exported = torch.export.export(model, (tracing.stand_in(_meta(2, 3), mode),), strict=False)
    assert all(tracing.mode_of(node.meta.get("val")) in (mode, None) for node in exported.graph.nodes)
    assert exported.state_dict["weight"] is model.weight


def test_a_model_runs_while_it_is_traced_and_not_behind() -> None:
    """Breaks if what modes see is taken for the model's where torch asks, or what a model asks for torch's."""
    seen = list[bool]()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(tracing.model_runs())
            return x + 1

    capture(Model(), {"x": torch.ones(2)})
    assert seen == [True] and not tracing.model_runs()
