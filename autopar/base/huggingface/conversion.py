"""Which weights of a model transformers makes of which stored ones: experts that are stored one by one, other names.

What is known here is transformers' own table (`conversion_mapping`), of which renaming, putting experts on top of each
other and putting such stacks side by side are followed. What else it may do to weights is left as it is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Made(NamedTuple):
    """Of a weight. parts: what lies side by side along dim 1 (dim 0 where nothing is on top of each other), each the
    names of what is on top of each other along dim 0. is_stack: False where one name stands for the weight itself.
    """

    parts: tuple[tuple[str, ...], ...]
    is_stack: bool


def has_table(model_type: str) -> bool:
    """Whether transformers is there and stores such models otherwise than it holds them."""
    return bool(_table(model_type))


def made_of(model_type: str, names: Iterable[str]) -> dict[str, Made]:
    """How the model's weights are made of stored ones, by the model's names. names: all that are stored."""
    renamings, converters = _split(_table(model_type))
    found: dict[str, dict[int, dict[int, str]]] = {}
    plain: dict[str, Made] = {}
    for name in names:
        renamed = name
        for each in renamings:
            renamed = each.rename_source_key(renamed)[0]
        for each in converters:
            target, pattern = each.rename_source_key(renamed)
            if pattern is not None:
                number = re.search(r"\.(\d+)\.", _differing(renamed, target))
                if number is not None:
                    place = each.source_patterns.index(pattern)
                    found.setdefault(target, {}).setdefault(place, {})[int(number[1])] = name
                break
        else:
            plain[renamed] = Made(((name,),), False)
    for target, parts in found.items():
        stacks = [tuple(each[e] for e in sorted(each)) for _, each in sorted(parts.items())]
        if len({len(stack) for stack in stacks}) == 1:
            plain[target] = Made(tuple(stacks), True)
    return plain


def stored_as(model_type: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Made]:
    """The inverse: for each of the model's weights the names under which transformers stores it. shapes: of them."""
    renamings, converters = _split(_table(model_type))
    found: dict[str, Made] = {}
    for name, shape in shapes.items():
        stacks: list[list[str]] = [[name]]
        is_stack = False
        for each in converters:
            reverse = each.reverse_transform()
            matched = reverse.compiled_sources.search(name)
            if matched is not None and len(shape) >= 2:
                targets = [pattern.replace("*", "{}") for pattern in reverse.target_patterns]
                inside = [name.replace(matched.group(0), target, 1) for target in targets]
                stacks = [[text.format(expert) for expert in range(shape[0])] for text in inside]
                is_stack = True
                break
        for each in reversed(renamings):
            reverse = each.reverse_transform()
            stacks = [[reverse.rename_source_key(one)[0] for one in stack] for stack in stacks]
        found[name] = Made(tuple(map(tuple, stacks)), is_stack)
    return found


def _table(model_type: str) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return []
    return list(get_checkpoint_conversion_mapping(model_type) or [])


def _split(table: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Renamings, and converters that are followed."""
    renamings, converters = [], []
    for each in table:
        operations = getattr(each, "operations", None)
        if operations is None:
            renamings.append(each)
        elif _is_followed(operations):
            converters.append(each)
    return renamings, converters


def _is_followed(operations: Iterable[Any]) -> bool:
    said = [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
    return said in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _differing(one: str, other: str) -> str:
    """What of the first name the second has otherwise, with the dots around it."""
    start = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return one[max(0, start - 1) :]
