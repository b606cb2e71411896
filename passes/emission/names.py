"""What the variables of a generated function are called, and which values are written where they are used.

o_proj = ops.linear(x, w)  # f32[8, 64] +tp
o_proj = comm.all_reduce(o_proj, "tp")        a value that is nothing but what became of another goes on under its
                                              name where nobody reads that any more
q = q_proj.reshape(4, 16, 4, 8).transpose(1, 2)     a view that one operator reads is written inside of it
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from autopar.ir.names import RESERVED
from autopar.ir.nodes import COPY_OF, FORM_OF, FORMS, NAME, operand_of
from autopar.ir.region import Region
from autopar.ir.rings import sends_inside
from autopar.passes.emission.literals import quoted
from autopar.passes.emission.statements import identifier, statement

LONGEST_INSIDE, WIDEST = 64, 118
"""What is longer than so many characters gets a line of its own, and what makes a line longer than this."""

_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "expand.default", "permute.default", "t.default",
        "transpose.int", "unsqueeze.default", "squeeze.dim", "clone.default", "slice.Tensor", "neg.default",
    )
)  # fmt: skip
_RESHAPED = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
_RESHAPES = frozenset({"aten.view.default", "aten.squeeze.dim", "aten.reshape.default"})
_MOVES = frozenset({"slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


class FunctionNames:
    """The variables of one function. expression: of any value, as Python text."""

    def __init__(
        self,
        graph: fx.Graph,
        *,
        given: Mapping[str, str],
        owned: Iterable[str] = (),
        targets: Mapping[fx.Node, str] | None = None,
    ) -> None:
        """given: what arguments are called that others have named, by node. owned: arguments that nobody else holds.
        targets: where some values are put, `g["weight"]`.
        """
        self._graph, self._given = graph, dict(given)
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self._owned = frozenset(owned)
        self._targets = dict(targets or {})
        self._place = {node: place for place, node in enumerate(graph.nodes)}
        self._own_lines: set[fx.Node] = set()
        self._write()
        while crowded := self._crowded():
            self._own_lines |= crowded
            self._write()

    def _write(self) -> None:
        """Decide which values have lines of their own, and call them something."""
        self._inside: dict[fx.Node, str] = {}
        self._names: dict[fx.Node, str] = {}
        self._taken = {"g", "p", "comm", *self._given.values()}
        self.continued: set[fx.Node] = set()
        """Values whose variable goes on as another value."""
        for node in self._graph.nodes:
            if node.op == "placeholder" and node.name in ("comm", "p"):
                self._names[node] = node.name
            elif node.op == "placeholder":
                self._names[node] = self._given.get(node.name) or self._unique(node)
        for node in self.nodes:
            if _is_slot(node):
                self._inside[node] = f"p[{quoted(str(node.args[1]))}]"
            elif self._may_stand_inside(node) and len(text := self._text_inside(node)) <= LONGEST_INSIDE:
                self._inside[node] = text
            elif not self._is_several(node):
                self._names[node] = self._targets.get(node) or self._continued(node) or self._unique(node)

    def _text_inside(self, node: fx.Node) -> str:
        """What stands for a value inside of what reads it: of two shapes one behind the other, the last will do, and of
        a tensor of one number, the number.
        """
        if str(node.target) == "aten.scalar_tensor.default":
            return repr(node.args[0])
        if {str(node.target), str(next(iter(node.users)).target)} <= _RESHAPED:
            return self.expression(node.all_input_nodes[0])
        return self.statement(node)

    def _crowded(self) -> set[fx.Node]:
        """Of each line that is too long, the longest value in it that could have a line of its own."""
        found: set[fx.Node] = set()
        for line in self.nodes:
            inside = [n for n in line.all_input_nodes if n in self._inside and "type" in n.meta and not _is_slot(n)]
            if not inside or line in self._inside:
                continue
            if 4 + len(self._names.get(line, "")) + 3 + len(self.statement(line)) > WIDEST:
                found.add(max(inside, key=lambda node: len(self._inside[node])))
        return found

    def name(self, node: fx.Node) -> str:
        """The variable that holds a value."""
        return self._names[node]

    def expression(self, node: fx.Node) -> str:
        """A value where something reads it."""
        return self._inside.get(node) or self._names[node]

    def statement(self, node: fx.Node) -> str:
        """What computes a value."""
        if (total := _row_sum(node)) is not None and total in self._inside:
            dims: Any = total.args[1]
            return f"{self.operand(operand_of(total))}.sum({dims[0] if len(dims) == 1 else list(dims)})"
        return statement(node, self.expression, self.operand)

    def operand(self, node: fx.Node) -> str:
        """The same as an operand of an operator sign, or before a dot."""
        text = self.expression(node)
        return f"({text})" if node in self._inside and not re.match(r"[\w.\"]+[\[(].*[\])]$|\w+$", text) else text

    def is_inside(self, node: fx.Node) -> bool:
        """Whether a value is written where it is used, not as a line of its own."""
        return node in self._inside

    def line_of(self, node: fx.Node) -> fx.Node:
        """The node whose line holds this one."""
        while node in self._inside and node.users:
            node = next(iter(node.users))
        return node

    def last_user(self, node: fx.Node) -> fx.Node | None:
        """The node on whose line a value is last read."""
        readers = [self.line_of(user) for user in node.users]
        return max(readers, key=self._place.__getitem__, default=None)

    def _is_several(self, node: fx.Node) -> bool:
        return any(user.target is operator.getitem for user in node.users)

    def _may_stand_inside(self, node: fx.Node) -> bool:
        if len(node.users) != 1 or self._is_several(node) or node in self._targets or node in self._own_lines:
            return False
        (user,) = node.users
        if "holds" in node.meta:  # on its way from here on
            return False
        if user.op == "output" or _count(user, node) != 1:
            return False
        if "type" not in node.meta:  # a number, or numbers, that `comm` knows
            return not sends_inside(node)
        if sends_inside(user) or (user.op == "call_method" and user.target in _MOVES):
            return "joins" in node.meta
        if str(node.target) == "aten.scalar_tensor.default":
            return _is_plain_number(node, user)
        is_row = str(node.target) == "aten.sum.dim_IntList" and str(user.target) in _RESHAPES
        return is_row or str(node.target) in _VIEWS

    def _continued(self, node: fx.Node) -> str | None:
        """The variable of what this value was made of, where that ends here and is called alike."""
        line, move, sources = self._made_of(node)
        for source in sources:
            if source not in self._names or self._names[source].startswith("g["):
                continue
            is_held = source.op == "placeholder" and source.name not in self._owned
            if not move and (is_held or _stem(source) != _stem(node)):
                continue
            if self.last_user(source) is not line:
                continue
            if move and _form(self._names[source], source) not in ("", FORMS[move]):
                return self._form_again(node)
            self.continued.add(source)
            return self._names[source]
        return None

    def _made_of(self, node: fx.Node) -> tuple[fx.Node, str, list[fx.Node]]:
        """The node whose line makes a value, the move that it is ("": none), and the values that may go on as this."""
        if (terms := _joined_terms(node)) is not None:
            line = node.all_input_nodes[0]
            return line, str(line.target), [terms]
        if node.op == "call_method" and node.target in _MOVES:
            return node, str(node.target), [operand_of(node, 1)]
        return node, "", self._read(node)

    def _form_again(self, node: fx.Node) -> str | None:
        """What a value is called that is moved a second time, such as a part of a gathered one: as the value itself,
        where nothing here goes by that.
        """
        name = identifier(str(node.meta.get(FORM_OF, "")))
        if not self._is_free(name):
            return None
        self._taken.add(name)
        return name

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The values that a line reads, those inside of others too."""
        found: list[fx.Node] = []
        for source in node.all_input_nodes:
            found += self._read(source) if source in self._inside else [source]
        return found

    def _unique(self, node: fx.Node) -> str:
        """As everywhere else (plans, pictures, `explain`), as long as no other value goes by that; what is made again,
        as what it is again.
        """
        original = identifier(str(node.meta.get(COPY_OF) or node.name))
        base = name = original if self._is_free(original) else identifier(node.name)
        number = 1
        while not self._is_free(name):
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name

    def _is_free(self, name: str) -> bool:
        return name not in self._taken and not _is_reserved(name)


