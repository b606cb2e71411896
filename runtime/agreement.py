"""What the ranks compare at every forward: that they are about to do the same step on the same batch.

Each rank sends some numbers, most of them hashes of what it is about to do, before anything else. Ranks that differ
would compute wrong numbers without a word (another batch, another learning rate), or wait for each other for ever (a
rank that plans for a batch that the others know). On a CPU the numbers are compared at once; on other devices nobody
waits for them: they are compared when the next forward begins, or before a plan is made.

The last number is what the rank's generator gives next. Rank 0's is the seed of the step (`Agreement.seed`): so random
draws are the same on every rank, however each was seeded, and `torch.manual_seed` repeats them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import all_gather_single, job_store
from autopar.base.torch_compat.tracing import tree_leaves_with_path
from autopar.runtime import draws
from autopar.runtime.alike import Alike, Values, differing, digest, first_of
from autopar.runtime.checks import gather_objects
from autopar.runtime.communicator import Communicator
from autopar.runtime.edits import Edits
from autopar.runtime.nearby import Nearby
from autopar.runtime.p2p import tells_of_time
from autopar.runtime.trail import BEGINNING

logger = logging.getLogger("autopar")

SAMPLES = 256
"""Elements of each input that are compared."""
VALUES = "the values of the inputs"
FLAGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Of an optimizer's group: what may differ, as it says how a step is computed, not which."""
TELLS_WITHIN_S = 3.0
"""Where some rank did not come: how long the others have to say that they did."""
SETTINGS = "the settings of the optimizer"
TRAINED = "the parameters that are trained"
STEPS = "the numbers of steps of optimizers"
GRADED = "which parameters have gradients"
WRITTEN = "writes into weights between steps"
GIVEN = "the gradients of the losses"
OF_HELD = (SETTINGS, TRAINED, STEPS, GRADED, WRITTEN, GIVEN)
"""What only ranks compare that hold the same parameters: stages of a pipeline have groups of their own."""
FACTS: Mapping[str, str] = {
    "the numbers of forwards": "Run the same steps on every rank: a condition on the rank must not skip one",
    "the modes of modules (train, eval)": "Call train() and eval() on every rank alike",
    "the modes of recording gradients": "Enter torch.no_grad() on every rank alike",
    "the kinds of the inputs": "Pass inputs of the same shapes and dtypes on every rank",
    "the traced graphs": "The model must not branch on the rank, and every rank takes the global batch",
    TRAINED: "Freeze parameters (requires_grad_) on every rank alike",
    SETTINGS: "Set learning rates and the like from what is the same on every rank",
    STEPS: "Call optimizer.step() on every rank alike",
    GRADED: "Call zero_grad(), and set or delete .grad, on every rank alike",
    WRITTEN: "Edit weights on every rank alike; go on from the last checkpoint",
    GIVEN: "A rank's loss is that of the whole batch: scale it on every rank alike",
    VALUES: "Pass the same global batch on every rank (same sampler seed), or use compiled.shard_loader",
}
"""What is compared, in this order, and what to do where it differs."""


