"""`autopar.watch`: what is asked at every step of an optimizer, and what comes of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_args
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import all_gather_single, local_tensor, own_store
from autopar.runtime.added import Added
from autopar.runtime.agreement import waited_for
from autopar.runtime.clipping import own_power
from autopar.runtime.engine import Engine
from autopar.runtime.meeting import gathered
from autopar.runtime.pieces import coordinates
from autopar.runtime.step import loss_in
from autopar.runtime.trail import ENDING
from autopar.runtime.watch import replicas
from autopar.runtime.watch.late import Late, Watchdog, ranks_text
from autopar.runtime.watch.metrics import Clock, Metrics, Row, held_bytes, most_waited, tokens_in
from autopar.runtime.watch.slow import Waited, slow_one
from autopar.runtime.watch.verdicts import Judge, Numbers, Policy, Verdict

logger = logging.getLogger("autopar")

_numbers = count()


class _Sent(NamedTuple):
    """The numbers of a step on their way. found: (ranks · 4,) float64, of each rank a loss, a norm, bytes held, seconds
    waited for others; known when `work` is done. is_norm: whether they know the norm, or each its part of its square.
    noted: on the rank that writes metrics, what it knows by itself.
    """

    step: int
    found: Tensor
    work: Any
    has_loss: bool
    is_norm: bool
    noted: Row


class Watch:
    """What `autopar.watch` gives. step: how many steps were judged, from the one that it was given on. skipped: those
    of them that were not taken. last: what was known of the last one. late: when ranks were waited for, or hung.
    """

    def __init__(
        self,
        engine: Engine,
        judge: Judge,
        same: Policy | None,
        every: int,
        step: int,
        late_s: float | None = None,
        metrics: Path | None = None,
    ) -> None:
        self.engine, self.step, self.every = engine, step, every
        self.skipped: list[int] = []
        self.last = Numbers(None, math.nan)
        self.number = next(_numbers)
        self._judge, self._same = judge, same
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._is_new = False
        self._verdict = Verdict()
        self._sent: _Sent | None = None
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._equal_at: int | None = None
        self._dog = self._watchdog(late_s)
        self._exchanged_at = time.monotonic()
        self._clock = self._now()
        self._tokens = 0
        self._metrics: Metrics | None = None
        if metrics is not None and dist.get_rank() == 0:
            self._metrics = Metrics(metrics, {"run": metrics.name, "model": type(engine.model).__qualname__})
            finalize(self.engine, self._metrics.close)

    @property
    def late(self) -> Sequence[Late]:
        """When a rank was waited for, oldest first."""
        return () if self._dog is None else tuple(self._dog.found)

    def _watchdog(self, late_s: float | None) -> Watchdog | None:
        comm, ranks = self.engine.comm, dist.get_world_size()
        if late_s is None or ranks == 1:
            return None
        store, rank = own_store(), dist.get_rank()
        name = str(store.add(f"autopar/watches of {rank}", 1))  # in this job: every rank makes the same ones
        dog = Watchdog(comm.trail, store, rank, ranks, late_s, comm.timeout_s, name)
        finalize(self.engine, dog.stop)
        dog.step = self.step
        dog.start()
        return dog

    def close(self) -> None:
        """Watch no longer."""
        if self._dog is not None:
            self._dog.stop()
        if self.engine.watch is self:
            self.engine.watch = None
        if self._sent is not None and dist.is_initialized():  # all ranks have sent theirs
            sent, self._sent = self._sent, None
            self._judged(sent)
        if self._metrics is not None:
            self._metrics.close()

    def loss(self, loss: Tensor) -> None:
        """Say the loss of this step, where the model does not return it: a scalar, the same on every rank."""
        self._losses = [loss.detach()]

    # What the engine and the hook of optimizers call.

    def forward_ended(self, output: Any, inputs: Mapping[str, Tensor], added: Added | None) -> None:
        """After a forward that records gradients."""
        self._is_new = True
        self._tokens += tokens_in(inputs, added)
        loss = loss_in(output)
        if loss is not None:
            self._losses.append(loss.detach())

    def clipped(self, norm: Tensor) -> None:
        """The norm that gradients had before they were clipped."""
        self._norm = norm

    def before_step(self, optimizer: Optimizer) -> None:
        """Called by every rank before every step of an optimizer of this model. Collective.

        All its steps behind one backward share the verdict: those of the first.

        Raises:
            AutoparError: by the policies, before anything has changed.
        """
        self._optimizers.add(optimizer)
        if self._is_new:
            self._is_new = False
            self._verdict = self._of_step(self._noted(optimizer))
            self._losses, self._norm = [], None
            self.step += 1
            if self._dog is not None:
                self._dog.stepped(self.step)
                if self.step % self.every == 0 and self.engine.comm.device.type == "cpu":
                    self._compare_waits()
            if self._same is not None and self.step % self.every == 0:
                self._compare()
        if self._verdict.policy == "skip":
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _now(self) -> Clock:
        trail = self.engine.comm.trail
        done = trail.did
        return Clock(time.monotonic(), done.get("plans", 0.0), done.get("saves", 0.0), trail.waited_s)

    def _noted(self, optimizer: Optimizer) -> Row:
        """What this rank knows of the step by itself."""
        before, now, tokens = self._clock, self._now(), self._tokens
        self._clock, self._tokens = now, 0
        took_s = now.at_s - before.at_s
        rate = optimizer.param_groups[0].get("lr")
        return Row(
            step=self.step, time_s=time.time(), loss=None, norm=None, step_s=took_s,
            plans_s=now.plans_s - before.plans_s, saves_s=now.saves_s - before.saves_s,
            waited_s=now.waited_s - before.waited_s, least_by=dist.get_rank(), tokens=tokens,
            tokens_per_s=tokens / max(took_s, 1e-9), memory_bytes=held_bytes(self.engine.comm.device),
            rate=float(rate) if isinstance(rate, (int, float)) else None, skipped=False,
            num_skipped=len(self.skipped), num_late=len(self.late),
        )  # fmt: skip

    def _of_step(self, noted: Row) -> Verdict:
        """Send this rank's numbers, and judge by those of all."""
        if self._judge.nonfinite is None and self._judge.spikes is None:
            if self._metrics is not None:
                self._metrics.write(noted)
            return Verdict()
        waits = self.engine.comm.device.type == "cpu" or {self._judge.nonfinite, self._judge.spikes} != {"warn"}
        sent = self._send(noted)
        if waits:
            return self._judged(sent)
        # Nothing is to be done before the step: by the next one the numbers are there.
        before, self._sent = self._sent, sent
        return Verdict() if before is None else self._judged(before)

    def _send(self, noted: Row) -> _Sent:
        engine, is_norm = self.engine, self._norm is not None
        device = engine.comm.device
        loss = torch.full((), math.nan, dtype=torch.float64, device=device)
        if self._losses:
            loss = torch.stack([_plain(x).to(device, torch.float64) for x in self._losses]).mean()
        own = (
            _plain(self._norm)
            if self._norm is not None
            else own_power(engine.inner, self._gradients(), engine.stages())
        )
        host = (torch.full((), x, dtype=torch.float64, device=device) for x in (noted.memory_bytes, noted.waited_s))
        mine = torch.stack([loss, own.to(device, torch.float64), *host])
        found = torch.empty(dist.get_world_size() * len(mine), dtype=torch.float64, device=device)
        work = all_gather_single(found, mine, async_op=True)
        return _Sent(self.step, found, work, bool(self._losses), is_norm, noted)

    def _judged(self, sent: _Sent) -> Verdict:
        with self.engine.comm.trail.waiting(ENDING):
            waited_for(sent.work, self.engine.comm, "end a step")
            losses, powers, held, waited = sent.found.view(-1, 4).T.tolist()
        loss = losses[0] if all(map(math.isfinite, losses)) else next(x for x in losses if not math.isfinite(x))
        # A sum of infinities stays one; of a norm that ranks know, the largest, or what is none.
        norm = _largest(powers) if sent.is_norm else math.sqrt(sum(powers))
        self.last = Numbers(loss if sent.has_loss else None, norm)
        verdict = self._judge.judge(self.last)
        if self._metrics is not None:
            self._metrics.write(self._row(sent.noted, verdict, held, waited))
        if verdict.policy is not None:
            self._act(sent.step, verdict)
        return verdict

    def _row(self, noted: Row, verdict: Verdict, held: Sequence[float], waited: Sequence[float]) -> Row:
        """Of a step, when what all ranks sent is there."""
        longest_s, least_by = most_waited(waited)
        is_skipped = verdict.policy == "skip"
        loss, norm = (x if x is not None and math.isfinite(x) else None for x in self.last)
        return replace(
            noted, loss=loss, norm=norm, waited_s=longest_s, least_by=least_by, memory_bytes=int(max(held)),
            skipped=is_skipped, num_skipped=noted.num_skipped + is_skipped, said=verdict.what,
        )  # fmt: skip

    def _act(self, step: int, verdict: Verdict) -> None:
        where = None if math.isfinite(self.last.norm) else self._where()
        if verdict.policy == "stop":
            raise AutoparError(
                f"{verdict.what} at step {step}",
                where=where,
                values=verdict.values or None,
                remedy="Nothing has changed by this step. Go on from the last checkpoint with other data or a lower "
                'learning rate, or let such steps be left out: autopar.watch(…, nonfinite="skip", spikes="skip")',
            )
        if verdict.policy == "skip":
            self.skipped.append(step)
        if self.engine.comm.rank == 0:
            said = ", ".join(part for part in (verdict.what, where, verdict.values) if part)
            does = "is skipped" if verdict.policy == "skip" else "is taken"
            logger.warning("autopar: step %d %s: %s", step, does, said)

    def _where(self) -> str | None:
        """The first parameter that has numbers that are none, or whose gradient has, and where. Collective."""
        named = list(self.engine.model.named_parameters())
        found = gathered("end a step", (_bad((n, p) for n, p in named), _bad((n, p.grad) for n, p in named)))
        for of, place in (("", 0), ("the gradient of ", 1)):
            ranks = [rank for rank, each in enumerate(found) if each[place]]
            if ranks:
                names = list(dict.fromkeys(name for each in found for name in each[place]))
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return f"{of}{names[0]}{more}, on {ranks_text(ranks)}"
        return None

    def _gradients(self) -> list[tuple[Tensor, DTensor]]:
        given = ((parameter, parameter.grad) for parameter in self.engine.model.parameters())
        return [(parameter, grad) for parameter, grad in given if isinstance(grad, DTensor)]

    def _compare_waits(self) -> None:
        """Which rank the others wait for in every step, though none for long. Collective."""
        engine, trail, now = self.engine, self.engine.comm.trail, time.monotonic()
        mine = Waited(now - self._exchanged_at, sum(trail.waited.values()), trail.most())
        trail.waited, self._exchanged_at = {}, now
        axes, sizes = engine.comm.axes, engine.comm.sizes
        if (pipeline := engine.pipeline_axis()) is None:
            peers = [list(range(dist.get_world_size()))]
        else:  # stages wait for each other by plan
            place = axes.index(pipeline)
            ranks = range(dist.get_world_size())
            peers = [[r for r in ranks if coordinates(r, sizes)[place] == at] for at in range(sizes[place])]
        text = slow_one(gathered("compare waits", mine), peers, self.every)
        if text is not None and engine.comm.rank == 0:
            logger.warning("autopar: %s", text)

    def _compare(self) -> None:
        """That replicas are alike. Collective.

        Raises:
            AutoparError: by the policy: some are not.
        """
        engine = self.engine
        if engine.interface is None or dist.get_world_size() == 1:
            return
        grid = replicas.Grid(engine.comm.axes, engine.comm.sizes, engine.pipeline_axis())
        own = replicas.held(engine, self._optimizers)
        numbers = replicas.digests(own)
        kinds = gathered("compare replicas", replicas.digests_of_kinds(own, numbers))
        bad = replicas.differing(grid, kinds)
        if not bad:
            self._equal_at = self.step
            return
        mine = {(each.kind, each.name): numbers[each.name] for each in own if each.kind in bad}
        error = self._drifted(replicas.odd_ones(grid, gathered("compare replicas", mine)))
        if self._same == "stop":
            raise error
        if engine.comm.rank == 0:
            logger.warning("autopar: %s", error)

    def _drifted(self, odd: Sequence[replicas.Odd]) -> AutoparError:
        first = odd[0]
        names = list(dict.fromkeys(each.name for each in odd))
        more = f" (and of {len(names) - 1} more tensors)" if len(names) > 1 else ""
        if first.same:
            what = (
                f"{ranks_text(first.odd)} {_hold(first.odd)} other bits of {first.name} than {ranks_text(first.same)}"
            )
        else:
            what = f"{ranks_text(first.odd)} hold different bits of {first.name}, and no majority says which are right"
        since = "" if self._equal_at is None else f"; they were equal at step {self._equal_at}"
        ranks = sorted({rank for each in odd for rank in each.odd})
        return AutoparError(
            f"{what}{more}",
            values=f"found at step {self.step}{since}. Ranks concerned: {', '.join(map(str, ranks))}",
            remedy="Go on from the last checkpoint (autopar.resume_or_start); where the same rank is named again, have "
            "its machine checked: memory, links, or a kernel that computes otherwise there",
        )


