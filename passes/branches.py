"""Branches that go by values which nobody has when a model is traced: one way is traced, and told from the others.

    if loss.isnan(): …              as it is of finite numbers
    while (z - last).norm() > eps:  a round, and more of them
    if self.step % 10 == 0: …       as the buffer has it now
    if loss.item() > 2: …           not taken

Where a program can say so, its last output is the number of the first branch that went the other way; then the batch is
run by the program for that way, which is traced when one is first met (`branches.py` of the runtime). Microbatches all
go the same way: it is taken for granted that their numbers are finite (`usual.py`), and what other branches ask for is
no matter of rows (`batching.py`). Elsewhere these are refused.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import computed
from autopar.ir.program import Branch
from autopar.passes.checks import frame_of_model, wanted_of
from autopar.passes.draws import draws
from autopar.passes.source import places_asked, source_of, stands_at
from autopar.passes.usual import MOST_ROUNDS, Usual, line_of

WAYS = "_autopar_ways"
"""The attribute of a model that holds which ways its first branches go."""
MOST_ASKED = 512
"""Branches of one program."""
MOST_OF_A_LINE = 8
"""Branches of one program at one line of one module, where they do not end a loop."""
_FINITE = (0.0, 1.0, 0.37, -2.1, 50.0)
"""Numbers of which a question is asked that minds only whether they are finite."""


def put_ways(model: nn.Module, ways: Sequence[bool]) -> None:
    """Have traces of a model go these ways at its first branches."""
    vars(model)[WAYS] = tuple(ways)


@contextmanager
def going(model: nn.Module, ways: Sequence[bool]) -> Iterator[None]:
    """Inside, traces of a model go these ways at its first branches."""
    before = vars(model).get(WAYS)
    put_ways(model, ways)
    try:
        yield
    finally:
        vars(model).pop(WAYS)
        if before is not None:
            put_ways(model, before)


def ways_of(model: nn.Module) -> tuple[bool, ...]:
    """Which ways traces of a model go at its first branches."""
    return next((vars(each)[WAYS] for each in model.modules() if WAYS in vars(each)), ())


class Branches(TorchFunctionMode):
    """While a model is traced.

    values: of inputs and buffers, by name, as they are now: by these the first way is chosen. usual: takes for granted
    that numbers are finite; None where the program says of such branches, too, which way they go. tells: whether it
    says so of any. taken: which way each branch went, with the model's line; none where it says it of none.
    """

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor], usual: Usual | None, tells: bool) -> None:
        super().__init__()
        self.taken: list[Branch] = []
        self._ways = ways_of(model)
        self._values, self._usual, self._tells = values, usual, tells
        self._known: dict[fx.Node, Tensor] = {}
        self._buffers: set[fx.Node] = set()
        self._same: list[Tensor | None] = []
        self._asked = Counter[tuple[str, int]]()

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, what the program is for."""
        return tuple(
            f"takes for granted that what is asked for is as here ({line}): a batch for which it is not so gets a "
            "program of its own"
            for line in dict.fromkeys(line for _, line in self.taken)
        )

    def within(self, model: nn.Module) -> Callable[..., Any]:
        """The model's forward; where branches were met, it returns the number of the first that went another way
        beside its results: how many there are, where none did.
        """
        forward = model.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._buffers = {node for x in model.buffers() if (node := compat.node_of(x)) is not None}
            for name, leaf in (*model.named_buffers(), *compat.tree_leaves_with_path(kwargs)):
                node = compat.node_of(leaf) if isinstance(leaf, Tensor) and name in self._values else None
                if node is not None:
                    self._known[node] = self._values[name]
            results = forward(*args, **kwargs)
            if all(same is None for same in self._same):
                self.taken.clear()
                return results
            return results, self._first_other()

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asks = func in _ASKING or (func is Tensor.item and args[0].dtype == torch.bool)
        if asks and args[0].numel() == 1 and compat.node_of(args[0]) is not None:
            frame = frame_of_model(sys._getframe(1))
            if frame is not None and (found := self._way(args[0], frame)) is not None:
                return found
        return func(*args, **(kwargs or {}))

    def _way(self, asked: Tensor, frame: FrameType) -> bool | None:
        """Which way is traced; None where there is no telling them apart."""
        if len(self.taken) == MOST_ASKED or compat.is_unknown(asked):
            return None
        line, number, finite = line_of(frame), len(self.taken), _of_finite(asked)
        if self._usual is not None and finite is not None:
            self._usual.takes_way((asked != 0) == finite, f"that numbers are finite where {line} asks for it")
            self._same.append(None)  # it has its number, as in a program that says of it which way it goes
            self.taken.append((finite, line))
            return finite
        if not self._tells:
            return None
        going_on = _goes_on(frame)
        place = line, id(_module_of(frame))
        self._asked[place] += 1
        if going_on is None and finite is None and self._asked[place] > MOST_OF_A_LINE:
            return None  # of each token, or each row: no two batches would go the same ways
        if self._is_drawn(asked):
            raise AutoparError(
                "forward() chooses what to do by the value of a tensor that is drawn: each step would need a program",
                where=line,
                remedy="do both and choose: keep = (torch.rand(()) >= p).to(x.dtype); x = x + keep * (layer(x) - x)",
            )
        goes_on = bool(going_on) == (self._asked[place] <= MOST_ROUNDS)
        usual = (x for x in (self._as_now(asked), finite, goes_on) if x is not None)
        way = self._ways[number] if number < len(self._ways) else next(usual)
        self._same.append(((asked != 0) == way).reshape(()))
        self.taken.append((way, line))
        return way

    def _as_now(self, asked: Tensor) -> bool | None:
        """What an answer is by the values that inputs and buffers have now; None where others go into it."""
        with computed():
            known = {node: value.detach().cpu() for node, value in self._known.items()}
        value = compat.value_from(asked, known)
        with computed():
            return None if value is None else bool(value)

    def _is_drawn(self, asked: Tensor) -> bool:
        """Whether an answer is made of random draws, Python's numbers and buffers alone."""
        last, drawn = compat.node_of(asked), False
        waiting, seen = [] if last is None else [last], set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" and node not in self._buffers:
                return False
            drawn = drawn or draws(node)
            waiting += node.all_input_nodes
        return drawn

    def _first_other(self) -> Tensor:
        """[] int64."""
        before, *rest = itertools.dropwhile(lambda same: same is None, self._same)
        assert before is not None
        alive, first = before, before.to(torch.int64)
        for same in rest:
            alive = alive if same is None else alive & same
            first = first + alive.to(torch.int64)
        granted = len(self._same) - 1 - len(rest)
        return first + granted if granted else first


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs: a line that each of many modules has is none that is met for each row."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    found = frame.f_locals.get(names[0]) if names else None
    return found if isinstance(found, nn.Module) else None


