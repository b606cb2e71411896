"""The one error of autopar, and its one shape: what was asked (where). The numbers. The nearest remedy."""

from __future__ import annotations


class AutoparError(Exception):
    """An error a user can act on. Printed as ``what (where). values. remedy``.

    what: what was asked and why it cannot be.
    where: module path and, where it is known, the model's own source line.
    values: the numbers that decide.
    remedy: the nearest thing that would work.

    Bugs of autopar itself are ``assert``s, never this.
    """

    def __init__(
        self, what: str, *, where: str | None = None, values: str | None = None, remedy: str | None = None
    ) -> None:
        self.what = what
        self.where = where
        self.values = values
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        first = self.what.rstrip(".")
        if self.where:
            first = f"{first} ({self.where})"
        sentences = [first, *(part.rstrip(".") for part in (self.values, self.remedy) if part)]
        return " ".join(sentence if sentence.endswith(("?", "!")) else f"{sentence}." for sentence in sentences)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fields when an error crosses a process boundary (pickle cannot pass keyword arguments)."""
        return (_rebuild, (type(self), self.what, self.where, self.values, self.remedy))


def _rebuild(
    kind: type[AutoparError], what: str, where: str | None, values: str | None, remedy: str | None
) -> AutoparError:
    return kind(what, where=where, values=values, remedy=remedy)


class DoesNotFit(AutoparError):
    """No placement was found: of the limit on memory, or of constraints that exclude each other.

    ratio: the bytes of the smallest that was found to those of the limit, where something was. needed_bytes: of the
    smallest limit within which the placement would find something, as it sees the step. excluded: it is the
    constraints, proven: no limit would help. outside_attention: these are constraints on what lies outside of
    attention, so that no other way to split it would help.
    """

    ratio: float | None = None
    needed_bytes: int | None = None
    excluded: bool = False
    outside_attention: bool = False
