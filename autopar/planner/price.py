"""What a lowered program costs."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost.collectives import Collective, shared_outputs
from autopar.cost.estimate import Cost, difference, estimate, stored_bytes, unused_everywhere
from autopar.cost.hosts import host_seconds_of_calls, waited_for_hosts
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.program import Program
from autopar.ir.schedule import Kind
from autopar.passes.split_stages import summarize
from autopar.strategies.pipelining.costs import update_seconds
from autopar.strategies.pipelining.simulate import Timeline
from autopar.strategies.pipelining.summary import PipelineSummary


def price(program: Program) -> tuple[Cost, list[Collective], PipelineSummary | None]:
    """What a lowered program costs, its collectives, and its stages where it has a pipeline: then the step is the one
    that was simulated, with what ranks tell each other of outputs after it, and its peak the fullest rank's.
    """
    cost, rows = estimate(program, program.result.peak_bytes if program.result else 0.0)
    if program.pipeline is None:
        memory = replace(cost.memory, peak=int(step_peak_bytes(program)))
        return replace(cost, memory=memory), rows, None
    summary = summarize(program)
    timeline = summary.timeline
    busiest = max(timeline.busy_s)
    waiting_s = max(0.0, difference(timeline.makespan_s - busiest, busiest))
    # Sends, gathers and reductions run beside the computations.
    hidden_s = difference(cost.compute_s + cost.communication_s - busiest, busiest)
    memory = replace(
        cost.memory, peak=int(max(timeline.peak_bytes)) + stored_bytes(program, unused_everywhere(program))
    )
    optimizer_s = update_seconds(summary.schedule.rank_of, timeline.costs) if program.training else 0.0
    shared = list(shared_outputs(program))
    communication_s = cost.communication_s + sum(row.seconds for row in shared)
    cost = replace(
        cost, memory=memory, communication_s=communication_s, waiting_s=waiting_s, hidden_s=hidden_s,
        optimizer_s=optimizer_s, host_s=_waited_for_hosts(program, timeline),
    )  # fmt: skip
    return cost, [*rows, *shared], summary


def _waited_for_hosts(program: Program, timeline: Timeline) -> float:
    """Seconds by which hosts make the last stage of a forward late; 0 in training."""
    host = host_seconds_of_calls(program)
    if not any(host):
        return 0.0
    assert program.pipeline is not None
    ends = {event.action.stage: event.end_s for event in timeline.events if event.action.kind is Kind.FORWARD}
    stages = program.pipeline.stages
    return waited_for_hosts(
        [sum(host[number] for number in stage.calls) for stage in stages],
        [ends[number] for number in range(len(stages))],
        timeline.schedule.rank_of,
    )
