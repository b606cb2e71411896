"""The checker of generated programs: what autopar and people write passes, and each kind of wrong edit is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.main import app
from autopar.cli.models import catalogue
from autopar.ir.sharding import Partial, Placement, Replicate, Shard, Sharding, Step, is_valid, redistribution_steps
from autopar.machine.mesh import Mesh
from autopar.passes.lowering import PhaseBuilder
from autopar.runtime.checker.moves import after
from autopar.runtime.checker.program import _once_a_type, check_types
from autopar.runtime.checker.ranks import RankInt
from autopar.runtime.checker.types import Axes, Typed, bare, give
from autopar.runtime.checker.typing_mode import TypedOperators, Typing
from tests.unit.runtime.programs import PLANS, mlp_interface, mlp_source

pytestmark = pytest.mark.unit
STRATEGIES = {
    "llama": {"dp": "zero3", "tp": "tensor"},
    "gpt2": {"dp": "zero2", "tp": "tensor+sequence"},
    "t5": {"pp": "pipeline(1f1b)", "dp": "zero1"},
    "bert": {"dp": "ddp", "cp": "ring"},
}


AVERAGE = (r'comm\.all_reduce\(part, "dp"\)', 'comm.all_reduce(comm.all_reduce(part, "dp") / comm.size("dp"), "dp")')


@lru_cache(maxsize=8)
def planned(name: str) -> Plan:
    strategy = STRATEGIES[name]
    loaded = catalogue.load(name, tiny=True, device="cpu")
    mesh = Mesh(dict.fromkeys(strategy, 2), hardware="cpu")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy)


def edited(text: str, pattern: str, replacement: str, line: str = "") -> str:
    """The text with the first match of a pattern replaced, in the first line that has `line` where it matters."""
    lines = text.splitlines()
    for number, each in enumerate(lines):
        code = each.partition("  #")[0]
        if line in code and re.search(pattern, code):
            lines[number] = re.sub(pattern, replacement, code, count=1)
            return "\n".join(lines) + "\n"
    raise AssertionError(f"no line with {line!r} matches {pattern!r}")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_people_write_passes(plan: str, microbatches: int) -> None:
    """Breaks when the checker knows only what autopar's own emission writes."""
    sizes, zero3 = PLANS[plan]
    check_types(mlp_source(sizes, zero3, microbatches), mlp_interface(sizes, zero3, microbatches=microbatches))


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        (r'comm\.all_reduce\(part, "dp"\)', "part", "output is not as its interface says"),
        (r'comm\.all_reduce\(product, "tp"\)', "product", "add on these parts"),
        (r'comm\.all_reduce\(product, "tp"\)', 'comm.all_reduce(product, "dp")', "no terms of a sum over dp"),
        (r'comm\.all_reduce\(product, "tp"\)', 'comm.all_reduce(product, "tp", op="max")', "no terms of a maximum"),
        (r'"reduce_scatter dp"', '"slice dp"', "do not hold the whole of it"),
        (r"d_out\.t\(\) @ hidden", "hidden.t() @ d_out", "the gradient is not as its interface says"),
        (r'comm\.slice\(inputs\["y"\], "dp", 0\)', 'inputs["y"]', "error = logits - y). given f64[8/dp, 4], f64[8, 4]"),
        (r"error = logits - y", "error = logits - y if comm.rank == 0 else y - logits", "the number of its rank"),
        (r"error = logits - y", "error = logits - torch.rand_like(y)", "draws other numbers on every rank"),
        (r"error = logits - y", "error = logits[y.sum(1).nonzero()[:1, 0]] - y", "that a rank does not have whole"),
        (r"error = logits - y", "error = logits - y[0]", "select on these parts is no part of one whole select"),
        (r'"up\.bias": d_up_bias,', "", "up.bias"),
        (r"error = logits - y", "error = logit - y", "NameError: name 'logit' is not defined (line "),
        (r"error = logits - y", "error = logits - y[0, 0, 0]", "IndexError"),
    ],
)
def test_wrong_edits_of_a_persons_program(pattern: str, replacement: str, said: str) -> None:
    """Breaks when an edit passes that gives wrong numbers, or the error does not say what is wrong."""
    sizes, zero3 = PLANS["zero3+tensor"]
    text = edited(mlp_source(sizes, zero3), pattern, replacement)
    with pytest.raises(AutoparError, match=re.escape(said)):
        check_types(text, mlp_interface(sizes, zero3))


