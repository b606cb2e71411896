"""The text that a plan runs, beside that which is proven.

A proof traces the model again, in one dtype, and lowers it by the plan's decisions: what is proven is that text. It is
the plan's own but for what follows from the dtype: comments, `del` (of what is large), the limits of dtypes that masks
are filled with. Where more differs, the traces did, or the plan's program casts, and its own text has to run as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.api.promote import in_dtype
from autopar.ir.interface import PipelineInterface, ProgramInterface, StageInterface, TensorInterface
from autopar.ir.program import Program
from autopar.passes.emit import interface_of

if TYPE_CHECKING:
    from autopar.planner.plan.record import PlanRecord

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LIMITS = {
    getattr(torch.finfo(dtype), name): name for dtype in _DTYPES for name in ("max", "eps", "tiny", "smallest_normal")
}


def text_in(source: str, dtype: torch.dtype) -> str:
    """A program with the floating-point types that it writes read as `dtype`, as `promote.only` reads the model's; so
    are the complex ones, which are pairs of these.
    """
    source = re.sub(r"\btorch\.(complex128|complex64|complex32)\b", str(dtype.to_complex()), source)
    return re.sub(r"\btorch\.(float64|float32|bfloat16|float16)\b", str(dtype), source)


def own_text(plan: PlanRecord, proven: str, dtype: torch.dtype) -> str:
    """A plan's text in `dtype`; limits of other dtypes, which `proven` has not, are this one's there."""
    source = text_in(plan.source, dtype)
    for value, name in _LIMITS.items():
        if repr(value) not in proven:
            source = re.sub(
                rf"(?<![\d.]){re.escape(repr(value))}(?!\d)", repr(getattr(torch.finfo(dtype), name)), source
            )
    return source


def is_proven_text(
    plan: PlanRecord, program: Program, source: str, state: Mapping[str, Tensor], dtype: torch.dtype
) -> bool:
    """Whether a proof that ran `source` on `state` ran what the plan does, but for what a dtype decides. program:
    lowered, of `source`.
    """
    if plan.source_is_edited:  # it is what the proof runs
        return True
    if any(each is not state.get(name) for name, each in state_for(plan, state, dtype).items()):
        return False
    plain, other = (border_in(replace(each, meaning=None), dtype) for each in (plan.interface, interface_of(program)))
    return plain == other and (plan.source == source or _statements(plan.source, dtype) == _statements(source, dtype))


def has_shapes_of(plan: PlanRecord, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a plan's own text takes these inputs: they are as long as those that it was planned for."""
    return {each.name: each.shape for each in plan.interface.inputs} == {n: tuple(x.shape) for n, x in tensors.items()}


def border_in(interface: ProgramInterface, dtype: torch.dtype) -> ProgramInterface:
    """A border with `dtype` in the place of all floating-point types."""
    found = _in_dtype(interface, dtype)
    assert isinstance(found, ProgramInterface)
    return found


def state_for(plan: PlanRecord, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that a plan's own text reads: those of the proof, with the constants of the plan's trace where they
    are others, and not merely rounded. A plan that was loaded from a file has none.
    """
    found = dict(state)
    for name, value in plan.program.constants.items() if plan.program is not None else ():
        proven = state.get(name)
        if proven is None or not _is_rounded(value, proven):
            found[name] = value.detach().to("cpu", in_dtype(value.dtype, dtype))
    return found


def _is_rounded(value: Tensor, exact: Tensor) -> bool:
    if value.shape != exact.shape or value.is_meta:
        return value.is_meta
    if not (value.is_floating_point() or value.is_complex()):
        return value.dtype == exact.dtype and torch.equal(value.cpu(), exact)
    if exact.is_floating_point():  # what masks are filled with is as far as a dtype goes
        is_limit = exact.abs() == torch.finfo(exact.dtype).max
        exact = torch.where(is_limit, exact.sign() * torch.finfo(value.dtype).max, exact)
    near = exact.to(value.dtype)
    return torch.allclose(value.cpu(), near, rtol=4 * torch.finfo(value.dtype).eps, atol=0.0, equal_nan=True)


class _Plain(ast.NodeTransformer):
    """Takes what a dtype decides out of a program."""

    def visit_Delete(self, node: ast.Delete) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        limit = _LIMITS.get(node.value) if isinstance(node.value, float) else None
        return node if limit is None else ast.Constant(f"a dtype's {limit}")


def _statements(source: str, dtype: torch.dtype) -> str:
    return ast.dump(_Plain().visit(ast.parse(text_in(source, dtype))))


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_in_dtype(each, dtype) for each in value)
    if isinstance(value, TensorInterface):
        named = getattr(torch, value.dtype)
        return replace(value, dtype=str(in_dtype(named, dtype)).removeprefix("torch."))
    if isinstance(value, (ProgramInterface, PipelineInterface, StageInterface)):
        return replace(value, **{each.name: _in_dtype(getattr(value, each.name), dtype) for each in fields(value)})
    return value
