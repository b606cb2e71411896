"""Calls of torch that are written down in one run of a program and made again: which, and that they give the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.comm import RecordingComm
from autopar.runtime.in_place import InPlace
from autopar.runtime.loader import load_program
from autopar.runtime.replay import Replay, written_down
from autopar.runtime.straight import is_straight_program

pytestmark = pytest.mark.unit

COMM: Any = RecordingComm(("dp",), (1,), 0, "cpu")
LAYER = """
import torch
import torch.nn.functional as F

from autopar import operators as ops

aten = torch.ops.aten
B = 2


def layer_forward(comm, p, x, cos, sin, at, keys, values, seen):
    y, *_ = ops.rms_norm(x, p["norm"], 1e-5)
    q = ops.linear(y, p["q"]).reshape(B, 1, 2, 4).transpose(1, 2)
    k = ops.rotary(q, cos, sin)
    place = torch.arange(1, dtype=torch.int64, device=comm.device) + at
    keys_1 = aten.index_copy(keys, 2, place, k)
    values_1 = aten.index_copy(values, 2, place, q)
    found, *_ = ops.attention(k, keys_1, values_1, keys=seen, scale=0.5)
    return (x + F.silu(found.transpose(1, 2).reshape(B, 1, 8)), keys_1, values_1), ()


def split_inputs(comm, inputs):
    return inputs


def forward(comm, state, held, inputs, seed):
    x = ops.embedding(state["table"], inputs["ids"])
    given = [inputs[name] for name in ("cos", "sin", "at")]
    comm.at("layers.0 forward")
    (x, keys, values), _ = layer_forward(comm, state, x, *given, inputs["keys"], inputs["values"], inputs["seen"])
    comm.at("layers.1 forward")
    (x, more, others), _ = layer_forward(comm, state, x, *given, inputs["more"], inputs["others"], inputs["seen"])
    return (x, inputs["at"] + 1, keys, values, more, others), ()


def backward(comm, state, held, saved, grads, sums, last):
    raise RuntimeError("planned for inference")