def test_what_is_divided_by_the_ranks_is_a_term() -> None:
    """Breaks when an average over ranks, as people write it, is refused; or any quotient is taken for a term."""
    sizes, zero3 = PLANS["ddp"]
    text, interface = edited(mlp_source(sizes, zero3), *AVERAGE), mlp_interface(sizes, zero3)
    check_types(text, interface)
    with pytest.raises(AutoparError, match="no terms of a sum over dp"):
        check_types(text.replace('comm.size("dp")', "2"), interface)
    with pytest.raises(AutoparError, match="no terms of a sum over dp"):
        check_types(text.replace(' / comm.size("dp")', ' * comm.size("dp")'), interface)


_SUM = r'comm\.all_reduce\((\w+), "(\w+)"\)'


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("model", "pattern", "replacement", "line"),
    [
        ("llama", _SUM, r"\1", "o_proj = comm"),
        ("llama", _SUM, r"\1", "grad_norm = comm"),
        ("llama", _SUM, r'comm.all_reduce(comm.all_reduce(\1, "\2"), "\2")', "down_proj = comm"),
        ("llama", _SUM, r'comm.all_reduce(\1, "dp")', "grad_input_layernorm = comm"),
        ("llama", r', op="max"', "", "amax = comm"),
        ("llama", r', start=comm\.index\("tp"\) \* \d+', "", "ops.embedding("),
        ("llama", r', start=comm\.index\("tp"\) \* \d+', ', start=comm.index("tp") * 16', "ops.take_label("),
        ("llama", r', start=comm\.index\("tp"\) \* ', ', start=comm.index("dp") * ', "ops.cross_entropy_grad("),
        ("llama", r"\((\w+), (\w+)\)", r"(\2, \1)", "ops.linear_grad_weight("),
        ("llama", r"loss = loss / count", "loss = loss", ""),
        ("gpt2", r'comm\.positions\(([^)]*\)), "[^"]*"\)', r'comm.positions(\1, "dp=S(0), tp=R")', "tp=S(1)"),
        ("gpt2", r'comm\.positions\([^)]*\), "[^"]*"\)', "[]", "ops.dropout("),
        ("gpt2", r"comm\.reduce_scatter\((\w+), \"tp\", \d\)", r"\1", ""),
        ("gpt2", r"comm\.all_gather\((\w+), \"tp\", \d\)", r"\1", ""),
        ("t5", r'"reduce_scatter dp"', '"slice dp"', ""),
        ("bert", r'cp=S\(2\)"\), query_starts', 'cp=R"), query_starts', ""),
        ("bert", r'comm\.starts\((\d+), "cp=S\(0\)"\)', r"[0]", ""),
    ],
)  # fmt: skip
def test_wrong_edits_of_a_generated_program(model: str, pattern: str, replacement: str, line: str) -> None:
    """Breaks when an edit passes that gives wrong numbers. Each was launched without a word before."""
    plan = planned(model)
    with pytest.raises(AutoparError, match="the program is not right") as found:
        check_types(edited(plan.source, pattern, replacement, line), plan.interface)
    assert "value:" not in str(found.value) and "relay:" not in str(found.value)


@pytest.mark.moderate
def test_an_error_names_line_operands_and_types() -> None:
    """Breaks when one who edited a program does not see which line is wrong, or why."""
    plan = planned("llama")
    text = edited(plan.source, _SUM, r"\1", "o_proj = comm")
    number = 1 + next(i for i, line in enumerate(text.splitlines()) if "hidden_states + o_proj" in line)
    with pytest.raises(AutoparError) as found:
        check_types(text, plan.interface)
    said = str(found.value)
    assert f"line {number}, model.layers.0 forward" in said and "hidden_states_1 = hidden_states + o_proj" in said
    assert "f32[8/dp, 16, 64], f32[8/dp, 16, 64] +tp" in said


