"""What other threads see of a model that is being traced: nothing."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import _get_current_function_mode_stack

import autopar
from autopar.base.torch_compat import tracing
from autopar.base.torch_compat.warned import without_warnings
from autopar.cli.models import catalogue
from autopar.passes.capture import capture
from autopar.passes.outline import outline

PATCHED = ("__getattribute__", "__setattr__")


class Inner(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear, self.act = number, nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        check_classes()
        return self.act(self.linear(x)) * (1 + self.number)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = Inner(number)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class Model(nn.Module):
    """shared: one module lies in two places, for which torch's tracer has proxies."""

    def __init__(self, blocks: int, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(i // 2) for i in range(blocks)])
        self.before = nn.Tanh()
        self.after = self.before if shared else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.before(x))
        for block in self.blocks:
            x = block(x)
        return x.sum()


OWN = {cls: {name: vars(cls).get(name) for name in PATCHED} for cls in (nn.Module, nn.Linear, nn.Tanh, Inner, Block)}


def check_classes() -> None:
    """Also run inside of the forward that is traced."""
    for cls, own in OWN.items():
        assert own == {name: vars(cls).get(name) for name in PATCHED}, f"{cls} is patched"
    assert not any(name in vars(nn.Linear) for name in PATCHED)


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[list[int]]:
    """Another thread does the same again and again; whatever it raises is raised here. Gives how often it did."""
    done, failed, stop = [0], list[BaseException](), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            try:
                work()
                done[0] += 1
            except BaseException as error:
                failed.append(error)
                return

    interval, thread = sys.getswitchinterval(), threading.Thread(target=loop)
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    if failed:
        raise failed[0]


def said(model: nn.Module, batch: dict[str, Tensor]) -> str:
    program = outline(capture(model, batch))
    return "\n".join(map(str, (program, *program.variables, *program.calls)))


@pytest.mark.moderate
@pytest.mark.parametrize("shared", [False, True])
def test_another_thread_runs_models(shared: bool) -> None:
    """Breaks if tracing patches a class for all threads, or takes their calls of modules for its model's."""
    model, batch = Model(24, shared), {"x": torch.randn(2, 4)}
    alone = said(model, batch)
    other = Model(8, shared)
    wanted = other(**batch)

    def work() -> None:
        check_classes()
        assert type(other.before) is nn.Tanh
        assert torch.equal(other(**batch), wanted)
        linear = nn.Linear(4, 2)
        linear.extra = 1
        assert torch.equal(linear(batch["x"]), torch.addmm(linear.bias, batch["x"], linear.weight.T))

    with meanwhile(work) as done:
        again = [said(model, batch) for _ in range(3)]
    assert again == [alone] * 3
    assert done[0] > 3
    check_classes()


@pytest.mark.moderate
def test_another_thread_asks_for_the_configuration() -> None:
    """Breaks if the user's own configuration is changed while a copy of the model is traced."""
    loaded = catalogue.load("llama", tiny=True, device="cpu", overrides={"num_hidden_layers": 4})
    config, mesh = loaded.model.config, autopar.Mesh({"dp": 2}, hardware="cpu")
    seen: set[bool] = set()
    with meanwhile(lambda: seen.add(config.use_cache)):
        capture(loaded.model, loaded.batch)
        autopar.plan(loaded.model, mesh, example_inputs=loaded.batch)
    assert seen == {True}


@pytest.mark.moderate
def test_two_threads_plan() -> None:
    """Breaks if two traces overlap: each is as alone, and torch's own changes of `nn.Module` are taken back."""
    before = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    tracer = tracing.proxy_tensor._ModuleStackTracer
    mesh, batch = autopar.Mesh({"dp": 2}, hardware="cpu"), {"x": torch.randn(4, 4)}
    models = [Model(5), Model(7)]
    alone = [autopar.plan(model, mesh, example_inputs=batch).source for model in models]
    sources: list[str] = []

    def work() -> None:
        sources.append(autopar.plan(models[0], mesh, example_inputs=batch).source)

    with meanwhile(work):
        others = [autopar.plan(models[1], mesh, example_inputs=batch).source for _ in range(3)]
    assert others == [alone[1]] * 3
    assert sources and set(sources) == {alone[0]}
    assert before == {name: vars(nn.Module)[name] for name in before}
    assert tracing.proxy_tensor._ModuleStackTracer is tracer


def test_one_thread_traces_at_a_time() -> None:
    """Breaks if the second does not wait; the same thread may trace within a trace."""
    entered = threading.Event()

    def other() -> None:
        with tracing.exclusive():
            entered.set()

    thread = threading.Thread(target=other)
    with tracing.exclusive():
        thread.start()
        with tracing.exclusive():
            assert not entered.wait(0.1)
    thread.join()
    assert entered.is_set()


def test_warnings_of_other_threads() -> None:
    """Breaks if they are lost while one thread traces, or if that thread's filters outlive the trace."""
    texts: list[str] = []

    def show(message: Any, *rest: Any) -> None:
        texts.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        with without_warnings():
            warnings.warn("mine", stacklevel=1)
            kept = warnings.filters[:]
            thread = threading.Thread(target=lambda: warnings.warn("theirs", stacklevel=1))
            thread.start()
            thread.join()
        warnings.warn("after", stacklevel=1)
        warnings.filters[:] = kept  # type: ignore[index]
        warnings.warn("put back", stacklevel=1)
    assert texts == ["theirs", "after", "put back"]


def recorded(x: Tensor) -> tuple[dict[str, Any], bool]:
    """What a tracer of torch notes of `x + 1`, and whether a mode of its own sees the functions that are called."""
    modes: list[Any] = []

    def add(value: Tensor) -> Tensor:
        modes.extend(_get_current_function_mode_stack())
        return value + 1

    graph = make_fx(add, tracing_mode="fake")(x).graph
    return next(node.meta for node in graph.nodes if node.op == "call_function"), bool(modes)


def test_what_torch_notes_beside_is_left_out_in_this_thread_alone():
    """Breaks when another thread's graphs lack what torch's own passes read of them."""
    found = [recorded(torch.ones(2))]  # torch 2.11 dies where the first trace of a process is another thread's
    with tracing.exclusive():
        thread = threading.Thread(target=lambda: found.append(recorded(torch.ones(2))))
        thread.start()
        thread.join()
        own, watched = recorded(torch.ones(2))
    assert own["val"].shape == (2,)
    assert own["tensor_meta"] is None
    assert not watched
    assert len(found) == 2
    for noted, watched in (*found, recorded(torch.ones(2))):
        assert noted["tensor_meta"].shape == (2,)
        assert watched