"""
CACHES = ("keys", "values", "more", "others")


def _state() -> dict[str, Tensor]:
    return {"norm": torch.randn(8), "q": torch.randn(8, 8), "table": torch.randn(11, 8)}


def _inputs(at: int) -> dict[str, Tensor]:
    given = {name: torch.randn(2, 1, 4) for name in ("cos", "sin")}
    given |= {"ids": torch.randint(11, (2, 1)), "at": torch.tensor(at), "seen": torch.rand(2, 6) < 0.7}
    return {**given, **{name: torch.randn(2, 2, 6, 4) for name in CACHES}}


def _run(source: str) -> Callable[[Any, Any, Any], Any]:
    program = load_program(source, "a test")
    return lambda comm, state, inputs: program.forward(comm, state, {}, inputs, torch.tensor(0))[0]


def _of(*lines: str) -> str:
    """A program whose forward is these lines, of x and y."""
    body = "\n    ".join(['x, y = inputs["x"], inputs["y"]', *lines])
    return (
        "import torch\nfrom autopar import operators as ops\n\naten = torch.ops.aten\n\n"
        "def split_inputs(comm, inputs):\n    return inputs\n\n"
        f"def forward(comm, state, held, inputs, seed):\n    {body}\n\n"
        "def backward(comm, state, held, saved, grads, sums, last):\n    return {}\n"
    )


def _two() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}


def test_a_token_is_what_the_text_says_bit_by_bit() -> None:
    """Breaks if a token's calls give other numbers than its text, if they are not made in its place, if caches are
    copied, or if what every layer has in common is computed in each.
    """
    torch.manual_seed(0)
    state, run, own = _state(), _run(LAYER), InPlace(load_program(LAYER, "a test"))
    kept: list[tuple[Tensor, Tensor]] = []
    for at in (1, 2, 3, 4, 5):
        given = _inputs(at)
        copies = {name: x.clone() for name, x in given.items()}
        want = run(COMM, state, copies)
        found = own(COMM, state, given, torch.tensor(0), CACHES)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
        assert [id(x) for x in found[2:]] == [id(given[name]) for name in CACHES]
        assert not any(x.is_inference() for x in found)
        kept.append((found[0], want[0]))
    assert all(torch.equal(*pair) for pair in kept)  # nobody wrote into what was handed out
    assert own._replay is not None
    text = own._replay.text
    assert "rms_norm" not in text and "arange" not in text
    assert text.count("masked_fill(") == 1 and text.count("index_copy_(") == 4 and text.count("for_cpu(") == 2


def test_parameters_that_are_others_are_seen() -> None:
    """Breaks if a parameter, its memory, or how an input lies, is still what it was where it was written down."""
    torch.manual_seed(0)
    source = _of("""z = x @ state["w"].t() + state["w"][0].exp()""", "return (z.contiguous() * y, z), ()")
    run, replay, state = _run(source), Replay(source, "a test"), {"w": torch.randn(4, 4)}

    def check(inputs: dict[str, Tensor]) -> None:
        found, want = replay(run, COMM, state, inputs), run(COMM, state, inputs)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))

    for _ in range(3):
        check(_two())
    assert replay.text and ".t" not in replay.text and " t(" not in replay.text
    state["w"].mul_(2)
    check(_two())
    state["w"].data = torch.randn(4, 4)
    check(_two())
    state["w"] = torch.randn(4, 4)
    for _ in range(3):
        check(_two())
        check({"x": torch.randn(4, 3).t(), "y": torch.randn(3, 4)})
        check({"x": torch.randn(5, 4), "y": torch.randn(5, 4)})
        check({name: x.double().float() for name, x in _two().items()})
    with torch.device("cpu"):  # another sees the calls
        check(_two())


@pytest.mark.parametrize(
    "lines",
    [
        ("return (x * y.sum().item(),), ()",),
        ("return (x * float(y.sum()),), ()",),
        ("z = x if y.sum() > 0 else -x", "return (z * 1,), ()"),
        ("z = x[y > 0]", "return (z.sum() * z.shape[0],), ()"),
        ("z = y.flatten().tolist()", "return (x * z[0],), ()"),
        ("z = torch.nonzero(y > 0)", "return (x + z.shape[0],), ()"),
        ("return (x + torch.rand_like(y),), ()",),
        ("return (torch.dropout(x, 0.5, True) + y,), ()",),
        ("state['w'].add_(1)", "return (x + state['w'],), ()"),
        ("return (x, x + y), ()", "print(x)"),
        ("global N", "N = 1", "return (x + N,), ()"),
        ("torch.save(x, '/dev/null')", "return (x + y,), ()"),
    ],
)
def test_what_goes_by_values_is_left_to_the_text(lines: tuple[str, ...]) -> None:
    """Breaks if what one batch decided, or drew, is what another gets, or what is done beside tensors is left out."""
    source, state = _of(*lines), {"w": torch.zeros(4)}
    run, replay = _run(source), Replay(source, "a test")
    for number in range(4):
        given = {"x": torch.randn(3, 4), "y": torch.randn(3, 4) + (5 if number % 2 else -5)}
        torch.manual_seed(number)
        want = run(COMM, {name: x.clone() for name, x in state.items()}, given)
        torch.manual_seed(number)
        found = replay(run, COMM, state, given)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
        assert not replay.text


def test_text_that_keeps_something_is_not_straight() -> None:
    """Breaks if a text counts as one of tensors alone that reads or leaves something else."""
    plain = "return (x + y,), ()"
    assert is_straight_program(_of(plain)) and is_straight_program(LAYER)
    others = (
        _of("import os", plain), _of("open('x')", plain), _of("f = lambda z: z", plain),
        _of("torch.manual_seed(0)", plain),
        _of(plain) + "\nimport os\n", _of(plain) + "\nSEEN = []\n" + _of("SEEN.append(x)", plain),
        _of("with torch.no_grad():", "    z = x", plain), "def forward(:", "",
    )  # fmt: skip
    assert not any(map(is_straight_program, others))


STEPS = (
    "{new} = {a} + {b}", "{new} = {a} * 2", "{new} = {a}.transpose(0, 1).contiguous().transpose(0, 1)",
    "{new} = {a}.reshape(2, 6).reshape(3, 4)", "{new} = {a}.view(3, 2, 2).reshape(3, 4)", "{a}.add_({b}.sum(-1, True))",
    "{a}[:, :2] = {b}[:, 2:]", "{a}[1].mul_(0.5)", "{new} = {a}.clone()", "{new} = torch.zeros(3, 4)",
    "{new} = torch.arange(4.0).expand(3, 4)", "{new} = {a}.contiguous()", "{new} = {a}.flip(-1)",
    "{new} = torch.cat([{a}[:, :1], {b}[:, 1:]], -1)", "{new} = state['w'].t().reshape(3, 4) + {a}",
    "{new} = {a}.unsqueeze(0).squeeze(0)", "{new} = torch.mul({a}, {b}, out={a})",
    "{new} = {a}.chunk(2, 0)[0].sum() + {b}",
    "{new} = {a}.masked_fill({b} > 0, 1.5)", "{new} = state['w'].view(3, 4)", "{new} = {a}[:, 1:3].repeat(1, 2)",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_straight_text(seed: int) -> None:
    """Breaks if a call is left out that something needs, if memory that is written counts as what it was before, or if
    what an input was in one run is in another: any texts with views and writes, on values of other runs.
    """
    draw = random.Random(seed)
    names, lines = ["x", "y"], []
    for number in range(draw.randrange(4, 16)):
        new = f"v{number}"
        step = draw.choice(STEPS)
        a, b = draw.choice(names), draw.choice(names)
        if ("_(" in step or "] =" in step or "out=" in step) and draw.random() < 0.5:
            lines.append(f"{a}w{number} = {a}.clone()")
            a = f"{a}w{number}"
            names.append(a)
        lines.append(step.format(new=new, a=a, b=b))
        names += [new] if "{new}" in step else []
    outputs = draw.sample(names[2:], min(3, len(names) - 2)) or ["x"]
    source = _of(*lines, f"return ({', '.join(outputs)},), ()")
    run, replay = _run(source), Replay(source, "a test")
    torch.manual_seed(seed)
    weight = torch.randn(4, 3)
    for _ in range(4):
        given, state = _two(), {"w": weight}
        copies = {name: x.clone() for name, x in given.items()}
        own = {"w": weight.clone()}
        try:
            want = run(COMM, own, copies)
        except RuntimeError:  # a write into what is expanded
            with pytest.raises(RuntimeError):
                replay(run, COMM, state, given)
            return
        before = weight.clone()
        found = replay(run, COMM, state, given)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True)), source
        assert all(torch.equal(given[name], copies[name]) for name in given), source
        assert torch.equal(weight, own["w"]), source
        weight.copy_(before + 1)


class _Peer:
    """A communicator of two ranks, the other of which has twice the numbers."""

    def __init__(self) -> None:
        self.device, self.said = torch.device("cpu"), list[str]()

    def at(self, where: str) -> None:
        self.said.append(where)

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        self.said.append(f"{axis} {op} {tuple(x.shape)}")
        return x * 3 if op == "sum" else x * 2

    def size(self, axis: str) -> int:
        return 2


def test_what_is_sent_is_sent_again() -> None:
    """Breaks if ranks that know the calls send less than others, in another order, or do not say where they are."""
    source = _of(
        'comm.at("one")', 'comm.at("two")', 'z = comm.all_reduce(x + y, "tp") * comm.size("tp")',
        'unused = comm.all_reduce(x, "tp", op="max")', 'comm.at("three")', 'again = comm.all_reduce(x, "tp", op="max")',
        "return (z, again - 1), ()",
    )  # fmt: skip
    run, replay = _run(source), Replay(source, "a test")
    comm, collectives = _Peer(), ["tp sum (3, 4)", "tp max (3, 4)", "tp max (3, 4)"]
    for _ in range(4):
        given = _two()
        want = run(_Peer(), {}, given)
        comm.said.clear()
        found = replay(run, comm, {}, given)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
        assert [each for each in comm.said if "tp" in each] == collectives
    assert comm.said == ["two", collectives[0], collectives[1], "three", collectives[2]]
    assert replay.text.count("all_reduce") == 3 and "'two'" in replay.text and "'one'" not in replay.text


def test_two_inputs_of_one_memory_are_left_to_the_text() -> None:
    """Breaks if inputs that share memory once are taken for such that never do, or the reverse."""
    source = _of("z = x.add_(1)", "return (z, y * 1), ()")
    run = _run(source)
    x = torch.randn(3, 4)
    assert written_down(run, COMM, {}, {"x": x, "y": x.view(3, 4)})[1].why
    assert not written_down(run, COMM, {}, _two())[1].why


@pytest.mark.moderate
def test_what_lies_between_sends_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if a part between two sends gives other numbers once it is compiled, if layers that are alike are compiled
    one by one, if caches are copied, or if something is not sent.
    """
    torch.manual_seed(0)
    source = LAYER.replace("F.silu(found", "comm.all_reduce(F.silu(found").replace(
        "B, 1, 8)), keys", 'B, 1, 8)), "tp"), keys'
    )
    source = source.replace(
        "    y, *_ = ops.rms_norm(x,", '    y = comm.all_reduce(x * 0.5, "tp")\n    y, *_ = ops.rms_norm(y,'
    )
    state, run, comm = _state(), _run(source), _Peer()
    own = InPlace(load_program(source, "a test", "aot_eager"), "aot_eager")
    for at in (1, 2, 3, 4, 5):
        given = _inputs(at)
        copies = {name: x.clone() for name, x in given.items()}
        other = _Peer()
        want = run(other, state, copies)
        comm.said.clear()
        found = own(comm, state, given, torch.tensor(0), CACHES)
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
        assert [id(x) for x in found[2:]] == [id(given[name]) for name in CACHES]
        assert [each for each in comm.said if "tp" in each] == [each for each in other.said if "tp" in each]
    assert own._replay is not None and "runs uncompiled" not in caplog.text
    text = own._replay.text
    assert text.count("all_reduce(") == 4 and "linear" not in text and "index_copy_" not in text
    functions = {
        line.split("=")[-1].split("(")[0].strip() for line in text.splitlines() if ", = " in line or "_ = " in line
    }
    assert len(functions) <= 5, text