def test_what_changes_nothing_passes() -> None:
    """Breaks when another way to write the same is refused: a sum and a slice for a scatter, a name, a comment."""
    plan = planned("llama")
    text = plan.source.replace('"reduce_scatter dp"', '"all_reduce dp, slice dp"')
    text = re.sub(r"(?<![.\w])up_proj\b(?!\.)", "up", text)
    check_types("\n".join(line.partition("  #")[0] for line in text.splitlines()), plan.interface)


@pytest.mark.moderate
def test_a_fault_in_lowering_is_found_when_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a plan is given out whose program the checker refuses, or AUTOPAR_CHECK=0 does not let it out."""
    moved = PhaseBuilder._move

    def without_sums(self, source, step, name):  # type: ignore[no-untyped-def]
        return source if step.kind == "all_reduce" else moved(self, source, step, name)

    monkeypatch.setattr(PhaseBuilder, "_move", without_sums)
    loaded = catalogue.load("mlp", tiny=True, device="cpu")
    mesh = Mesh({"tp": 2}, hardware="cpu")
    with pytest.raises(AutoparError, match="does not pass its own checker"):
        autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="tensor")
    monkeypatch.setenv("AUTOPAR_CHECK", "0")
    autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="tensor")


@pytest.mark.moderate
def test_the_command_line(tmp_path: Path) -> None:
    """Breaks when an edited file cannot be checked by itself, or its faults end without an exit code."""
    plan, program, file = planned("llama"), tmp_path / "program.py", tmp_path / "plan.json"
    plan.save(file)
    program.write_text(plan.source)
    run = CliRunner().invoke
    well = run(app, ["check", str(program), "--plan", str(file)])
    assert well.exit_code == 0 and "is right" in well.output, well.output
    program.write_text(edited(plan.source, _SUM, r"\1", "o_proj = comm"))
    wrong = run(app, ["check", str(program), "--plan", str(file)])
    assert wrong.exit_code == 1 and "add on these parts" in wrong.output
    assert run(app, ["check", str(tmp_path / "none.py"), "--plan", str(file)]).exit_code == 1


def test_a_gradient_that_is_not_returned() -> None:
    """Breaks if a parameter that is never trained passes."""
    plan = planned("llama")
    before, _, after_it = plan.source.rpartition("    return gradients\n")
    text = f'{before}    del gradients["model.norm.weight"]\n    return gradients\n{after_it}'
    with pytest.raises(AutoparError, match=r"no gradient \(model\.norm\.weight\)"):
        check_types(text, plan.interface)


def test_a_region_is_typed_again_for_other_types() -> None:
    """Breaks if what was found of one layer is taken for another, whose operands have the same shapes alone."""
    calls: list[int] = []
    run = _once_a_type(lambda p, x: calls.append(1) or x, Typing(Axes(("dp",), (2,)), ""))
    for placement in (Shard(0), Replicate(), Shard(0), Partial()):
        run({}, _given((2, 3), (4 if placement == Shard(0) else 2, 3), placement))
    assert len(calls) == 3


# -- moves


def _placements(dims: int) -> list[Placement]:
    splits: list[Placement] = [Shard(dim, outer, zigzag) for dim in range(dims) for outer, zigzag in
                               ((1, False), (2, False), (2, True))]  # fmt: skip
    return [Replicate(), Partial(), Partial("max"), *splits]


def test_moves_mean_what_redistributions_follow() -> None:
    """Breaks when the checker and what the runtime does disagree about a collective: each step of every way."""
    axes, shape, count = Axes(("a", "b"), (2, 2)), (16, 16), 0
    every = [each for each in product(_placements(2), repeat=2) if is_valid(shape, each, axes.sizes)]
    for source, target in product(every, repeat=2):
        steps = redistribution_steps(source, target, axes.sizes)
        if steps is None:
            continue
        now = axes.typed(shape, source)
        for step in steps:
            following = after(step, now, axes)
            assert not isinstance(following, str), f"{source} to {target}: {step} of {now}: {following}"
            now = following
        assert now.sharding == target
        count += len(steps)
    assert count > 1000


@pytest.mark.parametrize(
    ("sharding", "step"),
    [
        ((Shard(0), Replicate()), Step("all_reduce", 0)),
        ((Partial(), Replicate()), Step("all_gather", 0, 0)),
        ((Partial(), Replicate()), Step("all_reduce", 1)),
        ((Partial(), Replicate()), Step("slice", 0, 0)),
        ((Partial(), Replicate()), Step("reduce_scatter", 0, 0, op="max")),
        ((Shard(0), Shard(0)), Step("all_gather", 0, 0)),
        ((Shard(0, 2), Replicate()), Step("all_gather", 0, 0)),
        ((Shard(0, 2), Replicate()), Step("all_gather", 0, 0, 2, zigzag=True)),
        ((Shard(0), Replicate()), Step("all_gather", 0, 1)),
        ((Replicate(), Shard(1)), Step("all_to_all", 1, 0, from_dim=0)),
        ((Replicate(), Shard(0)), Step("slice", 0, 0)),
        ((Shard(0), Replicate()), Step("all_gather", 0, 0, size=9)),
    ],
)  # fmt: skip
def test_moves_that_have_no_meaning(sharding: Sharding, step: Step) -> None:
    """Breaks when a collective is taken for one that gives a whole, or a piece, of something."""
    axes = Axes(("a", "b"), (2, 2))
    found = after(step, axes.typed((16, 16), sharding), axes)
    assert isinstance(found, str) or (step.kind == "slice" and found.sharding == (Shard(0, 2), Shard(0)))


# -- what differs from rank to rank


def test_offsets_are_kept_as_expressions() -> None:
    """Breaks when an offset of one rank is taken for that of all."""
    dp, tp = RankInt(0, {"dp": 1}), RankInt(0, {"tp": 1})
    place = (dp * 2 + tp) * 8 + 3 - 1
    assert (place.base, dict(place.terms)) == (2, {"dp": 16, "tp": 8})
    assert (dp - dp).terms == {} and (2 * dp).terms == {"dp": 2} and (5 - tp).base == 5
    refused: Sequence[str] = ("dp == 0", "dp < tp", "bool(dp)", "dp % 2", "dp * tp", "dp // 2")
    for text in refused:
        with pytest.raises(AutoparError, match="by the number of its rank"):
            eval(text, {"dp": dp, "tp": tp})


@pytest.mark.moderate
def test_typing_needs_no_seed_of_torch() -> None:
    """Breaks when checking a program draws from the process's random numbers."""
    state = torch.random.get_rng_state()
    plan = planned("gpt2")
    check_types(plan.source + "\n# read again\n", plan.interface)
    assert torch.equal(state, torch.random.get_rng_state())


