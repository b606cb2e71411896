"""Where blocks that a step leaves out would stand among its calls.

Draws of Python's, and other numbers that a program is told, may leave out blocks (stochastic depth, LayerDrop). Stages
of a pipeline keep their parameters, whatever is left out: a stage begins before the same elements of module lists.

    stages: blocks.0-2 | blocks.3-5, epilogue;  a step without blocks.3  →  blocks.0-2 | blocks.4-5, epilogue
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.ir.program import Program
from autopar.ir.stages import Stage


def place_of(program: Program, name: str) -> tuple[int, bool] | None:
    """The first call that reads parameters of a module, and True; for one that no call reads, the call before which it
    would stand by its number in the list that it is part of, and False. None for what is in no list of which a call
    reads anything.
    """
    while name:
        own = [n for n in range(len(program.calls)) if _numbers(program, n, name, read_whole=True)]
        if own:
            return own[0], True
        around, _, last = name.rpartition(".")
        if last.isdigit():
            found = [(n, number) for n in range(len(program.calls)) for number in _numbers(program, n, around)]
            after = [n for n, number in found if number > int(last)]
            before = [n + 1 for n, number in found if number < int(last)]
            if found:
                return (min(after) if after else max(before)), False
        name = around
    return None


def _numbers(program: Program, call: int, around: str, *, read_whole: bool = False) -> list[int]:
    """The numbers of a list's elements whose parameters a call reads; read_whole: one number, if it reads any."""
    begin = f"{around}."
    read = [name.removeprefix(begin) for name in program.calls[call].slots if name.startswith(begin)]
    if read_whole:
        return [call] if read else []
    numbers = {name.partition(".")[0] for name in read}
    return sorted(int(number) for number in numbers if number.isdigit())


def kept_by(program: Program, stages: Sequence[Stage], name: str) -> int:
    """The stage that keeps a parameter which no call reads: where the block would be that it is of; else the first."""
    found = place_of(program, name.rpartition(".")[0]) if program.told is not None else None
    if found is None:
        return 0
    call, is_there = found
    call = call if is_there else max(0, call - 1)
    return next(n for n, stage in enumerate(stages) if call in stage.calls and call not in stage.recomputed)


def begins_with(program: Program, call: int, earlier: Collection[str]) -> str:
    """The module whose parameters a call is the first to read, of calls that are no blocks. earlier: what calls before
    it read. Empty where there is none.
    """
    return next((name.rpartition(".")[0] for name in program.calls[call].slots if name not in earlier), "")
