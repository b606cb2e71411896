"""The notation of sharding rules: what each dim of each operand and result walks.

    rule     ::= operands "->" results ["|" factors] ["|" "linear" groups]
    operands ::= [tensor {"," tensor}]                 one per tensor operand, in order
    results  ::= [(tensor | "_") {"," (tensor | "_")}] "_": this result is not a tensor
    tensor   ::= "." | dim {dim}                       ".": no dims
    dim      ::= factor | "1" | "(" {factor} ")"       major to minor; "1" and "()": a dim of size 1 that walks nothing
    factors  ::= (factor ["=" size] ["sum" | "max"] ["!"] | "(" factor {factor} ")" | pair) {"," ...}
    pair     ::= factor ("ring" | "exchange") factor operand {operand}
    groups   ::= operand {operand} {";" ...}           each group: all of it Partial(sum), the rest Replicate

`m k, k n -> m n | k sum` is a matrix product: a factor that a result lacks gives, when it is split, terms to be
combined with its reduction; `| s !` says that s cannot be split, `| (h r)` that the product of both can, into
contiguous pieces that divide neither: tensors that walk both side by side are split there, other operands are whole,
other results terms of a sum; `| s ring t 1 2` that one axis may split s and t at once, while the pieces of operands 1
and 2 travel around it (`Ring`); `| t exchange e 3 4` that it may split t and e at once, because what a piece along t
needs of e is worked out where that lies (`Exchange`). Sizes come from shapes; a factor that stands only
inside composite dims may need its own: `(c f) -> f | c=3`. When parsed against shapes, `...` stands for
leading dims, alike in every tensor but for those of size 1, which are broadcast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.base.errors import AutoparError

Dims = tuple[tuple[str, ...], ...]
ArgPath = tuple[int | str, ...]
"""Where an argument stands: its position or keyword, then indices into lists."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop index of an operation.

    split: False where the loop cannot be cut. reduce: how the terms of a result without this factor combine.
    """

    name: str
    size: int
    split: bool = True
    reduce: str | None = None


@dataclass(frozen=True, slots=True)
class Ring:
    """Two factors that one axis may split at once, because pieces along one of them visit every rank in turn.

    Operands in `travelling` are split along `key`; the other operands along `query` where they walk it, and whole along
    `key`. Results with the dims of a travelling operand (its gradient) are split along `key`, complete; the others
    along `query` where they walk it, else terms of a sum, and whole along `key`. Ring attention (Liu et al.,
    2310.01889): queries stay, keys and values travel.
    """

    query: str
    key: str
    travelling: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange(Ring):
    """As `Ring`, the other way round: operands in `travelling`, split along `key`, stay where they are, and what lies
    along `query` visits those of them that it needs, and comes back. Expert parallelism (Lepikhin et al., GShard,
    2006.16668): tokens go to the ranks of their experts. In what order tokens lie makes no difference: they may be
    split in any stripes.
    """


@dataclass(frozen=True, slots=True)
class Rule:
    """What each dim of each operand and result walks, and what lowering has to do to the other arguments.

    operands, results: per tensor, per dim, the factors from major to minor; a result of None is not a tensor.
    linear: groups of operands; with all of one group Partial(sum) and the others Replicate, every result is
    Partial(sum). alias: the results are views of operand 0.
    shape_args: (path, i): this argument is the local shape of result i.
    size_args: (path, factor): this int, or each int of this list, scales with the local size of that factor.
    offset_args: (path, factor): the local start of that factor is added to this int.
    joints: factors whose product can be split; size_args and offset_args know it by its `joint_name`.
    position_args: (path, i): this list gets the global index of each local element, per dim of operand i.
    starts_args: (path, factor): this list of ints gets the global index at which each of the equal runs of local
    elements of that factor begins, where it is split. So the factor may be split in any way, also zigzag.
    flops: of the whole operation, over all ranks.
    ring, exchange: the two factors that an axis may split at once, if there are such; of both there is one at most.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    linear: tuple[frozenset[int], ...] = ()
    alias: bool = False
    shape_args: tuple[tuple[ArgPath, int], ...] = ()
    size_args: tuple[tuple[ArgPath, str], ...] = ()
    offset_args: tuple[tuple[ArgPath, str], ...] = ()
    position_args: tuple[tuple[ArgPath, int], ...] = ()
    starts_args: tuple[tuple[ArgPath, str], ...] = ()
    op_class: str = "elementwise"
    flops: float = 0.0
    joints: tuple[tuple[str, ...], ...] = ()
    ring: Ring | None = None
    exchange: Exchange | None = None

    @property
    def pair(self) -> Ring | None:
        """The two factors that an axis may split at once, whatever moves."""
        return self.ring or self.exchange

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each factor, by name."""
        return {factor.name: factor.size for factor in self.factors}

    def factor(self, name: str) -> Factor:
        """The factor of that name."""
        return next(factor for factor in self.factors if factor.name == name)

    def shape_of(self, dims: Dims) -> tuple[int, ...]:
        """The global shape of an operand or result of this rule."""
        sizes = self.sizes
        return tuple(math.prod(sizes[name] for name in dim) for dim in dims)

    def can_split(self, name: str) -> bool:
        """Whether an axis may split this factor: not forbidden, and every result has it or can be a term."""
        return self.may_split(self.factor(name))

    def may_split(self, factor: Factor) -> bool:
        """`can_split` of one of its factors."""
        if not factor.split or factor.reduce is not None:
            return factor.split
        return all(result is None or any(factor.name in dim for dim in result) for result in self.results)

    def __str__(self) -> str:
        return format_rule(self)


def format_rule(rule: Rule, *, with_sizes: bool = False) -> str:
    """The text of a rule; with all sizes, `parse_rule` needs no shapes."""
    text = f"{', '.join(map(_format_dims, rule.operands))} -> {', '.join(map(_format_dims, rule.results))}".strip()
    alone = {dim[0] for dims in (*rule.operands, *rule.results) if dims for dim in dims if len(dim) == 1}
    notes = []
    for factor in rule.factors:
        marks = [factor.name]
        if with_sizes or factor.name not in alone:
            marks[0] += f"={factor.size}"
        marks += [factor.reduce] if factor.reduce else []
        marks += [] if factor.split else ["!"]
        if marks != [factor.name]:
            notes.append(" ".join(marks))
    notes += map(joint_name, rule.joints)
    if rule.pair is not None:
        word = "ring" if rule.ring is not None else "exchange"
        notes.append(f"{rule.pair.query} {word} {rule.pair.key} {' '.join(map(str, rule.pair.travelling))}")
    text += f" | {', '.join(notes)}" if notes else ""
    groups = "; ".join(" ".join(map(str, sorted(group))) for group in rule.linear)
    return f"{text} | linear {groups}" if groups else text


def joint_name(names: Sequence[str]) -> str:
    """`(h r)`: how a choice, and the arguments that follow from it, name a product of factors."""
    return f"({' '.join(names)})"


def _format_dims(dims: Dims | None) -> str:
    if dims is None:
        return "_"
    if not dims:
        return "."
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1" for dim in dims)


@dataclass(frozen=True, slots=True)
class Template:
    """A rule's text, taken apart, before it is bound to shapes. `...` is the dim ("...",)."""

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    notes: tuple[tuple[str, int | None, str | None, bool], ...]
    linear: tuple[frozenset[int], ...]
    joints: tuple[tuple[str, ...], ...] = ()
    pair: Ring | None = None