# -- dims of one element


def _given(
    shape: Sequence[int], whole: Sequence[int], *placements: Placement, dtype: torch.dtype = torch.float32
) -> Tensor:
    x = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return give(x, {Typed(tuple(whole), placements)})


def test_a_rank_that_has_one_row() -> None:
    """Breaks if sizes of one are not taken for sizes: a table of two rows over two ranks, and its gradient."""
    typing = Typing(Axes(("dp", "tp"), (2, 2)), "")
    gradient = _given((2, 3, 8), (4, 3, 8), Shard(0), Replicate())
    ids = _given((2, 3), (4, 3), Shard(0), Replicate(), dtype=torch.int64)
    operators = TypedOperators(typing)
    made = operators.embedding_grad(gradient, ids, 1, start=RankInt(0, {"tp": 1}))
    assert bare(typing.axes.of(made)) == {Typed((2, 8), (Partial(), Shard(0)))}
    with pytest.raises(AutoparError, match="no part of one whole"):
        operators.embedding_grad(gradient, ids, 1, start=RankInt(0, {"dp": 1}))


def test_a_sum_over_one_element_needs_no_statement() -> None:
    """Breaks if a row that a rank has alone may not be a term of the sum over rows, or several rows may."""
    typing = Typing(Axes(("dp", "tp"), (2, 2)), "")
    ids = _given((1, 3), (1, 3), Replicate(), Replicate(), dtype=torch.int64)
    operators = TypedOperators(typing)
    made = operators.embedding_grad(_given((1, 3, 8), (4, 3, 8), Shard(0), Shard(0)), ids, 5)
    assert bare(typing.axes.of(made)) == {Typed((5, 8), (Partial(), Partial()))}
    with pytest.raises(AutoparError, match="no part of one whole"):
        operators.embedding_grad(_given((2, 3, 8), (4, 3, 8), Shard(0), Replicate()), ids, 5)


