"""Buffers that forward assigns anew: `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`.

torch.export sees that of the outermost module alone, and drops what is assigned to the others'. Here new values are
written, where forward ends, into the tensors that the buffers were, which are then buffers that forward changes, as
those are that it writes in place (`mutation.py`).

A table that is made anew where it is too short for a batch (`if len(x) > len(self.pe): self.pe = make(len(x))`) stays
what it was: each program makes it at the length that it needs. That is so where numbers of Python's alone say what is
in it, it is no part of a checkpoint, and another forward, over what this one left, leaves it alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.base.torch_compat.written import untraced
from autopar.passes.kept import is_of_inputs, line_that_goes_by, line_that_keeps, line_that_reads, modules_of


class LongerTable(Exception):
    """A table becomes longer in forward."""


class Reassigned:
    """While a model is traced. model: the one that is traced. in_blocks: some of its blocks stand for others. notes: of
    tables that become longer.
    """

    def __init__(self, model: nn.Module, in_blocks: bool = False) -> None:
        self._model, self._in_blocks = model, in_blocks
        self.notes: list[str] = []

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that writes at its end what it has assigned to buffers.

        Raises:
            AutoparError: what it assigns is of another shape or kind and no table, or is a parameter; a buffer that was
                None goes into the next step.
            LongerTable: there is one, and blocks stand for others: the model has to be traced whole.
        """

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = {(path, name): was for path, _, name, was in self._buffers()}
            with compat.buffers_as_assigned():
                found = forward(*args, **kwargs)
            changed: list[tuple[nn.Module, str, Tensor, Tensor]] = []
            tables = self._tables(before, lambda: forward(*args, **kwargs))
            for module, name, short in tables:
                module._buffers[name] = short
            for path, module, name, now in self._buffers():
                was = before.get((path, name))
                if was is not now and self._is_written(path, name, was, now):
                    assert was is not None and now is not None
                    changed.append((module, name, was, now))
            for module, name, was, _ in changed:  # first: what is done to one would be done to what stands there
                module._buffers[name] = was
            memories = {compat.storage_id(was) for was in before.values() if was is not None}
            # One that another was is not what it is once that is written.
            values = [now.clone() if compat.storage_id(now) in memories else now for *_, now in changed]
            for (_, _, was, _), now in zip(changed, values, strict=True):
                was.copy_(now.detach())
            return found

        return run

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
        for path, module in modules_of(self._model, ""):
            held = vars(module)["_buffers"]
            if isinstance(held, dict):  # a scripted one has none
                yield from ((path, module, name, value) for name, value in dict.items(held))

    def _tables(
        self, before: Mapping[tuple[str, str], Tensor | None], again: Callable[[], Any]
    ) -> list[tuple[nn.Module, str, Tensor]]:
        """Tables of another length than they were, and what they were. again: the same forward."""
        longer = [
            (path, module, name, was)
            for path, module, name, now in self._buffers()
            if isinstance(was := before.get((path, name)), Tensor)
            and isinstance(now, Tensor) and now.shape != was.shape
            and name in module._non_persistent_buffers_set and compat.value_from(now, {}) is not None
        ]  # fmt: skip
        if longer and self._in_blocks:
            raise LongerTable
        if not longer or not self._stay(longer, again):
            return []
        full = ", ".join(f"{path}.{name}" if path else name for path, _, name, _ in longer)
        self.notes.append(f"{full}: made in each step, at the length that a batch needs")
        return [(module, name, was) for _, module, name, was in longer]

    def _stay(self, longer: list[tuple[str, nn.Module, str, Tensor]], again: Callable[[], Any]) -> bool:
        """Whether another forward leaves alone what this one assigned; it is run on shapes, and changes nothing."""
        modules = [each for _, each in modules_of(self._model, "") if isinstance(vars(each)["_buffers"], dict)]
        held = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
        left = {(path, name): module._buffers[name] for path, module, name, _ in longer}
        try:
            with untraced():
                again()
            return all(module._buffers[name] is left[path, name] for path, module, name, _ in longer)
        except Exception:  # what it asks for beyond shapes
            return False
        finally:
            for module, attributes, buffers in held:
                vars(module).clear()
                vars(module).update(attributes)
                vars(module)["_buffers"] = buffers

    def _is_written(self, path: str, name: str, was: Tensor | None, now: Tensor | None) -> bool:
        """Whether there is something to be written: then both are tensors."""
        full = f"{path}.{name}" if path else name
        if was is None:
            line = line_that_goes_by(self._model, name, False) or line_that_reads(self._model, name)
            line = line or line_that_keeps(self._model, name)
            if line is not None and now is not None and is_of_inputs(self._model, now):
                raise AutoparError(
                    f"forward() makes {full}, a buffer that was None, and goes by it: a program does as in its first "
                    "step",
                    where=line,
                    remedy=f'give it its shape in __init__: self.register_buffer("{name}", torch.zeros(…))',
                )
            return False
        if now is None or now.shape != was.shape or now.is_floating_point() != was.is_floating_point():
            became = "None" if now is None else f"{str(now.dtype).removeprefix('torch.')} {tuple(now.shape)}"
            raise AutoparError(
                f"forward() makes {full} another buffer than it was, which no program does",
                values=f"{str(was.dtype).removeprefix('torch.')} {tuple(was.shape)} becomes {became}",
                remedy="give it the shape and dtype that it has later in __init__, or set it outside of forward()",
            )
        if any(compat.shares_storage(now, each) for each in self._model.parameters()):
            raise AutoparError(
                f"forward() makes {full}, a buffer, a parameter, which goes on changing: a program has a copy",
                remedy=f"write self.{name}.copy_(…), or set it outside of forward()",
            )
        return True
