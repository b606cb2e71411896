"""A forward whose calls are compiled as one piece, without guards: which, what it computes, what it asks at a call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime import compiled_calls, regions
from autopar.runtime.comm import RecordingComm
from autopar.runtime.in_place import InPlace
from autopar.runtime.loader import LoadedProgram, load_program

pytestmark = pytest.mark.unit

COMM: Any = RecordingComm(("dp",), (1,), 0, "cpu")
TEXT = '''
import torch
import torch.nn.functional as F

from autopar import operators as ops

aten = torch.ops.aten
B = 2


def layer_forward(comm, p, x, cos, sin, at, keys, values):
    """A layer."""
    y, *_ = ops.rms_norm(x, p["norm"], 1e-5)
    q = (y @ p["q"].t()).reshape(B, 1, 2, 4).transpose(1, 2)
    k = ops.rotary(q, cos, sin)
    keys_1 = aten.index_copy(keys, 2, at, k)
    values_1 = aten.index_copy(values, 2, at, q)
    seen, *_ = ops.attention(q, keys_1, values_1, scale=0.5)
    return (x + F.silu(seen.transpose(1, 2).reshape(B, 1, 8)), x, keys_1, values_1), ()


def split_inputs(comm, inputs):
    return inputs


def forward(comm, state, held, inputs, seed):
    x, given = inputs["x"], [inputs[name] for name in ("cos", "sin", "at")]
    (x, _, keys, values), _ = layer_forward(comm, state, x, *given, inputs["keys"], inputs["values"])
    (x, before, more, others), _ = layer_forward(comm, state, x, *given, inputs["more"], inputs["others"])
    return (x, before, keys, values, more, others), ()


def backward(comm, state, held, saved, grads, gradients, is_last):
    raise RuntimeError("planned for inference")
'''
CACHES = ("keys", "values", "more", "others")


def inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    given = {"x": drawn(2, 1, 8), "cos": drawn(1, 1, 4), "sin": drawn(1, 1, 4), "at": torch.tensor([1])}
    return {"norm": drawn(8), "q": drawn(8, 8)}, {**given, **{name: drawn(2, 2, 3, 4) for name in CACHES}}


def run(program: Callable[..., Any], state: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return program(COMM, state, {}, given, 0)[0]


def check(found: Any, want: Any) -> None:
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedProgram, list[torch.fx.GraphModule]]:
    """The program above, and the graphs that a compiler was given, which runs them through AOTAutograd."""
    graphs: list[torch.fx.GraphModule] = []
    real = regions.lookup_backend

    def lookup(name: str) -> Any:
        def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
            graphs.append(graph)
            return real(name)(graph, given)

        return backend

    monkeypatch.setattr(regions, "lookup_backend", lookup)
    return load_program(TEXT, "a layer", "aot_eager"), graphs


def settled(program: Callable[..., Any], state: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
    """What it gives once it is compiled: the first time it runs as it is, the second time it is written down."""
    return [run(program, state, given) for _ in range(3)][-1]


@pytest.mark.moderate
def test_a_program_is_one_piece_a_layout(compiled: tuple[LoadedProgram, list[Any]]) -> None:
    """Breaks if a compiled forward gives other numbers than its text, if it is compiled in parts or for each set of
    parameters, if operators of autopar stay in the way of a compiler, or if what was made of one layout of tensors runs
    on another.
    """
    program, graphs = compiled
    plain, (state, given) = load_program(TEXT, "a layer"), inputs()
    check(settled(program.forward, state, given), run(plain.forward, state, given))
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if "autopar" in str(node.target)]
    doubled = {name: x * 2 for name, x in state.items()}
    for _ in range(5):
        for each in (doubled, state, {**state, "q": state["q"].clone()}):
            check(run(program.forward, each, given), run(plain.forward, each, given))
    assert len(graphs) == 1
    other = {**given, "more": given["more"].transpose(0, 1)}
    check(settled(program.forward, state, other), run(plain.forward, state, other))
    assert len(graphs) == 2
    for changed in ({**state, "q": state["q"].t()}, {**state, "norm": state["norm"].float()}):
        check(settled(program.forward, changed, given), run(plain.forward, changed, given))
    assert len(graphs) == 4


@pytest.mark.moderate
def test_many_calls_are_cut_at_regions(
    compiled: tuple[LoadedProgram, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if a deep model is one piece, which takes a compiler for ever, or if pieces get other values."""
    monkeypatch.setattr(compiled_calls, "MOST", 10)
    _, graphs = compiled
    text = TEXT.replace("    (x, ", '    comm.at("a layer")\n    (x, ')
    (state, given), plain = inputs(), load_program(text, "layers")
    program = load_program(text, "layers", "aot_eager")
    check(settled(program.forward, state, given), run(plain.forward, state, given))
    forward: Any = program.forward
    (replay,) = forward._replays.values()
    assert len(graphs) == 2 and replay.text.count(", = ") == 2


@pytest.mark.moderate
def test_states_are_written_where_they_lie(compiled: tuple[LoadedProgram, list[Any]]) -> None:
    """Breaks if a compiled token copies its caches, writes one that somebody holds, or takes one layer's for another's;
    or if an input that is handed on is another tensor.
    """
    program, graphs = compiled
    plain, in_place = load_program(TEXT, "a layer"), InPlace(program, "aot_eager")
    written = ("keys", "values", "more")
    for _ in range(4):
        state, given = inputs()
        held = {name: given[name].clone() for name in CACHES}
        want = run(plain.forward, state, {**given, **{name: x.clone() for name, x in held.items()}})
        found = in_place(COMM, state, given, 0, written)
        check(found, want)
        assert [any(each is x for x in given.values()) for each in found] == [False, False, True, True, True, False]
        assert all(given[name] is found[2 + place] for place, name in enumerate(written))
        assert torch.equal(given["others"], held["others"])
    assert len(graphs) == 1


def test_what_fails_to_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if generation ends where a compiler fails, or is told of it at every token."""

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(regions, "lookup_backend", lambda name: backend)
    program, (state, given) = load_program(TEXT, "a layer", "inductor"), inputs()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            check(run(program.forward, state, given), run(load_program(TEXT, "a layer").forward, state, given))
    assert caplog.text.count("runs uncompiled") == 1 and "no C++ compiler" in caplog.text


def test_text_that_does_more_is_not_compiled_as_one(compiled: tuple[LoadedProgram, list[Any]]) -> None:
    """Breaks if what a person writes into a program runs when it is written down, and never again."""
    seen: list[int] = []
    text = TEXT.replace("    x, given = ", "    SEEN.append(1)\n    x, given = ")
    program, (state, given) = load_program(text, "edited", "aot_eager"), inputs()
    program.namespace["SEEN"] = seen
    for _ in range(4):
        run(program.forward, state, given)
    assert len(seen) == 4