def test_what_repeats_itself_lies_in_whatever_stripes_it_meets() -> None:
    """Breaks if a gradient that is the same all along a dim is refused beside values that lie there in stripes."""
    typing, aten = Typing(Axes(("tp",), (2,)), ""), torch.ops.aten
    x, one = _given((8, 6, 4), (8, 12, 4), Shard(1, 6)), _given((), (), Replicate())
    typing.typed(aten.neg.default, (x,), {})
    spread = typing.typed(aten.expand.default, (one, [8, 6, 4]), {})
    assert Typed((8, 12, 4), (Shard(1, 6),)) in bare(typing.axes.of(spread))
    summed = typing.typed(aten.sum.dim_IntList, (typing.typed(aten.mul.Tensor, (spread, x), {}), [1]), {})
    assert Typed((8, 4), (Partial(),)) in bare(typing.axes.of(summed))


class Scaled(torch.nn.Module):
    """Every channel of a row is scaled, and all that a row then is is added up: its gradient is alike all along."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(6, 8)

    def forward(self, x: Tensor, by: Tensor) -> dict[str, Tensor]:
        """x [8, 6, 8], by [8, 6] -> loss []."""
        scaled = x * self.project(by).unsqueeze(1)
        return {"loss": scaled.flatten(1).sum(1).square().sum()}


@pytest.mark.moderate
def test_what_repeats_itself_lies_in_stripes_that_nothing_was_met_in() -> None:
    """Breaks if pieces of a gradient that is alike along channels that were laid together are refused, since no
    statement before it has anything in as many stripes; or if they are then taken for other pieces.
    """
    batch = {"x": torch.randn(8, 6, 8), "by": torch.randn(8, 6)}
    plan = autopar.plan(Scaled(), Mesh({"tp": 2}, hardware="cpu"), example_inputs=batch, strategy="auto")
    wide, cut = r"\.expand\(B, 48\)\.reshape\(B, 6, 8\)", r'comm\.slice\(grad_scaled, "tp", 2\)'
    text = edited(edited(plan.source, wide, ".expand(B, 24).reshape(B, 6, 4)"), cut, "grad_scaled")
    check_types(text, plan.interface)
    assert plan.with_source(text).verify().ok
    with pytest.raises(AutoparError, match="the program is not right"):
        check_types(edited(text, r'slice\(x, "tp", 2\)', 'slice(x, "tp", 2, 2)'), plan.interface)
    with pytest.raises(AutoparError, match="computes another"):
        check_types(edited(text, r"reshape\(B, 6, 4\)", "reshape(B, 6, 4) * 2"), plan.interface)


def test_many_operands_that_may_be_several_things() -> None:
    """Breaks if what they may be together is tried in every combination: a `cat` of twenty took for ever."""
    typing = Typing(Axes(("tp",), (2,)), "")
    each = give(torch.empty(4, device="meta"), {Typed((4,), (Replicate(),)), Typed((8,), (Shard(0),))})
    rows = [torch.ops.aten.unsqueeze.default(each, 0) for _ in range(20)]
    for row in rows:
        give(row, {Typed((1, 4), (Replicate(),)), Typed((1, 8), (Shard(1),))})
    made = typing.typed(torch.ops.aten.cat.default, (rows,), {})
    assert bare(typing.axes.of(made)) == {Typed((20, 4), (Replicate(),)), Typed((20, 8), (Shard(1),))}
