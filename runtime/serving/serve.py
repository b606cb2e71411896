"""The loop over requests: a chunk of prompts, then a token for all slots, in turn. See the package's text."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface import serving
from autopar.base.huggingface.caches import NAMES, check_serves, name_of
from autopar.base.huggingface.generation import vocabulary
from autopar.base.huggingface.reuse import places
from autopar.base.huggingface.sampling import Chooser
from autopar.runtime.engine import Engine
from autopar.runtime.seen_whole import whole
from autopar.runtime.serving.rows import Move, moved, put, row_pieces
from autopar.runtime.serving.schedule import Piece, Schedule, Work

CHUNK = 256
"""Tokens of a prompt in one call, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, token ids, and how many new ones at most.

    do_sample: whether tokens are drawn; the others are options of it, as of `generate()`, whose defaults are the
    model's. seed: of its own draws, as `torch.manual_seed` before a `generate()` of it alone; None: its number in the
    order in which requests come. eos_token_id: what ends it; None: what ends requests of this call. timeout_s: seconds
    from when it came, of a list from the beginning, by the clock of rank 0; what is not done then is cancelled.
    """

    prompt: Sequence[int] | Tensor
    max_new_tokens: int
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    eos_token_id: int | list[int] | None = None
    timeout_s: float | None = None

    def options(self) -> dict[str, Any]:
        """Those of `generate()`."""
        said = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return {"do_sample": self.do_sample, **{name: value for name, value in said.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Served:
    """A request that is done. number: in the order in which requests came. tokens: the new ones, with the one that ends
    the sequence. steps: the calls of forward between which it was under way, counted from the beginning. is_cancelled:
    it was, or came to its time: tokens are those that there were.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    steps: tuple[int, int]
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """Of `compiled.serve`; see there."""

    slots: int
    max_new_tokens: int
    length: int | None
    chunk: int | None
    eos_token_id: int | list[int] | None


class Serving(Iterator[Served]):
    """What `compiled.serve` gives: requests that are done, as they are."""

    def __init__(self, server: _Server) -> None:
        self._server, self._done = server, server.run()

    def __iter__(self) -> Serving:
        return self

    def __next__(self) -> Served:
        return next(self._done)

    def cancel(self, number: int) -> None:
        """Make no more tokens for a request, whether it waits, is read or has tokens: its slot goes to the next one,
        and it is yielded with `is_cancelled`. Of one that is done nothing happens. On every rank alike, between the
        same two results.

        Raises:
            AutoparError: no request of this number has come.
        """
        self._server.cancel(number)

    def close(self) -> None:
        """No more results; what is under way is forgotten. On every rank alike."""
        self._done.close()


def serve(model: nn.Module, engine: Engine, requests: Iterable[Any], asked: Asked) -> Serving:
    """See `CompiledModule.serve`."""
    serving.check_serves(model)
    known_tokens = vocabulary(model)
    read = (_work(number, each, asked, known_tokens) for number, each in zip(count(), requests, strict=False))
    known = list(read) if isinstance(requests, Sequence | Tensor) else None
    works = read if known is None else iter(known)
    length = asked.length
    if length is None:
        if known is None:
            raise AutoparError(
                "how long sequences get is not known of requests that are still to come",
                remedy="serve(requests, length=…): tokens of the longest prompt and of what is made of it",
            )
        longest = max((work.places for work in known), default=1)
        length = longest + longest // 4  # the less is left over, the oftener all rows move
    if min(asked.slots, length, 1 if asked.chunk is None else asked.chunk) < 1:
        raise AutoparError("slots, length and chunk are 1 or more", values=f"{asked}")
    return Serving(_Server(model, engine, works, asked, length, known))


def _work(number: int, request: Any, asked: Asked, known_tokens: int) -> Work:
    if not isinstance(request, Request):
        request = Request(request, asked.max_new_tokens)
    prompt = _tokens(number, request.prompt, known_tokens)
    if not prompt or request.max_new_tokens < 1:
        raise AutoparError(
            f"request {number} has nothing to do",
            values=f"{len(prompt)} tokens, {request.max_new_tokens} new ones",
            remedy="a prompt has a token at least, and so has what is made of it",
        )
    if not request.do_sample and (said := [*request.options()][1:] + ["seed"] * (request.seed is not None)):
        raise AutoparError(
            f"request {number} says how tokens are drawn, and none is",
            values=", ".join(said),
            remedy="Request(…, do_sample=True)",
        )
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise AutoparError(f"request {number} has no time", values=f"timeout_s={request.timeout_s}")
    return Work(number, prompt, request.max_new_tokens, request)


