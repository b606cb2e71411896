"""A slice of what benchmarks/proofs/operators.py proves of all operators of torch's op_db."""

from __future__ import annotations

import hashlib

import pytest

from autopar import __version__
from benchmarks.proofs import operators
from benchmarks.proofs.operator_calls import Recorded, database

pytestmark = pytest.mark.unit
COUNT = 24


def chosen() -> list[str]:
    """Others for each version, the same wherever it is tested."""
    return sorted(database(), key=lambda name: hashlib.sha256(f"{__version__} {name}".encode()).digest())[:COUNT]


@pytest.mark.slow
def test_some_of_all_operators_are_right() -> None:
    """Breaks if a rule, registered or discovered, splits what cannot be split, or raises, in odd sizes too."""
    known: dict[str, operators.Found] = {}
    rows = [operators.prove_apart(name, known, most=3, sizes=1) for name in chosen()]
    assert [line for row in rows for line in (*row.wrong, *row.crashed)] == []
    assert sum(row.verdict == "right" for row in rows) >= COUNT // 2


def test_the_proof_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if wrong rules pass: a mean that is a sum of the means of its parts."""
    import torch

    from autopar.ir.rule import parse_rule

    def wrong(call: object) -> object:
        return parse_rule("a b -> a | b sum | linear 0", [(4, 6)], [(4,)])

    call = Recorded(torch.ops.aten.mean.dim, (torch.randn(4, 6, dtype=torch.float64), [1]), {})
    assert operators.prove_call(call).wrong == []
    monkeypatch.setattr(operators, "rule_for", wrong)
    found = operators.prove_call(call)
    assert [line.partition("under ")[2] for line in found.wrong] == [
        "b on 2: result 0 differs", "b on 3: result 0 differs"
    ]  # fmt: skip
    assert found.proven == 3