def _row_sum(node: fx.Node) -> fx.Node | None:
    """The sum that keeps its dims as ones and of which a value is but the other dims, as a sum by itself would give it;
    None of anything else.
    """
    total = node.all_input_nodes[0] if str(node.target) in _RESHAPES and "type" in node.meta else node
    if total is node or str(total.target) != "aten.sum.dim_IntList" or "type" not in total.meta or total.kwargs:
        return None
    _, dims, *keeps = total.args
    shape = total.meta["type"].shape
    summed = {dim % len(shape) for dim in dims}  # type: ignore[union-attr, operator]
    others = tuple(size for dim, size in enumerate(shape) if dim not in summed)
    return total if keeps[:1] == [True] and node.meta["type"].shape == others else None


def _is_plain_number(node: fx.Node, user: fx.Node) -> bool:
    """Whether a number says the same as a tensor of it: beside a tensor of its type, which has dims."""
    others = [source.meta.get("type") for source in user.all_input_nodes if source is not node]
    is_said = isinstance(node.args[0], int | float) and math.isfinite(node.args[0])
    typed = any(other is not None and other.dtype == node.meta["type"].dtype and other.shape for other in others[1:])
    return str(user.target) == "aten.where.self" and is_said and typed


def _joined_terms(node: fx.Node) -> fx.Node | None:
    """What one of several sums that are one message adds up; None of anything else."""
    if node.target is not operator.getitem or "joins" not in node.all_input_nodes[0].meta:
        return None
    together, number = operand_of(node.all_input_nodes[0], 1), node.args[1]
    is_stack = str(together.target) == "aten.stack.default" and isinstance(number, int)
    return together.all_input_nodes[number] if is_stack else None  # type: ignore[index]


def _is_reserved(name: str) -> bool:
    """Whether Python or the generated functions use a name for something else."""
    return name in RESERVED or keyword.iskeyword(name) or hasattr(builtins, name)


def _form(name: str, node: fx.Node) -> str:
    """Which form of a value a variable says it is: `full` for `hidden_states_full`; "" where it does not say."""
    value = identifier(str(node.meta.get(FORM_OF, "")))
    match = re.fullmatch(rf"{value}_({'|'.join(sorted({*FORMS.values()}))})(_\d+)?", name)
    return match[1] if match else ""


def result_names(region: Region) -> list[str]:
    """What a region's results are called outside of it, each without the number that tells it from others in there."""
    output = next(node for node in region.graph.nodes if node.op == "output")
    return [identifier(port.word or _stem(node)) for node, port in zip(output.args[0], region.outputs, strict=False)]


def _is_slot(node: fx.Node) -> bool:
    """Whether a node reads a parameter from `p`."""
    return node.target is operator.getitem and isinstance(node.args[1], str)


def _count(user: fx.Node, node: fx.Node) -> int:
    """How often a node reads another one."""
    found: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), lambda each: found.append(each))
    return found.count(node)


def _stem(node: fx.Node) -> str:
    """What a value is called before names are made unique."""
    return str(node.meta.get(NAME) or re.sub(r"(_\d+)+$", "", node.name))