_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*|1|[().])")
_NOTE = re.compile(r"([A-Za-z_]\w*)\s*(?:=\s*(\d+))?((?:\s+(?:sum|max|!))*)\s*$")
_PAIR = re.compile(r"([A-Za-z_]\w*)\s+(ring|exchange)\s+([A-Za-z_]\w*)((?:\s+\d+)+)\s*$")
_JOINT = re.compile(r"\(\s*((?:[A-Za-z_]\w*\s+)+[A-Za-z_]\w*)\s*\)$")


@lru_cache(maxsize=1 << 12)
def parse_template(text: str) -> Template:
    """Take a rule's text apart.

    Raises:
        AutoparError: text that is not in the notation.
    """
    head, *sections = [part.strip() for part in text.split("|")]
    if head.count("->") != 1 or len(sections) > 2:
        raise _not_a_rule(text, "one '->', then factors, then linear groups, between '|'")
    left, right = (part.strip() for part in head.split("->"))
    notes: list[tuple[str, int | None, str | None, bool]] = []
    linear: tuple[frozenset[int], ...] = ()
    joints: list[tuple[str, ...]] = []
    pair: Ring | None = None
    for section in sections:
        if section.startswith("linear"):
            groups = section.removeprefix("linear").split(";")
            linear = tuple(frozenset(int(i) for i in group.split()) for group in groups)
            continue
        for note in section.split(","):
            if joint := _JOINT.match(note.strip()):
                joints.append(tuple(joint[1].split()))
                continue
            if mark := _PAIR.match(note.strip()):
                kind = Ring if mark[2] == "ring" else Exchange
                pair = kind(mark[1], mark[3], tuple(map(int, mark[4].split())))
                continue
            match = _NOTE.match(note.strip())
            if match is None:
                raise _not_a_rule(text, f"{note.strip()!r} says nothing of a factor")
            marks = match[3].split()
            reduce = next((mark for mark in marks if mark != "!"), None)
            notes.append((match[1], int(match[2]) if match[2] else None, reduce, "!" not in marks))
    operands = tuple(_parse_dims(part, text) for part in left.split(",")) if left else ()
    results = tuple(
        None if part.strip() == "_" else _parse_dims(part, text) for part in (right.split(",") if right else ())
    )
    return Template(operands, results, tuple(notes), linear, tuple(joints), pair)


def _parse_dims(part: str, text: str) -> Dims:
    tokens = _TOKEN.findall(part)
    if not tokens or _TOKEN.sub("", part).strip():
        raise _not_a_rule(text, f"{part.strip()!r} is not a tensor")
    if tokens == ["."]:
        return ()
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "." or ((token == "(") == (group is not None) and token in "()"):
            raise _not_a_rule(text, f"{part.strip()!r} is not a tensor")
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group += [] if token == "1" else [token]
        else:
            dims.append(() if token == "1" else (token,))
    if group is not None:
        raise _not_a_rule(text, f"{part.strip()!r} leaves a parenthesis open")
    return tuple(dims)


