"""What a value of a microbatch says of the same value of the whole batch.

V is the value that the whole batch gives, v_i the one of microbatch i of m:

    Whole    V = m^power · v_i, alike for every i
    Rows     V, its dim `dim` seen as (outer, m, rest), is m^power · v_i at [:, i, :]
    Order    where a sort of all rows takes each from: rows that are taken by it are rows in another order
    Terms    V = m^power · Σ v_i, or with a count c: V = m^power · Σ c_i·v_i / Σ c_i
    Coupled  none of these: no v_i says enough of V

A sum over rows is Terms(0), a mean Terms(-1). A power other than 0 comes from constants that the model makes of the
number of rows: `loss.sum() / len(x)` is a mean, though the graph divides by a number like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from autopar.ir.rule import Rule


@dataclass(frozen=True, slots=True)
class Whole:
    """Independent of the batch, but for a power of the number of its rows."""

    power: int = 0

    def __str__(self) -> str:
        return "the same for every row" if not self.power else "made of the number of rows"


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i of dim `dim` depends on row i of the batch only; order: on the row that a sort, this node, puts there."""

    dim: int
    outer: int = 1
    power: int = 0
    order: fx.Node | None = None

    def __str__(self) -> str:
        return f"by rows along dim {self.dim}" + ", in the order of a sort" * (self.order is not None)


@dataclass(frozen=True, slots=True)
class Order:
    """Where a sort, `node`, takes each of its elements from, of which `by` belong to a row; inverse: puts it."""

    node: fx.Node
    by: int = 1
    inverse: bool = False

    def __str__(self) -> str:
        return "the order of a sort along all rows"


@dataclass(frozen=True, slots=True)
class Terms:
    """A sum (power 0) or average (power -1) over the rows, or one weighted by a count, a node of one element."""

    power: int = 0
    count: fx.Node | None = None

    @property
    def is_average(self) -> bool:
        """Whether a term that is the same for every row may be added."""
        return self.power == (-1 if self.count is None else 0)

    def __str__(self) -> str:
        if self.count is not None:
            return "an average weighted by a count of the labels or the mask"
        return {0: "a sum over the rows", -1: "a mean over the rows"}.get(self.power, "a scaled sum over the rows")


@dataclass(frozen=True, slots=True)
class Coupled:
    """What couples the rows: the operator in words, and where the model has it."""

    why: str
    where: str


State: TypeAlias = Whole | Rows | Terms | Order | Coupled


def factor_of(rule: Rule, dims: tuple[tuple[str, ...], ...], state: Rows, rows: int) -> tuple[str, int] | None:
    """The factor that walks the rows of a tensor with these dims, and the stripes in which it is cut; None: no one.

    rows: the number of rows of the batch, all of which the factor has to walk.
    """
    sizes = rule.sizes
    before = 1
    for name in dims[state.dim]:
        stripes = state.outer // before
        if before * stripes == state.outer and sizes[name] % (stripes * rows) == 0:
            return name, stripes
        before *= sizes[name]
    return None


def place_of(rule: Rule, dims: tuple[tuple[str, ...], ...], name: str, stripes: int) -> Rows | None:
    """The dim that walks a factor, when the factor walks the rows in so many stripes; None: no dim does."""
    sizes = rule.sizes
    for index, dim in enumerate(dims):
        outer = stripes
        for own in dim:
            if own == name:
                return Rows(index, outer)
            outer *= sizes[own]
    return None


def scaled(state: State, power: int) -> State:
    """The state of a value that is multiplied by something that grows as rows^power."""
    return state if isinstance(state, Coupled | Order) or not power else replace(state, power=state.power + power)