def _tokens(number: int, prompt: Any, known_tokens: int) -> list[int]:
    """A prompt's ids; of a vocabulary that is split no rank would find another one, and none would say so."""
    try:
        found = [operator.index(token) for token in prompt]
        wrong = [token for token in found if not 0 <= token < known_tokens]
    except (TypeError, ValueError) as error:  # ValueError: a tensor of no integers, or of several dims
        raise AutoparError(
            f"request {number} is no prompt",
            values=str(error),
            remedy="a prompt is a list of token ids, or a tensor of one dim of them: tokenizer(text).input_ids",
        ) from error
    if wrong:
        raise AutoparError(
            f"request {number} has a token that the model does not know",
            values=f"{wrong[0]}, of {known_tokens}",
            remedy="ids are from 0 on; see that the tokenizer is the model's",
        )
    return found


@dataclass(frozen=True, slots=True)
class _Choice:
    """How the tokens of a request are chosen, and which of them end it."""

    chooser: Chooser
    ends: frozenset[int]


class _Server:
    """slots: a cache of a row each, whose next token stands in column `column`. lanes: the cache of prompts; documents:
    whose each of its columns is, [lanes, room]. choices: of requests that are not done, by their numbers. open: the
    requests that came, a list's all at once, and are not done; unwanted: the numbers of those that are to be cancelled;
    since: when those that have a time were first seen.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, works: Iterator[Work], asked: Asked, length: int,
        known: Sequence[Work] | None,
    ) -> None:  # fmt: skip
        self.model, self.engine, self.device = model, engine, engine.comm.device
        self.num_slots, self.eos_token_id = asked.slots, asked.eos_token_id
        self.live: dict[int, Work] = {}
        self.newest = [0] * self.num_slots
        self.begun: dict[int, int] = {}
        self.choices: dict[int, _Choice] = {}
        self.open = {work.number: work for work in known or ()}
        self.num_known = len(self.open)
        self.unwanted: list[int] = []
        self.since: dict[int, float] = {}
        self.steps = self.column = self._written = 0
        self.slots = self._empty_slots(length)
        self.length = places(self.slots, length)
        num_lanes = row_pieces(self.slots)
        if self.num_slots % num_lanes:
            raise AutoparError(
                f"{self.num_slots} slots cannot lie in {num_lanes} pieces",
                remedy=f"make their number a multiple of {num_lanes}",
            )
        self.packs = serving.packs(model, self.slots, self.device)
        longest = length if known is None else max((len(work.prompt) for work in known), default=1)
        chunk = min(asked.chunk or engine.caches.chunk or CHUNK, longest)
        self.room = (-(-longest // chunk) + 1) * chunk
        self.lanes: Any = None
        self.documents = torch.full((num_lanes, self.room), -1)
        # Alone, a prompt is a chunk of its own length.
        packed = Schedule(self._checked(works), self.num_slots, num_lanes, chunk, self.room)
        self.schedule = packed if self.packs else Schedule(self._checked(works), self.num_slots, 1, length, length)

    def run(self) -> Generator[Served]:
        while self.live or not self.schedule.is_done():
            with torch.no_grad():
                ended = [(work, True) for work in self._cancelled()]
                ended += [(work, False) for work in (*self._read_prompts(), *self._make_tokens())]
            for work, is_cancelled in ended:
                prompt, tokens = tuple(work.prompt), tuple(work.tokens)
                steps = self.begun.pop(work.number, self.steps), self.steps
                yield Served(work.number, prompt, tokens, steps, is_cancelled)

    def cancel(self, number: int) -> None:
        """See `Serving`; done before the next call of forward, as requests may be handed in during one."""
        if not 0 <= number < self.num_known:
            raise AutoparError(
                f"request {number} cannot be cancelled: it has not come",
                values=f"{self.num_known} did",
                remedy="numbers are those of Served.number, from 0 on in the order of the requests",
            )
        self.unwanted.append(number)

    def _cancelled(self) -> list[Work]:
        """The requests that are not to go on, which have no slot any more."""
        numbers, self.unwanted = [*self.unwanted, *self._late()], []
        found = [self.open.pop(number) for number in dict.fromkeys(numbers) if number in self.open]
        for work in found:
            self.schedule.drop(work)
            self.choices.pop(work.number, None)
            if self.live.get(work.slot) is work:
                del self.live[work.slot]
        return found

    def _late(self) -> list[int]:
        """The requests that came to their time. Collective where one has a time: all ranks go by the first one's clock,
        as each would by its own have another batch.
        """
        timed = {number: work.asked.timeout_s for number, work in self.open.items() if work.asked.timeout_s is not None}
        if not timed:
            return []
        now = torch.tensor(monotonic(), dtype=torch.float64, device=self.device)
        if dist.get_world_size() > 1:
            dist.broadcast(now, 0)
        now_s = now.item()
        return [number for number, time_s in timed.items() if now_s - self.since.setdefault(number, now_s) >= time_s]

    def _checked(self, works: Iterator[Work]) -> Iterator[Work]:
        for work in works:
            if work.number >= self.num_known:
                self.num_known += 1
                self.open[work.number] = work
            elif work.number not in self.open:
                continue
            if work.places > self.length:
                raise AutoparError(
                    f"request {work.number} is longer than what a slot has room for",
                    values=f"{len(work.prompt)} tokens and {work.limit} new ones, length={self.length}",
                    remedy=f"serve(…, length={work.places}) or more",
                )
            self.choices[work.number] = self._choice(work, work.asked)
            yield work

    def _choice(self, work: Work, request: Request) -> _Choice:
        own, seed = request.eos_token_id, work.number if request.seed is None else request.seed
        ends = self.eos_token_id if own is None else own
        options = request.options() | ({} if ends is None else {"eos_token_id": ends})
        chooser = Chooser(self.model, work.prompt, work.limit, options, seed, self.device)
        return _Choice(chooser, serving.ends_of(self.model, ends))

    def _choose(self, works: Sequence[Work], logits_BSV: Tensor, places: Sequence[tuple[int, int]]) -> list[int]:
        """The next token of each request. places: where its logits are."""
        choosers = [self.choices[work.number].chooser for work in works]
        best = [] if all(each.has_rules for each in choosers) else logits_BSV.argmax(-1).tolist()
        return [
            each.choose(whole(logits_BSV[row, place]), work.tokens) if each.has_rules else best[row][place]
            for each, work, (row, place) in zip(choosers, works, places, strict=True)
        ]

    @torch.no_grad()
    def _empty_slots(self, length: int) -> Any:
        """A cache that lies as the program of a token leaves it."""
        fresh = self.engine.caches.new_cache(self.num_slots, length, None)
        check_serves(fresh)
        self.slots = fresh.after(fresh.states())
        self._call_slots()
        self.slots.advance(-1)
        self.steps = 0
        return self.slots

    def _call_slots(self) -> Tensor:
        """A token for every slot, whether it is in use or not; the logits [slots, 1, words]."""
        written = [self.live[slot].written if slot in self.live else 0 for slot in range(self.num_slots)]
        positions = torch.tensor(written, device=self.device)[:, None]
        columns = torch.arange(self.column + 1, device=self.device)
        mask = (columns >= self.column - positions).long()
        ids = torch.tensor(self.newest, device=self.device)[:, None]
        return self._call(ids, mask, positions, self.slots, "slots", begins=False)

    def _call(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, keep: str, **options: Any) -> Tensor:
        inputs = serving.inputs_of(self.model, ids, cache, mask, positions, **options)
        return self._run(inputs, keep)

    def _run(self, inputs: dict[str, Any], keep: str) -> Tensor:
        with self.engine.caches.driving():
            output = self.model(**inputs)
        setattr(self, keep, output[name_of(self.model) or NAMES[0]])
        self.steps += 1
        logits: Tensor = output.logits
        return logits

    def _read_prompts(self) -> list[Work]:
        """A chunk of prompts; the requests that are done with it."""
        pieces = self.schedule.next_chunk()
        for piece in pieces:
            if not piece.start:
                self.begun[piece.work.number] = self.steps
        if not pieces:
            return []
        if not self.packs:
            return [work for piece in pieces for work in self._read_alone(piece.work)]
        first = self.schedule.cursor - self.schedule.chunk
        ending = [piece for piece in pieces if piece.ends]
        logits, is_kept = self._read_chunk(pieces, first)
        places = [(each.lane, n if is_kept else each.at + each.count - 1) for n, each in enumerate(ending)]
        found = self._choose([piece.work for piece in ending], logits, places)
        done, moves = [], []
        for piece, token in zip(ending, found, strict=True):
            work = piece.work
            if self._is_done(work, token):
                done.append(work)
            else:
                moves.append((work, piece.lane, work.begin))
        self._admit(moves)
        return done

    def _read_chunk(self, pieces: Sequence[Piece], first: int) -> tuple[Tensor, bool]:
        """The logits [lanes, columns, words], and whether their columns are those in which prompts end, in order; else
        they are the chunk's.
        """
        chunk, lanes = self.schedule.chunk, len(self.documents)
        if not first:
            self.documents.fill_(-1)
            if self.lanes is None:
                fresh = self.engine.caches.new_cache(lanes, self.room, None)
                self.room = places(fresh, self.room)
                self.documents = torch.full((lanes, self.room), -1)
                self.lanes = fresh.after(fresh.states())
            else:
                self.lanes.advance(-self._written)
            self._written = 0
        ids = torch.zeros(lanes, chunk, dtype=torch.long)
        positions = torch.zeros(lanes, chunk, dtype=torch.long)
        own = self.documents[:, first : first + chunk]  # what is no request's sees others of its kind: it is never read
        ends: list[int] = []
        for piece in pieces:
            where, last = (piece.lane, slice(piece.at, piece.at + piece.count)), piece.start + piece.count
            ids[where] = torch.tensor(piece.work.prompt[piece.start : last])
            positions[where] = torch.arange(piece.start, last)
            own[where] = piece.work.number
            if piece.ends:
                ends.append(piece.at + piece.count - 1)
        kept = torch.tensor(ends + [0] * (self.num_slots - len(ends)), device=self.device)
        ids, positions = ids.to(self.device), positions.to(self.device)
        mask = torch.ones(lanes, first + chunk, dtype=torch.long, device=self.device)
        inputs = serving.inputs_of(self.model, ids, self.lanes, mask, positions, begins=not first, kept=kept)
        logits = self._run(serving.within_documents(inputs, self.documents, first), "lanes")
        self._written += chunk
        return logits, "logits_to_keep" in inputs

    def _read_alone(self, work: Work) -> list[Work]:
        """A prompt of its own length, the same in every lane."""
        lanes = len(self.documents)
        ids = torch.tensor(work.prompt, device=self.device).expand(lanes, -1).contiguous()
        positions = torch.arange(ids.shape[1], device=self.device).expand(lanes, -1).contiguous()
        cache = self.engine.caches.new_cache(lanes, self.length, None)
        found = self._call(ids, torch.ones_like(ids), positions, cache, "lanes", begins=True)
        if self._is_done(work, *self._choose([work], found[:, -1:], [(0, 0)])):
            return [work]
        self._admit([(work, work.slot * lanes // self.num_slots, 0)])
        return []

    def _admit(self, moves: Sequence[tuple[Work, int, int]]) -> None:
        """Prompts that were read become rows of slots. moves: which, of which lane, from which column of it."""
        if not moves:
            return
        for work, _, _ in moves:
            self.live[work.slot] = work
        self._make_room()
        found = [Move(lane, begin, work.written, work.slot, self.column - work.written) for work, lane, begin in moves]
        self.slots = put(self.slots, self.lanes, found)

    def _make_room(self) -> None:
        """Every row ends at the column of the next token, and begins in the first one or later."""
        most = max(work.written for work in self.live.values())
        if most > self.column or self.column >= self.length:
            self.slots = moved(self.slots, most - self.column)
            self.column = most

    def _make_tokens(self) -> list[Work]:
        """A token for every slot in use; the requests that are done with it."""
        if not self.live:
            return []
        self._make_room()
        works = list(self.live.values())
        found = self._choose(works, self._call_slots()[:, -1:], [(work.slot, 0) for work in works])
        self.column += 1
        return [work for work, token in zip(works, found, strict=True) if self._is_done(work, token)]

    def _is_done(self, work: Work, token: int) -> bool:
        """Take a new token; whether it is the last one of the request, whose slot is free then."""
        work.tokens.append(token)
        self.newest[work.slot] = token
        if token not in self.choices[work.number].ends and len(work.tokens) < work.limit:
            return False
        del self.choices[work.number], self.open[work.number]
        self.live.pop(work.slot, None)
        self.schedule.give_back(work)
        return True
