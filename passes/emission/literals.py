r"""Names of modules, parameters and inputs in the program's text: as literals that are read back as what they were.

Any text names a module (`nn.ModuleDict`, `add_module`), so none is written as it is.

    quoted('a"b')        "a\"b"                      a string
    inside('a"b{')       a\"b{{                      a part of an f-string
    plain("a\nb")        a b                        a part of a comment
"""

from __future__ import annotations


def quoted(text: str) -> str:
    """A literal in double quotes: what is not printable is escaped, other letters stay as they are."""
    return f'"{escaped(text)}"'


def inside(text: str) -> str:
    """The same within an f-string in double quotes."""
    return escaped(text).replace("{", "{{").replace("}", "}}")


def escaped(text: str) -> str:
    """The same without the quotes; also for what stands in a docstring."""
    return "".join(map(_escaped, text))


def plain(text: str) -> str:
    """One line of a comment: what is not printable, line ends above all, becomes a space."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()