_COMPARING = frozenset(
    {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isfinite",
        "isnan",
        "isinf",
        "isposinf",
        "isneginf",
        "logical_not",
        "any",
        "all",
    }
    | {"logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "sum"}
    | {"view", "reshape", "flatten", "squeeze", "unsqueeze", "select", "slice", "to", "_to_copy", "detach", "clone"}
    | {"is_nonzero", "item", "alias", "stack", "cat", "lift_fresh", "lift_fresh_copy"}
)
"""Operators, of answers and of floating-point numbers, that tell nothing of one number by its place among others."""
_ASKING = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero})


def _of_finite(asked: Tensor) -> bool | None:
    """What a traced answer is of finite numbers, whichever these are; None where it depends on them."""
    said = {_asked_of(asked, number) for number in _FINITE}
    return said.pop() if len(said) == 1 else None


def _asked_of(asked: Tensor, number: float) -> bool | None:
    """What a traced answer is where all floating-point numbers that it asks about are this one; None of others."""
    last, edge = compat.node_of(asked), dict[fx.Node, Tensor]()
    waiting, seen = [last], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        value = None if node is None else node.meta.get("val")
        if node is None or node in seen or node.op == "get_attr":
            continue
        seen.add(node)
        if isinstance(value, Tensor) and value.is_floating_point():
            with compat.outside_of_tracing():
                edge[node] = torch.full(tuple(map(int, value.shape)), number, dtype=value.dtype)
        elif node.op != "call_function" or not _compares(node):
            return None  # where a tensor's numbers are all one, a `topk` or a count says what it says of no other
        else:
            waiting += node.all_input_nodes
    found = compat.value_from(asked, edge) if edge else None
    with computed():
        return None if found is None else bool(found)


def _compares(node: fx.Node) -> bool:
    """Whether a result tells of each number by itself, or of whether any or all are so."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.removeprefix("aten::") in _COMPARING


def _goes_on(frame: FrameType) -> bool | None:
    """What a loop's test, or one of whether it is left, has to give for another round; None of other branches."""
    source = source_of(frame.f_code)
    if source is None:
        return None
    first, both = places_asked(frame, source)
    for node, places in ((node, places) for places in (first, both) for node in ast.walk(source.tree)):
        if isinstance(node, ast.While) and stands_at(node.test, frame.f_lineno):
            found = wanted_of(node.test, True, places)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Break) and stands_at(node.test, frame.f_lineno):
            found = wanted_of(node.test, False, places)
        else:
            continue
        if found is not None:
            return found
    return None