def watch(
    model: Any,
    *,
    nonfinite: Policy | None = "stop",
    spikes: Policy | None = "warn",
    replicas: Policy | None = "stop",
    every: int = 100,
    threshold: float = 10.0,
    late_s: float | None = 60.0,
    step: int = 0,
    metrics: str | Path | None = None,
) -> Watch:
    """Watch a run: from now on, every step of an optimizer of this model is looked at before it is taken.

        watch = autopar.watch(model, nonfinite="skip", spikes="skip")

    The loop stays as it is, others' loops (transformers' Trainer) too. Call it on every rank, once, after `compile`.

    "stop" raises an AutoparError on all ranks before anything has changed, "skip" leaves the step out (parameters and
    states of optimizers stay bit by bit as they were; after 10 in a row it stops), "warn" logs on rank 0, None does not
    look.

    Args:
        model: compiled.
        nonfinite: what to do where the loss or the gradients' norm is NaN or infinite.
        spikes: and where it is more than `threshold` deviations above the median of the last 128 steps.
        replicas: "stop", "warn" or None: what to do where ranks hold different bits of what the plan has them hold
            alike (parameters, states of optimizers, buffers).
        every: after how many steps replicas are compared, and for whom ranks waited.
        late_s: seconds that a rank may wait for another, beyond five usual steps, until it is told which rank is late
            or hangs, at which line of the program or the script. None does not look. Half of the process group's
            timeout at most.
        step: how many steps are done, for messages: `run.step` of `resume_or_start`.
        metrics: a folder in which rank 0 writes what each step had: `metrics.jsonl`, `metrics.prom` (OpenMetrics), and
            TensorBoard's events where it is installed.

    The loss is what the model returns (`output.loss`, or the first scalar; of several forwards before a step their
    mean), or what `watch.loss(loss)` is given. The norm is that before `model.clip_grad_norm_`, where that is called.

    Raises:
        AutoparError: a model that is not compiled, an argument that is none of those above.
    """
    engine = getattr(model, "autopar", None)
    if not isinstance(engine, Engine):
        raise AutoparError(
            f"this {type(model).__name__} is not compiled, so that there is nothing to watch",
            remedy="Call autopar.watch(autopar.compile(model, mesh))",
        )
    known = get_args(Policy)
    for name, policy, some in (
        ("nonfinite", nonfinite, known), ("spikes", spikes, known), ("replicas", replicas, ("stop", "warn")),
    ):  # fmt: skip
        if policy is not None and policy not in some:
            raise AutoparError(f"{name}={policy!r} is no policy", remedy=f"Use one of {', '.join(some)}, or None")
    if every < 1 or threshold <= 0 or (late_s is not None and late_s <= 0):
        raise AutoparError(
            "replicas are compared every 1 or more steps, and the threshold and late_s are positive",
            values=f"every={every}, threshold={threshold}, late_s={late_s}",
        )
    if engine.watch is not None:
        engine.watch.close()
    made = Watch(
        engine,
        Judge(nonfinite, spikes, threshold),
        replicas,
        every,
        step,
        late_s,
        None if metrics is None else Path(metrics),
    )
    engine.watch = made
    return made


def _bad(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Those with numbers that are none in this rank's piece."""
    return [name for name, x in named if isinstance(x, DTensor) and not bool(local_tensor(x).isfinite().all())]


def _plain(x: Any) -> Tensor:
    """A scalar without what is around it."""
    if isinstance(x, DTensor):
        whole: Any = x.full_tensor()
        return whole
    return x.as_subclass(Tensor)


def _largest(numbers: Sequence[float]) -> float:
    return next((x for x in numbers if math.isnan(x)), max(numbers))


def _hold(ranks: Sequence[int]) -> str:
    return "holds" if len(ranks) == 1 else "hold"
