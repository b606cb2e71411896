"""Every registered rule, proved by execution on sample calls: all strategies of one axis, and random ones of two.

What breaks it: a rule that says a factor can be split where the results then do not add up to the whole; a size or
offset argument that is not localized; an operator registered without a sample.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.op_call import flatten_results
from autopar.operators.rules import op_call, registered, rule_for
from autopar.operators.rules.verify import run, verify_rule
from tests.unit.rules.samples import CASES, POINTWISE, SAMPLES, STAND_INS
from tests.unit.rules.tensors import K2, V2, Q, b, i, p, r

pytestmark = pytest.mark.unit


def overload(name: str) -> Any:
    namespace, operator, which = name.split(".")
    if namespace == "transformers":
        pytest.importorskip("transformers.integrations.moe")
        if not hasattr(torch.ops.transformers, operator):
            pytest.skip(f"this transformers has no {operator}")
    return getattr(getattr(getattr(torch.ops, namespace), operator), which)


def split_keywords(sample: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sample[:-1], sample[-1]) if sample and isinstance(sample[-1], dict) else (sample, {})


@pytest.mark.parametrize(("name", "sample"), [(c[0], c[1:]) for c in CASES], ids=[c[0] for c in CASES])
def test_rule_holds(name: str, sample: tuple[Any, ...]) -> None:
    args, kwargs = split_keywords(sample)
    target = overload(name)
    runnable = STAND_INS.get(name, target)
    rule = rule_for(op_call(target, args, kwargs, run(runnable, args, kwargs)))
    assert verify_rule(runnable, args, kwargs, rule, outers={f.name: (2, 3) for f in rule.factors}) == []


@pytest.mark.parametrize(("name", "sample"), [(c[0], c[1:]) for c in CASES], ids=[c[0] for c in CASES])
def test_rule_holds_zigzag(name: str, sample: tuple[Any, ...]) -> None:
    """Breaks if a rule is true of pieces in their order only."""
    args, kwargs = split_keywords(sample)
    target = overload(name)
    runnable = STAND_INS.get(name, target)
    rule = rule_for(op_call(target, args, kwargs, run(runnable, args, kwargs)))
    assert verify_rule(runnable, args, kwargs, rule, zigzags={f.name: (2, 4) for f in rule.factors}, num_pairs=0) == []


def test_what_is_called_an_alias_moves_no_memory() -> None:
    wrong = []
    for name, *sample in CASES:
        args, kwargs = split_keywords(tuple(sample))
        if name.startswith("transformers") or name in STAND_INS or not args or not isinstance(args[0], Tensor):
            continue
        target = overload(name)
        rule = rule_for(op_call(target, args, kwargs, run(target, args, kwargs)))
        if rule.alias:
            results = flatten_results(target(*args, **kwargs))
            own = args[0].untyped_storage().data_ptr()
            wrong += [name for result in results if result.untyped_storage().data_ptr() != own]
    assert wrong == []


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_operators_need_no_rule_of_their_own(name: str) -> None:
    target = overload(f"aten.{name}.default")
    args = (b(4, 6) if name.endswith("not") else p(4, 6),)
    rule = rule_for(op_call(target, args, {}, run(target, args, {})))
    assert str(rule) == "d0 d1 -> d0 d1"
    assert verify_rule(target, args, {}, rule) == []


def test_every_registered_rule_has_a_sample() -> None:
    assert set(registered()) - set(SAMPLES) == set()
    assert set(SAMPLES) - set(registered()) == set()


@pytest.mark.parametrize(
    ("name", "sample", "text"),
    [
        ("aten.view.default", (r(6, 24), [2, 3, 3, 8]), "(d0 d1) (d2 d3) -> d0 d1 d2 d3 | linear 0"),
        (
            "aten.view.default",
            (r(6, 4), [8, 3]),
            "(d0 d1) d2 -> (d0 d3) d4 | d0=2, d1=3 !, d2 !, d3=4 !, d4 ! | linear 0",
        ),
        ("aten.slice.Tensor", (r(4, 8), 1, 4, 8), "d0 (c f) -> d0 f | c=2 ! | linear 0"),
        ("aten.split.Tensor", (r(4, 9), 3, 1), "d0 (c f) -> d0 f, d0 f, d0 f | c=3 ! | linear 0"),
        ("aten.sum.dim_IntList", (r(4, 6), [1], True), "d0 d1 -> d0 1 | d1 sum | linear 0"),
        (
            "autopar.attention.default",
            (Q, K2, V2, {"scale": 1.0}),
            "b (h r) s d, b h t d, b h t e -> b (h r) s e, b (h r) s | r=2, d !, t !, s ring t 1 2 | linear",
        ),
        ("autopar.embedding.default", (r(8, 6), i(8, 4)), "v d, b0 -> b0 d | v sum | linear 0"),
        ("autopar.repeat_heads.default", (r(2, 2, 6, 8), 3, 6), "b h t d -> b (h r) t d | r=3, (h r) | linear 0"),
    ],
)
def test_rules_read_as_they_should(name: str, sample: tuple[Any, ...], text: str) -> None:
    target = overload(name)
    args, kwargs = split_keywords(sample)
    rule = rule_for(op_call(target, args, kwargs, run(target, args, kwargs)))
    assert str(rule) == text.removesuffix(" | linear")


def test_terms_are_cast_where_none_can_overflow() -> None:
    """Breaks if large terms that cancel become infinite on the way: float16 ends at 65,504, bfloat16 does not."""
    cast = torch.ops.aten._to_copy.default
    for source, narrow, lets_through in (
        (torch.float32, torch.float16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.int64, False),
    ):
        args, kwargs = (r(4, 6).to(source),), {"dtype": narrow}
        call = op_call(cast, args, kwargs, run(cast, args, kwargs))
        assert bool(rule_for(call).linear) == lets_through, (source, narrow)


def test_a_wrong_rule_is_found_out() -> None:
    from autopar.operators.rules import parse_rule

    x, y = r(4, 6), r(6, 8)
    wrong = parse_rule("m k, k n -> m n | k max", [(4, 6), (6, 8)], [(4, 8)])
    failures = verify_rule(torch.ops.aten.mm.default, (x, y), {}, wrong)
    assert failures
    assert all("result 0 differs" in failure and " k" in failure for failure in failures)


def test_an_operator_that_cannot_be_tried_is_replicated_with_a_warning() -> None:
    target = torch.ops.aten.nonzero_static.default
    call = op_call(target, (r(4, 6),), {"size": 100}, target(r(4, 6), size=100))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule, again = rule_for(call), rule_for(call)
    assert not any(factor.split for factor in rule.factors)
    assert again == rule
    assert [str(w.message).split()[0] for w in caught] == ["aten.nonzero_static.default"]
