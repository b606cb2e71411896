"""Numbers of rows that Python asks for: nothing reads one without asking; what is made of them is what eager has."""

from __future__ import annotations

import json
import logging
import math
import operator
import statistics
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.api import interpret
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from autopar.passes.row_counts import Count

ROWS = 8


class Told(Exception):
    """Somebody asks."""


class _Asked:
    """Tells of whatever is asked."""

    def _told(self, *_: Any) -> Any:
        raise Told

    compared = read = number = escapes = written = looked_up = _told


ASKS = """
0.5 * n; 0.5 + n; 0.5 - n; 0.5 / n; 0.5 ** n; 0.5 // n; 0.5 % n; divmod(0.5, n); 0.5 < n; 2.0 == n; n * 0.5; n / 8
2 ** n; n ** 2; pow(n, 2); 1j * n; n * 1j; complex(n); float(n); int(n); bool(n); not n; round(n, -1); n & 1; n << 1
~n < -2; math.sqrt(n); math.log(n); math.log2(n); math.isqrt(n); math.gcd(n, 2); math.pow(n, 2); math.comb(n, 2)
range(n); [0, 1][n]; math.exp(n); [0, 1, 2][:n]; list(range(9))[n:]; operator.index(n); n.__index__(); (0,) * n
f"{n}"; f"{n:3d}"; f"{n!r}"; str(n); repr(n); "%d" % n; "%s" % n; "%.1f" % n; "{}".format(n); hex(n); bin(n); chr(n)
n == 2; n in (1, 2); n in range(5); n in {2: 1}; {n}; {2: 1}.get(n); hash(n); (n, 1) == (2, 1); [2].index(n)
sorted([n, 2]); max(n, 2) > 3; min([n, 2]); any([n]); sum([0.5, n]); statistics.mean([n, 2.0]); n.bit_length()
np.float64(0.5) * n; np.int64(2) * n == 4; np.float32(2) < n; np.array([0.5, 2]) * n; np.arange(n)
n.real > 2; n.numerator > 2; n.conjugate() > 2; math.floor(n) > 2; math.ceil(n) > 2; math.trunc(n) > 2; round(n) > 2
abs(n) > 2; -n > 2; +n > 2; n // 2 > 2; n % 2 == 1; n - 1 == 1; 2 * n > 3; torch.Size([n]).numel(); n.to_bytes(2, "big")
math.prod([n, 2]) > 3; sum([n, 1]) > 2; n.as_integer_ratio()[0] > 2; np.prod(torch.Size([n, 3])) > 2; Fraction(n) > 2
""".replace("\n", ";").strip("; ")


@pytest.mark.parametrize("text", [each.strip() for each in ASKS.split(";") if each.strip()])
def test_nothing_reads_a_number_without_asking(text: str) -> None:
    """Breaks if what is written in C has the number of a trace, by which a program does what it does for that."""
    names = {"math": math, "operator": operator, "np": np, "torch": torch, "statistics": statistics}
    asked: Any = _Asked()
    n = Count(2, asked, lambda: torch.tensor(2), 2, ROWS)
    assert isinstance(n, int)
    with pytest.raises((Told, AttributeError)):  # or it has no such method: capture says so
        eval(text, {**names, "Fraction": Fraction, "n": n})


@pytest.mark.parametrize("read", [Decimal, json.dumps, np.sqrt])
def test_what_takes_no_such_number_says_so(read: Callable[[Any], Any]) -> None:
    """Breaks if what looks into an `int` by itself finds a number there."""
    asked: Any = _Asked()
    with pytest.raises(TypeError, match="Count|JSON"):
        read(Count(2, asked, lambda: torch.tensor(2)))


class Chooses(nn.Module):
    """`how` makes a number of rows that values choose: 2 of 8, or none."""

    def __init__(self, how: Callable[[Tensor, Tensor, int], Any]) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        rows = self.linear(x)[x[:, 0] > 1]
        return self.how(x.sum() + self.linear.bias.sum(), rows, rows.shape[0])


def _fractions(x: Tensor, rows: Tensor, n: int) -> Any:
    return x * (0.5 * n + len(rows) / len(x.expand(ROWS)) + 2**n + n**0.5 + 1.0 - n) + rows.square().sum() / (n + 1e-6)


