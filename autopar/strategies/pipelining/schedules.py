"""The known schedules, by name, and schedules of a user's own, from CSV.

The orders of computations are torch's (autopar/torch_compat/pipelining.py), except that of 1f1b: torch 2.13's
`Schedule1F1B` leaves microbatch 0 out on the last rank, and refuses fewer microbatches than stages. Communication is
added to all of them in the same way.

UNSHARD of every stage comes at a rank's start, in the order in which its stages are first computed: the gathers run
while the first stages compute, and hold little longer what is held until the last backward anyway. RESHARD and then
REDUCE_GRAD follow a stage's last computation and its sends.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import pipelining as torch_pipelining
from autopar.ir.schedule import COMPUTE, PARAMETERS, TRANSFERS, Action, Kind, Schedule
from autopar.strategies.pipelining.check import check, check_computations, run
from autopar.strategies.pipelining.spec import MOST_BYTES, read_rows

_SENDS = (Kind.SEND_F, Kind.SEND_B)
FORWARDS = "forwards"
"""The name of the schedule of programs without a backward."""
MOST_CELLS = 4_000_000
"""Of a CSV of actions."""
MOST_STAGES_PER_RANK = 8
"""What `candidates` goes up to: more stages a rank send more and gain little."""


@dataclass(frozen=True, slots=True)
class Known:
    """A known schedule. fewest, most: stages per rank (most None: any number). default: of them, where none is given.

    torch_class: whose order it is; empty for our own. splits: backwards into their two halves. rounds: microbatches
    must fill rounds of equal size, of at least as many as there are ranks; per_stage: at least one for each stage.
    """

    name: str
    fewest: int
    most: int | None
    default: int
    torch_class: str
    summary: str
    source: str
    splits: bool = False
    rounds: bool = False
    per_stage: bool = False


KNOWN = {
    known.name: known
    for known in (
        Known("gpipe", 1, 1, 1, "ScheduleGPipe", "all forwards, then all backwards", "Huang et al., arXiv:1811.06965"),
        Known(
            "1f1b",
            1,
            1,
            1,
            "",
            "a backward as soon as it can be, then one forward, one backward",
            "PipeDream-Flush: Narayanan et al., arXiv:2006.09503",
        ),
        Known(
            "interleaved",
            2,
            None,
            2,
            "ScheduleInterleaved1F1B",
            "1f1b over several stages a rank",
            "Narayanan et al., arXiv:2104.04473",
            rounds=True,
        ),
        Known(
            "zero_bubble",
            1,
            None,
            1,
            "ScheduleInterleavedZeroBubble",
            "1f1b whose weight gradients fill the bubble",
            "ZB1P: Qi et al., arXiv:2401.10241",
            splits=True,
            rounds=True,
        ),
        Known(
            "zbv",
            2,
            2,
            2,
            "ScheduleZBVZeroBubble",
            "two stages a rank, there and back again, weight gradients in the bubble",
            "ZB-V: Qi et al., arXiv:2401.10241, section 6",
            splits=True,
        ),
        Known(
            "dualpipev",
            2,
            2,
            2,
            "ScheduleDualPipeV",
            "two stages a rank, there and back again, forwards beside backwards",
            "DeepSeek-AI, arXiv:2412.19437; github.com/deepseek-ai/DualPipe",
            splits=True,
            per_stage=True,
        ),
    )
}
NAMES = tuple(KNOWN)


def refusal(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> AutoparError | None:
    """Why a known schedule does not admit these numbers, with the nearest that it does; None where it does."""
    known = KNOWN[name]
    where = f"{num_ranks} ranks, {stages_per_rank} stages each, {num_microbatches} microbatches"
    if num_ranks < 1 or num_microbatches < 1 or stages_per_rank < 1:
        return AutoparError(f"The schedule {name} needs ranks, stages and microbatches", where=where)
    if stages_per_rank < known.fewest or (known.most is not None and stages_per_rank > known.most):
        span = f"{known.fewest}" if known.fewest == known.most else f"at least {known.fewest}"
        others = [each.name for each in KNOWN.values() if _admits_stages(each, stages_per_rank)]
        return AutoparError(
            f"The schedule {name} takes {span} stages per rank, not {stages_per_rank}",
            where=where,
            remedy=f"Take {known.default}, or {' or '.join(others)}, which takes {stages_per_rank}",
        )
    if not _admits_microbatches(known, num_ranks, num_microbatches, stages_per_rank):
        nearest = _nearest(known, num_ranks, num_microbatches, stages_per_rank)
        reason = f"Each stage needs one: there are {num_ranks * stages_per_rank}"
        if known.rounds:
            rounds = num_microbatches // num_ranks
            reason = f"They go in {num_microbatches} // {num_ranks} = {rounds} rounds of equal size"
        return AutoparError(
            f"The schedule {name} does not take {num_microbatches} microbatches",
            where=where,
            values=reason,
            remedy=f"Take {' or '.join(map(str, nearest))} microbatches, or the schedule 1f1b, which takes any number",
        )
    return None


def _admits_stages(known: Known, stages_per_rank: int) -> bool:
    return known.fewest <= stages_per_rank and (known.most is None or stages_per_rank <= known.most)


def _admits_microbatches(known: Known, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> bool:
    if known.rounds and num_microbatches % max(1, num_microbatches // num_ranks) != 0:
        return False
    return not known.per_stage or num_microbatches >= num_ranks * stages_per_rank


def _nearest(known: Known, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[int]:
    """The next admitted numbers of microbatches below and above; a multiple of the stages always is."""
    above = range(num_microbatches + 1, num_microbatches + num_ranks * stages_per_rank + 1)
    found = []
    for numbers in (range(num_microbatches - 1, 0, -1), above):
        admitted = (each for each in numbers if _admits_microbatches(known, num_ranks, each, stages_per_rank))
        found += [next(admitted, 0)]
    return [each for each in found if each]


def known_as(name: str) -> Known:
    """The known schedule of a name.

    Raises:
        AutoparError: there is none.
    """
    if name not in KNOWN:
        raise AutoparError(
            f"There is no schedule {name!r}",
            values=f"Known are {', '.join(NAMES)}",
            remedy="Name one of these, or give a CSV of actions, a row for each rank",
        )
    return KNOWN[name]


def build(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """A known schedule with its communication. stages_per_rank: None for the schedule's default.

    Raises:
        AutoparError: an unknown name, or numbers that the schedule does not admit.
    """
    known = known_as(name)
    return _build(name, num_ranks, num_microbatches, known.default if stages_per_rank is None else stages_per_rank)


@functools.lru_cache(maxsize=32)
def _build(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    error = refusal(name, num_ranks, num_microbatches, stages_per_rank)
    if error is not None:
        raise error
    known = KNOWN[name]
    if known.torch_class:
        texts = torch_pipelining.compute_order(known.torch_class, num_ranks, stages_per_rank, num_microbatches)
    else:
        texts = [_one_forward_one_backward(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    order = [[_parse(text) for text in row] for row in texts]
    return _with_communication(name, num_microbatches, _ranks_of(order), order, backward=True)


def _one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """1f1b: as many forwards first as there are ranks behind, then a forward and a backward in turn."""
    first = min(num_ranks - 1 - rank, num_microbatches)
    texts = [f"{rank}F{microbatch}" for microbatch in range(first)]
    for microbatch in range(num_microbatches):
        if first + microbatch < num_microbatches:
            texts.append(f"{rank}F{first + microbatch}")
        texts.append(f"{rank}B{microbatch}")
    return texts


@functools.lru_cache(maxsize=1 << 16)
def _parse(text: str) -> Action:
    return Action.parse(text)


def _ranks_of(order: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Stage -> the first rank that computes it; -1 where none does."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(order):
        for action in actions:
            for leaf in action.leaves:
                if leaf.kind in COMPUTE:
                    ranks.setdefault(leaf.stage, rank)
    return tuple(ranks.get(stage, -1) for stage in range(max(ranks, default=-1) + 1))


def compute_only(name: str, num_microbatches: int, order: Sequence[Sequence[Action]]) -> Schedule:
    """A schedule from its computations, checked, with communication added. name: for errors.

    Raises:
        AutoparError: computations that are missing, done twice or out of order, or that wait for each other.
    """
    bare = Schedule(name, num_microbatches, _ranks_of(order), tuple(tuple(row) for row in order))
    check_computations(bare, backward=True)
    run(bare, transfers=False)
    return _with_communication(name, num_microbatches, bare.rank_of, order, backward=True)


def _with_communication(
    name: str, num_microbatches: int, rank_of: tuple[int, ...], order: Sequence[Sequence[Action]], backward: bool
) -> Schedule:
    texts = torch_pipelining.add_send_recv([list(map(str, row)) for row in order], rank_of)
    rows = (_with_parameters([_parse(text) for text in row], backward) for row in texts)
    return Schedule(name, num_microbatches, rank_of, tuple(rows))


def _with_parameters(actions: Sequence[Action], backward: bool) -> tuple[Action, ...]:
    """One rank's actions with UNSHARD, RESHARD and REDUCE_GRAD of its stages."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, action in enumerate(actions):
        for leaf in action.leaves:
            if leaf.kind in COMPUTE:
                first.setdefault(leaf.stage, at)
                last[leaf.stage] = at
    closing: dict[int, list[int]] = {}
    for stage, at in last.items():
        while at + 1 < len(actions) and actions[at + 1].kind in _SENDS:
            at += 1
        closing.setdefault(at, []).append(stage)
    out = [Action(stage, Kind.UNSHARD) for stage in first]
    for at, action in enumerate(actions):
        out.append(action)
        for stage in closing.get(at, ()):
            out.append(Action(stage, Kind.RESHARD))
            if backward:
                out.append(Action(stage, Kind.REDUCE_GRAD))
    return tuple(out)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in its order and on its ranks, as evaluation runs them."""
    order = [
        [leaf for action in actions for leaf in action.leaves if leaf.kind is Kind.FORWARD]
        for actions in schedule.order
    ]
    return _with_communication(schedule.name, schedule.num_microbatches, schedule.rank_of, order, backward=False)


def forwards(num_ranks: int, rank_of: Sequence[int]) -> Schedule:
    """One forward of one microbatch through all stages, for programs that have no backward: prompts and tokens.

    rank_of: stage -> rank, of `num_ranks`.
    """
    order = [
        [Action(stage, Kind.FORWARD, 0) for stage, owner in enumerate(rank_of) if owner == rank]
        for rank in range(num_ranks)
    ]
    return _with_communication(FORWARDS, 1, tuple(rank_of), order, backward=False)


def from_csv(source: str | Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """A user's own schedule: one row a rank, a cell an action, blank cells are bubbles.

    source: a path, or the text itself. Communication is added to rows of computations; rows with sends and receives
    must have them all, and may leave out UNSHARD, RESHARD and REDUCE_GRAD.

    Raises:
        AutoparError: a file that cannot be read, a cell that is no action, or a schedule that `check` refuses.
    """
    name, text = _read(source)
    if text.count(",") > MOST_CELLS:
        raise AutoparError(
            "A pipeline schedule has too many cells",
            where=f"pipeline schedule {name}",
            values=f"At most {MOST_CELLS} are read",
            remedy=f"Give fewer actions, or one of {', '.join(NAMES)}",
        )
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise AutoparError(
            "A pipeline schedule is not CSV",
            where=f"pipeline schedule {name}",
            values=str(error),
            remedy="Write a row of actions for each rank, such as 0F0,0F1,0B0,0B1",
        ) from error
    while rows and not any(rows[-1]):
        rows.pop()
    if len(rows) != num_ranks:
        raise AutoparError(
            "A pipeline schedule has one row for each rank",
            where=f"pipeline schedule {name}",
            values=f"It has {len(rows)} rows, the pipeline axis {num_ranks} ranks",
            remedy=f"Write {num_ranks} rows, or choose a mesh whose pipeline axis has {len(rows)} ranks",
        )
    order = [_actions(name, rank, row) for rank, row in enumerate(rows)]
    kinds = {leaf.kind for row in order for action in row for leaf in action.leaves}
    if not kinds & (TRANSFERS | PARAMETERS):
        schedule = compute_only(name, num_microbatches, order)
    elif kinds & PARAMETERS:
        schedule = Schedule(name, num_microbatches, _ranks_of(order), tuple(map(tuple, order)))
    else:
        with_parameters = tuple(_with_parameters(row, backward=True) for row in order)
        schedule = Schedule(name, num_microbatches, _ranks_of(order), with_parameters)
    check(schedule)
    return schedule


def _read(source: str | Path) -> tuple[str, str]:
    """Name and text of a CSV: a text of several actions or lines is the schedule itself, else it is a path."""
    if isinstance(source, str) and any(sign in source for sign in ",\n\r"):
        if len(source) > MOST_BYTES:
            raise AutoparError(
                "A pipeline schedule is too large",
                where="from CSV",
                values=f"{len(source)} characters, at most {MOST_BYTES} are read",
                remedy=f"Give fewer actions, or one of {', '.join(NAMES)}",
            )
        return "from CSV", source
    return str(source), read_rows(source)


def _actions(name: str, rank: int, row: Sequence[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row):
        if cell:
            try:
                actions.append(Action.parse(cell))
            except AutoparError as error:
                where = f"pipeline schedule {name}, row {rank + 1}, column {column + 1}"
                raise AutoparError(error.what, where=where, remedy=error.remedy) from error
    return actions


@dataclass(frozen=True, slots=True)
class Candidate:
    """A known schedule and its stages per rank."""

    name: str
    stages_per_rank: int


def candidates(num_ranks: int, num_microbatches: int, num_calls: int) -> tuple[Candidate, ...]:
    """The known schedules that admit these numbers and have no more stages than there are calls."""
    most = min(MOST_STAGES_PER_RANK, num_calls // num_ranks)
    return tuple(
        Candidate(name, stages)
        for name in NAMES
        for stages in range(1, most + 1)
        if refusal(name, num_ranks, num_microbatches, stages) is None
    )
