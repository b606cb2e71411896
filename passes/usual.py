"""What a forward does in the usual case, where values that a trace does not have decide: taken for granted, guarded.

    if done.all():                  a loop that may end early: it runs to its end
        break
    images = images[is_real]        a mask that the example's own pixels fill: all is taken
    if pixels.min() < 0:            a test of the example's own pixels: as it is
    if labels.max() >= size:        a check: it passes
        raise ValueError("...")
    if mask.any():                  what has no effect where nothing is marked: it is done, and nothing is to be guarded
        x[mask] = row
    if not is_padding.any():        a test of whether the example's masks mark anything, or everything: as it is
        is_padding = None
    if (self.mask == causal).all(): a test of a buffer that forward does not change: as it is
    if len(x[mask]) > 0:            a test of whether a mask chooses rows: it does (`counted_rows.py`)
    torch.bincount(x, minlength=n)  of numbers that may be n or larger: none is

Each step computes whether it was so. Where it was not, what the forward returns is NaN, which the engine refuses
(`ProgramInterface.granted`): no step goes on with other numbers than eager's.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.values import computed
from autopar.ir.program import Program
from autopar.passes import counting
from autopar.passes.checks import frame_of_model, passing
from autopar.passes.chosen_index import seen_along
from autopar.passes.source import source_of, stands_at

_ASKING: Mapping[Callable[..., Any], Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool, Tensor.__int__: int, Tensor.__index__: int, Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
}  # fmt: skip
"""What makes tensors numbers of Python's."""
_MASKED = (Tensor.__getitem__, Tensor.__setitem__)
"""What may read, or write, where a mask says."""
_PLAIN = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "view", "reshape", "expand", "squeeze"}
    | {"unsqueeze", "flatten", "clone", "detach", "contiguous"}
)
"""Methods that change nothing, draw nothing and mind no values."""


MOST_ROUNDS = 32
"""Rounds of a loop of which a program says whether it is left there; it runs through others."""


class Decides(AutoparError):
    """A buffer decides what is done that forward changes."""