def _not_a_rule(text: str, why: str) -> AutoparError:
    return AutoparError(f"{text!r} is not a sharding rule", values=why, remedy="see autopar/rules/notation.py")


def parse_rule(
    text: str,
    operand_shapes: Sequence[Sequence[int]] | None = None,
    result_shapes: Sequence[Sequence[int] | None] | None = None,
) -> Rule:
    """The rule that a text means, for operands and results of these shapes (not needed where the text has all sizes).

    Raises:
        AutoparError: text that is not in the notation, or that contradicts the shapes.
    """
    template = parse_template(text)
    operands, results = template.operands, template.results
    sizes = {name: size for name, size, _, _ in template.notes if size is not None}
    if operand_shapes is not None and result_shapes is not None:
        if len(operands) != len(operand_shapes) or len(results) != len(result_shapes):
            raise _not_a_rule(text, f"it is for {len(operands)} operands and {len(results)} results, not for these")
        lead = _leading_sizes(operands, results, operand_shapes, result_shapes)
        operands = tuple(_fill(dims, shape, lead) for dims, shape in zip(operands, operand_shapes))
        results = tuple(
            None if dims is None or shape is None else _fill(dims, shape, lead)
            for dims, shape in zip(results, result_shapes)
        )
        sizes |= {f"_{i}": size for i, size in enumerate(lead)}
        shaped = [(dims, shape) for dims, shape in zip(operands, operand_shapes)]
        shaped += [
            (dims, shape) for dims, shape in zip(results, result_shapes) if dims is not None and shape is not None
        ]
        _infer_sizes(shaped, sizes, text)
    names = dict.fromkeys(name for dims in (*operands, *results) if dims is not None for dim in dims for name in dim)
    if missing := [name for name in names if name not in sizes]:
        raise _not_a_rule(text, f"no size for {', '.join(missing)}")
    marks = {name: (reduce, split) for name, _, reduce, split in template.notes}
    factors = tuple(
        Factor(name, sizes[name], marks.get(name, (None, True))[1], marks.get(name, (None, True))[0]) for name in names
    )
    pair = template.pair
    exchange = pair if isinstance(pair, Exchange) else None
    ring = None if exchange is not None else pair
    return Rule(
        factors, operands, results, template.linear, joints=template.joints, ring=ring, exchange=exchange
    )  # fmt: skip


def _leading_sizes(
    operands: Sequence[Dims],
    results: Sequence[Dims | None],
    operand_shapes: Sequence[Sequence[int]],
    result_shapes: Sequence[Sequence[int] | None],
) -> list[int]:
    """The sizes of the dims that `...` stands for: of all tensors that have it, aligned at their ends."""
    lead: list[int] = []
    for dims, shape in zip((*operands, *results), (*operand_shapes, *result_shapes)):
        if dims is None or shape is None or ("...",) not in dims:
            continue
        at = dims.index(("...",))
        own = list(shape[at : len(shape) - (len(dims) - at - 1)])
        lead = [1] * (len(own) - len(lead)) + lead
        for i in range(1, len(own) + 1):
            lead[-i] = own[-i] if lead[-i] == 1 else lead[-i]
    return lead


def _fill(dims: Dims, shape: Sequence[int], lead: Sequence[int]) -> Dims:
    """`dims` with `...` replaced by one factor for each leading dim (none for a dim that is broadcast)."""
    if ("...",) not in dims:
        return dims
    at = dims.index(("...",))
    count = len(shape) - len(dims) + 1
    first = len(lead) - count
    own = tuple((f"_{first + i}",) if shape[at + i] == lead[first + i] else () for i in range(count))
    return dims[:at] + own + dims[at + 1 :]


def _infer_sizes(shaped: Sequence[tuple[Dims, Sequence[int]]], sizes: dict[str, int], text: str) -> None:
    """Fill in the sizes of factors: a dim gives that of its one unknown factor."""
    for dims, shape in shaped:
        if len(dims) != len(shape):
            raise _not_a_rule(text, f"{_format_dims(dims)} is not for shape {tuple(shape)}")
    progress = True
    while progress:
        progress = False
        for dims, shape in shaped:
            for dim, size in zip(dims, shape):
                unknown = [name for name in dim if name not in sizes]
                known = math.prod(sizes[name] for name in dim if name in sizes)
                if len(unknown) == 1 and known and size % known == 0:
                    sizes[unknown[0]] = size // known
                    progress = True
                elif not unknown and known != size:
                    raise _not_a_rule(text, f"{_format_dims((dim,))} has {known} elements, the dim {size}")


def with_fields(rule: Rule, **fields: object) -> Rule:
    """`dataclasses.replace`, under a name that says what it is for: the fields that the text does not hold."""
    return replace(rule, **fields)  # type: ignore[arg-type]


def volume(rule: Rule) -> float:
    """The number of points of the loop nest: the product of all factors."""
    return float(math.prod(rule.sizes.values()))