def _extremes(x: Tensor, rows: Tensor, n: int) -> Any:
    largest = max([n, rows.shape[0] * 2, 1])
    return x * (max(n, 3) + min(1, n) + max(n, 1.5) + min(n, 0.5) + largest) + rows.sum() / max(n, 1)


def _tensors_of_numbers(x: Tensor, rows: Tensor, n: int) -> Any:
    made = torch.tensor([[n, 3], [n + 1, 2]]).sum() + torch.tensor([n, 0.5]).mean() + torch.as_tensor(n) / 3
    marked = (torch.arange(ROWS) < n).sum() + x.new_tensor([n]).sum()
    return x * (made + marked) + torch.zeros(n, 3).add(rows).sum() + rows[:n].sum() * abs(n - 3)


def _writes(x: Tensor, rows: Tensor, n: int) -> Any:
    print(f"{n} rows of {ROWS}", n, str(n) + "!")
    logging.getLogger(__name__).info("%d of %s", n, len(rows))
    assert n >= 0, f"{n} rows"
    return x * n


def _returns(x: Tensor, rows: Tensor, n: int) -> Any:
    return {"loss": x + rows.sum(), "n": n, "more": [len(rows), int(n)], "share": 0.1 * n, "float": float(n)}


@pytest.mark.moderate
@pytest.mark.parametrize("how", [_fractions, _extremes, _tensors_of_numbers, _returns])
def test_what_is_made_of_numbers_is_what_eager_has(how: Callable[..., Any]) -> None:
    """Breaks if a program has the number of its trace, another type of number, or is refused."""
    torch.manual_seed(0)
    model, shift = Chooses(how), torch.zeros(ROWS, 3)
    program = capture(model, {"x": torch.empty(ROWS, 3, device="meta")})
    for chosen in (2, 5, 0):
        shift[:, 0] = 10.0 * (torch.arange(ROWS) < chosen) - 4
        x = torch.rand(ROWS, 3) + shift
        found, _ = interpret.run(
            program, interpret.state_of(model, program), interpret.input_tensors(program, {"x": x})
        )
        eager = tree_leaves(model(x))
        for one, each in zip(found, eager, strict=True):
            if isinstance(each, Tensor):
                torch.testing.assert_close(one, each)
            else:  # a number of Python's, of as many bits
                assert one.item() == each


def _decides(x: Tensor, rows: Tensor, n: int) -> Any:
    return x if 0.5 * n > 1 else x * 3


def _keeps_a_text(x: Tensor, rows: Tensor, n: int) -> Any:
    return x * {"2": 2.0}.get(f"{n}", 1.0)


def _is_odd(x: Tensor, rows: Tensor, n: int) -> Any:
    return x * (int(n) % 2)


def _has_a_factor(x: Tensor, rows: Tensor, n: int) -> Any:
    return x * math.gcd(n, 2)


def _puts_it_into_a_list(x: Tensor, rows: Tensor, n: int) -> Any:
    weights = [1.0, 2.0, 3.0]
    weights.insert(n, 5.0)
    return x * weights[1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_decides, "by the value of a tensor.*test_row_counts.py:"),
        (_is_odd, "how many rows a mask chooses.*test_row_counts.py:"),
        (_has_a_factor, "how many rows a mask chooses.*test_row_counts.py:"),
        (_keeps_a_text, "how many rows a mask chooses.*test_row_counts.py:"),
        (_puts_it_into_a_list, "how many rows a mask chooses.*test_row_counts.py:"),
    ],
)
def test_what_it_decides_is_refused(how: Callable[..., Any], said: str) -> None:
    """Breaks if half of the rows, a text or a place in a list decide as for the number of a trace."""
    with pytest.raises(AutoparError, match=said):
        capture(Chooses(how), {"x": torch.empty(ROWS, 3, device="meta")})


def test_what_is_written_down_is_let_be(capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks if a model that prints how many rows there are is refused."""
    capture(Chooses(_writes), {"x": torch.empty(ROWS, 3, device="meta")})
    assert "rows of 8" in capsys.readouterr().out
