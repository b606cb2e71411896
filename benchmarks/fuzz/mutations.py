"""Inputs that are nearly right, and inputs that are nothing: of JSON-like values, of texts, of bytes."""

from __future__ import annotations

import copy
import json
import random
import string
from typing import Any

HOSTILE = (
    "", " ", "\n", "\0", "x" * 3000, '"', "\\", "../x", "/etc/passwd", "os:abort", "os:abort()", "../../../etc/passwd",
    "{0}", "%s", "</script>", "größe", "\u2028", "\ud800", "nan", "inf", "1e999", "None", "true", "dp", "S(0)",
    "dp=S(9)", "dp=P(max)", "h100", "h100:4xroce-100", "/dev/zero", "zero3", "tensor", "0F0", "99999F99", "in:x", "0.0",
    "float32", "object", "load", "__import__", "torch.load", "*", "a.b.c", "~root", "1" * 5000,
    "(0F0;1B0)OVERLAP_F_B",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 16, 255, 1 << 16, 1 << 31, 1 << 53, 1 << 62, 1 << 63, 10**30, 10**400, -(10**30), 0.0, -0.0,
    0.5, -1.5, 1e-300, 1e300, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


def arbitrary(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value."""
    kind = draw.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind in (1, 2):
        return draw.choice(NUMBERS) if draw.random() < 0.6 else draw.randrange(-20, 2000)
    if kind in (3, 4):
        return draw.choice(HOSTILE)
    if kind == 5:
        return "".join(draw.choices(string.printable, k=draw.randrange(12)))
    if kind == 6:
        return [arbitrary(draw, depth + 1) for _ in range(draw.randrange(5))]
    if kind == 7:
        return {draw.choice(HOSTILE)[:40]: arbitrary(draw, depth + 1) for _ in range(draw.randrange(4))}
    value: Any = draw.choice(([], {}, 1))
    for _ in range(draw.choice((3, 30, 70, 300))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a value."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        each = todo.pop()
        pairs = (
            list(each.items()) if isinstance(each, dict) else list(enumerate(each)) if isinstance(each, list) else []
        )
        found += [(each, key) for key, _ in pairs]
        todo += [inner for _, inner in pairs]
    return found


def mutated(draw: random.Random, value: Any) -> Any:
    """A copy with a few things dropped, replaced, retyped, nested, doubled, or taken from elsewhere in it."""
    try:
        return _mutated(draw, copy.deepcopy(value))
    except RecursionError:  # nested things taken into each other
        return arbitrary(draw, depth=4)


def _mutated(draw: random.Random, value: Any) -> Any:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        known = places(value)
        if not known:
            return arbitrary(draw)
        holder, key = draw.choice(known)
        _change(draw, holder, key, known)
    return value


def _change(draw: random.Random, holder: Any, key: Any, known: list[tuple[Any, Any]]) -> None:
    old = holder[key]
    kind = draw.randrange(9)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = arbitrary(draw)
    elif kind == 2:
        holder[key] = draw.choice(NUMBERS)
    elif kind == 3:
        other, place = draw.choice(known)
        holder[key] = copy.deepcopy(other[place])
    elif kind == 4:
        holder[key] = [old] if draw.random() < 0.5 else {"a": old}
    elif kind == 5 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(old))
    elif kind == 5:
        holder[draw.choice(HOSTILE)[:40]] = copy.deepcopy(old)
    elif kind == 6 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = draw.choice(
            (old + 1, old - 1, -old, old * 1000, old / 3 if abs(old) < 1e99 else 0, [old], not old)
        )
    elif kind == 6 and isinstance(old, str):
        holder[key] = mutated_text(draw, old)
    elif kind == 7 and isinstance(old, str):
        holder[key] = draw.choice(HOSTILE)
    else:
        same = [each for each in known if type(each[0][each[1]]) is type(old)] if len(known) < 3000 else known
        other, place = draw.choice(same)
        holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(old)


def mutated_text(draw: random.Random, text: str) -> str:
    """The text with letters, words or pieces of it changed."""
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + draw.choice((1, 3, 20, 1000)))
        piece = draw.choice((
            "", draw.choice(HOSTILE), text[at:end] * draw.choice((2, 50)), draw.choice(string.printable),
            str(draw.choice(NUMBERS)) if draw.random() < 0.9 else "[" * 2000,
        ))  # fmt: skip
        text = text[:at] + piece + text[end:]
    return text


def mutated_lines(draw: random.Random, text: str) -> str:
    """Lines dropped, doubled, exchanged, and their values replaced."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        kind = draw.randrange(6)
        name, sign, _ = lines[at].partition("=")
        if kind == 0 and len(lines) > 1:
            del lines[at]
        elif kind == 1:
            lines.insert(draw.randrange(len(lines)), lines[at])
        elif kind == 2:
            lines[at] = mutated_text(draw, lines[at])
        elif sign:
            value = arbitrary(draw)
            plain = json.dumps(value) if not isinstance(value, dict) else "{" + "a.b = 1," * draw.choice((1, 900)) + "}"
            lines[at] = f"{name}= {draw.choice((plain, str(draw.choice(NUMBERS)), '1' * 5000, '1979-05-27', 'nan'))}"
        else:
            lines[at] = draw.choice(
                ("[a]", "[node]", "[[node]]", "[a.b.c]", ".".join("a" * 50) + " = 1", "[memory.bytes]")
            )
        lines = lines or [""]
    return "\n".join(lines) + "\n"


def mutated_bytes(draw: random.Random, content: bytes) -> bytes:
    """Cut short, flipped, inserted into, repeated."""
    kind = draw.randrange(5)
    at = draw.randrange(len(content) + 1)
    if kind == 0:
        return content[:at]
    if kind == 1 and content:
        changed = bytearray(content)
        for _ in range(draw.choice((1, 4, 64))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)
    if kind == 2:
        return content[:at] + draw.randbytes(draw.choice((1, 8, 300))) + content[at:]
    if kind == 3:
        return content[:at] + content[at // 2 : at] * draw.choice((2, 20)) + content[at:]
    return draw.randbytes(draw.choice((0, 1, 7, 64, 4000)))
