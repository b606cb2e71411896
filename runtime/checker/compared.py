"""What a program computes, compared with what was planned: term by term of outputs, buffers and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface
from autopar.ir.meaning import digest_of
from autopar.ir.terms import Term
from autopar.ir.values import gradient_key, gradient_of

REMEDY = (
    "undo the last edit of the program; one that computes the same in another way, or something else on purpose, runs "
    "with AUTOPAR_CHECK=types, and plan.with_source(text).verify() compares it with the model"
)


class Compared:
    """Collects what is not as planned; a plan without meaning takes everything."""

    def __init__(self, interface: ProgramInterface) -> None:
        meaning = interface.meaning
        self._wanted = meaning if meaning is not None and meaning.is_comparable else None
        self._gradients = {} if self._wanted is None else dict(self._wanted.gradients)
        self._interface = interface
        self._wrong: dict[str, list[str]] = {"output": [], "buffer": [], "gradient": []}

    def border(self) -> None:
        """Whether the interface has outputs as the user sees them, hands in the gradients that were planned, and hands
        back those of inputs.

        Raises:
            AutoparError: an output of another shape, or one whose gradient would be lost, or asked for and not come; an
                input of which that is so.
        """
        wanted = self._wanted
        if wanted is not None:
            self._inputs()
        for place, entry in enumerate(self._interface.outputs):
            if wanted is None or wanted.shapes is None or wanted.roots is None:
                return
            if wanted.shapes[place] != entry.shape:
                raise _not_planned(
                    "output", entry.name, f"it has the shape {entry.shape}, planned is {wanted.shapes[place]}"
                )
            if entry.differentiable != (place in wanted.roots):
                raise _not_planned(
                    "output", entry.name, f"a gradient is {'' if entry.differentiable else 'not '}handed in for it"
                )

    def before(self, source: str) -> None:
        """Whether the text says of the batch what was planned, before anything runs: by what microbatches are weighted,
        and what they read of all rows.

        Raises:
            AutoparError: one of these functions is another, or gone.
        """
        for name, digest in () if self._wanted is None else self._wanted.before:
            if digest_of(source, name) != digest:
                raise AutoparError(
                    f"the program is not right: its {name} is another than was planned",
                    where=name,
                    values="microbatches are put together by what it says of the batch",
                    remedy=REMEDY,
                )

    def _inputs(self) -> None:
        for entry in self._interface.inputs:
            if entry.differentiable != (gradient_key(entry.name) in self._gradients):
                raise _not_planned(
                    "input", entry.name, f"its gradient is {'' if entry.differentiable else 'not '}handed back"
                )

    def outputs(self, places: Iterable[int], terms: Sequence[Iterable[Term]]) -> None:
        """Of the outputs at these places."""
        if self._wanted is not None:
            for place, found in zip(places, terms, strict=True):
                self._compare("output", self._interface.outputs[place].name, self._wanted.outputs[place], found)

    def updates(self, names: Sequence[str], terms: Sequence[Iterable[Term]]) -> None:
        """Of buffers that the program changes."""
        if self._wanted is not None:
            known = dict(zip((entry.name for entry in self._interface.updates), self._wanted.updates, strict=True))
            for name, found in zip(names, terms, strict=True):
                self._compare("buffer", name, known[name], found)

    def gradients(self, found: Mapping[str, Iterable[Term]]) -> None:
        """Of parameters, and of inputs by their keys."""
        if self._wanted is not None:
            for name, terms in found.items():
                self._compare("gradient", name, self._gradients[name], terms)

    def _compare(self, kind: str, name: str, wanted: Term, found: Iterable[Term]) -> None:
        if wanted not in set(found):
            self._wrong[kind].append(gradient_of(name) if kind == "gradient" else name)

    def check(self) -> None:
        """Raises:
        AutoparError: what is not as planned, first what is computed first.
        """
        for kind, names in self._wrong.items():
            if names:
                names = list(dict.fromkeys(names))
                nearest = names[::-1] if kind == "gradient" else names
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise AutoparError(
                    f"the program is not right: it computes another {kind} than was planned",
                    where=", ".join(nearest[:3]) + more,
                    values="every statement is a part of a whole one, but of others than the model's",
                    remedy=REMEDY,
                )


def _not_planned(kind: str, name: str, values: str) -> AutoparError:
    return AutoparError(
        f"the program is not right: an {kind} of its interface is another than was planned",
        where=name,
        values=values,
        remedy="let autopar plan again",
    )