def _plain(value: Any) -> str:
    """What says the same on every rank, without looking at a device."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return repr(value.item())
    return type(value).__name__


HELD = "which parameters a rank holds"
SEED = "the number that a rank's generator gives next"
SENT = (*list(FACTS)[:-1], HELD, VALUES, SEED)
"""The numbers of a rank, in their order."""
Detail = Mapping[str, str]
"""What differs, by its name: of an input, or of the fact itself."""


class Call(NamedTuple):
    """What a rank is about to run. number: of the forward. inputs: by name. modes: of the model's modules. graph: says
    the same on ranks whose models were traced to the same graph. trained: which of its parameters want gradients.
    graded: which have one. kinds: of all inputs, by name, where `inputs` are those alone whose values are compared.
    """

    number: int
    inputs: Mapping[str, Any]
    modes: Sequence[bool] = ()
    graph: str = ""
    trained: Sequence[bool] = ()
    graded: Sequence[bool] = ()
    kinds: Mapping[str, str] | None = None

    def kinds_of_inputs(self) -> Mapping[str, str]:
        """What each input is, but for its values."""
        return {name: _kind(leaf) for name, leaf in self.inputs.items()} if self.kinds is None else self.kinds

    def compared(self) -> tuple[str, ...]:
        """The inputs whose values are compared, in their order."""
        return tuple(name for name, leaf in self.inputs.items() if _is_compared(leaf))


class _Sent(NamedTuple):
    """What was sent at the beginning of a forward. found: (ranks · facts,) int64, known when `work` is done.
    axes: those of the last numbers, which say what parameters have.
    """

    number: int
    found: Tensor
    work: Any
    details: Callable[[], dict[str, Detail]]
    axes: tuple[str, ...] = ()


class Agreement:
    """Of one compiled model: sends a step's facts, and compares them in time.

    comm: of the whole mesh; says how long a rank is waited for. settings: of the optimizer of its parameters that
    stepped last. held: says the same on ranks that hold the same parameters. alike: what ranks hold alike, once
    parameters are placed; writes: what was written into those of which no other rank has the same. apart: the inputs
    that each stage of a pipeline keeps its own of, by name: their values are nobody else's.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.device = comm, comm.device
        self.settings = self.held = ""
        self.alike: Alike | None = None
        self.writes, self.apart = Edits({}), frozenset[str]()
        self._steps = self._num_ranks = 0
        self._nearby: Nearby | None = None
        self._odd = torch.zeros(0, dtype=torch.int64, device=comm.device)
        self._given: list[Tensor] = []
        self._sent: _Sent | None = None
        self._seed: int | Tensor | None = None

    def note(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer."""
        groups = [
            ", ".join(f"{name}={_plain(value)}" for name, value in sorted(group.items()) if name not in FLAGS)
            for group in optimizer.param_groups
        ]
        self.settings = f"{type(optimizer).__name__}({'; '.join(groups)})"
        self._steps += 1
        self.writes.note()

    def stepped(self) -> None:
        """Called after each step of an optimizer."""
        self.writes.accept()

    def note_gradient(self, gradient: Tensor) -> None:
        """Called with each gradient that comes for a scalar output."""
        self._given.append(gradient.detach())

    def begin(self, call: Call) -> None:
        """Before anything else of a forward. Collective.

        Raises:
            AutoparError: ranks differ; says which, in what, and what each has. Or a rank did not come: says which.
        """
        self.settle()
        self._seed = None
        if not self._num_ranks:
            self._num_ranks = dist.get_world_size()
            if self._num_ranks > 1 and self.device.type == "cpu":
                self._nearby = self._with_all(call.number, self.comm.neighbours)
        if self._num_ranks == 1:
            return
        seed = draws.peek()
        modes, trained, records, settings = call.modes, call.trained, torch.is_grad_enabled(), self.settings
        graded, steps, (losses, self._given) = call.graded, self._steps, (self._given, [])
        written = self.writes.taken()
        given = digest(torch.stack(losses).double().to(self.device)) if losses else 0
        alike = self.alike if records else None
        samples = [] if alike is None else alike.numbers(call.number)
        kinds = call.kinds_of_inputs()
        alike_everywhere = {name: x for name, x in call.inputs.items() if _is_compared(x) and name not in self.apart}
        parts = [_bits(x).to(self.device) for x in alike_everywhere.values()]
        bits = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=self.device)
        texts = (repr(kinds), call.graph, repr(bytes(trained)), settings)
        known = (call.number, _hash(bytes(modes)), int(records), *map(_hash, texts))
        known = (*known, steps, _hash(bytes(graded)), int(bool(written)))
        known = (*known, 0, _hash(self.held), 0, seed, *[0] * len(samples))
        own = torch.tensor(known, dtype=torch.int64).to(self.device)
        numbers = ((SENT.index(VALUES), self._number_of(bits)), (SENT.index(GIVEN), given))
        for place, number in (*numbers, *enumerate(samples, len(SENT))):
            if isinstance(number, Tensor):
                own[place] = number
        found, work = self._sent_to_all(call.number, own)
        # Steps that are trained go through gloo whatever their size: whoever counts or times what it sends sees all.
        self.comm.nearby = None if records else self._nearby

        def details() -> dict[str, Detail]:
            said = [str(call.number), f"{sum(modes)} of {len(modes)} modules train", str(records)]
            known: list[Detail] = [{"": text} for text in said]
            known += [kinds, {"": _brief(call.graph)}]
            known += [{"": f"{sum(trained)} of {len(trained)} parameters"}, {"": settings}, {"": str(steps)}]
            known += [{"": f"{sum(graded)} of {len(graded)} parameters"}, {"": _few(written)}]
            known += [{"": ", ".join(f"{loss:g}" for loss in map(float, losses)) or "none"}]
            own = zip(alike_everywhere, bits.split([*map(len, parts)]), strict=True)
            known.append({name: str(int(self._number_of(each))) for name, each in own})
            return dict(zip(FACTS, known, strict=True))

        axes = () if alike is None else alike.axes
        self._sent = _Sent(call.number, found, work, details, axes)
        self._seed = found[SENT.index(SEED)]  # rank 0's
        if self.device.type == "cpu":
            self.settle()

    def _number_of(self, bits: Tensor) -> Tensor:
        """A hash of int64 numbers [n], which their order is part of: an int64 scalar; nothing waits for it."""
        if len(self._odd) < len(bits):
            with torch.inference_mode(False):
                odd = torch.arange(1, 4 * len(bits), 2, device=self.device)
            self._odd = odd * 0x9E3779B97F4A7
        return (bits * self._odd[: len(bits)]).sum()

    def _sent_to_all(self, number: int, own: Tensor) -> tuple[Tensor, Any]:
        """What will hold the numbers of all ranks, and what to wait for."""
        nearby = self._nearby
        if nearby is not None:
            ranks = range(self._num_ranks)
            with self.comm.trail.waiting(BEGINNING):
                return self._with_all(number, lambda: nearby.gather(ranks, own, self.comm.timeout_s)).view(-1), None
        found = torch.empty(self._num_ranks * len(own), dtype=torch.int64, device=self.device)
        return found, self._with_all(number, lambda: all_gather_single(found, own, async_op=True))

    def seed(self) -> int | Tensor:
        """The seed of the forward that has begun, which it takes from the generator: the same number on every rank, or
        an int64 scalar on the device, which nobody waits for.
        """
        seed = draws.peek() if self._seed is None else self._seed
        draws.take()
        if self._sent is not None:
            self._sent.work.wait()  # the stream does
        return int(seed) if self.device.type == "cpu" else seed

    def settle(self) -> None:
        """Compare what was sent last, unless that was done. Raises as `begin`."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        with self.comm.trail.waiting(BEGINNING):
            if self.device.type == "cpu" and sent.work is not None:
                self._with_all(sent.number, lambda: sent.work.wait(timedelta(seconds=self.comm.timeout_s)))
            elif sent.work is not None:
                sent.work.wait()  # the stream does; what never comes is ended by the process group's watchdog
            numbers = sent.found.view(-1, len(SENT) + len(sent.axes)).tolist()
        if any(row[: SENT.index(SEED)] != numbers[0][: SENT.index(SEED)] for row in numbers):
            self._compare_facts(sent, [dict(zip(SENT, row, strict=False)) for row in numbers])
        for place, axis in enumerate(sent.axes, len(SENT)):
            self._compare(axis, sent.number, [row[place] for row in numbers])

    def _compare_facts(self, sent: _Sent, rows: Sequence[Mapping[str, int]]) -> None:
        for fact, remedy in FACTS.items():
            different = [rank for rank, row in enumerate(rows) if row[fact] != rows[_like(rows, rank, fact)][fact]]
            if different:
                first = _like(rows, different[0], fact)
                same = [rank for rank in different if _like(rows, rank, fact) == first]
                details = gather_objects(sent.details()[fact])
                raise _disagreement(fact, remedy, first, same, details)

    def _compare(self, axis: str, number: int, found: Sequence[int]) -> None:
        """What ranks of an axis hold alike. found: of each rank."""
        first = [first_of(rank, axis, self.comm.axes, self.comm.sizes) for rank in range(len(found))]
        if self.alike is None or all(found[rank] == found[first[rank]] for rank in range(len(found))):
            return
        values = gather_objects(self.alike.values(axis, number))
        eps = {name: self.alike.eps(name) for name in values[dist.get_rank()]}
        odd: list[int] = []
        for rank, own in enumerate(values):
            names, is_rounding = differing(own, values[first[rank]], eps)
            if names and not is_rounding:
                raise _apart(rank, first[rank], names, own, values[first[rank]])
            odd += [rank] if names else []
        self.alike.forget(axis)
        if dist.get_rank() == 0:
            logger.warning(
                "autopar: replicas of parameters over %s differ by rounding (%s), as when norms of gradients are "
                "summed in different orders: they are compared no more",
                axis,
                _name(odd or [rank for rank in range(len(found)) if found[rank] != found[first[rank]]]),
            )

    def _with_all(self, number: int, act: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        try:
            return act()
        except RuntimeError as error:
            rank = dist.get_rank()
            is_late = time.monotonic() - begun >= self.comm.timeout_s or tells_of_time(error)
            missing = _name(_silent(number) or [each for each in range(dist.get_world_size()) if each != rank])
            raise AutoparError(
                f"rank {rank} waited {self.comm.timeout_s:g} s for {missing} to begin a step"
                if is_late
                else f"rank {rank} lost {missing} at the beginning of a step",
                values=None if is_late else str(error).splitlines()[0],
                remedy="See what they do, or the error that one of them ended with: every rank runs the same steps",
            ) from error


def waited_for(work: Any, comm: Communicator, what: str) -> None:
    """Wait for a collective of all ranks.

    Raises:
        AutoparError: a rank is gone, or did not come in time.
    """
    if comm.device.type != "cpu":
        work.wait()  # the stream does
        return
    begun = time.monotonic()
    try:
        work.wait(timedelta(seconds=comm.timeout_s))
    except RuntimeError as error:
        is_late = time.monotonic() - begun >= comm.timeout_s or tells_of_time(error)
        does = f"waited {comm.timeout_s:g} s for others" if is_late else "lost another one"
        raise AutoparError(
            f"rank {dist.get_rank()} {does}, with which it was to {what}",
            values=None if is_late else str(error).splitlines()[0],
            remedy="See what they do, or the error that one of them ended with",
        ) from error


def _silent(number: int) -> list[int]:
    """The ranks that do not say soon that they began this forward too; those that wait say so where they gave up."""
    silent, until = [], time.monotonic() + TELLS_WITHIN_S
    try:
        store = job_store()
        store.set(f"autopar/began/{number}/{dist.get_rank()}", "")
        for rank in range(dist.get_world_size()):
            left = max(until - time.monotonic(), 0.01)
            try:
                store.wait([f"autopar/began/{number}/{rank}"], timedelta(seconds=left))
            except RuntimeError:
                silent.append(rank)
    except RuntimeError:  # the store went with the rank that kept it
        return []
    return silent


def _like(rows: Sequence[Mapping[str, int]], rank: int, fact: str) -> int:
    """The first rank that this one has to have the fact of."""
    if fact not in OF_HELD:
        return 0
    return next(each for each, row in enumerate(rows) if row[HELD] == rows[rank][HELD])


def _disagreement(fact: str, remedy: str, first: int, ranks: list[int], details: Sequence[Detail]) -> AutoparError:
    here, there = details[first], details[ranks[0]]
    names = [name for name in dict.fromkeys((*here, *there)) if here.get(name) != there.get(name)]
    where = ", ".join(name for name in names if name) or None
    values = None
    if names and fact != VALUES:
        name = names[0]
        values = f"rank {first} {here.get(name, 'has none')}, rank {ranks[0]} {there.get(name, 'has none')}"
    return AutoparError(
        f"{fact} differ on {_name(ranks)} from rank {first}'s", where=where, values=values, remedy=remedy
    )


def _apart(rank: int, first: int, names: Sequence[str], here: Values, there: Values) -> AutoparError:
    name = names[0]
    pair = next(pair for pair in zip(there[name], here[name], strict=True) if pair[0] != pair[1])
    more = f" and of {len(names) - 1} more parameters" if len(names) > 1 else ""
    return AutoparError(
        f"the replicas of {name}{more} differ on rank {rank} from rank {first}'s",
        values=f"an element is {pair[0]:g} on rank {first}, {pair[1]:g} on rank {rank}",
        remedy="Between steps every rank does the same to weights and gradients: edits, scaling, clipping, steps. "
        "Go on from the last checkpoint",
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else "into none"


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _brief(text: str) -> str:
    """What tells one text from another in a message."""
    return f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _hash(content: str | bytes) -> int:
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return _plain(leaf)
    wants = " requires_grad" if leaf.requires_grad else ""
    if isinstance(leaf, DTensor):
        return f"DTensor {tuple(leaf.shape)} {leaf.dtype} {leaf.placements}{wants}"
    return f"{tuple(leaf.shape)} {leaf.dtype}{wants}"


def _is_compared(leaf: Any) -> bool:
    """Whether every rank has the input whole, with values."""
    is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.layout is torch.strided
    return is_plain and leaf.numel() > 0 and not leaf.is_meta


def _bits(x: Tensor) -> Tensor:
    """Some elements as int64 numbers [n]."""
    flat = x.detach().reshape(-1)
    taken = flat[:: max(1, flat.numel() // SAMPLES)][: 2 * SAMPLES]
    if taken.is_complex():
        taken = torch.view_as_real(taken).reshape(-1)
    return taken.double().view(torch.int64) if taken.is_floating_point() else taken.long()


def call_of(number: int, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A forward of the model, as ranks compare it: by name, whatever order a script hands its inputs in (libraries
    walk through sets of names, which each process has in an order of its own).
    """
    named = tree_leaves_with_path({**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs})
    modes, trained, graded = list[bool](), list[bool](), list[bool]()
    for module in model.modules():
        modes.append(module.training)
        held = [p for p in module._parameters.values() if p is not None]
        trained += [p.requires_grad for p in held]
        graded += [p.grad is not None for p in held]
    return Call(number, dict(sorted(named, key=lambda each: each[0])), modes, trained=trained, graded=graded)