class Usual(TorchFunctionMode):
    """While a model is traced: what it does in the usual case is done.

    inputs: of the example, whose values may tell what is usual, by name. marks: masks, tokens and labels, which tell
    whether anything is marked. buffers: of the model, whose values may decide. taken: what was taken for granted, in
    words with the model's line. asked_of: buffers whose values did decide, each with the first line that asked.
    leaves_branches: whether a program says which way branches go (`branches.py`), which are then not taken for granted.
    asked_by: the global names of code that made a number of one by `int`.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        marks: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves_branches: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.marks, self.buffers = inputs, marks, buffers
        self.leaves_branches = leaves_branches
        self.taken: dict[str, None] = {}
        self.asked_of: dict[str, str] = {}
        self.asked_by: dict[int, dict[str, Any]] = {}
        self._held: dict[fx.Node, str] = {}
        self._traced: dict[fx.Node, Tensor] = {}
        self._marked: dict[fx.Node, Tensor] = {}
        self._usual: list[Tensor] = []
        self._rounds = Counter[str]()

    def passes(self, asked: Tensor, wanted: bool, frame: FrameType) -> bool:
        """What a check has to give for nothing to be raised."""
        self._take((asked != 0) == wanted, f"that the check at {line_of(frame)} passes")
        return wanted

    def takes_rows(self, mask: Tensor, line: str) -> None:
        """What is done is what is done where a mask chooses rows."""
        self._take(mask.any(), f"that a mask chooses rows at all ({line})")

    def takes_numbers(self, differ: Tensor, line: str) -> None:
        """What is done is what is done where a number of rows is not what it is compared with."""
        self._take(differ, f"that a mask chooses another number of rows ({line})")

    def takes_way(self, is_so: Tensor, words: str) -> None:
        """A branch goes this way."""
        self._take(is_so, words)

    def takes_check(self, passes: Tensor, line: str) -> None:
        """A check of how many rows masks choose passes."""
        self._take(passes, f"that the check at {line} passes")

    def takes_apart(self, same: Tensor) -> None:
        """A mask chooses as many rows in each sequence as in the others, or as a size says."""
        self._take(same, f"that a mask chooses as many rows in each sequence ({line_of(sys._getframe(1))})")

    def takes_row(self, is_there: Tensor) -> None:
        """A mask chooses so many rows that one of a certain number is among them."""
        self._take(is_there, f"that a mask chooses enough rows ({line_of(sys._getframe(1))})")

    def takes_buffer(self, name: str, traced: Tensor, line: str) -> None:
        """A buffer of whole numbers, by which sizes go, holds what it holds here."""
        if name not in self.asked_of:
            self.asked_of[name] = line
            with computed():
                numbers = self.buffers[name].tolist()
            self._take((traced == torch.tensor(numbers)).all(), f"that {name} is as here ({line})")

    def takes_longest(self, fits: Tensor, frame: FrameType) -> None:
        """What is as long as the longest of packed sequences is as long as what was packed.

        Raises:
            AutoparError: it is not in the example.
        """
        instead = "pad_packed_sequence(…, total_length=x.size(1)) takes nothing for granted"
        value = compat.value_from(fits, {**self._traced, **self._marked})
        with computed():
            too_short = value is not None and not value
        if too_short:
            raise AutoparError(
                "all packed sequences end before the batch does, so that a size is what values say",
                where=line_of(frame),
                remedy=f"cut the batch at its longest sequence, or let a size be known: {instead}",
            )
        self._take(fits, f"that the longest of packed sequences has every step ({line_of(frame)}; {instead})")

    def takes_slice(self, lies: Tensor, frame: FrameType | None) -> None:
        """A slice that begins where a tensor says lies in what it is of."""
        self._take(lies, f"that a slice lies in what it is a slice of ({line_of(frame)})")

    def guarding(self, model: nn.Module) -> Callable[..., Any]:
        """The model's forward, whose floating-point results are NaN where what was taken for granted is not so."""
        forward = model.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            for name, leaf in model.named_buffers():
                node = compat.node_of(leaf) if name in self.buffers else None
                if node is not None:
                    self._held[node] = name
            for name, leaf in compat.tree_leaves_with_path(kwargs):
                node = compat.node_of(leaf) if isinstance(leaf, Tensor) else None
                if node is not None and name in self.inputs:
                    self._traced[node] = self.inputs[name]
                elif node is not None and name in self.marks:
                    self._marked[node] = self.marks[name]
            results = forward(*args, **kwargs)
            return self._guarded(results) if self._usual else results

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASKING and (found := self._asked(_ASKING[func], args[0], sys._getframe(1))) is not None:
            return found
        if func in counting.COUNTS and (found := self._counts(*args, **(kwargs or {}))) is not None:
            return found
        if func is Tensor.__bool__ and compat.known_value(args[0]) is None:
            if _without_effect_if_false(sys._getframe(1)):
                return True
            line = _early_exit(sys._getframe(1))
            if line is not None and not self._leaves_round(line):
                self._take(args[0] == 0, f"that no loop ends early ({line})")
                return False
        if func in _ASKING and (found := self._marks(_ASKING[func], args[0], sys._getframe(1))) is not None:
            return found
        if func in _MASKED and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            source, mask, *written = args
            one_each = all(isinstance(each, Tensor) and each.numel() == source.numel() for each in written)
            if one_each and self._takes_everything(mask, sys._getframe(1)):
                if written:
                    return source.copy_(written[0].reshape(source.shape))
                return seen_along(source, mask).clone()
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and (at := _masked_dim(*args)) is not None:
            source, mask = args[0], args[1][at[0]]
            if self._takes_everything(mask, sys._getframe(1)):
                return seen_along(source, mask, at[1]).clone()
            value = compat.value_from(mask, {}) if mask.ndim == 1 else None
            if value is not None:
                with computed():
                    rows = value.nonzero()[:, 0].tolist()
                return source.index_select(at[1], torch.tensor(rows, dtype=torch.long, device=source.device))
        return func(*args, **(kwargs or {}))

    def _counts(self, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
        """How often each number below `minlength` is there, where that is all; None where there is no such end."""
        if minlength <= 0 or input.dim() != 1 or compat.value_from(input, {}) is not None:
            return None
        if not counting.lie_below(input, minlength):
            line = line_of(sys._getframe(2))
            self._take((input < minlength).all(), f"that bincount's numbers lie below its minlength ({line})")
        return counting.counted(input, weights, minlength)

    def _leaves_round(self, line: str) -> bool:
        """Whether a program says if a loop is left in this round, one of the first."""
        self._rounds[line] += 1
        return self.leaves_branches and self._rounds[line] <= MOST_ROUNDS

    def _takes_everything(self, mask: Tensor, frame: FrameType) -> bool:
        """Whether a mask that is known is set everywhere. One that is made of Python's own numbers always is."""
        value = compat.value_from(mask, self._traced)
        with computed():
            full = value is not None and value.numel() > 0 and bool(value.all())
        if full and compat.value_from(mask, {}) is None:
            self._take((~mask).sum() == 0, f"that a mask takes everything ({line_of(frame)})")
        return full

    def _marks(self, reading: Callable[[Tensor], Any], asked: Tensor, frame: FrameType) -> bool | None:
        """Whether masks of the example mark anything, or everything, where Python asks that; None of what else it asks.

        How much they mark, and what, is another matter in every batch.
        """
        if asked.dtype != torch.bool or asked.dim() or reading not in (bool, Tensor.item) or self.leaves_branches:
            return None
        value = compat.value_from(asked, {**self._traced, **self._marked}) if compat.asks_of_all(asked) else None
        if value is None or compat.value_from(asked, {}) is not None:
            return None
        with computed():
            found = bool(value)
        self._take(asked == found, f"that what is asked of a mask is as here ({line_of(frame)})")
        return found

    def _asked(self, reading: Callable[[Tensor], Any], asked: Tensor, frame: FrameType) -> Any:
        """What Python reads of numbers that are made of the example's inputs, or of buffers; None of others."""
        if self.leaves_branches and (reading is bool or asked.dtype == torch.bool):
            return None
        sources = compat.sources_from(asked, ChainMap[fx.Node, object]({**self._held}, {**self._traced}))
        if sources is None:
            return None
        held = [node for node in sources if node in self._held]
        with computed():
            buffers = {node: self.buffers[self._held[node]].detach().cpu() for node in held}
        value = compat.value_from(asked, {**self._traced, **buffers})
        if value is None or compat.value_from(asked, {}) is not None:
            return None
        if reading is not bool and value.is_floating_point():
            return None  # such a number is another one for every batch
        with computed():
            found, numbers = reading(value), value.tolist()
        for node in held:
            self.asked_of.setdefault(self._held[node], line_of(frame))
            if reading is int and (own := frame_of_model(frame, own=True)) is not None:
                self.asked_by[id(own.f_globals)] = own.f_globals
        same = (asked != 0) == found if reading is bool else (asked == torch.tensor(numbers)).all()
        self._take(same, f"that what is asked for is as here ({line_of(frame)})")
        return found

    def noted(self, program: Program) -> Program:
        """The traced program with a note for each thing that was taken for granted.

        Raises:
            AutoparError: a buffer decides what is done that forward changes, so that the next step does something else.
        """
        for name, _ in program.updates:
            if name in self.asked_of:
                raise Decides(
                    f"the value of {name}, which forward() changes, decides what is done: each step may do otherwise",
                    where=self.asked_of[name],
                    remedy="keep both cases and choose between their results by torch.where, or let the script change "
                    "it between steps",
                )
        notes = (f"takes for granted {words}: a batch for which it is not so is refused" for words in self.taken)
        return replace(program, notes=(*program.notes, *notes), granted=tuple(self.taken))

    def _take(self, usual: Tensor, words: str) -> None:
        self._usual.append(usual.reshape(()))
        self.taken.setdefault(words)

    def _guarded(self, results: Any) -> Any:
        usual = functools.reduce(torch.logical_and, self._usual)
        leaves, spec = compat.tree_flatten(results)
        guarded = [torch.where(usual, x, torch.nan) if _is_floating(x) else x for x in leaves]
        if all(x is y for x, y in zip(leaves, guarded, strict=True)):
            raise AutoparError(
                f"the values of tensors decide what is done: the usual case is {next(iter(self.taken))}, and nothing "
                "that the model returns could say that it is not",
                remedy="return a floating-point tensor, too, or keep the decision out of forward()",
            )
        return compat.tree_unflatten(guarded, spec)


class Checked(TorchFunctionMode):
    """While a model is traced: a check of values that nobody knows here passes."""

    def __init__(self, usual: Usual) -> None:
        super().__init__()
        self.usual = usual

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asks = func is Tensor.__bool__ or (func is Tensor.item and args[0].dtype == torch.bool)
        if asks and args[0].numel() == 1 and (frame := frame_of_model(sys._getframe(1))) is not None:
            wanted = passing(frame)
            if wanted is not None and compat.known_value(args[0]) is None:
                return self.usual.passes(args[0], wanted, frame)
        return func(*args, **(kwargs or {}))


def _masked_dim(source: Tensor, index: tuple[Any, ...]) -> tuple[int, int] | None:
    """Where a mask stands in an index that takes all of the other dims, and the first dim that it is of; None of other
    indices.
    """
    masks = [i for i, each in enumerate(index) if isinstance(each, Tensor)]
    if len(masks) != 1 or index[masks[0]].dtype != torch.bool or index[masks[0]].ndim == 0:
        return None
    rest = [each for i, each in enumerate(index) if i != masks[0]]
    if not all(each is Ellipsis or (isinstance(each, slice) and each == slice(None)) for each in rest):
        return None
    skipped = source.ndim - index[masks[0]].ndim - sum(each is not Ellipsis for each in rest)
    before = index[: masks[0]]
    return masks[0], sum(skipped if each is Ellipsis else 1 for each in before)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def line_of(frame: FrameType | None) -> str:
    """Where a frame is; of one of torch's libraries also where the model calls it."""
    found, own = frame_of_model(frame), frame_of_model(frame, own=True)
    if found is None:
        return ""
    return _place(found) if own is None or own is found else f"{_place(found)}, called at {_place(own)}"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _early_exit(frame: FrameType | None) -> str | None:
    """The line of the model, if a test stands there after which a loop is left, and nothing else is done."""
    node = _branch(frame)
    if node is None or not isinstance(node.body[0], ast.Break):
        return None
    return line_of(frame) if isinstance(node.test, ast.Call | ast.Compare | ast.Name) else None


def _without_effect_if_false(frame: FrameType | None) -> bool:
    """Whether a test asks if a mask is set anywhere, and all that is done then is to write where it is."""
    node = _branch(frame)
    mask = None if node is None else _asked_anywhere(node.test)
    return node is not None and mask is not None and all(_writes_where(each, mask) for each in node.body)


def _asked_anywhere(test: ast.expr) -> str | None:
    """The name of a mask in `mask.any()` or `torch.any(mask)`."""
    if not isinstance(test, ast.Call) or not isinstance(test.func, ast.Attribute) or test.func.attr != "any":
        return None
    on = test.func.value
    of = [on] if not test.args else test.args if isinstance(on, ast.Name) and on.id == "torch" else []
    return of[0].id if len(of) == 1 and not test.keywords and isinstance(of[0], ast.Name) else None


def _writes_where(statement: ast.stmt, mask: str) -> bool:
    """Whether a statement is `x[mask] = …`, and nothing else is changed in it."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    (target,) = statement.targets
    if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Name) or target.slice.id != mask:
        return False
    written = statement.value
    calls = [each.func for each in ast.walk(written) if isinstance(each, ast.Call)]
    plain = all(isinstance(each, ast.Attribute) and each.attr in _PLAIN for each in calls)
    return plain and isinstance(target.value, ast.Name) and not any(map(_names, ast.walk(written)))


def _names(part: ast.AST) -> bool:
    return isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)


def _branch(frame: FrameType | None) -> ast.If | None:
    """The `if` without an `else` whose test stands at the model's line."""
    found = frame_of_model(frame)
    if found is None:
        return None
    source = source_of(found.f_code)
    for node in () if source is None else ast.walk(source.tree):
        if isinstance(node, ast.If) and not node.orelse and stands_at(node.test, found.f_lineno):
            return node
    return None
